"""Means over episodes of what an algorithm measures at each step of an evaluation."""
import numpy as np
import torch

from alfx.metrics.segments import to_host


class EpisodeMeans:
    """Means of numbers over the steps of each episode; a NaN is a step at which there is nothing to measure."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}
        self._means: dict[str, list[float]] = {}

    def observe(self, measures: dict[str, torch.Tensor], is_counted: np.ndarray, is_last: np.ndarray) -> None:
        """Add one step of each environment.

        Args:
            measures: numbers ``[B]`` by name; the same names each time.
            is_counted: bool ``[B]``: whether the episode that the step belongs to is to be measured.
            is_last: bool ``[B]``: whether it is the last one of its episode.
        """
        ended = is_counted & is_last
        for name, measure in measures.items():
            values = to_host(measure).astype(np.float64)
            sums = self._sums.setdefault(name, np.zeros(len(values)))
            counts = self._counts.setdefault(name, np.zeros(len(values)))
            means = self._means.setdefault(name, [])
            valid = is_counted & ~np.isnan(values)
            sums[valid] += values[valid]
            counts[valid] += 1
            means.extend((sums[ended & (counts > 0)] / counts[ended & (counts > 0)]).tolist())
            sums[is_last] = counts[is_last] = 0

    def result(self) -> dict[str, np.ndarray]:
        """float64 ``[N]`` by name: one number an episode, in the order in which they ended; empty ones are left out."""
        return {name: np.array(means) for name, means in self._means.items() if means}
