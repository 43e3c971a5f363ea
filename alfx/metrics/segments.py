"""Episodes inside a stacked sequence of time steps, located once and shared by all metrics.

A sequence of T steps of B environments is arranged as ``[B, T]`` and split, environment by environment, into
*segments*: a segment starts at row 0 or at a FIRST step and ends before the next segment. A per-episode sum is then
one ``reduceat`` over the segments, plus the sum that the environment had accumulated before row 0.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from alfx.data_structures import StepType, TimeStep

# Aggregations of a quantity over an episode, and their neutral elements.
UFUNC = {'sum': np.add, 'mean': np.add, 'max': np.maximum, 'min': np.minimum}
INITIAL = {'sum': 0., 'mean': 0., 'max': -np.inf, 'min': np.inf}


@lru_cache(maxsize=8)
def _mid_steps(number: int, dtype: str) -> bytes:
    """Return the memory of ``number`` step types that are all MID."""
    return np.full(number, int(StepType.MID), dtype).tobytes()


def to_host(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return ``x`` as a numpy array, which shares the memory of a CPU tensor."""
    if isinstance(x, torch.Tensor):
        return x.numpy() if x.is_cpu and not x.requires_grad else x.detach().cpu().numpy()
    return np.asarray(x)


class Segments(NamedTuple):
    """The S segments of a sequence, ordered by environment, then by time.

    Attributes:
        starts: ``[S]`` index of each segment's first row in the ``[B * T]`` layout.
        ends: ``[S]`` index after the segment's last row.
        initial: ``[B]`` first segment of each environment.
        final: ``[B]`` last segment of each environment.
        carried: float64 ``[B]``: 1 where the episode of ``initial`` began before row 0, otherwise 0.
        num_steps: ``[S]`` number of the segment's steps that are not FIRST.
        ended: indices of the segments that end with LAST, in the order in which the episodes ended.
    """
    starts: np.ndarray
    ends: np.ndarray
    initial: np.ndarray
    final: np.ndarray
    carried: np.ndarray
    num_steps: np.ndarray
    ended: np.ndarray


class Positions(NamedTuple):
    """Positions of the steps in their episodes, as numbers of transitions since FIRST.

    Attributes:
        position: ``[B, T]`` position of each step; 0 at FIRST.
        length: ``[S]`` position of the last step of each segment; ``None`` if no segment begins or ends.
        final: ``[B]`` position of the last step of each environment.
    """
    position: np.ndarray
    length: np.ndarray | None
    final: np.ndarray


class StepSequence:
    """Time steps on the host, in the layout ``[B, T, ...]``; each intermediate result is computed at most once.

    Args:
        time_step: a time step ``[B, ...]``, or ``[T, B, ...]`` with ``stacked=True``.
        stacked: ``time_step`` has the time dimension.
    """

    def __init__(self, time_step: TimeStep, stacked: bool):
        self.time_step = time_step
        self.stacked = stacked
        step_type = to_host(time_step.step_type)
        self.num_steps, self.batch_size = step_type.shape if stacked else (1, len(step_type))
        # a comparison of bytes takes a third of the time of np.count_nonzero
        self.crosses_boundary = step_type.tobytes() != _mid_steps(step_type.size, step_type.dtype.char)
        self.num_transitions, self.num_ended = step_type.size, 0
        if self.crosses_boundary:
            self.num_transitions -= int(np.count_nonzero(step_type == StepType.FIRST))
            self.num_ended = int(np.count_nonzero(step_type == StepType.LAST))
        self._positions: dict[bytes, Positions] = {}

    def host(self, x: torch.Tensor | np.ndarray) -> np.ndarray:
        """Return ``x`` as a contiguous ``[B, T, ...]`` array."""
        x = to_host(x)
        return np.ascontiguousarray(x.swapaxes(0, 1)) if self.stacked else x[:, None]

    @cached_property
    def step_type(self) -> np.ndarray:
        """Step types, int32 ``[B, T]``."""
        return self.host(self.time_step.step_type)

    @cached_property
    def first(self) -> np.ndarray:
        """Mask of FIRST steps, bool ``[B, T]``."""
        return self.step_type == StepType.FIRST

    @cached_property
    def last(self) -> np.ndarray:
        """Mask of LAST steps, bool ``[B, T]``."""
        return self.step_type == StepType.LAST

    def without_first(self, x: np.ndarray, neutral: float) -> np.ndarray:
        """Return ``x``, ``[B, T, ...]``, with ``neutral`` at FIRST."""
        if not self.crosses_boundary:
            return x
        return np.where(self.first.reshape(self.first.shape + (1, ) * (x.ndim - 2)), neutral, x)

    @cached_property
    def reward(self) -> np.ndarray:
        """Reward of arriving at each step, 0 at FIRST, float64 ``[B, T]`` or ``[B, T, K]``."""
        return self.without_first(self.host(self.time_step.reward).astype(np.float64), 0.0)

    @cached_property
    def transitions(self) -> np.ndarray:
        """Number of transitions of each step: 0 at FIRST, otherwise 1, float64 ``[B, T]``."""
        return 1.0 - self.first if self.crosses_boundary else np.ones((self.batch_size, self.num_steps))

    @cached_property
    def segments(self) -> Segments:
        """Segments of a sequence that crosses an episode boundary."""
        batch_size, num_steps = self.step_type.shape
        is_start = self.first.copy()
        is_start[:, 0] = True
        starts = np.flatnonzero(is_start)
        ends = np.empty_like(starts)
        ends[:-1] = starts[1:]
        ends[-1] = is_start.size
        initial = np.searchsorted(starts, np.arange(0, is_start.size, num_steps))
        final = np.empty_like(initial)
        final[:-1] = initial[1:] - 1
        final[-1] = len(starts) - 1
        begins_at_first = self.first.reshape(-1)[starts]
        if self.num_ended:
            ended = np.flatnonzero(self.last.reshape(-1)[ends - 1])
            ended = ended[np.argsort((ends[ended] - 1) % num_steps, kind='stable')]
        else:
            ended = starts[:0]
        carried = 1.0 - self.first[:, 0]
        return Segments(starts, ends, initial, final, carried, ends - starts - begins_at_first, ended)

    def positions(self, length: np.ndarray) -> Positions:
        """Return the positions of the steps in their episodes.

        Args:
            length: int64 ``[B]``, the position of the step before row 0.
        """
        key = length.tobytes()
        if key not in self._positions:
            self._positions[key] = self._compute_positions(length)
        return self._positions[key]

    def _compute_positions(self, length: np.ndarray) -> Positions:
        index = np.arange(self.num_steps)
        position = length[:, None] + (index + 1)
        if not self.crosses_boundary:
            return Positions(position, None, position[:, -1])
        first_index = np.maximum.accumulate(np.where(self.first, index, -1), axis=1)
        position = np.where(first_index >= 0, index - first_index, position)
        return Positions(position, position.reshape(-1)[self.segments.ends - 1], position[:, -1])


def aggregate(steps: StepSequence, value: np.ndarray, accumulated: np.ndarray, reduction: str) -> np.ndarray:
    """Aggregate a quantity over the segments of a sequence.

    Args:
        steps: a sequence that crosses an episode boundary.
        value: float64 ``[B, T, ...]``, with the neutral element at FIRST.
        accumulated: float64 ``[B, ...]``: the totals of the episodes before row 0. They are updated to the totals at
            the last row.
        reduction: a key of ``UFUNC``.

    Returns:
        The total of its episode at the end of each segment, ``[S, ...]``.
    """
    ufunc, segments = UFUNC[reduction], steps.segments
    total = ufunc.reduceat(value.reshape(-1, *value.shape[2:]), segments.starts, axis=0)
    if ufunc is np.add:
        total[segments.initial] += accumulated * segments.carried.reshape(-1, *(1, ) * (accumulated.ndim - 1))
    else:
        carried = segments.initial[segments.carried > 0]
        total[carried] = ufunc(total[carried], accumulated[segments.carried > 0])
    accumulated[...] = total[segments.final]
    return total


def reduction_of(path: str) -> str:
    """Return the aggregation of a quantity over an episode: the part of its name after ``@``, or 'sum'."""
    _, at, suffix = path.rpartition('@')
    if not at:
        return 'sum'
    reduction = {'step': 'mean'}.get(suffix, suffix)
    if reduction not in UFUNC:
        raise ValueError(f"env_info field '{path}': unknown aggregation '@{suffix}', expected one of "
                         '@sum, @step (mean over the steps), @max, @min')
    return reduction
