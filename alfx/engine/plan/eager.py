"""Objective, batch and result of an update, and the plan that computes its gradients in eager mode.

All other plans are verified against this one.
"""
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.data_structures import LossInfo
from alfx.engine.loss_reduction import masked_means, reduce_loss
from alfx.engine.plan.program import copied
from alfx.experience_replayers.batch_reader import StaticBatch
from alfx.tensor_specs import NestedTensor

logger = logging.getLogger(__name__)
Losses = Callable[[Any], tuple[LossInfo, Tensor | None, NestedTensor]]


class Objective(NamedTuple):
    """Loss to minimize.

    Callables that belong to an object are bound methods or a ``functools.partial`` of one, not functions that hold the
    object (``lambda``): otherwise a copy of the object would train the original.

    Attributes:
        module: module that holds every parameter and buffer that ``losses`` reads.
        losses: function from a batch to its losses, whose ``loss`` is ``[T, B]``; masks ``[T, B]`` of the valid steps,
            or ``None`` if all are valid; and the infos that the losses were computed from, for use after the update.
        params: trained parameters, in the order of the optimizers.
        name: name of the owner, for messages.
        graph_key: returns the key of the next update, if the objective alternates between several sequences of
            operations. Each key has its own traced graph.
        scaled: multiplies the loss by a factor before the backward pass; ``None`` for 1. With a factor the update is
            always eager, because the gradients decide what follows.
        gradient_noise: function from the masked losses ``[T, B]`` and ``params`` to a noise scale, called where
            summaries are written.
    """

    module: nn.Module
    losses: Losses
    params: Sequence[nn.Parameter]
    name: str
    graph_key: Callable[[], Hashable] = lambda: None
    scaled: Callable[[Tensor], Tensor] | None = None
    gradient_noise: Callable[[Tensor, Sequence[nn.Parameter]], Any] | None = None


class Batch(NamedTuple):
    """Input of an update.

    Attributes:
        experience: nest of tensors, in the structure that ``Objective.losses`` takes.
        weights: importance weights ``[B]``, or ``()``.
        static_batch: memory that holds ``experience`` now and other batches later; ``None`` if there is none.
    """

    experience: NestedTensor
    weights: Tensor | tuple[()] = ()
    static_batch: StaticBatch | None = None


class Computed(NamedTuple):
    """Results of an update besides its gradients.

    Attributes:
        loss_info: ``loss`` is a scalar without gradient; ``priority`` is ``[B]`` or ``()``. It is complete, with the
            masked means of ``extra``, where summaries are written; otherwise other fields may be missing. The next
            update may overwrite it.
        train_info: infos that the losses were computed from; ``()`` if no Python code has run.
        parts: losses before means are taken; ``None`` if no Python code has run.
    """

    loss_info: LossInfo
    train_info: NestedTensor = ()
    parts: LossInfo | None = None


class Eager:
    """Plan that computes gradients in eager mode: it calls the losses and runs the backward pass.

    Other plans give the same results.

    Args:
        objective: loss to minimize.

    Attributes:
        supports_static_batches: whether it pays to read batches into the same memory each time.
        accepts_static_batches: whether graphs work on that memory itself, one graph for each address. Otherwise there
            is one graph for each layout, and batches are copied.
    """

    supports_static_batches = accepts_static_batches = False

    def __init__(self, objective: Objective) -> None:
        self.objective, self._warns = objective, True

    def gradients(self, batch: Batch) -> Computed:
        """Store the gradients in the ``grad`` of the parameters, ``None`` for a parameter that the loss does not depend
        on.

        No parameter is changed. The caller checks whether the loss is finite, averages gradients over processes and
        lets the optimizers step.
        """
        objective, experience = self.objective, batch.experience
        if batch.static_batch is not None:
            experience = nest.map_structure(copied, experience)  # the losses may keep parts of it
        parts, masks, train_info = objective.losses(experience)
        total = reduce_loss(parts, masks, 1.0, batch.weights)
        loss_info, is_recording = parts, context.should_record_summaries()
        if is_recording and objective.gradient_noise is not None and bool(torch.isfinite(total.detach())):
            loss_info = loss_info._replace(gns=self._gradient_noise(parts.loss, masks))
        for param in objective.params:
            param.grad = None
        if total.requires_grad:
            (total if objective.scaled is None else objective.scaled(total)).backward()
        elif objective.params and self._warns:
            self._warns = False
            logger.warning('%s: the loss does not depend on any trained parameter, so the update changes nothing; was '
                           'it detached, or computed under torch.no_grad()?', objective.name)
        loss_info = loss_info._replace(loss=total.detach())
        if is_recording:
            loss_info = loss_info._replace(extra=masked_means(loss_info.extra, masks))
        return Computed(loss_info, train_info, parts)

    def explain(self, batch: Batch) -> LossInfo:
        """Compute the losses of a batch again, before means are taken, to name the part that is not finite.

        No other process takes part, because the other processes do not call this.
        """
        with context.alone():
            return self.objective.losses(batch.experience)[0]

    def _gradient_noise(self, loss: Tensor | tuple[()], masks: Tensor | None) -> Tensor | tuple[()]:
        """Return the noise scale of the gradient of ``loss`` ``[T, B]``; ``()`` if the loss has another shape."""
        assert self.objective.gradient_noise is not None
        if not isinstance(loss, Tensor) or loss.ndim != 2:
            return ()
        return self.objective.gradient_noise(loss if masks is None else loss * masks, self.objective.params)
