"""Every algorithm reaches the optimal value, known in closed form, of every tiny environment."""
import pytest
import torch
from helpers.agents import ALGORITHMS, ENVIRONMENTS, make_agent
from helpers.learning import trains_until

from alfx import context
from alfx.environments.suite_unittest import ValueUnittestEnv

# undiscounted return of an episode of 5 steps, 4 of which are rewarded; 2 in the environment that requires memory
OPTIMAL = {'discrete': 4.0, 'continuous': 4.0, 'mixed': 4.0, 'nested observation': 4.0, 'recurrent': 2.0}
ITERATIONS = {('recurrent', 'actor-critic'): 300, ('recurrent', 'impala'): 300}


def greedy_return(agent, env, episodes=2):
    """Return the mean undiscounted return of complete episodes of 5 steps, with all environments in lockstep."""
    total = torch.zeros(env.batch_size)
    time_step = env.reset()
    state = agent.get_initial_predict_state(env.batch_size)
    with torch.no_grad(), context.eval_context():
        for t in range(1, 5 * episodes):
            if t % 5 == 1:
                state = agent.get_initial_predict_state(env.batch_size)
            step = agent.predict_step(time_step, state)
            time_step, state = env.step(step.output), step.state
            total += time_step.reward
    return total.mean().item() / episodes


@pytest.mark.parametrize('environment', list(OPTIMAL))
@pytest.mark.parametrize('algorithm', list(ALGORITHMS))
def test_the_greedy_policy_is_optimal(algorithm, environment):
    agent, env = make_agent(algorithm, environment, batch_size=16, unroll_length=10, learning_rate=1e-2,
                            mini_batch_size=80)
    # A policy that ignores the signal gets at most half of the optimum. The mean of a continuous action keeps drifting.
    share = 0.85 if environment in ('continuous', 'mixed') else 0.97
    evaluation_env = ENVIRONMENTS[environment](batch_size=16)
    assert trains_until(lambda: greedy_return(agent, evaluation_env) >= share * OPTIMAL[environment], agent.train_iter,
                        ITERATIONS.get((environment, algorithm), 150))


@pytest.mark.parametrize('algorithm', list(ALGORITHMS))
def test_the_value_of_certain_rewards_is_learned(algorithm, monkeypatch):
    # Each of the next 4 steps has a reward of 1. The observation is noise, so that the best estimate is the mean
    # over the 4 steps that have a successor: with gamma = 0.99, S(k) = 1 + g + ... + g^(k-1) is 1, 1.99, 2.9701,
    # 3.940399, whose mean is 2.4751. If terminal values were bootstrapped from, the estimate would be near 100.
    from helpers import agents
    monkeypatch.setitem(agents.ENVIRONMENTS, 'value', lambda batch_size: ValueUnittestEnv(batch_size, 5))
    agent, env = make_agent(algorithm, 'value', batch_size=16, unroll_length=10, learning_rate=1e-2, mini_batch_size=80)
    for _ in range(150):
        agent.train_iter()
    value, _ = agent.policy._value_network(env.current_time_step().observation)
    assert value.mean().item() == pytest.approx(2.4751, abs=0.35)
