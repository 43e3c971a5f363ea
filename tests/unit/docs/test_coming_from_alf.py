"""The conf that the page brings over: what is said of it before, and that it trains after."""
import pathlib
import re

import pytest

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import ConfError
from alfx.trainers.policy_trainer import RLTrainer

PAGE = (pathlib.Path(__file__).parents[3] / 'docs' / 'coming_from_alf.md').read_text()
BLOCKS = {kind: text for kind, text in re.findall(r'<!-- (before|said of|file): pendulum.gin -->\n```\n(.*?)```', PAGE,
                                                  re.DOTALL)}


@pytest.fixture
def conf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path / 'pendulum.gin'
    gin_utils.clear()


def test_the_page_shows_the_messages_about_the_conf(conf):
    conf.write_text(BLOCKS['before'])
    with pytest.raises(ConfError) as caught:
        gin_utils.load(conf.name)
    assert f'ConfError: {caught.value}\n' == BLOCKS['said of']


def test_the_converted_conf_trains_and_uses_every_line(conf):
    conf.write_text(BLOCKS['file'])
    gin_utils.load(conf.name, ['TrainerConfig.num_iterations = 40', 'TrainerConfig.initial_collect_steps = 20',
                               'TrainerConfig.num_checkpoints = 1', 'TrainerConfig.evaluate = False',
                               'create_environment.nonparallel = True', 'TrainerConfig.random_seed = 1'])
    RLTrainer(TrainerConfig(root_dir='run')).train()
    assert (conf.parent / 'run/progress.csv').exists()
    assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []


def test_only_reported_or_environment_lines_change():
    before, after = (set(BLOCKS[kind].splitlines()) for kind in ('before', 'file'))
    told = {int(line) for line in re.findall(r'pendulum.gin:(\d+): ', BLOCKS['said of'])}
    lines = BLOCKS['before'].splitlines()
    changed = {i for i, line in enumerate(lines, 1) if line not in after}
    assert changed == told | {lines.index("create_environment.env_name = 'Pendulum-v0'") + 1}
    assert len(after - before) == len(changed) - 3  # the imports have gone
