"""V-trace against a slow loop written from the paper, constants worked out by hand, identities, and its fixed point."""
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_value_ops import rollouts, tensors

from alfx import context
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.impala_algorithm import ImpalaInfo
from alfx.algorithms.vtrace_loss import VTraceLoss
from alfx.data_structures import StepType
from alfx.gin_utils import ConfError
from alfx.utils import value_ops
from alfx.utils.dist_utils import Categorical

F, M, L = StepType.FIRST, StepType.MID, StepType.LAST
THRESHOLDS = st.one_of(st.none(), st.floats(0.1, 3.0))


def clipped(ratio, threshold):
    return ratio if threshold is None else min(ratio, threshold)


def slow_vtrace(reward, value, step_type, discount, ratio, rho, c, pg_rho, td_lambda=1.0):
    """Compute equation 1 of Espeholt et al. 2018: a double sum for each step along its episode."""
    steps, envs = reward.shape
    target, advantage = value.copy(), np.zeros((steps, envs))

    def delta(t, b):
        return reward[t + 1, b] + discount[t + 1, b] * value[t + 1, b] - value[t, b]

    for b in range(envs):
        for s in range(steps - 1):
            weight = 1.0  # the product of discounts and c from s to t - 1
            for t in range(s, steps - 1):
                if step_type[t, b] == L:
                    break
                target[s, b] += weight * clipped(ratio[t, b], rho) * delta(t, b)
                weight *= discount[t + 1, b] * td_lambda * clipped(ratio[t, b], c)
        for s in range(steps - 1):
            if step_type[s, b] != L:
                following = (1 - td_lambda) * value[s + 1, b] + td_lambda * target[s + 1, b]
                advantage[s, b] = clipped(ratio[s, b], pg_rho) * (
                    reward[s + 1, b] + discount[s + 1, b] * following - value[s, b])
    return target[:-1], advantage[:-1]


def random_ratios(like, seed):
    return np.exp(np.random.default_rng(seed).normal(size=like.shape))


@given(rollouts(), st.integers(0, 2**32 - 1), THRESHOLDS, THRESHOLDS, THRESHOLDS, st.sampled_from([0.0, 0.7, 1.0]))
@settings(max_examples=120)
def test_targets_and_advantages_match_the_double_sum_at_any_boundaries(rollout, seed, rho, c, pg_rho, td_lambda):
    ratio = random_ratios(rollout[0], seed)
    found = value_ops.vtrace(*tensors(*rollout, ratio), td_lambda, rho, c, pg_rho)
    targets, advantages = slow_vtrace(*rollout, ratio, rho, c, pg_rho, td_lambda)
    np.testing.assert_allclose(found.targets.numpy(), targets, atol=1e-9)
    np.testing.assert_allclose(found.advantages.numpy(), advantages, atol=1e-9)


@given(rollouts(), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
@settings(max_examples=60)
def test_on_policy_it_is_gae_and_with_lambda_1_the_return(rollout, td_lambda):
    reward, value, step_type, discount = args = tensors(*rollout)
    found = value_ops.vtrace(*args, torch.ones_like(reward), td_lambda)
    advantages = value_ops.generalized_advantage_estimation(*args, td_lambda)
    torch.testing.assert_close(found.advantages, advantages)
    torch.testing.assert_close(found.targets, advantages + value[:-1])
    if td_lambda == 1.0:
        torch.testing.assert_close(found.targets, value_ops.discounted_return(*args))


@given(rollouts(), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_without_clipping_the_target_is_the_ratio_weighted_return(rollout, seed):
    # Per-decision importance sampling of the n-step return: V[s] + sum of w[s] ... w[t] delta[t].
    reward, value, step_type, discount = rollout
    ratio = random_ratios(reward, seed)
    found = value_ops.vtrace(*tensors(*rollout, ratio), 1.0, None, None, None).targets.numpy()
    for b in range(reward.shape[1]):
        following = value[-1, b]
        for t in reversed(range(len(reward) - 1)):
            if step_type[t, b] == L:
                following = value[t, b]
            else:
                following = value[t, b] + ratio[t, b] * (
                    reward[t + 1, b] + discount[t + 1, b] * following - value[t, b])
            assert found[t, b] == pytest.approx(following, abs=1e-8)


@given(rollouts(max_steps=12), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_later_episodes_and_ratios_of_ignored_actions_do_not_matter(rollout, seed):
    reward, value, step_type, discount = rollout
    ratio = random_ratios(reward, seed)
    after_end = np.zeros(reward.shape, bool)
    for b in range(reward.shape[1]):
        ends = np.flatnonzero(step_type[:, b] == L)
        if len(ends):
            after_end[ends[0] + 1:, b] = True
    ignored = (step_type == L) | (np.arange(len(reward)) == len(reward) - 1)[:, None]
    changed = tensors(reward + 5.0 * after_end, value - 3.0 * after_end, step_type, discount,
                      np.where(after_end, 2.0 * ratio, np.where(ignored, np.inf, ratio)))
    before = ~after_end[:-1]
    for a, b in zip(value_ops.vtrace(*tensors(*rollout, ratio)), value_ops.vtrace(*changed)):
        np.testing.assert_array_equal(a.numpy()[before], b.numpy()[before])
    unclipped = value_ops.vtrace(*changed, 1.0, None, None, None)
    assert all(np.isfinite(x.numpy()[before]).all() for x in unclipped)


def hand_made(discount_at_last):
    """Return an episode with rewards 1, 2 that ends at t = 2, then the first steps of the next."""
    reward = torch.tensor([[0.0], [1.0], [2.0], [0.0], [4.0]])
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
    step_type = torch.tensor([[F], [M], [L], [F], [M]], dtype=torch.int32)
    discount = torch.tensor([[0.5], [0.5], [0.5 * discount_at_last], [0.5], [0.5]])
    return reward, value, step_type, discount, torch.tensor([[0.5], [2.0], [7.0], [4.0], [9.0]])


def test_a_truncation_bootstraps_from_its_last_state_by_hand():
    # rho = 1.5, c = 1, pg_rho = 3
    # delta[0] = 1 + 0.5 * 20 - 10 = 1, delta[1] = 2 + 0.5 * 30 - 20 = -3, delta[3] = 4 + 0.5 * 50 - 40 = -11
    # v[3] = 40 + 1.5 * -11 = 23.5; v[2] = V = 30; v[1] = 20 + 1.5 * -3 = 15.5
    # v[0] = 10 + 0.5 * 1 + 0.5 * 0.5 * (15.5 - 20) = 9.375
    # A[0] = 0.5 * (1 + 0.5 * 15.5 - 10) = -0.625, A[1] = 2 * (2 + 15 - 20) = -6, A[2] = 0, A[3] = 3 * -11
    targets, advantages = value_ops.vtrace(*hand_made(1.0), 1.0, 1.5, 1.0, 3.0)
    torch.testing.assert_close(targets, torch.tensor([[9.375], [15.5], [30.0], [23.5]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.625], [-6.0], [0.0], [-33.0]]))


def test_a_termination_is_not_bootstrapped_from_as_worked_out_by_hand():
    # delta[1] = 2 - 20 = -18; v[1] = 20 + 1.5 * -18 = -7; v[0] = 10 + 0.5 + 0.25 * -27 = 3.75
    # A[0] = 0.5 * (1 + 0.5 * -7 - 10) = -6.25, A[1] = 2 * -18
    targets, advantages = value_ops.vtrace(*hand_made(0.0), 1.0, 1.5, 1.0, 3.0)
    torch.testing.assert_close(targets, torch.tensor([[3.75], [-7.0], [30.0], [23.5]]))
    torch.testing.assert_close(advantages, torch.tensor([[-6.25], [-36.0], [0.0], [-33.0]]))


def test_each_reward_dimension_has_its_own_trace():
    reward, value, step_type, discount, ratio = hand_made(1.0)
    both = torch.stack((reward, -2.0 * reward), -1), torch.stack((value, value + 1.0), -1)
    found = value_ops.vtrace(*both, step_type, discount, ratio)
    for k in range(2):
        single = value_ops.vtrace(both[0][..., k], both[1][..., k], step_type, discount, ratio)
        torch.testing.assert_close((found.targets[..., k], found.advantages[..., k]), tuple(single))


@pytest.mark.parametrize('bad, message', [
    (lambda a: (a[0], a[1], a[2], a[3], a[4][:-1]), r'ratios: expected shape \(5, 1\), found \(4, 1\)'),
    (lambda a: (a[0], a[1][:-1], *a[2:]), 'rewards and values differ in shape'),
    (lambda a: tuple(x[:1] for x in a), 'at least 2 time steps'),
])
def test_shapes_that_disagree_are_rejected(bad, message):
    with pytest.raises(ValueError, match=message):
        value_ops.vtrace(*bad(hand_made(1.0)))


# The fixed point (theorem 1) --------------------------------------------------------------------------------------

# Three states in a ring. Action 0 stays and action 1 moves to the next state; rewards differ between states.
GAMMA = 0.8
REWARD = np.array([[0.1, 1.0], [0.5, -0.3], [-1.0, 2.0]])  # [state, action]
BEHAVIOR = np.array([[0.5, 0.5], [0.8, 0.2], [0.4, 0.6]])
POLICY = np.array([[0.1, 0.9], [0.5, 0.5], [0.9, 0.1]])


def value_of(policy):
    """Solve the Bellman equation."""
    transition = np.zeros((3, 3))
    for x in range(3):
        transition[x, x] += policy[x, 0]
        transition[x, (x + 1) % 3] += policy[x, 1]
    return np.linalg.solve(np.eye(3) - GAMMA * transition, (policy * REWARD).sum(1))


def fixed_point(rho, c, length=3, iterations=200):
    """Iterate expected V-trace targets of ``length`` steps from the behavior policy; return the resulting values."""
    value = np.zeros(3)
    paths = [[(x, *a) for a in np.ndindex(*[2] * length)] for x in range(3)]
    for _ in range(iterations):
        expected = np.zeros(3)
        for x, actions in enumerate(paths):
            states, ratio, reward, chance = [], [], [], []
            for _, *chosen in actions:
                at, probability = [x], 1.0
                for a in chosen:
                    probability *= BEHAVIOR[at[-1], a]
                    at.append((at[-1] + a) % 3)
                states.append(at)
                chance.append(probability)
                ratio.append([POLICY[s, a] / BEHAVIOR[s, a] for s, a in zip(at, chosen)] + [1.0])
                reward.append([0.0] + [REWARD[s, a] for s, a in zip(at, chosen)])
            states, ratio, reward = np.array(states).T, np.array(ratio).T, np.array(reward).T
            step_type = np.full(states.shape, M)
            found = value_ops.vtrace(*tensors(reward, value[states], step_type, np.full(states.shape, GAMMA), ratio),
                                     1.0, rho, c).targets
            expected[x] = (found[0].numpy() * np.array(chance)).sum()
        value = expected
    return value


@pytest.mark.parametrize('rho', [0.6, 1.0, 1.5, None])
def test_rho_determines_the_policy_whose_values_are_learned(rho):
    weighted = POLICY if rho is None else np.minimum(rho * BEHAVIOR, POLICY)
    assert rho is None or (weighted < POLICY).any(), 'something is clipped'
    expected = value_of(weighted / weighted.sum(1, keepdims=True))
    np.testing.assert_allclose(fixed_point(rho, 0.5), expected, atol=1e-6)


def test_c_changes_the_speed_but_not_the_limit_of_learning():
    first = [fixed_point(1.0, c, iterations=1) for c in (0.2, 1.0)]
    assert np.abs(first[0] - first[1]).max() > 0.01
    np.testing.assert_allclose(fixed_point(1.0, 0.2), fixed_point(1.0, 1.0), atol=1e-6)
    expected = value_of(POLICY)
    distances = [np.abs(fixed_point(None, c, iterations=4) - expected).max() for c in (0.2, 0.6, 1.0)]
    assert distances == sorted(distances, reverse=True)


# The loss -----------------------------------------------------------------------------------------------------------


def random_info(length=7, batch=3, seed=0, age=0.3):
    """Return infos with a terminated, a truncated and an unfinished episode."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.full((length, batch), M, dtype=torch.int32)
    step_type[2, 0], step_type[3, 0] = L, F
    step_type[4, 1], step_type[5, 1] = L, F
    discount = torch.ones(length, batch)
    discount[2, 0] = 0.
    logits = torch.randn(length, batch, 4, generator=generator).requires_grad_()
    value = torch.randn(length, batch, generator=generator).requires_grad_()
    action = torch.randint(4, (length, batch), generator=generator)
    policy = Categorical(logits=logits)
    rollout_log_prob = policy.log_prob(action).detach() + age * torch.randn(length, batch, generator=generator)
    info = ImpalaInfo(step_type=step_type, discount=discount, reward=torch.randn(length, batch, generator=generator),
                      action=action, rollout_log_prob=rollout_log_prob, action_distribution=policy, value=value)
    return info, logits


def test_the_loss_equals_a_slow_loop():
    gamma, td_lambda, thresholds = 0.9, 0.8, (1.2, 0.9, 1.1)
    info, logits = random_info()
    loss = VTraceLoss(gamma=gamma, td_lambda=td_lambda, clip_rho_thres=1.2, clip_c_thres=0.9, clip_pg_rho_thres=1.1,
                      td_loss_weight=0.5, entropy_regularization=0.01)(info).loss
    log_probs = torch.log_softmax(logits, -1).detach()
    log_prob = log_probs.gather(-1, info.action.unsqueeze(-1)).squeeze(-1)
    ratio = (log_prob - info.rollout_log_prob).exp().double().numpy()
    targets, advantages = slow_vtrace(info.reward.double().numpy(), info.value.detach().double().numpy(),
                                      info.step_type.numpy(), gamma * info.discount.double().numpy(), ratio,
                                      *thresholds, td_lambda)
    for t in range(info.value.shape[0] - 1):
        for b in range(info.value.shape[1]):
            if info.step_type[t, b] == L:
                continue  # masked by the caller
            entropy = -(log_probs[t, b].exp() * log_probs[t, b]).sum().item()
            expected = (-advantages[t, b] * log_prob[t, b].item()
                        + 0.5 * (targets[t, b] - info.value[t, b].item())**2 - 0.01 * entropy)
            assert loss[t, b].item() == pytest.approx(expected, abs=1e-5)


def test_a_hand_computed_two_step_loss():
    # V = (1, 2), r[1] = 3, gamma = 0.5; pi = 1/2 and mu = 2/3, so w = 3/4: delta = 3 + 1 - 1 = 3, v = 1 + 9/4 = 3.25,
    # A = 9/4. loss = 9/4 log 2 + (3.25 - 1)^2; with mu = 1/4, w = 2 is clipped to 1: loss = 3 log 2 + 9.
    def loss(behavior):
        info = ImpalaInfo(step_type=torch.tensor([[F], [M]], dtype=torch.int32), discount=torch.ones(2, 1),
                          reward=torch.tensor([[0.], [3.]]), action=torch.zeros(2, 1, dtype=torch.int64),
                          rollout_log_prob=torch.full((2, 1), math.log(behavior)),
                          action_distribution=Categorical(logits=torch.zeros(2, 1, 2)),
                          value=torch.tensor([[1.], [2.]]))
        return VTraceLoss(gamma=0.5)(info).loss[:, 0].tolist()
    assert loss(2 / 3) == pytest.approx([2.25 * math.log(2) + 2.25**2, 0], abs=1e-5)
    assert loss(1 / 4) == pytest.approx([3 * math.log(2) + 9, 0], abs=1e-5)


@pytest.mark.parametrize('td_lambda', [0.8, 1.0])
def test_with_the_same_policy_it_is_the_loss_of_the_actor_critic(td_lambda):
    info, _ = random_info(age=0.)
    common = dict(gamma=0.9, td_lambda=td_lambda, td_loss_weight=0.5, entropy_regularization=0.01,
                  normalize_advantages=True)
    torch.testing.assert_close(VTraceLoss(**common)(info).loss, ActorCriticLoss(use_gae=True, **common)(info).loss)


def test_ratios_targets_and_advantages_are_constants_for_the_gradient():
    info, logits = random_info()
    loss = VTraceLoss(gamma=0.9, td_loss_weight=0.5)
    total = loss(info).loss[:-1].sum()
    value_grad, logits_grad = torch.autograd.grad(total, (info.value, logits), retain_graph=True)
    log_prob = info.action_distribution.log_prob(info.action)
    targets, advantages = loss.calc_returns_and_advantages(info._replace(log_prob=log_prob))
    assert not targets.requires_grad and not advantages.requires_grad
    expected = (info.value - targets).detach()  # of 0.5 (v - V)^2
    expected[-1] = 0.
    torch.testing.assert_close(value_grad, expected)
    expected_loss = -(advantages * info.action_distribution.log_prob(info.action))[:-1].sum()
    expected_gradient = torch.autograd.grad(expected_loss, logits)[0]
    torch.testing.assert_close(logits_grad, expected_gradient)


def test_each_reward_dimension_has_its_own_targets_and_policy_weight():
    info, _ = random_info()
    double = info._replace(reward=torch.stack([info.reward, info.reward], -1),
                           value=torch.stack([info.value, info.value], -1),
                           reward_weights=torch.tensor([0.25, 0.75]).expand(*info.reward.shape, 2))
    single_loss = VTraceLoss(gamma=0.9)(info)
    double_loss = VTraceLoss(gamma=[0.9, 0.9])(double)
    torch.testing.assert_close(double_loss.loss, single_loss.loss)
    assert double_loss.extra.td_loss.shape == (*info.reward.shape, 2)


@pytest.mark.parametrize('bad, message', [
    (dict(clip_rho_thres=0.0), 'clip_rho_thres'),
    (dict(clip_c_thres=-1.0), 'clip_c_thres'),
    (dict(clip_pg_rho_thres='1'), 'clip_pg_rho_thres'),
    (dict(clip_rho_thres=1.0, clip_c_thres=1.5), 'clip_c_thres = 1.5 exceeds'),
    (dict(clip_rho_thres=1.0, clip_c_thres=None), 'clip_c_thres = None exceeds'),
    (dict(td_lambda=1.5), 'td_lambda'),
])
def test_arguments_out_of_range_are_rejected_by_name(bad, message):
    with pytest.raises((ConfError, ValueError), match=message):
        VTraceLoss(**bad)


class Writer:
    """A summary writer that keeps scalars by their name after the scope."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, *args, **kwargs):
        self.scalars[name.partition('/')[2]] = float(value)

    def add_histogram(self, *args, **kwargs):
        pass


def test_summaries_contain_the_age_of_the_policy():
    writer = Writer()
    context.set_summary_writer(writer)
    info, _ = random_info()
    with context.record_if(True):
        VTraceLoss(clip_rho_thres=1.1, clip_c_thres=0.7, clip_pg_rho_thres=None, debug_summaries=True)(info)
    by_end = writer.scalars
    ratio = (info.action_distribution.log_prob(info.action).detach() - info.rollout_log_prob).exp()
    ratio = ratio[:-1][info.step_type[:-1] != L]
    assert by_end['rho/mean'] == pytest.approx(ratio.clamp(max=1.1).mean().item())
    assert by_end['rho/clip_fraction'] == pytest.approx((ratio > 1.1).float().mean().item())
    assert by_end['c/clip_fraction'] == pytest.approx((ratio > 0.7).float().mean().item())
    assert by_end['pg_rho/clip_fraction'] == 0 and by_end['pg_rho/mean'] == pytest.approx(ratio.mean().item())
    assert by_end['kl_of_rollout_policy'] == pytest.approx(-ratio.log().mean().item(), abs=1e-6)
    assert 'explained_variance_of_return_by_value' in by_end
