"""Warnings about state that a resumed run lacks."""
import pytest
import torch
from torch import nn

from alfx.config import TrainerConfig
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec
from alfx.trainers import reproducibility


@pytest.mark.parametrize('env_steps, stored, warns', [(0, 0, False), (100, 0, True), (100, 1, False)])
def test_an_empty_buffer_is_named_once_steps_were_collected(env_steps, stored, warns, caplog):
    part = nn.Module()
    part.replay_buffer = ReplayBuffer(TensorSpec((2, )), num_environments=1, max_length=4, name='my_buffer')
    for _ in range(stored):
        part.replay_buffer.add_batch(torch.zeros(1, 2))
    config = TrainerConfig(root_dir='', whole_replay_buffer_training=False, clear_replay_buffer=False,
                           mini_batch_length=2)
    reproducibility.warn_on_resume(nn.ModuleList([part]), config, env_steps)
    assert ('my_buffer was not in the checkpoint' in caplog.text) == warns


@pytest.mark.parametrize('limit, rows', [(dict(num_env_steps=100), 50), (dict(num_iterations=10), 80),
                                         (dict(num_iterations=1000), 200), (dict(num_episodes=5), 200)])
def test_the_size_of_a_buffer_at_the_end_is_at_most_its_length(limit, rows):
    buffer = ReplayBuffer(TensorSpec((2, )), num_environments=2, max_length=200)
    settings = {'num_iterations': 0, **limit}
    config = TrainerConfig(root_dir='', unroll_length=8, **settings)
    assert reproducibility._rows_of_run(buffer, config, 2) == rows
