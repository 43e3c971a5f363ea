"""Priors over actions: densities against slow loops, and as parts of a nest."""
import math

import pytest
import torch

from alfx import nest
from alfx.algorithms.prior_actor import BoxUniform, SameActionPriorActor, TruncatedNormal, UniformPriorActor
from alfx.data_structures import StepType, TimeStep
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

OBSERVATION = TensorSpec((3, ))


def time_step(prev_action, step_types):
    batch = len(step_types)
    return TimeStep(step_type=torch.tensor(step_types, dtype=torch.int32), reward=torch.zeros(batch),
                    discount=torch.ones(batch), observation=torch.zeros(batch, 3), prev_action=prev_action)


def normal_density(x, loc, scale):
    return math.exp(-0.5 * ((x - loc) / scale)**2) / (scale * math.sqrt(2 * math.pi))


def normal_cdf(x, loc, scale):
    return 0.5 * (1 + math.erf((x - loc) / (scale * math.sqrt(2))))


def truncated_density(x, loc, scale, low, high):
    return normal_density(x, loc, scale) / (normal_cdf(high, loc, scale) - normal_cdf(low, loc, scale))


def test_truncated_normal_is_the_normal_density_over_its_mass():
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(5, 4, generator=generator)
    scale = 0.4 + torch.rand(5, 4, generator=generator)
    low, high = torch.tensor([-1., -2., 0., 1.]), torch.tensor([1., 0.5, 3., 2.])
    x = low + (high - low) * torch.rand(5, 4, generator=generator)
    found = TruncatedNormal(loc, scale, low, high).log_prob(x)
    for b in range(5):
        for d in range(4):
            expected = truncated_density(*(float(v) for v in (x[b, d], loc[b, d], scale[b, d], low[d], high[d])))
            assert float(found[b, d]) == pytest.approx(math.log(expected), rel=1e-3, abs=1e-4)


def test_truncated_normal_of_a_wide_scale_is_uniform():
    dist = TruncatedNormal(torch.zeros(1), torch.full((1, ), 1e4), torch.tensor([-1.]), torch.tensor([3.]))
    # the density of a uniform distribution over 4 is 1/4: log 0.25 = -1.386294
    assert float(dist.log_prob(torch.tensor([2.9]))) == pytest.approx(-1.386294, abs=1e-3)


def test_truncated_normal_integrates_to_one_and_samples_inside():
    dist = TruncatedNormal(torch.tensor([0.8]), torch.tensor([0.3]), torch.tensor([-1.]), torch.tensor([1.]))
    grid = torch.linspace(-1, 1, 4001).unsqueeze(-1)
    assert float(dist.log_prob(grid).exp().mean() * 2) == pytest.approx(1.0, abs=1e-3)
    torch.manual_seed(0)
    samples = dist.sample((2000, ))
    assert samples.shape == (2000, 1) and samples.abs().max() <= 1
    density = dist.log_prob(grid).exp()
    assert float(samples.mean()) == pytest.approx(float((grid * density).sum() / density.sum()), abs=0.02)


def test_truncated_normal_validates_arguments_on_request():
    one = torch.ones(2)
    with pytest.raises(ValueError, match='scale > 0'):
        TruncatedNormal(one, 0 * one, -one, one, validate_args=True)
    with pytest.raises(ValueError, match='low < high'):
        TruncatedNormal(one, one, one, one, validate_args=True)
    with pytest.raises(ValueError):
        TruncatedNormal(one, one, -one, one, validate_args=True).log_prob(2 * one)


def test_a_uniform_prior_has_the_same_density_at_its_bounds():
    dist = BoxUniform(torch.tensor([-2.]), torch.tensor([2.]))
    values = torch.tensor([-2.0, 0.0, 2.0, 2.0000002, 2.1, -3.0]).unsqueeze(-1)
    found = dist.log_prob(values).squeeze(-1)
    assert found[:4].tolist() == pytest.approx([-math.log(4)] * 4)
    assert torch.isneginf(found[4:]).all()


def test_same_action_prior_is_the_mixture_of_a_flat_and_a_sharp_normal():
    spec = BoundedTensorSpec((2, ), torch.float32, [-1., 0.], [1., 4.])
    prior = SameActionPriorActor(OBSERVATION, spec, same_action_noise=0.05, same_action_prob=0.8)
    previous = torch.tensor([[0.5, 1.], [0.5, 1.], [-0.9, 3.9]])
    action = torch.tensor([[0.4, 1.2], [0.4, 1.2], [0.1, 4.0]])
    step = time_step(previous, [StepType.FIRST, StepType.MID, StepType.LAST])
    found = prior.train_step(step, ()).output.log_prob(action)
    assert found.shape == (3, )
    for b, weight in enumerate((0.0, 0.8, 0.8)):
        expected = 0.0
        for d, (low, high) in enumerate(((-1., 1.), (0., 4.))):
            x, last, width = float(action[b, d]), float(previous[b, d]), high - low
            flat = truncated_density(x, (low + high) / 2, width, low, high)
            sharp = truncated_density(x, last, 0.05 * width, low, high)
            expected += math.log((1 - weight) * flat + weight * sharp)
        assert float(found[b]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_previous_action_outside_of_the_bounds_counts_as_the_bound():
    spec = BoundedTensorSpec((1, ), torch.float32, 1., 2.)
    prior = SameActionPriorActor(OBSERVATION, spec)
    at, beyond = (prior.train_step(time_step(torch.tensor([[x]]), [StepType.MID]), ()).output for x in (2., 50.))
    action = torch.tensor([[1.9]])
    assert torch.equal(at.log_prob(action), beyond.log_prob(action))
    first = prior.train_step(time_step(torch.zeros(1, 1), [StepType.FIRST]), ()).output
    assert torch.isfinite(first.log_prob(action)).all()


def test_gradients_of_the_prior_reach_the_action():
    spec = BoundedTensorSpec((1, ), torch.float32, -1., 1.)
    prior = SameActionPriorActor(OBSERVATION, spec)
    action = torch.tensor([[0.3], [0.3]], requires_grad=True)
    step = time_step(torch.zeros(2, 1), [StepType.FIRST, StepType.MID])
    prior.train_step(step, ()).output.log_prob(action).sum().backward()
    assert torch.isfinite(action.grad).all()
    # at FIRST there is only the flat normal: d/dx -(x / 2)^2 / 2 = -x / 4 = -0.075
    assert float(action.grad[0]) == pytest.approx(-0.075, abs=1e-5)
    assert float(action.grad[1]) < -0.075


def test_priors_follow_the_nest_of_the_actions():
    specs = dict(steer=BoundedTensorSpec((), torch.float32, -1., 1.),
                 arm=BoundedTensorSpec((2, 3), torch.float32, -2., 2.))
    previous = dict(steer=torch.zeros(4), arm=torch.zeros(4, 2, 3))
    for cls in (SameActionPriorActor, UniformPriorActor):
        dists = cls(OBSERVATION, specs).predict_step(time_step(previous, [0, 1, 1, 2]), ()).output
        actions = dist_utils.sample_action_distribution(dists)
        assert {name: tuple(x.shape) for name, x in actions.items()} == dict(steer=(4, ), arm=(4, 2, 3))
        assert dist_utils.compute_log_probability(dists, actions).shape == (4, )


def test_uniform_prior_gives_every_action_the_same_probability():
    specs = dict(move=BoundedTensorSpec((), torch.int64, 2, 6), arm=BoundedTensorSpec((2, ), torch.float32, -1., 3.),
                 buttons=BoundedTensorSpec((2, ), torch.int64, 0, [1, 2]))
    step = time_step(dict(move=torch.full((2, ), 2), arm=torch.zeros(2, 2), buttons=torch.zeros(2, 2).long()), [0, 1])
    dists = UniformPriorActor(OBSERVATION, specs).rollout_step(step, ()).output
    action = dict(move=torch.tensor([2, 6]), arm=torch.tensor([[-1., 3.], [0., 0.]]),
                  buttons=torch.tensor([[0, 2], [1, 1]]))
    expected = math.log(1 / 5) + math.log(1 / 16) + math.log(1 / 6)
    assert dist_utils.compute_log_probability(dists, action).tolist() == pytest.approx([expected] * 2, abs=1e-5)
    total = sum(dist_utils.calc_uniform_log_prob(s) for name, s in specs.items() if name != 'buttons')
    assert total + math.log(1 / 6) == pytest.approx(expected)


@pytest.mark.parametrize('cls', [SameActionPriorActor, UniformPriorActor])
def test_a_prior_crosses_stacking_as_a_nest_of_its_parameters(cls):
    spec = BoundedTensorSpec((2, ), torch.float32, -1., 1.)
    step = time_step(torch.rand(6, 2) - 0.5, [0, 1, 1, 1, 2, 0])
    dist = cls(OBSERVATION, spec).train_step(step, ()).output
    by_time = nest.map_structure(lambda x: x.reshape(3, 2, *x.shape[1:]), dist)
    assert by_time.batch_shape == (3, 2)
    action = torch.rand(6, 2) - 0.5
    assert torch.equal(by_time.log_prob(action.reshape(3, 2, 2)), dist.log_prob(action).reshape(3, 2))


def test_a_prior_has_no_parameters_and_no_state_in_checkpoints():
    prior = SameActionPriorActor(OBSERVATION, BoundedTensorSpec((2, ), torch.float32, -1., 1.))
    assert not list(prior.parameters()) and not [x for x in prior.state_dict().values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize('spec, message', [
    (BoundedTensorSpec((), torch.int64, 0, 3), 'UniformPriorActor'),
    (TensorSpec((2, )), 'bounded actions'),
    (BoundedTensorSpec((2, ), torch.float32, -float('inf'), float('inf')), 'finite bounds'),
    (BoundedTensorSpec((2, ), torch.float32, 1., 1.), 'empty range'),
])
def test_actions_that_have_no_such_prior_are_rejected(spec, message):
    with pytest.raises(SpecError, match=message):
        SameActionPriorActor(OBSERVATION, spec)


@pytest.mark.parametrize('arguments', [dict(same_action_noise=0.0), dict(same_action_prob=1.5)])
def test_arguments_out_of_range_are_rejected_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SameActionPriorActor(OBSERVATION, BoundedTensorSpec((2, ), torch.float32, -1., 1.), **arguments)
