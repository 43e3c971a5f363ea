"""Small DQN agents, and others with the same replay buffer, for tests of replayed and compiled updates."""
from functools import partial

import torch

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import Adam


class Fixed(DqnAlgorithm):
    """A DQN whose loss can be corrupted."""

    own_capabilities = DqnAlgorithm.own_capabilities

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer('factor', torch.ones(()))

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss * self.factor,
                                  extra=loss_info.extra._replace(critic=loss_info.extra.critic * self.factor))


def sac(algorithm_cls=SacAlgorithm, **kwargs):
    """Return a constructor of small SAC algorithms, for ``rl``."""
    return partial(algorithm_cls, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                   critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(8, )), calculate_priority=True,
                   **kwargs)


def make_agent(compile=False, optimizer=None, algorithm_cls=DqnAlgorithm, rl=None, action_type=ActionType.Discrete,
               priority_replay=True, agent_cls=Agent, **config):
    """Return an agent in an environment, ready to train: a DQN of class ``algorithm_cls``, or the result of ``rl``."""
    torch.manual_seed(0)
    context.reset()
    env = PolicyUnittestEnv(batch_size=4, episode_length=5, action_type=action_type)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8,
                           num_updates_per_train_iter=3, whole_replay_buffer_training=False, clear_replay_buffer=False,
                           replay_buffer_length=100, priority_replay=priority_replay, compile=compile,
                           **{'mini_batch_length': 2, **config})
    rl = rl or partial(algorithm_cls, q_network_cls=partial(QNetwork, fc_layer_params=(8, )), calculate_priority=True)
    agent = agent_cls(env.observation_spec(), env.action_spec(), env=env, config=config, rl_algorithm_cls=rl,
                      optimizer=optimizer or Adam(lr=1e-2, gradient_clipping=0.1, clip_by_global_norm=True))
    agent.finalize()
    return agent


def train(agents, iterations, between=lambda agent: None):
    """Train each agent for some iterations, with the same random numbers."""
    for agent in agents:
        torch.manual_seed(1)
        context.reset()
        for _ in range(iterations):
            agent.train_iter()
            between(agent)


def assert_same_parameters(agents, atol=1e-5, rtol=1e-4):
    """Assert that the first two agents have the same parameters; bit for bit with ``atol=rtol=0``."""
    for (name, a), (_, b) in zip(agents[0].named_parameters(), agents[1].named_parameters()):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, msg=name)
