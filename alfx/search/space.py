"""The values that a search tries for a binding: a range of numbers, or a choice.

In a conf a range is a text such as ``'log_uniform(1e-5, 1e-2)'`` and a choice is a list of values; :func:`parse` reads
both. The names that such a text may use are :data:`RANGES`.
"""
import ast
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from alfx.gin_utils import ConfError
from alfx.gin_utils.conf_error import hint_nearest

_MAX_GRID = 1_000_000


class Range:
    """Numbers from ``low`` to ``high``, both included.

    Args:
        low: the least.
        high: the greatest.
        step: only ``low``, ``low + step``, ...; None for all in between.
        log: as many between 1 and 10 as between 10 and 100.
        whole: whole numbers only.

    Raises:
        ConfError: the arguments contradict each other.
    """

    def __init__(self, low: float, high: float, step: float | None = None, log: bool = False, whole: bool = False):
        kind = numbers.Integral if whole else numbers.Real
        for name, value in (('low', low), ('high', high), ('step', 1 if step is None else step)):
            if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
                raise ConfError(f'{name} must be {"an int" if whole else "a number"}, found {value!r}')
        if low > high:
            raise ConfError(f'low must not exceed high, found low = {low!r} and high = {high!r}')
        if log and low <= 0:
            raise ConfError(f'low must be > 0 on a logarithmic scale, found {low!r}')
        if step is not None and step <= 0:
            raise ConfError(f'step must be > 0, found {step!r}')
        self.low, self.high, self.step, self.log, self.whole = low, high, step, log, whole

    def suggest(self, trial: Any, name: str) -> None:
        """Let an optuna trial draw the parameter ``name``, unless it has it already."""
        if self.whole:
            trial.suggest_int(name, self.low, self._last(), step=self.step or 1, log=self.log)
        else:
            low, high = float(self.low), float(self._last())
            trial.suggest_float(name, low, high, step=self.step and float(self.step), log=self.log)

    def text(self, value: Any) -> str:
        """A drawn value as a conf writes it."""
        return repr(int(value) if self.whole else float(value))

    def probes(self) -> list[str]:
        """Values to try a conf with before anything runs: the extreme ones, as text."""
        return list(dict.fromkeys((self.text(self.low), self.text(self._last()))))

    def grid(self) -> list[Any]:
        """Every value, ascending.

        Raises:
            ConfError: there are too many to count.
        """
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            raise ConfError('a grid needs values that can be counted', 'give a list of values, or a step')
        count = self._count(step)
        if count > _MAX_GRID:
            raise ConfError(f'a grid of {count:,} values is too large', 'take a larger step')
        return [self.low + i * step for i in range(count)]

    def _count(self, step: float) -> int:
        return int(math.floor((self.high - self.low) / step * (1 + 1e-12) + 1e-9)) + 1

    def _last(self) -> float:
        """The greatest value that there is."""
        return self.high if self.step is None else self.low + (self._count(self.step) - 1) * self.step


class Choice:
    """One of several values.

    Args:
        texts: the values as a conf writes them.

    Raises:
        ConfError: there is none, or one is listed twice.
    """

    def __init__(self, texts: list[str]):
        if not texts:
            raise ConfError('there is no value to choose', 'list at least one')
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ConfError(f'{twice} is listed twice')
        self.texts = texts

    def suggest(self, trial: Any, name: str) -> None:
        """Let an optuna trial draw the parameter ``name``, unless it has it already."""
        trial.suggest_categorical(name, self.texts)

    def text(self, value: Any) -> str:
        """A drawn value as a conf writes it."""
        return value

    def probes(self) -> list[str]:
        """Values to try a conf with before anything runs: all, as text."""
        return self.texts

    def grid(self) -> list[Any]:
        """Every value, in the order listed."""
        return list(self.texts)


Values = Range | Choice


def uniform(low: float, high: float, step: float | None = None) -> Range:
    """Numbers, each as likely as any other."""
    return Range(low, high, step)


def log_uniform(low: float, high: float) -> Range:
    """Positive numbers, each order of magnitude as likely as any other."""
    return Range(low, high, log=True)


def integer(low: int, high: int, step: int | None = None) -> Range:
    """Whole numbers, each as likely as any other."""
    return Range(low, high, step, whole=True)


def log_integer(low: int, high: int) -> Range:
    """Positive whole numbers, each order of magnitude as likely as any other."""
    return Range(low, high, log=True, whole=True)


def choice(*values: Any) -> Choice:
    """One of several values; a list without a name means the same."""
    return Choice([repr(value) for value in values])


RANGES: dict[str, Callable[..., Values]] = {
    function.__name__: function for function in (uniform, log_uniform, integer, log_integer, choice)}


def parse(value: Any) -> Values:
    """What a value of ``Search.space`` means.

    Args:
        value: a list or tuple of values, or a text like ``'uniform(0, 1, step=0.1)'``.

    Raises:
        ConfError: it means nothing.
    """
    if isinstance(value, (list, tuple)):
        return Choice([repr(item) for item in value])
    if not isinstance(value, str):
        raise ConfError(f"expected a list of values, or a text like 'uniform(0, 1)', found {value!r}",
                        'what is not searched is bound outside of Search.space')
    try:
        call = ast.parse(value.strip(), mode='eval').body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ConfError(f"expected a list of values, or a text like 'uniform(0, 1)', found {value!r}")
    function = RANGES.get(call.func.id)
    if function is None:
        raise ConfError(f'{value!r}: there is no {call.func.id}()',
                        hint_nearest(call.func.id, list(RANGES), 0.5) or f'there are {", ".join(RANGES)}')
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {keyword.arg or '**': ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise ConfError(f'{value!r}: the arguments must be plain numbers or texts',
                        'a choice of @references is written as a list: [@torch.tanh, @torch.relu]') from None
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise ConfError(f'{value!r}: {error}', f'it is {call.func.id}{inspect.signature(function)}') from None
    try:
        return function(*arguments, **named)
    except ConfError as error:
        raise ConfError(f'{value!r}: {error.problems[0].message}', error.problems[0].hint) from None
