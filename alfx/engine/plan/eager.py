"""What a plan is asked for, the gradients of an objective for a batch, and the plan that computes them step by step.

Every other one is held against that.
"""
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.data_structures import LossInfo
from alfx.engine.plan.program import copied
from alfx.engine.loss_reduction import masked_means, reduce_loss
from alfx.experience_replayers.batch_reader import StaticBatch
from alfx.tensor_specs import NestedTensor

Losses = Callable[[Any], tuple[LossInfo, Tensor | None, NestedTensor]]


def _no_variants() -> Hashable:
    return None


class Objective(NamedTuple):
    """A loss to be minimised.

    Callables that belong to an object are its bound methods or ``functools.partial`` of it, not functions that hold it
    (``lambda``): otherwise a copy of the object would train the original.

    Attributes:
        module: holds every parameter and buffer that ``losses`` reads.
        losses: from a batch to its losses, of which ``loss`` is ``[T, B]``; masks ``[T, B]`` of the steps that count,
            or ``None`` if all do; and the infos that the losses were made from, for whoever looks at them after the
            update.
        params: what is trained, in the order of the optimizers.
        name: whose objective it is, for messages.
        variant: which one of several fixed objectives is next, where they take turns.
        scaled: what the loss is multiplied by before it goes backward; ``None`` for 1. Where that is so, what follows
            depends on the gradients, and each update is made step by step.
        gradient_noise: from the masked losses ``[T, B]`` and ``params`` to a noise scale, where summaries are written.
    """

    module: nn.Module
    losses: Losses
    params: Sequence[nn.Parameter]
    name: str
    variant: Callable[[], Hashable] = _no_variants
    scaled: Callable[[Tensor], Tensor] | None = None
    gradient_noise: Callable[[Tensor, Sequence[nn.Parameter]], Any] | None = None


class Batch(NamedTuple):
    """What an update is made from.

    Attributes:
        experience: nest of tensors, in whatever form ``Objective.losses`` takes it.
        weights: importance weights ``[B]``, or ``()``.
        slot: the memory that holds ``experience`` now and other batches later, if there is any.
    """

    experience: NestedTensor
    weights: Tensor | tuple[()] = ()
    slot: StaticBatch | None = None


class Computed(NamedTuple):
    """What was computed besides gradients.

    Attributes:
        loss_info: ``loss`` is a scalar without gradient; ``priority`` is ``[B]`` or ``()``. Where summaries are written
            it is complete, with the masked means of ``extra``; otherwise more may be missing. The next update may
            overwrite it.
        train_info: what the losses were made from; ``()`` where no Python code has seen it.
        parts: the losses as they were, before means were taken; ``None`` where no Python code has seen them.
    """

    loss_info: LossInfo
    train_info: NestedTensor = ()
    parts: LossInfo | None = None


class Eager:
    """A plan, which is how gradients are computed: calls the losses, and goes backward. Others give the same numbers.

    Args:
        objective: what to compute.

    Attributes:
        reads_slots: whether it pays to read batches into the same memory each time.
        accepts_static_batches: whether there is a record for each place; otherwise for all of one layout.
    """

    reads_slots = accepts_static_batches = False

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
