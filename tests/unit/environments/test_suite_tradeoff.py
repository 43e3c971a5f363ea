"""The environment with two rewards and its best trade-off."""
import math

import numpy as np
import pytest
import torch

from alfx.environments import suite_tradeoff
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_tradeoff import FuelEnv


MEAN_SQUARE_SLOPE = 13 / 12


def optimal_progress(fuel):
    """Return the maximum mean progress per step for this mean fuel per step, at most 0.48."""
    return math.sqrt(MEAN_SQUARE_SLOPE * fuel)


def optimal_weight_ratio(fuel):
    """Return the ratio of reward weights ``w[1] / w[0]`` for which the best policy uses this mean fuel."""
    return math.sqrt(MEAN_SQUARE_SLOPE / fuel) / 2


def mean_rewards(policy, count=20000):
    env = FuelEnv()
    observation, _ = env.reset(seed=0)
    total = np.zeros(2)
    for _ in range(count):
        observation, reward, _, _, _ = env.step(np.array([policy(float(observation[0]))]))
        total += reward
    return total / count


def test_the_best_policy_makes_the_progress_of_the_formula():
    # fuel 0.1: k = sqrt(12/13 * 0.1) = 0.30382, progress sqrt(13/12 * 0.1) = 0.32914
    assert optimal_progress(0.1) == pytest.approx(0.32914, abs=1e-5)
    np.testing.assert_allclose(mean_rewards(lambda slope: 0.30382 * slope), [0.32914, -0.1], rtol=0.01)


def test_with_the_optimal_weights_no_throttle_is_better():
    ratio = optimal_weight_ratio(0.1)
    assert ratio == pytest.approx(1 / (2 * 0.30382), rel=1e-4)
    throttle = np.linspace(0, 1, 1001)
    for slope in (0.5, 1.0, 1.5):
        best = throttle[np.argmax(slope * throttle - ratio * throttle**2)]
        assert best == pytest.approx(0.30382 * slope, abs=1e-3)


def test_other_policies_with_the_same_fuel_make_less_progress():
    for policy in (lambda slope: 0.1**0.5, lambda slope: 0.2762 * slope**1.5, lambda slope: float(slope > 1.4)):
        progress, minus_fuel = mean_rewards(policy)
        assert progress < optimal_progress(-minus_fuel)


def test_it_is_loaded_as_a_batch_with_rewards_of_rank_1():
    env = suite_tradeoff.load('Fuel', batch_size=3)
    env.seed(0)
    step = env.reset()
    assert tuple(env.reward_spec().shape) == (2, ) and step.reward.shape == (3, 2)
    slope = step.observation.clone()
    step = env.step(torch.zeros(3, 1))  # actions are in [-1, 1]: half throttle
    torch.testing.assert_close(step.reward, torch.cat([0.5 * slope, torch.full((3, 1), -0.25)], 1))
    torch.testing.assert_close(step.env_info['minus_fuel@step'], torch.full((3, ), -0.25))
    for _ in range(19):
        step = env.step(torch.full((3, 1), 2.0))
    assert step.is_last().all() and (step.discount == 1).all() and (step.reward[:, 1] == -1).all()
    with pytest.raises(EnvironmentLoadError, match='Fuel'):
        suite_tradeoff.load('Fule')
