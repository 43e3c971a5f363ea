"""Soft actor-critic and its relatives in tiny environments, for their tests."""
import inspect
from functools import partial

import torch
from helpers.deterministic_agents import NestedActionEnv

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import StepType, TimeStep
from alfx.environments.suite_unittest import (ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv,
                                              RNNPolicyUnittestEnv)
from alfx.layers import Cast, OneHot, Scale, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticRNNNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.networks.q_networks import QNetwork, QRNNNetwork
from alfx.optimizers import Adam

continuous = dict(episode_length=5, action_type=ActionType.Continuous)
discrete = dict(episode_length=5, action_type=ActionType.Discrete)
ENVIRONMENTS = {
    'continuous': partial(PolicyUnittestEnv, **continuous),
    'discrete': partial(PolicyUnittestEnv, **discrete),
    'mixed': partial(MixedPolicyUnittestEnv, episode_length=5),
    'nested action': partial(NestedActionEnv, episode_length=5),
    'nested observation': partial(PolicyUnittestEnv, nested_observation=True, **continuous),
    'vector reward': partial(PolicyUnittestEnv, reward_dim=3, **continuous),
    'vector reward, discrete': partial(PolicyUnittestEnv, reward_dim=3, **discrete),
    'vector reward, mixed': partial(MixedPolicyUnittestEnv, episode_length=5, reward_dim=3),
    'recurrent': partial(RNNPolicyUnittestEnv, gap=1, **continuous),
    'recurrent, discrete': partial(RNNPolicyUnittestEnv, gap=1, **discrete),
}
squashed_normal = partial(NormalProjectionNetwork, state_dependent_std=True, scale_distribution=True)


def networks(environment, env, hidden=(16, )):
    """Return the networks of an algorithm as keyword arguments."""
    recurrent = environment.startswith('recurrent')
    actor, critic, q_network = ((ActorDistributionRNNNetwork, CriticRNNNetwork, QRNNNetwork) if recurrent else
                                (ActorDistributionNetwork, CriticNetwork, QNetwork))
    memory = dict(lstm_hidden_size=(8, )) if recurrent else {}
    actor_args, critic_args = dict(fc_layer_params=hidden, **memory), dict(joint_fc_layer_params=hidden, **memory)
    q_args = dict(fc_layer_params=hidden, **memory)
    if isinstance(env.observation_spec(), dict):
        encoder = {'signal': None, 'noise': (Sequential(Cast(), Scale(1 / 255)), OneHot(5))}
        actor_args.update(input_preprocessors=encoder, preprocessing_combiner=NestConcat())
        critic_args.update(observation_input_processors=encoder, observation_preprocessing_combiner=NestConcat())
    if environment == 'nested action':
        critic_args['action_preprocessing_combiner'] = NestConcat()
    if 'mixed' in environment:
        q_args['preprocessing_combiner'] = NestConcat()
    return dict(actor_network_cls=partial(actor, continuous_projection_net_ctor=squashed_normal, **actor_args),
                critic_network_cls=partial(critic, **critic_args), q_network_cls=partial(q_network, **q_args))


def make_agent(environment='continuous', algorithm_cls=SacAlgorithm, batch_size=4, seed=0, mini_batch_size=8,
               mini_batch_length=2, unroll_length=4, updates=2, use_rollout_state=None, config_args=None, hidden=(16, ),
               optimizer=None, agent_args=None, data_transformer=None, **algorithm_args):
    """Return an agent in an environment, ready to train; ``data_transformer`` maps the environment to a transformer."""
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    recurrent = environment.startswith('recurrent')
    config = TrainerConfig(
        root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, mini_batch_size=mini_batch_size,
        mini_batch_length=mini_batch_length, num_updates_per_train_iter=updates, whole_replay_buffer_training=False,
        clear_replay_buffer=False, replay_buffer_length=200,
        use_rollout_state=recurrent if use_rollout_state is None else use_rollout_state, **(config_args or {}))
    if data_transformer is not None:
        config.data_transformer = data_transformer(env)
    arguments = {**networks(environment, env, hidden), **algorithm_args}
    if 'q_network_cls' not in inspect.signature(algorithm_cls).parameters:
        del arguments['q_network_cls']
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=partial(algorithm_cls, **arguments), optimizer=optimizer or Adam(lr=1e-2),
                  **(agent_args or {}))
    agent.set_path('')
    agent.finalize()
    return agent, env


def random_steps(algorithm, length, batch, seed=1):
    """Return actions and time steps ``[T, B]`` with random terminations, truncations and first steps."""
    generator = torch.Generator().manual_seed(seed)

    def like(spec):
        if spec.is_discrete:
            return torch.randint(int(spec.minimum.min()), int(spec.maximum.max()) + 1, (length, batch, *spec.shape),
                                 generator=generator).to(spec.dtype)
        return torch.rand(length, batch, *spec.shape, generator=generator) * 2 - 1

    step_type = torch.randint(0, 3, (length, batch), generator=generator).to(torch.int32)
    is_terminal = (step_type == StepType.LAST) & (torch.rand(length, batch, generator=generator) < 0.5)
    time_step = TimeStep(step_type=step_type, reward=like(algorithm._reward_spec), discount=1.0 - is_terminal.float(),
                         observation=nest.map_structure(like, algorithm.observation_spec),
                         prev_action=nest.map_structure(like, algorithm.action_spec))
    return time_step, nest.map_structure(like, algorithm.action_spec)
