"""Nested structures: tuples, lists, dicts, named tuples and distributions, arbitrarily deep.

All observations, actions, states and infos that cross a module boundary are nests whose leaves are usually tensors.
Only this package imports optree. Conventions:

* ``()`` is the empty nest: it has no leaves. ``None`` is a leaf like any other value.
* The keys of a dict are visited in sorted order.
* A distribution is a *node*: its leaves are its parameters, so nests can be stacked, indexed, stored and moved without
  a conversion. Pass ``is_leaf=is_distribution`` to treat it as one leaf.
* The spec of a nest is the same nest with a ``TensorSpec`` instead of each tensor; the spec of a distribution is that
  distribution with specs instead of its parameters.

Read next: :mod:`alfx.tensor_specs`, then :mod:`alfx.data_structures`.
"""
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from alfx.nest.distributions import is_distribution, register_distribution
from alfx.nest.fields import (extract_fields_from_nest, find_field, get_field, listed, locate_field, set_field,
                              transform_nest, transform_nests)

__all__ = [
    'assert_same_length', 'assert_same_structure', 'assert_same_structure_up_to', 'assert_same_type',
    'batch_nested_tensor', 'concatenate', 'extract_any_leaf_from_nest', 'extract_fields_from_nest', 'find_field',
    'flatten', 'flatten_up_to', 'flatten_with_path', 'get_field', 'get_nest_batch_size', 'get_nest_shape',
    'get_nest_size', 'is_distribution', 'is_namedtuple', 'is_nested', 'is_unnamedtuple', 'listed', 'locate_field',
    'map_structure', 'map_structure_up_to', 'map_structure_without_check', 'nest_top_level', 'pack_sequence_as',
    'prune_nest_like', 'py_map_structure_with_path', 'register_distribution', 'set_field', 'stack', 'structure',
    'sum_nest', 'transform_nest', 'transform_nests', 'transpose', 'unbatch_nested_tensor', 'unflatten',
]

_NAMESPACE = 'alfx'
_flatten = optree.tree_flatten


def flatten(nest: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of ``nest`` in visiting order."""
    return optree.tree_leaves(nest, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)


def structure(nest: Any, is_leaf: Callable[[Any], bool] | None = None) -> optree.PyTreeSpec:
    """Return the tree structure of ``nest`` without the leaves; structures can be compared with ``==``."""
    return optree.tree_structure(nest, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)


def flatten_with_structure(nest: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return leaves and structure; the inverse is :func:`unflatten`."""
    return _flatten(nest, none_is_leaf=True, namespace=_NAMESPACE)


def unflatten(structure: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """Return the nest with this structure and these leaves; the inverse of :func:`flatten_with_structure`."""
    return structure.unflatten(leaves)


def flatten_with_path(nest: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return ``[(path, leaf), ...]`` with paths such as ``'observation.camera'`` or ``'0.0'``."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(nest, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    return [('.'.join(str(e.field if isinstance(e, optree.NamedTupleEntry) else e.entry) for e in a), leaf)
            for a, leaf in zip(accessors, leaves)]


def map_structure(func: Callable[..., Any], *nests: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply ``func`` to the corresponding leaves of ``nests``.

    Raises:
        ValueError: the structures differ; the message names the first path at which they differ.
    """
    leaves, tree = _flatten(nests[0], is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    if len(nests) == 1:
        return tree.unflatten(map(func, leaves))
    others = []
    for other in nests[1:]:
        other_leaves, other_tree = _flatten(other, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
        if other_tree != tree:
            _raise_structure_error(nests[0], other)
        others.append(other_leaves)
    return tree.unflatten(map(func, leaves, *others))


def map_structure_without_check(func: Callable[..., Any], *nests: Any) -> Any:
    """Apply ``func`` like :func:`map_structure` to nests known to be alike; the nests are flattened without a check."""
    leaves, tree = _flatten(nests[0], none_is_leaf=True, namespace=_NAMESPACE)
    return tree.unflatten(map(func, leaves, *(flatten(n) for n in nests[1:])))


def py_map_structure_with_path(func: Callable[..., Any], *nests: Any,
                               is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply ``func(path, *leaves)``; for paths see :func:`flatten_with_path`."""
    map_structure(lambda *_: None, *nests, is_leaf=is_leaf)  # checks the structures
    named = flatten_with_path(nests[0], is_leaf)
    rest = [flatten(n, is_leaf) for n in nests[1:]]
    values = [func(path, leaf, *others) for (path, leaf), *others in zip(named, *rest)]
    return structure(nests[0], is_leaf).unflatten(values)


def pack_sequence_as(nest: Any, flat_seq: Sequence[Any]) -> Any:
    """Return ``flat_seq`` in the structure of ``nest``; the inverse of :func:`flatten`.

    Raises:
        ValueError: the number of elements differs from the number of leaves.
    """
    return structure(nest).unflatten(flat_seq)


def assert_same_structure(nest1: Any, nest2: Any, *more: Any) -> None:
    """Raise ``ValueError`` with the first differing path unless all nests have the same structure."""
    for other in (nest2, *more):
        if structure(nest1) != structure(other):
            _raise_structure_error(nest1, other)


def _raise_structure_error(nest1: Any, nest2: Any) -> None:
    path, left, right = _first_difference(nest1, nest2, '')
    where = f" at '{path}'" if path else ''
    raise ValueError(f'the nests have different structures{where}: expected {left}, found {right}')


def _first_difference(a: Any, b: Any, path: str) -> tuple[str, str, str]:
    """Return the first difference of two nests: ``(path, description of a, description of b)``."""
    leaf_a, leaf_b = not is_nested(a), not is_nested(b)
    if leaf_a or leaf_b or type(a) is not type(b) or is_distribution(a):
        return path, _describe(a), _describe(b)
    children_a, children_b = dict(_children(a)), dict(_children(b))
    if list(children_a) != list(children_b):
        in_one = [repr(key) for key in {**children_a, **children_b} if (key in children_a) != (key in children_b)]
        return path, _describe(a), f'{_describe(b)}, {listed(in_one)} in one of them only' if in_one else _describe(b)
    for key, child in children_a.items():
        if structure(child) != structure(children_b[key]):
            return _first_difference(child, children_b[key], f'{path}.{key}' if path else str(key))
    return path, _describe(a), _describe(b)


def _describe(value: Any) -> str:
    if is_distribution(value):
        return str(structure(value))
    if is_namedtuple(value):
        return f'{type(value).__name__}{value._fields}'
    if isinstance(value, dict):
        return f'a dict with keys [{listed(list(map(repr, sorted(value, key=str))))}]'
    if isinstance(value, (list, tuple)):
        return f'a {type(value).__name__} of {len(value)}'
    return f'a leaf ({type(value).__name__})'


def _children(nest: Any) -> Iterable[tuple[Any, Any]]:
    """Return ``(key, child)`` pairs of the top level of ``nest``."""
    if isinstance(nest, dict):
        return [(key, nest[key]) for key in sorted(nest, key=str)]
    if is_namedtuple(nest):
        return list(zip(nest._fields, nest))
    return list(enumerate(nest)) if isinstance(nest, (list, tuple)) else []


def flatten_up_to(shallow_nest: Any, nest: Any) -> list[Any]:
    """Return the parts of ``nest`` at the leaves of ``shallow_nest``, which is a prefix of it.

    Raises:
        ValueError: ``shallow_nest`` is not a prefix of ``nest``.
    """
    return structure(shallow_nest).flatten_up_to(nest)


def map_structure_up_to(shallow_nest: Any, func: Callable[..., Any], *nests: Any) -> Any:
    """Apply ``func`` to the parts of ``nests`` at the leaves of ``shallow_nest``; the result has its structure."""
    tree = structure(shallow_nest)
    return tree.unflatten(map(func, *(tree.flatten_up_to(n) for n in nests)))


def assert_same_structure_up_to(shallow_nest: Any, deep_nest: Any) -> None:
    """Raise ``ValueError`` unless ``shallow_nest`` is a prefix of ``deep_nest``."""
    flatten_up_to(shallow_nest, deep_nest)


def is_namedtuple(value: Any) -> bool:
    """Return whether ``value`` is an instance of a named tuple class."""
    return isinstance(value, tuple) and hasattr(value, '_fields')


def is_unnamedtuple(value: Any) -> bool:
    """Return whether ``value`` is a tuple without field names."""
    return isinstance(value, tuple) and not hasattr(value, '_fields')


def is_nested(value: Any) -> bool:
    """Return whether ``value`` is a node (tuple, list, dict, named tuple or distribution), not a leaf."""
    return isinstance(value, (tuple, list, dict)) or is_distribution(value)


def assert_same_type(value1: Any, value2: Any) -> None:
    """Raise ``ValueError`` unless both have the same type, or both are dicts."""
    if type(value1) is not type(value2) and not (isinstance(value1, dict) and isinstance(value2, dict)):
        raise ValueError(f'expected the same type, found {type(value1).__name__} and {type(value2).__name__}')


def assert_same_length(seq1: Sequence[Any], seq2: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless both have the same length."""
    if len(seq1) != len(seq2):
        raise ValueError(f'expected the same length, found {len(seq1)} and {len(seq2)}')


def extract_any_leaf_from_nest(nest: Any) -> Any:
    """Return the first leaf.

    Raises:
        ValueError: the nest has no leaves.
    """
    leaves = flatten(nest)
    if not leaves:
        raise ValueError('the nest has no leaves')
    return leaves[0]


def nest_top_level(nested: Any) -> Any:
    """Return the top level of ``nested`` with each child replaced by the leaf ``None``."""
    if not is_nested(nested) or is_distribution(nested):
        return None
    return optree.tree_map(lambda _: None, nested, is_leaf=lambda x: x is not nested, none_is_leaf=True,
                           namespace=_NAMESPACE)


def prune_nest_like(nest: Any, slim_nest: Any, value_to_match: Any = None) -> Any:
    """Return ``nest`` without the parts that ``slim_nest`` lacks.

    Children of a dict or named tuple that are absent from ``slim_nest`` are dropped (in a named tuple they become
    ``()``). Where ``slim_nest`` equals ``value_to_match`` or ``()``, the result is ``()``.

    Raises:
        ValueError: ``slim_nest`` has parts that ``nest`` lacks.
    """
    if (slim_nest is value_to_match and value_to_match is not None) or _is_empty(slim_nest):
        return ()
    if not is_nested(slim_nest) or is_distribution(slim_nest):
        return nest
    if type(nest) is not type(slim_nest):
        raise ValueError(f'cannot prune {_describe(nest)} to the structure of {_describe(slim_nest)}')
    wide = dict(_children(nest))
    missing = [key for key, _ in _children(slim_nest) if key not in wide]
    if missing or (isinstance(nest, (list, tuple)) and len(nest) != len(slim_nest)):
        raise ValueError(f'cannot prune {_describe(nest)} to {_describe(slim_nest)}: missing {missing}')
    pruned = {key: prune_nest_like(wide[key], child, value_to_match) for key, child in _children(slim_nest)}
    if isinstance(nest, dict):
        return type(nest)(pruned)
    return type(nest)(**pruned) if is_namedtuple(nest) else type(nest)(pruned.values())


def _is_empty(value: Any) -> bool:
    return type(value) in (tuple, list, dict) and len(value) == 0


def stack(nests: Sequence[Any], dim: int = 0) -> Any:
    """Stack corresponding tensors of equally structured ``nests`` along a new dimension ``dim``.

    A single nest is not copied: the result contains views of its tensors.
    """
    if len(nests) == 1:
        return _combined(nests, lambda column: column[0].unsqueeze(dim))
    return _combined(nests, lambda column: torch.stack(column, dim))


def concatenate(nests: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate corresponding tensors of equally structured ``nests`` along dimension ``dim``."""
    return _combined(nests, lambda column: torch.cat(column, dim))


def _combined(nests: Sequence[Any], combine: Callable[[Any], torch.Tensor]) -> Any:
    """Apply ``combine`` to each sequence of corresponding tensors of ``nests``, in the structure of the first nest.

    Tuples are traversed together, because flattening each of hundreds of steps takes longer than stacking them.
    """
    first = nests[0]
    if isinstance(first, torch.Tensor):
        return combine(nests)
    if type(first) is tuple or is_namedtuple(first):
        parts = [combine(column) if isinstance(column[0], torch.Tensor) else
                 () if column[0] == () else _combined(column, combine) for column in zip(*nests, strict=True)]
        return tuple(parts) if type(first) is tuple else type(first)(*parts)
    leaves, tree = flatten_with_structure(first)
    return tree.unflatten(map(combine, zip(leaves, *map(tree.flatten_up_to, nests[1:]))))


def batch_nested_tensor(nested_tensor: Any) -> Any:
    """Add a leading batch dimension of 1 to each tensor."""
    return map_structure(lambda x: x.unsqueeze(0), nested_tensor)


def unbatch_nested_tensor(nested_tensor: Any) -> Any:
    """Remove the leading batch dimension, which must be 1, from each tensor.

    Raises:
        ValueError: the batch size is not 1.
    """
    if any(len(x) != 1 for x in flatten(nested_tensor)):
        raise ValueError(f'expected a batch size of 1, found {[len(x) for x in flatten(nested_tensor)]}')
    return map_structure(lambda x: x.squeeze(0), nested_tensor)


def get_nest_shape(nest: Any) -> torch.Size:
    """Return the shape of the first leaf."""
    return torch.Size(extract_any_leaf_from_nest(nest).shape)


def get_nest_size(nest: Any, dim: int) -> int:
    """Return the size of dimension ``dim`` of the first leaf."""
    return get_nest_shape(nest)[dim]


def get_nest_batch_size(nest: Any) -> int:
    """Return the size of the first dimension of the first leaf."""
    return get_nest_size(nest, 0)


def transpose(nested: Any, shallow_nest: Any = None, new_shallow_nest: Any = None) -> Any:
    """Swap the outer structure ``shallow_nest`` of ``nested`` with the structure below it.

    ``{'a': (1, 2), 'b': (3, 4)}`` becomes ``({'a': 1, 'b': 3}, {'a': 2, 'b': 4})``.

    Args:
        nested: a nest whose parts at the leaves of ``shallow_nest`` have the same structure.
        shallow_nest: the outer structure; ``None``: the top level of ``nested``.
        new_shallow_nest: the inner structure, which becomes the outer one; ``None``: the top level of the parts.
    """
    outer = structure(nest_top_level(nested) if shallow_nest is None else shallow_nest)
    parts = outer.flatten_up_to(nested)
    inner = structure(nest_top_level(parts[0]) if new_shallow_nest is None else new_shallow_nest)
    rows = zip(*(inner.flatten_up_to(part) for part in parts))
    return inner.unflatten([outer.unflatten(row) for row in rows])


def sum_nest(nested: Any) -> Any:
    """Return the sum of all leaves."""
    first, *rest = flatten(nested)
    for leaf in rest:
        first = first + leaf
    return first
