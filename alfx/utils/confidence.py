"""Confidence intervals of a mean."""
import math

import numpy as np


def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile of Student's t distribution.

    With t = sqrt(n) tan(a) its density is proportional to cos(a)^(n-1), which is integrated numerically; the relative
    error is below 1e-4.

    Args:
        probability: in ``(0.5, 1)``.
        degrees_of_freedom: n, at least 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0.5 < probability < 1.0 or degrees_of_freedom < 1:
        raise ValueError('expected a probability in (0.5, 1) and at least 1 degree of freedom, found '
                         f'{probability} and {degrees_of_freedom}')
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angle)**(degrees_of_freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    at = np.interp((probability - 0.5) * 2 * mass[-1], mass, angle)
    return math.sqrt(degrees_of_freedom) * math.tan(at)


def confidence_interval(values: np.ndarray, level: float = 0.95) -> np.ndarray:
    """Half width of the confidence interval of the mean (Student's t).

    Args:
        values: ``[N, ...]`` independent samples.
        level: probability that the interval covers the mean.

    Returns:
        Half widths ``[...]``; NaN for fewer than two samples.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return student_t_quantile((1 + level) / 2, len(values) - 1) * values.std(0, ddof=1) / math.sqrt(len(values))
