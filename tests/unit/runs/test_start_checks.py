"""Warnings at the start about sizes that are far too large."""
import importlib.util
import logging

import pytest
import torch
from helpers.trainer_fakes import WalkEnv, make_config

from alfx import TensorSpec, gin_utils
from alfx.config import TrainerConfig
from alfx.environments.utils import create_environment
from alfx.runs import start_checks
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.processes import num_cores


class LargeEnv(WalkEnv):

    def observation_spec(self):
        return {'video': TensorSpec((2**40, )), 'speed': TensorSpec(())}


@pytest.mark.parametrize('env, warned', [(LargeEnv(), True), (WalkEnv(), False)])
def test_observations_larger_than_memory_log_a_warning(tmp_path, caplog, env, warned):
    with caplog.at_level(logging.WARNING):
        start_checks.warn_of_unroll(env, make_config(tmp_path, unroll_length=8))
    assert ('TrainerConfig.unroll_length = 8 steps of 4 environments) need 131072 GiB' in caplog.text) is warned


@pytest.mark.parametrize('count, warned', [(num_cores(), False), (100 * num_cores(), True)])
def test_many_processes_per_core_log_a_warning(caplog, count, warned):
    start_checks.warn_of_processes(count, f'--num_processes={count}')
    assert (f'--num_processes={count}: {count} processes share' in caplog.text) is warned


def test_a_million_environments(caplog):
    create_environment('CartPole-v1', num_parallel_environments=1_000_000, only_described=True)
    assert 'num_parallel_environments = 1000000: creating so many environments is slow' in caplog.text


@pytest.mark.parametrize('size, warned', [(20, False), (21, True)])
def test_minibatches_larger_than_the_training_data_log_a_warning(tmp_path, caplog, size, warned):
    with caplog.at_level(logging.WARNING):
        start_checks.warn_of_mini_batch(4, make_config(tmp_path, unroll_length=10, mini_batch_length=2,
                                                        mini_batch_size=size))
    assert ('an unroll of 10 steps of 4 environments has only 20 sequences of 2 step(s)' in caplog.text) is warned


def test_samples_from_replay_may_be_of_any_size(tmp_path, caplog):
    start_checks.warn_of_mini_batch(4, make_config(tmp_path, mini_batch_size=1000, whole_replay_buffer_training=False,
                                            clear_replay_buffer=False, mini_batch_length=2))
    assert not caplog.text


BEGINNING = """
create_environment.num_parallel_environments = 1
create_environment.nonparallel = True
TrainerConfig.unroll_length = 4
TrainerConfig.num_env_steps = 4
TrainerConfig.num_threads = 1
"""


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that builds the trainer of a conf from its text."""

    def make(text):
        (tmp_path / 'mine.gin').write_text(text + BEGINNING)
        gin_utils.load(str(tmp_path / 'mine.gin'))
        return RLTrainer(TrainerConfig(root_dir=str(tmp_path / 'run')))

    yield make
    gin_utils.clear()


def test_a_conf_without_an_environment_is_an_error(make_trainer):
    with pytest.raises(gin_utils.ConfError, match='create_environment.env_name is not set'):
        make_trainer("include 'ppo.gin'")


def test_the_start_names_task_algorithm_parameters_and_device(make_trainer, capsys):
    trainer = make_trainer("include 'ppo.gin'\ncreate_environment.env_name = 'Acrobot-v1'")
    count = sum(parameter.numel() for parameter in trainer.algorithm.parameters())
    assert capsys.readouterr().err.startswith(f'Acrobot-v1, PPOAlgorithm, {count} parameters, cpu\n')


@pytest.mark.parametrize('algorithm, binding, warned', [
    ('ppo', '', {'ActorDistributionNetwork.fc_layer_params', 'ValueNetwork.fc_layer_params'}),
    ('ppo', 'ValueNetwork.fc_layer_params = (8, )', {'ActorDistributionNetwork.fc_layer_params'}),
    ('ppo', 'ValueNetwork.fc_layer_params = ()\nActorDistributionNetwork.fc_layer_params = None', set()),
    ('dqn', '', {'QNetwork.fc_layer_params'}),
    ('sac', "create_environment.env_name = 'Pendulum-v1'",
     {'ActorDistributionNetwork.fc_layer_params', 'CriticNetwork.joint_fc_layer_params'}),
])
def test_networks_without_layers_log_a_warning(make_trainer, caplog, algorithm, binding, warned):
    make_trainer(f"include '{algorithm}.gin'\ncreate_environment.env_name = 'Acrobot-v1'\n{binding}")
    assert {line.split()[0] for line in caplog.messages if 'so the network is linear' in line} == warned


@pytest.mark.parametrize('value, shown', [("'CartPole-v1'", 'CartPole-v1, '), ('%task', 'Pendulum-v1, '),
                                          ("[%task, 'CartPole-v1']", 'Pendulum-v1, CartPole-v1, ')])
def test_the_first_line_of_a_run_names_the_tasks_also_of_macros(tmp_path, value, shown):
    conf = tmp_path / 'conf.gin'
    conf.write_text(f"task = 'Pendulum-v1'\ncreate_environment.env_name = {value}\n")
    with gin_utils.loaded(str(conf)):
        create_environment(env_load_fn=lambda *args, **kwargs: WalkEnv(), num_parallel_environments=1, nonparallel=True)
        line = start_checks.describe_run(torch.nn.Linear(2, 3), True)
    assert line == f'{shown}Linear, 9 parameters, cpu'


@pytest.mark.parametrize('conf, logged', [('ac_cart_pole', {'mini_batch_size', 'num_updates_per_train_iter'}),
                                          ('dqn_cart_pole', set())])
def test_settings_of_replay_of_an_algorithm_without_replay_are_logged(make_trainer, caplog, conf, logged):
    caplog.set_level(logging.INFO, 'alfx')
    make_trainer(f"include '{conf}.gin'\nTrainerConfig.mini_batch_size = 64\n"
                 'TrainerConfig.num_updates_per_train_iter = 2')
    message = ' is not used: ActorCriticAlgorithm is on-policy and trains on each unroll once'
    assert {line.removesuffix(message).rpartition('.')[2] for line in caplog.messages if message in line} == logged


def test_a_missing_package_of_a_logger_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    for name, package in (('wandb', 'wandb'), ('mlflow', 'mlflow-skinny')):
        with pytest.raises(gin_utils.ConfError, match=rf"(?s)'{name}' needs a package.*pip install '?{package}>=\S+$"):
            start_checks.check_loggers(['tensorboard', name])
    start_checks.check_loggers(['tensorboard'])
