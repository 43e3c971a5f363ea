"""Compiled graphs: elementwise operations are fused into a few passes.

On a CPU, :mod:`alfx.engine.plan.cpu_graph` prepares the graph for the compiler. Results differ from those of the
fallback by rounding.
"""
import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from alfx.engine.plan import cpu_graph
from alfx.engine.plan.backends import Backend, CachedGraph, GraphRequest, Run, UnsupportedError
from alfx.engine.plan.program import copied
from alfx.engine.plan.torch_internals import below_autograd, compile_graph, compiler_settings, entry_in_c, storage_key
from alfx.engine.plan.traced_graph import first_line

logger = logging.getLogger(__name__)

# The same random numbers as without compiling, from the generator that a checkpoint saves, in the same order: torch
# before 2.13 reorders draws to bring related operations closer together.
_SETTINGS: dict[str, Any] = {'fallback_random': True, 'reorder_for_locality': False, 'size_asserts': False}


class Compiled(Backend):
    """Compiles traced graphs with the backend of ``torch.compile`` and calls the compiled functions."""

    label = 'compiled code'

    def _make(self, request: GraphRequest) -> CachedGraph:
        name, started = self.task.tracer.name, time.monotonic()
        logger.info('compiling %s; this takes a few seconds, once', name)
        graph = self.task.trace(request)
        inputs = [*graph.fixed, *request.leaves]
        try:
            function = compiled(graph.graph, inputs)
        except Exception as error:  # of any kind, of Python code or of the C++ compiler
            raise UnsupportedError(f'it cannot be compiled: {type(error).__name__}: {first_line(error)}') from error
        finally:
            gc.collect()  # garbage of the compiler; otherwise a later update would wait a third of a second
        logger.info('compiled %s in %.0f seconds', name, time.monotonic() - started)
        return CachedGraph(graph, lambda changing: function([*graph.fixed, *changing]))


def compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
    """Compile ``graph`` into a function of a list of tensors.

    Args:
        graph: graph of aten operations; it is changed.
        inputs: examples of its inputs, without gradients.
    """
    on_cpu = all(x.is_cpu for x in inputs)
    if on_cpu:
        cpu_graph.prepare(graph)
    inner: list[tuple[Any, Sequence[Any]]] = []
    settings = _SETTINGS | (cpu_graph.SETTINGS if on_cpu else {})
    with compiler_settings(settings), torch.random.fork_rng(), torch.no_grad():
        function: Any = compile_graph(graph, inputs, inner, cpu_graph.PRODUCTS if on_cpu else ())
        arguments = [copied(x) for x in inputs]
        results = function(*arguments)  # compiled at the first call
    if on_cpu and inner and list(map(_layout, inner[-1][1])) == list(map(_layout, inputs)):
        bare = inner[-1][0]
        for shortcut in entry_in_c(bare), _without_autograd(bare):
            if shortcut is not None and _behaves_the_same(shortcut, inputs, arguments, results):
                return shortcut
    call: Any = torch.no_grad()(lambda tensors: function(*tensors))
    return call


def _without_autograd(function: Run) -> Run:
    def call(tensors: list[Tensor]) -> Any:
        with below_autograd():
            return function(tensors)

    return call


def _layout(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else None


def _behaves_the_same(bare: Any, inputs: Sequence[Tensor], arguments: Sequence[Tensor], results: Sequence[Any]) -> bool:
    """Return whether ``bare``, the compiled code alone, gives the same results for ``inputs`` as the complete function.

    The code around it is needed for functions that return one of their inputs or a view; it takes a tenth of the time
    of a small update.

    Args:
        bare: compiled code without the code around it.
        inputs: inputs of the function.
        arguments: copies of ``inputs`` after a call of the complete function.
        results: results of that call.
    """
    again = [copied(x) for x in inputs]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            found = bare(list(again))
    except (RuntimeError, TypeError, AttributeError, AssertionError):
        return False
    given = {storage_key(x) for x in again if x.numel()}
    pairs = [*zip((*arguments, *results), (*again, *found))]
    return (len(found) == len(results) and all(_layout(a) == _layout(b) for a, b in pairs)
            and not any(x is not None and storage_key(x) in given for x in found)
            and all(a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs))
