"""Agents in tiny environments."""
from functools import partial

import torch

from alfx import context
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.impala_algorithm import ImpalaAlgorithm
from alfx.algorithms.ppg_algorithm import PPGAlgorithm, PPGAuxOptions
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.vtrace_loss import VTraceLoss
from alfx.environments.suite_unittest import (ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv,
                                              RNNPolicyUnittestEnv)
from alfx.layers import Cast, OneHot, Scale, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.optimizers import Adam

ENVIRONMENTS = {
    'discrete': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Discrete),
    'continuous': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
    'mixed': partial(MixedPolicyUnittestEnv, episode_length=5),
    'recurrent': partial(RNNPolicyUnittestEnv, episode_length=5, gap=2),
    'nested observation': partial(PolicyUnittestEnv, episode_length=5, nested_observation=True),
    'vector reward': partial(PolicyUnittestEnv, episode_length=5, reward_dim=3),
}


def ppg(actor_network_ctor, value_network_ctor, **kwargs):
    """PPG with the encoder of a value network."""
    encoder = LSTMEncodingNetwork if value_network_ctor.func is ValueRNNNetwork else EncodingNetwork
    arguments = dict(value_network_ctor.keywords)
    if 'lstm_hidden_size' in arguments:
        arguments['hidden_size'] = arguments.pop('lstm_hidden_size')
        arguments['pre_fc_layer_params'] = arguments.pop('fc_layer_params')
    return PPGAlgorithm(encoding_network_ctor=partial(encoder, **arguments), **kwargs)


ALGORITHMS = {
    'actor-critic': partial(ActorCriticAlgorithm, loss_class=partial(ActorCriticLoss, entropy_regularization=0.01)),
    'ppo': partial(PPOAlgorithm, loss_class=partial(PPOLoss, entropy_regularization=0.01)),
    'ppg': partial(ppg, loss_class=partial(PPOLoss, entropy_regularization=0.01),
                   aux_options=PPGAuxOptions(interval=2, mini_batch_length=2, num_updates_per_train_iter=2)),
    'impala': partial(ImpalaAlgorithm, loss_class=partial(VTraceLoss, entropy_regularization=0.01)),
}


def make_agent(algorithm, environment, batch_size=4, unroll_length=6, seed=0, data_transformer=None,
               learning_rate=1e-2, mini_batch_size=8, mini_batch_length=None, use_rollout_state=None, config_args=None,
               **agent_args):
    """Return an agent in an environment, ready to train; ``config_args``: more settings of its `TrainerConfig`."""
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    recurrent = environment == 'recurrent'
    if mini_batch_length is None and algorithm != 'impala':  # which sees as far as its sequences
        mini_batch_length = 2 if recurrent else 1
    settings = dict(unroll_length=unroll_length, mini_batch_size=mini_batch_size, mini_batch_length=mini_batch_length,
                    num_updates_per_train_iter=2,
                    use_rollout_state=recurrent if use_rollout_state is None else use_rollout_state)
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, **settings | (config_args or {}))
    if data_transformer is not None:
        config.data_transformer = data_transformer(env)
    encoder = dict(fc_layer_params=(16, ))
    if isinstance(env.observation_spec(), (dict, tuple, list)):
        encoder['input_preprocessors'] = {'signal': None, 'noise': (Sequential(Cast(), Scale(1 / 255)), OneHot(5))}
        encoder['preprocessing_combiner'] = NestConcat()
    actor, value = ((ActorDistributionRNNNetwork, ValueRNNNetwork) if recurrent else
                    (ActorDistributionNetwork, ValueNetwork))
    if recurrent:
        encoder['lstm_hidden_size'] = (8, )
    rl = partial(ALGORITHMS[algorithm], actor_network_ctor=partial(actor, **encoder),
                 value_network_ctor=partial(value, **encoder))
    agent_args.setdefault('rl_algorithm_cls', rl)
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  optimizer=Adam(lr=learning_rate), **agent_args)
    agent.set_path('')
    agent.finalize()
    return agent, env
