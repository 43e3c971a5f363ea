"""Updates: losses and gradients of an objective, in the fastest form there is."""
import copy
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context, nest
from alfx.data_structures import LossInfo
from alfx.engine.plan import backends
from alfx.engine.plan.capture import Captured
from alfx.engine.plan.verification import Parts
from alfx.engine.plan.compile import Compiled
from alfx.engine.plan.eager import Batch, Computed, Eager, Objective
from alfx.engine.plan.backends import Backend, Replayed, GraphRequest, GraphTask
from alfx.engine.plan.recorder import Record, Recorder
from alfx.engine.loss_reduction import reduce_loss
from alfx.experience_replayers.batch_reader import StaticBatch


class UpdateTask(GraphTask):
    """An update, for the forms."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._params = objective, list(objective.params)
        self.recorder = Recorder(objective.losses, [objective.module], f'the update of {objective.name}')
        names = {id(x): name for name, _, x in self.recorder.tensors()}
        self._param_names = [names.get(id(p), '') for p in self._params]
        self._layouts: dict[Hashable, object] = {}  # of batches in slots: what stands for them, quickly found in a key
        # leaves, tree, layout
        self._in_slots: dict[tuple[StaticBatch, bool, bool], tuple[list[Tensor], Any, object]] = {}

    def request(self, asked: Batch, in_place: bool) -> GraphRequest:
        """The tensors of a batch; of a batch in a slot, with gaps or without, since all slots of a reader are alike."""
        variant, (experience, weights, slot) = self._objective.variant(), asked
        if slot is None:
            leaves, tree = nest.flatten_with_structure((experience, weights))
            if not in_place:
                leaves = [x.contiguous() for x in leaves]
            return GraphRequest(leaves, tree, (variant, _layout(leaves, tree)))
        is_weighted = isinstance(weights, Tensor)
        found = self._in_slots.get((slot, is_weighted, in_place))
        if found is None:
            leaves, tree = nest.flatten_with_structure((slot.time_major, weights))
            kind = object() if in_place else self._layouts.setdefault(_layout(leaves, tree), object())
            found = self._in_slots[slot, is_weighted, in_place] = leaves[:len(leaves) - is_weighted], tree, kind
        leaves, tree, kind = found
        return GraphRequest([*leaves, weights] if isinstance(weights, Tensor) else leaves, tree, (variant, kind),
                       len(leaves) if in_place else 0)

    def record(self, request: GraphRequest) -> Record:
        """From tensors and the leaves of a batch to loss, priorities or ``None``, and gradients or ``None``."""
        def update(named: dict[str, Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
            experience, weights = nest.unflatten(request.tree, leaves)
            with torch.enable_grad():
                tracked = {name: named[name].detach().requires_grad_() for name in self._param_names}
                loss_info, masks, _ = self.recorder.call({**named, **tracked}, experience)
                total = reduce_loss(loss_info, masks, 1.0, weights)
                grads = torch.autograd.grad(total, list(tracked.values()), allow_unused=True)
            priority = loss_info.priority
            return [total.detach(), priority.detach() if isinstance(priority, Tensor) else None, *grads]

        return self.recorder.record(update, request.leaves)

    def parts(self, answer: Computed) -> Parts:
        """Loss, priorities and gradients."""
        priority = answer.loss_info.priority
        return [('the loss', answer.loss_info.loss),
                ('the priority', priority if isinstance(priority, Tensor) else None),
                *((f'the gradient of {name.removeprefix("read.0.")}', p.grad)
                  for name, p in zip(self._param_names, self._params))]

    def answer(self, results: Sequence[Tensor | None], request: GraphRequest) -> Computed:
        """The gradients are left where they are: optimizers find them there again at the next update."""
        for param, grad in zip(self._params, results[2:]):
            if param.grad is not grad:
                param.grad = grad
        return Computed(LossInfo(loss=results[0], priority=() if results[1] is None else results[1]))

    def must_be_eager(self) -> bool:
        """Only Python code can write summaries."""
        return context.should_record_summaries()

    def is_comparable(self, answer: Computed) -> bool:
        """Of a loss that is not finite, all parts are as good as another."""
        return math.isfinite(answer.loss_info.loss.item())


def _layout(leaves: Sequence[Tensor], tree: Any) -> Hashable:
    return tree, tuple([(x.shape, x.stride(), x.dtype) for x in leaves])


class TracedPlan(Eager):
    """Gradients in the fastest form that there is for a batch. Make it with :func:`make_plan`.

    Args:
        objective: what to compute.
        compiles: whether updates are compiled; otherwise they are played.
        is_rare: whether there is only one update an iteration.

    Attributes:
        played, compiled: the forms, for who wants to know what has become of them; ``None`` before the first call, and
            if nothing is compiled.
    """

    reads_slots = True

    def __init__(self, objective: Objective, compiles: bool, is_rare: bool = False) -> None:
        super().__init__(objective)
        self._compiles, self._is_rare, self.accepts_static_batches = compiles, is_rare, not compiles
        self.played: Replayed | None = None
        self.compiled: Compiled | None = None
        self._form: Backend | None = None

    def _make_form(self) -> Backend:
        """Put one form round the other, as soon as the first gradients are wanted: only then its module is complete."""
        task = UpdateTask(self.objective)
        warm_up = backends.WARM_UP.rare_updates if self._is_rare else backends.WARM_UP.updates
        self.played = Replayed(super().gradients, task, warm_up)
        if not self._compiles:
            return self.played
        self.compiled = Compiled(self.played, task, backends.WARM_UP.compiled_updates)
        if not all(p.is_cuda for p in self.objective.params):
            return self.compiled
        return Captured(self.compiled, task, backends.WARM_UP.captured_updates)

    def __deepcopy__(self, memo: Any) -> 'TracedPlan':
        # records hold the tensors of the original
        return TracedPlan(copy.deepcopy(self.objective, memo), self._compiles, self._is_rare)

    def gradients(self, batch: Batch) -> Computed:
        """As step by step."""
        if self._form is None:
            self._form = self._make_form()
        return self._form(batch)
