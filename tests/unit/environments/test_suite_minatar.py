"""The MinAtar suite: the games of the package, with channels first, and their state."""
import importlib.util
import logging
import sys
import types

import numpy as np
import pytest
import torch

from alfx.environments import saved_state, suite_minatar
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_minatar import GAMES, MinAtarEnv

pytestmark = pytest.mark.skipif(importlib.util.find_spec('minatar') is None, reason='needs the extra minatar')
CHANNELS = {'asterix': 4, 'breakout': 4, 'freeway': 7, 'seaquest': 10, 'space_invaders': 6}
ACTIONS = {'asterix': 5, 'breakout': 3, 'freeway': 3, 'seaquest': 6, 'space_invaders': 4}


@pytest.mark.parametrize('game', GAMES)
def test_frames_and_rewards_are_those_of_the_package(game):
    from minatar import Environment
    env = MinAtarEnv(game, sticky_action_probability=0.1)
    observation, _ = env.reset(seed=3)
    reference = Environment(game, sticky_action_prob=0.1)
    reference.seed(int(np.random.Generator(np.random.PCG64(3)).integers(2**31)))
    reference.reset()
    assert observation.shape == (CHANNELS[game], 10, 10) and observation.dtype == np.uint8
    for action in np.random.default_rng(0).integers(0, ACTIONS[game], 200):
        observation, reward, terminated, truncated, _ = env.step(action)
        expected, ended = reference.act(reference.minimal_action_set()[action])
        assert (reward, terminated, truncated) == (expected, ended, False)
        assert np.array_equal(observation, reference.state().transpose(2, 0, 1))
        if terminated:
            observation, _ = env.reset()
            reference.reset()


def test_a_batch_has_separate_random_streams():
    env = suite_minatar.load('breakout', batch_size=3)
    env.seed(0)
    env.reset()
    frames = torch.stack([env.step(torch.zeros(3, dtype=torch.int64)).observation for _ in range(30)], 1)
    assert not torch.equal(frames[0], frames[1]) or not torch.equal(frames[0], frames[2])
    assert env.action_spec().maximum == 2 and frames.shape == (3, 30, 4, 10, 10)


def test_all_six_actions_can_be_offered():
    assert MinAtarEnv('breakout', minimal_actions=False).action_space.n == 6


def test_a_restored_game_continues_identically():
    env, other = MinAtarEnv('space_invaders'), MinAtarEnv('space_invaders')
    env.reset(seed=1)
    other.reset(seed=2)
    for action in (0, 1, 2, 3, 1):
        env.step(action)
    saved_state.restore(other, saved_state.capture(env))
    for action in np.random.default_rng(0).integers(0, 4, 50):
        expected, restored = env.step(action), other.step(action)
        assert np.array_equal(expected[0], restored[0]) and expected[1:3] == restored[1:3]
        if expected[2]:
            assert np.array_equal(env.reset()[0], other.reset()[0])


def test_every_object_is_visible_in_the_image():
    env = MinAtarEnv('breakout')
    observation, _ = env.reset(seed=0)
    image = env.render()
    assert image.shape == (160, 160, 3) and image.dtype == np.uint8
    assert np.array_equal(image[::16, ::16].any(-1), observation.any(0))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'minatar', None)
    with pytest.raises(EnvironmentLoadError, match='MinAtar is not installed: pip install'):
        MinAtarEnv('breakout')


def test_unknown_games_and_arguments_are_rejected_by_name():
    with pytest.raises(EnvironmentLoadError, match="env_args: .* unexpected keyword argument 'sticky'"):
        suite_minatar.load('breakout', env_args={'sticky': 0.3})
    with pytest.raises(EnvironmentLoadError, match='sticky_action_probability from 0 to 1, found 3.0'):
        suite_minatar.load('breakout', env_args={'sticky_action_probability': 3.0})
    with pytest.raises(EnvironmentLoadError, match="did you mean 'breakout'"):
        suite_minatar.load('breakuot')


@pytest.mark.parametrize('seed', range(3))
def test_a_seed_determines_the_first_action_whatever_came_before(seed):
    """A sticky first action repeats the initial one, which does nothing, not the last one before the seed."""
    env = MinAtarEnv('breakout', sticky_action_probability=1.0)
    env.reset(seed=seed)
    expected = env.step(0)[0].copy()
    env._game.last_action = 1  # left, as after an episode
    env.reset(seed=seed)
    np.testing.assert_array_equal(env.step(0)[0], expected)


@pytest.mark.parametrize('is_imported', [False, True])
def test_the_import_leaves_matplotlib_and_the_root_logger_alone(is_imported, monkeypatch, caplog):
    for name in [name for name in sys.modules if name.partition('.')[0] in ('minatar', 'matplotlib', 'seaborn')]:
        monkeypatch.delitem(sys.modules, name)
    module = types.ModuleType('matplotlib')
    if is_imported:
        monkeypatch.setitem(sys.modules, 'matplotlib', module)
    handlers = list(logging.root.handlers)
    MinAtarEnv('breakout')
    assert sys.modules.get('matplotlib') is (module if is_imported else None) and 'seaborn' not in sys.modules
    assert logging.root.handlers == handlers and not caplog.records
