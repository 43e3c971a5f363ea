"""Evolution strategies against formulas worked out by hand, slow loops and a quadratic."""
import math

import pytest
import torch

from alfx.algorithms.evolution import evolution


def test_ranks_span_minus_half_to_half_and_ties_share_theirs():
    assert evolution.centered_ranks(torch.tensor([3.0, -1.0, 10.0])).tolist() == [0.0, -0.5, 0.5]
    assert evolution.centered_ranks(torch.tensor([2.0, 1.0, 2.0])).tolist() == [0.25, -0.5, 0.25]
    assert evolution.centered_ranks(torch.full((4, ), 7.0)).tolist() == [0.0] * 4
    assert evolution.centered_ranks(torch.tensor([1.0])).tolist() == [0.0]


def test_standardized_returns_have_no_scale():
    found = evolution.standardized(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0, 1.0]) * math.sqrt(1.5))
    assert evolution.standardized(torch.full((3, ), 2.0)).tolist() == [0.0] * 3


def test_a_gradient_worked_out_by_hand():
    # (2 * [1, 0] + 4 * [0, 1]) / (2 members * sigma 0.5)
    noise = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert evolution.gradient_estimate(torch.tensor([2.0, 4.0]), noise, 0.5).tolist() == [2.0, 4.0]


def test_the_estimate_is_the_gradient_of_a_linear_fitness():
    torch.manual_seed(0)
    slope = torch.randn(5)
    noise = torch.randn(200000, 5)
    found = evolution.gradient_estimate(0.1 * noise @ slope, noise, 0.1)
    torch.testing.assert_close(found, slope, atol=0.03, rtol=0)


def test_augmented_random_search_worked_out_by_hand():
    # Directions 0 and 2 have the best returns, 5 and 4. Of 5, 1, 0, 4 the standard deviation is sqrt(4.25).
    returns = torch.tensor([[5.0, 2.0, 0.0], [1.0, 3.0, 4.0]])
    directions = torch.eye(3)
    found = evolution.augmented_random_search(returns, directions, 2)
    expected = torch.tensor([4.0, 0.0, -4.0]) / (2 * math.sqrt(4.25))
    torch.testing.assert_close(found, expected)


def test_utilities_against_a_loop():
    returns = torch.tensor([3.0, 9.0, -2.0, 4.0])
    weights = [max(0.0, math.log(3) - math.log(rank)) for rank in (1, 2, 3, 4)]
    place_of = [3, 1, 4, 2]
    expected = [weights[p - 1] / sum(weights) - 0.25 for p in place_of]
    torch.testing.assert_close(evolution.utilities(returns), torch.tensor(expected))
    assert abs(float(evolution.utilities(torch.randn(30)).sum())) < 1e-6
    assert evolution.utilities(torch.ones(4)).abs().max() < 1e-7


@pytest.mark.parametrize('strategy', ['openai', 'ars', 'snes'])
def test_the_best_point_of_a_sphere_is_found(strategy):
    generator = torch.Generator().manual_seed(0)
    best, theta = torch.tensor([0.5, -1.0, 2.0]), torch.zeros(3)
    log_sigma = torch.full((3, ), 0.5).log()
    for generation in range(200):
        half = torch.randn(10, 3, generator=generator)
        noise = torch.cat((half, -half))
        sigma = log_sigma.exp() if strategy == 'snes' else torch.full((3, ), 0.05)
        returns = -(theta + sigma * noise - best).square().sum(-1)
        rate = 0.1 * (1 - generation / 200)
        if strategy == 'openai':
            theta = theta + rate * evolution.gradient_estimate(returns, noise, 0.05)
        elif strategy == 'ars':
            theta = theta + 0.3 * rate * evolution.augmented_random_search(returns.view(2, -1), half, 5)
        else:
            utility = evolution.utilities(returns)
            theta = theta + sigma * (utility @ noise)
            log_sigma = log_sigma + 0.5 * evolution.default_sigma_rate(3) * (utility @ (noise.square() - 1))
    assert float((theta - best).norm()) < 1e-2
