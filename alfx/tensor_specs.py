"""Tensor specs: shape, dtype and optional bounds of a tensor.

A spec has no batch dimension: a tensor of ``TensorSpec((3,))`` is ``[B, 3]`` in a batch and ``[T, B, 3]`` in a
batch of sequences. Specs are immutable and hashable. Read next: :mod:`alfx.data_structures`.
"""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfx import nest

Nested = Any
"""``Nested[X]`` is a nest whose leaves are ``X``; untyped because Python cannot express arbitrary depth."""
NestedTensor = Any
NestedTensorSpec = Any

_DTYPE_NAMES = {dtype: str(dtype).removeprefix('torch.') for dtype in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool)}


class SpecError(ValueError):
    """A value does not match its spec, or specs do not match each other."""


def torch_dtype_to_str(dtype: torch.dtype) -> str:
    """Convert ``torch.float32`` to ``'float32'``, a name that numpy understands.

    Raises:
        SpecError: numpy has no such dtype.
    """
    if dtype not in _DTYPE_NAMES:
        raise SpecError(f'unsupported dtype {dtype}; supported: {sorted(_DTYPE_NAMES.values())}')
    return _DTYPE_NAMES[dtype]


def as_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Convert ``'float32'`` or ``'torch.float32'`` to ``torch.float32``; confs name dtypes as strings.

    Raises:
        SpecError: specs support no dtype of this name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    for known, name in _DTYPE_NAMES.items():
        if dtype in (name, f'torch.{name}'):
            return known
    raise SpecError(f'unsupported dtype {dtype!r}; supported: {sorted(_DTYPE_NAMES.values())}')


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(torch_dtype_to_str(dtype))


class TensorSpec:
    """The shape and dtype of a tensor, without its batch dimensions.

    Args:
        shape: sizes of the dimensions; ``()`` for a scalar.
        dtype: element type, or its name such as 'int64'.
    """

    __slots__ = ('_shape', '_dtype')

    def __init__(self, shape: Sequence[int], dtype: torch.dtype | str = torch.float32):
        self._shape = torch.Size(shape)
        self._dtype = as_torch_dtype(dtype)

    @classmethod
    def from_spec(cls, spec: 'TensorSpec') -> 'TensorSpec':
        """Return a plain spec with the shape and dtype of ``spec``."""
        return TensorSpec(spec.shape, spec.dtype)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, from_dim: int = 0) -> 'TensorSpec':
        """Return the spec of ``tensor`` without its first ``from_dim`` dimensions."""
        return TensorSpec(tensor.shape[from_dim:], tensor.dtype)

    @classmethod
    def from_array(cls, array: np.ndarray, from_dim: int = 0) -> 'TensorSpec':
        """Return the spec of a numpy array without its first ``from_dim`` dimensions."""
        return TensorSpec(array.shape[from_dim:], torch.from_numpy(np.empty((0, ), array.dtype)).dtype)

    def replace(self, shape: Sequence[int] | None = None, dtype: torch.dtype | str | None = None) -> 'TensorSpec':
        """Return a spec with another shape or dtype."""
        return TensorSpec(self._shape if shape is None else shape, self._dtype if dtype is None else dtype)

    @classmethod
    def is_bounded(cls) -> bool:
        """Return whether specs of this class have bounds."""
        return False

    @property
    def shape(self) -> torch.Size:
        """Sizes of the dimensions."""
        return self._shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._shape.numel()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._dtype

    @property
    def dtype_str(self) -> str:
        """Element type as a name that numpy understands."""
        return torch_dtype_to_str(self._dtype)

    @property
    def is_discrete(self) -> bool:
        """Return whether the elements are integers or booleans."""
        return not self._dtype.is_floating_point

    @property
    def is_continuous(self) -> bool:
        """Return whether the elements are floating point numbers."""
        return self._dtype.is_floating_point

    def constant(self, value: float, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return a tensor ``[*outer_dims, *shape]`` filled with ``value``."""
        return torch.full((*outer_dims, *self._shape), value, dtype=self._dtype)

    def zeros(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return a tensor ``[*outer_dims, *shape]`` of zeros."""
        return torch.zeros((*outer_dims, *self._shape), dtype=self._dtype)

    def nearest_zeros(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return the tensor ``[*outer_dims, *shape]`` within the bounds that is nearest to zeros."""
        return self.zeros(outer_dims)

    def ones(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return a tensor ``[*outer_dims, *shape]`` of ones."""
        return torch.ones((*outer_dims, *self._shape), dtype=self._dtype)

    def numpy_constant(self, value: float, outer_dims: Sequence[int] = ()) -> np.ndarray:
        """Return an array ``[*outer_dims, *shape]`` filled with ``value``."""
        return np.full((*outer_dims, *self._shape), value, dtype=_numpy_dtype(self._dtype))

    def numpy_zeros(self, outer_dims: Sequence[int] = ()) -> np.ndarray:
        """Return an array ``[*outer_dims, *shape]`` of zeros."""
        return self.numpy_constant(0, outer_dims)

    def randn(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return standard normal samples ``[*outer_dims, *shape]``; requires a floating point spec."""
        self._require_continuous('randn')
        return torch.randn((*outer_dims, *self._shape), dtype=self._dtype)

    def rand(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return uniform samples in [0, 1) ``[*outer_dims, *shape]``; requires a floating point spec."""
        self._require_continuous('rand')
        return torch.rand((*outer_dims, *self._shape), dtype=self._dtype)

    def _require_continuous(self, what: str) -> None:
        if self.is_discrete:
            raise SpecError(f'{what} needs a floating point spec, found {self}')

    def _key(self) -> tuple:
        return type(self), self._shape, self._dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple:
        return type(self), (tuple(self._shape), self._dtype)

    def __repr__(self) -> str:
        return f'TensorSpec({tuple(self._shape)}, {torch_dtype_to_str(self._dtype)})'


class BoundedTensorSpec(TensorSpec):
    """A ``TensorSpec`` with inclusive bounds.

    Args:
        shape: sizes of the dimensions.
        dtype: element type, or its name; with an integer type the values are ``minimum .. maximum``.
        minimum: lower bound, a number or an array that broadcasts to ``shape``.
        maximum: upper bound, a number or an array that broadcasts to ``shape``.

    Raises:
        SpecError: the bounds do not broadcast to ``shape``, or a minimum exceeds its maximum.
    """

    __slots__ = ('_minimum', '_maximum')

    def __init__(self, shape: Sequence[int], dtype: torch.dtype | str = torch.float32, minimum: Any = 0,
                 maximum: Any = 1):
        super().__init__(shape, dtype)
        self._minimum = self._as_bound(minimum, 'minimum')
        self._maximum = self._as_bound(maximum, 'maximum')
        if self.numel and not np.all(np.broadcast_to(self._minimum, self._shape) <= np.broadcast_to(self._maximum,
                                                                                                   self._shape)):
            raise SpecError(f'minimum exceeds maximum, or a bound is NaN, in {self}')

    def _as_bound(self, value: Any, name: str) -> np.ndarray:
        with np.errstate(invalid='ignore'):
            array = np.asarray(value).astype(_numpy_dtype(self._dtype))
        if self.is_discrete and not np.array_equal(array, value):
            raise SpecError(f'{name}: expected numbers of type {torch_dtype_to_str(self._dtype)}, found {value}')
        try:
            np.broadcast_shapes(array.shape, tuple(self._shape))
            if array.ndim:
                array = np.broadcast_to(array, tuple(self._shape)).copy()
        except ValueError:
            raise SpecError(f'{name} of shape {array.shape} does not broadcast to {tuple(self._shape)}') from None
        array.setflags(write=False)
        return array

    @classmethod
    def is_bounded(cls) -> bool:
        """Return whether specs of this class have bounds."""
        return True

    @classmethod
    def from_spec(cls, spec: TensorSpec) -> 'BoundedTensorSpec':
        """Return a bounded spec like ``spec``; without bounds it gets the whole range of its dtype."""
        if isinstance(spec, BoundedTensorSpec):
            return BoundedTensorSpec(spec.shape, spec.dtype, spec.minimum, spec.maximum)
        if spec.dtype == torch.bool:
            return BoundedTensorSpec(spec.shape, spec.dtype, False, True)
        info = torch.iinfo(spec.dtype) if spec.is_discrete else torch.finfo(spec.dtype)
        return BoundedTensorSpec(spec.shape, spec.dtype, info.min, info.max)

    def replace(self, shape: Sequence[int] | None = None, dtype: torch.dtype | str | None = None, minimum: Any = None,
                maximum: Any = None) -> 'BoundedTensorSpec':
        """Return a spec with another shape, dtype or other bounds."""
        return BoundedTensorSpec(self._shape if shape is None else shape, self._dtype if dtype is None else dtype,
                                 self._minimum if minimum is None else minimum,
                                 self._maximum if maximum is None else maximum)

    @property
    def minimum(self) -> np.ndarray:
        """Inclusive lower bound: a 0-d array, or one of the shape of the spec."""
        return self._minimum

    @property
    def maximum(self) -> np.ndarray:
        """Inclusive upper bound: a 0-d array, or one of the shape of the spec."""
        return self._maximum

    def nearest_zeros(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return the tensor ``[*outer_dims, *shape]`` within the bounds that is nearest to zeros."""
        nearest = np.minimum(np.maximum(np.zeros_like(self._minimum), self._minimum), self._maximum)
        return torch.from_numpy(np.array(np.broadcast_to(nearest, (*outer_dims, *self._shape))))

    def sample(self, outer_dims: Sequence[int] = ()) -> torch.Tensor:
        """Return uniform samples within the bounds, ``[*outer_dims, *shape]``, from torch's generator.

        Raises:
            SpecError: a bound is infinite.
        """
        shape = (*outer_dims, *self._shape)
        low, high = torch.as_tensor(self._minimum.copy()), torch.as_tensor(self._maximum.copy())
        uniform = torch.rand(shape, dtype=torch.float64)
        if self.is_discrete:
            low, high = low.to(torch.int64), high.to(torch.int64)
            return (low + (uniform * (high - low + 1)).floor().to(torch.int64)).to(self._dtype)
        if not (np.all(np.isfinite(self._minimum)) and np.all(np.isfinite(self._maximum))):
            raise SpecError(f'cannot sample uniformly from {self}: its bounds are infinite')
        return (low + uniform * (high.double() - low)).to(self._dtype)

    def numpy_sample(self, outer_dims: Sequence[int] = ()) -> np.ndarray:
        """Return :meth:`sample` as a numpy array."""
        return self.sample(outer_dims).numpy()

    def _key(self) -> tuple:
        return (*super()._key(), self._minimum.shape, self._minimum.tobytes(), self._maximum.shape,
                self._maximum.tobytes())

    def __reduce__(self) -> tuple:
        return type(self), (tuple(self._shape), self._dtype, self._minimum, self._maximum)

    def __repr__(self) -> str:
        low, high = (x.item() if x.ndim == 0 else x.tolist() for x in (self._minimum, self._maximum))
        return f'BoundedTensorSpec({tuple(self._shape)}, {torch_dtype_to_str(self._dtype)}, {low}, {high})'


def extract_spec(nested: NestedTensor, from_dim: int = 1) -> NestedTensorSpec:
    """Return the nest of specs of ``nested``, whose tensors have ``from_dim`` batch dimensions."""
    return nest.map_structure(lambda t: TensorSpec(t.shape[from_dim:], t.dtype), nested)


def zeros_from_spec(nested_spec: NestedTensorSpec, batch_size: int | Sequence[int]) -> NestedTensor:
    """Return a nest of zeros ``[batch_size, *shape]``."""
    outer = (batch_size, ) if isinstance(batch_size, int) else tuple(batch_size)
    return nest.map_structure(lambda spec: spec.zeros(outer), nested_spec)


def nearest_zeros(nested_spec: NestedTensorSpec, batch_size: int | Sequence[int]) -> NestedTensor:
    """Return the nest of tensors ``[batch_size, *shape]`` within the bounds that is nearest to zeros.

    It stands for "no action" where there is none, as before the first step of an episode.
    """
    outer = (batch_size, ) if isinstance(batch_size, int) else tuple(batch_size)
    return nest.map_structure(lambda spec: spec.nearest_zeros(outer), nested_spec)


def without_action(where: torch.Tensor, action: NestedTensor, action_spec: NestedTensorSpec) -> NestedTensor:
    """Return actions ``[B, ...]`` in the dtypes of the spec, :func:`nearest_zeros` where ``where`` ``[B]`` is True.
    """
    return nest.map_structure(
        lambda a, spec: torch.where(where.reshape(-1, *[1] * (a.ndim - 1)), spec.nearest_zeros(),
                                    a.detach().to('cpu', spec.dtype)), action, action_spec)


def check_consistent(nested: NestedTensor, spec: NestedTensorSpec, from_dim: int = 1, where: str = 'the nest') -> None:
    """Check the structure, shapes and dtypes of ``nested`` against ``spec``.

    Args:
        nested: nest of tensors with ``from_dim`` batch dimensions.
        spec: nest of specs.
        from_dim: number of leading dimensions to ignore.
        where: name of ``nested`` in error messages.

    Raises:
        SpecError: structure, shape or dtype differ; the message says where, what was expected and what was found.
    """
    try:
        nest.assert_same_structure(spec, nested)
    except ValueError as error:
        raise SpecError(f'{where}: {error}') from None
    for (path, wanted), tensor in zip(nest.flatten_with_path(spec), nest.flatten(nested)):
        if tuple(tensor.shape[from_dim:]) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
            name = f'{where}.{path}' if path else where
            raise SpecError(f'{name}: expected {torch_dtype_to_str(wanted.dtype)} {tuple(wanted.shape)}, found '
                            f'{torch_dtype_to_str(tensor.dtype)} {tuple(tensor.shape[from_dim:])}')


def select(mask: torch.Tensor, first: NestedTensor, second: NestedTensor) -> NestedTensor:
    """Return a nest with the rows of ``first`` where ``mask`` ``[B]`` is True, and the rows of ``second`` elsewhere."""
    return nest.map_structure(lambda x, y: torch.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y), first, second)
