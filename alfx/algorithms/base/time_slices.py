"""Parts of training sequences ``[T, B, ...]`` as one batch, and back."""
import torch
from torch import Tensor

from alfx import nest
from alfx.tensor_specs import NestedTensor


def steps(nested: NestedTensor, start: int, stop: int) -> NestedTensor:
    """Steps ``start`` to ``stop - 1`` of a nest of ``[T, B, ...]`` as one batch ``[(stop - start) * B, ...]``."""
    if stop == start + 1:
        return nest.map_structure(lambda x: x[start], nested)
    return nest.map_structure(lambda x: x[start:stop].flatten(0, 1), nested)


def pad_end(x: Tensor, count: int) -> Tensor:
    """``[N, ...]`` to ``[N + count, ...]``: zeros behind the last row."""
    return torch.cat((x, x.new_zeros((count, *x.shape[1:]))))


def pad_start(x: Tensor, count: int) -> Tensor:
    """``[N, ...]`` to ``[count + N, ...]``: zeros in front of the first row."""
    return torch.cat((x.new_zeros((count, *x.shape[1:])), x))


def repeated(nested: NestedTensor, count: int) -> NestedTensor:
    """``[T, B, ...]`` to ``[T, B * count, ...]``: each sequence ``count`` times in a row.

    With it, ``count`` critics ``[T, B, count, ...].flatten(1, 2)`` are so many more samples to a loss.
    """
    return nest.map_structure(lambda x: x.unsqueeze(2).expand(*x.shape[:2], count, *x.shape[2:]).flatten(1, 2), nested)
