"""A sum tree, from which indices are drawn in proportion to their weights.

The data structure is that of Schaul et al. 2016 (arXiv:1511.05952, appendix B.2.1), but each node is the sum of many
children instead of two: a million weights are then three levels deep, and each level takes a few numpy calls for a
whole batch.
"""
from typing import Any

import numpy as np
import torch

from alfx.utils.shared_memory import SharedArrays

_FANOUT = 16
_MAX_TOP_SIZE = 4096  # nodes of the last level, which is searched as a whole


class SumTree(SharedArrays):
    """A tree of ``capacity`` weights, initially 0, and the sums for drawing in proportion to them.

    Sums are float64 and are always recomputed from the children, never updated by differences, so they do not drift:
    they equal the sums of a new tree with the same weights.

    Args:
        capacity: number of weights.
        shared: keep the tree in shared memory.
    """

    def __init__(self, capacity: int, shared: bool = False) -> None:
        super().__init__(shared)
        self.capacity = capacity
        self._depth = 0
        size = capacity
        while True:
            is_top = size <= _MAX_TOP_SIZE
            padded = size if is_top else -(-size // _FANOUT) * _FANOUT
            self._allocate(f'_level_{self._depth}', padded, np.float64)
            self._depth += 1
            if is_top:
                break
            size = padded // _FANOUT
        self._find_levels()

    def _find_levels(self) -> None:
        self._levels: list[Any] = [getattr(self, f'_level_{i}') for i in range(self._depth)]
        self._children = [level.reshape(-1, _FANOUT) for level in self._levels[:-1]]

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in super().__getstate__().items() if name not in ('_levels', '_children')}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._find_levels()

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._levels[-1].sum())

    def get(self, indices: np.ndarray) -> np.ndarray:
        """Return the weights, float64, at ``indices`` (int64, any shape)."""
        return self._levels[0][indices]

    def set(self, indices: np.ndarray, weights: Any) -> None:
        """Replace weights.

        Args:
            indices: int64 ``[n]``; if an index is repeated, its last weight counts.
            weights: ``[n]`` or a number, finite and not negative (not checked).
        """
        self._levels[0][indices] = weights
        if len(indices) * _FANOUT > self.capacity:
            for children, sums in zip(self._children, self._levels[1:]):
                np.sum(children, axis=1, out=sums[:len(children)])
            return
        for children, sums in zip(self._children, self._levels[1:]):
            indices = indices // _FANOUT
            sums[indices] = children.take(indices, axis=0).sum(axis=1)

    def find(self, fractions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices at which the cumulative weight exceeds given fractions of the total.

        A uniformly distributed fraction draws an index in proportion to its weight. An index of weight 0 is never
        returned.

        Args:
            fractions: float64 ``[n]`` in ``[0, 1)``. Sorted fractions are faster.

        Returns:
            tuple:
            - int64 ``[n]``: indices
            - float64 ``[n]``: their weights divided by the total

        Raises:
            ValueError: all weights are 0.
        """
        top = self._levels[-1]
        sums = np.empty(len(top) + 1)
        sums[0] = 0.0
        np.cumsum(top, out=sums[1:])
        total = sums[-1]
        if not total > 0.0:
            raise ValueError('expected a weight above 0, found none')
        # the bound just below the total keeps rounding errors from passing the last weight that is not 0
        remaining = np.minimum(fractions * total, np.nextafter(total, 0.0))
        indices = sums[1:].searchsorted(remaining, side='right')
        remaining -= sums[indices]
        first = np.arange(0, len(indices) * _FANOUT, _FANOUT)
        for children in reversed(self._children):
            weights = children.take(indices, axis=0)
            running = torch.from_numpy(weights).cumsum(1)  # takes a fifth of the time of numpy
            sums = running.numpy()
            np.minimum(remaining, np.nextafter(sums[:, -1], 0.0), out=remaining)
            child = torch.searchsorted(running, torch.from_numpy(remaining).unsqueeze(1), right=True).numpy()[:, 0]
            chosen = first + child
            remaining -= sums.ravel().take(chosen) - weights.ravel().take(chosen)
            np.maximum(remaining, 0.0, out=remaining)
            indices = indices * _FANOUT + child
        return indices, self._levels[0].take(indices) / total
