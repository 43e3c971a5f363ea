"""Formulas shared by algorithms with action-value critics, as pure functions.

``N`` is any batch, ``n`` the number of critics, ``K`` the number of reward dimensions. Read next:
:mod:`alfx.algorithms.ddpg_algorithm` and :mod:`alfx.algorithms.sac.soft_losses`.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import LossInfo, StepType
from alfx.tensor_specs import NestedTensor


def min_q(critics: Tensor, reward_weights: Tensor | None) -> Tensor:
    """Return the minimum over several critics (Fujimoto et al. 2018, arXiv:1802.09477).

    For a reward dimension with a negative weight the maximum is the pessimistic estimate.

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


def random_critics(critics: Tensor, count: int) -> Tensor:
    """Return ``count`` different critics drawn uniformly, the same for the whole batch: ``[N, n, ...]`` -> ``[N, count,
    ...]``."""
    return critics.index_select(1, torch.randperm(critics.shape[1], device=critics.device)[:count])


def weighted_sum(value: Tensor, reward_weights: Tensor | None) -> Tensor:
    """Return the value of the weighted sum of rewards, ``[..., K]`` -> ``[...]``; unchanged if there are no weights."""
    return value if reward_weights is None else value @ reward_weights


def min_weighted_q(critics: Tensor, reward_weights: Tensor | None) -> Tensor:
    """Return :func:`weighted_sum` of :func:`min_q`: ``[N, n, ...(, K)]`` -> ``[N, ...]``."""
    return weighted_sum(min_q(critics, reward_weights), reward_weights)


def expected_value(values: Tensor, probs: Tensor) -> Tensor:
    """Compute ``sum_a p(a | s) Q(s, a)`` (Christodoulou 2019, arXiv:1910.07207, eq. 10, without the entropy).

    Args:
        values: values of all discrete actions, ``[N, A]`` or ``[N, A, K]``.
        probs: probabilities of the policy, ``[N, A]``.

    Returns:
        ``[N]`` or ``[N, K]``.
    """
    return (values * probs.reshape(*probs.shape, *[1] * (values.ndim - 2))).sum(1)


def action_gradient(value: Tensor, action: NestedTensor, clipping: float | None = None) -> NestedTensor:
    """Compute ``dQ/da``, without gradients of other tensors.

    Args:
        value: ``[N]``, computed from ``action``.
        action: nest of leaves ``[N, ...]`` that require gradients.
        clipping: clip each element to ``[-clipping, clipping]``; ``None`` or 0: no clipping.

    Returns:
        nest like ``action``; zeros for an action that the value does not depend on.
    """
    leaves, structure = nest.flatten_with_structure(action)
    # differentiate the sum: with explicit grad_outputs torch imports sympy to compare shapes, which takes half a second
    gradients: Any = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    if clipping:
        gradients = [g.clamp(-clipping, clipping) for g in gradients]
    return structure.unflatten(gradients)


def deterministic_policy_loss(gradient: NestedTensor, action: NestedTensor) -> Tensor:
    """Return a loss ``[N]`` whose gradient with respect to ``action`` is ``-dQ/da``.

    This is the deterministic policy gradient (Silver et al. 2014, eq. 9), and the second term of eq. 10 of SAC. The
    value of the loss, ``-dQ/da * a`` summed over an action, is meaningless.

    Args:
        gradient: nest of ``dQ/da``, ``[N, ...]`` each.
        action: nest of actions with gradient to the policy, of the same shapes.
    """
    terms = [(g * a).reshape(len(g), -1).sum(1) for g, a in zip(nest.flatten(gradient), nest.flatten(action))]
    return -sum(terms[1:], start=terms[0])


def sequence_priority(loss: Tensor, step_type: Tensor) -> Tensor:
    """Compute the root of the mean loss over the steps of a sequence that are not LAST.

    For squared errors this is the root mean squared TD error.

    Args:
        loss: ``[T, B]``, non-negative; 0 where there is no target (LAST steps and the final one).
        step_type: ``[T, B]``.

    Returns:
        ``[B]``.
    """
    count = (step_type[:-1] != StepType.LAST).sum(0).clamp(min=1)
    return (loss.detach().sum(0) / count).clamp(min=0.0).sqrt()  # rounding may make a divergence of 0 negative


def leaves_of_graph(action: NestedTensor) -> NestedTensor:
    """Detach ``action`` and make it a leaf that requires gradients if gradients are enabled."""
    if isinstance(action, Tensor):
        return action.detach().requires_grad_(torch.is_grad_enabled())
    return nest.map_structure(leaves_of_graph, action)


def detached(nested: NestedTensor) -> NestedTensor:
    """Return the same nest without gradients."""
    return nest.map_structure(Tensor.detach, nested)


def loss_of_all_critics(critic_loss: Callable[..., LossInfo], info: Any, critics: Tensor, target: Tensor) -> Tensor:
    """Compute the sum of the losses of n critics.

    ``critic_loss`` is called once, with the critics as additional samples ``[T, n * B, ...]``.

    Args:
        critic_loss: a TD loss.
        info: named tuple of ``[T, B, ...]`` with the fields that the loss reads; ``()`` for missing fields.
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
