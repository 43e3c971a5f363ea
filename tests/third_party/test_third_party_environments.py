"""Environments of other packages train, and resume exactly or with new episodes and a line in the log.

``make test-environments`` runs these tests. They need packages that alfx does not depend on::

    pip install panda-gym highway-env crafter mo-gymnasium flappy-bird-gymnasium gymnasium-robotics minigrid
    pip install gym-super-mario-bros 'gym==0.25.2' 'numpy<2'     # in another environment, because of numpy
"""
import csv
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import warm_starts

pytestmark = [pytest.mark.processes, pytest.mark.slow,
              pytest.mark.skipif(not os.environ.get('ALFX_TEST_ENVIRONMENTS'), reason='run by make test-environments')]

EXACT, NEW_EPISODES, EITHER = 'exact', 'new episodes', 'either'
FLAT = 'suite_gym.load.gym_env_wrappers = (@gymnasium.wrappers.FlattenObservation, )'
MINIGRID = '''
create_environment.env_load_fn = @suite_minigrid.load
TrainerConfig.data_transformer_ctor = @ImageScaleTransformer
'''
# package, environment, further lines of the conf, how it resumes
ENVIRONMENTS = [
    ('panda_gym', 'PandaReach-v3', FLAT, NEW_EPISODES),  # PyBullet knows its world by a number
    ('gym_super_mario_bros', 'Mario-v0', '', NEW_EPISODES),  # the emulator is known by its address
    ('highway_env', 'highway-fast-v0', FLAT, EXACT),
    ('crafter', 'Crafter-v0', '', EITHER),  # two runs with the same seed differ
    ('gymnasium_robotics', 'FetchReach-v4', FLAT, EXACT),
    ('gymnasium_robotics', 'FrankaKitchen-v1', FLAT, EXACT),
    ('minigrid', 'MiniGrid-Dynamic-Obstacles-5x5-v0', MINIGRID, EXACT),
    ('mo_gymnasium', 'deep-sea-treasure-v0', '', EXACT),
    ('flappy_bird_gymnasium', 'FlappyBird-v0', '', NEW_EPISODES),  # it keeps surfaces of pygame in its objects
]
CONF = '''
import adapters
include 'ppo.gin'
create_environment.env_name = '{name}'
create_environment.num_parallel_environments = 2
create_environment.nonparallel = {nonparallel}
{more}
ActorDistributionNetwork.fc_layer_params = (16, )
ActorDistributionNetwork.continuous_projection_net_ctor = @NormalProjectionNetwork
ValueNetwork.fc_layer_params = (16, )
ppo/Adam.lr = 1e-3
TrainerConfig.unroll_length = 40
TrainerConfig.mini_batch_size = 40
TrainerConfig.num_updates_per_train_iter = 1
TrainerConfig.num_checkpoints = 1
TrainerConfig.random_seed = 1
'''


def train(folder, name, steps):
    """Start or resume the run ``name`` up to so many environment steps; return what it prints."""
    done = warm_starts.run([sys.executable, '-m', 'alfx', 'train', str(folder / 'task.gin'), '--root_dir',
                            str(folder / name), '--conf_param', f'TrainerConfig.num_env_steps={steps}'],
                           capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(folder):
    """Return the rows of progress.csv without times."""
    with open(folder / 'progress.csv', encoding='utf8') as file:
        return [{k: v for k, v in row.items() if 'second' not in k} for row in csv.DictReader(file)]


@pytest.mark.parametrize('nonparallel', [True, False], ids=['one process', 'workers'])
@pytest.mark.parametrize('package, name, bindings, expected', ENVIRONMENTS, ids=[name for _, name, *_ in ENVIRONMENTS])
def test_a_run_resumes_exactly_or_with_new_episodes(tmp_path, package, name, bindings, expected, nonparallel):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'the package {package} is not installed')
    if package == 'gym_super_mario_bros' and np.lib.NumpyVersion(np.__version__) >= '2.0.0':
        pytest.skip('the emulator of gym_super_mario_bros needs numpy<2')
    (tmp_path / 'task.gin').write_text(CONF.format(name=name, more=bindings, nonparallel=nonparallel))
    shutil.copy(Path(__file__).with_name('adapters.py'), tmp_path)
    output = train(tmp_path, 'halves', 480)
    resumed = train(tmp_path, 'halves', 960)
    if expected == EITHER:
        return
    if expected == NEW_EPISODES:
        assert 'the state of this environment cannot be saved' in output and 'new episodes start' in resumed
        return
    assert 'new episodes' not in output + resumed
    train(tmp_path, 'whole', 960)
    assert rows(tmp_path / 'whole') == rows(tmp_path / 'halves')
