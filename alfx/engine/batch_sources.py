"""Minibatches that are drawn from several sources at once: collected data, stored datasets, imagined steps.

A source is any object with the method ``get_batch`` of ``ReplayBuffer``. A :class:`BatchSource` sets how much of a
minibatch comes from it. An update then minimizes, with the steps of source ``s`` masked as usual,

    sum over sources s of  weight[s] * (mean loss of the samples of s)

This is the sum of the losses of one minibatch from each source. It is computed from a single minibatch ``[T, B]``, the
concatenation of all samples, in which the samples of ``s`` have the importance weight ``weight[s] * B /
batch_size[s]``. The networks therefore run once, and updates can be traced and compiled as usual. With ``weight[s] =
batch_size[s] / B`` the result is the plain mean over the minibatch.

Override ``Algorithm.batch_sources`` to add your own source::

    def batch_sources(self, collected):  # replace half of the batch with imagined data
        half = collected.batch_size // 2
        return [collected._replace(batch_size=half, weight=0.5), BatchSource(self._imagined, half, weight=0.5)]
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
    """Source of samples; a ``ReplayBuffer`` is one."""

    def get_batch(self, batch_size: int, batch_length: int) -> tuple[Experience, BatchInfo]:
        """Return experience ``[batch_size, batch_length, ...]``, not transformed, and its origin.

        It has the structure of the replay buffer, with ``()`` for missing fields. Fields that one source does not have
        are not trained on from any other source either.
        """


class BatchSource(NamedTuple):
    """Source of a part of each minibatch.

    Attributes:
        source: object with ``get_batch``.
        batch_size: number of sequences in a minibatch.
        weight: factor of their mean loss, a number or a schedule.
        is_offline: whether ``train_step_offline`` and ``calc_loss_offline`` compute the loss, if the algorithm
            overrides them.
    """

    source: Any
    batch_size: int
    weight: float | Callable[[], float] = 1.0
    is_offline: bool = False

    def current_weight(self) -> float:
        """Return the current weight."""
        return self.weight if isinstance(self.weight, (int, float)) else self.weight()


class SampleOrigin(NamedTuple):
    """Origin of some columns of a minibatch.

    Attributes:
        source: source that they were sampled from.
        batch_info: see ``ReplayBuffer.get_batch``.
    """

    source: BatchSource
    batch_info: BatchInfo


class Sample(NamedTuple):
    """Minibatch for an update.

    Attributes:
        experience: ``[T, B, ...]``; ``None`` if everything is in ``offline_batch``.
        offline_batch: ``[T, B, ...]`` whose losses the offline hooks compute; ``None`` if there is none. Its columns
            come after those of ``experience``.
        origins: origins of the columns, in order; empty if nothing was sampled.
        static_batch: memory that holds ``experience`` now and other samples later; ``None`` if there is none.
    """

    experience: Any
    offline_batch: Any = None
    origins: tuple[SampleOrigin, ...] = ()
    static_batch: StaticBatch | None = None

    @property
    def logged_batch(self) -> Experience:
        """Experience to summarize: collected data if there is any, else the offline batch."""
        return self.offline_batch if self.experience is None else self.experience


class Stage(enum.Enum):
    """Data that an iteration trains on."""

    ONLINE = 'collected data'
    PRETRAIN = 'stored datasets, before data is collected'
    OFFLINE = 'stored datasets'
    HYBRID = 'both'


def stage_of(settings: TrainerConfig, has_offline: bool, counter: int) -> Stage:
    """Return the data to train on in an iteration that begins when the global counter is ``counter``."""
    if not has_offline:
        return Stage.ONLINE
    if counter < settings.rl_train_after_update_steps:
        return Stage.PRETRAIN
    if not settings.collects or counter % settings.rl_train_every_update_steps:
        return Stage.OFFLINE
    return Stage.HYBRID


def weights_of(settings: TrainerConfig, origins: Sequence[SampleOrigin]) -> Tensor | tuple[()]:
    """Return the importance weights ``[B]`` of the columns of a minibatch; ``()`` if all are 1."""
    infos = [priority_updates.importance_weights(settings, origin.batch_info).importance_weights for origin in origins]
    if len(origins) == 1 and origins[0].source.current_weight() == 1.0:
        return infos[0]
    total = sum(origin.source.batch_size for origin in origins)
    factors = [origin.source.current_weight() * total / origin.source.batch_size for origin in origins]
    if all(factor == 1.0 for factor in factors) and not any(isinstance(x, Tensor) for x in infos):
        return ()
    device = context.get_default_device()  # device of samples and importance weights
    return torch.cat([x * factor if isinstance(x, Tensor) else torch.full((origin.source.batch_size, ), factor,
                                                                          device=device)
                      for x, factor, origin in zip(infos, factors, origins)])


def update_priorities(settings: TrainerConfig, origins: Sequence[SampleOrigin], loss_info: LossInfo) -> None:
    """Update the priorities of the sampled sequences, each in its own buffer, see :mod:`alfx.engine.priority_updates`.

    Args:
        settings: configuration of the run.
        origins: origins of the columns of the minibatch.
        loss_info: losses; ``priority`` is ``[B]``.
    """
    first = 0
    for source, batch_info in origins:
        end = first + source.batch_size
        if isinstance(source.source, ReplayBuffer):
            own_loss = loss_info
            if isinstance(loss_info.priority, Tensor):
                own_loss = loss_info._replace(priority=loss_info.priority[first:end])
            priority_updates.update_priorities(settings, source.source, batch_info, own_loss)
        first = end


def concatenate(collected: LossInfo, offline: LossInfo) -> LossInfo:
    """Concatenate the losses ``[T, B1]`` and ``[T, B2]`` of two minibatches to ``[T, B1 + B2]``; add scalar losses."""
    def both(name: str, join: Callable[[list[Tensor]], Tensor]) -> Any:
        found = [x for x in (getattr(collected, name), getattr(offline, name)) if isinstance(x, Tensor)]
        return join(found) if found else ()

    if isinstance(collected.loss, Tensor) != isinstance(offline.loss, Tensor):
        raise ValueError('calc_loss and calc_loss_offline: expected a loss [T, B] from both or from neither')
    return LossInfo(loss=both('loss', lambda x: torch.cat(x, 1)),
                    scalar_loss=both('scalar_loss', lambda x: torch.stack(x).sum()),
                    extra={'online': collected.extra, 'offline': offline.extra}, priority=both('priority', torch.cat))


class BatchConcatenator:
    """Concatenates samples. The leaves that they have in common are determined once per structure."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, tuple[list[list[int]], Any]] = {}

    def __call__(self, parts: Sequence[Experience]) -> Experience:
        """Concatenate the common leaves ``[T, B1, ...]``, ``[T, B2, ...]``, ... to ``[T, B1 + B2 + ..., ...]``."""
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
    """Return the nests with ``()`` for everything that is missing in one of them."""
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
