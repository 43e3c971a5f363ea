"""A recorded function as compiled code.

``torch.compile``'s backend turns a record into one function, in which what is done element by element is done in few
passes. :mod:`alfx.engine.cpu_graph` prepares the record for a CPU.
"""
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from alfx.engine import cpu_graph
from alfx.engine.compiled_step import AdamStep
from alfx.engine.program import addresses, copied

_Function = Callable[[list[Tensor]], Sequence[Tensor | None]]


class CompiledFunction:
    """Calls a compiled graph on tensors that stay where they are and on others.

    Args:
        graph: of aten operations, from ``fixed`` and then ``changing`` to the results; it is changed.
        fixed: tensors that it reads, and may write to, where they are.
        changing: examples of the other inputs: the shapes, strides and types that they always have.
        step: is part of the graph, with tensors between ``fixed`` and ``changing``.

    Attributes:
        makes_step: whether it makes the steps of the optimizers as well.
        asks_other_ranks: whether it waits for other processes in between, which no CUDA graph can.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[Tensor], changing: Sequence[Tensor],
                 step: AdamStep | None = None) -> None:
        self.asks_other_ranks = any('mean_over_ranks' in str(node.target) for node in graph.graph.nodes)
        self._tensors = _without_unused(graph, fixed)
        self._addresses = addresses(self._tensors)
        self._fixed = [x.detach() for x in self._tensors]
        self._step, self.makes_step = step, step is not None
        state = step.tensors() if step is not None else ()
        self._function: _Function = _compiled(graph, [*self._fixed, *state, *changing])
        del graph
        gc.collect()  # of all that a compiler leaves behind: otherwise some update would soon wait a third of a second

    @property
    def is_current(self) -> bool:
        """Whether the fixed tensors still lie where they did, and the optimizers do what they did."""
        return addresses(self._tensors) == self._addresses and (self._step is None or self._step.is_current)

    def __call__(self, changing: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What the graph returns."""
        state = self._step.prepare() if self._step is not None else ()
        return self._function([*self._fixed, *state, *changing])


def _without_unused(graph: fx.GraphModule, fixed: Sequence[Tensor]) -> list[Tensor]:
    """Those of ``fixed``, the first inputs of ``graph``, that it makes use of; the others are no inputs any more."""
    used = []
    for node, tensor in list(zip(graph.graph.nodes, fixed)):
        if node.users:
            used.append(tensor)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def _compiled(graph: fx.GraphModule, inputs: list[Tensor]) -> _Function:
    """``graph`` as a function of a list; the backend does its work now."""
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    # the same random numbers as without compiling, from the generator that a checkpoint saves
    with inductor_config.patch(fallback_random=True, size_asserts=False):
        if all(x.device.type == 'cpu' for x in inputs):
            return cpu_graph.compiled(graph, inputs)
        function: Any = compile_fx(graph, inputs)
        call: _Function = torch.no_grad()(lambda tensors: function(*tensors))
        with torch.random.fork_rng():
            call([copied(x) for x in inputs])
        return call
