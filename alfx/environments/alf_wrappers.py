"""Wrappers around a whole batch of environments, for ``suite_gym.load.alf_env_wrappers`` (innermost first).

All of them are vectorized. Wrappers around single gymnasium environments are in :mod:`alfx.environments.gym_wrappers`.
Wrappers that join environments or switch between tasks are in :mod:`alfx.environments.multitask_wrappers`.
"""
import cProfile
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.checked_environment import CheckedEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError
from alfx.environments.multitask_wrappers import BatchEnvironmentWrapper, CurriculumWrapper, MultitaskWrapper
from alfx.environments.seeding import batch_seed
from alfx.environments.wrapper_base import AlfEnvironmentBaseWrapper
from alfx.gin_utils import Count, configurable
from alfx.tensor_specs import (BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, nearest_zeros,
                               without_action)

__all__ = [
    'ActionObservationWrapper', 'AlfEnvironmentBaseWrapper', 'AtariTerminalOnLifeLossWrapper',
    'BatchEnvironmentWrapper', 'CheckedEnvironment', 'CurriculumWrapper', 'DiscreteActionWrapper', 'MultitaskWrapper',
    'NonEpisodicAgent', 'NormalizedActionWrapper', 'PerformanceProfiler', 'RandomFirstEpisodeLength',
    'ReturnLimit', 'ScalarRewardWrapper', 'TemporallyCorrelatedNoiseWrapper', 'TimeLimit',
]


class _EpisodeLimit(AlfEnvironmentBaseWrapper):
    """Base class of wrappers that truncate episodes: the step at which a limit is reached becomes LAST."""

    _STATE: tuple[str, ...] = ('_elapsed', '_limits')

    def __init__(self, env: AlfEnvironment):
        super().__init__(env)
        try:
            env.request_reset(torch.zeros(self.batch_size, dtype=torch.bool))
        except UnsupportedOperationError as error:
            raise EnvironmentLoadError(f'{type(self).__name__}: {error}') from None
        self._elapsed = np.zeros(self.batch_size, np.int64)
        self._limits = np.full(self.batch_size, np.iinfo(np.int64).max)

    def _new_limits(self, begun: np.ndarray) -> None:
        """Set the limits of episodes that have begun, bool ``[B]``."""

    def _reset(self) -> TimeStep:
        time_step = self._env.reset()
        self._elapsed[:] = 0
        self._new_limits(np.ones(self.batch_size, bool))
        return time_step

    def _step(self, action: NestedTensor) -> TimeStep:
        time_step = self._env.step(action)
        step_type = time_step.step_type.numpy()
        self._elapsed += 1
        begun = step_type == StepType.FIRST
        if np.count_nonzero(begun):
            self._elapsed[begun] = 0
            self._new_limits(begun)
        over = self._is_over(time_step) & (step_type == StepType.MID)
        if not np.count_nonzero(over):
            return time_step
        self._env.request_reset(torch.from_numpy(over))
        return time_step._replace(step_type=torch.from_numpy(np.where(over, np.int32(StepType.LAST), step_type)))

    def _is_over(self, time_step: TimeStep) -> np.ndarray:
        """Return whether the limit is reached, bool ``[B]``."""
        return self._elapsed >= self._limits


@configurable
class TimeLimit(_EpisodeLimit):
    """Truncates episodes after ``duration`` steps; the discount of the LAST step is not changed.

    Args:
        env: the environment.
        duration: number of steps from FIRST to LAST, or a sequence of one number for each environment.
    """

    def __init__(self, env: AlfEnvironment, duration: int | Sequence[int]):
        super().__init__(env)
        limits = np.asarray(duration)
        if limits.shape not in ((), (self.batch_size, )) or limits.min() < 1:
            raise EnvironmentLoadError('TimeLimit.duration: expected a number of at least 1, or a sequence of '
                                       f'{self.batch_size} such numbers, found {duration}')
        self._limits[:] = limits

    @property
    def duration(self) -> int:
        """Number of steps from FIRST to LAST of environment 0."""
        return int(self._limits[0])


@configurable
class ReturnLimit(_EpisodeLimit):
    """Truncates episodes whose return, the sum of their rewards, reaches ``max_total_reward``.

    The discount of the LAST step is not changed, so values are bootstrapped from it, as at a time limit.

    Args:
        env: an environment with a reward of rank 0.
        max_total_reward: the return, above 0.

    Raises:
        EnvironmentLoadError: an argument is out of range, or the reward has another rank.
    """

    _STATE = ('_elapsed', '_limits', '_returns')

    def __init__(self, env: AlfEnvironment, max_total_reward: float):
        super().__init__(env)
        if env.reward_spec().ndim or not max_total_reward > 0:
            raise EnvironmentLoadError('ReturnLimit: expected a reward of rank 0 and max_total_reward above 0, found a '
                                       f'reward of shape {tuple(env.reward_spec().shape)} and {max_total_reward}; '
                                       'leave the wrapper out for no limit')
        self._max_total_reward, self._returns = max_total_reward, np.zeros(self.batch_size)

    def _new_limits(self, begun: np.ndarray) -> None:
        self._returns[begun] = 0.0

    def _is_over(self, time_step: TimeStep) -> np.ndarray:
        self._returns += time_step.reward.numpy()  # 0 at FIRST
        return self._returns >= self._max_total_reward


@configurable
class RandomFirstEpisodeLength(_EpisodeLimit):
    """Truncates the first episodes of each environment at random, so that episodes do not end in lockstep.

    Args:
        env: the environment.
        random_length_range: maximum length; lengths are drawn uniformly from 1 to this number, inclusive.
        num_episodes: number of episodes of each environment that are truncated.
    """

    _STATE = ('_elapsed', '_limits', '_begun_episodes', '_generator')

    def __init__(self, env: AlfEnvironment, random_length_range: Count, num_episodes: int = 1):
        super().__init__(env)
        self._range, self._num_episodes = random_length_range, num_episodes
        self._begun_episodes = np.zeros(self.batch_size, np.int64)
        self._generator = np.random.default_rng()

    def _seed(self, seed: int | None) -> None:
        super()._seed(seed)
        self._generator = np.random.default_rng(batch_seed(seed, 1))
        self._begun_episodes[:] = 0

    def _new_limits(self, begun: np.ndarray) -> None:
        self._begun_episodes[begun] += 1
        lengths = self._generator.integers(1, self._range + 1, self.batch_size)
        free = np.iinfo(np.int64).max
        self._limits[begun] = np.where(self._begun_episodes <= self._num_episodes, lengths, free)[begun]


@configurable
class NonEpisodicAgent(AlfEnvironmentBaseWrapper):
    """Makes terminations look like truncations: the discount of LAST is never 0.

    Args:
        env: the environment.
        discount: the discount of LAST steps.
    """

    def __init__(self, env: AlfEnvironment, discount: float = 1.0):
        super().__init__(env)
        self._discount = discount

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        return time_step._replace(discount=torch.where(time_step.is_last(), self._discount, time_step.discount))


@configurable
class ActionObservationWrapper(AlfEnvironmentBaseWrapper):
    """Adds the previous action: the observation becomes ``{'observation': ..., 'prev_action': ...}``."""

    def observation_spec(self) -> NestedTensorSpec:
        return {'observation': self._env.observation_spec(), 'prev_action': self._env.action_spec()}

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        return time_step._replace(observation={'observation': time_step.observation,
                                               'prev_action': time_step.prev_action})


@configurable
class ScalarRewardWrapper(AlfEnvironmentBaseWrapper):
    """Turns a multi-dimensional reward into a scalar, the weighted sum of its components.

    Args:
        env: an environment with rewards ``[B, K]``.
        reward_weights: K weights; ``None`` uses the first component only.
    """

    def __init__(self, env: AlfEnvironment, reward_weights: Sequence[float] | None = None):
        super().__init__(env)
        shape = env.reward_spec().shape
        if len(shape) != 1:
            raise EnvironmentLoadError(f'ScalarRewardWrapper: expected rewards of shape (K,), found {tuple(shape)}')
        weights = [1.0] + [0.0] * (shape[0] - 1) if reward_weights is None else list(reward_weights)
        if len(weights) != shape[0]:
            raise EnvironmentLoadError(f'ScalarRewardWrapper.reward_weights: expected {shape[0]} numbers, found '
                                       f'{len(weights)}')
        self._weights = torch.tensor(weights, dtype=torch.float32)

    def reward_spec(self) -> TensorSpec:
        return TensorSpec(())

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        return time_step._replace(reward=time_step.reward @ self._weights)


class _ActionWrapper(AlfEnvironmentBaseWrapper):
    """Base class of wrappers that change the action spec; ``prev_action`` is the action before the conversion."""

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        if action is None:
            return time_step._replace(prev_action=nearest_zeros(self.action_spec(), self.batch_size))
        return time_step._replace(prev_action=without_action(time_step.is_first(), action, self.action_spec()))


def _bounded_continuous(env: AlfEnvironment, wrapper: str) -> BoundedTensorSpec:
    spec = env.action_spec()
    if not (isinstance(spec, BoundedTensorSpec) and spec.is_continuous and spec.ndim <= 1):
        raise EnvironmentLoadError(f'{wrapper}: expected one bounded continuous action of rank 0 or 1, found {spec}')
    return spec


@configurable
class DiscreteActionWrapper(_ActionWrapper):
    """Discretizes a continuous action: each of its D elements takes one of ``actions_num`` evenly spaced values.

    Args:
        env: an environment with one bounded continuous action ``(D,)``.
        actions_num: number of values of each element, including both bounds; there are ``actions_num ** D`` actions.
    """

    def __init__(self, env: AlfEnvironment, actions_num: int):
        super().__init__(env)
        spec = _bounded_continuous(env, 'DiscreteActionWrapper')
        if actions_num < 2 or actions_num**max(spec.numel, 1) > 10**6:
            raise EnvironmentLoadError('DiscreteActionWrapper.actions_num: expected at least 2, and at most 10**6 '
                                       f'actions in all, found {actions_num} for each of {spec.numel} elements')
        low, high = (np.broadcast_to(bound, spec.shape).reshape(-1) for bound in (spec.minimum, spec.maximum))
        values = np.linspace(low, high, actions_num).T
        table = np.array(list(itertools.product(*values)), dtype=np.float32)
        self._table = torch.from_numpy(table).reshape(-1, *spec.shape).to(spec.dtype)
        self._spec = BoundedTensorSpec((), torch.int64, 0, len(table) - 1)

    def action_spec(self) -> NestedTensorSpec:
        return self._spec

    def _inner(self, action: NestedTensor) -> NestedTensor:
        return self._table[action.cpu()]


class NormalizedActionWrapper(_ActionWrapper):
    """Rescales all bounded continuous parts of the action to [-1, 1].

    ``suite_gym.load`` does the same without a wrapper (``wrap_env.normalize_action``).

    Args:
        env: the environment.
    """

    def __init__(self, env: AlfEnvironment):
        super().__init__(env)
        self._scales = nest.map_structure(_scale, env.action_spec())
        self._spec = nest.map_structure(
            lambda spec: spec.replace(minimum=-1.0, maximum=1.0) if _is_scaled(spec) else spec, env.action_spec())

    def action_spec(self) -> NestedTensorSpec:
        return self._spec

    def _inner(self, action: NestedTensor) -> NestedTensor:
        return nest.map_structure_up_to(
            action, lambda a, scale: a if scale is None else torch.addcmul(scale[0], a.cpu(), scale[1]), action,
            self._scales)


def _is_scaled(spec: TensorSpec) -> bool:
    return isinstance(spec, BoundedTensorSpec) and spec.is_continuous and bool(
        np.all(np.isfinite(spec.minimum)) and np.all(np.isfinite(spec.maximum)))


def _scale(spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the middle and the half width of the bounds; ``None`` for an action that is not rescaled."""
    if not _is_scaled(spec):
        return None
    assert isinstance(spec, BoundedTensorSpec)
    low, high = torch.from_numpy(spec.minimum.copy()), torch.from_numpy(spec.maximum.copy())
    return (low + high) / 2, (high - low) / 2


@configurable
class TemporallyCorrelatedNoiseWrapper(AlfEnvironmentBaseWrapper):
    """Adds temporally correlated noise to continuous actions.

    ``noise[t] = past_noise_weight * noise[t-1] + sigma * normal``, from 0 at the start of each episode; the sum of
    action and noise is clipped to the bounds of the action. ``prev_action`` is the action without noise.

    Args:
        env: an environment with one bounded continuous action.
        sigma: standard deviation of the random number added to the noise at each step.
        past_noise_weight: 0 for white noise, 1 for a random walk.
    """

    _STATE = ('_noise', '_generator')

    def __init__(self, env: AlfEnvironment, sigma: float = 0.5, past_noise_weight: float = 1.0):
        super().__init__(env)
        spec = _bounded_continuous(env, 'TemporallyCorrelatedNoiseWrapper')
        self._sigma, self._weight = sigma, past_noise_weight
        self._low, self._high = torch.from_numpy(spec.minimum.copy()), torch.from_numpy(spec.maximum.copy())
        self._noise = torch.zeros(self.batch_size, *spec.shape)
        self._generator = torch.Generator()
        self._generator.seed()

    def _seed(self, seed: int | None) -> None:
        super()._seed(seed)
        own = batch_seed(seed, 0)
        self._generator.seed() if own is None else self._generator.manual_seed(own)

    def _step(self, action: NestedTensor) -> TimeStep:
        self._noise = self._weight * self._noise + self._sigma * torch.randn(self._noise.shape,
                                                                             generator=self._generator)
        action = action.detach().cpu()
        time_step = self._env.step(torch.clamp(action + self._noise, self._low, self._high))
        first = time_step.is_first()
        self._noise[first] = 0
        return time_step._replace(prev_action=without_action(first, action, self.action_spec()))

    def _reset(self) -> TimeStep:
        self._noise = torch.zeros_like(self._noise)
        return super()._reset()


@configurable
class AtariTerminalOnLifeLossWrapper(AlfEnvironmentBaseWrapper):
    """Treats the loss of a life as a termination in returns, while the episode lasts until the game is over.

    The discount of the step that loses a life is 0, so nothing is bootstrapped from the next one, as in the
    preprocessing of Mnih et al. 2015. The step stays MID, as in ALF, so the return of an episode is the score of the
    game.

    Args:
        env: an environment whose ``env_info`` has 'lives', as that of every Atari game.
        fire_action: action to execute after the loss of a life instead of the given action, for games that wait for it:
            1 (FIRE) in Breakout, as in the preprocessing of OpenAI Baselines. The replay buffer stores the given
            action of that step, unless ``overwrite_policy_output`` is set. ``None``: execute the given action.
    """

    _STATE = ('_lives', '_lost')

    def __init__(self, env: AlfEnvironment, fire_action: int | None = None):
        super().__init__(env)
        if fire_action is not None and not 0 <= fire_action <= (largest := int(env.action_spec().maximum)):
            raise EnvironmentLoadError(f'AtariTerminalOnLifeLossWrapper.fire_action: expected 0 to {largest}, found '
                                       f'{fire_action}')
        self._fire_action = fire_action
        spec = env.env_info_spec()
        if not isinstance(spec, dict) or 'lives' not in spec:
            raise EnvironmentLoadError("AtariTerminalOnLifeLossWrapper: env_info has no 'lives'; load the environment "
                                       "with env_info_keys=('lives',)")
        self._lives, self._lost = torch.zeros(self.batch_size), torch.zeros(self.batch_size, dtype=torch.bool)

    def _reset(self) -> TimeStep:
        time_step = self._env.reset()
        self._lives, self._lost = time_step.env_info['lives'], torch.zeros_like(self._lost)
        return time_step

    def _step(self, action: NestedTensor) -> TimeStep:
        if self._fire_action is not None:
            action = action.masked_fill(self._lost, self._fire_action)
        time_step = self._env.step(action)
        self._lost = (time_step.env_info['lives'] < self._lives) & time_step.is_mid()
        self._lives = time_step.env_info['lives']
        return time_step._replace(discount=time_step.discount.masked_fill(self._lost, 0))


@configurable
class PerformanceProfiler(AlfEnvironmentBaseWrapper):
    """Profiles the steps of the environment with cProfile.

    Args:
        env: the environment.
        process_profile_fn: called with the ``cProfile.Profile`` of the last ``process_steps`` steps.
        process_steps: number of steps between two calls.
    """

    def __init__(self, env: AlfEnvironment, process_profile_fn: Callable[[cProfile.Profile], Any], process_steps: int):
        super().__init__(env)
        self._process, self._every, self._count = process_profile_fn, process_steps, 0
        self._profile = cProfile.Profile()

    def _step(self, action: NestedTensor) -> TimeStep:
        self._profile.enable()
        time_step = self._env.step(action)
        self._profile.disable()
        self._count += 1
        if self._count % self._every == 0:
            self._process(self._profile)
            self._profile = cProfile.Profile()
        return time_step

    @property
    def duration(self) -> int:
        """Number of steps profiled so far."""
        return self._count
