"""Operations without autograd."""
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def without_autograd(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context manager for operations on ``tensors``, like ``torch.no_grad``.

    On the CPU it bypasses the autograd dispatch, which takes as long as the operation itself on a small tensor.
    In-place changes still increase the version counters of the tensors.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            return torch.no_grad()
    return torch._C._AutoDispatchBelowAutograd()
