"""Whether two forms have computed the same, and what has to be put back before the second one computes."""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from alfx import context

_SINGLE = 2**13 * torch.finfo(torch.float32).eps  # 1e-3: thousands of roundings
_HALF = 2**5 * torch.finfo(torch.bfloat16).eps  # 0.25
_ALMOST_NOTHING = 1e-5  # of all parts together; below that a part is made of what rounding has left of larger numbers

Parts = Sequence[tuple[str, Tensor | None]]


def is_check_due(count: int) -> bool:
    """Whether a form is compared at its ``count``-th call: often at first, from then on at every 1024th."""
    return count % 1024 == 0 or (count < 1024 and count & (count - 1) == 0)


class State:
    """What a computation changes besides its results: the streams of random numbers and tensors that it writes to.

    Args:
        tensors: those that may be written to.
        devices: those of all tensors that are computed with.
    """

    def __init__(self, tensors: Sequence[Tensor], devices: set[torch.device]) -> None:
        self._tensors, self._values = tensors, [x.detach().clone() for x in tensors]
        self._on_host = torch.get_rng_state()
        self._on_devices = [(x, torch.cuda.get_rng_state(x)) for x in devices if x.type == 'cuda']

    def put_back(self) -> None:
        """Make all of it what it was."""
        for x, value in zip(self._tensors, self._values):
            x.detach().copy_(value)
        torch.set_rng_state(self._on_host)
        for device, state in self._on_devices:
            torch.cuda.set_rng_state(state, device)

    def has_same_streams(self, other: 'State') -> bool:
        """Whether the next random numbers would be the same."""
        return (torch.equal(self._on_host, other._on_host)
                and all(torch.equal(a, b) for (_, a), (_, b) in zip(self._on_devices, other._on_devices)))

    def parts(self, names: Sequence[str]) -> Parts:
        """The tensors, for :func:`difference`."""
        return [*zip(names, self._values)]


def difference(expected: Parts, found: Parts, tolerance: float) -> str | None:
    """Which part of two results differs and by how much; ``None`` if none does.

    With ``tolerance`` 0 they have to be equal to the bit. Otherwise the distance of two parts may be that much times
    their length; of gradients that nearly cancel out, it may also be a tiny part of the length of all gradients.
    """
    lengths = [_length(x) if tolerance else 0.0 for _, x in expected]
    total = sum(length**2 for (name, _), length in zip(expected, lengths) if name.startswith('the gradient'))**0.5
    for (name, a), (_, b), length in zip(expected, found, lengths, strict=True):
        if a is None or b is None:
            if a is not b:
                return f'{name} is {"missing" if b is None else "there, and should not be"}'
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f'{name} is {b.dtype} of shape {tuple(b.shape)} in place of {a.dtype} {tuple(a.shape)}'
        if torch.equal(a, b):
            continue
        reason = 'is another one'
        if tolerance and a.is_floating_point():
            distance = float(torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b), dtype=torch.float64))
            least = total if name.startswith('the gradient') else a.numel()**0.5
            if distance <= max(tolerance * length, _ALMOST_NOTHING * least):
                continue
            reason = f'differs by {distance / max(length, 1e-30):.2g} of its length, more than {tolerance:.2g}'
        if not torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
            return f'{name} {reason}'
    return None


def tolerance_of(record: Any, is_exact: bool) -> float:
    """How far results of a form may be apart from those of the one below it."""
    if is_exact and all(x.is_cpu for x in record.fixed):  # on a GPU, sums are not in the same order at each call
        return 0.0
    return _HALF if record.is_half else _SINGLE


def _length(x: Tensor | None) -> float:
    """Of what is finite, such as the logs of the probabilities that are not 0."""
    if x is None or not x.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(torch.where(x.isinf(), 0.0, x.detach()), dtype=torch.float64))


# Processes that train together --------------------------------------------------------------------------------------
#
# They do not record or compare at the same time (only the first of them writes summaries): a question too many would
# meet another one of theirs.


class _StandIn:
    """Takes the place of the ranks, and does some things in another way."""

    def __init__(self, ranks: Any, **instead: Callable[[Tensor], Any]) -> None:
        self._ranks = ranks
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def _in_place_of_ranks(**instead: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
    ranks = context.get_ranks()
    return context.training_with(None if ranks is None else _StandIn(ranks, **instead))


def no_collectives() -> AbstractContextManager[None]:
    """Context manager within which the other processes are taken to have the same tensors as this one."""
    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError('tensors are gathered from other processes, which is no recorded operation')

    return _in_place_of_ranks(all_reduce=lambda tensor: tensor.mul_(context.num_ranks()), gather=refuse)


def record_collectives(answers: list[Tensor]) -> AbstractContextManager[None]:
    """Context manager within which the other processes are asked, and what they answer is added to ``answers``."""
    ranks = context.get_ranks()

    def ask(tensor: Tensor) -> None:
        ranks.all_reduce(tensor)
        answers.append(tensor.clone())

    return _in_place_of_ranks(all_reduce=ask)


def replay_collectives(answers: list[Tensor]) -> AbstractContextManager[None]:
    """Context manager within which the same questions in the same order get these answers, and nobody is asked."""
    def repeat(tensor: Tensor) -> None:
        if not answers or answers[0].shape != tensor.shape:
            raise RuntimeError('other questions are asked of the other processes')
        tensor.copy_(answers.pop(0))

    return _in_place_of_ranks(all_reduce=repeat)
