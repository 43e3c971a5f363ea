"""Positions and sizes of the rings of all environments.

The *position* of a step is the number of steps that its environment had stored before it since the buffer was created;
it never wraps around. The step at a position lies in row ``position % max_length`` and column ``env_id`` of the
storage; its *slot* is ``row * num_environments + env_id``.
"""
from typing import Any

import numpy as np

from alfx.utils.shared_memory import SharedArrays


class RingIndex(SharedArrays):
    """Positions and sizes of the rings of all environments.

    As long as all environments are stored together these are two Python integers (``lockstep``); storing for some
    environments turns them into arrays. In shared memory they are arrays from the beginning.

    Args:
        num_environments: E, number of rings.
        max_length: capacity of a ring in steps.
        shared: keep the state in shared memory.
    """

    def __init__(self, num_environments: int, max_length: int, shared: bool = False) -> None:
        super().__init__(shared)
        self.num_envs = num_environments
        self.max_length = max_length
        self.all_envs = np.arange(num_environments)
        self.lockstep = not shared
        self.pos, self.size = 0, 0
        self._env_pos = self._allocate('_env_pos', num_environments, np.int64)
        self._env_size = self._allocate('_env_size', num_environments, np.int64)

    def positions(self) -> np.ndarray:
        """Return the position of the next step of each environment, int64 ``[E]``; read-only."""
        return np.full(self.num_envs, self.pos) if self.lockstep else self._env_pos

    def sizes(self) -> np.ndarray:
        """Return the number of stored steps of each environment, int64 ``[E]``; read-only."""
        return np.full(self.num_envs, self.size) if self.lockstep else self._env_size

    def first(self) -> np.ndarray:
        """Return the position of the oldest step of each environment, int64 ``[E]``."""
        return self.positions() - self.sizes()

    def window(self, ignored: int, length: int) -> tuple[Any, Any]:
        """Return the range of positions at which sequences may begin: ``first`` to ``end - 1`` in each environment.

        Args:
            ignored: number of oldest steps that are not part of any sequence.
            length: number of steps of a sequence.

        Returns:
            ``first`` and ``end``, ``first <= end``: numbers in lockstep, otherwise int64 ``[E]``.
        """
        if self.lockstep:
            oldest = self.pos - self.size + ignored
            return oldest, max(self.pos - length + 1, oldest)
        first = self._env_pos - self._env_size + ignored
        return first, np.maximum(self._env_pos - length + 1, first)

    def is_even(self) -> bool:
        """Return whether all environments have the same position and size."""
        return self.lockstep or bool((self._env_pos == self._env_pos[0]).all() and
                                     (self._env_size == self._env_size[0]).all())

    def advance(self, steps: int) -> None:
        """Count ``steps`` stored steps for each environment."""
        if self.lockstep:
            self.pos += steps
            self.size = min(self.size + steps, self.max_length)
        else:
            self._env_pos += steps
            np.minimum(self._env_size + steps, self.max_length, out=self._env_size)

    def advance_some(self, env_ids: np.ndarray, steps: int = 1) -> None:
        """Count ``steps`` stored steps for each of ``env_ids``, which are distinct."""
        self.leave_lockstep()
        self._env_pos[env_ids] += steps
        self._env_size[env_ids] = np.minimum(self._env_size[env_ids] + steps, self.max_length)
        self.set(self._env_pos, self._env_size)  # even rings are in lockstep, as after loading a checkpoint

    def clear(self, env_ids: np.ndarray | None = None) -> None:
        """Drop all steps of ``env_ids``; None for all environments, which then get the same position."""
        if env_ids is not None:
            self.leave_lockstep()
            self._env_size[env_ids] = 0
        elif self.lockstep:
            self.size = 0
        else:
            self.set(np.full(self.num_envs, self._env_pos.max()), np.zeros(self.num_envs, np.int64))

    def drop_all_but(self, keep: int) -> None:
        """Drop the newest step and all but ``keep`` steps before it; the rings must be even and not empty."""
        size = min(int(self.sizes()[0]) - 1, keep)
        self.set(self.positions() - 1, np.full(self.num_envs, size))

    def drop_newest(self, env_ids: np.ndarray) -> None:
        """Drop the newest step, which must exist, of each of ``env_ids``."""
        dropped = np.bincount(env_ids, minlength=self.num_envs)
        self.set(self.positions() - dropped, self.sizes() - dropped)

    def drop_oldest(self, steps: int, env_ids: np.ndarray | None = None) -> None:
        """Drop the ``steps`` oldest steps, which must exist, of ``env_ids``; None for all."""
        if env_ids is None and self.lockstep:
            self.size -= steps
        else:
            self.leave_lockstep()
            self._env_size[self.all_envs if env_ids is None else env_ids] -= steps

    def set(self, positions: np.ndarray, sizes: np.ndarray) -> None:
        """Set positions and sizes (``[E]``)."""
        self._env_pos[:], self._env_size[:] = positions, sizes
        self.pos, self.size = int(positions[0]), int(sizes[0])
        self.lockstep = False
        self.lockstep = not self._shared and self.is_even()

    def leave_lockstep(self) -> None:
        """Track the environments separately from now on."""
        if self.lockstep:
            self._env_pos[:], self._env_size[:] = self.pos, self.size
            self.lockstep = False

    def slots(self, positions: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return the slots of steps, int64; the arguments broadcast."""
        return positions % self.max_length * self.num_envs + env_ids

    def slots_from(self, positions: Any, num_steps: int, env_ids: np.ndarray) -> np.ndarray:
        """Return the slots of the steps from ``positions`` (a number or ``[B]``) on, int64 ``[num_steps, B]``."""
        if num_steps == 1:
            return self.slots(positions, env_ids)[None]
        return self.slots(positions + np.arange(num_steps)[:, None], env_ids)

    def slots_between(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the slots of positions ``first`` to ``end - 1`` (``[E]`` each) of all environments, int64 ``[n]``.

        If a range is longer than a ring, slots occur more than once.
        """
        counts = np.maximum(end - first, 0)
        total = int(counts.sum())
        if total == 0:
            return np.empty(0, np.int64)
        env_ids = self.all_envs.repeat(counts)
        offsets = first - (counts.cumsum() - counts)
        return self.slots(np.arange(total) + offsets[env_ids], env_ids)

    def holds(self, positions: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return whether steps are stored, bool; the arguments have the same shape."""
        if self.lockstep:
            return (positions < self.pos) & (positions >= self.pos - self.size)
        end = self._env_pos[env_ids]
        return (positions < end) & (positions >= end - self._env_size[env_ids])
