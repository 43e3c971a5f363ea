"""The losses of actor-critic and PPO against loops written from the formulas."""
import math

import pytest
import torch

from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm, ActorCriticInfo
from alfx.algorithms.actor_critic_loss import ActorCriticLoss, normalize_advantages
from alfx.algorithms.ppo_algorithm import PPOInfo
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.data_structures import StepType, TimeStep
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.dist_utils import Categorical

F, M, L = StepType.FIRST, StepType.MID, StepType.LAST


def random_info(length=7, batch=3, seed=0):
    """Return infos with episodes that terminate, are truncated, and start in the middle."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.full((length, batch), M, dtype=torch.int32)
    step_type[2, 0], step_type[3, 0] = L, F
    step_type[4, 1], step_type[5, 1] = L, F
    discount = torch.ones(length, batch)
    discount[2, 0] = 0.  # terminated; the episode of environment 1 was truncated
    reward = torch.randn(length, batch, generator=generator)
    reward[step_type == F] = 0.
    logits = torch.randn(length, batch, 4, generator=generator, requires_grad=True)
    value = torch.randn(length, batch, generator=generator, requires_grad=True)
    action = torch.randint(4, (length, batch), generator=generator)
    return ActorCriticInfo(step_type=step_type, discount=discount, reward=reward, action=action,
                           action_distribution=Categorical(logits=logits), value=value), logits


def slow_gae(info, gamma, td_lambda):
    length, batch = info.value.shape
    advantages = [[0.] * batch for _ in range(length)]
    for b in range(batch):
        for t in reversed(range(length - 1)):
            if info.step_type[t, b] == L:
                continue
            d = gamma * info.discount[t + 1, b].item()
            delta = info.reward[t + 1, b].item() + d * info.value[t + 1, b].item() - info.value[t, b].item()
            advantages[t][b] = delta + d * td_lambda * advantages[t + 1][b]
    return torch.tensor(advantages)


def slow_return(info, gamma):
    length, batch = info.value.shape
    returns = info.value.detach().clone()
    for b in range(batch):
        for t in reversed(range(length - 1)):
            if info.step_type[t, b] == L:
                continue
            returns[t, b] = info.reward[t + 1, b] + gamma * info.discount[t + 1, b] * returns[t + 1, b]
    return returns


def log_softmax(logits, t, b, a):
    return logits[t, b, a].item() - math.log(sum(math.exp(x) for x in logits[t, b].tolist()))


@pytest.mark.parametrize('use_gae, use_td_lambda_return', [(True, True), (True, False), (False, True)])
def test_actor_critic_loss_equals_a_slow_loop(use_gae, use_td_lambda_return):
    gamma, td_lambda = 0.9, 0.7
    info, logits = random_info()
    loss = ActorCriticLoss(gamma=gamma, use_gae=use_gae, td_lambda=td_lambda, td_loss_weight=0.5,
                           use_td_lambda_return=use_td_lambda_return, entropy_regularization=0.01)(info).loss
    returns, gae = slow_return(info, gamma), slow_gae(info, gamma, td_lambda)
    advantage = gae if use_gae else returns - info.value.detach()
    target = gae + info.value.detach() if use_gae and use_td_lambda_return else returns
    for t in range(info.value.shape[0]):
        for b in range(info.value.shape[1]):
            if info.step_type[t, b] == L:
                continue  # masked by the caller
            entropy = -sum(math.exp(lp) * lp for lp in (log_softmax(logits, t, b, a) for a in range(4)))
            expected = (-advantage[t, b].item() * log_softmax(logits, t, b, info.action[t, b].item())
                        + 0.5 * (target[t, b] - info.value[t, b]).item()**2 - 0.01 * entropy)
            assert loss[t, b].item() == pytest.approx(expected, abs=1e-5)


def test_a_hand_computed_two_step_loss():
    # V = (1, 2), r[1] = 3, gamma = 0.5: A[0] = 3 + 0.5 * 2 - 1 = 3; uniform policy over 2: log pi = -log 2.
    # loss[0] = 3 log 2 + (4 - 1)^2 = 2.07944 + 9
    info = ActorCriticInfo(step_type=torch.tensor([[F], [M]], dtype=torch.int32), discount=torch.ones(2, 1),
                           reward=torch.tensor([[0.], [3.]]), action=torch.zeros(2, 1, dtype=torch.int64),
                           action_distribution=Categorical(logits=torch.zeros(2, 1, 2)),
                           value=torch.tensor([[1.], [2.]]))
    loss = ActorCriticLoss(gamma=0.5)(info).loss
    assert loss[0, 0].item() == pytest.approx(3 * math.log(2) + 9, abs=1e-5)
    assert loss[1, 0].item() == pytest.approx(0, abs=1e-6), 'the last step is only used to bootstrap'


def test_lambda_one_is_the_return_minus_the_value():
    info, _ = random_info()
    with_gae = ActorCriticLoss(gamma=0.9, use_gae=True, td_lambda=1.0)(info)
    without = ActorCriticLoss(gamma=0.9, use_gae=False)(info)
    valid = info.step_type != L
    torch.testing.assert_close(with_gae.loss[valid], without.loss[valid])


def test_truncation_bootstraps_and_termination_does_not():
    value = torch.tensor([[1.], [10.], [0.]])
    def advantage(discount_at_last):
        info = ActorCriticInfo(step_type=torch.tensor([[M], [L], [F]], dtype=torch.int32),
                               discount=torch.tensor([[1.], [discount_at_last], [1.]]),
                               reward=torch.tensor([[0.], [2.], [0.]]), value=value)
        return ActorCriticLoss(gamma=0.5, use_gae=True).calc_returns_and_advantages(info)[1][:, 0].tolist()
    assert advantage(1.) == pytest.approx([2 + 0.5 * 10 - 1, 0, 0])
    assert advantage(0.) == pytest.approx([2 - 1, 0, 0])


def test_advantages_are_normalized_over_valid_steps_only():
    advantages = torch.tensor([[1., 100.], [3., 5.]])
    valid = torch.tensor([[1., 0.], [1., 1.]])
    result = normalize_advantages(advantages, valid)
    chosen = result[valid.bool()]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-6)
    assert chosen.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    assert result[0, 1] == 0


def test_ppo_loss_equals_a_slow_loop():
    info, logits = random_info(seed=1)
    rollout_log_prob = torch.randn(info.value.shape) * 0.3 - 1.4
    advantages, returns = torch.randn(info.value.shape), torch.randn(info.value.shape)
    ppo_info = PPOInfo(step_type=info.step_type, discount=info.discount, reward=info.reward, action=info.action,
                       rollout_log_prob=rollout_log_prob, returns=returns, advantages=advantages,
                       action_distribution=info.action_distribution, value=info.value)
    loss = PPOLoss(normalize_advantages=False, importance_ratio_clipping=0.2, td_loss_weight=0.5,
                   entropy_regularization=0.01)(ppo_info).loss
    for t in range(info.value.shape[0]):
        for b in range(info.value.shape[1]):
            ratio = math.exp(log_softmax(logits, t, b, info.action[t, b].item()) - rollout_log_prob[t, b].item())
            clipped = min(max(ratio, 0.8), 1.2)
            advantage = advantages[t, b].item()
            entropy = -sum(math.exp(lp) * lp for lp in (log_softmax(logits, t, b, a) for a in range(4)))
            expected = (-min(ratio * advantage, clipped * advantage)
                        + 0.5 * (returns[t, b] - info.value[t, b]).item()**2 - 0.01 * entropy)
            assert loss[t, b].item() == pytest.approx(expected, abs=1e-5)


def test_ppo_has_no_gradient_where_the_ratio_is_clipped():
    # ratio = exp(log 0.5 - log 0.25) = 2 > 1.2 with a positive advantage: clipped, hence flat.
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    info = PPOInfo(step_type=torch.full((1, 1), M, dtype=torch.int32), action=torch.zeros(1, 1, dtype=torch.int64),
                   rollout_log_prob=torch.full((1, 1), math.log(0.25)), returns=torch.zeros(1, 1),
                   advantages=torch.ones(1, 1), action_distribution=Categorical(logits=logits),
                   value=torch.zeros(1, 1))
    loss = PPOLoss(normalize_advantages=False)(info).loss.sum()
    assert loss.item() == pytest.approx(-1.2)
    assert torch.autograd.grad(loss, logits)[0].abs().max() == 0


def test_multi_dimensional_rewards_are_weighted_for_the_policy_only():
    info, _ = random_info()
    double = info._replace(reward=torch.stack([info.reward, info.reward], -1),
                           value=torch.stack([info.value, info.value], -1),
                           reward_weights=torch.tensor([0.25, 0.75]).expand(*info.reward.shape, 2))
    single_loss = ActorCriticLoss(gamma=0.9, use_gae=True)(info)
    double_loss = ActorCriticLoss(gamma=[0.9, 0.9], use_gae=True)(double)
    torch.testing.assert_close(double_loss.loss, single_loss.loss)


def test_a_list_of_discounts_needs_a_reward_vector_of_that_size():
    info, _ = random_info(batch=2)
    with pytest.raises(ValueError, match=r'gamma is a list of 2, but the value has shape \(7, 2\)'):
        ActorCriticLoss(gamma=[0.9, 0.0])(info)


@pytest.mark.parametrize('separate', [False, True])
def test_rewards_are_normalized_and_clipped_together_or_separately(separate):
    # Of valid steps 0 and 1 (step 2 is only used to bootstrap) the advantages are r[t+1] = (1, 3) and (30, 10), which
    # are (-1, 1) and (1, -1) when normalized, (-0.5, 0.5) and (0.5, -0.5) when clipped. Together they are
    # 0.75 * (1, 3) + 0.25 * (30, 10) = (8.25, 4.75), of which (0.5, -0.5) is left.
    zeros = torch.zeros(3, 1)
    info = ActorCriticInfo(step_type=torch.full((3, 1), M, dtype=torch.int32), discount=zeros,
                           reward=torch.tensor([[[0., 0.]], [[1., 30.]], [[3., 10.]]]), value=torch.zeros(3, 1, 2),
                           reward_weights=torch.tensor([0.75, 0.25]).expand(3, 1, 2), action=zeros.long(),
                           action_distribution=Categorical(logits=torch.zeros(3, 1, 2)))
    loss = ActorCriticLoss(use_gae=True, normalize_advantages=True, advantage_clip=0.5, separate_rewards=separate)
    expected = [-0.25, 0.25] if separate else [0.5, -0.5]
    found = loss(info).extra.pg_loss[:2, 0] / math.log(2)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_single_reward_has_no_separate_normalization():
    info, _ = random_info()
    args = dict(use_gae=True, normalize_advantages=True, advantage_clip=1.0)
    torch.testing.assert_close(ActorCriticLoss(**args)(info).loss,
                               ActorCriticLoss(**args, separate_rewards=True)(info).loss)


@pytest.mark.parametrize('bad', [dict(td_lambda=1.5), dict(td_lambda=-0.1)])
def test_lambda_outside_the_unit_interval_is_rejected(bad):
    with pytest.raises(ValueError, match=r'td_lambda must be a number in \[0, 1\]'):
        ActorCriticLoss(**bad)


def ppo_info(info, **fields):
    return PPOInfo(step_type=info.step_type, discount=info.discount, reward=info.reward, action=info.action,
                   action_distribution=info.action_distribution, value=info.value, **fields)


def test_ppo_returns_are_generalized_advantages_plus_values():
    """The targets of PPO's values are lambda-returns, not Monte-Carlo returns."""
    info, _ = random_info(seed=2)
    returns, advantages = PPOLoss(gamma=0.9, td_lambda=0.7).calc_rollout_returns_and_advantages(ppo_info(info))
    expected = slow_gae(info, 0.9, 0.7)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + info.value.detach())


def test_ppo_advantages_from_minibatches_match_those_of_the_unroll():
    info, _ = random_info(seed=3)
    rollout_log_prob = info.action_distribution.log_prob(info.action).detach() + 0.1
    arguments = dict(gamma=0.9, td_lambda=0.7, normalize_advantages=False)
    inside = PPOLoss(compute_advantages_internally=True, **arguments)(
        ppo_info(info, rollout_log_prob=rollout_log_prob))
    expected = slow_gae(info, 0.9, 0.7)
    actual = PPOLoss(**arguments)(ppo_info(info, rollout_log_prob=rollout_log_prob, advantages=expected,
                                           returns=expected + info.value.detach()))
    torch.testing.assert_close(inside.loss[:-1], actual.loss[:-1])


@pytest.mark.parametrize('check', [False, True])
def test_ppo_checks_for_nan_only_on_request_and_then_eagerly(check):
    info, _ = random_info(seed=1)
    advantages = torch.ones(info.value.shape)
    advantages[1, 1] = math.nan
    loss = PPOLoss(normalize_advantages=False, check_numerics=check)
    info = ppo_info(info, rollout_log_prob=torch.zeros(advantages.shape), returns=advantages, advantages=advantages)
    assert loss.own_capabilities().traceable_update == (not check)
    if check:
        with pytest.raises(FloatingPointError, match='the policy loss is not finite'):
            loss(info)
        assert loss(info._replace(advantages=torch.ones_like(advantages))).extra.pg_loss.isfinite().all()
    else:
        assert loss(info).loss.isnan().sum() == 1


def test_the_weight_of_a_reward_vector_of_one_component_is_used():
    algorithm = ActorCriticAlgorithm(TensorSpec((3, )), BoundedTensorSpec((2, ), minimum=-1.0, maximum=1.0),
                                     reward_spec=TensorSpec((1, )), reward_weights=[-1.0])
    weights = algorithm._batched_reward_weights(TimeStep(reward=torch.zeros(4, 1)))
    assert torch.equal(weights, -torch.ones(4, 1))
