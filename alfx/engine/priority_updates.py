"""Prioritised replay (Schaul et al. 2016, arXiv:1511.05952): exponents, importance weights, new priorities.

The replay buffer samples in proportion to the numbers it is given; what they mean is decided here.
"""
from typing import Any

import torch

from alfx import context
from alfx.config import TrainerConfig
from alfx.data_structures import BatchInfo, LossInfo


def importance_weights(config: TrainerConfig, batch_info: BatchInfo) -> BatchInfo:
    """``batch_info`` with the weights that correct for sampling by priority (section 3.4).

    With N sequences to choose from and P(i) the probability of sequence i, of which the buffer reports ``N * P(i)``:

        w[i] = (1 / (N * P(i))) ** beta

    and with ``normalize_importance_weights_by_max`` this divided by the largest of the batch. Of several processes that
    train together each samples from what it has stored itself: N and P are those of its own buffer, the largest weight
    is that of the whole batch.

    Args:
        config: ``priority_replay_beta`` is a number or a schedule.
        batch_info: ``importance_weights`` is ``[B]``, or ``()`` where sampling was uniform.
    """
    relative = batch_info.importance_weights
    if not isinstance(relative, torch.Tensor):
        return batch_info
    weights = relative**-_value(config.priority_replay_beta)
    if config.normalize_importance_weights_by_max:
        weights = weights / context.cat_over_ranks(weights).max()
    return batch_info._replace(importance_weights=weights)


def update_priorities(config: TrainerConfig, buffer: Any, batch_info: BatchInfo, loss_info: LossInfo) -> None:
    """Give the sampled sequences new priorities: ``(priority + eps) ** alpha``.

    Args:
        config: ``priority_replay_alpha`` is a number or a schedule.
        buffer: where the batch came from; nothing is done if it does not sample by priority.
        batch_info: env ids and positions ``[B]``.
        loss_info: ``priority`` is ``[B]``.

    Raises:
        ValueError: there is no priority.
    """
    if not buffer.prioritized_sampling:
        return
    priority = loss_info.priority
    if not isinstance(priority, torch.Tensor):
        raise ValueError('TrainerConfig.priority_replay = True, but the loss has no priority: set calculate_priority = '
                         'True for the policy algorithm, or choose one that has it')
    scaled = (priority.detach() + config.priority_replay_eps)**_value(config.priority_replay_alpha)
    buffer.update_priority(batch_info.env_ids, batch_info.positions, scaled)


def _value(number_or_schedule: Any) -> float:
    return float(number_or_schedule() if callable(number_or_schedule) else number_or_schedule)
