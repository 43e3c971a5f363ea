"""Transfers of tensors from the host to a GPU that do not block the host.

A copy from ordinary memory blocks the host until it is done. A copy from pinned memory does not, and it overlaps with
computations on the GPU if it is in another stream. Small tensors are transferred together, since every copy costs some
microseconds.
"""
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import nest

_LARGEST_PACKED = 2**16  # maximum size in bytes of a tensor that is transferred together with others
_ALIGNMENT = 16  # bytes
_copy_streams: dict[torch.device, Any] = {}


def to_device(nested: Any, device: torch.device) -> Any:
    """Return a nest of tensors on ``device``.

    Args:
        nested: nest of tensors on any devices. Host tensors may be overwritten as soon as the function returns.
        device: target device. Work queued on a GPU after the call sees the copies.

    Returns:
        The same nest; tensors that are already on the device are not copied.
    """
    leaves, tree = nest.flatten_with_structure(nested)
    return nested if all(x.device == device for x in leaves) else nest.unflatten(tree, copied_to(leaves, device))


def copied_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return ``tensors`` on ``device``, see :func:`to_device`."""
    if device.type == 'cpu':
        return [x.to(device) for x in tensors]
    pins = device.type == 'cuda'
    on_cpu = [i for i, x in enumerate(tensors) if x.device.type == 'cpu']
    small = [i for i in on_cpu if tensors[i].nbytes <= _LARGEST_PACKED]
    result = [x if i in on_cpu else x.to(device, non_blocking=True) for i, x in enumerate(tensors)]
    if len(small) > 1:
        block, layout = packed([tensors[i] for i in small], pinned=pins)
        for i, x in zip(small, unpacked(send(block, device), layout)):
            result[i] = x
    for i in on_cpu:
        if len(small) <= 1 or i not in small:
            x = tensors[i]
            result[i] = send(pinned_like(x).copy_(x), device) if pins else x.to(device)
    return result


def pinned_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Allocate pinned memory with the dtype and, by default, the shape of ``tensor``; torch caches such memory."""
    return torch.empty(tensor.shape if shape is None else tuple(shape), dtype=tensor.dtype, pin_memory=True)


def send(pinned: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory to a GPU in a separate stream; work queued there afterwards waits only for this copy.

    A device without streams receives an ordinary copy.
    """
    if device.type != 'cuda':
        return pinned.to(device)
    computing = torch.cuda.current_stream(device)
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    copying = _copy_streams[device]
    with torch.cuda.stream(copying):
        copy = pinned.to(device, non_blocking=True)
    computing.wait_stream(copying)
    copy.record_stream(computing)  # the memory is not reused for a later copy while queued work still reads it
    return copy


_Entry = tuple[int, torch.Size, torch.dtype]


def packed(tensors: Sequence[Tensor], pinned: bool) -> tuple[Tensor, list[_Entry]]:
    """Copy ``tensors`` into one block of memory.

    Args:
        tensors: tensors on the host.
        pinned: use pinned memory.

    Returns:
        tuple:
        - uint8 ``[n]``
        - layout for :func:`unpacked`: first byte, shape and dtype of each tensor
    """
    layout, end = [], 0
    for x in tensors:
        layout.append((end, x.shape, x.dtype))
        end += math.ceil(x.nbytes / _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    for x, copy in zip(tensors, unpacked(block, layout)):
        copy.copy_(x)
    return block, layout


def unpacked(block: Tensor, layout: Sequence[_Entry]) -> list[Tensor]:
    """Return views of the tensors that :func:`packed` put into ``block`` (uint8 ``[n]``, on any device)."""
    return [block[first:first + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for first, shape, dtype in layout]
