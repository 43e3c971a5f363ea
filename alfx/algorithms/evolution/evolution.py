"""Formulas of evolution strategies: fitness of the returns of a population, and the direction of the update.

Members are perturbations of the same parameters ``theta [D]``, possibly in pairs: member ``i`` is ``theta + sigma *
noise[i]``. Read next: :mod:`alfx.algorithms.evolution_strategy_algorithm`.
"""
import math

import torch
from torch import Tensor


def centered_ranks(returns: Tensor) -> Tensor:
    """Return ranks ``[N]`` of ``returns`` ``[N]`` from -1/2 to 1/2 (Salimans et al. 2017, arXiv:1703.03864, section
    2.1).

    Equal returns have the mean of their ranks.
    """
    count = len(returns)
    if count < 2:
        return torch.zeros_like(returns)
    smaller = (returns.unsqueeze(-1) > returns).sum(-1)
    equal = (returns.unsqueeze(-1) == returns).sum(-1)
    return ((smaller + (equal - 1) / 2) / (count - 1) - 0.5).to(returns.dtype)


def standardized(returns: Tensor) -> Tensor:
    """Normalize ``returns`` ``[N]`` to mean 0 and standard deviation 1; return zeros if all are equal."""
    return (returns - returns.mean()) / returns.std(unbiased=False).clamp_min(1e-8)


def raw(returns: Tensor) -> Tensor:
    """Return ``returns`` unchanged."""
    return returns


FITNESS = {'centered_rank': centered_ranks, 'standardized': standardized, 'raw': raw}


def gradient_estimate(fitness: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Estimate the gradient ``[D]`` of the mean fitness, ``1 / (N sigma) sum_i fitness[i] noise[i]``.

    Args:
        fitness: ``[N]``.
        noise: ``[N, D]``.
        sigma: standard deviation of the parameters.
    """
    return fitness @ noise / (len(fitness) * sigma)


def augmented_random_search(returns: Tensor, directions: Tensor, num_best: int) -> Tensor:
    """Compute the step ``[D]`` of augmented random search (Mania et al. 2018, arXiv:1803.07055, algorithm 2).

    ``1 / (b s) sum_k (r+[k] - r-[k]) directions[k]`` over the b directions whose better return is largest, with the
    standard deviation s of their 2 b returns.

    Args:
        returns: ``[2, P]``: returns of ``theta + sigma * directions`` and of ``theta - sigma * directions``.
        directions: ``[P, D]``.
        num_best: b.
    """
    best = returns.amax(0).topk(num_best).indices
    chosen = returns[:, best]
    deviation = chosen.std(unbiased=False).clamp_min(1e-8)
    return (chosen[0] - chosen[1]) @ directions[best] / (num_best * deviation)


def utilities(returns: Tensor) -> Tensor:
    """Compute the utilities ``[N]`` of natural evolution strategies (Wierstra et al. 2014, arXiv:1106.4487, section
    3.1).

    ``max(0, log(N / 2 + 1) - log(rank)) / sum - 1 / N`` with rank 1 for the best; they sum to 0. Equal returns have the
    mean of the utilities of their ranks.
    """
    count = len(returns)
    ranks = torch.arange(1, count + 1, dtype=returns.dtype)
    by_rank = (math.log(count / 2 + 1) - ranks.log()).clamp_min(0)
    by_rank = by_rank / by_rank.sum() - 1 / count
    result = torch.empty_like(returns)
    result[returns.argsort(descending=True)] = by_rank.to(returns.device)
    same = (returns.unsqueeze(-1) == returns).to(returns.dtype)
    return same @ result / same.sum(-1)


def default_sigma_rate(size: int) -> float:
    """Return the learning rate of the standard deviations in ``size`` dimensions, ``(3 + log D) / (5 sqrt D)``."""
    return (3 + math.log(size)) / (5 * math.sqrt(size))
