"""DDPG and TD3 reach the optimal return, known in closed form, of tiny environments."""
import copy
from functools import partial

import pytest
import torch
from helpers.deterministic_agents import make_agent
from helpers.learning import trains_until

from alfx import context
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.optimizers import Adam

ALGORITHMS = {'ddpg': partial(DdpgAlgorithm, target_update_tau=0.05), 'td3': partial(Td3Algorithm,
                                                                                     target_update_tau=0.05)}


def greedy_return(agent, env, episodes=2):
    """Return the mean undiscounted return of complete episodes of 5 steps, of which 4 are rewarded."""
    total = torch.zeros(env.batch_size)
    time_step = env.reset()
    with torch.no_grad(), context.eval_context():
        for t in range(1, 5 * episodes):
            if t % 5 == 1:
                state = agent.get_initial_predict_state(env.batch_size)
            step = agent.predict_step(time_step, state)
            time_step, state = env.step(step.output), step.state
            total += time_step.reward if time_step.reward.ndim == 1 else time_step.reward[:, 0]
    return total.mean().item() / episodes


# optimal returns; a policy that ignores or forgets the signal gets half of it
CASES = {('ddpg', 'continuous'): 4.0, ('ddpg', 'vector reward'): 4.0, ('td3', 'nested action'): 4.0,
         ('td3', 'continuous'): 4.0, ('td3', 'recurrent'): 3.0}


@pytest.mark.parametrize('algorithm,environment', list(CASES))
def test_the_greedy_policy_is_nearly_optimal(algorithm, environment):
    args = dict(mini_batch_size=64, updates=4, hidden=(32, 32), actor_optimizer=Adam(lr=1e-3))
    if environment == 'recurrent':
        args = dict(mini_batch_size=32, mini_batch_length=5, updates=2, actor_optimizer=Adam(lr=3e-3))
    agent, env = make_agent(ALGORITHMS[algorithm], environment, batch_size=16, unroll_length=5,
                            initial_collect_steps=200, rollout_random_action=0.5, critic_optimizer=Adam(lr=4e-3),
                            critic_loss_ctor=partial(OneStepTDLoss, gamma=0.9), **args)
    optimal = (0.7 if environment == 'recurrent' else 0.8) * CASES[algorithm, environment]
    evaluation_env = copy.deepcopy(env)
    assert trains_until(lambda: greedy_return(agent, evaluation_env) >= optimal, agent.train_iter,
                        240 if environment == 'recurrent' else 120, interval=20)
