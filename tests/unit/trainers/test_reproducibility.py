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
