"""Compare-through returns against the definition in the paper, a constant worked out by hand, and identities."""
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.taac.compare_through import compare_through_return
from alfx.algorithms.taac_algorithm import TAACTDLoss
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def slow_target(reward, value, step_type, discount, rollout_b, b, t):
    """The target of one step of one sequence, all arguments lists over time: the definition with n found by search."""
    if step_type[t] == LAST:
        return value[t]
    n = t + 1
    while not (rollout_b[n] or b[n]) and step_type[n] != LAST and n != len(reward) - 1:
        n += 1
    target, factor = 0.0, 1.0
    for i in range(t + 1, n + 1):
        target += factor * reward[i]
        factor *= discount[i]
    return target + factor * value[n]


def random_sequences(seed, length, batch, rewards=()):
    generator = torch.Generator().manual_seed(seed)

    def draw(p):
        return torch.rand(length, batch, generator=generator) < p

    ended = draw(0.25)
    step_type = torch.where(ended, LAST, MID).to(torch.int32)
    step_type[1:][ended[:-1]] = FIRST  # what follows a LAST is a FIRST
    terminated = (step_type == LAST) & draw(0.5)
    discount = 1.0 - terminated.float()
    reward, value = (torch.randn(length, batch, *rewards, generator=generator) for _ in range(2))
    return SimpleNamespace(reward=reward, step_type=step_type, discount=discount, rollout_b=draw(0.3),
                           b=draw(0.3).long()), value


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 9), st.integers(1, 5))
def test_the_target_matches_the_definition(seed, length, batch):
    info, value = random_sequences(seed, length, batch)
    target = TAACTDLoss(gamma=0.9).compute_td_target(info, value)
    for i in range(batch):
        columns = [x[:, i].tolist() for x in (info.reward, value, info.step_type, info.discount * 0.9, info.rollout_b,
                                              info.b)]
        expected = [slow_target(*columns, t) for t in range(length - 1)]
        torch.testing.assert_close(target[:, i], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def sequence(reward, b, rollout_b, step_type=None, discount=None):
    columns = dict(reward=reward, b=b, rollout_b=rollout_b, step_type=step_type or [MID] * len(reward),
                   discount=discount or [1.0] * len(reward))
    return SimpleNamespace(**{name: torch.tensor(column).unsqueeze(1) for name, column in columns.items()})


def test_a_target_worked_out_by_hand():
    # gamma = 0.5. Rewards 1, 2, 4, 8 for arriving at steps 1..4, values 10, 20, 40, 80 there.
    # The current policy switches at step 3 only, the rollout nowhere but at step 0.
    # step 0: n = 3: 1 + 2/2 + 4/4 + 40/8 = 8; step 1: 2 + 4/2 + 40/4 = 14; step 2: 4 + 40/2 = 24; step 3: 8 + 80/2 = 48
    info = sequence([0., 1., 2., 4., 8.], b=[1, 0, 0, 1, 0], rollout_b=[1, 0, 0, 0, 0])
    value = torch.tensor([[0.], [10.], [20.], [40.], [80.]])
    target = TAACTDLoss(gamma=0.5).compute_td_target(info, value)
    assert target.flatten().tolist() == [8.0, 14.0, 24.0, 48.0]


def test_a_truncation_bootstraps_and_a_termination_does_not():
    for discount, expected in ((1.0, 1.0 + 0.5 * (2.0 + 0.5 * 20.0)), (0.0, 1.0 + 0.5 * 2.0)):
        info = sequence([0., 1., 2., 7., 8.], b=[0] * 5, rollout_b=[0] * 5, step_type=[MID, MID, LAST, FIRST, MID],
                        discount=[1.0, 1.0, discount, 1.0, 1.0])
        value = torch.tensor([[0.], [10.], [20.], [40.], [80.]])
        assert TAACTDLoss(gamma=0.5).compute_td_target(info, value)[0].item() == pytest.approx(expected)


def test_switching_gives_one_step_targets_and_repeating_monte_carlo_ones():
    info, value = random_sequences(3, 6, 50)
    info.b[:] = 1
    one_step = OneStepTDLoss(gamma=0.9).compute_td_target(info, value)
    torch.testing.assert_close(TAACTDLoss(gamma=0.9).compute_td_target(info, value), one_step)
    info.b[:], info.rollout_b[:] = 0, False
    monte_carlo = TDLoss(gamma=0.9, td_lambda=1.0).compute_td_target(info, value)
    torch.testing.assert_close(TAACTDLoss(gamma=0.9).compute_td_target(info, value), monte_carlo)


def test_each_reward_dimension_has_its_own_discount():
    info, value = random_sequences(4, 6, 20, rewards=(2, ))
    target = TAACTDLoss(gamma=[0.9, 0.5]).compute_td_target(info, value)
    for k, gamma in enumerate((0.9, 0.5)):
        single = SimpleNamespace(**{**vars(info), 'reward': info.reward[..., k]})
        torch.testing.assert_close(target[..., k], TAACTDLoss(gamma=gamma).compute_td_target(single, value[..., k]))


def test_the_loss_has_the_sequence_shape_and_is_zero_without_a_target():
    info, value = random_sequences(5, 6, 20)
    result = TAACTDLoss()(info, value, value + 1.0)
    assert result.loss.shape == (6, 20) and result.extra is result.loss
    no_target = info.step_type == LAST
    no_target[-1] = True
    assert (result.loss[no_target] == 0).all() and (result.loss[~no_target] > 0).all()


def test_one_step_alone_is_rejected():
    info, value = random_sequences(6, 1, 2)
    with pytest.raises(ValueError, match='mini_batch_length'):
        compare_through_return(info.reward, value, info.step_type, info.discount, info.rollout_b)
