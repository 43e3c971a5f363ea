"""Storage and look-up of the last steps of each environment.

Each environment has its own ring (:mod:`~alfx.experience_replayers.rings`); all of them are the columns of one storage
(:mod:`~alfx.experience_replayers.packed_storage`). Sampling is added by a subclass, see
:mod:`~alfx.experience_replayers.replay_buffer`.
"""
import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

import numpy as np
import torch
from torch import Tensor

from alfx import context, nest
from alfx.experience_replayers.packed_storage import PackedStorage
from alfx.experience_replayers.rings import RingIndex
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, check_consistent

_Method = TypeVar('_Method', bound=Callable[..., Any])


def locked(method: _Method) -> _Method:
    """Decorate a method of a shared buffer so that only one process at a time runs it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._lock is None:
            return method(self, *args, **kwargs)
        with self._lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def atomic(method: _Method) -> _Method:
    """Decorate a method of a buffer to run without gradients and, in a shared buffer, in one process at a time."""
    return locked(torch.no_grad()(method))


class RingBuffer:
    """The last steps of each environment, in preallocated tensors.

    Args:
        data_spec: nest of specs of the data of one step of one environment; may contain distributions.
        num_environments: number of environments.
        max_length: number of steps that are kept for each environment.
        device: device of the storage.
        allow_multiprocess: the buffer can be passed to other processes, which then work on the same contents.
        memory_map_dir: folder for memory-mapped storage in a file instead of memory.
        name: name of this buffer in error messages.

    Attributes:
        bytes_per_step: size of the data of one step of one environment in bytes, without padding.

    Raises:
        ValueError: an argument is out of range, or conflicts with another.
    """

    def __init__(self, data_spec: NestedTensorSpec, num_environments: int, max_length: int = 1024,
                 device: str | torch.device = 'cpu', allow_multiprocess: bool = False,
                 memory_map_dir: Optional[str] = None, name: str = 'RingBuffer') -> None:
        require_at_least(name, 1, num_environments=num_environments, max_length=max_length)
        specs, self._tree = nest.flatten_with_structure(data_spec)
        if not specs:
            raise ValueError(f'{name}.data_spec: expected at least one TensorSpec, found an empty nest')
        self.name = name
        _check_storage(name, torch.device(device), allow_multiprocess, memory_map_dir)
        self.device = _storage_device(name, torch.device(device))
        self.data_spec = data_spec
        self._leaf_indices = self._tree.unflatten(range(len(specs)))
        self.num_environments = num_environments
        self.max_length = max_length
        self._shapes = [spec.shape for spec in specs]
        self._batch_shapes = [torch.Size((num_environments, *shape)) for shape in self._shapes]
        self._sequence_shapes: tuple[int, list[torch.Size]] = 0, []  # length and shapes of the latest sequence
        self._dtypes = [spec.dtype for spec in specs]
        self.bytes_per_step = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        self._all_envs = torch.arange(num_environments)
        self._store = PackedStorage(specs, max_length, num_environments, self.device, allow_multiprocess,
                                    memory_map_dir)
        self._rings = RingIndex(num_environments, max_length, allow_multiprocess)
        self._lock: Any = torch.multiprocessing.get_context('spawn').RLock() if allow_multiprocess else None

    # Description and size -------------------------------------------------------------------------------------

    @property
    def current_pos(self) -> Tensor:
        """Position of the next step of each environment, int64 ``[num_environments]``."""
        return torch.from_numpy(self._rings.positions().copy())

    @property
    def current_size(self) -> Tensor:
        """Number of stored steps of each environment, int64 ``[num_environments]``."""
        return torch.from_numpy(self._rings.sizes().copy())

    @property
    def total_size(self) -> int:
        """Number of stored steps of all environments together."""
        rings = self._rings
        return rings.size * self.num_environments if rings.lockstep else int(rings.sizes().sum())

    def earliest_positions(self, env_ids: Tensor) -> Tensor:
        """Return the positions of the oldest steps in the buffer, including those that are not sampled.

        Args:
            env_ids: int64, any shape.

        Returns:
            int64, the same shape and device.

        Raises:
            ValueError: there is no such environment.
        """
        rings = self._rings
        self._checked_range('earliest_positions', env_ids)
        if rings.lockstep:
            return torch.full_like(env_ids, rings.pos - rings.size)
        return torch.from_numpy(rings.first()).to(env_ids.device)[env_ids]

    # Storing --------------------------------------------------------------------------------------------------

    @locked
    def add_batch(self, batch: NestedTensor, env_ids: Optional[Tensor] = None) -> None:
        """Store one step of several environments, as copies.

        Args:
            batch: nest ``[B, ...]``.
            env_ids: int64 ``[B]``: distinct environments; None for all in order.

        Raises:
            SpecError: ``batch`` does not have the spec of the buffer.
            ValueError: ``env_ids`` are not distinct environments of the buffer.
        """
        leaves = self._leaves_of(batch, 'add_batch', 1)
        size = self.num_environments if env_ids is None else env_ids.numel()
        shapes = self._batch_shapes if size == self.num_environments else [(size, *shape) for shape in self._shapes]
        if [x.shape for x in leaves] != shapes:
            self._raise_spec_error('add_batch', batch, 1, (size, ))
        rings = self._rings
        if env_ids is None or torch.equal(env_ids.cpu(), self._all_envs):
            envs = rings.all_envs
            if rings.lockstep:
                position = rings.pos
                self._store.write_row(position % self.max_length, leaves)
                rings.advance(1)
                self._stored(position, 1, envs, leaves)
                return
        else:
            envs = self._check_env_ids(env_ids)
        positions = rings.positions()[envs]
        self._store.write_slots(torch.from_numpy(rings.slots(positions, envs)), leaves)
        rings.advance_some(envs)
        self._stored(positions, 1, envs, leaves)

    @locked
    def add_sequence(self, batch: NestedTensor, env_ids: Optional[Sequence[int]] = None) -> None:
        """Store T steps of several environments, as copies; the same as T calls of :meth:`add_batch`.

        Args:
            batch: nest ``[T, B, ...]``.
            env_ids: ``B`` distinct environments; None for all in order.

        Raises:
            SpecError: ``batch`` does not have the spec of the buffer.
            ValueError: ``env_ids`` are not distinct environments of the buffer.
        """
        leaves = self._leaves_of(batch, 'add_sequence', 2)
        num_steps = leaves[0].shape[0] if leaves[0].ndim else 0
        envs = None if env_ids is None else self._check_env_ids(torch.as_tensor(env_ids))
        if envs is not None:
            shapes = [torch.Size((num_steps, len(envs), *shape)) for shape in self._shapes]
        else:
            if num_steps != self._sequence_shapes[0]:
                self._sequence_shapes = num_steps, [torch.Size((num_steps, *shape)) for shape in self._batch_shapes]
            shapes = self._sequence_shapes[1]
        if [x.shape for x in leaves] != shapes:
            self._raise_spec_error('add_sequence', batch, 2, (num_steps,
                                                              self.num_environments if envs is None else len(envs)))
        for start in range(0, num_steps, self.max_length):  # once, unless T exceeds the capacity
            part = leaves if num_steps <= self.max_length else [x[start:start + self.max_length] for x in leaves]
            self._add_rows(part, envs)

    def _leaves_of(self, batch: NestedTensor, method: str, from_dim: int) -> list[Tensor]:
        """Return the detached leaves; a check of each leaf is faster than ``torch.no_grad``."""
        leaves, tree = nest.flatten_with_structure(batch)
        if tree != self._tree or [x.dtype for x in leaves] != self._dtypes:
            self._raise_spec_error(method, batch, from_dim)
        return [x.detach() if x.requires_grad else x for x in leaves]

    def _add_rows(self, leaves: Sequence[Tensor], env_ids: Optional[np.ndarray] = None) -> None:
        """Store ``[T, B, ...]`` with T of at most ``max_length``; None for all environments."""
        rings, num_steps = self._rings, leaves[0].shape[0]
        envs = rings.all_envs if env_ids is None else env_ids
        positions: Any
        if env_ids is None and rings.lockstep:
            positions = rings.pos
            self._store.write_rows(positions % self.max_length, leaves)
            rings.advance(num_steps)
        else:
            positions = rings.positions()[envs]  # a copy
            slots = torch.from_numpy(rings.slots_from(positions, num_steps, envs))
            self._store.write_slots(slots.flatten(), [x.flatten(0, 1) for x in leaves])
            rings.advance_some(envs, num_steps)
        self._stored(positions, num_steps, envs, leaves)

    def _stored(self, positions: Any, num_steps: int, env_ids: np.ndarray, leaves: Sequence[Tensor]) -> None:
        """Handle steps that were stored, in a subclass.

        Args:
            positions: position of the first step: a number in lockstep, otherwise int64 ``[B]``.
            num_steps: T, at most ``max_length``.
            env_ids: int64 ``[B]``.
            leaves: ``[B, ...]`` from :meth:`add_batch`, ``[T, B, ...]`` from :meth:`add_sequence`.
        """

    def _dropped(self, env_ids: np.ndarray) -> None:
        """Handle steps that were dropped without being overwritten, among them the newest steps of ``env_ids``."""

    def _changed(self, leaves: Sequence[int], env_ids: np.ndarray) -> None:
        """Handle a change of the given leaves of stored steps of ``env_ids``."""

    @atomic
    def clear(self, env_ids: Optional[Tensor] = None) -> None:
        """Remove the steps of some environments. Positions continue from their current values.

        Args:
            env_ids: int64 ``[B]``; None for all environments, which then get the same position.

        Raises:
            ValueError: ``env_ids`` are not distinct environments of the buffer.
        """
        envs = None if env_ids is None else self._check_env_ids(env_ids)
        self._rings.clear(envs)
        self._dropped(self._rings.all_envs if envs is None else envs)

    @atomic
    def drop_all_but(self, keep: int = 0) -> int:
        """Remove the newest step, whose position the next step gets, and all but ``keep`` steps before it.

        Args:
            keep: number of steps of each environment to keep as context of later steps, such as for a frame stack.

        Returns:
            Number of steps that were kept.

        Raises:
            ValueError: the environments were not stored together, or there is no step.
        """
        sizes = self._rings.sizes()
        if not self._rings.is_even() or not sizes[0]:
            raise ValueError(f'{self.name}.drop_all_but: expected at least one step, and the same number of steps of '
                             f'each environment, found {sizes.tolist()}')
        self._rings.drop_all_but(keep)
        self._dropped(self._rings.all_envs)
        return int(self._rings.sizes()[0])

    @atomic
    def drop_newest(self, env_ids: Tensor) -> None:
        """Remove the newest step of some environments, whose position the next step gets.

        Args:
            env_ids: int64 ``[B]``; each has at least one step.

        Raises:
            ValueError: ``env_ids`` are not distinct environments of the buffer, or one has no step.
        """
        envs = self._check_env_ids(env_ids)
        self._held('drop_newest', env_ids, self.current_pos[env_ids] - 1)
        self._rings.drop_newest(envs)
        self._dropped(envs)

    @atomic
    def set_field(self, field: str, env_ids: Tensor, positions: Tensor, values: NestedTensor) -> None:
        """Overwrite part of stored steps.

        Args:
            field: path in ``data_spec``, such as 'time_step.step_type'; '' for all of it.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; together with ``env_ids`` each step at most once.
            values: nest ``[B, ...]`` with the structure, shapes and types of that part.

        Raises:
            SpecError: ``values`` do not have the spec of the field.
            ValueError: a step is not (or no longer) in the buffer.
        """
        where = f'{self.name}.set_field'
        spec = nest.get_field(self.data_spec, field) if field else self.data_spec
        check_consistent(values, spec, 1, f'{where}: {field}')
        envs, steps = self._held('set_field', env_ids, positions)
        chosen = nest.flatten(nest.get_field(self._leaf_indices, field) if field else self._leaf_indices)
        slots, leaves = torch.from_numpy(self._rings.slots(steps, envs)), nest.flatten(values)
        for new in leaves:
            if steps.ndim != 1 or new.shape[0] != len(steps):
                raise SpecError(f'{where}: {field}: expected [B, ...] with the B of env_ids and positions, found '
                                f'{tuple(new.shape)}, {tuple(env_ids.shape)} and {tuple(positions.shape)}')
        for leaf, new in zip(chosen, leaves):
            self._store.write_leaf(leaf, slots, new)
        self._changed(chosen, np.unique(envs))

    def _find_leaf(self, field: str) -> Optional[int]:
        """Return the index of the leaf with this name: in the time step if possible, else the one nearest to the root.

        ``None`` if there is no such leaf.
        """
        found = [(path.split('.'), leaf) for path, leaf in nest.flatten_with_path(self._leaf_indices)]
        found = [(path, leaf) for path, leaf in found if path[-1] == field]
        found.sort(key=lambda item: (item[0][:-1] != ['time_step'], len(item[0])))
        return found[0][1] if found else None

    def _check_env_ids(self, env_ids: Tensor) -> np.ndarray:
        found = env_ids.cpu().numpy()
        if found.ndim != 1 or found.dtype != np.int64 or np.unique(found).size != found.size or (
                (found < 0) | (found >= self.num_environments)).any():
            raise ValueError(f'{self.name}: expected distinct environment ids, int64 [B] from 0 to '
                             f'{self.num_environments - 1}, found {env_ids.dtype} {env_ids.tolist()}')
        return found

    def _raise_spec_error(self, method: str, batch: NestedTensor, from_dim: int, outer: tuple[int, ...] = ()) -> None:
        """Raise the error that describes how ``batch`` differs from the spec."""
        where = f'{self.name}.{method}'
        check_consistent(batch, self.data_spec, from_dim, where)
        for path, x in nest.flatten_with_path(batch):
            if tuple(x.shape[:from_dim]) != outer:
                raise SpecError(f'{where}: {path}: expected the outer dimensions {outer}, found '
                                f'{tuple(x.shape[:from_dim])}')
        raise SpecError(f'{where}: {nest.structure(batch)} does not match {self._tree}')

    # Reading --------------------------------------------------------------------------------------------------

    @atomic
    def get_field(self, field: str, env_ids: Tensor, positions: Tensor) -> NestedTensor:
        """Return part of the steps at given positions.

        Args:
            field: path in ``data_spec``, such as 'time_step.observation'; '' for all of it.
            env_ids: int64, any shape that broadcasts with ``positions``.
            positions: int64. They are checked on the CPU only; elsewhere a check would synchronize the device.

        Returns:
            Nest ``[*shape, ...]`` with the broadcast ``shape`` of the two, on the device of ``positions``.

        Raises:
            ValueError: a position is not (or no longer) in the buffer.
        """
        leaves = nest.get_field(self._leaf_indices, field) if field else self._leaf_indices
        shape = torch.broadcast_shapes(env_ids.shape, positions.shape)
        if positions.device.type == 'cpu':
            envs, steps = self._held('get_field', env_ids, positions)
            slots = torch.from_numpy(self._rings.slots(steps, envs).reshape(-1))
        else:
            slots = (positions % self.max_length * self.num_environments + env_ids).reshape(-1)
        slots = slots.to(self.device)

        def read(leaf: int) -> Tensor:
            chosen = self._store.field(leaf).index_select(0, slots).to(positions.device)
            return chosen.view(shape + self._shapes[leaf])

        return nest.map_structure(read, leaves)

    def _checked_range(self, method: str, env_ids: Tensor) -> np.ndarray:
        envs = env_ids.cpu().numpy()
        if envs.size and (envs.min() < 0 or envs.max() >= self.num_environments):
            raise ValueError(f'{self.name}.{method}: expected environment ids from 0 to {self.num_environments - 1}, '
                             f'found {int(envs.min())} to {int(envs.max())}')
        return envs

    def _held(self, method: str, env_ids: Tensor, positions: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return environments and positions as arrays of one shape.

        Raises:
            ValueError: a step is not in the buffer.
        """
        envs, steps = np.broadcast_arrays(self._checked_range(method, env_ids), positions.cpu().numpy())
        if not self._rings.holds(steps, envs).all():
            first = self._rings.first()[envs]
            raise ValueError(f'{self.name}.{method}: expected positions in the buffer, from {int(first.min())} to '
                             f'{int(self._rings.positions().max()) - 1}, found {int(steps.min())} to '
                             f'{int(steps.max())}')
        return envs, steps

    def _read(self, env_ids: np.ndarray, positions: np.ndarray, length: int) -> tuple[NestedTensor, Tensor]:
        """Return ``length`` steps from ``positions`` (``[B]``) on, and their slots ``[B * length]``.

        The steps are a nest ``[B, length, ...]`` on the default device.
        """
        if length == 1:
            slots = self._rings.slots(positions, env_ids)
        else:
            steps = positions[:, None] + np.arange(length)
            slots = self._rings.slots(steps, env_ids[:, None]).reshape(-1)
        chosen = torch.from_numpy(slots)
        leaves = self._store.read_slots(chosen, (len(env_ids), length), context.get_default_device())
        return self._tree.unflatten(leaves), chosen


def _storage_device(name: str, device: torch.device) -> torch.device:
    """Return ``device`` with the number of the GPU; raise if the GPU does not exist."""
    if device.type != 'cuda':
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = device.index if device.index is not None else torch.cuda.current_device() if count else 0
    if number >= count:
        raise ValueError(f"{name}.device: expected 'cpu' or one of {count} GPU(s), found '{device}'")
    return torch.device('cuda', number)


def _check_storage(name: str, device: torch.device, allow_multiprocess: bool, memory_map_dir: Optional[str]) -> None:
    if device.type != 'cpu' and (allow_multiprocess or memory_map_dir is not None):
        argument = 'allow_multiprocess' if allow_multiprocess else 'memory_map_dir'
        raise ValueError(f"{name}.{argument}: expected {name}.device to be 'cpu', found '{device}': only host memory "
                         'can be shared or mapped')
    if allow_multiprocess and memory_map_dir is not None:
        raise ValueError(f'{name}.memory_map_dir: expected None with allow_multiprocess = True, found '
                         f"'{memory_map_dir}'; use only one of them")


def require_at_least(name: str, least: int, **arguments: int) -> None:
    """Raise a ValueError that names the argument of ``name`` that is less than ``least``."""
    for argument, value in arguments.items():
        if value < least:
            raise ValueError(f'{name}.{argument}: expected at least {least}, found {value}')
