"""Tells the records of episodes and returns what is in the storage of a replay buffer."""
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from alfx.experience_replayers.episodes import Episodes
from alfx.experience_replayers.episodic_returns import EpisodicReturns
from alfx.experience_replayers.rings import RingIndex
from alfx.experience_replayers.row_store import PackedStorage


class Leaves(NamedTuple):
    """Which leaf of what is stored is which; None where there is none."""

    step_type: int
    discount: Optional[int]
    reward: Optional[int]


class EpisodeRecords:
    """The episodes in a storage, and the returns if those are recorded.

    Args:
        rings: where the environments are.
        store: what is stored.
        leaves: where to look.
        returns: None if returns are not recorded.
        shared: whether the records lie in shared memory.
    """

    def __init__(self, rings: RingIndex, store: PackedStorage, leaves: Leaves, returns: Optional[EpisodicReturns],
                 shared: bool) -> None:
        self._rings = rings
        self._store = store
        self._leaves = leaves
        self._returns = returns
        self.episodes = Episodes(rings, leaves.discount is not None, shared)
        self.retrace(rings.all_envs)

    def stored(self, positions: int | np.ndarray, num_steps: int, env_ids: np.ndarray,
               leaves: Sequence[Tensor]) -> None:
        """Steps were stored; arguments as of ``RingBuffer._stored``."""

        def get(leaf: int) -> np.ndarray:
            array = leaves[leaf].cpu().numpy()
            return array.reshape(num_steps, len(env_ids), *self._store.shapes[leaf])

        self._follow(positions, env_ids, get)

    def changed(self, leaves: Sequence[int], env_ids: np.ndarray) -> None:
        """Those leaves of steps of ``env_ids`` were changed."""
        if any(leaf in leaves for leaf in self._leaves):
            self.retrace(env_ids)

    def retrace(self, env_ids: np.ndarray) -> None:
        """Look through all that is stored of ``env_ids``, as if it had just been stored."""
        self.episodes.forget(env_ids)
        firsts, sizes = self._rings.first()[env_ids], self._rings.sizes()[env_ids]
        for first, size in {*zip(firsts.tolist(), sizes.tolist())}:  # one, if all were stored together
            if size:
                chosen = env_ids[(firsts == first) & (sizes == size)]
                self._retrace_alike(first, size, chosen)

    def _retrace_alike(self, first: int, size: int, env_ids: np.ndarray) -> None:
        slots = self._rings.slots_from(first, size, env_ids)
        self._follow(first, env_ids, lambda leaf: self._read(leaf, slots))

    def _follow(self, positions: int | np.ndarray, env_ids: np.ndarray, get: Callable[[int], np.ndarray]) -> None:
        """``get(leaf)`` is ``[T, B, ...]`` of the steps from ``positions`` on."""
        step_type, discount, reward = self._leaves
        discounts = None if discount is None else get(discount)
        stored = self.episodes.store(positions, env_ids, get(step_type), discounts)
        if self._returns is not None:
            assert discount is not None and reward is not None and discounts is not None
            self._returns.store(stored, get(reward), discounts,
                                lambda slots: (self._read(reward, slots), self._read(discount, slots)))

    def _read(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """``[*slots.shape, ...]``: what is stored."""
        found = self._store.read_leaf(leaf, torch.from_numpy(slots.reshape(-1))).cpu()
        return found.view(*slots.shape, *self._store.shapes[leaf]).numpy()
