"""Modules that combine the tensors of a nest, and other operations on the tensors of whole nests."""
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.gin_utils import configurable
from alfx.process_state import state
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec


class NestCombiner(nn.Module):
    """Base class of modules that combine a nest of tensors into one tensor.

    Args:
        name: name of the combiner.
        batch_dims: number of leading dimensions that all tensors share; they are kept.
    """

    def __init__(self, name: str, batch_dims: int = 1):
        super().__init__()
        self._name = name
        self._batch_dims = batch_dims

    @property
    def name(self) -> str:
        """Name of the combiner."""
        return self._name

    def _combine(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def combined_leaves(self, nested: Nested) -> list[tuple[str, Any]]:
        """Return ``(path, leaf)`` of the leaves of ``nested`` that :meth:`forward` combines."""
        return nest.flatten_with_path(nested)

    def forward(self, nested: Any) -> Any:
        """Combine the leaves of ``nested``, each ``[B, ...]``, in visiting order.

        Returns:
            One tensor; for a nest of specs, the spec of the combined tensor.

        Raises:
            ValueError: the nest has no leaves.
        """
        if any(isinstance(leaf, TensorSpec) for leaf in nest.flatten(nested)):
            zeros = self(nest.map_structure(lambda spec: spec.zeros((2, ) * self._batch_dims), nested))
            return TensorSpec(zeros.shape[self._batch_dims:], zeros.dtype)
        tensors = nest.flatten(nested)
        if not tensors:
            raise ValueError(f'{self._name}: the nest has no tensors to combine')
        return self._combine(tensors)


@configurable
class NestConcat(NestCombiner):
    """Concatenation of the tensors of a nest.

    Args:
        nest_mask: a nest of the structure of the input with leaves ``True`` for the tensors to concatenate, and
            ``False`` for the others; ``None``: all tensors.
        dim: the dimension of the specs to concatenate along: 0 is the first one after the batch dimension, negative
            numbers count from the end.
        name: name of the combiner.
    """

    def __init__(self, nest_mask: Nested = None, dim: int = -1, name: str = 'NestConcat'):
        super().__init__(name)
        self._nest_mask, self._dim = nest_mask, dim
        self._selected = None if nest_mask is None else [bool(x) for x in nest.flatten(nest_mask)]

    def combined_leaves(self, nested: Nested) -> list[tuple[str, Any]]:
        """Return ``(path, leaf)`` of the leaves that ``nest_mask`` selects."""
        leaves = nest.flatten_with_path(nested)
        return leaves if self._selected is None else [x for x, selected in zip(leaves, self._selected) if selected]

    def forward(self, nested: Any) -> Any:
        """Concatenate; see the base class.

        Raises:
            ValueError: the nest does not have the structure of ``nest_mask``, has no tensors, or they have too few
                dimensions.
        """
        if self._nest_mask is not None:
            nest.assert_same_structure(self._nest_mask, nested)
        return super().forward(nested)

    def _combine(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        if self._selected is not None:
            tensors = [t for t, selected in zip(tensors, self._selected) if selected]
        rank = tensors[0].ndim - self._batch_dims
        if not -rank <= self._dim < rank:
            raise ValueError(f'{self._name}: expected tensors with dimension {self._dim} besides the batch dimension, '
                             f'found {list(tensors[0].shape)}')
        return torch.cat(tensors, dim=self._dim if self._dim < 0 else self._dim + self._batch_dims)

    def make_parallel(self, n: int) -> 'NestConcat':
        """Return the combiner for tensors ``[B, n, ...]``."""
        return NestConcat(self._nest_mask, self._dim if self._dim < 0 else self._dim + 1, 'parallel_' + self._name)


def _activated(tensors: list[torch.Tensor], combined: torch.Tensor, activation: Callable | None) -> torch.Tensor:
    """Return ``activation(combined)``; an in-place activation must not modify a tensor of the caller."""
    return combined if activation is None else activation(combined.clone() if len(tensors) == 1 else combined)


class _ElementwiseCombiner(NestCombiner):
    """Base class of combiners that broadcast the specs; the batch dimensions of all tensors are the same."""

    def _aligned(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Insert dimensions of size 1 after the batch dimensions, so that all tensors have the same rank."""
        rank, outer = max(t.ndim for t in tensors), self._batch_dims
        return [t.reshape(*t.shape[:outer], *[1] * (rank - t.ndim), *t.shape[outer:]) for t in tensors]

    def _stacked(self: Any, single: Any) -> Any:
        self._batch_dims = single._batch_dims + 1
        return self


@configurable
class NestSum(_ElementwiseCombiner):
    """Sum of the tensors of a nest, which have the same shape (or shapes that broadcast).

    Args:
        average: divide the sum by the number of tensors.
        activation: applied to the result; ``None`` for none.
        name: name of the combiner.
    """

    def __init__(self, average: bool = False, activation: Callable | None = None, name: str = 'NestSum'):
        super().__init__(name)
        self._average, self._activation = average, activation

    def _combine(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        combined = reduce(torch.add, self._aligned(tensors))
        if self._average:
            combined = combined / len(tensors)
        return _activated(tensors, combined, self._activation)

    def make_parallel(self, n: int) -> 'NestSum':
        """Return the combiner for tensors ``[B, n, ...]``."""
        return NestSum(self._average, self._activation, 'parallel_' + self._name)._stacked(self)


@configurable
class NestMultiply(_ElementwiseCombiner):
    """Elementwise product of the tensors of a nest, which have the same shape (or shapes that broadcast).

    Args:
        activation: applied to the result; ``None`` for none.
        name: name of the combiner.
    """

    def __init__(self, activation: Callable | None = None, name: str = 'NestMultiply'):
        super().__init__(name)
        self._activation = activation

    def _combine(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return _activated(tensors, reduce(torch.mul, self._aligned(tensors)), self._activation)

    def make_parallel(self, n: int) -> 'NestMultiply':
        """Return the combiner for tensors ``[B, n, ...]``."""
        return NestMultiply(self._activation, 'parallel_' + self._name)._stacked(self)


@configurable
class NestOuterProduct(NestCombiner):
    """Flattened outer product of the tensors of a nest.

    Args:
        activation: applied to the result; ``None`` for none.
        batch_dims: number of leading dimensions that all tensors share.
        padding: append a 1 to each vector first, which adds the products of fewer vectors to the result.
        name: name of the combiner.
    """

    def __init__(self, activation: Callable | None = None, batch_dims: int = 1, padding: bool = False,
                 name: str = 'NestOuterProduct'):
        super().__init__(name, batch_dims)
        self._activation, self._padding = activation, padding

    def _combine(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        outer = tensors[0].shape[:self._batch_dims]
        vectors = [t.reshape(*outer, math.prod(t.shape[self._batch_dims:])) for t in tensors]
        if self._padding:
            vectors = [torch.cat([v, v.new_ones(*outer, 1)], dim=-1) for v in vectors]
        product = reduce(lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2), vectors)
        return _activated(tensors, product, self._activation)

    def make_parallel(self, n: int) -> 'NestOuterProduct':
        """Return the combiner for tensors ``[B, n, ...]``."""
        return NestOuterProduct(self._activation, self._batch_dims + 1, self._padding, 'parallel_' + self._name)


def stack_nests(nests: list[NestedTensor], dim: int = 0) -> NestedTensor:
    """Stack corresponding tensors of equally structured nests along a new dimension ``dim``."""
    return nest.stack(nests, dim)


def get_outer_rank(tensors: NestedTensor, specs: NestedTensorSpec) -> int:
    """Return the number of batch dimensions of ``tensors``: the difference between their ranks and those of ``specs``.

    Raises:
        SpecError: the structures, shapes or dtypes disagree, or the tensors have different numbers of batch dimensions.
    """
    ranks = set()
    nest.assert_same_structure(specs, tensors)
    for (path, spec), tensor in zip(nest.flatten_with_path(specs), nest.flatten(tensors)):
        rank = tensor.ndim - spec.ndim
        if rank < 0 or tuple(tensor.shape[rank:]) != tuple(spec.shape) or tensor.dtype != spec.dtype:
            raise SpecError(f"'{path}': expected {spec} after the batch dimensions, found {tensor.dtype} "
                            f'{tuple(tensor.shape)}')
        ranks.add(rank)
    if len(ranks) != 1:
        raise SpecError(f'expected the same number of batch dimensions for all tensors, found {sorted(ranks)}')
    return ranks.pop()


def convert_device(nests: Nested, device: str | torch.device | None = None) -> Nested:
    """Move the tensors of a nest to a device; other leaves are kept.

    Args:
        nests: any nest.
        device: target device; ``None``: the default device.
    """
    target = state.device if device is None else device
    return nest.map_structure(lambda x: x.to(target) if isinstance(x, torch.Tensor) else x, nests)


def grad(nested: NestedTensor, objective: torch.Tensor, retain_graph: bool = False) -> NestedTensor:
    """Return the gradient of the scalar ``objective`` with respect to each tensor of ``nested``, as a nest.

    Args:
        nested: tensors that ``objective`` depends on.
        objective: a scalar.
        retain_graph: keep the graph for another gradient.
    """
    gradients = torch.autograd.grad(objective, nest.flatten(nested), retain_graph=retain_graph)
    return nest.pack_sequence_as(nested, gradients)


def zeros_like(nested: NestedTensor) -> NestedTensor:
    """Return a nest of zeros of the same shapes and dtypes."""
    return nest.map_structure(torch.zeros_like, nested)


def make_nested_module(nested: Nested, ignore_non_module_element: bool = True) -> nn.Module | None:
    """Return one module that contains the modules of a nest, so that their parameters are registered.

    Args:
        nested: nest of modules; a dict becomes a ``ModuleDict``, other nodes a ``ModuleList``.
        ignore_non_module_element: skip elements that are not modules.

    Returns:
        The module; ``None`` for an element that is skipped.

    Raises:
        ValueError: an element is not a module and is not to be skipped.
    """
    if isinstance(nested, nn.Module):
        return nested
    if not nest.is_nested(nested):
        if not ignore_non_module_element:
            raise ValueError(f'expected a nest of modules, found {nested!r}')
        return None
    children = {name: make_nested_module(child, ignore_non_module_element)
                for name, child in nest.extract_fields_from_nest(nested)}
    kept = {name: child for name, child in children.items() if child is not None}
    return nn.ModuleDict(kept) if isinstance(nested, dict) else nn.ModuleList(kept.values())


def get_nested_field(nested: Nested, nest_fields: Nested) -> Nested:
    """Return the nest of the parts of ``nested`` at the paths that are the leaves of ``nest_fields``.

    Raises:
        LookupError: a path does not exist.
    """
    return nest.map_structure(lambda path: nest.get_field(nested, path), nest_fields)
