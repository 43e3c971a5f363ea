"""The page about callbacks: its conf and its program run, and its commands work in order."""
import csv
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import warm_starts

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.runs.callbacks import Callback, TrainingRun
from alfx.trainers.policy_trainer import RLTrainer

TEXT = (Path(__file__).parents[3] / 'docs' / 'callbacks.md').read_text()
FILES = dict(re.findall(r'<!-- file: (\S+) -->\n```\w*\n(.*?)```', TEXT, re.DOTALL))
COMMANDS = [shlex.split(line)[1:] for line in TEXT.splitlines() if line.startswith('python -m')]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_callback_of_the_page_logs_and_stops(folder):
    short = ['TrainerConfig.num_env_steps = 4000', 'TrainerConfig.evaluate = True', 'TrainerConfig.num_evals = 1',
             'TrainerConfig.num_eval_episodes = 1', 'ParameterNorm.limit = 1.0']
    with gin_utils.loaded('callbacks_cart_pole.gin', short, 'run'):
        RLTrainer(TrainerConfig(root_dir='run')).train()
    with open('run/progress.csv') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1 and float(rows[0]['parameters/norm']) > 1.0  # stopped after the first iteration
    assert os.path.isdir('run/train/algorithm/best') and os.path.exists('run/episodes.csv')


def test_the_program_of_the_page_runs(folder):
    code = re.findall(r'```python\n(import alfx.*?)```', TEXT, re.DOTALL)
    assert len(code) == 1
    names: dict = {}
    exec(compile(code[0], 'callbacks.md', 'exec'), names)
    assert max(names['episodes'].returns) >= 8  # the shortest possible episode of CartPole


def test_the_tables_of_the_page_name_every_hook_and_member():
    hooks = [name for name in vars(Callback) if name.startswith('on_')]
    assert sorted(re.findall(r'^\| `(on_\w+)\(', TEXT, re.MULTILINE)) == sorted(hooks)
    rows = TEXT.partition('`run` has these members')[2].partition('Scalars are')[0].splitlines()
    named = set(re.findall(r'`(\w+)', ' '.join(row.split('|')[1] for row in rows if row.startswith('| `'))))
    members = {name for name in dir(TrainingRun('', None)) if not name.startswith('_')}
    assert named == members - {'logged', 'stop_reason', 'keeps_best', 'is_interrupted'}


@pytest.mark.slow
@pytest.mark.processes
def test_the_commands_work_one_after_the_other(folder):
    for command in COMMANDS:
        added = ['--num_episodes', '1'] if 'alfx.bin.evaluate' in command else []
        result = warm_starts.run([sys.executable, *command, *added], capture_output=True, text=True, timeout=300,
                                 env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert result.returncode == 0, f'{shlex.join(command)}\n{result.stdout}{result.stderr}'
    assert len(COMMANDS) == 3 and (folder / 'norm.png').stat().st_size
