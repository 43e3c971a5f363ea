"""Black-box optimizers of action sequences: random shooting, CEM, iCEM, MPPI.

All of them treat the cost as a black box and optimize for many environments at once, independently of each other.
Shapes: ``B`` environments, ``P`` candidates of each, ``S`` the shape of a solution, such as ``(H, dim)`` for a plan of
H actions. Read next: :mod:`alfx.algorithms.planning_algorithm`.
"""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.gin_utils import check_value, takes_arguments_of
from alfx.tensor_specs import NestedTensor

CostFunction = Callable[[NestedTensor, Tensor], Tensor]
"""Cost function ``f(observation [B, ...], solutions [B, P, *S]) -> cost [B, P]``."""

_WORST = torch.finfo(torch.float32).max


class TrajOptimizer:
    """Base class of the optimizers.

    Args:
        solution_dim: ``S``: the number of components of a solution, or its shape.
        population_size: ``P``: number of candidates of each environment in an iteration; larger populations find better
            solutions and cost more.
        cost_func: the cost of solutions; NaN counts as the highest cost.
        upper_bound: maximum of each component, broadcast to ``S``.
        lower_bound: minimum of each component, broadcast to ``S``.

    Raises:
        ConfError: the population is empty.
        ValueError: a lower bound is above the upper one, or a bound is not finite.
    """

    def __init__(self, solution_dim: int | Sequence[int], population_size: int, cost_func: CostFunction,
                 upper_bound: Any, lower_bound: Any):
        name = type(self).__name__
        self._shape = (solution_dim, ) if isinstance(solution_dim, int) else tuple(solution_dim)
        self._population_size = check_value(name, 'population_size', population_size, int, minimum=1)
        self._cost_func = cost_func
        self._low, self._high = (torch.as_tensor(bound, dtype=torch.float32).expand(self._shape)
                                 for bound in (lower_bound, upper_bound))
        if not bool((self._low <= self._high).all() and self._low.isfinite().all() and self._high.isfinite().all()):
            raise ValueError(f'{name}: expected finite bounds, lower_bound <= upper_bound, found {lower_bound} and '
                             f'{upper_bound}')

    def reset(self) -> None:
        """Reset the state kept between observations; these optimizers keep none."""

    def obtain_solution(self, observation: NestedTensor, init_mean: Tensor | None = None,
                        init_var: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the best solution for each environment.

        Args:
            observation: nest ``[B, ...]``; passed to the cost function.
            init_mean: initial mean of the search, ``[B, *S]``; ``None``: the middle of the bounds.
            init_var: initial variance of the search, ``[B, *S]``; ``None``: the square of half the distance between
                the bounds.

        Returns:
            The solution ``[B, *S]``, within the bounds, and its cost ``[B]``.
        """
        raise NotImplementedError(f'{type(self).__name__}.obtain_solution')

    # Helpers for subclasses ------------------------------------------------------------------------------------

    def _start(self, observation: NestedTensor, mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the initial mean and variance ``[B, *S]``."""
        leaf = nest.flatten(observation)[0]
        if self._low.device != leaf.device:
            self._low, self._high = self._low.to(leaf.device), self._high.to(leaf.device)
        shape = leaf.shape[0], *self._shape
        half = 0.5 * (self._high - self._low)
        return ((self._low + half).expand(shape) if mean is None else mean,
                half.square().expand(shape) if var is None else var)

    def _candidates(self, mean: Tensor, var: Tensor, noise: Tensor) -> Tensor:
        """Return ``[B, P, *S]`` around the mean, within the bounds, from standard normal noise of that shape."""
        return self._clipped(torch.addcmul(mean.unsqueeze(1), var.sqrt().unsqueeze(1), noise))

    def _clipped(self, solutions: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(solutions, self._low), self._high)

    def _noise(self, batch: int, count: int) -> Tensor:
        return torch.randn(batch, count, *self._shape, device=self._low.device)

    def _costs(self, observation: NestedTensor, solutions: Tensor) -> Tensor:
        """Return the finite costs ``[B, P]``.

        Raises:
            ValueError: the cost function returns another shape.
        """
        cost = self._cost_func(observation, solutions)
        if tuple(cost.shape) != tuple(solutions.shape[:2]):
            raise ValueError(f'{type(self).__name__}.cost_func: expected costs of shape [B, P] = '
                             f'{list(solutions.shape[:2])}, found {list(cost.shape)}')
        return cost.nan_to_num(nan=_WORST, posinf=_WORST, neginf=-_WORST)


def select_solutions(solutions: Tensor, index: Tensor) -> Tensor:
    """Return the solutions ``[B, K, *S]`` at an index ``[B, K]`` of ``solutions [B, P, *S]``."""
    return solutions[torch.arange(len(index), device=index.device).unsqueeze(1), index]


class RandomOptimizer(TrajOptimizer):
    """Random shooting: the best of uniformly random solutions (Nagabandi et al. 2017, arXiv:1708.02596)."""

    def obtain_solution(self, observation: NestedTensor, init_mean: Tensor | None = None,
                        init_var: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the best solution for each environment; the initial mean and variance are ignored."""
        batch = self._start(observation, None, None)[0].shape[0]
        uniform = torch.rand(batch, self._population_size, *self._shape, device=self._low.device)
        solutions = torch.lerp(self._low, self._high, uniform)
        cost, best = self._costs(observation, solutions).min(1)
        return select_solutions(solutions, best.unsqueeze(1)).squeeze(1), cost


class CEMOptimizer(TrajOptimizer):
    """Cross-entropy method: repeatedly fit a normal distribution to the best of its samples, the elites.

    In each environment the iteration stops when the largest variance is below ``epsilon``, independently of the other
    environments. The solution is the mean.

    Args:
        elite_size: number of best candidates that the distribution is fitted to; fewer elites converge faster.
        max_iter_num: maximum number of iterations.
        epsilon: largest variance at which the iteration stops.
        tau: step size of mean and variance towards those of the elites, in (0, 1].
        min_var: minimum variance.
        kwargs: arguments of :class:`TrajOptimizer`.

    Raises:
        ConfError: an argument is out of range, or there are more elites than candidates.
    """

    def __init__(self, solution_dim: int | Sequence[int], population_size: int, cost_func: CostFunction,
                 upper_bound: Any, lower_bound: Any, elite_size: int = 50, max_iter_num: int = 5,
                 epsilon: float = 0.01, tau: float = 0.9, min_var: float = 1e-5):
        super().__init__(solution_dim, population_size, cost_func, upper_bound, lower_bound)
        name = type(self).__name__
        self._elite_size = check_value(name, 'elite_size', elite_size, int, minimum=1, maximum=population_size)
        self._max_iter_num = check_value(name, 'max_iter_num', int(max_iter_num), int, minimum=1)
        self._epsilon = check_value(name, 'epsilon', epsilon, float, minimum=0)
        self._tau = check_value(name, 'tau', tau, float, above=0, maximum=1)
        self._min_var = check_value(name, 'min_var', min_var, float, minimum=0)

    def obtain_solution(self, observation: NestedTensor, init_mean: Tensor | None = None,
                        init_var: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean and the cost of the best candidate of the last iteration, see the base class."""
        mean, var = self._start(observation, init_mean, init_var)
        best = mean.new_full((len(mean), ), _WORST)
        for _ in range(self._max_iter_num):
            active = var.flatten(1).amax(1) >= self._epsilon
            if not bool(active.any()):
                break
            solutions = self._candidates(mean, var, self._noise(len(mean), self._population_size))
            mean, var, _, cost = self._fitted(observation, solutions, mean, var, active)
            best = torch.where(active, cost, best)
        return self._clipped(mean), best

    def _fitted(self, observation: NestedTensor, solutions: Tensor, mean: Tensor, var: Tensor,
                active: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fit mean and variance ``[B, *S]`` to the elites of ``solutions [B, P, *S]`` where ``active [B]``.

        Returns:
            Mean, variance, the elites ``[B, elite_size, *S]``, best first, and the lowest cost ``[B]``.
        """
        cost, index = self._costs(observation, solutions).topk(self._elite_size, 1, largest=False)
        elites = select_solutions(solutions, index)
        new_mean = elites.mean(1)
        new_var = (elites - new_mean.unsqueeze(1)).square().mean(1)
        active = active.view(-1, *[1] * len(self._shape))
        mean = torch.where(active, torch.lerp(mean, new_mean, self._tau), mean)
        var = torch.where(active, torch.lerp(var, new_var, self._tau).clamp(min=self._min_var), var)
        return mean, var, elites, cost[:, 0]


def colored_noise(shape: Sequence[int], beta: float, device: torch.device | None = None) -> Tensor:
    """Return normal noise whose power falls with frequency as ``1 / f**beta`` along the second to last axis.

    Timmer and Koenig 1995: independent normal Fourier coefficients, scaled by ``f**(-beta / 2)``; the mean, of
    frequency 0, gets the scale of the lowest other frequency. Each number has variance 1.

    Args:
        shape: ``[..., H, dim]``.
        beta: 0 for white noise, 1 for pink, 2 for brown.
        device: device of the result.
    """
    *outer, length, dim = shape
    if beta == 0 or length == 1:
        return torch.randn(*shape, device=device)
    frequencies = torch.fft.rfftfreq(length, device=device)
    frequencies[0] = frequencies[1]
    scale = frequencies.pow(-0.5 * beta)
    real, imaginary = torch.randn(2, *outer, dim, len(scale), device=device).unbind(0)
    imaginary[..., 0] = 0.0  # these coefficients of a real signal are real
    ends = torch.ones_like(scale)
    ends[0] = math.sqrt(2.0)
    if length % 2 == 0:
        imaginary[..., -1] = 0.0
        ends[-1] = math.sqrt(2.0)
    spectrum = torch.complex(real * scale * ends, imaginary * scale)
    noise = torch.fft.irfft(spectrum, n=length, dim=-1)
    # x[t] = 1/H sum_k c[k] e^(i..): variance 1/H^2 (2 s[0]^2 + sum of 4 s[k]^2 (2 s[H/2]^2 at k = H/2))
    weights = torch.full_like(scale, 4.0)
    weights[0] = 2.0
    if length % 2 == 0:
        weights[-1] = 2.0
    return (noise * (length / (weights * scale.square()).sum().sqrt())).transpose(-1, -2)


class ICEMOptimizer(CEMOptimizer):
    """Improved CEM, with less than a tenth of the candidates (Pinneri et al. 2020, arXiv:2008.06389).

    The noise is colored along the plan, so that consecutive actions are similar; the population shrinks from iteration
    to iteration; the best elites become candidates of the next iteration; the mean is a candidate of the first and the
    last iteration; the solution is the best candidate of all iterations.

    Args:
        noise_beta: exponent of the color of the noise; larger values make plans smoother.
        population_decay: the population of iteration i is divided by ``population_decay ** i``; at least 1. There are
            at least twice as many candidates as elites.
        keep_fraction: fraction of the elites that become candidates again, in [0, 1].
        return_mean_elites: return the mean as the solution, which is more stable if many candidates have the same cost.
        kwargs: arguments of :class:`CEMOptimizer`; a solution has a shape ``(H, dim)``.

    Raises:
        ConfError: an argument is out of range.
        ValueError: a solution does not have a shape ``(H, dim)``.
    """

    @takes_arguments_of(CEMOptimizer, defaults={'elite_size': 10, 'max_iter_num': 3, 'epsilon': 0.0},
                        after={'noise_beta': 'min_var'})
    def __init__(self, noise_beta: float = 2.0, population_decay: float = 1.25, keep_fraction: float = 0.3,
                 return_mean_elites: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        name = type(self).__name__
        if len(self._shape) != 2:
            raise ValueError(f'{name}.solution_dim: expected (H, dim), found {self._shape}')
        self._noise_beta = check_value(name, 'noise_beta', noise_beta, float, minimum=0)
        self._population_decay = check_value(name, 'population_decay', population_decay, float, minimum=1)
        keep = check_value(name, 'keep_fraction', keep_fraction, float, minimum=0, maximum=1)
        self._num_kept = int(keep * self._elite_size)
        self._return_mean_elites = return_mean_elites

    def _noise(self, batch: int, count: int) -> Tensor:
        return colored_noise((batch, count, *self._shape), self._noise_beta, self._low.device)

    def obtain_solution(self, observation: NestedTensor, init_mean: Tensor | None = None,
                        init_var: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the best candidate and its cost, see the base class."""
        mean, var = self._start(observation, init_mean, init_var)
        kept = self._clipped(mean).unsqueeze(1)  # candidates in addition to the sampled ones
        best, best_cost = kept[:, 0], mean.new_full((len(mean), ), _WORST)
        active = torch.ones(len(mean), dtype=torch.bool, device=mean.device)
        for i in range(self._max_iter_num):
            active = active & (var.flatten(1).amax(1) >= self._epsilon)
            if not bool(active.any()):
                break
            count = max(int(self._population_size * self._population_decay**-i), 2 * self._elite_size)
            solutions = self._candidates(mean, var, self._noise(len(mean), count))
            if i == self._max_iter_num - 1 and i:
                kept = torch.cat((kept, self._clipped(mean).unsqueeze(1)), 1)
            solutions = torch.cat((solutions, kept), 1)
            mean, var, elites, cost = self._fitted(observation, solutions, mean, var, active)
            is_better = active & (cost < best_cost)
            best = torch.where(is_better.view(-1, 1, 1), elites[:, 0], best)
            best_cost = torch.where(is_better, cost, best_cost)
            kept = elites[:, :self._num_kept]
        return self._clipped(mean) if self._return_mean_elites else best, best_cost


class MPPIOptimizer(TrajOptimizer):
    """Model predictive path integral control (Williams et al. 2017, arXiv:1707.02342).

    The mean moves to the weighted average of the candidates, with ``w = exp(-(cost - minimum cost) / lambda)``:

        mean' = sum w[i] u[i] / sum w[i]

    The variance does not change. The solution is the mean.

    Args:
        max_iter_num: number of iterations.
        temperature: lambda, in units of the standard deviation of the costs in the environment, so that it does not
            depend on the scale of the rewards; smaller values follow the best candidates more closely.
        noise_beta: exponent of the color of the noise, see :func:`colored_noise`; above 0 a solution has a shape
            ``(H, dim)``.
        kwargs: arguments of :class:`TrajOptimizer`.

    Raises:
        ConfError: an argument is out of range.
        ValueError: colored noise for a solution that does not have a shape ``(H, dim)``.
    """

    def __init__(self, solution_dim: int | Sequence[int], population_size: int, cost_func: CostFunction,
                 upper_bound: Any, lower_bound: Any, max_iter_num: int = 3, temperature: float = 0.1,
                 noise_beta: float = 0.0):
        super().__init__(solution_dim, population_size, cost_func, upper_bound, lower_bound)
        name = type(self).__name__
        self._max_iter_num = check_value(name, 'max_iter_num', int(max_iter_num), int, minimum=1)
        self._temperature = check_value(name, 'temperature', temperature, float, above=0)
        self._noise_beta = check_value(name, 'noise_beta', noise_beta, float, minimum=0)
        if noise_beta and len(self._shape) != 2:
            raise ValueError(f'{name}.solution_dim: expected (H, dim) for colored noise, found {self._shape}')

    def _noise(self, batch: int, count: int) -> Tensor:
        if not self._noise_beta:
            return super()._noise(batch, count)
        return colored_noise((batch, count, *self._shape), self._noise_beta, self._low.device)

    def obtain_solution(self, observation: NestedTensor, init_mean: Tensor | None = None,
                        init_var: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean and the weighted average cost of the last candidates, see the base class."""
        mean, var = self._start(observation, init_mean, init_var)
        expected = mean.new_zeros(len(mean))
        for _ in range(self._max_iter_num):
            solutions = self._candidates(mean, var, self._noise(len(mean), self._population_size))
            cost = self._costs(observation, solutions).clamp(-1e15, 1e15)  # their squares must not overflow
            is_bad = cost >= 1e15
            spread = _deviation(cost, ~is_bad).clamp(min=1e-12)
            logits = (cost.amin(1, keepdim=True) - cost) / (self._temperature * spread)
            weights = torch.softmax(logits, 1)
            mean = torch.einsum('bp,bp...->b...', weights, solutions)
            expected = (weights * cost).sum(1)
        return self._clipped(mean), expected


def _deviation(x: Tensor, valid: Tensor) -> Tensor:
    """Return the standard deviation of the ``valid`` elements of ``x [B, P]``, ``[B, 1]``."""
    count = valid.sum(1, keepdim=True).clamp(min=1)
    x = torch.where(valid, x, 0.0)
    mean = x.sum(1, keepdim=True) / count
    return (torch.where(valid, x - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
