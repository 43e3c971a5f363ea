"""Where a replay buffer keeps its tensors: one row for each time, one column for each environment.

The small leaves of a cell lie next to each other in memory, whatever their types. Reading a sampled cell of a large
buffer is a cache miss, which costs more than the copying: so it is one for the cell and not one for each leaf.
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

from alfx.gin_utils import ConfError
from alfx.gin_utils.value_checks import problem_at
from alfx.gin_utils.locations import location_of
from alfx.tensor_specs import TensorSpec
from alfx.utils.shared_memory import SharedTensors
from alfx.utils.transfers import pinned_like, send

_WORD = 8  # bytes of the int64 that packed leaves are stored and copied as
_LARGEST_PACKED = 1024  # bytes; larger leaves get a tensor of their own


class _Layout:
    """Where a leaf lies in a packed cell."""

    def __init__(self, spec: TensorSpec, first_byte: int, cell_words: int) -> None:
        self.dtype = spec.dtype
        self.shape = tuple(spec.shape)
        self.strides = tuple(math.prod(self.shape[i + 1:]) for i in range(len(self.shape)))
        self.offset = first_byte // spec.dtype.itemsize
        self.cell = cell_words * _WORD // spec.dtype.itemsize

    def view(self, typed: Tensor, outer: tuple[int, ...]) -> Tensor:
        """The leaf ``[*outer, *shape]`` of contiguous slots that are seen as elements of its type."""
        cell = self.cell
        if len(outer) == 2:
            strides = (outer[1] * cell, cell, *self.strides)
        else:
            strides = (*(math.prod(outer[i + 1:]) * cell for i in range(len(outer))), *self.strides)
        return typed.as_strided(outer + self.shape, strides, self.offset)


class PackedStorage:
    """Preallocated storage for ``[num_rows, num_columns]`` slots, each a list of tensors.

    Args:
        specs: spec of each tensor of a cell.
        num_rows: number of rows.
        num_columns: number of columns.
        device: where the storage lives.
        shared: whether it lies in shared memory; then a pickled copy in another process is the same storage.
        memory_map_dir: folder of the files in which it lies, see :func:`map_file`; None for memory.

    Attributes:
        shapes: of the leaves of a cell.
    """

    def __init__(self, specs: Sequence[TensorSpec], num_rows: int, num_columns: int, device: torch.device,
                 shared: bool = False, memory_map_dir: str | None = None) -> None:
        self.shapes = [tuple(spec.shape) for spec in specs]
        self._num_rows, self._num_columns = num_rows, num_columns
        self._device = device
        self._layouts = self._pack(specs)
        words = max((layout.cell * layout.dtype.itemsize // _WORD for layout in self._layouts.values()), default=0)

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            shape = (num_rows, num_columns, *shape)
            if memory_map_dir is not None:
                return map_file(memory_map_dir, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            if shared:
                return SharedTensors([TensorSpec(shape, dtype)], 'a replay buffer (allow_multiprocess)').tensors[0]
            return torch.zeros(shape, dtype=dtype, device=device)  # gaps too: a checkpoint holds no chance bits

        if memory_map_dir is None:
            _check_memory(num_rows, num_columns, 8 * words + sum(
                spec.numel * spec.dtype.itemsize for i, spec in enumerate(specs) if i not in self._layouts), device)
        packed = allocate((words, ), torch.int64)
        large = {i: allocate(spec.shape, spec.dtype) for i, spec in enumerate(specs) if i not in self._layouts}
        self._set_blocks(packed, large)

    def _set_blocks(self, packed: Tensor, large: dict[int, Tensor]) -> None:
        outer = (self._num_rows, self._num_columns)
        self._packed, self._large = packed, large
        self._packed_cells = packed.flatten(0, 1)
        self._large_cells = {i: block.flatten(0, 1) for i, block in large.items()}
        self._dtypes = {layout.dtype for layout in self._layouts.values()}
        views = {**large, **self._unpack(packed, outer)}
        self._views = [views[i] for i in range(len(self.shapes))]
        self._new_row = torch.zeros_like(packed[:1])
        new_leaves = self._unpack(self._new_row, (1, self._num_columns))
        self._new_leaves = [new_leaves.get(i) for i in range(len(self.shapes))]
        is_on_host = packed.device.type == 'cpu'  # where numpy copies a row in a fraction of the time of torch
        self._rows: Any = packed.numpy() if is_on_host else packed
        self._row_to_write: Any = self._new_row.numpy() if is_on_host else self._new_row

    def __getstate__(self) -> dict[str, Any]:
        views = ('_packed_cells', '_large_cells', '_dtypes', '_views', '_new_row', '_new_leaves', '_rows',
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

        small = [i for i in range(len(specs)) if size(i) <= _LARGEST_PACKED]
        small.sort(key=lambda i: -specs[i].dtype.itemsize)
        words = math.ceil(sum(size(i) for i in small) / _WORD)
        layouts, first_byte = {}, 0
        for i in small:
            layouts[i] = _Layout(specs[i], first_byte, words)
            first_byte += size(i)
        return layouts

    def _unpack(self, packed: Tensor, outer: tuple[int, ...]) -> dict[int, Tensor]:
        """Views ``[*outer, *shape]`` of the leaves in contiguous slots ``[..., words]``."""
        typed = {dtype: packed.view(dtype) for dtype in self._dtypes}
        return {i: layout.view(typed[layout.dtype], outer) for i, layout in self._layouts.items()}

    @property
    def bytes_per_cell(self) -> int:
        """How much memory the storage takes for each cell."""
        return sum(block[0, 0].numel() * block.element_size() for block in self.blocks)

    @property
    def blocks(self) -> list[Tensor]:
        """The tensors that everything is stored in, ``[num_rows, num_columns, ...]`` each."""
        return [self._packed, *self._large.values()]

    def first_rows(self, count: int) -> list[Tensor]:
        """The first ``count`` rows of :attr:`blocks`, to be written to a file."""
        return [alone(block[:count]) for block in self.blocks]

    def field(self, leaf: int) -> Tensor:
        """A view of one leaf, ``[num_rows * num_columns, ...]``."""
        return self._views[leaf].flatten(0, 1)

    def write_row(self, row: int, leaves: Sequence[Tensor]) -> None:
        """Store ``leaves`` (``[num_columns, ...]`` or ``[1, num_columns, ...]`` each) as one row.

        The small ones are put together in a row of their own: finding the place of each in the storage takes longer
        than to copy them twice.
        """
        places = [self._large[i][row:row + 1] if x is None else x for i, x in enumerate(self._new_leaves)]
        torch._foreach_copy_(places, list(leaves))
        self._rows[row:row + 1] = self._row_to_write

    def write_rows(self, start: int, leaves: Sequence[Tensor]) -> None:
        """Store ``leaves`` (``[n, num_columns, ...]`` each) as ``n`` rows from ``start``, going on at the first row
        after the last; ``n`` is at most the number of rows."""
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
        """Copies ``[n, ...]`` of one leaf of the slots (int64 ``[n]``)."""
        return self.field(leaf).index_select(0, slots.to(self._device))

    def read_cells(self, slots: Tensor, outer: tuple[int, ...], device: torch.device | None = None) -> list[Tensor]:
        """Copies of slots.

        Args:
            slots: int64 ``[n]``: ``row * num_columns + column`` of each.
            outer: n = the product of it.
            device: where the copies are; None for where the storage is. To a GPU they travel from pinned memory, and
                nothing waits for it.

        Returns:
            each leaf ``[*outer, ...]``. The small ones share memory with each other, not with the storage.
        """
        slots = slots.to(self._device)
        device = device or self._device
        leaves = self._unpack(self._select(self._packed_cells, slots, device), outer)
        for i, block in self._large_cells.items():
            leaves[i] = self._select(block, slots, device).view(*outer, *block.shape[1:])
        return [leaves[i] for i in range(len(leaves))]

    def reused_cells(self, outer: tuple[int, ...]) -> tuple[list[Tensor], Callable[[np.ndarray], None]]:
        """Memory for as many slots as ``outer`` says, and what copies slots there; for a storage in host memory.

        Returns:
            tuple:
            - each leaf ``[*outer, ...]``, as :meth:`read_cells` returns them
            - a function of the slots to copy, int64 ``[n]`` as there, which overwrites these leaves, or the first of
              them if it is given fewer
        """
        count = math.prod(outer)
        packed = self._packed_cells.new_zeros((count, *self._packed_cells.shape[1:]))
        stored_rows, packed_rows = self._packed_cells.numpy(), packed.numpy()
        large = {i: block.new_zeros((count, *block.shape[1:])) for i, block in self._large_cells.items()}
        leaves = {**self._unpack(packed, outer), **{i: x.view(*outer, *x.shape[1:]) for i, x in large.items()}}

        def read(slots: np.ndarray) -> None:
            stored_rows.take(slots, 0, packed_rows[:len(slots)], 'clip')  # half of torch's time; 'raise' copies twice
            for i, copies in large.items():
                torch.index_select(self._large_cells[i], 0, torch.from_numpy(slots), out=copies[:len(slots)])

        return [leaves[i] for i in range(len(leaves))], read

    def _select(self, block: Tensor, slots: Tensor, device: torch.device) -> Tensor:
        """Copies of ``block[slots]`` on ``device``."""
        if device == self._device:
            return block.index_select(0, slots)
        if device.type != 'cuda' or self._device.type != 'cpu':
            return block.index_select(0, slots).to(device)
        chosen = pinned_like(block, (len(slots), *block.shape[1:]))
        return send(torch.index_select(block, 0, slots, out=chosen), device)


def _check_memory(num_rows: int, num_columns: int, num_bytes: int, device: torch.device) -> None:
    """Refuse what is larger than the memory there is: much of it may be promised, and taken when it is written to.

    Args:
        num_rows: steps.
        num_columns: environments.
        num_bytes: of a step of one environment.
        device: where.

    Raises:
        ConfError: names the setting that is as large.
    """
    needed, there_is = num_rows * num_columns * num_bytes, memory_of(device)
    if needed <= there_is:
        return
    settings = [('TrainerConfig', name) for name in ('replay_buffer_length', 'unroll_length')]
    bound = [(abs(binding.value - num_rows), name) for owner, name in settings
             if (binding := location_of(owner, name)) is not None and isinstance(binding.value, (int, float))]
    raise ConfError([problem_at(
        'TrainerConfig', min(bound)[1] if bound else 'replay_buffer_length', f'asks for a buffer of {num_rows:,} steps '
        f'of {num_columns} environment(s) of {num_bytes} bytes each, {needed:,} bytes; there are {there_is:,} bytes of '
        'memory', 'shorten it, take fewer environments, or keep the buffer on a disk: ReplayBuffer.memory_map_dir')])


def memory_of(device: torch.device) -> int:
    """All bytes of memory that a device has, for the CPU not more than this process may use."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    try:
        with open('/sys/fs/cgroup/memory.max', encoding='utf8') as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def alone(part: Tensor) -> Tensor:
    """``part``, contiguous, as a tensor that ``torch.save`` writes without the rest of the storage that it is part of.

    In host memory it is no copy.
    """
    if part.untyped_storage().nbytes() == part.nbytes:
        return part
    if part.device.type != 'cpu' or not part.numel():
        return part.clone()
    return torch.from_numpy(part.flatten().view(torch.uint8).numpy()).view(part.dtype).view(part.shape)


def map_file(directory: str, num_bytes: int) -> Tensor:
    """uint8 ``[num_bytes]`` that lies in a file, zeros at first.

    The file has no name: its space on the disk is taken now, and free again as soon as the tensor is gone or the
    process has ended, however it ended.

    Args:
        directory: where; made if it does not exist.
        num_bytes: size.

    Raises:
        ValueError: the disk does not have the space, or the folder cannot be written to.
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
                         'choose a folder on a disk with that space, or a smaller max_length') from error
