"""TD losses against slow loops, constants worked out by hand, and identities."""
import collections

import numpy as np
import pytest
import torch

from alfx import context
from alfx.algorithms.one_step_loss import OneStepTDLoss, OneStepTDQRLoss
from alfx.algorithms.td_loss import TDLoss, TDQRLoss
from alfx.data_structures import StepType
from alfx.utils import losses, value_ops

Info = collections.namedtuple('Info', ['reward', 'step_type', 'discount'])
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def random_info(steps=12, envs=3, dims=(), seed=0):
    rng = np.random.default_rng(seed)
    step_type = np.where(rng.random((steps, envs)) < 0.2, LAST, MID)
    discount = np.where((step_type == LAST) & (rng.random((steps, envs)) < 0.5), 0.0, 1.0)
    return Info(torch.tensor(rng.normal(size=(steps, envs, *dims))), torch.tensor(step_type, dtype=torch.int32),
                torch.tensor(discount))


def slow_lambda_return(info, value, gamma, td_lambda):
    """Return the mixture of n-step returns of Sutton and Barto 2018, eq. 12.3, summed term by term."""
    steps, envs = value.shape
    result = torch.zeros(steps - 1, envs, dtype=value.dtype)
    for b in range(envs):
        for t in range(steps - 1):
            end = t
            while end < steps - 1 and info.step_type[end, b] != LAST:
                end += 1
            horizon = end - t
            if horizon == 0:
                result[t, b] = value[t, b]
                continue
            n_step, weight, total = [], 1.0, 0.0
            for s in range(t + 1, end + 1):
                total = total + weight * info.reward[s, b]
                weight = weight * gamma * info.discount[s, b]
                n_step.append(total + weight * value[s, b])
            mixture = sum((1 - td_lambda) * td_lambda**(n - 1) * n_step[n - 1] for n in range(1, horizon))
            result[t, b] = mixture + td_lambda**(horizon - 1) * n_step[-1]
    return result


@pytest.mark.parametrize('td_lambda', [0.0, 0.6, 0.95, 1.0])
def test_targets_are_the_lambda_returns(td_lambda):
    info = random_info()
    value = torch.randn(12, 3, dtype=torch.float64)
    target = TDLoss(gamma=0.9, td_lambda=td_lambda).compute_td_target(info, value)
    torch.testing.assert_close(target, slow_lambda_return(info, value, 0.9, td_lambda))


def hand_made(last_discount):
    """Return steps with rewards 1 and 2, of which the second ends the episode; then a new episode begins."""
    return Info(torch.tensor([[0.0], [1.0], [2.0], [0.0]]),
                torch.tensor([[FIRST], [MID], [LAST], [FIRST]], dtype=torch.int32),
                torch.tensor([[1.0], [1.0], [last_discount], [1.0]]))


def test_one_step_losses_worked_out_by_hand():
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    target_value = value + 1
    # Truncated: targets 1 + 0.5 * 21 = 11.5 and 2 + 0.5 * 31 = 17.5, errors 1.5 and -2.5, squared 2.25 and 6.25.
    loss = OneStepTDLoss(gamma=0.5)(hand_made(1.0), value, target_value)
    torch.testing.assert_close(loss.loss, torch.tensor([[2.25], [6.25], [0.0], [0.0]]))
    assert loss.extra is loss.loss
    # Terminated: target 2, error -18, squared 324.
    loss = OneStepTDLoss(gamma=0.5)(hand_made(0.0), value, target_value)
    torch.testing.assert_close(loss.loss, torch.tensor([[2.25], [324.0], [0.0], [0.0]]))


def test_the_loss_has_one_entry_per_step_and_zero_without_a_successor():
    info = random_info()
    value = torch.randn(12, 3, dtype=torch.float64)
    loss = TDLoss()(info, value, value).loss
    assert loss.shape == (12, 3)
    assert (loss[-1] == 0).all() and (loss[info.step_type == LAST] == 0).all()
    assert (loss[:-1][info.step_type[:-1] != LAST] > 0).all()


def test_targets_equal_to_the_value_have_no_gradient():
    info = random_info()
    value = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    loss_fn = TDLoss(gamma=0.9, td_lambda=0.8)
    (found, ) = torch.autograd.grad(loss_fn(info, value, value).loss.sum(), value)
    target = loss_fn.compute_td_target(info, value.detach())
    alive = info.step_type[:-1] != LAST
    expected = torch.zeros_like(value)
    expected[:-1] = 2 * (value.detach()[:-1] - target) * alive
    torch.testing.assert_close(found, expected)


def test_the_error_function_receives_target_and_value():
    seen = {}

    def record(target, value):
        seen.update(target=target, value=value)
        return target - value

    info = random_info()
    value = torch.randn(12, 3, dtype=torch.float64)
    loss_fn = TDLoss(td_error_loss_fn=record)
    loss_fn(info, value, value + 1)
    torch.testing.assert_close(seen['value'], value[:-1])
    torch.testing.assert_close(seen['target'], loss_fn.compute_td_target(info, value + 1))


def test_a_discount_for_each_reward_dimension():
    info = random_info(dims=(2, ))
    value = torch.randn(12, 3, 2, dtype=torch.float64)
    target = TDLoss(gamma=[0.9, 0.5], td_lambda=0.7).compute_td_target(info, value)
    for k, gamma in enumerate([0.9, 0.5]):
        single = Info(info.reward[..., k], info.step_type, info.discount)
        expected = TDLoss(gamma=gamma, td_lambda=0.7).compute_td_target(single, value[..., k])
        torch.testing.assert_close(target[..., k], expected)
    loss = TDLoss(gamma=[0.9, 0.5])(info, value, value)
    assert loss.loss.shape == (12, 3)
    shared = TDLoss(gamma=0.9, td_lambda=0.7).compute_td_target(info, value)
    torch.testing.assert_close(shared[..., 0], target[..., 0])
    with pytest.raises(ValueError, match=r'gamma is a list of 2'):
        TDLoss(gamma=[0.9, 0.5])(random_info(), value[..., 0], value[..., 0])
    with pytest.raises(ValueError, match=r'gamma is a list of 2.*expected \[T, B, 2\]'):
        TDLoss(gamma=[0.9, 0.5])(random_info(dims=(3, )), value, value)


def test_gamma_is_a_tensor_of_rank_zero_or_one():
    assert TDLoss(gamma=0.9).gamma.shape == () and TDLoss(gamma=[0.9, 0.8]).gamma.shape == (2, )
    assert TDLoss(gamma=0.9).state_dict() == {}


def test_normalized_targets_rescale_the_loss_and_are_checkpointed():
    info = random_info(steps=40, envs=8)
    info = info._replace(reward=info.reward * 1000)
    value = torch.randn(40, 8, dtype=torch.float64)
    plain, normalized = TDLoss(td_lambda=1.0), TDLoss(td_lambda=1.0, normalize_target=True)
    target = plain.compute_td_target(info, value)
    found = normalized(info, value, value).loss
    alive = info.step_type[:-1] != LAST
    # The first update sets the statistics to those of the targets: the error is divided by their deviation.
    assert not alive.all()  # LAST steps have no target
    expected = ((target - value[:-1]) / target[alive].std(correction=0)).square() * alive
    torch.testing.assert_close(found[:-1], expected, rtol=1e-4, atol=1e-5)
    other = TDLoss(td_lambda=1.0, normalize_target=True)
    other.load_state_dict(normalized.state_dict())
    with context.eval_context():
        torch.testing.assert_close(other(info, value, value).loss, found)


def test_arguments_out_of_range_are_rejected():
    with pytest.raises(ValueError, match='gamma'):
        TDLoss(gamma=1.5)
    for gamma in ([0.9, 1.5], [-0.1, 0.9], []):
        with pytest.raises(ValueError, match='gamma'):
            TDLoss(gamma=gamma)
    assert TDLoss(gamma=[0.0, 1.0]).gamma.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match='td_lambda'):
        TDLoss(td_lambda=-0.1)
    with pytest.raises(ValueError, match='td_lambda must be 0 or 1'):
        TDQRLoss(td_lambda=0.5)


# Quantiles --------------------------------------------------------------------------------------------------------


def slow_quantile_loss(value, target, huber=1.0):
    """Dabney et al. 2018 (QR-DQN), eq. 10, for one state: mean over target j, one number for each value i."""
    n = len(value)
    result = np.zeros(n)
    for i in range(n):
        fraction = (i + 0.5) / n
        for u in target - value[i]:
            size = 0.5 * u * u if abs(u) <= huber else huber * (abs(u) - 0.5 * huber)
            result[i] += abs(fraction - float(u < 0)) * size / len(target)
    return result


@pytest.mark.parametrize('sum_over_quantiles, num_targets', [(False, 4), (True, 4), (False, 7), (True, 2)])
@pytest.mark.parametrize('cls', [TDQRLoss, OneStepTDQRLoss])
def test_quantile_losses_match_the_paper(cls, sum_over_quantiles, num_targets):
    info = random_info(steps=5, envs=2)
    value, target_value = (torch.randn(5, 2, size, dtype=torch.float64) for size in (4, num_targets))
    loss_fn = cls(num_quantiles=4, gamma=0.9, sum_over_quantiles=sum_over_quantiles)
    found = loss_fn(info, value, target_value).loss
    function = value_ops.discounted_return if cls is TDQRLoss else value_ops.one_step_discounted_return
    assert found.shape == (5, 2)
    for q in range(num_targets):
        torch.testing.assert_close(loss_fn.compute_td_target(info, target_value)[..., q],
                                   function(info.reward, target_value[..., q], info.step_type, info.discount * 0.9))
    target = loss_fn.compute_td_target(info, target_value).numpy()
    for t in range(4):
        for b in range(2):
            each = slow_quantile_loss(value[t, b].numpy(), target[t, b])
            expected = each.sum() if sum_over_quantiles else each.mean()
            alive = bool(info.step_type[t, b] != LAST)
            assert found[t, b].item() == pytest.approx(expected * alive, abs=1e-10)


def test_quantile_losses_take_rewards_with_dimensions():
    info = random_info(steps=5, envs=2, dims=(3, ))
    value = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    loss_fn = OneStepTDQRLoss(num_quantiles=4, gamma=[0.9, 0.8, 0.7])
    target = loss_fn.compute_td_target(info, value)
    single = info._replace(reward=info.reward[..., 1])
    torch.testing.assert_close(target[..., 1, :], OneStepTDQRLoss(4, gamma=0.8).compute_td_target(
        single, value[..., 1, :]))
    assert loss_fn(info, value, value).loss.shape == (5, 2)
    shared = OneStepTDQRLoss(num_quantiles=4, gamma=0.8).compute_td_target(info, value)
    torch.testing.assert_close(shared[..., 1, :], target[..., 1, :])
    with pytest.raises(ValueError, match='num_quantiles=5'):
        OneStepTDQRLoss(num_quantiles=5)(info, value, value)
    with pytest.raises(ValueError, match='target_value has shape .* expected the shape of the reward'):
        loss_fn(info, value, value[..., 0, :])


def test_minimizing_the_quantile_loss_finds_the_quantiles_of_the_return():
    # One state, reward 0 or 10 with equal probability, no future: quantiles at 1/8, 3/8 are 0, at 5/8, 7/8 are 10.
    reward = torch.tensor([0.0, 10.0]).repeat(50)
    info = Info(torch.stack([torch.zeros(100), reward]), torch.full((2, 100), MID, dtype=torch.int32),
                torch.zeros(2, 100))
    quantiles = torch.full((4, ), 5.0, requires_grad=True)
    loss_fn = OneStepTDQRLoss(num_quantiles=4, td_error_loss_fn=torch.abs)
    optimizer = torch.optim.SGD([quantiles], lr=1.0)
    for _ in range(300):
        optimizer.zero_grad()
        value = quantiles.expand(2, 100, 4)
        loss_fn(info, value, torch.zeros(2, 100, 4)).loss.sum(0).mean().backward()
        optimizer.step()
    torch.testing.assert_close(quantiles.detach(), torch.tensor([0.0, 0.0, 10.0, 10.0]), atol=0.3, rtol=0)


# Losses -------------------------------------------------------------------------------------------------------------


def test_elementwise_losses_worked_out_by_hand():
    x, y = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.5, -1.0, 3.0])
    torch.testing.assert_close(losses.element_wise_huber_loss(x, y), torch.tensor([0.125, 0.5, 2.5]))
    torch.testing.assert_close(losses.element_wise_squared_loss(x, y), torch.tensor([0.25, 1.0, 9.0]))
    # delta 2: 0.5 * 0.25, 0.5 * 1, 2 * (3 - 1)
    torch.testing.assert_close(losses.huber_function(y, delta=2.0), torch.tensor([0.125, 0.5, 4.0]))


def test_multi_quantile_huber_loss_equals_the_slow_loop():
    quantiles, target = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    for delta in (0.0, 0.1, 1.0):
        found = losses.multi_quantile_huber_loss(quantiles, target, delta)
        for b in range(3):
            total = 0.0
            for i in range(5):
                for u in (target[b] - quantiles[b, i]).tolist():
                    size = abs(u) if delta == 0 else (u * u / (2 * delta) if abs(u) < delta else abs(u) - delta / 2)
                    total += abs((i + 0.5) / 5 - float(u < 0)) * size
            assert found[b].item() == pytest.approx(total / 35)
    single = losses.multi_quantile_huber_loss(quantiles, target[:, 0], 0.1)
    torch.testing.assert_close(single, losses.multi_quantile_huber_loss(quantiles, target[:, :1], 0.1))


def test_iqn_loss_equals_the_slow_loop_with_any_fractions():
    value, target = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    tau = torch.rand(2, 3, 4, dtype=torch.float64)
    width = torch.rand(2, 3, 6, dtype=torch.float64).softmax(-1)
    found = losses.iqn_huber_loss(value, target, tau_hat=tau, next_delta_tau=width)
    for index in np.ndindex(2, 3):
        total = 0.0
        for i in range(4):
            for j in range(6):
                u = (target[index][j] - value[index][i]).item()
                size = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                total += width[index][j].item() * abs(tau[index][i].item() - float(u < 0)) * size
        assert found[index].item() == pytest.approx(total)
    fixed = losses.iqn_huber_loss(value, target, fixed_tau=torch.tensor([0.125, 0.375, 0.625, 0.875]).double(),
                                  sum_over_quantiles=False)
    torch.testing.assert_close(fixed, losses.iqn_huber_loss(value, target) / 4)
    expected = slow_quantile_loss(value[0, 0].numpy(), target[0, 0].numpy()).mean()
    assert fixed[0, 0].item() == pytest.approx(expected)
