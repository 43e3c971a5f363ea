"""Exchange of tensors between processes of one machine through shared memory.

A process that is killed never leaves a lock behind that others need: counting semaphores have no owner, and a process
that waits for one regularly checks that the others are still running.
"""
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from alfx.tensor_specs import TensorSpec
from alfx.utils.processes import POLL_SECONDS
from alfx.utils.shared_memory import SharedTensors


class StepRing:
    """Bounded queue of steps between one writing and one reading process.

    Args:
        step_specs: specs of the tensors of one step.
        size: maximum number of steps.
        context: multiprocessing context that starts the other process.
    """

    def __init__(self, step_specs: Sequence[TensorSpec], size: int, context: Any):
        self.size = size
        self._shared = SharedTensors([TensorSpec((size, *spec.shape), spec.dtype) for spec in step_specs],
                                     f'a queue of {size} steps (TrainerConfig.unroll_queue_size)')
        self._free, self._filled = context.Semaphore(size), context.Semaphore(0)
        self._position = 0  # of the next step; each process has its own
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Size of the shared memory."""
        return self._shared.nbytes

    @property
    def is_untouched(self) -> bool:
        """Writer: whether no step has been put in so far."""
        return not self._count

    def wait_for_room(self, timeout: float = POLL_SECONDS) -> bool:
        """Writer: wait for space for one step and reserve it; return False if there is none after ``timeout`` seconds.
        """
        return self._free.acquire(timeout=timeout)

    def put(self, step: Sequence[torch.Tensor]) -> None:
        """Writer: put in a step for which space is reserved."""
        for row, tensor in zip(self._shared.tensors, step):
            row[self._position].copy_(tensor)
        self._position = (self._position + 1) % self.size
        self._count += 1
        self._filled.release()

    def get(self, out: Sequence[torch.Tensor], first: int, at_most: int, timeout: float = POLL_SECONDS) -> int:
        """Reader: take the oldest steps available.

        Args:
            out: tensors ``[T, ...]`` that the steps are copied into.
            first: position of the first step in ``out``.
            at_most: maximum number of steps.
            timeout: seconds to wait for the first step.

        Returns:
            Number of steps taken.
        """
        if not at_most or not (self._filled.acquire(timeout=timeout) if timeout else self._filled.acquire(False)):
            return 0
        count = 1
        while count < at_most and self._filled.acquire(False):
            count += 1
        done = 0
        while done < count:
            part = min(count - done, self.size - self._position)
            for tensor, rows in zip(out, self._shared.tensors):
                tensor[first + done:first + done + part].copy_(rows[self._position:self._position + part])
            self._position = (self._position + part) % self.size
            done += part
        for _ in range(count):
            self._free.release()
        return count

    def empty_steps(self, count: int) -> list[torch.Tensor]:
        """Reader: return tensors ``[count, ...]`` for :meth:`get`."""
        return [torch.empty((count, *rows.shape[1:]), dtype=rows.dtype) for rows in self._shared.tensors]


class Published:
    """Latest version of some tensors, from one process to another; never seen half-written.

    Args:
        specs: specs of the tensors.
        purpose: see :class:`~alfx.utils.shared_memory.SharedTensors`.
        context: multiprocessing context that starts the other process.
    """

    def __init__(self, specs: Sequence[TensorSpec], purpose: str, context: Any):
        self._shared = SharedTensors(specs, purpose)
        self._version = SharedTensors([TensorSpec((), torch.int64)], purpose)
        self._lock = context.Semaphore(1)
        self._seen = 0

    def publish(self, write: Callable[[list[torch.Tensor]], None], check_peers: Callable[[], None]) -> None:
        """Write a new version.

        Args:
            write: receives the shared tensors.
            check_peers: called periodically while the other process reads; may raise an error to end the wait.
        """
        with self._locked(check_peers):
            write(self._shared.tensors)
            self._version.tensors[0].add_(1)

    def take(self, read: Callable[[list[torch.Tensor]], None], check_peers: Callable[[], None]) -> bool:
        """Read the latest version if it has not been read yet; return whether it is new.

        Args:
            read: receives the shared tensors, and copies what it needs.
            check_peers: called periodically while the other process writes; may raise an error to end the wait.
        """
        if int(self._version.tensors[0]) == self._seen:
            return False
        with self._locked(check_peers):
            read(self._shared.tensors)
            self._seen = int(self._version.tensors[0])
        return True

    @contextlib.contextmanager
    def _locked(self, check_peers: Callable[[], None]) -> Iterator[None]:
        while not self._lock.acquire(timeout=POLL_SECONDS):
            check_peers()
        try:
            yield
        finally:
            self._lock.release()
