"""Runs of shipped confs are reproducible and can be resumed, also with a replay buffer.

The confs of small tasks run for a few iterations, each with a small batch.
"""
import functools
import shutil

import pytest
import torch

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.engine.plan.backends import Replayed
from alfx.engine.plan.traced_plan import UpdateTask
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.checkpoint_utils import read_checkpoint

CONFS = [
    'ddpg_pendulum', 'dqn_cart_pole', 'dynamic_action_repeat_pendulum', 'mbpo_pendulum', 'mbrl_pendulum',
    'mdq_pendulum', 'mpo_cart_pole', 'mpo_pendulum', 'oac_pendulum', 'ppg_cart_pole', 'ppo_cart_pole',
    'ppo_cart_pole_rnn', 'ppo_pendulum', 'q_learning_frozen_lake', 'qrsac_pendulum', 'rainbow_cart_pole',
    'sac_cart_pole', 'sac_mixed_actions', 'sac_mountain_car_continuous', 'sac_pendulum', 'sarsa_pendulum',
    'taac_pendulum', 'taacl_pendulum', 'taacq_pendulum', 'td3_pendulum', 'td7_pendulum', 'trac_cart_pole'
]
ON_POLICY = ['q_learning_frozen_lake', 'trac_cart_pole']
STEP_BY_STEP = ['q_learning_frozen_lake', 'trac_cart_pole']
SMALL = [
    'TrainerConfig.random_seed = 3', 'TrainerConfig.num_iterations = 8', 'TrainerConfig.num_env_steps = 0',
    'TrainerConfig.num_updates_per_train_iter = 2', 'TrainerConfig.num_checkpoints = 2',
    'TrainerConfig.num_threads = 1', "TrainerConfig.float32_matmul_precision = 'highest'",
    'TrainerConfig.summary_interval = 4',
    'TrainerConfig.num_summaries = None'
]


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


@functools.cache
def conf_params(conf):
    """Return the overrides that make a run of ``conf`` short."""
    gin_utils.load(conf)
    config = TrainerConfig(root_dir='unused')
    unroll_length = min(max(int(config.unroll_length), 4), 8)
    params = [*SMALL, f'TrainerConfig.unroll_length = {unroll_length}', 'create_environment.nonparallel = True']
    if not config.trains_on_whole_unrolls:
        params.append('TrainerConfig.replay_buffer_length = 64')
    if config.mini_batch_size:
        params.append(f'TrainerConfig.mini_batch_size = {min(config.mini_batch_size, 8)}')
    if conf.startswith('ppg'):  # one phase before the checkpoint and one after it
        params += ['PPGAuxOptions.interval = 3', 'PPGAuxOptions.mini_batch_size = 16']
    if config.initial_collect_steps:
        params.append('TrainerConfig.initial_collect_steps = 10')
    gin_utils.clear()
    return params


def train(conf, root, overrides=()):
    """Train in the run folder ``root``, from its newest checkpoint if it has one; return the checkpointed state."""
    if not (root / 'conf').exists():
        gin_utils.write_conf(str(root), gin_utils.load(conf, [*conf_params(conf), *overrides]))
    else:
        gin_utils.load(conf, [*conf_params(conf), *overrides])
    RLTrainer(TrainerConfig(root_dir=str(root))).train()
    gin_utils.clear()
    return contents(newest(root))


def newest(root):
    return max(numbered(root), key=lambda path: int(path.name.removeprefix('ckpt-')))


def numbered(root):
    return [p for p in (root / 'train/algorithm').glob('ckpt-*') if p.name.removeprefix('ckpt-').isdigit()]


def contents(path):
    """Return the entries of the algorithm in a checkpoint, by path."""
    flat = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f'{name}.{key}')
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                walk(item, f'{name}.{i}')
        else:
            flat[name] = value

    walk(read_checkpoint(str(path))['alg'], 'alg')
    return flat


def differences(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not (torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else
                                       a[name] == b[name])]


@pytest.mark.parametrize('conf', CONFS)
def test_same_seed_same_parameters_also_when_replayed_and_when_resumed(conf, tmp_path, monkeypatch, warm_up, caplog):
    """Require bitwise equal parameters. Runs are slow, so the second run of the seed is also the replayed one."""
    recorded = []
    make = Replayed._make

    def make_and_record(backend, request):
        cached = make(backend, request)
        if isinstance(backend.task, UpdateTask):
            recorded.append(1)
        return cached

    monkeypatch.setattr(Replayed, '_make', make_and_record)
    first, second, resumed = tmp_path / 'first', tmp_path / 'second', tmp_path / 'resumed'
    warm_up(10**9)
    expected = train(conf, first)
    assert any('replay_buffer' in name for name in expected) != (conf in ON_POLICY)
    shutil.copytree(first, resumed)
    newest(resumed).unlink()
    for path in (resumed / 'train/algorithm').glob('*8*'):
        path.unlink()
    assert [p.name for p in numbered(resumed)] == ['ckpt-4']
    assert differences(expected, train(conf, resumed)) == [], 'the resumed run is another one'
    assert not recorded
    warm_up(3)
    assert differences(expected, train(conf, second)) == [], 'the second run is another one'
    assert bool(recorded) == (conf not in STEP_BY_STEP)
    assert 'its result would be different' not in caplog.text


def test_a_run_with_policy_checkpoints_can_be_resumed_within_an_episode(tmp_path):
    overrides = ['Td7Algorithm.policy_checkpoints = @PolicyCheckpoints()', 'PolicyCheckpoints.num_episodes = 2',
                 'TrainerConfig.unroll_length = 1', 'TrainerConfig.num_iterations = 44',
                 'TrainerConfig.summary_interval = 11', 'suite_gym.load.max_episode_steps = 5']
    first, resumed = tmp_path / 'first', tmp_path / 'resumed'
    expected = train('td7_pendulum', first, overrides)
    [progress] = [x.tolist() for name, x in expected.items() if name.endswith('_checkpoints._progress')]
    assert progress[6] < 0 and int(expected['alg._rl_algorithm._num_updates']) > 20
    shutil.copytree(first, resumed)
    newest(resumed).unlink()
    for path in (resumed / 'train/algorithm').glob('*44*'):
        path.unlink()
    assert [p.name for p in numbered(resumed)] == ['ckpt-22']
    assert differences(expected, train('td7_pendulum', resumed, overrides)) == []


@pytest.mark.parametrize('setting, at_start', [
    ('TrainerConfig.replay_checkpoint_megabytes = 0.001', 'replay_buffer will need 1 MiB'),
    ('ReplayBuffer.enable_checkpoint = False', 'ReplayBuffer.enable_checkpoint = False'),
    ('ReplayBuffer.enable_checkpoint = True', ''),
    ('ReplayBuffer.enable_checkpoint = None', ''),
])
def test_inexact_resumption_is_logged_at_the_start_and_on_resume(tmp_path, caplog, setting, at_start):
    params = [*conf_params('sac_pendulum'), setting]
    for iterations in (8, 16):
        caplog.clear()
        gin_utils.load('sac_pendulum', [*params, f'TrainerConfig.num_iterations = {iterations}'])
        RLTrainer(TrainerConfig(root_dir=str(tmp_path))).train()
        gin_utils.clear()
        assert ('saved in checkpoints' in caplog.text) == bool(at_start) and at_start in caplog.text
        assert ('was not in the checkpoint' in caplog.text) == (bool(at_start) and iterations == 16)
