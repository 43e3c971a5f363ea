"""Updates played from a record: the same operations on the same numbers, without Python and autograd in between.

An update of small networks takes most of its time for deciding what to do: calls of modules, of distributions, of the
loss, and the bookkeeping of autograd. Where the operations are the same every time, they are recorded after some
updates and played from then on, forward and backward, one after the other. The results are equal to the bit.
"""
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine.recording import NotRecordableError, TrainInfo, UpdateRecorder

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

logger = logging.getLogger(__name__)
_UPDATES_BEFORE = 50  # recording takes as long as some hundred updates: a short run is over before that pays


class RecordedUpdate:
    """Plays the updates of an algorithm, one record for each variant of its update and each layout of a batch.

    Args:
        algorithm: trains; ``has_fixed_update``.
        compute_train_info: as for :class:`~alfx.engine.recording.UpdateRecorder`.
    """

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        self._algorithm = algorithm
        self._compute_train_info = compute_train_info
        self._recorder: UpdateRecorder | None = None
        self._records: dict[Any, Callable[..., Any]] = {}
        self._is_recordable = True
        self._counts: dict[Any, int] = {}

    def __call__(self, experience: Experience, batch_info: BatchInfo | None) -> LossInfo | None:
        """One update, if it is time to play it.

        Args:
            experience: ``[T, B, ...]``.
            batch_info: where the batch came from; its importance weights apply.

        Returns:
            ``loss``: a scalar; ``priority``: ``[B]`` or ``()``. ``None``: no parameter has been changed, since it
            is not time yet or the loss is not finite.
        """
        if not self._is_recordable:
            return None
        if self._recorder is None:
            self._recorder = UpdateRecorder(self._algorithm, self._compute_train_info)
        recorder = self._recorder
        batch = recorder.batch(experience, batch_info, contiguous=False)
        play = self._records.get(batch.key)
        if play is None:
            count = self._counts[batch.key] = self._counts.get(batch.key, 0) + 1
            if count <= _UPDATES_BEFORE:
                return None
            try:
                play = self._records[batch.key] = self._record(recorder, batch.leaves, batch.tree)
            except NotRecordableError as error:
                logger.info('%s; it is made step by step, which takes longer', str(error).partition(':')[0])
                self._is_recordable = False
                return None
        with torch.no_grad():
            loss, priority, *grads = play(*recorder.tensors, *batch.leaves)
        if not torch.isfinite(loss):
            return None  # made step by step, it stops with the name of the loss that is not finite
        for param, grad in zip(recorder.params, grads):
            param.grad = grad
        averager = self._algorithm.gradient_averager
        if averager is not None:
            averager.average()
        for optimizer in self._algorithm.what_is_updated()[0]:
            optimizer.step()
        return LossInfo(loss=loss, priority=() if priority is None else priority)

    @staticmethod
    def _record(recorder: UpdateRecorder, leaves: list[Tensor], tree: Any) -> Callable[..., Any]:
        count = len(recorder.tensors)

        def update(*flat: Tensor) -> list[Any]:
            loss, priority, grads = recorder.gradients(flat[:count], flat[count:], tree)
            return [loss, priority if isinstance(priority, Tensor) else None, *grads]

        graph = recorder.record(update, [*(x.detach() for x in recorder.tensors), *leaves])
        return _streamlined(graph).forward


def _streamlined(graph_module: Any) -> Any:
    """The same graph without what does nothing, each operation called in the quickest way there is."""
    graph, aten = graph_module.graph, torch.ops.aten
    quick_methods = {aten.view.default: torch.Tensor.view, aten.expand.default: torch.Tensor.expand}
    quick = {getattr(getattr(aten, name), overload): getattr(torch, name) for name, overload in _QUICK}
    quick.update(quick_methods)
    for node in list(graph.nodes):
        if node.op != 'call_function':
            continue
        if node.target is aten.detach.default:  # nothing tracks gradients where it is played
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.t.default and _is_transposed(node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)
        elif node.target in quick:
            node.target = quick[node.target]
    graph.eliminate_dead_code(is_impure_node=_has_effect)
    graph_module.recompile()
    return graph_module


def _is_transposed(node: Any) -> bool:
    """Whether a node is the transpose of a matrix, as autograd makes it to go back."""
    return node.op == 'call_function' and node.target in (torch.t, torch.ops.aten.t.default)


def _has_effect(node: Any) -> bool:
    """Whether a node may not be left out although nobody uses its result: it changes a tensor or draws numbers."""
    if node.op in ('placeholder', 'output'):
        return True
    name = getattr(node.target, '__name__', str(node.target)).split('.')[0]
    return name.endswith('_') or any(word in name for word in _WITH_EFFECT)


_WITH_EFFECT = ('rand', 'normal', 'bernoulli', 'multinomial', 'exponential', 'uniform', 'dropout', 'copy', 'gamma',
                'poisson')

# Operations whose Python function takes the same arguments as the operation itself.
_QUICK = (
    ('abs', 'default'), ('add', 'Tensor'), ('addcmul', 'default'), ('addmm', 'default'), ('baddbmm', 'default'),
    ('bmm', 'default'), ('cat', 'default'), ('clamp', 'default'), ('div', 'Tensor'), ('exp', 'default'),
    ('gather', 'default'), ('log', 'default'), ('logaddexp', 'default'), ('lerp', 'Tensor'), ('mm', 'default'),
    ('mul', 'Tensor'), ('neg', 'default'), ('ne', 'Scalar'), ('permute', 'default'), ('relu_', 'default'),
    ('rsub', 'Scalar'), ('select', 'int'), ('sqrt', 'default'), ('sub', 'Tensor'), ('sum', 'dim_IntList'),
    ('t', 'default'), ('tanh', 'default'), ('transpose', 'int'), ('unsqueeze', 'default'), ('where', 'self'))
