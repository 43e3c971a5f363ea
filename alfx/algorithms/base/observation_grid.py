"""Grid over observations that numbers its cells, for tables of visit counts or values."""
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec

Bounds = Sequence[tuple[float, float] | None] | None


class ObservationGrid(nn.Module):
    """Maps observations to the cells of a grid, ``0 .. num_cells - 1``.

    Each integer is a coordinate, counted from its ``minimum``. The range of a floating point number is divided into
    ``grid_size`` equal parts. Values out of bounds are clipped to the nearest cell.

    Args:
        observation_spec: nest of specs.
        grid_size: number of parts, for all floating point numbers or for each in the order of the nest; ``None`` if
            there are none.
        grid_bounds: ``(low, high)`` for each floating point number in the order of the nest; ``None`` instead of a pair
            or of the whole argument: the bounds of the spec.
        owner: class named in error messages.

    Attributes:
        num_cells: number of cells.

    Raises:
        ValueError: integers or floating point numbers have no bounds, or arguments do not fit; the message names the
            part of the observation.
    """

    _low: Tensor
    _scale: Tensor
    _last: Tensor
    _stride: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, grid_size: int | Sequence[int] | None,
                 grid_bounds: Bounds, owner: str):
        super().__init__()
        leaves = [(f'observation {path}'.strip(), spec) for path, spec in nest.flatten_with_path(observation_spec)]
        num_floats = sum(spec.numel for _, spec in leaves if spec.is_continuous)
        parts = iter(_sizes(grid_size, num_floats, owner))
        pairs = iter(_pairs(grid_bounds, num_floats, owner))
        coordinates: list[tuple[float, float, int]] = []
        for where, spec in leaves:
            coordinates += _gridded(where, spec, parts, pairs, owner) if spec.is_continuous else _counted(where, spec,
                                                                                                         owner)
        sizes = [size for _, _, size in coordinates]
        self.num_cells = math.prod(sizes)
        # float64 holds integers up to 2**53 exactly
        self.register_buffer('_low', torch.tensor([low for low, _, _ in coordinates], dtype=torch.float64), False)
        self.register_buffer('_scale', torch.tensor([scale for _, scale, _ in coordinates], dtype=torch.float64), False)
        self.register_buffer('_last', torch.tensor(sizes, dtype=torch.float64) - 1, False)
        strides = [math.prod(sizes[i + 1:]) for i in range(len(sizes))]
        self.register_buffer('_stride', torch.tensor(strides, dtype=torch.float64), False)
        single = isinstance(observation_spec, BoundedTensorSpec) and observation_spec.is_discrete
        self._first = int(coordinates[0][0]) if single and len(coordinates) == 1 else None

    def forward(self, observation: NestedTensor) -> Tensor:
        """Return the cells, int64 ``[B]``, of observations ``[B, ...]``."""
        if self._first is not None:
            return (observation.reshape(-1).long() - self._first).clamp_(0, self.num_cells - 1)
        leaves = [leaf.reshape(len(leaf), -1).double() for leaf in nest.flatten(observation)]
        values = leaves[0] if len(leaves) == 1 else torch.cat(leaves, -1)
        digits = ((values - self._low) * self._scale).floor_().clamp_(min=torch.zeros_like(self._last), max=self._last)
        return (digits @ self._stride).long()


def _sizes(grid_size: Any, count: int, owner: str) -> list[int]:
    if grid_size is None:
        if count:
            raise ValueError(f'{owner}.grid_size: the observation has {count} floating point numbers; set the number '
                             'of parts that the range of each is divided into')
        return []
    if not count:
        raise ValueError(f'{owner}.grid_size: the observation has no floating point numbers to divide; remove it')
    sizes = [grid_size] * count if isinstance(grid_size, int) else list(grid_size)
    if len(sizes) != count or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f'{owner}.grid_size: expected a number of at least 1, or {count} of them, found {grid_size}')
    return sizes


def _pairs(grid_bounds: Bounds, count: int, owner: str) -> list[Any]:
    if grid_bounds is None:
        return [None] * count
    pairs = list(grid_bounds)
    if len(pairs) != count or not all(
            pair is None or (len(pair) == 2 and pair[0] < pair[1] and math.isfinite(pair[1] - pair[0]))
            for pair in pairs):
        raise ValueError(f'{owner}.grid_bounds: expected {count} pairs (low, high) with low < high, one for each '
                         f'floating point number of the observation, found {grid_bounds}')
    return pairs


def _gridded(where: str, spec: Any, parts: Any, pairs: Any, owner: str) -> list[tuple[float, float, int]]:
    """Return ``(low, scale, size)`` of the floating point numbers of one leaf."""
    bounds = _bounds(spec) if isinstance(spec, BoundedTensorSpec) else [(-math.inf, math.inf)] * spec.numel
    coordinates = []
    for own, _ in zip(bounds, range(spec.numel)):
        low, high = next(pairs) or own
        if not (low < high and math.isfinite(high - low)):
            raise ValueError(f'{owner}.grid_bounds: {where} has no finite range, found {spec}; set a pair (low, high) '
                             'for each of its numbers')
        size = next(parts)
        coordinates.append((low, size / (high - low), size))
    return coordinates


def _counted(where: str, spec: Any, owner: str) -> list[tuple[float, float, int]]:
    """Return ``(minimum, 1, size)`` of the integers of one leaf."""
    if spec.dtype == torch.bool:
        return [(0.0, 1.0, 2)] * spec.numel
    if not isinstance(spec, BoundedTensorSpec):
        raise ValueError(f'{owner}: {where} is {spec}, integers without bounds, which cannot index a table; bound '
                         'the observation')
    return [(low, 1.0, int(high - low) + 1) for low, high in _bounds(spec)]


def _bounds(spec: BoundedTensorSpec) -> list[tuple[float, float]]:
    shape = tuple(spec.shape)
    low, high = (np.broadcast_to(bound, shape).reshape(-1).tolist() for bound in (spec.minimum, spec.maximum))
    return list(zip(low, high))
