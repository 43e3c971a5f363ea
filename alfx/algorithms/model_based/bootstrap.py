"""Which transitions each member of an ensemble trains on, how often, and which nobody does.

That is decided by their place in the replay buffer alone: a hash of environment, position and member. So a bootstrap
needs no memory and is the same after a resume. How often is Poisson distributed with mean 1, which is what drawing with
replacement becomes for much data (Oza and Russell 2001).
"""
import math

import torch
from torch import Tensor

_POISSON = tuple(math.exp(-1) * sum(1 / math.factorial(i) for i in range(k + 1)) for k in range(6))
"""The distribution function of a Poisson variable with mean 1."""


def hashed_uniform(*keys: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on integers ``[...]`` alone, and look independent for different ones: float64.

    The mixing function of splitmix64 (Steele et al. 2014), once for each key.
    """
    x = torch.zeros_like(keys[0])
    for key in keys:
        x = x + key + _signed(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ _shifted(x, shift)) * _signed(factor)
        x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * 2.0**-53


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def transition_weights(env_ids: Tensor, positions: Tensor, num_members: int, bootstrap: bool,
                       holdout: float) -> tuple[Tensor, Tensor]:
    """Which transitions are trained on.

    Args:
        env_ids: int64 ``[...]``: the environment of each transition.
        positions: int64 ``[...]``: the position of the step that it arrives at.
        num_members: ``n``.
        bootstrap: each member has its own number of times of each; otherwise all are trained on everything once.
        holdout: share of those that nobody is trained on.

    Returns:
        how often each member trains on it, float32 ``[..., n]``; whether it is held out, bool ``[...]``.
    """
    is_held_out = hashed_uniform(env_ids, positions, torch.full_like(positions, -1)) < holdout
    weight = torch.ones((*positions.shape, num_members), device=positions.device)
    if bootstrap:
        member = torch.arange(num_members, device=positions.device).expand_as(weight)
        u = hashed_uniform(env_ids.unsqueeze(-1).expand_as(weight), positions.unsqueeze(-1).expand_as(weight), member)
        weight = torch.stack([u >= threshold for threshold in _POISSON]).sum(0).float()
    return weight * ~is_held_out.unsqueeze(-1), is_held_out
