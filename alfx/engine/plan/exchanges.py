"""Processes that train together, while a record is made or compared: no other one is asked a question more than needed.

The others do not record or compare at the same time (only the first of them writes summaries), so that a question too
many would meet another one of theirs.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from alfx import context


class _StandIn:
    """Takes the place of the ranks; exchanges tensors in another way."""

    def __init__(self, ranks: Any, add_up: Callable[[Tensor], Any]) -> None:
        self._ranks, self.add_up = ranks, add_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


@contextmanager
def nobody_asked() -> Iterator[None]:
    """Context manager within which the other processes are taken to have the same tensors as this one."""
    ranks = context.get_ranks()
    if ranks is None:
        yield
        return

    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError('tensors are gathered from other processes, which is no recorded operation')

    stand_in = _StandIn(ranks, lambda tensor: tensor.mul_(ranks.size))
    stand_in.gather = refuse  # type: ignore[attr-defined]
    with context.training_with(stand_in):
        yield


class Answers:
    """What the other processes have answered, to be given again."""

    def __init__(self) -> None:
        self._given: list[Tensor] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager within which the others are asked, and their answers are kept."""
        ranks = context.get_ranks()

        def ask(tensor: Tensor) -> None:
            ranks.add_up(tensor)
            self._given.append(tensor.clone())

        with context.training_with(None if ranks is None else _StandIn(ranks, ask)):
            yield

    @contextmanager
    def given_again(self) -> Iterator[None]:
        """Context manager within which the same questions in the same order get the same answers."""
        ranks, left = context.get_ranks(), list(self._given)

        def repeat(tensor: Tensor) -> None:
            if not left or left[0].shape != tensor.shape:
                raise RuntimeError('other questions are asked of the other processes')
            tensor.copy_(left.pop(0))

        with context.training_with(None if ranks is None else _StandIn(ranks, repeat)):
            yield
