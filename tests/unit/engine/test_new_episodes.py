"""Resuming a run whose environments start new episodes: the episodes in the replay buffer are ended."""
import pytest
import torch
from helpers.dqn_agents import make_agent

import alfx
from alfx.data_structures import StepType
from alfx.offline import dataset_sources
from alfx.offline.dataset_files import DatasetError

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


def test_a_run_on_unrolls_with_frame_stacks_resumes_with_new_episodes(tmp_path):
    params = {'TrainerConfig.data_transformer_ctor': '@FrameStacker', 'FrameStacker.stack_size': 4,
              'TrainerConfig.save_environment_state': False, 'TrainerConfig.unroll_length': 8,
              'create_environment.num_parallel_environments': 16, 'create_environment.nonparallel': True,
              'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.mini_batch_size': 32,
              'TrainerConfig.evaluate': False, 'TrainerConfig.random_seed': 1, 'TrainerConfig.num_env_steps': 0}
    run = str(tmp_path / 'run')
    for num_iterations in (4, 6):
        alfx.train('ppo_cart_pole', {**params, 'TrainerConfig.num_iterations': num_iterations}, run)
    with pytest.raises(DatasetError, match='contains no episode'):
        dataset_sources.read(run)
