"""Soft actor-critic with optimistic exploration."""
import math
from functools import partial

import pytest
import torch
from helpers.sac_agents import make_agent, random_steps
from torch import nn

from alfx import nest
from alfx.algorithms.oac_algorithm import OacAlgorithm, exploration_shift, upper_bound
from alfx.algorithms.sac_algorithm import SacAlgorithm, SacInfo
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.projection_networks import BetaProjectionNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils import dist_utils

make_oac = partial(make_agent, algorithm_cls=OacAlgorithm)
every_environment = pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward',
                                                            'nested observation'])
SPECS = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 1)


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


@every_environment
def test_training_changes_every_parameter_and_is_repeated_by_the_same_seed(environment):
    results = []
    for _ in range(2):
        agent, _ = make_oac(environment)
        before = parameters(agent)
        for _ in range(3):
            agent.train_iter()
        assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_environment
def test_one_environment_is_enough_and_a_checkpoint_restores_the_rollout(environment):
    agent, env = make_oac(environment, batch_size=1, mini_batch_size=1)
    for _ in range(3):
        agent.train_iter()
    other, _ = make_oac(environment, batch_size=1, seed=9)
    other.load_state_dict(agent.state_dict())
    actions = []
    for a in (agent, other):
        torch.manual_seed(0)
        actions.append(nest.flatten(a.rollout_step(env.current_time_step(), a.get_initial_rollout_state(1)).output))
    assert all(torch.equal(a, b) for a, b in zip(*actions))
    assert all(p.grad is None for p in other.parameters())


def test_two_critics_have_half_their_distance_as_standard_deviation():
    critics = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    torch.testing.assert_close(upper_bound(critics, 2.0), torch.tensor([2.0 + 2.0 * 1.0, 5.0]), atol=1e-5, rtol=0)


def test_the_shift_reaches_the_divergence_bound_in_the_best_direction():
    torch.manual_seed(0)
    gradients = [torch.randn(6, 2), torch.randn(6, 3)]
    scales = [torch.rand(6, 2) + 0.1, torch.rand(6, 3) + 0.1]
    shifts = exploration_shift(gradients, scales, 0.7)
    # KL(N(m + d, S) || N(m, S)) = d' S^-1 d / 2
    divergence = sum((0.5 * (d / s).square()).sum(1) for d, s in zip(shifts, scales))
    torch.testing.assert_close(divergence, torch.full((6, ), 0.7))
    gain = sum((g * d).sum(1) for g, d in zip(gradients, shifts))
    for _ in range(200):
        others = [torch.randn_like(s) * s for s in scales]
        length = (sum((0.5 * (d / s).square()).sum(1) for d, s in zip(others, scales)) / 0.7).sqrt()
        assert (sum((g * d).sum(1) for g, d in zip(gradients, others)) / length <= gain + 1e-5).all()
    # by hand: S g = (8, 3), g' S g = 16 + 9 = 25, sqrt(2 * 2) / 5 = 0.4
    by_hand = exploration_shift([torch.tensor([[2.0, 3.0]])], [torch.tensor([[2.0, 1.0]])], 2.0)
    torch.testing.assert_close(by_hand[0], torch.tensor([[3.2, 1.2]]))
    assert torch.equal(exploration_shift([torch.zeros(1, 2)], [torch.ones(1, 2)], 2.0)[0], torch.zeros(1, 2))


def test_a_gradient_within_rounding_is_no_direction():
    gradients, scales = [torch.tensor([[1e-9, -1e-9], [1.0, -1.0]])], [torch.ones(2, 2)]
    shift, = exploration_shift(gradients, scales, 0.5, torch.tensor([1e-5, 1e-5]))
    assert shift[0].norm() < 1e-3
    torch.testing.assert_close(shift[1], exploration_shift(gradients, scales, 0.5)[0][1])


class LinearCritics(nn.Module):
    """``Q = a[0]`` and ``3 a[0]``."""

    is_rnn = False

    def forward(self, inputs, state=()):
        return torch.stack((inputs[1][:, 0], 3 * inputs[1][:, 0]), 1), state


def test_the_rollout_moves_the_mean_before_squashing_and_keeps_the_scale():
    agent, env = make_oac(batch_size=3, explore_delta=0.5, beta_ub=3.0)
    algorithm = agent.policy
    algorithm._critic_networks = LinearCritics()
    observation = env.current_time_step().observation
    policy = algorithm.actor(observation)[0]
    exploring = algorithm._exploring(observation, policy)
    mean, scale = policy.base_dist.loc, policy.base_dist.scale
    # the shift is +- sqrt(2 delta) * scale = +-scale to where the bound of the critics a and 3 a grows, which is
    # 2 a + 3 |a|, with a the first element of the action: away from 0 on both sides
    expected = torch.where(torch.tanh(mean) > 0, mean + scale, mean - scale)
    torch.testing.assert_close(exploring.base_dist.loc, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(exploring.base_dist.scale, scale)
    torch.manual_seed(0)
    action = agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(3)).output
    torch.manual_seed(0)
    torch.testing.assert_close(action, exploring.sample())


def test_scalar_actions_are_shifted_like_vectors():
    gradients, scales = torch.tensor([0.3, -2.0, 0.0]), torch.tensor([0.5, 1.0, 2.0])
    resolution = torch.full((3, ), 1e-6)
    found, = exploration_shift([gradients], [scales], 0.5, resolution)
    expected, = exploration_shift([gradients[:, None]], [scales[:, None]], 0.5, resolution)
    assert torch.equal(found, expected[:, 0])


def test_without_exploration_it_is_soft_actor_critic():
    results = []
    for algorithm_cls, args in ((OacAlgorithm, dict(explore=False)), (SacAlgorithm, {})):
        agent, _ = make_agent('continuous', algorithm_cls=algorithm_cls, **args)
        for _ in range(3):
            agent.train_iter()
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    agent, _ = make_oac('discrete', explore=False)
    agent.train_iter()


def test_evaluation_and_training_use_the_policy_itself():
    agent, env = make_oac()
    algorithm = agent.policy
    policy = algorithm.actor(env.current_time_step().observation)[0]
    assert torch.equal(agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4)).output,
                       dist_utils.get_mode(policy))
    steps, action = random_steps(algorithm, 2, 5)
    torch.manual_seed(0)
    info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(10), SacInfo(action=action)).info
    policy = algorithm.actor(steps.observation.flatten(0, 1))[0]
    torch.testing.assert_close(info.action_distribution.base_dist.loc.flatten(0, 1), policy.base_dist.loc)
    assert math.isfinite(algorithm.calc_loss(info).loss.sum().item())


@pytest.mark.parametrize('args,message', [
    (dict(explore_delta=-1.0), 'explore_delta'),
    (dict(actor_network_cls=partial(ActorDistributionNetwork, continuous_projection_net_ctor=BetaProjectionNetwork)),
     'diagonal normals'),
])
def test_policies_that_cannot_explore_are_rejected(args, message):
    with pytest.raises(ValueError, match=message):
        OacAlgorithm(*SPECS, **args)
    with pytest.raises(ValueError, match='explore=False'):
        OacAlgorithm(SPECS[0], BoundedTensorSpec((), torch.int64, 0, 3))
    with pytest.raises(ValueError, match='recurrent'):
        make_oac('recurrent')
