"""The losses of offline algorithms against slow loops and closed forms."""
import math
from functools import partial

import pytest
import torch

from alfx import nest
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.algorithms.iql_algorithm import IqlActorInfo, IqlAlgorithm, IqlCriticInfo, IqlInfo
from alfx.algorithms.offline.offline_losses import StoredActions, advantage_weights, expectile_loss
from alfx.data_structures import BasicRLInfo, StepType, TimeStep
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.dist_utils import DiagMultivariateNormal

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, (-1, 0), (3, 1))


@pytest.mark.parametrize('low, high', [(-math.inf, math.inf), (0.0, math.inf)])
def test_actions_without_bounds_are_not_moved(low, high):
    actions = StoredActions(BoundedTensorSpec((2, ), torch.float32, low, high))
    x = torch.tensor([[0.5, 1e6], [3.0, 0.25]])
    assert torch.equal(actions.inside_bounds(x), x)
    bounded = StoredActions(BoundedTensorSpec((2, ), torch.float32, 0.0, 1.0))
    assert 0.0 < float(bounded.inside_bounds(torch.zeros(1, 2)).min()) < 1e-3


def test_the_expectile_loss_weighs_the_two_sides_of_a_square():
    # 0.8 * 2^2 = 3.2 above, 0.2 * 3^2 = 1.8 below
    assert expectile_loss(torch.tensor([2.0, -3.0, 0.0]), 0.8).tolist() == pytest.approx([3.2, 1.8, 0.0])
    x = torch.randn(100)
    torch.testing.assert_close(expectile_loss(x, 0.5), x.square() / 2)


def test_its_minimum_is_the_expectile():
    """Minimize to m with tau * E[(X - m)+] = (1 - tau) * E[(m - X)+]: 2/3 for X uniform on [0, 1] and tau = 0.8."""
    x = torch.linspace(0, 1, 10001, dtype=torch.float64)
    m = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    for _ in range(200):
        gradient, = torch.autograd.grad(expectile_loss(x - m, 0.8).mean(), m)
        m = (m - gradient).detach().requires_grad_()
    assert float(m.detach()) == pytest.approx(2 / 3, abs=1e-4)


def test_weights_are_exponentials_up_to_a_maximum():
    advantage = torch.tensor([0.0, 1.0, -1.0, 1000.0], requires_grad=True)
    weights = advantage_weights(advantage, 0.5, 100.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(2), math.exp(-2), 100.0])
    assert not weights.requires_grad


def test_dataset_actions_are_moved_off_their_bounds_and_no_further():
    stored = StoredActions(ACTION)
    moved = stored.inside_bounds(torch.tensor([[-1.0, 1.0], [3.0, 0.0], [1.0, 0.5]]))
    assert moved.tolist() == [pytest.approx([-1 + 2e-4, 1 - 5e-5]), pytest.approx([3 - 2e-4, 5e-5]), [1.0, 0.5]]
    free = StoredActions(TensorSpec((2, )))
    assert free.inside_bounds(torch.full((1, 2), 9.0)).tolist() == [[9.0, 9.0]]
    discrete = StoredActions(BoundedTensorSpec((), torch.int64, 0, 3))
    assert discrete.inside_bounds(torch.tensor([0, 3])).tolist() == [0, 3]


def test_the_error_of_an_action_is_in_units_of_half_its_range():
    error = StoredActions(ACTION).squared_error(torch.tensor([[1.0, 0.5]]), torch.tensor([[2.0, 0.0]]))
    assert error.tolist() == pytest.approx([(1 / 2)**2 + (0.5 / 0.5)**2])


def test_squashed_policies_have_finite_likelihood_at_the_action_bounds():
    squashed = partial(NormalProjectionNetwork, scale_distribution=True)
    network = ActorDistributionNetwork(OBSERVATION, ACTION, fc_layer_params=(4, ),
                                       continuous_projection_net_ctor=squashed)
    distribution, _ = network(torch.zeros(2, 3))
    log_prob = StoredActions(ACTION).log_prob(distribution, torch.tensor([[-1.0, 1.0], [3.0, 0.0]]))
    assert torch.isfinite(log_prob).all()
    log_prob.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def iql(**kwargs):
    torch.manual_seed(0)
    return IqlAlgorithm(
        OBSERVATION, ACTION, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
        critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(8, )),
        v_network_cls=partial(ValueNetwork, fc_layer_params=(8, )), actor_optimizer=Adam(lr=1e-3),
        critic_optimizer=Adam(lr=1e-3), value_optimizer=Adam(lr=1e-3), **kwargs)


def steps(length, batch, reward_shape=()):
    generator = torch.Generator().manual_seed(1)
    kinds = [StepType.FIRST, StepType.MID, StepType.LAST, StepType.FIRST, StepType.MID]
    step_type = torch.stack([torch.tensor([int(kinds[(t + b) % 5]) for b in range(batch)]) for t in range(length)])
    return TimeStep(step_type=step_type.to(torch.int32), reward=torch.randn(length, batch, *reward_shape,
                                                                           generator=generator),
                    discount=(step_type != StepType.LAST).float(),
                    observation=torch.randn(length, batch, 3, generator=generator)), torch.rand(
                        length, batch, 2, generator=generator)


@pytest.mark.parametrize('length', [2, 4])
def test_the_losses_of_iql_match_the_paper(length):
    algorithm, batch, tau, temperature, limit, gamma = iql(expectile=0.7, temperature=0.4,
                                                           max_exp_advantage=1.5), 5, 0.7, 0.4, 1.5, 0.99
    inputs, action = steps(length, batch)
    rollout = IqlInfo(action=action)
    info = algorithm.train_sequence(inputs, algorithm.get_initial_train_state(length * batch), rollout).info
    found = algorithm.calc_loss(info)
    q, q_target = algorithm.critics, algorithm.target_critics
    v, pi = algorithm._value_network, algorithm.actor
    for t in range(length - 1):
        for b in range(batch):
            if inputs.step_type[t, b] == StepType.LAST:
                continue
            s, a, s2 = inputs.observation[t, b][None], action[t, b][None], inputs.observation[t + 1, b][None]
            target = inputs.reward[t + 1, b] + gamma * inputs.discount[t + 1, b] * v(s2)[0]
            critic = ((q((s, a))[0] - target.detach())**2).sum()
            u = q_target((s, a))[0].min() - v(s)[0]
            value = abs(tau - float(u < 0)) * u**2
            weight = min(math.exp(float(u) / temperature), limit)
            actor = -weight * pi(s)[0].log_prob(a)
            for name, expected in (('critic', critic), ('value', value), ('actor', actor)):
                assert float(getattr(found.extra, name)[t, b]) == pytest.approx(float(expected), abs=1e-5), (name, t, b)
    assert found.loss[-1].tolist() == [0.0] * batch
    torch.testing.assert_close(found.loss, sum(found.extra))


def test_iql_on_sequences_trains_as_step_by_step():
    algorithm = iql()
    inputs, action = steps(3, 4)
    at_once = algorithm.calc_loss(algorithm.train_sequence(inputs, algorithm.get_initial_train_state(12),
                                                           IqlInfo(action=action)).info)
    infos = [algorithm.train_step(nest.map_structure(lambda x, t=t: x[t], inputs), algorithm.get_initial_train_state(4),
                                  IqlInfo(action=action[t])).info for t in range(3)]
    one_by_one = algorithm.calc_loss(nest.stack(infos))
    gradients = [torch.autograd.grad(x.loss.sum(), [p for p in algorithm.parameters() if p.requires_grad],
                                     allow_unused=True) for x in (at_once, one_by_one)]
    for x, y in zip(*gradients):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


def test_only_v_follows_the_expectile_and_only_the_critics_the_target():
    """Check that each loss has gradients in its own network only."""
    algorithm = iql()
    inputs, action = steps(2, 4)
    info = algorithm.train_sequence(inputs, algorithm.get_initial_train_state(8), IqlInfo(action=action)).info
    networks = dict(actor=algorithm.actor, critic=algorithm.critics, value=algorithm._value_network)
    for name in networks:
        loss = getattr(algorithm.calc_loss(info).extra, name).sum()
        for other, module in networks.items():
            reached = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
            assert any(x is not None for x in reached) == (name == other), (name, other)


def test_reward_dimensions_are_weighted_in_the_advantage():
    wide = iql(reward_spec=TensorSpec((2, )), reward_weights=[1.0, -1.0])
    inputs, action = steps(2, 4, (2, ))
    info = wide.train_sequence(inputs, wide.get_initial_train_state(8), IqlInfo(action=action)).info
    assert info.critic.critics.shape == (2, 4, 2, 2) and info.critic.value.shape == (2, 4, 2)
    s, a = inputs.observation[0], action[0]
    q = wide.target_critics((s, a))[0]
    pessimistic = torch.stack([q[..., 0].min(1).values, q[..., 1].max(1).values], -1)
    torch.testing.assert_close(info.critic.target_value[0], pessimistic)
    advantage = (pessimistic - wide._value_network(s)[0]) @ torch.tensor([1.0, -1.0])
    expected = -advantage.exp().clamp(max=100) * wide.actor(s)[0].log_prob(a)
    torch.testing.assert_close(wide.calc_loss(info).extra.actor[0], expected)


def test_infos_have_the_documented_fields():
    assert IqlInfo._fields == ('reward', 'step_type', 'discount', 'action', 'action_distribution', 'actor', 'critic')
    assert IqlActorInfo._fields == ('actor_loss', ) and IqlCriticInfo._fields == ('critics', 'target_value', 'value')


def test_cloning_a_normal_policy_reaches_its_entropy():
    """Clone a policy until the negative log-likelihood is within 0.02 of the entropy of the expert."""
    torch.manual_seed(0)
    algorithm = BcAlgorithm(TensorSpec((1, )), BoundedTensorSpec((1, ), torch.float32, -9, 9),
                            actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(16, )))
    expert = DiagMultivariateNormal(torch.zeros(1), torch.full((1, ), 0.5))
    optimizer = torch.optim.Adam(algorithm.parameters(), lr=2e-2)
    for _ in range(400):
        state = torch.rand(256, 1) * 2 - 1
        action = 2 * state + expert.sample((256, ))
        info = algorithm.train_step(TimeStep(observation=state), algorithm.get_initial_train_state(256),
                                    BasicRLInfo(action=action)).info
        optimizer.zero_grad()
        loss = info.actor.loss.mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        state = torch.rand(20000, 1) * 2 - 1
        loss = algorithm.train_step(TimeStep(observation=state), algorithm.get_initial_train_state(20000), BasicRLInfo(
            action=2 * state + expert.sample((20000, )))).info.actor.loss.mean()
    assert float(loss) == pytest.approx(float(expert.entropy()), abs=0.02)
