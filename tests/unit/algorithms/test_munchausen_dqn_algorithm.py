"""Munchausen DQN: the loss against a slow loop, its limits, and which arguments it rejects."""
import math
from functools import partial

import pytest
import torch
from helpers.dqn_agents import assert_same_parameters, make_agent, train
from helpers.plans import num_graphs, warnings_in

from alfx import context
from alfx.algorithms.dqn_algorithm import DqnInfo, DqnState
from alfx.algorithms.munchausen_dqn_algorithm import MunchausenDqnAlgorithm, soft_value_and_bonus
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep
from alfx.networks.q_networks import QNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

ACTION = BoundedTensorSpec((), torch.int64, 2, 4)
SMALL = partial(QNetwork, fc_layer_params=(8, ))


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


def make(**arguments):
    torch.manual_seed(0)
    algorithm = MunchausenDqnAlgorithm(TensorSpec((3, )), ACTION, q_network_cls=SMALL, **arguments)
    with torch.no_grad():
        for parameter in [*algorithm.critics.parameters(), *algorithm.target_critics.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return algorithm


def batch(length, size=5):
    torch.manual_seed(1)
    step_type = torch.full((length, size), int(StepType.MID), dtype=torch.int32)
    step_type[1, 0], step_type[0, 1] = int(StepType.LAST), int(StepType.LAST)
    discount = torch.ones(length, size)
    discount[1, 0] = 0.0
    inputs = TimeStep(step_type, torch.randn(length, size), discount, torch.randn(length, size, 3))
    return inputs, DqnInfo(action=torch.randint(2, 5, (length, size)))


def q_of(network, x):
    with torch.no_grad():
        return network(x)[0].tolist()


def test_value_and_bonus_are_those_worked_out_by_hand():
    # pi(0) = 3/4 and pi(1) = 1/4 for values 0 and -ln 3 at temperature 1: value ln(1 + 1/3) = 0.28768, bonuses
    # ln(3/4) = -0.28768 and ln(1/4) = -1.38629, which the bound -1 raises to -1
    values = torch.tensor([[0.0, -math.log(3)]] * 2)
    value, bonus = soft_value_and_bonus(values, torch.tensor([0, 1]), 1.0, -1.0)
    torch.testing.assert_close(value, torch.full((2, ), 0.28768), atol=1e-5, rtol=0)
    torch.testing.assert_close(bonus, torch.tensor([-0.28768, -1.0]), atol=1e-5, rtol=0)
    # at temperature 2, values 2 and 2 - 2 ln 3 have the same policy, and everything is twice as large
    value, bonus = soft_value_and_bonus(2 * values + 2, torch.tensor([0, 1]), 2.0, -10.0)
    torch.testing.assert_close(value, torch.full((2, ), 2.57536), atol=1e-5, rtol=0)
    torch.testing.assert_close(bonus, torch.tensor([-0.57536, -2.77259]), atol=1e-5, rtol=0)


def slow_loss(algorithm, inputs, action, tau, alpha, least, steps):
    """Return the squared errors ``[T - 1][B]`` of returns of up to ``steps`` rewards, with gamma 0.9."""
    length, size = inputs.step_type.shape
    losses = []
    for t in range(length - 1):
        losses.append([])
        for b in range(size):
            target, factor, k = 0.0, 1.0, t
            for k in range(t, min(t + steps, length - 1)):
                if inputs.step_type[k, b] == StepType.LAST:
                    break
                q = q_of(algorithm.target_critics, inputs.observation[k, b][None])[0]
                log_sum = math.log(sum(math.exp(x / tau) for x in q))
                bonus = min(max(tau * (q[int(action[k, b]) - 2] / tau - log_sum), least), 0.0)
                target += factor * (float(inputs.reward[k + 1, b]) + alpha * bonus)
                factor *= 0.9 * float(inputs.discount[k + 1, b])
                k += 1
            q = q_of(algorithm.target_critics, inputs.observation[k, b][None])[0]
            pi = torch.softmax(torch.tensor(q, dtype=torch.float64) / tau, -1).tolist()
            target += factor * sum(p * (x - tau * math.log(p)) for p, x in zip(pi, q))
            value = q_of(algorithm.critics, inputs.observation[t, b][None])[0][int(action[t, b]) - 2]
            losses[-1].append((value - target)**2)
    return torch.tensor(losses)


@pytest.mark.parametrize('alpha', [0.0, 0.9])
@pytest.mark.parametrize('length, loss', [(2, OneStepTDLoss), (4, partial(TDLoss, td_lambda=1.0))])
def test_the_loss_matches_a_slow_loop(length, loss, alpha):
    algorithm = make(temperature=0.4, bonus_weight=alpha, least_bonus=-0.5,
                     critic_loss_ctor=partial(loss, gamma=0.9))
    inputs, rollout_info = batch(length)
    found = algorithm.calc_loss(algorithm.train_sequence(inputs, DqnState(), rollout_info).info).loss[:-1]
    expected = slow_loss(algorithm, inputs, rollout_info.action, 0.4, alpha, -0.5, length - 1)
    valid = inputs.step_type[:-1] != StepType.LAST
    torch.testing.assert_close(found.detach()[valid], expected[valid], atol=1e-4, rtol=1e-4)


def test_first_steps_alone_have_the_same_target_as_all_steps():
    settings = dict(temperature=0.4, critic_loss_ctor=partial(TDLoss, td_lambda=1.0))
    inputs, rollout_info = batch(4)
    losses = [algorithm.calc_loss(algorithm.train_sequence(inputs, DqnState(), rollout_info).info).loss
              for algorithm in (make(**settings), make(train_first_step_only=True, **settings))]
    torch.testing.assert_close(4 * losses[0][0], losses[1][0])


def test_replayed_updates_match_eager_ones(warm_up, caplog):
    agents = []
    for count in (1, 10**9):
        warm_up(count)
        agents.append(make_agent(rl=partial(MunchausenDqnAlgorithm, q_network_cls=SMALL, calculate_priority=True)))
        train(agents[-1:], 6)
    assert num_graphs(agents[0]) and not num_graphs(agents[1]) and not warnings_in(caplog)
    assert_same_parameters(agents, atol=0.0, rtol=0.0)


@pytest.mark.parametrize('arguments, message', [
    (dict(reward_spec=TensorSpec((2, ))), 'expected a scalar reward'),
    (dict(least_bonus=0.5), 'least_bonus must be a number <= 0'),
    (dict(temperature=0.0), 'temperature'), (dict(bonus_weight=1.5), 'bonus_weight')])
def test_wrong_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(Exception, match=message):
        make(**arguments)
