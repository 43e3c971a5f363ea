"""Comparison of two backends, and the state that has to be restored before the second one computes."""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from alfx import context

_SINGLE = 2**13 * torch.finfo(torch.float32).eps  # 1e-3: thousands of roundings
_HALF = 2**5 * torch.finfo(torch.bfloat16).eps  # 0.25
NEAR_MISS = 2**-5  # tolerance of gradients in a single verification: one element may have another gradient
_NEGLIGIBLE = 1e-5  # fraction of the norm of all gradients; smaller differences are rounding errors

Parts = Sequence[tuple[str, Tensor | None]]


def is_check_due(count: int) -> bool:
    """Return whether a backend is verified at its ``count``-th call: at powers of 2, then at every 1024th call."""
    return count % 1024 == 0 or (count < 1024 and count & (count - 1) == 0)


class State:
    """State that a computation changes besides its results: random number generators and written tensors.

    Args:
        tensors: tensors that may be written to.
        devices: devices of all tensors in the computation.
    """

    def __init__(self, tensors: Sequence[Tensor], devices: set[torch.device]) -> None:
        self._tensors, self._values = tensors, [x.detach().clone() for x in tensors]
        self._on_host = torch.get_rng_state()
        self._on_devices = [(x, torch.cuda.get_rng_state(x)) for x in devices if x.type == 'cuda']

    def restore(self) -> None:
        """Restore the tensors and the random number generators."""
        for x, value in zip(self._tensors, self._values):
            x.detach().copy_(value)
        torch.set_rng_state(self._on_host)
        for device, state in self._on_devices:
            torch.cuda.set_rng_state(state, device)

    def has_same_streams(self, other: 'State') -> bool:
        """Return whether the next random numbers would be the same."""
        return (torch.equal(self._on_host, other._on_host)
                and all(torch.equal(a, b) for (_, a), (_, b) in zip(self._on_devices, other._on_devices)))

    def parts(self, names: Sequence[str]) -> Parts:
        """Return the named tensors, for :func:`difference`."""
        return [*zip(names, self._values)]


def difference(expected: Parts, found: Parts, tolerance: float, least_of_gradients: float = 0.0) -> str | None:
    """Return which part of two results differs and by how much; ``None`` if none does.

    With ``tolerance`` 0 the results have to be bit-identical. Otherwise the distance between two parts may be up to
    ``tolerance`` times the norm of the expected part; for gradients this factor is at least ``least_of_gradients``.
    A gradient that nearly cancels out may also differ by a tiny fraction of the norm of all gradients.
    """
    lengths = [_length(x) if tolerance else 0.0 for _, x in expected]
    total = sum(length**2 for (name, _), length in zip(expected, lengths) if name.startswith('the gradient'))**0.5
    for (name, a), (_, b), length in zip(expected, found, lengths, strict=True):
        if a is None or b is None:
            if a is not b:
                return f'{name} is {"missing" if b is None else "unexpected"}'
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f'{name}: expected {a.dtype} of shape {tuple(a.shape)}, found {b.dtype} {tuple(b.shape)}'
        if torch.equal(a, b):
            continue
        reason = 'differs'
        if tolerance and a.is_floating_point():
            distance = float(torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b), dtype=torch.float64))
            is_gradient = name.startswith('the gradient')
            allowed = max(tolerance, least_of_gradients) if is_gradient else tolerance
            if distance <= max(allowed * length, _NEGLIGIBLE * (total if is_gradient else a.numel()**0.5)):
                continue
            reason = f'differs by {distance / max(length, 1e-30):.2g} of its norm, more than {allowed:.2g}'
        if not torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
            return f'{name} {reason}'
    return None


def tolerance_of(graph: Any, is_exact: bool) -> float:
    """Return the tolerance between the results of a backend and of its fallback."""
    if is_exact and all(x.is_cpu for x in graph.fixed):  # on a GPU the order of sums varies between calls
        return 0.0
    return _HALF if graph.is_half else _SINGLE


def _length(x: Tensor | None) -> float:
    """Norm of the finite elements; infinite ones occur, for example the log of a probability of 0."""
    if x is None or not x.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(torch.where(x.isinf(), 0.0, x.detach()), dtype=torch.float64))


# Processes that train together --------------------------------------------------------------------------------------
#
# Processes do not trace or verify at the same time (only rank 0 writes summaries). An additional collective in one of
# them would be matched with a different collective of the others.


class _RanksProxy:
    """Forwards to the ranks, except for some replaced methods."""

    def __init__(self, ranks: Any, **instead: Callable[[Tensor], Any]) -> None:
        self._ranks = ranks
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def _replaced_ranks(**instead: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
    ranks = context.get_ranks()
    return context.training_with(None if ranks is None else _RanksProxy(ranks, **instead))


def no_collectives() -> AbstractContextManager[None]:
    """Context manager without communication: the tensors of other processes are assumed to equal those of this one."""
    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError('it gathers tensors from other processes, which a graph cannot do')

    return _replaced_ranks(all_reduce=lambda tensor: tensor.mul_(context.num_ranks()), gather=refuse)


def record_collectives(results: list[Tensor]) -> AbstractContextManager[None]:
    """Context manager that performs collectives and appends their results to ``results``."""
    ranks = context.get_ranks()

    def all_reduce(tensor: Tensor) -> None:
        ranks.all_reduce(tensor)
        results.append(tensor.clone())

    return _replaced_ranks(all_reduce=all_reduce)


def replay_collectives(results: list[Tensor]) -> AbstractContextManager[None]:
    """Context manager in which the same collectives, in the same order, return ``results`` without communication."""
    def repeat(tensor: Tensor) -> None:
        if not results or results[0].shape != tensor.shape:
            raise RuntimeError('it communicates with the other processes in a different order')
        tensor.copy_(results.pop(0))

    return _replaced_ranks(all_reduce=repeat)
