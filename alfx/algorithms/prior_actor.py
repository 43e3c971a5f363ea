"""Fixed policies used as priors of KL-regularized reinforcement learning.

A learner (:mod:`alfx.algorithms.sac_algorithm`) keeps its policy close to the distribution that ``train_step`` of a
prior returns: ``KL(policy || prior)`` replaces the negative entropy. A prior has no parameters.
"""
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, StepType, TimeStep
from alfx.distributions import nests as dist_nests
from alfx.gin_utils import Fraction, Positive, configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError
from alfx.utils import dist_utils

_UNBOUNDED = 1e30
# Tolerance for actions that tanh or an addition has rounded to just outside their bounds.
_ROUNDING = 1e-6


class TruncatedNormal(td.Distribution):
    """Truncated normal distribution of each element on an interval.

    Args:
        loc: ``[...]``, mean of the untruncated normal; may lie outside the interval.
        scale: ``[...]``, positive standard deviation of the untruncated normal.
        low: lower end of the interval, broadcasts with ``loc``.
        high: upper end, above ``low``.
        validate_args: check the parameters, and values at :meth:`log_prob`.

    Raises:
        ValueError: with ``validate_args``, a scale is not positive or an interval is empty.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True
    _validate_args = False

    def __init__(self, loc: Tensor, scale: Tensor, low: Tensor, high: Tensor, validate_args: bool | None = None):
        if validate_args:
            self._validate_args = True
            if not bool(((scale > 0) & (low < high)).all()):
                raise ValueError(f'TruncatedNormal: expected scale > 0 and low < high, found scale {scale}, low {low}, '
                                 f'high {high}')
        # Vectors of one element, because the wrapped class sums log densities over the last dimension.
        self._vector = dist_utils.TruncatedNormal(loc.unsqueeze(-1), scale.unsqueeze(-1), low.unsqueeze(-1),
                                                  high.unsqueeze(-1))

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        return dist_nests.shape_of(self._vector.loc)[:-1]

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size()

    @property
    def support(self) -> constraints.Constraint:
        """Interval of the distribution."""
        return constraints.interval(self._vector.lower_bound.squeeze(-1),  # type: ignore[union-attr]
                                    self._vector.upper_bound.squeeze(-1))  # type: ignore[union-attr]

    @property
    def mode(self) -> Tensor:
        """Point of the interval nearest to ``loc``: ``[...]``."""
        return self._vector.mode.squeeze(-1)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw samples ``[*sample_shape, ...]`` with gradient."""
        return self._vector.rsample(sample_shape).squeeze(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the elementwise log density of ``value``, which has to be inside the interval.

        Raises:
            ValueError: with ``validate_args``, a value is outside.
        """
        if self._validate_args:
            self._validate_sample(value)
        return self._vector.log_prob(value.unsqueeze(-1))

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'TruncatedNormal':
        """Return the distributions with their dimensions expanded to ``batch_shape``."""
        return dist_nests.rebuilt(TruncatedNormal, _vector=self._vector.expand(batch_shape))

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._vector!r})'


class BoxUniform(td.Uniform):
    """Uniform distribution of each element on a closed interval; the arguments are those of ``torch``'s ``Uniform``.

    The density at both ends equals the density inside. In ``torch`` it is 0 at the upper end, although a squashed
    action may be rounded to this end.
    """

    _validate_args = False

    def __init__(self, low: Tensor, high: Tensor):
        super().__init__(low, high, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the elementwise log density of ``value``."""
        width = self.high - self.low
        slack = _ROUNDING * width
        inside = (value >= self.low - slack) & (value <= self.high + slack)
        return torch.where(inside, -width.log(), -torch.inf)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'BoxUniform':
        """Return the distributions with their dimensions expanded to ``batch_shape``."""
        return BoxUniform(self.low.expand(batch_shape), self.high.expand(batch_shape))


dist_nests.register(TruncatedNormal, ('vector', ), lambda d: ((d._vector, ), None),
                    lambda p, _: dist_nests.rebuilt(TruncatedNormal, _vector=p[0]))
dist_nests.register(
    BoxUniform, ('low', 'high'), lambda d: ((d.low, d.high), None),
    lambda p, _: dist_nests.rebuilt(BoxUniform, low=p[0], high=p[1], _batch_shape=dist_nests.shape_of(p[0]),
                                    _event_shape=torch.Size()))


class _PriorActor(Algorithm):
    """Base class of priors that depend only on the time step; a subclass implements ``_distribution``."""

    def __init__(self, action_spec: NestedTensorSpec, debug_summaries: bool, name: str):
        super().__init__(debug_summaries=debug_summaries, name=name)
        self._action_spec = action_spec
        for i, spec in enumerate(nest.flatten(action_spec)):
            if spec.is_continuous:
                low, high = _bounds(spec, name)
                self.register_buffer(f'_low_{i}', low, persistent=False)
                self.register_buffer(f'_high_{i}', high, persistent=False)

    def _range(self, i: int) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds of the ``i``-th action, each with its shape."""
        return getattr(self, f'_low_{i}'), getattr(self, f'_high_{i}')

    def _distribution(self, inputs: TimeStep) -> Any:
        """Return the prior: a nest of distributions ``[B]`` with the structure of the action."""
        raise NotImplementedError

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run :meth:`train_step`."""
        return self.train_step(inputs, state)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run :meth:`train_step`."""
        return self.train_step(inputs, state)

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: NestedTensor = ()) -> AlgStep:
        """Return the prior of the next action.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``()``.
            rollout_info: not used.

        Returns:
            ``output``: a nest of distributions of batch shape ``[B]``, with the structure of the action.
        """
        return AlgStep(self._distribution(inputs), (), ())


def _bounds(spec: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the finite bounds of a continuous spec, each with its shape."""
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'{name}: a prior over actions needs bounded actions, found {spec}')
    low, high = (torch.as_tensor(bound.copy(), dtype=spec.dtype).expand(spec.shape).clone()
                 for bound in (spec.minimum, spec.maximum))
    if not bool(((low > -_UNBOUNDED) & (high < _UNBOUNDED) & (low < high)).all()):
        raise SpecError(f'{name}: a prior over actions needs finite bounds and no empty range, found {spec}; rescale '
                        'the actions with an environment wrapper')
    return low, high


@configurable
class SameActionPriorActor(_PriorActor):
    """Prior that repeats the previous action most of the time.

    Each component of an action has a mixture of two truncated normals within its bounds: a flat one, centered in the
    range and as wide as the range, and a sharp one at the previous action. At a FIRST step, which has no previous
    action, only the flat one is used.

    Args:
        observation_spec: nest of specs of the observation; the prior does not depend on it.
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions.
        same_action_noise: standard deviation of the sharp normal, as a fraction of the range.
        same_action_prob: weight of the sharp normal.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: an action is discrete or not bounded.
        ValueError: ``same_action_noise`` is 0.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 same_action_noise: Positive = 0.1, same_action_prob: Fraction = 0.9, debug_summaries: bool = False,
                 name: str = 'SameActionPriorActor'):
        for spec in nest.flatten(action_spec):
            if not spec.is_continuous:
                raise SpecError(f'{name} supports only continuous actions, found {spec}; use UniformPriorActor for '
                                'discrete actions')
        super().__init__(action_spec, debug_summaries, name)
        self._noise = same_action_noise
        weights = torch.tensor([[1.0, 0.0], [1.0 - same_action_prob, same_action_prob]])
        self.register_buffer('_log_weights', weights.log(), persistent=False)

    def _distribution(self, inputs: TimeStep) -> Any:
        has_previous = (inputs.step_type != StepType.FIRST).long()
        log_weights: Any = self._log_weights
        log_weights = log_weights[has_previous]
        mixtures = [self._mixture(i, action, log_weights) for i, action in enumerate(nest.flatten(inputs.prev_action))]
        return nest.pack_sequence_as(self._action_spec, mixtures)

    def _mixture(self, i: int, prev_action: Tensor, log_weights: Tensor) -> Any:
        """Return the prior of an action, from ``prev_action [B, *shape]`` and ``log_weights [B, 2]``."""
        low, high = self._range(i)
        middle, width = 0.5 * (low + high), high - low
        # An unsquashed policy may have left the bounds; the environment clips its actions.
        previous = torch.minimum(torch.maximum(prev_action, low), high)
        loc = torch.stack([middle.expand_as(previous), previous], -1)
        scale = torch.stack([width, self._noise * width], -1).expand_as(loc)
        components = TruncatedNormal(loc, scale, low.unsqueeze(-1), high.unsqueeze(-1))
        ndim = prev_action.ndim - 1
        weights = log_weights.reshape(-1, *[1] * ndim, 2).expand_as(loc)
        mixture = td.MixtureSameFamily(dist_utils.Categorical(logits=weights), components, validate_args=False)
        return td.Independent(mixture, ndim, validate_args=False) if ndim else mixture


@configurable
class UniformPriorActor(_PriorActor):
    """Uniform prior over all actions within the bounds; the KL divergence is the negative entropy plus a constant.

    Args:
        observation_spec: nest of specs of the observation; the prior does not depend on it.
        action_spec: nest of ``BoundedTensorSpec``, continuous or discrete.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: an action is not bounded.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 debug_summaries: bool = False, name: str = 'UniformPriorActor'):
        super().__init__(action_spec, debug_summaries, name)
        for i, spec in enumerate(nest.flatten(action_spec)):
            if spec.is_discrete:
                logits = torch.zeros(*spec.shape, dist_utils.num_categories(spec))
                self.register_buffer(f'_logits_{i}', logits, persistent=False)

    def _distribution(self, inputs: TimeStep) -> Any:
        batch = inputs.step_type.shape[0]
        uniforms = [self._uniform(i, spec, batch) for i, spec in enumerate(nest.flatten(self._action_spec))]
        return nest.pack_sequence_as(self._action_spec, uniforms)

    def _uniform(self, i: int, spec: BoundedTensorSpec, batch: int) -> Any:
        if spec.is_discrete:
            logits = getattr(self, f'_logits_{i}')
            return dist_utils.categorical_from_spec(logits.expand(batch, *logits.shape), spec)
        low, high = (bound.expand(batch, *spec.shape) for bound in self._range(i))
        uniform = BoxUniform(low, high)
        return td.Independent(uniform, spec.ndim, validate_args=False) if spec.ndim else uniform
