"""On-policy training: one update from an unroll."""
from typing import TYPE_CHECKING

import torch

from alfx import context
from alfx.data_structures import Experience, LossInfo
from alfx.engine.plan import Batch
from alfx.engine.planning import plan_of
from alfx.engine.replay import compute_train_info
from alfx.engine.update import optimize, without_bootstrap_step
from alfx.tensor_specs import NestedTensor

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm


def train_from_unroll(algorithm: 'Algorithm', experience: Experience, train_info: NestedTensor | None) -> int:
    """One update from an unroll.

    Args:
        algorithm: calculates the loss and owns the optimizers.
        experience: ``[T + 1, B, ...]``; the last step is there to bootstrap from, its loss does not count.
        train_info: infos ``[T + 1, B, ...]``; ``None``: they are computed from ``experience`` for all steps at once.

    Returns:
        ``T * B``, the number of steps trained on.
    """
    if train_info is None:
        plan = plan_of(algorithm, _recomputed_losses)
    else:
        plan = plan_of(algorithm, _losses_of_infos, is_function_of_batch=False)
        experience = experience._replace(rollout_info=train_info)
    computed, params = optimize(algorithm, plan, Batch(experience))
    algorithm.after_update(experience.time_step, computed.train_info)
    if context.should_record_summaries():
        algorithm.summarize_train(experience, computed.train_info, computed.loss_info, params)
    length, batch = experience.time_step.step_type.shape
    return (length - 1) * batch


def _recomputed_losses(algorithm: 'Algorithm', experience: Experience) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
    """``Objective.losses`` of an unroll that was collected without gradients."""
    return _losses_of_infos(algorithm, experience._replace(rollout_info=compute_train_info(algorithm, experience)))


def _losses_of_infos(algorithm: 'Algorithm', experience: Experience) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
    """``Objective.losses`` of an unroll whose infos are there."""
    train_info = experience.rollout_info
    loss_info, masks = without_bootstrap_step(algorithm.calc_loss(train_info), experience.time_step.step_type)
    return loss_info, masks, train_info
