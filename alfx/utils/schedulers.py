"""Schedulers: numbers that change with the progress of a run, such as learning rates and coefficients.

A scheduler is called without arguments and returns a float computed from the progress in :mod:`alfx.context`. It has no
state, so a resumed run continues its schedule. Pass arguments that may be schedules through :func:`as_scheduler`.
"""
import bisect
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import gin
import numpy as np

from alfx import context
from alfx.context import get_all_progresses, get_progress, update_all_progresses, update_progress
from alfx.gin_utils import NonNegative, Positive, configurable, locations
from alfx.gin_utils.parsing import Reference, substitute
from alfx.gin_utils.reference_types import made_by

__all__ = ['ConstantScheduler', 'CyclicalScheduler', 'ExponentialScheduler', 'LinearScheduler', 'Scheduler',
           'StepScheduler', 'as_scheduler', 'disallow_scheduler', 'get_all_progresses', 'get_progress',
           'update_all_progresses', 'update_progress', 'values_over_percent']

_allowed: ContextVar[bool] = ContextVar('schedulers_allowed', default=True)


@contextmanager
def disallow_scheduler() -> Iterator[None]:
    """Context manager within which creating or calling a scheduler raises ``RuntimeError``.

    For code that runs where the progress of the run is unknown, for example in a worker process.
    """
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def _check_allowed() -> None:
    if not _allowed.get():
        raise RuntimeError('schedulers cannot be used here, where the progress of the run is unknown; '
                           'use a number instead')


class Scheduler:
    """Number as a function of the progress.

    Args:
        progress_type: 'percent' (0 to 1), 'iterations', 'env_steps' or 'global_counter'.

    Raises:
        ValueError: the progress type is unknown.
    """

    def __init__(self, progress_type: str):
        _check_allowed()
        context.get_progress(progress_type)
        self._progress_type = progress_type

    def progress(self) -> float:
        """Return the progress that the number depends on."""
        _check_allowed()
        return context.get_progress(self._progress_type)

    def __call__(self) -> float:
        """Return the current number."""
        raise NotImplementedError

    def final_value(self) -> float:
        """Return the number at the end of the run."""
        raise NotImplementedError


class ConstantScheduler:
    """Constant number.

    Args:
        value: the number.
    """

    def __init__(self, value: float):
        self._value = value

    def __call__(self) -> float:
        """Return the number."""
        return self._value

    def final_value(self) -> float:
        """Return the number."""
        return self._value

    def __repr__(self) -> str:
        return f'ConstantScheduler({self._value})'


class _ScheduleOfPairs(Scheduler):
    """Base class of schedulers with a list of (progress, value) pairs."""

    def __init__(self, progress_type: str, schedule: Sequence[tuple[float, float]]):
        super().__init__(progress_type)
        owner, pairs = type(self).__name__, [tuple(pair) for pair in schedule]
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f'{owner}: schedule must be a list of (progress, value) pairs, found {schedule}')
        self._progresses, self._values = [float(p) for p, _ in pairs], [float(v) for _, v in pairs]
        if any(a >= b for a, b in zip(self._progresses, self._progresses[1:])):
            raise ValueError(f'{owner}: the progress values of schedule must increase, found {self._progresses}')
        if progress_type == 'percent' and self._progresses[-1] > 1:
            raise ValueError(f"{owner}: the progress values of schedule are fractions of the run in [0, 1], found "
                             f"{self._progresses[-1]:g}; to count steps, set {owner}.progress_type = 'env_steps'")

    def final_value(self) -> float:
        """Return the last number of the schedule."""
        return self._values[-1]

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._progress_type!r}, {list(zip(self._progresses, self._values))})'


@configurable
class StepScheduler(_ScheduleOfPairs):
    """Piecewise constant number, with an optional linear warm-up from 0.

    Args:
        progress_type: see :class:`Scheduler`.
        schedule: ``[(p1, v1), (p2, v2), ...]``: the number is v1 below progress p1, v2 from p1 to p2, and so on; the
            last value also holds after the last progress.
        warm_up_period: length of the warm-up from 0 to the scheduled number.
        start: progress at which the warm-up starts; before it the number is 0. It does not shift the schedule.

    Raises:
        ValueError: the schedule is empty or does not increase, or ``warm_up_period`` is negative.
    """

    def __init__(self, progress_type: str, schedule: Sequence[tuple[float, float]], warm_up_period: NonNegative = 0,
                 start: float = 0):
        super().__init__(progress_type, schedule)
        self._warm_up_period = warm_up_period
        self._start = start

    def __call__(self) -> float:
        """Return the current number."""
        progress = self.progress()
        value = self._values[min(bisect.bisect_right(self._progresses, progress), len(self._values) - 1)]
        elapsed = progress - self._start
        if elapsed < 0:
            return 0.0
        return value * elapsed / self._warm_up_period if elapsed < self._warm_up_period else value


@configurable
class LinearScheduler(_ScheduleOfPairs):
    """Linear interpolation between given points; constant before the first and after the last.

    Args:
        progress_type: see :class:`Scheduler`.
        schedule: ``[(p1, v1), (p2, v2), ...]``: the number is v1 at progress p1, and so on.

    Raises:
        ValueError: the schedule is empty or does not increase.
    """

    def __call__(self) -> float:
        """Return the current number."""
        return float(np.interp(self.progress(), self._progresses, self._values))


@configurable
class ExponentialScheduler(Scheduler):
    """Exponential decay, ``initial_value * decay_rate ** (progress / decay_time)``.

    Args:
        progress_type: see :class:`Scheduler`.
        initial_value: the number at progress 0.
        decay_rate: positive factor for each ``decay_time``.
        decay_time: positive progress.

    Raises:
        ValueError: ``decay_rate`` or ``decay_time`` is not positive.
    """

    def __init__(self, progress_type: str, initial_value: float, decay_rate: Positive, decay_time: Positive):
        super().__init__(progress_type)
        self._initial_value, self._decay_rate, self._decay_time = initial_value, decay_rate, decay_time

    def _value_at(self, progress: float) -> float:
        return self._initial_value * self._decay_rate**(progress / self._decay_time)

    def __call__(self) -> float:
        """Return the current number."""
        return self._value_at(self.progress())

    def final_value(self) -> float:
        """Return the number at the end of the run for 'percent', else the limit, as the length is unknown."""
        if self._progress_type == 'percent' or self._decay_rate == 1.0:
            return self._value_at(1.0)
        return 0.0 if self._decay_rate < 1.0 else math.copysign(math.inf, self._initial_value)


@configurable
class CyclicalScheduler(Scheduler):
    """Alternation between two numbers.

    Args:
        progress_type: see :class:`Scheduler`.
        base_lr: number at progress 0.
        bound_lr: other number.
        half_cycle_size: positive progress of half a cycle.
        switch_mode: 'step': each number holds for half a cycle; 'linear': interpolate from ``base_lr`` to ``bound_lr``
            in the first half cycle and back in the second.

    Raises:
        ValueError: ``half_cycle_size`` is not positive, or ``switch_mode`` is unknown.
    """

    def __init__(self, progress_type: str, base_lr: float, bound_lr: float, half_cycle_size: Positive,
                 switch_mode: Literal['step', 'linear'] = 'step'):
        super().__init__(progress_type)
        self._base, self._bound = base_lr, bound_lr
        self._half_cycle_size = half_cycle_size
        self._switch_mode = switch_mode

    def __call__(self) -> float:
        """Return the current number."""
        halves = self.progress() / self._half_cycle_size
        begun = math.floor(halves + 1e-9)  # rounding
        at_base = begun % 2 == 0
        start, end = (self._base, self._bound) if at_base else (self._bound, self._base)
        return start if self._switch_mode == 'step' else start + (end - start) * (halves - begun)

    def final_value(self) -> float:
        """Return ``bound_lr``, because the final number depends on the length of the run."""
        return self._bound


def as_scheduler(value_or_scheduler: float | Callable[[], float]) -> Any:
    """Return ``value_or_scheduler`` if it is callable, else a :class:`ConstantScheduler`."""
    return value_or_scheduler if callable(value_or_scheduler) else ConstantScheduler(value_or_scheduler)


def values_over_percent(percent: float) -> dict[str, float]:
    """Return the values of all schedules over 'percent' in the loaded conf, by the bound argument (``Adam.lr``).

    These values change if the length of the run is changed.

    Args:
        percent: completed fraction of the run for which the values are computed.
    """
    macros = {binding.scope: binding.value for binding in locations.bindings() if binding.selector == 'gin.macro'}
    shared = {each.scope: each.value for each in locations.bindings() if each.text.endswith('singleton.constructor')}
    found, current = {}, context.get_progress('percent')
    context.update_progress('percent', percent)
    for binding in locations.bindings():
        value = substitute(binding.value, macros)
        if isinstance(value, Reference) and value.selector.endswith('singleton'):
            value = dataclasses.replace(shared.get('/'.join(value.scopes), value), evaluate=True)
        if binding.selector != 'gin.macro' and isinstance(value, Reference) and value.evaluate and issubclass(
                made_by(value) or object, Scheduler):
            reference = gin.config.ConfigurableReference('/'.join((*value.scopes, value.selector)), True)
            with gin.config_scope(binding.scope or None):
                schedule = copy.deepcopy(reference)  # calls the constructor
            if schedule._progress_type == 'percent':
                found[binding.text] = schedule()
    context.update_progress('percent', current)
    return found
