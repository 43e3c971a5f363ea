"""User modules next to a conf: found, copied to the run folder, used when the run is resumed."""
import logging
import os
import shutil
import sys

import pytest
from helpers import warm_starts

from alfx import gin_utils
from alfx.environments.utils import create_environment
from alfx.gin_utils import user_modules

MODULE = '''
import gymnasium
{helper}
class {name}(gymnasium.Wrapper):
    """Rewards times a factor."""

    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward * self.factor, *rest
'''
CONF = '''
import {module}
include 'ppo_cart_pole.gin'
suite_gym.load.gym_env_wrappers = (@{module}.{name}, )
{module}.{name}.factor = 3.0
create_environment.num_parallel_environments = 2
TrainerConfig.num_env_steps = 32
TrainerConfig.unroll_length = 8
TrainerConfig.mini_batch_size = 8
TrainerConfig.num_updates_per_train_iter = 1
TrainerConfig.evaluate = False
'''


@pytest.fixture
def forget(monkeypatch):
    """Remove modules of these names afterwards, and restore the path."""
    monkeypatch.setattr(sys, 'path', list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith('own_'):
            del sys.modules[name]
    gin_utils.clear()


def write(folder, module, name='ByThree', helper=''):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{module}.py').write_text(MODULE.format(name=name, helper=helper))
    (folder / 'mine.gin').write_text(CONF.format(module=module, name=name))
    return str(folder / 'mine.gin')


def test_a_module_next_to_the_conf_is_found_and_its_files_are_listed(tmp_path, forget):
    conf_file = write(tmp_path / 'a', 'own_one', helper='import own_helper')
    (tmp_path / 'a' / 'own_helper').mkdir()
    (tmp_path / 'a' / 'own_helper' / '__init__.py').write_text('from own_helper import inner\n')
    (tmp_path / 'a' / 'own_helper' / 'inner.py').write_text('')
    (tmp_path / 'a' / 'own_not_used.py').write_text('')
    conf = gin_utils.load(conf_file)
    assert sorted(file.name for file in conf.modules) == ['own_helper/__init__.py', 'own_helper/inner.py', 'own_one.py']
    folder = gin_utils.write_conf(str(tmp_path / 'run'), conf, [])
    assert os.path.isfile(os.path.join(folder, 'own_helper', 'inner.py'))
    assert (tmp_path / 'run' / 'conf' / 'own_one.py').read_text() == (tmp_path / 'a' / 'own_one.py').read_text()


def test_unregistered_classes_are_named_by_their_path(tmp_path, forget):
    gin_utils.load(write(tmp_path, 'own_two'))
    bound = {str(binding) for binding in gin_utils.unused_bindings()}
    assert 'own_two.ByThree.factor = 3.0' in bound
    gin_utils.load('ppo_cart_pole', ['suite_gym.load.gym_env_wrappers = (@gymnasium.wrappers.ClipReward, )',
                                     'gymnasium.wrappers.ClipReward.max_reward = 1.0'])
    with pytest.raises(gin_utils.ConfError, match="did you mean 'ClipReward'"):
        gin_utils.load('ppo_cart_pole', ['suite_gym.load.gym_env_wrappers = (@gymnasium.wrappers.ClipRewar, )'])
    with pytest.raises(gin_utils.ConfError, match="has no parameter 'max_rewrd'"):
        gin_utils.load('ppo_cart_pole', ['gymnasium.wrappers.ClipReward.max_rewrd = 1.0'])
    with pytest.raises(gin_utils.ConfError, match='no configurable'):
        gin_utils.load('ppo_cart_pole', ['suite_gym.load.gym_env_wrappers = (@os.path.join, @subprocess.Popen)'],
                       trusted=False)


def test_two_modules_of_one_name_in_a_process_are_rejected(tmp_path, forget):
    gin_utils.load(write(tmp_path / 'a', 'own_three'))
    conf_file = write(tmp_path / 'b', 'own_three', helper='import os')
    with pytest.raises(gin_utils.ConfError, match=r"mine.gin:2: 'own_three' refers to .*b/own_three.py here"):
        gin_utils.load(conf_file)
    gin_utils.load(write(tmp_path / 'c', 'own_three'))  # the same text


def test_a_resumed_run_uses_its_module_copy_and_reports_changes(tmp_path, forget, caplog, monkeypatch):
    (tmp_path / 'a').mkdir()
    monkeypatch.chdir(tmp_path / 'a')  # the folder of the conf and the working directory are the same
    conf_file = write(tmp_path / 'a', 'own_four')
    root_dir = str(tmp_path / 'run')
    gin_utils.write_conf(root_dir, gin_utils.load(conf_file), [])
    os.makedirs(os.path.join(root_dir, 'train', 'algorithm', 'ckpt-1'))
    del sys.modules['own_four']
    (tmp_path / 'a' / 'own_four.py').write_text('raise RuntimeError\n')
    with caplog.at_level(logging.WARNING):
        gin_utils.load(conf_file, root_dir=root_dir)
    assert caplog.text.count('own_four.py has changed since the run was started') == 1
    assert sys.modules['own_four'].__file__ == os.path.join(root_dir, 'conf', 'own_four.py')


def test_modules_that_a_resumed_run_imports_anew_are_copied(tmp_path, forget):
    conf_file = write(tmp_path / 'a', 'own_nine')
    root_dir = str(tmp_path / 'run')
    gin_utils.write_conf(root_dir, gin_utils.load(conf_file), [])
    os.makedirs(os.path.join(root_dir, 'train', 'algorithm', 'ckpt-1'))
    (tmp_path / 'b').mkdir()
    (tmp_path / 'b' / 'own_ten.py').write_text('')
    (tmp_path / 'b' / 'more.gin').write_text(f"include '{conf_file}'\nimport own_ten\n")
    folder = gin_utils.write_conf(root_dir, gin_utils.load(str(tmp_path / 'b' / 'more.gin'), root_dir=root_dir), [])
    assert os.path.isfile(os.path.join(folder, 'own_ten.py'))
    assert user_modules.origins(folder) == [str(tmp_path / 'a'), str(tmp_path / 'b')]
    shutil.rmtree(tmp_path / 'b')
    del sys.modules['own_ten'], sys.modules['own_nine']
    gin_utils.load(None, root_dir=root_dir)
    assert sys.modules['own_ten'].__file__ == os.path.join(folder, 'own_ten.py')


def test_settings_of_own_callbacks_may_change_when_a_run_is_resumed(tmp_path, forget):
    (tmp_path / 'own_eleven.py').write_text('from alfx.runs.callbacks import Callback\n\n\nclass Often(Callback):\n'
                                            '    def __init__(self, n=3):\n        self.n = n\n')
    conf_file = tmp_path / 'mine.gin'
    conf_file.write_text("import own_eleven\ninclude 'ppo_cart_pole.gin'\n")
    root_dir = str(tmp_path / 'run')
    gin_utils.write_conf(root_dir, gin_utils.load(str(conf_file)), [])
    os.makedirs(os.path.join(root_dir, 'train', 'algorithm', 'ckpt-1'))
    gin_utils.load(str(conf_file), ['TrainerConfig.callbacks = (@own_eleven.Often(), )', 'own_eleven.Often.n = 7'],
                   root_dir=root_dir)
    with pytest.raises(gin_utils.ConfError, match='PPOLoss.gamma is 0.5'):
        gin_utils.load(str(conf_file), ['PPOLoss.gamma = 0.5'], root_dir=root_dir)


def test_a_missing_module_is_explained(tmp_path, forget):
    conf = tmp_path / 'run' / 'conf'
    conf.mkdir(parents=True)
    (conf / 'operative.gin').write_text('import own_gone\n')
    (conf / 'config.gin').write_text('# From some/where.gin\n')
    with pytest.raises(gin_utils.ConfError, match='the run was started with some/where.gin; copy the module into'):
        gin_utils.load(None, root_dir=str(tmp_path / 'run'))
    (tmp_path / 'x.gin').write_text('import own_gone\n')
    with pytest.raises(gin_utils.ConfError, match='searched for next to the conf file'):
        gin_utils.load(str(tmp_path / 'x.gin'))


def test_imports_among_copied_modules_are_not_circular(tmp_path):
    (tmp_path / 'own_a.py').write_text('import own_b, os\n')
    (tmp_path / 'own_b.py').write_text('from own_a import x\nimport json\n')
    files = user_modules.copies([('own_a', str(tmp_path))])
    assert sorted(file.name for file in files) == ['own_a.py', 'own_b.py']


def test_a_run_folder_is_moved_and_evaluated_where_the_module_is_not(tmp_path):
    conf_file = write(tmp_path / 'a', 'own_five')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()

    def run(*arguments):
        done = warm_starts.run([sys.executable, '-m', 'alfx', *arguments], capture_output=True, text=True, timeout=120,
                              cwd=elsewhere)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run('train', conf_file, '--root_dir', str(tmp_path / 'run'))
    os.rename(tmp_path / 'a', tmp_path / 'gone')
    os.rename(tmp_path / 'run', tmp_path / 'moved')
    output = run('evaluate', str(tmp_path / 'moved'), '--num_episodes', '1', '--mode', 'greedy')
    number = float(output.split('return ')[1].split()[0].rstrip(','))
    assert number % 3 == 0 and number >= 24  # three per step; no policy fails before the eighth step


READER = """
import pathlib

HERE = pathlib.Path(__file__).parent
VALUE = (HERE / 'own_data' / 'values.csv').read_text()
MODEL = (HERE / 'own_arm.xml').read_bytes()
LEVELS = [path.read_text() for path in sorted(HERE.glob('own_level_*.txt'))]
TABLE = pathlib.Path(__file__).with_suffix('.tsv').read_text()
OTHERS = [path.read_text() for path in HERE.iterdir() if path.name == 'own_' + 'other.txt']
"""


@pytest.fixture
def reader(tmp_path, forget):
    """Write a module that reads files next to itself; return the run folder of a conf that imports it."""
    folder, run = tmp_path / 'a', str(tmp_path / 'run')
    (folder / 'own_data').mkdir(parents=True)
    (folder / 'own_reader.py').write_text(READER)
    (folder / 'own_data' / 'values.csv').write_text('1,2')
    (folder / 'own_reader.tsv').write_text('5')
    (folder / 'own_arm.xml').write_bytes(b'<mesh file="own_hand.stl"/>\xff')
    (folder / 'own_hand.stl').write_bytes(bytes(range(256)))
    (folder / 'own_level_1.txt').write_text('one')
    (folder / 'own_other.txt').write_text('not named')
    (folder / 'mine.gin').write_text("import own_reader\ninclude 'ppo_cart_pole.gin'\n")
    gin_utils.write_conf(run, gin_utils.load(str(folder / 'mine.gin')), [])
    del sys.modules['own_reader']
    return run


def test_files_that_a_module_names_are_copied(reader, tmp_path):
    names = {'own_reader.py', 'own_reader.tsv', 'own_data', 'own_arm.xml', 'own_hand.stl', 'own_level_1.txt'}
    assert {name for name in os.listdir(f'{reader}/conf') if name.startswith('own_')} == names
    shutil.move(tmp_path / 'a', tmp_path / 'gone')
    gin_utils.load(None, root_dir=reader, same_run=False)
    module = sys.modules['own_reader']
    assert (module.VALUE, module.MODEL[-1], module.LEVELS, module.TABLE) == ('1,2', 255, ['one'], '5')
    assert module.OTHERS == []
    assert (tmp_path / 'run/conf/own_hand.stl').read_bytes() == bytes(range(256))


def test_binary_files_are_copied_and_runs_are_not(tmp_path):
    (tmp_path / 'own_reader.py').write_text("DATA, RUN = 'own_levels.npy', 'own_runs'")
    (tmp_path / 'own_levels.npy').write_bytes(b'"1\0\0\0"2\0\0\0')  # bytes between quotes that are no file name
    (tmp_path / 'own_runs' / 'seed-1' / 'train').mkdir(parents=True)
    for name in ('train.lock', 'progress.csv', 'train/ckpt-1'):
        (tmp_path / 'own_runs' / 'seed-1' / name).write_text('')
    (tmp_path / 'own_runs' / 'scores.csv').write_text('')
    found = user_modules.copies([('own_reader', str(tmp_path))])
    assert sorted(file.name for file in found) == ['own_levels.npy', 'own_reader.py', 'own_runs/scores.csv']


def test_unchanged_originals_are_used_with_all_their_files(reader, tmp_path):
    gin_utils.load(None, root_dir=reader, same_run=False)
    assert sys.modules['own_reader'].OTHERS == ['not named']
    del sys.modules['own_reader']
    (tmp_path / 'a' / 'own_data' / 'values.csv').write_text('3,4')
    gin_utils.load(None, root_dir=reader, same_run=False)
    assert sys.modules['own_reader'].VALUE == '1,2'


def test_a_missing_file_of_a_copied_module_is_explained(reader, tmp_path):
    shutil.move(tmp_path / 'a', tmp_path / 'gone')
    os.remove(f'{reader}/conf/own_arm.xml')
    with pytest.raises(gin_utils.ConfError, match='copy the files that it reads there too'):
        gin_utils.load(None, root_dir=reader, same_run=False)


def test_data_of_a_package_is_copied_up_to_a_limit(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(user_modules, '_MOST_BYTES', 1000)
    assets = tmp_path / 'own_package' / 'assets'
    assets.mkdir(parents=True)
    (tmp_path / 'own_package' / '__init__.py').write_text('import own_package.inner\n' + '#' * 2000)
    (tmp_path / 'own_package' / 'inner.py').write_text('')
    (assets / 'small.bin').write_bytes(b'1' * 900)
    (assets / 'large.bin').write_bytes(b'1' * 1001)
    (tmp_path / 'own_package' / '.#inner.py').symlink_to('user@host.1234')  # Emacs is editing inner.py
    with caplog.at_level(logging.INFO):
        found = user_modules.copies([('own_package', str(tmp_path))])
    assert sorted(os.path.basename(file.name) for file in found) == ['__init__.py', 'inner.py', 'small.bin']
    assert 'too large or too many: own_package/assets/large.bin' in caplog.text


def test_the_code_of_a_package_with_very_many_files_is_copied(tmp_path, caplog):
    frames = tmp_path / 'own_package' / 'frames'
    frames.mkdir(parents=True)
    for name in ('__init__.py', *(f'frames/{i}' for i in range(501))):
        (tmp_path / 'own_package' / name).write_text('')
    (tmp_path / 'own_package' / 'inner.py').write_text("FIRST = HERE / 'frames' / '0'")
    found = user_modules.copies([('own_package', str(tmp_path))])
    assert sorted(file.name for file in found) == [f'own_package/{name}' for name in ('__init__.py', 'frames/0',
                                                                                      'inner.py')]
    assert caplog.text.endswith('too large or too many: own_package, own_package/frames\n')


def test_files_named_by_a_pattern_or_next_to_the_package_are_copied(tmp_path):
    (tmp_path / 'own_package' / 'envs').mkdir(parents=True)
    (tmp_path / 'own_data').mkdir()
    (tmp_path / 'own_package' / 'envs' / 'track.py').write_text("NAMES = 'own_data', 'own_*.csv', '*', 'level_[12]'")
    names = {'own_data/track.csv', 'own_package/envs/own_1.csv', 'own_package/envs/level_1', 'own_2.csv'}
    for name in (*names, 'other.csv', 'own_package/envs/level_3'):
        (tmp_path / name).write_text('')
    found = user_modules.copies([('own_package.envs.track', str(tmp_path))])
    assert {file.name for file in found} == names | {'own_package/envs/track.py'}


def test_a_class_that_is_not_registered_is_named_with_its_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'bare_layers.py').write_text('class Squeezed:\n    pass\n')
    (tmp_path / 'c.gin').write_text('import bare_layers\nAgent.optimizer = @Squeezed()\n')
    with pytest.raises(gin_utils.ConfError, match=r"'@Squeezed'\n  write 'bare_layers.Squeezed', or decorate it"):
        gin_utils.load('c.gin')
    (tmp_path / 'c.gin').write_text('import bare_layers\nAgent.optimizer = @bare_layers.Squeezed()\n')
    gin_utils.load('c.gin')
    gin_utils.clear()


def test_modules_of_a_folder_without_init_file_are_copied(tmp_path, forget):
    folder = tmp_path / 'a' / 'own_space' / 'deep'
    folder.mkdir(parents=True)
    (folder / 'more.py').write_text('y = 1\n')
    (folder / 'unused.py').write_text('')
    (tmp_path / 'a' / 'own_space' / 'helper.py').write_text('import own_space.deep.more\n')
    (tmp_path / 'a' / 'own_space' / 'other.py').write_text('x = 1\n')
    write(tmp_path / 'a', 'own_direct')
    imports = 'from . import helper\nfrom .other import x\n'
    (tmp_path / 'a' / 'own_space' / 'wrap.py').write_text(imports + MODULE.format(name='ByThree', helper=''))
    conf_file = tmp_path / 'a' / 'mine.gin'
    conf_file.write_text(CONF.format(module='own_space.wrap', name='ByThree'))
    conf = gin_utils.load(str(conf_file))
    assert sorted(file.name for file in conf.modules) == ['own_space/deep/more.py', 'own_space/helper.py',
                                                          'own_space/other.py', 'own_space/wrap.py']


def test_the_module_of_an_environment_id_is_found_and_copied(tmp_path, forget):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'own_task.py').write_text("""
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register('OwnTask-v0', CartPoleEnv)
""")
    conf_file = tmp_path / 'a' / 'mine.gin'
    conf_file.write_text("task = 'own_task:OwnTask-v0'\ncreate_environment.env_name = %task\n")
    conf = gin_utils.load(str(conf_file))
    assert [file.name for file in conf.modules] == ['own_task.py']
    gin_utils.write_conf(str(tmp_path / 'run'), conf, [])
    (tmp_path / 'a' / 'own_task.py').unlink()
    sys.path[:] = [folder for folder in sys.path if not folder.startswith(str(tmp_path))]
    gin_utils.load(None, root_dir=str(tmp_path / 'run'), same_run=False)
    with create_environment(nonparallel=True) as env:
        assert env.reset().observation.shape == (env.batch_size, 4)
