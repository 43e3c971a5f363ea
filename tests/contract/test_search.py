"""``alfx.bin.search`` from the command line: its processes train, stop, are killed and resume."""
import csv
import glob
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import warm_starts

import alfx
from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.search import search_conf
from alfx.search.search_folder import SearchFolder
from alfx.search.seeds import run_seed
from alfx.trainers.conf_check import shorten
from alfx.trainers.policy_trainer import RLTrainer

pytestmark = pytest.mark.processes

pytest.importorskip('optuna')
ROOT = Path(alfx.__file__).parents[1]
SEARCHES = sorted((ROOT / 'alfx' / 'examples' / 'searches').glob('*.gin'))
FUNCTIONS = ROOT / 'tests' / 'unit' / 'search'
WAITING = """
import search_functions
Search.function = @bowl
Search.space = {{'bowl.x': 'uniform(-10, 10)', 'bowl.y': 'log_uniform(1e-6, 1)'}}
Search.num_trials = 2
Search.num_parallel = 2
bowl.journal = '{folder}/journal'
bowl.gate = '{folder}/gate'
"""
TRAINING = """
include 'ppo_cart_pole.gin'
TrainerConfig.num_env_steps = 2048
TrainerConfig.unroll_length = 32
TrainerConfig.evaluate = True
TrainerConfig.num_evals = 4
TrainerConfig.num_eval_episodes = 2
TrainerConfig.num_updates_per_train_iter = 1
Search.space = {'PPOLoss.gamma': [0.9, 0.99], 'TrainerConfig.mini_batch_size': [64, -1]}
Search.sampler = 'grid'
Search.give_up_after = 4
"""


def command(*arguments):
    return [sys.executable, '-m', 'alfx.bin.search', *arguments]


def environment():
    paths = [str(ROOT), str(FUNCTIONS), os.environ.get('PYTHONPATH', '')]
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}


def run(*arguments, seconds=240):
    return warm_starts.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=seconds)


def trial_starts(folder):
    """Return the calls that began according to the journal, with the id of the process."""
    journal = folder / 'journal'
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [line.split()[1:] for line in lines if line.startswith('begin')]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a zombie has ended, but no process has waited for it
    return ') Z ' not in Path(f'/proc/{pid}/stat').read_text()


def wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, 'nothing happened'
        time.sleep(0.05)


@pytest.mark.slow
def test_stopped_searches_leave_no_process_and_resume_the_same_trials(tmp_path):
    """Stopping or killing a search leaves no process behind; resuming it runs the same trials."""
    conf, root = tmp_path / 'waiting.gin', str(tmp_path / 'search')
    conf.write_text(WAITING.format(folder=tmp_path))
    pids = []

    def start(number, *arguments):
        process = warm_starts.Popen(command(*arguments, '--root_dir', root), env=environment(), text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        wait_until(lambda: len(trial_starts(tmp_path)) >= number or process.poll() is not None)
        pids.extend(int(call[-1]) for call in trial_starts(tmp_path))
        return process
    first = start(2, '--conf', str(conf))
    second = run('--root_dir', root)
    assert second.returncode == 2 and f'search is running in {root}: process {first.pid}' in second.stderr
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGINT and 'to resume: ' in output, output
    assert not any(is_alive(pid) for pid in pids)
    killed = start(4)
    killed.kill()
    killed.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 20)
    (tmp_path / 'gate').touch()
    last = run('--root_dir', root)
    assert last.returncode == 0 and 'resuming: 0 of 2 trials have ended, 2 were running' in last.stdout
    calls = sorted(call[:3] for call in trial_starts(tmp_path))
    assert calls == sorted(calls[::3] * 3), 'the same two trials three times'
    assert {call[2] for call in calls} == {str(run_seed(0, trial, 0)) for trial in range(2)}
    with open(f'{root}/results.csv', newline='') as file:
        assert [row['state'] for row in csv.DictReader(file)] == ['complete', 'complete']


@pytest.mark.slow
def test_a_search_survives_failed_trials_and_its_best_conf_trains(tmp_path):
    """Searching over training runs scores them, survives failures and yields a best conf that trains."""
    conf, root = tmp_path / 'training.gin', tmp_path / 'search'
    conf.write_text(TRAINING.replace('[64, -1]', '[64, 128]'))
    done = run('--conf', str(conf), '--root_dir', str(root), '--conf_param', 'Search.num_trials=2',
               '--conf_param', 'Search.num_parallel=2')
    assert done.returncode == 0, done.stderr
    with open(root / 'results.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['state'] for row in rows] == ['complete', 'complete']
    for trial, row in enumerate(rows):
        folder = root / 'trials' / f'{trial:04}' / 'seed_0'
        with open(folder / 'eval' / 'progress.csv', newline='') as file:
            evaluations = [float(line['average_return']) for line in csv.DictReader(file)]
        assert len(evaluations) >= 4 and float(row['value']) == evaluations[-1]
        text = (folder / 'conf' / 'operative.gin').read_text()
        assert f'random_seed = {run_seed(0, trial, 0)}' in text
        assert f"mini_batch_size = {row['TrainerConfig.mini_batch_size']}" in text
    best = max(rows, key=lambda row: float(row['value']))
    with gin_utils.loaded(str(root / 'best.gin')):
        config = TrainerConfig(root_dir=str(tmp_path / 'best'))
        assert config.mini_batch_size == int(best['TrainerConfig.mini_batch_size'])
        trainer = RLTrainer(config)
        shorten(config, 8)
        trainer.train()


def test_a_conf_that_is_wrong_ends_with_one_message(tmp_path):
    conf = tmp_path / 'wrong.gin'
    conf.write_text(TRAINING)
    done = run('--conf', str(conf), '--root_dir', str(tmp_path / 'search'))
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert re.search(r'wrong.gin:9: Search.space: TrainerConfig.mini_batch_size must be an int >= 1', done.stderr)


@pytest.mark.parametrize('path', SEARCHES, ids=lambda path: path.stem)
def test_a_shipped_search_has_no_errors_and_a_header_comment(path, tmp_path):
    search_conf.prepare(gin_utils.load(str(path)), SearchFolder(str(tmp_path)))
    head = path.read_text().split('\n\n')[0]
    assert re.search(r'#   task .*trials.*about .* on 2 cores', head) and re.search(r'#   expected +\S+', head)


def test_searches_exist():
    assert glob.glob(str(ROOT / 'alfx' / 'examples' / 'searches' / '*.gin'))
