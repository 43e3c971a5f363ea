"""Gradients computed step by step: what every other way is held against."""
import torch
from torch import Tensor

from alfx import context, nest
from alfx.data_structures import LossInfo
from alfx.engine.plan.objective import Batch, Computed, Objective
from alfx.engine.plan.program import copied
from alfx.engine.update import masked_means, reduce_loss


class Eager:
    """A plan, which is how gradients are computed: calls the losses, and goes backward. Others give the same numbers.

    Args:
        objective: what to compute.

    Attributes:
        reads_slots: whether it pays to read batches into the same memory each time.
        takes_batches_in_place: whether there is a record for each place; otherwise for all of one layout.
    """

    reads_slots = takes_batches_in_place = False

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def gradients(self, batch: Batch) -> Computed:
        """Leave the gradients of the objective in the ``grad`` of its parameters, ``None`` where it does not depend on
        one.

        No parameter is changed. Whether the loss is finite, whether gradients are averaged over processes, and the
        steps of optimizers are the business of the caller.
        """
        objective, experience = self.objective, batch.experience
        if batch.slot is not None:
            experience = nest.map_structure(copied, experience)  # who calculates losses may keep parts of it
        parts, masks, train_info = objective.losses(experience)
        total = reduce_loss(parts, masks, 1.0, batch.weights)
        loss_info, is_recording = parts, context.should_record_summaries()
        if is_recording and objective.gradient_noise is not None and bool(torch.isfinite(total.detach())):
            loss_info = loss_info._replace(gns=self._gradient_noise(parts.loss, masks))
        for param in objective.params:
            param.grad = None
        if total.requires_grad:
            (total if objective.scaled is None else objective.scaled(total)).backward()
        loss_info = loss_info._replace(loss=total.detach())
        if is_recording:
            loss_info = loss_info._replace(extra=masked_means(loss_info.extra, masks))
        return Computed(loss_info, train_info, parts)

    def explain(self, batch: Batch) -> LossInfo:
        """The losses of a batch once more, before means are taken, to name the part that is not finite.

        Other processes that train together with this one are not asked: they have gone on.
        """
        with context.alone():
            return self.objective.losses(batch.experience)[0]

    def _gradient_noise(self, loss: Tensor | tuple[()], masks: Tensor | None) -> Tensor | tuple[()]:
        """The noise scale of the gradient of ``loss`` ``[T, B]``, ``()`` where there is none."""
        assert self.objective.gradient_noise is not None
        if not isinstance(loss, Tensor) or loss.ndim != 2:
            return ()
        return self.objective.gradient_noise(loss if masks is None else loss * masks, self.objective.params)
