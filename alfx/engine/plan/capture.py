"""Compiled updates as CUDA graphs: the GPU is told once what to do, and then only to do it again.

The kernels of an update of small networks take less time than it takes the host to launch them one by one. A graph of
them is launched at once.
"""
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from alfx.engine.plan.compile import Compiled
from alfx.engine.plan.backends import Backend, CachedGraph, Play, GraphRequest, UnsupportedError
from alfx.engine.plan.recorder import Record, first_line

logger = logging.getLogger(__name__)

_WARM_UPS = 3  # before what is done is always the same: kernels are chosen, workspaces made


class Captured(Backend):
    """Captures what is compiled for a GPU; all else it leaves to the form below."""

    verb = 'a CUDA graph'

    def _make(self, request: GraphRequest) -> CachedGraph | None:
        assert isinstance(self.below, Compiled)
        self.has_stopped = self.below.has_stopped
        kept = self.below._kept.get(request.key)
        if kept is None or not kept.record.is_current:
            return None
        if kept.record.asks_other_ranks:
            logger.info('%s asks the other processes, so that it is no CUDA graph', self.task.recorder.what)
            self.has_stopped = True
            return None
        try:
            graph = CudaGraph(kept.play, kept.record, request.leaves)
        except RuntimeError as error:  # what CUDA raises is derived from it
            raise UnsupportedError(f'it cannot be captured: {first_line(error)}') from error
        logger.info('%s is a CUDA graph', self.task.recorder.what)
        return CachedGraph(kept.record, graph)


class CudaGraph:
    """A captured update.

    Args:
        play: computes on tensors that stay where they are.
        record: what it carries out.
        leaves: an example of its arguments.

    Raises:
        RuntimeError: it does what cannot be captured, such as to wait for a result.
    """

    def __init__(self, play: Play, record: Record, leaves: Sequence[Tensor]):
        self._play, self._leaves = play, [x.clone() for x in leaves]
        self._graph = torch.cuda.CUDAGraph()
        device = leaves[0].device
        before = [x.detach().clone() for _, x in record.written]
        try:
            with torch.random.fork_rng([device]), torch.no_grad():
                self._warm_up(device)
                with torch.cuda.graph(self._graph):
                    self._outputs = list(play(self._leaves))
        finally:
            torch.cuda.synchronize(device)
            for (_, x), saved in zip(record.written, before):
                x.detach().copy_(saved)

    def _warm_up(self, device: torch.device) -> None:
        """Call it some times, apart from the stream that others use, as torch asks for."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._play(self._leaves)
        torch.cuda.current_stream(device).wait_stream(stream)

    def __call__(self, leaves: Sequence[Tensor], /) -> Sequence[Tensor | None]:
        """What the update returns; the next call overwrites it."""
        with torch.no_grad():
            torch._foreach_copy_(self._leaves, list(leaves))
            self._graph.replay()
        return self._outputs
