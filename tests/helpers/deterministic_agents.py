"""Agents with deterministic policies in tiny environments, for the tests of DDPG and TD3.

Other algorithms for continuous actions work as well, with the names of their ``networks``.
"""
from functools import partial

import torch

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv, RNNPolicyUnittestEnv, UnittestEnv
from alfx.nest.utils import NestConcat
from alfx.networks.actor_networks import ActorNetwork, ActorRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticRNNNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec


class NestedActionEnv(UnittestEnv):
    """Two actions with different bounds: ``first`` (2,) in [-1, 3], ``second`` (1,) in [0, 1].

    The reward is 1 at the middle of their ranges, 0 at the bounds: the mean of ``1 - |a - middle| / half``.
    """

    def action_spec(self):
        return {'first': BoundedTensorSpec((2, ), torch.float32, -1, 3),
                'second': BoundedTensorSpec((1, ), torch.float32, 0, 1)}

    def _reward(self, action, t):
        first = (1 - (action['first'] - 1).abs() / 2).mean(-1)
        return 0.5 * (first + 1 - (action['second'][:, 0] - 0.5).abs() / 0.5)


continuous = dict(episode_length=5, action_type=ActionType.Continuous)
ENVIRONMENTS = {
    'continuous': partial(PolicyUnittestEnv, **continuous),
    'nested action': partial(NestedActionEnv, episode_length=5),
    'vector reward': partial(PolicyUnittestEnv, reward_dim=3, **continuous),
    'recurrent': partial(RNNPolicyUnittestEnv, gap=1, **continuous),
}


def make_agent(algorithm_cls, environment='continuous', batch_size=4, seed=0, optimizer=None, hidden=(16, ),
               mini_batch_size=8, mini_batch_length=2, unroll_length=4, initial_collect_steps=0,
               priority_replay=False, updates=2, use_rollout_state=None, policy_loss_addons=(), compile=False,
               num_ray_workers=0, networks=('actor_network_ctor', 'critic_network_ctor'), **algorithm_args):
    """Return an agent in an environment, ready to train."""
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    recurrent = environment == 'recurrent'
    config = TrainerConfig(
        root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, mini_batch_size=mini_batch_size,
        mini_batch_length=mini_batch_length, num_updates_per_train_iter=updates, whole_replay_buffer_training=False,
        clear_replay_buffer=False, replay_buffer_length=200, initial_collect_steps=initial_collect_steps,
        priority_replay=priority_replay,
        use_rollout_state=recurrent if use_rollout_state is None else use_rollout_state, compile=compile,
        num_ray_workers=num_ray_workers)
    actor, critic = (ActorRNNNetwork, CriticRNNNetwork) if recurrent else (ActorNetwork, CriticNetwork)
    memory = dict(lstm_hidden_size=(8, )) if recurrent else {}
    combiner = NestConcat() if environment == 'nested action' else None
    algorithm_args.setdefault(networks[0], partial(actor, fc_layer_params=hidden, **memory))
    algorithm_args.setdefault(networks[1], partial(
        critic, joint_fc_layer_params=hidden, action_preprocessing_combiner=combiner, **memory))
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=partial(algorithm_cls, **algorithm_args), optimizer=optimizer or Adam(lr=1e-2),
                  policy_loss_addons=policy_loss_addons)
    agent.set_path('')
    agent.finalize()
    return agent, env
