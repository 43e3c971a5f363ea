"""Models for tree search: predictions, reward sums, sampled actions, and losses against slow loops."""
import math

import pytest
import torch
import torch.distributions as td

from alfx import context
from alfx.algorithms.mcts_models import (MCTSModel, ModelOutput, ModelState, ModelTarget, SimpleMCTSModel,
                                         SimplePredictionNet, create_simple_dynamics_net, create_simple_encoding_net,
                                         policy_loss)
from alfx.gin_utils import ConfError
from alfx.networks import network
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.losses import AsymmetricSimSiamLoss, DiscreteRegressionLoss, QuantileRegressionLoss, SquareLoss
from alfx.utils.math_ops import Sqrt1pTransform

OBSERVATION, DISCRETE = TensorSpec((5, )), BoundedTensorSpec((), torch.int64, 1, 4)
BOX = BoundedTensorSpec((2, ), torch.float32, -1, 1)
B, R = 6, 3


class Chain(network.Network):
    """A network whose latent state counts steps; the reward of step t is ``rewards[t]``, or the sum since the reset."""

    def __init__(self, rewards, sums=False):
        super().__init__(TensorSpec((1, )), TensorSpec((1, )) if sums else ())
        self.rewards, self.sums = torch.tensor(rewards), sums

    def forward(self, inputs, state=()):
        reward = self.rewards[inputs[:, 0].long()]
        if self.sums:
            reward = reward + state[:, 0]
            state = reward[:, None]
        probs = td.Categorical(logits=torch.zeros(len(inputs), 2))
        return (torch.zeros(len(inputs)), reward, probs, torch.zeros(len(inputs))), state


class ChainModel(MCTSModel):
    """A search model that predicts with :class:`Chain`."""

    def prediction_model(self, dyn_state, pred_state):
        (value, reward, dist, logit), pred_state = self._prediction_net(dyn_state, pred_state)
        return ModelOutput(value=value, reward=reward, action_probs=dist.probs, action_distribution=dist,
                           state=ModelState(state=dyn_state, pred_state=pred_state), value_pred=value,
                           reward_pred=reward, game_over_logit=logit)


def plain_model(**kwargs):
    arguments = dict(num_unroll_steps=R, representation_net=None, dynamics_net=None, prediction_net=None,
                     train_reward_function=True, train_game_over_function=True)
    return MCTSModel(**{**arguments, **kwargs})


def test_a_period_without_sums_is_logged(caplog):
    caplog.set_level('INFO', 'alfx')
    plain_model(reset_reward_sum_period=2, predict_reward_sum=True)
    assert not caplog.records
    plain_model(reset_reward_sum_period=2)
    assert 'MCTSModel.reset_reward_sum_period is not used: predict_reward_sum is False' in caplog.text


@pytest.mark.parametrize('predicts_first', [True, False])
@pytest.mark.parametrize('period', [0, 2, 3])
def test_differences_of_sums_are_the_rewards(period, predicts_first):
    rewards = [1.0, 10.0, 100.0, 1000.0, 1e4, 1e5, 1e6]
    model = ChainModel(6, None, lambda inputs: (inputs[0] + 1, ()), Chain(rewards, sums=True), True, True,
                       predict_reward_sum=True, reset_reward_sum_period=period, predict_initial_reward=predicts_first)
    output = model.initial_predict(torch.zeros(2, 1))
    found, sums = [output.reward], [output.reward_pred]
    for _ in range(6):
        output = model.recurrent_inference(output.state, torch.zeros(2))
        found.append(output.reward)
        sums.append(output.reward_pred)
    expected = rewards if predicts_first else [0.0, *rewards[1:]]
    if predicts_first:
        assert torch.stack(found, 1)[0].tolist() == expected
        assert model.reward_sums(torch.tensor([rewards]))[0].tolist() == torch.stack(sums, 1)[0].tolist()
    target = model.reward_sums(torch.tensor([rewards]))[0].tolist()
    # by hand, with a period of 2: 1, 11, 111 | 1000, 11000 | 1e5, 1.1e6
    by_hand = {0: [1, 11, 111, 1111, 11111, 111111, 1111111], 2: [1, 11, 111, 1000, 11000, 1e5, 1.1e6],
               3: [1, 11, 111, 1111, 1e4, 1.1e5, 1.11e6]}[period]
    assert target == (by_hand if predicts_first else [max(x - (i <= (period or 9)), 0) for i, x in enumerate(by_hand)])


def outputs_and_targets(seed=0):
    torch.manual_seed(seed)
    steps = R + 1
    logits = torch.randn(B, steps, 4, requires_grad=True)
    output = ModelOutput(value_pred=torch.randn(B, steps, requires_grad=True), reward_pred=torch.randn(B, steps),
                         action_distribution=td.Categorical(logits=logits), game_over_logit=torch.randn(B, steps),
                         state=ModelState(state=torch.randn(B, steps, 5)))
    beyond = torch.arange(steps) >= torch.tensor([4, 3, 2, 4, 1, 2])[:, None]
    target = ModelTarget(
        is_partial_trajectory=torch.tensor([False, False, True, True, False, True]), beyond_episode_end=beyond,
        reward=torch.randn(B, steps), action_policy=torch.rand(B, steps, 4).softmax(-1) * ~beyond[..., None],
        game_over=beyond, value=torch.randn(B, steps), observation=torch.randn(B, steps, 5))
    return output, target


@pytest.mark.parametrize('options', [
    {}, dict(initial_loss_weight=None), dict(value_loss_weight=0.25, policy_loss_weight=2.0, reward_loss_weight=3.0,
                                             game_over_loss_weight=0.5),
    dict(apply_partial_trajectory_mask=True), dict(predict_initial_reward=False), dict(predict_reward_sum=True),
    dict(train_repr_prediction=True, repr_prediction_loss_weight=0.7),
    dict(train_repr_prediction=True, apply_beyond_episode_end_mask=True, apply_partial_trajectory_mask=True),
    dict(initial_alpha=0.1), dict(train_policy=False, train_reward_function=False, train_game_over_function=False)])
def test_the_loss_matches_a_loop_over_samples_and_steps(options):
    output, target = outputs_and_targets()
    loss = plain_model(**options).calc_loss(output, target)
    weight = {name: options.get(f'{name}_loss_weight', 1.0) for name in ('value', 'reward', 'policy', 'game_over')}
    log_p = output.action_distribution.logits
    for b in range(B):
        expected, total_reward = 0.0, 0.0
        for t in range(R + 1):
            share = 1 / R if t or options.get('initial_loss_weight', 1.0) is None else 1.0
            beyond = bool(target.beyond_episode_end[b, t])
            if options.get('apply_partial_trajectory_mask') and target.is_partial_trajectory[b] and beyond:
                share = 0.0
            step = weight['value'] * (output.value_pred[b, t] - target.value[b, t])**2
            if options.get('train_reward_function', True) and (t or options.get('predict_initial_reward', True)):
                total_reward = total_reward * bool(options.get('predict_reward_sum')) + target.reward[b, t]
                step += weight['reward'] * (output.reward_pred[b, t] - total_reward)**2
            if options.get('train_policy', True):
                step -= weight['policy'] * (target.action_policy[b, t] * log_p[b, t]).sum()
            if options.get('train_game_over_function', True):
                x = output.game_over_logit[b, t]
                step += weight['game_over'] * (torch.log1p(torch.exp(x)) - beyond * x)
            if options.get('train_repr_prediction') and not (beyond and options.get('apply_beyond_episode_end_mask')):
                difference = output.state.state[b, t] - target.observation[b, t]
                step += options.get('repr_prediction_loss_weight', 1.0) * 0.5 * (difference**2).mean()
            if options.get('initial_alpha') and not beyond:
                step += options['initial_alpha'] * (log_p[b, t].exp() * log_p[b, t]).sum()
            expected += share * step
        assert float(loss.loss[b].detach()) == pytest.approx(float(torch.as_tensor(expected).detach()), rel=1e-5)
    assert loss.loss.shape == (B, ) and loss.loss.sum().backward() is None


def test_the_entropy_weight_grows_below_the_target_and_is_never_negative():
    output, target = outputs_and_targets()
    grows = plain_model(target_entropy=10.0, alpha_adjust_rate=0.5)
    shrinks = plain_model(target_entropy=0.0, initial_alpha=0.1, alpha_adjust_rate=0.5)
    for model in (grows, shrinks):
        model.calc_loss(output, target)
    assert grows._alpha > 1 and shrinks._alpha == 0
    before = grows.eval()._alpha.clone()
    grows.calc_loss(output, target)
    assert torch.equal(grows._alpha, before)


def test_the_entropy_weight_is_the_same_in_all_ranks(monkeypatch):
    output, target = outputs_and_targets()
    learned = target.action_policy.sum(-1) > 0
    missing = float((5.0 - output.action_distribution.entropy().detach())[learned].sum())
    sums = []
    monkeypatch.setattr(context, 'sum_over_ranks', lambda x: sums.append(float(x)) or x + len(sums))
    model = plain_model(target_entropy=5.0, initial_alpha=1.0, alpha_adjust_rate=0.1)
    model.calc_loss(output, target)
    assert sums == pytest.approx([missing, int(learned.sum())], rel=1e-5)
    assert float(model._alpha) == pytest.approx(1.0 + 0.1 * (missing + 1) / (int(learned.sum()) + 2), rel=1e-5)


def test_the_target_entropy_counts_only_steps_with_a_policy_target():
    """Exclude steps of finished games; if they counted as steps without entropy, the weight would grow indefinitely."""
    output, target = outputs_and_targets()
    learned = target.action_policy.sum(-1) > 0
    assert not learned.all()
    mean = float(output.action_distribution.entropy()[learned].detach().mean())
    model = plain_model(target_entropy=mean, initial_alpha=1.0, alpha_adjust_rate=1.0)
    model.calc_loss(output, target)
    assert float(model._alpha) == pytest.approx(1.0, abs=1e-5)
    model.calc_loss(output, target._replace(action_policy=torch.zeros_like(target.action_policy)))
    assert float(model._alpha) == pytest.approx(1.0, abs=1e-5), 'nothing to learn is no reason to change it'


def test_the_policy_loss_takes_candidates_and_impossible_actions():
    logits = torch.tensor([[0.0, math.log(3.0), -torch.inf]])
    dist = td.Categorical(logits=logits)
    policy = torch.tensor([[0.25, 0.75, 0.0]])
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(policy_loss(dist, (), policy)) == pytest.approx(expected)
    assert float(policy_loss(dist, torch.tensor([[1, 0, 2]]), policy[:, [1, 0, 2]])) == pytest.approx(expected)
    normal = td.Independent(td.Normal(torch.zeros(2, 3, 2), torch.ones(2, 3, 2)), 1)
    actions, weights = torch.randn(2, 3, 5, 2), torch.rand(2, 3, 5).softmax(-1)
    loop = [[-sum(weights[b, t, k] * td.Normal(0.0, 1.0).log_prob(actions[b, t, k]).sum() for k in range(5))
             for t in range(3)] for b in range(2)]
    torch.testing.assert_close(policy_loss(normal, actions, weights), torch.tensor(loop))


@pytest.mark.parametrize('action_spec, options', [
    (DISCRETE, {}), (DISCRETE, dict(num_sampled_actions=2)), (BOX, dict(num_sampled_actions=7)),
    (BoundedTensorSpec((2, ), torch.int64, 0, 3), dict(num_sampled_actions=7))])
def test_a_simple_model_predicts_everything_the_search_needs(action_spec, options):
    model = SimpleMCTSModel(OBSERVATION, action_spec, R, **options)
    output = model.initial_predict(model.initial_representation(torch.randn(B, 5)))
    action = action_spec.zeros((B, )) + 1
    for _ in range(2):
        assert output.value.shape == output.reward.shape == output.game_over.shape == (B, )
        assert output.action_probs.sum(-1).tolist() == pytest.approx([1] * B)
        k = options.get('num_sampled_actions')
        if k is None:
            assert output.actions == () and output.action_probs.shape == (B, 4)
        else:
            assert output.actions.shape == (B, k, *action_spec.shape) and output.actions.dtype == action_spec.dtype
        output = model.recurrent_inference(output.state, action)
    assert output.state.state.shape == (B, *model.repr_spec.shape)


def test_the_most_probable_actions_are_considered_with_their_shares():
    model = SimpleMCTSModel(OBSERVATION, DISCRETE, R, num_sampled_actions=2)
    actions, probs = model._candidates(td.Categorical(probs=torch.tensor([[0.1, 0.3, 0.0, 0.6]])))
    assert actions.tolist() == [[4, 2]] and probs.tolist() == [pytest.approx([2 / 3, 1 / 3])]


def test_the_policy_improved_with_sampled_actions_tends_to_that_with_all():
    """Sample actions with equal priors: as their number grows, the mean over draws tends to the full expectation."""
    q, prior = torch.tensor([0.0, 1.0, 0.5, -1.0]).double(), torch.tensor([0.4, 0.1, 0.3, 0.2]).double()
    from alfx.tree_search.rules import kl_policy
    full = (kl_policy(q[None], prior[None], torch.tensor([[0.5]]).double())[0] * q).sum()
    torch.manual_seed(0)
    errors = []
    for k in (2, 8, 64):
        value = q[torch.multinomial(prior, 4000 * k, replacement=True).view(4000, k)]
        policy = kl_policy(value, torch.full_like(value, 1 / k), torch.full((4000, 1), 0.5).double())
        errors.append(abs(float((policy * value).sum(-1).mean() - full)))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


def test_a_model_learns_by_its_loss_in_all_of_its_networks():
    model = SimpleMCTSModel(OBSERVATION, DISCRETE, R, train_repr_prediction=True, initial_alpha=0.01)
    observation = torch.randn(B, R + 1, 5)
    output = model.initial_predict(model.initial_representation(observation[:, 0]))
    outputs = [output]
    for t in range(R):
        output = model.recurrent_inference(output.state, torch.full((B, ), 1 + t))
        outputs.append(output)
    from alfx import nest
    stacked = nest.map_structure(lambda *x: torch.stack(x, 1), *[o._replace(state=ModelState(o.state.state))
                                                                 for o in outputs])
    _, target = outputs_and_targets()
    with torch.no_grad():
        latents = model.initial_representation(observation.flatten(0, 1)).view(B, R + 1, -1)
    model.calc_loss(stacked, target._replace(observation=latents)).loss.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bins_are_read_by_the_losses_that_made_them():
    class Binned(SimpleMCTSModel):
        def __init__(self, loss):
            super().__init__(OBSERVATION, DISCRETE, R, prediction_net_ctor=lambda spec, action: SimplePredictionNet(
                spec, action, lambda input_tensor_spec: create_simple_encoding_net(input_tensor_spec),
                num_quantiles=11))
            self._value_loss = self._reward_loss = loss

    loss = DiscreteRegressionLoss(Sqrt1pTransform())
    model = Binned(loss)
    output = model.initial_predict(torch.randn(B, 64))
    assert output.value_pred.shape == (B, 11)
    torch.testing.assert_close(output.value, loss.calc_expectation(output.value_pred))


@pytest.mark.parametrize('num_quantiles, loss, fits', [
    (1, SquareLoss(), True), (1, SquareLoss(Sqrt1pTransform()), True), (3, SquareLoss(), False),
    (1, DiscreteRegressionLoss(), False), (3, DiscreteRegressionLoss(), True), (1, QuantileRegressionLoss(), False),
    (3, QuantileRegressionLoss(), True)])
@pytest.mark.parametrize('argument', ['value_loss', 'reward_loss'])
def test_a_loss_that_does_not_read_the_prediction_is_rejected(num_quantiles, loss, fits, argument):
    def prediction_net(latent_spec, action_spec):
        return SimplePredictionNet(latent_spec, action_spec, lambda input_tensor_spec: create_simple_encoding_net(
            input_tensor_spec), num_quantiles)

    model = SimpleMCTSModel(OBSERVATION, DISCRETE, R, prediction_net_ctor=prediction_net)
    model._value_loss = model._reward_loss = DiscreteRegressionLoss() if num_quantiles > 1 else SquareLoss()
    setattr(model, f'_{argument}', loss)
    if fits:
        model.check_losses()
        return
    with pytest.raises(ConfError, match=f'{argument} = {type(loss).__name__} does not match .*{num_quantiles} num'):
        model.check_losses()


@pytest.mark.parametrize('action_spec, options, message', [
    (BOX, {}, 'cannot be enumerated, found None'),
    (DISCRETE, dict(num_sampled_actions=4), 'below the number of actions'),
    (BOX, dict(num_sampled_actions=1), 'expected at least 2'), ((BOX, BOX), {}, 'single bounded action')])
def test_actions_that_cannot_be_searched_are_rejected(action_spec, options, message):
    with pytest.raises((ValueError, SpecError), match=message):
        SimpleMCTSModel(OBSERVATION, action_spec, R, **options)


def test_a_loss_for_another_number_of_steps_is_rejected():
    output, target = outputs_and_targets()
    with pytest.raises(ValueError, match='expected 6 steps'):
        plain_model(num_unroll_steps=5).calc_loss(output, target)


def test_nets_take_dictionaries_images_of_integers_and_shifted_actions():
    spec = {'board': TensorSpec((3, 3)), 'to_play': TensorSpec((), torch.int8)}
    encode = create_simple_encoding_net(spec, latent_size=6)
    assert encode({'board': torch.ones(2, 3, 3), 'to_play': torch.tensor([0, 1], dtype=torch.int8)})[0].shape == (2, 6)
    dynamics = create_simple_dynamics_net((TensorSpec((6, )), DISCRETE))
    latent = torch.randn(2, 6)
    results = [dynamics((latent, torch.full((2, ), action)))[0] for action in (1, 4)]
    assert results[0].shape == (2, 6) and not torch.equal(*results)


# The loss of representations --------------------------------------------------------------------------------------


def test_similarity_matches_its_formula_without_target_gradient():
    torch.manual_seed(0)
    project, predict = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)
    loss = AsymmetricSimSiamLoss(project, predict)
    pred, target = torch.randn(5, 2, 4, requires_grad=True), torch.randn(5, 2, 4, requires_grad=True)
    found = loss(pred, target).loss
    for b in range(5):
        for t in range(2):
            x, y = predict(project(pred[b, t])), project(target[b, t])
            torch.testing.assert_close(found[b, t], -x @ y / x.norm() / y.norm())
    found.sum().backward()
    assert target.grad is None and pred.grad.abs().sum() > 0
    same = AsymmetricSimSiamLoss(torch.nn.Identity(), torch.nn.Identity())
    torch.testing.assert_close(same(pred, pred).loss, -torch.ones(5, 2))


def test_similarity_makes_its_networks_by_size():
    loss = AsymmetricSimSiamLoss(input_size=6, proj_last_use_bn=True, lr=1e-3)
    assert loss(torch.randn(8, 3, 2, 3), torch.randn(8, 3, 2, 3)).loss.shape == (8, 3)
    assert all(p.opt_args == {'lr': 1e-3} for p in loss.parameters())
    with pytest.raises(ValueError, match='proj_net or input_size'):
        AsymmetricSimSiamLoss()
    with pytest.raises(ValueError, match='fix the norms'):
        AsymmetricSimSiamLoss(input_size=6, fixed_weight_norm=True)


def test_square_loss_is_the_default():
    assert isinstance(plain_model()._value_loss, SquareLoss)


@pytest.mark.parametrize('options', [dict(initial_alpha=0.1), dict(target_entropy=0.5)])
def test_the_entropy_of_a_policy_that_is_not_trained_is_rejected(options):
    with pytest.raises(ValueError, match='have no effect with train_policy=False'):
        plain_model(train_policy=False, **options)


def test_the_entropy_of_any_policy_has_an_unbiased_gradient():
    """Train the spread of a mixture, which has no closed form and no rsample, on its entropy alone."""
    torch.manual_seed(0)
    log_std = torch.zeros(4000, 2, requires_grad=True)
    mixture = td.MixtureSameFamily(td.Categorical(logits=torch.zeros(4000, 2)),
                                   td.Normal(torch.zeros(4000, 2), log_std.exp()))
    entropy = SimpleMCTSModel._policy_entropy(mixture)
    assert entropy.mean().item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e), abs=0.05)
    entropy.mean().backward()
    assert log_std.grad.sum().item() == pytest.approx(1.0, abs=0.15)  # the entropy of N(0, s) is log(s) + a constant
