"""Projection networks: distributions over discrete and continuous actions."""
import math

import pytest
import torch
import torch.distributions as td
from torch.nn import functional as F

from alfx import nest
from alfx.distributions.truncated import TruncatedCauchy
from alfx.networks.networks import NoisyFC
from alfx.networks.projection_networks import (BetaProjectionNetwork, CategoricalProjectionNetwork,
                                               CauchyProjectionNetwork, MixtureProjectionNetwork,
                                               NestedProjectionNetwork, NormalProjectionNetwork,
                                               OnehotCategoricalProjectionNetwork, ParallelCategoricalProjectionNetwork,
                                               StableNormalProjectionNetwork, TruncatedProjectionNetwork)
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

BOX = BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 6.0])
CONTINUOUS = [NormalProjectionNetwork, StableNormalProjectionNetwork, CauchyProjectionNetwork, BetaProjectionNetwork,
              TruncatedProjectionNetwork]
X = torch.linspace(-2, 2, 20).view(5, 4)


def exact_probabilities(dist, actions):
    """Return the probabilities of all actions, from log_prob."""
    return torch.stack([dist.log_prob(a.expand(*dist.batch_shape, *a.shape)).exp() for a in actions])


@pytest.mark.parametrize('start', [0, 3, -2])
def test_discrete_samples_and_probabilities_are_in_the_spec_range(start):
    spec = BoundedTensorSpec((), torch.int64, start, start + 2)
    dist, _ = CategoricalProjectionNetwork(4, spec)(X * 10)
    samples = dist.sample((2000, ))
    assert samples.dtype == torch.int64
    assert set(samples.unique().tolist()) == {start, start + 1, start + 2}
    probabilities = exact_probabilities(dist, torch.tensor([start, start + 1, start + 2]))
    torch.testing.assert_close(probabilities.sum(0), torch.ones(5))
    frequency = torch.stack([(samples == start + k).float().mean(0) for k in range(3)])
    torch.testing.assert_close(frequency, probabilities, atol=0.05, rtol=0)
    assert torch.equal(dist_utils.get_mode(dist), probabilities.argmax(0) + start)


def test_components_of_a_vector_of_discrete_actions_have_their_own_ranges():
    spec = BoundedTensorSpec((3, ), torch.int64, [0, -1, 2], [1, 3, 2])
    network = CategoricalProjectionNetwork(4, spec, logits_init_output_factor=3.0)
    dist, _ = network(X)
    samples = dist.sample((3000, ))
    assert samples.shape == (3000, 5, 3)
    assert [samples[..., k].unique().tolist() for k in range(3)] == [[0, 1], [-1, 0, 1, 2, 3], [2]]
    actions = torch.cartesian_prod(torch.arange(0, 2), torch.arange(-1, 4), torch.arange(2, 3))
    probabilities = exact_probabilities(dist, actions)
    torch.testing.assert_close(probabilities.sum(0), torch.ones(5))
    entropy = -(probabilities * probabilities.log()).sum(0)
    torch.testing.assert_close(dist.entropy(), entropy)
    entropy_gradient = torch.autograd.grad(dist.entropy().sum(), network._projection_layer.weight)[0]
    assert bool(torch.isfinite(entropy_gradient).all())


def test_multi_binary_actions_are_vectors_of_zeros_and_ones():
    dist, _ = CategoricalProjectionNetwork(4, BoundedTensorSpec((2, 2), torch.int64, 0, 1))(X)
    samples = dist.sample((100, ))
    assert samples.shape == (100, 5, 2, 2) and set(samples.unique().tolist()) == {0, 1}
    assert dist.log_prob(samples).shape == (100, 5)


def test_the_initial_logits_are_small():
    network = CategoricalProjectionNetwork(100, BoundedTensorSpec((), torch.int64, 0, 49))
    logits = network._projection_layer(torch.randn(1000, 100))
    assert float(logits.detach().std()) == pytest.approx(0.1, rel=0.1)
    assert not network._projection_layer.bias.any()


def test_the_layer_of_the_logits_can_be_chosen():
    network = CategoricalProjectionNetwork(4, BoundedTensorSpec((), torch.int64, 0, 2), fc_ctor=NoisyFC,
                                           weight_opt_args={'lr': 1.0})
    assert network.is_rnn and network._projection_layer.weight.opt_args == {'lr': 1.0}
    zeros = (torch.zeros(5, 4), torch.zeros(5, 3))
    dist, noise = network(X, zeros)
    assert noise[1].shape == (5, 3) and bool(noise[1].any())
    repeated, same = network(X, noise)
    assert [n.shape for n in same] == [(5, 4), (5, 3)]
    stack = network.make_parallel(2)
    assert all(p.opt_args == {'lr': 1.0} for n, p in stack.named_parameters() if n.endswith('weight'))
    assert isinstance(stack, ParallelCategoricalProjectionNetwork)


def test_a_categorical_head_gives_floats_for_float_actions():
    """Categorical heads give floats if the actions are floats between integer bounds."""
    spec = {'a': BoundedTensorSpec((), torch.float32, 0, 2), 'b': BoundedTensorSpec((2, ), torch.float32, [-1, 0], 1)}
    head = NestedProjectionNetwork(4, spec, continuous_projection_net_ctor=CategoricalProjectionNetwork)
    dist, _ = head(X * 10)
    action = dist_utils.sample_action_distribution(dist)
    for name, leaf in spec.items():
        assert set(dist[name].sample((500, )).unique().tolist()) == {0., 1., 2.} if name == 'a' else {-1., 0., 1.}
        assert action[name].dtype == torch.float32 and action[name].shape == (5, *leaf.shape)
    assert dist_utils.compute_log_probability(dist, action).shape == (5, )
    assert head.make_parallel(3)(X)[0]['b'].sample().shape == (5, 3, 2)


def test_the_wrong_kind_of_action_is_rejected_with_the_right_head():
    for head in CONTINUOUS:
        with pytest.raises(SpecError, match='continuous actions: expected a spec of floats, found .*int64.*discrete_'
                           'projection_net_ctor'):
            head(4, BoundedTensorSpec((2, ), torch.int64, 0, 3))
    with pytest.raises(SpecError, match='discrete actions: expected a spec of integers, found .*float32.*Normal'):
        CategoricalProjectionNetwork(4, BoundedTensorSpec((2, ), torch.float32, -0.5, 1.0))
    with pytest.raises(SpecError, match='needs bounds'):
        CategoricalProjectionNetwork(4, TensorSpec((), torch.int64))
    with pytest.raises(SpecError, match='has too many for one logit each'):
        CategoricalProjectionNetwork(4, BoundedTensorSpec((), torch.int64, 0, 2**40))
    with pytest.raises(SpecError, match='NestedProjectionNetwork'):
        NormalProjectionNetwork(4, (BOX, BOX))
    with pytest.raises(SpecError, match='no components'):
        NormalProjectionNetwork(4, BoundedTensorSpec((0, )))


@pytest.mark.parametrize('bounds', [(-math.inf, math.inf), (-3.4e38, 3.4e38), (0.0, math.inf)])
def test_a_box_without_bounds_needs_a_head_that_does_not_squash(bounds):
    spec = BoundedTensorSpec((2, ), torch.float32, *bounds)
    for head in CONTINUOUS:
        with pytest.raises(SpecError, match='finite bounds, found .*squash_me'):
            head(4, spec)
    for unbounded in (spec, TensorSpec((2, ))):
        dist, _ = NormalProjectionNetwork(4, unbounded, squash_mean=False)(X)
        assert dist.sample().shape == (5, 2)
    with pytest.raises(SpecError, match='bounds'):
        NormalProjectionNetwork(4, TensorSpec((2, )), squash_mean=False, scale_distribution=True)


def test_a_range_of_zero_width_cannot_be_scaled_to():
    spec = BoundedTensorSpec((2, ), torch.float32, [0.0, 1.0], [1.0, 1.0])
    with pytest.raises(SpecError, match='different bounds of each component'):
        NormalProjectionNetwork(4, spec, scale_distribution=True)
    for head in (BetaProjectionNetwork, TruncatedProjectionNetwork):
        with pytest.raises(SpecError, match='different bounds of each component'):
            head(4, spec)
    assert NormalProjectionNetwork(4, spec)(X)[0].loc[:, 1].tolist() == [1.0] * 5


def test_heads_of_vectors_reject_other_shapes():
    for head in (CauchyProjectionNetwork, BetaProjectionNetwork, TruncatedProjectionNetwork):
        with pytest.raises(SpecError, match=r'shape \(D,\)'):
            head(4, BoundedTensorSpec((2, 2)))


def test_the_mean_is_squashed_into_the_bounds():
    network = NormalProjectionNetwork(4, BOX, projection_output_init_gain=100.0)
    dist, _ = network(X)
    raw = network._projection_layer(X)
    torch.testing.assert_close(dist.mean, torch.tanh(raw) * torch.tensor([1.0, 3.0]) + torch.tensor([0.0, 3.0]))
    # softplus(0) = log 2
    torch.testing.assert_close(dist.stddev, torch.full((5, 2), math.log(2)))


def test_mean_and_std_transforms_are_used():
    network = NormalProjectionNetwork(4, BOX, mean_transform=torch.sigmoid_, std_transform=torch.exp_,
                                      std_bias_initializer_value=0.5, activation=torch.tanh)
    dist, _ = network(X)
    torch.testing.assert_close(dist.mean, torch.sigmoid(network._projection_layer(X)))
    torch.testing.assert_close(dist.stddev, torch.full((5, 2), math.exp(0.5)))
    assert network._scale_parameter.tolist() == [0.5, 0.5]


def test_the_standard_deviation_may_depend_on_the_state():
    network = NormalProjectionNetwork(4, BOX, state_dependent_std=True, squash_mean=False,
                                      std_bias_initializer_value=0.5)
    dist, _ = network(X)
    raw = F.linear(X, network._projection_layer.weight, network._projection_layer.bias)
    torch.testing.assert_close(dist.mean, raw[:, :2])
    torch.testing.assert_close(dist.stddev, F.softplus(raw[:, 2:]))
    assert network._projection_layer.bias.tolist() == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize('shape', [(), (2, ), (2, 3)])
def test_a_scaled_distribution_stays_within_the_bounds(shape):
    spec = BoundedTensorSpec(shape, torch.float32, -2.0, 4.0)
    for head in (NormalProjectionNetwork, StableNormalProjectionNetwork):
        dist, _ = head(4, spec, scale_distribution=True)(X)
        samples = dist.rsample((200, ))
        assert samples.shape == (200, 5, *shape)
        assert -2.0 <= float(samples.detach().min()) < 0 and 2 < float(samples.detach().max()) <= 4.0
        assert dist.log_prob(samples).shape == (200, 5)
        # Change of variables, by torch.
        base = dist.base_dist
        normal = td.Independent(td.Normal(base.loc, base.scale), len(shape))
        reference = td.TransformedDistribution(normal, [td.TanhTransform(), td.AffineTransform(1.0, 3.0, len(shape))])
        inner = torch.full((5, *shape), 1.7)
        torch.testing.assert_close(dist.log_prob(inner), reference.log_prob(inner), rtol=1e-4, atol=1e-4)


def test_the_affine_part_is_left_out_for_the_unit_range():
    dist, _ = NormalProjectionNetwork(4, BoundedTensorSpec((2, ), minimum=-1), scale_distribution=True)(X)
    assert len(dist.transforms) == 1
    other, _ = NormalProjectionNetwork(4, BOX, scale_distribution=True)(X)
    assert len(other.transforms) == 2


def test_distributions_of_one_head_can_be_stacked():
    network = NormalProjectionNetwork(4, BOX, scale_distribution=True)
    stacked = nest.stack([network(X)[0], network(X)[0]])
    assert stacked.rsample().shape == (2, 5, 2)


@pytest.mark.parametrize('transform', ['softplus', 'exp'])
@pytest.mark.parametrize('state_dependent', [False, True])
def test_the_stable_parameterization_starts_at_init_std_within_limits(transform, state_dependent):
    def head(**kwargs):
        return StableNormalProjectionNetwork(4, BOX, inverse_std_transform=transform, squash_mean=False,
                                             state_dependent_std=state_dependent, **kwargs)

    for kwargs in (dict(init_std=0.7), dict(init_std=0.7, min_std=0.2), dict(init_std=0.7, min_std=0.2, max_std=0.9)):
        dist, _ = head(**kwargs)(X)
        torch.testing.assert_close(dist.stddev, torch.full((5, 2), 0.7), rtol=1e-4, atol=0)
    extreme = head(min_std=0.2, max_std=0.9, init_std=0.5, projection_output_init_gain=1000.0)
    if not state_dependent:
        extreme._scale_parameter.data.copy_(torch.tensor([-1000.0, 1000.0]))
    std = extreme(torch.randn(100, 4))[0].stddev
    assert 0.2 - 1e-6 <= float(std.min()) < 0.25 and 0.85 < float(std.max()) <= 0.9 + 1e-6


def test_the_stable_mean_is_proportional_to_the_standard_deviation():
    network = StableNormalProjectionNetwork(4, BOX, squash_mean=False, init_std=0.5, projection_output_init_gain=1.0)
    dist, _ = network(X)
    torch.testing.assert_close(dist.mean, network._projection_layer(X) * 0.5)
    with pytest.raises(ValueError, match="'softplus' or 'exp', found str 'relu'"):
        StableNormalProjectionNetwork(4, BOX, inverse_std_transform='relu')
    with pytest.raises(ValueError, match='min_std < init_std < max_std'):
        StableNormalProjectionNetwork(4, BOX, init_std=0.5, min_std=0.6)


def test_cauchy_squashes_its_median_or_itself():
    dist, _ = CauchyProjectionNetwork(4, BOX)(X * 100)
    assert bool((dist.loc >= torch.tensor([-1.0, 0.0])).all()) and bool((dist.loc <= torch.tensor([1.0, 6.0])).all())
    torch.testing.assert_close(dist.scale, torch.full((5, 2), math.log(2)))
    scaled, _ = CauchyProjectionNetwork(4, BOX, scale_distribution=True, state_dependent_scale=True,
                                        scale_bias_initializer_value=1.0, scale_transform=torch.exp_)(X)
    samples = scaled.sample((500, ))
    assert bool((samples >= torch.tensor([-1.0, 0.0])).all()) and bool((samples <= torch.tensor([1.0, 6.0])).all())


def test_beta_starts_uniform_over_the_bounds():
    dist, _ = BetaProjectionNetwork(4, BOX)(X)
    # log density of a uniform distribution on [-1, 1] x [0, 6]: -log 12
    torch.testing.assert_close(dist.log_prob(torch.tensor([[0.3, 2.0]] * 5)), torch.full((5, ), -math.log(12.0)))
    torch.testing.assert_close(dist.entropy(), torch.full((5, ), math.log(12.0)))
    torch.testing.assert_close(dist.mean, torch.tensor([[0.0, 3.0]] * 5))
    samples = dist.rsample((1000, ))
    assert bool((samples >= torch.tensor([-1.0, 0.0])).all()) and bool((samples <= torch.tensor([1.0, 6.0])).all())
    dist, _ = BetaProjectionNetwork(4, BOX, min_concentration=2.0)(X)
    torch.testing.assert_close(dist.base_dist.base_dist.concentration1, torch.full((5, 2), 3.0))


@pytest.mark.parametrize('clip', [None, 0.01])
def test_gradients_of_the_concentrations_are_clipped(clip):
    network = BetaProjectionNetwork(4, BOX, grad_clip=clip)
    dist, _ = network(X)
    (1000 * dist.log_prob(torch.tensor([[0.99, 0.01]] * 5))).sum().backward()
    # each of the 4 biases gets the sum over 5 samples of sigmoid(bias) = 1 - 1/e times the clipped gradients
    largest = float(network._projection_layer.bias.grad.abs().max())
    assert largest == pytest.approx(5 * 0.01 * (1 - math.exp(-1)), rel=1e-4) if clip else largest > 100


@pytest.mark.parametrize('bounds, expected', [((0, 100), -0.5524), ((-50, 50), -0.5524), ((-1, 1), -0.391)])
def test_the_scale_of_a_truncated_distribution_is_in_units_of_the_action(bounds, expected):
    # scale log 2, density at the center 1 / (log 2 sqrt(2 pi)); within [-1, 1]: divided by erf(1 / (log 2 sqrt 2))
    network = TruncatedProjectionNetwork(4, BoundedTensorSpec((1, ), torch.float32, *bounds))
    dist, _ = network(torch.zeros(1, 4))
    assert float(dist.log_prob(torch.tensor([[sum(bounds) / 2]]))) == pytest.approx(expected, abs=1e-3)


def test_truncated_distributions_stay_within_the_bounds():
    network = TruncatedProjectionNetwork(4, BOX, state_dependent_scale=True, min_scale=0.5, max_scale=0.6,
                                         projection_output_init_gain=10.0)
    dist, _ = network(X)
    samples = dist.rsample((500, ))
    assert bool((samples >= torch.tensor([-1.0, 0.0])).all()) and bool((samples <= torch.tensor([1.0, 6.0])).all())
    assert 0.5 <= float(dist.scale.detach().min()) and float(dist.scale.detach().max()) <= 0.6 + 1e-6
    raw = network._projection_layer(X)[:, :2]
    torch.testing.assert_close(dist.loc, torch.tanh(raw) * torch.tensor([1.0, 3.0]) + torch.tensor([0.0, 3.0]))
    other, _ = TruncatedProjectionNetwork(4, BOX, dist_ctor=TruncatedCauchy, loc_transform=torch.sin)(X)
    assert isinstance(other, TruncatedCauchy)


@pytest.mark.parametrize('mode', ['st', 'gumbel'])
def test_one_hot_actions_let_gradients_through(mode):
    network = OnehotCategoricalProjectionNetwork(4, BoundedTensorSpec((3, )), mode=mode, gumbel_temperature=0.5)
    dist, _ = network(X)
    sample = dist.rsample()
    torch.testing.assert_close(sample.sum(-1), torch.ones(5))
    assert set(sample.detach().round().unique().tolist()) == {0, 1}
    (sample * torch.randn(3)).sum().backward()
    assert bool(network._projection_layer.weight.grad.any())
    with pytest.raises(ValueError, match="'st' or 'gumbel' or 'st-gumbel', found str 'soft'"):
        OnehotCategoricalProjectionNetwork(4, BoundedTensorSpec((3, )), mode='soft')
    for spec in (BOX, BoundedTensorSpec((), torch.int64, 0, 1), TensorSpec((3, ))):
        with pytest.raises(SpecError, match='one-hot'):
            OnehotCategoricalProjectionNetwork(4, spec)


@pytest.mark.parametrize('mode, has_gradient', [('plain', False), ('st', True), ('gumbel', True), ('st-gumbel', True)])
@pytest.mark.parametrize('spec, count', [
    (BoundedTensorSpec((1, ), torch.float32, 0, 4), 5), (BoundedTensorSpec((1, ), torch.int64, 2, 4), 3),
    (BoundedTensorSpec((1, ), torch.float32, 0, 1), 2), (BoundedTensorSpec((4, ), torch.float32, 0, 1), 4)])
def test_one_hot_categories_are_the_values_of_a_scalar_or_a_vector(mode, has_gradient, spec, count):
    dist, _ = OnehotCategoricalProjectionNetwork(4, spec, mode=mode)(X)
    assert dist.event_shape == (count, ) and dist.has_rsample == has_gradient
    sample = dist.sample()
    assert sample.shape == (5, count) and sample.sum(-1).tolist() == [1] * 5
    assert dist.log_prob(sample).shape == (5, )


@pytest.mark.parametrize('head', [NormalProjectionNetwork, CauchyProjectionNetwork, TruncatedProjectionNetwork])
@pytest.mark.parametrize('state_dependent', [True, False])
def test_an_integer_can_be_the_initial_bias_of_a_scale(head, state_dependent):
    name = 'std' if head is NormalProjectionNetwork else 'scale'
    arguments = {f'{name}_bias_initializer_value': 0, f'state_dependent_{name}': state_dependent}
    network = head(4, BOX, **arguments)
    assert network(X)[0].batch_shape == (5, ) and all(p.is_floating_point() for p in network.parameters())


def test_a_mixture_weighs_its_components():
    network = MixtureProjectionNetwork(4, BOX, 3, NormalProjectionNetwork)
    dist, _ = network(X)
    assert network.num_components == 3
    weights, components = network._mixture(X)[0].probs, network._components(X)[0]
    value = torch.tensor([[0.3, 2.0]] * 5)
    expected = (weights * components.log_prob(value[:, None]).exp()).sum(-1).log()
    torch.testing.assert_close(dist.log_prob(value), expected)
    assert dist.sample().shape == (5, 2)
    assert network(X)[0].batch_shape == (5, )


def test_nested_actions_give_a_nest_of_distributions():
    spec = {'a': (BOX, BoundedTensorSpec((), torch.int64, 1, 2)), 'b': BOX}
    network = NestedProjectionNetwork(4, spec, continuous_projection_net_ctor=BetaProjectionNetwork)
    output, _ = network(X)
    kinds = nest.map_structure(type, output, is_leaf=nest.is_distribution)
    assert kinds == {'a': (dist_utils.AffineTransformedDistribution, dist_utils.ShiftedCategorical),
                     'b': dist_utils.AffineTransformedDistribution}
    action = dist_utils.sample_action_distribution(output)
    nest.assert_same_structure(action, spec)
    with pytest.raises(SpecError, match='is discrete, but discrete_projection_net_ctor is None'):
        NestedProjectionNetwork(4, spec, discrete_projection_net_ctor=None)


@pytest.mark.parametrize('head', [NormalProjectionNetwork, StableNormalProjectionNetwork, BetaProjectionNetwork])
def test_a_head_with_parallelism_is_a_stack(head):
    stack = head(4, BOX, parallelism=3)
    assert stack(X)[0].batch_shape == (5, 3)
    assert stack(torch.randn(5, 3, 4))[0].batch_shape == (5, 3)
    with pytest.raises(ValueError, match='is already a stack of networks'):
        stack.make_parallel(2)
    before = stack._projection_layer.weight.clone()
    stack.reset_parameters()
    assert head is BetaProjectionNetwork or not torch.equal(before, stack._projection_layer.weight)


def test_moving_the_head_moves_the_bounds():
    network = NormalProjectionNetwork(4, BOX, scale_distribution=True)
    network(X)
    dist, _ = network.double()(X.double())
    assert dist.transforms[1].loc.dtype == torch.float64 and dist.sample().dtype == torch.float64
