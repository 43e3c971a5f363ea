"""What an update computes, recorded operation by operation as a function of everything that changes between updates.

For algorithms whose update is the same operations every time (``Algorithm.has_fixed_update``). Such a record can be
played (:mod:`alfx.engine.recorded_update`) or compiled (:mod:`alfx.engine.compiled_update`).
"""
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine.program import copied, has_effect
from alfx.engine.update import counted_loss, reduce_loss
from alfx.experience_replayers.batch_reader import Slot
from alfx.tensor_specs import NestedTensor, extract_spec
from alfx.utils.schedulers import disallow_scheduler

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

TrainInfo = Callable[['Algorithm', Experience], NestedTensor]


class NotRecordableError(RuntimeError):
    """The operations of an update depend on the values of tensors."""


def has_fixed_update(algorithm: 'Algorithm') -> bool:
    """Whether the very class of ``algorithm`` says that its update is the same operations every time.

    What a subclass changes nobody knows but its author: it has to define ``has_fixed_update`` again.
    """
    return 'has_fixed_update' in vars(type(algorithm)) and algorithm.has_fixed_update


class Batch(NamedTuple):
    """What an update is made from, flat.

    Attributes:
        leaves: tensors of the experience and the importance weights.
        tree: their structure.
        key: updates of batches with the same key are the same operations.
        num_reused: the first so many leaves are the same tensors in each batch with that key, with other values.
    """

    leaves: list[Tensor]
    tree: Any
    key: Hashable
    num_reused: int = 0


class Gradients(NamedTuple):
    """What :meth:`UpdateRecorder.gradients` returns.

    Attributes:
        loss: scalar.
        priority: ``[B]`` or ``()``.
        grads: one for each parameter, ``None`` for those that the loss does not depend on.
        loss_info: what ``calc_loss`` returned of the steps that count.
        masks: ``[T, B]``, of these steps.
    """

    loss: Tensor
    priority: Any
    grads: Sequence[Tensor | None]
    loss_info: LossInfo
    masks: Tensor


class Step(Protocol):
    """The steps of optimizers, as part of a recorded update: see :class:`~alfx.engine.compiled_step.AdamStep`."""

    def tensors(self) -> list[Tensor]: ...

    def record(self, tensors: Sequence[Tensor], state: Sequence[Tensor], loss: Tensor,
               grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]: ...


class UpdateRecorder:
    """Losses and gradients of an algorithm as a function of its tensors and a batch.

    Args:
        algorithm: trains.
        compute_train_info: the infos ``[T, B, ...]`` that its ``calc_loss`` gets for an experience ``[T, B, ...]``.

    Attributes:
        params: what is trained, in the order of the optimizers.
        tensors: all parameters and buffers.
        trained: where ``params`` are among them.
    """

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        self._algorithm = algorithm
        self._losses = _Losses(algorithm, compute_train_info)
        named = {name: x for name, x in (*self._losses.named_parameters(), *self._losses.named_buffers())}
        self._names, self.tensors = list(named), list(named.values())
        self.params = [p for _, p in algorithm.what_is_updated()[1]]
        places = {id(x): i for i, x in enumerate(self.tensors)}
        self.trained = [places[id(p)] for p in self.params]
        self._layouts: dict[Hashable, object] = {}  # of batches in slots
        self._in_slots: dict[tuple[Slot, bool], tuple[list[Tensor], Any, object]] = {}  # leaves, their tree, layout

    def batch(self, experience: Experience, batch_info: BatchInfo | None, in_place: bool,
              slot: Slot | None = None) -> Batch:
        """The batch of an update.

        Args:
            experience: ``[T, B, ...]``.
            batch_info: where it came from.
            in_place: batches are taken from where the first one of their kind lies, if others are going to lie there as
                well. Otherwise they may lie anywhere, but without gaps between their numbers.
            slot: holds ``experience``; other batches follow it there.
        """
        weights = batch_info.importance_weights if batch_info is not None else ()
        if slot is not None:
            return self._batch_in_slot(slot, weights, in_place)
        leaves, tree = nest.flatten_with_structure((experience, weights))
        if not in_place:
            leaves = [x.contiguous() for x in leaves]
        key = self._algorithm.update_variant, tree, tuple((x.shape, x.stride(), x.dtype) for x in leaves)
        return Batch(leaves, tree, key)

    def _batch_in_slot(self, slot: Slot, weights: Any, in_place: bool) -> Batch:
        """The batch in a slot, with gaps or without: all slots of a reader are alike."""
        is_weighted = isinstance(weights, Tensor)
        found = self._in_slots.get((slot, is_weighted))
        if found is None:
            leaves, tree = nest.flatten_with_structure((slot.time_major, weights))
            layout = tree, tuple((x.shape, x.stride(), x.dtype) for x in leaves)
            kind = object() if in_place else self._layouts.setdefault(layout, object())
            found = self._in_slots[slot, is_weighted] = leaves[:len(leaves) - is_weighted], tree, kind
        leaves, tree, kind = found
        key = self._algorithm.update_variant, kind
        return Batch([*leaves, weights] if is_weighted else leaves, tree, key, len(leaves) if in_place else 0)

    def gradients(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor], tree: Any) -> Gradients:
        """Losses and gradients for ``tensors`` in the place of the algorithm's own."""
        experience, weights = nest.unflatten(tree, leaves)
        with torch.enable_grad():
            tracked = [tensors[i].detach().requires_grad_() for i in self.trained]
            named = dict(zip(self._names, tensors))
            named.update((self._names[i], p) for i, p in zip(self.trained, tracked))
            loss_info: LossInfo = torch.func.functional_call(self._losses, named, (experience, ))
            loss_info, masks = counted_loss(self._algorithm, loss_info, experience.time_step.step_type)
            total = reduce_loss(loss_info, masks, 1.0, weights)
            grads = torch.autograd.grad(total, tracked, allow_unused=True)
        priority = loss_info.priority
        return Gradients(total.detach(), priority.detach() if isinstance(priority, Tensor) else (), grads, loss_info,
                         masks)

    def record_gradients(self, batch: Batch, more: Callable[[Gradients], list[Tensor]] | None = None,
                         step: Step | None = None) -> Any:
        """A graph from all tensors and the leaves of a batch to loss, priorities or None, and gradients or None.

        Args:
            batch: what the update is made from.
            more: what the graph returns besides, of an update that writes summaries.
            step: makes the steps of the optimizers, too; its tensors come between those two.

        Raises:
            NotRecordableError: see :func:`recorded`.
        """
        state = step.tensors() if step is not None else []
        count = len(self.tensors)

        def update(*flat: Tensor) -> list[Any]:
            tensors, moments, leaves = flat[:count], flat[count:count + len(state)], flat[count + len(state):]
            with context.record_if(more is not None):
                found = self.gradients(tensors, leaves, batch.tree)
            priority = found.priority if isinstance(found.priority, Tensor) else None
            told = more(found) if more is not None else []
            grads = found.grads if step is None else step.record(tensors, moments, found.loss, found.grads)
            return [found.loss, priority, *grads, *told]

        return recorded(update, [*self.tensors, *state, *batch.leaves], f'the update of {self._algorithm.name}')


def recorded(function: Callable[..., list[Any]], inputs: Sequence[Tensor], what: str) -> Any:
    """A graph of what ``function`` does with ``inputs``, without what has no effect.

    It is called with copies, and no generator moves on.

    Args:
        function: returns tensors and None.
        inputs: all tensors that it reads and that may change.
        what: what the function is, for messages.

    Raises:
        NotRecordableError: something looks at the values of a tensor, such as a check that integers are in range.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.random.fork_rng(), disallow_scheduler(), context.record_if(False):
        try:
            graph = make_fx(function)(*(copied(x.detach()) for x in inputs))
        except RuntimeError as error:
            if 'tracing tensor' not in str(error):
                raise
            raise NotRecordableError(f'{what} looks at the values of a tensor, so that its operations cannot be '
                                     f'recorded: {error}') from error
    _check_constants(graph, inputs, what)
    graph.graph.eliminate_dead_code(is_impure_node=has_effect)
    graph.recompile()
    return graph


def _check_constants(graph: Any, inputs: Sequence[Tensor], what: str) -> None:
    """A parameter that the record holds as a constant would never be seen to change."""
    mine = {x.data_ptr() for x in inputs if x.numel()}
    for node in graph.graph.nodes:
        if node.op == 'get_attr':
            value = getattr(graph, node.target)
            assert not (isinstance(value, Tensor) and value.numel() and value.data_ptr() in mine), (
                f'{what} reaches a parameter of shape {tuple(value.shape)} past its modules')


class _Losses(nn.Module):
    """From experience to losses, as a module whose parameters can be exchanged for a call."""

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        super().__init__()
        self.algorithm = algorithm
        self._compute_train_info = compute_train_info

    def forward(self, experience: Experience) -> LossInfo:
        """``[T, B, ...]`` to the losses ``[T, B]``."""
        train_info = self._compute_train_info(self.algorithm, experience)
        if self.algorithm._train_info_spec is None:
            self.algorithm._train_info_spec = extract_spec(train_info, from_dim=2)
        return self.algorithm.calc_loss(train_info)
