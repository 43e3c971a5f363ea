"""Drawing indices."""
import numpy as np
import torch
from torch import Tensor


def draw_distinct(n: int, k: int) -> Tensor:
    """``k`` distinct integers from ``range(n)`` in random order, all choices equally likely.

    The first ``k`` different values of a stream of independent draws; no work in proportion to ``n``.

    Args:
        n: at least ``k``.
        k: how many.

    Returns:
        int64 ``[k]`` on the CPU.
    """
    if n <= 4 * k:
        return torch.randperm(n)[:k]
    drawn = torch.randint(n, (k, ))
    while _has_repeats(drawn):
        values, order = drawn.sort(stable=True)
        first = torch.ones(k, dtype=torch.bool)
        first[order[1:][values[1:] == values[:-1]]] = False
        kept = drawn[first]
        drawn = torch.cat([kept, torch.randint(n, (k - len(kept), ))])
    return drawn


def _has_repeats(values: Tensor) -> bool:
    # numpy, because its calls cost a fraction of torch's and this runs for every batch.
    ordered = np.sort(values.numpy())
    return bool((ordered[1:] == ordered[:-1]).any())
