"""Slices of training sequences ``[T, B, ...]`` as one batch, and back."""
import torch
from torch import Tensor

from alfx import nest
from alfx.tensor_specs import NestedTensor


def steps(nested: NestedTensor, start: int, stop: int) -> NestedTensor:
    """Return steps ``start`` to ``stop - 1`` of a nest of ``[T, B, ...]`` as one batch ``[(stop - start) * B,
    ...]``."""
    if stop == start + 1:
        return nest.map_structure(lambda x: x[start], nested)
    return nest.map_structure(lambda x: x[start:stop].flatten(0, 1), nested)


def pad_end(x: Tensor, count: int) -> Tensor:
    """Pad ``[N, ...]`` to ``[N + count, ...]`` with zeros after the last row."""
    return torch.cat((x, x.new_zeros((count, *x.shape[1:]))))


def pad_start(x: Tensor, count: int) -> Tensor:
    """Pad ``[N, ...]`` to ``[count + N, ...]`` with zeros before the first row."""
    return torch.cat((x.new_zeros((count, *x.shape[1:])), x))


def repeated(nested: NestedTensor, count: int) -> NestedTensor:
    """Repeat each sequence ``count`` times: ``[T, B, ...]`` to ``[T, B * count, ...]``.

    A loss can then treat ``count`` critics, ``[T, B, count, ...].flatten(1, 2)``, as additional samples.
    """
    return nest.map_structure(lambda x: x.unsqueeze(2).expand(*x.shape[:2], count, *x.shape[2:]).flatten(1, 2), nested)
