"""Results of single environments that do not fit the interface of gymnasium or the spaces of the environment."""
import logging
import re
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from alfx.environments import alf_wrappers, step_checks
from alfx.environments.described_environment import DescribedEnvironment
from alfx.environments.environment_errors import EnvironmentStepError
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.gym_wrappers import ImageChannelFirst
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.spaces import ObservationCodec
from alfx.environments.vector_env import SerialVectorEnv
from alfx.environments.wrapper_base import AlfEnvironmentBaseWrapper

FLOATS = spaces.Box(-1, 1, (2, ), np.float32)
IMAGE = spaces.Box(0, 255, (8, 6, 3), np.uint8)


class Returning(gymnasium.Env):
    """An environment that returns one value from ``reset``, and ``observations`` in turn from its steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=FLOATS, reset=None, observations=()):
        self.observation_space = space
        self._reset = (space.sample(), {}) if reset is None else reset
        self._observations, self._steps = observations, 0

    def reset(self, *, seed=None, options=None):
        return self._reset

    def step(self, action):
        self._steps += 1
        return self._observations[(self._steps - 1) % len(self._observations)], 0.0, False, False, {}


class WithoutOptions(Returning):

    def reset(self, seed=None):
        return self._reset


class WithoutArguments(Returning):

    def reset(self):
        return self._reset[0]


class PositionalOnly(Returning):

    def reset(self, seed=None, options=None, /):
        return self._reset


class FourValues(Returning):

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, {}


def message_of_a_step(env_fn):
    env = SerialVectorEnv([env_fn])
    env.reset()
    with pytest.raises(EnvironmentStepError) as caught:
        env.step(np.zeros(1, int))
    return str(caught.value)


@pytest.mark.parametrize('wrap', [RecordEpisodeStatistics, lambda env: TimeLimit(env, 5)])
def test_an_old_step_inside_a_wrapper_is_named_with_its_remedy(wrap):
    message = message_of_a_step(lambda: wrap(FourValues()))
    assert re.search('(?s)expected 5, got 4.*old interface of gym', message) and 'max_restarts' not in message


def test_another_tuple_of_the_wrong_length_is_no_old_interface():
    class Broken(Returning):

        def step(self, action):
            x, y = self._position()
            return x, y

        def _position(self):
            return 1, 2, 3

    message = message_of_a_step(lambda: RecordEpisodeStatistics(Broken()))
    assert re.search('(?s)expected 2.*max_restarts', message) and 'old interface' not in message


def test_a_reward_vector_without_a_declaration_is_named_with_its_remedy():
    class Vector(Returning):

        def step(self, action):
            return self.observation_space.sample(), np.ones(2), False, False, {}

    assert re.search('(?s)expected a number.*self.reward_space = Box', message_of_a_step(Vector))


@pytest.mark.parametrize('env, found', [
    (WithoutOptions, "got an unexpected keyword argument 'options'"),
    (WithoutArguments, "got an unexpected keyword argument 'seed'"),
    (lambda: gymnasium.Wrapper(WithoutArguments()), "got an unexpected keyword argument 'seed'"),
    (PositionalOnly, 'got some positional-only arguments passed as keyword arguments'),
    (lambda: Returning(reset=np.zeros(2, np.float32)), r'it returned array.*, expected \(observation, info\)'),
    (lambda: Returning(spaces.Dict(a=FLOATS, b=FLOATS), {'a': np.zeros(2), 'b': np.zeros(2)}), 'it returned {'),
    (lambda: Returning(spaces.Tuple((FLOATS, FLOATS)), (np.zeros(2), np.zeros(2))), r'it returned \(array'),
    (lambda: Returning(spaces.Discrete(3), 0), 'it returned 0'),
    (lambda: Returning(spaces.Tuple((spaces.Discrete(3), spaces.Dict(a=FLOATS))), (0, {'a': np.zeros(2, np.float32)})),
     r'it returned \(0'),
    (lambda: Returning(reset=(np.zeros(2), 1.0, {})), 'it returned'),
    (lambda: ImageChannelFirst(Returning(spaces.Dict(a=IMAGE, b=FLOATS), {'a': np.zeros((8, 6, 3)), 'b': np.zeros(2)})),
     "it returned {'a'"),
])
def test_an_old_reset_is_named_with_its_remedy(env, found):
    with pytest.raises(EnvironmentStepError, match=rf'(?s){found}.*old interface of gym.*seed=None, options') as caught:
        SerialVectorEnv([env]).reset(seed=0)
    assert 'max_restarts' not in str(caught.value) and caught.value.during == 'reset()'


def test_a_missing_info_of_a_reset_is_an_empty_one():
    for info in (None, [], {}):
        assert SerialVectorEnv([lambda info=info: Returning(reset=(np.zeros(2, np.float32), info))]).reset()[1] == {}


BYTES = spaces.Box(0, 255, (2, ), np.uint8)


@pytest.mark.parametrize('space, observation, found', [
    (BYTES, np.array([0.0, 0.5]), r'0\.5 \(at \[1\]\), which its space Box\(0, 255'),
    (BYTES, np.array([3, 256]), r'256 \(at \[1\]\)'),
    (BYTES, np.array([-1, 0]), '-1'),
    (spaces.Box(0, 9, (2, ), np.int64), np.array([0, 10]), '10'),
    (spaces.Discrete(4), 4, r'4, which its space Discrete\(4\) does not allow'),
    (spaces.Discrete(4, start=2), 1, '1, which its space'),
    (spaces.Discrete(4), 1.5, '1.5'),
    (spaces.MultiDiscrete([2, 3]), np.array([1, 3]), '3'),
    (spaces.MultiBinary(2), np.array([0, 2]), '2'),
    (spaces.MultiBinary(2), np.array([0, np.nan]), 'nan'),
    (spaces.Dict(a=FLOATS, b=spaces.Discrete(2)), {'a': np.zeros(2, np.float32), 'b': -1}, '-1, which'),
])
def test_values_outside_an_integer_space_are_rejected(space, observation, found):
    env = SerialVectorEnv([lambda: Returning(space, observations=[observation])] * 2)
    env.reset()
    with pytest.raises(EnvironmentStepError, match=rf'environment 0 .*step\(\): observation.* contains .*{found}'):
        env.step(np.zeros(2, int))
    with pytest.raises(EnvironmentStepError, match=r'failed in reset\(\): observation.* contains'):
        SerialVectorEnv([lambda: Returning(space, reset=(observation, {}))]).reset()


def test_an_image_of_another_rank_is_named_with_both_shapes():
    space = spaces.Dict(camera=IMAGE, arm=FLOATS)
    sent = {'camera': np.zeros((8, 6), np.uint8), 'arm': np.zeros(2, np.float32)}
    env = SerialVectorEnv([lambda: ImageChannelFirst(Returning(space, observations=[sent]))])
    with pytest.raises(EnvironmentStepError, match=r"observation\['camera'\]: expected .*\(3, 8, 6\).* shape \(8, 6\)"):
        env.reset()
        env.step(np.zeros(1, int))


def test_whole_numbers_of_another_dtype_are_accepted():
    for space, sent in ((BYTES, [7.0, 255.0]), (spaces.Discrete(4), np.float32(3)), (spaces.MultiBinary(2), [True, 0]),
                        (spaces.Box(0, 1, (2, ), bool), [0, 1]), (BYTES, [True, False])):
        env = SerialVectorEnv([lambda space=space, sent=sent: Returning(space, observations=[np.array(sent)])])
        env.reset()
        assert np.array_equal(env.step(np.zeros(1, int))[0][0], sent)


def test_later_observations_are_compared_with_the_space_as_well():
    calls = step_checks._CALLS_PER_CHECK
    observations = [np.zeros(2, np.uint8)] * 100 + [np.full(2, 0.5)] * 999
    env = SerialVectorEnv([lambda: Returning(BYTES, observations=observations)])
    env.reset()
    with pytest.raises(EnvironmentStepError, match='contains 0.5'):
        for _ in range(2 * calls):
            env.step(np.zeros(1, int))


@pytest.mark.parametrize('space, sent', [(FLOATS, np.array([1j, 0])), (FLOATS, np.array(['1', '0'])),
                                         (FLOATS, np.array(['2026-01-02'] * 2, 'M8[D]')), (spaces.Discrete(4), '2')])
def test_observations_that_are_no_real_numbers_are_rejected(space, sent):
    with pytest.raises(EnvironmentStepError, match='values, which its space .* does not allow'):
        SerialVectorEnv([lambda: Returning(space, reset=(sent, {}))]).reset()


def test_a_batch_outside_an_integer_space_is_rejected():
    class Pool(VectorEnv):
        num_envs, metadata = 3, {'autoreset_mode': AutoresetMode.NEXT_STEP}
        single_observation_space, single_action_space = BYTES, spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.full((3, 2), 0.5), {}

    with pytest.raises(EnvironmentStepError, match=r'0\.5 \(at \[0\]\[0\]\), which its space Box\(0, 255'):
        GymVectorEnvironment(Pool(), name='Pool').reset()


@pytest.mark.parametrize('sent, message', [
    ([0.0, 3.0], r"environment 0 of 'Returning': observation of step 0 contains 3\.0.* Box\(-1"),
    ([np.inf, 0.0], r"environment 0 of 'Returning': observation of step 1 of its episode contains infinity"),
])
def test_floats_outside_their_space_are_logged_once_and_kept(sent, message, monkeypatch, caplog):
    monkeypatch.setattr(step_checks, '_logged', {('Returning', '')} if np.inf in sent else set())
    env = SerialVectorEnv([lambda: Returning(observations=[np.array(sent, np.float32)])])
    env.reset()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert env.step(np.zeros(1, int))[0].tolist() == [sent]
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)


class TwoRewards(Returning):
    reward_space = spaces.Box(-1, 1, (2, ))

    def __init__(self):
        super().__init__(observations=[np.zeros(2, np.float32)])

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, np.array([1.0, -0.5]), *rest


class Weighted(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward @ [0.5, 0.5], *rest


class Declared(Weighted):
    reward_space = spaces.Box(-1, 1, ())


class Sum(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward.sum()


class Range(Weighted):
    reward_space = (-1, 1)  # not a space, like reward_range of gym


class DeclaredAsOne(Weighted):
    reward_space = spaces.Box(-1, 1, (1, ))


class Three(gymnasium.RewardWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.reward_space = spaces.Box(-1, 1, (3, ))

    def reward(self, reward):
        return np.append(reward, 0)


@pytest.mark.parametrize('wrappers, shape', [
    ([], (2, )), ([Weighted], ()), ([Declared], ()), ([DeclaredAsOne], ()), ([Range], ()), ([Sum], ()),
    ([Three], (3, )), ([Three, Sum], ()),
    ([lambda env: gymnasium.wrappers.TimeLimit(env, 5), Sum, gymnasium.Wrapper], ())])
def test_wrappers_may_change_the_number_of_rewards(wrappers, shape):
    def make():
        env = TwoRewards()
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    env = GymVectorEnvironment(SerialVectorEnv([make, make]))
    assert env.reward_spec().shape == shape
    env.reset()
    assert env.step(torch.zeros(2, dtype=torch.int64)).reward.shape == (2, *shape)


@pytest.mark.parametrize('make', [SerialVectorEnv, pytest.param(ProcessVectorEnv, marks=pytest.mark.processes)])
def test_the_reward_of_goals_is_that_of_the_outermost_wrapper(make):
    class Goals(TwoRewards):
        def compute_reward(self, achieved, desired, info):
            return 1.0

    class Other(gymnasium.Wrapper):
        def compute_reward(self, achieved, desired, info):
            return 2.0

    with AlfEnvironmentBaseWrapper(GymVectorEnvironment(make([lambda: Other(gymnasium.Wrapper(Goals()))]))) as env:
        assert env.goal_reward_fn()(0, 0, {}) == DescribedEnvironment(env, 3).goal_reward_fn()(0, 0, {}) == 2.0
    with GymVectorEnvironment(make([TwoRewards])) as env:
        assert env.goal_reward_fn() is None


def test_an_info_that_is_no_dict_is_rejected():
    class Listing(Returning):
        def step(self, action):
            return *super().step(action)[:4], ['info']

    env = SerialVectorEnv([lambda: Listing(observations=[np.zeros(2, np.float32)])])
    env.reset()
    with pytest.raises(EnvironmentStepError, match=r"its info is \['info'\], expected a dict"):
        env.step(np.zeros(1, int))


def test_an_info_of_none_is_an_empty_one():
    class Silent(Returning):
        def step(self, action):
            return *super().step(action)[:4], None

    with GymVectorEnvironment(SerialVectorEnv([lambda: Silent(observations=[np.zeros(2, np.float32)] * 3)])) as env:
        limited = alf_wrappers.TimeLimit(env, 1)
        limited.reset()
        assert limited.step(torch.zeros(1, dtype=torch.int64)).is_last().all()


@pytest.mark.parametrize('large', [1e300, -1e39])
def test_numbers_too_large_for_float32_are_logged_with_their_step(large, monkeypatch, caplog):
    monkeypatch.setattr(step_checks, '_logged', set())
    space = spaces.Box(-np.inf, np.inf, (2, ), np.float64)
    env = SerialVectorEnv([lambda sent=sent: Returning(space, (np.zeros(2), {}), [np.array([0.0, sent])])
                           for sent in (3e38, large)])
    env.reset()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter('error')
        observation = env.step(np.zeros(2, int))[0]
        stored = ObservationCodec(space).decode(observation, owned=False)
    assert not torch.isfinite(stored[1, 1]) and torch.isfinite(stored[0]).all()
    assert "environment 1 of 'Returning': observation of step 1 of its episode contains a number too large for " \
           'float32' in caplog.text


def test_a_missing_file_raises_with_the_path_that_always_works():
    with pytest.raises(EnvironmentStepError, match=r'No such file.*\n  name files relative to the module') as caught:
        SerialVectorEnv([lambda: open('no_such_file.csv')])
    assert 'its constructor' in str(caught.value)
