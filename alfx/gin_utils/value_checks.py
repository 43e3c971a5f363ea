"""Checks of the values of constructor arguments, with messages that point at the conf.

:func:`check_value` is for constructors that document the type or range of an argument::

    check_value('SacAlgorithm', 'target_update_tau', target_update_tau, float, minimum=0, maximum=1)

A range or a Literal in the annotation of an argument needs no call. It is checked for values bound by a conf, before
anything is constructed, and for values passed by callers of a configurable constructor or factory::

    def __init__(self, gamma: Fraction = 0.99, size: Count = 8, scale: Annotated[float, Range(below=2)] = 1.0):
"""

import inspect
import logging
import numbers
import types
import typing
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Optional, Union

from alfx.gin_utils import locations
from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest

_logger = logging.getLogger(__name__)

Kinds = Union[type, Callable, Sequence[Union[type, Callable]]]  # a Callable is the function ``callable``


class Range(NamedTuple):
    """Range of valid numbers; ``None`` for no limit.

    Attributes:
        minimum: inclusive lower limit.
        maximum: inclusive upper limit.
        above: exclusive lower limit.
        below: exclusive upper limit.
    """

    minimum: Optional[float] = None
    maximum: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None

    def __contains__(self, number: Any) -> bool:
        return ((self.minimum is None or number >= self.minimum) and (self.maximum is None or number <= self.maximum)
                and (self.above is None or number > self.above) and (self.below is None or number < self.below))

    def __str__(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f'in [{self.minimum}, {self.maximum}]'
        signs = (('>=', self.minimum), ('>', self.above), ('<=', self.maximum), ('<', self.below))
        return ' and '.join(f'{sign} {limit}' for sign, limit in signs if limit is not None)


Fraction = Annotated[float, Range(0, 1)]
"""A probability, a discount or a weight of an average."""
PositiveFraction = Annotated[float, Range(above=0, maximum=1)]
"""A share or a step size."""
Count = Annotated[int, Range(minimum=1)]
"""A number of items of which there is at least one, a size or a period."""
NonNegative = Annotated[float, Range(minimum=0)]
"""A learning rate, a standard deviation or a distance."""
Positive = Annotated[float, Range(above=0)]
"""A scale or a temperature."""
StepLimit = Annotated[int, Range(minimum=0)]
"""Number of steps after which an episode is truncated or something starts; 0 for no limit."""


def check_value(owner: str, name: str, value: Any, kind: Kinds = object, *, minimum: Optional[float] = None,
                maximum: Optional[float] = None, above: Optional[float] = None,
                choices: Optional[Collection] = None, optional: bool = False) -> Any:
    """Raise a ConfError if an argument has the wrong type or is out of range.

    Args:
        owner: name of the class or factory, as a conf writes it.
        name: name of the argument.
        value: the argument.
        kind: valid type, or several. ``float`` accepts int; neither accepts bool. ``callable`` accepts callables.
        minimum: smallest valid number.
        maximum: largest valid number.
        above: exclusive lower limit.
        choices: valid values.
        optional: accept ``None``.

    Returns:
        ``value``.

    Raises:
        ConfError: the value is invalid; the message names file and line if a conf set the argument.
    """
    problem = problem_of(owner, name, value, kind, minimum=minimum, maximum=maximum, above=above,
                         choices=choices, optional=optional)
    if problem is not None:
        raise ConfError([problem])
    return value


def problem_of(owner: str, name: str, value: Any, kind: Kinds = object, *, minimum: Optional[float] = None,
               maximum: Optional[float] = None, above: Optional[float] = None,
               choices: Optional[Collection] = None, optional: bool = False) -> Optional[Problem]:
    """Return the problem of an argument, or ``None``; for callers of :func:`check_value` that collect several."""
    if value is None and optional:
        return None
    kinds = tuple(kind) if isinstance(kind, Sequence) else (kind,)
    limits = Range(minimum, maximum, above)
    if any(_is_a(value, k) for k in kinds):
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if (not is_number or value in limits) and (choices is None or value in choices):
            return None
    expected = _expected(kinds, limits, choices, optional)
    hint = hint_nearest(value, [c for c in choices if isinstance(c, str)]) if choices and isinstance(value, str) else ''
    return problem_at(owner, name, f'must be {expected}, found {describe(value)}', hint)


def problem_at(owner: str, name: str, message: str, hint: str = '') -> Problem:
    """Create a problem of one argument, located where the conf binds it.

    Args:
        owner: name of the class or factory.
        name: name of the argument.
        message: continues ``owner.name ...``.
        hint: what to do.
    """
    binding = locations.location_of(owner, name)
    return Problem(binding.location if binding else '', f'{owner}.{name} {message}', hint)


def log_unused(owner: str, names: Collection[str], reason: str) -> None:
    """Log that arguments have no effect here, for those that are documented to be used only under a condition.

    Args:
        owner: name of the class or factory.
        names: names of the arguments that were given.
        reason: why they have no effect.
    """
    for name in names:
        _logger.info('%s', problem_at(owner, name, f'is not used: {reason}'))


def non_default(function: Callable[..., Any], values: Mapping[str, Any], *names: str) -> list[str]:
    """Return which of ``names``, arguments of ``function``, have ``values`` other than their defaults."""
    defaults = {name: inspect.signature(function).parameters[name].default for name in names}
    return [name for name, default in defaults.items() if values[name] is not default and values[name] != default]


def describe(value: Any) -> str:
    """Format a value and its type for an error message."""
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


def _expected(kinds, limits, choices, optional) -> str:
    if choices is not None:
        text = f'one of {sorted(choices, key=str)}'
    else:
        text = ' or '.join(_NAMES.get(k, f'a {getattr(k, "__name__", k)}') for k in kinds)
        text = f'{text} {limits}'.rstrip()
    return f'{text} or None' if optional else text


_NAMES: dict[Any, str] = {int: 'an int', float: 'a number', bool: 'True or False', str: 'a string',
                          callable: 'a callable', Callable: 'a callable', type(None): 'None'}


# Resolved annotations. Resolving takes a fraction of a millisecond, and every binding of a conf needs those of its
# function. Failures are not cached, because a missing name may be defined later.
_hints: weakref.WeakKeyDictionary[Callable, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()


def limits_of(fn: Callable) -> dict[str, Any]:
    """Return the annotations of the arguments of a function that contain a range or a choice, by argument."""
    return {name: hint for name, hint in annotations_of(fn).items() if name != 'return' and _has_range(hint)}


def annotations_of(fn: Callable) -> dict[str, Any]:
    """Return the annotations of a function by argument, and 'return', as far as they can be resolved."""
    fn = inspect.unwrap(fn)
    written = getattr(fn, '__annotations__', None)
    known = _hints.get(fn) if inspect.isfunction(fn) else None
    if known is not None and known[0] is written:
        hints = known[1]
    else:
        try:
            hints = typing.get_type_hints(fn, include_extras=True)
        except (NameError, TypeError, AttributeError):  # names under TYPE_CHECKING, functions written in C
            return {}
        if inspect.isfunction(fn):
            _hints[fn] = (written, hints)
    parameters = getattr(getattr(fn, '__signature__', None), 'parameters', {})  # set by takes_arguments_of
    return {**{name: p.annotation for name, p in parameters.items()
               if p.annotation is not p.empty and not isinstance(p.annotation, str)}, **hints}


def check_limits(owner: str, limits: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise a ConfError if a number or string, alone or in a list or tuple, is not admitted by its annotation.

    Args:
        owner: name of the class or factory.
        limits: result of :func:`limits_of`.
        arguments: arguments to check; values of other types are left to the constructor.

    Raises:
        ConfError: a number is out of range, see :func:`check_value`.
    """
    problems = [problem_at(owner, name, f'must be {_describe_annotation(limits[name])}, found {describe(value)}')
                for name, value in arguments.items() if name in limits and not _admits(limits[name], value)]
    if problems:
        raise ConfError(problems)


def _has_range(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        return any(isinstance(limits, Range) for limits in annotation.__metadata__)
    return typing.get_origin(annotation) is typing.Literal or any(map(_has_range, typing.get_args(annotation)))


def _admits(annotation: Any, value: Any) -> bool:
    """Return whether ``annotation`` accepts ``value``; only numbers, strings, and lists and tuples are checked."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str, list, tuple)):
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_admits(argument, value) for argument in arguments)
    if origin is Annotated:
        return _is_a(value, arguments[0]) and all(value in limits for limits in arguments[1:]
                                                  if isinstance(limits, Range))
    base = origin or annotation
    if base in (Any, object):
        return True
    if base is typing.Literal:
        return value in arguments
    if isinstance(value, numbers.Real):
        return inspect.isclass(base) and _is_a(value, base)
    if not inspect.isclass(base) or not isinstance(value, base) and not issubclass(base, (list, tuple)):
        return False
    if base is tuple and Ellipsis not in arguments:
        return len(value) == len(arguments) and all(map(_admits, arguments, value))
    return all(_admits(argument, item) for argument in arguments[:1] for item in value)


def _describe_annotation(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return ' or '.join(_describe_annotation(argument) for argument in arguments)
    if origin is Annotated:
        return ' '.join([_NAMES[arguments[0]], *(str(limits) for limits in arguments[1:])])
    if origin is typing.Literal:
        return ' or '.join(map(repr, arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f'({", ".join(_describe_annotation(argument) for argument in arguments)})'
    if origin is not None and origin is not Callable and arguments:
        return f'a sequence, each {_describe_annotation(arguments[0])}'
    return _NAMES.get(origin or annotation, str(getattr(annotation, '__name__', annotation)))
