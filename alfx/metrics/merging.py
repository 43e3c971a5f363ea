"""Mixins that merge the metric states of several processes into one state, and split one state into several.

Each class is a base class of metrics with this kind of state. ``join_states`` merges several states into one;
``split_state`` returns the part of one of ``size`` processes; ``take_joined`` loads the result of ``join_states``
into a metric that observes no steps itself.
"""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

State = dict[str, torch.Tensor]


class MergesRings:
    """Mixin for a ring of the last values: ``_values`` and ``_count``."""

    _values: np.ndarray
    _count: np.ndarray
    _max_len: int

    def join_states(self, states: Sequence[State]) -> State:
        """Return the state of one ring for the values of several rings of this size; the newest of each are kept."""
        rings = [ring[np.arange(max(count - len(ring), 0), count) % len(ring)] for ring, count in
                 ((state['values'].numpy(), int(state['count'])) for state in states)]
        longest = max(map(len, rings))  # interleaved, so that values of the same age are adjacent
        newest = [ring[len(ring) - age] for age in range(longest, 0, -1) for ring in rings if len(ring) >= age]
        return self._packed(newest[-self._max_len:])

    def split_state(self, state: State, rank: int, size: int) -> State:
        """Return the state of one of ``size`` rings that together contain the values of one."""
        values, count = state['values'].numpy(), int(state['count'])
        ordered = values[np.arange(max(count - len(values), 0), count) % len(values)]
        return self._packed(list(ordered[rank::size]))

    def take_joined(self, state: State) -> None:
        """Load the result of :meth:`join_states`."""
        self._values[...], self._count[...] = state['values'].numpy(), int(state['count'])

    def _packed(self, values: list[np.ndarray]) -> State:
        ring = np.zeros_like(self._values)
        if values:
            ring[:len(values)] = np.stack(values)
        return {'values': torch.from_numpy(ring), 'count': torch.tensor(len(values))}


class MergesCounts:
    """Mixin for a counter: ``_count``."""

    _count: np.ndarray

    def set(self, count: int) -> None:
        """Continue from ``count``."""
        self._count.fill(count)

    def join_states(self, states: Sequence[State]) -> State:
        """Return the state of one counter with the sum of several."""
        return {'count': torch.stack([state['count'] for state in states]).sum()}

    def split_state(self, state: State, rank: int, size: int) -> State:
        """Return the state of one of ``size`` counters whose sum is this one: the first gets the whole count."""
        return state if rank == 0 else {'count': torch.zeros_like(state['count'])}

    def take_joined(self, state: State) -> None:
        """Load the result of :meth:`join_states`."""
        self.set(int(state['count']))


class MergesEpisodes:
    """Mixin for values accumulated over the running episodes of environments: arrays ``[B, ...]``."""

    _host_state: Any

    def join_states(self, states: Sequence[State]) -> State:
        """Return the state with the running episodes of all environments of several metrics, concatenated."""
        return {name: torch.cat([state[name] for state in states]) for name in self._host_state()}

    def split_state(self, state: State, rank: int, size: int) -> State:
        """Return the state of one of ``size`` metrics with the same number of environments each."""
        return {name: state[name].chunk(size)[rank] for name in self._host_state()}

    def take_joined(self, state: State) -> None:
        """Do nothing: a metric that observes no environments has no running episodes."""
