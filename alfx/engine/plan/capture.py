"""Compiled updates as CUDA graphs: all kernels of an update are launched at once.

Launching the kernels of an update of small networks one by one takes the host longer than the GPU needs to execute
them.
"""
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from alfx.engine.plan.backends import Backend, CachedGraph, GraphRequest, Run, UnsupportedError
from alfx.engine.plan.compile import Compiled
from alfx.engine.plan.traced_graph import TracedGraph, first_line

logger = logging.getLogger(__name__)

_WARM_UPS = 3  # calls after which kernels are chosen and workspaces allocated, so that each call does the same


class Captured(Backend):
    """Captures updates that are compiled for a GPU; everything else is left to the fallback."""

    label = 'a CUDA graph'

    def _make(self, request: GraphRequest) -> CachedGraph | None:
        assert isinstance(self.fallback, Compiled)
        self.has_stopped = self.fallback.has_stopped
        cached = self.fallback._graphs.get(request.key)
        if cached is None or not cached.graph.is_current:
            return None
        name = self.task.tracer.name
        if cached.graph.has_collectives:
            logger.info('%s is not captured as a CUDA graph, because it communicates with other processes', name)
            self.has_stopped = True
            return None
        try:
            graph = CudaGraph(cached.run, cached.graph, request.leaves)
        except RuntimeError as error:  # base class of the errors of CUDA
            raise UnsupportedError(f'it cannot be captured: {first_line(error)}') from error
        logger.info('%s is captured as a CUDA graph', name)
        return CachedGraph(cached.graph, graph)


class CudaGraph:
    """A captured update.

    Args:
        run: computes on tensors that stay where they are.
        graph: traced graph that ``run`` executes.
        leaves: example of the arguments.

    Raises:
        RuntimeError: the update cannot be captured, for example because it waits for a result.
    """

    def __init__(self, run: Run, graph: TracedGraph, leaves: Sequence[Tensor]):
        self._run, self._leaves = run, [x.clone() for x in leaves]
        self._graph = torch.cuda.CUDAGraph()
        device = leaves[0].device
        before = [x.detach().clone() for _, x in graph.written]
        try:
            with torch.random.fork_rng([device]), torch.no_grad():
                self._warm_up(device)
                with torch.cuda.graph(self._graph):
                    self._outputs = list(run(self._leaves))
        finally:
            torch.cuda.synchronize(device)
            for (_, x), saved in zip(graph.written, before):
                x.detach().copy_(saved)

    def _warm_up(self, device: torch.device) -> None:
        """Call the update a few times on a separate stream, which torch requires before capturing."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run(self._leaves)
        torch.cuda.current_stream(device).wait_stream(stream)

    def __call__(self, leaves: Sequence[Tensor], /) -> Sequence[Tensor | None]:
        """Return the results of the update; the next call overwrites them."""
        with torch.no_grad():
            torch._foreach_copy_(self._leaves, list(leaves))
            self._graph.replay()
        return self._outputs
