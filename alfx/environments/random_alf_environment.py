"""An environment of random observations for given specs, to test algorithms and networks without a simulator."""
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import SpecifiedEnvironment
from alfx.environments.checked_environment import check_values
from alfx.environments.seeding import batch_seed
from alfx.gin_utils import Count, Fraction, StepLimit, configurable
from alfx.tensor_specs import (BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, nearest_zeros,
                               without_action)


@configurable
class RandomAlfEnvironment(SpecifiedEnvironment):
    """Environment whose observations are drawn from their spec, uniformly between its bounds or standard normal.

    Each environment of the batch ends its episodes independently of the others, by termination. Actions have to fit
    their spec.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action.
        env_id: ``TimeStep.env_id`` of the first environment; ``None``: 0.
        episode_end_probability: probability that a step is the last one of its episode.
        discount: the discount of every step that is neither FIRST nor LAST.
        reward_fn: called as ``(step_type, action, observation)`` with tensors ``[B, ...]``, returns rewards ``[B]``;
            ``None``: 0. The reward at FIRST is 0.
        batch_size: B; ``None``: 1.
        seed: seed of the first episodes; see :meth:`seed`.
        render_size: shape of the image that :meth:`render` returns.
        min_duration: number of steps at the start of an episode in which it cannot end.
        max_duration: number of steps after which an episode ends; ``None``: unlimited.

    Raises:
        SpecError: from ``step``: the action does not fit its spec.
        ValueError: ``max_duration`` is not above ``min_duration``.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, env_id: int | None = None,
                 episode_end_probability: Fraction = 0.1, discount: Fraction = 1.0,
                 reward_fn: Callable[..., Any] | None = None, batch_size: Count | None = None, seed: int | None = 42,
                 render_size: tuple[int, int, int] = (2, 2, 3), min_duration: StepLimit = 0,
                 max_duration: Count | None = None):
        if max_duration is not None and max_duration <= min_duration:
            raise ValueError(f'max_duration: expected more than min_duration = {min_duration}, found {max_duration}')
        self._observation_spec, self._action_spec = observation_spec, action_spec
        self._batch_size, first = 1 if batch_size is None else batch_size, 0 if env_id is None else env_id
        self._env_ids = torch.arange(first, first + self._batch_size)
        self._end_probability, self._discount, self._reward_fn = episode_end_probability, discount, reward_fn
        self._min_duration, self._max_duration, self._render_size = min_duration, max_duration, render_size
        self._t = torch.zeros(self._batch_size, dtype=torch.int64)
        self._generator = torch.Generator()
        self._seed(seed)

    def _reset(self) -> TimeStep:
        self._t = torch.zeros_like(self._t)
        return self._time_step(torch.zeros(self._batch_size, dtype=torch.int32),
                               nearest_zeros(self._action_spec, self._batch_size))

    def _step(self, action: NestedTensor) -> TimeStep:
        check_values(action, self._action_spec, 'action')
        first = self.current_time_step().is_last()
        self._t = torch.where(first, 0, self._t + 1)
        ends = torch.rand(self._batch_size, generator=self._generator) < self._end_probability
        ends &= self._t > self._min_duration
        if self._max_duration is not None:
            ends |= self._t >= self._max_duration
        step_type = torch.where(ends & ~first, StepType.LAST, torch.where(first, StepType.FIRST, StepType.MID))
        return self._time_step(step_type.to(torch.int32), without_action(first, action, self._action_spec))

    def _time_step(self, step_type: torch.Tensor, prev_action: NestedTensor) -> TimeStep:
        observation = nest.map_structure(self._draw, self._observation_spec)
        reward = torch.zeros(self._batch_size)
        if self._reward_fn is not None:
            reward = torch.as_tensor(self._reward_fn(step_type, prev_action, observation), dtype=torch.float32)
            reward = reward.expand(self._batch_size).masked_fill(step_type == StepType.FIRST, 0)
        discount = torch.full((self._batch_size, ), self._discount)
        discount = discount.masked_fill(step_type == StepType.FIRST, 1).masked_fill(step_type == StepType.LAST, 0)
        return TimeStep(step_type, reward, discount, observation, prev_action, self._env_ids)

    def _draw(self, spec: TensorSpec) -> torch.Tensor:
        shape = (self._batch_size, *spec.shape)
        if not isinstance(spec, BoundedTensorSpec) or not np.isfinite(spec.maximum - spec.minimum).all():
            return torch.randn(shape, generator=self._generator).to(spec.dtype)
        low, high = (torch.as_tensor(bound.astype(np.float64)) for bound in (spec.minimum, spec.maximum))
        uniform = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        if spec.is_discrete:
            return (low + (uniform * (high - low + 1)).floor()).to(spec.dtype)
        return (low + uniform * (high - low)).to(spec.dtype)

    def _seed(self, seed: int | None) -> None:
        own = batch_seed(seed, 0)
        self._generator.seed() if own is None else self._generator.manual_seed(own)

    def get_state(self) -> Any:
        current = nest.map_structure(torch.clone, self.current_time_step())
        return {'current': current, 't': self._t.clone(), 'generator': self._generator.get_state()}

    def set_state(self, state: Any) -> None:
        self._current, self._t = nest.map_structure(torch.clone, state['current']), state['t'].clone()
        self._generator.set_state(state['generator'])

    def render(self, mode: str = 'rgb_array') -> np.ndarray:
        """Return a random image ``[*render_size]``; it is not shown in a window."""
        return np.random.default_rng().integers(0, 256, self._render_size, np.uint8)
