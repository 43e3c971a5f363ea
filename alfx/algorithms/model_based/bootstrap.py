"""Bootstrap weights of transitions for each member of an ensemble, and the choice of holdout transitions.

A hash of environment, position in the replay buffer and member determines the weights. Bootstrapping therefore needs no
storage and is the same after a run is resumed. The weights are Poisson distributed with mean 1, the limit of sampling
with replacement from large data (Oza and Russell 2001).
"""
import math

import torch
from torch import Tensor

from alfx.tree_search.rules import shifted, signed

_POISSON = tuple(math.exp(-1) * sum(1 / math.factorial(i) for i in range(k + 1)) for k in range(6))
"""Cumulative distribution function of a Poisson variable with mean 1."""


def hashed_uniform(*keys: Tensor) -> Tensor:
    """Return pseudo-random numbers in [0, 1) as a function of integers ``[...]``: float64.

    Uses the mixing function of splitmix64 (Steele et al. 2014), once for each key.
    """
    x = torch.zeros_like(keys[0])
    for key in keys:
        x = x + key + signed(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ shifted(x, shift)) * signed(factor)
        x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def transition_weights(env_ids: Tensor, positions: Tensor, num_members: int, bootstrap: bool,
                       holdout: float) -> tuple[Tensor, Tensor]:
    """Return the weights with which transitions are trained on.

    Args:
        env_ids: int64 ``[...]``, environment of each transition.
        positions: int64 ``[...]``, position of the step at which the transition arrives.
        num_members: ``n``.
        bootstrap: draw separate weights for each member; otherwise all weights are 1.
        holdout: share of transitions that no member is trained on.

    Returns:
        Weight of each transition for each member, float32 ``[..., n]``; and the holdout mask, bool ``[...]``.
    """
    is_held_out = hashed_uniform(env_ids, positions, torch.full_like(positions, -1)) < holdout
    weight = torch.ones((*positions.shape, num_members), device=positions.device)
    if bootstrap:
        member = torch.arange(num_members, device=positions.device).expand_as(weight)
        u = hashed_uniform(env_ids.unsqueeze(-1).expand_as(weight), positions.unsqueeze(-1).expand_as(weight), member)
        weight = torch.stack([u >= threshold for threshold in _POISSON]).sum(0).float()
    return weight * ~is_held_out.unsqueeze(-1), is_held_out
