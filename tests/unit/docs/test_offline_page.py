"""The commands on the page about datasets work in order, with shortened runs."""
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import warm_starts

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[3] / 'docs' / 'offline.md'
SHORT = {'train': ['TrainerConfig.num_updates_per_train_iter=2', 'TrainerConfig.random_seed=1'],
         'sac_pendulum': ['TrainerConfig.num_env_steps=800', 'TrainerConfig.initial_collect_steps=300'],
         'bc_pendulum': ['TrainerConfig.num_iterations=3'], 'iql_pendulum': ['TrainerConfig.num_iterations=3'],
         'iql_finetune_pendulum': ['TrainerConfig.num_iterations=4', 'TrainerConfig.rl_train_after_update_steps=4'],
         'gail_pendulum': ['TrainerConfig.num_env_steps=800', 'TrainerConfig.initial_collect_steps=300']}


def commands():
    """Return the commands of the page as lists of arguments of Python."""
    blocks = re.findall(r'^```\n(.*?)^```', PAGE.read_text(), re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith('python -m')]
    return [shlex.split(line)[1:] for line in lines]


def shortened(command):
    program = command[1].removeprefix('alfx.bin.')
    conf = command[command.index('--conf') + 1] if '--conf' in command else ''
    params = SHORT['train'] + SHORT[conf] if program == 'train' else []
    added = [part for param in params for part in ('--conf_param', param)]
    return [*command, *added, *{'record': ['--num_steps', '300'], 'evaluate': ['--num_episodes', '1']}.get(program, [])]


@pytest.mark.slow
def test_the_commands_work_one_after_the_other(tmp_path):
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    for command in commands():
        result = warm_starts.run([sys.executable, *shortened(command)], capture_output=True, text=True, timeout=300,
                                cwd=tmp_path, env=environment)
        assert result.returncode == 0, f'{shlex.join(command)}\n{result.stdout}{result.stderr}'
        if command[1] == 'alfx.bin.evaluate':
            assert 'normalized score' in result.stdout


def test_the_page_has_commands():
    assert len(commands()) == 11
