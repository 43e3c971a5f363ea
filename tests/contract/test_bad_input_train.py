"""A run that cannot continue ends with one message and a non-zero exit code, and loses nothing."""
import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.bin import flags as conf_flags
from alfx.bin import train
from alfx.runs.run_files import read_table
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.checkpoint_utils import read_checkpoint

CONF = """
include 'ppo_cart_pole.gin'
create_environment.num_parallel_environments = 2
TrainerConfig.unroll_length = 4
TrainerConfig.num_updates_per_train_iter = 1
TrainerConfig.num_iterations = 4
TrainerConfig.num_env_steps = 0
TrainerConfig.num_checkpoints = 2
TrainerConfig.confirm_checkpoint_upon_crash = False
"""

ENVIRONMENTS = '''
import gymnasium
import numpy as np

class Faulty(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault, render_mode=None):
        self.fault, self.steps = fault, 0
        if fault == 'text':
            self.observation_space = gymnasium.spaces.Dict(image=gymnasium.spaces.Box(-1, 1, (3,)),
                                                           mission=gymnasium.spaces.Text(10))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == 'reset':
            raise RuntimeError('the simulator did not start')
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fault == 'step' and self.steps == 6:
            raise RuntimeError('the simulator fell over')
        if self.fault == 'exit' and self.steps == 6:
            raise SystemExit(0)
        reward = float('nan') if self.fault == 'nan' and self.steps > 8 else 0.0
        return np.zeros(3, np.float32), reward, False, False, {}

for fault in ('text', 'reset', 'step', 'nan', 'exit'):
    gymnasium.register(f'Faulty{fault.title()}-v0', Faulty, kwargs={'fault': fault})
'''


@pytest.fixture
def run_train(tmp_path, monkeypatch, capsys):
    """Run ``bin.train`` on the conf with lines added; return exit code and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'faulty_environments.py').write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')]))

    def run(added='', root_dir='run', conf='mine.gin', allow_unused=False):
        (tmp_path / 'mine.gin').write_text(CONF + added)
        with flag_values(train.PARSER, conf=conf, root_dir=str(root_dir), allow_unused=allow_unused):
            code = conf_flags.call(train.main, ['train'])
        gin_utils.clear()
        return code, capsys.readouterr().err

    return run


def checkpoints(root_dir='run'):
    return sorted((Path(root_dir) / 'train' / 'algorithm').glob('ckpt-[0-9]'))


def test_the_unmodified_conf_is_valid(run_train):
    assert run_train()[0] == 0
    assert len(checkpoints()) == 2


# fault -> (lines added, exit code, message)
FAULTS = {
    'unsupported space': ("create_environment.env_name = 'faulty_environments:FaultyText-v0'", 2,
                          ['mission', 'Text']),
    'raises in reset': ("create_environment.env_name = 'faulty_environments:FaultyReset-v0'", 1,
                        ['the simulator did not start', 'reset']),
    'raises in step': ("create_environment.env_name = 'faulty_environments:FaultyStep-v0'", 1,
                       ['the simulator fell over', 'step']),
    'ends the program': ("create_environment.env_name = 'faulty_environments:FaultyExit-v0'", 1,
                         ['failed in step(): it called sys.exit(0)', 'faulty_environments.py']),
    'ends a worker': ("create_environment.env_name = 'faulty_environments:FaultyExit-v0'\n"
                      'create_environment.nonparallel = False', 1, ['failed in step(): it called sys.exit(0)']),
    'raises in a worker': ("create_environment.env_name = 'faulty_environments:FaultyStep-v0'\n"
                           'create_environment.nonparallel = False', 1, ['the simulator fell over', 'step']),
    'nan loss': ('PPOLoss.td_loss_weight = 1e38', 1, ['NaN or infinite']),
    'nan reward': ("create_environment.env_name = 'faulty_environments:FaultyNan-v0'", 1,
                   ["environment 0 of 'FaultyNan-v0' failed in step()",
                    'the reward of step 9 of its episode is nan, expected a finite number']),
    'head for the other kind of action': (
        'ActorDistributionNetwork.discrete_projection_net_ctor = @NormalProjectionNetwork', 2,
        ['NormalProjectionNetwork', 'int64']),
    'transformer of a missing field': (
        "TrainerConfig.data_transformer_ctor = @ObservationNormalizer\nObservationNormalizer.fields = ['pixels']", 2,
        ['pixels']),
}


def test_an_unused_binding_ends_the_run_at_its_first_iteration(run_train):
    code, err = run_train('actr/Adam.lr = 1e-3\n')
    assert code == 2
    assert ('ConfError: mine.gin:10: this binding is never used: actr/Adam.lr = 0.001\n'
            "  Adam is not constructed in the scope 'actr': did you mean 'ppo/Adam'?") in err
    assert not list(Path('run', 'train', 'algorithm').glob('ckpt-*'))
    assert run_train('actr/Adam.lr = 1e-3\n', allow_unused=True)[0] == 0
    log = Path('run', 'train.log').read_text()
    assert 'this binding has not been used so far: actr/Adam.lr' in log and ' INFO done: ' in log


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_ends_the_run_with_its_reason(run_train, fault):
    added, exit_code, messages = FAULTS[fault]
    code, err = run_train(added + '\n')
    assert code == exit_code, err
    assert all(text in err for text in messages), err


def test_after_a_nan_loss_the_last_good_state_can_be_loaded(run_train):
    run_train(FAULTS['nan loss'][0])
    saved = read_checkpoint(str(checkpoints()[-1]))
    weights = [x for x in saved['alg'].values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert weights and all(torch.isfinite(x).all() for x in weights if x.ndim == 2)


def test_the_folder_of_another_conf_is_rejected_and_unchanged(run_train):
    run_train()
    before = [path.read_bytes() for path in checkpoints()]
    code, err = run_train('ValueNetwork.fc_layer_params = (32, )\n')
    assert code == 2 and 'ValueNetwork.fc_layer_params' in err
    assert [path.read_bytes() for path in checkpoints()] == before


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(run_train):
    run_train()
    newest = checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    code, _ = run_train('TrainerConfig.num_checkpoints = 2\n')
    assert code == 0
    log = Path('run', 'train.log').read_text()
    assert 'damaged' in log and newest.name in log


@pytest.mark.parametrize('damage', ['empty', 'truncated'])
def test_a_run_with_only_damaged_checkpoints_does_not_restart(run_train, damage):
    run_train()
    for path in checkpoints():
        path.write_bytes(b'' if damage == 'empty' else path.read_bytes()[:500])
    code, err = run_train()
    assert code == 1 and 'damaged' in err


def test_a_foreign_checkpoint_is_rejected_by_name(run_train):
    run_train()
    torch.save({'model': torch.zeros(3)}, checkpoints()[-1])
    code, err = run_train()
    assert code == 1 and 'not written by alfx' in err and 'ckpt-' in err


@pytest.mark.parametrize('root_dir', ['/proc/no_folder_can_be_made_here/run', 'a_file/run'])
def test_a_folder_that_cannot_be_written_is_named(run_train, root_dir, tmp_path):
    (tmp_path / 'a_file').write_text('')
    code, err = run_train(root_dir=root_dir)
    assert code == 2 and root_dir.split('/')[-2] in err


def test_a_full_disk_ends_the_run_and_keeps_existing_checkpoints(run_train, monkeypatch):
    run_train('TrainerConfig.num_iterations = 2\n')
    num_checkpoints = len(checkpoints())

    def full(_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, 'fsync', full)
        code, err = run_train()
    assert code == 1 and 'No space left on device' in err
    assert len(checkpoints()) == num_checkpoints
    assert run_train()[0] == 0


def test_a_missing_conf_names_the_nearest_one(run_train):
    code, err = run_train(conf='ppo_cart_pol')
    assert code == 2 and 'ppo_cart_pole' in err


def test_nothing_is_left_behind_by_a_conf_that_is_wrong(run_train, tmp_path):
    code, _ = run_train("PPOLoss.gama = 0.9\n")
    assert code == 2
    assert not (tmp_path / 'run').exists()


# fault -> (lines added, message); none of these is detected before environment and networks are created
FAILED_STARTS = {
    'a value out of range': ('TrainerConfig.mini_batch_size = -4\n', 'mini_batch_size'),
    'a misspelled environment': ("create_environment.env_name = 'CartPol-v1'\n", 'CartPol'),
    'a head for the other kind of action': (FAULTS['head for the other kind of action'][0] + '\n', 'Normal'),
}


@pytest.mark.parametrize('mistake', FAILED_STARTS)
def test_a_failed_start_leaves_nothing_and_the_corrected_conf_runs(run_train, tmp_path, mistake):
    added, message = FAILED_STARTS[mistake]
    code, err = run_train(added)
    assert code == 2 and message in err
    assert not (tmp_path / 'run').exists()
    assert run_train()[0] == 0


def test_a_run_that_ends_before_its_first_checkpoint_accepts_another_conf(run_train):
    code, _ = run_train(FAULTS['raises in step'][0])
    assert code == 1 and Path('run', 'conf', 'config.gin').exists() and not checkpoints()
    Path('run', 'conf', 'operative.gin').write_text('of the conf that failed')
    code, err = run_train('ValueNetwork.fc_layer_params = (32, )\n')
    assert code == 0, err
    assert 'FaultyStep' not in Path('run', 'conf', 'config.gin').read_text()
    assert 'fc_layer_params = (32' in Path('run', 'conf', 'operative.gin').read_text()


def test_a_failed_start_leaves_the_existing_run_unchanged(run_train):
    run_train()
    before = {path: path.read_bytes() for path in Path('run').rglob('*') if path.is_file()}
    code, _ = run_train('TrainerConfig.num_summaries = -1\n')
    assert code == 2
    assert {path: path.read_bytes() for path in Path('run').rglob('*') if path.is_file()} == before


def test_a_second_run_in_the_folder_is_rejected_and_changes_nothing(run_train):
    run_train()
    before = {path: path.read_bytes() for path in Path('run').rglob('*') if path.is_file()}
    with open(Path('run', 'train.lock'), 'r+', encoding='utf8') as other:  # as another process would
        fcntl.flock(other, fcntl.LOCK_EX)
        code, err = run_train('TrainerConfig.num_iterations = 8\n')
    assert code == 2 and 'another process is training in' in err
    assert {path: path.read_bytes() for path in Path('run').rglob('*') if path.is_file()} == before
    assert run_train('TrainerConfig.num_iterations = 8\n')[0] == 0


def test_a_run_with_damaged_metadata_resumes(run_train):
    run_train('TrainerConfig.num_iterations = 2\n')
    table = Path('run', 'progress.csv')
    table.write_bytes(table.read_bytes() + b'\xff\xfe,1\r\n')
    Path('run', 'train', 'start.json').write_text('[]')
    code, err = run_train()
    assert code == 0, err
    assert [row['iteration'] for row in read_table(str(table))] == ['0', '1', '2', '3']
    log = Path('run', 'train.log').read_text()
    assert 'progress.csv' in log and 'start.json is damaged' in log


@pytest.mark.parametrize('make, root_dir, message', [
    (lambda: None, 'x' * 300, 'File name too long'),
    (lambda: os.symlink('nowhere/at/all', 'dangling'), 'dangling', 'is a link to nowhere/at/all'),
    (lambda: os.symlink('looping', 'looping'), 'looping', 'is a link to looping'),
    (lambda: Path('file').write_text(''), 'file/sub', 'Not a directory'),
    (lambda: None, '/proc/nothing', '/proc/nothing'),
])
def test_an_uncreatable_run_folder_raises_with_a_remedy(run_train, make, root_dir, message):
    make()
    code, err = run_train(root_dir=root_dir)
    assert code == 2 and message in err and '--root_dir' in err and 'Traceback' not in err


def remove_during_training(folder):
    while os.path.exists(folder):  # the summary writer's thread may add a file in the meantime
        shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_removed_during_the_run_is_logged_once_and_gets_its_conf(run_train, monkeypatch):
    train_iter, iterations = RLTrainer._train_iter, []

    def removing(self):
        iterations.append(train_iter(self))
        if len(iterations) == 1:
            self._summary.writer.flush()
            remove_during_training('run')

    monkeypatch.setattr(RLTrainer, '_train_iter', removing)
    code, err = run_train('TrainerConfig.num_checkpoints = 4\n')
    assert code == 0 and err.count('was removed completely or in part') == 1
    conf = {path.name for path in Path('run', 'conf').iterdir()}
    assert {'config.gin', 'operative.gin', 'mine.gin', 'versions.json', 'command_line.txt'} <= conf
    assert Path('run', 'train', 'start.json').exists()
    assert run_train('TrainerConfig.num_checkpoints = 4\nTrainerConfig.num_iterations = 6\n')[0] == 0
    assert run_train('TrainerConfig.num_checkpoints = 4\nValueNetwork.fc_layer_params = (32, )\n')[0] == 2


def test_a_run_ends_if_another_run_took_over_its_removed_folder(
        run_train, monkeypatch):
    """End a run whose folder was removed and taken over by another run, and leave the files of that run unchanged."""
    train_iter, others = RLTrainer._train_iter, []

    def removing(self):
        train_iter(self)
        if not others:
            self._summary.writer.flush()
            remove_during_training('run')
            os.mkdir('run')
            others.append(open('run/train.lock', 'w'))
            fcntl.flock(others[0], fcntl.LOCK_EX)

    monkeypatch.setattr(RLTrainer, '_train_iter', removing)
    code, err = run_train('TrainerConfig.num_checkpoints = 4\nTrainerConfig.summary_interval = 1\n')
    others[0].close()
    assert code == 2 and 'another process is training in ' in err
    assert not Path('run', 'conf').exists() and not Path('run', 'progress.csv').exists()
    assert not list(Path('run', 'train', 'algorithm').glob('ckpt-*'))


def test_a_run_without_its_stored_conf_accepts_no_other_one(run_train):
    run_train()
    Path('run', 'conf', 'config.gin').unlink()
    code, err = run_train('ValueNetwork.fc_layer_params = (32, )\n')
    assert code == 2 and 'ValueNetwork.fc_layer_params' in err
    code, err = run_train('TrainerConfig.num_iterations = 6\n')
    assert code == 0, err
    shutil.rmtree(Path('run', 'conf'))
    code, err = run_train()
    assert code == 2 and 'conf/config.gin' in err and 'use another root_dir' in err


def test_a_conf_with_a_byte_order_mark_is_read_and_a_folder_is_rejected(run_train, tmp_path):
    """Read a conf that starts with the byte order mark of Windows editors; reject a folder as a conf."""
    (tmp_path / 'marked.gin').write_text(CONF, encoding='utf-8-sig')
    assert run_train(conf='marked.gin')[0] == 0
    (tmp_path / 'wide.gin').write_text(CONF, encoding='utf-16')
    code, err = run_train(conf='wide.gin')
    assert code == 2 and 'wide.gin: is not valid UTF-8' in err and 'save it as UTF-8' in err
    (tmp_path / 'confs').mkdir()
    (tmp_path / 'confs' / 'c.gin').write_text(CONF)
    code, err = run_train(conf='confs')
    assert code == 2 and "'confs' is a folder" in err and 'c.gin' in err
    code, err = run_train(conf='run')
    assert code == 2 and '--root_dir' in err


def test_a_missing_checkpoint_argument_is_reported_with_its_conf_line(run_train):
    code, err = run_train("ActorCriticAlgorithm.checkpoint = 'nowhere/ckpt-1'\n")
    line = CONF.count('\n') + 1
    assert code == 2 and f'mine.gin:{line}' in err and 'nowhere/ckpt-1' in err, err


def test_a_field_of_an_unnested_observation_is_reported(run_train):
    _, err = run_train(FAULTS['transformer of a missing field'][0] + '\n')
    assert 'is a single TensorSpec and has no fields' in err or 'is a single BoundedTensorSpec' in err, err


@pytest.mark.parametrize('settings, message', [
    ({'RANK': 'x', 'WORLD_SIZE': 'y'}, "environment variable WORLD_SIZE: expected a number, found 'y'"),
    ({'RANK': 'x', 'WORLD_SIZE': '2'}, "environment variable RANK: expected a number, found 'x'"),
    ({'RANK': '0', 'WORLD_SIZE': '2'}, 'not MASTER_ADDR and MASTER_PORT'),
])
def test_incomplete_rank_variables_raise_with_a_remedy(run_train, monkeypatch, settings, message):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    code, err = run_train()
    assert code == 2 and message in err and 'torchrun' in err
