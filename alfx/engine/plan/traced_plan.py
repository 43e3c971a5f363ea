"""Fast computation of the losses and gradients of an objective, on the fastest available backend."""
import copy
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context, nest
from alfx.data_structures import LossInfo
from alfx.engine.loss_reduction import reduce_loss
from alfx.engine.plan import backends
from alfx.engine.plan.backends import Backend, GraphRequest, GraphTask, Replayed
from alfx.engine.plan.capture import Captured
from alfx.engine.plan.compile import Compiled
from alfx.engine.plan.eager import Batch, Computed, Eager, Objective
from alfx.engine.plan.torch_internals import storage_key
from alfx.engine.plan.traced_graph import TracedGraph, Tracer
from alfx.engine.plan.verification import Parts
from alfx.experience_replayers.batch_reader import StaticBatch


class UpdateTask(GraphTask):
    """Update of an objective, for the backends."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._params = objective, list(objective.params)
        self.tracer = Tracer(objective.losses, [objective.module], f'the update of {objective.name}')
        names = {id(x): name for name, _, x in self.tracer.tensors()}
        self._param_names = [names.get(id(p), '') for p in self._params]
        self._layouts: dict[Hashable, object] = {}  # a key for each layout of static batches that is fast to hash
        # leaves, tree, layout
        self._static_batches: dict[tuple[StaticBatch, bool, bool], tuple[list[Tensor], Any, object]] = {}

    def request(self, inputs: Batch, in_place: bool) -> GraphRequest:
        """Flatten a batch; all static batches of a reader have the same layout."""
        experience, weights, static_batch = inputs
        trained = tuple([p.requires_grad for p in self._params])  # parameters can be frozen during a run
        graph_key = self._objective.graph_key(), trained
        if static_batch is None:
            leaves, tree = nest.flatten_with_structure((experience, weights))
            if not in_place:
                leaves = [x.contiguous() for x in leaves]
            return GraphRequest(leaves, tree, (graph_key, _layout(leaves, tree)))
        is_weighted = isinstance(weights, Tensor)
        found = self._static_batches.get((static_batch, is_weighted, in_place))
        if found is None:
            leaves, tree = nest.flatten_with_structure((static_batch.time_major, weights))
            layout = object() if in_place else self._layouts.setdefault(_layout(leaves, tree), object())
            found = leaves[:len(leaves) - is_weighted], tree, layout
            self._static_batches[static_batch, is_weighted, in_place] = found
        leaves, tree, layout = found
        return GraphRequest([*leaves, weights] if isinstance(weights, Tensor) else leaves, tree, (graph_key, layout),
                            len(leaves) if in_place else 0)

    def trace(self, request: GraphRequest) -> TracedGraph:
        """Trace from the leaves of a batch to loss, priority or ``None``, and gradients or ``None``."""
        trained = [name for name, p in zip(self._param_names, self._params) if p.requires_grad]

        def update(named: dict[str, Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
            experience, weights = nest.unflatten(request.tree, leaves)
            with torch.enable_grad():
                tracked = {name: named[name].detach().requires_grad_() for name in trained}
                loss_info, masks, _ = self.tracer.call({**named, **tracked}, experience)
                total = reduce_loss(loss_info, masks, 1.0, weights)
                grads = dict(zip(trained, torch.autograd.grad(total, list(tracked.values()), allow_unused=True)))
            priority = loss_info.priority
            return [total.detach(), priority.detach() if isinstance(priority, Tensor) else None,
                    *_with_own_memory([grads.get(name) for name in self._param_names])]

        return self.tracer.trace(update, request.leaves)

    def parts(self, output: Computed) -> Parts:
        """Return loss, priorities and gradients with their names."""
        priority = output.loss_info.priority
        return [('the loss', output.loss_info.loss),
                ('the priority', priority if isinstance(priority, Tensor) else None),
                *((f'the gradient of {name.removeprefix("read.0.")}', p.grad)
                  for name, p in zip(self._param_names, self._params))]

    def output(self, results: Sequence[Tensor | None], request: GraphRequest) -> Computed:
        """Assign the gradients without copying them, so that optimizers find the same tensors at each update."""
        for param, grad in zip(self._params, results[2:]):
            if param.grad is not grad:
                param.grad = grad
        return Computed(LossInfo(loss=results[0], priority=() if results[1] is None else results[1]))

    def must_be_eager(self) -> bool:
        """Return whether summaries are written, which only Python code can do."""
        return context.should_record_summaries()

    def is_comparable(self, output: Computed) -> bool:
        """Return whether the loss is finite: otherwise differences mean nothing."""
        return math.isfinite(output.loss_info.loss.item())


def _with_own_memory(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy gradients that share memory, as ``backward`` does, because gradients are clipped in place."""
    own: list[Tensor | None] = []
    seen = set()
    for grad in grads:
        if grad is not None:
            is_expanded = any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape))
            is_shared = is_expanded or storage_key(grad) in seen
            seen.add(storage_key(grad))
            grad = grad.clone(memory_format=torch.contiguous_format) if is_shared else grad
        own.append(grad)
    return own


def _layout(leaves: Sequence[Tensor], tree: Any) -> Hashable:
    return tree, tuple([(x.shape, x.stride(), x.dtype) for x in leaves])


class TracedPlan(Eager):
    """Gradients on the fastest backend available for a batch. Create it with :func:`make_plan`.

    Args:
        objective: loss to minimize.
        compiles: compile updates; otherwise they are replayed.
        is_rare: whether there is at most one update per iteration.

    Attributes:
        replayed: backend that replays graphs; ``None`` before the first call.
        compiled: backend that compiles graphs; ``None`` before the first call, and if nothing is compiled.
    """

    supports_static_batches = True

    def __init__(self, objective: Objective, compiles: bool, is_rare: bool = False) -> None:
        super().__init__(objective)
        self._compiles, self._is_rare, self.accepts_static_batches = compiles, is_rare, not compiles
        self.replayed: Replayed | None = None
        self.compiled: Compiled | None = None
        self._backend: Backend | None = None

    def _make_backend(self) -> Backend:
        """Create the backends; at the first call, because the module is incomplete before."""
        task = UpdateTask(self.objective)
        warm_up = backends.WARM_UP.rare_updates if self._is_rare else backends.WARM_UP.updates
        self.replayed = Replayed(super().gradients, task, warm_up)
        if not self._compiles:
            return self.replayed
        self.compiled = Compiled(self.replayed, task, backends.WARM_UP.compiled_updates)
        if not all(p.is_cuda for p in self.objective.params):
            return self.compiled
        return Captured(self.compiled, task, backends.WARM_UP.captured_updates)

    def __deepcopy__(self, memo: Any) -> 'TracedPlan':
        # graphs hold the tensors of the original
        return TracedPlan(copy.deepcopy(self.objective, memo), self._compiles, self._is_rare)

    def gradients(self, batch: Batch) -> Computed:
        """Compute gradients, see :meth:`Eager.gradients`."""
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend(batch)
