"""Kinds of actions of soft actor-critic: continuous, discrete, or a discrete action with continuous ones.

Also contains target entropies and exploration for each kind. Read next: :mod:`alfx.algorithms.sac_algorithm`.
"""
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.base.exploration_noise import HeldNoise, ZetaRepeat
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.discrete_action import leaf_of_mask, random_valid, suited_algorithms


class ActionType(enum.Enum):
    """Kind of actions that an algorithm chooses."""

    Discrete = 1
    Continuous = 2
    Mixed = 3


class ActionParts:
    """Discrete and continuous part of an action.

    Args:
        action_spec: nest of continuous specs; or one discrete spec of shape ``()``; or a tuple, list or dict of two:
            one discrete spec of shape ``()`` and a nest of continuous specs.

    Attributes:
        type: kind of action, an :class:`ActionType`.
        discrete: spec of the discrete part, or ``()``.
        continuous: nest of specs of the continuous part, or ``()``.

    Raises:
        SpecError: the action is another combination of specs.
    """

    def __init__(self, action_spec: NestedTensorSpec):
        leaves = nest.flatten(action_spec)
        is_discrete = [leaf.is_discrete for leaf in leaves]
        self._spec = action_spec
        self._keys: tuple[Any, Any] = (None, None)
        self.discrete: Any = ()
        self.continuous: NestedTensorSpec = ()
        if leaves and not any(is_discrete):
            self.type, self.continuous = ActionType.Continuous, action_spec
        elif leaves and all(is_discrete):
            if not isinstance(action_spec, BoundedTensorSpec):
                raise SpecError(f'expected a single discrete action, found {action_spec}; '
                                f'{suited_algorithms(action_spec)}')
            self.type, self.discrete = ActionType.Discrete, action_spec
        else:
            self.type, self._keys = ActionType.Mixed, _keys_of_parts(action_spec)
            self.discrete, self.continuous = (action_spec[key] for key in self._keys)
        if self.type != ActionType.Continuous and self.discrete.ndim != 0:
            raise SpecError(f'expected a discrete action of shape (), found {self.discrete}; '
                            f'{suited_algorithms(action_spec)}')

    def split(self, action: NestedTensor) -> tuple[Any, NestedTensor]:
        """Split a nest like the action into ``(discrete, continuous)``; a missing part is ``()``."""
        if self.type == ActionType.Mixed:
            return action[self._keys[0]], action[self._keys[1]]
        return (action, ()) if self.type == ActionType.Discrete else ((), action)

    def join(self, discrete: Any, continuous: NestedTensor) -> NestedTensor:
        """Invert :meth:`split`."""
        if self.type != ActionType.Mixed:
            return discrete if self.type == ActionType.Discrete else continuous
        parts = dict(zip(self._keys, (discrete, continuous)))
        if isinstance(self._spec, dict):
            return type(self._spec)((key, parts[key]) for key in self._spec)
        return type(self._spec)((parts[0], parts[1]))

    def with_valid_choice(self, action: NestedTensor, mask: NestedTensor) -> NestedTensor:
        """Return ``action`` with its discrete part sampled uniformly from the valid ones, if there is a mask."""
        own = leaf_of_mask(mask)
        if not isinstance(own, Tensor):
            return action
        discrete, continuous = self.split(action)
        return self.join((random_valid(own) + int(self.discrete.minimum)).to(discrete.dtype), continuous)

    def index(self, discrete_action: Tensor) -> Tensor:
        """Return the index int64 ``[B]`` of the output of the Q network for a discrete action ``[B]``."""
        start = int(self.discrete.minimum)
        index = discrete_action.long()
        return index - start if start else index


def _keys_of_parts(action_spec: NestedTensorSpec) -> tuple[Any, Any]:
    """Return the keys of the discrete and the continuous part of a mixed action."""
    if type(action_spec) in (tuple, list, dict) and len(action_spec) == 2:
        keys = list(action_spec) if isinstance(action_spec, dict) else [0, 1]
        for discrete, continuous in (keys, keys[::-1]):
            if (isinstance(action_spec[discrete], BoundedTensorSpec) and action_spec[discrete].is_discrete
                    and not any(leaf.is_discrete for leaf in nest.flatten(action_spec[continuous]))):
                return discrete, continuous
    raise SpecError('expected a mixed action to be a tuple, list or dict of two: one discrete action and a nest of '
                    f'continuous ones, such as (discrete, continuous); found {action_spec}; '
                    f'{suited_algorithms(action_spec)}')


class Choice(NamedTuple):
    """Choice of the policy at N steps.

    ``distribution`` and ``action`` are nests like the action, ``continuous`` is the continuous part of ``action`` and
    ``log_prob`` ``[N]`` its log-probability, if requested. A discrete part is sampled with ``probs`` ``[N, A]``,
    computed from ``q_values`` ``[N, n, A]`` (``[N, n, A, K]``). The input of ``q_values`` is ``at``: ``continuous`` as
    a leaf of the autograd graph.
    """

    distribution: Any
    action: Any
    continuous: Any
    log_prob: Any
    state: Any
    at: Any = ()
    q_values: Any = ()
    probs: Any = ()


# Target entropy ----------------------------------------------------------------------------------------------------

TargetEntropy = float | Callable[[BoundedTensorSpec], float] | None


def target_entropy_of(spec: NestedTensorSpec, target_entropy: TargetEntropy) -> float:
    """Return the target entropy in nats of a policy over actions of ``spec``.

    Args:
        spec: nest of action specs.
        target_entropy: the value itself; or a function of one spec, summed over the nest; ``None``:
            :func:`alfx.utils.dist_utils.calc_default_target_entropy`.

    Raises:
        SpecError: the default is undefined for an action without finite bounds.
    """
    if isinstance(target_entropy, (int, float)):
        return float(target_entropy)
    of_one = dist_utils.calc_default_target_entropy if target_entropy is None else target_entropy
    return float(sum(of_one(leaf) for leaf in nest.flatten(spec)))


def target_entropies(parts: ActionParts, target_entropy: TargetEntropy | Sequence[TargetEntropy]) -> list[float]:
    """Return one target entropy for each entropy coefficient: for a mixed action ``[discrete, continuous]``.

    Args:
        parts: kind and parts of the action.
        target_entropy: see :func:`target_entropy_of`; for a mixed action also a pair of them.

    Raises:
        ValueError: a pair for an action that is not mixed, or a sequence of another length than two.
    """
    is_pair = isinstance(target_entropy, (tuple, list))
    if parts.type != ActionType.Mixed:
        if is_pair:
            raise ValueError(f'target_entropy: expected one target for a {parts.type.name.lower()} action, found '
                             f'{target_entropy}; a pair is for a mixed action')
        return [target_entropy_of(parts.join(parts.discrete, parts.continuous), target_entropy)]  # type: ignore[arg-type]
    pair: Any = target_entropy if is_pair else (target_entropy, target_entropy)
    if len(pair) != 2:
        raise ValueError(f'target_entropy: expected (discrete, continuous), found {target_entropy}')
    return [target_entropy_of(parts.discrete, pair[0]), target_entropy_of(parts.continuous, pair[1])]


# Exploration -------------------------------------------------------------------------------------------------------


def uniform_actions(action_spec: NestedTensorSpec, batch_size: int, device: torch.device) -> NestedTensor:
    """Sample actions ``[batch_size, ...]`` uniformly from their bounds."""
    return nest.map_structure(lambda spec: spec.sample((batch_size, )).to(device), action_spec)


def is_normal(distribution: Any) -> bool:
    """Return whether a distribution (not a nest) is a diagonal normal, transformed or not."""
    base = distribution.base_dist if isinstance(distribution, dist_utils.TransformedDistribution) else distribution
    return isinstance(base, dist_utils.DiagMultivariateNormal)


def next_noise(noise: Tensor, correlation: float, is_first: Tensor) -> Tensor:
    """Return the next state of a stationary autoregressive process of standard normal numbers.

    The process is ``e[t] = c e[t-1] + sqrt(1 - c^2) z[t]`` with standard normal z, and ``e[0] = z[0]`` at the first
    step of an episode. It is the Ornstein-Uhlenbeck process sampled once per step. Each ``e[t]`` is standard normal.

    Args:
        noise: ``e[t-1]``, ``[B, ...]``.
        correlation: c, in [0, 1).
        is_first: bool ``[B]``.
    """
    fresh = torch.randn_like(noise)
    moved = noise * correlation + fresh * math.sqrt(1.0 - correlation**2)
    return torch.where(is_first.reshape(-1, *[1] * (noise.ndim - 1)), fresh, moved)


def noise_state_spec(parts: ActionParts, correlation: float, repeat: ZetaRepeat | None) -> NestedTensorSpec:
    """Return the spec of the state of :func:`rollout_noise`; ``()`` without such noise."""
    if repeat is not None:
        return repeat.state_spec(parts.continuous)
    return nest.map_structure(TensorSpec.from_spec, parts.continuous) if correlation else ()


def rollout_noise(state: Any, is_first: Tensor, correlation: float, repeat: ZetaRepeat | None
                  ) -> tuple[NestedTensor, Any]:
    """Return the standard normal noise of an action, nest of ``[B, ...]``, and the next state.

    Args:
        state: state returned by the previous call, of :func:`noise_state_spec`.
        is_first: bool ``[B]``.
        correlation: see :func:`next_noise`.
        repeat: holds the noise for several steps; excludes ``correlation``.
    """
    if isinstance(state, HeldNoise) and repeat is not None:
        return repeat(state)
    noise = nest.map_structure(lambda x: next_noise(x, correlation, is_first), state)
    return noise, noise


def sample(distribution: Any, noise: NestedTensor) -> NestedTensor:
    """Return the samples for a nest of standard normal noise, or independent ones if it is ``()``."""
    if isinstance(noise, tuple) and noise == ():
        return dist_utils.sample_action_distribution(distribution)
    return nest.map_structure(sample_from_noise, distribution, noise, is_leaf=nest.is_distribution)


def sample_from_noise(distribution: Any, noise: Tensor) -> Tensor:
    """Return the sample ``[B, ...]`` of a (transformed) diagonal normal for the standard normal ``noise``."""
    if isinstance(distribution, dist_utils.TransformedDistribution):
        return distribution.forward(sample_from_noise(distribution.base_dist, noise))
    return torch.addcmul(distribution.loc, distribution.scale, noise)
