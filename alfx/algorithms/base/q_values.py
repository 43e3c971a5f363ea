"""Formulas of Q-learning with several critics, reward dimensions or distributions, as pure functions.

``B`` is any batch, ``n`` the number of critics, ``A`` of actions, ``K`` of reward dimensions, ``N`` of atoms. Read
next: :mod:`alfx.algorithms.dqn_algorithm`.
"""
import torch
from torch import Tensor

from alfx.data_structures import StepType


def preference(outputs: Tensor, reward_weights: Tensor | None, atoms: Tensor | None) -> Tensor:
    """Return the values that compare actions: the minimum over critics, summed over reward dimensions by their weights.

    Args:
        outputs: values ``[B, n, A]`` (``[B, n, K, A]``), or logits ``[B, n, A, N]``.
        reward_weights: ``[K]``, or ``None`` for a scalar reward.
        atoms: ``[N]``, or ``None`` for values.

    Returns:
        ``[B, A]``.
    """
    values = least_values(outputs if atoms is None else expected_values(outputs, atoms), reward_weights)
    return values if reward_weights is None else torch.einsum('k,bka->ba', reward_weights, values)


def expected_values(logits: Tensor, atoms: Tensor) -> Tensor:
    """Compute the means ``[...]`` of categorical distributions ``logits`` ``[..., N]`` over ``atoms`` ``[N]``.

    The sum is over distances from the middle atom. Rounding errors of the total probability then do not shift the mean,
    which would reorder actions of nearly equal value.
    """
    middle = atoms[len(atoms) // 2]
    return middle + torch.softmax(logits, -1) @ (atoms - middle)


def least_values(values: Tensor, reward_weights: Tensor | None) -> Tensor:
    """Return the minimum over n critics; the maximum for a reward dimension with negative weight.

    Args:
        values: ``[B, n, A]``, or ``[B, n, K, A]`` for a K-dimensional reward.
        reward_weights: ``[K]``, or ``None`` for a scalar reward.

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
    """Return the distribution ``[B, N]`` with the smallest mean among ``probs`` ``[B, n, N]`` over ``atoms``
    ``[N]``."""
    if probs.shape[1] == 1:
        return probs.squeeze(1)
    least = (probs @ atoms).argmin(1)
    return probs.take_along_dim(least.reshape(-1, 1, 1), 1).squeeze(1)


def of_action(outputs: Tensor, action: Tensor, dim: int) -> Tensor:
    """Select the entry of ``action`` ``[B]`` along ``dim`` of ``outputs`` ``[B, ..., A, ...]``; drops that
    dimension."""
    index = action.reshape(-1, *[1] * (outputs.ndim - 1))
    return outputs.take_along_dim(index, dim).squeeze(dim)


def first_step_only(x: Tensor) -> Tensor:
    """Return T times the first row of ``x`` ``[T, B]``, then rows of 0: their mean is the mean of the first row."""
    return torch.cat((x[:1] * len(x), torch.zeros_like(x[1:])))


def mean_over_steps(x: Tensor, step_type: Tensor, first_only: bool) -> Tensor:
    """Compute the mean ``[B]`` of ``x`` ``[T, B]`` over the steps with a successor in the sequence, 0 if there is none.

    Args:
        x: ``[T, B]``.
        step_type: ``[T, B]``.
        first_only: use only the first step.
    """
    mask = (step_type != StepType.LAST).to(x.dtype)[:1 if first_only else -1]
    return (x[:len(mask)] * mask).sum(0) / mask.sum(0).clamp(min=1.0)
