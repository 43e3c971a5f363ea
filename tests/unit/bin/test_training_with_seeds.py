"""Training with several seeds: the runs, their summary, failures, resuming, and contradicting flags."""
import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import warm_starts
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.bin import seeds
from alfx.bin import train as train_program
from alfx.runs import run_files

CONF = '''
include 'ppo_cart_pole.gin'
create_environment.num_parallel_environments = 2
TrainerConfig.unroll_length = 64
TrainerConfig.mini_batch_size = 64
TrainerConfig.num_updates_per_train_iter = 1
TrainerConfig.num_env_steps = 400
'''


def alfx(*arguments, code=0):
    result = warm_starts.run([sys.executable, '-m', 'alfx', 'train', *map(str, arguments)], capture_output=True,
                             text=True, timeout=300)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


@pytest.mark.processes
def test_each_seed_has_a_run_folder_and_their_mean_is_printed(tmp_path):
    (tmp_path / 'short.gin').write_text(CONF)
    root_dir = tmp_path / 'runs'
    output = alfx(tmp_path / 'short.gin', '--root-dir', root_dir, '--seeds', '3,4')
    assert {number: run_files.StartRecord(str(root_dir / f'seed-{number}')).read()['random_seed'] for number in (3, 4)
            } == {3: 3, 4: 4}
    one, two = (float(re.search(rf'seed {number}: done, training return (\S+)', output)[1]) for number in (3, 4))
    summary = re.search(r'2 seeds: training return (\S+) .*interval (\S+) to (\S+)\)', output)
    mean, low, high = map(float, summary.groups())
    assert mean == pytest.approx((one + two) / 2, rel=1e-3) and low == min(one, two) and high == max(one, two)
    # The same command with another end resumes both runs; a setting that cannot change fails in both.
    output = alfx(root_dir / 'seed-3', 'TrainerConfig.num_env_steps=600')
    assert 'done: 5 iterations' in output
    output = alfx(tmp_path / 'short.gin', '--root-dir', root_dir, '--seeds', '3,4', 'PPOLoss.gamma=0.5', code=2)
    for number in (3, 4):
        log = root_dir / 'logs' / f'seed-{number}.log'
        assert f'seed {number}: ended with exit code 2; see {log}' in output and 'PPOLoss.gamma' in log.read_text()
    assert '2 seeds' not in output and re.search(rf'^to resume: .*--root_dir {root_dir}$', output, re.MULTILINE)


@pytest.mark.parametrize('flags, message', [
    (dict(seeds=[1, 1]), 'expected different numbers, found 1,1'),
    (dict(seeds=[1, 2], seed=3), '--seeds and --seed cannot be combined'),
])
def test_contradicting_seeds_are_rejected(tmp_path, flags, message):
    with flag_values(train_program.PARSER, **flags), pytest.raises(gin_utils.ConfError, match=message):
        seeds.train(str(tmp_path / 'runs'))
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('found', ['x', '-2', '1.5', '4294967296', ''])
def test_seeds_that_are_no_seeds_are_rejected_by_the_command_line(found, capsys):
    with pytest.raises(SystemExit, match='2'):
        train_program.PARSER.read([f'--seeds=1,{found},2'])
    assert f'seeds: expected int in [0, 4294967295], found {found!r}' in capsys.readouterr().err
    assert train_program.PARSER.read(['--seeds=0,4294967295']).seeds == [0, 2**32 - 1]


@pytest.mark.parametrize('number, started', [(signal.SIGUSR1, 2), (signal.SIGTERM, 0)])
def test_a_request_for_a_checkpoint_does_not_stop_waiting_seeds(tmp_path, monkeypatch, number, started):
    runs = []

    def start(*_):
        runs.append(subprocess.Popen([sys.executable, '-c', '']))
        return runs[-1]

    monkeypatch.setattr(seeds, '_start', start)
    monkeypatch.setattr(seeds.launch, 'forwarded_signals', lambda runs: contextlib.nullcontext([number]))
    with flag_values(train_program.PARSER, seeds=[1, 2]):
        seeds.train(str(tmp_path / 'runs'))
    assert len(runs) == started


def test_offline_runs_are_summarized_by_their_evaluations(tmp_path, monkeypatch, capsys):
    for number in (1, 2):
        folder = tmp_path / 'runs' / f'seed-{number}'
        (folder / 'eval').mkdir(parents=True)
        (folder / 'progress.csv').write_text('iteration,global_counter,seconds\n9,10,1.0\n')
        (folder / 'eval' / 'progress.csv').write_text(f'iteration,global_counter,average_return\n9,10,{number}00.0\n')
    monkeypatch.setattr(seeds, '_start', lambda *_: subprocess.Popen([sys.executable, '-c', '']))
    with flag_values(train_program.PARSER, seeds=[1, 2]):
        seeds.train(str(tmp_path / 'runs'))
    output = capsys.readouterr().out
    assert 'seed 1: done, return in evaluation 100' in output and '2 seeds: return in evaluation 150' in output


def test_a_seed_is_a_binding_of_the_conf():
    with flag_values(train_program.PARSER, seed=7, conf_param=['TrainerConfig.num_env_steps=1']):
        seeds.apply_seed()
        assert seeds.FLAGS.conf_param == ['TrainerConfig.num_env_steps=1', 'TrainerConfig.random_seed=7']


def test_a_run_folder_is_not_changed_by_seeds(tmp_path):
    (tmp_path / 'conf').mkdir()
    with flag_values(train_program.PARSER, seeds=[1, 2]), pytest.raises(gin_utils.ConfError, match='a single run'):
        seeds.train(str(tmp_path))
    assert os.listdir(tmp_path) == ['conf']
