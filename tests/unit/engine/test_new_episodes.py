"""Resuming a run whose environments start new episodes: the episodes in the replay buffer are ended."""
import pytest
import torch
from helpers.dqn_agents import make_agent

from alfx.data_structures import StepType

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


# episodes have five steps, so that the 16th is the first of its episode and the 20th the last
@pytest.mark.parametrize('iterations, dropped, previous', [(3, 0, FIRST), (4, 1, MID), (5, 0, MID)])
def test_running_episodes_are_truncated_and_first_steps_are_dropped(iterations, dropped, previous):
    agent = make_agent()
    for _ in range(iterations):
        agent.train_iter()
    collector, buffer = agent.learner.collector, agent.replay_buffer
    collector.start_new_episodes(collector.state_dict())
    size = 4 * iterations - dropped
    assert buffer.current_size.tolist() == [size] * 4
    types = buffer.get_field('time_step.step_type', torch.arange(4)[:, None], torch.arange(size - 2, size))
    assert types.tolist() == [[previous, LAST]] * 4


def test_environments_are_treated_separately():
    agent = make_agent()
    for _ in range(3):
        agent.train_iter()
    buffer, two = agent.replay_buffer, torch.tensor([1, 3])
    buffer.set_field('time_step.step_type', two, buffer.current_pos[two] - 1, torch.full((2, ), FIRST).int())
    collector = agent.learner.collector
    collector.start_new_episodes(collector.state_dict())
    assert buffer.current_size.tolist() == [12, 11, 12, 11]
    assert buffer.get_batch(8, 2)[0].time_step.step_type.shape == (8, 2)
