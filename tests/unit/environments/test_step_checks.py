"""Errors about non-finite data from natively batched environments, such as EnvPool, name the single environment."""
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from alfx.environments.environment_errors import EnvironmentStepError
from alfx.environments.gym_vector_environment import GymVectorEnvironment


class Pool(VectorEnv):
    """A batch of three environments that returns the given values at the second step and later."""

    num_envs = 3
    metadata = {'autoreset_mode': AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Dict({'camera': spaces.Box(0, 255, (2, ), np.uint8),
                                            'speed': spaces.Box(-np.inf, np.inf, (2, ), np.float32)})
    single_action_space = spaces.Discrete(2)

    def __init__(self, **sent):
        self._sent, self._steps = sent, 0

    def _observation(self, speed=None):
        return {'camera': np.zeros((3, 2), np.uint8), 'speed': np.zeros((3, 2), np.float32) if speed is None else speed}

    def reset(self, *, seed=None, options=None):
        return self._observation(self._sent.get('speed_at_reset')), {}

    def step(self, actions):
        self._steps += 1
        sent = self._sent if self._steps > 1 else {}
        return (self._observation(sent.get('speed')), sent.get('reward', np.ones(3)),
                sent.get('terminated', np.zeros(3, bool)), sent.get('truncated', np.zeros(3, bool)), {})


def step_twice(**sent):
    env = GymVectorEnvironment(Pool(**sent), name='Pool')
    env.reset()
    env.step(torch.zeros(3, dtype=torch.int64))
    return env.step(torch.zeros(3, dtype=torch.int64))


NAN = np.array([[0, 0], [0, 0], [0, np.nan]], np.float32)


@pytest.mark.parametrize('sent, row, message', [
    ({'reward': np.array([0.0, np.nan, np.inf])}, 1, 'its reward is .*nan.*, expected a finite number'),
    ({'reward': np.array([0.0, 0.0, -np.inf], np.float32)}, 2, 'its reward is .*inf'),
    ({'reward': [1.0, None, 1.0]}, 1, 'its reward is None, expected a number'),
    ({'reward': [1.0, 1.0, '1.0']}, 2, "its reward is '1.0', expected a number"),
    ({'terminated': np.array(['no', 'no', 'no'])}, 0, "terminated is 'no', expected True or False"),
    ({'truncated': [0, 1, 2]}, 2, 'truncated is 2, expected True or False'),
    ({'truncated': [False, None, False]}, 1, 'truncated is None'),
    ({'speed': NAN}, 2, r'its observation\.speed contains NaN'),
])
def test_non_finite_values_name_the_environment(sent, row, message):
    with pytest.raises(EnvironmentStepError, match=rf"environment {row} of 'Pool' failed in step\(\): {message}"):
        step_twice(**sent)


def test_resets_are_checked_as_well():
    with pytest.raises(EnvironmentStepError, match=r"environment 2 of 'Pool' failed in reset\(\): its observation"):
        step_twice(speed_at_reset=NAN)


def test_numbers_and_flags_keep_their_values():
    speed = np.array([[np.inf, -np.inf], [0, 1], [2, 3]], np.float32)
    time_step = step_twice(reward=[1, 2, 3], terminated=[0, 1, 0], truncated=np.array([1, 0, 0]), speed=speed)
    assert time_step.reward.tolist() == [1.0, 2.0, 3.0] and time_step.is_last().tolist() == [True, True, False]
    assert time_step.discount.tolist() == [1.0, 0.0, 1.0] and torch.equal(time_step.observation['speed'],
                                                                          torch.from_numpy(speed))


@pytest.mark.parametrize('sent, message', [
    ({'reward': np.ones(1)}, r'their reward has shape \(1,\), expected \(3,\)'),
    ({'reward': 1.0}, r'their reward has shape \(\), expected \(3,\)'),
    ({'reward': np.ones((3, 2))}, r'their reward has shape \(3, 2\), expected \(3,\)'),
    ({'terminated': False}, r'terminated has shape \(\), expected \(3,\)'),
    ({'truncated': np.zeros((3, 1))}, r'truncated has shape \(3, 1\), expected \(3,\)'),
    ({'speed': np.zeros((1, 2), np.float32)}, r'their observation\.speed has shape \(1, 2\), expected \(3, 2\)'),
    ({'speed': np.zeros((3, 1), np.float32)}, r'their observation\.speed has shape \(3, 1\), expected \(3, 2\)'),
])
def test_values_are_not_broadcast_over_a_batch(sent, message):
    with pytest.raises(EnvironmentStepError, match=rf"an environment of 'Pool' failed in step\(\): {message}"):
        step_twice(**sent)
