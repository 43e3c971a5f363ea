"""The clipped value error of PPO against a slow loop, and schedules of the clipped ratio."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from test_actor_critic_loss import random_info

from alfx.algorithms.ppo_algorithm import PPOAlgorithm, PPOInfo
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork


def info_with(value, old_value, returns):
    info, _ = random_info()
    shape = info.value.shape
    log_prob = info.action_distribution.log_prob(info.action).detach()
    return PPOInfo(step_type=info.step_type, discount=info.discount, reward=info.reward, action=info.action,
                   action_distribution=info.action_distribution, rollout_log_prob=log_prob,
                   rollout_action_distribution=info.action_distribution, returns=returns,
                   advantages=torch.zeros(shape), value=value, old_value=old_value)


def test_the_error_is_the_larger_of_the_clipped_and_unclipped_one():
    generator = torch.Generator().manual_seed(3)
    value, old, returns = (torch.randn(7, 3, generator=generator) for _ in range(3))
    loss = PPOLoss(value_clipping=0.2)(info_with(value, old, returns))
    for t in range(7):
        for b in range(3):
            v, o, r = float(value[t, b]), float(old[t, b]), float(returns[t, b])
            near = min(max(v, o - 0.2), o + 0.2)
            assert float(loss.extra.td_loss[t, b]) == pytest.approx(max((v - r)**2, (near - r)**2), rel=1e-5)
    plain = PPOLoss()(info_with(value, old, returns))
    assert not torch.equal(plain.extra.td_loss, loss.extra.td_loss)


def test_a_value_beyond_the_clipping_range_has_no_gradient():
    value = torch.full((7, 3), 0.9, requires_grad=True)
    loss = PPOLoss(value_clipping=0.2)(info_with(value, torch.zeros(7, 3), torch.ones(7, 3)))
    loss.extra.td_loss.sum().backward()
    assert not value.grad.any()


def test_the_old_value_comes_from_the_unroll():
    agent, _ = make_agent('ppo', 'discrete', rl_algorithm_cls=partial(
        PPOAlgorithm, loss_class=partial(PPOLoss, value_clipping=0.1),
        actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
        value_network_ctor=partial(ValueNetwork, fc_layer_params=(8, ))))
    seen = []
    plain = agent.calc_loss
    agent.calc_loss = lambda info: (seen.append((info.rl.value.detach(), info.rl.old_value)), plain(info))[1]
    agent.train_iter()
    assert torch.allclose(*seen[0]) and not torch.allclose(*seen[-1])


def test_a_clipping_of_zero_is_rejected():
    with pytest.raises(ValueError, match='value_clipping'):
        PPOLoss(value_clipping=0.0)


def test_a_schedule_clips_the_ratio_as_its_current_number_does():
    info, _ = random_info()
    info = info_with(info.value, info.value, torch.zeros(7, 3))
    info = info._replace(advantages=torch.randn(7, 3), rollout_log_prob=info.rollout_log_prob + torch.randn(7, 3))
    clipping = [0.3]
    scheduled = PPOLoss(importance_ratio_clipping=lambda: clipping[0])
    losses = []
    for clipping[0] in (0.3, 0.05):
        scheduled.update_schedules()
        losses.append(scheduled(info).extra.pg_loss)
        assert torch.allclose(losses[-1], PPOLoss(importance_ratio_clipping=clipping[0])(info).extra.pg_loss)
    assert not torch.allclose(*losses)


def test_an_agent_reads_the_schedule_once_per_iteration():
    values = iter([0.5, 0.4, 0.3])
    agent, _ = make_agent('ppo', 'discrete', rl_algorithm_cls=partial(
        PPOAlgorithm, loss_class=partial(PPOLoss, importance_ratio_clipping=lambda: next(values)),
        actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
        value_network_ctor=partial(ValueNetwork, fc_layer_params=(8, ))))
    for expected in (0.5, 0.4, 0.3):
        agent.train_iter()
        assert float(agent._rl_algorithm._loss._importance_ratio_clipping) == pytest.approx(expected)
