"""Discounted return from each stored step to the termination of its episode, filled in once it is known.

With r[t] the reward and d[t] the discount for arriving at step t:

    R[t] = r[t+1] + gamma d[t+1] R[t+1]

The return is known as soon as a discount of 0 ends the sum. A step that is LAST by termination has R = 0. The return of
a running episode is unknown. So is the return of a truncated episode, because its continuation is missing, unless
``after_truncation`` gives the R of a step that is LAST by truncation. A number that does not exceed the value there
makes R a lower bound, for example 0 if no reward is negative.
"""
from collections.abc import Callable, Sequence
from typing import Optional

import numpy as np

from alfx.experience_replayers.episodes import StoredSteps
from alfx.experience_replayers.rings import RingIndex
from alfx.utils.shared_memory import SharedArrays


class EpisodicReturns(SharedArrays):
    """Returns of all slots.

    Args:
        rings: ring positions of the environments; read at each call, not modified.
        reward_shape: ``()``, or ``(K, )`` for K-dimensional rewards, which have K returns.
        gamma: discount factor of the returns, multiplied by the discount of the environment.
        default_return: value for a return that is unknown.
        reward_clip: minimum and maximum reward; rewards are clipped before they are summed.
        after_truncation: return of a step that is LAST by truncation; ``None``: unknown.
        shared: keep the returns in shared memory.

    Attributes:
        gamma: see above.
        default: value for a return that is unknown.
    """

    def __init__(self, rings: RingIndex, reward_shape: Sequence[int], gamma: float, default_return: float,
                 reward_clip: Optional[tuple[float, float]], after_truncation: Optional[float] = None,
                 shared: bool = False) -> None:
        super().__init__(shared)
        self._rings = rings
        self.gamma = gamma
        self.default = default_return
        self._reward_clip = reward_clip
        self._after_truncation = after_truncation
        self._returns = self._allocate('_returns', (rings.max_length * rings.num_envs, *reward_shape), np.float32)

    def get(self, slots: np.ndarray) -> np.ndarray:
        """Return the returns of slots, float32 ``[*slots.shape, *reward_shape]``."""
        return self._returns[slots]

    def store(self, stored: StoredSteps, reward: np.ndarray, discount: np.ndarray,
              read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> None:
        """Compute the returns that become known with newly stored steps.

        Args:
            stored: the steps as parts of episodes.
            reward: ``[T, B, *reward_shape]``.
            discount: ``[T, B]``.
            read: ``read(slots) -> (reward, discount)`` of steps in the buffer, for int64 ``slots`` of any shape.
        """
        cuts, discount = stored.cuts, discount.astype(np.float64)
        returns = np.full(reward.shape, self.default)
        truncated = stored.is_last & ~cuts & (self._after_truncation is not None)
        if cuts.any() or truncated.any():
            reward = self._clipped(reward)
            # A sum stops where the episode ends, the next discount is 0, or the next step does not exist.
            known = stored.is_last & cuts | truncated
            stops = stored.ends.copy()
            stops[-1] = True
            known[:-1] |= cuts[1:] & ~stored.ends[:-1]
            stops[:-1] |= cuts[1:]
            num_steps = len(cuts)
            stop = np.where(stops, np.arange(num_steps)[:, None], num_steps)
            stop = np.minimum.accumulate(stop[::-1], axis=0)[::-1]
            is_known = np.take_along_axis(known, stop, axis=0)
            totals = np.zeros(reward.shape)
            totals[:-1] = np.where(_as(reward, stored.ends[:-1]), 0.0, reward[1:])
            totals[truncated] = self._after_truncation or 0.0
            reverse_scan(_as(reward, np.where(stops[:-1], 0.0, self.gamma * discount[1:])), totals)
            returns = np.where(_as(reward, is_known), totals, self.default)
            self._fill_in(stored, reward[0] + self.gamma * _as(reward[0], discount[0]) * totals[0],
                          ~stored.begins[0] & (cuts[0] | is_known[0]), read)
        self._returns[stored.slots] = returns

    def _fill_in(self, stored: StoredSteps, total: np.ndarray, chosen: np.ndarray,
                 read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> None:
        """Fill in the returns of steps stored earlier.

        ``total`` (``[B, *reward_shape]``), where ``chosen``, is the return of the step before the newly stored ones;
        the returns of earlier steps follow from it.
        """
        last = stored.steps[0] - 1
        first = np.maximum(stored.return_begins, stored.steps[-1] + 1 - self._rings.max_length)
        column = np.flatnonzero(chosen & (first <= last))
        if not len(column):
            return
        env_ids, last, first = stored.env_ids[column], last[column], first[column]
        steps = last - np.arange(int((last - first).max()), -1, -1)[:, None]  # [n, B], the last row is ``last``
        is_there = steps >= first
        slots = self._rings.slots(np.maximum(steps, first), env_ids)
        reward, discount = read(slots)
        totals = np.empty(reward.shape)
        totals[:-1], totals[-1] = self._clipped(reward)[1:], total[column]
        reverse_scan(_as(reward, self.gamma * discount[1:].astype(np.float64)), totals)
        self._returns[slots[is_there]] = totals[is_there]

    def _clipped(self, reward: np.ndarray) -> np.ndarray:
        return reward if self._reward_clip is None else reward.clip(*self._reward_clip)


def _as(like: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return ``x`` with trailing dimensions of size 1, so that it has as many dimensions as ``like``."""
    return x.reshape(x.shape + (1, ) * (like.ndim - x.ndim))


def reverse_scan(coefficient: np.ndarray, offset: np.ndarray) -> None:
    """Solve ``x[t] = offset[t] + coefficient[t] x[t+1]``, ``x[n-1] = offset[n-1]``, in place, in ``offset``.

    Recursive doubling takes log2(n) rounds of a few operations instead of n rounds.

    Args:
        coefficient: float64 ``[n-1, ...]``, broadcasts with ``offset``.
        offset: float64 ``[n, ...]``.
    """
    n, stride = len(offset), 1
    while stride < n:
        offset[:n - stride] += coefficient[:n - stride] * offset[stride:]
        left = n - 2 * stride
        if left > 0:
            coefficient = coefficient[:left] * coefficient[stride:stride + left]
        stride *= 2
