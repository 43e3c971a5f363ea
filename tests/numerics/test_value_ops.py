"""Returns, advantages and importance ratios against slow loops, constants worked out by hand, and identities."""
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from alfx.data_structures import StepType
from alfx.utils import dist_utils, value_ops

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def slow_advantages(reward, value, step_type, discount, td_lambda):
    """Compute equation 16 of Schulman et al. 2016, one environment and one step at a time, in float64."""
    steps, envs = reward.shape
    advantage = np.zeros((steps, envs))
    for b in range(envs):
        for t in reversed(range(steps - 1)):
            if step_type[t, b] == LAST:
                continue
            delta = reward[t + 1, b] + discount[t + 1, b] * value[t + 1, b] - value[t, b]
            advantage[t, b] = delta + td_lambda * discount[t + 1, b] * advantage[t + 1, b]
    return advantage[:-1]


def slow_returns(reward, value, step_type, discount):
    """Follow each step forward to the end of its episode or of the sequence."""
    steps, envs = reward.shape
    result = np.zeros((steps - 1, envs))
    for b in range(envs):
        for t in range(steps - 1):
            weight, total, s = 1.0, 0.0, t
            while s < steps - 1 and step_type[s, b] != LAST:
                s += 1
                total += weight * reward[s, b]
                weight *= discount[s, b]
            result[t, b] = total + weight * value[s, b]
    return result


@st.composite
def rollouts(draw, max_steps=20):
    """Draw random rewards and values over episodes that end anywhere, by termination or truncation."""
    steps, envs = draw(st.integers(2, max_steps)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gamma = draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    step_type = np.full((steps, envs), MID)
    discount = np.full((steps, envs), gamma)
    for b in range(envs):
        ends = draw(st.lists(st.integers(0, steps - 1), max_size=4))
        for end in ends:
            step_type[end, b] = LAST
            discount[end, b] = gamma * draw(st.sampled_from([0.0, 1.0]))
            if end + 1 < steps:
                step_type[end + 1, b] = FIRST
    reward = rng.normal(size=(steps, envs))
    reward[step_type == FIRST] = 0.0
    return reward, rng.normal(size=(steps, envs)), step_type, discount


def tensors(*arrays):
    return [torch.as_tensor(a, dtype=torch.int32 if a.dtype.kind == 'i' else torch.float64) for a in arrays]


@given(rollouts(), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
@settings(max_examples=80)
def test_advantages_equal_the_recursion_for_any_episode_boundaries(rollout, td_lambda):
    found = value_ops.generalized_advantage_estimation(*tensors(*rollout), td_lambda=td_lambda)
    np.testing.assert_allclose(found.numpy(), slow_advantages(*rollout, td_lambda), atol=1e-9)


@given(rollouts())
@settings(max_examples=80)
def test_returns_equal_the_sum_along_the_episode_for_any_boundaries(rollout):
    found = value_ops.discounted_return(*tensors(*rollout))
    np.testing.assert_allclose(found.numpy(), slow_returns(*rollout), atol=1e-9)


@given(rollouts())
@settings(max_examples=40)
def test_lambda_1_is_return_minus_value_and_lambda_0_the_one_step_error(rollout):
    reward, value, step_type, discount = tensors(*rollout)
    args = (reward, value, step_type, discount)
    gae = value_ops.generalized_advantage_estimation
    torch.testing.assert_close(gae(*args, td_lambda=1.0) + value[:-1], value_ops.discounted_return(*args))
    torch.testing.assert_close(gae(*args, td_lambda=0.0) + value[:-1], value_ops.one_step_discounted_return(*args))


@given(rollouts(max_steps=12), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_nothing_of_a_later_episode_reaches_an_earlier_one(rollout, seed):
    reward, value, step_type, discount = rollout
    rng = np.random.default_rng(seed)
    changed_reward, changed_value = reward.copy(), value.copy()
    before_end = np.zeros(reward.shape, bool)
    for b in range(reward.shape[1]):
        lasts = np.flatnonzero(step_type[:, b] == LAST)
        if len(lasts):
            end = lasts[0]
            before_end[:end + 1, b] = True
            changed_reward[end + 1:, b] += rng.normal(size=len(reward) - end - 1)
            changed_value[end + 1:, b] += rng.normal(size=len(reward) - end - 1)
    for function in (value_ops.generalized_advantage_estimation, value_ops.discounted_return,
                     value_ops.one_step_discounted_return):
        original = function(*tensors(reward, value, step_type, discount)).numpy()
        changed = function(*tensors(changed_reward, changed_value, step_type, discount)).numpy()
        np.testing.assert_array_equal(original[before_end[:-1]], changed[before_end[:-1]])


def hand_made(discount_at_last):
    """Return an episode with rewards 1, 2 that ends at t = 2, then the first step of the next."""
    reward = torch.tensor([[0.0], [1.0], [2.0], [0.0], [4.0]])
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
    step_type = torch.tensor([[FIRST], [MID], [LAST], [FIRST], [MID]], dtype=torch.int32)
    discount = torch.tensor([[0.5], [0.5], [0.5 * discount_at_last], [0.5], [0.5]])
    return reward, value, step_type, discount


def test_truncation_bootstraps_and_termination_does_not():
    # Truncated: R[1] = 2 + 0.5 * 30 = 17, R[0] = 1 + 0.5 * 17 = 9.5; R[2] = V = 30; R[3] = 4 + 0.5 * 50 = 29.
    truncated = value_ops.discounted_return(*hand_made(1.0))
    torch.testing.assert_close(truncated, torch.tensor([[9.5], [17.0], [30.0], [29.0]]))
    # Terminated: R[1] = 2, R[0] = 1 + 0.5 * 2 = 2.
    terminated = value_ops.discounted_return(*hand_made(0.0))
    torch.testing.assert_close(terminated, torch.tensor([[2.0], [2.0], [30.0], [29.0]]))


def test_a_truncation_bootstraps_from_the_final_observation():
    # V of the LAST step is 30; V of the first step of the next episode is 40 and must not be used.
    one_step = value_ops.one_step_discounted_return(*hand_made(1.0))
    # 1 + 0.5 * 20 = 11, 2 + 0.5 * 30 = 17, V = 30, 4 + 0.5 * 50 = 29
    torch.testing.assert_close(one_step, torch.tensor([[11.0], [17.0], [30.0], [29.0]]))


def test_advantages_worked_out_by_hand():
    # delta[1] = 2 + 0.5 * 30 - 20 = -3, delta[0] = 1 + 0.5 * 20 - 10 = 1, A[0] = 1 + 0.8 * 0.5 * -3 = -0.2
    # delta[3] = 4 + 0.5 * 50 - 40 = -11; the LAST step has advantage 0.
    advantage = value_ops.generalized_advantage_estimation(*hand_made(1.0), td_lambda=0.8)
    torch.testing.assert_close(advantage, torch.tensor([[-0.2], [-3.0], [0.0], [-11.0]]))


def test_perfect_values_have_no_advantage():
    # With reward 1, gamma 0.9 and an infinite horizon, V = 1 / (1 - 0.9) = 10.
    shape = (50, 3)
    advantage = value_ops.generalized_advantage_estimation(
        torch.ones(shape, dtype=torch.float64), torch.full(shape, 10.0, dtype=torch.float64),
        torch.full(shape, MID, dtype=torch.int32), torch.full(shape, 0.9, dtype=torch.float64), td_lambda=0.95)
    torch.testing.assert_close(advantage, torch.zeros(49, 3, dtype=torch.float64))


def test_float32_over_2048_steps_agrees_with_float64():
    rng = np.random.default_rng(0)
    steps = 2048
    step_type = np.where(rng.random((steps, 4)) < 0.01, LAST, MID)
    rollout = (rng.normal(size=(steps, 4)), rng.normal(size=(steps, 4)), step_type, np.full((steps, 4), 0.99))
    args = [t.float() if t.is_floating_point() else t for t in tensors(*rollout)]
    found = value_ops.generalized_advantage_estimation(*args, td_lambda=0.99)
    np.testing.assert_allclose(found.numpy(), slow_advantages(*rollout, 0.99), atol=2e-4)


def test_reward_dimensions_are_learned_independently():
    reward, value, step_type, discount = hand_made(1.0)
    other = torch.randn_like(reward)
    rewards, values = torch.stack([reward, other], -1), torch.stack([value, value + 1], -1)
    gammas = torch.stack([discount, 0.5 * discount], -1)
    for function in (value_ops.generalized_advantage_estimation, value_ops.discounted_return,
                     value_ops.one_step_discounted_return):
        shared = function(rewards, values, step_type, discount)
        torch.testing.assert_close(shared[..., 0], function(reward, value, step_type, discount))
        torch.testing.assert_close(shared[..., 1], function(other, value + 1, step_type, discount))
        own = function(rewards, values, step_type, gammas)
        torch.testing.assert_close(own[..., 1], function(other, value + 1, step_type, 0.5 * discount))


def test_batch_major_is_the_transpose():
    args = hand_made(1.0)
    swapped = [a.transpose(0, 1) for a in args]
    for function in (value_ops.generalized_advantage_estimation, value_ops.discounted_return):
        torch.testing.assert_close(function(*swapped, time_major=False), function(*args).transpose(0, 1))


def test_a_sequence_of_two_steps_is_enough_and_one_is_rejected():
    args = [a[:2] for a in hand_made(1.0)]
    assert value_ops.generalized_advantage_estimation(*args, td_lambda=0.9).item() == 1.0  # 1 + 0.5 * 20 - 10
    with pytest.raises(ValueError, match='at least 2 time steps'):
        value_ops.discounted_return(*[a[:1] for a in args])


def test_shapes_that_disagree_are_rejected():
    reward, value, step_type, discount = hand_made(1.0)
    with pytest.raises(ValueError, match='rewards and values differ'):
        value_ops.discounted_return(reward, value[:-1], step_type, discount)
    with pytest.raises(ValueError, match='discounts: expected shape'):
        value_ops.discounted_return(reward, value, step_type, discount[:-1])


def test_inputs_do_not_change():
    args = hand_made(1.0)
    copies = [a.clone() for a in args]
    value_ops.generalized_advantage_estimation(*args, td_lambda=0.9)
    value_ops.discounted_return(*args)
    value_ops.one_step_discounted_return(*args)
    assert all(torch.equal(a, c) for a, c in zip(args, copies))


def test_gradients_flow_through_values_as_through_the_recursion():
    rng = np.random.default_rng(1)
    step_type = torch.tensor(np.where(rng.random((9, 2)) < 0.2, LAST, MID), dtype=torch.int32)
    reward, value = (torch.tensor(rng.normal(size=(9, 2)), requires_grad=True) for _ in range(2))
    discount = torch.full((9, 2), 0.9, dtype=torch.float64)

    def returns(reward, value):
        return value_ops.discounted_return(reward, value, step_type, discount)

    def advantages(reward, value):
        return value_ops.generalized_advantage_estimation(reward, value, step_type, discount, td_lambda=0.7)

    assert torch.autograd.gradcheck(returns, (reward, value))
    assert torch.autograd.gradcheck(advantages, (reward, value))


# Importance ratios ------------------------------------------------------------------------------------------------


def ratio(new, old, action, mode='double_sided', clipping=0.2, log_prob_clipping=0.0, **kwargs):
    return value_ops.action_importance_ratio(new, old, action, clipping_mode=mode, scope='test',
                                             importance_ratio_clipping=clipping, log_prob_clipping=log_prob_clipping,
                                             check_numerics=True, debug_summaries=False, **kwargs)


def categorical(*probs):
    return dist_utils.Categorical(probs=torch.tensor(probs))


def test_importance_ratios_worked_out_by_hand():
    old, new = categorical([0.5, 0.5], [0.8, 0.2]), categorical([0.9, 0.1], [0.4, 0.6])
    action = torch.tensor([0, 0])
    # 0.9 / 0.5 = 1.8 -> 1.2;  0.4 / 0.8 = 0.5 -> 0.8, or 0.5 where only the upper side is capped
    plain, clipped = ratio(new, old, action)
    torch.testing.assert_close(plain, torch.tensor([1.8, 0.5]))
    torch.testing.assert_close(clipped, torch.tensor([1.2, 0.8]))
    torch.testing.assert_close(ratio(new, old, action, mode='capping')[1], torch.tensor([1.2, 0.5]))
    torch.testing.assert_close(ratio(new, old, action, clipping=0.0)[1], torch.tensor([1.8, 0.5]))


def test_a_stored_log_probability_replaces_the_rollout_distribution():
    old, new = categorical([0.5, 0.5]), categorical([0.9, 0.1])
    action = torch.tensor([1])
    expected = ratio(new, old, action)
    found = ratio(new, (), action, rollout_log_prob=old.log_prob(action))
    torch.testing.assert_close(found, expected)


def test_log_probabilities_are_clipped_symmetrically():
    new, old = categorical([0.999, 0.001]), categorical([0.5, 0.5])
    # log 0.001 = -6.9 is clipped to -1, log 0.5 = -0.69 is not: exp(-1 + 0.6931) = 0.7358
    plain, _ = ratio(new, old, torch.tensor([1]), log_prob_clipping=1.0)
    torch.testing.assert_close(plain, torch.tensor([0.7358]), atol=1e-4, rtol=0)


def test_ratios_are_clipped_at_any_positive_limit_only():
    new, old = categorical([0.54, 0.46]), categorical([0.5, 0.5])
    for limit, expected in ((0.05, 1.05), (0.1, 1.08), (0.0, 1.08)):
        torch.testing.assert_close(ratio(new, old, torch.tensor([0]), clipping=limit)[1], torch.tensor([expected]))


def test_ratios_have_the_gradient_of_the_current_policy_only():
    old_logits, logits = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    new, old = dist_utils.Categorical(logits=logits), dist_utils.Categorical(logits=old_logits)
    ratio(new, old, torch.tensor([0, 1, 2]))[0].sum().backward()
    assert logits.grad is not None and old_logits.grad is None


def test_unknown_clipping_modes_and_non_finite_ratios_are_rejected():
    one = categorical([0.5, 0.5])
    with pytest.raises(ValueError, match='both_sides'):
        ratio(one, one, torch.tensor([0]), mode='both_sides')
    with pytest.raises(FloatingPointError, match='not finite'):
        ratio(one, (), torch.tensor([0]), rollout_log_prob=torch.tensor([-torch.inf]))
    with pytest.raises(FloatingPointError, match='not finite'):
        ratio(one, (), torch.tensor([0, 0]), rollout_log_prob=torch.tensor([0.0, -torch.inf]))
