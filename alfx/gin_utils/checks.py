"""Checks of the value of a constructor argument, with a message that points at the conf.

:func:`check_value` is for any constructor that documents the type or range of an argument::

    check_value('SacAlgorithm', 'target_update_tau', target_update_tau, float, minimum=0, maximum=1)

A range in the annotation of an argument holds for what a conf binds to it, and is told before anything is built::

    def __init__(self, gamma: Fraction = 0.99, size: Annotated[int, Range(minimum=1)] = 8):
"""

import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NamedTuple, Optional, Union

from . import locations
from .errors import ConfError, Problem, hint_nearest

__all__ = ['Fraction', 'Range', 'StepLimit', 'check_value', 'problem_of', 'problem_at']

Kinds = Union[type, Callable, Sequence[Union[type, Callable]]]  # a Callable: the function ``callable``


class Range(NamedTuple):
    """The numbers that an argument takes, both ends included; None for no end."""

    minimum: Optional[float] = None
    maximum: Optional[float] = None

    def __contains__(self, number: Any) -> bool:
        return ((self.minimum is None or number >= self.minimum) and (self.maximum is None or number <= self.maximum))

    def __str__(self) -> str:
        if self.minimum is None or self.maximum is None:
            return f'<= {self.maximum}' if self.minimum is None else f'>= {self.minimum}'
        return f'in [{self.minimum}, {self.maximum}]'


Fraction = Annotated[float, Range(0, 1)]
"""A probability, a discount, a weight of an average."""
StepLimit = Annotated[int, Range(minimum=0)]
"""Steps after which an episode is truncated; 0 for none."""


def check_value(owner: str, name: str, value: Any, kind: Kinds = object, *, minimum: Optional[float] = None,
                maximum: Optional[float] = None, above: Optional[float] = None,
                choices: Optional[Collection] = None, optional: bool = False) -> Any:
    """Raise a ConfError unless an argument has the right type and range.

    Args:
        owner: name of the class or factory, as a conf writes it.
        name: name of the argument.
        value: what was given.
        kind: the type, or several. ``float`` admits int, neither admits bool; ``callable`` admits what
            can be called.
        minimum: smallest allowed number.
        maximum: largest allowed number.
        above: number that ``value`` has to exceed.
        choices: the allowed values.
        optional: whether None is allowed.

    Returns:
        ``value``.

    Raises:
        ConfError: it has not; the message names file and line if a conf set the argument.
    """
    problem = problem_of(owner, name, value, kind, minimum=minimum, maximum=maximum, above=above,
                         choices=choices, optional=optional)
    if problem is not None:
        raise ConfError([problem])
    return value


def problem_of(owner: str, name: str, value: Any, kind: Kinds = object, *, minimum: Optional[float] = None,
               maximum: Optional[float] = None, above: Optional[float] = None,
               choices: Optional[Collection] = None, optional: bool = False) -> Optional[Problem]:
    """Like :func:`check_value`, but returns the problem (or None) for callers that collect several."""
    if value is None and optional:
        return None
    kinds = tuple(kind) if isinstance(kind, Sequence) else (kind,)
    in_range = True
    if any(_is_a(value, k) for k in kinds):
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            number: Any = value
            in_range = ((minimum is None or number >= minimum) and (maximum is None or number <= maximum)
                        and (above is None or number > above))
        if in_range and (choices is None or value in choices):
            return None
    expected = _expected(kinds, minimum, maximum, above, choices, optional)
    hint = hint_nearest(value, [c for c in choices if isinstance(c, str)]) if choices and isinstance(value, str) else ''
    return problem_at(owner, name, f'must be {expected}, found {describe(value)}', hint)


def problem_at(owner: str, name: str, message: str, hint: str = '') -> Problem:
    """A problem of one argument, located where the conf binds it.

    Args:
        owner: name of the class or factory.
        name: name of the argument.
        message: continues ``owner.name ...``.
        hint: what to do.
    """
    binding = locations.location_of(owner, name)
    return Problem(binding.location if binding else '', f'{owner}.{name} {message}', hint)


def describe(value: Any) -> str:
    """A value and its type, as an error message shows it."""
    if value is None or isinstance(value, bool):
        return repr(value)
    text = repr(value)
    return f'{type(value).__name__} {text if len(text) <= 60 else text[:57] + "..."}'


def _is_a(value: Any, kind: Any) -> bool:
    if kind is callable:
        return callable(value)
    if kind in (int, float):
        base = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, base) and not isinstance(value, bool) and value == value
    return isinstance(value, kind)


def _expected(kinds, minimum, maximum, above, choices, optional) -> str:
    names = {int: 'an int', float: 'a number', bool: 'True or False', str: 'a string', callable: 'a callable'}
    if choices is not None:
        text = f'one of {sorted(choices, key=str)}'
    else:
        text = ' or '.join(names.get(k, f'a {getattr(k, "__name__", k)}') for k in kinds)
        if minimum is not None and maximum is not None:
            text += f' in [{minimum}, {maximum}]'
        else:
            limits = [f'{sign} {limit}' for sign, limit in (('>=', minimum), ('>', above), ('<=', maximum))
                      if limit is not None]
            text += f' {" and ".join(limits)}' if limits else ''
    return f'{text} or None' if optional else text
