"""All metrics of an algorithm, shown short unrolls a few at a time.

What a metric costs is mostly its call, so that the episodic metrics see several short unrolls as one sequence. Counters
are always up to date.
"""
from collections.abc import Iterable
from typing import Any

from torch import nn

from alfx import nest
from alfx.data_structures import TimeStep
from alfx.metrics.metrics import StepMetric, update_metrics

_ENOUGH_STEPS = 32


class MetricSet(nn.ModuleList):
    """Metrics; the first ``num_counters`` of them are updated at once, the others when somebody looks.

    Args:
        metrics: the metrics.
        num_counters: how many at the front are cheap counters.
    """

    NUM_COUNTERS = 2

    def __init__(self, metrics: Iterable[StepMetric] = (), num_counters: int = NUM_COUNTERS):
        super().__init__(metrics)
        everything: list[Any] = list(self)
        self._counters, self._others = everything[:num_counters], everything[num_counters:]
        self._waiting: list[TimeStep] = []
        self._steps_waiting = 0

    @property
    def counters(self) -> list[Any]:
        """The counters: environment steps, number of episodes."""
        return self._counters

    def observe(self, time_steps: TimeStep) -> None:
        """Show the steps of an unroll ``[T, B, ...]`` to the metrics."""
        update_metrics(self._counters, time_steps)
        self._waiting.append(time_steps)
        self._steps_waiting += time_steps.step_type.shape[0]
        if self._steps_waiting >= _ENOUGH_STEPS:
            self.catch_up()

    def observe_step(self, time_step: TimeStep) -> None:
        """Show one step ``[B, ...]`` to the metrics."""
        self.observe(nest.map_structure(lambda x: x.unsqueeze(0), time_step))

    def catch_up(self) -> list[Any]:
        """All metrics, after they have seen everything."""
        if self._waiting:
            waiting, self._waiting, self._steps_waiting = self._waiting, [], 0
            update_metrics(self._others, waiting[0] if len(waiting) == 1 else nest.concatenate(waiting))
        return [*self._counters, *self._others]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of all metrics, after they have seen everything."""
        self.catch_up()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._waiting, self._steps_waiting = [], 0
        super()._load_from_state_dict(*args)
