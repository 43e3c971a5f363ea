"""Policies supported by maximum a posteriori policy optimization: diagonal normal and categorical ones.

A class defines the parameters of a policy, the constraints on its change, and the loss of the M-step. Read next:
:mod:`alfx.algorithms.mpo_algorithm`.
"""
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.mpo import mpo_loss
from alfx.algorithms.mpo.mpo_loss import Multiplier
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.discrete_action import suited_algorithms

_UNBOUNDED = 1e30


class GaussianPolicy(nn.Module):
    """Diagonal normal policies over a nest of continuous actions, squashed or not.

    All actions together are one vector of A numbers. Samples are taken before squashing: the change of variables of a
    squashed policy is the same before and after an update, and cancels in likelihoods and divergences. Without
    squashing an action is clipped to its bounds.

    Args:
        action_spec: nest of continuous specs.
        output_spec: ``output_spec`` of the actor network.
        of_mean: multiplier of the constraint on the means.
        of_scale: multiplier of the constraint on the standard deviations.
        name: name of the algorithm, for error messages.

    Raises:
        SpecError: the actor network does not output diagonal normal distributions.
    """

    _low: Tensor
    _high: Tensor

    def __init__(self, action_spec: NestedTensorSpec, output_spec: Any, of_mean: Multiplier, of_scale: Multiplier,
                 name: str):
        super().__init__()
        self._action_spec = action_spec
        self._specs = nest.flatten(action_spec)
        self._sizes = [spec.numel for spec in self._specs]
        self.multipliers = nn.ModuleList([of_mean, of_scale])
        lows, highs = [], []
        for spec, dist in zip(self._specs, nest.flatten(output_spec, nest.is_distribution)):
            if not isinstance(_base(dist), dist_utils.DiagMultivariateNormal):
                raise SpecError(f'{name}: expected a diagonal normal policy, squashed or not, found '
                                f'{type(_base(dist)).__name__}; use NormalProjectionNetwork or '
                                'StableNormalProjectionNetwork as continuous_projection_net_ctor of the actor network')
            low, high = _clipping_bounds(spec, is_squashed=_base(dist) is not dist)
            lows.append(low)
            highs.append(high)
        self.register_buffer('_low', torch.cat(lows), persistent=False)
        self.register_buffer('_high', torch.cat(highs), persistent=False)

    @property
    def size(self) -> int:
        """Size A of the action vector."""
        return sum(self._sizes)

    def parameters_of(self, distributions: Any) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations ``[..., A]`` of a nest of distributions."""
        bases = [_base(dist) for dist in nest.flatten(distributions, nest.is_distribution)]
        if len(bases) == 1 and self._specs[0].ndim == 1:
            return bases[0].loc, bases[0].scale
        return self._joined([base.loc for base in bases]), self._joined([base.scale for base in bases])

    def _joined(self, leaves: list[Tensor]) -> Tensor:
        return torch.cat([leaf.flatten(leaf.ndim - spec.ndim) if spec.ndim else leaf.unsqueeze(-1)
                          for spec, leaf in zip(self._specs, leaves)], -1)

    @torch.no_grad()
    def sample(self, distributions: Any, count: int) -> Tensor:
        """Draw samples ``[B, count, A]``, before squashing."""
        loc, scale = self.parameters_of(distributions)
        noise = torch.randn(loc.shape[0], count, loc.shape[1], dtype=loc.dtype, device=loc.device)
        return noise.mul_(scale.unsqueeze(1)).add_(loc.unsqueeze(1))

    def actions(self, distributions: Any, samples: Tensor) -> NestedTensor:
        """Convert samples ``[M, A]`` of these distributions to actions, a nest of ``[M, ...]``."""
        clipped = samples.clamp(self._low, self._high)
        leaves = []
        for spec, dist, leaf in zip(self._specs, nest.flatten(distributions, nest.is_distribution),
                                    clipped.split(self._sizes, -1)):
            leaf = leaf.reshape(-1, *spec.shape)
            leaves.append(dist.forward(leaf) if isinstance(dist, dist_utils.TransformedDistribution) else leaf)
        return nest.pack_sequence_as(self._action_spec, leaves)

    def clip(self, action: NestedTensor) -> NestedTensor:
        """Clip a nest of actions ``[B, ...]`` to their bounds."""
        bounds = zip(self._low.split(self._sizes), self._high.split(self._sizes), self._specs)
        leaves = [leaf.clamp(low.reshape(spec.shape), high.reshape(spec.shape))
                  for leaf, (low, high, spec) in zip(nest.flatten(action), bounds)]
        return nest.pack_sequence_as(self._action_spec, leaves)

    def value_within_bounds(self, samples: Tensor) -> Tensor:
        """Return ``-||a - clip(a)||^2``, the value of staying within the bounds: ``[..., A]`` to ``[...]``."""
        return -(samples - samples.clamp(self._low, self._high)).square().sum(-1)

    def log_prior(self, target: tuple[Tensor, Tensor]) -> None:
        """Return ``None``: sampled actions have equal weights."""

    def divergences(self, target: tuple[Tensor, Tensor], online: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return the constrained changes of the policy, ``[..., A]`` each."""
        return mpo_loss.gaussian_divergences(*target, *online)

    def loss(self, weights: Tensor, samples: Tensor, target: tuple[Tensor, Tensor],
             online: tuple[Tensor, Tensor]) -> Tensor:
        """Return the weighted negative log-likelihood ``[...]``."""
        return mpo_loss.gaussian_policy_loss(weights, samples, *target, *online)


_LEAST_LOG_PROB = -1e4  # stands for a probability of 0


class CategoricalPolicy(nn.Module):
    """Categorical policies over one discrete action, all of whose N values are evaluated.

    Args:
        action_spec: spec of a discrete action of shape ``()``.
        output_spec: ``output_spec`` of the actor network.
        multiplier: multiplier of the constraint on the policy.
        name: name of the algorithm, for error messages.

    Raises:
        SpecError: the action is not a scalar, or the actor network does not output a categorical distribution.
    """

    def __init__(self, action_spec: BoundedTensorSpec, output_spec: Any, multiplier: Multiplier, name: str):
        super().__init__()
        if not isinstance(action_spec, BoundedTensorSpec) or action_spec.ndim:
            raise SpecError(f'{name}: expected a nest of continuous actions, or one discrete action of shape (), found '
                            f'{action_spec}; {suited_algorithms(action_spec)}')
        if not isinstance(output_spec, dist_utils.Categorical):
            raise SpecError(f'{name}: expected a categorical policy over a discrete action, found '
                            f'{type(output_spec).__name__}; use CategoricalProjectionNetwork as '
                            'discrete_projection_net_ctor of the actor network')
        self._start = int(action_spec.minimum)
        self.multipliers = nn.ModuleList([multiplier])

    def index(self, action: Tensor) -> Tensor:
        """Return the index int64 ``[B]`` of an action ``[B]`` among the N values."""
        return action.long() - self._start

    def parameters_of(self, distribution: Any) -> Tensor:
        """Return normalized log-probabilities ``[..., N]``, finite even for invalid actions."""
        return distribution.logits.clamp_min(_LEAST_LOG_PROB)

    def clip(self, action: Tensor) -> Tensor:
        """Return the action unchanged."""
        return action

    def log_prior(self, target: Tensor) -> Tensor:
        """Return the log-probabilities of the target policy, the prior of the actions."""
        return target

    def divergences(self, target: Tensor, online: Tensor) -> tuple[Tensor, ...]:
        """Return the constrained change of the policy, ``[..., 1]``."""
        return (mpo_loss.categorical_divergence(target, online), )

    def loss(self, weights: Tensor, samples: Any, target: Tensor, online: Tensor) -> Tensor:
        """Return the weighted negative log-likelihood ``[...]``."""
        return mpo_loss.categorical_policy_loss(weights, online)


def _base(dist: Any) -> Any:
    return dist.base_dist if isinstance(dist, dist_utils.TransformedDistribution) else dist


def _clipping_bounds(spec: TensorSpec, is_squashed: bool) -> tuple[Tensor, Tensor]:
    """Return the bounds ``[numel]`` each; infinite for actions that are not clipped."""
    if is_squashed or not isinstance(spec, BoundedTensorSpec):
        return torch.full((spec.numel, ), -torch.inf), torch.full((spec.numel, ), torch.inf)
    low, high = (torch.as_tensor(bound.copy(), dtype=spec.dtype).expand(spec.shape).reshape(-1)
                 for bound in (spec.minimum, spec.maximum))
    return (torch.where(low < -_UNBOUNDED, -torch.inf, low), torch.where(high > _UNBOUNDED, torch.inf, high))
