"""Confs in run folders: what is recorded, and reading it."""

import os
import re
import subprocess
import textwrap
from typing import Any, Callable

import pytest
import torch

import alfx
from alfx import gin_utils
from alfx.gin_utils import run_folder
from alfx.gin_utils import ConfError, configurable


@configurable(module='record')
class Motor:

    def __init__(self, power: float = 1.0, fins: int = 2, act: Callable = torch.tanh):
        self.power, self.fins, self.act = power, fins, act


@configurable(module='record')
class Boat:

    def __init__(self, motor: Any = None, spare: Any = None, seats: int = 4):
        self.motor, self.spare, self.seats = motor, spare, seats


@configurable(module='record')
def evaluate_boat(laps: int = 1):
    return laps


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


@pytest.fixture
def conf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name='boat.gin'):
        os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
        with open(name, 'w', encoding='utf8') as file:
            file.write(textwrap.dedent(text))
        return name

    return write


def read(name, folder='run'):
    with open(os.path.join(folder, 'conf', name), encoding='utf8') as file:
        return file.read()


BASE = '''
    power = 3.5
    Motor.power = %power
    Boat.motor = @front/Motor()
    front/Motor.fins = 5
    Motor.act = @elu
    elu.alpha = 2.0
    evaluate_boat.laps = 7
'''


def start_run(conf, text="include 'base.gin'\nBoat.seats = 2", params=()):
    conf(BASE, 'base.gin')
    loaded = gin_utils.load(conf(text), params)
    gin_utils.write_conf('run', loaded, ['train', '--conf', 'boat.gin', "--conf_param=Motor.power = 3"])
    boat = Boat()
    gin_utils.write_operative('run')
    write_checkpoint('run')
    return boat


def write_checkpoint(root_dir):
    os.makedirs(os.path.join(root_dir, 'train', 'algorithm'))
    with open(os.path.join(root_dir, 'train', 'algorithm', 'ckpt-3'), 'w', encoding='utf8') as file:
        file.write('what the run has learned')


def test_the_conf_files_are_kept_as_given(conf):
    start_run(conf)
    assert read('boat.gin') == "include 'base.gin'\nBoat.seats = 2"
    assert read('base.gin') == textwrap.dedent(BASE)


def test_two_files_of_one_name_are_both_kept(conf):
    conf(BASE, 'parts/boat.gin')
    gin_utils.write_conf('run', gin_utils.load(conf("include 'parts/boat.gin'")), [])
    assert read('boat.gin') == "include 'parts/boat.gin'" and read('boat-2.gin') == textwrap.dedent(BASE)


def test_the_operative_conf_alone_reproduces_the_objects(conf):
    start_run(conf)
    gin_utils.load(None, root_dir='run', same_run=False)
    boat = Boat()
    assert (boat.motor.power, boat.motor.fins, boat.seats) == (3.5, 5, 2)
    assert boat.motor.act.func is torch.nn.functional.elu and boat.motor.act.keywords == {'alpha': 2.0}
    assert evaluate_boat() == 7, 'what was not used when it was written is there as well'
    gin_utils.clear()
    assert Boat().motor is None


def test_the_operative_conf_can_be_written_and_loaded_again_and_again(conf):
    start_run(conf)
    first = read('operative.gin')
    for _ in range(2):
        gin_utils.load(None, root_dir='run')
        Boat()
        gin_utils.write_operative('run')
    assert read('operative.gin') == first
    assert 'Motor.act = @elu' in first


def test_unbound_functions_stay_plain_under_the_operative_conf(conf):
    gin_utils.load(conf('Motor.act = @torch.nn.functional.leaky_relu'))
    Motor()
    gin_utils.write_operative('run')
    gin_utils.load(None, root_dir='run')
    assert Motor().act is torch.nn.functional.leaky_relu


def test_the_current_default_is_recorded_for_resuming(conf):
    gin_utils.load(conf('Motor.fins = 3'))
    Motor()
    assert 'Motor.power = 1.0' in gin_utils.operative_config_str()
    assert 'power' not in gin_utils.config_str()


def test_versions_command_line_and_git_state_are_kept(conf):
    for command in (['init', '-q'], ['-c', 'user.name=a', '-c', 'user.email=a@b', 'commit', '-q', '--allow-empty',
                                     '-m', 'start']):
        subprocess.run(['git', *command], check=True)
    start_run(conf)
    info = gin_utils.stored_info('run')
    assert info['versions']['torch'].split('+')[0] == torch.__version__.split('+')[0]
    assert info['versions']['alfx'] == alfx.__version__, 'of the sources, whatever was installed'
    assert {'python', 'numpy', 'gymnasium'} <= set(info['versions'])
    assert info['command_lines'][0].endswith("train --conf boat.gin '--conf_param=Motor.power = 3'")
    assert info['git'].startswith('commit ') and 'boat.gin' in info['git']


def test_each_start_of_the_run_adds_its_command_line(conf):
    start_run(conf)
    gin_utils.write_conf('run', gin_utils.load(None, root_dir='run'), ['train', '--root_dir', 'run'])
    assert [line.split('  ')[1] for line in gin_utils.stored_info('run')['command_lines']] == [
        "train --conf boat.gin '--conf_param=Motor.power = 3'", 'train --root_dir run']


def test_a_folder_without_a_run_raises(conf, tmp_path):
    with pytest.raises(ConfError, match='is not a run folder'):
        gin_utils.load(None, root_dir=str(tmp_path))


def test_a_blank_operative_conf_is_passed_over(conf):
    start_run(conf)
    for name in ('operative.gin', 'config.gin'):
        with open(f'run/conf/{name}', 'w') as file:
            file.write('\n \n')
        if name == 'operative.gin':
            assert gin_utils.stored_conf('run').endswith('config.gin')
    with pytest.raises(ConfError, match='run is not a run folder: .*operative.gin, or the file is blank'):
        gin_utils.stored_conf('run')


def test_resuming_a_stored_conf_adds_only_command_line_changes(conf):
    start_run(conf)
    before, files = read('config.gin'), sorted(os.listdir('run/conf'))
    params = ['TrainerConfig.num_iterations = 7']
    for _ in range(2):
        gin_utils.write_conf('run', gin_utils.load(None, params, root_dir='run'), [])
        assert sorted(os.listdir('run/conf')) == files
        assert read('config.gin') == before + 'alfx.algorithms.config.TrainerConfig.num_iterations = 7\n'
    gin_utils.load('boat.gin', root_dir='run')


# The same run or another ------------------------------------------------------------------------------------------


def test_the_same_conf_resumes(conf):
    start_run(conf)
    gin_utils.load('boat.gin', root_dir='run')
    gin_utils.load(None, root_dir='run')
    gin_utils.load('boat.gin', root_dir='no_such_run')


def test_length_and_cadence_may_change(conf):
    start_run(conf, "include 'base.gin'\nTrainerConfig.num_iterations = 5\nTrainerConfig.summary_interval = 1")
    params = ['TrainerConfig.num_iterations=10', 'TrainerConfig.eval_interval=3', 'TrainerConfig.num_checkpoints=1']
    gin_utils.load('boat.gin', params, root_dir='run')
    gin_utils.load(None, params, root_dir='run')


def test_actions_suggested_after_a_failed_step_can_change(conf):
    start_run(conf)
    params = ['create_environment.max_restarts=3', 'create_environment.worker_timeout=60.0']
    gin_utils.load(None, params, root_dir='run')
    with pytest.raises(ConfError, match='env_name'):
        gin_utils.load(None, [*params, "create_environment.env_name='Acrobot-v1'"], root_dir='run')


def test_another_conf_is_rejected_with_differences_and_a_remedy(conf):
    start_run(conf)
    conf("include 'base.gin'\nBoat.seats = 2\nfront/Motor.fins = 6")
    with pytest.raises(ConfError) as caught:
        gin_utils.load('boat.gin', root_dir='run')
    assert str(caught.value).startswith('boat.gin:3: front/Motor.fins is 6, but the run in run has 5')
    assert 'another root_dir' in str(caught.value)
    assert not gin_utils.config_str().strip()


@pytest.mark.parametrize('param, differs', [
    ('Motor.power = 9.0', 'Motor.power is 9.0, but the run in run has 3.5'),
    ('Motor.fins = 9', 'Motor.fins is 9, but the run in run has 2'),
    ('front/Motor.power = 9', 'front/Motor.power is 9, but the run in run has 3.5'),
    ('TrainerConfig.mini_batch_size = 9', 'TrainerConfig.mini_batch_size is 9, but the run in run has None'),
])
@pytest.mark.parametrize('conf_file', ['boat.gin', None])
def test_a_conf_param_that_changes_training_is_rejected(conf, param, differs, conf_file):
    start_run(conf)
    with pytest.raises(ConfError) as caught:
        gin_utils.load(conf_file, [param], root_dir='run')
    assert str(caught.value).startswith(f"override '{param}': {differs}")
    gin_utils.load(conf_file, [param], root_dir='run', same_run=False)


@pytest.mark.parametrize('conf_file', ['boat.gin', None])
def test_a_macro_that_changes_training_is_rejected(conf, conf_file):
    start_run(conf)
    for param in ('power = 9.0', "include 'other.gin'"):
        conf('Motor.power = 9.0', 'other.gin')
        with pytest.raises(ConfError, match='Motor.power is 9.0, but the run in run has 3.5'):
            gin_utils.load(conf_file, [param], root_dir='run')


def test_writing_a_default_out_or_renaming_a_macro_is_no_difference(conf):
    start_run(conf)
    conf(BASE.replace('power = 3.5', 'strength = 3.5').replace('%power', '%strength'), 'base.gin')
    conf("include 'base.gin'\nBoat.seats = 2\nBoat.spare = None\nMotor.fins = 2")
    gin_utils.load('boat.gin', root_dir='run')


def test_leaving_a_binding_out_is_a_difference(conf):
    start_run(conf)
    conf("include 'base.gin'")
    with pytest.raises(ConfError, match='Boat.seats is 4, but the run in run has 2'):
        gin_utils.load('boat.gin', root_dir='run')


def test_without_a_checkpoint_no_run_can_be_resumed(conf):
    gin_utils.write_conf('run', gin_utils.load(conf(BASE)), [])
    Boat()
    gin_utils.write_operative('run')
    loaded = gin_utils.load(conf('Boat.seats = 7', 'other.gin'), root_dir='run')
    gin_utils.write_conf('run', loaded, [])
    assert gin_utils.stored_conf('run').endswith('config.gin'), 'the operative conf was that of another one'
    assert 'Boat.seats = 7' in read('config.gin') and 'Motor' not in read('config.gin')


def test_a_folder_of_runs_is_answered_with_their_names(tmp_path):
    for i in range(7):
        (tmp_path / f'seed-{i}' / 'conf').mkdir(parents=True)
        (tmp_path / f'seed-{i}' / 'conf' / 'operative.gin').write_text('X.y = 1')
    with pytest.raises(ConfError) as caught:
        gin_utils.load(None, root_dir=str(tmp_path))
    assert str(caught.value) == (f'{tmp_path} is not a run folder, but contains 7\n  name one of them: '
                                 + ', '.join(str(tmp_path / f'seed-{i}') for i in range(5)) + ', ...')


def test_an_override_replaces_a_value_of_several_lines(conf):
    long = ', '.join(f"'a_long_name_{i}'" for i in range(9))
    start_run(conf, f"include 'base.gin'\nBoat.spare = %names\nnames = ({long})")
    assert re.search(r'(?m)^names = .*\n +', read('operative.gin'))
    run_folder.copy_conf('run', 'fork', gin_utils.load(None, ['names = ("b",)'], 'run', same_run=False))
    gin_utils.load(os.path.join('fork', 'conf', 'operative.gin'))
    assert Boat().spare == ('b', )
