"""Directions in which particles move towards a distribution: SVGD and GFSF, from a kernel between the particles.

Particles ``x_1 ... x_N`` in D dimensions follow the gradient of ``log p``, the *score*, and keep away from each other:

    k(x, y)  = exp(-|x - y|^2 / h)
    SVGD:    phi(x) = 1/M sum_j [k(y_j, x) s(y_j) + a grad_{y_j} k(y_j, x)]    (Liu, Wang 2016, arXiv:1608.04471)
    GFSF:    phi_i  = s(x_i) + a (K + r I)^-1 sum_j grad_{x_j} k(x_j, x_i)      (Liu et al. 2019, arXiv:1807.01750)

with the weight ``a`` of the repulsion, 1 for the distribution itself. As ``grad_{y_j} k(y_j, x) = 2/h (x - y_j) k``,
sums over j are products of the ``[N, M]`` matrix of kernels with the particles: memory is O(N M + N D), never N M D.
Distances are computed in float64 from centred particles, as the difference of large squares would lose those of close
particles.
"""
import math

import torch
from torch import Tensor

_COLUMNS = 1 << 12  # as many at a time are made float64: copies of all would take more memory than the particles


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """``|x_i - y_j|^2``.

    Args:
        x: ``[N, D]``.
        y: ``[M, D]``.

    Returns:
        float64 ``[N, M]``, without gradients.
    """
    x, y = x.detach(), y.detach()
    total = x.new_zeros((len(x), len(y)), dtype=torch.float64)
    for begin in range(0, x.shape[1], _COLUMNS):
        a, b = (z[:, begin:begin + _COLUMNS].double() for z in (x, y))
        center = b.mean(0)
        a, b = a - center, b - center
        total += a.square().sum(1, keepdim=True) - 2 * (a @ b.T) + b.square().sum(1)
    return total.clamp_(min=0)


def median_bandwidth(distances: Tensor, same: bool) -> Tensor:
    """``h = median / log(N)``, so that the kernels of a particle with all others sum up to about 1 (Liu, Wang 2016).

    Args:
        distances: squared distances ``[N, M]``, or ``[N]`` of N pairs.
        same: whether they are those of a set with itself; the zeros of a particle with itself then do not count.

    Returns:
        float64 scalar; 1 where there is no distance other than zero.
    """
    num = distances.shape[0]
    if same:
        # without the first one, every (N + 1)-th is one of a particle with itself
        distances = distances.flatten()[1:].view(num - 1, num + 1)[:, :-1]
    if distances.numel() == 0:
        return torch.ones((), dtype=torch.float64, device=distances.device)
    bandwidth = distances.flatten().median() / math.log(max(num, 2))
    return torch.where(bandwidth > 0, bandwidth, torch.ones_like(bandwidth))


def kernel(distances: Tensor, bandwidth: Tensor) -> Tensor:
    """``exp(-d / h)``, elementwise."""
    return torch.exp(-distances / bandwidth)


def repulsion(x: Tensor, y: Tensor, kernels: Tensor, bandwidth: Tensor) -> Tensor:
    """``sum_j grad_{y_j} k(y_j, x_i)``.

    Args:
        x: ``[N, D]``.
        y: ``[M, D]``.
        kernels: ``k(x_i, y_j)``, ``[N, M]``.
        bandwidth: scalar ``h``.

    Returns:
        ``[N, D]`` of the dtype of ``x``.
    """
    # The sum does not change when all are shifted; centred ones lose less in the difference.
    center = y.mean(0)
    weights = kernels.to(x.dtype)
    differences = weights @ (center - y)
    return differences.addcmul_(x - center, weights.sum(1, keepdim=True)).mul_((2 / bandwidth).to(x.dtype))


def svgd_direction(x: Tensor, y: Tensor, score: Tensor, kernels: Tensor, bandwidth: Tensor, weight: float) -> Tensor:
    """SVGD at ``x`` with expectations over ``y``; see the module.

    Args:
        x: ``[N, D]``.
        y: ``[M, D]``; the same as ``x`` for particles that move each other.
        score: gradient of the log density at ``y``, ``[M, D]``.
        kernels: ``k(x_i, y_j)``, ``[N, M]``.
        bandwidth: scalar ``h``.
        weight: of the repulsion.

    Returns:
        ``[N, D]``.
    """
    direction = repulsion(x, y, kernels, bandwidth).mul_(weight)
    return direction.addmm_(kernels.to(x.dtype), score).div_(len(y))


def paired_svgd_direction(x: Tensor, y: Tensor, score: Tensor, kernels: Tensor, bandwidth: Tensor, weight: float
                          ) -> Tensor:
    """SVGD at each ``x_i`` with the expectation over a single ``y_i``, so that both may be given the same condition.

    Args:
        x: ``[N, D]``.
        y: ``[N, D]``.
        score: gradient of the log density at ``y``, ``[N, D]``.
        kernels: ``k(x_i, y_i)``, ``[N]``.
        bandwidth: scalar ``h``.
        weight: of the repulsion.

    Returns:
        ``[N, D]``.
    """
    weights = kernels.to(x.dtype).unsqueeze(1)
    return weights * score + weight * weights * (x - y) * (2 / bandwidth).to(x.dtype)


def smoothed_repulsion(x: Tensor, kernels: Tensor, bandwidth: Tensor, ridge: float) -> Tensor:
    """``(K + r I)^-1 sum_j grad_{x_j} k(x_j, x_i)``: minus the gradient of the log density of the particles themselves.

    Args:
        x: ``[N, D]``.
        kernels: ``K``, float64 ``[N, N]``.
        bandwidth: scalar ``h``.
        ridge: ``r``, relative to the diagonal of K, which is 1.

    Returns:
        ``[N, D]`` of the dtype of ``x``.
    """
    identity = torch.eye(len(x), dtype=kernels.dtype, device=x.device)
    factor = torch.linalg.cholesky(kernels + ridge * identity)
    # (K + r I)^-1 (diag(K 1) - K) x, with the small matrix first
    smoother = torch.cholesky_solve(torch.diag(kernels.sum(1)) - kernels, factor) * (2 / bandwidth)
    return smoother.to(x.dtype) @ (x - x.mean(0))


def mean_pairwise_distance(x: Tensor) -> Tensor:
    """The mean of ``|x_i - x_j|`` over pairs of different particles of ``[N, D]``; 0 for one: it shows a collapse."""
    num = len(x)
    if num < 2:
        return x.new_zeros(())
    return (squared_distances(x, x).sqrt().sum() / (num * (num - 1))).to(x.dtype)
