"""What a reference of a conf makes, as far as that is known before it is made."""

import inspect
from typing import Any, Optional

import gin

from . import registry
from .parsing import Reference

__all__ = ['family', 'is_callable', 'made_by', 'resolve']


def resolve(selector: str) -> Any:
    """gin's record (``wrapped``, ``selector``, ``allowlist``, ``denylist``) of what a conf calls ``selector``.

    Raises:
        ValueError: nothing has this name.
        KeyError: more than one thing has it.
    """
    return gin.config.ConfigurableReference(selector, False).configurable


def made_by(reference: Reference) -> Optional[type]:
    """The class of what is made when the reference is called; None if that is not known."""
    try:
        configurable = resolve(reference.selector)
    except (ValueError, KeyError):  # reported where references are checked
        return None
    target = configurable.wrapped
    if inspect.isclass(target):
        return target if registry.construction_function(target)[0] == '__init__' else None
    if registry.step_function_of(configurable.selector):
        return None
    made = registry.annotation_of(target, 'return')
    return made if inspect.isclass(made) and made not in (object, Any, inspect.Parameter.empty) else None


def is_callable(kind: type) -> bool:
    """Whether instances of a class can be called."""
    return any('__call__' in vars(base) for base in kind.__mro__)


def family(kind: type) -> Optional[type]:
    """The most general class of alfx that a class descends from: ``Network`` for a network; None if there is none."""
    return next((base for base in reversed(kind.__mro__) if base.__module__.split('.')[0] == 'alfx'), None)
