"""The environment with mixed actions and its optimal return."""
import numpy as np
import pytest
import torch

from alfx.environments import suite_mixed
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_mixed import GearsEnv


def optimal_return(x):
    """Return the maximum return of an episode that begins at ``x``; see ``GearsEnv``."""
    low = sum(max(abs(x) - GearsEnv.reach[0] * i, 0.0) for i in range(1, GearsEnv.num_steps + 1))
    return -min(GearsEnv.cost[1], low)


def returns_of(policy, count=200):
    env = GearsEnv()
    optimal, found = [], []
    for seed in range(count):
        observation, _ = env.reset(seed=seed)
        optimal.append(optimal_return(float(observation[0])))
        total = 0.0
        for _ in range(env.num_steps):
            observation, reward, _, _, _ = env.step(policy(float(observation[0])))
            total += reward
        found.append(total)
    return np.array(optimal), np.array(found)


def low_gear(x):
    return 0, np.array([np.clip(-x / 0.1, -1, 1)], np.float32)


def high_gear_from_afar(x):
    return (1, np.array([-x], np.float32)) if abs(x) > 11 / 30 else low_gear(x)


def test_the_best_policy_reaches_the_optimal_return_and_others_do_not():
    optimal, found = returns_of(high_gear_from_afar)
    np.testing.assert_allclose(found, optimal, atol=1e-4)
    optimal, found = returns_of(low_gear)
    assert (found <= optimal + 1e-5).all() and found.mean() < optimal.mean() - 0.5


def test_the_optimal_return_by_dynamic_programming():
    grid = np.round(np.arange(-1000, 1001) / 1000, 3)
    value = np.zeros_like(grid)
    thrusts = np.arange(-100, 101) / 100
    for _ in range(GearsEnv.num_steps):
        best = np.full_like(grid, -np.inf)
        for reach, cost in zip(GearsEnv.reach, GearsEnv.cost):
            steps = np.round(reach * thrusts * 1000).astype(int)
            for step in np.unique(steps):
                index = np.arange(len(grid)) + step
                inside = (index >= 0) & (index < len(grid))
                target = np.clip(index, 0, len(grid) - 1)
                best = np.where(inside, np.maximum(best, -np.abs(grid[target]) - cost + value[target]), best)
        value = best
    expected = np.array([optimal_return(x) for x in grid])
    np.testing.assert_allclose(value, expected, atol=0.006)  # thrusts on a grid of 0.01
    assert expected.mean() == pytest.approx(-0.3683, abs=5e-4)


def test_it_is_loaded_as_a_batch():
    env = suite_mixed.load('Gears', batch_size=3)
    env.seed(0)
    env.reset()
    discrete, continuous = env.action_spec()
    assert discrete.is_discrete and continuous.is_continuous
    for _ in range(10):
        step = env.step((torch.zeros(3, dtype=torch.int64), torch.ones(3, 1)))
    assert step.is_last().all() and (step.discount == 1).all()
    with pytest.raises(EnvironmentLoadError, match='Gears'):
        suite_mixed.load('Gear')
