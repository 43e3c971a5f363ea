"""Episodes and returns of the contents of a replay buffer, updated when steps are stored or changed."""
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from alfx.experience_replayers.episodes import Episodes
from alfx.experience_replayers.episodic_returns import EpisodicReturns
from alfx.experience_replayers.packed_storage import PackedStorage
from alfx.experience_replayers.rings import RingIndex


class Leaves(NamedTuple):
    """Indices of the leaves of stored experience; ``None`` for a missing leaf."""

    step_type: int
    discount: Optional[int]
    reward: Optional[int]


class EpisodeRecords:
    """Episodes in a storage, and their returns if these are recorded.

    Args:
        rings: ring positions of the environments.
        store: the stored steps.
        leaves: indices of the relevant leaves.
        returns: ``None`` if returns are not recorded.
        shared: keep the records in shared memory.
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
        """Update the records after steps were stored; the arguments are those of ``RingBuffer._stored``."""

        def get(leaf: int) -> np.ndarray:
            array = leaves[leaf].cpu().numpy()
            return array.reshape(num_steps, len(env_ids), *self._store.shapes[leaf])

        self._follow(positions, env_ids, get)

    def changed(self, leaves: Sequence[int], env_ids: np.ndarray) -> None:
        """Update the records after the given leaves of steps of ``env_ids`` were changed."""
        if any(leaf in leaves for leaf in self._leaves):
            self.retrace(env_ids)

    def retrace(self, env_ids: np.ndarray) -> None:
        """Rebuild the records of ``env_ids`` from their stored steps."""
        self.episodes.forget(env_ids)
        firsts, sizes = self._rings.first()[env_ids], self._rings.sizes()[env_ids]
        for first, size in {*zip(firsts.tolist(), sizes.tolist())}:  # one pair if all were stored together
            if size:
                chosen = env_ids[(firsts == first) & (sizes == size)]
                self._retrace_alike(first, size, chosen)

    def _retrace_alike(self, first: int, size: int, env_ids: np.ndarray) -> None:
        slots = self._rings.slots_from(first, size, env_ids)
        self._follow(first, env_ids, lambda leaf: self._read(leaf, slots))

    def _follow(self, positions: int | np.ndarray, env_ids: np.ndarray, get: Callable[[int], np.ndarray]) -> None:
        """Record the steps from ``positions`` on; ``get(leaf)`` returns their leaf ``[T, B, ...]``."""
        step_type, discount, reward = self._leaves
        discounts = None if discount is None else get(discount)
        stored = self.episodes.store(positions, env_ids, get(step_type), discounts)
        if self._returns is not None:
            assert discount is not None and reward is not None and discounts is not None
            self._returns.store(stored, get(reward), discounts,
                                lambda slots: (self._read(reward, slots), self._read(discount, slots)))

    def _read(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """Return a leaf of stored steps, ``[*slots.shape, ...]``."""
        found = self._store.read_leaf(leaf, torch.from_numpy(slots.reshape(-1))).cpu()
        return found.view(*slots.shape, *self._store.shapes[leaf]).numpy()
