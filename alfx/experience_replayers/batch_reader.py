"""Minibatches of one size, read into the same memory again and again.

A minibatch is a nest of small tensors, and an update of small networks takes so little time that making it anew for
each is a noticeable part of it. Here its tensors are views of one block of memory, made once; the block is filled anew.
"""
import functools
import operator
from collections.abc import Callable

import numpy as np

from alfx import nest
from alfx.data_structures import BatchInfo
from alfx.tensor_specs import NestedTensor

Draw = Callable[[int], tuple[list[BatchInfo], np.ndarray]]


class BatchReader:
    """Samples minibatches; made by ``ReplayBuffer.reader``.

    Args:
        time_major: nest ``[T, B, ...]`` of tensors that ``read`` fills.
        read: copies the steps in given cells (int64 ``[T * B]``) there.
        draw: draws a number of minibatches; returns what is told of each, and the cells, int64 ``[number, T * B]``.

    Attributes:
        time_major: the minibatch that was read last.
        experience: the same tensors as ``[B, T, ...]``.
    """

    def __init__(self, time_major: NestedTensor, read: Callable[[np.ndarray], None], draw: Draw) -> None:
        self.time_major = time_major
        self.experience = nest.map_structure(lambda x: x.transpose(0, 1), time_major)
        self._leaves, self._structure = nest.flatten_with_structure(self.experience)
        self._read, self._draw = read, draw

    def draw(self, count: int) -> list[tuple[BatchInfo, Callable[[], None]]]:
        """Decide what the next ``count`` minibatches are. Nothing may be stored before the last of them has been read.

        Returns:
            for each what ``ReplayBuffer.get_batch`` tells of it, and what makes it the current one.

        Raises:
            ValueError: as ``get_batch``.
        """
        infos, cells = self._draw(count)
        return [(info, functools.partial(self._read, of_one)) for info, of_one in zip(infos, cells)]

    def holds(self, experience: NestedTensor) -> bool:
        """Whether a nest consists of the tensors of :attr:`experience`, each in its place."""
        if experience is self.experience:
            return True
        leaves, structure = nest.flatten_with_structure(experience)
        return all(map(operator.is_, leaves, self._leaves)) and structure == self._structure
