"""Layers without weights: casts, reshapes, selections, sums and scalings."""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx import context, nest
from alfx.gin_utils import Count, Range, configurable
from alfx.tensor_specs import BoundedTensorSpec, Nested, NestedTensor, SpecError, TensorSpec, as_torch_dtype
from alfx.utils import math_ops
from alfx.utils.tensor_utils import scale_gradient


class ElementwiseLayerBase(nn.Module):
    """Base of parameter-free layers whose result does not depend on the number of batch dimensions.

    Such a layer is its own parallel version.
    """

    def make_parallel(self, n: int) -> nn.Module:
        """Return the layer itself, which also handles ``[B, n, ...]``."""
        return self

    def first_layers(self, k: int) -> nn.Module:
        """Return the layer itself, which also handles ``[B, k, ...]``."""
        return self


@configurable(module='alfx.layers')
class Identity(ElementwiseLayerBase):
    """Layer that returns its input."""

    def forward(self, inputs: NestedTensor) -> NestedTensor:
        """Return ``inputs``."""
        return inputs


@configurable(module='alfx.layers')
class Dropout(ElementwiseLayerBase):
    """Dropout (Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html) that can be traced and compiled.

    In training each element becomes 0 with probability ``rate``, and the others are divided by ``1 - rate``. This
    applies to supervised training and to the run modes 'replay' and 'pretrain', also in target networks. Rollouts,
    evaluation and ``.eval()`` leave the input unchanged.

    Args:
        rate: probability in [0, 1) of dropping an element.

    Raises:
        ValueError: ``rate`` is 1 or otherwise out of range.
    """

    def __init__(self, rate: Annotated[float, Range(minimum=0, below=1)] = 0.01):
        super().__init__()
        self._rate = rate

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Drop elements of a tensor of any shape."""
        if not self.training or not context.is_training():
            return inputs
        # a comparison of uniform numbers gives the same mask when compiled; F.dropout does not
        kept = torch.rand_like(inputs, dtype=torch.float32) >= self._rate
        return inputs * (kept * (1.0 / (1.0 - self._rate))).to(inputs.dtype)

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        return f'rate={self._rate}'


@configurable(module='alfx.layers')
class Cast(ElementwiseLayerBase):
    """Conversion to another dtype.

    Args:
        dtype: dtype of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32):
        super().__init__()
        self._dtype = as_torch_dtype(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Convert ``inputs``; a tensor that already has the dtype is returned as it is."""
        return inputs.to(self._dtype)


class MaxPool2D(ElementwiseLayerBase):
    """Max pooling over squares of ``[..., C, H, W]``."""

    def __init__(self, kernel: int):
        super().__init__()
        self._kernel = kernel

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pooled = F.max_pool2d(inputs.flatten(0, -4), self._kernel)
        return pooled.view(*inputs.shape[:-2], *pooled.shape[-2:])


def _after_batch(dim: int) -> int:
    """Convert a dimension counted without the batch dimension to a dimension of the whole tensor."""
    return dim + 1 if dim >= 0 else dim


@configurable(module='alfx.layers')
class Transpose(nn.Module):
    """Swap of two dimensions.

    Args:
        dim0: first dimension, not counting the batch dimension; negative numbers count from the end.
        dim1: second dimension, counted in the same way.
    """

    def __init__(self, dim0: int = 0, dim1: int = 1):
        super().__init__()
        self._dims = dim0, dim1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a transposed view of ``inputs``."""
        return inputs.transpose(_after_batch(self._dims[0]), _after_batch(self._dims[1]))

    def make_parallel(self, n: int) -> 'Transpose':
        """Create the layer for inputs ``[B, n, ...]``."""
        return Transpose(*(_after_batch(dim) for dim in self._dims))


class Permute(nn.Module):
    """Permutation of the dimensions after the batch dimension.

    Args:
        dims: new order of the dimensions, not counting the batch dimension.

    Raises:
        ValueError: ``dims`` is not a permutation.
    """

    def __init__(self, *dims: int):
        super().__init__()
        self._dims = tuple(dim % len(dims) for dim in dims)
        if sorted(self._dims) != list(range(len(dims))):
            raise ValueError(f'Permute: {dims} is not a permutation of the dimensions 0 ... {len(dims) - 1}')

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a permuted view of ``inputs``."""
        return inputs.permute(0, *(dim + 1 for dim in self._dims))

    def make_parallel(self, n: int) -> 'Permute':
        """Create the layer for inputs ``[B, n, ...]``."""
        return Permute(0, *(dim + 1 for dim in self._dims))


@configurable(module='alfx.layers')
class OneHot(ElementwiseLayerBase):
    """One-hot encoding of integers.

    Args:
        num_classes: length of the vectors. ``None`` uses the number of values of the input; this works only for input
            preprocessors, where the network knows the input spec.
    """

    def __init__(self, num_classes: Count | None = None):
        super().__init__()
        self._num_classes = num_classes

    def for_input(self, spec: TensorSpec) -> 'OneHot':
        """Return a layer for inputs of ``spec``: this layer if ``num_classes`` is set, else a new one.

        Raises:
            SpecError: the inputs are not integers from 0 to an upper bound.
        """
        if self._num_classes is not None:
            return self
        if not isinstance(spec, BoundedTensorSpec) or not spec.is_discrete or (spec.minimum < 0).any():
            raise SpecError(f'OneHot: expected integers from 0 to an upper bound, found {spec}; set num_classes')
        return OneHot(int(spec.maximum.max()) + 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map integers ``[B, ...]`` in ``0 .. num_classes - 1`` to float32 ``[B, ..., num_classes]``."""
        if self._num_classes is None:
            raise ValueError('OneHot: num_classes is unknown; set it, unless the layer is an input preprocessor')
        return F.one_hot(inputs.long(), self._num_classes).float()


@configurable(module='alfx.layers')
class Reshape(nn.Module):
    """Reshape of all dimensions except the batch dimension.

    Args:
        shape: new shape without the batch dimension, as one sequence, or its first number; one of them may be -1.
        more: the other numbers.
    """

    def __init__(self, shape: int | Sequence[int] = (), *more: int):
        super().__init__()
        self._shape = (shape, *more) if isinstance(shape, int) else tuple(shape)

    def forward(self, inputs: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Map ``[B, ...]`` to ``[B, *shape]``, or to ``[B, first, *shape[1:]]``."""
        shape = self._shape if first is None else (first, *self._shape[1:])
        return inputs.reshape(inputs.shape[0], *shape)

    def make_parallel(self, n: int) -> 'Reshape':
        """Create the layer for inputs ``[B, n, ...]``."""
        return Reshape(n, *self._shape)

    def first_layers(self, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the reshape to ``[B, k, ...]`` for a layer that reshapes to ``[B, n, ...]``."""
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
        """Return ``func(inputs)``."""
        return self._func(inputs)


class GetFields(ElementwiseLayerBase):
    """Selection of parts of a nest by their paths.

    ``GetFields(('image', 'state.speed'))`` returns a pair, ``GetFields(speed='state.speed')`` a dict.

    Args:
        field_nest: nest of paths; the result has its structure.
        fields: paths of a dict, by key.

    Raises:
        ValueError: both arguments or neither are given.
    """

    def __init__(self, field_nest: Nested = None, **fields: str):
        super().__init__()
        if (field_nest is None) == (not fields):
            raise ValueError('GetFields: expected either field_nest or named fields')
        self._fields = fields if field_nest is None else field_nest

    def forward(self, inputs: Nested) -> Nested:
        """Return the selected parts.

        Raises:
            LookupError: a path does not exist; the message names the nearest existing path.
        """
        return nest.map_structure(lambda path: nest.get_field(inputs, path), self._fields)


@configurable(module='alfx.layers')
class Sum(nn.Module):
    """Sum over dimensions.

    Args:
        dim: one or several dimensions, not counting the batch dimension; negative numbers count from the end.
    """

    def __init__(self, dim: int | tuple[int, ...]):
        super().__init__()
        self._dim = (dim, ) if isinstance(dim, int) else tuple(dim)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sum ``inputs`` over the dimensions ``dim``."""
        return inputs.sum(dim=tuple(_after_batch(dim) for dim in self._dim))

    def make_parallel(self, n: int) -> 'Sum':
        """Create the layer for inputs ``[B, n, ...]``."""
        return Sum(tuple(_after_batch(dim) for dim in self._dim))


@configurable(module='alfx.layers')
class AddN(ElementwiseLayerBase):
    """Sum of several tensors of the same shape."""

    def forward(self, inputs: NestedTensor) -> torch.Tensor:
        """Sum the leaves of the nest ``inputs``."""
        return math_ops.add_n(nest.flatten(inputs))


@configurable(module='alfx.layers')
class Detach(ElementwiseLayerBase):
    """Layer that stops gradients."""

    def forward(self, inputs: NestedTensor) -> NestedTensor:
        """Return ``inputs`` without gradient."""
        return nest.map_structure(torch.Tensor.detach, inputs)


@configurable(module='alfx.layers')
class Scale(ElementwiseLayerBase):
    """Multiplication by a constant.

    Args:
        scale: factor.
    """

    def __init__(self, scale: float):
        super().__init__()
        self._scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``scale * inputs``."""
        return self._scale * inputs


@configurable(module='alfx.layers')
class ScaleGradient(ElementwiseLayerBase):
    """Identity whose gradient is multiplied by a constant.

    Args:
        scale: factor of the gradient.
    """

    def __init__(self, scale: float):
        super().__init__()
        self._scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` with a scaled gradient."""
        return scale_gradient(inputs, self._scale)
