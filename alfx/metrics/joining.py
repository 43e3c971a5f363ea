"""The states of the metrics of several processes as those of one, and the reverse, for what is kept in arrays.

Each class is one of the bases of what it is for. ``join_states`` makes the state of one of many; ``share_of_state``
makes that of one of ``size`` of one; ``take_joined`` takes over what ``join_states`` returned, in a metric that sees no
steps itself.
"""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

State = dict[str, torch.Tensor]


class JoinsRings:
    """A ring of the last values: ``_values`` and ``_count``."""

    _values: np.ndarray
    _count: np.ndarray
    _max_len: int

    def join_states(self, states: Sequence[State]) -> State:
        """The state of a ring that has seen what several rings of this size have; the newest of each are kept."""
        rings = [ring[np.arange(max(count - len(ring), 0), count) % len(ring)] for ring, count in
                 ((state['values'].numpy(), int(state['count'])) for state in states)]
        longest = max(map(len, rings))  # by age: those of the same age stand together
        newest = [ring[len(ring) - age] for age in range(longest, 0, -1) for ring in rings if len(ring) >= age]
        return self._packed(newest[-self._max_len:])

    def share_of_state(self, state: State, rank: int, size: int) -> State:
        """The state of one of ``size`` rings that together have seen what one has."""
        values, count = state['values'].numpy(), int(state['count'])
        ordered = values[np.arange(max(count - len(values), 0), count) % len(values)]
        return self._packed(list(ordered[rank::size]))

    def take_joined(self, state: State) -> None:
        """Take over what :meth:`join_states` returned."""
        self._values[...], self._count[...] = state['values'].numpy(), int(state['count'])

    def _packed(self, values: list[np.ndarray]) -> State:
        ring = np.zeros_like(self._values)
        if values:
            ring[:len(values)] = np.stack(values)
        return {'values': torch.from_numpy(ring), 'count': torch.tensor(len(values))}


class JoinsCounts:
    """A counter: ``_count``."""

    _count: np.ndarray

    def set(self, count: int) -> None:
        """Go on from ``count``."""
        self._count.fill(count)

    def join_states(self, states: Sequence[State]) -> State:
        """The state of one counter for what several have counted."""
        return {'count': torch.stack([state['count'] for state in states]).sum()}

    def share_of_state(self, state: State, rank: int, size: int) -> State:
        """The state of one of ``size`` counters that together have counted this: the first one has all of it."""
        return state if rank == 0 else {'count': torch.zeros_like(state['count'])}

    def take_joined(self, state: State) -> None:
        """Take over what :meth:`join_states` returned."""
        self.set(int(state['count']))


class JoinsEpisodes:
    """What the running episodes of environments have added up to: arrays ``[B, ...]``."""

    _host_state: Any

    def join_states(self, states: Sequence[State]) -> State:
        """The state of the running episodes of the environments of several such metrics, one after the other."""
        return {name: torch.cat([state[name] for state in states]) for name in self._host_state()}

    def share_of_state(self, state: State, rank: int, size: int) -> State:
        """The state of one of ``size`` metrics that follow the same number of environments each."""
        return {name: state[name].chunk(size)[rank] for name in self._host_state()}

    def take_joined(self, state: State) -> None:
        """Nothing: a metric of no environments in particular follows no episodes."""
