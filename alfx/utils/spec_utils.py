"""Operations on tensors and their specs: scaling to bounds, clipping, comparison."""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alfx import nest, tensor_specs
from alfx.gin_utils import configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec


@configurable('TensorSpec', module='alfx.tensor_specs')
def _tensor_spec(shape: Sequence[int], dtype: torch.dtype | str = torch.float32) -> TensorSpec:
    """Create a spec from a conf; the class itself is not a configurable, because specs are created at every step."""
    return TensorSpec(shape, dtype)


@configurable('BoundedTensorSpec', module='alfx.tensor_specs')
def _bounded_tensor_spec(shape: Sequence[int], dtype: torch.dtype | str = torch.float32, minimum: Any = 0,
                         maximum: Any = 1) -> BoundedTensorSpec:
    """Create a bounded spec from a conf, see :func:`_tensor_spec`."""
    return BoundedTensorSpec(shape, dtype, minimum, maximum)


def zeros_from_spec(nested_spec: NestedTensorSpec, batch_size: int) -> NestedTensor:
    """Return a nest of zeros ``[batch_size, *shape]``; see :func:`alfx.tensor_specs.zeros_from_spec`."""
    return tensor_specs.zeros_from_spec(nested_spec, batch_size)


def _bounds(spec: BoundedTensorSpec) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'expected a bounded spec, found {spec}')
    shape = tuple(spec.shape)
    return np.broadcast_to(spec.minimum, shape), np.broadcast_to(spec.maximum, shape)


def spec_means_and_magnitudes(spec: BoundedTensorSpec) -> tuple[Tensor, Tensor]:
    """Middle and half width of the range of each component, ``[*spec.shape]`` each.

    Raises:
        SpecError: the spec has no finite bounds.
    """
    low, high = (bound.astype(np.float64) for bound in _bounds(spec))
    if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high))):
        raise SpecError(f'{spec} has no finite bounds: its means and magnitudes are undefined')
    dtype = spec.dtype if spec.is_continuous else torch.float32
    return (torch.from_numpy(np.array(0.5 * (low + high))).to(dtype),
            torch.from_numpy(np.array(0.5 * (high - low))).to(dtype))


def scale_to_spec(tensor: Tensor, spec: BoundedTensorSpec) -> Tensor:
    """Map [-1, 1] linearly to the range of a spec.

    Args:
        tensor: ``[..., *spec.shape]``.
        spec: bounded continuous spec.

    Returns:
        Scaled tensor of the same shape.
    """
    means, magnitudes = spec_means_and_magnitudes(spec)
    return means.to(tensor.device) + magnitudes.to(tensor.device) * tensor


def clip_to_spec(value: Tensor, spec: BoundedTensorSpec) -> Tensor:
    """Clip ``value [..., *spec.shape]`` to the bounds, which may be infinite."""
    low, high = (torch.from_numpy(np.array(bound)).to(value.device, value.dtype) for bound in _bounds(spec))
    return torch.minimum(torch.maximum(value, low), high)


def is_same_spec(spec1: NestedTensorSpec, spec2: NestedTensorSpec) -> bool:
    """Return whether two nests of specs have the same structure and equal specs."""
    return nest.structure(spec1) == nest.structure(spec2) and nest.flatten(spec1) == nest.flatten(spec2)


def consistent_with_spec(nested: NestedTensor, spec: NestedTensorSpec, from_dim: int = 0) -> bool:
    """Return whether ``nested`` has the structure, shapes (from ``from_dim`` on) and dtypes of ``spec``."""
    return nest.structure(nested) == nest.structure(spec) and all(
        tuple(tensor.shape[from_dim:]) == tuple(wanted.shape) and tensor.dtype == wanted.dtype
        for tensor, wanted in zip(nest.flatten(nested), nest.flatten(spec)))
