"""Categorical and one-hot distributions against torch's own, and samples."""
import math

import pytest
import torch
import torch.distributions as td

from alfx.tensor_specs import BoundedTensorSpec, SpecError
from alfx.utils import dist_utils as du


def frequencies(samples, n):
    return torch.bincount(samples.reshape(-1), minlength=n).double() / samples.numel()


# Categorical ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('form', ['logits', 'probs'])
def test_categorical_agrees_with_torch(form):
    parameter = torch.rand(5, 7) * 3
    actual, expected = du.Categorical(**{form: parameter}), td.Categorical(**{form: parameter})
    action = torch.randint(7, (5, ))
    assert isinstance(actual, td.Categorical)
    torch.testing.assert_close(actual.log_prob(action), expected.log_prob(action))
    torch.testing.assert_close(actual.entropy(), expected.entropy())
    torch.testing.assert_close(actual.probs, expected.probs)
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.mode, expected.mode)
    torch.testing.assert_close(actual.enumerate_support(), expected.enumerate_support())
    many = torch.randint(7, (3, 5))
    torch.testing.assert_close(actual.log_prob(many), expected.log_prob(many))
    assert (actual.batch_shape, actual.event_shape) == (expected.batch_shape, expected.event_shape)
    other = torch.randn(5, 7)
    torch.testing.assert_close(td.kl_divergence(actual, du.Categorical(logits=other)),
                               td.kl_divergence(expected, td.Categorical(logits=other)))


def test_categorical_has_the_gradients_of_torch():
    logits = torch.randn(4, 5, dtype=torch.float64)
    action = torch.tensor([0, 1, 2, 4])
    gradients = []
    for cls in (du.Categorical, td.Categorical):
        leaf = logits.clone().requires_grad_()
        dist = cls(logits=leaf)
        (dist.log_prob(action) + 0.3 * dist.entropy()).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_entropy_of_a_fair_coin_is_log_two():
    assert du.Categorical(logits=torch.zeros(2)).entropy().item() == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.parametrize('form', ['logits', 'probs'])
def test_an_excluded_category_is_never_drawn_and_adds_nothing(form):
    # Probabilities 0, 1/4, 3/4, 0: entropy 1/4 log 4 + 3/4 log 4/3 = 0.562335
    probs = torch.tensor([0.0, 0.25, 0.75, 0.0])
    parameter = (probs if form == 'probs' else probs.log()).requires_grad_()
    dist = du.Categorical(**{form: parameter})
    assert dist.entropy().item() == pytest.approx(0.562335, abs=1e-6)
    assert dist.log_prob(torch.tensor(0)).item() == -math.inf
    (dist.entropy() + dist.log_prob(torch.tensor(2))).backward()
    assert torch.isfinite(parameter.grad).all()
    if form == 'logits':
        assert parameter.grad[0] == 0 and parameter.grad[3] == 0
    for shape in ((50, ), (5000, )):  # both ways of drawing
        assert set(dist.sample(shape).tolist()) <= {1, 2}


@pytest.mark.parametrize('batch', [1, 4000])
def test_categories_are_sampled_with_their_probabilities(batch):
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    dist = du.Categorical(probs=probs.expand(batch, 4))
    samples = torch.stack([dist.sample() for _ in range(40_000 // batch)])
    # One standard deviation is at most sqrt(0.24 / 40000) = 0.0025.
    torch.testing.assert_close(frequencies(samples, 4), probs.double(), atol=0.01, rtol=0)


def test_the_last_category_is_in_range_despite_rounded_probabilities():
    logits = torch.randn(20_000, 3) * 5
    samples = du.Categorical(logits=logits).sample((5, ))
    assert samples.min() >= 0 and samples.max() <= 2


@pytest.mark.parametrize('uniform,expected', [(0.0, 1), (1 - 2**-24, 2)])
def test_the_extremes_of_the_uniform_number_draw_possible_categories(monkeypatch, uniform, expected):
    monkeypatch.setattr(torch, 'rand_like', lambda x: torch.full_like(x, uniform))
    probs = torch.tensor([0.0, 0.1, 0.9, 0.0]).expand(500, 4)
    assert (du.Categorical(probs=probs).sample() == expected).all()


def test_a_distribution_first_used_without_gradients_gives_gradients_later():
    logits = torch.randn(3, 4, requires_grad=True)
    dist = du.Categorical(logits=logits * 1.0)
    normal = du.DiagMultivariateNormal(logits * 1.0, logits.exp())
    with torch.no_grad():
        action, value = dist.sample(), normal.sample()
        dist.log_prob(action)
        dist.entropy()
        normal.log_prob(value)
    assert dist.log_prob(action).requires_grad
    assert dist.entropy().requires_grad
    assert normal.entropy().requires_grad


def test_validation_is_off_by_default():
    bad = torch.full((2, 3), torch.nan)
    du.Categorical(logits=bad)
    with pytest.raises(ValueError, match='finite maximum'):
        du.Categorical(logits=bad, validate_args=True)
    with pytest.raises(ValueError, match='exactly one of probs and logits'):
        du.Categorical()
    with pytest.raises(ValueError, match='exactly one of probs and logits'):
        du.Categorical(probs=bad, logits=bad)


def test_a_start_other_than_zero_shifts_everything():
    logits = torch.randn(6, 3)
    shifted, plain = du.ShiftedCategorical(logits, start=-2), du.Categorical(logits=logits)
    actions = shifted.sample((400, ))
    assert set(actions.unique().tolist()) == {-2, -1, 0}
    torch.testing.assert_close(shifted.log_prob(actions), plain.log_prob(actions + 2))
    torch.testing.assert_close(shifted.mode, plain.mode - 2)
    torch.testing.assert_close(shifted.entropy(), plain.entropy())
    assert shifted.enumerate_support(expand=False).flatten().tolist() == [-2, -1, 0]


def test_unequal_multidiscrete_actions_are_products_of_categoricals():
    """Distributions of multi-discrete actions with unequal counts and starts are products of categoricals."""
    spec = BoundedTensorSpec((3, ), torch.int64, minimum=[0, 5, -1], maximum=[1, 8, 0])
    logits = torch.randn(4, 3, 4)
    dist = du.categorical_from_spec(logits, spec)
    assert isinstance(dist, td.Independent)
    parts = [td.Categorical(logits=logits[:, i, :n]) for i, n in enumerate([2, 4, 2])]
    actions = dist.sample((300, ))
    starts = torch.tensor([0, 5, -1])
    assert actions.amin((0, 1)).tolist() == [0, 5, -1] and actions.amax((0, 1)).tolist() == [1, 8, 0]
    expected = sum(part.log_prob((actions - starts)[..., i]) for i, part in enumerate(parts))
    torch.testing.assert_close(dist.log_prob(actions), expected)
    torch.testing.assert_close(dist.entropy(), sum(part.entropy() for part in parts))
    modes = torch.stack([part.probs.argmax(-1) for part in parts], -1) + starts
    torch.testing.assert_close(dist.mode, modes)
    assert (dist.batch_shape, dist.event_shape) == ((4, ), (3, ))


def test_actions_with_two_dimensions_have_one_log_probability():
    spec = BoundedTensorSpec((2, 3), torch.int64, 0, 4)
    dist = du.categorical_from_spec(torch.randn(6, 2, 3, 5), spec)
    assert dist.sample().shape == (6, 2, 3)
    assert dist.log_prob(dist.sample()).shape == dist.entropy().shape == (6, )


def test_the_spec_decides_the_kind_of_categorical():
    assert type(du.categorical_from_spec(torch.zeros(2, 3), BoundedTensorSpec((), torch.int64, 0, 2))) is du.Categorical
    shifted = du.categorical_from_spec(torch.zeros(2, 3), BoundedTensorSpec((), torch.int64, 1, 3))
    assert type(shifted) is du.ShiftedCategorical and shifted.start == 1
    with pytest.raises(SpecError, match='expected shape'):
        du.categorical_from_spec(torch.zeros(2, 4), BoundedTensorSpec((), torch.int64, 0, 2))
    for high in (2.5, float('inf'), 1e30):
        with pytest.raises(SpecError, match='spec with integer bounds'):
            du.categorical_from_spec(torch.zeros(2, 4), BoundedTensorSpec((), torch.float32, 0, high))


@pytest.mark.parametrize('shape, low, high, kind', [
    ((), 0, 2, du.ShiftedCategorical), ((), -1, 1, du.ShiftedCategorical),
    ((2, ), [0, -3], [2, -2], du.DiagMultivariateCategorical)])
def test_floats_between_integers_are_drawn_as_floats(shape, low, high, kind):
    spec = BoundedTensorSpec(shape, torch.float32, low, high)
    logits = torch.randn(5, *shape, 3)
    dist = du.categorical_from_spec(logits, spec)
    same = du.categorical_from_spec(logits, BoundedTensorSpec(shape, torch.int64, low, high))
    assert type(dist) is kind
    for d in (dist, dist.expand((5, )), du.params_to_distributions(du.distributions_to_params(dist),
                                                                   du.extract_spec(dist))):
        values = d.sample((100, ))
        assert values.dtype == d.mode.dtype == torch.float32 and bool((values == values.round()).all())
        assert bool(((values >= torch.tensor(low)) & (values <= torch.tensor(high))).all())
        torch.testing.assert_close(d.log_prob(values), same.log_prob(values.long()))
        torch.testing.assert_close(d.mode, same.mode.float())


# One-hot ----------------------------------------------------------------------------------------------------------


def test_one_hot_agrees_with_torch():
    logits = torch.randn(5, 4)
    actual, expected = (cls(logits=logits) for cls in (du.OneHotCategoricalStraightThrough,
                                                       td.OneHotCategoricalStraightThrough))
    value = actual.sample()
    assert value.sum(-1).eq(1).all() and value.shape == (5, 4)
    torch.testing.assert_close(actual.log_prob(value), expected.log_prob(value))
    torch.testing.assert_close(actual.entropy(), expected.entropy())
    torch.testing.assert_close(actual.mode, expected.mode)
    assert (actual.batch_shape, actual.event_shape) == (expected.batch_shape, expected.event_shape)


def test_straight_through_samples_are_one_hot_with_probability_gradients():
    logits = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(5, 4)
    dist = du.OneHotCategoricalStraightThrough(logits=logits)
    sample = dist.rsample()
    torch.testing.assert_close(sample.detach().sort(-1).values[:, -1], torch.ones(5))
    (found, ) = torch.autograd.grad((sample * weight).sum(), logits)
    (expected, ) = torch.autograd.grad((logits.softmax(-1) * weight).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.grad((dist.rmode * weight).sum(), logits)[0].abs().sum() > 0
    assert not dist.mode.requires_grad


def test_gumbel_softmax_is_one_hot_if_hard_and_has_the_right_frequencies():
    probs = torch.tensor([0.2, 0.3, 0.5])
    dist = du.OneHotCategoricalGumbelSoftmax(hard_sample=True, tau=0.7, probs=probs.expand(20_000, 3))
    torch.testing.assert_close(dist.rsample().mean(0), probs, atol=0.02, rtol=0)
    soft = du.OneHotCategoricalGumbelSoftmax(hard_sample=False, tau=0.7, probs=probs).rsample((10, ))
    torch.testing.assert_close(soft.sum(-1), torch.ones(10))
    assert ((soft > 0.01) & (soft < 0.99)).any()
    with pytest.raises(ValueError, match='tau'):
        du.OneHotCategoricalGumbelSoftmax(tau=0.0, probs=probs)


@pytest.mark.parametrize('make', [
    lambda x: du.Categorical(logits=x), lambda x: du.OneHotCategoricalStraightThrough(logits=x),
    lambda x: du.DiagMultivariateCategorical(x.unflatten(0, (2, 2)), num_categories=[3, 3])],
    ids=['one', 'one-hot', 'several'])
def test_divergences_and_gradients_use_only_existing_categories(make):
    torch.manual_seed(0)
    first, second = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    plain = td.kl_divergence(td.Categorical(logits=first), td.Categorical(logits=second))
    excluded = torch.full((4, 1), -torch.inf)
    found = td.kl_divergence(*(make(torch.cat((x, excluded), 1)) for x in (first, second)))
    torch.testing.assert_close(found, plain if len(found) == 4 else plain.view(2, 2).sum(1))
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), first)[0] for x in (found, plain)))
    wider = td.kl_divergence(*(du.Categorical(logits=torch.cat((second, x), 1)) for x in (
        excluded, torch.zeros(4, 1))))
    torch.testing.assert_close(wider, (1 + second.exp().sum(1).reciprocal()).log())
    assert (td.kl_divergence(*(du.Categorical(logits=torch.cat((second, x), 1)) for x in (
        torch.zeros(4, 1), excluded))) == torch.inf).all()
