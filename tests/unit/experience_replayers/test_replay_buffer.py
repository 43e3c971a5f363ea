"""ReplayBuffer against a list of stored values, and its errors."""
import io
from collections import Counter

import gin
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alfx import context, nest
from alfx.data_structures import Experience, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils  # noqa: F401 - makes distributions nests

SPEC = {
    'value': TensorSpec((), torch.int64),
    'small': TensorSpec((3, ), torch.float32),
    'flag': TensorSpec((), torch.bool),
    'byte': BoundedTensorSpec((2, 2), torch.uint8, 0, 255),
    'large': TensorSpec((300, ), torch.float32),
    'half': TensorSpec((1, ), torch.float16),
    'nothing': (),
}


def cell(value, shape=()):
    """Return a batch that each of its leaves identifies; ``value`` is int64 [*shape]."""
    value = torch.as_tensor(value)
    return {
        'value': value,
        'small': value.float().unsqueeze(-1) + torch.tensor([0.0, 0.25, 0.5]),
        'flag': value % 3 == 0,
        'byte': (value % 251).to(torch.uint8)[..., None, None].expand(*value.shape, 2, 2),
        'large': value.float().unsqueeze(-1).expand(*value.shape, 300),
        'half': (value % 1000).half().unsqueeze(-1),
        'nothing': (),
    }


def assert_cells(batch, values):
    """Check that every leaf of ``batch`` equals the same leaf of ``cell(values)``."""
    expected = cell(torch.as_tensor(values))
    nest.assert_same_structure(batch, expected)
    for (path, a), e in zip(nest.flatten_with_path(batch), nest.flatten(expected)):
        assert a.dtype == e.dtype and a.shape == e.shape, path
        assert torch.equal(a, e), path


class Reference:
    """A replay buffer as one list of (position, value) for each environment."""

    def __init__(self, num_envs, max_length):
        self.max_length = max_length
        self.contents = [[] for _ in range(num_envs)]
        self.positions = [0] * num_envs

    def add(self, env, value):
        self.contents[env] = (self.contents[env] + [(self.positions[env], value)])[-self.max_length:]
        self.positions[env] += 1

    def sequences(self, length, ignored):
        """Return ``{(env, position): values}`` of all sequences that may be sampled."""
        found = {}
        for env, items in enumerate(self.contents):
            items = items[ignored:]
            for i in range(len(items) - length + 1):
                found[env, items[i][0]] = [value for _, value in items[i:i + length]]
        return found


NUM_ENVS = 3
operations = st.lists(
    st.one_of(
        st.tuples(st.just('all'), st.booleans()),
        st.tuples(st.just('some'), st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, max_size=NUM_ENVS, unique=True)),
        st.tuples(st.just('sequence'), st.integers(1, 12)),
        st.tuples(st.just('clear'), st.one_of(st.none(), st.lists(st.integers(0, NUM_ENVS - 1), max_size=2,
                                                                  unique=True))),
        st.tuples(st.just('drop_all_but'), st.integers(0, 4)),
        st.tuples(st.just('reload'), st.none()),
    ),
    max_size=12)


def play(buffer, reference, history, make_buffer):
    """Apply the same operations to both; every stored value is different."""
    counter = 0

    def values(*shape):
        nonlocal counter
        count = torch.Size(shape).numel()
        counter += count
        return torch.arange(counter - count, counter).reshape(shape)

    for operation, argument in history:
        if operation in ('all', 'some'):
            env_ids = list(range(NUM_ENVS)) if operation == 'all' else argument
            new = values(len(env_ids))
            explicit = operation == 'some' or argument
            buffer.add_batch(cell(new), torch.tensor(env_ids) if explicit else None)
            for env, value in zip(env_ids, new.tolist()):
                reference.add(env, value)
        elif operation == 'sequence':
            new = values(argument, NUM_ENVS)
            buffer.add_sequence(cell(new))
            for row in new.tolist():
                for env, value in enumerate(row):
                    reference.add(env, value)
        elif operation == 'clear':
            buffer.clear(None if argument is None else torch.tensor(argument, dtype=torch.int64))
            for env in range(NUM_ENVS) if argument is None else argument:
                reference.contents[env] = []
            if argument is None:
                reference.positions = [max(reference.positions)] * NUM_ENVS
        elif operation == 'drop_all_but':
            try:
                remaining = buffer.drop_all_but(argument)
            except ValueError:  # after environments were stored separately, until all are cleared
                continue
            reference.contents = [items[:-1][max(len(items) - 1 - argument, 0):] for items in reference.contents]
            reference.positions = [position - 1 for position in reference.positions]
            assert {len(items) for items in reference.contents} == {remaining}
        else:
            state = io.BytesIO()
            torch.save(buffer.state_dict(), state)
            state.seek(0)
            buffer = make_buffer()
            buffer.load_state_dict(torch.load(state, weights_only=True))
    return buffer


@given(st.lists(st.integers(1, 9), max_size=5), st.integers(1, 7), st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_one_environment_is_sampled_as_any_is(stored, max_length, ignored, length, with_replacement):
    ignored = min(ignored, max_length - 1)
    buffer, reference = ReplayBuffer(SPEC, 1, max_length, ignored, with_replacement=with_replacement), Reference(
        1, max_length)
    for number in stored:
        first = reference.positions[0]
        buffer.add_sequence(cell(7 * torch.arange(first, first + number)[:, None]))
        for position in range(first, first + number):
            reference.add(0, 7 * position)
    sequences = reference.sequences(length, ignored)
    if not sequences:
        with pytest.raises(ValueError, match='at least'):
            buffer.get_batch(4, length)
        return
    batch, info = buffer.get_batch(4, length)
    assert_cells(batch, [sequences[0, position] for position in info.positions.tolist()])
    reader = buffer.reader(100, length)
    ((info, slot), ) = reader.draw(1)
    assert info.env_ids.tolist() == [0] * 100 and {*info.positions.tolist()} == {position for _, position in sequences}
    assert_cells(slot.experience, [sequences[0, position] for position in info.positions.tolist()])


@settings(max_examples=120)
@example([('sequence', 3), ('clear', None), ('sequence', 2), ('reload', None)], 7, 0, 2, 4, False)
@example([('sequence', 9), ('drop_all_but', 3), ('some', [1]), ('reload', None), ('all', True)], 4, 1, 1, 4, False)
@given(operations, st.integers(1, 7), st.integers(0, 2), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_any_history_reads_back_as_a_list_of_the_last_steps(history, max_length, ignored, length, batch_size,
                                                            with_replacement):
    ignored = min(ignored, max_length - 1)

    def make_buffer():
        return ReplayBuffer(
            SPEC, NUM_ENVS, max_length, ignored, with_replacement=with_replacement, enable_checkpoint=True)

    reference = Reference(NUM_ENVS, max_length)
    buffer = play(make_buffer(), reference, history, make_buffer)

    sizes = [len(items) for items in reference.contents]
    assert buffer.current_size.tolist() == sizes
    assert buffer.total_size == sum(sizes)
    assert buffer.current_pos.tolist() == reference.positions
    sequences = reference.sequences(length, ignored)
    if not sequences:
        with pytest.raises(ValueError, match='at least'):
            buffer.get_batch(batch_size, length)
    else:
        batch, info = buffer.get_batch(batch_size, length)
        keys = list(zip(info.env_ids.tolist(), info.positions.tolist()))
        assert len(keys) == batch_size
        assert_cells(batch, [sequences[key] for key in keys])
        if not with_replacement:
            assert len(set(keys)) == min(batch_size, len(sequences)) or len(sequences) < batch_size
    for ignore in (False, True):
        remaining = sizes[0] - (ignored if ignore else 0)
        if len(set(sizes)) > 1 or remaining <= 0:
            with pytest.raises(ValueError, match='gather_all'):
                buffer.gather_all(ignore)
        else:
            batch, info = buffer.gather_all(ignore)
            assert_cells(batch, [[value for _, value in items[-remaining:]] for items in reference.contents])
            assert info.env_ids.tolist() == list(range(NUM_ENVS))
            assert info.positions.tolist() == [items[-remaining][0] for items in reference.contents]
    stored = [(env, *item) for env, items in enumerate(reference.contents) for item in items]
    if stored:
        env_ids, positions, values = (torch.tensor(column) for column in zip(*stored))
        assert_cells(buffer.get_field('', env_ids, positions), values)
        first = [reference.contents[env][0][0] for env in env_ids.tolist()]
        assert buffer.earliest_positions(env_ids).tolist() == first


@pytest.mark.parametrize('lockstep', [True, False])
def test_every_sequence_is_sampled_equally_often(lockstep):
    buffer = ReplayBuffer(SPEC, 2, 6, num_earliest_frames_ignored=1)
    buffer.add_sequence(cell(torch.arange(22).reshape(11, 2)))
    if not lockstep:
        buffer.clear(torch.tensor([1]))
        for value in range(4):
            buffer.add_batch(cell(torch.tensor([100 + value])), torch.tensor([1]))
    # Starts in environment 0: 6 - 1 - 2 + 1 = 4; in environment 1 the same, or with 4 steps: 4 - 1 - 2 + 1 = 2.
    count = 8 if lockstep else 6
    counts = Counter()
    draws = 3000
    for _ in range(draws):
        batch, _ = buffer.get_batch(2, 2)
        first, second = batch['value'][:, 0].tolist()
        assert first != second
        counts.update((first, second))
    assert len(counts) == count
    expected = 2 * draws / count
    # Five standard deviations of a binomial count.
    assert all(abs(n - expected) < 5 * (expected * (1 - 1 / count))**0.5 for n in counts.values()), counts


@pytest.mark.parametrize('n,k', [(5, 5), (20, 5), (21, 5), (40, 9)])
def test_distinct_draws_are_distinct_and_in_random_order(n, k):
    from alfx.experience_replayers.sampling import draw_distinct
    rounds = 4000
    counts = torch.zeros(k, n)
    for _ in range(rounds):
        samples = draw_distinct(n, k)
        assert samples.shape == (k, ) and len(set(samples.tolist())) == k
        counts[torch.arange(k), samples] += 1
    # Each number is equally likely at each position.
    expected = rounds / n
    assert ((counts - expected).abs() < 5.5 * (expected * (1 - 1 / n))**0.5).all()


def test_the_same_seed_samples_the_same():
    buffer = ReplayBuffer(SPEC, 4, 50)
    buffer.add_sequence(cell(torch.arange(200).reshape(50, 4)))
    samples = []
    for _ in range(2):
        torch.manual_seed(7)
        samples.append(buffer.get_batch(16, 3)[0]['value'])
    assert torch.equal(*samples)


def test_environments_that_are_even_again_are_sampled_alike_after_loading():
    def make():
        return ReplayBuffer(SPEC, 2, 20, enable_checkpoint=True)

    buffer = make()
    buffer.add_sequence(cell(torch.arange(20).reshape(10, 2)))
    for env in (0, 1):
        buffer.add_batch(cell(torch.tensor([40 + env])), torch.tensor([env]))
    loaded = make()
    loaded.load_state_dict(buffer.state_dict())
    samples = []
    for each in (buffer, loaded):
        torch.manual_seed(7)
        samples.append(each.get_batch(16, 2)[0]['value'])
    assert torch.equal(*samples)


def test_batches_and_buffer_do_not_alias_each_other():
    buffer = ReplayBuffer(SPEC, 2, 3)
    source = torch.arange(6).reshape(3, 2)
    stored = nest.map_structure(torch.clone, cell(source))
    buffer.add_sequence(stored)
    nest.map_structure(lambda x: x.zero_(), stored)
    batch, _ = buffer.gather_all()
    sample, info = buffer.get_batch(4, 2)
    before = nest.map_structure(torch.clone, sample)
    buffer.add_sequence(cell(source + 50))
    assert_cells(batch, source.T)
    assert all(torch.equal(a, b) for a, b in zip(nest.flatten(before), nest.flatten(sample)))
    batch, _ = buffer.gather_all()
    nest.map_structure(lambda x: x.zero_(), batch)
    assert_cells(buffer.gather_all()[0], source.T + 50)


def test_gradients_are_not_stored():
    buffer = ReplayBuffer(TensorSpec((2, )), 1, 4)
    x = torch.ones(1, 2, requires_grad=True)
    buffer.add_batch(x * 2)
    buffer.add_sequence((x * 3).unsqueeze(0))
    batch, _ = buffer.gather_all()
    assert not batch.requires_grad and batch.tolist() == [[[2, 2], [3, 3]]]


def test_distributions_and_recurrent_states_are_stored_by_their_tensors():
    normal = torch.distributions.Normal

    def experience(loc):
        return Experience(
            time_step=TimeStep(reward=loc.sum(-1)),
            action=normal(loc, loc + 1, validate_args=False),
            state=[(loc, loc + 2)])

    spec = nest.map_structure(lambda x: TensorSpec(x.shape[1:], x.dtype), experience(torch.zeros(3, 2)))
    buffer = ReplayBuffer(spec, 3, 4)
    steps = [torch.rand(3, 2) for _ in range(6)]
    for step in steps:
        buffer.add_batch(experience(step))
    batch, _ = buffer.gather_all()
    expected = torch.stack(steps[2:], dim=1)
    assert isinstance(batch.action, normal)
    assert torch.equal(batch.action.loc, expected) and torch.equal(batch.action.scale, expected + 1)
    assert torch.equal(batch.state[0][1], expected + 2)
    assert torch.equal(buffer.get_field('time_step.reward', torch.tensor(1), torch.tensor(5)), steps[5].sum(-1)[1])


def test_a_batch_that_does_not_match_the_spec_is_rejected_with_its_path():
    buffer = ReplayBuffer({'a': TensorSpec((2, )), 'b': TensorSpec((), torch.int64)}, 2, 4)
    good = {'a': torch.zeros(2, 2), 'b': torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(SpecError, match=r'add_batch.*a: expected float32 \(2,\), found float32 \(3,\)'):
        buffer.add_batch({**good, 'a': torch.zeros(2, 3)})
    with pytest.raises(SpecError, match=r'add_batch.*b: expected int64 \(\), found float32 \(\)'):
        buffer.add_batch({**good, 'b': torch.zeros(2)})
    with pytest.raises(SpecError, match='structures'):
        buffer.add_batch({'a': good['a']})
    with pytest.raises(SpecError, match=r'a: expected the outer dimensions \(2,\), found \(1,\)'):
        buffer.add_batch({**good, 'a': torch.zeros(1, 2)})
    with pytest.raises(SpecError, match=r'outer dimensions \(5, 2\), found \(5, 3\)'):
        buffer.add_sequence({'a': torch.zeros(5, 2, 2), 'b': torch.zeros(5, 3, dtype=torch.int64)})
    with pytest.raises(SpecError, match='outer dimensions'):
        buffer.add_batch(good, torch.tensor([0]))
    assert buffer.total_size == 0


@pytest.mark.parametrize('env_ids', [[0, 0], [0, 2], [-1, 0]])
def test_environment_ids_must_be_distinct_environments(env_ids):
    buffer = ReplayBuffer(TensorSpec(()), 2, 4)
    with pytest.raises(ValueError, match='distinct environment ids'):
        buffer.add_batch(torch.zeros(2), torch.tensor(env_ids))
    with pytest.raises(ValueError, match='distinct environment ids'):
        buffer.clear(torch.tensor(env_ids))


def test_environments_are_rewound_together_or_not_at_all():
    buffer = ReplayBuffer(TensorSpec(()), 2, 4)
    with pytest.raises(ValueError, match=r'drop_all_but: .*found \[0, 0\]'):
        buffer.drop_all_but(1)
    buffer.add_batch(torch.zeros(2))
    buffer.add_batch(torch.zeros(1), torch.tensor([1]))
    with pytest.raises(ValueError, match=r'drop_all_but: .*found \[1, 2\]'):
        buffer.drop_all_but(1)


def test_a_position_that_was_overwritten_is_rejected():
    buffer = ReplayBuffer(TensorSpec(()), 1, 3)
    buffer.add_sequence(torch.arange(5.).reshape(5, 1))
    assert buffer.get_field('', torch.tensor([0]), torch.tensor([[2], [4]])).tolist() == [[2], [4]]
    for position in (1, 5):
        with pytest.raises(ValueError, match='in the buffer, from 2 to 4'):
            buffer.get_field('', torch.tensor(0), torch.tensor(position))


def test_arguments_out_of_range_are_rejected_by_name():
    for argument, value in (('num_environments', 0), ('max_length', 0), ('num_earliest_frames_ignored', -1),
                            ('num_earliest_frames_ignored', 4)):
        with pytest.raises(ValueError, match=argument):
            ReplayBuffer(**{'data_spec': TensorSpec(()), 'num_environments': 1, 'max_length': 4, argument: value})
    with pytest.raises(ValueError, match='empty nest'):
        ReplayBuffer((), 1)
    buffer = ReplayBuffer(TensorSpec(()), 1, 4)
    buffer.add_batch(torch.zeros(1))
    for args in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match='expected at least 1, found 0'):
            buffer.get_batch(*args)


@pytest.mark.parametrize('prioritized', [False, True])
def test_only_filled_slots_are_saved(prioritized):
    sizes = []
    for length in (10, 10_000):
        buffer = ReplayBuffer(SPEC, 2, length, prioritized_sampling=prioritized)
        buffer.add_sequence(cell(torch.arange(20).reshape(10, 2)))
        file = io.BytesIO()
        torch.save(buffer.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[1] - sizes[0] < 1000
    buffer.clear()
    assert all(not block.numel() for block in buffer.state_dict()['blocks'])


def test_the_buffer_is_saved_by_default_while_it_is_small():
    def buffer(**arguments):
        replay = ReplayBuffer({'large': TensorSpec((300, ))}, 2, 100, **arguments)  # 2,400 bytes a row
        replay.checkpoint_limit = 24_000
        return replay

    found = {}
    for num_rows in (10, 11):
        batch = {'large': torch.rand(num_rows, 2, 300)}
        for flag in (None, True, False):
            filled, other = buffer(enable_checkpoint=flag), buffer(enable_checkpoint=flag)
            filled.add_sequence(batch)
            other.load_state_dict(filled.state_dict())
            found[num_rows, flag] = other.total_size
            if other.total_size:
                assert torch.equal(other.gather_all()[0]['large'], batch['large'].transpose(0, 1))
    assert found == {(10, None): 20, (10, True): 20, (10, False): 0, (11, None): 0, (11, True): 22, (11, False): 0}
    assert ReplayBuffer(SPEC, 1).checkpoint_limit == 256 * 2**20


def test_contents_are_saved_on_request_and_fit_only_the_same_buffer():
    plain = ReplayBuffer(TensorSpec(()), 1, 4, enable_checkpoint=False)
    plain.add_batch(torch.ones(1))
    assert plain.state_dict() == {}
    saved = ReplayBuffer(TensorSpec(()), 1, 4, enable_checkpoint=True)
    saved.add_batch(torch.ones(1))
    plain.load_state_dict(saved.state_dict())
    assert plain.total_size == 1
    saved.load_state_dict({})
    assert saved.total_size == 1
    others = ((TensorSpec(()), 2, 4, 'num_environments'), (TensorSpec(()), 1, 5, 'max_length'),
              (TensorSpec((), torch.int32), 1, 4, 'data_spec'))
    for spec, num_envs, length, what in others:
        other = ReplayBuffer(spec, num_envs, length, enable_checkpoint=True)
        with pytest.raises(ValueError, match=f'another {what}'):
            other.load_state_dict(saved.state_dict())


def test_the_batch_info_refers_to_the_buffer():
    buffer = ReplayBuffer(SPEC, 2, 8)
    buffer.add_sequence(cell(torch.arange(40).reshape(20, 2)))
    batch, info = buffer.get_batch(5, 3)
    assert info.replay_buffer is buffer
    reread = buffer.get_field('small', info.env_ids.unsqueeze(-1), info.positions.unsqueeze(-1) + torch.arange(3))
    assert torch.equal(reread, batch['small'])


def test_a_conf_file_sets_its_arguments():
    gin.parse_config('ReplayBuffer.max_length = 17\nreplay_buffer.ReplayBuffer.with_replacement = True')
    assert ReplayBuffer(TensorSpec(()), 1).max_length == 17


@pytest.mark.gpu
def test_storage_and_batches_may_live_on_different_devices():
    with context.device('cuda'):
        for device in ('cpu', 'cuda'):
            buffer = ReplayBuffer(SPEC, 2, 8, device=device)
            values = torch.arange(40).reshape(20, 2)
            buffer.add_sequence(nest.map_structure(lambda x: x.cuda(), cell(values)))
            buffer.add_batch(nest.map_structure(lambda x: x.cuda(), cell(torch.tensor([40, 41]))))
            batch, info = buffer.gather_all()
            assert {x.device.type for x in nest.flatten(batch)} == {'cuda'}
            assert info.positions.device.type == 'cuda'
            assert_cells(nest.map_structure(lambda x: x.cpu(), batch), torch.arange(26, 42).reshape(8, 2).T)
            assert buffer.get_field('value', info.env_ids, info.positions).tolist() == [26, 27]


@pytest.mark.parametrize('steps', [1, 3])
def test_nothing_stored_has_a_gradient(steps):
    buffer = ReplayBuffer({'value': TensorSpec(())}, 2, 8)
    batch = torch.ones(steps, 2, requires_grad=True)
    buffer.add_sequence({'value': batch * 2})
    buffer.add_batch({'value': batch[0] * 3}, torch.tensor([1, 0]))
    experience, _ = buffer.gather_all()
    assert not experience['value'].requires_grad
    assert experience['value'].tolist() == [[2.0] * steps + [3.0]] * 2
