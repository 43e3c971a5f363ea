"""Records as compiled code: what is done element by element is done in few passes.

On a CPU, :mod:`alfx.engine.plan.cpu_graph` prepares the record for the compiler. Results differ from those of the form
below by rounding.
"""
import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from alfx.engine.plan import cpu_graph
from alfx.engine.plan.backends import Backend, CachedGraph, Play, GraphRequest, UnsupportedError
from alfx.engine.plan.program import copied
from alfx.engine.plan.recorder import first_line
from alfx.engine.plan.torch_internals import (below_autograd, compile_graph, compiler_settings, entry_in_c,
                                              storage_key)

logger = logging.getLogger(__name__)

# the same random numbers as without compiling, from the generator that a checkpoint saves, and in the same order: to
# bring operations closer together, torch before 2.13 lets draws change places
_SETTINGS: dict[str, Any] = {'fallback_random': True, 'reorder_for_locality': False, 'size_asserts': False}


class Compiled(Backend):
    """Compiles records with torch.compile's backend, and calls what came out."""

    verb = 'compiled'

    def _make(self, request: GraphRequest) -> CachedGraph:
        what, started = self.task.recorder.what, time.monotonic()
        logger.info('compiling %s; this takes some seconds, once', what)
        record = self.task.record(request)
        inputs = [*record.fixed, *request.leaves]
        try:
            function = compiled(record.graph, inputs)
        except Exception as error:  # of any kind: that of Python code, of the C++ compiler
            raise UnsupportedError(f'it cannot be compiled: {type(error).__name__}: {first_line(error)}') from error
        finally:
            gc.collect()  # what a compiler leaves behind: otherwise some update would soon wait a third of a second
        logger.info('compiled %s in %.0f seconds', what, time.monotonic() - started)
        return CachedGraph(record, lambda changing: function([*record.fixed, *changing]))


def compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Play:
    """``graph`` as a function of a list of tensors; the compiler does its work now.

    Args:
        graph: of aten operations; it is changed.
        inputs: examples of the tensors that it takes, without gradient.
    """
    on_cpu = all(x.is_cpu for x in inputs)
    if on_cpu:
        cpu_graph.prepare(graph)
    inner: list[tuple[Any, Sequence[Any]]] = []
    settings = _SETTINGS | (cpu_graph.SETTINGS if on_cpu else {})
    with compiler_settings(settings), torch.random.fork_rng(), torch.no_grad():
        function: Any = compile_graph(graph, inputs, inner, cpu_graph.PRODUCTS if on_cpu else ())
        arguments = [copied(x) for x in inputs]
        results = function(*arguments)  # the backend does its work at the first call
    if on_cpu and inner and list(map(_kind, inner[-1][1])) == list(map(_kind, inputs)):
        bare = inner[-1][0]
        for shortcut in entry_in_c(bare), _without_autograd(bare):
            if shortcut is not None and _does_the_same(shortcut, inputs, arguments, results):
                return shortcut
    call: Any = torch.no_grad()(lambda tensors: function(*tensors))
    return call


def _without_autograd(function: Play) -> Play:
    def call(tensors: list[Tensor]) -> Any:
        with below_autograd():
            return function(tensors)

    return call


def _kind(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else None


def _does_the_same(bare: Any, inputs: Sequence[Tensor], arguments: Sequence[Tensor], results: Sequence[Any]) -> bool:
    """Whether ``bare``, the compiled code alone, does with ``inputs`` what it did with all that is around it.

    That is for functions which return what they were given, or views; it takes a tenth of the time of a small update.
    ``arguments`` are what copies of ``inputs`` were after the call, ``results`` is what it returned.
    """
    again = [copied(x) for x in inputs]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            found = bare(list(again))
    except (RuntimeError, TypeError, AttributeError, AssertionError):
        return False
    given = {storage_key(x) for x in again if x.numel()}
    pairs = [*zip((*arguments, *results), (*again, *found))]
    return (len(found) == len(results) and all(_kind(a) == _kind(b) for a, b in pairs)
            and not any(x is not None and storage_key(x) in given for x in found)
            and all(a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs))
