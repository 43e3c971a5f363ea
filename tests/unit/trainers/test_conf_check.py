"""Parts of the report of ``bin.check`` about a conf."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardClipping, create_data_transformer
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.trainers import conf_check


class Holder(nn.Module):
    """A module with a trained part, a target copy of it, and an alias of the trained part."""

    def __init__(self, *optimizers):
        super().__init__()
        self.online = nn.Linear(3, 2)
        self.target = nn.Linear(3, 2, bias=False)
        self.alias = self.online
        self._optimizers = [optimizer(self.online.parameters()) for optimizer in optimizers]

    def optimizers(self, include_ignored_attributes):
        return self._optimizers


def test_each_parameter_is_listed_with_its_optimizer():
    lines = conf_check.parameter_lines(Holder(torch.optim.SGD))
    assert lines == [
        'parameters: 14, of which 8 are trained',
        'Holder, 14 parameters',
        '  online: Linear, 8 parameters',
        '    weight [2, 3] <- SGD',
        '    bias [2] <- SGD',
        '  target: Linear, 6 parameters',
        '    weight [2, 3] <- no optimizer',
    ]


def test_optimizers_of_one_name_are_numbered():
    holder = Holder(torch.optim.SGD)
    holder._optimizers.append(torch.optim.SGD(holder.target.parameters()))
    lines = conf_check.parameter_lines(holder)
    assert '    bias [2] <- SGD (1)' in lines and lines[-1] == '    weight [2, 3] <- SGD (2)'


def test_specs_are_listed_by_path_with_bounds():
    spec = {'camera': BoundedTensorSpec((3, 8, 8), torch.uint8, 0, 255), 'joints': TensorSpec((7,)),
            'speed': BoundedTensorSpec((2,), torch.float32, np.array([-1, -2]), np.array([1, 3]))}
    assert conf_check.nested_spec_lines('observation', spec) == [
        'observation:', '  camera: uint8 [3, 8, 8] in [0, 255]', '  joints: float32 [7]',
        '  speed: float32 [2] in [-2, 3]']
    assert conf_check.nested_spec_lines('reward', TensorSpec(())) == ['reward: float32 []']
    assert conf_check.nested_spec_lines('info', ()) == ['info: none']


def test_replay_buffer_memory_is_the_sum_of_its_leaves():
    spec = (TensorSpec((84, 84), torch.uint8), TensorSpec((3,)), TensorSpec((), torch.int64))
    # 84 * 84 + 3 * 4 + 8 bytes a step
    assert conf_check.replay_bytes(spec, 8, 1000) == (7056 + 12 + 8) * 8000


@pytest.mark.parametrize('initial, unroll_length, length, iterations, collected', [
    (0, 32, None, 1, 0),           # nothing to wait for
    (0, 1, 2, 4, 0),               # samples need two steps
    (10000, 1, 2, 4, 3 * 4),       # sequences of 2 in 4 environments
    (10000, 8, 4, 2, 5 * 4),
    (5, 0.5, 2, 7, 5),             # the conf itself requires less
])
def test_a_run_is_shortened_to_its_first_update(initial, unroll_length, length, iterations, collected):
    config = TrainerConfig('run', algorithm_ctor=SimpleNamespace, num_env_steps=10**6,
                           initial_collect_steps=initial, unroll_length=unroll_length, mini_batch_length=length)
    conf_check.shorten(config, 4)
    assert (config.num_iterations, config.num_env_steps, config.initial_collect_steps) == (iterations, 0, collected)
    assert not config.async_eval


@pytest.mark.parametrize('samples, unroll_length, updates', [(True, 30, 2), (False, 500, 40)])
def test_an_unroll_is_shortened_if_samples_of_it_are_trained_on(samples, unroll_length, updates):
    config = TrainerConfig('run', algorithm_ctor=SimpleNamespace, initial_collect_steps=10000, unroll_length=500,
                           mini_batch_length=2, whole_replay_buffer_training=not samples,
                           clear_replay_buffer=not samples, num_updates_per_train_iter=40)
    conf_check.shorten(config, 38)
    assert (config.unroll_length, config.num_updates_per_train_iter) == (unroll_length, updates)
    assert (config.num_iterations, config.initial_collect_steps) == (2, 3 * 38)


@pytest.mark.parametrize('ctors, line', [
    (None, 'none'), (ObservationNormalizer, 'ObservationNormalizer'),
    ([ObservationNormalizer, RewardClipping], 'ObservationNormalizer, RewardClipping')])
def test_data_transformers_are_listed_in_order(ctors, line):
    transformer = create_data_transformer(ctors, TensorSpec((3, )))
    assert conf_check.transformer_line(transformer) == f'data transformers: {line}'


def test_a_check_does_not_report_that_states_cannot_be_verified(tmp_path, caplog):
    (tmp_path / 'checked_env.py').write_text(
        'import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n\n\n'
        "class Own(CartPoleEnv):\n    pass\n\n\ngymnasium.register('Checked-v0', Own, max_episode_steps=20)\n")
    conf = tmp_path / 'c.gin'
    conf.write_text("include 'ppo_cart_pole.gin'\nimport checked_env\ncreate_environment.env_name = 'Checked-v0'\n")
    caplog.set_level(logging.INFO)
    with gin_utils.loaded(str(conf)):
        lines = list(conf_check.check(str(tmp_path / 'run')))
    assert any(line.startswith('data transformers: ') for line in lines) and 'random seed' in caplog.text
    assert 'cannot be saved' not in caplog.text


def test_a_network_that_the_algorithm_does_not_create_is_a_mistake(tmp_path):
    conf = tmp_path / 'sac_cart_pole.gin'  # with discrete actions SAC has a QNetwork only
    conf.write_text("include 'sac_continuous.gin'\ncreate_environment.env_name = 'CartPole-v1'\n"
                    'QNetwork.fc_layer_params = (8, )\nCriticNetwork.joint_fc_layer_params = (8, )\n'
                    'ActorDistributionNetwork.fc_layer_params = (8, )\nTrainerConfig.num_env_steps = 100\n'
                    'TrainerConfig.replay_buffer_length = 100\ncreate_environment.num_parallel_environments = 2\n')
    gin_utils.load(str(conf), allow_unused=True)
    list(conf_check.check(str(tmp_path / 'run')))
    result = conf_check.unused()
    assert [text.partition(': ')[2] for text in result.mistakes] == [
        'CriticNetwork.joint_fc_layer_params = (8,)\n  CriticNetwork is never constructed',
        'ActorDistributionNetwork.fc_layer_params = (8,)\n  ActorDistributionNetwork is never constructed']
    assert str(result).endswith('\n2 unused bindings')
