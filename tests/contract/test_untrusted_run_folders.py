"""Run folders of other people: which files are executed, and that ``--untrusted`` executes none."""
import os
import shutil
from pathlib import Path

import pytest
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.bin import flags as conf_flags
from alfx.bin import dataset, play, show, train
from alfx.checkpoints import user_key
from alfx.environments import suite_gym
from alfx.environments.environment_errors import EnvironmentLoadError

CONF = """
include 'ppo_cart_pole.gin'
create_environment.num_parallel_environments = 2
TrainerConfig.unroll_length = 4
TrainerConfig.num_updates_per_train_iter = 1
TrainerConfig.num_iterations = 2
TrainerConfig.num_env_steps = 0
TrainerConfig.num_checkpoints = 1
TrainerConfig.evaluate = False
"""
EVIL = """
import pathlib
import gymnasium
pathlib.Path(__file__).with_name('executed').touch()
gymnasium.register('Evil-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv', max_episode_steps=20)
"""


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Return a run folder."""
    folder = tmp_path_factory.mktemp('stranger')
    (folder / 'mine.gin').write_text(CONF)
    with flag_values(train.PARSER, conf=str(folder / 'mine.gin'), root_dir=str(folder / 'run')):
        assert conf_flags.call(train.main, ['train']) == 0
    gin_utils.clear()
    return folder / 'run'


@pytest.fixture
def tampered(run, tmp_path, monkeypatch):
    """Play a copy of the run folder with an additional line in its conf and a module next to it."""
    (tmp_path / 'evil.py').write_text(EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(run, tmp_path / 'copy')
    monkeypatch.delitem(__import__('sys').modules, 'evil', raising=False)

    def play_it(line, untrusted):
        for name in ('operative.gin', 'config.gin'):
            path = tmp_path / 'copy' / 'conf' / name
            path.write_text(path.read_text() + line + '\n')
        with flag_values(play.PARSER, root_dir=str(tmp_path / 'copy'), untrusted=untrusted, num_episodes=1,
                         render=False):
            code = conf_flags.call(play.main, ['play'])
        gin_utils.clear()
        return code, (tmp_path / 'executed').exists()

    return play_it


@pytest.mark.parametrize('untrusted', [False, True])
def test_a_run_of_a_gymnasium_task_can_be_played(tampered, untrusted):
    assert tampered('', untrusted) == (0, False)


MODULES = {
    'import evil': 'evil',
    "create_environment.env_name = 'evil:Evil-v0'": "'evil:Evil-v0'",
    "named_fields.record = 'evil.Path'\nTrainerConfig.algorithm_ctor = @named_fields": "'evil.Path'",
}


@pytest.mark.parametrize('line', MODULES)
def test_modules_that_a_conf_names_are_imported_but_not_with_untrusted(tampered, line, capsys):
    code, executed = tampered(line, untrusted=True)
    err = capsys.readouterr().err
    assert (code, executed) == (2, False) and MODULES[line] in err and '--untrusted' in err
    assert tampered('', untrusted=False)[1], 'this is how it would have been executed'


@pytest.mark.parametrize('line, named', [
    ("create_environment.env_name = 'ALE/Pong-v5'", 'ALE/Pong-v5'),
    ("create_environment.env_name = 'MiniGrid-Empty-5x5-v0'", 'MiniGrid-Empty-5x5-v0'),
    ("suite_gym.load.env_args = {'xml_file': '/some/file.xml'}", 'xml_file'),
    ('create_environment.env_load_fn = @suite_envpool.load', 'envpool'),
    ("create_environment.env_name = 'ALE/Pong-v5'\ncreate_environment.env_load_fn = @suite_ale_vector.load", 'ALE'),
])
def test_tasks_of_other_packages_and_their_files_are_rejected_by_name(tampered, line, named, capsys):
    assert tampered(line, untrusted=True)[0] == 2
    err = capsys.readouterr().err
    assert named in err and '--untrusted' in err


def test_the_next_conf_is_trusted_again(tampered):
    assert tampered('import evil', untrusted=True) == (2, False)
    with pytest.raises(EnvironmentLoadError, match='no_such_module'):
        suite_gym.load('no_such_module:Id-v0')


def test_environment_state_is_loaded_only_from_runs_of_the_user(run, tmp_path, monkeypatch, caplog):
    shutil.copytree(run, tmp_path / 'copy')
    arguments = dict(root_dir=str(tmp_path / 'copy'), conf_param=['TrainerConfig.num_iterations=4'])
    monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path / 'of_somebody_else'))
    with flag_values(train.PARSER, **arguments):
        assert conf_flags.call(train.main, ['train']) == 0
    gin_utils.clear()
    log = (tmp_path / 'copy' / 'train.log').read_text()
    assert 'was not written with the key of this user' in log and user_key.path() in log
    assert 'new episodes start' in log
    assert os.stat(user_key.path()).st_mode & 0o777 == 0o600 and len(Path(user_key.path()).read_bytes()) == 32


@pytest.mark.parametrize('program, arguments', [(show, []), (dataset, [['dataset', 'check', 'data']])])
def test_show_and_dataset_import_nothing_of_untrusted_runs(run, tmp_path, monkeypatch, capsys, program, arguments):
    (tmp_path / 'evil.py').write_text(EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(run, tmp_path / 'copy')
    for name in ('operative.gin', 'config.gin'):
        path = tmp_path / 'copy' / 'conf' / name
        path.write_text('import evil\n' + path.read_text())
    with flag_values(program.PARSER, root_dir=str(tmp_path / 'copy'), untrusted=True):
        assert conf_flags.call(lambda: program.main(*arguments), ['program']) == 2
    gin_utils.clear()
    assert "import of 'evil' is not allowed with --untrusted" in capsys.readouterr().err
    assert not (tmp_path / 'executed').exists()
