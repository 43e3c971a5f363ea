"""Tiny batched environments of tensors whose optimal value is known in closed form, for tests of algorithms.

An episode has ``n = episode_length`` time steps, including FIRST and LAST, hence ``n - 1`` rewards. All environments
of the batch end together, by termination. With discount g, "return" below is the return from FIRST, and ``S(k) =
1 + g + ... + g**(k-1) = (1 - g**k) / (1 - g)``. With ``reward_dim`` K > 1 rewards and returns have the components
``r, 2 r, ..., K r``.
"""
import enum
from typing import Any

import torch

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import SpecifiedEnvironment, check_action
from alfx.environments.seeding import batch_seed
from alfx.tensor_specs import (BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, nearest_zeros,
                               without_action)


class ActionType(enum.Enum):
    """Kinds of actions."""

    Discrete = 1
    Continuous = 2


class UnittestEnv(SpecifiedEnvironment):
    """Base class of these environments: observations are noise, and every reward is 0.

    The first element of the observation is the signal, the others are noise; both are -1 or 1.

    Args:
        batch_size: ``B``.
        episode_length: number of time steps of an episode, at least 2.
        obs_dim: size of the observation.
        action_type: Discrete: int64 ``()``, 0 or 1; Continuous: float32 ``(1,)`` in [-1, 1].
        nested_observation: use the observation ``{'signal': (obs_dim,), 'noise': (image (3,) uint8, int64 ())}``.
        reward_dim: dimension of the reward; 1: the reward is ``[B]``.
    """

    def __init__(self, batch_size: int, episode_length: int, obs_dim: int = 1,
                 action_type: ActionType = ActionType.Discrete, nested_observation: bool = False, reward_dim: int = 1):
        if batch_size < 1 or episode_length < 2 or obs_dim < 1 or reward_dim < 1:
            raise ValueError('expected batch_size, obs_dim and reward_dim >= 1 and episode_length >= 2, found '
                             f'{batch_size}, {obs_dim}, {reward_dim} and {episode_length}')
        self._batch_size, self._episode_length, self._obs_dim = batch_size, episode_length, obs_dim
        self._action_type, self._nested = action_type, nested_observation
        self._reward_spec = TensorSpec(() if reward_dim == 1 else (reward_dim, ))
        self._reward_scale = torch.arange(1.0, reward_dim + 1) if reward_dim > 1 else None
        self._generator = torch.Generator()
        self._generator.seed()
        self._t = torch.zeros(batch_size, dtype=torch.int32)
        self._signal = torch.zeros(batch_size)

    # Description -----------------------------------------------------------------------------------------------

    def observation_spec(self) -> NestedTensorSpec:
        signal = BoundedTensorSpec((self._obs_dim, ), torch.float32, -1, 1)
        if not self._nested:
            return signal
        return {'signal': signal, 'noise': (BoundedTensorSpec((3, ), torch.uint8, 0, 255),
                                            BoundedTensorSpec((), torch.int64, 0, 4))}

    def action_spec(self) -> NestedTensorSpec:
        return _action_spec(self._action_type)

    # Dynamics --------------------------------------------------------------------------------------------------

    def _reward(self, action: NestedTensor, t: torch.Tensor) -> torch.Tensor:
        """Return the reward ``[B]`` for arriving at step ``t`` (int32 ``[B]``, from 1) of the episode by ``action``."""
        return torch.zeros(self._batch_size)

    def _visible_signal(self, signal: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return the first element of the observation ``[B]`` at step ``t``."""
        return signal

    def _draw_signal(self, previous: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return the signal ``[B]`` at step ``t``."""
        return self._signs(self._batch_size)

    def _signs(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=self._generator) * 2.0 - 1

    def _reset(self) -> TimeStep:
        self._t = torch.zeros_like(self._t)
        return self._time_step(torch.zeros(self._batch_size), nearest_zeros(self.action_spec(), self._batch_size))

    def _step(self, action: NestedTensor) -> TimeStep:
        check_action(action, self.action_spec(), self._batch_size)
        self._t = torch.where(self._t >= self._episode_length - 1, 0, self._t + 1)
        first = self._t == 0
        reward = self._reward(action, self._t).masked_fill(first, 0)
        return self._time_step(reward, without_action(first, action, self.action_spec()))

    def _time_step(self, reward: torch.Tensor, prev_action: NestedTensor) -> TimeStep:
        last = self._t == self._episode_length - 1
        step_type = torch.where(last, StepType.LAST, (self._t > 0).to(torch.int32)).to(torch.int32)
        if self._reward_scale is not None:
            reward = reward[:, None] * self._reward_scale
        return TimeStep(step_type, reward, (~last).to(torch.float32), self._observe(), prev_action,
                        torch.arange(self._batch_size))

    def _observe(self) -> NestedTensor:
        self._signal = self._draw_signal(self._signal, self._t)
        observation = self._signs(self._batch_size, self._obs_dim)
        observation[:, 0] = self._visible_signal(self._signal, self._t)
        if not self._nested:
            return observation
        image = torch.randint(0, 256, (self._batch_size, 3), generator=self._generator).to(torch.uint8)
        return {'signal': observation, 'noise': (image, torch.randint(0, 5, (self._batch_size, ),
                                                                      generator=self._generator))}

    def request_reset(self, mask: torch.Tensor) -> None:
        self._t = torch.where(mask, self._episode_length, self._t)

    def _seed(self, seed: int | None) -> None:
        # not the seed itself: torch's global generator, from which policies draw, may have the same seed
        own = batch_seed(seed, 0)
        self._generator.seed() if own is None else self._generator.manual_seed(own)

    def get_state(self) -> Any:
        current = nest.map_structure(torch.clone, self.current_time_step())
        return {'current': current, 't': self._t.clone(), 'signal': self._signal.clone(),
                'generator': self._generator.get_state()}

    def set_state(self, state: Any) -> None:
        self._current = nest.map_structure(torch.clone, state['current'])
        self._t, self._signal = state['t'].clone(), state['signal'].clone()
        self._generator.set_state(state['generator'])


def _action_spec(action_type: ActionType) -> BoundedTensorSpec:
    if action_type is ActionType.Discrete:
        return BoundedTensorSpec((), torch.int64, 0, 1)
    return BoundedTensorSpec((1, ), torch.float32, -1, 1)


def _agreement(action: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
    """Return 1 for the right action, less for others, ``[B]``.

    The right actions for the signals -1 and 1 are 0 and 1 (discrete), or -0.5 and 0.5 (continuous).
    """
    if action.dtype.is_floating_point:
        return 1 - (action.detach().reshape(len(action), -1)[:, 0] - 0.5 * signal).abs()
    return (action * 2 - 1 == signal).to(torch.float32)


class ValueUnittestEnv(UnittestEnv):
    """Environment in which every reward is 1, whatever the action.

    The return is ``S(n - 1)``; the value at step t is ``S(n - 1 - t)``, for any policy.
    """

    def _reward(self, action: NestedTensor, t: torch.Tensor) -> torch.Tensor:
        return torch.ones(self._batch_size)


class PolicyUnittestEnv(UnittestEnv):
    """Environment that rewards actions that agree with the observed signal.

    A discrete action agrees if it is 0 at signal -1 and 1 at signal 1, with reward 1; otherwise the reward is 0. For a
    continuous action a at signal s the reward is ``1 - |a - s / 2|``.

    The optimal return is ``S(n - 1)``; a uniformly random discrete policy gets half of it.
    """

    def _reward(self, action: NestedTensor, t: torch.Tensor) -> torch.Tensor:
        return _agreement(action, self._signal)


class MixedPolicyUnittestEnv(UnittestEnv):
    """:class:`PolicyUnittestEnv` with an action ``{'discrete': int64 (), 'continuous': float32 (1,)}``.

    The reward is the mean of the rewards of both parts. The optimal return is ``S(n - 1)``.

    Args:
        batch_size: ``B``.
        episode_length: number of time steps of an episode.
        obs_dim: size of the observation.
        nested_observation: see :class:`UnittestEnv`.
        reward_dim: see :class:`UnittestEnv`.
    """

    def __init__(self, batch_size: int, episode_length: int, obs_dim: int = 1, nested_observation: bool = False,
                 reward_dim: int = 1):
        super().__init__(batch_size, episode_length, obs_dim, nested_observation=nested_observation,
                         reward_dim=reward_dim)

    def action_spec(self) -> NestedTensorSpec:
        return {'continuous': _action_spec(ActionType.Continuous), 'discrete': _action_spec(ActionType.Discrete)}

    def _reward(self, action: NestedTensor, t: torch.Tensor) -> torch.Tensor:
        return (_agreement(action['continuous'], self._signal) + _agreement(action['discrete'], self._signal)) / 2


class RNNPolicyUnittestEnv(UnittestEnv):
    """Environment that shows the signal of the episode at FIRST only (0 later) and rewards it ``gap`` steps later.

    The reward for arriving at steps 1 to ``gap`` is 0; later rewards are those of :class:`PolicyUnittestEnv` for the
    signal of FIRST. The optimal return is ``g**gap * S(n - 1 - gap)``; without memory it is half of it (discrete
    actions).

    Args:
        batch_size: ``B``.
        episode_length: number of time steps of an episode, at least ``gap + 2``.
        gap: number of steps without reward.
        action_type: see :class:`UnittestEnv`.
        obs_dim: size of the observation.
        nested_observation: see :class:`UnittestEnv`.
        reward_dim: see :class:`UnittestEnv`.
    """

    def __init__(self, batch_size: int, episode_length: int, gap: int = 3,
                 action_type: ActionType = ActionType.Discrete, obs_dim: int = 1, nested_observation: bool = False,
                 reward_dim: int = 1):
        if episode_length < gap + 2:
            raise ValueError(f'episode_length: expected at least gap + 2 = {gap + 2}, found {episode_length}')
        super().__init__(batch_size, episode_length, obs_dim, action_type, nested_observation, reward_dim)
        self._gap = gap

    def _draw_signal(self, previous: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.where(t == 0, self._signs(self._batch_size), previous)

    def _visible_signal(self, signal: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.where(t == 0, signal, 0.0)

    def _reward(self, action: NestedTensor, t: torch.Tensor) -> torch.Tensor:
        return _agreement(action, self._signal).masked_fill(t <= self._gap, 0)
