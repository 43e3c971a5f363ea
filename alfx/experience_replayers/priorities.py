"""Priorities of stored sequences (Schaul et al. 2016, arXiv:1511.05952, section 3.3), by which they are sampled.

A priority belongs to the first step of a sequence. Which steps a sequence can begin at changes with every step that is
stored and with the length that is asked for; only those have a weight in the sum tree. The tree is brought up to date
when a batch is drawn, at the two ends of each ring, so that storing costs next to nothing.

Differences from the paper: new steps get the largest priority that was ever *given*, and ``initial_priority`` only
until one was given, so that they stand out by as much whatever the scale of the priorities is.
"""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfx.experience_replayers.rings import RingIndex
from alfx.experience_replayers.row_store import alone
from alfx.experience_replayers.sum_tree import SumTree
from alfx.utils.shared_memory import SharedArrays


class Priorities(SharedArrays):
    """The priorities of all slots, and the sum tree of those at which a sequence can begin.

    Args:
        rings: where the environments are; read at each call, not changed.
        initial_priority: of new steps, until one was given.
        shared: whether the state lies in shared memory.
    """

    def __init__(self, rings: RingIndex, initial_priority: float, shared: bool = False) -> None:
        super().__init__(shared)
        num_cells = rings.max_length * rings.num_envs
        self._rings = rings
        self._priorities = self._allocate('_priorities', num_cells, np.float32)
        self._tree = SumTree(num_cells, shared)
        # The positions at which sequences of _length steps began when the tree was last brought up to date.
        self._first = self._allocate('_first', rings.num_envs, np.int64)
        self._end = self._allocate('_end', rings.num_envs, np.int64)
        self._same_for_all: tuple[int, int] | None = None  # first and end as numbers, where they can be
        self._length = self._allocate('_length', 1, np.int64, fill=1)
        # The priority of new steps, and whether that was given or is the initial one.
        self._newest = self._allocate('_newest', 2, np.float64)
        self._newest[0] = initial_priority

    @property
    def length(self) -> int:
        """The length of the sequences that were drawn last."""
        return int(self._length[0])

    def store(self, slots: Any) -> None:
        """New steps were stored in ``slots`` (int64 ``[n]`` or a slice)."""
        self._priorities[slots] = self._newest[0]

    def update(self, env_ids: np.ndarray, positions: np.ndarray, priorities: np.ndarray) -> None:
        """Give new priorities (``[B]`` each); of steps that occur twice the last one counts, others are ignored if
        they are not held any more."""
        if not len(priorities):
            return
        highest = float(priorities.max())
        self._newest[:] = (max(highest, self._newest[0]) if self._newest[1] else highest), 1.0
        held = self._rings.holds(positions, env_ids)
        if not held.all():
            env_ids, positions, priorities = env_ids[held], positions[held], priorities[held]
        slots = self._rings.slots(positions, env_ids)
        self._priorities[slots] = priorities
        drawable = (positions >= self._first[env_ids]) & (positions < self._end[env_ids])
        if not drawable.all():
            slots = slots[drawable]
        self._tree.set(slots, self._priorities[slots])

    def set_window(self, first: Any, end: Any, length: int) -> None:
        """Sequences of ``length`` steps begin at the positions from ``first`` to ``end - 1`` (numbers or ``[E]``)."""
        self._length[0] = length
        new, old = (first, end), self._same_for_all
        is_same_for_all = not isinstance(first, np.ndarray)
        if is_same_for_all and old is not None:
            if new == old:
                return
            leaving, entering = self._rows_of_difference(old, new), self._rows_of_difference(new, old)
        else:
            arrays = self._first, self._end
            leaving, entering = self._cells_of_difference(arrays, new), self._cells_of_difference(new, arrays)
        if len(leaving) or len(entering):
            # What leaves comes before what enters, which may have taken its place.
            weights = np.zeros(len(leaving) + len(entering))
            weights[len(leaving):] = self._priorities[entering]
            self._tree.set(np.concatenate([leaving, entering]), weights)
        self._first[:], self._end[:] = first, end
        self._same_for_all = (first, end) if is_same_for_all else None

    def _rows_of_difference(self, a: tuple[int, int], b: tuple[int, int]) -> np.ndarray:
        """The slots of all environments, of the positions in ``a`` and not in ``b``, which may be on both sides."""
        low = min(max(a[0], b[0]), a[1])  # a[0] to low - 1 are before b
        high = max(min(a[1], b[1]), low)  # high to a[1] - 1 are after it
        positions = np.arange(a[0], low) if high == a[1] else np.arange(high, a[1])
        if low > a[0] and high < a[1]:
            positions = np.concatenate([np.arange(a[0], low), positions])
        return self._rings.slots(positions[:, None], self._rings.all_envs).reshape(-1)

    def _cells_of_difference(self, a: tuple[Any, Any], b: tuple[Any, Any]) -> np.ndarray:
        """The same for windows that differ between environments."""
        a = np.broadcast_to(a[0], self._first.shape), np.broadcast_to(a[1], self._first.shape)
        low = np.minimum(np.maximum(a[0], b[0]), a[1])
        high = np.maximum(np.minimum(a[1], b[1]), low)
        return np.concatenate([self._rings.cells_between(a[0], low), self._rings.cells_between(high, a[1])])

    def draw(self, batch_size: int, with_replacement: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw sequences with probabilities in proportion to their priorities.

        Args:
            batch_size: B, how many.
            with_replacement: whether the draws are independent. If not, they are stratified: one from each of B
                parts of equal total priority. Then a sequence of probability P comes up less than two times more or
                less often than ``B * P`` times.

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
        """float64 ``[B]``: the probabilities with which sequences are drawn, of those that may be."""
        return self._tree.get(self._rings.slots(positions, env_ids)) / self._tree.total

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """The priorities of the first ``num_rows`` rows, and what new steps get."""
        priorities = alone(self._tensors['_priorities'][:num_rows * self._rings.num_envs])
        return {'priorities': priorities, 'newest': self._tensors['_newest']}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Take over what :meth:`state_dict` returned, as copies; None to give all steps what new steps get."""
        self.set_window(self._first, self._first, self.length)
        if state_dict is None:
            self._priorities[:] = self._newest[0]
            return
        priorities = state_dict['priorities'].numpy()
        self._priorities[:len(priorities)] = priorities
        self._newest[:] = state_dict['newest'].numpy()


def join_priorities(states: Sequence[tuple[dict[str, Any], int]], num_rows: int) -> dict[str, Any]:
    """The state of the priorities of several buffers as one of all of their environments.

    Args:
        states: what ``state_dict`` returned, and the number of environments, of each.
        num_rows: rows of the joined state.
    """
    columns = []
    for state, num_envs in states:
        column = torch.zeros(num_rows, num_envs)
        found = state['priorities'].view(-1, num_envs)
        column[:len(found)] = found
        columns.append(column)
    newest = torch.stack([state['newest'] for state, _ in states])
    given = newest[newest[:, 1] > 0]
    best = newest[0] if not len(given) else given[given[:, 0].argmax()]
    return {'priorities': torch.cat(columns, 1).flatten(), 'newest': best.clone()}


def share_of_priorities(state: dict[str, Any], num_envs: int, rank: int, size: int) -> dict[str, Any]:
    """The state of the priorities of one of ``size`` buffers that divide ``num_envs`` environments among them."""
    columns = state['priorities'].view(-1, num_envs).chunk(size, 1)
    return {'priorities': columns[rank].flatten(), 'newest': state['newest'].clone()}
