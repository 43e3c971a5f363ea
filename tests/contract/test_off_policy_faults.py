"""Faults that training from replay is prone to: data that must not reach a loss, a statistic or the buffer.

Faults of the buffer itself (seams, priorities, episodes) are in tests/numerics/test_replay_against_slow_loops.py and
tests/unit/experience_replayers; of prioritized updates in tests/unit/engine/test_priority_updates.py; of hindsight in
tests/numerics/test_hindsight.py.
"""
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import OffsetActionEnv
from helpers.sac_agents import ENVIRONMENTS, networks

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardScaling
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, valid_masks
from alfx.environments import suite_gym
from alfx.networks.actor_networks import ActorNetwork, ActorRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticRNNNetwork
from alfx.optimizers import Adam
from alfx.runs.evaluator import evaluate

lambda_loss = partial(TDLoss, td_lambda=0.9)


def sac(networks, recurrent, **args):
    return partial(SacAlgorithm, train_actor_on_last_step=False, target_update_period=3, **networks, **args)


def dqn(networks, recurrent, **args):
    return partial(DqnAlgorithm, q_network_cls=networks['q_network_cls'], rollout_epsilon_greedy=0.5,
                   target_update_period=3, **args)


def deterministic(cls, networks, recurrent, **args):
    actor, critic = (ActorRNNNetwork, CriticRNNNetwork) if recurrent else (ActorNetwork, CriticNetwork)
    memory = dict(lstm_hidden_size=(8, )) if recurrent else {}
    return partial(cls, train_actor_on_last_step=False, target_update_period=3,
                   actor_network_ctor=partial(actor, fc_layer_params=(16, ), **memory),
                   critic_network_ctor=partial(critic, joint_fc_layer_params=(16, ), **memory), **args)


td3 = partial(deterministic, partial(Td3Algorithm, policy_update_period=1))
ddpg = partial(deterministic, DdpgAlgorithm)
# (algorithm, environment)
STATELESS = {
    'sac': (sac, 'continuous'), 'sac, discrete': (sac, 'discrete'), 'sac, mixed': (sac, 'mixed'),
    'sac, several steps': (partial(sac, critic_loss_ctor=lambda_loss), 'continuous'),
    'dqn': (dqn, 'discrete'), 'dqn, several steps': (partial(dqn, critic_loss_ctor=lambda_loss), 'discrete'),
    'ddpg': (ddpg, 'continuous'), 'ddpg, several steps': (partial(ddpg, critic_loss_ctor=lambda_loss), 'continuous'),
    'td3': (td3, 'continuous'),
}
RECURRENT = {'sac': (sac, 'recurrent'), 'sac, discrete': (sac, 'recurrent, discrete'),
             'dqn': (dqn, 'recurrent, discrete'), 'ddpg': (ddpg, 'recurrent')}
every_algorithm = pytest.mark.parametrize('name', list(STATELESS))


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


def make_env(kind, batch_size=4, seed=0):
    env = ENVIRONMENTS[kind](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    return env


def make_agent(name, table=STATELESS, env=None, seed=0, data_transformer=None, config_args=None, **agent_args):
    """Return an agent in an environment with episodes of 5 steps, ready to train; two updates an iteration."""
    build, kind = table[name]
    torch.manual_seed(seed)
    context.reset()
    env = make_env(kind, seed=seed) if env is None else env
    recurrent = table is RECURRENT
    config = TrainerConfig(**{**dict(
        root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8, mini_batch_length=4 if recurrent else 2,
        num_updates_per_train_iter=2, whole_replay_buffer_training=False, clear_replay_buffer=False,
        replay_buffer_length=50, use_rollout_state=recurrent), **(config_args or {})})
    if data_transformer is not None:
        config.data_transformer = data_transformer(env)
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=build(networks(kind, env), recurrent), optimizer=Adam(lr=1e-2), **agent_args)
    agent.set_path('')
    agent.finalize()
    return agent, env


def collected(agent, steps=16):
    """Return training experience ``[T, B]`` of ``steps`` steps; the networks have been trained."""
    for _ in range(3):
        agent.train_iter()
    agent.replay_buffer.clear()
    with torch.no_grad():
        agent.unroll(steps)
    experience = nest.map_structure(lambda x: x.transpose(0, 1).clone(), agent.replay_buffer.gather_all()[0])
    assert (experience.step_type[1:-2] == StepType.LAST).any(0).all(), 'every environment has ends of episodes'
    return experience


def losses(agent, experience):
    """Return the losses ``[T, B]`` that an update adds up, with the same random numbers each time."""
    torch.manual_seed(7)
    loss = agent.calc_loss(agent.learner.losses.train_info(experience)).loss.detach()
    return loss * valid_masks(experience.step_type)


def disturbed(nested, where):
    """Return a nest ``[T, B, ...]`` with other values ``where``, bool ``[T, B]``; integers stay 0 or 1."""

    def change(x):
        other = 1 - x if not x.is_floating_point() else x * 0.5 + 0.3
        return torch.where(where.view(where.shape + (1, ) * (x.ndim - 2)), other, x)

    return nest.map_structure(change, nested)


def with_others(experience, where, *fields):
    """Return ``experience`` with other values of these fields ``where``; 'action' is the stored action."""
    if 'action' in fields:
        info = experience.rollout_info
        rl = info.rl._replace(action=disturbed(info.rl.action, where))
        experience = experience._replace(rollout_info=info._replace(rl=rl), action=disturbed(experience.action, where))
    for field in fields:
        if field != 'action':
            new = disturbed(getattr(experience.time_step, field), where)
            experience = experience.update_time_step_field(field, new)
    return experience


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second))


# Inputs of the losses ------------------------------------------------------------------------------------------------


@every_algorithm
def test_ignored_actions_and_first_step_rewards_are_not_trained_on(name):
    """Training ignores the action at the last step of an episode and the values that come with its first step."""
    agent, _ = make_agent(name)
    experience = collected(agent)
    is_first, is_last = (experience.step_type == kind for kind in (StepType.FIRST, StepType.LAST))
    expected = losses(agent, experience)
    other = with_others(experience, is_last, 'action')
    other = with_others(other, is_first, 'reward', 'discount', 'prev_action')
    assert torch.equal(losses(agent, other), expected)
    is_mid = ~is_first & ~is_last
    assert not torch.equal(losses(agent, with_others(experience, is_mid, 'action')), expected)
    assert not torch.equal(losses(agent, with_others(experience, is_mid, 'reward')), expected)


@every_algorithm
def test_nothing_of_a_later_episode_reaches_an_earlier_one(name):
    agent, _ = make_agent(name)
    experience = collected(agent)
    ends = (experience.step_type == StepType.LAST).int()
    later = ends.cumsum(0) - ends > 0  # after the first LAST of each environment
    other = with_others(experience, later, 'action', 'observation', 'reward', 'discount')
    before, after = losses(agent, experience), losses(agent, other)
    torch.testing.assert_close(after[~later], before[~later], rtol=0, atol=1e-6)
    assert not torch.allclose(after[later], before[later])


@every_algorithm
@pytest.mark.parametrize('terminated', [True, False])
def test_the_final_observation_is_bootstrapped_from_unless_terminated(name, terminated):
    agent, _ = make_agent(name)
    experience = collected(agent)
    is_last = experience.step_type == StepType.LAST
    discount = torch.where(is_last, 0.0 if terminated else 1.0, 1.0)
    experience = experience.update_time_step_field('discount', discount)
    before, after = losses(agent, experience), losses(agent, with_others(experience, is_last, 'observation'))
    leads_to_end = torch.cat([is_last[1:], torch.zeros_like(is_last[:1])])
    if terminated:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    else:
        assert not torch.isclose(after[leads_to_end], before[leads_to_end]).all()


@pytest.mark.parametrize('name', list(RECURRENT))
def test_states_are_reset_at_first_steps_in_training_as_in_the_rollout(name):
    agent, _ = make_agent(name, RECURRENT)
    experience = collected(agent)
    begins = (experience.step_type == StepType.FIRST).int()
    begins[0] = 0
    earlier = begins.cumsum(0) == 0
    assert earlier.any() and (~earlier).any()
    other = with_others(experience, earlier, 'observation', 'action')
    before, after = losses(agent, experience), losses(agent, other)
    torch.testing.assert_close(after[~earlier], before[~earlier], rtol=0, atol=1e-6)
    for state in nest.flatten(experience.state):
        assert not state[experience.step_type == StepType.FIRST].any()


@pytest.mark.parametrize('name, length', [(name, 3 if 'several' in name else 2) for name in STATELESS])
def test_sequences_are_contiguous_even_after_the_ring_is_full(name, length):
    agent, _ = make_agent(name, config_args=dict(replay_buffer_length=9, mini_batch_length=length))
    seen = []
    step = agent.train_sequence
    agent.train_sequence = lambda inputs, state, info: (seen.append((inputs, info)), step(inputs, state, info))[1]
    for _ in range(12):
        agent.train_iter()
    assert len(seen) >= 20
    for time_step, info in seen:
        follows = time_step.step_type[1:] != StepType.FIRST
        assert (follows == (time_step.step_type[:-1] != StepType.LAST)).all()
        for action, prev_action in zip(nest.flatten(info.rl.action), nest.flatten(time_step.prev_action)):
            assert torch.equal(action[:-1][follows], prev_action[1:][follows])
        assert torch.equal(time_step.env_id[1:], time_step.env_id[:-1])


# Stored and reported data --------------------------------------------------------------------------------------------


@every_algorithm
def test_collected_rewards_and_stored_data_never_change(name):
    agent, env = make_agent(name, extrinsic_reward_coef=3.0,
                            data_transformer=lambda env: RewardScaling(0.5, observation_spec=env.observation_spec()))
    rewards, step = [], env.step

    def remember(action):
        time_step = step(action)
        rewards.append((time_step.reward, time_step.reward.clone()))
        return time_step

    env.step = remember
    for _ in range(3):
        agent.train_iter()
    assert len(rewards) == 12 and all(torch.equal(current, earlier) for current, earlier in rewards)
    before = nest.map_structure(torch.clone, agent.replay_buffer.gather_all()[0])
    assert torch.equal(before.reward.transpose(0, 1)[1:], torch.stack([reward for reward, _ in rewards])[:11])
    agent._config.num_env_steps = 1  # no further steps
    assert agent.train_iter() > 0
    assert same(nest.flatten(before), nest.flatten(agent.replay_buffer.gather_all()[0]))


@every_algorithm
def test_the_reported_return_is_that_of_the_environment(name):
    # Each episode of 5 steps has at most 4 rewards of 1, an average over environments.
    agent, _ = make_agent(name, extrinsic_reward_coef=100.0)
    for _ in range(4):
        agent.train_iter()
    assert np.abs(float(agent.get_metrics()[2].result())) <= 4.0
    assert float(agent.get_metrics()[3].result()) == 4.0


# Evaluation ----------------------------------------------------------------------------------------------------------


@every_algorithm
def test_an_evaluation_in_between_changes_nothing(name):
    results = []
    for evaluates in (False, True):
        agent, _ = make_agent(name, data_transformer=lambda env: ObservationNormalizer(
            env.observation_spec(), update_mode='rollout'))
        other_env = make_env(STATELESS[name][1], seed=5)
        for _ in range(4):
            agent.train_iter()
            if evaluates:
                evaluate(other_env, agent, 3)
        results.append([*parameters(agent), *(x.clone() for x in agent.buffers())])
    assert same(*results)


@every_algorithm
def test_a_greedy_policy_does_not_explore(name):
    agent, env = make_agent(name, config_args=dict(epsilon_greedy=0.0))
    agent.train_iter()
    time_step, state = env.current_time_step(), agent.get_initial_predict_state(4)
    actions = [nest.flatten(agent.predict_step(time_step, state).output) for _ in range(5)]
    assert all(same(actions[0], other) for other in actions[1:])


@every_algorithm
@pytest.mark.parametrize('update_mode', ['rollout', 'replay'])
def test_statistics_are_updated_in_their_mode_and_are_in_the_checkpoint(name, update_mode):
    agent, _ = make_agent(name, data_transformer=lambda env: ObservationNormalizer(
        env.observation_spec(), update_mode=update_mode))
    states = []
    for advance in (lambda: None, lambda: agent.unroll(4), agent.train_iter):
        advance()
        states.append({k: v.clone() for k, v in agent.state_dict().items() if 'normalizer' in k})
    changes = [any(not torch.equal(before[k], after[k]) for k in before) for before, after in zip(states, states[1:])]
    assert states[0] and changes == [update_mode == 'rollout', True]


# Repeatability and checkpoints ---------------------------------------------------------------------------------------


@every_algorithm
def test_exploration_differs_between_environments_but_not_between_runs(name):
    """Exploration differs between environments and is the same in runs with the same seed."""
    rollouts = []
    for seed in (3, 3, 4):
        agent, _ = make_agent(name, env=make_env(STATELESS[name][1], batch_size=16), seed=seed)
        rollouts.append(nest.flatten(agent.unroll(4).action))
    assert same(rollouts[0], rollouts[1]) and not same(rollouts[0], rollouts[2])
    for action in rollouts[0]:
        assert (action[0] != action[0, :1]).any()


@every_algorithm
def test_resuming_between_two_target_updates_is_exact(name):
    # 2 updates an iteration, targets every 3: after two iterations the next one is due after two further updates
    agent, env = make_agent(name)
    for _ in range(2):
        agent.train_iter()
    copied = partial(nest.map_structure, lambda x: x.clone() if isinstance(x, torch.Tensor) else x)
    saved, rollout, env_state = copied(dict(agent.state_dict())), copied(agent.learner.state_dict()), env.get_state()
    other, other_env = make_agent(name, seed=9)
    other.load_state_dict(saved)
    other_env.set_state(env_state)
    other.learner.load_state_dict(rollout)
    for each in (agent, other):
        each.replay_buffer.clear()
        torch.manual_seed(5)
        for _ in range(2):
            each.train_iter()
    first, second = dict(agent.state_dict()), dict(other.state_dict())
    for key in first:
        if isinstance(first[key], torch.Tensor) and 'metric' not in key:
            assert torch.equal(first[key], second[key]), key


@every_algorithm
def test_a_checkpoint_that_lacks_a_part_is_rejected_by_name(name):
    agent, _ = make_agent(name)
    agent.train_iter()
    saved = dict(agent.state_dict())
    parts = [key for key in saved if '_target' in key or key.endswith('_extra_state') or 'alpha' in key]
    assert any('_target' in key for key in parts) and any(key.endswith('_extra_state') for key in parts)
    for key in parts:
        other, _ = make_agent(name, seed=9)
        with pytest.raises((RuntimeError, ValueError), match=key.replace('.', r'\.')):
            other.load_state_dict({k: v for k, v in saved.items() if k != key})


# Actions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['sac, discrete', 'dqn'])
def test_discrete_actions_may_start_anywhere(name):
    env = suite_gym.wrap_env(gymnasium.wrappers.TransformObservation(
        OffsetActionEnv(), lambda x: np.float32([x - 11]), gymnasium.spaces.Box(-1, 1, (1, ))))
    env.seed(0)
    env.reset()
    agent, _ = make_agent(name, env=env)
    actions = []
    for _ in range(10):
        agent.train_iter()
        actions += agent.replay_buffer.gather_all()[0].action.flatten().tolist()
    spec = env.action_spec()
    assert set(actions) == set(range(int(spec.minimum), int(spec.maximum) + 1))
    assert all(torch.isfinite(p).all() for p in agent.parameters())
