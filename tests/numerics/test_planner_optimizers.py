"""Trajectory optimizers against problems with known solutions; environments are optimized independently."""
import numpy as np
import pytest
import torch

from alfx.gin_utils import ConfError
from alfx.optimizers.traj_optimizers import (CEMOptimizer, ICEMOptimizer, MPPIOptimizer, RandomOptimizer, TrajOptimizer,
                                             colored_noise)

# An ill-conditioned quadratic in 4 x 2 numbers; its minimum depends on the environment.
_generator = torch.Generator().manual_seed(0)
FACTOR = torch.linspace(1.0, 5.0, 8)
MINIMA = 0.8 * (2 * torch.rand(3, 4, 2, generator=_generator) - 1)


def quadratic(observation, solutions):
    """Compute ``sum_i f[i] (x[i] - m[i])^2``, where the observation ``[B, 1]`` selects the minimum m."""
    minimum = MINIMA[observation[:, 0].long()].unsqueeze(1)
    return ((solutions - minimum).flatten(2).square() * FACTOR).sum(-1)


OBSERVATION = torch.arange(3.0).unsqueeze(1)
COMMON = dict(solution_dim=(4, 2), cost_func=quadratic, upper_bound=1.0, lower_bound=-1.0)
MAKE = {
    'random shooting': lambda **a: RandomOptimizer(**{**COMMON, 'population_size': 500, **a}),
    'CEM': lambda **a: CEMOptimizer(**{**COMMON, 'population_size': 500, 'elite_size': 50, 'max_iter_num': 15,
                                       'epsilon': 1e-6, 'min_var': 1e-8, **a}),
    'iCEM': lambda **a: ICEMOptimizer(**{**COMMON, 'population_size': 150, 'elite_size': 15, 'max_iter_num': 15,
                                         'noise_beta': 0.5, 'min_var': 1e-8, **a}),
    'MPPI': lambda **a: MPPIOptimizer(**{**COMMON, 'population_size': 500, 'max_iter_num': 10, **a}),
}


@pytest.mark.parametrize('kind, most', [('CEM', 1e-4), ('iCEM', 3e-3), ('MPPI', 1.2), ('random shooting', 2.6)])
def test_the_planner_finds_the_minimum_of_a_quadratic_in_each_environment(kind, most):
    torch.manual_seed(1)
    solution, cost = MAKE[kind]().obtain_solution(OBSERVATION)
    assert (quadratic(OBSERVATION, solution.unsqueeze(1)) < most).all(), 'the cost of the middle is 4.5 and more'
    assert cost.shape == (3, )
    if kind == 'CEM':
        torch.testing.assert_close(solution, MINIMA, atol=1e-2, rtol=0)
    if kind in ('random shooting', 'iCEM'):  # their solution is an evaluated candidate
        torch.testing.assert_close(cost, quadratic(OBSERVATION, solution.unsqueeze(1)).squeeze(1))


def test_icem_needs_fewer_samples_of_a_smooth_plan_than_cem():
    time = torch.linspace(0, 3, 30)
    smooth = torch.sin(time).view(1, 1, 30, 1)
    num_samples = {}

    def cost_of(kind):
        def cost(observation, solutions):
            num_samples[kind] = num_samples.get(kind, 0) + solutions.shape[1]
            return (solutions - smooth).square().sum((2, 3))
        return cost

    torch.manual_seed(0)
    common = dict(solution_dim=(30, 1), upper_bound=1.5, lower_bound=-1.5, max_iter_num=3, epsilon=0.0)
    one = torch.zeros(1, 1)
    cem, _ = CEMOptimizer(population_size=100, elite_size=10, cost_func=cost_of('CEM'), **common).obtain_solution(one)
    icem, _ = ICEMOptimizer(population_size=40, elite_size=10, cost_func=cost_of('iCEM'), **common).obtain_solution(one)
    assert num_samples['iCEM'] < num_samples['CEM'] / 2
    assert (icem - smooth[0]).square().sum() < (cem - smooth[0]).square().sum()


@pytest.mark.parametrize('kind', list(MAKE))
def test_solutions_stay_in_bounds_and_outside_minima_lead_to_the_bound(kind):
    torch.manual_seed(0)

    def cost(observation, solutions):
        assert (solutions >= -0.25).all() and (solutions <= 0.5).all()
        return (solutions - 2.0).square().sum((2, 3))

    solution, _ = MAKE[kind](cost_func=cost, lower_bound=-0.25, upper_bound=0.5).obtain_solution(OBSERVATION)
    assert (solution >= -0.25).all() and (solution <= 0.5).all()
    if kind in ('CEM', 'iCEM'):
        torch.testing.assert_close(solution, torch.full_like(solution, 0.5), atol=1e-2, rtol=0)


def one_at_a_time(monkeypatch, optimizer, noise):
    """Solve one environment after the other, each with its rows of the noise of the joint solution."""
    solutions = []
    for i in range(3):
        draws = iter(noise)
        monkeypatch.setattr(optimizer, '_noise', lambda batch, count, draws=draws, i=i: next(draws)[i:i + 1])
        solutions.append(optimizer.obtain_solution(OBSERVATION[i:i + 1])[0])
    return torch.cat(solutions)


@pytest.mark.parametrize('kind', ['CEM', 'iCEM', 'MPPI'])
def test_planning_for_many_environments_is_planning_for_each(kind, monkeypatch):
    torch.manual_seed(0)
    optimizer = MAKE[kind](max_iter_num=4)
    noise = [optimizer._noise(3, 300) for _ in range(4)]
    draws = iter(noise)
    monkeypatch.setattr(optimizer, '_noise', lambda batch, count: next(draws)[:, :count])
    together, _ = optimizer.obtain_solution(OBSERVATION)
    noise_parts = [x[:, :optimizer._population_size] for x in noise]
    if kind == 'iCEM':
        sizes = [max(int(150 * 1.25**-i), 30) for i in range(4)]  # written from the paper's schedule
        noise_parts = [x[:, :size] for x, size in zip(noise, sizes)]
    elif kind in ('CEM', 'MPPI'):
        noise_parts = noise
    torch.testing.assert_close(together, one_at_a_time(monkeypatch, optimizer, noise_parts), atol=1e-6, rtol=0)


def test_cem_stops_in_each_environment_for_itself():
    """Stop at once where the initial variance is below epsilon; optimize the other environments."""
    torch.manual_seed(0)
    optimizer = MAKE['CEM'](epsilon=0.01)
    mean, var = torch.zeros(3, 4, 2), torch.full((3, 4, 2), 0.25)
    var[1] = 0.009
    solution, cost = optimizer.obtain_solution(OBSERVATION, mean, var)
    assert (solution[1] == 0).all() and (solution[[0, 2]] != 0).all()
    assert cost[1] == torch.finfo(torch.float32).max and (cost[[0, 2]] < 1.0).all()


def test_one_step_of_cem_is_the_formula_of_a_slow_loop():
    """Compare with mean and variance of the elites, mixed with tau, in float64, for single environments and components.
    """
    torch.manual_seed(3)
    optimizer = CEMOptimizer((4, 2), 20, quadratic, 1.0, -1.0, elite_size=5, max_iter_num=1, epsilon=0.0, tau=0.7)
    mean, var = 0.1 * torch.randn(3, 4, 2), torch.full((3, 4, 2), 0.3)
    noise = optimizer._noise(3, 20)
    found = optimizer._fitted(OBSERVATION, optimizer._candidates(mean, var, noise), mean, var,
                              torch.ones(3, dtype=torch.bool))
    for b in range(3):
        candidates = np.clip(mean[b].double().numpy() + np.sqrt(0.3) * noise[b].double().numpy(), -1, 1)
        costs = [float((((c - MINIMA[b].double().numpy()).reshape(-1)**2) * FACTOR.numpy()).sum()) for c in candidates]
        elites = candidates[np.argsort(costs)[:5]]
        np.testing.assert_allclose(found[0][b], 0.3 * mean[b].numpy() + 0.7 * elites.mean(0), atol=1e-6)
        np.testing.assert_allclose(found[1][b], 0.3 * 0.3 + 0.7 * elites.var(0), atol=1e-6)
        np.testing.assert_allclose(found[3][b], min(costs), rtol=1e-5)


def test_mppi_weights_candidates_by_their_costs():
    """Weight two candidates with costs 0 and 1 as 1 : exp(-1 / (0.5 * 0.5)): deviation 1/2, temperature 0.5."""
    optimizer = MPPIOptimizer(1, 2, lambda observation, x: x[:, :, 0], 1.0, 0.0, max_iter_num=1, temperature=0.5)
    optimizer._noise = lambda batch, count: torch.tensor([[[-1.0], [1.0]]])
    solution, _ = optimizer.obtain_solution(torch.zeros(1, 1))  # candidates 0.5 -+ 0.5
    weight = np.exp(-4.0)
    np.testing.assert_allclose(solution.item(), weight / (1 + weight), rtol=1e-5)


def test_with_equal_costs_the_elite_mean_stays_near_the_middle():
    def flat(observation, solutions):
        return torch.zeros(solutions.shape[:2])

    sizes = []
    for mean in (False, True):
        torch.manual_seed(0)
        planner = MAKE['iCEM'](cost_func=flat, max_iter_num=3, return_mean_elites=mean)
        solution, cost = planner.obtain_solution(OBSERVATION)
        sizes.append(solution.abs().mean())
        assert (cost == 0).all()
    assert sizes[1] < 0.5 * sizes[0]


def test_costs_that_are_not_numbers_are_the_worst():
    def cost(observation, solutions):
        return torch.where(solutions[:, :, 0, 0] > 0, torch.nan, quadratic(observation, solutions))

    torch.manual_seed(0)
    for kind, make in MAKE.items():
        solution, _ = make(cost_func=cost).obtain_solution(OBSERVATION)
        assert solution.isfinite().all(), kind
        assert (solution[:, 0, 0] <= 0.02).all(), kind


@pytest.mark.parametrize('beta', [0.0, 1.0, 2.0])
@pytest.mark.parametrize('length', [16, 25])
def test_colored_noise_has_variance_one_and_the_power_of_its_color(beta, length):
    torch.manual_seed(0)
    noise = colored_noise((20000, length, 1), beta)[..., 0]
    torch.testing.assert_close(noise.var(0), torch.ones(length), atol=0.06, rtol=0)
    power = torch.fft.rfft(noise).abs().square().mean(0)[1:(length + 1) // 2]
    frequency = torch.arange(1, len(power) + 1)
    slope = np.polyfit(np.log(frequency), np.log(power), 1)[0]
    assert abs(slope + beta) < 0.05


@pytest.mark.parametrize('arguments, message', [
    (dict(elite_size=501), r'elite_size must be an int in \[1, 500\].*501'), (dict(tau=0.0), 'tau'),
    (dict(tau=1.5), 'tau'),
    (dict(population_size=0), 'population_size'), (dict(max_iter_num=0), 'max_iter_num'),
    (dict(epsilon=-1.0), 'epsilon')])
def test_arguments_of_cem_that_are_out_of_range_are_rejected(arguments, message):
    with pytest.raises(ConfError, match=message):
        MAKE['CEM'](**arguments)


def test_invalid_bounds_and_cost_shapes_are_rejected():
    """Raise an error for exchanged or infinite bounds and for costs of another shape."""
    with pytest.raises(ValueError, match='lower_bound <= upper_bound'):
        MAKE['random shooting'](lower_bound=2.0)
    with pytest.raises(ValueError, match='finite bounds'):
        MAKE['random shooting'](upper_bound=float('inf'))
    with pytest.raises(ValueError, match=r'shape \[B, P\] = \[3, 500\], found \[3\]'):
        MAKE['CEM'](cost_func=lambda observation, x: x.sum((1, 2, 3))).obtain_solution(OBSERVATION)
    with pytest.raises(NotImplementedError, match='obtain_solution'):
        TrajOptimizer(**COMMON, population_size=1).obtain_solution(OBSERVATION)


def test_mppi_stays_finite_with_infinite_costs():
    values = torch.tensor([-torch.inf, torch.nan, 1.0, torch.inf])
    optimizer = MPPIOptimizer(1, 4, lambda observation, x: values.expand(x.shape[:2]), 1.0, 0.0, max_iter_num=1)
    solution, cost = optimizer.obtain_solution(torch.zeros(2, 1))
    assert bool(((solution >= 0) & (solution <= 1)).all()) and bool(cost.isfinite().all())
