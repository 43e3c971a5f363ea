"""Layers without weights: what they do to a batch does not depend on training."""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx import nest
from alfx.gin_utils import configurable
from alfx.gin_utils.value_checks import Count
from alfx.tensor_specs import BoundedTensorSpec, Nested, NestedTensor, SpecError, TensorSpec, as_torch_dtype
from alfx.utils import math_ops
from alfx.utils.tensor_utils import scale_gradient


class ElementwiseLayerBase(nn.Module):
    """Base of layers without parameters whose result does not depend on the number of batch dimensions.

    So ``n`` of them in parallel are the layer itself.
    """

    def make_parallel(self, n: int) -> nn.Module:
        """The layer itself, as it does the same to ``[B, n, ...]``."""
        return self

    def first_layers(self, k: int) -> nn.Module:
        """The layer itself, likewise."""
        return self


@configurable(module='alfx.layers')
class Identity(ElementwiseLayerBase):
    """What comes in comes out."""

    def forward(self, inputs: NestedTensor) -> NestedTensor:
        """``inputs`` itself."""
        return inputs


@configurable(module='alfx.layers')
class Cast(ElementwiseLayerBase):
    """Convert to another dtype.

    Args:
        dtype: the dtype of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32):
        super().__init__()
        self._dtype = as_torch_dtype(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape; the same tensor if it has the dtype already."""
        return inputs.to(self._dtype)


def _after_batch(dim: int) -> int:
    """A dimension counted without the batch dimension, as one of the whole tensor."""
    return dim + 1 if dim >= 0 else dim


@configurable(module='alfx.layers')
class Transpose(nn.Module):
    """Swap two dimensions.

    Args:
        dim0: not counting the batch dimension: 0 is the one behind it; negative ones count from the end.
        dim1: likewise.
    """

    def __init__(self, dim0: int = 0, dim1: int = 1):
        super().__init__()
        self._dims = dim0, dim1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A view of ``inputs``."""
        return inputs.transpose(_after_batch(self._dims[0]), _after_batch(self._dims[1]))

    def make_parallel(self, n: int) -> 'Transpose':
        """The layer for inputs ``[B, n, ...]``."""
        return Transpose(*(_after_batch(dim) for dim in self._dims))


class Permute(nn.Module):
    """Reorder the dimensions behind the batch dimension.

    Args:
        dims: the new order, not counting the batch dimension.

    Raises:
        ValueError: ``dims`` is no permutation.
    """

    def __init__(self, *dims: int):
        super().__init__()
        self._dims = tuple(dim % len(dims) for dim in dims)
        if sorted(self._dims) != list(range(len(dims))):
            raise ValueError(f'Permute: {dims} is no permutation of the dimensions 0 ... {len(dims) - 1}')

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A view of ``inputs``."""
        return inputs.permute(0, *(dim + 1 for dim in self._dims))

    def make_parallel(self, n: int) -> 'Permute':
        """The layer for inputs ``[B, n, ...]``."""
        return Permute(0, *(dim + 1 for dim in self._dims))


@configurable(module='alfx.layers')
class OneHot(ElementwiseLayerBase):
    """Integers to one-hot vectors.

    Args:
        num_classes: length of the vectors; ``None``: as many as the input has values, which a network finds out that
            has this layer as its input preprocessor.
    """

    def __init__(self, num_classes: Count | None = None):
        super().__init__()
        self._num_classes = num_classes

    def for_input(self, spec: TensorSpec) -> 'OneHot':
        """This layer if it knows its length, else one for inputs like this.

        Raises:
            SpecError: they are not integers from 0 to an upper bound.
        """
        if self._num_classes is not None:
            return self
        if not isinstance(spec, BoundedTensorSpec) or not spec.is_discrete or (spec.minimum < 0).any():
            raise SpecError(f'OneHot: expected integers from 0 to an upper bound, found {spec}; give it num_classes')
        return OneHot(int(spec.maximum.max()) + 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Integers ``[B, ...]`` in ``0 .. num_classes - 1`` to float32 ``[B, ..., num_classes]``."""
        if self._num_classes is None:
            raise ValueError('OneHot: num_classes is not known; give it, unless this is an input preprocessor')
        return F.one_hot(inputs.long(), self._num_classes).float()


@configurable(module='alfx.layers')
class Reshape(nn.Module):
    """Reshape all but the batch dimension.

    Args:
        shape: the new shape without the batch dimension, as numbers or one sequence; one of them may be -1.
    """

    def __init__(self, *shape: Any):
        super().__init__()
        self._shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape

    def forward(self, inputs: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """``[B, ...]`` to ``[B, *shape]``, or to ``[B, first, *shape[1:]]``."""
        shape = self._shape if first is None else (first, *self._shape[1:])
        return inputs.reshape(inputs.shape[0], *shape)

    def make_parallel(self, n: int) -> 'Reshape':
        """The layer for inputs ``[B, n, ...]``."""
        return Reshape(n, *self._shape)

    def first_layers(self, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Of a layer for ``[B, n, ...]``, what does the same to ``[B, k, ...]``."""
        return partial(self, first=k)


class Lambda(nn.Module):
    """A function as a layer.

    Args:
        func: called with the input; must not change it in place.
    """

    def __init__(self, func: Callable[[Any], Any]):
        super().__init__()
        self._func = func

    def forward(self, inputs: Any) -> Any:
        """``func(inputs)``."""
        return self._func(inputs)


class GetFields(ElementwiseLayerBase):
    """Pick parts of a nest by their paths.

    ``GetFields(('image', 'state.speed'))`` gives a pair, ``GetFields(speed='state.speed')`` a dict.

    Args:
        field_nest: a nest of paths; the result has its structure.
        fields: the same for a dict.

    Raises:
        ValueError: both or neither are given.
    """

    def __init__(self, field_nest: Nested = None, **fields: str):
        super().__init__()
        if (field_nest is None) == (not fields):
            raise ValueError('GetFields: expected either field_nest or named fields')
        self._fields = fields if field_nest is None else field_nest

    def forward(self, inputs: Nested) -> Nested:
        """The parts.

        Raises:
            LookupError: a path does not exist; the message names the nearest one that does.
        """
        return nest.map_structure(lambda path: nest.get_field(inputs, path), self._fields)


@configurable(module='alfx.layers')
class Sum(nn.Module):
    """Sum over dimensions.

    Args:
        dim: one or several dimensions, not counting the batch dimension; negative ones count from the end.
    """

    def __init__(self, dim: int | tuple[int, ...]):
        super().__init__()
        self._dim = (dim, ) if isinstance(dim, int) else tuple(dim)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` without the dimensions ``dim``."""
        return inputs.sum(dim=tuple(_after_batch(dim) for dim in self._dim))

    def make_parallel(self, n: int) -> 'Sum':
        """The layer for inputs ``[B, n, ...]``."""
        return Sum(tuple(_after_batch(dim) for dim in self._dim))


@configurable(module='alfx.layers')
class AddN(ElementwiseLayerBase):
    """The sum of several tensors of the same shape."""

    def forward(self, inputs: NestedTensor) -> torch.Tensor:
        """The sum of the leaves of the nest ``inputs``."""
        return math_ops.add_n(nest.flatten(inputs))


@configurable(module='alfx.layers')
class Detach(ElementwiseLayerBase):
    """Let no gradient pass."""

    def forward(self, inputs: NestedTensor) -> NestedTensor:
        """``inputs`` as constants."""
        if isinstance(inputs, torch.Tensor):
            return inputs.detach()
        return nest.map_structure(torch.Tensor.detach, inputs)


@configurable(module='alfx.layers')
class Scale(ElementwiseLayerBase):
    """Multiply by a number.

    Args:
        scale: the factor.
    """

    def __init__(self, scale: float):
        super().__init__()
        self._scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``scale * inputs``."""
        return self._scale * inputs


@configurable(module='alfx.layers')
class ScaleGradient(ElementwiseLayerBase):
    """Multiply the gradient by a number and leave the value as it is.

    Args:
        scale: the factor.
    """

    def __init__(self, scale: float):
        super().__init__()
        self._scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The value of ``inputs``."""
        return scale_gradient(inputs, self._scale)
