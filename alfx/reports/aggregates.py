"""Aggregate scores of several runs with confidence intervals that are valid for few runs.

The statistics are those of Agarwal et al. 2021, arXiv:2108.13264. The scores of a task are an array ``[N]`` over N runs
of the same conf with different seeds; N may differ between tasks.
"""
from collections.abc import Callable, Sequence

import numpy as np

_RESAMPLES = 2000
_SEED = 0  # the same runs get the same interval


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half of the values along the first dimension.

    A quarter of the values, rounded down, is dropped at either end, so with fewer than four values this is the mean.

    Args:
        values: ``[N, ...]``.

    Returns:
        ``[...]``; NaN where any value is NaN.

    Raises:
        ValueError: N is 0.
    """
    values = np.asarray(values, dtype=np.float64)
    values = np.sort(np.where(np.isnan(values).any(0), np.nan, values), axis=0)  # do not sort NaN as the largest value
    if len(values) == 0:
        raise ValueError('expected at least one value, found none')
    cut = len(values) // 4
    return values[cut:len(values) - cut].mean(0)


def probability_of_improvement(tasks: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Probability that a run of X is better than a run of Y on a random task.

        P(X > Y) = 1/M sum_m 1/(N K) sum_i sum_j S(x[m, i], y[m, j]),   S(x, y) = 1 if x > y, 1/2 if x = y, else 0

    Args:
        tasks: scores ``(x [N], y [K])`` of each of the M tasks.

    Returns:
        A number in ``[0, 1]``.

    Raises:
        ValueError: there is no task, or a task has no runs.
    """
    if not tasks or any(len(scores) == 0 for pair in tasks for scores in pair):
        raise ValueError('expected at least one task, and at least one run of X and of Y on each task')
    chances = [(np.greater.outer(x, y) + 0.5 * np.equal.outer(x, y)).mean() for x, y in tasks]
    return float(np.mean(chances))


def bootstrap_interval(statistic: Callable[[list[np.ndarray]], float], strata: Sequence[np.ndarray],
                       level: float = 0.95, resamples: int = _RESAMPLES) -> tuple[float, float]:
    """Interval of the stratified percentile bootstrap: runs are resampled with replacement within each stratum.

    Args:
        statistic: function of a list like ``strata``.
        strata: the runs ``[N]`` of each conf on each task.
        level: probability that the interval covers the statistic.
        resamples: number of bootstrap samples.

    Returns:
        Low and high; NaN if every stratum has fewer than two runs.
    """
    if all(len(runs) < 2 for runs in strata):
        return float('nan'), float('nan')
    generator = np.random.default_rng(_SEED)
    drawn = [statistic([runs[generator.integers(len(runs), size=len(runs))] for runs in strata])
             for _ in range(resamples)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interquartile_mean_interval(values: np.ndarray, level: float = 0.95,
                                resamples: int = _RESAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap intervals of :func:`interquartile_mean` on one task, for many points at once.

    Args:
        values: ``[N, P]``, P quantities of N runs; whole runs are resampled.
        level: probability that an interval covers the statistic.
        resamples: number of bootstrap samples.

    Returns:
        Low and high, ``[P]``; NaN for a single run.
    """
    values = np.asarray(values, dtype=np.float64)
    count, num_points = values.shape
    if count < 2:
        return np.full(num_points, np.nan), np.full(num_points, np.nan)
    index = np.random.default_rng(_SEED).integers(count, size=(count, resamples))
    limits = [np.quantile(interquartile_mean(values[:, p][index]), [(1 - level) / 2, (1 + level) / 2])
              for p in range(num_points)]
    low, high = np.transpose(limits)
    return low, high
