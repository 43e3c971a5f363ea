"""Soft actor-critic with quantile critics."""
from functools import partial

import pytest
import torch
from helpers.sac_agents import make_agent, random_steps

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss, OneStepTDQRLoss
from alfx.algorithms.qrsac_algorithm import QrsacAlgorithm, quantiles_of_lowest_mean, truncated_quantiles
from alfx.algorithms.sac_algorithm import SacInfo
from alfx.data_structures import StepType
from alfx.networks.critic_networks import CriticNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

QUANTILES = 5
make_agent = partial(make_agent, algorithm_cls=QrsacAlgorithm)
loss_ctor = partial(OneStepTDQRLoss, num_quantiles=QUANTILES, gamma=0.9)
every_environment = pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward',
                                                            'nested observation', 'recurrent'])


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


@every_environment
def test_training_changes_every_parameter_and_is_repeated_by_the_same_seed(environment):
    results = []
    for _ in range(2):
        agent, _ = make_agent(environment, critic_loss_ctor=loss_ctor)
        before = parameters(agent)
        for _ in range(3):
            agent.train_iter()
        assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_environment
def test_one_environment_is_enough_and_a_checkpoint_restores_the_policy(environment):
    agent, env = make_agent(environment, batch_size=1, mini_batch_size=1, critic_loss_ctor=loss_ctor)
    for _ in range(3):
        agent.train_iter()
    other, _ = make_agent(environment, batch_size=1, seed=9, critic_loss_ctor=loss_ctor)
    other.load_state_dict(agent.state_dict())
    state = agent.get_initial_predict_state(1)
    first, second = (a.predict_step(env.current_time_step(), state).output for a in (agent, other))
    assert all(torch.equal(a, b) for a, b in zip(nest.flatten(first), nest.flatten(second)))


@pytest.mark.parametrize('by_mean', [True, False])
@pytest.mark.parametrize('environment', ['continuous', 'vector reward'])
def test_train_sequence_trains_as_train_step(environment, by_mean, monkeypatch):
    weights = [1.0, -0.5, 2.0] if environment == 'vector reward' else None
    agent, _ = make_agent(environment, critic_loss_ctor=loss_ctor, min_critic_by_critic_mean=by_mean,
                          reward_weights=weights)
    algorithm = agent.policy
    steps, action = random_steps(algorithm, 2, 5)
    monkeypatch.setattr(torch, 'randn', lambda shape, **kwargs: torch.full(shape, 0.3))
    losses = [algorithm.calc_loss(train(steps, algorithm.get_initial_train_state(10), SacInfo(action=action)).info).loss
              for train in (algorithm.train_sequence, partial(Algorithm.train_sequence, algorithm))]
    torch.testing.assert_close(*losses)


def test_the_loss_is_the_quantile_regression_of_a_slow_loop(monkeypatch):
    agent, _ = make_agent('continuous', critic_loss_ctor=loss_ctor, use_entropy_reward=False)
    algorithm = agent.policy
    for p in [*algorithm.target_critics.parameters(), *algorithm.critics.parameters()]:
        p.data.add_(0.3 * torch.randn_like(p))
    steps, action = random_steps(algorithm, 2, 6)
    monkeypatch.setattr(torch, 'randn', lambda shape, **kwargs: torch.full(shape, 0.3))
    info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(12), SacInfo(action=action)).info
    loss = algorithm.calc_loss(info).extra.critic
    for b in range(6):
        expected = 0.0
        if steps.step_type[0, b] != StepType.LAST:
            later = steps.observation[1, b:b + 1]
            chosen = algorithm.actor(later)[0].rsample()
            targets = algorithm.target_critics((later, chosen))[0][0]
            target = [steps.reward[1, b] + 0.9 * steps.discount[1, b] * min(targets[0, i], targets[1, i])
                      for i in range(QUANTILES)]
            for critic in algorithm.critics((steps.observation[0, b:b + 1], action[0, b:b + 1]))[0][0]:
                for i in range(QUANTILES):
                    for y in target:
                        error = (critic[i] - y).item()
                        huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                        fraction = (i + 0.5) / QUANTILES
                        expected += (fraction if error < 0 else 1 - fraction) * huber / QUANTILES**2
        assert loss[0, b].item() == pytest.approx(expected, abs=1e-5, rel=1e-3)


def test_bootstrap_quantiles_are_of_one_critic_or_the_minimum_of_each():
    critics = torch.tensor([[[0.0, 10.0], [4.0, 5.0]], [[3.0, 3.0], [0.0, 1.0]]])  # means 5, 4.5; 3, 0.5
    assert quantiles_of_lowest_mean(critics, None).tolist() == [[4.0, 5.0], [0.0, 1.0]]
    several = torch.stack((critics, critics), 2)
    found = quantiles_of_lowest_mean(several, torch.tensor([1.0, -1.0]))
    assert found.tolist() == [[[4.0, 5.0], [0.0, 10.0]], [[0.0, 1.0], [3.0, 3.0]]]
    assert quantiles_of_lowest_mean(several, torch.tensor([1.0, 0.0]))[:, 1].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    three = torch.tensor([[[0.0, 1.0, 8.0], [2.0, 2.0, 2.0]]], dtype=torch.float64)  # 3 and 2
    assert quantiles_of_lowest_mean(three, None).tolist() == [[2.0, 2.0, 2.0]]
    agent, _ = make_agent('continuous', critic_loss_ctor=partial(OneStepTDQRLoss, num_quantiles=2))
    assert agent.policy._pessimistic_value(critics).tolist() == [[0.0, 5.0], [0.0, 1.0]]
    assert agent.policy._actor_value(critics).tolist() == [4.5, 0.5]
    agent, _ = make_agent('vector reward', critic_loss_ctor=partial(OneStepTDQRLoss, num_quantiles=2),
                          reward_weights=[1.0, -1.0, 1.0])
    found = agent.policy._pessimistic_value(torch.stack((critics, critics, critics), 2))
    assert found[0].tolist() == [[0.0, 5.0], [4.0, 10.0], [0.0, 5.0]]


def test_truncation_drops_the_largest_quantiles_of_all_critics():
    critics = torch.tensor([[[0.0, 10.0], [4.0, 5.0]], [[3.0, 3.0], [0.0, 1.0]]])
    assert truncated_quantiles(critics, 0, None).tolist() == [[0.0, 4.0, 5.0, 10.0], [0.0, 1.0, 3.0, 3.0]]
    assert truncated_quantiles(critics, 1, None).tolist() == [[0.0, 4.0], [0.0, 1.0]]
    assert torch.equal(truncated_quantiles(critics.flip(1), 1, None), truncated_quantiles(critics, 1, None))
    several = truncated_quantiles(torch.stack((critics, critics), 2), 1, torch.tensor([1.0, -1.0]))
    assert several.tolist() == [[[0.0, 4.0], [10.0, 5.0]], [[0.0, 1.0], [3.0, 3.0]]]


@pytest.mark.parametrize('environment', ['continuous', 'vector reward'])
def test_one_critic_without_dropped_quantiles_trains_as_before(environment):
    losses = []
    for dropped in (None, 0):
        agent, _ = make_agent(environment, critic_loss_ctor=loss_ctor, num_critic_replicas=1,
                              num_dropped_quantiles=dropped)
        steps, action = random_steps(agent.policy, 2, 6)
        torch.manual_seed(2)
        info = agent.policy.train_sequence(steps, agent.policy.get_initial_train_state(12), SacInfo(action=action)).info
        losses.append(agent.policy.calc_loss(info).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize('args, message', [
    (dict(num_dropped_quantiles=5), 'num_dropped_quantiles: expected a number from 0 to 4'),
    (dict(num_dropped_quantiles=-1), 'num_dropped_quantiles: expected a number from 0 to 4'),
    (dict(num_dropped_quantiles=1, min_critic_by_critic_mean=True), 'combined with min_critic_by_critic_mean'),
    (dict(num_dropped_quantiles=1, bootstrap_critics='mean'), "combined with .* bootstrap_critics = 'mean'"),
    (dict(min_critic_by_critic_mean=True, bootstrap_critics='mean'),
     "remove min_critic_by_critic_mean or bootstrap_critics = 'mean'")])
def test_reductions_that_exclude_each_other_are_rejected(args, message):
    with pytest.raises(ValueError, match=message):
        make_agent('continuous', critic_loss_ctor=loss_ctor, **args)


SPECS = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 1)


def test_a_critic_may_have_its_quantiles_already():
    critic = partial(CriticNetwork, output_tensor_spec=TensorSpec((QUANTILES, )))
    algorithm = QrsacAlgorithm(*SPECS, critic_network_cls=critic, critic_loss_ctor=loss_ctor)
    assert algorithm.critics((torch.zeros(4, 3), torch.zeros(4, 2)))[0].shape == (4, 2, QUANTILES)
    with pytest.raises(SpecError, match='50'):
        QrsacAlgorithm(*SPECS, critic_network_cls=critic)


def test_another_loss_or_action_is_rejected():
    with pytest.raises(ValueError, match='quantile loss'):
        QrsacAlgorithm(*SPECS, critic_loss_ctor=OneStepTDLoss)
    with pytest.raises(ValueError, match='continuous'):
        QrsacAlgorithm(SPECS[0], BoundedTensorSpec((), torch.int64, 0, 3))


@pytest.mark.slow
def test_it_learns_a_one_step_task():
    agent, env = make_agent('continuous', batch_size=20, mini_batch_size=64, hidden=(32, ), updates=4,
                            optimizer=Adam(lr=5e-3), initial_log_alpha=-3.0, target_update_tau=0.1, target_entropy=-2.0,
                            train_actor_on_last_step=False, critic_loss_ctor=loss_ctor)
    for _ in range(150):
        agent.train_iter()
    rewards = []
    state = agent.get_initial_predict_state(20)
    with torch.no_grad():
        for _ in range(20):
            time_step = env.step(agent.predict_step(env.current_time_step(), state).output)
            rewards.append(time_step.reward[~time_step.is_first()])
    assert torch.cat(rewards).mean() > 0.9
