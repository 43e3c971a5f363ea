"""Public results of episode bookkeeping. Histories are compared in tests/numerics."""
import pytest
import torch

from alfx import nest
from alfx.data_structures import BasicRLInfo, BasicRolloutInfo, Experience, StepType, TimeStep, namedtuple
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import SpecError, TensorSpec

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
SPEC = TimeStep(step_type=TensorSpec((), torch.int32), reward=TensorSpec(()), discount=TensorSpec(()))


def time_steps(*step_types, discount=1.0, reward=1.0):
    """Return time steps ``[T, 1]``."""
    step_type = torch.tensor(step_types, dtype=torch.int32).unsqueeze(-1)
    return TimeStep(step_type=step_type, reward=torch.full(step_type.shape, reward),
                    discount=torch.full(step_type.shape, discount))


def episode_bounds(buffer):
    """Return the episode starts and ends of all stored steps of environment 0."""
    first, end = buffer.earliest_positions(torch.tensor([0])).item(), buffer.current_pos.item()
    positions, env_ids = torch.arange(first, end), torch.zeros(1, dtype=torch.int64)
    begins = buffer.get_episode_begin_position(positions, env_ids)
    ends = positions + buffer.steps_to_episode_end(positions, env_ids)
    return begins.tolist(), ends.tolist()


def test_episodes_worked_out_by_hand():
    buffer = ReplayBuffer(SPEC, 1, 6, keep_episodic_info=True)
    buffer.add_sequence(time_steps(FIRST, MID, LAST, FIRST, MID))
    assert episode_bounds(buffer) == ([0, 0, 0, 3, 3], [2, 2, 2, 4, 4])
    buffer.add_batch(nest.map_structure(lambda x: x[0], time_steps(MID)))
    assert episode_bounds(buffer) == ([0, 0, 0, 3, 3, 3], [2, 2, 2, 5, 5, 5])
    # The first step of the first episode is overwritten: the oldest step replaces it, the end is still known.
    buffer.add_sequence(time_steps(LAST))
    assert episode_bounds(buffer) == ([1, 1, 3, 3, 3, 3], [2, 2, 6, 6, 6, 6])


def test_episodic_info_can_be_enabled_and_disabled_later():
    buffer = ReplayBuffer(SPEC, 1, 6)
    assert not buffer.keep_episodic_info
    with pytest.raises(ValueError, match='steps_to_episode_end: expected a buffer that tracks episodes'):
        buffer.steps_to_episode_end(torch.tensor([0]), torch.tensor([0]))
    buffer.add_sequence(time_steps(FIRST, MID, LAST, FIRST))
    buffer.keep_episodic_info = True
    assert episode_bounds(buffer) == ([0, 0, 0, 3], [2, 2, 2, 3])
    buffer.add_sequence(time_steps(MID))
    assert episode_bounds(buffer) == ([0, 0, 0, 3, 3], [2, 2, 2, 4, 4])
    buffer.keep_episodic_info = False
    assert not buffer.keep_episodic_info


def test_shapes_broadcast_and_positions_are_checked():
    buffer = ReplayBuffer(SPEC, 2, 6, keep_episodic_info=True)
    sequence = time_steps(FIRST, MID, LAST, FIRST)
    buffer.add_sequence(nest.map_structure(lambda x: x.expand(4, 2), sequence))
    env_ids, positions = torch.tensor([[0], [1]]), torch.tensor([0, 1, 3])
    assert buffer.steps_to_episode_end(positions, env_ids).tolist() == [[2, 1, 0]] * 2
    assert buffer.get_episode_begin_position(positions, env_ids).tolist() == [[0, 0, 3]] * 2
    for index in ((torch.tensor([4]), torch.tensor([0])), (torch.tensor([-1]), torch.tensor([0]))):
        with pytest.raises(ValueError, match='in the buffer, from 0 to 3'):
            buffer.steps_to_episode_end(*index)
    with pytest.raises(ValueError, match='environment ids from 0 to 1, found 2 to 2'):
        buffer.get_episode_begin_position(torch.tensor([0]), torch.tensor([2]))


def test_the_step_type_is_read_from_the_time_step_itself():
    info = namedtuple('Info', ['step_type', 'reward'])
    spec = Experience(time_step=SPEC._replace(untransformed=SPEC), rollout_info=BasicRolloutInfo(
        rl=BasicRLInfo(action=info(TensorSpec((3, )), TensorSpec((2, ))))))
    buffer = ReplayBuffer(spec, 1, 4, keep_episodic_info=True, record_episodic_return=True)

    paths = [path for path, _ in nest.flatten_with_path(spec)]
    for field in ('step_type', 'reward', 'discount'):
        assert paths[buffer._find_leaf(field)] == f'time_step.{field}'


def test_fields_missing_in_the_experience_are_rejected_by_name():
    plain = {'observation': TensorSpec(())}
    with pytest.raises(ValueError, match=r"\.keep_episodic_info: expected a field 'step_type'.*observation"):
        ReplayBuffer(plain, 1, 4, keep_episodic_info=True)
    with pytest.raises(ValueError, match=r"record_episodic_return: expected a field 'discount'"):
        ReplayBuffer({'step_type': TensorSpec((), torch.int32)}, 1, 4, record_episodic_return=True)
    buffer = ReplayBuffer({'step_type': TensorSpec((), torch.int32)}, 1, 4, keep_episodic_info=True)
    buffer.add_sequence({'step_type': torch.tensor([[FIRST], [MID]], dtype=torch.int32)})
    assert episode_bounds(buffer) == ([0, 0], [1, 1])
    with pytest.raises(ValueError, match="get_disc_0_begin_position: expected a field 'discount'"):
        buffer.get_disc_0_begin_position(torch.tensor([0]), torch.tensor([0]))
    buffer = ReplayBuffer(plain, 1, 4)
    with pytest.raises(ValueError, match="expected a field 'step_type'"):
        buffer.keep_episodic_info = True


@pytest.mark.parametrize('arguments', [
    dict(gamma=0.5), dict(default_return=0.0), dict(reward_clip=(-1.0, 1.0)), dict(return_after_truncation=0.0),
    dict(gamma=0.98, default_return=-1.0), {}])
def test_arguments_of_returns_are_logged_if_no_returns_are_recorded(arguments, caplog):
    caplog.set_level('INFO', 'alfx')
    ReplayBuffer(SPEC, 1, 4, **arguments)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f'ReplayBuffer.{argument} is not used: record_episodic_return is False' for argument in sorted(arguments)]


def test_arguments_of_returns_that_do_not_fit_are_rejected_by_name():
    for argument, value in (('gamma', 1.5), ('default_return', float('nan')), ('reward_clip', (1.0, -1.0)),
                            ('return_after_truncation', float('inf')), ('keep_episodic_info', False)):
        with pytest.raises(ValueError, match=rf'ReplayBuffer\.{argument}(: expected| must be)'):
            ReplayBuffer(SPEC, 1, 4, record_episodic_return=True, **{argument: value})
    with pytest.raises(ValueError, match='recent_data_steps: expected no value with recent_data_ratio = 0'):
        ReplayBuffer(SPEC, 1, 4, recent_data_steps=2)
    buffer = ReplayBuffer(SPEC, 1, 4, record_episodic_return=True)
    with pytest.raises(ValueError, match='expected True with record_episodic_return = True'):
        buffer.keep_episodic_info = False


def test_rewards_of_returns_are_clipped_and_each_dimension_has_its_own():
    spec = SPEC._replace(reward=TensorSpec((2, )))
    buffer = ReplayBuffer(spec, 1, 8, record_episodic_return=True, gamma=0.5, reward_clip=(-1.0, 2.0))
    steps = time_steps(FIRST, MID, MID, LAST)
    discount = steps.discount.clone()
    discount[-1] = 0.0
    reward = torch.tensor([[0.0, 0.0], [4.0, 1.0], [1.0, -3.0], [2.0, 2.0]]).unsqueeze(1)
    for t in range(4):  # added one by one: returns are filled in at the end of the episode
        buffer.add_batch(TimeStep(step_type=steps.step_type[t], reward=reward[t], discount=discount[t]))
    _, info = buffer.gather_all()
    # First: 2 + 1/2 + 2/4 = 3, 1 + 2/2 = 2, 2, 0. Second: 1 - 1/2 + 2/4 = 1, -1 + 2/2 = 0, 2, 0.
    assert info.discounted_return.tolist() == [[[3.0, 1.0], [2.0, 0.0], [2.0, 2.0], [0.0, 0.0]]]


def test_a_bootstrap_value_makes_truncated_returns_known():
    steps = time_steps(FIRST, MID, LAST, FIRST, MID, LAST, FIRST)
    rewards = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 8.0, 0.0]).unsqueeze(-1)
    discount = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]).unsqueeze(-1)
    buffer = ReplayBuffer(SPEC, 1, 8, record_episodic_return=True, gamma=0.5, return_after_truncation=16.0)
    buffer.add_sequence(steps._replace(reward=rewards, discount=discount))
    # truncated: 1 + 2/2 + 16/4 = 6, 2 + 16/2 = 10, 16; terminated: 4 + 8/2 = 8, 8, 0; the last one has not ended
    assert buffer.gather_all()[1].discounted_return.tolist() == [[6.0, 10.0, 16.0, 8.0, 8.0, 0.0, -1000.0]]


def test_a_discount_of_0_cuts_off_returns_but_not_the_episode():
    buffer = ReplayBuffer(SPEC, 1, 8, record_episodic_return=True, gamma=1.0, default_return=-5.0)
    steps = time_steps(FIRST, MID, MID, MID, LAST)
    buffer.add_sequence(steps._replace(discount=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]).unsqueeze(-1)))
    positions, env_ids = torch.arange(5), torch.tensor([0])
    assert buffer.get_episode_begin_position(positions, env_ids).tolist() == [0] * 5
    assert buffer.get_disc_0_begin_position(positions, env_ids).tolist() == [0, 0, 0, 2, 2]
    assert buffer.gather_all()[1].discounted_return.tolist() == [[2.0, 1.0, 2.0, 1.0, 0.0]]


def test_a_field_can_be_overwritten_and_episodes_follow():
    buffer = ReplayBuffer(SPEC, 1, 6, keep_episodic_info=True)
    buffer.add_sequence(time_steps(FIRST, MID, MID))
    buffer.set_field('step_type', torch.tensor([0]), torch.tensor([2]), torch.tensor([LAST], dtype=torch.int32))
    buffer.add_sequence(time_steps(MID, MID))
    assert episode_bounds(buffer) == ([0, 0, 0, 3, 3], [2, 2, 2, 4, 4])
    buffer.set_field('reward', torch.tensor([0, 0]), torch.tensor([4, 1]), torch.tensor([7.0, 8.0]))
    assert buffer.get_field('reward', torch.tensor(0), torch.arange(5)).tolist() == [1.0, 8.0, 1.0, 1.0, 7.0]
    with pytest.raises(ValueError, match='set_field: expected positions in the buffer, from 0 to 4, found 5 to 5'):
        buffer.set_field('reward', torch.tensor([0]), torch.tensor([5]), torch.ones(1))
    with pytest.raises(SpecError, match='set_field: reward: .*expected float32'):
        buffer.set_field('reward', torch.tensor([0]), torch.tensor([4]), torch.ones(1, dtype=torch.int64))
    with pytest.raises(SpecError, match=r'set_field: reward: expected \[B, ...\] with the B of env_ids'):
        buffer.set_field('reward', torch.tensor([0]), torch.tensor([4]), torch.ones(2))
    with pytest.raises(LookupError, match="did you mean 'reward'"):
        buffer.set_field('rewards', torch.tensor([0]), torch.tensor([4]), torch.ones(1))


def test_a_field_of_a_nest_is_overwritten_as_a_whole_or_not_at_all():
    spec = {'a': TensorSpec(()), 'b': TensorSpec(())}
    buffer = ReplayBuffer(spec, 1, 4)
    buffer.add_sequence({'a': torch.zeros(2, 1), 'b': torch.zeros(2, 1)})
    with pytest.raises(SpecError, match=r'expected \[B, ...\] with the B of env_ids'):
        buffer.set_field('', torch.tensor([0, 0]), torch.tensor([0, 1]), {'a': torch.ones(2), 'b': torch.ones(1)})
    assert not buffer.gather_all()[0]['a'].any()


def test_returns_are_those_of_the_time_step():
    spec = {'reward': TensorSpec(()), 'time_step': SPEC}
    buffer = ReplayBuffer(spec, 1, 4, record_episodic_return=True, gamma=1.0)
    steps = time_steps(FIRST, MID, LAST)._replace(discount=torch.tensor([[1.0], [1.0], [0.0]]))
    buffer.add_sequence({'reward': torch.full((3, 1), 100.0), 'time_step': steps})
    assert buffer.gather_all()[1].discounted_return.tolist() == [[2.0, 1.0, 0.0]]


def test_a_buffer_created_with_false_cannot_be_made_to_keep_episodes():
    buffer = ReplayBuffer(SPEC, 1, 6, keep_episodic_info=False)
    buffer.keep_episodic_info = False
    with pytest.raises(ValueError, match=r'keep_episodic_info: expected True or None, .* found False'):
        buffer.keep_episodic_info = True
