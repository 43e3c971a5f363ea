"""Common faults of training code: data that must not reach a loss, a statistic or the replay buffer."""
import numpy as np
import pytest
import torch
from helpers.agents import make_agent

from alfx import nest
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardScaling
from alfx.data_structures import StepType
from alfx.runs.evaluator import evaluate

every_algorithm = pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])


def tensors(agent):
    return {k: v.clone() for k, v in agent.state_dict().items() if isinstance(v, torch.Tensor)}


@every_algorithm
def test_the_action_ignored_at_the_end_of_an_episode_is_not_trained_on(algorithm):
    results = []
    for other_action in (False, True):
        agent, env = make_agent(algorithm, 'continuous')
        agent.policy._loss._normalize_advantages = True
        own_step = agent.collect_step

        def collect(inputs, state, own_step=own_step, other_action=other_action):
            step = own_step(inputs, state)
            last = inputs.is_last().unsqueeze(-1) & other_action
            action = torch.where(last, -step.output, step.output)
            info = step.info._replace(rl=step.info.rl._replace(action=action))
            return step._replace(output=action, info=info)

        agent.collect_step = collect
        for _ in range(3):
            agent.train_iter()
        results.append([p.detach().clone() for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize('environment', ['discrete', 'recurrent'])
def test_training_uses_the_rollout_states_across_episode_ends(environment):
    agent, _ = make_agent('ppo', environment, unroll_length=8)  # episodes of 5 steps
    for _ in range(2):  # the second unroll starts in the middle of an episode
        agent.replay_buffer.clear()
        unrolled = agent.unroll(8)
    assert (unrolled.time_step.step_type[1:] == StepType.FIRST).any()
    assert (unrolled.time_step.step_type[0] != StepType.FIRST).all()
    experience = agent.learner.batches.processed(*agent.replay_buffer.gather_all())
    experience = nest.map_structure(lambda x: x.transpose(0, 1), experience)
    info = agent.learner.losses.train_info(experience).rl
    log_prob = info.action_distribution.log_prob(info.action)
    torch.testing.assert_close(log_prob[:-1], info.rollout_log_prob[:-1])  # the last one is only for bootstrapping
    if environment == 'recurrent':
        torch.testing.assert_close(info.value, unrolled.rollout_info.rl.value)


def test_without_stored_states_a_sequence_starts_from_zero_states():
    agent, _ = make_agent('ppo', 'recurrent')
    agent._config.use_rollout_state = False
    seen = []
    step = agent.train_step
    agent.train_step = lambda inputs, state, info: (seen.append((inputs, state)), step(inputs, state, info))[1]
    agent._replay_buffer = None  # created again, without states
    agent.set_replay_buffer(4, 7)
    agent.train_iter()
    for _, state in seen[::2]:  # sequences of 2 steps
        assert all(not x.any() for x in nest.flatten(state))
    for inputs, state in seen[1::2]:
        for x in nest.flatten(state):
            assert not x[inputs.is_first()].any() and x[~inputs.is_first()].any()


@every_algorithm
def test_collected_rewards_never_change(algorithm):
    agent, env = make_agent(algorithm, 'discrete', extrinsic_reward_coef=3.0,
                            data_transformer=lambda env: RewardScaling(0.5, observation_spec=env.observation_spec()))
    rewards = []
    step = env.step

    def remember(action):
        time_step = step(action)
        rewards.append((time_step.reward, time_step.reward.clone()))
        return time_step

    env.step = remember
    for _ in range(3):
        agent.train_iter()
    assert len(rewards) == 18 and all(torch.equal(current, earlier) for current, earlier in rewards)


def test_training_does_not_change_replay_data():
    agent, _ = make_agent('ppo', 'discrete', extrinsic_reward_coef=3.0)
    agent._config.clear_replay_buffer = False
    agent.train_iter()
    before = nest.map_structure(torch.clone, agent.replay_buffer.gather_all()[0])
    agent._config.num_env_steps = 1  # no further steps
    agent.train_iter()
    for a, b in zip(nest.flatten(before), nest.flatten(agent.replay_buffer.gather_all()[0])):
        assert torch.equal(a, b)


@pytest.mark.parametrize('algorithm, update_mode', [('actor-critic', 'rollout'), ('ppo', 'rollout'), ('ppo', 'replay')])
def test_statistics_are_checkpointed_and_unchanged_by_evaluation(algorithm, update_mode):
    agent, _ = make_agent(algorithm, 'discrete', data_transformer=lambda env: ObservationNormalizer(
        env.observation_spec(), update_mode=update_mode))
    start = tensors(agent)
    agent.train_iter()
    trained = tensors(agent)
    statistics = [k for k in trained if 'normalizer' in k]
    assert any(not torch.equal(start[k], trained[k]) for k in statistics)
    _, env = make_agent(algorithm, 'discrete')
    evaluate(env, agent, 3)
    after = tensors(agent)
    assert all(torch.equal(trained[k], after[k]) for k in trained)


@every_algorithm
def test_a_longer_episode_elsewhere_leaves_the_reported_return_unchanged(algorithm):
    # Each episode of 5 steps has at most 4 rewards of 1. The metric is an average over environments, not a sum.
    agent, _ = make_agent(algorithm, 'discrete', batch_size=8)
    for _ in range(4):
        agent.train_iter()
    assert np.abs(float(agent.get_metrics()[2].result())) <= 4.0
    assert float(agent.get_metrics()[3].result()) == 4.0
