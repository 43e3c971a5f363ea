"""Dynamics models: losses in float64, bounds of log-variances, bootstraps, held-out data, elites."""
from functools import partial

import numpy as np
import pytest
import torch

from alfx import context
from alfx.algorithms.dynamics_learning_algorithm import (DeterministicDynamicsAlgorithm, DynamicsInfo, DynamicsState,
                                                         StochasticDynamicsAlgorithm)
from alfx.algorithms.model_based.bootstrap import hashed_uniform, transition_weights
from alfx.data_structures import BatchInfo, LossInfo, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.dynamics_networks import BoundedVarianceProjectionNetwork, DynamicsNetwork, softly_bounded
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

stats = pytest.importorskip('scipy.stats')  # of an extra

FEATURE = TensorSpec((3, ))
ACTION = BoundedTensorSpec((2, ), minimum=-1.0, maximum=1.0)
DISCRETE = BoundedTensorSpec((), torch.int64, minimum=3, maximum=5)
MAKE = {'deterministic': DeterministicDynamicsAlgorithm, 'stochastic': StochasticDynamicsAlgorithm}


def make(kind, **arguments):
    torch.manual_seed(0)
    return MAKE[kind](**{**dict(action_spec=ACTION, feature_spec=FEATURE, hidden_size=(8, )), **arguments})


def sequences(length=4, batch=5, action_spec=ACTION, first=(), seed=0):
    """Return time steps ``[T, B]`` with FIRST at the positions of ``first``."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.ones(length, batch, dtype=torch.int32)
    for t, b in first:
        step_type[t, b] = 0
    action = torch.rand(length, batch, *action_spec.shape, generator=generator)
    if action_spec is DISCRETE:
        action = (3 + 3 * action).long()
    feature = 3.0 + 2.0 * torch.randn(length, batch, 3, generator=generator)
    return TimeStep(step_type=step_type, observation=feature, prev_action=action)


def row(time_step, t):
    return TimeStep(*[x[t] if isinstance(x, torch.Tensor) else x for x in time_step])


def observed(model, time_step):
    """Update the statistics of the model with a batch; return its info ``[B, T]``."""
    batch_major = TimeStep(*[x.transpose(0, 1) if isinstance(x, torch.Tensor) else x for x in time_step])
    batch = time_step.step_type.shape[1]
    batch_info = BatchInfo(env_ids=torch.arange(batch), positions=torch.full((batch, ), 10))
    return model.preprocess_experience(batch_major, (), batch_info)[1]


# Losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('num_replicas', [1, 3])
@pytest.mark.parametrize('kind', list(MAKE))
def test_the_ensemble_loss_matches_the_formulas_in_float64(kind, num_replicas):
    """Compare with scipy's negative log-likelihood and half the mean squared error, on normalized inputs."""
    model = make(kind, num_replicas=num_replicas, bootstrap=False)
    steps = sequences()
    assert observed(model, steps) == ()
    feature, action = steps.observation.double().numpy(), steps.prev_action.double().numpy()
    before, after, action = (x.reshape(15, -1) for x in (feature[:-1], feature[1:], action[1:]))
    change = after - before
    target = (change - change.mean(0)) / change.std(0)
    inputs = [torch.as_tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32) for x in (before, action)]
    with torch.no_grad():
        predicted = model._network(tuple(inputs))[0]
    step = model.train_sequence(steps, DynamicsState(torch.zeros(4, 5, 3)), ())
    found = model.calc_loss(step.info).loss.detach()
    target = target[:, None] if num_replicas > 1 else target
    if kind == 'stochastic':
        expected = -stats.norm.logpdf(target, predicted.mean.numpy(), predicted.stddev.numpy()).sum(-1)
    else:
        expected = 0.5 * ((predicted.numpy() - target)**2).mean(-1)
    expected = expected.mean(-1) if num_replicas > 1 else expected
    np.testing.assert_allclose(found[:3].reshape(-1), expected, rtol=2e-4, atol=1e-5)
    assert (found[3] == 0).all()


@pytest.mark.parametrize('kind', list(MAKE))
def test_a_loss_belongs_to_the_step_before_and_is_zero_between_episodes(kind):
    model = make(kind)
    steps = sequences(first=[(2, 1)])
    observed(model, steps)
    info = model.train_sequence(steps, DynamicsState(torch.zeros(4, 5, 3)), ()).info
    found = model.calc_loss(info).loss
    assert found[1, 1] == 0, 'between LAST and FIRST nothing is learned'
    assert (found[:3].abs() > 0).sum() == 14
    for t in range(1, 4):
        single = model.train_step(row(steps, t), DynamicsState(steps.observation[t - 1]), ()).info.loss.loss
        torch.testing.assert_close(found[t - 1], single)


@pytest.mark.parametrize('kind', list(MAKE))
@pytest.mark.parametrize('action_spec', [ACTION, DISCRETE])
def test_an_ensemble_of_n_is_n_single_models(kind, action_spec):
    model, single = make(kind, num_replicas=3, action_spec=action_spec), make(kind, action_spec=action_spec)
    steps = sequences(action_spec=action_spec)
    observed(model, steps), observed(single, steps)
    for i in range(3):
        for name, parameter in single._network.named_parameters():
            stacked = dict(model._network.named_parameters())[name]
            parameter.data.copy_(stacked[i].reshape(parameter.shape))
        arguments = model._action_encoder(steps.prev_action[1]), steps.observation[1]
        torch.testing.assert_close(model._losses(steps.observation[0], *arguments)[0][:, i],
                                   single._losses(steps.observation[0], *arguments)[0])
        action = TimeStep(prev_action=steps.prev_action[1])
        if kind == 'deterministic':
            found = model.predict_step(action, DynamicsState(steps.observation[0])).output
            assert found.shape == (5, 3, 3)
            torch.testing.assert_close(found[:, i], single.predict_step(action, DynamicsState(
                steps.observation[0])).output)


@pytest.mark.parametrize('kind', list(MAKE))
def test_a_model_trains_from_the_states_and_actions_of_replicas(kind):
    model, time_step = make(kind, num_replicas=3), row(sequences(), 0)
    state = DynamicsState(feature=torch.randn(5, 3))
    of_replicas = DynamicsState(feature=state.feature[:, None].expand(5, 3, 3))
    actions = time_step._replace(prev_action=time_step.prev_action[:, None].expand(5, 3, 2))
    losses = []
    for inputs, before in (time_step, state), (time_step, of_replicas), (actions, state), (actions, of_replicas):
        torch.manual_seed(1)
        losses.append(model.train_step(inputs, before, ()).info.loss.loss)
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])


def test_stochastic_model_samples_have_the_reported_mean_and_deviation():
    model = make('stochastic')
    steps = sequences()
    observed(model, steps)
    feature, action = steps.observation[0, :1].expand(20000, 3), steps.prev_action[1, :1].expand(20000, 2)
    with torch.no_grad():
        step = model.predict_step(TimeStep(prev_action=action), DynamicsState(feature))
    dist = step.info.dist
    assert step.state.feature is step.output
    torch.testing.assert_close(step.output.mean(0), (feature + dist.mean)[0], atol=0.1, rtol=0)
    torch.testing.assert_close(step.output.std(0), dist.stddev[0], atol=0.1, rtol=0)


@pytest.mark.parametrize('kind', list(MAKE))
def test_a_model_learns_a_linear_system_whose_features_differ_in_scale(kind):
    """Fit s' = s + A s + B a with features of different scales; the error is at most 1/4 of the size of the change."""
    torch.manual_seed(1)
    model = make(kind, hidden_size=(32, ), num_replicas=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scale = torch.tensor([1.0, 100.0, 0.01])
    matrix, gain = 0.3 * torch.randn(3, 3), torch.randn(2, 3)

    def batch():
        before, action = torch.randn(64, 3), 2 * torch.rand(64, 2) - 1
        after = before + before @ matrix + action @ gain
        return TimeStep(step_type=torch.ones(2, 64, dtype=torch.int32), prev_action=torch.stack((action, action)),
                        observation=torch.stack((before, after)) * scale)

    for _ in range(250):
        steps = batch()
        observed(model, steps)
        info = model.train_sequence(steps, DynamicsState(torch.zeros(2, 64, 3)), ()).info
        loss_info = model.calc_loss(info)
        loss = loss_info.loss[0].mean()
        loss = loss + loss_info.scalar_loss if isinstance(loss_info.scalar_loss, torch.Tensor) else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    steps = batch()
    with torch.no_grad():
        found = model.predict_step(row(steps, 1), DynamicsState(steps.observation[0])).output
    change = (steps.observation[1] - steps.observation[0]).std(0)
    assert ((found - steps.observation[1].unsqueeze(1)).square().mean((0, 1)).sqrt() / change < 0.25).all()


# Log-variances ------------------------------------------------------------------------------------------------


def test_log_variances_are_soft_bounded_and_unchanged_well_inside():
    x = torch.linspace(-100, 100, 401, dtype=torch.float64)
    y = softly_bounded(x, -10.0, 0.5)
    slack = np.log1p(np.exp(-10.5))  # softplus(low - high): what the lower bound adds at the upper one
    assert (y >= -10.0).all() and (y <= 0.5 + slack + 1e-9).all() and (y.diff() >= 0).all()
    # by hand: 0.5 - log(1 + e^5.5) = -5.0040784, then -10 + log(1 + e^4.9959216) = -4.997336
    found = softly_bounded(torch.tensor(-5.0, dtype=torch.float64), -10.0, 0.5)
    np.testing.assert_allclose(found, -4.997336, atol=1e-6)


def test_bounds_of_log_variances_are_learned_and_pulled_together():
    head = BoundedVarianceProjectionNetwork(4, TensorSpec((3, )), min_log_variance=-2.0, max_log_variance=1.0)
    assert head.bounds_penalty() == 9.0
    stack = head.make_parallel(5)
    assert stack.bounds_penalty() == 9.0, 'the mean over the networks'
    dist, _ = stack(100 * torch.randn(7, 5, 4))
    log_variance = 2 * dist.stddev.log()
    assert dist.mean.shape == (7, 5, 3) and log_variance.min() >= -2.0001 and log_variance.max() <= 1.05
    stack.bounds_penalty().backward()
    low, high = stack._min_log_variance.grad, stack._max_log_variance.grad
    torch.testing.assert_close(high, torch.full((5, 3), 0.2))
    torch.testing.assert_close(low, -high)
    with pytest.raises(ValueError, match='min_log_variance < max_log_variance'):
        BoundedVarianceProjectionNetwork(4, TensorSpec((3, )), min_log_variance=1.0, max_log_variance=1.0)


def test_only_stochastic_models_have_the_bound_penalty_in_their_loss():
    infos = DynamicsInfo(loss=sequences_loss())
    assert make('deterministic').calc_loss(infos).scalar_loss == ()
    # bounds -10 and 0.5 of 3 components, times 0.01
    np.testing.assert_allclose(make('stochastic', num_replicas=2).calc_loss(infos).scalar_loss.item(), 0.315, rtol=1e-6)


def sequences_loss():
    return LossInfo(loss=torch.zeros(2, 3), extra={'dynamics': torch.zeros(2, 3)})


# Bootstraps, holdout, elites ----------------------------------------------------------------------------------


def test_hashed_numbers_are_uniform_and_independent_of_each_other():
    env, position = torch.meshgrid(torch.arange(100), torch.arange(1000), indexing='ij')
    u = hashed_uniform(env, position)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.flatten().numpy(), 'uniform').pvalue > 1e-3
    for shifted in (u[1:, :] - u[:-1, :], u[:, 1:] - u[:, :-1]):  # the difference of independent ones has variance 1/6
        np.testing.assert_allclose(shifted.var().item(), 1 / 6, rtol=0.02)
    assert abs(np.corrcoef(u.flatten(), hashed_uniform(env, position + 1000).flatten())[0, 1]) < 0.02


def test_members_of_the_ensemble_see_different_bootstraps_that_are_poisson():
    positions = torch.arange(50000)
    weight, is_held_out = transition_weights(torch.zeros_like(positions), positions, 3, True, 0.0)
    assert not is_held_out.any()
    for k in range(4):
        np.testing.assert_allclose((weight == k).float().mean(0), stats.poisson(1).pmf(k), atol=0.01)
    np.testing.assert_allclose(np.corrcoef(weight.T.numpy()), np.eye(3), atol=0.02)


def test_membership_of_a_transition_depends_only_on_its_position():
    env_ids, positions = torch.tensor([0, 1, 1]), torch.tensor([7, 7, 8])
    all_at_once = transition_weights(env_ids, positions, 4, True, 0.5)
    for i in range(3):
        single = transition_weights(env_ids[i], positions[i], 4, True, 0.5)
        assert torch.equal(single[0], all_at_once[0][i]) and torch.equal(single[1], all_at_once[1][i])


def test_held_out_data_is_never_trained_on():
    positions = torch.arange(20000)
    weight, is_held_out = transition_weights(positions % 8, positions, 2, False, 0.2)
    np.testing.assert_allclose(is_held_out.float().mean(), 0.2, atol=0.01)
    assert (weight[is_held_out] == 0).all() and (weight[~is_held_out] == 1).all()


def test_held_out_errors_are_those_of_all_ranks(monkeypatch):
    model = make('deterministic', num_replicas=2, holdout=0.5)
    before, action = torch.randn(4, 3), torch.randn(4, *ACTION.shape)
    errors = model._losses(before, action, before)[0].detach()
    monkeypatch.setattr(context, 'sum_over_ranks', lambda x: x + 1)
    model._observe_holdout(before, action, before)
    torch.testing.assert_close(model._holdout_error, (errors.sum(0) + 1) / 5)
    model._observe_holdout(before[:0], action[:0], before[:0])  # another rank has a held-out transition
    assert model._holdout_count == 2


def test_held_out_errors_choose_the_elites_and_have_no_gradient():
    model = make('deterministic', num_replicas=3, holdout=0.5, num_elites=2, bootstrap=False)
    steps = sequences(batch=40)
    info = observed(model, steps)
    held_out = (info.weight == 0).all(-1).T[1:]
    assert 30 < held_out.sum() < 90
    by_hand = model._losses(steps.observation[:-1].flatten(0, 1), steps.prev_action[1:].flatten(0, 1),
                            steps.observation[1:].flatten(0, 1))[0][held_out.flatten()].mean(0)
    torch.testing.assert_close(model._holdout_error, by_hand.detach())
    assert model.elites.tolist() == by_hand.argsort().tolist()[:2]
    weights = DynamicsInfo(weight=info.weight.transpose(0, 1))
    loss = model.calc_loss(model.train_sequence(steps, DynamicsState(torch.zeros(4, 40, 3)), weights).info).loss
    assert (loss[:-1][held_out] == 0).all() and (loss[:-1][~held_out] != 0).all()


def test_bootstrap_weights_multiply_the_losses_of_the_members():
    model = make('stochastic', num_replicas=3)
    steps = sequences()
    weight = observed(model, steps).weight.transpose(0, 1)
    info = model.train_sequence(steps, DynamicsState(torch.zeros(4, 5, 3)), DynamicsInfo(weight=weight)).info
    single = model._losses(steps.observation[0], steps.prev_action[1], steps.observation[1])[0]
    torch.testing.assert_close(model.calc_loss(info).loss[0], (single * weight[1]).mean(-1))
    assert len({tuple(w) for w in weight.flatten(0, 1).T.tolist()}) == 3


# Arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arguments, message', [
    (dict(num_replicas=0), 'num_replicas'), (dict(holdout=1.0), 'holdout'), (dict(hidden_size=(0, )), 'hidden_size'),
    (dict(num_replicas=3, num_elites=2), 'num_elites.*holdout is 0'),
    (dict(num_replicas=3, num_elites=4, holdout=0.1), 'num_elites')])
def test_arguments_out_of_range_are_rejected(arguments, message):
    with pytest.raises(ConfError, match=message):
        make('stochastic', **arguments)


def test_wrong_networks_and_non_vector_features_are_rejected():
    network = partial(DynamicsNetwork, joint_fc_layer_params=(8, ))
    with pytest.raises(ConfError, match='predicts a tensor; the algorithm needs a distribution(.|\n)*prob = True'):
        make('stochastic', dynamics_network_ctor=network)
    with pytest.raises(ConfError, match='predicts a distribution; the algorithm needs a tensor'):
        make('deterministic', dynamics_network_ctor=partial(
            network, prob=True, continuous_projection_net_ctor=BoundedVarianceProjectionNetwork))
    with pytest.raises(SpecError, match='feature_spec.*one vector of floats'):
        make('deterministic', feature_spec=TensorSpec((3, 4)))
    with pytest.raises(SpecError, match='feature_spec, action_spec'):
        network(FEATURE, FEATURE)


def test_without_normalization_a_given_network_predicts_the_change_itself():
    network = partial(DynamicsNetwork, joint_fc_layer_params=(8, ))
    model = make('deterministic', dynamics_network_ctor=network, normalize=False)
    steps = sequences()
    found = model.predict_step(row(steps, 1), DynamicsState(steps.observation[0])).output
    change, _ = model._network((steps.observation[0], steps.prev_action[1]))
    torch.testing.assert_close(found, steps.observation[0] + change)
