"""An intrinsic reward with a separate value function."""
from functools import partial

import pytest
import torch
from helpers import offline_agents
from helpers.agents import make_agent

from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.count_bonus_algorithm import CountBonusAlgorithm
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork

NETWORKS = dict(actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                value_network_ctor=partial(ValueNetwork, fc_layer_params=(8, )))


def make(environment='discrete', rl=None, **arguments):
    rl = rl or partial(PPOAlgorithm, loss_class=partial(PPOLoss, gamma=[0.99, 0.5]), **NETWORKS)
    bonus = partial(CountBonusAlgorithm, counting='grid', grid_size=4)
    return make_agent('ppo', environment, rl_algorithm_cls=rl, intrinsic_reward_module=bonus,
                      intrinsic_reward_as_dimension=True, intrinsic_reward_coef=0.3, extrinsic_reward_coef=2.0,
                      **arguments)[0]


def test_the_intrinsic_dimension_has_its_own_value_and_discount():
    agent, seen = make(), []
    plain = agent.policy.preprocess_experience

    def preprocess(inputs, info, batch_info):
        inputs, info = plain(inputs, info, batch_info)
        seen.append((inputs, info))
        return inputs, info

    agent.policy.preprocess_experience = preprocess
    agent.train_iter()
    inputs, info = seen[0]
    assert inputs.reward.shape[-1] == 2 and info.returns.shape[-1] == 2
    assert (inputs.reward[..., 1] != inputs.reward[..., 0]).any()
    loss = agent.policy._loss
    assert loss.gamma.tolist() == pytest.approx([0.99, 0.5])
    assert agent.policy.reward_weights.tolist() == pytest.approx([2.0, 0.3])


@pytest.mark.parametrize('environment', ['discrete', 'vector reward'])
@pytest.mark.parametrize('on_policy', [False, True])
def test_it_trains_with_any_rewards(environment, on_policy):
    rl = (partial(ActorCriticAlgorithm, loss_class=ActorCriticLoss, **NETWORKS) if on_policy else
          partial(PPOAlgorithm, loss_class=PPOLoss, **NETWORKS))
    agent = make(environment, rl)
    for _ in range(3):
        agent.train_iter()
    assert agent.policy.reward_weights.shape == ((4, ) if environment == 'vector reward' else (2, ))
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_without_an_intrinsic_reward_it_is_rejected():
    with pytest.raises(ConfError, match='True, but there is no intrinsic_reward_module'):
        make_agent('ppo', 'discrete', intrinsic_reward_as_dimension=True)


def test_a_dataset_without_rewards_is_rejected(tmp_path):
    bonus = partial(CountBonusAlgorithm, counting='grid', grid_size=4)
    arguments = dict(intrinsic_reward_module=bonus, intrinsic_reward_as_dimension=True)
    with pytest.raises(ConfError, match='no reward for the steps of a dataset'):
        offline_agents.make_agent('sac', offline_agents.record(tmp_path / 'data'), unroll_length=4,
                                  agent_args=arguments).train_iter()
