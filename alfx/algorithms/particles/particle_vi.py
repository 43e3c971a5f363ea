"""Update directions of particles that approximate a distribution: SVGD and GFSF, with a kernel between the particles.

Particles ``x_1 ... x_N`` in D dimensions follow the gradient of ``log p``, the *score*, and repel each other:

    k(x, y)  = exp(-|x - y|^2 / h)
    SVGD:    phi(x) = 1/M sum_j [k(y_j, x) s(y_j) + a grad_{y_j} k(y_j, x)]    (Liu, Wang 2016, arXiv:1608.04471)
    GFSF:    phi_i  = s(x_i) + a (K + r I)^-1 sum_j grad_{x_j} k(x_j, x_i)      (Liu et al. 2019, arXiv:1807.01750)

with the weight ``a`` of the repulsion, 1 for the distribution itself. Since ``grad_{y_j} k(y_j, x) = 2/h (x - y_j) k``,
sums over j are products of the ``[N, M]`` matrix of kernels with the particles: memory is O(N M + N D), not O(N M D).
Distances are computed in float64 from centered particles, because the difference of large squares would lose the
distances of close particles.
"""
import math

import torch
from torch import Tensor

_COLUMNS = 1 << 12  # columns converted to float64 at a time; converting all takes more memory than the particles


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return ``|x_i - y_j|^2``.

    Args:
        x: ``[N, D]``.
        y: ``[M, D]``.

    Returns:
        Squared distances, float64 ``[N, M]``, without gradients.
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
    """Return ``h = median / log(N)``, so that the kernels of a particle sum up to about 1 (Liu, Wang 2016).

    Args:
        distances: squared distances ``[N, M]``, or ``[N]`` of N pairs.
        same: the distances are within one set; zero distances of a particle to itself are then excluded.

    Returns:
        Bandwidth, float64 scalar; 1 if all distances are zero.
    """
    num = distances.shape[0]
    if same:
        # After dropping the first one, every (N + 1)-th is the distance of a particle to itself.
        distances = distances.flatten()[1:].view(num - 1, num + 1)[:, :-1]
    if distances.numel() == 0:
        return torch.ones((), dtype=torch.float64, device=distances.device)
    bandwidth = distances.flatten().median() / math.log(max(num, 2))
    return torch.where(bandwidth > 0, bandwidth, torch.ones_like(bandwidth))


def kernel(distances: Tensor, bandwidth: Tensor) -> Tensor:
    """Return ``exp(-d / h)``, elementwise."""
    return torch.exp(-distances / bandwidth)


def repulsion(x: Tensor, y: Tensor, kernels: Tensor, bandwidth: Tensor) -> Tensor:
    """Return ``sum_j grad_{y_j} k(y_j, x_i)``.

    Args:
        x: ``[N, D]``.
        y: ``[M, D]``.
        kernels: ``k(x_i, y_j)``, ``[N, M]``.
        bandwidth: scalar ``h``.

    Returns:
        Repulsion ``[N, D]`` with the dtype of ``x``.
    """
    # The sum does not depend on a shift of all points; centered points lose less precision in the difference.
    center = y.mean(0)
    weights = kernels.to(x.dtype)
    differences = weights @ (center - y)
    return differences.addcmul_(x - center, weights.sum(1, keepdim=True)).mul_((2 / bandwidth).to(x.dtype))


def svgd_direction(x: Tensor, y: Tensor, score: Tensor, kernels: Tensor, bandwidth: Tensor, weight: float) -> Tensor:
    """Return the SVGD direction at ``x`` with expectations over ``y``; see the module docstring.

    Args:
        x: ``[N, D]``.
        y: ``[M, D]``; the same as ``x`` for particles that repel each other.
        score: gradient of the log density at ``y``, ``[M, D]``.
        kernels: ``k(x_i, y_j)``, ``[N, M]``.
        bandwidth: scalar ``h``.
        weight: weight of the repulsion.

    Returns:
        Direction ``[N, D]``.
    """
    direction = repulsion(x, y, kernels, bandwidth).mul_(weight)
    return direction.addmm_(kernels.to(x.dtype), score).div_(len(y))


def paired_svgd_direction(x: Tensor, y: Tensor, score: Tensor, kernels: Tensor, bandwidth: Tensor, weight: float
                          ) -> Tensor:
    """Return the SVGD direction at each ``x_i`` with a single ``y_i``, so that both can share a condition.

    Args:
        x: ``[N, D]``.
        y: ``[N, D]``.
        score: gradient of the log density at ``y``, ``[N, D]``.
        kernels: ``k(x_i, y_i)``, ``[N]``.
        bandwidth: scalar ``h``.
        weight: weight of the repulsion.

    Returns:
        Direction ``[N, D]``.
    """
    weights = kernels.to(x.dtype).unsqueeze(1)
    return weights * score + weight * weights * (x - y) * (2 / bandwidth).to(x.dtype)


def smoothed_repulsion(x: Tensor, kernels: Tensor, bandwidth: Tensor, ridge: float) -> Tensor:
    """Return ``(K + r I)^-1 sum_j grad_{x_j} k(x_j, x_i)``, minus the gradient of the particles' log density.

    Args:
        x: ``[N, D]``.
        kernels: ``K``, float64 ``[N, N]``.
        bandwidth: scalar ``h``.
        ridge: ``r``, relative to the diagonal of K, which is 1.

    Returns:
        Repulsion ``[N, D]`` with the dtype of ``x``.
    """
    identity = torch.eye(len(x), dtype=kernels.dtype, device=x.device)
    factor = torch.linalg.cholesky(kernels + ridge * identity)
    # (K + r I)^-1 (diag(K 1) - K) x, starting with the product of the small matrices
    smoother = torch.cholesky_solve(torch.diag(kernels.sum(1)) - kernels, factor) * (2 / bandwidth)
    return smoother.to(x.dtype) @ (x - x.mean(0))


def mean_pairwise_distance(x: Tensor) -> Tensor:
    """Return the mean of ``|x_i - x_j|`` over pairs of ``[N, D]``, which shows a collapse; 0 for one particle."""
    num = len(x)
    return x.new_zeros(()) if num < 2 else (squared_distances(x, x).sqrt().sum() / (num * (num - 1))).to(x.dtype)
