"""Step metrics: counters, and averages over the last few episodes.

Every metric observes the time steps of a batched environment, one at a time (``metric(time_step)``) or a whole unroll
at once (``metric.call_sequence(time_steps)``, ``update_metrics`` for several metrics); both give the same result. A
quantity always belongs to a single episode of a single environment and is never a sum over environments. Only the
environment's own reward counts: intrinsic rewards are added later.

The state of a metric is saved and restored with the module that contains it. It stays on the host.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from alfx import gin_utils, nest, summary
from alfx.data_structures import TimeStep
from alfx.gin_utils.value_checks import Fraction
from alfx.metrics.host_module import HostModule
from alfx.metrics.merging import MergesCounts, MergesEpisodes
from alfx.metrics.metric_buffer import MetricBuffer
from alfx.metrics.segments import INITIAL, UFUNC, StepSequence, aggregate, reduction_of, to_host

def update_metrics(metrics: Iterable[Any], time_steps: TimeStep, stacked: bool = True) -> None:
    """Update several metrics with the same steps; shared intermediate results are computed once.

    Args:
        metrics: the metrics to update.
        time_steps: ``[T, B, ...]``, or ``[B, ...]`` with ``stacked=False``.
        stacked: ``time_steps`` has the time dimension.
    """
    steps = StepSequence(time_steps, stacked)
    for metric in metrics:
        metric.update(steps)


class StepMetric(HostModule):
    """Base class of all metrics.

    Args:
        name: name of the summary.
        prefix: summaries are written below this name.
        dtype: dtype of the result.
    """

    def __init__(self, name: str, prefix: str = 'Metrics', dtype: torch.dtype = torch.float32):
        super().__init__()
        self.name = name
        self.prefix = prefix
        self._dtype = dtype

    def forward(self, time_step: TimeStep) -> None:
        """Update the metric with one time step ``[B, ...]``."""
        self.update(StepSequence(time_step, stacked=False))

    call = forward

    def call_sequence(self, time_steps: TimeStep) -> None:
        """Update the metric with consecutive time steps ``[T, B, ...]``; the result is the same as after T calls."""
        self.update(StepSequence(time_steps, stacked=True))

    def update(self, steps: StepSequence) -> None:
        """Update the metric with a prepared sequence; see ``update_metrics``."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the current value: a tensor, or a nest of tensors."""
        raise NotImplementedError

    def has_result(self) -> bool:
        """Return whether ``result()`` is based on any data."""
        return True

    def reset(self) -> None:
        """Clear all data."""
        raise NotImplementedError

    def gen_summaries(self, train_step: int | None = None, step_metrics: Iterable[Any] = ()) -> None:
        """Write the result as scalars, against the global counter and against each of ``step_metrics``.

        Args:
            train_step: the step to write against; ``None``: the global counter.
            step_metrics: counters such as ``EnvironmentSteps``: for each of them ``<prefix>_vs_<its name>/<name>`` is
                written with its value as the step.
        """
        if not summary.should_record_summaries() or not self.has_result():
            return
        for path, value in _named_scalars(self.name, self.result()):
            summary.scalar(f'{self.prefix}/{path}', value, step=train_step)
            for metric in step_metrics:
                if metric is not self:
                    step = metric.count if isinstance(metric, _Counter) else int(metric.result())
                    summary.scalar(f'{self.prefix}_vs_{metric.name}/{path}', value, step=step)


def _named_scalars(name: str, result: Any) -> list[tuple[str, float]]:
    if isinstance(result, torch.Tensor) and result.ndim == 0:
        return [(name, result.item())]
    named = []
    for path, value in nest.flatten_with_path(result):
        base = f'{name}/{path}' if path else name
        values = value.reshape(-1).tolist()
        named += [(base, values[0])] if value.ndim == 0 else [(f'{base}/{i}', v) for i, v in enumerate(values)]
    return named


class _Counter(MergesCounts, StepMetric):
    """Base class of counters."""

    def __init__(self, name: str, prefix: str, dtype: torch.dtype):
        super().__init__(name, prefix, dtype)
        self._count = np.zeros((), dtype=np.int64)

    def _host_state(self) -> dict[str, np.ndarray]:
        return {'count': self._count}

    @property
    def count(self) -> int:
        """Count as a number."""
        return int(self._count)

    def _add(self, number: int) -> None:
        count = self._count  # in place: setting an attribute of a module is slow
        count += number

    def result(self) -> torch.Tensor:
        """Return the count, ``[]``."""
        return torch.tensor(self._count, dtype=self._dtype, device='cpu')

    def reset(self) -> None:
        """Count from 0 again."""
        self._count.fill(0)


class EnvironmentSteps(_Counter):
    """Number of steps taken in all environments. FIRST steps are the result of a reset and are not counted."""

    def __init__(self, name: str = 'EnvironmentSteps', prefix: str = 'Metrics', dtype: torch.dtype = torch.int64):
        super().__init__(name, prefix, dtype)

    def update(self, steps: StepSequence) -> None:
        """Add the number of steps that are not FIRST."""
        self._add(steps.num_transitions)


class NumberOfEpisodes(_Counter):
    """Number of episodes that ended, in all environments."""

    def __init__(self, name: str = 'NumberOfEpisodes', prefix: str = 'Metrics', dtype: torch.dtype = torch.int64):
        super().__init__(name, prefix, dtype)

    def update(self, steps: StepSequence) -> None:
        """Add the number of LAST steps."""
        if steps.num_ended:
            self._add(steps.num_ended)

    def std(self) -> torch.Tensor:
        """Return 0: a count has no spread."""
        return torch.zeros(())


class AverageEpisodicAggregationMetric(MergesEpisodes, StepMetric):
    """Base class of averages of a per-episode quantity over the last episodes.

    A subclass returns the quantity of each step in ``_extract_values``; this class sums it (or takes its mean, maximum
    or minimum) over the steps of each episode, excluding FIRST, and keeps the last ``buffer_size`` episodes.

    Args:
        name: name of the summary.
        prefix: summaries are written below this name.
        dtype: dtype of the result.
        buffer_size: number of episodes in the average.
        example_time_step: a ``[B, ...]`` time step, for the number of environments and the shapes.
    """

    def __init__(self, name: str = 'AverageEpisodicAggregationMetric', prefix: str = 'Metrics',
                 dtype: torch.dtype = torch.float32, buffer_size: int = 10, example_time_step: TimeStep | None = None):
        super().__init__(name, prefix, dtype)
        if example_time_step is None:
            raise ValueError(f'{name}: example_time_step is required, for the number of environments')
        batch_size = example_time_step.step_type.shape[0]
        example = self._example_values(example_time_step)
        leaves = nest.flatten_with_path(example)
        self._structure = nest.map_structure(lambda x: 0, example)
        self.finished: list[np.ndarray] | None = None  # a list collects the values of each episode that ends
        self._reductions = [reduction_of(path) for path, _ in leaves]
        self._length = np.zeros(batch_size, dtype=np.int64)
        self._accumulated = [np.full((batch_size, *leaf.shape[1:]), INITIAL[reduction])
                             for (_, leaf), reduction in zip(leaves, self._reductions)]
        self.buffers_of_episodes = nn.ModuleList(MetricBuffer(buffer_size, dtype, leaf.shape[1:]) for _, leaf in leaves)

    def _host_state(self) -> dict[str, np.ndarray]:
        return {'length': self._length, **{f'accumulated{i}': a for i, a in enumerate(self._accumulated)}}

    def _example_values(self, time_step: TimeStep) -> Any:
        """Return a nest of tensors ``[B, ...]`` with the shapes of ``_extract_values``, without T."""
        return time_step.reward

    def _extract_values(self, steps: StepSequence) -> list[np.ndarray]:
        """Return ``[B, T, ...]`` arrays to aggregate, with the neutral element (0 for a sum) at FIRST."""
        raise NotImplementedError

    def update(self, steps: StepSequence) -> None:
        """Continue the running episodes and store those that end."""
        if steps.batch_size != len(self._length):
            raise ValueError(f'{self.name}: expected {len(self._length)} environments, found {steps.batch_size}')
        values = self._extract_values(steps)
        if not steps.crosses_boundary:
            for value, accumulated, reduction in zip(values, self._accumulated, self._reductions):
                ufunc = UFUNC[reduction]
                ufunc(accumulated, ufunc.reduce(value, axis=1), out=accumulated)
            self._length += steps.num_steps
            return
        positions, ended = steps.positions(self._length), steps.segments.ended
        for value, accumulated, reduction, buffer in zip(values, self._accumulated, self._reductions, self._rings()):
            total = aggregate(steps, value, accumulated, reduction)
            if positions.length is not None and steps.num_ended:
                length = positions.length[ended]
                done = self._mean(total[ended], length) if reduction == 'mean' else total[ended]
                finished = self._finish(done, length)
                buffer.extend(finished)
                if self.finished is not None:
                    self.finished.extend(finished)
        self._length[...] = positions.final

    def _finish(self, total: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the values to store for n episodes, from their totals ``[n, ...]`` and lengths ``[n]``."""
        return total

    @staticmethod
    def _mean(total: np.ndarray, length: np.ndarray) -> np.ndarray:
        return total / np.maximum(length, 1).reshape(-1, *(1, ) * (total.ndim - 1))

    def has_result(self) -> bool:
        """Return whether an episode has ended."""
        return all(len(buffer) for buffer in self._rings())

    def result(self) -> Any:
        """Return the mean over the last episodes; 0 before the first one ended."""
        return self._pack([buffer.mean() for buffer in self._rings()])

    def std(self) -> Any:
        """Return the standard deviation over the last episodes."""
        return self._pack([buffer.std() for buffer in self._rings()])

    def latest(self) -> Any:
        """Return the value of the episode that ended last."""
        return self._pack([buffer.latest() for buffer in self._rings()])

    def episodes(self) -> list[np.ndarray]:
        """Return the values of the last episodes, oldest first, float64 ``[n, ...]`` for each leaf of the result."""
        return [buffer.values() for buffer in self._rings()]

    def _rings(self) -> list[MetricBuffer]:
        return list(self.buffers_of_episodes)  # type: ignore[arg-type]

    def _pack(self, values: list[torch.Tensor]) -> Any:
        return nest.pack_sequence_as(self._structure, values)

    def _reset_running(self) -> None:
        self._length.fill(0)
        for accumulated, reduction in zip(self._accumulated, self._reductions):
            accumulated.fill(INITIAL[reduction])

    def reset(self) -> None:
        """Clear all episodes, including the running ones."""
        self._reset_running()
        for buffer in self._rings():
            buffer.clear()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        # The running episodes belong to the environments of the checkpoint: with another number of environments
        # (play, evaluation) they start from scratch.
        saved = state_dict.get(prefix + 'length')
        if saved is not None and len(saved) != len(self._length):
            self._reset_running()
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)


class AverageReturnMetric(AverageEpisodicAggregationMetric):
    """Average undiscounted return; ``[]``, or ``[K]`` for K-dimensional rewards.

    Args:
        example_time_step: a ``[B, ...]`` time step, for the number of environments and the shapes.
        name: name of the summary.
        prefix: summaries are written below this name.
        dtype: dtype of the result.
        buffer_size: number of episodes in the average.
    """

    def __init__(self, example_time_step: TimeStep, name: str = 'AverageReturn', prefix: str = 'Metrics',
                 dtype: torch.dtype = torch.float32, buffer_size: int = 10):
        super().__init__(name, prefix, dtype, buffer_size, example_time_step)

    def _extract_values(self, steps: StepSequence) -> list[np.ndarray]:
        return [steps.reward]


@gin_utils.configurable
class AverageDiscountedReturnMetric(AverageEpisodicAggregationMetric):
    r"""Discounted return, averaged over all states of an episode, then over episodes.

    With rewards :math:`r_1, \ldots, r_L` the return from state t is
    :math:`G_t = \sum_{i>t} \gamma^{i-t-1} r_i`, and the mean of the L returns is
    :math:`\frac{1}{L}\sum_i r_i \frac{1-\gamma^i}{1-\gamma}`. Rewards after a truncation are not estimated.

    Args:
        discount: :math:`\gamma`, in ``[0, 1]``.
        reward_transformer: applied to the float64 ``[B, T]`` (or ``[B, T, K]``) reward tensor first.
        kwargs: arguments of :class:`AverageReturnMetric`.
    """

    @gin_utils.takes_arguments_of(AverageReturnMetric, defaults={'name': 'AverageDiscountedReturn'},
                                  after={'discount': 'dtype'})
    def __init__(self, name: str, discount: Fraction = 0.99, reward_transformer: Callable | None = None, **kwargs: Any):
        self._discount = discount
        super().__init__(name=name, **kwargs)
        self._reward_transformer = reward_transformer

    def _extract_values(self, steps: StepSequence) -> list[np.ndarray]:
        reward = steps.reward
        if self._reward_transformer is not None:
            reward = to_host(self._reward_transformer(torch.from_numpy(reward)))
            reward = steps.without_first(reward, 0.0)
        position = steps.positions(self._length).position
        if self._discount == 1.0:
            weight = position.astype(np.float64)
        else:
            weight = (1.0 - np.power(self._discount, position)) / (1.0 - self._discount)
        return [reward * (weight if reward.ndim == 2 else weight[..., None])]

    def _finish(self, total: np.ndarray, length: np.ndarray) -> np.ndarray:
        return self._mean(total, length)


@gin_utils.configurable
class EpisodicStartAverageDiscountedReturnMetric(AverageEpisodicAggregationMetric):
    r"""Discounted return from the first state of an episode, :math:`\sum_i \gamma^{i-1} r_i`.

    Args:
        discount: :math:`\gamma`, in ``[0, 1]``.
        kwargs: arguments of :class:`AverageReturnMetric`, except ``dtype``.
    """

    @gin_utils.takes_arguments_of(
        AverageReturnMetric, without=('dtype', ), defaults={'name': 'EpisodicStartAverageDiscountedReturn'},
        after={'discount': 'buffer_size'})
    def __init__(self, name: str, discount: Fraction = 0.99, **kwargs: Any):
        self._discount = discount
        super().__init__(name=name, dtype=torch.float32, **kwargs)

    def _extract_values(self, steps: StepSequence) -> list[np.ndarray]:
        position = steps.positions(self._length).position
        weight = np.power(float(self._discount), np.maximum(position - 1, 0))
        return [steps.reward * (weight if steps.reward.ndim == 2 else weight[..., None])]


@gin_utils.configurable
class AverageRewardMetric(AverageReturnMetric):
    """Mean reward per step of an episode, averaged over episodes.

    Args:
        kwargs: arguments of :class:`AverageReturnMetric`, except ``dtype``.
    """

    @gin_utils.takes_arguments_of(AverageReturnMetric, without=('dtype', ), defaults={'name': 'AverageReward'})
    def __init__(self, **kwargs: Any):
        super().__init__(dtype=torch.float32, **kwargs)

    def _finish(self, total: np.ndarray, length: np.ndarray) -> np.ndarray:
        return self._mean(total, length)


class AverageEpisodeLengthMetric(AverageEpisodicAggregationMetric):
    """Average number of steps of an episode (transitions: FIRST is not counted).

    Args:
        kwargs: arguments of :class:`AverageReturnMetric`.
    """

    @gin_utils.takes_arguments_of(AverageReturnMetric, defaults={'name': 'AverageEpisodeLength'})
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)

    def _example_values(self, time_step: TimeStep) -> torch.Tensor:
        return time_step.step_type

    def _extract_values(self, steps: StepSequence) -> list[np.ndarray]:
        return [steps.transitions]


_NOT_SUMMED = {'lives', 'frame_number', 'episode_frame_number', 'task_id'}


def averaged_infos(env_info: Any) -> Any:
    """Return the nest ``env_info`` without entries whose sum over an episode means nothing."""
    if not isinstance(env_info, dict):
        return env_info
    return {name: value for name, value in env_info.items() if name not in _NOT_SUMMED}


def episode_metrics(example: TimeStep, buffer_size: int, further: Sequence[Callable[..., Any]] = ()) -> list[Any]:
    """Create the metrics of return and length, those in ``further``, and, unless it is empty, that of ``env_info``."""
    ctors: list[Callable[..., Any]] = [AverageReturnMetric, AverageEpisodeLengthMetric, *further]
    if nest.flatten(averaged_infos(example.env_info)):
        ctors.append(AverageEnvInfoMetric)
    return [ctor(example_time_step=example, buffer_size=buffer_size) for ctor in ctors]


@gin_utils.configurable
class AverageEnvInfoMetric(AverageEpisodicAggregationMetric):
    """Averages of the quantities in ``time_step.env_info``, with the same structure.

    A quantity is summed over the episode, unless its name ends with ``@step`` (mean over the steps), ``@max``
    or ``@min``. The values of ``env_info`` at FIRST are ignored.

    Args:
        fields: paths (``'a.b'``) of the quantities to average; ``None``: all but those of :func:`averaged_infos`.
        kwargs: arguments of :class:`AverageReturnMetric`; the ``env_info`` of ``example_time_step`` is a nest of
            tensors.
    """

    @gin_utils.takes_arguments_of(AverageReturnMetric, defaults={'name': 'AverageEnvInfoMetric'},
                                  after={'fields': 'dtype'})
    def __init__(self, fields: Sequence[str] | None = None, **kwargs: Any):
        self._fields = None if fields is None else list(fields)
        super().__init__(**kwargs)

    def _example_values(self, time_step: TimeStep) -> Any:
        if self._fields is None:
            return averaged_infos(time_step.env_info)
        return {field: nest.get_field(time_step.env_info, field) for field in self._fields}

    def _extract_values(self, steps: StepSequence) -> list[np.ndarray]:
        values = nest.flatten(self._example_values(steps.time_step))
        return [steps.without_first(steps.host(value).astype(np.float64), INITIAL[reduction])
                for value, reduction in zip(values, self._reductions)]
