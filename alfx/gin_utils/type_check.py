"""Type checks of conf values against the annotations of the parameters they are bound to.

A reference fits if the object that it creates fits, or if the type of that object is unknown
(:mod:`alfx.gin_utils.reference_types`). A macro of unknown value always fits. An unsupported annotation accepts
everything.
"""

import collections.abc
import inspect
import re
import types
import typing
from typing import Any, NamedTuple, Optional

from alfx.gin_utils.value_checks import Range, describe
from . import reference_types
from .parsing import Macro, Reference

_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_ANYTHING = (inspect.Parameter.empty, Any, object)
_LITERALS = (int, float, bool, str, bytes, list, tuple, dict, type(None))


class Mismatch(NamedTuple):
    """Expected type, found value and hint."""

    expected: str
    found: str
    hint: str = ''


class _Unfit(Exception):
    """Raised for a value that does not fit."""

    def __init__(self, hint: str = ''):
        self.hint = hint


def check(value: Any, annotation: Any) -> tuple[Optional[Mismatch], Any]:
    """Compare a value with an annotation.

    Args:
        value: a literal, :class:`~alfx.gin_utils.parsing.Reference` or ``Macro``, or a nest of them.
        annotation: annotation of the parameter; ``inspect.Parameter.empty`` accepts everything.

    Returns:
        The mismatch or ``None``, and the value to bind. The value is converted to int if the annotation is int and the
        conf has ``1e6``, and to bool if the annotation is bool and the conf has 1 or 0.
    """
    try:
        return None, _fit(value, annotation)
    except _Unfit as unfit:
        found = f'the reference {value!r}' if isinstance(value, Reference) else describe(value)
        return Mismatch(show(annotation), found, unfit.hint), value


def show(annotation: Any) -> str:
    """Format an annotation for an error message."""
    if annotation is None or annotation is type(None):
        return 'None'
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return ' or '.join(show(argument) for argument in arguments)
    if origin is typing.Literal:
        return ' or '.join(repr(argument) for argument in arguments)
    if origin is typing.Annotated:
        return ' '.join([show(arguments[0]), *(str(limits) for limits in arguments[1:] if isinstance(limits, Range))])
    if any(typing.get_origin(argument) is typing.Annotated for argument in arguments):
        return f'{show(origin)}[{", ".join(show(argument) for argument in arguments)}]'
    if origin is collections.abc.Callable or annotation in (collections.abc.Callable, typing.Callable):
        return 'a callable'
    if origin is None and inspect.isclass(annotation):
        return annotation.__name__
    return str(annotation).replace('typing.', '').replace('collections.abc.', '')


def _fit(value: Any, annotation: Any) -> Any:
    if annotation in _ANYTHING or isinstance(value, Macro):
        return value
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, arguments)
    if origin is typing.Annotated:
        value = _fit(value, arguments[0])
        return _require(isinstance(value, (Reference, Macro))
                        or all(value in limits for limits in arguments[1:] if isinstance(limits, Range)), value)
    if isinstance(value, Reference):
        return _fit_made(value, annotation) if value.evaluate else _fit_constructor(value, annotation)
    if origin is typing.Literal:
        return _require(value in arguments, value)
    if annotation is None or annotation is type(None):
        return _require(value is None, value)
    base = origin or annotation
    if base in _SEQUENCES:
        return _fit_sequence(value, base, arguments)
    if base in _MAPPINGS:
        return _require(isinstance(value, dict), value)
    if base in (collections.abc.Callable, typing.Callable, type):
        hint = '' if not isinstance(value, str) else (
            f'a reference has no quotes: {value}; in Python, pass the function or class itself'
            if value.startswith('@') else
            'a schedule is an object: @LinearScheduler() with LinearScheduler.schedule = [(0.0, START), (1.0, 0.0)]'
            if value.startswith('lin_') else f'a number has no quotes: {value}'
            if re.fullmatch(r'[-+.\d]+(e[-+]?\d+)?', value) else f'a reference begins with @: @{value}')
        return _require(not isinstance(value, _LITERALS), value, hint)
    return _fit_scalar(value, base)


def _fit_union(value: Any, arguments: tuple) -> Any:
    hint = ''
    exact_first = sorted(arguments, key=lambda argument: (argument is not type(value), argument is bool))
    for argument in exact_first:
        try:
            return _fit(value, argument)
        except _Unfit as unfit:
            hint = hint or unfit.hint
    raise _Unfit(hint)


def _fit_scalar(value: Any, kind: Any) -> Any:
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    unquoted = ''
    if isinstance(value, str) and re.fullmatch(r'[-+.\d]+(e[-+]?\d+)?|True|False', value):
        unquoted = f'remove the quotes: {value}'
    if kind is int:
        return _require(type(value) is int, value, unquoted)
    if kind is float:
        return _require(type(value) in (int, float), value, unquoted)
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if kind is str:
        hint = 'remove the letter b before the quotes' if isinstance(value, bytes) else f"text needs quotes: '{value}'"
        return _require(isinstance(value, str), value, hint)
    if not inspect.isclass(kind) or _is_structural(kind):
        return value
    return _require(isinstance(value, kind), value, unquoted)


def _is_structural(kind: Any) -> bool:
    """Return whether a class describes a structure, so that values need not be instances of it."""
    return typing.is_typeddict(kind) or getattr(kind, '_is_protocol', False)


def _fit_sequence(value: Any, base: Any, arguments: tuple) -> Any:
    hint = f'write ({value!r},) for a tuple of one' if _is_element(value, arguments) else ''
    _require(isinstance(value, (list, tuple)), value, hint)
    if not arguments:
        return value
    if value and check(value[0], arguments[0])[0] and check(value, arguments[0])[0] is None:
        raise _Unfit(f'write ({value!r},) for a tuple of one')
    if base is tuple and Ellipsis not in arguments:
        _require(len(value) == len(arguments), value, f'it needs {len(arguments)} elements')
        return type(value)(_fit(item, argument) for item, argument in zip(value, arguments))
    return type(value)(_fit(item, arguments[0]) for item in value)


def _is_element(value: Any, arguments: tuple) -> bool:
    """Return whether ``value`` would fit if it were put into brackets."""
    return isinstance(value, (int, float, str)) and (not arguments or check(value, arguments[0])[0] is None)


def _fit_made(value: Reference, annotation: Any) -> Any:
    """Check ``@f()``: the object that ``f`` creates must fit."""
    made = reference_types.made_by(value)
    base: Any = typing.get_origin(annotation) or annotation
    if made is None or not (inspect.isclass(base) or base is typing.Literal) or _is_structural(base):
        return value
    advice = f'; write ({value!r},) for a tuple of one' if base is collections.abc.Sequence else ''
    hint = f'{value!r} creates an instance of {made.__name__}{advice}'
    if base is collections.abc.Callable:
        return _require(reference_types.is_callable(made), value, hint)
    if base is float:
        return _require(issubclass(made, (int, float)), value, hint)
    return _require(inspect.isclass(base) and (issubclass(made, base) or issubclass(base, made)), value, hint)


def _fit_constructor(value: Reference, annotation: Any) -> Any:
    """Check ``@f``: the function or class itself must fit."""
    if typing.get_origin(annotation) is collections.abc.Callable:
        arguments, made = typing.get_args(annotation), reference_types.made_by(value)
        wanted = arguments[-1] if arguments else Any
        if made is not None and wanted not in _ANYTHING and inspect.isclass(wanted) and not _is_structural(wanted):
            return _require(issubclass(made, wanted) or issubclass(wanted, made), value,
                            f'{value!r} creates an instance of {made.__name__}')
        return value
    base = typing.get_origin(annotation) or annotation
    _require(base is not collections.abc.Sequence, value, f'write ({value!r},) for a tuple of one')
    wants_value = base in (int, float, bool, str, type(None), list, tuple, dict, typing.Literal)
    is_wrong = wants_value and reference_types.find(value.selector)  # unknown names are reported by their check
    return _require(not is_wrong, value, f'write {value!r}() to pass what it returns')


def _require(fits: bool, value: Any, hint: str = '') -> Any:
    if not fits:
        raise _Unfit(hint)
    return value
