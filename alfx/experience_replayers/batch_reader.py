"""Minibatches of one size that are read into the same memory repeatedly.

A minibatch is a nest of small tensors, and the update of small networks is so fast that allocating them takes a
noticeable part of the time. Here the tensors are views of one block of memory, which is allocated once and refilled
for each minibatch.
"""
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from alfx import nest
from alfx.data_structures import BatchInfo
from alfx.tensor_specs import NestedTensor

Draw = Callable[[int], tuple[list[BatchInfo], np.ndarray]]


class StaticBatch:
    """Memory for one minibatch.

    Args:
        time_major: nest ``[T, B, ...]`` of tensors.

    Attributes:
        time_major: the minibatch that was read last.
        experience: the same tensors as ``[B, T, ...]``.
    """

    def __init__(self, time_major: NestedTensor) -> None:
        self.time_major = time_major
        self.experience = nest.map_structure(lambda x: x.transpose(0, 1), time_major)
        self._leaves, self._structure = nest.flatten_with_structure(self.experience)

    def holds(self, experience: NestedTensor) -> bool:
        """Return whether a nest consists of exactly the tensors of :attr:`experience`, in the same structure."""
        if experience is self.experience:
            return True
        leaves, structure = nest.flatten_with_structure(experience)
        return all(map(operator.is_, leaves, self._leaves)) and structure == self._structure


class BatchReader:
    """Sampler of minibatches into static memory, created by ``ReplayBuffer.reader``.

    Args:
        slots: memory for the minibatches that are read at a time.
        read: copies the steps in the given slots (int64 ``[n * T * B]``) into the first n minibatches.
        draw: draws a number of minibatches; returns the batch info of each, and the slots, int64 ``[number, T * B]``.
    """

    def __init__(self, slots: Sequence[StaticBatch], read: Callable[[np.ndarray], None], draw: Draw) -> None:
        self.slots = slots
        self._read, self._draw = read, draw

    def draw(self, count: int, together: int | None = None) -> Iterator[tuple[BatchInfo, StaticBatch]]:
        """Sample ``count`` minibatches.

        Args:
            count: number of minibatches.
            together: number of minibatches whose contents are drawn at once; ``None``: all. Nothing may be stored until
                the last of them has been read.

        Yields:
            The batch info of ``ReplayBuffer.get_batch``, and the static batch, which is valid until it is overwritten
            by a later minibatch.

        Raises:
            ValueError: for the reasons of ``get_batch``.
        """
        number = len(self.slots)
        while count:
            drawn = min(count, together or count)
            count -= drawn
            infos, slots = self._draw(drawn)
            for start in range(0, drawn, number):
                self._read(slots[start:start + number].reshape(-1))
                yield from zip(infos[start:start + number], self.slots)
