"""Prioritized replay (Schaul et al. 2016, arXiv:1511.05952): exponents, importance weights, new priorities.

The replay buffer samples in proportion to given numbers; this module computes them.
"""
from typing import Any

import torch

from alfx import context
from alfx.config import TrainerConfig
from alfx.data_structures import BatchInfo, LossInfo
from alfx.utils.schedulers import as_scheduler


def importance_weights(config: TrainerConfig, batch_info: BatchInfo) -> BatchInfo:
    """Return ``batch_info`` with the weights that correct for sampling by priority (section 3.4).

    With N sequences to choose from and P(i) the probability of sequence i, of which the buffer reports ``N * P(i)``:

        w[i] = (1 / (N * P(i))) ** beta

    With ``normalize_importance_weights_by_max`` this is divided by the largest weight of the batch. If several
    processes train together, each samples from its own buffer: N and P belong to that buffer, and the largest weight is
    taken over all ranks.

    Args:
        config: ``priority_replay_beta`` is a number or a schedule.
        batch_info: ``importance_weights`` is ``[B]``, or ``()`` if sampling was uniform.
    """
    relative = batch_info.importance_weights
    if not isinstance(relative, torch.Tensor):
        return batch_info
    weights = relative**-as_scheduler(config.priority_replay_beta)()
    if config.normalize_importance_weights_by_max:
        weights = weights / context.cat_over_ranks(weights).max()
    return batch_info._replace(importance_weights=weights)


def update_priorities(config: TrainerConfig, buffer: Any, batch_info: BatchInfo, loss_info: LossInfo) -> None:
    """Set new priorities of the sampled sequences: ``(priority + eps) ** alpha``.

    Args:
        config: ``priority_replay_alpha`` is a number or a schedule.
        buffer: source of the batch; nothing is done if it does not sample by priority.
        batch_info: env ids and positions ``[B]``.
        loss_info: ``priority`` is ``[B]``.

    Raises:
        ValueError: ``loss_info`` has no priority.
    """
    if not buffer.prioritized_sampling:
        return
    priority = loss_info.priority
    if not isinstance(priority, torch.Tensor):
        raise ValueError('TrainerConfig.priority_replay = True: expected a LossInfo with priority, found none; set '
                         'calculate_priority = True for the policy algorithm, or choose one that supports it')
    scaled = (priority.detach() + config.priority_replay_eps)**as_scheduler(config.priority_replay_alpha)()
    buffer.update_priority(batch_info.env_ids, batch_info.positions, scaled)
