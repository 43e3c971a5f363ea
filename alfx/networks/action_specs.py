"""Checks of action specs for the heads of actor networks."""
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.distributions.discrete import has_integer_bounds
from alfx.gin_utils import ConfError, problem_at
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec, SpecError, TensorSpec

_UNBOUNDED = 1e30
_MAX_CATEGORIES = 1 << 20
_ADD_BOUNDS = 'gym_wrappers.ContinuousActionClip(min_v=..., max_v=...) among gym_env_wrappers adds bounds'


def check_actor(owner: str, argument: str, actor: Any, gives_distributions: bool) -> None:
    """Raise an error if an actor network returns actions where an algorithm needs distributions, or the reverse.

    Args:
        owner: class of the algorithm.
        argument: argument of the algorithm that created the network.
        actor: the network; modules that are not a :class:`~alfx.networks.network.Network` are not checked.
        gives_distributions: the algorithm needs distributions.

    Raises:
        ConfError: the network returns the other kind.
    """
    found = getattr(actor, 'is_distribution_output', gives_distributions)
    if found != gives_distributions:
        needed, other = ('distributions of actions', 'actions') if gives_distributions else ('actions', 'distributions')
        example = 'ActorDistributionNetwork' if gives_distributions else 'ActorNetwork'
        raise ConfError([problem_at(
            owner, argument, f'creates {type(actor).__name__}, which returns {other}; the algorithm needs {needed}',
            f'choose a network that returns {needed}, for example @{example}')])


def refuse_discrete_actions(owner: str, action_spec: NestedTensorSpec, remedy: str) -> None:
    """Raise ``ConfError`` if an action of the environment is discrete; ``remedy`` is what ``owner`` advises."""
    if any(spec.is_discrete for spec in nest.flatten(action_spec)):
        raise ConfError([problem_at('create_environment', 'env_name', f'has a discrete action, {action_spec}, but '
                                    f'{owner} supports only continuous actions', remedy)])


def require_categories(spec: TensorSpec, head: str) -> None:
    """Raise ``SpecError`` unless the action is discrete or its float bounds are integers; see `require_discrete`."""
    _require_action(spec, head)
    if has_integer_bounds(spec):
        _require_few_values(spec, head)
    else:
        require_discrete(spec, head)


def require_discrete(spec: TensorSpec, head: str) -> None:
    """Raise ``SpecError`` unless ``spec`` describes a bounded discrete action."""
    _require_action(spec, head)
    if not spec.is_discrete:
        raise SpecError(f'{head} is for discrete actions: expected a spec of integers, found {spec}; use a continuous '
                        'head such as NormalProjectionNetwork (of an actor network: continuous_projection_net_ctor)')
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'{head}: a discrete action needs bounds (BoundedTensorSpec), found {spec}')
    _require_few_values(spec, head)


def _require_few_values(spec: Any, head: str) -> None:
    most = int(np.max(spec.maximum.astype(np.float64) - spec.minimum.astype(np.float64))) + 1
    if most > _MAX_CATEGORIES:
        raise SpecError(f'{head}: an action with {most} values has too many for one logit each, found {spec}; turn it '
                        'into a continuous Box with a wrapper among gym_env_wrappers')


def require_continuous(spec: TensorSpec, head: str) -> None:
    """Raise ``SpecError`` unless ``spec`` describes a continuous action."""
    _require_action(spec, head)
    if not spec.is_continuous:
        raise SpecError(f'{head} is for continuous actions: expected a spec of floats, found {spec}; use a discrete '
                        'head such as CategoricalProjectionNetwork (of an actor network: discrete_projection_net_ctor)')


def _require_action(spec: TensorSpec, head: str) -> None:
    if not isinstance(spec, TensorSpec):
        raise SpecError(f'{head}: expected the spec of one action, found {spec!r}; use NestedProjectionNetwork for '
                        'nests')
    if spec.numel == 0:
        raise SpecError(f'{head}: the action {spec} has no components')


def require_vector(spec: TensorSpec, head: str) -> None:
    """Raise ``SpecError`` unless ``spec`` has one dimension."""
    if spec.ndim != 1:
        raise SpecError(f'{head}: expected an action of shape (D,), found {spec}; NormalProjectionNetwork supports any '
                        'shape')


def action_range(spec: TensorSpec, head: str, remedy: str, positive: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Middle and half width of the bounds of a continuous action, both of the shape of ``spec``.

    Args:
        spec: the action spec.
        head: name of the head, for messages.
        remedy: advice for an action without finite bounds.
        positive: the width of each component must be positive.

    Raises:
        SpecError: a bound is missing or infinite, or with ``positive`` two bounds are equal.
    """
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'{head}: expected an action with bounds, found {spec}; {remedy}; {_ADD_BOUNDS}')
    low = np.broadcast_to(spec.minimum, tuple(spec.shape)).astype(np.float64)
    high = np.broadcast_to(spec.maximum, tuple(spec.shape)).astype(np.float64)
    if np.any(low < -_UNBOUNDED) or np.any(high > _UNBOUNDED):
        raise SpecError(f'{head}: expected an action with finite bounds, found {spec}; {remedy}; {_ADD_BOUNDS}')
    if positive and np.any(low == high):
        raise SpecError(f'{head}: expected different bounds of each component, found {spec}')
    dtype = torch.get_default_dtype()
    return torch.as_tensor((high + low) / 2, dtype=dtype), torch.as_tensor((high - low) / 2, dtype=dtype)
