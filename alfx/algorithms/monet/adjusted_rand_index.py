"""How well one partition of things agrees with another, whatever the parts are called."""
import torch
from torch import Tensor


def adjusted_rand_index(labels: Tensor, clusters: Tensor, counted: Tensor | None = None) -> Tensor:
    """The adjusted Rand index (Hubert & Arabie 1985, doi:10.1007/BF01908075, eq. 5), for a batch.

    With ``n_ij`` the number of things that have label i and are in cluster j, row sums ``a_i``, column sums ``b_j``, N
    the sum of all, and ``C(n) = n (n - 1) / 2`` pairs among n things::

        index    = sum_ij C(n_ij)
        expected = sum_i C(a_i) sum_j C(b_j) / C(N)
        most     = (sum_i C(a_i) + sum_j C(b_j)) / 2
        ARI      = (index - expected) / (most - expected)

    It is 1 for equal partitions and 0 on average for random ones with the same sizes of parts. Where both partitions
    are trivial in the same way (one part, or nothing but single things, or at most one thing) it is 1.

    Args:
        labels: integers ``[B, ...]``, not negative: the true part of each thing.
        clusters: integers of the same shape: the part found.
        counted: bool of the same shape: which things to look at, such as all but the background; ``None``: all.

    Returns:
        float32 ``[B]``.

    Raises:
        ValueError: the shapes disagree, or a number is negative or not an integer.
    """
    if labels.shape != clusters.shape or (counted is not None and counted.shape != labels.shape):
        shapes = [tuple(x.shape) for x in (labels, clusters, counted) if x is not None]
        raise ValueError(f'adjusted_rand_index: expected tensors of the same shape, found {shapes}')
    for name, x in (('labels', labels), ('clusters', clusters)):
        if x.is_floating_point() or (x.numel() and int(x.min()) < 0):
            raise ValueError(f'adjusted_rand_index: expected {name} to be integers from 0 on, found {x.dtype} '
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
    """The number of pairs among ``count`` things, elementwise."""
    return count * (count - 1) / 2
