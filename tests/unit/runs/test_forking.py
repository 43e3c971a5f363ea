"""A run that begins at a checkpoint of another one."""
import errno
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import warm_starts

import alfx
from alfx import gin_utils
from alfx.optimizers import AdamTF
from alfx.reports import comparing
from alfx.runs import forking
from alfx.runs import run_files
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError, read_checkpoint

SMALL = {'create_environment.num_parallel_environments': 2, 'TrainerConfig.num_iterations': 6,
         'TrainerConfig.num_env_steps': 0, 'TrainerConfig.unroll_length': 8, 'TrainerConfig.mini_batch_size': 8,
         'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.evaluate': False,
         'TrainerConfig.num_checkpoints': 3, 'TrainerConfig.summary_interval': 1, 'TrainerConfig.random_seed': 1}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    root_dir = str(tmp_path_factory.mktemp('branch') / 'run')
    alfx.train('ppo_cart_pole', SMALL, root_dir)
    return root_dir


def steps_of(root_dir):
    return Checkpointer(run_files.checkpoint_dir(root_dir)).steps()


def parameters(root_dir):
    path = os.path.join(run_files.checkpoint_dir(root_dir), f'ckpt-{steps_of(root_dir)[-1]}')
    return read_checkpoint(path)['alg']


def resume(root_dir, *params):
    warm_starts.run([sys.executable, '-m', 'alfx', 'train', root_dir,
                    *(part for param in params for part in ('--conf_param', param))], check=True, timeout=120)


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == 'f'))


def test_a_fork_without_changes_matches_the_run_bit_for_bit(run, tmp_path):
    first = steps_of(run)[1]  # replay buffers are kept with the latest two
    assert forking.branch(run, first, [], str(tmp_path / 'same')) == first
    assert forking.has_own_checkpoint(run) and not forking.has_own_checkpoint(str(tmp_path / 'same'))
    resume(str(tmp_path / 'same'))
    assert equal(parameters(str(tmp_path / 'same')), parameters(run))
    with pytest.raises(gin_utils.ConfError, match='random_seed is 2, but the run in .* has 1'):
        alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.random_seed': 2}, str(tmp_path / 'same'))
    returns = [alfx.read_progress(folder)['average_return'] for folder in (run, str(tmp_path / 'same'))]
    assert np.array_equal(*returns, equal_nan=True) and len(returns[0]) == 6


def test_a_changed_learning_rate_takes_effect_at_the_fork(run, tmp_path):
    slow = str(tmp_path / 'slow')
    forking.branch(run, steps_of(run)[0], ['ppo/Adam.lr = 0.0'], slow)
    before = parameters(slow)
    resume(slow, 'ppo/Adam.lr = 0.0')
    after = parameters(slow)
    weights = [key for key in before if key.endswith('weight')]
    assert weights and all(equal(before[key], after[key]) for key in weights)
    assert not all(equal(before[key], parameters(run)[key]) for key in weights)
    assert comparing.differences([comparing.read_bindings(folder) for folder in (run, slow)]) == [
        ('ppo/Adam.lr', [comparing.read_bindings(run)['ppo/Adam.lr'], '0.0'])]
    resume(slow)  # the run has ended; the stored conf has the change


def test_the_settings_of_a_fork_keep_the_step_count_of_adam_tf():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = AdamTF(lr=0.5)
    optimizer.add_param_group({'params': [parameter]})
    settings = forking.OptimizerSettings(SimpleNamespace(optimizers=lambda include_ignored_attributes: [optimizer]))
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[-1]['lr'] = 0.1
    settings.restore()
    assert (optimizer.param_groups[-1]['iterations'], optimizer.param_groups[-1]['lr']) == (1, 0.5)


def test_invalid_forks_are_rejected(run, tmp_path):
    with pytest.raises(gin_utils.ConfError, match='has no checkpoint 1234567\n  available: '):
        forking.branch(run, 1234567, [], str(tmp_path / 'new'))
    with pytest.raises(gin_utils.ConfError, match="did you mean 'lr'"):
        forking.branch(run, 'latest', ['ppo/Adam.lrr = 1'], str(tmp_path / 'new'))
    assert not (tmp_path / 'new').exists()
    with pytest.raises(gin_utils.ConfError, match='already exists'):
        forking.branch(run, 'latest', [], run)


def test_the_command_creates_the_folder_and_prints_how_to_start_it(run, tmp_path):
    done = warm_starts.run([sys.executable, '-m', 'alfx', 'fork', run, '--set', 'ppo/Adam.lr=1e-5', '--nostart',
                           '--root_dir', str(tmp_path / 'new')], capture_output=True, text=True, check=True, timeout=60)
    assert f'train --root_dir {tmp_path / "new"}' in done.stdout and 'ppo/Adam.lr=1e-5' in done.stdout
    assert forking.branched_at(str(tmp_path / 'new')) == steps_of(run)[-1]
    assert forking.branched_at(run) is None


def test_a_fork_has_the_tables_of_callbacks(run, tmp_path):
    copy = tmp_path / 'run'
    shutil.copytree(run, copy)
    (copy / 'episodes.csv').write_text('number,return\n1,9\n')
    forking.branch(str(copy), steps_of(copy)[0], [], str(tmp_path / 'fork'))
    assert (tmp_path / 'fork' / 'episodes.csv').read_text() == 'number,return\n1,9\n'


def test_a_fork_of_a_damaged_checkpoint_creates_nothing(run, tmp_path):
    shutil.copytree(run, tmp_path / 'run')
    path = Checkpointer(run_files.checkpoint_dir(str(tmp_path / 'run'))).path(steps_of(run)[-1])
    os.truncate(path, os.path.getsize(path) - 100)
    with pytest.raises(CheckpointError, match='is damaged'):
        forking.branch(str(tmp_path / 'run'), 'latest', [], str(tmp_path / 'fork'))
    assert os.listdir(tmp_path) == ['run']


@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, 'No space left on device'), KeyboardInterrupt()])
def test_a_fork_that_fails_halfway_leaves_no_folder(run, tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(shutil, 'copy2', fail)
    with pytest.raises(type(error)):
        forking.branch(run, 'latest', [], str(tmp_path / 'fork'))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize('text', ['', '{', '[]', '{"step": "3"}', '{"step": 1e999}', '{"step": -1}', 'caf\xe9'])
def test_a_damaged_record_of_a_fork_is_named(tmp_path, text):
    (tmp_path / 'train').mkdir()
    (tmp_path / 'train' / 'branch.json').write_bytes(text.encode('latin1'))
    with pytest.raises(gin_utils.ConfError, match='branch.json is damaged: .*expected .*, found'):
        forking.branched_at(str(tmp_path))


def test_an_untrusted_run_that_imports_modules_is_not_forked(run, tmp_path):
    shutil.copytree(run, tmp_path / 'run')
    for name in ('operative.gin', 'config.gin'):
        path = tmp_path / 'run' / 'conf' / name
        path.write_text('import this_module_is_not_imported\n' + path.read_text())
    with pytest.raises(gin_utils.ConfError, match='not allowed with --untrusted'):
        forking.branch(str(tmp_path / 'run'), 'latest', [], str(tmp_path / 'fork'), trusted=False)
    assert os.listdir(tmp_path) == ['run']


def test_a_fork_starts_from_the_best_checkpoint(run, tmp_path):
    source, fork = str(tmp_path / 'run'), str(tmp_path / 'fork')
    shutil.copytree(run, source)
    with pytest.raises(gin_utils.ConfError, match='has no best checkpoint\n.*KeepBestCheckpoint'):
        forking.branch(source, 'best', [], fork)
    first = steps_of(source)[0]
    os.makedirs(run_files.best_checkpoint_dir(source))
    shutil.move(os.path.join(run_files.checkpoint_dir(source), f'ckpt-{first}'), run_files.best_checkpoint_dir(source))
    assert forking.branch(source, 'best', [], fork) == first and steps_of(fork) == [first]
    resume(fork)
    assert steps_of(fork)[-1] == 6
