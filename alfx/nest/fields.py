"""Access to the parts of a nest by a path such as ``'observation.camera'``."""
import difflib
from collections.abc import Callable, Sequence
from typing import Any


def extract_fields_from_nest(nest: Any) -> list[tuple[str, Any]]:
    """Return ``[(name, value), ...]`` of the top level of a dict, named tuple, list or tuple.

    The names of a list or tuple are positions.

    Raises:
        ValueError: ``nest`` is a leaf.
    """
    if isinstance(nest, dict):
        return [(key, nest[key]) for key in sorted(nest, key=str)]
    if isinstance(nest, tuple) and hasattr(nest, '_fields'):
        return list(zip(nest._fields, nest))
    if isinstance(nest, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(nest)]
    raise ValueError(f'a {type(nest).__name__} has no fields')


def _is_node(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def get_field(nested: Any, field: str | None) -> Any:
    """Return the part of ``nested`` at the path ``field``; all of ``nested`` for ``''`` or ``None``.

    Raises:
        LookupError: no such field; the message names the nearest existing one.
    """
    if not field:
        return nested
    for depth, name in enumerate(path := field.split('.')):
        children = dict(extract_fields_from_nest(nested)) if _is_node(nested) else {}
        if name not in children:
            raise LookupError(_missing_field(field, '.'.join(path[:depth]), name, list(children)) if _is_node(nested)
                              else f"field '{field}' does not exist: {_place(path[:depth])} is a single "
                              f"{type(nested).__name__} and has no fields")
        nested = children[name]
    return nested


def listed(items: Sequence[str], most: int = 10) -> str:
    """Return texts separated by commas, for messages; only the first ``most`` of many."""
    rest = [f'... and {len(items) - most} more'] if len(items) > most else []
    return ', '.join([*items[:most], *rest])


def _missing_field(field: str, parent: str, name: str, existing: list[str]) -> str:
    near = difflib.get_close_matches(name, existing, n=1)
    hint = f", did you mean '{near[0]}'?" if near else ''
    place = f"'{parent}'" if parent else 'the nest'
    names = f'[{listed(list(map(repr, existing)))}]' if existing else 'no fields'
    return f"field '{field}' does not exist: {place} has {names}{hint}"


def _place(path: Sequence[str]) -> str:
    return f"'{'.'.join(path)}'" if path else 'the nest'


def set_field(nested: Any, field: str | None, new_value: Any) -> Any:
    """Return a copy of ``nested`` with the part at ``field`` replaced; the original is not modified."""
    return transform_nest(nested, field, lambda _: new_value)


def transform_nest(nested: Any, field: str | None, func: Callable[[Any], Any]) -> Any:
    """Return a copy of ``nested`` with the part ``x`` at the path ``field`` replaced by ``func(x)``.

    Raises:
        LookupError: no such field.
    """
    return transform_nests([nested], field, lambda parts: [func(parts[0])])[0]


def transform_nests(nests: Sequence[Any], field: str | None, func: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Transform several nests at once, like :func:`transform_nest`; ``func`` maps the list of parts to the new parts.
    """
    return _transform(list(nests), field.split('.') if field else [], func, field or '')


def _transform(nests: list[Any], path: list[str], func: Callable[[list[Any]], Sequence[Any]], field: str) -> list[Any]:
    if not path:
        return list(func(nests))
    children = [get_field(nest, path[0]) for nest in nests]
    return [_replaced(nest, path[0], new) for nest, new in zip(nests, _transform(children, path[1:], func, field))]


def _replaced(nest: Any, name: str, value: Any) -> Any:
    if isinstance(nest, dict):
        return type(nest)((key, value if key == name else old) for key, old in nest.items())
    if hasattr(nest, '_fields'):
        return nest._replace(**{name: value})
    return type(nest)(value if str(i) == name else old for i, old in enumerate(nest))


def find_field(nest: Any, name: str, ignore_empty: bool = True) -> list[Any]:
    """Return all values of fields called ``name``, at any depth, of dicts and named tuples.

    Args:
        nest: nest to search.
        name: name of the field.
        ignore_empty: skip values that are ``()`` or ``None``.
    """
    found: list[Any] = []
    if not _is_node(nest):
        return found
    for key, value in extract_fields_from_nest(nest):
        if key == name and not (ignore_empty and (value is None or (isinstance(value, tuple) and value == ()))):
            found.append(value)
        elif key != name:
            found.extend(find_field(value, name, ignore_empty))
    return found
