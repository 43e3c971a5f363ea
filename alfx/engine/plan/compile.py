"""Records as compiled code: what is done element by element is done in few passes.

On a CPU, :mod:`alfx.engine.plan.cpu_graph` prepares the record for the compiler. Results differ from those of the form
below by rounding.
"""
import functools
import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from alfx.engine.plan import cpu_graph
from alfx.engine.plan.compare import difference
from alfx.engine.plan.forms import Faster, Kept, Play, Request, UnsupportedError
from alfx.engine.plan.program import copied
from alfx.engine.plan.record import first_line
from alfx.engine.plan.torch_internals import compile_graph, compiler_settings, make_graph, storage_key

logger = logging.getLogger(__name__)

# the same random numbers as without compiling, from the generator that a checkpoint saves
_SETTINGS = {'fallback_random': True, 'size_asserts': False}


class Compiled(Faster):
    """Compiles records with torch.compile's backend, and calls what came out."""

    verb = 'compiled'

    def _make(self, request: Request) -> Kept:
        fault = compiler_fault()
        if fault is not None:
            raise UnsupportedError(fault)
        what, started = self.task.recorder.what, time.monotonic()
        logger.info('compiling %s; this takes some seconds, once', what)
        record = self.task.record(request)
        inputs = [*record.fixed, *request.leaves]
        try:
            function = compiled(record.graph, inputs)
            keeps_results = _makes_new_tensors(function, inputs)
        except Exception as error:  # of any kind: that of Python code, of the C++ compiler
            raise UnsupportedError(f'it cannot be compiled: {type(error).__name__}: {first_line(error)}') from error
        finally:
            gc.collect()  # what a compiler leaves behind: otherwise some update would soon wait a third of a second
        logger.info('compiled %s in %.0f seconds', what, time.monotonic() - started)
        fixed = record.fixed

        def play(changing: list[Tensor]) -> Sequence[Tensor | None]:
            return function([*fixed, *changing])

        return Kept(record, play, keeps_results)


def compiled(graph: fx.GraphModule, inputs: list[Tensor]) -> Play:
    """``graph``, which is changed, as a function of a list of tensors; the compiler does its work now."""
    with compiler_settings(_SETTINGS):
        if all(x.is_cpu for x in inputs):
            return cpu_graph.compiled(graph, inputs)
        function: Any = compile_graph(graph, inputs)
        call: Any = torch.no_grad()(lambda tensors: function(*tensors))
        with torch.random.fork_rng():
            call([copied(x) for x in inputs])
        return call


@functools.cache
def compiler_fault() -> str | None:
    """What is wrong with compiling here, such as that there is no C++ compiler; ``None`` if nothing is.

    It is found out on a layer and its gradient, before the first record.
    """
    def update(weight: Tensor, x: Tensor) -> list[Tensor]:
        weight = weight.detach().requires_grad_()
        with torch.enable_grad():
            loss = torch.relu(x @ weight).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [weight])]

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in ((12, 16), (9, 12))]
    try:
        found = cpu_graph.compiled(make_graph(update, inputs), inputs)(list(inputs))
    except Exception as error:  # noqa: BLE001 - of any kind: that of Python code, of the C++ compiler
        return f'torch {torch.__version__} cannot compile here: {type(error).__name__}: {first_line(error)}'
    names = ['result 0', 'result 1']
    wrong = difference([*zip(names, update(*inputs))], [*zip(names, found)], 1e-4)
    return None if wrong is None else f'torch {torch.__version__} compiles wrong code here: {wrong}'


def _makes_new_tensors(function: Play, inputs: Sequence[Tensor]) -> bool:
    """Whether no results lie in the same memory as each other or as what they are computed from."""
    given = [copied(x) for x in inputs]
    with torch.random.fork_rng():
        results = [x for x in function(list(given)) if x is not None and x.numel()]
    of_inputs, of_results = ({storage_key(x) for x in of_these} for of_these in (given, results))
    return not of_inputs & of_results and len(of_results) == len(results)
