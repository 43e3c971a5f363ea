"""The maths of soft actor-critic as pure functions. Read next :mod:`alfx.algorithms.sac_algorithm`.

``N`` is any batch, ``n`` the number of critics, ``A`` the number of values of a discrete action, ``K`` the number of
rewards. Haarnoja et al. 2018 (arXiv:1812.05905), "SAC" below; discrete actions: Christodoulou 2019 (arXiv:1910.07207).
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import LossInfo, StepType
from alfx.tensor_specs import NestedTensor


def lowest_critic(critics: Tensor, reward_weights: Tensor | None) -> Tensor:
    """The lowest of several estimates of a value (Fujimoto et al. 2018, arXiv:1802.09477).

    Of a reward dimension with a negative weight the highest estimate is the pessimistic one.

    Args:
        critics: ``[N, n, ...]``, with K as last dimension if there are ``reward_weights``.
        reward_weights: ``[K]``, or ``None`` for a scalar reward.

    Returns:
        ``[N, ...]``.
    """
    if reward_weights is None:
        return critics.min(1).values
    sign = torch.where(reward_weights < 0, -1.0, 1.0)
    return (critics * sign).min(1).values * sign


def weighted_sum(value: Tensor, reward_weights: Tensor | None) -> Tensor:
    """``[..., K]`` -> ``[...]``, the value of the weighted sum of rewards; unchanged if there are no weights."""
    return value if reward_weights is None else value @ reward_weights


def action_gradient(value: Tensor, action: NestedTensor, clipping: float | None = None) -> NestedTensor:
    """``dQ/da``, without gradients of anything else.

    Args:
        value: ``[N]``, computed from ``action``.
        action: nest of leaves ``[N, ...]`` that require gradients.
        clipping: clip each element to ``[-clipping, clipping]``; ``None`` or 0: do not.

    Returns:
        nest like ``action``; zeros for an action that the value does not depend on.
    """
    leaves, structure = nest.flatten_with_structure(action)
    gradients: Any = torch.autograd.grad(value, leaves, torch.ones_like(value), materialize_grads=True)
    if clipping:
        gradients = [g.clamp(-clipping, clipping) for g in gradients]
    return structure.unflatten(gradients)


def deterministic_policy_loss(gradient: NestedTensor, action: NestedTensor) -> Tensor:
    """A loss ``[N]`` whose gradient with respect to ``action`` is ``-dQ/da`` (SAC eq. 10, second term).

    Its value, ``-dQ/da * a`` summed over an action, has no meaning.

    Args:
        gradient: nest of ``dQ/da``, ``[N, ...]`` each.
        action: nest of actions with gradient to the policy, likewise.
    """
    terms = [(g * a).reshape(len(g), -1).sum(1) for g, a in zip(nest.flatten(gradient), nest.flatten(action))]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return -total


def temperature_loss(log_alpha: Tensor, log_pi: Tensor, target_entropy: Tensor | float) -> Tensor:
    """The loss of the entropy coefficients (SAC eq. 18, with log alpha in the place of alpha as factor).

    ``log_alpha * (-log_pi - target_entropy)``: alpha grows while the entropy is below its target.

    Args:
        log_alpha: ``()``, or ``[2]`` for the discrete and the continuous part of a mixed action.
        log_pi: ``[N]`` or ``[N, 2]``: log-probabilities of the sampled actions, or negative entropies.
        target_entropy: a number or ``[2]``.

    Returns:
        ``[N]``.
    """
    loss = log_alpha * (-log_pi.detach() - target_entropy)
    return loss.sum(-1) if log_alpha.ndim else loss


def entropy_bonus(log_alpha: Tensor, log_pi: Tensor) -> Tensor:
    """``-alpha log_pi`` ``[...]``, summed over the parts of a mixed action; no gradient to alpha.

    Args:
        log_alpha: ``()`` or ``[2]``.
        log_pi: ``[...]`` or ``[..., 2]``.
    """
    bonus = log_pi * -log_alpha.detach().exp()
    return bonus.sum(-1) if log_alpha.ndim else bonus


def reward_with_bonus(reward: Tensor, bonus: Tensor, discount: Tensor, gamma: Tensor,
                      reward_weights: Tensor | None) -> Tensor:
    """Rewards whose return contains the entropy of all steps but the first, as the soft value does (SAC eq. 3).

    The soft value of s[t] is ``E[Q(s[t], a) - alpha log pi(a | s[t])]``. Adding ``gamma discount[t] bonus[t]`` to the
    reward for arriving at s[t] makes any target built on ``r[t] + gamma discount[t] Q[t]`` a soft one. Of K rewards
    each gets the part ``w[k] / sum_j w[j]^2``, so that the weighted sum of rewards gets exactly the bonus.

    Args:
        reward: ``[T, B]`` or ``[T, B, K]``.
        bonus: ``[T, B]``.
        discount: ``[T, B]``: 0 at a termination.
        gamma: 0-d or ``[K]``.
        reward_weights: ``[K]`` or ``None``.

    Returns:
        A new tensor of the shape of ``reward``.
    """
    bonus = bonus * discount
    if reward_weights is None:
        return torch.addcmul(reward, bonus, gamma)
    part = reward_weights / reward_weights.square().sum().clamp(min=1e-12)
    return torch.addcmul(reward, bonus.unsqueeze(-1), part * gamma)


def sequence_priority(loss: Tensor, step_type: Tensor) -> Tensor:
    """The root mean of the losses of the steps of a sequence that are not LAST.

    For squared errors that is the root mean squared TD error.

    Args:
        loss: ``[T, B]``, non-negative; 0 where there is no target (LAST steps and the final one).
        step_type: ``[T, B]``.

    Returns:
        ``[B]``.
    """
    count = (step_type[:-1] != StepType.LAST).sum(0).clamp(min=1)
    return (loss.detach().sum(0) / count).sqrt()


def leaves_of_graph(action: NestedTensor) -> NestedTensor:
    """``action``, cut from what it was computed from, with gradient to it where gradients are recorded."""
    if isinstance(action, Tensor):
        return action.detach().requires_grad_(torch.is_grad_enabled())
    return nest.map_structure(leaves_of_graph, action)


def detached(nested: NestedTensor) -> NestedTensor:
    """The same nest without gradients."""
    return nest.map_structure(Tensor.detach, nested)


def summed_log_prob(distributions: Any, actions: NestedTensor) -> Tensor:
    """Log-density ``[N]`` of actions ``[N, ...]`` under distributions that may treat each element on its own."""
    leaves = [d.log_prob(a).reshape(a.shape[0], -1).sum(-1) for d, a in zip(
        nest.flatten(distributions, nest.is_distribution), nest.flatten(actions))]
    return torch.stack(leaves).sum(0)


def loss_of_all_critics(critic_loss: Callable[..., LossInfo], info: Any, critics: Tensor, target: Tensor) -> Tensor:
    """The sum of the losses of n critics.

    To ``critic_loss`` the critics are further samples: it is called once, with ``[T, n * B, ...]``.

    Args:
        critic_loss: a TD loss.
        info: record of ``[T, B, ...]`` with what the loss reads; ``()`` for what there is not.
        critics: ``[T, B, n, ...]``.
        target: ``[T, B, ...]``: values to bootstrap from.

    Returns:
        ``[T, B]``.
    """
    length, batch, count = critics.shape[:3]
    if count > 1:
        info, target = nest.map_structure(lambda x: torch.cat((x, ) * count, 1), (info, target))
    loss = critic_loss(info, critics.transpose(1, 2).flatten(1, 2), target).loss
    return loss.view(length, count, batch).sum(1)
