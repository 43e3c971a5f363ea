"""The states of several ranks as the state of one process, and the reverse.

Most of an algorithm is the same in all ranks. What belongs to environments is joined along their dimension: the replay
buffer and the episodes that metrics follow. Counters are added up. What parts keep by themselves of what they have seen
and share with nobody (samples of a mutual information estimator, how often codes were used) is that of rank 0.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]
_EXTRA, _BUFFER = '_extra_state', 'replay_buffer'


def _shared_parts(algorithm: nn.Module) -> dict[str, Any]:
    """The parts by key prefix that can join their states."""
    return {f'{name}.': part for name, part in algorithm.named_modules() if hasattr(part, 'join_states')}


def own_share(algorithm: Any, state: State) -> State:
    """The part of the state of this rank's ``algorithm`` that the other ranks have differently."""
    prefixes = tuple(_shared_parts(algorithm))
    share = {key: value for key, value in state.items() if key.startswith(prefixes)}
    if _BUFFER in state.get(_EXTRA, {}):
        share[_EXTRA] = state[_EXTRA][_BUFFER]
    return share


def joined(algorithm: Any, state: State, shares: Sequence[State]) -> State:
    """``state`` of one rank with the shares of all of them joined."""
    state = dict(state)
    for prefix, part in _shared_parts(algorithm).items():
        own = [_below(prefix, share) for share in shares]
        state.update({prefix + key: value for key, value in part.join_states(own).items()})
    if _EXTRA in shares[0]:
        buffer = algorithm.replay_buffer.join_states([share[_EXTRA] for share in shares])
        state[_EXTRA] = {**state[_EXTRA], _BUFFER: buffer}
    return state


def with_counters(algorithm: Any, state: State, counters: dict[str, int]) -> State:
    """``state`` with these values of the counting metrics, by name."""
    for prefix, part in _shared_parts(algorithm).items():
        if getattr(part, 'name', None) in counters:
            state = {**state, f'{prefix}count': torch.tensor(counters[part.name])}
    return state


def share_of(algorithm: Any, state: State, rank: int, size: int) -> State:
    """The part that one of ``size`` ranks has of the state of one process."""
    state = dict(state)
    for prefix, part in _shared_parts(algorithm).items():
        own = part.share_of_state(_below(prefix, state), rank, size)
        state.update({prefix + key: value for key, value in own.items()})
    if _BUFFER in state.get(_EXTRA, {}) and state[_EXTRA][_BUFFER]:
        buffer = algorithm.replay_buffer.share_of_state(state[_EXTRA][_BUFFER], rank, size)
        state[_EXTRA] = {**state[_EXTRA], _BUFFER: buffer}
    return state


def _below(prefix: str, state: State) -> State:
    """The entries of a part's own tensors, without those of its parts."""
    return {key.removeprefix(prefix): value for key, value in state.items()
            if key.startswith(prefix) and '.' not in key.removeprefix(prefix)}


def metric_states(algorithm: Any) -> list[State]:
    """The state of each metric."""
    return [{name: part.state_dict() for name, part in _joinable(metric)} for metric in algorithm.get_metrics()]


def load_metrics(metrics: Sequence[Any], states: Sequence[list[State]]) -> None:
    """Give ``metrics``, which are of no rank in particular, what those of all ranks have seen.

    Args:
        metrics: the metrics of the whole.
        states: :func:`metric_states` of each rank.
    """
    for i, metric in enumerate(metrics):
        for name, part in _joinable(metric):
            own: list[dict[str, Tensor]] = [_top(state[i][name]) for state in states]
            part.take_joined(part.join_states(own))


def _joinable(metric: nn.Module) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in metric.named_modules() if hasattr(part, 'join_states')]


def _top(state: State) -> State:
    return {key: value for key, value in state.items() if '.' not in key}
