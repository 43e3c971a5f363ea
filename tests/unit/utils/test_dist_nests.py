"""Every distribution as a node of a nest: flattened, rebuilt, stacked, described and stored."""
import copy
import pickle

import pytest
import torch
import torch.distributions as td

from alfx import nest
from alfx.distributions import nests as dist_nests
from alfx.tensor_specs import TensorSpec
from alfx.utils import dist_utils as du

LOW, HIGH = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 2.0, 5.0])
B, D = 4, 3


def loc():
    return torch.randn(B, D)


def scale():
    return torch.rand(B, D) + 0.2


def normal():
    return du.DiagMultivariateNormal(loc(), scale())


def mixture(component):
    return td.MixtureSameFamily(du.Categorical(logits=torch.randn(B, 2)), component, validate_args=False)


SHARED_TANH = du.StableTanh()

MAKERS = {
    'Categorical': lambda: du.Categorical(logits=torch.randn(B, 5)),
    'Categorical.probs': lambda: du.Categorical(probs=torch.rand(B, 5)),
    'ShiftedCategorical': lambda: du.ShiftedCategorical(torch.randn(B, 5), 2),
    'DiagMultivariateCategorical': lambda: du.DiagMultivariateCategorical(torch.randn(B, D, 5), [2, 5, 3], [0, 1, 4]),
    'OneHotST': lambda: du.OneHotCategoricalStraightThrough(logits=torch.randn(B, 5)),
    'OneHotGumbel': lambda: du.OneHotCategoricalGumbelSoftmax(tau=0.5, logits=torch.randn(B, 5)),
    'DiagMultivariateNormal': normal,
    'DiagMultivariateBeta': lambda: du.DiagMultivariateBeta(scale(), scale()),
    'DiagMultivariateCauchy': lambda: du.DiagMultivariateCauchy(loc(), scale()),
    'Beta': lambda: du.Beta(scale(), scale(), eps=1e-4),
    'TruncatedNormal': lambda: du.TruncatedNormal(loc(), scale(), LOW, HIGH),
    'TruncatedCauchy': lambda: du.TruncatedCauchy(loc(), scale(), -1.0, 1.0),
    'TruncatedT2': lambda: du.TruncatedT2(loc(), scale(), LOW, HIGH),
    'Squashed': lambda: du.TransformedDistribution(normal(), [SHARED_TANH, du.AffineTransform(LOW, HIGH - LOW)]),
    'Affine': lambda: du.AffineTransformedDistribution(normal(), LOW, 2.0),
    'Mixture': lambda: mixture(du.DiagMultivariateNormal(torch.randn(B, 2, D), torch.ones(B, 2, D))),
    'Mixture of squashed': lambda: mixture(du.TransformedDistribution(
        du.DiagMultivariateNormal(torch.randn(B, 2, D), torch.ones(B, 2, D)), [SHARED_TANH])),
    'torch.Categorical': lambda: td.Categorical(logits=torch.randn(B, 5), validate_args=False),
    'torch.Categorical.probs': lambda: td.Categorical(probs=torch.rand(B, 5), validate_args=False),
    'torch.OneHot': lambda: td.OneHotCategorical(logits=torch.randn(B, 5), validate_args=False),
    'torch.OneHotST': lambda: td.OneHotCategoricalStraightThrough(probs=torch.rand(B, 5), validate_args=False),
    'torch.Bernoulli': lambda: td.Bernoulli(logits=loc(), validate_args=False),
    'torch.Normal': lambda: td.Normal(loc(), scale(), validate_args=False),
    'torch.Independent': lambda: td.Independent(td.Normal(loc(), scale()), 1, validate_args=False),
    'torch.Beta': lambda: td.Beta(scale(), scale(), validate_args=False),
    'torch.Cauchy': lambda: td.Cauchy(loc(), scale(), validate_args=False),
    'torch.Laplace': lambda: td.Laplace(loc(), scale(), validate_args=False),
    'torch.Uniform': lambda: td.Uniform(loc() - 4, loc() + 4, validate_args=False),
    'torch.Transformed': lambda: td.TransformedDistribution(
        td.Independent(td.Normal(loc(), scale()), 1), [du.StableTanh(), td.AffineTransform(0.5, 2.0)],
        validate_args=False),
}

each_kind = pytest.mark.parametrize('make', MAKERS.values(), ids=MAKERS.keys())


def same_distribution(a, b):
    assert type(a) is type(b) and a.batch_shape == b.batch_shape and a.event_shape == b.event_shape
    torch.manual_seed(7)
    value = a.sample()
    torch.manual_seed(7)
    torch.testing.assert_close(b.sample(), value)
    torch.testing.assert_close(b.log_prob(value.clone()), a.log_prob(value.clone()))


@each_kind
def test_a_distribution_is_rebuilt_from_its_leaves(make):
    dist = make()
    leaves = nest.flatten(dist)
    assert leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    same_distribution(dist, nest.map_structure(lambda x: x, dist))
    same_distribution(dist, nest.pack_sequence_as(make(), leaves))


@each_kind
def test_distributions_can_be_stacked_and_unstacked(make):
    dists = [make() for _ in range(3)]
    stacked = nest.stack(dists)
    assert stacked.batch_shape == (3, *dists[0].batch_shape) and stacked.event_shape == dists[0].event_shape
    same_distribution(nest.map_structure(lambda x: x[1], stacked), dists[1])
    flat = nest.map_structure(lambda x: x.flatten(0, 1), stacked)
    assert flat.batch_shape[0] == 3 * B
    value = flat.sample()
    torch.testing.assert_close(flat.log_prob(value.clone())[B:2 * B], dists[1].log_prob(value[B:2 * B].clone()))


@each_kind
def test_a_distribution_spec_contains_specs_and_compares_equal(make):
    spec, other = du.extract_spec(make()), du.extract_spec(make())
    assert nest.structure(spec) == nest.structure(other) and nest.flatten(spec) == nest.flatten(other)
    assert all(isinstance(leaf, TensorSpec) for leaf in nest.flatten(spec))
    hash(nest.structure(spec))


@each_kind
def test_leaves_can_be_arbitrary_objects(make):
    dist = make()
    placeholders = nest.map_structure(lambda x: None, dist)
    assert nest.flatten(placeholders) == [None] * len(nest.flatten(dist))
    numbered = nest.pack_sequence_as(dist, range(len(nest.flatten(dist))))
    assert nest.flatten(numbered) == list(range(len(nest.flatten(dist))))


@each_kind
def test_parameters_and_distributions_convert_into_each_other(make):
    nested = {'x': make(), 'y': [torch.zeros(B), make()]}
    spec = du.extract_spec(nested)
    params = du.distributions_to_params(nested)
    assert not any(isinstance(leaf, td.Distribution) for leaf in nest.flatten(params, nest.is_distribution))
    assert nest.structure(du.to_distribution_param_spec(spec)) == nest.structure(params)
    rebuilt = du.params_to_distributions(params, spec)
    same_distribution(nested['x'], rebuilt['x'])
    same_distribution(nested['y'][1], rebuilt['y'][1])
    build = du.DistributionSpec.from_distribution(nested['x'], from_dim=1)
    assert nest.structure(build.input_params_spec) == nest.structure(params['x'])
    same_distribution(nested['x'], build.build_distribution(params['x']))


@each_kind
def test_distributions_are_copied_and_pickled_after_use(make):
    dist = make()
    dist.sample()
    same_distribution(dist, copy.deepcopy(dist))
    same_distribution(dist, pickle.loads(pickle.dumps(dist)))


@each_kind
def test_expanding_adds_batch_dimensions(make):
    dist = make()
    assert dist.expand((2, *dist.batch_shape)).sample().shape == (2, *dist.sample().shape)


@each_kind
def test_samples_have_the_declared_shape(make):
    dist = make()
    for shape in ((), (2, ), (2, 3)):
        assert dist.sample(torch.Size(shape)).shape == (*shape, *dist.batch_shape, *dist.event_shape)
        assert dist.log_prob(dist.sample(torch.Size(shape))).shape == (*shape, *dist.batch_shape)
    assert not dist.sample().requires_grad
    assert repr(dist)


def test_named_parameters():
    assert set(du.extract_distribution_parameters(MAKERS['Categorical']())) == {'logits'}
    assert set(du.extract_distribution_parameters(MAKERS['torch.Categorical.probs']())) == {'probs'}
    assert set(du.extract_distribution_parameters(MAKERS['Squashed']())) == {'loc', 'scale'}
    assert set(du.extract_distribution_parameters(MAKERS['DiagMultivariateBeta']())) == {'concentration0',
                                                                                        'concentration1'}
    params = du.extract_distribution_parameters(MAKERS['Mixture']())
    assert set(params) == {'mixture', 'components'} and set(params['components']) == {'loc', 'scale'}


def test_different_settings_are_different_structures():
    def structure(*transforms):
        return nest.structure(du.TransformedDistribution(normal(), list(transforms)))

    base = structure(du.StableTanh(), du.AffineTransform(LOW, HIGH))
    assert base == structure(du.StableTanh(), du.AffineTransform(LOW.clone(), HIGH.clone()))
    assert base != structure(du.StableTanh(), du.AffineTransform(LOW, HIGH + 1))
    assert base != structure(du.StableTanh(), du.AffineTransform(0.0, 1.0))
    assert base != structure(du.StableTanh())
    assert structure(du.Softclip(0.0, 1.0)) != structure(du.Softclip(0.0, 2.0))
    assert structure(du.Softlower(0.0)) == structure(du.Softlower(0.0)) != structure(du.Softlower(1.0))
    assert structure(du.StableTanh().inv) != structure(du.Softsign().inv)
    one, two = (nest.structure(du.TruncatedNormal(loc(), scale(), LOW, high)) for high in (HIGH, HIGH + 1))
    assert one != two
    assert nest.structure(du.ShiftedCategorical(torch.zeros(2, 3), 1)) != nest.structure(
        du.ShiftedCategorical(torch.zeros(2, 3), 2))


def test_parameters_with_the_wrong_names_are_rejected():
    spec = du.extract_spec({'x': normal()})
    with pytest.raises(ValueError, match="expected a dict with \\['loc', 'scale'\\]"):
        du.params_to_distributions({'x': {'loc': loc()}}, spec)


def test_an_unknown_distribution_is_rejected_by_name():
    with pytest.raises(TypeError, match='VonMises is not registered'):
        du.extract_distribution_parameters(td.VonMises(torch.zeros(2), torch.ones(2)))


def test_other_distributions_can_be_registered():

    class Point(td.Distribution):
        """All its mass is at one place."""

        def __init__(self, where):
            super().__init__(where.shape, validate_args=False)
            self.where = where

    def rebuild(params, static):
        point = object.__new__(Point)
        point.where = params[0]
        return point

    dist_nests.register(Point, ('where', ), lambda d: ((d.where, ), None), rebuild)
    assert du.extract_distribution_parameters(Point(torch.ones(3)))['where'].sum() == 3
    assert nest.map_structure(lambda x: x + 1, Point(torch.ones(3))).where.tolist() == [2.0, 2.0, 2.0]
