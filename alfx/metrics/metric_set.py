"""All metrics of an algorithm, with short unrolls combined before they reach the metrics.

Most of a metric's cost is the call itself, so the episodic metrics receive several short unrolls as one sequence.
Counters are always up to date.
"""
from collections.abc import Iterable
from typing import Any

from torch import nn

from alfx import nest
from alfx.data_structures import TimeStep
from alfx.metrics.metrics import StepMetric, update_metrics

_MIN_STEPS = 32


class _Waiting:
    """Steps not yet passed to the episodic metrics; a separate object, since setting attributes of a module is slow."""

    def __init__(self) -> None:
        self.sequences: list[TimeStep] = []
        self.num_steps = 0


class MetricSet(nn.ModuleList):
    """Metrics; the first ``num_counters`` of them are updated immediately, the others when they are read.

    Args:
        metrics: the metrics.
        num_counters: number of cheap counters at the front.

    Attributes:
        counters: the counters: environment steps, number of episodes.
    """

    NUM_COUNTERS = 2

    def __init__(self, metrics: Iterable[StepMetric] = (), num_counters: int = NUM_COUNTERS):
        super().__init__(metrics)
        everything: list[Any] = list(self)
        self.counters, self._others = everything[:num_counters], everything[num_counters:]
        self._waiting = _Waiting()

    def observe(self, time_steps: TimeStep) -> None:
        """Update the metrics with the steps of an unroll ``[T, B, ...]``."""
        update_metrics(self.counters, time_steps)
        waiting = self._waiting
        waiting.sequences.append(time_steps)
        waiting.num_steps += time_steps.step_type.shape[0]
        if waiting.num_steps >= _MIN_STEPS:
            self.catch_up()

    def observe_step(self, time_step: TimeStep) -> None:
        """Update the metrics with one step ``[B, ...]``."""
        self.observe(nest.map_structure(lambda x: x.unsqueeze(0), time_step))

    def catch_up(self) -> list[Any]:
        """Process all waiting steps and return all metrics."""
        sequences = self._waiting.sequences
        if sequences:
            self._waiting = _Waiting()
            update_metrics(self._others, sequences[0] if len(sequences) == 1 else nest.concatenate(sequences))
        return [*self.counters, *self._others]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of all metrics, after all waiting steps are processed."""
        self.catch_up()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._waiting = _Waiting()
        super()._load_from_state_dict(*args)
