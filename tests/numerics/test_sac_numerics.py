"""The losses of soft actor-critic against slow loops, constants worked out by hand, and identities."""
import math
from functools import partial

import pytest
import torch
from helpers.sac_agents import make_agent, random_steps
from torch import nn

from alfx import nest
from alfx.algorithms.base import critic_values
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.prior_actor import SameActionPriorActor, UniformPriorActor
from alfx.algorithms.sac import soft_losses as sac_losses
from alfx.algorithms.sac_algorithm import SacAlgorithm, SacInfo
from alfx.data_structures import StepType, TimeStep, valid_masks
from alfx.engine.loss_reduction import reduce_loss
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils import dist_utils

NOISE = 0.3
GAMMA = 0.9


@pytest.fixture
def same_noise(monkeypatch):
    """Use ``NOISE`` as the noise of every sample."""
    monkeypatch.setattr(torch, 'randn', lambda shape, **kwargs: torch.full(shape, NOISE))


def algorithm_of(environment, **args):
    """Return an algorithm whose target critics differ from its critics."""
    args.setdefault('critic_loss_ctor', partial(OneStepTDLoss, gamma=GAMMA))
    agent, _ = make_agent(environment, **args)
    algorithm = agent.policy
    for p in [*algorithm.target_critics.parameters(), *algorithm.critics.parameters()]:
        p.data.add_(0.3 * torch.randn_like(p))
    return algorithm


def with_different_continuous_alpha(algorithm):
    """Give the continuous part of a mixed action another alpha than the discrete one."""
    if algorithm._log_alpha.ndim:
        algorithm._log_alpha.data[1] += 0.9
    return algorithm


def losses_of(algorithm, steps, action):
    length, batch = steps.step_type.shape
    info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(length * batch),
                                    SacInfo(action=action)).info
    return info, algorithm.calc_loss(info)


def one(nested, t, b):
    """Return step ``t`` of sample ``b`` as a batch of one."""
    return nest.map_structure(lambda x: x[t, b:b + 1], nested)


def weights_of(algorithm):
    return algorithm.reward_weights.tolist() if algorithm.has_multidim_reward() else [1.0]


def lowest(values, weights):
    """Return the minimum over n critics of each of K ``values[i][k]``, the maximum for a negative weight."""
    return [(max if w < 0 else min)(v[k] for v in values) for k, w in enumerate(weights)]


def per_critic(values, weights):
    """Convert ``[n]`` or ``[n, K]`` to ``values[i][k]``."""
    return [[x.item() for x in v.reshape(-1)] for v in values.reshape(-1, len(weights))]


# The target of the critics -------------------------------------------------------------------------------------------


def soft_value_continuous(algorithm, observation, weights):
    """Return K target values of the policy's action and the entropy bonus ``-alpha log pi``."""
    distribution = algorithm.actor(observation)[0]
    action = dist_utils.rsample_action_distribution(distribution)
    log_pi = dist_utils.compute_log_probability(distribution, action).item()
    critics = per_critic(algorithm.target_critics((observation, action))[0][0], weights)
    return lowest(critics, weights), -math.exp(algorithm._log_alpha.item()) * log_pi


def policy_of_choices(algorithm, q_values, weights, alpha):
    """Compute p(k) = exp(Q(k) / alpha) / Z for ``q_values[i][w][k]`` of n critics, K rewards and A actions."""
    total = [sum(w * v for w, v in zip(weights, lowest([[q[j][k] for j in range(len(weights))] for q in q_values],
                                                       weights))) for k in range(len(q_values[0][0]))]
    unnormalized = [math.exp((t - max(total)) / alpha) for t in total]
    return [u / sum(unnormalized) for u in unnormalized]


def q_lists(algorithm, networks, inputs, weights):
    """Return Q values as nested lists ``[n][K][A]``."""
    values = networks(inputs)[0][0]
    return values.reshape(-1, len(weights), values.shape[-1]).tolist()


def soft_value_of_choices(algorithm, observation, weights):
    """Return the target values and the entropy bonus for a policy with a discrete action."""
    log_alpha, bonus, inputs = algorithm._log_alpha.detach(), 0.0, observation
    alpha = math.exp(log_alpha[0] if log_alpha.ndim else log_alpha)
    if log_alpha.ndim:
        distribution = algorithm.actor(observation)[0]
        continuous = dist_utils.rsample_action_distribution(distribution)
        bonus -= math.exp(log_alpha[1]) * dist_utils.compute_log_probability(distribution, continuous).item()
        inputs = (observation, continuous)
    probs = policy_of_choices(algorithm, q_lists(algorithm, algorithm.critics, inputs, weights), weights,
                              alpha)
    bonus -= alpha * sum(p * math.log(p) for p in probs)
    targets = q_lists(algorithm, algorithm.target_critics, inputs, weights)
    values = [lowest([[q[j][k] for j in range(len(weights))] for q in targets], weights) for k in range(len(probs))]
    return [sum(p * v[j] for p, v in zip(probs, values)) for j in range(len(weights))], bonus


@pytest.mark.parametrize('length', [2, 4])
@pytest.mark.parametrize('environment', ['continuous', 'nested action', 'discrete', 'mixed', 'vector reward',
                                         'vector reward, discrete', 'vector reward, mixed'])
def test_the_critic_loss_matches_a_slow_loop(environment, length, same_noise):
    several = environment.startswith('vector reward')
    algorithm = with_different_continuous_alpha(algorithm_of(
        environment, reward_weights=[1.0, -0.5, 2.0] if several else None, initial_log_alpha=-0.7))
    weights = weights_of(algorithm)
    steps, action = random_steps(algorithm, length, 12)
    assert (steps.step_type[:-1] == StepType.LAST).any() and (steps.discount[1:] == 0).any()
    _, loss = losses_of(algorithm, steps, action)
    soft_value = soft_value_continuous if environment in ('continuous', 'nested action',
                                                          'vector reward') else soft_value_of_choices
    for t in range(length):
        for b in range(12):
            expected = 0.0
            if t < length - 1 and steps.step_type[t, b] != StepType.LAST:
                critics = per_critic(algorithm._action_values.of_action(
                    algorithm.critics, *one((steps.observation, action), t, b), ())[0][0], weights)
                values, bonus = soft_value(algorithm, one(steps.observation, t + 1, b), weights)
                rewards = steps.reward[t + 1, b].reshape(-1).tolist()
                for k, weight in enumerate(weights):
                    # A single reward gets the bonus; of several rewards, the weighted sum gets it once.
                    part = weight / sum(w * w for w in weights) if several else 1.0
                    target = rewards[k] + GAMMA * steps.discount[t + 1, b].item() * (values[k] + part * bonus)
                    expected += sum((c[k] - target)**2 for c in critics) / len(weights)
            assert loss.extra.critic[t, b].item() == pytest.approx(expected, abs=1e-4, rel=1e-3), (t, b)


def test_a_termination_is_not_bootstrapped_and_a_truncation_is():
    algorithm = algorithm_of('continuous', use_entropy_reward=False)
    for p in [*algorithm.target_critics.parameters(), *algorithm.critics.parameters()]:
        p.data.zero_()
    last_bias = [p for n, p in algorithm.target_critics.named_parameters() if n.endswith('bias')][-1]
    last_bias.data.copy_(torch.tensor([10.0, 20.0]).reshape(last_bias.shape))  # the lower of the two is 10
    step_type = torch.tensor([[StepType.MID] * 3 + [StepType.LAST],
                              [StepType.LAST, StepType.LAST, StepType.MID, StepType.FIRST]], dtype=torch.int32)
    steps = TimeStep(step_type=step_type, reward=torch.tensor([[0.0] * 4, [1.0] * 4]),
                     observation=torch.zeros(2, 4, 1), discount=torch.tensor([[1.0] * 4, [0.0, 1.0, 1.0, 1.0]]))
    _, loss = losses_of(algorithm, steps, torch.zeros(2, 4, 1))
    # 1 at the termination; 1 + 0.9 * 10 where the episode is truncated or continues; nothing after LAST; two critics
    torch.testing.assert_close(loss.extra.critic, torch.tensor([[2 * 1.0, 2 * 100.0, 2 * 100.0, 0.0], [0.0] * 4]))
    masked = reduce_loss(loss._replace(loss=loss.extra.critic), valid_masks(step_type))
    assert masked.item() == pytest.approx(402 / 8)


def test_the_entropy_is_rewarded_where_it_is_bootstrapped_from():
    reward = torch.zeros(3, 2)
    discount = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    bonus = torch.tensor([[5.0, 5.0], [2.0, 2.0], [4.0, 4.0]])
    found = sac_losses.reward_with_bonus(reward, bonus, discount, torch.tensor(0.5), None)
    torch.testing.assert_close(found, torch.tensor([[2.5, 2.5], [1.0, 0.0], [2.0, 2.0]]))
    assert torch.equal(reward, torch.zeros(3, 2))
    for weights in torch.tensor([[1.0, -2.0], [0.1, 0.05]]):
        several = sac_losses.reward_with_bonus(torch.zeros(3, 2, 2), bonus, discount, torch.tensor(0.5), weights)
        torch.testing.assert_close(several @ weights, found)


def test_the_mean_of_the_entropy_reward_can_be_subtracted():
    algorithm = algorithm_of('continuous', normalize_entropy_reward=True)
    info = SacInfo(reward=torch.zeros(2, 4), discount=torch.ones(2, 4), log_pi=torch.tensor([[9.0] * 4, [1., 2., 3., 6.]
                                                                                             ]))
    # alpha = 1; the mean of -log pi at the second step is -3
    torch.testing.assert_close(algorithm._soft_reward(info)[1], GAMMA * torch.tensor([2.0, 1.0, 0.0, -3.0]))


# Alpha ---------------------------------------------------------------------------------------------------------------


def test_alpha_grows_while_the_entropy_is_below_its_target():
    log_alpha = nn.Parameter(torch.tensor(0.5))
    loss = sac_losses.temperature_loss(log_alpha, torch.tensor([1.0, -3.0]), -2.0)
    # -log pi - target: -1 + 2 = 1 and 3 + 2 = 5
    torch.testing.assert_close(loss, torch.tensor([0.5, 2.5]))
    low_entropy, = torch.autograd.grad(sac_losses.temperature_loss(log_alpha, torch.tensor([3.0]), -2.0).sum(),
                                       log_alpha)
    assert low_entropy < 0  # descent raises log alpha
    high_entropy, = torch.autograd.grad(sac_losses.temperature_loss(log_alpha, torch.tensor([-3.0]), -2.0).sum(),
                                        log_alpha)
    assert high_entropy > 0


def test_each_part_of_a_mixed_action_has_its_own_alpha(same_noise):
    algorithm = algorithm_of('mixed', target_entropy=(0.3, -1.5), initial_log_alpha=-0.5)
    steps, action = random_steps(algorithm, 2, 6)
    info, _ = losses_of(algorithm, steps, action)
    assert info.log_pi.shape == (2, 6, 2) and algorithm._log_alpha.shape == (2, )
    expected = -0.5 * ((-info.log_pi[..., 0] - 0.3) + (-info.log_pi[..., 1] + 1.5))
    torch.testing.assert_close(info.alpha, expected)
    gradient, = torch.autograd.grad(info.alpha.sum(), algorithm._log_alpha)
    torch.testing.assert_close(gradient, torch.stack(((-info.log_pi[..., 0] - 0.3).sum(),
                                                      (-info.log_pi[..., 1] + 1.5).sum())))


# The policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('environment', ['discrete', 'vector reward, discrete', 'mixed'])
def test_a_discrete_action_is_chosen_by_the_exponential_of_its_value(environment, same_noise):
    several = environment.startswith('vector reward')
    algorithm = algorithm_of(environment, reward_weights=[1.0, -0.5, 2.0] if several else None, initial_log_alpha=-2.0)
    weights = weights_of(algorithm)
    steps, action = random_steps(algorithm, 2, 5)
    info, _ = losses_of(algorithm, steps, action)
    policy = algorithm._parts.split(info.action_distribution)[0]
    for t in range(2):
        for b in range(5):
            observation = one(steps.observation, t, b)
            inputs = observation
            if environment == 'mixed':
                inputs = (observation, dist_utils.rsample_action_distribution(algorithm.actor(observation)[0]))
            probs = policy_of_choices(algorithm, q_lists(algorithm, algorithm.critics, inputs, weights),
                                      weights, math.exp(-2.0))
            torch.testing.assert_close(policy.probs[t, b], torch.tensor(probs), atol=1e-5, rtol=1e-4)
            log_pi = info.log_pi[t, b, 0] if environment == 'mixed' else info.log_pi[t, b]
            assert log_pi.item() == pytest.approx(sum(p * math.log(p) for p in probs), abs=1e-4)


class LinearCritics(nn.Module):
    """Two critics, ``Q = c (3 a[0] - 0.1 a[1])`` with c = 1 and 2, for any observation."""

    def forward(self, inputs, state=()):
        action = inputs[1]
        value = 3 * action[:, 0] - 0.1 * action[:, 1]
        return torch.stack((value, 2 * value), 1), state


@pytest.mark.parametrize('clipping,expected', [(None, [3.0, -0.1]), (0, [3.0, -0.1]), (0.5, [0.5, -0.1]),
                                               (0.05, [0.05, -0.05])])
def test_the_gradient_of_the_value_is_clipped_elementwise(clipping, expected):
    algorithm = SacAlgorithm(TensorSpec((1, )), BoundedTensorSpec((2, ), torch.float32, -1, 1), dqda_clipping=clipping)
    algorithm._critic_networks = LinearCritics()
    torch.manual_seed(0)
    choice = algorithm._choose(torch.randn(4, 1), algorithm.train_state_spec.action,
                               lambda d: torch.full((4, 2), 0.5, requires_grad=True))
    loss, _ = algorithm._actor_loss(torch.randn(4, 1), choice, torch.zeros(4), ())
    found, = torch.autograd.grad(loss.sum(), choice.action)
    # Q > 0: the lower critic is the first one
    torch.testing.assert_close(found, -torch.tensor([expected] * 4))


def test_an_action_that_the_value_ignores_has_a_gradient_of_zero():
    used, ignored = (torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = critic_values.action_gradient(3 * used[:, 0], {'used': used, 'ignored': ignored}, clipping=2.0)
    assert {name: x.tolist() for name, x in found.items()} == {'used': [[2.0, 0.0]], 'ignored': [[0.0, 0.0]]}


@pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward'])
def test_the_actor_follows_value_and_entropy_and_trains_no_critic(environment, same_noise):
    several = environment == 'vector reward'
    algorithm = algorithm_of(environment, reward_weights=[1.0, -0.5, 2.0] if several else None, initial_log_alpha=-0.7)
    steps, action = random_steps(algorithm, 2, 5)
    info, _ = losses_of(algorithm, steps, action)
    info.actor.loss.sum().backward()
    assert all(p.grad is None for p in algorithm.critics.parameters())
    found = [p.grad.clone() for p in algorithm.actor.parameters()]
    algorithm.zero_grad()
    observation = nest.map_structure(lambda x: x.flatten(0, 1), steps.observation)
    chosen, log_pi = dist_utils.rsample_action_distribution(algorithm.actor(observation)[0],
                                                            return_log_prob=True)
    critics = algorithm.critics((observation, chosen))[0]
    if several:
        low = torch.stack([critics[:, :, 0].min(1).values, critics[:, :, 1].max(1).values,
                           critics[:, :, 2].min(1).values], -1)
        value = low[:, 0] - 0.5 * low[:, 1] + 2 * low[:, 2]
    else:
        value = critics.min(1).values
    (math.exp(-0.7) * log_pi - value).sum().backward()
    for gradient, p in zip(found, algorithm.actor.parameters()):
        torch.testing.assert_close(gradient, p.grad, atol=1e-5, rtol=1e-4)


def test_the_actor_of_a_mixed_action_follows_the_soft_value(same_noise):
    """Check that ``d/da alpha log sum_k exp(Q(a, k) / alpha) = sum_k p(k) dQ(a, k)/da``."""
    algorithm = with_different_continuous_alpha(algorithm_of('mixed', initial_log_alpha=-0.7))
    steps, action = random_steps(algorithm, 2, 5)
    info, _ = losses_of(algorithm, steps, action)
    info.actor.loss.sum().backward()
    assert all(p.grad is None for p in algorithm.critics.parameters())
    found = [p.grad.clone() for p in algorithm.actor.parameters()]
    algorithm.zero_grad()
    observation, alpha = steps.observation.flatten(0, 1), math.exp(-0.7)
    chosen, log_pi = dist_utils.rsample_action_distribution(algorithm.actor(observation)[0],
                                                            return_log_prob=True)
    q_values = algorithm.critics((observation, chosen))[0].min(1).values
    (math.exp(0.2) * log_pi - alpha * torch.logsumexp(q_values / alpha, -1)).sum().backward()
    for gradient, p in zip(found, algorithm.actor.parameters()):
        torch.testing.assert_close(gradient, p.grad, atol=1e-5, rtol=1e-4)


# KL to a prior -------------------------------------------------------------------------------------------------------


def test_with_a_uniform_prior_divergence_is_entropy_up_to_a_constant(same_noise):
    plain = algorithm_of('continuous')
    prior = algorithm_of('continuous', prior_actor_ctor=UniformPriorActor, target_kld_per_dim=2.0)
    steps, action = random_steps(plain, 2, 5)
    without, with_prior = (losses_of(a, steps, action)[0] for a in (plain, prior))
    # the density of the uniform distribution on [-1, 1] is a half
    torch.testing.assert_close(with_prior.log_pi, without.log_pi + math.log(2.0))
    assert prior._target_entropy.item() == -2.0
    torch.testing.assert_close(with_prior.alpha, 0.0 * with_prior.log_pi)  # log alpha is 0


def test_the_divergence_to_the_previous_action_uses_log_probabilities(same_noise):
    """Estimate the divergence from the prior of the previous action by the difference of log probabilities."""
    algorithm = algorithm_of('nested action', prior_actor_ctor=SameActionPriorActor, initial_log_alpha=-0.7)
    steps, action = random_steps(algorithm, 2, 5)
    steps = steps._replace(prev_action={'first': steps.prev_action['first'].clamp(-1, 1),
                                        'second': steps.prev_action['second'].abs().clamp(0, 1)})
    info, _ = losses_of(algorithm, steps, action)
    for t in range(2):
        for b in range(5):
            step = one(steps, t, b)
            distribution = algorithm.actor(step.observation)[0]
            chosen = dist_utils.rsample_action_distribution(distribution)
            prior = algorithm._prior_actor.train_step(step, ()).output
            expected = dist_utils.compute_log_probability(distribution, chosen).item() - sum(
                prior[key].log_prob(chosen[key]).sum().item() for key in ('first', 'second'))
            assert info.log_pi[t, b].item() == pytest.approx(expected, abs=1e-4)


# Priorities ----------------------------------------------------------------------------------------------------------


def test_the_priority_of_a_sequence_is_its_root_mean_loss():
    loss = torch.tensor([[4.0, 9.0, 0.0], [12.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    step_type = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 0, 1]])
    # (4 + 12) / 2 steps with a target; 9 / 1; no target at all
    torch.testing.assert_close(critic_values.sequence_priority(loss, step_type), torch.tensor([8.0, 9.0, 0.0]).sqrt())
    rounded = torch.tensor([[-1e-7], [0.0]])  # the divergence of a perfect prediction
    assert critic_values.sequence_priority(rounded, torch.ones(2, 1)).tolist() == [0.0]


def test_priorities_are_set_on_request():
    for calculate_priority in (True, False):
        algorithm = algorithm_of('continuous', calculate_priority=calculate_priority)
        steps, action = random_steps(algorithm, 2, 5)
        _, loss = losses_of(algorithm, steps, action)
        if calculate_priority:
            torch.testing.assert_close(loss.priority, loss.extra.critic[0].detach().sqrt())
        else:
            assert loss.priority == ()


@pytest.mark.parametrize('rewards', [(), (2, )])
def test_the_expected_value_weights_actions_by_probability(rewards):
    values, probs = torch.randn(4, 3, *rewards), torch.rand(4, 3)
    found = critic_values.expected_value(values, probs)
    for i in range(4):
        torch.testing.assert_close(found[i], sum(probs[i, a] * values[i, a] for a in range(3)))
    # 0.25 * 4 + 0.75 * 8 = 7
    assert critic_values.expected_value(torch.tensor([[4.0, 8.0]]), torch.tensor([[0.25, 0.75]])).tolist() == [7.0]
