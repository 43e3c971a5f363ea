"""The maths that algorithms with critics of actions share, as pure functions.

``N`` is any batch, ``n`` the number of critics, ``K`` the number of rewards. Read next
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


def min_weighted_q(critics: Tensor, reward_weights: Tensor | None) -> Tensor:
    """``[N, n, ...(, K)]`` -> ``[N, ...]``: :func:`weighted_sum` of :func:`min_q`."""
    return weighted_sum(min_q(critics, reward_weights), reward_weights)


def expected_value(values: Tensor, probs: Tensor) -> Tensor:
    """``sum_a p(a | s) Q(s, a)`` (Christodoulou 2019, arXiv:1910.07207, eq. 10, without the entropy).

    Args:
        values: of all discrete actions, ``[N, A]`` or ``[N, A, K]``.
        probs: of the policy, ``[N, A]``.

    Returns:
        ``[N]`` or ``[N, K]``.
    """
    return (values * probs.reshape(*probs.shape, *[1] * (values.ndim - 2))).sum(1)


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
    # of the sum: to compare shapes with gradients that are given, torch imports sympy, which takes half a second
    gradients: Any = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    if clipping:
        gradients = [g.clamp(-clipping, clipping) for g in gradients]
    return structure.unflatten(gradients)


def deterministic_policy_loss(gradient: NestedTensor, action: NestedTensor) -> Tensor:
    """A loss ``[N]`` whose gradient with respect to ``action`` is ``-dQ/da``.

    That is the deterministic policy gradient (Silver et al. 2014, eq. 9), and the second term of eq. 10 of SAC. Its
    value, ``-dQ/da * a`` summed over an action, has no meaning.

    Args:
        gradient: nest of ``dQ/da``, ``[N, ...]`` each.
        action: nest of actions with gradient to the policy, likewise.
    """
    terms = [(g * a).reshape(len(g), -1).sum(1) for g, a in zip(nest.flatten(gradient), nest.flatten(action))]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return -total


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
