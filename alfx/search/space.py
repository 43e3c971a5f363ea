"""Search spaces of bindings: ranges of numbers, or choices.

In a conf, a range is a string such as ``'log_uniform(1e-5, 1e-2)'`` and a choice is a list of values; :func:`parse`
reads both. :data:`RANGES` contains the functions that such a string may call.
"""
import ast
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from alfx.gin_utils import ConfError, hint_nearest

_MAX_GRID = 1_000_000


class Range:
    """Range of numbers from ``low`` to ``high``, both included.

    Args:
        low: smallest value.
        high: largest value.
        step: restrict the values to ``low``, ``low + step``, ...; None for all values in between.
        log: sample on a logarithmic scale.
        integer: restrict the values to integers.

    Raises:
        ConfError: the arguments contradict each other.
    """

    def __init__(self, low: float, high: float, step: float | None = None, log: bool = False, integer: bool = False):
        kind = numbers.Integral if integer else numbers.Real
        for name, value in (('low', low), ('high', high), ('step', 1 if step is None else step)):
            if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
                raise ConfError(f'{name} must be {"an int" if integer else "a number"}, found {value!r}')
        if low > high:
            raise ConfError(f'low must not exceed high, found low = {low!r} and high = {high!r}')
        if log and low <= 0:
            raise ConfError(f'low must be > 0 on a logarithmic scale, found {low!r}')
        if step is not None and step <= 0:
            raise ConfError(f'step must be > 0, found {step!r}')
        self.low, self.high, self.step, self.log, self.integer = low, high, step, log, integer

    def suggest(self, trial: Any, name: str) -> None:
        """Sample the parameter ``name`` of an optuna trial, unless it already has a value."""
        if self.integer:
            trial.suggest_int(name, self.low, self._last(), step=self.step or 1, log=self.log)
        else:
            low, high = float(self.low), float(self._last())
            trial.suggest_float(name, low, high, step=self.step and float(self.step), log=self.log)

    def text(self, value: Any) -> str:
        """Return a sampled value in the syntax of confs."""
        return repr(int(value) if self.integer else float(value))

    def probes(self) -> list[str]:
        """Return the smallest and largest value as text, to check a conf with them."""
        return list(dict.fromkeys((self.text(self.low), self.text(self._last()))))

    def grid(self) -> list[Any]:
        """Return all values in ascending order.

        Raises:
            ConfError: there are infinitely many values, or too many.
        """
        step = self.step or (1 if self.integer and not self.log else None)
        if step is None:
            raise ConfError('a grid needs a finite number of values', 'give a list of values, or a step')
        count = self._count(step)
        if count > _MAX_GRID:
            raise ConfError(f'a grid of {count:,} values is too large', 'use a larger step')
        return [self.low + i * step for i in range(count)]

    def _count(self, step: float) -> int:
        return int(math.floor((self.high - self.low) / step * (1 + 1e-12) + 1e-9)) + 1

    def _last(self) -> float:
        """Return the largest value."""
        return self.high if self.step is None else self.low + (self._count(self.step) - 1) * self.step


class Choice:
    """Choice between several values.

    Args:
        texts: the values in the syntax of confs.

    Raises:
        ConfError: the list is empty or contains a value twice.
    """

    def __init__(self, texts: list[str]):
        if not texts:
            raise ConfError('the list of values is empty', 'list at least one value')
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ConfError(f'{twice} is listed twice')
        self.texts = texts

    def suggest(self, trial: Any, name: str) -> None:
        """Sample the parameter ``name`` of an optuna trial, unless it already has a value."""
        trial.suggest_categorical(name, self.texts)

    def text(self, value: Any) -> str:
        """Return a sampled value in the syntax of confs."""
        return value

    def probes(self) -> list[str]:
        """Return all values as text, to check a conf with them."""
        return self.texts

    def grid(self) -> list[Any]:
        """Return all values in the given order."""
        return list(self.texts)


Values = Range | Choice


def uniform(low: float, high: float, step: float | None = None) -> Range:
    """Range of uniformly distributed numbers."""
    return Range(low, high, step)


def log_uniform(low: float, high: float) -> Range:
    """Range of positive numbers, uniformly distributed on a logarithmic scale."""
    return Range(low, high, log=True)


def integer(low: int, high: int, step: int | None = None) -> Range:
    """Range of uniformly distributed integers."""
    return Range(low, high, step, integer=True)


def log_integer(low: int, high: int) -> Range:
    """Range of positive integers, uniformly distributed on a logarithmic scale."""
    return Range(low, high, log=True, integer=True)


def choice(*values: Any) -> Choice:
    """Choice between several values, equivalent to a list."""
    return Choice([repr(value) for value in values])


RANGES: dict[str, Callable[..., Values]] = {
    function.__name__: function for function in (uniform, log_uniform, integer, log_integer, choice)}


def parse(value: Any) -> Values:
    """Parse a value of ``Search.space``.

    Args:
        value: a list or tuple of values, or a string like ``'uniform(0, 1, step=0.1)'``.

    Raises:
        ConfError: the value is invalid.
    """
    if isinstance(value, (list, tuple)):
        return Choice([repr(item) for item in value])
    if not isinstance(value, str):
        raise ConfError(f"expected a list of values, or a string like 'uniform(0, 1)', found {value!r}",
                        'bind constants outside of Search.space')
    try:
        call = ast.parse(value.strip(), mode='eval').body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ConfError(f"expected a list of values, or a string like 'uniform(0, 1)', found {value!r}")
    function = RANGES.get(call.func.id)
    if function is None:
        raise ConfError(f'{value!r}: unknown function {call.func.id}()',
                        hint_nearest(call.func.id, list(RANGES), 0.5) or f'available: {", ".join(RANGES)}')
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {keyword.arg or '**': ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise ConfError(f'{value!r}: the arguments must be numbers or strings',
                        'write a choice of @references as a list: [@torch.tanh, @torch.relu]') from None
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise ConfError(f'{value!r}: {error}', f'expected {call.func.id}{inspect.signature(function)}') from None
    try:
        return function(*arguments, **named)
    except ConfError as error:
        raise ConfError(f'{value!r}: {error.problems[0].message}', error.problems[0].hint) from None
