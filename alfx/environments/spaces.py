"""Conversion of gymnasium spaces to tensor specs, and of batches of their samples to and from nests of tensors.

Box, Discrete (any ``start``), MultiDiscrete, MultiBinary and any nesting of these in Dict and Tuple are supported.
Other spaces raise an error that contains their path in the nest.
"""
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfx import nest
from alfx.environments.environment_errors import UnsupportedSpaceError
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec

_SUPPORTED = 'Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple'
_HINTS = {
    'MissionSpace': 'suite_minigrid.load drops the mission of MiniGrid',
    'Text': 'drop the field with a wrapper among gym_env_wrappers, or encode it as numbers',
    'Sequence': 'pad it to a fixed length with a wrapper among gym_env_wrappers',
    'Graph': 'encode it as arrays of a fixed size with a wrapper among gym_env_wrappers',
    'OneOf': 'encode the choice as a Dict of Discrete and Box with a wrapper among gym_env_wrappers',
}
# integer types that torch lacks or supports poorly: a type that holds all their values
_WIDER = {'bool': np.uint8, 'uint16': np.int32, 'uint32': np.int64}
_INT64 = np.iinfo(np.int64)


def tensor_spec_from_gym_space(space: spaces.Space, simplify_box_bounds: bool = True,
                               float_dtype: Any = np.float32, where: str = 'space') -> NestedTensorSpec:
    """Return the nest of specs of the samples of ``space``.

    - ``Discrete(n, start)``: ``BoundedTensorSpec((), int64, start, start + n - 1)``; MultiDiscrete: int64 of its shape.
    - ``MultiBinary``: int8 bounded by 0 and 1.
    - ``Box``: floating point becomes ``float_dtype``, integers keep their type (uint16 and uint32 become the next
      signed type, bool becomes uint8). The spec is bounded if every bound is finite in that type; a Box with any
      infinite bound becomes a plain ``TensorSpec``.
    - ``Dict`` and ``Tuple``: dict and tuple.

    Args:
        space: the space of one environment.
        simplify_box_bounds: use a scalar bound where the bound is the same for all elements.
        float_dtype: numpy type of floating point leaves.
        where: name of ``space`` in errors.

    Raises:
        UnsupportedSpaceError: another kind of space; the message contains its path in the nest.
    """
    if isinstance(space, spaces.Dict):
        return {key: tensor_spec_from_gym_space(child, simplify_box_bounds, float_dtype, f'{where}[{key!r}]')
                for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(tensor_spec_from_gym_space(child, simplify_box_bounds, float_dtype, f'{where}[{i}]')
                     for i, child in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return BoundedTensorSpec((), torch.int64, first, first + int(space.n) - 1)
    if isinstance(space, spaces.MultiDiscrete):
        low = np.asarray(space.start, np.int64)
        return _bounded(space.shape, torch.int64, low, low + np.asarray(space.nvec, np.int64) - 1, True)
    if isinstance(space, spaces.MultiBinary):
        return BoundedTensorSpec(space.shape, torch.int8, 0, 1)
    if isinstance(space, spaces.Box):
        return _box_spec(space, simplify_box_bounds, float_dtype, where)
    kind = type(space).__name__
    hint = next((_HINTS[cls.__name__] for cls in type(space).__mro__ if cls.__name__ in _HINTS),
                'convert it with a wrapper among gym_env_wrappers')
    raise UnsupportedSpaceError(f'{where}: {kind} spaces are not supported (supported: {_SUPPORTED}); {hint}')


def action_spec_from_gym_space(space: spaces.Space, normalize: bool = False, where: str = 'action') -> NestedTensorSpec:
    """Return the nest of specs of actions: like :func:`tensor_spec_from_gym_space`, but integers are always int64.

    Args:
        space: the action space of one environment.
        normalize: give floating point actions with finite bounds the bounds -1 and 1.
        where: name of ``space`` in errors.

    Raises:
        UnsupportedSpaceError: also for a space without components, or a floating point action with some finite and
            some infinite bounds.
    """
    spec = tensor_spec_from_gym_space(space, where=where)
    leaves = [_action_leaf(leaf_spec, leaf, path, normalize)
              for leaf_spec, (path, leaf) in zip(nest.flatten(spec), flatten_space(space, where))]
    if not any(leaf.numel for leaf in leaves):
        raise UnsupportedSpaceError(f'{where}: {space} has no components, so an agent has nothing to choose')
    return nest.pack_sequence_as(spec, leaves)


def _action_leaf(spec: TensorSpec, space: spaces.Space, where: str, normalize: bool) -> TensorSpec:
    if spec.is_discrete:
        return spec.replace(dtype=torch.int64)
    if not spec.is_bounded() and isinstance(space, spaces.Box) and np.any(_finite_bounds(space, np.dtype(np.float32))):
        raise UnsupportedSpaceError(
            f'{where}: expected an action whose bounds are all finite or all infinite, found {space}; '
            'add @ContinuousActionClip to gym_env_wrappers and bind ContinuousActionClip.min_v and .max_v')
    if isinstance(spec, BoundedTensorSpec) and normalize and spec.numel:
        return spec.replace(minimum=-1.0, maximum=1.0)
    return spec


def _finite_bounds(space: spaces.Box, dtype: np.dtype) -> np.ndarray:
    """Return which lower and upper bounds are finite as ``dtype``, bool ``[2, *shape]``."""
    if dtype.kind == 'f':
        most = float(np.finfo(dtype).max)
        values = np.stack([space.low, space.high]).astype(np.float64)
        return np.isfinite(values) & (np.abs(values) < most)
    return np.stack([space.bounded_below, space.bounded_above])


def _box_spec(space: spaces.Box, simplify: bool, float_dtype: Any, where: str) -> TensorSpec:
    if space.dtype is None or np.dtype(space.dtype).kind not in 'fiub':
        raise UnsupportedSpaceError(f'{where}: Box of dtype {space.dtype} is not supported; expected floating point, '
                                    'integer or bool')
    dtype = _leaf_dtype(space, float_dtype, where)
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    if 0 in space.shape:
        return BoundedTensorSpec(space.shape, torch_dtype, 0, 1)
    if not np.all(_finite_bounds(space, dtype)):
        return TensorSpec(space.shape, torch_dtype)
    return _bounded(space.shape, torch_dtype, space.low.astype(dtype), space.high.astype(dtype), simplify)


def _bounded(shape: Sequence[int], dtype: torch.dtype, low: np.ndarray, high: np.ndarray,
             simplify: bool) -> BoundedTensorSpec:
    if simplify and low.size and np.all(low == low.flat[0]) and np.all(high == high.flat[0]):
        return BoundedTensorSpec(shape, dtype, low.flat[0], high.flat[0])
    return BoundedTensorSpec(shape, dtype, low, high)


def _leaf_dtype(space: spaces.Space, float_dtype: Any, where: str) -> np.dtype:
    """Return the numpy type in which samples of a fundamental ``space`` become tensors."""
    if not isinstance(space, spaces.Box):
        return np.dtype(np.int8 if isinstance(space, spaces.MultiBinary) else np.int64)
    dtype = np.dtype(space.dtype)
    if dtype.kind == 'f':
        return np.dtype(float_dtype)
    if dtype == np.uint64:
        if space.high.size and int(space.high.max()) > _INT64.max:
            raise UnsupportedSpaceError(f'{where}: the bounds of {space} do not fit into int64; use smaller bounds')
        return np.dtype(np.int64)
    return np.dtype(_WIDER.get(dtype.name, dtype))


def _keys(space: spaces.Dict) -> list[Any]:
    """Return the keys in the order in which a nest visits their values."""
    keys = list(space.spaces)
    return [keys[i] for i in nest.flatten({key: i for i, key in enumerate(keys)})]


def flatten_space(space: spaces.Space, where: str = 'space') -> list[tuple[str, spaces.Space]]:
    """Return ``[(path, fundamental space), ...]`` in the order in which a nest visits its leaves."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in _keys(space) for leaf in flatten_space(space[key], f'{where}[{key!r}]')]
    if isinstance(space, spaces.Tuple):
        return [leaf for i, child in enumerate(space.spaces) for leaf in flatten_space(child, f'{where}[{i}]')]
    return [(where, space)]


def flatten_sample(space: spaces.Space, sample: Any) -> list[Any]:
    """Return the parts of a (batched) sample of ``space``, in the order of :func:`flatten_space`."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in _keys(space) for leaf in flatten_sample(space[key], sample[key])]
    if isinstance(space, spaces.Tuple):
        return [leaf for child, part in zip(space.spaces, sample) for leaf in flatten_sample(child, part)]
    return [sample]


def unflatten_sample(space: spaces.Space, leaves: Sequence[Any]) -> Any:
    """Return the sample with these leaves, the inverse of :func:`flatten_sample`; dicts keep the order of the space."""
    return _take(space, iter(leaves).__next__)


def _take(space: spaces.Space, take: Callable[[], Any]) -> Any:
    if isinstance(space, spaces.Dict):
        parts = {key: _take(space[key], take) for key in _keys(space)}
        return {key: parts[key] for key in space.spaces}
    return tuple(_take(child, take) for child in space.spaces) if isinstance(space, spaces.Tuple) else take()


class ObservationCodec:
    """Converter of batches of observations from numpy arrays to nests of tensors.

    Args:
        space: the observation space of one environment.
        simplify_box_bounds: see :func:`tensor_spec_from_gym_space`.
        float_dtype: see :func:`tensor_spec_from_gym_space`.

    Attributes:
        spec: the nest of specs of one observation.
    """

    def __init__(self, space: spaces.Space, simplify_box_bounds: bool = True, float_dtype: Any = np.float32):
        self.spec = tensor_spec_from_gym_space(space, simplify_box_bounds, float_dtype, 'observation')
        self._space = space
        self._structure = nest.structure(self.spec)
        self._is_leaf = not isinstance(space, (spaces.Dict, spaces.Tuple))
        self._dtypes = [_leaf_dtype(leaf, float_dtype, path) for path, leaf in flatten_space(space, 'observation')]
        self._dtype = self._dtypes[0] if self._is_leaf else None

    def decode(self, observation: Any, owned: bool) -> NestedTensor:
        """Return a batch of observations as tensors ``[B, ...]``.

        Args:
            observation: the observations of a gymnasium vector environment.
            owned: no one else will ever write to the arrays; otherwise they are copied.
        """
        if self._is_leaf:
            if owned and type(observation) is np.ndarray and observation.dtype == self._dtype:
                return torch.from_numpy(observation)
            return _tensor(observation, self._dtype, owned)
        leaves = flatten_sample(self._space, observation)
        return self._structure.unflatten([_tensor(x, d, owned) for x, d in zip(leaves, self._dtypes)])


def _tensor(array: Any, dtype: Any, owned: bool) -> torch.Tensor:
    if type(array) is not np.ndarray:
        array = array.cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
    if array.dtype != dtype:
        with np.errstate(over='ignore'):  # the environment group warns of numbers too large for float32
            array = array.astype(dtype, order='C')
    elif not owned:
        array = array.copy()
    return torch.from_numpy(array)


class ActionCodec:
    """Converter of nests of action tensors ``[B, ...]`` to batches of actions of a gymnasium vector environment.

    Args:
        space: the action space of one environment.
        batch_size: ``B``.
        normalize: rescale floating point actions with finite bounds from [-1, 1] to their bounds.
        clip: clip floating point actions with finite bounds (after the rescaling).

    Attributes:
        spec: the nest of specs of one action.
    """

    def __init__(self, space: spaces.Space, batch_size: int, normalize: bool = False, clip: bool = False):
        self.spec = action_spec_from_gym_space(space, normalize)
        self._space = space
        self._arguments = space, batch_size, normalize, clip
        self._structure = nest.structure(self.spec)
        self._is_leaf = not isinstance(space, (spaces.Dict, spaces.Tuple))
        specs = nest.flatten(self.spec)
        self._shapes = [(batch_size, *spec.shape) for spec in specs]
        self._dtypes = [np.dtype(spec.dtype_str) for spec in specs]
        leaves = [leaf for _, leaf in flatten_space(space)]
        self._mappings = [_action_mapping(leaf, spec, normalize, clip) for leaf, spec in zip(leaves, specs)]
        self._converters = [_action_converter(leaf, mapping, _is_mapped(spec, normalize, clip))
                            for leaf, spec, mapping in zip(leaves, specs, self._mappings)]
        if self._is_leaf:
            self._shape, self._convert, self._dtype = self._shapes[0], self._converters[0], self._dtypes[0]
            is_plain = not _is_mapped(self.spec, normalize, clip)
            self._plain_dtype = np.dtype(space.dtype) if is_plain else None

    def __reduce__(self) -> tuple[Any, ...]:
        return ActionCodec, self._arguments  # the converters are closures, which cannot be pickled

    def encode(self, action: NestedTensor) -> tuple[Any, list[np.ndarray]]:
        """Return the actions for the environment, and copies of the given leaves in the types of the specs.

        The arrays share memory neither with the tensors nor with each other.

        Raises:
            SpecError: the action has another structure or shape than the specs.
        """
        if self._is_leaf and type(action) is torch.Tensor:
            if action.requires_grad:
                action = action.detach()
            if not action.is_cpu:
                action = action.cpu()
            array = action.numpy()
            if array.shape != self._shape:
                self._refuse(action)
            encoded = array.astype(self._plain_dtype) if self._plain_dtype is not None else self._convert(action)
            return encoded, [array.astype(self._dtype)]
        leaves, structure = nest.flatten_with_structure(action)
        if structure != self._structure or any(x.shape != shape for x, shape in zip(leaves, self._shapes)):
            self._refuse(action)
        leaves = [leaf.detach().cpu() for leaf in leaves]
        encoded = [convert(leaf) for convert, leaf in zip(self._converters, leaves)]
        given = [leaf.numpy().astype(dtype) for leaf, dtype in zip(leaves, self._dtypes)]
        return unflatten_sample(self._space, encoded), given

    def in_bounds(self, action: NestedTensor) -> NestedTensor:
        """Return the actions of :meth:`encode` as a nest of tensors ``[B, ...]``, without leaving torch."""
        leaves = [mapping(leaf) for mapping, leaf in zip(self._mappings, nest.flatten(action))]
        return nest.pack_sequence_as(self.spec, leaves)

    def pack(self, leaves: Sequence[np.ndarray]) -> NestedTensor:
        """Return the nest of actions with these leaves, as tensors that share their memory."""
        if self._is_leaf:
            return torch.from_numpy(leaves[0])
        return self._structure.unflatten([torch.from_numpy(leaf) for leaf in leaves])

    def _refuse(self, action: NestedTensor) -> None:
        leaves = nest.flatten_with_path(action)
        found = {path: tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for path, x in leaves}
        expected = self._structure.unflatten([tuple(shape) for shape in self._shapes])
        raise SpecError(f'action: expected tensors of shapes {expected} (batch size first), '
                        f'found {found.get("", found)}')


def _is_mapped(spec: TensorSpec, normalize: bool, clip: bool) -> bool:
    """Return whether actions of ``spec`` are rescaled or clipped for the environment."""
    return isinstance(spec, BoundedTensorSpec) and spec.is_continuous and spec.numel > 0 and (normalize or clip)


def _action_converter(space: spaces.Space, mapping: Callable[[torch.Tensor], torch.Tensor],
                      is_mapped: bool) -> Callable[[torch.Tensor], np.ndarray]:
    if is_mapped:
        return lambda action: mapping(action).numpy()
    dtype = np.dtype(space.dtype)
    return lambda action: action.numpy().astype(dtype)


def _action_mapping(space: spaces.Space, spec: TensorSpec, normalize: bool,
                    clip: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    if not _is_mapped(spec, normalize, clip):
        return lambda action: action
    assert isinstance(space, spaces.Box)
    dtype = np.dtype(space.dtype)
    half = (space.high.astype(np.float64) - space.low) / 2
    # asarray: the result of arithmetic with arrays of shape () is a number
    scale = torch.from_numpy(np.asarray(half if normalize else np.ones_like(space.low), dtype))
    offset = torch.from_numpy(np.asarray(space.low + half if normalize else np.zeros_like(space.low), dtype))
    low, high = _bounds(space)
    is_centered = not offset.any()

    def convert(action: torch.Tensor) -> torch.Tensor:
        # in torch, like the policy: the first numpy arithmetic after an update is slow
        if action.dtype != scale.dtype:
            action = action.to(scale.dtype)
        action = action * scale
        if not is_centered:
            action += offset
        if clip:
            action.clamp_(low, high)
        return action

    return convert


def _bounds(space: spaces.Box) -> tuple[Any, Any]:
    """Return the bounds of all elements: numbers if all elements have the same (faster), otherwise tensors."""
    low, high = space.low, space.high
    if np.all(low == low.flat[0]) and np.all(high == high.flat[0]):
        return low.flat[0].item(), high.flat[0].item()
    return torch.from_numpy(low.copy()), torch.from_numpy(high.copy())
