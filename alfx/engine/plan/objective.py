"""What a plan is asked for: the gradients of an objective for a batch, and what it answers."""
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from alfx.data_structures import LossInfo
from alfx.experience_replayers.batch_reader import Slot
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
    slot: Slot | None = None


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
