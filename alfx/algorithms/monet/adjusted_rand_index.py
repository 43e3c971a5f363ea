"""Adjusted Rand index: agreement between two partitions, independent of the names of the parts."""
import torch
from torch import Tensor


def adjusted_rand_index(labels: Tensor, clusters: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the adjusted Rand index (Hubert & Arabie 1985, doi:10.1007/BF01908075, eq. 5) of a batch of partitions.

    With ``n_ij`` the number of items with label i in cluster j, row sums ``a_i``, column sums ``b_j``, total N, and
    ``C(n) = n (n - 1) / 2`` pairs among n items::

        index    = sum_ij C(n_ij)
        expected = sum_i C(a_i) sum_j C(b_j) / C(N)
        most     = (sum_i C(a_i) + sum_j C(b_j)) / 2
        ARI      = (index - expected) / (most - expected)

    It is 1 for equal partitions and 0 on average for random ones with parts of the same sizes. If both partitions are
    trivial in the same way (one part, only parts of one item, or at most one item), it is 1.

    Args:
        labels: integers ``[B, ...]``, not negative: true part of each item.
        clusters: integers of the same shape: predicted part of each item.
        counted: bool of the same shape: items to include, such as all but the background; ``None``: all.

    Returns:
        Index float32 ``[B]``.

    Raises:
        ValueError: the shapes disagree, or a number is negative or not an integer.
    """
    if labels.shape != clusters.shape or (counted is not None and counted.shape != labels.shape):
        shapes = [tuple(x.shape) for x in (labels, clusters, counted) if x is not None]
        raise ValueError(f'adjusted_rand_index: expected tensors of the same shape, found {shapes}')
    for name, x in (('labels', labels), ('clusters', clusters)):
        if x.is_floating_point() or (x.numel() and int(x.min()) < 0):
            raise ValueError(f'adjusted_rand_index: expected {name} to be integers >= 0, found {x.dtype} '
                             f'{x.flatten()[:5].tolist()}...')
    if not labels.numel():
        return torch.ones(labels.shape[:1], device=labels.device)
    batch = labels.shape[0]
    labels, clusters = labels.reshape(batch, -1).long(), clusters.reshape(batch, -1).long()
    rows, columns = int(labels.max()) + 1, int(clusters.max()) + 1
    ones = torch.ones(labels.shape, dtype=torch.float64, device=labels.device)
    if counted is not None:
        ones = ones * counted.reshape(batch, -1)
    counts = ones.new_zeros(batch, rows * columns).scatter_add_(1, labels * columns + clusters, ones)
    counts = counts.view(batch, rows, columns)
    index = _pairs(counts).sum((1, 2))
    of_labels, of_clusters = _pairs(counts.sum(2)).sum(1), _pairs(counts.sum(1)).sum(1)
    total = _pairs(counts.sum((1, 2)))
    expected = of_labels * of_clusters / total.clamp(min=1)
    most = (of_labels + of_clusters) / 2
    trivial = most == expected
    return torch.where(trivial, 1.0, (index - expected) / (most - expected).masked_fill(trivial, 1)).float()


def _pairs(count: Tensor) -> Tensor:
    """Return the number of pairs among ``count`` items, elementwise."""
    return count * (count - 1) / 2
