"""Implicit Q-learning on a chain with known values, from the mean of the data up to the best action in the data."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from alfx.algorithms.iql_algorithm import IqlAlgorithm, IqlInfo
from alfx.data_structures import StepType, TimeStep
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

LENGTH, GAMMA, SPREAD = 5, 0.99, 1.0
REWARD = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])


def transitions():
    """Return each state of the chain with both actions, -0.5 and 0.5, as sequences of two steps ``[2, 10]``.

    Either action leads to the next state, and from the last state to the end. Their rewards are ``SPREAD`` above and
    below ``REWARD``.
    """
    state = torch.arange(LENGTH).repeat(2)
    sign = torch.tensor([-1.0, 1.0]).repeat_interleave(LENGTH)
    one_hot = F.one_hot(state, LENGTH).float()
    is_end = state == LENGTH - 1
    following = F.one_hot((state + 1) % LENGTH, LENGTH) * (~is_end).unsqueeze(1)
    step_type = torch.stack([torch.full_like(state, int(StepType.MID)),
                             torch.where(is_end, int(StepType.LAST), int(StepType.MID))]).int()
    reward = REWARD[state] + SPREAD * sign
    inputs = TimeStep(step_type=step_type, reward=torch.stack([torch.zeros_like(reward), reward]),
                      discount=torch.stack([torch.ones(2 * LENGTH), (~is_end).float()]),
                      observation=torch.stack([one_hot, following.float()]))
    return inputs, torch.stack([sign, sign]).unsqueeze(-1) / 2


@pytest.mark.parametrize('expectile', [0.5, 0.8, 0.999])
def test_values_are_expectiles_of_the_data(expectile):
    """Compare with the expectile of two equally likely numbers, ``tau * higher + (1 - tau) * lower``.

    Here it is the reward of a state plus (2 tau - 1) SPREAD. With tau near 1 it is the value of the best action in the
    data.
    """
    torch.manual_seed(0)
    algorithm = IqlAlgorithm(
        TensorSpec((LENGTH, )), BoundedTensorSpec((1, ), torch.float32, -1, 1),
        actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(4, )),
        critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=()),
        v_network_cls=partial(ValueNetwork, fc_layer_params=()), expectile=expectile, target_update_tau=1.0)
    inputs, action = transitions()

    def minimize(name, module):
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=60, line_search_fn='strong_wolfe')

        def loss():
            info = algorithm.train_sequence(inputs, algorithm.get_initial_train_state(4 * LENGTH),
                                            IqlInfo(action=action)).info
            total = getattr(algorithm.calc_loss(info).extra, name).sum()
            optimizer.zero_grad()
            total.backward()
            return total.detach()

        optimizer.step(loss)

    for _ in range(LENGTH + 1):  # each round corrects one more state, starting at the end
        minimize('critic', algorithm.critics)
        algorithm.after_update(None, None)
        minimize('value', algorithm._value_network)
    with torch.no_grad():
        found = algorithm._value_network(torch.eye(LENGTH))[0]
    gains = REWARD + (2 * expectile - 1) * SPREAD
    expected = [float(sum(GAMMA**i * gain for i, gain in enumerate(gains[start:]))) for start in range(LENGTH)]
    assert found.tolist() == pytest.approx(expected, abs=0.02)
