"""Memories of the current episode of each environment, for rewards that depend on what the episode has seen so far.

Rewards are computed for a *block* of consecutive steps ``[T, B]`` at once. A block may contain several episodes of an
environment; no step is compared with a step of another episode. Read next:
:mod:`alfx.algorithms.exploration.factors`.
"""
import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.intrinsic.intrinsic_reward import is_first
from alfx.gin_utils import ConfError, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


logger = logging.getLogger(__name__)


class Places(NamedTuple):
    """Places of the steps of a block in their episodes, int64.

    Attributes:
        segment: ``[T, B]``: number of episodes that have begun in the block so far; 0 in the episode in progress before
            the block.
        position: ``[T, B]``: number of earlier steps of the episode.
        length: ``[B]``: number of steps before the block in the episode in progress.
    """

    segment: Tensor
    position: Tensor
    length: Tensor

    @property
    def follows(self) -> Tensor:
        """bool ``[T, B]``: there is a previous step in the episode."""
        return self.position > 0

    @property
    def next_length(self) -> Tensor:
        """Steps of the episode in progress after the block, int64 ``[B]``."""
        return self.position[-1] + 1


def places_of(step_type: Tensor, length: Tensor) -> Places:
    """Return the places of steps ``[T, B]``, after ``length [B]`` steps of the episode in progress."""
    first = is_first(step_type)
    index = torch.arange(len(step_type), device=step_type.device).unsqueeze(-1)
    begin = torch.where(first, index, -length).cummax(0).values
    return Places(first.long().cumsum(0), index - begin, length)


def previous_rows(x: Tensor, before: Tensor) -> Tensor:
    """Shift ``x [T, ...]`` by one step; ``before [...]`` is the row before the first one."""
    return torch.cat((before.unsqueeze(0), x[:-1]))


def longer_than_memory(length: Tensor, capacity: int, path: str) -> bool:
    """Return whether an episode of ``length [B]`` steps is longer than a memory; log a warning if so."""
    is_longer = bool(length.max() > capacity)
    if is_longer:
        logger.warning('%s: an episode is longer than the %d steps that are remembered, so its first steps are '
                       'forgotten; increase the capacity', path, capacity)
    return is_longer


class EpisodicMemory:
    """Ring of the last ``capacity`` steps of the current episode of each environment.

    Args:
        capacity: maximum number of steps.
        spec: spec of what is stored of a step.
    """

    def __init__(self, capacity: int, spec: TensorSpec):
        self.capacity = capacity
        self.state_spec = TensorSpec((capacity, *spec.shape), spec.dtype)

    def earlier(self, items: Tensor, memory: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return everything that a step can be compared with.

        Args:
            items: what is stored of the steps, ``[T, B, ...]`` with ``T <= capacity``.
            memory: ``[B, capacity, ...]``.
            places: places of the steps.

        Returns:
            - ``[B, capacity + T, ...]``: memory and block.
            - bool ``[B, T, capacity + T]``: whether the entry is one of the ``capacity`` steps before the step, in the
              same episode.
        """
        segment, position = places.segment.T, places.position.T
        slot = torch.arange(self.capacity, device=items.device)
        last = places.length.unsqueeze(-1) - 1
        stored = last - (last - slot) % self.capacity  # position of the step in each slot; negative if empty
        age = position.unsqueeze(-1) - stored.unsqueeze(1)
        in_memory = (stored >= 0).unsqueeze(1) & (segment == 0).unsqueeze(-1) & (age <= self.capacity)
        in_block = (segment.unsqueeze(-1) == segment.unsqueeze(1)) & (position.unsqueeze(-1) > position.unsqueeze(1))
        return torch.cat((memory, items.transpose(0, 1)), 1), torch.cat((in_memory, in_block), -1)

    def add(self, items: Tensor, memory: Tensor, places: Places) -> Tensor:
        """Return the memory ``[B, capacity, ...]`` after a block, of which the last episode is kept."""
        step, environment = (places.segment == places.segment[-1]).nonzero(as_tuple=True)
        memory = memory.clone()
        memory[environment, places.position[step, environment] % self.capacity] = items[step, environment]
        return memory


class ObservationHash(nn.Module):
    """Hashes of observations, int64: equal for equal observations and, in practice, different for different ones.

    Each number x_i is mixed with random constants, and the results are added up modulo 2^64:

        h = sum_i c_i * (y_i xor (y_i >> 29)),  y_i = (x_i + a_i) * b_i

    Args:
        observation_spec: nest of specs of the observation.
        resolution: floating point numbers are rounded to multiples of it; ``None`` if there are none.
        owner: class named in error messages.

    Raises:
        ConfError: there are floating point numbers without ``resolution``, or the reverse.
    """

    _constants: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, resolution: float | None, owner: str):
        super().__init__()
        leaves = nest.flatten(observation_spec)
        has_floats = any(spec.is_continuous for spec in leaves)
        if has_floats != (resolution is not None):
            problem = ('= None, but the observation has floating point numbers, which hardly ever repeat exactly'
                       if has_floats else f'= {resolution}, but the observation has only integers')
            raise ConfError([problem_at(owner, 'resolution', problem, 'set the difference below which two numbers are '
                                        'the same, such as 0.01' if has_floats else 'leave it out')])
        self._resolution = resolution
        generator = torch.Generator().manual_seed(0)  # the same in each run
        constants = torch.randint(-2**63, 2**63 - 1, (3, sum(spec.numel for spec in leaves)), generator=generator)
        self.register_buffer('_constants', constants | torch.tensor([[0], [1], [1]]), persistent=False)

    def forward(self, observation: NestedTensor) -> Tensor:
        """Return the hashes ``[T, B]`` of observations ``[T, B, ...]``."""
        numbers = torch.cat([self._integers(x).flatten(2) for x in nest.flatten(observation)], -1)
        shift, factor, weight = self._constants
        mixed = (numbers + shift) * factor
        return ((mixed ^ (mixed >> 29)) * weight).sum(-1)

    def _integers(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape, 1) if x.ndim == 2 else x
        if self._resolution is not None and x.is_floating_point():
            x = torch.round(x / self._resolution)
        return x.long()
