"""Sampling by priority, as seen by users. Histories are compared in tests/numerics."""
import copy
import io
import math

import pytest
import torch

from alfx import context
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec

SPEC = TensorSpec((), torch.int64)


def filled(steps, envs=1, max_length=8, **kwargs):
    """Return a buffer in which each step is 100 * env + its position."""
    buffer = ReplayBuffer(SPEC, envs, max_length, prioritized_sampling=True, **kwargs)
    if steps:
        buffer.add_sequence(torch.arange(steps).unsqueeze(-1) + 100 * torch.arange(envs))
    return buffer


def shares(buffer, length=1, batch=64, rounds=40):
    """Return {(env, position): (fraction of the batches, importance weight)}."""
    found = {}
    for _ in range(rounds):
        _, info = buffer.get_batch(batch, length)
        for env, position, weight in zip(info.env_ids.tolist(), info.positions.tolist(),
                                         info.importance_weights.tolist()):
            count, first_weight = found.get((env, position), (0, weight))
            assert first_weight == weight
            found[env, position] = (count + 1, weight)
    return {key: (count / (rounds * batch), weight) for key, (count, weight) in found.items()}


def set_priorities(buffer, priorities, env=0):
    """Return a buffer with the priorities {position: priority}."""
    count = len(priorities)
    buffer.update_priority(torch.full((count, ), env), torch.tensor(list(priorities)),
                           torch.tensor(list(priorities.values())))


@pytest.mark.parametrize('with_replacement', [False, True])
def test_probabilities_and_weights_worked_out_by_hand(with_replacement):
    buffer = filled(4, with_replacement=with_replacement)
    set_priorities(buffer, {0: 1.0, 1: 0.0, 2: 2.0, 3: 5.0})
    # Sequences of 1: N = 4, P = 1/8, 0, 2/8, 5/8, so N P = 0.5, 0, 1, 2.5.
    found = shares(buffer)
    assert {key: weight for key, (_, weight) in found.items()} == {(0, 0): 0.5, (0, 2): 1.0, (0, 3): 2.5}
    assert found[0, 3][0] == pytest.approx(0.625, abs=0.05 if with_replacement else 0.01)
    # Sequences of 2 begin at 0, 1 and 2: N = 3, P = 1/3, 0, 2/3.
    assert {key: weight for key, (_, weight) in shares(buffer, 2).items()} == {(0, 0): 1.0, (0, 2): 2.0}


def test_equal_priorities_have_weight_one():
    buffer = filled(8, envs=3)
    assert set(buffer.get_batch(50, 3)[1].importance_weights.tolist()) == {1.0}


def test_stratified_draws_have_the_expected_frequencies():
    buffer = filled(8)
    set_priorities(buffer, {i: 2.0 if i < 4 else 6.0 for i in range(8)})  # P = 1/16 and 3/16
    for _ in range(20):
        positions = buffer.get_batch(16, 1)[1].positions.tolist()
        assert [positions.count(i) for i in range(8)] == [1, 1, 1, 1, 3, 3, 3, 3]


def test_new_steps_get_the_largest_priority_so_far():
    """New steps get the largest priority so far, not always the initial priority."""
    buffer = filled(2, initial_priority=7.0)
    assert buffer.initial_priority == 7.0
    set_priorities(buffer, {0: 0.25})
    buffer.add_batch(torch.tensor([2]))
    # Weights of 0, 1 and 2: 0.25, 7 and again 0.25.
    weights = {p: w for (_, p), (_, w) in shares(buffer).items()}
    assert weights[0] == weights[2] == pytest.approx(3 * 0.25 / 7.5)
    set_priorities(buffer, {1: 1.0})
    set_priorities(buffer, {2: 0.5})
    buffer.add_sequence(torch.tensor([[3], [4]]))
    assert {p: w for (_, p), (_, w) in shares(buffer).items()} == pytest.approx(
        {0: 5 * 0.25 / 3.75, 1: 5 / 3.75, 2: 5 * 0.5 / 3.75, 3: 5 / 3.75, 4: 5 / 3.75})


def test_new_steps_get_the_largest_priority_of_one_update():
    buffer = filled(3)
    set_priorities(buffer, {0: 0.5, 1: 4.0, 2: 2.0})
    buffer.add_batch(torch.tensor([3]))
    weights = {p: w for (_, p), (_, w) in shares(buffer).items()}
    assert weights == pytest.approx({0: 4 * 0.5 / 10.5, 1: 16 / 10.5, 2: 8 / 10.5, 3: 16 / 10.5})


def test_a_step_of_one_environment_sets_no_other_priority():
    buffer = filled(4, envs=2, max_length=4)
    set_priorities(buffer, {0: 5.0, 1: 1.0, 2: 2.0, 3: 3.0}, env=1)
    set_priorities(buffer, dict.fromkeys(range(4), 0.0))
    buffer.add_batch(torch.tensor([104]), torch.tensor([1]))
    # Sequences of 2 begin at 3 steps of each environment: N P = 6 p / 6.
    assert {key: w for key, (_, w) in shares(buffer, 2).items()} == {(1, 1): 1.0, (1, 2): 2.0, (1, 3): 3.0}


def test_a_priority_of_a_step_without_room_for_a_sequence_waits():
    """Sequences of 2 begin at 0 and 1 of 3 steps; the priority set at 2 counts once there is a fourth step."""
    buffer = filled(3)
    assert set(shares(buffer, 2)) == {(0, 0), (0, 1)}
    set_priorities(buffer, {0: 1.0, 1: 2.0, 2: 3.0})
    assert {p: w for (_, p), (_, w) in shares(buffer, 2).items()} == pytest.approx({0: 2 / 3, 1: 4 / 3})
    buffer.add_batch(torch.tensor([3]))
    assert {p: w for (_, p), (_, w) in shares(buffer, 2).items()} == pytest.approx({0: 0.5, 1: 1.0, 2: 1.5})


def test_steps_that_become_context_are_no_longer_drawn():
    buffer = filled(8, num_earliest_frames_ignored=2)
    assert {position for _, position in shares(buffer)} == set(range(2, 8))
    for _ in range(3):
        buffer.add_batch(torch.tensor([9]))
        buffer.get_batch(1, 1)
    assert {p: w for (_, p), (_, w) in shares(buffer).items()} == dict.fromkeys(range(5, 11), 1.0)


def test_uniform_batches_of_a_prioritized_buffer_ignore_priorities():
    buffer = filled(4, recent_data_ratio=0.5)
    set_priorities(buffer, {0: 0.0, 1: 0.0, 2: 0.0, 3: 9.0})
    _, info = buffer.get_batch(4, 1, uniform=True)
    assert sorted(info.positions.tolist()) == [0, 1, 2, 3] and info.importance_weights == ()


def test_duplicate_sequences_get_the_last_priority():
    buffer = filled(2)
    buffer.update_priority(torch.tensor([0, 0, 0]), torch.tensor([1, 0, 1]), torch.tensor([9.0, 1.0, 3.0]))
    assert {p: w for (_, p), (_, w) in shares(buffer).items()} == {0: 0.5, 1: 1.5}


def test_updates_of_overwritten_steps_leave_new_priorities_unchanged():
    buffer = filled(4, max_length=4)
    _, info = buffer.get_batch(4, 1)
    buffer.add_batch(torch.tensor([4]))  # over position 0
    buffer.update_priority(info.env_ids, info.positions, torch.where(info.positions == 0, 3.0, 1.0))
    assert {p: w for (_, p), (_, w) in shares(buffer).items()} == dict.fromkeys((1, 2, 3, 4), 1.0)


@pytest.mark.parametrize('bad', [-1.0, math.nan, math.inf])
def test_priorities_that_are_none_are_rejected(bad):
    buffer = filled(4)
    with pytest.raises(ValueError, match=r'update_priority: expected finite priorities of at least 0, found \[-?\w'):
        set_priorities(buffer, {0: 1.0, 1: bad})
    assert set(buffer.get_batch(8, 1)[1].importance_weights.tolist()) == {1.0}


def test_priorities_need_a_prioritized_buffer_and_one_value_per_position():
    buffer = ReplayBuffer(SPEC, 1, 4)
    assert not buffer.prioritized_sampling and filled(0).prioritized_sampling
    with pytest.raises(ValueError, match='prioritized_sampling = True'):
        buffer.update_priority(torch.tensor([0]), torch.tensor([0]), torch.ones(1))
    with pytest.raises(ValueError, match=r'the same shape \[B\], found \(1,\), \(2,\) and \(2,\)'):
        filled(3).update_priority(torch.tensor([0]), torch.tensor([0, 1]), torch.ones(2))


def test_a_batch_without_positive_priorities_raises():
    buffer = filled(3)
    set_priorities(buffer, {0: 0.0, 1: 0.0, 2: 0.0})
    with pytest.raises(ValueError, match='priorities of all sequences are 0'):
        buffer.get_batch(2, 1)


def test_priorities_are_saved_with_the_data_and_give_the_same_batches():
    buffer = filled(11, envs=2, enable_checkpoint=True)
    set_priorities(buffer, {p: float(p) for p in range(5, 10)})
    buffer.get_batch(4, 2)
    state = io.BytesIO()
    torch.save(buffer.state_dict(), state)
    state.seek(0)
    other = filled(5, envs=2, enable_checkpoint=True)
    set_priorities(other, {1: 50.0})
    other.get_batch(4, 3)
    other.load_state_dict(torch.load(state, weights_only=True))
    for one in (buffer, other):
        one.add_batch(torch.tensor([11, 111]))
    for length in (1, 2, 4):
        batches = []
        for one in (buffer, other):
            torch.manual_seed(length)
            batch, info = one.get_batch(32, length)
            batches.append((batch.tolist(), info.positions.tolist(), info.importance_weights.tolist()))
        assert batches[0] == batches[1]


def test_new_steps_get_the_largest_stored_priority_at_every_third_update():
    buffer = filled(4, new_priority_period=3, enable_checkpoint=True)
    loaded = filled(0, new_priority_period=3, enable_checkpoint=True)

    def new_priority(one):
        one.add_batch(torch.tensor([0]))
        newest = int(one.current_pos[0]) - 1
        return one.state_dict()['priorities']['priorities'][newest % 8].item()

    set_priorities(buffer, {0: 9.0, 1: 1.0, 2: 1.0, 3: 2.0})
    set_priorities(buffer, {0: 0.5})
    assert new_priority(buffer) == 9.0  # the largest one so far, at position 4
    loaded.load_state_dict(copy.deepcopy(buffer.state_dict()))
    for one in (buffer, loaded):
        set_priorities(one, {4: 3.0})  # the third update: 0.5, 1, 1, 2, 3
        assert new_priority(one) == 3.0
        set_priorities(one, {1: 4.0})
        assert new_priority(one) == 4.0  # a larger one was set


def test_removed_steps_do_not_count_for_the_largest_stored_priority():
    buffer = filled(4, new_priority_period=2)
    set_priorities(buffer, {3: 9.0, 0: 1.0, 1: 1.0, 2: 1.0})
    buffer.drop_newest(torch.tensor([0]))
    set_priorities(buffer, {0: 0.5})
    buffer.add_batch(torch.tensor([0]))
    assert shares(buffer)[0, 3][1] == pytest.approx(1.0 / (3.5 / 4))


def test_priorities_of_unknown_environments_are_rejected():
    buffer = filled(4, envs=2)
    for env in (-1, 2):
        with pytest.raises(ValueError, match=f'update_priority: expected environment ids from 0 to 1, found {env}'):
            set_priorities(buffer, {2: 9.0}, env)
        with pytest.raises(ValueError, match='earliest_positions: expected environment ids from 0 to 1'):
            buffer.earliest_positions(torch.tensor([env]))
    assert set(buffer.get_batch(50, 1)[1].importance_weights.tolist()) == {1.0}


def test_state_without_a_number_of_updates_can_be_loaded():
    buffer = filled(4, enable_checkpoint=True)
    state = copy.deepcopy(buffer.state_dict())
    state['priorities']['newest'] = torch.tensor([7.0, 1.0], dtype=torch.float64)
    buffer.load_state_dict(state)
    assert buffer.state_dict()['priorities']['newest'].tolist() == [7.0, 1.0, 0.0]


def test_a_period_without_priorities_is_rejected():
    with pytest.raises(ValueError, match='ReplayBuffer.new_priority_period: expected 0 without prioritized_sampling'):
        ReplayBuffer(SPEC, 1, 4, new_priority_period=3)


def test_contents_saved_without_priorities_get_the_initial_one():
    plain = ReplayBuffer(SPEC, 1, 8, enable_checkpoint=True)
    plain.add_sequence(torch.arange(5).unsqueeze(-1))
    buffer = filled(8, enable_checkpoint=True)
    buffer.load_state_dict(plain.state_dict())
    assert {p: w for (_, p), (_, w) in shares(buffer).items()} == dict.fromkeys(range(5), 1.0)


@pytest.mark.parametrize('with_replacement', [False, True])
def test_recent_steps_get_their_fraction_and_matching_weights(with_replacement):
    buffer = filled(8, envs=2, recent_data_steps=2, recent_data_ratio=0.25, with_replacement=with_replacement)
    set_priorities(buffer, {p: 3.0 if p == 6 else 1.0 for p in range(8)})
    # Sequences of 2 begin at 0 to 6: N = 14, priorities add up to 9 + 7 = 16. Recent are 5 and 6 of each environment.
    found = shares(buffer, 2, rounds=60)
    for (env, p), (share, weight) in found.items():
        priority = 3.0 if (env, p) == (0, 6) else 1.0
        expected = 0.75 * priority / 16 + (0.25 / 4 if p in (5, 6) else 0)
        assert weight == pytest.approx(14 * expected)
        assert share == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize('lockstep', [True, False])
def test_recent_steps_get_their_fraction_without_priorities(lockstep):
    buffer = ReplayBuffer(SPEC, 2, 8, recent_data_steps=3, recent_data_ratio=0.5)
    buffer.add_sequence(torch.arange(8).unsqueeze(-1) + 100 * torch.arange(2))
    newest = [7, 7]
    if not lockstep:
        buffer.add_batch(torch.tensor([108]), torch.tensor([1]))
        newest[1] = 8
    counts = torch.zeros(2, 9)
    for _ in range(400):
        batch, info = buffer.get_batch(4, 1)
        assert info.importance_weights == ()
        assert (batch[:, 0] == 100 * info.env_ids + info.positions).all()
        recent = info.positions[2:] - torch.tensor(newest)[info.env_ids[2:]]
        assert recent.min() >= -2 and recent.max() <= 0
        counts.index_put_((info.env_ids, info.positions), torch.ones(4), accumulate=True)
    # Two of four from 16 sequences, two from 6.
    for env in range(2):
        for p in range(newest[env] - 7, newest[env] + 1):
            expected = 400 * (2 / 16 + (2 / 6 if p > newest[env] - 3 else 0))
            assert abs(counts[env, p] - expected) < 5 * expected**0.5


def test_arguments_of_sampling_that_are_out_of_range_are_rejected_by_name():
    for argument, value in (('recent_data_ratio', 1.5), ('recent_data_ratio', -0.1), ('recent_data_steps', 0),
                            ('initial_priority', 0.0), ('initial_priority', math.inf)):
        with pytest.raises(ValueError, match=rf'ReplayBuffer\.{argument}(: expected| must be)'):
            ReplayBuffer(SPEC, 1, 4, **{argument: value})


@pytest.mark.gpu
def test_storage_and_batches_may_live_on_different_devices():
    spec = {'step_type': TensorSpec((), torch.int32), 'reward': TensorSpec(()), 'discount': TensorSpec(())}
    with context.device('cuda'):
        for device in ('cpu', 'cuda'):
            buffer = ReplayBuffer(spec, 2, 8, device=device, prioritized_sampling=True, record_episodic_return=True)
            for _ in range(3):
                buffer.add_sequence({
                    'step_type': torch.tensor([0, 1, 1, 2], dtype=torch.int32).cuda().unsqueeze(-1).expand(4, 2),
                    'reward': torch.ones(4, 2).cuda(),
                    'discount': torch.tensor([1.0, 1.0, 1.0, 0.0]).cuda().unsqueeze(-1).expand(4, 2)
                })
            batch, info = buffer.get_batch(64, 2)  # each of the 14 sequences at least once
            for x in (batch['reward'], *info[:3], info.discounted_return):
                assert x.device.type == 'cuda'
            buffer.update_priority(info.env_ids, info.positions, (info.positions == 5).float())
            ends = buffer.steps_to_episode_end(info.positions, info.env_ids)
            assert ends.device.type == 'cuda' and ends.tolist() == (3 - info.positions % 4).tolist()
            assert set(buffer.get_batch(8, 1)[1].positions.tolist()) <= {5, 11}
