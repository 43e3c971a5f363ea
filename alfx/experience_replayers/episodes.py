"""Beginning and end of the episode of each stored step, updated as steps are stored.

An episode begins at a FIRST step, after a LAST step, or where no earlier step exists. It ends with a LAST step, before
a FIRST step, or with the newest step while it is running. Each slot stores one number: the first step of an episode
stores the distance to the last step, every other step stores the distance back to the first step. Both ends are
therefore found in one or two look-ups, and storing a step writes one number, or two if it ends an episode.
"""
from typing import Any, NamedTuple

import numpy as np

from alfx.data_structures import StepType
from alfx.experience_replayers.rings import RingIndex
from alfx.utils.shared_memory import SharedArrays

_OPEN = np.iinfo(np.int32).max  # distance to the end of a running episode
_NEVER = np.iinfo(np.int64).max


class StoredSteps(NamedTuple):
    """Steps that have just been stored, T of each of B environments, as parts of episodes.

    Fields:
        env_ids: int64 ``[B]``.
        steps: int64 ``[T, B]``: their positions.
        slots: int64 ``[T, B]``.
        is_last: bool ``[T, B]``: LAST.
        begins: bool ``[T, B]``: the first step of an episode.
        ends: bool ``[T, B]``: the last step of an episode, as far as known.
        cuts: bool ``[T, B]`` or None: the discount is 0.
        return_begins: int64 ``[B]``: position of the earliest step whose return includes the first of these steps,
            unless ``begins[0]``.
    """

    env_ids: np.ndarray
    steps: np.ndarray
    slots: np.ndarray
    is_last: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    cuts: Any
    return_begins: np.ndarray


class Episodes(SharedArrays):
    """Episodes of all steps in the rings.

    Args:
        rings: ring positions of the environments; read at each call, not modified.
        has_discount: discounts are available, for :meth:`return_begins`.
        shared: keep the state in shared memory.
    """

    def __init__(self, rings: RingIndex, has_discount: bool, shared: bool = False) -> None:
        super().__init__(shared)
        self._rings = rings
        self.has_discount = has_discount
        num_slots, num_envs = rings.max_length * rings.num_envs, rings.num_envs
        # not negative: distance to the end of the episode that begins here; negative: distance to its first step
        self._links = self._allocate('_links', num_slots, np.int32)
        self._return_links = self._allocate('_return_links', num_slots if has_discount else 0, np.int32)
        # for each environment: the first step of the running episode, -1 if the next step begins an episode; and the
        # earliest step whose return includes the next step
        self._begin = self._allocate('_begin', num_envs, np.int64, fill=-1)
        self._return_begin = self._allocate('_return_begin', num_envs, np.int64)
        # the end of the last episode whose first step was overwritten
        self._headless_end = self._allocate('_headless_end', num_envs, np.int64, fill=_NEVER)

    def forget(self, env_ids: np.ndarray) -> None:
        """Let the next step of each of ``env_ids`` begin an episode, whatever its type."""
        self._begin[env_ids] = -1
        self._return_begin[env_ids] = -1

    def store(self, positions: Any, env_ids: np.ndarray, step_type: np.ndarray,
              discount: np.ndarray | None) -> StoredSteps:
        """Record steps that were stored, and return them as parts of episodes.

        Args:
            positions: position of the first of them: a number or int64 ``[B]``.
            env_ids: int64 ``[B]``.
            step_type: ``[T, B]`` with T of at most ``max_length``.
            discount: ``[T, B]``; None if ``has_discount`` is False.
        """
        num_steps = len(step_type)
        steps = positions + np.arange(num_steps)[:, None] + np.zeros_like(env_ids)
        slots = self._rings.slots(steps, env_ids)
        is_last = step_type == StepType.LAST
        is_first = step_type == StepType.FIRST
        open_begin = self._begin[env_ids]
        begins = is_first | (open_begin < 0) if num_steps == 1 else is_first.copy()
        if num_steps > 1:
            begins[0] |= open_begin < 0
            begins[1:] |= is_last[:-1]
        ends = is_last.copy()
        ends[:-1] |= begins[1:]
        end = np.where(ends, steps, _NEVER)
        end = np.minimum.accumulate(end[::-1], axis=0)[::-1]
        self._close(env_ids, steps[0], open_begin, np.where(begins[0], steps[0] - 1, end[0]))
        self._note_overwritten(env_ids, steps, slots)
        begin = np.where(begins, steps, -1)
        begin[0] = np.where(begins[0], steps[0], open_begin)
        begin = np.maximum.accumulate(begin, axis=0)
        self._links[slots] = np.where(begins, np.minimum(end - steps, _OPEN), np.maximum(begin - steps, -_OPEN))
        self._begin[env_ids] = np.where(is_last[-1], -1, begin[-1])
        return_begins, cuts = self._return_begin[env_ids], None
        if discount is not None:
            cuts = discount == 0
            self._store_return_begins(env_ids, steps, slots, begin, cuts)
        return StoredSteps(env_ids, steps, slots, is_last, begins, ends, cuts, return_begins)

    def _close(self, env_ids: np.ndarray, newest: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        """Store the ends of episodes that were running before the step ``newest``, began at ``begin`` and have ended.
        """
        closed = (begin >= 0) & (end != _NEVER)
        if not closed.any():
            return
        env_ids, newest, begin, end = env_ids[closed], newest[closed], begin[closed], end[closed]
        is_there = begin >= newest - self._rings.max_length
        self._links[self._rings.slots(begin[is_there], env_ids[is_there])] = (end - begin)[is_there]
        self._headless_end[env_ids[~is_there]] = end[~is_there]

    def _note_overwritten(self, env_ids: np.ndarray, steps: np.ndarray, slots: np.ndarray) -> None:
        """Keep the ends of episodes whose first steps are about to be overwritten."""
        if (steps[-1] < self._rings.max_length).all():
            return
        links = self._links[slots]
        # Only the last of them matters. Slots that were never written, or not since the ring was cleared, may look like
        # first steps; but then there is no episode whose end would be looked up there.
        is_begin = links >= 0
        row = len(steps) - 1 - is_begin[::-1].argmax(axis=0)
        column = np.flatnonzero(is_begin.any(axis=0))
        row = row[column]
        link = links[row, column].astype(np.int64)
        end = np.where(link == _OPEN, _NEVER, steps[row, column] - self._rings.max_length + link)
        self._headless_end[env_ids[column]] = end

    def _store_return_begins(self, env_ids: np.ndarray, steps: np.ndarray, slots: np.ndarray, begin: np.ndarray,
                             cuts: np.ndarray) -> None:
        latest_cut = np.where(cuts, steps, -1)
        if len(steps) == 1:
            before = self._return_begin[env_ids][None]
        else:
            before = np.maximum.accumulate(np.concatenate([self._return_begin[env_ids][None], latest_cut[:-1]]))
        begins = np.maximum(before, begin)
        self._return_links[slots] = np.maximum(begins - steps, -_OPEN)
        self._return_begin[env_ids] = np.maximum(begins[-1], latest_cut[-1])

    def begins(self, positions: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return the first steps that are still stored of the episodes of stored steps, int64."""
        links = self._links[self._rings.slots(positions, env_ids)]
        return np.maximum(positions + np.minimum(links, 0), self._rings.first()[env_ids])

    def ends(self, positions: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return the last steps, so far, of the episodes of stored steps, int64."""
        rings = self._rings
        links = self._links[rings.slots(positions, env_ids)]
        begins = positions + np.minimum(links, 0)
        next_position = rings.positions()[env_ids]
        # a dropped step is still readable until another step overwrites it
        is_there = begins >= next_position - rings.max_length
        links = self._links[rings.slots(begins, env_ids)]
        ends = np.where(is_there, np.where(links == _OPEN, _NEVER, begins + links), self._headless_end[env_ids])
        return np.minimum(ends, next_position - 1)

    def return_begins(self, positions: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return the earliest stored steps whose return includes the reward for arriving at the given steps, int64."""
        links = self._return_links[self._rings.slots(positions, env_ids)]
        return np.maximum(positions + links, self._rings.first()[env_ids])
