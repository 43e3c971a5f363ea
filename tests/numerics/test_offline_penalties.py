"""What keeps policies and values near the data, against slow loops written from the papers."""
from functools import partial

import pytest
import torch

from alfx import nest
from alfx.algorithms.ddpg_algorithm import DdpgInfo
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.algorithms.td3_bc_algorithm import Td3BcAlgorithm
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, (-1, 0), (3, 1))
HALF, GAMMA = torch.tensor([2.0, 0.5]), 0.99
CRITIC = partial(CriticNetwork, joint_fc_layer_params=(8, ))


def steps(length, batch):
    """Steps ``[T, B]`` of all kinds, some of them terminations, and actions within the bounds."""
    generator = torch.Generator().manual_seed(1)
    kinds = [StepType.FIRST, StepType.MID, StepType.LAST, StepType.FIRST, StepType.MID]
    step_type = torch.tensor([[int(kinds[(t + b) % 5]) for b in range(batch)] for t in range(length)])
    discount = torch.ones(length, batch)
    discount[:, ::2] = (step_type != StepType.LAST).float()[:, ::2]  # the others are cut off
    low = torch.tensor([-1.0, 0.0])
    return TimeStep(step_type=step_type.to(torch.int32), reward=torch.randn(length, batch, generator=generator),
                    discount=discount, observation=torch.randn(length, batch, 3, generator=generator)), low + (
                        2 * HALF * torch.rand(length, batch, 2, generator=generator))


def pairs(inputs, action):
    """Each pair of successive steps on which there is a loss, as ``(t, b), s, a, r, discount, s', a', is last'``."""
    for t in range(inputs.step_type.shape[0] - 1):
        for b in range(inputs.step_type.shape[1]):
            if inputs.step_type[t, b] != StepType.LAST:
                yield ((t, b), inputs.observation[t, b][None], action[t, b][None], inputs.reward[t + 1, b],
                       inputs.discount[t + 1, b], inputs.observation[t + 1, b][None], action[t + 1, b][None],
                       bool(inputs.step_type[t + 1, b] == StepType.LAST))


def train_info(algorithm, inputs, rollout_info):
    length, batch = inputs.step_type.shape
    return algorithm.train_sequence(inputs, algorithm.get_initial_train_state(length * batch), rollout_info).info


def gradient(loss, network):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)])


# TD3 with penalties ------------------------------------------------------------------------------------------------


def td3(cls=Td3BcAlgorithm, **kwargs):
    torch.manual_seed(0)
    return cls(OBSERVATION, ACTION, config=None, actor_network_ctor=partial(ActorNetwork, fc_layer_params=(8, )),
               critic_network_ctor=CRITIC, target_noise=0.0, policy_update_period=1, train_actor_on_last_step=False,
               **kwargs)


@pytest.mark.parametrize('length', [2, 4])
@pytest.mark.parametrize('critic_penalty, normalize', [(0.0, True), (0.3, True), (0.3, False)])
def test_the_losses_of_td3_with_penalties_are_those_of_the_papers(length, critic_penalty, normalize):
    algorithm = td3(actor_penalty=0.7, critic_penalty=critic_penalty, normalize_value=normalize)
    inputs, action = steps(length, 5)
    found = algorithm.calc_loss(train_info(algorithm, inputs, DdpgInfo(action=action)))
    pi, q = algorithm._actor_network, algorithm._critic_networks
    target_pi, target_q = algorithm._target_actor_network, algorithm._target_critic_networks
    observation = inputs.observation[:-1].reshape(-1, 3)
    size = q((observation, pi(observation)[0]))[0][:, 0].abs().mean().item() if normalize else 1.0
    actor_loss, kept = 0.0, torch.zeros(length, 5)
    for (t, b), s, a, reward, discount, s2, a2, is_last in pairs(inputs, action):
        chosen = target_pi(s2)[0]
        penalty = 0.0 if is_last else critic_penalty * ((chosen - a2) / HALF).square().sum()
        target = reward + GAMMA * discount * (target_q((s2, chosen))[0].min() - penalty)
        critic = (q((s, a))[0] - target.detach()).square().sum()
        assert found.extra.critic[t, b].item() == pytest.approx(critic.item(), abs=1e-5), (t, b)
        done = pi(s)[0]
        actor_loss = actor_loss - q((s, done))[0][0, 0] / size + 0.7 * ((done - a) / HALF).square().sum()
        kept[t, b] = 1.0
    torch.testing.assert_close(gradient((found.extra.actor * kept).sum(), pi), gradient(actor_loss, pi))


def test_without_penalties_it_is_td3():
    inputs, action = steps(3, 4)
    found = []
    for cls, kwargs in ((Td3Algorithm, {}), (Td3BcAlgorithm, dict(actor_penalty=0.0, normalize_value=False))):
        algorithm = td3(cls, **kwargs)
        found.append(algorithm.calc_loss(train_info(algorithm, inputs, DdpgInfo(action=action))).loss)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_step_by_step_the_penalties_are_the_same():
    algorithm = td3(critic_penalty=0.5, normalize_value=False)
    inputs, action = steps(3, 4)
    infos = [algorithm.train_step(nest.map_structure(lambda x, t=t: x[t], inputs), algorithm.get_initial_train_state(4),
                                  DdpgInfo(action=action[t])).info for t in range(3)]
    at_once = algorithm.calc_loss(train_info(algorithm, inputs, DdpgInfo(action=action)))
    torch.testing.assert_close(algorithm.calc_loss(nest.stack(infos)).loss, at_once.loss)


def test_a_penalty_of_several_returns_is_refused():
    with pytest.raises(ConfError, match='critic_penalty'):
        td3(critic_penalty=0.1, reward_spec=TensorSpec((2, )))
    assert td3(reward_spec=TensorSpec((2, ))).own_traits().fixed_update
    with pytest.raises(ConfError, match='actor_penalty'):
        td3(actor_penalty=-1.0)
