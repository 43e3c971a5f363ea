"""Invalid datasets and settings are reported before the first update.

One message names the location, the expected and the found value, and a remedy. The descriptions of each kind of invalid
number are tested in tests/unit/offline; here whole runs encounter them.
"""
import glob
import json
import os
import shutil

import numpy as np
import pytest
import torch

from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.gin_utils import ConfError
from alfx.offline import dataset_folder
from alfx.offline.dataset_episodes import Episodes
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.checkpoint_utils import read_checkpoint

DATA = os.path.join('data', 'pendulum', 'replay')
SMALL = ('TrainerConfig.num_updates_per_train_iter = 2', 'TrainerConfig.mini_batch_size = 8',
         'TrainerConfig.random_seed = 7', 'TrainerConfig.num_threads = 1', 'TrainerConfig.num_iterations = 2')


@pytest.fixture(autouse=True)
def in_separate_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    gin_utils.clear()


def episodes(**changes):
    """Return two episodes with the shapes of Pendulum."""
    data = Episodes({'': np.zeros((22, 3), np.float32)}, {'': np.zeros((20, 1), np.float32)}, np.zeros(20, np.float32),
                    np.ones(20, np.float32), np.array([12, 8]))
    return data._replace(**changes)


def write(path=DATA, metadata=(), **changes):
    dataset_folder.write(path, episodes(**changes), dict(metadata), overwrite=True)


def with_nan(where):
    array = np.zeros((22, 3), np.float32)
    array[where] = np.nan
    return {'': array}


def start(conf, *params):
    """Start a run, up to its first iteration."""
    context.reset()
    with gin_utils.loaded(conf, [*SMALL, *params], 'run') as loaded:
        return RLTrainer(TrainerConfig(root_dir='run', conf_file=loaded.conf_file))


def damage(pattern, contents=None):
    """Cut a file of the dataset in half, or replace its contents."""
    write()
    path, = glob.glob(os.path.join(DATA, pattern))
    with open(path, 'rb') as file:
        old = file.read()
    with open(path, 'wb') as file:
        file.write(old[:len(old) // 2] if contents is None else contents)


def flip():
    write()
    path, = glob.glob(os.path.join(DATA, 'alfx-data-*', 'action.npy'))
    with open(path, 'r+b') as file:
        file.seek(-1, os.SEEK_END)
        file.write(b'\x01')


def leave_incomplete_files():
    write()
    os.remove(os.path.join(DATA, dataset_folder.MANIFEST))


def write_with_another_version():
    write()
    path = os.path.join(DATA, dataset_folder.MANIFEST)
    with open(path) as file:
        manifest = json.load(file)
    with open(path, 'w') as file:
        json.dump({**manifest, 'version': 99}, file)


def write_same_lengths_to_another_dataset():
    """Write a manifest whose episode lengths differ from those of the arrays."""
    write(observation={'': np.zeros((20, 3), np.float32)})


CASES = {
    'no such folder': (lambda: write('data/pendulum/reply'), (),
                       f'{DATA}: there is no such folder; datasets in .*: reply.*record one with python -m'),
    'cut off': (lambda: damage('alfx-data-*/observation.npy'), (),
                'observation.npy: cannot be read.*record the dataset'),
    'no JSON': (lambda: damage('dataset.json'), (), 'dataset.json: is damaged.*record the dataset again'),
    'killed writer': (leave_incomplete_files, (), 'contains no dataset.json: it is not a dataset, or recording was'),
    'unknown version': (write_with_another_version, (), 'dataset.json: expected format .*found .*99'),
    'a flipped bit': (flip, (), 'action.npy: its contents have changed since it was written: .* SHA-256 .*, found'),
    'other observations': (lambda: write(observation={'': np.zeros((22, 4), np.float32)}), (),
                           r'observation: expected shape \(3,\), found \(4,\).*choose the environment'),
    'other names': (lambda: write(observation={'arm': np.zeros((22, 3), np.float32)}), (),
                    'observation.arm: expected nothing, found float32'),
    'other actions': (lambda: write(action={'': np.zeros(20, np.int64)}), (),
                      r'action: expected shape \(1,\), found \(\)'),
    'no final observations': (write_same_lengths_to_another_dataset, (),
                              r'observation: expected 22 rows.*found.*20.*T \+ 1 observations'),
    'not as many as said': (lambda: write(lengths=np.array([12, 9])), (), 'reward: expected 21 rows, for 2 episodes'),
    'an empty episode': (lambda: write(lengths=np.array([20, 0])), (), 'episode 1 has 0 actions'),
    'no number': (lambda: write(observation=with_nan(15)), (),
                  'observation: NaN or infinite in episode 1, step 2.*remove that episode'),
    'out of bounds': (lambda: write(action={'': np.full((20, 1), 1.5, np.float32)}), (),
                      'action: 20 of 20 are out of bounds, by up to 0.5; expected -1 to 1.*other bounds'),
    'whole numbers': (lambda: write(observation={'': np.zeros((22, 3), np.int64)}), (),
                      'observation: expected float32, found int64'),
    'two rewards': (lambda: write(reward=np.zeros((20, 2), np.float32)), (),
                    r'reward: expected one number a step, found an array of shape \(2,\)'),
    'long sequences': (write, ('TrainerConfig.mini_batch_length = 14', ),
                       'longest episode has 13 steps.*mini_batch_length = 14.*use shorter sequences'),
    'little is loaded': (write, ('TrainerConfig.offline_buffer_length = 3', 'TrainerConfig.mini_batch_length = 4'),
                         'longest episode has 3 steps.*offline_buffer_length'),
    'nothing is loaded': (write, ('TrainerConfig.offline_buffer_length = 1', ), 'offline_buffer_length = 1.*2 or more'),
}


@pytest.mark.parametrize('case', CASES)
def test_unusable_data_raises(case):
    prepare, params, message = CASES[case]
    prepare()
    with pytest.raises(ConfError, match=f'(?s){message}') as caught:
        start('iql_pendulum', *params)
    assert 'data/pendulum' in str(caught.value) or 'TrainerConfig' in str(caught.value)
    assert not glob.glob('run/train/algorithm/ckpt-*')


CART_POLE = "create_environment.env_name = 'CartPole-v1'"
ALGORITHMS = {
    'cloning discrete actions by a network of continuous ones': (
        'bc_pendulum', (CART_POLE, ), 'BcAlgorithm.actor_network_cls = .*discrete.*set it to @ActorDistribution'),
    'IQL of discrete actions': ('iql_pendulum', (CART_POLE, ), 'discrete.*IqlAlgorithm supports only continuous'),
    'CQL of discrete actions': ('cql_pendulum', (CART_POLE, ), 'discrete.*use DiscreteCqlAlgorithm'),
    'discrete CQL of continuous actions': (
        'cql_cart_pole', ("create_environment.env_name = 'Pendulum-v1'", ),
        'expected one discrete action.*Td3Algorithm'),
    'TD3+BC of discrete actions': ('td3_bc_pendulum', (CART_POLE, ), '(?i)discrete|continuous'),
    'a policy without a distribution in AWAC': (
        'awac_pendulum', ('AwacAlgorithm.actor_network_cls = @ActorNetwork', ), 'actor_network_cls'),
    'a policy without a distribution in CQL': (
        'cql_pendulum', ('CqlAlgorithm.actor_network_cls = @ActorNetwork', ), 'actor_network_cls'),
    'a policy without a distribution in IQL': (
        'iql_pendulum', ('IqlAlgorithm.actor_network_cls = @ActorNetwork', ), 'actor_network_cls'),
}


@pytest.mark.parametrize('case', ALGORITHMS)
def test_an_algorithm_unsuitable_for_the_environment_raises(case):
    conf, params, message = ALGORITHMS[case]
    for level in ('expert', 'replay', 'tcn'):
        write(f'data/pendulum/{level}')
    write('data/cart_pole/replay')
    with pytest.raises((ConfError, ValueError), match=f'(?s){message}') as caught:
        start(conf, *params).train()
    assert gin_utils.is_explained(caught.value) or isinstance(caught.value, ConfError)


def test_causal_cloning_of_single_steps_trains_on_pairs():
    write('data/pendulum/tcn')
    trainer = start('causal_bc_pendulum', 'TrainerConfig.mini_batch_length = 1')
    trainer.train()
    assert trainer._config.mini_batch_length == 2 and trainer.current_iterations() > 0


def test_data_without_a_digest_logs_a_warning(caplog):
    """Log a warning for episodes from a file of ALF, which has no digest."""
    from alfx.data_structures import StepType
    step_type = torch.full((1, 30), int(StepType.MID))
    step_type[:, 0], step_type[:, 29] = int(StepType.FIRST), int(StepType.LAST)
    torch.save({f'_replay_buffer.{name}': x for name, x in {
        '_current_size': torch.tensor([30]), '_current_pos': torch.tensor([30]), 'time_step|step_type': step_type,
        'time_step|reward': torch.zeros(1, 30), 'time_step|discount': torch.ones(1, 30),
        'time_step|observation': torch.zeros(1, 30, 3),
        'time_step|prev_action': torch.zeros(1, 30, 1)}.items()}, 'file')
    with caplog.at_level('WARNING'):
        start('iql_pendulum', "TrainerConfig.offline_buffer_dir = 'file'").train()
    assert 'file: there is no digest to verify its contents with' in caplog.text


@pytest.mark.parametrize('value', [[3.0, 1.0], None])
def test_without_reference_returns_the_score_is_missing_with_a_reason(value, caplog):
    write(metadata={} if value is None else {'reference_returns': value})
    with caplog.at_level('INFO'):
        start('iql_pendulum')
    assert 'no normalized score' in caplog.text and ('3.0, 1.0' in caplog.text) == (value is not None)
    assert 'none: all were truncated' in caplog.text


def test_missing_data_stops_a_resumed_run_but_no_policy(tmp_path):
    write()
    start('iql_pendulum').train()
    shutil.move('data', 'gone')
    with pytest.raises(ConfError, match=f'(?s){DATA}: there is no such folder'):
        start('iql_pendulum', 'TrainerConfig.num_iterations = 3')


def test_training_only_reads_a_dataset():
    """Train on a dataset without creating, changing or opening for writing any file in its folder.

    The disk of a dataset may be read-only.
    """
    def times():
        found = {path: os.stat(path) for path in glob.glob(f'{DATA}/**', recursive=True)}
        return {path: (x.st_mtime_ns, x.st_ctime_ns) for path, x in found.items()}

    write()
    for path in times():
        os.chmod(path, 0o555)
    before = times()
    start('iql_pendulum').train()
    assert times() == before


def test_a_nan_loss_in_pretraining_keeps_the_previous_state(monkeypatch):
    """Keep the previous state if rewards are finite but their squares are not."""
    reward = np.zeros(20, np.float32)
    reward[:] = 3e38
    write(reward=reward)
    trainer = start('iql_finetune_pendulum', "TrainerConfig.offline_buffer_dir = 'data/pendulum/replay'",
                    'RewardScaling.scale = 1.0', 'TrainerConfig.rl_train_after_update_steps = 100')
    before = {name: p.detach().clone() for name, p in trainer.algorithm.named_parameters()}
    with pytest.raises(NonFiniteLossError, match='(?s)critic'):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in before.values())
    saved = read_checkpoint('run/train/algorithm/ckpt-1')['alg']
    for name, value in before.items():
        assert torch.equal(saved[name], value), name
