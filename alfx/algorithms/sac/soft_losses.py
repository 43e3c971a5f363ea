"""Pure functions for the entropy losses of soft actor-critic. Read next: :mod:`alfx.algorithms.sac_algorithm`.

``N`` is any batch, ``K`` the number of rewards. "SAC" below is Haarnoja et al. 2018 (arXiv:1812.05905). Functions
shared with other algorithms are in :mod:`alfx.algorithms.base.critic_values`.
"""
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.tensor_specs import NestedTensor


def temperature_loss(log_alpha: Tensor, log_pi: Tensor, target_entropy: Tensor | float) -> Tensor:
    """Return the loss of the entropy coefficients (SAC eq. 18, with the factor log alpha instead of alpha).

    The loss is ``log_alpha * (-log_pi - target_entropy)``: alpha grows while the entropy is below its target.

    Args:
        log_alpha: ``()``, or ``[2]`` for the discrete and the continuous part of a mixed action.
        log_pi: ``[N]`` or ``[N, 2]``, log-probabilities of the sampled actions, or negative entropies.
        target_entropy: a number or ``[2]``.

    Returns:
        Loss ``[N]``.
    """
    loss = log_alpha * (-log_pi.detach() - target_entropy)
    return loss.sum(-1) if log_alpha.ndim else loss


def entropy_bonus(log_alpha: Tensor, log_pi: Tensor) -> Tensor:
    """Return ``-alpha log_pi`` ``[...]``, summed over the parts of a mixed action, without gradient to alpha.

    Args:
        log_alpha: ``()`` or ``[2]``.
        log_pi: ``[...]`` or ``[..., 2]``.
    """
    bonus = log_pi * -log_alpha.detach().exp()
    return bonus.sum(-1) if log_alpha.ndim else bonus


def reward_with_bonus(reward: Tensor, bonus: Tensor, discount: Tensor, gamma: Tensor,
                      reward_weights: Tensor | None) -> Tensor:
    """Return rewards whose return contains the entropy of all steps but the first, like the soft value (SAC eq. 3).

    The soft value of s[t] is ``E[Q(s[t], a) - alpha log pi(a | s[t])]``. Adding ``gamma discount[t] bonus[t]`` to the
    reward for arriving at s[t] makes any target based on ``r[t] + gamma discount[t] Q[t]`` a soft target. Each of K
    rewards gets the part ``w[k] / sum_j w[j]^2``, so that the weighted sum of rewards gets exactly the bonus.

    Args:
        reward: ``[T, B]`` or ``[T, B, K]``.
        bonus: ``[T, B]``.
        discount: ``[T, B]``, 0 at a termination.
        gamma: 0-d or ``[K]``.
        reward_weights: ``[K]`` or ``None``.

    Returns:
        A new tensor with the shape of ``reward``.
    """
    bonus = bonus * discount
    if reward_weights is None:
        return torch.addcmul(reward, bonus, gamma)
    part = reward_weights / reward_weights.square().sum().clamp(min=1e-12)
    return torch.addcmul(reward, bonus.unsqueeze(-1), part * gamma)


def summed_log_prob(distributions: Any, actions: NestedTensor) -> Tensor:
    """Return the log density ``[N]`` of actions ``[N, ...]``, summed over elementwise and nested distributions."""
    leaves = [d.log_prob(a).reshape(a.shape[0], -1).sum(-1) for d, a in zip(
        nest.flatten(distributions, nest.is_distribution), nest.flatten(actions))]
    return torch.stack(leaves).sum(0)
