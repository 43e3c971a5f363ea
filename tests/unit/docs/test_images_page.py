"""The page about images: its commands work in order, and its conf trains."""
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import warm_starts

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import parsing
from alfx.trainers.policy_trainer import RLTrainer

TEXT = (Path(__file__).parents[3] / 'docs' / 'learn_from_images.md').read_text()
COMMANDS = [shlex.split(line)[1:] for line in TEXT.splitlines() if line.startswith('python -m')]
SHORT = {'train': ['--conf_param', 'TrainerConfig.num_env_steps=100',
                   '--conf_param', 'TrainerConfig.num_updates_per_train_iter=1',
                   '--conf_param', 'create_environment.num_parallel_environments=8'], 'play': ['--max_frames', '20']}


@pytest.mark.slow
@pytest.mark.processes
def test_the_commands_work_one_after_the_other(tmp_path):
    pytest.importorskip('minatar')
    pytest.importorskip('ale_py')
    for command in COMMANDS:
        added = SHORT.get(command[1].removeprefix('alfx.bin.'), [])
        result = warm_starts.run([sys.executable, *command, *added], capture_output=True, text=True, timeout=300,
                                 cwd=tmp_path, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert result.returncode == 0, f'{shlex.join(command)}\n{result.stdout}{result.stderr}'
    assert len(COMMANDS) == 5
    assert all((tmp_path / 'runs' / name).stat().st_size for name in ('breakout.mp4', 'pong.mp4'))


def test_the_conf_of_the_page_trains(tmp_path):
    pytest.importorskip('ale_py')
    name, text = re.search(r'<!-- file: (\S+) -->\n```\n(.*?)```', TEXT, re.DOTALL).groups()
    (tmp_path / name).write_text(text)
    short = ['TrainerConfig.num_env_steps = 24', 'TrainerConfig.initial_collect_steps = 8',
             'TrainerConfig.mini_batch_size = 4', 'TrainerConfig.replay_buffer_length = 50']
    with gin_utils.loaded(str(tmp_path / name), short, str(tmp_path / 'run')):
        RLTrainer(TrainerConfig(root_dir=str(tmp_path / 'run'))).train()
        assert gin_utils.unused_bindings() == []


def test_the_confs_that_the_page_names_exist():
    games = ('asterix', 'breakout', 'freeway', 'seaquest', 'space_invaders')
    for name in re.findall(r'`((?:pqn|ppo|dqn|rainbow|munchausen|der|drq)_[a-zA-Z_*]+)`', TEXT):
        for game in games:
            assert (Path(parsing.CONFS) / f"{name.replace('GAME', game).replace('*', game)}.gin").exists()
