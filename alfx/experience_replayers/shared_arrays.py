"""Numpy arrays as attributes, which other processes may share.

The bookkeeping of the replay buffer is index work on a few hundred numbers at a time, where a call of numpy costs a
fraction of one of torch. Its arrays are numpy views of torch tensors, because those know how to be handed to another
process without a copy.
"""
from typing import Any

import numpy as np
import torch

_DTYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


class SharedArrays:
    """Base of classes whose state is arrays.

    Args:
        shared: whether the arrays lie in shared memory, so that a process that gets the object works on the same ones.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._tensors: dict[str, torch.Tensor] = {}

    def _allocate(self, name: str, shape: int | tuple[int, ...], dtype: Any, fill: float = 0) -> Any:
        """Make the array ``[*shape]`` that is the attribute ``name``; memory of zeros is not touched before use."""
        if self._shared:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype]).share_memory_()
            tensor.fill_(fill)
        else:
            tensor = torch.from_numpy(np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype))
        self._tensors[name] = tensor
        setattr(self, name, tensor.numpy())
        return getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name, tensor in self._tensors.items():
            setattr(self, name, tensor.numpy())
