"""Minibatches that are drawn from several sources at once: own experience, stored datasets, imagined steps.

A source is whatever has ``get_batch`` as ``ReplayBuffer`` has it; a :class:`Share` says how much of a minibatch comes
from it. An update then minimises, with the steps of ``s`` masked as always,

    sum over shares s of  weight[s] * (mean loss of the samples of s)

which is the sum of the losses of one minibatch from each. It is computed from one minibatch ``[T, B]`` that holds all
samples side by side, those of ``s`` with the importance weight ``weight[s] * B / batch_size[s]``: one pass of the
networks, and whatever records or compiles updates sees one like any other. With ``weight[s] = batch_size[s] / B`` it is
the plain mean over the whole minibatch.

To mix in a source of one's own, override ``Algorithm.batch_sources``::

    def batch_sources(self, share):  # half of it imagined
        half = share.batch_size // 2
        return [share._replace(batch_size=half, weight=0.5), Share(self._imagined, half, weight=0.5)]
"""
import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from alfx import context, nest
from alfx.config import TrainerConfig
from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine import priority_updates
from alfx.experience_replayers.batch_reader import StaticBatch
from alfx.experience_replayers.replay_buffer import ReplayBuffer


class Source(Protocol):
    """Where samples come from; a ``ReplayBuffer`` is one."""

    def get_batch(self, batch_size: int, batch_length: int) -> tuple[Experience, BatchInfo]:
        """Experience ``[batch_size, batch_length, ...]``, untransformed, and where it came from.

        Its nest is that of the replay buffer, with ``()`` for what is not known; of that no source is trained on what
        another does not know.
        """


class BatchSource(NamedTuple):
    """How much of each minibatch comes from a source.

    Attributes:
        source: where from.
        batch_size: so many sequences.
        weight: factor of their mean loss, a number or a schedule.
        is_offline: whether ``train_step_offline`` and ``calc_loss_offline`` compute that loss, if they differ.
    """

    source: Any
    batch_size: int
    weight: float | Callable[[], float] = 1.0
    is_offline: bool = False

    def current_weight(self) -> float:
        """The factor now."""
        return self.weight if isinstance(self.weight, (int, float)) else self.weight()


class SampleOrigin(NamedTuple):
    """Where some columns of a minibatch came from."""

    share: BatchSource
    batch_info: BatchInfo


class Sample(NamedTuple):
    """What an update is made from.

    Attributes:
        experience: ``[T, B, ...]``; ``None`` if all is kept apart.
        offline_batch: ``[T, B, ...]``, whose losses the offline hooks compute; ``None`` if there is nothing of that
            kind. Its columns come after those of ``experience``.
        origins: where the columns came from, in order; empty for what is not sampled.
        slot: the memory that holds ``experience`` now and other samples later, if there is any.
    """

    experience: Any
    offline_batch: Any = None
    origins: tuple[SampleOrigin, ...] = ()
    slot: StaticBatch | None = None

    @property
    def logged_batch(self) -> Experience:
        """What is shown as trained on: own experience, where there is any."""
        return self.offline_batch if self.experience is None else self.experience


class Stage(enum.Enum):
    """What an iteration trains on."""

    ONLINE = 'own experience'
    PRETRAIN = 'stored datasets, before anything is collected'
    OFFLINE = 'stored datasets'
    HYBRID = 'both'


def stage_of(settings: TrainerConfig, has_offline: bool, counter: int) -> Stage:
    """What an iteration trains on that begins when the global counter is ``counter``."""
    if not has_offline:
        return Stage.ONLINE
    if counter < settings.rl_train_after_update_steps:
        return Stage.PRETRAIN
    if not settings.collects or counter % settings.rl_train_every_update_steps:
        return Stage.OFFLINE
    return Stage.HYBRID


def weights_of(settings: TrainerConfig, origins: Sequence[SampleOrigin]) -> Tensor | tuple[()]:
    """Weights ``[B]`` of the columns of a minibatch; ``()`` if all are 1."""
    infos = [priority_updates.importance_weights(settings, origin.batch_info).importance_weights for origin in origins]
    if len(origins) == 1 and origins[0].share.current_weight() == 1.0:
        return infos[0]
    total = sum(origin.share.batch_size for origin in origins)
    factors = [origin.share.current_weight() * total / origin.share.batch_size for origin in origins]
    if all(factor == 1.0 for factor in factors) and not any(isinstance(x, Tensor) for x in infos):
        return ()
    device = context.get_default_device()  # where samples come to, and their importance weights
    return torch.cat([x * factor if isinstance(x, Tensor) else torch.full((origin.share.batch_size, ), factor,
                                                                          device=device)
                      for x, factor, origin in zip(infos, factors, origins)])


def update_priorities(settings: TrainerConfig, origins: Sequence[SampleOrigin], loss_info: LossInfo) -> None:
    """Give the sampled sequences new priorities, each in the buffer that it came from; see
    ``engine/priority_updates.py``.

    Args:
        settings: of the run.
        origins: of the columns of the minibatch.
        loss_info: ``priority`` is ``[B]``.
    """
    first = 0
    for share, batch_info in origins:
        end = first + share.batch_size
        if isinstance(share.source, ReplayBuffer):
            of_share = loss_info
            if isinstance(loss_info.priority, Tensor):
                of_share = loss_info._replace(priority=loss_info.priority[first:end])
            priority_updates.update_priorities(settings, share.source, batch_info, of_share)
        first = end


def concatenate(own: LossInfo, offline: LossInfo) -> LossInfo:
    """The losses ``[T, B1]`` and ``[T, B2]`` of two minibatches as ``[T, B1 + B2]``; scalar losses are added up."""
    def both(name: str, join: Callable[[list[Tensor]], Tensor]) -> Any:
        found = [x for x in (getattr(own, name), getattr(offline, name)) if isinstance(x, Tensor)]
        return join(found) if found else ()

    if isinstance(own.loss, Tensor) != isinstance(offline.loss, Tensor):
        raise ValueError('calc_loss and calc_loss_offline have to return a loss [T, B] both, or neither')
    return LossInfo(loss=both('loss', lambda x: torch.cat(x, 1)),
                    scalar_loss=both('scalar_loss', lambda x: torch.stack(x).sum()),
                    extra={'online': own.extra, 'offline': offline.extra}, priority=both('priority', torch.cat))


class BatchConcatenator:
    """Puts samples side by side. Which of their leaves all have is found out once."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, tuple[list[list[int]], Any]] = {}

    def __call__(self, parts: Sequence[Experience]) -> Experience:
        """``[T, B1, ...]``, ``[T, B2, ...]``, ... to ``[T, B1 + B2 + ..., ...]``, of the leaves that all have."""
        if len(parts) == 1:
            return parts[0]
        flat = [nest.flatten_with_structure(part) for part in parts]
        key = tuple(tree for _, tree in flat)
        if key not in self._plans:
            numbered = [nest.unflatten(tree, list(range(len(leaves)))) for leaves, tree in flat]
            common = _common(numbered)
            self._plans[key] = [nest.flatten(x) for x in common], nest.structure(common[0])
        indices, tree = self._plans[key]
        chosen = [[leaves[i] for i in own] for (leaves, _), own in zip(flat, indices)]
        return nest.unflatten(tree, [torch.cat(columns, 1) for columns in zip(*chosen)])


def _common(parts: list[Any]) -> list[Any]:
    """The nests with ``()`` in place of all that one of them does not have."""
    first = parts[0]
    if all(isinstance(part, int) for part in parts):
        return parts
    if any(type(part) is not type(first) for part in parts):
        return [() for _ in parts]
    if isinstance(first, dict):
        keys = [key for key in first if all(key in part for part in parts)]
        columns = {key: _common([part[key] for part in parts]) for key in keys}
        return [type(first)((key, columns[key][i]) for key in keys) for i in range(len(parts))]
    if any(len(part) != len(first) for part in parts):
        return [() for _ in parts]
    children = [_common(list(of_each)) for of_each in zip(*parts)]
    made = [[child[i] for child in children] for i in range(len(parts))]
    return [type(first)(*x) if hasattr(first, '_fields') else type(first)(x) for x in made]
