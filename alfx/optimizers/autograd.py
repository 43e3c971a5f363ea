"""Work that autograd has no part in."""
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def without_autograd(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Context manager for operations on ``tensors``, as ``torch.no_grad``.

    On the CPU operations do not even ask autograd, which takes them as long as work on a small tensor. What is changed
    in place is counted as changed all the same.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            return torch.no_grad()
    return torch._C._AutoDispatchBelowAutograd()
