"""Environments with goals: achieved goals, ends of episodes, reported success; gymnasium-robotics."""
import re
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from test_suites import run, same_continuation

from alfx.environments import suite_goals, suite_gym, suite_robotics
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_goals import BitFlipEnv, PointGoalEnv
from alfx.environments.suite_robotics import SuccessAtEnd, SuccessWrapper
from alfx.utils.extras import pip_install


def play(env, actions):
    """Return the time steps after a reset with a fixed seed."""
    env.seed(0)
    env.reset()
    return [env.step(action) for action in actions]


class TestBitFlip:

    def test_flipping_the_bits_that_differ_reaches_the_goal_and_terminates(self):
        env = suite_goals.load('BitFlip', env_args={'num_bits': 8})
        env.seed(0)
        first = env.reset().observation
        wrong = torch.nonzero((first['achieved_goal'] != first['desired_goal'])[0])[:, 0]
        assert len(wrong) >= 2
        steps = [env.step(bit.view(1)) for bit in wrong]
        # the optimal return -(k - 1) of k bits that differ
        assert sum(float(step.reward) for step in steps) == -(len(wrong) - 1)
        assert bool(steps[-1].is_last()) and float(steps[-1].discount) == 0.0
        assert [float(step.env_info['success']) for step in steps] == [0.0] * (len(wrong) - 1) + [1.0]
        assert torch.equal(steps[-1].observation['achieved_goal'], steps[-1].observation['desired_goal'])

    def test_an_episode_has_as_many_steps_as_bits_and_then_is_truncated(self):
        env = suite_goals.load('BitFlip', env_args={'num_bits': 8})
        steps = play(env, [torch.tensor([i % 2]) for i in range(8)])
        assert [bool(step.is_last()) for step in steps] == [False] * 7 + [True]
        assert float(steps[-1].discount) == 1.0 and float(steps[-1].env_info['success']) == 0.0

    def test_the_goal_is_never_reached_at_the_start(self):
        env = BitFlipEnv(1)
        env.reset(seed=0)
        for _ in range(50):
            observation, _ = env.reset()
            assert observation['achieved_goal'] != observation['desired_goal']


class TestPointGoal:

    def test_moving_straight_reaches_the_goal_and_staying_succeeds(self):
        env = suite_goals.load('PointGoal')
        env.seed(0)
        time_step, rewards = env.reset(), []
        for _ in range(50):
            goal, state = (time_step.observation[key] for key in ('desired_goal', 'achieved_goal'))
            time_step = env.step(((goal - state) / 0.1).clamp(-1, 1))
            rewards.append(float(time_step.reward))
        assert bool(time_step.is_last()) and float(time_step.discount) == 1.0
        assert rewards[-1] == 0.0 and float(time_step.env_info['success']) == 1.0
        assert 0 < rewards.count(-1.0) <= 10, 'the farthest goal is reached in 10 steps'

    def test_the_point_stays_in_the_box_and_returned_arrays_do_not_change(self):
        env = PointGoalEnv(terminate=False)
        observation, _ = env.reset(seed=0)
        before = observation['achieved_goal'].copy()
        for _ in range(30):
            last, *_ = env.step(np.array([5.0, -5.0]))
        assert last['achieved_goal'].tolist() == [1.0, -1.0]
        assert np.array_equal(before, observation['achieved_goal'])


@pytest.mark.parametrize('name', ['BitFlip', 'PointGoal'])
def test_every_time_step_is_valid_and_a_saved_episode_resumes(name):
    run(suite_goals.load(name, batch_size=3), steps=30)
    same_continuation(lambda: suite_goals.load(name, batch_size=2))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(EnvironmentLoadError, match="did you mean 'BitFlip'"):
        suite_goals.load('BitFlop')


@pytest.mark.parametrize('steps, last', [(3, 2), (0, None)])
def test_the_number_of_steps_can_be_set(steps, last):
    env = suite_goals.load('PointGoal', max_episode_steps=steps)
    ends = [bool(step.is_last()) for step in play(env, [torch.zeros(1, 2)] * 60)]
    assert (ends.index(True) if True in ends else None) == last


class TestSuccessAtEnd:

    def test_an_environment_without_a_success_flag_is_rejected(self):
        env = SuccessAtEnd(gymnasium.make('CartPole-v1'))
        env.reset(seed=0)
        with pytest.raises(EnvironmentLoadError, match="expected one of .'is_success', 'success'., found .*suite_gym"):
            env.step(0)

    def test_temporary_success_does_not_count(self):
        class Passing(gymnasium.Wrapper):

            def step(self, action):
                observation, reward, terminated, truncated, _ = self.env.step(action)
                return observation, reward, terminated, truncated, {'success': not truncated}

        env = SuccessAtEnd(Passing(gymnasium.make('Pendulum-v1', max_episode_steps=3)))
        env.reset(seed=0)
        assert [env.step([0.0])[-1]['success'] for _ in range(3)] == [0.0, 0.0, 0.0]


class TestSuccessWrapper:

    @pytest.mark.parametrize('limit, since_episode_steps, expected', [
        (3, None, [0, 0, 1, 0, 0, 1]),     # the last step of the environment
        (None, 2, [0, 1, 1, 1, 1, 1]),     # every step from the second one
        (2, 3, [0, 1, 0, 1, 0, 1]), (3, 2, [0, 1, 1, 0, 1, 1]),
    ])
    def test_success_counts_at_the_last_step_and_since_a_given_one(self, limit, since_episode_steps, expected):
        class Reaching(gymnasium.Wrapper):

            def step(self, action):
                observation, reward, terminated, truncated, _ = self.env.step(action)
                return observation, reward, terminated, truncated, {'is_success': np.bool_(True)}

        pendulum = gymnasium.make('Pendulum-v1', max_episode_steps=limit or -1)
        env = SuccessWrapper(Reaching(pendulum), since_episode_steps)
        env.reset(seed=0)
        found = []
        for _ in range(6):
            *_, truncated, info = env.step([0.0])
            found.append(info['success'])
            if truncated:
                env.reset()
        assert found == expected


def test_a_missing_package_raises_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'gymnasium_robotics', None)
    for name in [name for name in gymnasium.registry if name.startswith('Fetch')]:
        monkeypatch.delitem(gymnasium.registry, name)
    for load in (suite_robotics.load, suite_gym.load):
        with pytest.raises(EnvironmentLoadError, match=re.escape(pip_install('robotics'))):
            load('FetchReach-v4')


class TestRobotics:

    @pytest.fixture(autouse=True)
    def robotics(self):
        pytest.importorskip('gymnasium_robotics')

    @pytest.mark.parametrize('arguments, infos', [
        (dict(use_success_wrapper=False), ()), (dict(use_success_wrapper=False, env_info_keys=['is_success']),
                                                ['is_success']),
        (dict(use_success_wrapper=False, gym_env_wrappers=[partial(SuccessWrapper, since_episode_steps=2)]),
         ['success'])])
    def test_the_success_wrapper_can_be_left_out_or_replaced(self, arguments, infos):
        env = suite_robotics.load('FetchReach-v4', **arguments)
        assert list(env.env_info_spec()) == list(infos)

    def test_goals_are_part_of_the_observation_and_rewards_are_sparse(self):
        env = suite_robotics.load('FetchReach-v4', batch_size=2)
        assert {key: tuple(spec.shape) for key, spec in env.observation_spec().items()} == {
            'observation': (10, ), 'achieved_goal': (3, ), 'desired_goal': (3, )}
        assert list(env.env_info_spec()) == ['success']
        last = run(env, steps=50)
        assert last.is_last().all() and (last.discount == 1).all()
        near = (last.observation['achieved_goal'] - last.observation['desired_goal']).norm(dim=1) < 0.05
        assert torch.equal(last.reward, near.float() - 1) and torch.equal(last.env_info['success'], near.float())

    def test_goal_and_state_may_be_one_vector(self):
        apart, together = (suite_robotics.load('FetchReach-v4', concat_desired_goal=concat) for concat in (False, True))
        for env in (apart, together):
            env.seed(3)
        observation = apart.reset().observation
        assert tuple(together.observation_spec().shape) == (13, )
        assert torch.equal(together.reset().observation,
                           torch.cat([observation['desired_goal'], observation['observation']], 1))

    def test_moving_towards_the_goal_is_a_success(self):
        env = suite_robotics.load('FetchReach-v4')
        env.seed(1)
        time_step = env.reset()
        for _ in range(50):
            goal, state = (time_step.observation[key] for key in ('desired_goal', 'achieved_goal'))
            time_step = env.step(torch.cat([((goal - state) / 0.05).clamp(-1, 1), torch.zeros(1, 1)], 1))
        assert float(time_step.reward) == 0.0 and float(time_step.env_info['success']) == 1.0

    @pytest.mark.parametrize('name', [
        'FetchReach-v4',
        'PointMaze_UMaze-v3',  # an environment inside an environment
        'AdroitHandDoor-v1'])  # places the door in the model
    def test_a_saved_episode_resumes_exactly(self, name):
        same_continuation(lambda: suite_robotics.load(name, max_episode_steps=30), steps=40, before=15)
