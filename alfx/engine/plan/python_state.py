"""Detection of changes of numbers kept in Python, which a traced graph would freeze.

Classes of alfx and torch keep nothing in Python that decides what a traced function computes, or include it in their
graph key. Other classes may keep a counter, a switch, or a threshold that changes during training. While a function is
traced, the plain attributes that it reads of such objects are noted; the graph is dropped when one of them changes.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

_TRUSTED = ('alfx', 'torch', 'numpy', 'builtins', 'collections', 'functools', 'optree', 'gin')
_PLAIN = (bool, int, float, complex, str, type(None), np.generic)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_LARGEST_CONTAINER = 64
_DEPTH = 3


class Guard:
    """Plain attributes and their values at a point in time.

    Args:
        attributes: pairs of an object and the name of an attribute.
    """

    def __init__(self, attributes: list[tuple[Any, str]]) -> None:
        now = [(owner, name, _plain(_current(owner, name), _DEPTH)) for owner, name in attributes]
        self._values = [x for x in now if x[2] is not None]

    def changed(self, among: list[tuple[Any, str]] | None = None) -> str | None:
        """Return the name of an attribute that has another value now, or ``None`` if none does.

        Args:
            among: attributes to check; by default all.
        """
        chosen = None if among is None else {(id(owner), name) for owner, name in among}
        for owner, name, value in self._values:
            if (chosen is None or (id(owner), name) in chosen) and (_plain(_current(owner, name), _DEPTH) != value):
                return f'{type(owner).__name__}.{name}'
        return None


class PythonState:
    """Plain attributes of objects whose classes do not belong to alfx or torch.

    Args:
        objects: modules, which are searched with all their parts, and other objects.
    """

    def __init__(self, *objects: Any) -> None:
        self._given = objects

    def all_attributes(self) -> Guard:
        """Return the present values of all plain attributes, read or not."""
        return Guard([(owner, name) for owner in _foreign_objects(self._given)
                      for name in {*vars(owner), *(n for cls in type(owner).__mro__ if _is_foreign(cls)
                                                   for n in _plain_names(cls))} if name not in _MODULE_INTERNALS])

    @contextmanager
    def noted(self) -> Iterator[list[tuple[Any, str]]]:
        """Note which attributes are read within the context.

        Yields:
            Pairs of an object and a name, complete at the end of the context. Class attributes are always among them.
        """
        owners = {id(owner): owner for owner in _foreign_objects(self._given)}
        classes = {type(owner) for owner in owners.values()}
        noted: dict[tuple[int, str], tuple[Any, str]] = {}
        for owner in owners.values():
            for cls in filter(_is_foreign, type(owner).__mro__):
                noted.update({(id(owner), name): (owner, name) for name in _plain_names(cls)})
        original = {cls: cls.__getattribute__ for cls in classes}
        own = {cls for cls in classes if '__getattribute__' in vars(cls)}
        for cls in classes:
            cls.__getattribute__ = _noting(original[cls], owners, noted)
        reads: list[tuple[Any, str]] = []
        try:
            yield reads
        finally:
            for cls in classes:
                if cls in own:
                    cls.__getattribute__ = original[cls]
                else:
                    del cls.__getattribute__
            reads.extend(noted.values())


def _noting(get: Any, owners: dict[int, Any], noted: dict[tuple[int, str], tuple[Any, str]]) -> Any:
    def getattribute(self: Any, name: str) -> Any:
        if id(self) in owners and name not in _MODULE_INTERNALS and not name.startswith('__'):
            noted[id(self), name] = self, name
        return get(self, name)
    return getattribute


def _is_foreign(cls: type) -> bool:
    return cls.__module__.partition('.')[0] not in _TRUSTED


def _foreign_objects(objects: tuple[Any, ...]) -> Iterator[Any]:
    for given in objects:
        for x in (given.modules() if isinstance(given, nn.Module) else [given]):
            if _is_foreign(type(x)) and hasattr(x, '__dict__'):
                yield x


def _current(owner: Any, name: str) -> Any:
    """Return the value of an attribute, without calling properties."""
    for space in (vars(owner), *map(vars, type(owner).__mro__)):
        if name in space:
            return space[name]
    return None


def _plain_names(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if not name.startswith('__') and isinstance(value, _PLAIN)]


def _plain(value: Any, depth: int) -> Any:
    """Return a hashable form of a plain value or of a small container of them; ``None`` for anything else."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # 1, 1.0 and True are different numbers for a graph
    if not depth:
        return None
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= _LARGEST_CONTAINER and value.dtype != object else None
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _LARGEST_CONTAINER:
        return tuple([_plain(x, depth - 1) for x in value])
    if isinstance(value, dict) and len(value) <= _LARGEST_CONTAINER:
        return tuple([(_plain(k, depth - 1), _plain(x, depth - 1)) for k, x in value.items()])
    if not isinstance(value, (nn.Module, type)) and _is_foreign(type(value)) and hasattr(value, '__dict__'):
        return tuple([(name, _plain(x, depth - 1)) for name, x in vars(value).items()])
    return None
