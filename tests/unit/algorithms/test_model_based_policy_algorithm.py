"""Imagined experience: its transitions, its storage, and an agent that trains on it."""
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import sac_agents

from alfx import context, nest
from alfx.algorithms import model_based_policy_algorithm
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.agent import Agent
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardScaling
from alfx.algorithms.dynamics_learning_algorithm import DeterministicDynamicsAlgorithm, StochasticDynamicsAlgorithm
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.model_based.imagination import TransitionStore, imagined_transitions
from alfx.algorithms.model_based_policy_algorithm import ModelBasedPolicyAlgorithm
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.reward_learning_algorithm import FixedRewardFunction, LearnedReward
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.world_models import WorldModel
from alfx.data_structures import AlgStep, BatchInfo, Experience, StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

on_policy = partial(ActorCriticAlgorithm, actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(4, )),
                    value_network_ctor=partial(ValueNetwork, fc_layer_params=(4, )))
OBSERVATION, ACTION = TensorSpec((2, )), BoundedTensorSpec((1, ), minimum=-1.0, maximum=1.0)


def start(positions, step_type=StepType.MID):
    count = len(positions)
    observation = torch.stack((torch.tensor(positions), torch.ones(count)), -1)
    return TimeStep(step_type=torch.full((count, ), step_type, dtype=torch.int32), reward=torch.zeros(count),
                    discount=torch.ones(count), observation=observation, prev_action=torch.zeros(count, 1),
                    env_id=torch.arange(count))


def exact_model(observation, action):
    """Add the action to the position, which is the reward; end the episode at positions of 1 and above."""
    following = observation + torch.cat((action, torch.zeros_like(action)), 1)
    return following, following[:, 0], following[:, 0] >= 1


def policy(step):
    """Move half of the way to 1.5."""
    action = 0.5 * (1.5 - step.observation[:, :1])
    return action, {'action': action}


def test_imagined_transitions_match_the_modelled_environment():
    """Compare with positions worked out by hand, which end at 1 and above.

    From 0: 0.75, 1.125 (end). From 1.4: 1.45 (end). From -0.5: 0.5, 1.0 (end).
    """
    first, second, *rest = imagined_transitions(start([0.0, 1.4, -0.5]), policy, exact_model, 5)
    np.testing.assert_allclose(first.time_step.observation[:, :, 0], [[0, 0.75], [1.4, 1.45], [-0.5, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(second.time_step.observation[:, :, 0], [[0.75, 1.125], [0.5, 1.0]], rtol=1e-6)
    assert not rest, 'all of them are over'
    np.testing.assert_allclose(first.action[:, 0, 0], [0.75, 0.05, 1.0], rtol=1e-5)
    torch.testing.assert_close(first.time_step.prev_action[:, 1], first.action[:, 0])
    torch.testing.assert_close(first.rollout_info['action'][:, 0], first.action[:, 0])
    torch.testing.assert_close(first.time_step.reward[:, 1], first.time_step.observation[:, 1, 0])
    assert first.time_step.step_type.tolist() == [[1, 1], [1, 2], [1, 1]]
    assert first.time_step.discount.tolist() == [[1, 1], [1, 0], [1, 1]]
    assert second.time_step.discount.tolist() == [[1, 0], [1, 0]]
    assert second.time_step.env_id[:, 0].tolist() == [0, 2]


def test_nothing_is_imagined_where_an_episode_is_over():
    steps = start([0.0, 0.5])
    steps = steps._replace(step_type=torch.tensor([StepType.LAST, StepType.FIRST], dtype=torch.int32))
    only, = imagined_transitions(steps, policy, exact_model, 1)
    np.testing.assert_allclose(only.time_step.observation[:, :, 0], [[0.5, 1.0]])


def filled_store(capacity, count):
    spec = Experience(time_step=TensorSpec(()), action=TensorSpec((1, )))
    store = TransitionStore(spec, capacity)
    numbers = torch.arange(float(count))
    action = numbers.view(-1, 1, 1).repeat(1, 2, 1)
    store.add(Experience(time_step=torch.stack((numbers, numbers + 0.5), 1), action=action))
    return store


def test_no_sample_crosses_from_one_imagined_transition_into_another():
    store = filled_store(capacity=50, count=40)
    experience, info = store.get_batch(500, 2)
    assert experience.time_step.shape == (500, 2) and info.env_ids.shape == (500, )
    torch.testing.assert_close(experience.time_step[:, 1] - experience.time_step[:, 0], torch.full((500, ), 0.5))
    assert set(experience.time_step[:, 0].tolist()) <= set(range(40))


def test_the_latest_imagined_transitions_are_kept_and_saved():
    store = filled_store(capacity=16, count=40)
    assert len(store) == 16
    other = filled_store(capacity=16, count=1)
    other.load_state_dict(store.state_dict())
    for each in (store, other):
        experience, _ = each.get_batch(300, 2)
        assert set(experience.time_step[:, 0].tolist()) == set(range(24, 40))
    with pytest.raises(ValueError, match='expected batch_length 2, found 3'):
        store.get_batch(4, 3)


# The model ----------------------------------------------------------------------------------------------------


def world_model(num_replicas=4, num_elites=2, **arguments):
    torch.manual_seed(0)
    dynamics = partial(StochasticDynamicsAlgorithm, hidden_size=(8, ), num_replicas=num_replicas, holdout=0.2,
                       num_elites=num_elites)
    return WorldModel(OBSERVATION, ACTION, TensorSpec(()), dynamics, partial(LearnedReward, hidden_size=(8, )),
                      **{**dict(termination_fn='none', optimizer=Adam(lr=1e-2)), **arguments})


@pytest.mark.parametrize('count', [1, 7, 64])
def test_each_row_is_imagined_by_an_elite_of_the_ensemble(count, monkeypatch):
    """Let member i of the ensemble add 10^i: the rows are divided evenly between the elites, 1 and 3."""
    model = world_model()
    model.dynamics._holdout_error.copy_(torch.tensor([9.0, 1.0, 9.0, 2.0]))

    def predict(time_step, state):
        added = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 4, 1)
        assert torch.equal(time_step.prev_action[..., 0], state.feature[..., 0]), 'action and observation stay together'
        return AlgStep(state.feature + added, state, ())

    monkeypatch.setattr(model.dynamics, 'predict_step', predict)
    observation = torch.randn(count, 2)
    following, reward, is_over = model.imagine(observation, observation[:, :1])
    added = (following - observation).round()
    assert (added[:, 0] == added[:, 1]).all()
    by_1, by_3 = (added[:, 0] == 10).sum(), (added[:, 0] == 1000).sum()
    assert by_1 + by_3 == count and abs(by_1 - by_3) <= 1
    assert reward.shape == (count, ) and not is_over.any()


def test_ensembles_imagine_steps_with_nested_actions():
    spec = (BoundedTensorSpec((), torch.int64, 0, 2), {'force': BoundedTensorSpec((2, 2), minimum=-1.0, maximum=1.0)})
    dynamics = partial(StochasticDynamicsAlgorithm, hidden_size=(8, ), num_replicas=3)
    model = WorldModel(OBSERVATION, spec, TensorSpec(()), dynamics, partial(LearnedReward), 'none', Adam())
    action = nest.map_structure(lambda s: s.sample([5]), spec)
    following, reward, _ = model.imagine(torch.randn(5, 2), action)
    assert following.shape == (5, 2) and reward.shape == (5, )


def test_a_model_learns_rewards_and_transitions_without_a_policy():
    model = world_model(termination_fn=lambda s: s[:, 0] > 3)
    generator = torch.Generator().manual_seed(0)
    for i in range(200):
        before, action = torch.randn(64, 2, generator=generator), 2 * torch.rand(64, 1, generator=generator) - 1
        after = before + torch.cat((action, -action), 1)
        steps = TimeStep(step_type=torch.ones(64, 2, dtype=torch.int32), observation=torch.stack((before, after), 1),
                         prev_action=torch.stack((action, action), 1),
                         reward=torch.stack((torch.zeros(64), 5 * after[:, 0]), 1))
        positions = 1000 * i + torch.arange(64)
        model.update(steps, BatchInfo(env_ids=torch.zeros(64, dtype=torch.int64), positions=positions))
    following, reward, is_over = model.imagine(before, action)
    assert (following - after).abs().mean() < 0.15
    assert (reward - 5 * following[:, 0]).abs().mean() < 0.5
    assert torch.equal(is_over, following[:, 0] > 3)


def test_prioritized_samples_are_weighted_as_uniform_ones():
    """Draw the first of two transitions twice as often: a batch that contains it twice gives the uniform update."""
    def updated(rows, relative):
        torch.manual_seed(0)
        dynamics = partial(DeterministicDynamicsAlgorithm, hidden_size=(8, ), normalize=False)
        model = WorldModel(OBSERVATION, ACTION, TensorSpec(()), dynamics, FixedRewardFunction(lambda s, a: s[:, 0]),
                           'none', SGD(lr=1.0))
        observation = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[2.0, 1.0], [-1.0, 3.0]]])[rows]
        steps = TimeStep(step_type=torch.ones(len(rows), 2, dtype=torch.int32), observation=observation,
                         prev_action=observation[..., :1], reward=torch.zeros(len(rows), 2))
        model.update(steps, BatchInfo(env_ids=torch.zeros(len(rows), dtype=torch.int64), positions=torch.tensor(rows),
                                      importance_weights=relative))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(updated([0, 0, 1], torch.tensor([4 / 3, 4 / 3, 2 / 3])), updated([0, 1], ()))


@pytest.mark.parametrize('length', [2, 3])
def test_the_penalty_of_log_variance_bounds_is_added_once(length):
    """Average the losses over transitions, ``length - 1`` in each sequence, and add the penalty to the average."""
    def make():
        torch.manual_seed(0)
        dynamics = partial(StochasticDynamicsAlgorithm, hidden_size=(8, ), normalize=False, bootstrap=False)
        return WorldModel(OBSERVATION, ACTION, TensorSpec(()), dynamics, FixedRewardFunction(lambda s, a: s[:, 0]),
                          'none', SGD(lr=1.0))

    model, expected = make(), make()
    observation = torch.randn(4, length, 2)
    steps = TimeStep(step_type=torch.ones(4, length, dtype=torch.int32), observation=observation,
                     prev_action=torch.rand(4, length, 1), reward=torch.zeros(4, length))
    model.update(steps, BatchInfo(env_ids=torch.zeros(4, dtype=torch.int64), positions=torch.arange(4)))
    dynamics = expected.dynamics
    losses = [dynamics._losses(*(x[b:b + 1] for x in (observation[:, t], steps.prev_action[:, t + 1],
                                                      observation[:, t + 1])))[0]
              for b in range(4) for t in range(length - 1)]
    total = sum(losses).sum() / len(losses) + 0.01 * dynamics._network.bounds_penalty()
    for x, y in zip(model.parameters(), expected.parameters()):
        gradient, = torch.autograd.grad(total, y, retain_graph=True)
        torch.testing.assert_close(x, y - gradient)


# In an agent --------------------------------------------------------------------------------------------------


def make_agent(environment='continuous', transformer=None, config_args=None, agent_args=None, algorithm=SacAlgorithm,
               length=2, policy_args=None, **arguments):
    def cls(actor_network_cls, critic_network_cls, q_network_cls=None, **kwargs):
        rl = partial(algorithm, actor_network_cls=actor_network_cls, critic_network_cls=critic_network_cls,
                     q_network_cls=q_network_cls, **(policy_args or {})) if algorithm is SacAlgorithm else algorithm
        return ModelBasedPolicyAlgorithm(rl_algorithm_cls=rl, **{**dict(
            dynamics_module_ctor=partial(StochasticDynamicsAlgorithm, hidden_size=(8, ), num_replicas=2, holdout=0.2),
            reward_module=partial(LearnedReward, hidden_size=(8, )), model_optimizer=Adam(lr=1e-3), real_share=0.25,
            num_rollouts=20, num_imagined=100, model_period=3, max_model_updates=4), **arguments}, **kwargs)

    return sac_agents.make_agent(environment, cls, mini_batch_length=length, agent_args=agent_args,
                                 config_args={**dict(initial_collect_steps=20), **(config_args or {})})


@pytest.mark.parametrize('environment', ['continuous', 'discrete'])
def test_agents_train_on_real_and_imagined_data_in_the_stated_proportion(environment, monkeypatch):
    agent, _ = make_agent(environment)
    algorithm = agent.policy
    sizes = []
    monkeypatch.setattr(TransitionStore, 'get_batch', lambda self, size, length, own=TransitionStore.get_batch: (
        sizes.append(size), own(self, size, length))[1])
    for _ in range(20):
        agent.train_iter()
    assert sizes and set(sizes) == {6}, '3/4 of the 8 sequences of a minibatch'
    assert len(algorithm._imagined) == 100
    experience, _ = algorithm._imagined.get_batch(100, 2)
    assert nest.flatten(experience.rollout_info.rl.action)
    assert experience.time_step.observation.isfinite().all()


def test_the_model_is_trained_separately_and_periodically():
    agent, _ = make_agent()
    model, calls = agent.policy.world_model, []
    agent.policy.train_model = lambda buffer, own=agent.policy.train_model: (
        calls.append(context.get_global_counter()), own(buffer))[1]
    before = [p.clone() for p in model.parameters()]
    owned = {id(p) for _, p in agent.optimized_parameters()[1]}
    assert owned and not owned & {id(p) for p in model.parameters()}
    for _ in range(14):  # 4 environments, unrolls of 4 steps: 20 steps are there after the second one
        agent.train_iter()
    assert len(calls) == 5, 'in the iterations 2, 5, 8, 11 and 14'
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_models_and_imagination_use_all_data_regardless_of_priorities(monkeypatch):
    """Set the priorities of all sequences but one to 0."""
    agent, _ = make_agent(config_args=dict(priority_replay=True), policy_args=dict(calculate_priority=True))
    for _ in range(3):
        agent.train_iter()
    mbpo, buffer, seen = agent.policy, agent.replay_buffer, []
    envs, steps = torch.arange(4).repeat_interleave(11), torch.arange(11).repeat(4)
    buffer.update_priority(envs, steps, (torch.arange(44) == 7).float())
    assert len(buffer.get_batch(20, 2)[1].env_ids.unique()) == 1
    monkeypatch.setattr(mbpo.world_model, 'update', lambda step, info: seen.append(step.env_id[:, 0]) or 0.0)
    monkeypatch.setattr(model_based_policy_algorithm, 'imagined_transitions',
                        lambda start, *args: seen.append(start.env_id) or [])
    mbpo.train_model(buffer)
    mbpo.imagine(buffer)
    assert len(seen) > 1 and all(len(x.unique()) > 1 for x in seen)


def test_model_metrics_are_written_with_every_summary(monkeypatch):
    """Write metrics of the model also if it was last trained some iterations ago."""
    agent, _ = make_agent(model_period=5, max_model_updates=50)
    written = {}
    monkeypatch.setattr(model_based_policy_algorithm.summary, 'scalar', lambda name, x: written.update({name: x}))
    for _ in range(4):  # the model is trained in the second iteration
        agent.train_iter()
    assert not written
    context.set_summary_writer(mock.MagicMock())
    with context.record_if(True):
        agent.train_iter()
    tags = {name for name in written if name.startswith(('model/', 'imagined/'))}
    assert tags == {'model/updates', 'model/loss', 'model/holdout', 'imagined/steps', 'imagined/reward'}
    assert written['model/updates'] == 50 and written['imagined/steps'] <= 20


def test_a_resumed_agent_keeps_its_imagined_transitions():
    agent, env = make_agent()
    for _ in range(12):
        agent.train_iter()
    other, _ = make_agent()
    other.load_state_dict(agent.state_dict())
    algorithm = other.policy
    assert algorithm._imagined is None and int(algorithm._wait) == int(agent.policy._wait)
    for _ in range(6):
        other.train_iter()
        if algorithm._imagined is not None:
            break
    expected = agent.policy._imagined._buffer.gather_all()[0]
    found = algorithm._imagined._buffer.gather_all()[0]
    for a, b in zip(nest.flatten(expected), nest.flatten(found)):
        assert torch.equal(a, b)


def test_model_training_ends_when_held_out_error_stops_improving(monkeypatch):
    monkeypatch.setattr(model_based_policy_algorithm, '_CHECK_PERIOD', 5)
    agent, _ = make_agent(max_model_updates=5000)
    for _ in range(3):
        agent.train_iter()
    algorithm = agent.policy
    errors = iter([5.0, 4.0, 4.0, 3.99, 3.98, 3.97, 3.965, 1.0])
    algorithm.world_model.dynamics.measure_holdout = lambda time_step, batch_info: next(errors)
    assert algorithm.train_model(agent.replay_buffer) == 35, '5 a look; after 4.0 there are 5 looks without 1% less'


@pytest.mark.parametrize('arguments, message', [
    (dict(length=3), 'mini_batch_length = 3.*2 steps'), (dict(real_share=1.5), 'real_share'),
    (dict(rollout_length=0), 'rollout_length'),
    (dict(termination_fn='hoper'), 'ModelBasedPolicyAlgorithm.termination_fn'),
    (dict(model_optimizer=None), 'model_optimizer is not set'), (dict(num_rollouts=0), 'num_rollouts'),
    (dict(agent_args=dict(intrinsic_reward_module=partial(ICMAlgorithm, hidden_size=4))),
     'intrinsic_reward_module = ICMAlgorithm'),
    (dict(environment='recurrent'), 'rl_algorithm_cls creates a recurrent SacAlgorithm'),
    (dict(policy_args=dict(rollout_noise_correlation=0.5)), 'SacAlgorithm, or one with repeated or correlated noise'),
    (dict(algorithm=on_policy), 'an on-policy algorithm'),
    (dict(algorithm=partial(PPOAlgorithm, **on_policy.keywords)), 'creates PPOAlgorithm, an on-policy algorithm')])
def test_incompatible_settings_are_rejected_before_the_first_step(arguments, message):
    with pytest.raises((ConfError, ValueError, TypeError), match=message):
        make_agent(**arguments)


def test_observation_transformers_are_rejected_and_reward_ones_accepted():
    config = sac_agents.TrainerConfig(root_dir='', algorithm_ctor=Agent, mini_batch_length=2,
                                      whole_replay_buffer_training=False)
    agent, env = make_agent()
    config.data_transformer = RewardScaling(0.1, env.observation_spec())
    agent.policy.check_config(config)
    config.data_transformer = ObservationNormalizer(env.observation_spec())
    with pytest.raises(ConfError, match='creates ObservationNormalizer'):
        agent.policy.check_config(config)


def test_a_run_that_collects_nothing_is_rejected():
    agent, _ = make_agent()
    config = sac_agents.TrainerConfig(root_dir='', algorithm_ctor=Agent, mini_batch_length=2, unroll_length=0,
                                      offline_buffer_dir='data', whole_replay_buffer_training=False)
    with pytest.raises(ConfError, match='unroll_length = 0, but .* learns only from collected experience'):
        agent.policy.check_config(config)
