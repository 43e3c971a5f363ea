"""Factors of exploration bonuses. An :class:`~alfx.algorithms.exploration.bonus.ExplorationBonus` multiplies them.

A factor computes a number ``[T, B]`` for arriving at each step of a block. In the formulas o[t] is the observation
arrived at, phi[t] its feature and e[t] the prediction error of random network distillation, the norm and not its
square. ``N[t]`` counts the visits to o[t] in its episode, the present one included; the first step of an episode counts
as a visit.
"""
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.exploration.memory import EpisodicMemory, ObservationHash, Places
from alfx.gin_utils import check_value, configurable
from alfx.gin_utils.value_checks import Count, Positive
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


class Seen(NamedTuple):
    """What factors see of a block of steps.

    Attributes:
        observation: nest ``[T, B, ...]``.
        places: places of the steps in their episodes.
        feature: ``[T, B, F]``; ``None`` unless a factor ``needs`` it.
        error: ``[T, B]``; ``None`` unless a factor ``needs`` it.
    """

    observation: NestedTensor
    places: Places
    feature: Any = None
    error: Any = None


class Factor(nn.Module):
    """Base class of factors.

    Args:
        observation_spec: nest of specs of the observation.
        num_features: F; 0 if there are no features.

    Attributes:
        needs: 'feature' or 'error', what the factor needs besides observations; '' for neither.
        state_spec: spec of the state of each environment between blocks.
        capacity: most steps of a block; ``None``: any number.
    """

    needs = ''
    state_spec: NestedTensorSpec = ()
    capacity: int | None = None

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int):
        super().__init__()

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the factor ``[T, B]`` and the next state ``[B, ...]``; the factor is ignored at FIRST."""
        raise NotImplementedError(f'{type(self).__name__}.forward')


@configurable
class EpisodicCount(Factor):
    """Factor that decreases with the number of visits to an observation in the episode.

    1 at the first visit and 0 afterwards (``decay = 'first'``), or ``N[t]^(-1/2)`` (``decay = 'inverse_sqrt'``).

    Args:
        observation_spec: nest of specs of the observation.
        num_features: not used.
        decay: 'first' or 'inverse_sqrt'.
        resolution: floating point numbers are rounded to multiples of it before they are compared; required if the
            observation has any.
        field: path of the part of the observation that is counted; '': all of it.
        capacity: steps of an episode that are remembered; of a longer episode the oldest are forgotten.

    Raises:
        ConfError: ``decay`` or ``resolution`` does not fit.
        LookupError: the observation has no such field.
    """

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int = 0, decay: str = 'first',
                 resolution: Positive | None = None, field: str = '', capacity: Count = 1000):
        super().__init__(observation_spec, num_features)
        owner = type(self).__name__
        check_value(owner, 'decay', decay, str, choices=('first', 'inverse_sqrt'))
        self._field, self._is_first_only = field, decay == 'first'
        self._hash = ObservationHash(nest.get_field(observation_spec, field), resolution, owner)
        self.capacity = capacity
        self._memory = EpisodicMemory(capacity, TensorSpec((), torch.int64))
        self.state_spec = self._memory.state_spec

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the factor ``[T, B]`` and the hashes of the episode ``[B, capacity]``; see the base class."""
        hashes = self._hash(nest.get_field(seen.observation, self._field))
        others, are_earlier = self._memory.earlier(hashes, state, seen.places)
        count = ((others.unsqueeze(1) == hashes.T.unsqueeze(-1)) & are_earlier).sum(-1).T
        factor = (count == 0).float() if self._is_first_only else (count + 1).float().rsqrt()
        return factor, self._memory.add(hashes, state, seen.places)
