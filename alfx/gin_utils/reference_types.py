"""Types of the objects that references in a conf create, as far as annotations tell them."""

import inspect
from typing import Any, Optional

import gin

from . import registry
from .parsing import Reference


def resolve(selector: str) -> Any:
    """Return gin's entry (``wrapped``, ``selector``, ``allowlist``, ``denylist``) for the name ``selector``.

    Raises:
        ValueError: no configurable has this name.
        KeyError: the name is ambiguous.
    """
    return gin.config.ConfigurableReference(selector, False).configurable


def find(*selectors: str) -> Any:
    """Return gin's entry for the first of these names that exists; ``None`` if none exists."""
    for selector in selectors:
        try:
            return resolve(selector)
        except (ValueError, KeyError):  # unknown, ambiguous
            continue
    return None


def made_by(reference: Reference) -> Optional[type]:
    """Return the class of the object that calling the reference creates; ``None`` if it is unknown."""
    configurable = find(reference.selector)
    if configurable is None:  # reported by the check of references
        return None
    target = configurable.wrapped
    if inspect.isclass(target):
        return target if registry.construction_function(target)[0] == '__init__' else None
    if registry.step_function_of(configurable.selector):
        return None
    made = registry.annotation_of(target, 'return')
    return made if inspect.isclass(made) and made not in (object, Any, inspect.Parameter.empty) else None


def is_callable(kind: type) -> bool:
    """Return whether instances of a class can be called."""
    return any('__call__' in vars(base) for base in kind.__mro__)


def family(kind: type) -> Optional[type]:
    """Return the most general alfx base of a class, for example ``Network``; ``None`` if it has none."""
    return next((base for base in reversed(kind.__mro__) if base.__module__.split('.')[0] == 'alfx'), None)
