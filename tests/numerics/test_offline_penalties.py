"""Penalties that keep policies and values near the data, against slow loops written from the papers."""
import math
from functools import partial

import pytest
import torch

from alfx import nest
from alfx.algorithms.awac_algorithm import AwacAlgorithm
from alfx.algorithms.cql_algorithm import CqlAlgorithm, DiscreteCqlAlgorithm
from alfx.algorithms.ddpg_algorithm import DdpgInfo
from alfx.algorithms.dqn_algorithm import DqnAlgorithm, DqnInfo
from alfx.algorithms.offline.offline_losses import log_integral_exp
from alfx.algorithms.sac_algorithm import SacAlgorithm, SacInfo
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.algorithms.td3_bc_algorithm import Td3BcAlgorithm
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.networks.q_networks import QNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, (-1, 0), (3, 1))
HALF, GAMMA = torch.tensor([2.0, 0.5]), 0.99
CRITIC = partial(CriticNetwork, joint_fc_layer_params=(8, ))
ACTOR = partial(ActorDistributionNetwork, fc_layer_params=(8, ), continuous_projection_net_ctor=partial(
    NormalProjectionNetwork, state_dependent_std=True, scale_distribution=True))


def steps(length, batch):
    """Return steps ``[T, B]`` of all step types, with terminations and truncations, and actions within the bounds."""
    generator = torch.Generator().manual_seed(1)
    kinds = [StepType.FIRST, StepType.MID, StepType.LAST, StepType.FIRST, StepType.MID]
    step_type = torch.tensor([[int(kinds[(t + b) % 5]) for b in range(batch)] for t in range(length)])
    discount = torch.ones(length, batch)
    discount[:, ::2] = (step_type != StepType.LAST).float()[:, ::2]  # the others are truncated
    low = torch.tensor([-1.0, 0.0])
    return TimeStep(step_type=step_type.to(torch.int32), reward=torch.randn(length, batch, generator=generator),
                    discount=discount, observation=torch.randn(length, batch, 3, generator=generator)), low + (
                        2 * HALF * torch.rand(length, batch, 2, generator=generator))


def pairs(inputs, action):
    """Yield each pair of successive steps that has a loss, as ``(t, b), s, a, r, discount, s', a', is last'``."""
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


@pytest.mark.parametrize('length, batch', [(2, 1), (2, 5), (4, 5)])  # the first has one step with a loss
@pytest.mark.parametrize('critic_penalty, normalize', [(0.0, True), (0.3, True), (0.3, False)])
def test_the_losses_of_td3_with_penalties_match_the_papers(length, batch, critic_penalty, normalize):
    algorithm = td3(actor_penalty=0.7, critic_penalty=critic_penalty, normalize_value=normalize)
    inputs, action = steps(length, batch)
    found = algorithm.calc_loss(train_info(algorithm, inputs, DdpgInfo(action=action)))
    pi, q = algorithm.actor, algorithm.critics
    target_pi, target_q = algorithm._target_actor_network, algorithm.target_critics
    observation = inputs.observation[:-1][inputs.step_type[:-1] != StepType.LAST]
    size = q((observation, pi(observation)[0]))[0][:, 0].abs().mean().item() if normalize else 1.0
    actor_loss, mask = 0.0, torch.zeros(length, batch)
    for (t, b), s, a, reward, discount, s2, a2, is_last in pairs(inputs, action):
        chosen = target_pi(s2)[0]
        penalty = 0.0 if is_last else critic_penalty * ((chosen - a2) / HALF).square().sum()
        target = reward + GAMMA * discount * (target_q((s2, chosen))[0].min() - penalty)
        critic = (q((s, a))[0] - target.detach()).square().sum()
        assert found.extra.critic[t, b].item() == pytest.approx(critic.item(), abs=1e-5), (t, b)
        done = pi(s)[0]
        actor_loss = actor_loss - q((s, done))[0][0, 0] / size + 0.7 * ((done - a) / HALF).square().sum()
        mask[t, b] = 1.0
    torch.testing.assert_close(gradient((found.extra.actor * mask).sum(), pi), gradient(actor_loss, pi))


def test_without_penalties_it_is_td3():
    inputs, action = steps(3, 4)
    found = []
    for cls, kwargs in ((Td3Algorithm, {}), (Td3BcAlgorithm, dict(actor_penalty=0.0, normalize_value=False))):
        algorithm = td3(cls, **kwargs)
        found.append(algorithm.calc_loss(train_info(algorithm, inputs, DdpgInfo(action=action))).loss)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_penalties_of_steps_match_those_of_sequences():
    algorithm = td3(critic_penalty=0.5, normalize_value=False)
    inputs, action = steps(3, 4)
    infos = [algorithm.train_step(nest.map_structure(lambda x, t=t: x[t], inputs), algorithm.get_initial_train_state(4),
                                  DdpgInfo(action=action[t])).info for t in range(3)]
    at_once = algorithm.calc_loss(train_info(algorithm, inputs, DdpgInfo(action=action)))
    torch.testing.assert_close(algorithm.calc_loss(nest.stack(infos)).loss, at_once.loss)


def test_a_penalty_of_several_returns_is_rejected():
    with pytest.raises(ConfError, match='critic_penalty'):
        td3(critic_penalty=0.1, reward_spec=TensorSpec((2, )))
    assert td3(reward_spec=TensorSpec((2, ))).own_capabilities().traceable_update
    with pytest.raises(ConfError, match='actor_penalty'):
        td3(actor_penalty=-1.0)


# Advantage-weighted actor-critic -----------------------------------------------------------------------------------


def stochastic(cls, **kwargs):
    torch.manual_seed(0)
    return cls(OBSERVATION, ACTION, actor_network_cls=ACTOR, critic_network_cls=CRITIC, **kwargs)


@pytest.mark.parametrize('length', [2, 4])
def test_the_losses_of_awac_match_the_paper(length, monkeypatch):
    """Replace samples of the policy by its mode, so that they are known."""
    algorithm = stochastic(AwacAlgorithm, temperature=0.01, max_exp_advantage=1.03)
    squashed = algorithm.actor(torch.zeros(1, 3))[0].__class__
    monkeypatch.setattr(squashed, 'rsample_with_log_prob', lambda self: (self.mode, self.log_prob(self.mode)))
    inputs, action = steps(length, 5)
    info = train_info(algorithm, inputs, SacInfo(action=action))
    found = algorithm.calc_loss(info)
    pi, q, target_q = algorithm.actor, algorithm.critics, algorithm.target_critics
    weights = []
    for (t, b), s, a, reward, discount, s2, _, _ in pairs(inputs, action):
        target = reward + GAMMA * discount * target_q((s2, pi(s2)[0].mode))[0].min()
        critic = (q((s, a))[0] - target.detach()).square().sum()
        advantage = q((s, a))[0].min() - q((s, pi(s)[0].mode))[0].min()
        weights.append(min((advantage / 0.01).exp().item(), 1.03))
        actor = -weights[-1] * pi(s)[0].log_prob(a)
        assert found.extra.critic[t, b].item() == pytest.approx(critic.item(), abs=1e-4), (t, b)
        assert found.extra.actor.actor_loss[t, b].item() == pytest.approx(actor.item(), abs=1e-4), (t, b)
    assert 1.03 in weights and min(weights) < 1.0
    torch.testing.assert_close(found.loss, found.extra.critic + found.extra.actor.actor_loss)
    critics = list(algorithm.critics.parameters())
    critic_gradients = torch.autograd.grad(found.extra.actor.actor_loss.sum(), critics, allow_unused=True,
                                           retain_graph=True)
    assert all(x is None for x in critic_gradients), 'the weights have no gradient'


def test_awac_has_no_temperature_of_an_entropy_and_no_discrete_actions():
    algorithm = stochastic(AwacAlgorithm)
    assert not any('alpha' in name for name, _ in algorithm.named_parameters())
    assert algorithm.own_capabilities().traceable_update
    with pytest.raises(ConfError, match='discrete'):
        AwacAlgorithm(OBSERVATION, BoundedTensorSpec((), torch.int64, 0, 3), actor_network_cls=ACTOR,
                      critic_network_cls=CRITIC)
    with pytest.raises(TypeError, match='target_entropy'):
        stochastic(AwacAlgorithm, target_entropy=-1.0)


# Conservative Q-learning -------------------------------------------------------------------------------------------


def test_the_integral_is_estimated_by_importance_sampling():
    """Integrate exp(2 a + 1) over [0, 3], which is e (e^6 - 1) / 2, from samples of density 2 a / 9."""
    action = 3 * torch.rand(200000, 1, dtype=torch.float64).sqrt()
    found = log_integral_exp(2 * action + 1, (2 * action / 9).log())
    assert found.item() == pytest.approx(math.log(math.e * (math.exp(6) - 1) / 2), abs=0.02)


def test_the_cql_penalty_is_the_log_integral_minus_the_data_value(monkeypatch):
    """Compare with a sum over a grid, which approximates the integral in one dimension."""
    torch.manual_seed(0)
    action_spec = BoundedTensorSpec((1, ), torch.float32, -1, 3)
    algorithm = CqlAlgorithm(OBSERVATION, action_spec, actor_network_cls=ACTOR, critic_network_cls=CRITIC,
                             num_sampled_actions=500, penalty_weight=3.0)
    inputs, action = steps(2, 4)
    action = action[..., :1]
    grid = torch.linspace(-1 + 0.002, 3 - 0.002, 1000).unsqueeze(1)
    monkeypatch.setattr(algorithm, '_sampled_actions_of', lambda _: (
        grid.repeat_interleave(4, 0), torch.full((1000, 4), -math.log(4))))
    found = algorithm.calc_loss(train_info(algorithm, inputs, SacInfo(action=action)))
    for (t, b), s, a, *_ in pairs(inputs, action):
        values = algorithm.critics((s.expand(1000, 3), grid))[0]
        integral = (values.exp().sum(0) * 4 / 1000).log()
        expected = 3.0 * (integral - algorithm.critics((s, a))[0][0]).sum()
        assert found.extra.penalty[t, b].item() == pytest.approx(expected.item(), abs=1e-4), (t, b)
    assert found.extra.penalty[-1].tolist() == [0.0] * 4


def test_cql_actions_are_uniform_and_on_policy_with_known_densities():
    algorithm = stochastic(CqlAlgorithm, num_sampled_actions=4000)
    observation = torch.randn(2, 3)
    distribution = algorithm.actor(observation)[0]
    action, log_density = algorithm._sampled_actions_of(distribution)
    action = action.unflatten(0, (8000, 2))
    uniform, on_policy = action[:4000], action[4000:]
    assert log_density.shape == (8000, 2)
    torch.testing.assert_close(log_density[:4000], torch.full((4000, 2), -math.log(4 * 1)))
    torch.testing.assert_close(uniform.mean((0, 1)), torch.tensor([1.0, 0.5]), atol=0.05, rtol=0)
    torch.testing.assert_close(uniform.amax((0, 1)), torch.tensor([3.0, 1.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(uniform.amin((0, 1)), torch.tensor([-1.0, 0.0]), atol=0.01, rtol=0)
    for i in range(3):
        torch.testing.assert_close(log_density[4000 + i], distribution.log_prob(on_policy[i]), atol=1e-3, rtol=1e-3)


def test_without_a_penalty_cql_is_sac_and_with_it_only_the_critics_differ():
    inputs, action = steps(3, 4)
    found = {}
    for name, cls, kwargs in (('sac', SacAlgorithm, dict(use_entropy_reward=False)),
                              ('none', CqlAlgorithm, dict(penalty_weight=0.0)), ('some', CqlAlgorithm, {})):
        algorithm = stochastic(cls, **kwargs)
        torch.manual_seed(1)
        loss = algorithm.calc_loss(train_info(algorithm, inputs, SacInfo(action=action)))
        total = loss.loss[:-1].sum()
        found[name] = [gradient(total, x) for x in (algorithm.actor, algorithm.critics)]
        critic = loss.extra.critic
        found[name].append(critic)
    for x, y in zip(found['sac'], found['none']):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(found['sac'][0], found['some'][0])
    torch.testing.assert_close(found['sac'][2], found['some'][2])
    assert (found['sac'][1] - found['some'][1]).abs().max() > 0.1


def test_calibration_stops_policy_values_below_the_data_return():
    """Check that calibration does not lower values of the policy below the return in the data."""
    inputs, action = steps(2, 4)
    penalties = {}
    for bound in (None, -1e6, 1e6):
        algorithm = stochastic(CqlAlgorithm, calibrated=bound is not None)
        torch.manual_seed(1)
        rollout = SacInfo(action=action)
        if bound is not None:
            rollout = rollout._replace(discounted_return=torch.full((2, 4), bound))
        info = train_info(algorithm, inputs, rollout)
        penalties[bound] = info.penalty
        policy_is_pushed = gradient(info.penalty.sum(), algorithm.critics)
    torch.testing.assert_close(penalties[-1e6], penalties[None])
    assert (penalties[1e6][0] > 1e6).all()
    # If the return is above all values, only the value of the data has a gradient: -Q(s, a).
    value = algorithm.critics((inputs.observation[0], action[0]))[0].sum()
    torch.testing.assert_close(policy_is_pushed, -gradient(value, algorithm.critics))
    with pytest.raises(ConfError, match='record_episodic_return'):
        train_info(stochastic(CqlAlgorithm, calibrated=True), inputs, SacInfo(action=action))


CHOICE = BoundedTensorSpec((), torch.int64, 1, 4)


def discrete(cls=DiscreteCqlAlgorithm, **kwargs):
    torch.manual_seed(0)
    return cls(OBSERVATION, CHOICE, q_network_cls=partial(QNetwork, fc_layer_params=(8, )), **kwargs)


@pytest.mark.parametrize('bound', [None, 0.05])
@pytest.mark.parametrize('kwargs', [{}, dict(target_net_target_action=False), dict(num_critic_replicas=1)])
def test_the_discrete_cql_penalty_covers_all_actions(bound, kwargs):
    algorithm = discrete(penalty_weight=0.7, calibrated=bound is not None, **kwargs)
    inputs, _ = steps(3, 5)
    action = torch.randint(1, 5, (3, 5))
    rollout = DqnInfo(action=action, discounted_return=() if bound is None else torch.full((3, 5), bound))
    found = algorithm.calc_loss(train_info(algorithm, inputs, rollout))
    plain = discrete(DqnAlgorithm, **kwargs)
    expected = plain.calc_loss(train_info(plain, inputs, DqnInfo(action=action)))
    torch.testing.assert_close(found.extra.critic, expected.loss)
    torch.testing.assert_close(found.loss, found.extra.critic + found.extra.penalty)
    for (t, b), s, a, *_ in pairs(inputs, action):
        values = algorithm.critics(s)[0].reshape(-1, 4)
        lowered = values if bound is None else values.clamp(min=bound)
        penalty = 0.7 * (lowered.exp().sum(-1).log() - values[:, int(a) - 1]).sum()
        assert found.extra.penalty[t, b].item() == pytest.approx(penalty.item(), abs=1e-5), (t, b)


@pytest.mark.parametrize('bound', [None, 0.05])
def test_the_discrete_cql_penalty_covers_valid_actions_only(bound):
    algorithm = discrete(calibrated=bound is not None)
    inputs, _ = steps(2, 4)
    mask = torch.tensor([True, False, True, False]).expand(2, 4, 4)
    rollout = DqnInfo(action=torch.full((2, 4), 3),
                      discounted_return=() if bound is None else torch.full((2, 4), bound))
    penalty = train_info(algorithm, inputs._replace(action_mask=mask), rollout).penalty[0]
    values = algorithm.critics(inputs.observation[0])[0]
    lowered = values if bound is None else values.clamp(min=bound)
    torch.testing.assert_close(penalty, (lowered[..., [0, 2]].logsumexp(-1) - values[..., 2]).sum(-1))
    assert torch.isfinite(gradient(penalty.sum(), algorithm.critics)).all()


def test_discrete_cql_uses_weighted_rewards_and_distribution_means():
    inputs, _ = steps(2, 4)
    rollout = DqnInfo(action=torch.randint(1, 5, (2, 4)))
    several = discrete(reward_spec=TensorSpec((2, )), reward_weights=[1.0, -2.0])
    penalty = train_info(several, inputs, rollout).penalty[0]
    values = several._outputs(several.critics, inputs.observation[0], ())[0]
    values = values[:, :, 0] - 2 * values[:, :, 1]
    index = (rollout.action[0] - 1).reshape(-1, 1, 1).expand(4, 2, 1)
    torch.testing.assert_close(penalty, (values.logsumexp(-1) - values.gather(-1, index).squeeze(-1)).sum(-1))
    atoms = discrete(num_atoms=5, v_min=-1.0, v_max=1.0)
    penalty = train_info(atoms, inputs, rollout).penalty[0]
    values = atoms.critics(inputs.observation[0])[0].softmax(-1) @ torch.linspace(-1, 1, 5)
    torch.testing.assert_close(penalty, (values.logsumexp(-1) - values.gather(-1, index).squeeze(-1)).sum(-1))


def test_conservative_values_of_unseen_actions_are_low():
    """Compare with the known optimum for two actions, of which only the first is in the data, with a return of 1.

    One step before the end, with weight w, the loss is (Q0 - 1)^2 + w (log(e^Q0 + e^Q1) - Q0). Q1 decreases without
    bound, and Q0 converges to 1.
    """
    torch.manual_seed(0)
    spec = BoundedTensorSpec((), torch.int64, 0, 1)
    algorithm = DiscreteCqlAlgorithm(TensorSpec((1, )), spec, q_network_cls=partial(QNetwork, fc_layer_params=()),
                                     penalty_weight=0.5)
    inputs = TimeStep(step_type=torch.tensor([[1], [2]], dtype=torch.int32), reward=torch.tensor([[0.0], [1.0]]),
                      discount=torch.tensor([[1.0], [0.0]]), observation=torch.ones(2, 1, 1))
    optimizer = torch.optim.Adam([p for p in algorithm.parameters() if p.requires_grad], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        rollout = DqnInfo(action=torch.zeros(2, 1, dtype=torch.int64))
        algorithm.calc_loss(train_info(algorithm, inputs, rollout)).loss.sum().backward()
        optimizer.step()
    values = algorithm.critics(torch.ones(1, 1))[0][0]
    assert (values[:, 1] < -1.0).all() and (values[:, 0] - 1.0).abs().max() < 0.05
