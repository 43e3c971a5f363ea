"""Bringing tensors from the host to a GPU without waiting for it.

A copy from ordinary memory makes the host wait until it is done; one from pinned memory does not, and goes on beside
what the GPU computes if it is queued apart from that. Small tensors travel together, since a copy costs some
microseconds however small it is.
"""
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import nest

_LARGEST_PACKED = 2**16  # bytes of a tensor that travels with others
_ALIGNMENT = 16  # bytes
_copy_streams: dict[torch.device, Any] = {}


def to_device(nested: Any, device: torch.device) -> Any:
    """A nest of tensors on ``device``.

    Args:
        nested: nest of tensors on any devices. Those of the host may be written to again at once.
        device: where to. On a GPU, whatever is queued there from now on sees the copies.

    Returns:
        The same nest; tensors that are there already are not copied.
    """
    leaves, tree = nest.flatten_with_structure(nested)
    if all(x.device == device for x in leaves):
        return nested
    return nest.unflatten(tree, copied_to(leaves, device))


def copied_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors`` on ``device``, see :func:`to_device`."""
    if device.type != 'cuda':
        return [x.to(device) for x in tensors]
    here = [i for i, x in enumerate(tensors) if x.device.type == 'cpu']
    small = [i for i in here if tensors[i].nbytes <= _LARGEST_PACKED]
    result = [x if i in here else x.to(device, non_blocking=True) for i, x in enumerate(tensors)]
    if len(small) > 1:
        block, layout = packed([tensors[i] for i in small], pinned=True)
        for i, x in zip(small, unpacked(send(block, device), layout)):
            result[i] = x
    for i in here:
        if len(small) <= 1 or i not in small:
            x = tensors[i]
            result[i] = send(pinned_like(x).copy_(x), device)
    return result


def pinned_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Pinned memory of the type, and the shape unless given, of ``tensor``; later ones use it again."""
    return torch.empty(tensor.shape if shape is None else tuple(shape), dtype=tensor.dtype, pin_memory=True)


def send(pinned: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory to a GPU beside what it computes; what is queued there later waits for the copy alone."""
    computing = torch.cuda.current_stream(device)
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    copying = _copy_streams[device]
    with torch.cuda.stream(copying):
        there = pinned.to(device, non_blocking=True)
    computing.wait_stream(copying)
    there.record_stream(computing)  # its memory is not used for a later copy before what reads it is done
    return there


_Place = tuple[int, torch.Size, torch.dtype]


def packed(tensors: Sequence[Tensor], pinned: bool) -> tuple[Tensor, list[_Place]]:
    """Copies of ``tensors`` one after the other.

    Args:
        tensors: on the host.
        pinned: whether in pinned memory.

    Returns:
        tuple:
        - uint8 ``[n]``
        - what :func:`unpacked` needs: the first byte, shape and type of each
    """
    layout, end = [], 0
    for x in tensors:
        layout.append((end, x.shape, x.dtype))
        end += math.ceil(x.nbytes / _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    for x, copy in zip(tensors, unpacked(block, layout)):
        copy.copy_(x)
    return block, layout


def unpacked(block: Tensor, layout: Sequence[_Place]) -> list[Tensor]:
    """Views of what :func:`packed` has put into ``block`` (uint8 ``[n]``, on any device)."""
    return [block[first:first + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for first, shape, dtype in layout]
