"""Formulas for learning from recorded actions, as pure functions. ``N`` is any batch."""
import math
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec
from alfx.utils import dist_utils

_MARGIN = 1e-4  # in units of half the range of an action


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Compute ``|tau - 1(u < 0)| u^2`` (Kostrikov et al. 2021, arXiv:2110.06169, eq. 3), elementwise.

    Args:
        difference: target minus prediction, u.
        expectile: tau in (0, 1); 0.5 is half the squared error.
    """
    return torch.where(difference < 0, 1.0 - expectile, expectile) * difference.square()


def advantage_weights(advantage: Tensor, temperature: float, maximum: float) -> Tensor:
    """Compute the weights of cloned actions, ``min(exp(A / temperature), maximum)``, without gradient (IQL, eq. 7)."""
    return (advantage.detach() / temperature).exp().clamp(max=maximum)


def log_integral_exp(values: Tensor, log_density: Tensor) -> Tensor:
    """Estimate ``log of the integral of exp(Q(s, a)) over a`` by importance sampling (Kumar et al. 2020,
    arXiv:2006.04779, appendix F).

    Args:
        values: Q of m sampled actions, ``[m, N, ...]``.
        log_density: log density with which each action was sampled, ``[m, N]``.

    Returns:
        ``[N, ...]``.
    """
    log_density = log_density.reshape(*log_density.shape, *[1] * (values.ndim - 2))
    return torch.logsumexp(values - log_density, 0) - math.log(len(values))


class StoredActions(nn.Module):
    """Operations on recorded actions of a spec.

    Args:
        spec: nest of specs of actions.
    """

    def __init__(self, spec: NestedTensorSpec):
        super().__init__()
        self._names = [f'_{i}' if isinstance(leaf, BoundedTensorSpec) and leaf.is_continuous else '' for i, leaf in
                       enumerate(nest.flatten(spec))]
        for name, leaf in zip(self._names, nest.flatten(spec)):
            if name:
                bounds = torch.stack([torch.tensor(x).expand(leaf.shape).to(leaf.dtype) for x in (
                    leaf.minimum, leaf.maximum)])
                self.register_buffer(name, bounds, persistent=False)

    def inside_bounds(self, action: NestedTensor) -> NestedTensor:
        """Move continuous actions ``[N, ...]`` that lie on their bounds into the open interval between them.

        A squashed distribution has no density at its bounds, or an infinite one, and recorded actions often lie there.
        """
        leaves, tree = nest.flatten_with_structure(action)
        moved = []
        for x, name in zip(leaves, self._names):
            if name:
                low, high = self._buffers[name]  # type: ignore[misc]
                margin = (_MARGIN * (high - low) / 2).nan_to_num(posinf=0.0)  # infinite bounds need none
                x = torch.minimum(torch.maximum(x, low + margin), high - margin)
            moved.append(x)
        return tree.unflatten(moved)

    def log_prob(self, distribution: Any, action: NestedTensor) -> Tensor:
        """Compute the log-probability ``[N]`` of actions ``[N, ...]`` in a nest of distributions of batch shape
        ``[N]``."""
        return dist_utils.compute_log_probability(distribution, self.inside_bounds(action))

    def squared_error(self, output: NestedTensor, action: NestedTensor) -> Tensor:
        """Compute the squared difference of two continuous actions ``[N]``, summed, in units of half their range."""
        return (self.flat(output) - self.flat(action)).square().sum(1)

    def flat(self, action: NestedTensor) -> Tensor:
        """Return continuous actions ``[N, ...]`` as one tensor ``[N, D]``, in units of half their range."""
        leaves = []
        for x, name in zip(nest.flatten(action), self._names):
            if name:
                low, high = self._buffers[name]  # type: ignore[misc]
                x = 2 * x / (high - low)
            leaves.append(x.flatten(1) if x.ndim > 1 else x.unsqueeze(1))
        return leaves[0] if len(leaves) == 1 else torch.cat(leaves, 1)
