"""Memory shared between processes of this machine; each block is checked against the available space.

A process that receives one of these objects sees the same memory.
"""
import itertools
import math
import os
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alfx.gin_utils import ConfError
from alfx.tensor_specs import TensorSpec

_ALIGNMENT = 64
_SHARED_FOLDER = '/dev/shm'


class SharedTensors:
    """Tensors of given specs, initially zeros, in one block of shared memory.

    Args:
        specs: specs of the tensors.
        purpose: use of the tensors and the setting that makes them smaller, for the error message.

    Attributes:
        tensors: the tensors.

    Raises:
        ConfError: there is not enough shared memory.
    """

    def __init__(self, specs: Sequence[TensorSpec], purpose: str):
        self._specs = [(tuple(spec.shape), spec.dtype) for spec in specs]
        size = self._offsets()[-1]
        if os.path.isdir(_SHARED_FOLDER):
            free = shutil.disk_usage(_SHARED_FOLDER).free
            if size > free:  # writing to it would kill the process without a message
                raise ConfError(f'{purpose} needs {size / 2**20:.3g} MiB of shared memory, {_SHARED_FOLDER} has '
                                f'{free / 2**20:.3g} MiB left', 'make it smaller, or increase the shared memory')
        self._block = torch.empty(max(size, 1), dtype=torch.uint8).share_memory_().zero_()
        self.tensors = self._views()

    def _offsets(self) -> list[int]:
        """Return the start of each tensor and the end of the last one, in bytes."""
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self._specs)
        return list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))

    def _views(self) -> list[Tensor]:
        return [self._block[offset:offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for (shape, dtype), offset in zip(self._specs, self._offsets())]

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return self._block.numel()

    def __getstate__(self) -> dict[str, Any]:
        return {'_specs': self._specs, '_block': self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tensors = self._views()


class SharedArrays:
    """Base of classes whose state is numpy arrays in attributes, which may be shared with other processes.

    Indexing a few hundred numbers at a time is much cheaper in numpy than in torch. The arrays are views of torch
    tensors, which can be passed to another process without a copy.

    Args:
        shared: put the arrays into shared memory, so that a process that receives the object works on the same arrays.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._tensors: dict[str, Tensor] = {}

    def _allocate(self, name: str, shape: int | tuple[int, ...], dtype: Any, fill: float = 0) -> Any:
        """Create the array ``[*shape]`` as attribute ``name``; memory of zeros is not touched before use.

        Raises:
            ConfError: there is not enough shared memory.
        """
        tensor = torch.from_numpy(np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype))
        if self._shared:
            tensor = SharedTensors([TensorSpec(tensor.shape, tensor.dtype)], type(self).__name__).tensors[0].fill_(fill)
        self._tensors[name] = tensor
        setattr(self, name, tensor.numpy())
        return getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name, tensor in self._tensors.items():
            setattr(self, name, tensor.numpy())
