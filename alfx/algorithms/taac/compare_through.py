"""Multi-step returns that stop where the current policy would have acted differently.

Yu, Xu and Zhang 2021 (arXiv:2104.06521), section 4.1: the compare-through operator. Used by
:mod:`alfx.algorithms.taac_algorithm`.
"""
import torch
from torch import Tensor

from alfx.data_structures import StepType


def compare_through_return(reward: Tensor, value: Tensor, step_type: Tensor, discount: Tensor,
                           is_switched: Tensor) -> Tensor:
    """Return multi-step returns along the steps at which both rollout and current policy repeat their action.

    With n the first step after t at which the rollout or the current policy switches, the sequence ends, or the
    episode ends::

        G[t] = r[t+1] + d[t+1] r[t+2] + ... + d[t+1] ... d[n-1] r[n] + d[t+1] ... d[n] V[n]

    Args:
        reward: ``[T, B]`` or ``[T, B, K]``, for arriving at each step.
        value: value of the current policy's action at each step, with the shape of ``reward``.
        step_type: ``[T, B]``.
        discount: ``[T, B]`` or ``[T, B, K]``, environment discount (0 at a termination) times gamma.
        is_switched: bool ``[T, B]``, the rollout or the current policy switches.

    Returns:
        Returns ``[T-1, B]`` (``[T-1, B, K]``); the return of a LAST step is its own value.

    Raises:
        ValueError: fewer than two steps.
    """
    if reward.shape[0] < 2:
        raise ValueError(f'expected at least 2 time steps, found rewards of shape {tuple(reward.shape)}; set '
                         'TrainerConfig.mini_batch_length to 2 or more')
    is_last = step_type == StepType.LAST
    stops = is_switched | is_last
    if reward.dim() == 3:
        is_last, stops = is_last.unsqueeze(-1), stops.unsqueeze(-1)
        discount = discount if discount.dim() == 3 else discount.unsqueeze(-1)
    target = reward[-1] + discount[-1] * value[-1]
    targets = [target]
    for t in range(reward.shape[0] - 2, 0, -1):
        target = reward[t] + discount[t] * torch.where(stops[t], value[t], target)
        targets.append(target)
    return torch.where(is_last[:-1], value[:-1], torch.stack(targets[::-1]))
