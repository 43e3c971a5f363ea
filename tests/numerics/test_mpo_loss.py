"""The maths of maximum a posteriori policy optimization: slow loops, hand-computed constants, identities."""
import math

import pytest
import torch

from alfx.algorithms.mpo.mpo_loss import (Multiplier, Temperature, categorical_divergence, categorical_policy_loss,
                                            gaussian_divergences, gaussian_policy_loss, improved_weights, masked_mean,
                                            solve_temperature, temperature_dual)
from alfx.utils.dist_utils import Categorical, DiagMultivariateNormal


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_gaussians(*shape):
    target_loc, loc = normal(*shape, seed=1), normal(*shape, seed=2)
    target_scale, scale = normal(*shape, seed=3).exp(), normal(*shape, seed=4).exp()
    return target_loc, target_scale, loc, scale


def mean_divergence(values, eta, log_prior):
    """Mean over states of KL(q || prior), in float64."""
    log_p = (log_prior if log_prior is not None else torch.full_like(values, -math.log(values.shape[-1]))).double()
    log_q = torch.log_softmax(values.double() / float(eta) + log_p, -1)
    return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())


# Means over states ----------------------------------------------------------------------------------------------


def test_the_mean_is_over_the_states_that_count():
    x = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert float(masked_mean(x, mask)) == 2.0  # (1 + 2 + 3) / 3
    vectors = torch.stack([x, -x, 10 * x], -1)
    assert masked_mean(vectors, mask).tolist() == [2.0, -2.0, 20.0]
    assert float(masked_mean(x, torch.zeros(2, 2))) == 0.0


# E-step ----------------------------------------------------------------------------------------------------------


def test_weights_are_the_prior_times_the_exponential_of_the_values():
    values, eta = normal(3, 4, 5) * 10, 7.0
    prior = torch.softmax(normal(3, 4, 5, seed=9), -1)
    for log_prior in (None, prior.log()):
        found = improved_weights(values, eta, log_prior)
        for t in range(3):
            for b in range(4):
                terms = [(1.0 if log_prior is None else float(prior[t, b, i])) * math.exp(float(values[t, b, i]) / eta)
                         for i in range(5)]
                assert found[t, b].tolist() == pytest.approx([x / sum(terms) for x in terms], rel=1e-4)


def test_weights_of_two_actions_worked_out_by_hand():
    # values log 1 and log 3 at eta = 1: weights 1 to 3; with a prior of 3 to 1 they come out even
    values = torch.tensor([[0.0, math.log(3.0)]])
    assert improved_weights(values, 1.0).squeeze(0).tolist() == pytest.approx([0.25, 0.75])
    prior = torch.tensor([[0.75, 0.25]])
    assert improved_weights(values, 1.0, prior.log()).squeeze(0).tolist() == pytest.approx([0.5, 0.5])


def test_weights_tend_to_the_prior_when_hot_and_the_best_action_when_cold():
    """Weights tend to the prior for a high temperature and to the best action for a low one."""
    values = normal(6, 5)
    log_prior = torch.log_softmax(normal(6, 5, seed=9), -1)
    torch.testing.assert_close(improved_weights(values, 1e7), torch.full((6, 5), 0.2), atol=1e-5, rtol=0)
    torch.testing.assert_close(improved_weights(values, 1e7, log_prior), log_prior.exp(), atol=1e-5, rtol=0)
    best = torch.nn.functional.one_hot(values.argmax(-1), 5).float()
    torch.testing.assert_close(improved_weights(values, 1e-4), best, atol=1e-5, rtol=0)


@pytest.mark.parametrize('with_prior', [False, True])
def test_dual_is_the_formula(with_prior):
    values, eta, epsilon = normal(3, 4, 5) * 3, 2.0, 0.3
    mask = (normal(3, 4, seed=5) > -0.5).float()
    prior = torch.softmax(normal(3, 4, 5, seed=9), -1) if with_prior else torch.full((3, 4, 5), 0.2)
    total = 0.0
    for t in range(3):
        for b in range(4):
            if mask[t, b]:
                total += math.log(sum(float(prior[t, b, i]) * math.exp(float(values[t, b, i]) / eta) for i in range(5)))
    expected = eta * epsilon + eta * total / float(mask.sum())
    found = temperature_dual(values, torch.tensor(eta), epsilon, mask, prior.log() if with_prior else None)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_dual_of_two_actions_worked_out_by_hand():
    # prior 1/2 each, values 0 and log 3, eta = 1: log((1 + 3) / 2) = log 2 = 0.693147; plus eta epsilon = 0.1
    found = temperature_dual(torch.tensor([[0.0, math.log(3.0)]]), torch.tensor(1.0), 0.1, torch.ones(1))
    assert float(found) == pytest.approx(0.793147, abs=1e-6)


@pytest.mark.parametrize('with_prior', [False, True])
@pytest.mark.parametrize('epsilon', [1e-3, 0.01, 0.1, 0.5])
@pytest.mark.parametrize('shape', ['normal', 'unequal states', 'skewed', 'three actions'])
def test_the_solved_temperature_meets_the_constraint(epsilon, shape, with_prior):
    values = {'normal': lambda: normal(128, 20) * 50 - 300,
              'unequal states': lambda: normal(128, 20) * normal(128, 1, seed=7).exp().square() * 10,
              'skewed': lambda: -torch.rand(128, 20, generator=torch.Generator().manual_seed(0)).pow(8) * 100,
              'three actions': lambda: normal(64, 3)}[shape]()
    log_prior = torch.log_softmax(normal(*values.shape, seed=8), -1) if with_prior else None
    eta = solve_temperature(values, epsilon, torch.ones(values.shape[0]), log_prior)
    assert mean_divergence(values, eta, log_prior) == pytest.approx(epsilon, rel=0.01)


def test_the_solved_temperature_is_the_minimum_of_the_dual():
    values, mask = normal(4, 16, 10) * 20, torch.ones(4, 16)
    eta = solve_temperature(values, 0.1, mask)
    grid = [float(temperature_dual(values, eta * factor, 0.1, mask)) for factor in (0.5, 0.9, 1.0, 1.1, 2.0)]
    assert min(grid) == grid[2]
    parameter = eta.clone().requires_grad_()
    temperature_dual(values, parameter, 0.1, mask).backward()
    assert abs(float(parameter.grad)) < 1e-3  # of the order of epsilon away from the minimum


def test_states_that_do_not_count_do_not_affect_the_temperature():
    values = normal(8, 10)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    corrupted = torch.where(mask.bool().unsqueeze(-1), values, 1e4 * values)
    assert torch.equal(solve_temperature(values, 0.1, mask), solve_temperature(corrupted, 0.1, mask))


def test_scaling_values_scales_the_temperature_and_shifting_does_not():
    values, mask = normal(32, 10), torch.ones(32)
    eta = float(solve_temperature(values, 0.1, mask))
    assert float(solve_temperature(1000 * values, 0.1, mask)) == pytest.approx(1000 * eta, rel=1e-3)
    assert float(solve_temperature(values - 50 * normal(32, 1, seed=3), 0.1, mask)) == pytest.approx(eta, rel=1e-3)
    assert float(solve_temperature(values + 1e4, 0.1, mask)) == pytest.approx(eta, rel=1e-2)


def test_a_constraint_that_no_temperature_meets_gives_finite_weights():
    mask = torch.ones(6)
    values = normal(6, 3)
    eta = solve_temperature(values, 5.0, mask, iterations=50)  # the divergence is log 3 at most
    best = torch.nn.functional.one_hot(values.argmax(-1), 3).float()
    torch.testing.assert_close(improved_weights(values, eta), best, atol=1e-4, rtol=0)
    equal = torch.full((6, 3), -7.0)
    weights = improved_weights(equal, solve_temperature(equal, 0.1, mask))
    torch.testing.assert_close(weights, torch.full((6, 3), 1 / 3))
    assert torch.isfinite(solve_temperature(values, 0.1, torch.zeros(6)))


def test_a_trained_temperature_converges_to_the_solution():
    values, mask = normal(64, 10) * 5, torch.ones(64)
    temperature = Temperature(0.1, initial_eta=1.0)
    optimizer = torch.optim.Adam(temperature.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        temperature(values, mask, None)[1].backward()
        optimizer.step()
    eta, loss = Temperature(0.1)(values, mask, None)
    assert loss is None and not list(Temperature(0.1).parameters())
    assert float(temperature(values, mask, None)[0]) == pytest.approx(float(eta), rel=0.02)


# M-step ----------------------------------------------------------------------------------------------------------


def test_divergences_separate_mean_and_scale():
    target_loc, target_scale, loc, scale = random_gaussians(3, 4, 2)
    mean_divergence, scale_divergence = gaussian_divergences(target_loc, target_scale, loc, scale)
    target = torch.distributions.Normal(target_loc, target_scale)
    kl = torch.distributions.kl_divergence
    torch.testing.assert_close(mean_divergence, kl(target, torch.distributions.Normal(loc, target_scale)),
                               atol=1e-5, rtol=1e-4)
    new_scale = torch.distributions.Normal(target_loc, scale)
    torch.testing.assert_close(scale_divergence, kl(target, new_scale), atol=1e-5, rtol=1e-4)


def test_divergences_worked_out_by_hand():
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    # means 1 and 3, target scale 2: ((3 - 1) / 2)^2 / 2 = 0.5
    assert gaussian_divergences(one, two, torch.tensor([3.0]), one)[0].tolist() == [0.5]
    # scales 1 (target) and 2: log 2 + 1/8 - 1/2 = 0.318147
    assert float(gaussian_divergences(one, one, one, two)[1]) == pytest.approx(0.318147, abs=1e-6)


def test_equal_policies_do_not_diverge():
    loc, scale, _, _ = random_gaussians(5, 3)
    for divergence in gaussian_divergences(loc, scale, loc, scale):
        assert torch.equal(divergence, torch.zeros(5, 3))
    logits = torch.log_softmax(normal(5, 4), -1)
    assert torch.equal(categorical_divergence(logits, logits), torch.zeros(5, 1))


def test_with_equal_scales_the_divergence_is_that_of_the_means():
    target_loc, target_scale, loc, _ = random_gaussians(5, 3)
    mean_divergence, scale_divergence = gaussian_divergences(target_loc, target_scale, loc, target_scale)
    expected = torch.distributions.kl_divergence(DiagMultivariateNormal(target_loc, target_scale),
                                                 DiagMultivariateNormal(loc, target_scale))
    torch.testing.assert_close((mean_divergence + scale_divergence).sum(-1), expected)


def test_the_gaussian_loss_is_a_likelihood_with_either_part_replaced():
    """Weighted likelihood, computed once with the target mean and once with the target scale."""
    target_loc, target_scale, loc, scale = random_gaussians(3, 4, 2)
    samples = normal(3, 4, 6, 2, seed=5)
    weights = torch.softmax(normal(3, 4, 6, seed=6), -1)
    found = gaussian_policy_loss(weights, samples, target_loc, target_scale, loc, scale)

    def log_density(x, m, s):
        return -0.5 * ((x - m) / s)**2 - math.log(s) - 0.5 * math.log(2 * math.pi)

    for t in range(3):
        for b in range(4):
            expected = 0.0
            for i in range(6):
                for d in range(2):
                    x, mu, sigma, mu_old, sigma_old = (float(v) for v in (
                        samples[t, b, i, d], loc[t, b, d], scale[t, b, d], target_loc[t, b, d], target_scale[t, b, d]))
                    likelihood = log_density(x, mu, sigma_old) + log_density(x, mu_old, sigma)
                    expected -= float(weights[t, b, i]) * likelihood
            assert float(found[t, b]) == pytest.approx(expected, rel=1e-4)


def test_the_gaussian_loss_of_one_sample_worked_out_by_hand():
    # sample 1, target N(0, 1), policy N(1, 2): -log N(1; 1, 1) - log N(1; 0, 2)
    # = 0.918939 + (0.918939 + log 2 + 1/8) = 2.656024
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    found = gaussian_policy_loss(one, one.unsqueeze(-1), zero, one, one, 2 * one)
    assert float(found) == pytest.approx(2.656024, abs=1e-5)


def test_the_gaussian_loss_is_least_at_the_weighted_moments():
    samples, weights = normal(1, 50, 2), torch.softmax(normal(1, 50, seed=6), -1)
    target_loc, target_scale = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.8, 1.5]])
    mean = (weights.unsqueeze(-1) * samples).sum(1)
    deviation = (weights.unsqueeze(-1) * (samples - target_loc.unsqueeze(1)).square()).sum(1).sqrt()
    loc, scale = mean.clone().requires_grad_(), deviation.clone().requires_grad_()
    gaussian_policy_loss(weights, samples, target_loc, target_scale, loc, scale).sum().backward()
    torch.testing.assert_close(loc.grad, torch.zeros(1, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(scale.grad, torch.zeros(1, 2), atol=1e-5, rtol=0)


def test_the_mean_does_not_move_the_scale_and_the_scale_not_the_mean():
    target_loc, target_scale, loc, scale = random_gaussians(4, 2)
    samples, weights = normal(4, 6, 2, seed=5), torch.softmax(normal(4, 6, seed=6), -1)

    def gradients(loc, scale):
        loc, scale = loc.clone().requires_grad_(), scale.clone().requires_grad_()
        gaussian_policy_loss(weights, samples, target_loc, target_scale, loc, scale).sum().backward()
        return loc.grad, scale.grad

    loc_gradients, scale_gradients = gradients(loc, scale)
    torch.testing.assert_close(gradients(loc, 2 * scale)[0], loc_gradients)
    torch.testing.assert_close(gradients(loc + 1, scale)[1], scale_gradients)


def test_the_categorical_loss_and_divergence_are_sums_over_actions():
    target, logits = (torch.log_softmax(normal(3, 4, seed=s), -1) for s in (1, 2))
    weights = torch.softmax(normal(3, 4, seed=3), -1)
    loss, divergence = categorical_policy_loss(weights, logits), categorical_divergence(target, logits)
    for b in range(3):
        assert float(loss[b]) == pytest.approx(-sum(float(weights[b, i] * logits[b, i]) for i in range(4)), rel=1e-5)
    expected = torch.distributions.kl_divergence(Categorical(logits=target), Categorical(logits=logits))
    torch.testing.assert_close(divergence.squeeze(-1), expected)


def test_the_categorical_divergence_worked_out_by_hand():
    # (1/2, 1/2) against (1/4, 3/4): log 2 / 2 + log(2/3) / 2 = 0.143841
    target, policy = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert float(categorical_divergence(target, policy)) == pytest.approx(0.143841, abs=1e-6)


def test_the_policy_of_least_categorical_loss_is_the_improved_one():
    weights = torch.softmax(normal(1, 4, seed=3), -1)
    raw = weights.log().clone().requires_grad_()
    categorical_policy_loss(weights, torch.log_softmax(raw, -1)).sum().backward()
    torch.testing.assert_close(raw.grad, torch.zeros(1, 4), atol=1e-6, rtol=0)


# Multipliers -----------------------------------------------------------------------------------------------------


def test_a_multiplier_grows_with_the_violation_within_its_range():
    multiplier = Multiplier(constraint=0.1, scale=2.0, maximum=0.5)
    mask = torch.tensor([1.0, 1.0, 0.0])
    violated = torch.tensor([[0.2, 0.1], [0.1, 0.0], [9.0, 9.0]])  # sums 0.3 and 0.1, mean 0.2: 0.1 too much
    multiplier.observe(violated, mask)
    multiplier.move()
    assert multiplier.value.tolist() == pytest.approx([0.2])
    assert multiplier.penalty(violated).tolist() == pytest.approx([0.06, 0.02, 3.6])
    for _ in range(5):
        multiplier.observe(violated, mask)
        multiplier.move()
    assert multiplier.value.tolist() == [0.5]
    for _ in range(5):
        multiplier.observe(0 * violated, mask)
        multiplier.move()
    assert multiplier.value.tolist() == [0.0]


def test_multipliers_of_each_dimension_move_separately():
    multiplier = Multiplier(constraint=0.1, scale=1.0, maximum=5.0, size=2)
    multiplier.observe(torch.tensor([[0.4, 0.05]]), torch.ones(1))
    multiplier.move()
    assert multiplier.value.tolist() == pytest.approx([0.3, 0.0])
    assert multiplier.penalty(torch.tensor([[2.0, 7.0]])).tolist() == pytest.approx([0.6])
