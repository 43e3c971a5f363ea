"""SARSA and multi-dimensional Q-learning find the best actions, and their values, of a tiny environment.

The reward of action a at signal s is ``1 - |a - s / 2|``. Without a future (gamma = 0) that is the value.
"""
from functools import partial

import pytest
import torch
from helpers.deterministic_agents import make_agent

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.mdq_algorithm import MdqAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sarsa_algorithm import SarsaAlgorithm
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks.action_quantizer import ActionQuantizer
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.mdq_critic_networks import MdqCriticNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.optimizers import Adam

no_future = partial(OneStepTDLoss, gamma=0.0)
SIGNALS = torch.tensor([[-1.0], [1.0]])


def greedy_actions(agent, env):
    """Return the actions at both signals, ``[2, 1]``."""
    time_step = env.reset()
    time_step = time_step._replace(observation=SIGNALS.repeat(env.batch_size // 2, 1))
    with torch.no_grad(), context.eval_context():
        return agent.predict_step(time_step, agent.get_initial_predict_state(env.batch_size)).output[:2]


@pytest.mark.parametrize('kind,on_policy', [('deterministic', False), ('stochastic', False), ('stochastic', True)])
def test_sarsa_takes_the_best_action_and_learns_its_value(kind, on_policy):
    args = dict(ou_stddev=0.5, ou_damping=1.0)
    if kind == 'stochastic':
        head = partial(NormalProjectionNetwork, state_dependent_std=True, scale_distribution=True)
        args = dict(actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(32, ),
                                               continuous_projection_net_ctor=head),
                    initial_alpha=0.05, target_entropy=-1.0)
    agent, env = make_agent(partial(SarsaAlgorithm, on_policy=on_policy), hidden=(32, 32), batch_size=16,
                            mini_batch_size=64, updates=4, initial_collect_steps=0 if on_policy else 200,
                            critic_loss_cls=no_future, **args)
    for _ in range(250 if on_policy else 100):
        agent.train_iter()
    actions = greedy_actions(agent, env)
    torch.testing.assert_close(actions, SIGNALS / 2, rtol=0, atol=0.2)
    values = agent.policy.critics((SIGNALS, SIGNALS / 2))[0]
    torch.testing.assert_close(values, torch.ones(2, 2), rtol=0, atol=0.2)


def test_mdq_takes_the_best_action_and_both_forms_learn_its_value():
    torch.manual_seed(0)
    context.reset()
    env = PolicyUnittestEnv(16, episode_length=5, action_type=ActionType.Continuous)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=64, mini_batch_length=2,
                           num_updates_per_train_iter=4, whole_replay_buffer_training=False, clear_replay_buffer=False,
                           replay_buffer_length=200)
    critic = partial(MdqCriticNetwork, action_qt=partial(ActionQuantizer, action_bins=9),
                     pre_encoding_layer_params=(32, ), free_form_fc_layer_params=(32, 32))
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=partial(MdqAlgorithm, critic_network=critic, critic_loss_ctor=no_future,
                                           initial_log_alpha=-2.0), optimizer=Adam(lr=1e-2))
    agent.set_path('')
    agent.finalize()
    for _ in range(60):
        agent.train_iter()
    torch.testing.assert_close(greedy_actions(agent, env), SIGNALS / 2)  # these are among the bins
    rl = agent.policy
    free_form = rl._critic_network((SIGNALS, SIGNALS / 2))[0]
    torch.testing.assert_close(free_form, torch.ones(2, 2), rtol=0, atol=0.15)
    advantage_form = rl._critic_network.advantage_form(SIGNALS, SIGNALS / 2, rl._log_alpha.exp())
    torch.testing.assert_close(advantage_form, torch.ones(2), rtol=0, atol=0.15)
