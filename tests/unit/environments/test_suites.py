"""Environments by name: Gymnasium, Atari, MiniGrid; missing packages and misspelled names."""
import _random
import logging
import os
import re
import sys
from functools import partial, wraps

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import registry
from helpers.gym_environments import ChainEnv, CountEnv

from alfx import nest
from alfx.environments import gym_make, saved_state, suite_atari, suite_gym, suite_minigrid
from alfx.environments.alf_gym_wrapper import AlfGymWrapper, tensor_spec_from_gym_space
from alfx.environments.alf_wrappers import AtariTerminalOnLifeLossWrapper, CheckedEnvironment, TimeLimit
from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError
from alfx.environments.gym_make import find_spec
from alfx.environments.gym_wrappers import FrameStack, ObservationSubset
from alfx.environments.parallel_environment import ParallelAlfEnvironment
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.extras import pip_install


class _Restarting(gymnasium.utils.EzPickle):
    """An environment that unpickling constructs again."""


def run(env, steps=5):
    """Take random actions, check every time step and return the last one."""
    checked = CheckedEnvironment(env)
    time_step = checked.reset()
    for _ in range(steps):
        time_step = checked.step(nest.map_structure(lambda spec: spec.sample((env.batch_size, )), env.action_spec()))
    return time_step


def same_continuation(make, steps=60, before=20):
    """Save the state after some steps, continue in another instance and compare."""
    env, other = make(), make()
    env.seed(0)
    env.reset()
    actions = [nest.map_structure(lambda spec: spec.sample((env.batch_size, )), env.action_spec())
               for _ in range(before + steps)]
    for action in actions[:before]:
        env.step(action)
    state = env.get_state()
    assert state is not None
    other.seed(1)
    other.reset()
    other.step(actions[0])
    other.set_state(state)
    for action in actions[before:]:
        nest.map_structure(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), env.step(action),
                           other.step(action))
    env.close()
    other.close()


class TestNames:

    @pytest.mark.parametrize('name, suggestion', [
        ('CartPol-v1', "did you mean 'CartPole-v1'"), ('cartpole-v1', "'CartPole-v1'"),
        ('CartPole-v7', "did you mean 'CartPole-v0' or 'CartPole-v1'"),
        ('CartPole', "without a version; did you mean 'CartPole-v0' or 'CartPole-v1'"),
        ('Qqqqq-v0', "'your_module:Qqqqq-v0'"),
    ])
    def test_an_unknown_name_is_answered_with_the_nearest_ones(self, name, suggestion):
        with pytest.raises(EnvironmentLoadError) as error:
            suite_gym.load(name)
        assert suggestion in str(error.value)

    @pytest.mark.parametrize('name, suggestion, package', [
        ('MiniGrid-Empty-5x6-v0', 'MiniGrid-Empty-5x5-v0', 'minigrid'), ('ALE/Pogn-v5', 'ALE/Pong-v5', 'ale_py')])
    def test_a_task_unknown_to_a_plugin_raises_with_the_nearest_ones(self, name, suggestion, package):
        pytest.importorskip(package)
        with pytest.raises(EnvironmentLoadError, match=f"'{suggestion}'"):
            suite_gym.load(name)

    def test_a_module_is_imported_first(self):
        with pytest.raises(EnvironmentLoadError, match="names the module 'no_such_module', which cannot be imported"):
            suite_gym.load('no_such_module:Env-v0')
        assert find_spec('gymnasium.envs.classic_control:CartPole-v1').id == 'CartPole-v1'

    def test_an_id_without_a_pattern_is_found_once_its_package_is_imported(self, monkeypatch):
        spec = registry['CartPole-v1']
        monkeypatch.setattr(gym_make, '_import_if_there',
                            lambda package: monkeypatch.setitem(registry, 'OddPole-v7', spec))
        assert find_spec('OddPole-v7') is spec

    @pytest.mark.parametrize('name, package, extra', [
        ('LunarLander-v3', 'Box2D', 'box2d'), ('Hopper-v5', 'mujoco', 'mujoco')])
    def test_a_missing_package_raises_with_the_extra_that_installs_it(self, name, package, extra, monkeypatch):
        for module in [module for module in sys.modules if module.startswith(f'gymnasium.envs.{extra}')]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(EnvironmentLoadError, match=re.escape(pip_install(extra))):
            suite_gym.load(name)

    @pytest.mark.parametrize('name, package, extra', [
        ('ALE/NoGame-v5', 'ale_py', 'atari'), ('MiniGrid-NoGame-v0', 'minigrid', 'minigrid')])
    def test_a_missing_plugin_is_reported_with_its_extra(self, name, package, extra, monkeypatch):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(EnvironmentLoadError, match=re.escape(pip_install(extra))):
            suite_gym.load(name)

    def test_errors_about_outdated_environments_quote_gymnasium(self):
        with pytest.raises(EnvironmentLoadError, match='Pendulum-v1'):
            suite_gym.load('Pendulum-v0')
        pytest.importorskip('mujoco')  # some versions of gymnasium check for it first
        with pytest.raises(EnvironmentLoadError, match="(gymnasium-robotics|mujoco_py).*; did you mean 'Hopper-v5'"):
            suite_gym.load('Hopper-v2')

    def test_arguments_that_the_constructor_does_not_know_are_rejected(self):
        with pytest.raises(EnvironmentLoadError, match='CartPole-v1: .*unexpected keyword.*env_args'):
            suite_gym.load('CartPole-v1', env_args={'wind': 3})
        env = suite_gym.load('FrozenLake-v1', env_args={'map_name': '8x8'})
        assert env.observation_spec() == BoundedTensorSpec((), torch.int64, 0, 63)


class TestLoad:

    def test_time_limits(self):
        for limit, length in ((4, 4), ([2, 3], 2), (None, 200), (0, None)):
            env = suite_gym.load('MountainCar-v0', max_episode_steps=limit, batch_size=2)
            env.reset()
            ends = [t for t in range(1, 203) if env.step(torch.zeros(2, dtype=torch.int64)).is_last()[0]]
            assert (ends[0] if ends else None) == length
        with pytest.raises(EnvironmentLoadError, match='max_episode_steps: expected 2 numbers'):
            suite_gym.load('CartPole-v1', max_episode_steps=[1], batch_size=2)

    def test_actions_are_normalized_by_default(self):
        assert suite_gym.load('Pendulum-v1').action_spec() == BoundedTensorSpec((1, ), torch.float32, -1, 1)
        plain = suite_gym.wrap_env(gymnasium.make('Pendulum-v1'), normalize_action=False)
        assert plain.action_spec() == BoundedTensorSpec((1, ), torch.float32, -2, 2)

    def test_wrappers_are_applied_inside_out(self):
        env = suite_gym.load('CartPole-v1', batch_size=2, env_id=5, discount=0.5, alf_env_wrappers=[
            lambda e: TimeLimit(e, 3)], gym_env_wrappers=[lambda e: ObservationSubset(e, (0, 2)),
                                                         lambda e: FrameStack(e, 2)])
        assert env.observation_spec().shape == (4, )
        time_step = run(env, 3)
        assert time_step.is_last().all() and time_step.discount.tolist() == [0.5, 0.5]
        assert time_step.env_id.tolist() == [5, 6]

    @pytest.mark.parametrize('wrapper, transformer', [
        (gymnasium.wrappers.NormalizeObservation, '@ObservationNormalizer'),
        (partial(gymnasium.wrappers.NormalizeReward, gamma=0.9), '@DiscountedReturnScaling'),
        (type('Mine', (gymnasium.wrappers.NormalizeReward, ), {}), '@DiscountedReturnScaling'),
        (wraps(gymnasium.wrappers.NormalizeReward)(lambda env: gymnasium.wrappers.NormalizeReward(env)),
         '@DiscountedReturnScaling'),  # as a configurable
        (gymnasium.wrappers.ClipAction, None)])
    def test_wrappers_with_statistics_are_warned_of(self, wrapper, transformer, caplog):
        suite_gym.load('Pendulum-v1', gym_env_wrappers=[wrapper]).close()
        assert (transformer or 'nothing') in caplog.text or (transformer is None and not caplog.text)

    @pytest.mark.parametrize('load', [
        lambda: suite_gym.wrap_env([lambda: gymnasium.wrappers.NormalizeReward(ChainEnv(3))] * 2),
        lambda: suite_gym.load(lambda: gymnasium.wrappers.TimeLimit(gymnasium.wrappers.NormalizeReward(ChainEnv(3)), 5),
                               batch_size=2),
        lambda: suite_gym.wrap_env(gymnasium.wrappers.vector.NormalizeReward(gymnasium.make_vec('CartPole-v1', 2)))])
    def test_wrappers_with_statistics_inside_functions_are_warned_of_once(self, load, caplog):
        load().close()
        assert caplog.text.count('NormalizeReward has statistics') == 1

    def test_infos_become_env_info_on_request(self):
        env = suite_gym.load('MountainCar-v0', env_info_keys=['TimeLimit.truncated', 'missing'])
        assert env.env_info_spec() == {'TimeLimit.truncated': TensorSpec(()), 'missing': TensorSpec(())}
        assert run(env).env_info['missing'].tolist() == [0]

    def test_natively_batched_implementations(self):
        env = suite_gym.load('CartPole-v1', batch_size=4, native=True, max_episode_steps=5)
        env.seed(0)
        first = [env.step(torch.zeros(4, dtype=torch.int64)).observation for _ in range(8)]
        env.seed(0)
        second = [env.step(torch.zeros(4, dtype=torch.int64)).observation for _ in range(8)]
        torch.testing.assert_close(first, second)
        env.reset()
        assert env.render().shape == (400, 600, 3)
        unlimited = suite_gym.load('CartPole-v1', batch_size=4, native=True, max_episode_steps=0)
        assert not unlimited.step(torch.zeros(4, dtype=torch.int64)).is_last().any()
        with pytest.raises(EnvironmentLoadError, match='no natively batched implementation'):
            suite_gym.load('Acrobot-v1', native=True)
        with pytest.raises(EnvironmentLoadError, match='gym_env_wrappers'):
            suite_gym.load('CartPole-v1', native=True, gym_env_wrappers=[FrameStack])

    def test_one_environment_is_a_batch_of_one(self):
        env = AlfGymWrapper(ChainEnv(3), env_id=4)
        assert run(env).env_id.tolist() == [4]
        assert tensor_spec_from_gym_space(env.gym.single_action_space) == env.action_spec()
        for make in (AlfGymWrapper, suite_gym.wrap_env):
            with pytest.raises(EnvironmentLoadError, match='auto_reset=False'):
                make(ChainEnv(3), auto_reset=False)

    def test_wrapping_with_a_time_limit_truncates(self):
        assert run(suite_gym.wrap_env(CountEnv(50), max_episode_steps=2), 2).is_last().all()

    def test_environments_in_other_processes_by_the_documented_name(self):
        with ParallelAlfEnvironment([CountEnv] * 2, max_restarts=1) as env:
            assert run(env).observation.shape == (2, 4)
        with pytest.raises(EnvironmentLoadError, match='flatten=True'):
            ParallelAlfEnvironment([CountEnv], flatten=False)


class TestPictures:

    def test_an_image_of_environment_0_is_rendered(self):
        env = suite_gym.load('CartPole-v1', batch_size=2)
        frame = env.render('rgb_array')
        assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3
        with pytest.raises(ValueError, match="expected 'rgb_array' or 'human'"):
            env.render('ansi')
        env.close()

    def test_render_human_shows_the_image_in_a_window(self, monkeypatch):
        monkeypatch.setenv('SDL_VIDEODRIVER', 'dummy')
        env = suite_gym.wrap_env(ChainEnv(3, render_mode='rgb_array'))
        assert env.render('human') is None
        env.step(torch.zeros(1, dtype=torch.int64))
        env.render('human')
        env.close()

    def test_a_missing_image_raises_with_the_remedy(self):
        with pytest.raises(UnsupportedOperationError, match="construct it with render_mode='rgb_array'"):
            suite_gym.wrap_env(ChainEnv(3)).render()
        with pytest.raises(EnvironmentLoadError, match='render_mode: expected one of'):
            suite_gym.load('CartPole-v1', render_mode='ansi')


class TestSavedState:

    @pytest.mark.parametrize('name', ['CartPole-v1', 'Pendulum-v1', 'Acrobot-v1', 'MountainCarContinuous-v0',
                                      'FrozenLake-v1', 'Blackjack-v1'])
    def test_classic_control_and_toy_text_resume_exactly(self, name):
        same_continuation(lambda: suite_gym.load(name, batch_size=2, max_episode_steps=30))

    def test_stateful_wrappers_resume_exactly(self):
        same_continuation(lambda: suite_gym.load('CartPole-v1', gym_env_wrappers=[lambda e: FrameStack(e, 3)]))

    @pytest.mark.parametrize('name', ['Ant-v5', 'Pusher-v5', 'InvertedPendulum-v5'])
    def test_mujoco_resumes_exactly(self, name):
        pytest.importorskip('mujoco')
        same_continuation(lambda: suite_gym.load(name, batch_size=1, max_episode_steps=30), steps=40)

    def test_atari_resumes_exactly(self):
        pytest.importorskip('ale_py')
        same_continuation(lambda: suite_atari.load('Breakout'), steps=50, before=10)

    def test_minigrid_resumes_exactly(self):
        pytest.importorskip('minigrid')
        same_continuation(lambda: suite_minigrid.load('MiniGrid-Dynamic-Obstacles-5x5-v0', max_episode_steps=15))

    def test_environments_in_workers_resume_exactly(self):
        from alfx.environments.process_vector_env import ProcessVectorEnv
        same_continuation(lambda: suite_gym.load('CartPole-v1', batch_size=3, vector_env=lambda fns: ProcessVectorEnv(
            fns, envs_per_worker=2)))

    def test_box2d_has_no_exact_state_and_the_error_explains_why(self, caplog):
        pytest.importorskip('Box2D')
        env = suite_gym.load('LunarLander-v3')
        saved_state._log_once.cache_clear()
        with caplog.at_level(logging.INFO):
            assert env.get_state() is None
        assert 'cannot be saved' in caplog.text

    def test_an_environment_that_is_itself_native_has_no_state(self):
        """Refuse to save the state: the attributes could be saved, but the state in native code would be lost."""
        class Native(ChainEnv, _random.Random):
            pass

        env = Native()
        env.reset(seed=0)
        assert saved_state.capture(env) is None and saved_state.capture(ChainEnv()) is not None

    def test_a_simulator_inside_an_environment_would_be_recreated(self):
        class Outer(ChainEnv):

            def __init__(self):
                super().__init__()
                self.simulator = _Restarting()

        assert saved_state.capture(Outer()) is None

    def test_a_state_of_another_environment_is_rejected(self):
        state = suite_gym.load('CartPole-v1').get_state()
        with pytest.raises(ValueError, match='PendulumEnv'):
            suite_gym.load('Pendulum-v1').set_state(state)
        with pytest.raises(ValueError, match='expected 2 environments.*found 1'):
            suite_gym.load('CartPole-v1', batch_size=2).set_state(state)


class TestAtari:

    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip('ale_py')
        pytest.importorskip('cv2')

    def test_games_are_seen_as_deepmind_sees_them(self):
        env = suite_atari.load('Pong', batch_size=2)
        env.seed(0)
        assert env.observation_spec() == BoundedTensorSpec((4, 84, 84), torch.uint8, 0, 255)
        assert env.action_spec() == BoundedTensorSpec((), torch.int64, 0, 5)
        time_step = run(env, 4)
        assert time_step.observation.float().std() > 1
        assert env.render().shape == (210, 160, 3)

    @pytest.mark.parametrize('name, arguments, expected', [
        ('PongNoFrameskip-v4', {}, 0.0), ('Breakout-v4', {}, 0.0), ('PongNoFrameskip-v0', {}, 0.25), ('Pong', {}, 0.25),
        ('ALE/Pong-v5', {}, 0.25), ('PongNoFrameskip-v4', {'sticky_action_probability': 0.5}, 0.5),
        ('Pong', {'sticky_action_probability': 0.0}, 0.0),
        ('Pong', {'env_args': {'repeat_action_probability': 0.125}}, 0.125)])
    def test_actions_stick_as_the_id_is_registered_which_is_logged(self, name, arguments, expected, caplog):
        suite_gym.log_sticky_actions.cache_clear()
        caplog.set_level('INFO')
        env = suite_atari.load(name, **arguments)
        message = f'sticky actions with probability {expected:g}' if expected else 'no sticky actions'
        assert [line for line in caplog.messages if line.endswith(message)]
        assert env.gym.envs[0].unwrapped.ale.getFloat('repeat_action_probability') == expected

    @pytest.mark.parametrize('make', [
        partial(suite_atari.load, 'Breakout', noop_max=1), partial(suite_gym.load, 'ALE/Breakout-v5'),
        lambda **kwargs: suite_gym.wrap_env(gymnasium.make('ALE/Breakout-v5'), **kwargs)],
        ids=['suite_atari', 'suite_gym', 'wrap_env'])
    def test_a_lost_life_can_be_a_termination_within_the_episode(self, make):
        env = make(alf_env_wrappers=[AtariTerminalOnLifeLossWrapper])
        env.seed(0)
        lives, kinds, remaining = [], set(), float(env.reset().env_info['lives'])
        for _ in range(200):
            time_step = env.step(torch.ones(1, dtype=torch.int64))
            if time_step.is_mid() and float(time_step.env_info['lives']) < remaining:
                assert time_step.discount.tolist() == [0]
                lives.append(int(time_step.env_info['lives']))
            elif time_step.is_mid():
                assert time_step.discount.tolist() == [1]
            remaining = float(time_step.env_info['lives'])
            kinds.add(int(time_step.step_type))
        assert lives[:3] == [4, 3, 2] and 1 in kinds

    @pytest.mark.parametrize('mode', ['NextStep', 'SameStep'])
    def test_the_vector_environment_of_the_game_is_supported(self, mode):
        from ale_py.vector_env import AtariVectorEnv

        from alfx.environments.gym_vector_environment import GymVectorEnvironment
        env = GymVectorEnvironment(AtariVectorEnv('breakout', 2, autoreset_mode=mode, episodic_life=True, noop_max=1,
                                                  img_height=20, img_width=20), seed=0, env_info_keys=('lives', ))
        checked = CheckedEnvironment(env)
        checked.reset()
        kinds = [checked.step(torch.ones(2, dtype=torch.int64)).step_type for _ in range(70)]
        assert (torch.stack(kinds) == 2).any()
        assert env.get_state() is None


class TestMiniGrid:

    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip('minigrid')

    @pytest.mark.parametrize('observation, spec', [
        ('one_hot', BoundedTensorSpec((20, 7, 7), torch.uint8, 0, 1)),
        ('image', BoundedTensorSpec((3, 7, 7), torch.uint8, 0, 10)),
        ('indices', BoundedTensorSpec((7, 7, 3), torch.int64, np.zeros((7, 7, 3)), [10, 5, 2])),
    ])
    def test_grids_are_encoded_and_the_mission_dropped(self, observation, spec):
        env = suite_minigrid.load('MiniGrid-DoorKey-5x5-v0', observation=observation, batch_size=2)
        assert env.observation_spec() == spec
        time_step = run(env, 10)
        if observation == 'one_hot':
            assert (time_step.observation.sum(1) == 3).all()

    def test_one_hot_codes_match_minigrid(self):
        from minigrid.wrappers import OneHotPartialObsWrapper
        env = gymnasium.make('MiniGrid-DoorKey-5x5-v0')
        expected = OneHotPartialObsWrapper(env).reset(seed=3)[0]['image']
        actual = suite_minigrid.MiniGridObservation(env).reset(seed=3)[0]
        np.testing.assert_array_equal(expected, actual)

    def test_the_full_grid_and_the_direction(self):
        env = suite_minigrid.load('MiniGrid-Empty-5x5-v0', fully_observable=True, direction=True)
        assert env.observation_spec()['image'].shape == (21, 5, 5)
        assert env.observation_spec()['direction'] == BoundedTensorSpec((), torch.int64, 0, 3)
        run(env)

    @pytest.mark.parametrize('observation', ['one_hot', 'indices'])
    def test_the_full_grid_shows_every_direction_of_the_agent(self, observation):
        env = suite_minigrid.load('MiniGrid-Empty-5x5-v0', observation=observation, fully_observable=True)
        grids = [env.reset().observation] + [env.step(torch.zeros(1, dtype=torch.int64)).observation for _ in range(3)]
        cells = [grid[0, 17:, 1, 1].argmax() if observation == 'one_hot' else grid[0, 1, 1, 2] for grid in grids]
        assert [int(cell) for cell in cells] == [0, 3, 2, 1]  # it turns left

    def test_suite_gym_suggests_suite_minigrid_for_a_minigrid_task(self):
        with pytest.raises(ValueError, match=r"observation\['mission'\].*suite_minigrid.load drops the mission"):
            suite_gym.load('MiniGrid-Empty-5x5-v0')

    def test_an_unknown_encoding_is_rejected(self):
        with pytest.raises(ValueError, match="must be 'one_hot' or 'image' or 'indices', found str 'rgb'"):
            suite_minigrid.load('MiniGrid-Empty-5x5-v0', observation='rgb')


def test_no_window_is_opened_on_this_machine():
    assert os.environ.get('SDL_VIDEODRIVER') == 'dummy'


def test_output_of_packages_that_are_not_needed_is_not_shown(tmp_path, monkeypatch, capfd):
    (tmp_path / 'noisy_plugin.py').write_text("import logging, sys\nlogging.warning('advice')\nprint('more advice')\n"
                                              "import gymnasium\ngymnasium.register('Quiet-v3', 'x:Y')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gym_make, '_PLUGINS', {'noisy_plugin': 'Noisy'})
    with pytest.raises(EnvironmentLoadError, match="did you mean 'Quiet-v3'"):
        suite_gym.load('Quiet-v2')
    gym_make.registry.pop('Quiet-v3')
    assert 'advice' not in ''.join(capfd.readouterr())


@pytest.mark.parametrize('name, value', [('observation_space', {'a': 1}), ('action_space', 4), ('action_space', None)])
def test_a_space_that_is_not_a_gymnasium_space_is_reported(name, value):
    def make():
        env = gymnasium.make('CartPole-v1').unwrapped
        setattr(env, name, value)
        return env

    found = f'{name} of CartPoleEnv: expected a space .*found {re.escape(repr(value))}'
    with pytest.raises(EnvironmentLoadError, match=found):
        suite_gym.load(make)


def test_an_environment_may_be_registered_in_another_process_only(monkeypatch):
    with pytest.raises(EnvironmentLoadError) as here:
        suite_gym.load('CartPolle-v1')
    monkeypatch.setattr('multiprocessing.parent_process', lambda: 'a process')
    with pytest.raises(EnvironmentLoadError, match="register it outside of if __name__ == '__main__'"):
        suite_gym.load('CartPolle-v1')
    assert "'CartPole-v1'" in str(here.value) and '__main__' not in str(here.value)


def test_an_unknown_id_is_answered_with_the_latest_version_of_similar_ones():
    message = gym_make._unknown('HumanoidBulletEnv-v0')
    assert 'Humanoid-v5' in message and '-v2' not in message and '-v3' not in message
