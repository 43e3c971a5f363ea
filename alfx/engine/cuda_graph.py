"""An update as a CUDA graph: the GPU is told once what to do, and then only to do it again.

The kernels of an update of small networks take less time than it takes the host to launch them one by one. A graph of
them is launched at once.
"""
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_WARM_UPS = 3  # before what is done is always the same: kernels are chosen, workspaces made


class Update(Protocol):
    """Computes losses and gradients, see ``Player`` in :mod:`alfx.engine.recorded_update`."""

    makes_step: bool

    @property
    def is_current(self) -> bool: ...

    def __call__(self, leaves: Sequence[Tensor], /) -> Sequence[Tensor | None]: ...


def captured(update: Update, fixed: Sequence[Tensor], leaves: Sequence[Tensor], name: str) -> Update:
    """``update`` as a CUDA graph if it is on a GPU and can be captured, otherwise itself.

    Args:
        update: computes on tensors that stay where they are.
        fixed: what it reads besides its arguments; changed by no more than a call changes it.
        leaves: an example of its arguments.
        name: what to call it in the log.
    """
    if not _is_on_gpu(leaves):
        return update
    try:
        graph = CudaGraph(update, fixed, leaves)
    except RuntimeError as error:  # what CUDA raises is derived from it
        logger.warning('the update of %s cannot be captured as a CUDA graph, its kernels are launched one by one: %s',
                       name, str(error).strip().partition('\n')[0])
        return update
    logger.info('the update of %s is a CUDA graph', name)
    return graph


class CudaGraph:
    """A captured update.

    Args:
        update: as for :func:`captured`.
        fixed: likewise.
        leaves: likewise.

    Raises:
        RuntimeError: it does what cannot be captured, such as to wait for a result.
    """

    makes_step = False  # optimizers of parameters on a GPU make their own

    def __init__(self, update: Update, fixed: Sequence[Tensor], leaves: Sequence[Tensor]):
        self._update = update
        self._leaves = [x.clone() for x in leaves]
        self._graph = torch.cuda.CUDAGraph()
        device = leaves[0].device
        before = [x.detach().clone() for x in fixed]
        try:
            with torch.random.fork_rng([device]), torch.no_grad():
                self._warm_up(device)
                with torch.cuda.graph(self._graph):
                    self._outputs = list(update(self._leaves))
        finally:
            torch.cuda.synchronize(device)
            for x, saved in zip(fixed, before):
                x.detach().copy_(saved)

    def _warm_up(self, device: torch.device) -> None:
        """Call it some times, apart from the stream that others use, as torch asks for."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._update(self._leaves)
        torch.cuda.current_stream(device).wait_stream(stream)

    @property
    def is_current(self) -> bool:
        """Whether what it computes on still is where it was when it was captured."""
        return self._update.is_current

    def __call__(self, leaves: Sequence[Tensor], /) -> Sequence[Tensor | None]:
        """What the update returns; the next call overwrites it."""
        with torch.no_grad():
            torch._foreach_copy_(self._leaves, list(leaves))
            self._graph.replay()
        return self._outputs


def _is_on_gpu(leaves: Sequence[Tensor]) -> bool:
    return bool(leaves) and all(x.device.type == 'cuda' for x in leaves)
