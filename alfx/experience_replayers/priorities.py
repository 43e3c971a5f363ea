"""Priorities for sampling stored sequences (Schaul et al. 2016, arXiv:1511.05952, section 3.3).

A priority belongs to the first step of a sequence. The steps at which a sequence can begin change with every stored
step and with the requested length; only those steps have a weight in the sum tree. The tree is updated when a batch is
drawn, at the two ends of each ring, so that storing costs almost nothing.

Difference from the paper: new steps get the largest priority that was ever *set*, and ``initial_priority`` only until
the first priority is set. New steps therefore stand out by the same amount whatever the scale of the priorities. With
``new_priority_period`` it is periodically reset to the largest stored priority, as in TD7 (Fujimoto et al. 2023,
arXiv:2306.02451).
"""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfx.experience_replayers.packed_storage import standalone
from alfx.experience_replayers.rings import RingIndex
from alfx.experience_replayers.sum_tree import SumTree
from alfx.utils.shared_memory import SharedArrays


class Priorities(SharedArrays):
    """Priorities of all slots, and the sum tree of the slots at which a sequence can begin.

    Args:
        rings: ring positions of the environments; read at each call, not modified.
        initial_priority: priority of new steps until one is set.
        shared: keep the state in shared memory.
        new_priority_period: number of updates after which new steps get the largest stored priority; 0: never.
    """

    def __init__(self, rings: RingIndex, initial_priority: float, shared: bool = False,
                 new_priority_period: int = 0) -> None:
        super().__init__(shared)
        num_slots = rings.max_length * rings.num_envs
        self._rings = rings
        self._priorities = self._allocate('_priorities', num_slots, np.float32)
        self._tree = SumTree(num_slots, shared)
        # the positions at which sequences of _length steps could begin when the tree was last updated
        self._first = self._allocate('_first', rings.num_envs, np.int64)
        self._end = self._allocate('_end', rings.num_envs, np.int64)
        self._same_for_all: tuple[int, int] | None = None  # first and end as numbers, where they can be
        self._length = self._allocate('_length', 1, np.int64, fill=1)
        self._period = new_priority_period
        # the priority of new steps, 1 if it was set or 0 if it is the initial one, and the number of updates
        self._newest = self._allocate('_newest', 3, np.float64)
        self._newest[0] = initial_priority

    @property
    def length(self) -> int:
        """Length of the sequences that were drawn last."""
        return int(self._length[0])

    def store(self, slots: Any) -> None:
        """Set the priorities of new steps in ``slots`` (int64 ``[n]`` or a slice)."""
        self._priorities[slots] = self._newest[0]

    def update(self, env_ids: np.ndarray, positions: np.ndarray, priorities: np.ndarray) -> None:
        """Set priorities (``[B]`` each).

        If a step occurs more than once, its last priority counts. Steps that are no longer stored are ignored.
        """
        if not len(priorities):
            return
        highest = float(priorities.max())
        self._newest[:] = (max(highest, self._newest[0]) if self._newest[1] else highest), 1.0, self._newest[2] + 1
        held = self._rings.holds(positions, env_ids)
        if not held.all():
            env_ids, positions, priorities = env_ids[held], positions[held], priorities[held]
        slots = self._rings.slots(positions, env_ids)
        self._priorities[slots] = priorities
        if self._period and self._newest[2] % self._period == 0:
            stored = self._priorities[self._rings.slots_between(self._rings.first(), self._rings.positions())]
            self._newest[0] = stored.max() if len(stored) else self._newest[0]
        drawable = (positions >= self._first[env_ids]) & (positions < self._end[env_ids])
        if not drawable.all():
            slots = slots[drawable]
        self._tree.set(slots, self._priorities[slots])

    def set_window(self, first: Any, end: Any, length: int) -> None:
        """Let sequences of ``length`` steps begin at the positions from ``first`` to ``end - 1`` (numbers or ``[E]``).
        """
        self._length[0] = length
        new, old = (first, end), self._same_for_all
        is_same_for_all = not isinstance(first, np.ndarray)
        if is_same_for_all and old is not None:
            if new == old:
                return
            leaving, entering = self._difference_in_lockstep(old, new), self._difference_in_lockstep(new, old)
        else:
            arrays = self._first, self._end
            leaving, entering = self._difference(arrays, new), self._difference(new, arrays)
        if len(leaving) or len(entering):
            # leaving slots first: an entering step may have overwritten the slot of a leaving one
            weights = np.zeros(len(leaving) + len(entering))
            weights[len(leaving):] = self._priorities[entering]
            self._tree.set(np.concatenate([leaving, entering]), weights)
        self._first[:], self._end[:] = first, end
        self._same_for_all = (first, end) if is_same_for_all else None

    def _difference_in_lockstep(self, a: tuple[int, int], b: tuple[int, int]) -> np.ndarray:
        """Return the slots, of all environments, of the positions in ``a`` but not in ``b``."""
        low = min(max(a[0], b[0]), a[1])  # a[0] to low - 1 are before b
        high = max(min(a[1], b[1]), low)  # high to a[1] - 1 are after it
        positions = np.arange(a[0], low) if high == a[1] else np.arange(high, a[1])
        if low > a[0] and high < a[1]:
            positions = np.concatenate([np.arange(a[0], low), positions])
        return self._rings.slots(positions[:, None], self._rings.all_envs).reshape(-1)

    def _difference(self, a: tuple[Any, Any], b: tuple[Any, Any]) -> np.ndarray:
        """Return the slots of the positions in ``a`` but not in ``b`` for windows that differ between environments."""
        a = np.broadcast_to(a[0], self._first.shape), np.broadcast_to(a[1], self._first.shape)
        low = np.minimum(np.maximum(a[0], b[0]), a[1])
        high = np.maximum(np.minimum(a[1], b[1]), low)
        return np.concatenate([self._rings.slots_between(a[0], low), self._rings.slots_between(high, a[1])])

    def draw(self, batch_size: int, with_replacement: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw sequences with probabilities proportional to their priorities.

        Args:
            batch_size: B, the number of sequences.
            with_replacement: draw independently. Otherwise the draws are stratified: one from each of B parts of equal
                total priority. A sequence of probability P then occurs ``B * P`` times, plus or minus less than two.

        Returns:
            ``env_ids`` and ``positions``, int64 ``[B]``, and their probabilities P, float64 ``[B]``.

        Raises:
            ValueError: all priorities are 0.
        """
        fractions = torch.rand(batch_size, dtype=torch.float64).numpy()
        if with_replacement:
            fractions.sort()
        else:
            fractions += np.arange(batch_size)
            fractions /= batch_size
        slots, probabilities = self._tree.find(fractions)
        rows, env_ids = np.divmod(slots, self._rings.num_envs)
        newest = self._rings.pos - 1 if self._rings.lockstep else (self._rings.positions() - 1)[env_ids]
        return env_ids, newest - (newest - rows) % self._rings.max_length, probabilities

    def probabilities(self, env_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the probabilities with which sequences are drawn, float64 ``[B]``."""
        return self._tree.get(self._rings.slots(positions, env_ids)) / self._tree.total

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """Return the priorities of the first ``num_rows`` rows, and the priority of new steps."""
        priorities = standalone(self._tensors['_priorities'][:num_rows * self._rings.num_envs])
        return {'priorities': priorities, 'newest': self._tensors['_newest']}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Load a copy of the result of :meth:`state_dict`; None gives all steps the priority of new steps."""
        self.set_window(self._first, self._first, self.length)
        if state_dict is None:
            self._priorities[:] = self._newest[0]
            return
        priorities = state_dict['priorities'].numpy()
        self._priorities[:len(priorities)] = priorities
        newest = state_dict['newest'].numpy()
        self._newest[:len(newest)] = newest  # older checkpoints lack the number of updates


def join_priorities(states: Sequence[tuple[dict[str, Any], int]], num_rows: int) -> dict[str, Any]:
    """Return the priorities of several buffers as the state of one buffer with all their environments.

    Args:
        states: result of ``state_dict``, and number of environments, of each buffer.
        num_rows: number of rows of the joined state.
    """
    columns = []
    for state, num_envs in states:
        found = state['priorities'].view(-1, num_envs)
        columns.append(torch.nn.functional.pad(found, (0, 0, 0, num_rows - len(found))))
    newest = torch.stack([state['newest'] for state, _ in states])
    given = newest[newest[:, 1] > 0]
    best = newest[0] if not len(given) else given[given[:, 0].argmax()]
    # the same number of buffers resumes exactly, each with its own priority of new steps
    return {'priorities': torch.cat(columns, 1).flatten(), 'newest': best.clone(), 'of_buffers': newest}


def share_of_priorities(state: dict[str, Any], num_envs: int, rank: int, size: int) -> dict[str, Any]:
    """Return the priorities of one of ``size`` buffers that ``num_envs`` environments are divided among."""
    columns, of_buffers = state['priorities'].view(-1, num_envs).chunk(size, 1), state.get('of_buffers', ())
    newest = of_buffers[rank] if len(of_buffers) == size else state['newest']
    return {'priorities': columns[rank].flatten(), 'newest': newest.clone()}
