"""Continuous distributions, transforms and nests of actions, against torch's own, integration, and samples."""
import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributions as td

from alfx.utils import dist_utils as du
from alfx.utils import math_ops


def grid(low, high, n=200_001):
    return torch.linspace(low, high, n, dtype=torch.float64)


# Continuous -------------------------------------------------------------------------------------------------------


def test_diagonal_normal_agrees_with_torch():
    loc, scale, other = torch.randn(5, 3), torch.rand(5, 3) + 0.1, torch.randn(5, 3)
    actual, expected = du.DiagMultivariateNormal(loc, scale), td.Independent(td.Normal(loc, scale), 1)
    value = torch.randn(2, 5, 3)
    torch.testing.assert_close(actual.log_prob(value), expected.log_prob(value))
    torch.testing.assert_close(actual.entropy(), expected.entropy())
    torch.testing.assert_close(actual.mean, expected.mean)
    torch.testing.assert_close(actual.stddev, expected.stddev)
    torch.testing.assert_close(actual.variance, expected.variance)
    assert isinstance(actual, td.Independent) and isinstance(actual.base_dist, td.Normal)
    assert (actual.batch_shape, actual.event_shape) == (expected.batch_shape, expected.event_shape)
    second = td.Independent(td.Normal(other, scale + 1), 1)
    torch.testing.assert_close(td.kl_divergence(actual, du.DiagMultivariateNormal(other, scale + 1)),
                               td.kl_divergence(expected, second))
    torch.testing.assert_close(td.kl_divergence(actual, second), td.kl_divergence(expected, second))


def test_the_density_of_a_standard_normal_at_zero_is_known():
    # 2 dimensions: log 1/(2 pi) = -1.837877; entropy log(2 pi e) = 2.837877
    dist = du.DiagMultivariateNormal(torch.zeros(2), torch.ones(2))
    assert dist.log_prob(torch.zeros(2)).item() == pytest.approx(-1.837877, abs=1e-5)
    assert dist.entropy().item() == pytest.approx(2.837877, abs=1e-5)


def test_normal_samples_have_the_right_moments_and_are_reparameterized():
    loc, scale = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([0.5, 3.0], requires_grad=True)
    dist = du.DiagMultivariateNormal(loc, scale)
    for sample in (dist.sample((20_000, )), dist.rsample((20_000, ))):
        torch.testing.assert_close(sample.mean(0), loc, atol=0.08, rtol=0)
        torch.testing.assert_close(sample.std(0), scale, atol=0.08, rtol=0)
    assert not dist.sample().requires_grad
    torch.testing.assert_close(torch.autograd.grad(dist.rsample().sum(), loc)[0], torch.ones(2))


def test_a_number_as_scale_is_spread_over_the_vector():
    dist = du.DiagMultivariateNormal(torch.zeros(4, 3), 2.0)
    assert dist.stddev.shape == (4, 3) and dist.log_prob(dist.sample()).shape == (4, )


def test_beta_agrees_with_torch_and_stays_inside_the_interval():
    alpha, beta = torch.rand(6, 2) * 4 + 0.2, torch.rand(6, 2) * 4 + 0.2
    actual, expected = du.DiagMultivariateBeta(alpha, beta), td.Independent(td.Beta(alpha, beta), 1)
    value = torch.rand(6, 2) * 0.98 + 0.01
    torch.testing.assert_close(actual.log_prob(value), expected.log_prob(value), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.entropy(), expected.entropy(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.mean, expected.mean)
    extreme = du.Beta(torch.full((1000, ), 0.01), torch.full((1000, ), 0.01), eps=1e-3)
    sample = extreme.rsample()
    assert sample.min() >= 1e-3 and sample.max() <= 1 - 1e-3 and torch.isfinite(extreme.log_prob(sample)).all()


def test_the_mode_of_a_beta_is_where_its_density_is_greatest():
    pairs = [(3.0, 2.0), (1.5, 1.2), (0.5, 2.0), (2.0, 0.5), (0.3, 0.6), (1.0, 1.0)]
    # (a - 1) / (a + b - 2) = 2/3 and 5/7; then the ends; for (1, 1) the middle
    expected = torch.tensor([2 / 3, 5 / 7, 0.0, 1.0, 0.0, 0.5])
    alpha, beta = (torch.tensor(x) for x in zip(*pairs))
    torch.testing.assert_close(du.Beta(alpha, beta).mode, expected)


def test_cauchy_samples_have_the_quartiles_and_are_finite():
    dist = du.DiagMultivariateCauchy(torch.tensor([1.0]), torch.tensor([2.0]))
    sample = dist.rsample((40_000, )).squeeze(-1)
    # Quartiles of a Cauchy are at loc -+ scale; clipping at 0.49 scales the probabilities by 0.98:
    # tan(pi * 0.98 * 0.25) = 0.969
    quartiles = torch.quantile(sample, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([1 - 1.938, 1.0, 1 + 1.938]), atol=0.1, rtol=0)
    assert sample.abs().max() < 2 * 32 + 2
    value = torch.randn(3, 1)
    torch.testing.assert_close(dist.log_prob(value), td.Cauchy(1.0, 2.0).log_prob(value).squeeze(-1))


# Transforms and squashing -------------------------------------------------------------------------------------------


def stored_action_log_prob(dist):
    """Return the log-density of samples read from a buffer, without the cached value before the transforms."""
    return dist.log_prob(dist.sample().clone())


@pytest.mark.parametrize('low, high', [(-1.0, 1.0), (2.0, 3.0), (20.0, 25.0)])
def test_actions_of_a_beta_policy_have_a_finite_density_within_any_bounds(low, high):
    concentration = torch.full((50_000, 1), 0.13, requires_grad=True)
    beta = du.DiagMultivariateBeta(concentration, concentration)
    log_prob = stored_action_log_prob(td.TransformedDistribution(beta, du.AffineTransform(low, high - low)))
    log_prob.sum().backward()
    assert log_prob.isfinite().all() and concentration.grad.isfinite().all()


@pytest.mark.parametrize('transform', [du.SoftclipTF(-1.0, 1.0, 0.1), du.Softlower(-1.0, 0.1), du.Softupper(1.0, 0.1),
                                       du.Softclip(-1.0, 1.0, 0.1), du.Softclip(20.0, 25.0, 0.1)])
def test_actions_at_a_soft_limit_have_a_finite_density(transform):
    normal = du.DiagMultivariateNormal(torch.zeros(20_000, 1), torch.full((20_000, 1), 3.0))
    assert stored_action_log_prob(td.TransformedDistribution(normal, transform)).isfinite().all()


@pytest.mark.parametrize('transform', [du.StableTanh(), du.Softlower(-0.5, 0.4)])
def test_cached_pairs_of_transforms_change_neither_gradients_nor_values(transform):
    loc = torch.zeros(1, requires_grad=True)
    dist = du.TransformedDistribution(du.DiagMultivariateNormal(loc, 1.0), [transform])
    with torch.no_grad():
        assert du.get_mode(dist) == dist.mode
    assert du.get_rmode(dist).requires_grad and dist.mode.requires_grad
    action = torch.full((1, ), 0.5)
    first = dist.log_prob(action)
    action.fill_(0.9)  # a buffer that is used again
    torch.testing.assert_close(dist.log_prob(action), dist.log_prob(torch.full((1, ), 0.9)))
    assert not torch.equal(first, dist.log_prob(action))


def test_inverse_transforms_agree_with_torch():
    normal, inverse = td.Normal(torch.zeros(1), 1.0), du.AffineTransform(1.0, 2.0).inv
    dist = du.TransformedDistribution(du.DiagMultivariateNormal(torch.zeros(1), 1.0), [inverse])
    value = dist.sample()
    torch.testing.assert_close(dist.log_prob(value.clone()), td.TransformedDistribution(
        normal, [td.AffineTransform(1.0, 2.0).inv]).log_prob(value).sum(-1))


TRANSFORMS = [du.StableTanh(), du.Softsign(), du.Softplus(0.3), du.Softclip(-1.0, 2.0, 0.2), du.Softlower(-0.5, 0.4),
              du.Softupper(0.5, 0.4), du.SoftclipTF(-1.0, 2.0, 0.3), du.AffineTransform(1.0, -2.0)]


@pytest.mark.parametrize('transform', TRANSFORMS, ids=lambda t: type(t).__name__)
def test_transforms_invert_and_have_the_right_jacobian(transform):
    x = torch.linspace(-2.0, 2.0, 41, dtype=torch.float64, requires_grad=True)
    y = transform(x)
    torch.testing.assert_close(transform.with_cache(0).inv(y.detach().clone()), x.detach(), atol=1e-6, rtol=1e-6)
    assert transform.inv(y) is x or torch.allclose(transform.inv(y), x)
    (slope, ) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, y), slope.abs().log(), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize('transform,function', [
    (du.Softlower(-0.5, 0.4), lambda x: math_ops.softlower(x, -0.5, 0.4)),
    (du.Softupper(0.5, 0.4), lambda x: math_ops.softupper(x, 0.5, 0.4)),
    (du.SoftclipTF(-1.0, 2.0, 0.3), lambda x: math_ops.softclip_tf(x, -1.0, 2.0, 0.3)),
    (du.Softclip(-1.0, 2.0, 0.3), lambda x: math_ops.softclip(x, -1.0, 2.0, 0.3)),
    (du.Softsign(), math_ops.softsign),
])
def test_transforms_are_the_functions_of_math_ops(transform, function):
    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(transform(x), function(x))


def test_transforms_with_a_graph_in_their_cache_can_be_copied_and_pickled():
    for transform in (du.StableTanh(), du.AffineTransform(0.0, 2.0), du.Softlower(0.0)):
        transform(torch.randn(3, requires_grad=True) * 2)
        assert torch.equal(copy.deepcopy(transform)(torch.ones(2)), transform(torch.ones(2)))
        assert torch.equal(pickle.loads(pickle.dumps(transform))(torch.ones(2)), transform(torch.ones(2)))


def squashed(loc, scale, low=-1.0, high=1.0):
    middle, half = torch.full(loc.shape[-1:], (low + high) / 2), torch.full(loc.shape[-1:], (high - low) / 2)
    return du.TransformedDistribution(du.DiagMultivariateNormal(loc, scale),
                                      [du.StableTanh(), du.AffineTransform(middle, half)])


def test_squashed_log_probability_is_exact_where_tanh_saturates():
    # At loc = 12, tanh rounds to 1 in float32, where atanh of a clamped action would give x = 8.3 and an error of
    # (12 - 8.3)^2 / 2 = 6.8 nats. The truth is N(x; 12, 1) - log(1 - tanh(x)^2), computed here in float64.
    dist = squashed(torch.full((1000, 1), 12.0), torch.ones(1000, 1))
    torch.manual_seed(3)
    action, log_prob = du.sample_action_distribution(dist, return_log_prob=True)
    assert (action == 1.0).any()
    torch.manual_seed(3)
    x = dist.base_dist.sample().double()
    log_one_minus_square = -2 * (x.cosh().log())
    truth = td.Normal(12.0, 1.0).log_prob(x) - log_one_minus_square
    torch.testing.assert_close(log_prob, truth.squeeze(-1).float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize('draw', [du.sample_action_distribution, du.rsample_action_distribution])
def test_squashed_log_probability_matches_torch_where_well_conditioned(draw):
    loc, scale = torch.randn(64, 3, dtype=torch.float64), torch.rand(64, 3, dtype=torch.float64) * 0.5 + 0.1
    actual = du.TransformedDistribution(du.DiagMultivariateNormal(loc, scale),
                                        [du.StableTanh(), du.AffineTransform(0.5, 2.0)])
    expected = td.TransformedDistribution(td.Independent(td.Normal(loc, scale), 1),
                                          [td.TanhTransform(), td.AffineTransform(0.5, 2.0)])
    action, log_prob = draw(actual, return_log_prob=True)
    torch.testing.assert_close(log_prob, expected.log_prob(action))
    torch.testing.assert_close(actual.log_prob(action.clone()), expected.log_prob(action))
    assert (actual.batch_shape, actual.event_shape) == (expected.batch_shape, expected.event_shape)


def test_a_squashed_density_integrates_to_one_over_the_action_range():
    dist = squashed(torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64), -2.0, 4.0)
    points = grid(-2 + 1e-9, 4 - 1e-9)
    density = dist.log_prob(points.unsqueeze(-1)).exp()
    assert torch.trapezoid(density, points).item() == pytest.approx(1.0, abs=1e-5)


def test_squashed_gradients_match_the_formula():
    loc, log_scale = (torch.randn(5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    noise = torch.randn(5, 2, dtype=torch.float64)

    def formula(loc, log_scale):
        x = loc + log_scale.exp() * noise
        return (td.Normal(loc, log_scale.exp()).log_prob(x) - torch.log(1 - torch.tanh(x)**2)).sum()

    class Fixed(du.DiagMultivariateNormal):

        def _noise(self, shape):
            return noise

    expected_value = formula(loc, log_scale)
    expected = torch.autograd.grad(expected_value, (loc, log_scale))
    for together in (False, True):
        dist = du.TransformedDistribution(Fixed(loc, log_scale.exp()), [du.StableTanh()])
        if together:
            sample, log_prob = du.rsample_action_distribution(dist, return_log_prob=True)
        else:
            sample = dist.rsample()
            log_prob = dist.log_prob(sample)
        torch.testing.assert_close(sample, torch.tanh(loc + log_scale.exp() * noise))
        torch.testing.assert_close(log_prob.sum(), expected_value)
        torch.testing.assert_close(torch.autograd.grad(log_prob.sum(), (loc, log_scale)), expected)


def test_a_nest_is_sampled_together_with_its_log_probability():
    dists = {'plain': du.DiagMultivariateNormal(torch.randn(4, 3), torch.rand(4, 3) + 0.1),
             'squashed': squashed(torch.randn(4, 2), torch.rand(4, 2) + 0.1, -2.0, 4.0),
             'beta': du.DiagMultivariateBeta(torch.rand(4, 2) + 1, torch.rand(4, 2) + 1)}
    actions, log_prob = du.rsample_action_distribution(dists, return_log_prob=True)
    torch.testing.assert_close(log_prob, du.compute_log_probability(dists, actions))


def test_foreign_actions_at_the_limits_have_finite_log_probability():
    dist = squashed(torch.zeros(2, 1), torch.ones(2, 1))
    assert torch.isfinite(dist.log_prob(torch.tensor([[-1.0], [1.0]]))).all()


def test_a_transform_that_is_not_elementwise_is_rejected():
    with pytest.raises(ValueError, match='SoftmaxTransform is not elementwise'):
        du.TransformedDistribution(du.DiagMultivariateNormal(torch.zeros(2), torch.ones(2)), du.SoftmaxTransform())


def test_an_affine_distribution_matches_the_scaled_normal():
    """An affine distribution has the moments and the entropy of the scaled normal distribution."""
    loc, scale = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.5])
    base = du.DiagMultivariateNormal(torch.randn(4, 2), torch.rand(4, 2) + 0.1)
    dist = du.AffineTransformedDistribution(base, loc, scale)
    expected = du.DiagMultivariateNormal(loc + scale * base.loc, scale * base.scale)
    torch.testing.assert_close(dist.entropy(), expected.entropy())
    torch.testing.assert_close(dist.mean, expected.mean)
    torch.testing.assert_close(dist.stddev, expected.stddev)
    torch.testing.assert_close(dist.variance, expected.variance)
    value = torch.randn(4, 2)
    torch.testing.assert_close(dist.log_prob(value), expected.log_prob(value), atol=1e-4, rtol=1e-4)
    number = du.AffineTransformedDistribution(base, 0.0, 2.0)
    torch.testing.assert_close(number.entropy(), base.entropy() + 2 * math.log(2))


def test_a_distribution_that_remembers_a_graph_can_be_copied_and_pickled():
    loc = torch.zeros(3, 2, requires_grad=True)
    dist = squashed(loc, torch.ones(3, 2))
    dist.rsample()
    torch.testing.assert_close(copy.deepcopy(dist).mode, dist.mode)
    torch.testing.assert_close(pickle.loads(pickle.dumps(dist)).mode, dist.mode)


# Nests of actions -------------------------------------------------------------------------------------------------


def mixed_nest(batch=5):
    return {'turn': du.Categorical(logits=torch.randn(batch, 3)),
            'push': (du.DiagMultivariateNormal(torch.randn(batch, 2), torch.ones(batch, 2)), )}


def test_nested_actions_add_up_to_one_number_for_each_element_of_the_batch():
    dists = mixed_nest()
    actions, log_prob = du.sample_action_distribution(dists, return_log_prob=True)
    expected = dists['turn'].log_prob(actions['turn']) + dists['push'][0].log_prob(actions['push'][0])
    torch.testing.assert_close(log_prob, expected)
    entropy = du.compute_entropy(dists)
    torch.testing.assert_close(entropy, dists['turn'].entropy() + dists['push'][0].entropy())
    assert log_prob.shape == entropy.shape == (5, )
    with pytest.raises(ValueError, match='differ in structure'):
        du.compute_log_probability(dists, {'turn': actions['turn']})


def test_categoricals_cannot_be_reparameterized():
    with pytest.raises(NotImplementedError, match='Categorical'):
        du.rsample_action_distribution(mixed_nest())


def test_epsilon_greedy_takes_the_mode_but_for_a_fraction():
    logits = torch.tensor([0.0, 1.0, 0.0]).expand(20_000, 3)
    dist = du.Categorical(logits=logits)
    assert (du.epsilon_greedy_sample(dist, 0.0) == 1).all()
    p = torch.softmax(logits[0], -1)[1].item()
    for eps in (0.05, 0.3, 1.0):
        share = (du.epsilon_greedy_sample((dist, ), eps)[0] == 1).double().mean().item()
        assert share == pytest.approx(1 - eps + eps * p, abs=0.02)
    assert (du.epsilon_greedy_sample(dist, lambda: 0.0) == 1).all()
    vector = du.epsilon_greedy_sample(du.DiagMultivariateNormal(torch.zeros(1000, 2), torch.ones(1000, 2)), 0.5)
    assert 350 < (vector == 0).all(-1).sum() < 650 and ((vector == 0).all(-1) == (vector == 0).any(-1)).all()


def test_modes_of_every_kind():
    loc = torch.randn(4, 2)
    normal = du.DiagMultivariateNormal(loc, torch.ones(4, 2))
    assert torch.equal(du.get_mode(normal), loc)
    assert torch.equal(du.get_mode(td.Independent(td.Normal(loc, torch.ones(4, 2)), 1)), loc)
    assert torch.equal(du.get_mode(du.DiagMultivariateCauchy(loc, torch.ones(4, 2))), loc)
    torch.testing.assert_close(du.get_mode(du.TransformedDistribution(normal, du.StableTanh())), torch.tanh(loc))
    assert torch.equal(du.get_mode(td.Bernoulli(probs=torch.tensor([0.2, 0.7]))), torch.tensor([0.0, 1.0]))
    assert du.get_mode(td.Uniform(torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 4.0]))).tolist() == [1.0, 3.0]
    components = du.DiagMultivariateNormal(torch.arange(12.0).view(2, 3, 2), torch.ones(2, 3, 2))
    mixture = td.MixtureSameFamily(du.Categorical(probs=torch.tensor([[0.1, 0.2, 0.7], [0.8, 0.1, 0.1]])), components,
                                   validate_args=False)
    assert torch.equal(du.get_mode(mixture), torch.tensor([[4.0, 5.0], [6.0, 7.0]]))


def test_base_distributions_and_modes_with_gradient():
    loc = torch.zeros(2, 3, requires_grad=True)
    normal = du.DiagMultivariateNormal(loc, torch.ones(2, 3))
    wrapped = du.TransformedDistribution(normal, [du.StableTanh()])
    assert type(du.get_base_dist(wrapped)) is td.Normal
    assert du.get_rmode(wrapped).requires_grad
    with pytest.raises(NotImplementedError, match='no gradient'):
        du.get_rmode(du.Categorical(logits=loc))
    probs = torch.tensor([0.2, 0.7, 0.1], requires_grad=True)
    mode = du.get_rmode(td.OneHotCategoricalStraightThrough(probs=probs))
    torch.testing.assert_close(mode.detach(), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.autograd.grad(mode[2], probs)[0][2] > 0


def test_estimated_entropy_is_unbiased():
    # Entropy of N(0, 2^2): 0.5 log(2 pi e 4) = 2.112086
    dist = du.DiagMultivariateNormal(torch.zeros(4, 1), torch.full((4, 1), 2.0))
    entropy, for_gradient = du.estimated_entropy(dist, num_samples=20_000)
    torch.testing.assert_close(entropy, torch.full((4, ), 2.112086), atol=0.03, rtol=0)
    assert for_gradient is entropy


def test_the_gradient_estimate_of_the_entropy_of_a_categorical_is_unbiased():
    logits = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    dist = du.Categorical(logits=logits)
    _, for_gradient = du.estimated_entropy(dist, num_samples=200_000)
    (estimate, ) = torch.autograd.grad(for_gradient.sum(), logits)
    (truth, ) = torch.autograd.grad(du.Categorical(logits=logits).entropy().sum(), logits)
    torch.testing.assert_close(estimate, truth, atol=0.01, rtol=0)


def test_entropies_are_estimated_only_without_a_closed_form():
    normal = du.DiagMultivariateNormal(torch.zeros(3, 2), torch.ones(3, 2))
    entropy, for_gradient = du.entropy_with_fallback(normal)
    torch.testing.assert_close(entropy, normal.entropy())
    squashed_normal = du.TransformedDistribution(normal, du.StableTanh())
    with pytest.raises(NotImplementedError):
        du.compute_entropy(squashed_normal)
    nested = {'a': squashed_normal, 'b': du.Categorical(logits=torch.zeros(3, 4))}
    total, _ = du.entropy_with_fallback(nested)
    assert total.shape == (3, )
    two = [du.Categorical(logits=torch.zeros(3, 4)), du.DiagMultivariateNormal(torch.zeros(3, 1), torch.ones(3, 1))]
    expected = torch.full((3, ), math.log(4) + 0.5 * math.log(2 * math.pi * math.e))
    for entropy in du.entropy_with_fallback(two):
        torch.testing.assert_close(entropy, expected)
    mixture = td.MixtureSameFamily(du.Categorical(logits=torch.zeros(3, 2)), td.Normal(torch.zeros(3, 2), 1.0))
    found = []
    for estimate in (du.estimated_entropy, du.entropy_with_fallback, lambda dist: du.entropy_with_fallback([dist])):
        torch.manual_seed(0)
        found.append(torch.stack(estimate(mixture)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    each, _ = du.entropy_with_fallback(nested, return_sum=False)
    torch.testing.assert_close(each['b'], torch.full((3, ), math.log(4)))
    affine = du.AffineTransformedDistribution(squashed_normal, 0.0, 2.0)
    assert torch.isfinite(du.entropy_with_fallback(affine)[0]).all()
    with pytest.raises(FloatingPointError, match='not finite'):
        du.estimated_entropy(du.DiagMultivariateNormal(torch.full((1, 1), torch.nan), 1.0), check_numerics=True)
    assert du.estimated_entropy(normal, check_numerics=True)[0].isfinite().all()
    assert du.estimated_entropy(du.DiagMultivariateNormal(torch.full((1, 1), torch.nan), 1.0))[0].isnan().all()


def test_squashed_entropy_matches_numerical_integration():
    dist = squashed(torch.tensor([[0.3]], dtype=torch.float64), torch.tensor([[0.8]], dtype=torch.float64))
    points = grid(-1 + 1e-9, 1 - 1e-9)
    log_density = dist.log_prob(points.view(-1, 1, 1)).squeeze(-1)
    truth = -torch.trapezoid(log_density.exp() * log_density, points)
    entropy, _ = du.estimated_entropy(dist, num_samples=100_000)
    assert entropy.item() == pytest.approx(truth.item(), abs=0.02)


@pytest.mark.parametrize('name', ['sample_action_distribution', 'rsample_action_distribution',
                                  'epsilon_greedy_sample', 'estimated_entropy'])
def test_conf_files_can_bind_samplers_without_importing_containers(name):
    code = ('import sys; import alfx.utils.dist_utils; from alfx.gin_utils.registry import registered_selectors; '
            'assert "alfx.algorithms.containers" not in sys.modules; '
            f'assert "alfx.utils.dist_utils.{name}" in registered_selectors()')
    subprocess.run([sys.executable, '-c', code], check=True, timeout=120)
