"""Minibatches of one size, read into the same memory again and again.

A minibatch is a nest of small tensors, and an update of small networks takes so little time that making it anew for
each is a noticeable part of it. Here its tensors are views of one block of memory, made once; the block is filled anew.
"""
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from alfx import nest
from alfx.data_structures import BatchInfo
from alfx.tensor_specs import NestedTensor

Draw = Callable[[int], tuple[list[BatchInfo], np.ndarray]]


class StaticBatch:
    """Memory for a minibatch.

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
        """Whether a nest consists of the tensors of :attr:`experience`, each in its place."""
        if experience is self.experience:
            return True
        leaves, structure = nest.flatten_with_structure(experience)
        return all(map(operator.is_, leaves, self._leaves)) and structure == self._structure


class BatchReader:
    """Samples minibatches; made by ``ReplayBuffer.reader``.

    Args:
        slots: for so many minibatches at a time there is memory.
        read: copies the steps in given slots (int64 ``[n * T * B]``) into the first n slots.
        draw: draws a number of minibatches; returns what is told of each, and the slots, int64 ``[number, T * B]``.
    """

    def __init__(self, slots: Sequence[StaticBatch], read: Callable[[np.ndarray], None], draw: Draw) -> None:
        self.slots = slots
        self._read, self._draw = read, draw

    def draw(self, count: int, together: int | None = None) -> Iterator[tuple[BatchInfo, StaticBatch]]:
        """Sample ``count`` minibatches.

        Args:
            count: how many.
            together: what so many at a time are is decided at once, by default for all. Nothing may be stored before
                the last of them has been read.

        Yields:
            for each what ``ReplayBuffer.get_batch`` tells of it, and where it is, until others are read into its place

        Raises:
            ValueError: as ``get_batch``.
        """
        number = len(self.slots)
        while count:
            drawn = min(count, together or count)
            count -= drawn
            infos, slots = self._draw(drawn)
            for start in range(0, drawn, number):
                self._read(slots[start:start + number].reshape(-1))
                yield from zip(infos[start:start + number], self.slots)
