"""Successors of each step in the replay buffer, against plain loops over lists of all stored steps."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alfx.algorithms.base.future_steps import FutureSteps, experience_field
from alfx.data_structures import BatchInfo, Experience, StepType, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
SPEC = Experience(time_step=TimeStep(step_type=TensorSpec((), torch.int32), reward=TensorSpec(()),
                                     observation={'x': TensorSpec((2, ))}, prev_action=TensorSpec((), torch.int64)),
                  action=TensorSpec((), torch.int64))


def stored_step(step_type, number):
    """Return a step of all environments; each field contains ``number`` ``[E]``, which identifies the step."""
    number = torch.as_tensor(number)
    return Experience(
        time_step=TimeStep(step_type=torch.as_tensor(step_type, dtype=torch.int32), reward=number.float(),
                           observation={'x': torch.stack([number, -number], -1).float()}, prev_action=number),
        action=number + 1)


def random_history(draw, num_envs, num_steps):
    """Draw step types of episodes, possibly as short as FIRST, LAST, and distinct numbers; both are ``[time][env]``."""
    types = [[FIRST] * num_envs]
    for _ in range(num_steps - 1):
        types.append([FIRST if before == LAST else LAST if draw(st.booleans()) and draw(st.booleans()) else MID
                      for before in types[-1]])
    numbers = [[100 * e + t for e in range(num_envs)] for t in range(num_steps)]
    return types, numbers


def slow_targets(types, numbers, env, position, num_steps):
    """Return the numbers at position, ..., position + num_steps by definition; ``None`` where no target exists."""
    found = [numbers[position][env]]
    while len(found) <= num_steps:
        current = position + len(found) - 1
        if types[current][env] == LAST or current + 1 >= len(types):
            break
        found.append(numbers[current + 1][env])
    return found + [None] * (num_steps + 1 - len(found))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_and_targets_match_a_slow_loop(data):
    num_envs, max_length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    types, numbers = random_history(data.draw, num_envs, data.draw(st.integers(1, 25)))
    buffer = ReplayBuffer(SPEC, num_envs, max_length)
    for step_type, number in zip(types, numbers):
        buffer.add_batch(stored_step(step_type, number), torch.arange(num_envs))
    num_steps, length = data.draw(st.integers(0, 4)), data.draw(st.integers(1, min(len(types), max_length)))
    torch.manual_seed(0)
    experience, batch_info = buffer.get_batch(5, length)
    steps = FutureSteps(batch_info, length, num_steps)
    mask, reward, observation = steps.mask(), steps.field('reward'), steps.field('time_step.observation')
    assert (mask.shape, mask.dtype) == ((5, length, num_steps + 1), torch.bool)
    assert observation['x'].shape == (5, length, num_steps + 1, 2)
    for b in range(5):
        for t in range(length):
            env, position = int(batch_info.env_ids[b]), int(batch_info.positions[b]) + t
            expected = slow_targets(types, numbers, env, position, num_steps)
            assert mask[b, t].tolist() == [number is not None for number in expected]
            for i, number in enumerate(expected):
                if number is not None:
                    assert reward[b, t, i] == number
                    assert observation['x'][b, t, i].tolist() == [number, -number]
    assert torch.equal(reward[:, :, 0], experience.time_step.reward)


def test_targets_of_a_history_worked_out_by_hand():
    """Look two steps ahead in the numbers 0 1 2 | 3 4 5 with FIRST MID LAST FIRST MID MID.

    Nothing follows the newest step: 0 1 2, 1 2 -, 2 - - | 3 4 5, 4 5 -, 5 - -.
    """
    buffer = ReplayBuffer(SPEC, 1, 10)
    for number, step_type in enumerate([FIRST, MID, LAST, FIRST, MID, MID]):
        buffer.add_batch(stored_step([step_type], [number]), torch.arange(1))
    _, batch_info = buffer.gather_all()
    steps = FutureSteps(batch_info, 6, 2)
    assert steps.mask()[0].int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert steps.field('reward')[0, [0, 3]].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert steps.field('prev_action')[0, 3, 1:].tolist() == steps.field('action')[0, 3, :-1].tolist() == [4, 5]


def test_targets_do_not_change_with_where_the_ring_begins():
    """Store the same newest steps in rings of different lengths, which wrap around at different positions."""
    found = []
    for max_length in (6, 7, 8):
        buffer = ReplayBuffer(SPEC, 1, max_length)
        for number in range(20):
            buffer.add_batch(stored_step([FIRST if number % 5 == 0 else LAST if number % 5 == 4 else MID], [number]),
                             torch.arange(1))
        info = BatchInfo(env_ids=torch.zeros(1, dtype=torch.int64), positions=torch.tensor([14]), replay_buffer=buffer)
        steps = FutureSteps(info, 6, 3)
        found.append((steps.mask(), steps.field('reward')))
    for mask, reward in found[1:]:
        assert torch.equal(mask, found[0][0]) and torch.equal(reward, found[0][1])
    assert found[0][1][0, 1].tolist() == [15, 16, 17, 18] and found[0][0][0, 0].tolist() == [True, False, False, False]


def test_a_cut_off_episode_ends_where_the_next_one_begins():
    buffer = ReplayBuffer(SPEC, 1, 10)
    for number, step_type in enumerate([FIRST, MID, FIRST, MID]):
        buffer.add_batch(stored_step([step_type], [number]), torch.arange(1))
    _, batch_info = buffer.gather_all()
    assert FutureSteps(batch_info, 4, 1).mask()[0, :, 1].tolist() == [True, False, True, False]


def test_fields_of_the_time_step_may_be_named_by_themselves():
    assert experience_field(SPEC, 'observation.x') == 'time_step.observation.x'
    assert experience_field(SPEC, 'time_step.reward') == 'time_step.reward'
    assert experience_field(SPEC, 'action') == 'action' and experience_field(SPEC, 'state.rl') == 'state.rl'
    assert experience_field({'reward': 0}, 'reward') == 'reward'


def test_a_batch_of_unknown_origin_is_rejected():
    with pytest.raises(ValueError, match='batch_info with its replay buffer'):
        FutureSteps(BatchInfo(env_ids=torch.zeros(1), positions=torch.zeros(1)), 1, 1)
