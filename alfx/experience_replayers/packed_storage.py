"""Storage of the tensors of a replay buffer: one row for each time, one column for each environment.

The small leaves of a slot are adjacent in memory, whatever their types. Reading a sampled slot of a large buffer is a
cache miss, which costs more than the copy; this way there is one miss for each slot instead of one for each leaf.
"""
import errno
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alfx.gin_utils import ConfError, problem_at
from alfx.gin_utils.locations import location_of
from alfx.tensor_specs import TensorSpec
from alfx.utils.shared_memory import SharedTensors
from alfx.utils.transfers import pinned_like, send

_WORD = 8  # bytes of the int64 as which packed leaves are stored and copied
_MAX_PACKED_BYTES = 1024  # larger leaves get separate tensors


class _Layout:
    """Position of a leaf in a packed slot."""

    def __init__(self, spec: TensorSpec, first_byte: int, slot_words: int) -> None:
        self.dtype = spec.dtype
        self.shape = tuple(spec.shape)
        self.strides = tuple(math.prod(self.shape[i + 1:]) for i in range(len(self.shape)))
        self.offset = first_byte // spec.dtype.itemsize
        self.slot_size = slot_words * _WORD // spec.dtype.itemsize

    def view(self, typed: Tensor, outer: tuple[int, ...]) -> Tensor:
        """Return the leaf ``[*outer, *shape]`` of contiguous slots, given as elements of its type."""
        size = self.slot_size
        if len(outer) == 2:
            strides = (outer[1] * size, size, *self.strides)
        else:
            strides = (*(math.prod(outer[i + 1:]) * size for i in range(len(outer))), *self.strides)
        return typed.as_strided(outer + self.shape, strides, self.offset)


class PackedStorage:
    """Preallocated storage for ``[num_rows, num_columns]`` slots, each a list of tensors.

    Args:
        specs: spec of each tensor of a slot.
        num_rows: number of rows.
        num_columns: number of columns.
        device: device of the storage.
        shared: use shared memory; a pickled copy in another process is then the same storage.
        memory_map_dir: folder for storage in memory-mapped files, see :func:`map_file`; None for memory.

    Attributes:
        shapes: shapes of the leaves of a slot.
    """

    def __init__(self, specs: Sequence[TensorSpec], num_rows: int, num_columns: int, device: torch.device,
                 shared: bool = False, memory_map_dir: str | None = None) -> None:
        self.shapes = [tuple(spec.shape) for spec in specs]
        self._num_rows, self._num_columns = num_rows, num_columns
        self._device = device
        self._layouts = self._pack(specs)
        words = max((layout.slot_size * layout.dtype.itemsize // _WORD for layout in self._layouts.values()), default=0)

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            shape = (num_rows, num_columns, *shape)
            if memory_map_dir is not None:
                return map_file(memory_map_dir, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            if shared:
                return SharedTensors([TensorSpec(shape, dtype)], 'a replay buffer (allow_multiprocess)').tensors[0]
            return torch.zeros(shape, dtype=dtype, device=device)  # zeros in the padding make checkpoints reproducible

        if memory_map_dir is None:
            _check_memory(num_rows, num_columns, 8 * words + sum(
                spec.numel * spec.dtype.itemsize for i, spec in enumerate(specs) if i not in self._layouts), device)
        packed = allocate((words, ), torch.int64)
        large = {i: allocate(spec.shape, spec.dtype) for i, spec in enumerate(specs) if i not in self._layouts}
        self._set_blocks(packed, large)

    def _set_blocks(self, packed: Tensor, large: dict[int, Tensor]) -> None:
        outer = (self._num_rows, self._num_columns)
        self._packed, self._large = packed, large
        self._packed_slots = packed.flatten(0, 1)
        self._large_slots = {i: block.flatten(0, 1) for i, block in large.items()}
        self._dtypes = {layout.dtype for layout in self._layouts.values()}
        views = {**large, **self._unpack(packed, outer)}
        self._views = [views[i] for i in range(len(self.shapes))]
        self._new_row = torch.zeros_like(packed[:1])
        new_leaves = self._unpack(self._new_row, (1, self._num_columns))
        self._new_leaves = [new_leaves.get(i) for i in range(len(self.shapes))]
        is_on_host = packed.device.type == 'cpu'  # numpy copies a row in a fraction of the time of torch
        self._rows: Any = packed.numpy() if is_on_host else packed
        self._row_to_write: Any = self._new_row.numpy() if is_on_host else self._new_row

    def __getstate__(self) -> dict[str, Any]:
        views = ('_packed_slots', '_large_slots', '_dtypes', '_views', '_new_row', '_new_leaves', '_rows',
                 '_row_to_write')
        return {name: value for name, value in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_blocks(self._packed, self._large)

    @staticmethod
    def _pack(specs: Sequence[TensorSpec]) -> dict[int, _Layout]:
        """Lay out the small leaves, those with the largest elements first, so that all are aligned."""

        def size(i: int) -> int:
            return specs[i].numel * specs[i].dtype.itemsize

        small = [i for i in range(len(specs)) if size(i) <= _MAX_PACKED_BYTES]
        small.sort(key=lambda i: -specs[i].dtype.itemsize)
        words = math.ceil(sum(size(i) for i in small) / _WORD)
        layouts, first_byte = {}, 0
        for i in small:
            layouts[i] = _Layout(specs[i], first_byte, words)
            first_byte += size(i)
        return layouts

    def _unpack(self, packed: Tensor, outer: tuple[int, ...]) -> dict[int, Tensor]:
        """Return views ``[*outer, *shape]`` of the leaves in contiguous slots ``[..., words]``."""
        typed = {dtype: packed.view(dtype) for dtype in self._dtypes}
        return {i: layout.view(typed[layout.dtype], outer) for i, layout in self._layouts.items()}

    @property
    def bytes_per_slot(self) -> int:
        """Size of each slot in bytes."""
        return sum(block[0, 0].numel() * block.element_size() for block in self.blocks)

    @property
    def blocks(self) -> list[Tensor]:
        """Tensors that contain all stored data, ``[num_rows, num_columns, ...]`` each."""
        return [self._packed, *self._large.values()]

    def first_rows(self, count: int) -> list[Tensor]:
        """Return the first ``count`` rows of :attr:`blocks`, to be saved to a file."""
        return [standalone(block[:count]) for block in self.blocks]

    def field(self, leaf: int) -> Tensor:
        """Return a view of one leaf, ``[num_rows * num_columns, ...]``."""
        return self._views[leaf].flatten(0, 1)

    def write_row(self, row: int, leaves: Sequence[Tensor]) -> None:
        """Store ``leaves`` (``[num_columns, ...]`` or ``[1, num_columns, ...]`` each) as one row.

        The small leaves are assembled in a separate row first: locating each of them in the storage takes longer than
        copying them twice.
        """
        places = [self._large[i][row:row + 1] if x is None else x for i, x in enumerate(self._new_leaves)]
        torch._foreach_copy_(places, list(leaves))
        self._rows[row:row + 1] = self._row_to_write

    def write_rows(self, start: int, leaves: Sequence[Tensor]) -> None:
        """Store ``leaves`` (``[n, num_columns, ...]`` each) as ``n`` rows from ``start`` on, wrapping at the last row.

        ``n`` is at most the number of rows.
        """
        n = leaves[0].shape[0]
        if n == 1:
            self.write_row(start, leaves)
            return
        head = min(n, self._num_rows - start)
        torch._foreach_copy_([view[start:start + head] for view in self._views], [leaf[:head] for leaf in leaves])
        if head < n:
            torch._foreach_copy_([view[:n - head] for view in self._views], [leaf[head:] for leaf in leaves])

    def write_slots(self, slots: Tensor, leaves: Sequence[Tensor]) -> None:
        """Store ``leaves`` (``[n, ...]`` each) in the slots ``row * num_columns + column`` (int64 ``[n]``)."""
        slots = slots.to(self._device)
        for i, leaf in enumerate(leaves):
            self.write_leaf(i, slots, leaf)

    def write_leaf(self, leaf: int, slots: Tensor, values: Tensor) -> None:
        """Store ``values`` (``[n, ...]``) as one leaf of the slots (int64 ``[n]``)."""
        self.field(leaf).index_copy_(0, slots.to(self._device), values.to(self._device))

    def read_leaf(self, leaf: int, slots: Tensor) -> Tensor:
        """Return copies ``[n, ...]`` of one leaf of the slots (int64 ``[n]``)."""
        return self.field(leaf).index_select(0, slots.to(self._device))

    def read_slots(self, slots: Tensor, outer: tuple[int, ...], device: torch.device | None = None) -> list[Tensor]:
        """Return copies of slots.

        Args:
            slots: int64 ``[n]``: ``row * num_columns + column`` of each.
            outer: shape of the slots in the result; its product is n.
            device: device of the copies; None for the device of the storage. Copies to a GPU go through pinned memory
                and are asynchronous.

        Returns:
            Each leaf ``[*outer, ...]``. The small leaves share memory with each other, not with the storage.
        """
        slots = slots.to(self._device)
        device = device or self._device
        leaves = self._unpack(self._select(self._packed_slots, slots, device), outer)
        for i, block in self._large_slots.items():
            leaves[i] = self._select(block, slots, device).view(*outer, *block.shape[1:])
        return [leaves[i] for i in range(len(leaves))]

    def static_slots(self, outer: tuple[int, ...]) -> tuple[list[Tensor], Callable[[np.ndarray], None]]:
        """Return static memory for slots, and a function that copies slots there; for storage in host memory.

        Args:
            outer: shape of the slots.

        Returns:
            tuple:
            - each leaf ``[*outer, ...]``, as in :meth:`read_slots`
            - a function of the slots to copy, int64 ``[n]``, which overwrites these leaves, or the first n of them
        """
        count = math.prod(outer)
        packed = self._packed_slots.new_zeros((count, *self._packed_slots.shape[1:]))
        stored_rows, packed_rows = self._packed_slots.numpy(), packed.numpy()
        large = {i: block.new_zeros((count, *block.shape[1:])) for i, block in self._large_slots.items()}
        leaves = {**self._unpack(packed, outer), **{i: x.view(*outer, *x.shape[1:]) for i, x in large.items()}}

        def read(slots: np.ndarray) -> None:
            # takes half the time of torch; mode 'raise' would copy twice
            stored_rows.take(slots, 0, packed_rows[:len(slots)], 'clip')
            for i, copies in large.items():
                torch.index_select(self._large_slots[i], 0, torch.from_numpy(slots), out=copies[:len(slots)])

        return [leaves[i] for i in range(len(leaves))], read

    def _select(self, block: Tensor, slots: Tensor, device: torch.device) -> Tensor:
        """Return copies of ``block[slots]`` on ``device``."""
        if device == self._device:
            return block.index_select(0, slots)
        if device.type != 'cuda' or self._device.type != 'cpu':
            return block.index_select(0, slots).to(device)
        chosen = pinned_like(block, (len(slots), *block.shape[1:]))
        return send(torch.index_select(block, 0, slots, out=chosen), device)


def _check_memory(num_rows: int, num_columns: int, num_bytes: int, device: torch.device) -> None:
    """Raise if the storage exceeds the memory of the device; the allocation might succeed and fail later, on writing.

    Args:
        num_rows: number of steps.
        num_columns: number of environments.
        num_bytes: size of a step of one environment.
        device: device of the storage.

    Raises:
        ConfError: the message names the setting to change.
    """
    needed, available = num_rows * num_columns * num_bytes, memory_of(device)
    if needed <= available:
        return
    settings = [('TrainerConfig', name) for name in ('replay_buffer_length', 'unroll_length')]
    bound = [(abs(binding.value - num_rows), name) for owner, name in settings
             if (binding := location_of(owner, name)) is not None and isinstance(binding.value, (int, float))]
    raise ConfError([problem_at(
        'TrainerConfig', min(bound)[1] if bound else 'replay_buffer_length', f'needs {needed:,} bytes of memory for a '
        f'buffer of {num_rows:,} steps of {num_columns} environment(s) with {num_bytes} bytes each, found '
        f'{available:,} bytes', 'shorten it, use fewer environments, or store the buffer on disk: '
        'ReplayBuffer.memory_map_dir')])


def memory_of(device: torch.device) -> int:
    """Return the memory of a device in bytes; for the CPU at most the limit of this process."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    try:
        with open('/sys/fs/cgroup/memory.max', encoding='utf8') as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def standalone(part: Tensor) -> Tensor:
    """Return ``part``, contiguous, as a tensor that ``torch.save`` writes without the rest of its storage.

    In host memory nothing is copied.
    """
    if part.untyped_storage().nbytes() == part.nbytes:
        return part
    if part.device.type != 'cpu' or not part.numel():
        return part.clone()
    return torch.from_numpy(part.flatten().view(torch.uint8).numpy()).view(part.dtype).view(part.shape)


def map_file(directory: str, num_bytes: int) -> Tensor:
    """Return a tensor uint8 ``[num_bytes]`` in a memory-mapped file, initially zeros.

    The file has no name. Its disk space is allocated now, and freed when the tensor is deleted or the process ends,
    however it ends.

    Args:
        directory: folder of the file; created if it does not exist.
        num_bytes: size.

    Raises:
        ValueError: there is not enough disk space, or the folder is not writable.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        os.makedirs(directory, exist_ok=True)
        if shutil.disk_usage(directory).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise ValueError(f"memory_map_dir: cannot map {num_bytes / 1e9:.2f} GB in '{directory}' ({error.strerror}); "
                         'use a folder on a disk with enough space, or a smaller max_length') from error
