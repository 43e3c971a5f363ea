"""The maths of Q-learning with several critics, rewards or distributions, as pure functions.

``B`` is any batch, ``n`` the number of critics, ``A`` of actions, ``K`` of rewards, ``N`` of atoms. Read next
:mod:`alfx.algorithms.dqn_algorithm`.
"""
import torch
from torch import Tensor

from alfx.data_structures import StepType


def preference(outputs: Tensor, reward_weights: Tensor | None, atoms: Tensor | None) -> Tensor:
    """What actions are compared by: the least value of any critic, summed over rewards by their weights.

    Args:
        outputs: values ``[B, n, A]`` (``[B, n, K, A]``), or logits ``[B, n, A, N]``.
        reward_weights: ``[K]``, or ``None`` for one reward.
        atoms: ``[N]``, or ``None`` for values.

    Returns:
        ``[B, A]``.
    """
    values = least_values(outputs if atoms is None else expected_values(outputs, atoms), reward_weights)
    return values if reward_weights is None else torch.einsum('k,bka->ba', reward_weights, values)


def expected_values(logits: Tensor, atoms: Tensor) -> Tensor:
    """The means ``[...]`` of categorical distributions ``logits`` ``[..., N]`` over ``atoms`` ``[N]``.

    Summed as distances from the middle atom: that the probabilities add up to 1 but for rounding then does not move the
    mean, by which actions of nearly the same value would be told apart.
    """
    middle = atoms[len(atoms) // 2]
    return middle + torch.softmax(logits, -1) @ (atoms - middle)


def least_values(values: Tensor, reward_weights: Tensor | None) -> Tensor:
    """The least value of n critics: the greatest of a reward whose weight is negative.

    Args:
        values: ``[B, n, A]``, or ``[B, n, K, A]`` for K rewards.
        reward_weights: ``[K]``, or ``None`` for one reward.

    Returns:
        ``[B, A]`` or ``[B, K, A]``.
    """
    if values.shape[1] == 1:
        return values.squeeze(1)
    if reward_weights is None:
        return values.amin(1)
    sign = torch.where(reward_weights < 0, -1.0, 1.0).unsqueeze(-1)
    return (values * sign).amin(1) * sign


def least_distribution(probs: Tensor, atoms: Tensor) -> Tensor:
    """Of n distributions ``probs`` ``[B, n, N]`` over ``atoms`` ``[N]`` the one with the least mean, ``[B, N]``."""
    if probs.shape[1] == 1:
        return probs.squeeze(1)
    least = (probs @ atoms).argmin(1)
    return probs.take_along_dim(least.reshape(-1, 1, 1), 1).squeeze(1)


def of_action(outputs: Tensor, action: Tensor, dim: int) -> Tensor:
    """What ``outputs`` ``[B, ..., A, ...]`` hold along ``dim`` for ``action`` ``[B]``; that dimension is left out."""
    shape = list(outputs.shape)
    shape[dim] = 1
    index = action.reshape(-1, *[1] * (outputs.ndim - 1))
    return outputs.gather(dim, index.expand(shape)).squeeze(dim)


def first_step_only(x: Tensor) -> Tensor:
    """``x`` ``[T, B]`` with all but the first row 0."""
    return torch.cat((x[:1], torch.zeros_like(x[1:])))


def mean_over_steps(x: Tensor, step_type: Tensor, first_only: bool) -> Tensor:
    """The mean ``[B]`` of ``x`` ``[T, B]`` over the steps with a successor in the sequence, 0 if there is none.

    Args:
        x: ``[T, B]``.
        step_type: ``[T, B]``.
        first_only: only the first step counts.
    """
    mask = (step_type != StepType.LAST).to(x.dtype)[:1 if first_only else -1]
    return (x[:len(mask)] * mask).sum(0) / mask.sum(0).clamp(min=1.0)
