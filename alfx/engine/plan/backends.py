"""Backends of a computation: replayed from a traced graph, compiled, or captured as a CUDA graph.

Each backend wraps a slower, more general one, falls back to it, and is verified against it. ``Replayed(Eager)``,
``Compiled(Replayed)`` and ``Captured(Compiled)`` differ in how they execute a graph (``_make``) and in what they leave
to their fallback. They have this in common:

- A graph is created for each graph key and each layout of the inputs, after the warm-up calls.
- The fallback also runs at calls 1, 2, 4, 8, ..., at every 1024th call, and at every update that runs eagerly
  anyway because it writes summaries. Both start from the same random numbers and buffers, and the results are
  compared. This detects values that change without the graph seeing them; a value that changes at every call is
  detected at once.
- A graph that gives different results, or that cannot be created, is no longer used, and the reason is logged. A
  small difference of gradients must occur in three calls in a row: where the input of a ReLU is 0 up to rounding, or
  the inputs of a minimum are equal, the gradient of a single element may differ.
"""
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx.engine.plan.program import Program
from alfx.engine.plan.traced_graph import NotTraceableError, TracedGraph, Tracer, first_line
from alfx.engine.plan.verification import (NEAR_MISS, Parts, State, difference, is_check_due, no_collectives,
                                           record_collectives, replay_collectives, tolerance_of)

logger = logging.getLogger(__name__)

_MAX_NEAR_MISSES = 2  # a third small difference of gradients in a row is an error

Run = Callable[[list[Tensor]], Sequence[Tensor | None]]


class WarmUp(NamedTuple):
    """Number of calls, per graph key and layout, that a backend leaves to its fallback before it creates a graph.

    Tracing takes as long as about a hundred updates, which does not pay off in a short run. A run with
    ``TrainerConfig.compile`` is assumed to be long, so that compiling starts early. With at most one update
    per iteration, updates are a small share of the time: ``rare_updates`` of them run eagerly first.
    """

    updates: int = 50
    calls: int = 500
    compiled_updates: int = 0
    compiled_calls: int = 100
    captured_updates: int = 1
    rare_updates: int = 5000


WARM_UP = WarmUp()


class UnsupportedError(RuntimeError):
    """A backend cannot execute a traced graph."""


class GraphRequest(NamedTuple):
    """Flattened inputs of one call.

    Attributes:
        leaves: all tensors that change from call to call.
        tree: structure of the leaves.
        key: requests with the same key are the same operations on tensors of the same layout.
        num_reused: number of leading leaves that are the same tensors, with new values, in every request with this key.
    """

    leaves: list[Tensor]
    tree: Any
    key: Hashable
    num_reused: int = 0


class GraphTask:
    """Computation that backends execute: an update, or a policy. Backends know nothing else about it.

    Attributes:
        tracer: traces the functions that it calls.
    """

    tracer: Tracer

    def request(self, inputs: Any, in_place: bool) -> GraphRequest:
        """Flatten the inputs of one call.

        Args:
            inputs: inputs of the call.
            in_place: use the tensors themselves, because later inputs will be in the same memory. Otherwise tensors may
                be anywhere, but must be contiguous.
        """
        raise NotImplementedError

    def trace(self, request: GraphRequest) -> TracedGraph:
        """Trace the computation as a graph from ``request.leaves`` to a list of tensors and ``None``."""
        raise NotImplementedError

    def parts(self, output: Any) -> Parts:
        """Return the named parts of an output, in the order in which a graph returns them."""
        raise NotImplementedError

    def output(self, results: Sequence[Tensor | None], request: GraphRequest) -> Any:
        """Return the output for the results of a graph, which its next call overwrites."""
        raise NotImplementedError

    def must_be_eager(self) -> bool:
        """Return whether this call needs Python code, for example because it writes summaries."""
        return False

    def is_comparable(self, output: Any) -> bool:
        """Return whether a backend can be verified against this output."""
        return True


@dataclass(eq=False)
class CachedGraph:
    """Traced graph with the function that executes it.

    Attributes:
        graph: traced graph.
        run: function that executes it.
        count: number of calls.
        num_near_misses: number of latest verifications in a row in which gradients differed a little.
    """

    graph: TracedGraph
    run: Run
    count: int = 0
    num_near_misses: int = 0


class Backend:
    """Base class of all backends except the eager function at the bottom.

    Args:
        fallback: function to fall back to and to be verified against.
        task: computation to execute.
        warm_up: number of calls, per key of a request, that the fallback computes first.
    """

    label = ''  # for messages
    _is_exact = False  # whether results are bit-identical to those of the fallback
    _in_place = False

    def __init__(self, fallback: Callable[[Any], Any], task: GraphTask, warm_up: int) -> None:
        self.fallback, self.task, self._warm_up = fallback, task, warm_up
        self._graphs: dict[Hashable, CachedGraph] = {}
        self._counts: dict[Hashable, int] = {}
        self.has_stopped = False

    def __call__(self, inputs: Any) -> Any:
        """Return the output of the fallback, bit-identical or up to rounding."""
        if self.has_stopped:
            return self.fallback(inputs)
        task = self.task
        request = task.request(inputs, self._in_place)
        cached = self._graphs.get(request.key)
        if cached is not None and not cached.graph.is_current:
            if cached.count < self._warm_up:  # its tensors move too often to trace again each time
                self._counts[request.key] = 0
            cached = None
            del self._graphs[request.key]
        if task.must_be_eager():
            return self.fallback(inputs) if cached is None else self._verified(inputs, request, cached, False)
        if cached is None:
            cached = self._make_if_due(request)
        if cached is None:
            return self.fallback(inputs)
        cached.count += 1
        if is_check_due(cached.count) or cached.num_near_misses:
            return self._verified(inputs, request, cached, True)
        return task.output(cached.run(request.leaves), request)

    @property
    def num_graphs(self) -> int:
        """Number of graphs in use."""
        return len(self._graphs)

    def _stop(self, reason: str, all_backends: bool = False) -> None:
        """Fall back from now on, with ``all_backends`` to eager mode, and log the reason."""
        backend = self
        backend.has_stopped = True
        while all_backends and isinstance(backend.fallback, Backend):
            backend = backend.fallback
            backend.has_stopped = True
        self._graphs.clear()
        slower = backend.fallback.label if isinstance(backend.fallback, Backend) else 'eager mode'
        logger.warning('%s falls back from %s to %s, which is slower: %s', self.task.tracer.name, self.label, slower,
                       reason)

    def _make(self, request: GraphRequest) -> CachedGraph | None:
        """Create a graph and the function that executes it; ``None`` if it is too early.

        Raises:
            NotTraceableError: the computation cannot be traced.
            UnsupportedError: this backend cannot execute the graph.
        """
        raise NotImplementedError

    def _make_if_due(self, request: GraphRequest) -> CachedGraph | None:
        count = self._counts[request.key] = self._counts.get(request.key, 0) + 1
        if count <= self._warm_up:
            return None
        cached = None
        try:
            with no_collectives(), torch.random.fork_rng():
                cached = self._make(request)
        except NotTraceableError as error:
            self._stop(f'it cannot be traced: {error}', all_backends=True)
        except UnsupportedError as error:
            self._stop(str(error))
        if cached is not None:
            self._graphs[request.key] = cached
        return cached

    def _verified(self, inputs: Any, request: GraphRequest, cached: CachedGraph, prefers_own: bool) -> Any:
        """Return the output of the fallback, or with ``prefers_own`` that of this backend if both agree."""
        task, graph = self.task, cached.graph
        names, written = [name for name, _ in graph.written], [x for _, x in graph.written]
        devices = {x.device for x in (*graph.fixed, *request.leaves)}
        collectives: list[Tensor] = []
        before, versions = State(written, devices), graph.versions()
        with record_collectives(collectives):
            expected = self.fallback(inputs)
        missed = {name for name, version in graph.versions().items() if versions[name] != version} - set(names)
        after = State(written, devices)
        if not task.is_comparable(expected):
            return expected
        before.restore()
        parts = [(name, None if x is None else x.detach().clone()) for name, x in task.parts(expected)]
        try:
            with replay_collectives(collectives):
                results = cached.run(request.leaves)
        except Exception as error:  # noqa: BLE001 - of any kind: the fallback has computed the result
            after.restore()
            self._stop(f'{type(error).__name__}: {first_line(error)}')
            return expected
        own, tolerance = State(written, devices), tolerance_of(graph, self._is_exact)
        if own.has_same_streams(after):
            found = [(name, x) for (name, _), x in zip(parts, results, strict=True)]
            compared = [*parts, *after.parts(names)], [*found, *own.parts(names)]
            reason = (f'{min(missed).removeprefix("read.0.")} is written to' if missed else
                      difference(*compared, tolerance))
            if reason is None:
                cached.num_near_misses = 0
            elif (not missed and tolerance and cached.num_near_misses < _MAX_NEAR_MISSES
                  and difference(*compared, tolerance, NEAR_MISS) is None):
                cached.num_near_misses += 1
                reason = None
        else:  # summaries have drawn random numbers as well: nothing can be compared this time
            reason = 'it draws different random numbers' if prefers_own else None
        if reason is None and prefers_own:
            return task.output(results, request)
        after.restore()
        if reason is not None:
            self._stop(f'its result would be different: {reason}')
        return expected


class Replayed(Backend):
    """Replays traced graphs: the same operations on the same numbers, without Python code and autograd in between.

    An update of small networks spends most of its time outside the operations: in calls of modules, distributions and
    losses, and in the bookkeeping of autograd and memory. Results are bit-identical.
    """

    label = 'a replayed graph'
    _is_exact = True
    _in_place = True

    def _make(self, request: GraphRequest) -> CachedGraph:
        graph = self.task.trace(request)
        try:
            program = Program(graph.graph, graph.fixed, request.leaves, request.num_reused)
        except Exception as error:  # of any kind: an operation is called in a way that the program does not know
            raise UnsupportedError(f'its graph cannot be replayed: {type(error).__name__}: '
                                   f'{first_line(error)}') from error
        return CachedGraph(graph, program)
