"""Sampling of sequences: uniformly, by priority, and with extra weight for recent ones."""
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx.experience_replayers.priorities import Priorities
from alfx.experience_replayers.rings import RingIndex


def draw_distinct(n: int, k: int) -> np.ndarray:
    """Return ``k`` distinct integers from ``range(n)`` in random order, with equal probability for all choices.

    They are the first ``k`` distinct values of a stream of independent draws, so the cost does not grow with ``n``.

    Args:
        n: at least ``k``.
        k: number of integers.

    Returns:
        int64 ``[k]``.
    """
    if n <= 4 * k:
        return torch.randperm(n)[:k].numpy()
    distinct = dict.fromkeys(torch.randint(n, (k, )).tolist())
    while len(distinct) < k:
        distinct.update(dict.fromkeys(torch.randint(n, (k - len(distinct), )).tolist()))
    return np.fromiter(distinct, np.int64, k)


class Sample(NamedTuple):
    """Sampled sequences.

    Fields:
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``: positions of their first steps.
        relative_probabilities: float32 ``[B]``, or None if they are the same for all.
    """

    env_ids: np.ndarray
    positions: np.ndarray
    relative_probabilities: Any = None


class SequenceSampler:
    """Sampler of sequences of consecutive steps of one environment.

    Args:
        rings: ring positions of the environments.
        ignored: number of oldest steps of each environment that are not part of any sequence.
        with_replacement: draw independently.
        recent_steps: number of latest sequences of each environment that count as recent.
        recent_ratio: fraction of recent sequences in a batch.
        priorities: priorities for sampling; None for uniform sampling.
    """

    def __init__(self, rings: RingIndex, ignored: int, with_replacement: bool, recent_steps: int, recent_ratio: float,
                 priorities: Priorities | None) -> None:
        self._rings = rings
        self._ignored = ignored
        self._with_replacement = with_replacement
        self._recent_steps = recent_steps
        self._recent_ratio = recent_ratio
        self._priorities = priorities

    def sample(self, batch_size: int, length: int, uniform: bool = False) -> Sample | None:
        """Draw ``batch_size`` sequences of ``length`` steps; return None if there is no such sequence.

        ``uniform`` ignores priorities and ``recent_ratio``.

        Raises:
            ValueError: there are sequences, but the priorities of all of them are 0.
        """
        first, end = self._rings.window(self._ignored, length)
        count = self._count(first, end)
        if count == 0:
            return None
        if uniform:
            return Sample(*self._draw_uniformly(first, end, count, batch_size))
        num_recent = int(batch_size * self._recent_ratio + 0.5)
        if self._priorities is None:
            env_ids, positions = self._draw_uniformly(first, end, count, batch_size - num_recent)
        else:
            self._priorities.set_window(first, end, length)
            env_ids, positions, probabilities = self._priorities.draw(batch_size - num_recent, self._with_replacement)
        if num_recent:
            first = np.maximum(end - self._recent_steps, first)
            num_sequences = self._count(first, end)
            recent = self._draw_uniformly(first, end, num_sequences, num_recent)
            env_ids, positions = np.concatenate([env_ids, recent[0]]), np.concatenate([positions, recent[1]])
            if self._priorities is not None:
                if isinstance(first, np.ndarray):
                    first = first[env_ids]
                share = num_recent / batch_size
                probabilities = (1 - share) * self._priorities.probabilities(env_ids, positions)
                probabilities += (positions >= first) * (share / num_sequences)
        if self._priorities is None:
            return Sample(env_ids, positions)
        return Sample(env_ids, positions, (count * probabilities).astype(np.float32))

    def _count(self, first: Any, end: Any) -> int:
        return int((end - first).sum()) if isinstance(end, np.ndarray) else int(end - first) * self._rings.num_envs

    def _draw_uniformly(self, first: Any, end: Any, count: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw environments and positions from ``first`` to ``end - 1``; ``count`` is the number of such pairs."""
        if self._with_replacement or count < batch_size:
            drawn = torch.randint(count, (batch_size, )).numpy()
        else:
            drawn = draw_distinct(count, batch_size)
        if isinstance(end, np.ndarray):
            ends = (end - first).cumsum()
            env_ids = ends.searchsorted(drawn, side='right')
            return env_ids, drawn + (end - ends)[env_ids]
        positions, env_ids = np.divmod(drawn, self._rings.num_envs)
        positions += first
        return env_ids, positions
