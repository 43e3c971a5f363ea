"""Dataclasses of settings whose fields declare their valid values.

::

    @configurable
    @dataclasses.dataclass
    class Settings:
        num_trials: Optional[int] = setting(None, minimum=1, may_change=True)
        seed: int = setting(0, minimum=0)
        device: str = 'cpu'

The type of a field is its annotation. ``float`` accepts int; neither accepts bool.
"""
import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from alfx.gin_utils.conf_error import Problem
from alfx.gin_utils.value_checks import problem_of


def setting(default: Any = dataclasses.MISSING, *, may_change: bool = False, **limits: Any) -> Any:
    """Declare a field of a dataclass of settings.

    Args:
        default: default value; without it the field is required.
        may_change: allow another value when a stored run is resumed.
        limits: ``minimum``, ``maximum``, ``above``, ``choices``, ``kind`` and ``optional`` as for
            :func:`~alfx.gin_utils.value_checks.check_value`; ``kind`` and ``optional`` default to the annotation.
    """
    return dataclasses.field(default=default, metadata={'limits': limits, 'may_change': may_change})


def wrong_values(settings: Any, owner: str) -> list[Problem]:
    """Return the problems of all fields that have the wrong type or are out of range.

    Args:
        settings: instance of a dataclass.
        owner: name of its class, as a conf writes it.
    """
    annotations = typing.get_type_hints(type(settings))
    problems = [problem_of(owner, field.name, getattr(settings, field.name),
                           **{**_allowed_by(annotations[field.name]), **field.metadata.get('limits', {})})
                for field in dataclasses.fields(settings)]
    return [problem for problem in problems if problem is not None]


def changeable(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that allows other values of these arguments of a function when a stored run is resumed."""
    def mark(function: Any) -> Any:
        function.changeable_arguments = frozenset(names)
        return function

    return mark


def may_change(cls: Any) -> frozenset[str]:
    """Return the fields or arguments that may differ when a stored run is resumed."""
    if isinstance(cls, types.FunctionType):
        return getattr(cls, 'changeable_arguments', frozenset())
    if getattr(cls, 'settings_may_change', False):
        return frozenset(inspect.signature(cls).parameters)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return frozenset(field.name for field in fields if field.metadata.get('may_change'))


def _allowed_by(annotation: Any) -> dict[str, Any]:
    """Derive ``kind`` and ``optional`` for :func:`~alfx.gin_utils.value_checks.check_value` from an annotation."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    alternatives = typing.get_args(annotation) if is_union else (annotation,)
    kinds: list[Any] = []
    for alternative in alternatives:
        base = typing.get_origin(alternative) or alternative
        if base is collections.abc.Sequence:
            kinds += [list, tuple]
        elif base is not type(None):
            kinds.append(callable if base is collections.abc.Callable else object if base is Any else base)
    return dict(kind=kinds, optional=type(None) in alternatives)
