"""Agents whose policies see ``[observation, goal]``, for tests of goals and skills."""
from functools import partial

import torch
from helpers.agents import ALGORITHMS
from helpers.sac_agents import ENVIRONMENTS, squashed_normal

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.optimizers import Adam

ENCODER = dict(preprocessing_combiner=NestConcat(), fc_layer_params=(16, ))


def combined_networks(algorithm, recurrent=False):
    """Return the ``rl_algorithm_cls`` of an agent with goals: 'actor-critic' or 'ppo'."""
    actor, value = ((ActorDistributionRNNNetwork, ValueRNNNetwork) if recurrent else
                    (ActorDistributionNetwork, ValueNetwork))
    encoder = {**ENCODER, 'lstm_hidden_size': (8, )} if recurrent else ENCODER
    return partial(ALGORITHMS[algorithm], actor_network_ctor=partial(actor, **encoder),
                   value_network_ctor=partial(value, **encoder))


def make_sac_agent(batch_size=4, seed=0, **agent_args):
    """Return an agent with SAC on continuous actions, ready to train."""
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS['continuous'](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8, mini_batch_length=2,
                           num_updates_per_train_iter=2, whole_replay_buffer_training=False, clear_replay_buffer=False,
                           replay_buffer_length=100, **agent_args.pop('config_args', {}))
    rl = partial(SacAlgorithm, actor_network_cls=partial(ActorDistributionNetwork,
                                                         continuous_projection_net_ctor=squashed_normal, **ENCODER),
                 critic_network_cls=partial(CriticNetwork, observation_preprocessing_combiner=NestConcat(),
                                            joint_fc_layer_params=(16, )))
    agent_args.setdefault('optimizer', Adam(lr=1e-2))
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=rl, **agent_args)
    agent.set_path('')
    agent.finalize()
    return agent, env
