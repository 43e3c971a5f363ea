"""Access to the parts of a nest by a path such as ``'observation.camera'``."""
import difflib
from collections.abc import Callable, Sequence
from typing import Any

Field = str | tuple | None


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


def _key(nested: Any, name: str) -> Any:
    """Return the key or position of the part called ``name`` at the top level of ``nested``; ``None`` if there is none.
    """
    if isinstance(nested, dict):
        return name if name in nested else next((key for key in nested if str(key) == name), None)
    if hasattr(nested, '_fields'):
        return nested._fields.index(name) if name in nested._fields else None
    return int(name) if name.isdecimal() and int(name) < len(nested) else None


def _candidates(nested: Any, field: str) -> list[tuple]:
    """Return the keys that lead to the parts called ``field``; several where keys contain dots."""
    if not _is_node(nested):
        return []
    found: list[tuple] = []
    for end in [i for i, character in enumerate(field) if character == '.'] + [len(field)]:
        key = _key(nested, field[:end])
        if key is None:
            continue
        found += [(key, )] if end == len(field) else [
            (key, *rest) for rest in _candidates(nested[key], field[end + 1:])]
    return found


def locate_field(nested: Any, field: Field) -> tuple:
    """Return the keys and positions that lead to the part at the path ``field``, one for each level.

    The path joins keys of dicts, names of named tuples and positions by dots. Keys may contain dots, be empty or be
    integers. ``None`` is the whole nest, and so is ``''`` unless a dict has this key. The result can be used in place
    of the path.

    Raises:
        LookupError: no such field, or several; the message names the nearest existing one.
    """
    if isinstance(field, tuple):
        return field
    if field is None or (field == '' and not (isinstance(nested, dict) and '' in nested)):
        return ()
    found = _candidates(nested, field)
    if len(found) == 1:
        return found[0]
    if found:
        raise LookupError(f"field '{field}' is ambiguous: it can be {' or '.join(map(str, map(list, found)))}; rename "
                          'one of these keys')
    path = field.split('.')
    for depth, name in enumerate(path):
        if not _is_node(nested):
            raise LookupError(f"field '{field}' does not exist: {_place(path[:depth])} is a single "
                              f'{type(nested).__name__} and has no fields')
        key = _key(nested, name)
        if key is None:
            names = [str(child) for child, _ in extract_fields_from_nest(nested)]
            raise LookupError(_missing_field(field, '.'.join(path[:depth]), '.'.join(path[depth:]), name, names))
        nested = nested[key]
    raise LookupError(f"field '{field}' does not exist")


def _quickly_located(nested: Any, field: Field) -> tuple:
    """Return :func:`locate_field`, without its search where the names between the dots lead to a part."""
    if not isinstance(field, str):
        return field or ()
    keys, part = [], nested
    for name in field.split('.'):
        if isinstance(part, dict):
            if name not in part:
                return locate_field(nested, field)
            keys.append(name)
            part = part[name]
        elif hasattr(part, '_fields') and name in part._fields:
            keys.append(part._fields.index(name))
            part = getattr(part, name)
        else:
            return locate_field(nested, field)
    return tuple(keys)


def get_field(nested: Any, field: Field) -> Any:
    """Return the part of ``nested`` at the path ``field``; all of ``nested`` for ``''`` or ``None``.

    Raises:
        LookupError: no such field; the message names the nearest existing one.
    """
    for key in _quickly_located(nested, field):
        nested = nested[key]
    return nested


def listed(items: Sequence[str], most: int = 10) -> str:
    """Return texts separated by commas, for messages; only the first ``most`` of many."""
    rest = [f'... and {len(items) - most} more'] if len(items) > most else []
    return ', '.join([*items[:most], *rest])


def _missing_field(field: str, parent: str, rest: str, name: str, existing: list[str]) -> str:
    near = difflib.get_close_matches(rest, existing, n=1) or difflib.get_close_matches(name, existing, n=1)
    hint = f", did you mean '{near[0]}'?" if near else ''
    place = f"'{parent}'" if parent else 'the nest'
    names = f'[{listed(list(map(repr, existing)))}]' if existing else 'no fields'
    return f"field '{field}' does not exist: {place} has {names}{hint}"


def _place(path: Sequence[str]) -> str:
    return f"'{'.'.join(path)}'" if path else 'the nest'


def set_field(nested: Any, field: Field, new_value: Any) -> Any:
    """Return a copy of ``nested`` with the part at ``field`` replaced; the original is not modified."""
    return transform_nest(nested, field, lambda _: new_value)


def transform_nest(nested: Any, field: Field, func: Callable[[Any], Any]) -> Any:
    """Return a copy of ``nested`` with the part ``x`` at the path ``field`` replaced by ``func(x)``.

    Raises:
        LookupError: no such field.
    """
    return transform_nests([nested], field, lambda parts: [func(parts[0])])[0]


def transform_nests(nests: Sequence[Any], field: Field, func: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Transform several nests at once, like :func:`transform_nest`; ``func`` maps the list of parts to the new parts.
    """
    return _transform(list(nests), _quickly_located(nests[0], field), func)


def _transform(nests: list[Any], keys: tuple, func: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    if not keys:
        return list(func(nests))
    children = _transform([nest[keys[0]] for nest in nests], keys[1:], func)
    return [_replaced(nest, keys[0], new) for nest, new in zip(nests, children)]


def _replaced(nest: Any, key: Any, value: Any) -> Any:
    if isinstance(nest, dict):
        return type(nest)((name, value if name == key else old) for name, old in nest.items())
    if hasattr(nest, '_fields'):
        return nest._replace(**{nest._fields[key]: value})
    return type(nest)(value if i == key else old for i, old in enumerate(nest))


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
