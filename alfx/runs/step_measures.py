"""Averages over episodes of the measures that an algorithm returns at each evaluation step."""
import numpy as np
import torch

from alfx.metrics.segments import to_host


class EpisodeMeans:
    """Averages of measures over the steps of each episode. Steps with NaN are ignored."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}
        self._means: dict[str, list[float]] = {}

    def observe(self, measures: dict[str, torch.Tensor], is_counted: np.ndarray, is_last: np.ndarray) -> None:
        """Add one step of each environment.

        Args:
            measures: tensors ``[B]`` by name; the names must be the same at each step.
            is_counted: bool ``[B]``, whether the current episode is evaluated.
            is_last: bool ``[B]``, whether the step is the last of its episode.
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
            complete = ended & (counts > 0)
            means.extend((sums[complete] / counts[complete]).tolist())
            sums[is_last] = counts[is_last] = 0

    def result(self) -> dict[str, np.ndarray]:
        """Return the averages by name, float64 ``[N]``, in the order in which episodes ended, without empty arrays."""
        return {name: np.array(means) for name, means in self._means.items() if means}
