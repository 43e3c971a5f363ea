"""Target entropies for an action spec; they can be imported from :mod:`alfx.utils.dist_utils`.

Each function takes one spec and sums over its components; for a nest of actions, add up its specs.
"""
import math

import numpy as np

from alfx.gin_utils import Count, PositiveFraction, configurable
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

_MODULE = 'alfx.utils.dist_utils'
_UNBOUNDED = 1e30


def _ranges(spec: TensorSpec, purpose: str) -> np.ndarray:
    """Return ``maximum - minimum`` of each component."""
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'{purpose} needs a bounded action spec, found {spec}; set the value explicitly, or '
                        'bound the action with gym_wrappers.ContinuousActionClip(min_v=..., max_v=...)')
    ranges = np.broadcast_to(spec.maximum.astype(np.float64) - spec.minimum.astype(np.float64), tuple(spec.shape))
    if not np.all(ranges < _UNBOUNDED):
        raise SpecError(f'{purpose} needs finite bounds, found {spec}; rescale the actions or set the value explicitly')
    if spec.is_continuous and not np.all(ranges > 0):
        raise SpecError(f'{purpose}: a component of {spec} has an empty range')
    return ranges.reshape(-1)


@configurable(module=_MODULE)
def calc_default_target_entropy(spec: TensorSpec, min_prob: PositiveFraction = 0.1) -> float:
    """Default target entropy of a policy in nats, for entropy control as in SAC.

    A continuous component is assumed to be uniform over the fraction ``min_prob`` of its range, with entropy
    ``log(min_prob * (max - min))``, which is negative for a narrow range. A discrete component with n values is assumed
    to spread ``min_prob`` evenly over all values except one, which has the rest of the probability:
    ``min_prob * log((n - 1) / min_prob) - (1 - min_prob) * log(1 - min_prob)``. A component with a single value adds 0.

    Args:
        spec: bounded action spec.
        min_prob: in (0, 1]; larger values keep the policy more random.

    Returns:
        Sum over all components.

    Raises:
        SpecError: the spec has no finite bounds.
        ValueError: ``min_prob`` is out of range.
    """
    ranges = _ranges(spec, 'calc_default_target_entropy')
    if spec.is_continuous:
        return float(np.log(min_prob * ranges).sum())
    others = ranges[ranges > 0]
    of_peak = 0.0 if min_prob == 1.0 else -(1.0 - min_prob) * math.log1p(-min_prob)
    return float((min_prob * (np.log(others) - math.log(min_prob)) + of_peak).sum())


@configurable(module=_MODULE)
def calc_default_target_entropy_quantized(spec: TensorSpec, num_bins: Count, ent_per_action_dim: float = -1.0) -> float:
    """Target entropy of continuous actions that are quantized into bins.

    A density of differential entropy h discretized into bins of width ``w = (max - min) / num_bins`` has the discrete
    entropy ``h - log w`` (Cover and Thomas, Elements of Information Theory, theorem 8.3.1).

    Args:
        spec: bounded continuous action spec.
        num_bins: number of bins of each component.
        ent_per_action_dim: target differential entropy h of each component; -1 is the usual choice for SAC.

    Returns:
        Sum over all components.

    Raises:
        SpecError: the spec is not continuous, or has no finite bounds.
    """
    if not spec.is_continuous:
        raise SpecError(f'calc_default_target_entropy_quantized needs a continuous action spec, found {spec}')
    ranges = _ranges(spec, 'calc_default_target_entropy_quantized')
    return float((ent_per_action_dim + math.log(num_bins) - np.log(ranges)).sum())


def calc_default_max_entropy(spec: TensorSpec, fraction: float = 0.8) -> float:
    """Upper limit of the entropy of a policy, in nats.

    Args:
        spec: bounded action spec.
        fraction: in (0, 1]; fraction of the maximum entropy of a component: ``log(max - min)`` if it is continuous,
            ``log n`` if it has n values. The maximum entropy of a range below 1 is negative, and a fraction of it
            could not be reached (ALF computes it nevertheless): the limit is ``log(fraction * (max - min))`` there.

    Returns:
        Sum over all components.

    Raises:
        SpecError: the spec has no finite bounds.
        ValueError: ``fraction`` is out of range.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f'calc_default_max_entropy: fraction must be in (0, 1], found {fraction}')
    ranges = _ranges(spec, 'calc_default_max_entropy')
    if not spec.is_continuous:
        return float((fraction * np.log(ranges + 1.0)).sum())
    return float(np.where(ranges < 1.0, np.log(fraction * ranges), fraction * np.log(ranges)).sum())


def calc_uniform_log_prob(spec: TensorSpec) -> float:
    """Log-probability (log-density) of any action under the uniform policy.

    Raises:
        SpecError: the spec has no finite bounds.
    """
    ranges = _ranges(spec, 'calc_uniform_log_prob')
    return -float((np.log(ranges) if spec.is_continuous else np.log(ranges + 1.0)).sum())
