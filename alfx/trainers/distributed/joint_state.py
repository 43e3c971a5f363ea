"""Conversion between the states of several ranks and the state of a single process.

Most of the state of an algorithm is equal on all ranks. State that belongs to environments (the replay buffer and the
running episodes of metrics) is concatenated along the environment dimension. Counters are summed. Local statistics that
ranks do not share (samples of a mutual information estimator, usage counts of codes) are taken from rank 0.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]
_EXTRA, _BUFFER = '_extra_state', 'replay_buffer'


def _shared_parts(algorithm: nn.Module) -> dict[str, Any]:
    """Return the parts that can join their states, by key prefix."""
    return {f'{name}.': part for name, part in algorithm.named_modules() if hasattr(part, 'join_states')}


def own_share(algorithm: Any, state: State) -> State:
    """Return the part of the state of ``algorithm`` that differs between ranks."""
    prefixes = tuple(_shared_parts(algorithm))
    share = {key: value for key, value in state.items() if key.startswith(prefixes)}
    if _BUFFER in state.get(_EXTRA, {}):
        share[_EXTRA] = state[_EXTRA][_BUFFER]
    return share


def joined(algorithm: Any, state: State, shares: Sequence[State]) -> State:
    """Return the ``state`` of one rank with the shares of all ranks joined."""
    state = dict(state)
    for prefix, part in _shared_parts(algorithm).items():
        own = [_below(prefix, share) for share in shares]
        state.update({prefix + key: value for key, value in part.join_states(own).items()})
    if _EXTRA in shares[0]:
        buffer = algorithm.replay_buffer.join_states([share[_EXTRA] for share in shares])
        state[_EXTRA] = {**state[_EXTRA], _BUFFER: buffer}
    return state


def with_counters(algorithm: Any, state: State, counters: dict[str, int]) -> State:
    """Return ``state`` with the given values of the counting metrics, by name."""
    for prefix, part in _shared_parts(algorithm).items():
        if getattr(part, 'name', None) in counters:
            state = {**state, f'{prefix}count': torch.tensor(counters[part.name])}
    return state


def share_of(algorithm: Any, state: State, rank: int, size: int) -> State:
    """Return the part of the state of a single process that belongs to one of ``size`` ranks."""
    state = dict(state)
    for prefix, part in _shared_parts(algorithm).items():
        own = part.split_state(_below(prefix, state), rank, size)
        state.update({prefix + key: value for key, value in own.items()})
    if _BUFFER in state.get(_EXTRA, {}) and state[_EXTRA][_BUFFER]:
        buffer = algorithm.replay_buffer.split_state(state[_EXTRA][_BUFFER], rank, size)
        state[_EXTRA] = {**state[_EXTRA], _BUFFER: buffer}
    return state


def _below(prefix: str, state: State) -> State:
    """Return the tensors that a part owns directly, without the tensors of its children."""
    return {key.removeprefix(prefix): value for key, value in state.items()
            if key.startswith(prefix) and '.' not in key.removeprefix(prefix)}


def metric_states(algorithm: Any) -> list[State]:
    """Return the state of each metric."""
    return [{name: part.state_dict() for name, part in _joinable(metric)} for metric in algorithm.get_metrics()]


def load_metrics(metrics: Sequence[Any], states: Sequence[list[State]]) -> None:
    """Load the joined metric states of all ranks.

    Args:
        metrics: metrics over all ranks.
        states: results of :func:`metric_states` on each rank.
    """
    for i, metric in enumerate(metrics):
        for name, part in _joinable(metric):
            own: list[dict[str, Tensor]] = [_below('', state[i][name]) for state in states]
            part.take_joined(part.join_states(own))


def _joinable(metric: nn.Module) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in metric.named_modules() if hasattr(part, 'join_states')]
