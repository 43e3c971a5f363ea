"""The loss of several critics that are trained towards the same target."""
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class TDInfo(NamedTuple):
    """What a temporal difference loss reads of a sequence: ``[T, B]`` each, ``reward`` also ``[T, B, K]``."""

    reward: Tensor
    step_type: Tensor
    discount: Tensor


def loss_of_replicas(loss: Callable[..., Any], info: Any, critics: Tensor, target: Tensor) -> Tensor:
    """The loss of each critic. To ``loss`` they are further samples, so that it is called once.

    Args:
        loss: a :class:`~alfx.algorithms.td_loss.TDLoss` or the like.
        info: a record with the fields of :class:`TDInfo`.
        critics: ``[T, B, n, ...]``: the values to train.
        target: ``[T, B, ...]``: the values to bootstrap from, or ``[T, B, n, ...]``, of each critic its own.

    Returns:
        ``[T, B, n]``.
    """
    length, batch, count = critics.shape[:3]

    def for_each(x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(length, batch, count, *x.shape[2:]).flatten(1, 2)

    seen = TDInfo(for_each(info.reward), for_each(info.step_type), for_each(info.discount))
    targets = target.flatten(1, 2) if target.ndim == critics.ndim else for_each(target)
    return loss(seen, critics.flatten(1, 2), targets).loss.view(length, batch, count)
