"""Distributional targets against slow loops, constants worked out by hand, and identities."""
import collections
import math

import numpy as np
import pytest
import torch

from alfx import context
from alfx.algorithms.base import q_values
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss, bootstrap_steps, project_distribution
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType

Info = collections.namedtuple('Info', ['reward', 'step_type', 'discount'])
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def random_info(steps=7, envs=40, seed=0):
    rng = np.random.default_rng(seed)
    step_type = np.where(rng.random((steps, envs)) < 0.25, LAST, MID)
    discount = np.where((step_type == LAST) & (rng.random((steps, envs)) < 0.5), 0.0, 1.0)
    return Info(torch.tensor(rng.normal(size=(steps, envs))), torch.tensor(step_type, dtype=torch.int32),
                torch.tensor(discount))


def random_probs(*shape, seed=1):
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.dirichlet(np.ones(shape[-1]), size=shape[:-1]))


def slow_projection(probs, reward, discount, v_min, v_max):
    """Algorithm 1 of Bellemare et al. 2017, line by line, for one distribution."""
    n = len(probs)
    step = (v_max - v_min) / (n - 1)
    projected = np.zeros(n)
    for j in range(n):
        moved = min(max(reward + discount * (v_min + j * step), v_min), v_max)
        b = (moved - v_min) / step
        lower, upper = int(np.floor(b + 1e-12)), int(np.ceil(b - 1e-12))
        if lower == upper:  # the paper's algorithm loses the probability here
            projected[lower] += probs[j]
        else:
            projected[lower] += probs[j] * (upper - b)
            projected[upper] += probs[j] * (b - lower)
    return projected


def test_the_projection_matches_the_paper():
    rng = np.random.default_rng(0)
    probs, reward = random_probs(200, 7), rng.normal(scale=3.0, size=200)
    discount = rng.choice([0.0, 0.5, 0.99, 1.0], size=200)
    found = project_distribution(probs, torch.tensor(reward), torch.tensor(discount), -2.0, 4.0)
    slow = [slow_projection(p, r, d, -2.0, 4.0) for p, r, d in zip(probs.numpy(), reward, discount)]
    torch.testing.assert_close(found, torch.tensor(np.stack(slow)))


def test_a_projection_worked_out_by_hand():
    # Atoms 0, 1, 2 with probabilities 0.2, 0.3, 0.5. With reward 0.25 and discount 0.5 they move to 0.25, 0.75 and
    # 1.25: atom 0 gets 0.2 * 0.75 + 0.3 * 0.25 = 0.225, atom 1 0.2 * 0.25 + 0.3 * 0.75 + 0.5 * 0.75 = 0.65, atom 2
    # 0.5 * 0.25 = 0.125.
    probs = torch.tensor([0.2, 0.3, 0.5])
    found = project_distribution(probs, torch.tensor(0.25), torch.tensor(0.5), 0.0, 2.0)
    torch.testing.assert_close(found, torch.tensor([0.225, 0.65, 0.125]))


def test_means_are_exact_to_the_last_digit_of_float32():
    """A distribution over [0, 100] has a mean near 50, where floats are 3.8e-6 apart: half of that, and the sum's own
    rounding. Summed from 0, whatever the probabilities miss of 1 is missing 50 times: 12e-6 at worst here."""
    logits = 0.3 * torch.randn(20_000, 51, generator=torch.Generator().manual_seed(0))
    atoms = torch.linspace(0.0, 100.0, 51)
    expected = torch.softmax(logits.double(), -1) @ atoms.double()
    assert (q_values.expected_values(logits, atoms).double() - expected).abs().max() < 5e-6
    two = torch.tensor([[0.0, math.log(3.0)]])
    assert q_values.expected_values(two, torch.tensor([-2.0, 2.0])).item() == pytest.approx(1.0)  # -2 / 4 + 3 * 2 / 4


def test_a_terminal_reward_beyond_the_range_is_all_at_the_last_atom():
    probs = torch.tensor([0.2, 0.3, 0.5])
    found = project_distribution(probs, torch.tensor(7.0), torch.tensor(0.0), 0.0, 2.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 1.0]))


def test_the_projection_keeps_the_mean_within_the_range():
    atoms = torch.linspace(-10, 10, 51, dtype=torch.float64)
    probs, reward = random_probs(30, 51), torch.rand(30, dtype=torch.float64) * 4 - 2
    found = project_distribution(probs, reward, torch.full((30, ), 0.8, dtype=torch.float64), -10.0, 10.0)
    torch.testing.assert_close(found.sum(-1), torch.ones(30, dtype=torch.float64))
    torch.testing.assert_close(found @ atoms, reward + 0.8 * (probs @ atoms))


def test_returns_are_bootstrapped_at_the_end_of_episode_or_sequence():
    step_type = torch.tensor([[MID, LAST], [MID, FIRST], [LAST, MID], [FIRST, MID]], dtype=torch.int32)
    assert bootstrap_steps(step_type)[:, 0].tolist() == [2, 2, 3]
    assert bootstrap_steps(step_type)[1:, 1].tolist() == [3, 3]


def slow_target(info, probs, gamma, v_min, v_max, t, b):
    """Return the n-step target of step ``t``, reward by reward."""
    total, factor, s = 0.0, 1.0, t
    while s < len(info.reward) - 1 and info.step_type[s, b] != LAST:
        s += 1
        total += factor * float(info.reward[s, b])
        factor *= gamma * float(info.discount[s, b])
    return slow_projection(probs[s, b].numpy(), total, factor, v_min, v_max)


def test_n_step_targets_stop_at_the_end_of_an_episode():
    info, probs = random_info(), random_probs(7, 40, 5)
    loss = CategoricalTDLoss(gamma=0.9, td_lambda=1.0, v_min=-3.0, v_max=3.0)
    target = loss.compute_td_target(info, probs)
    checked = 0
    for t in range(6):
        for b in range(40):
            if info.step_type[t, b] != LAST:
                slow = slow_target(info, probs, 0.9, -3.0, 3.0, t, b)
                torch.testing.assert_close(target[t, b], torch.tensor(slow), atol=1e-6, rtol=1e-6)
                checked += 1
    assert checked > 150


def test_a_truncation_bootstraps_and_a_termination_does_not():
    probs = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]]])
    step_type = torch.tensor([[MID], [LAST], [FIRST]], dtype=torch.int32)
    for discount, expected in ((1.0, [0.0, 0.0, 1.0]), (0.0, [0.0, 1.0, 0.0])):
        info = Info(torch.tensor([[0.0], [1.0], [0.0]]), step_type, torch.tensor([[1.0], [discount], [1.0]]))
        for td_lambda in (0.0, 1.0):
            loss = CategoricalTDLoss(gamma=1.0, td_lambda=td_lambda, v_min=0.0, v_max=2.0)
            assert loss.compute_td_target(info, probs)[0, 0].tolist() == expected


@pytest.mark.parametrize('td_lambda', [0.0, 1.0])
def test_the_mean_of_the_target_is_the_scalar_target(td_lambda):
    info, probs = random_info(), random_probs(7, 40, 201)
    atoms = torch.linspace(-50, 50, 201, dtype=torch.float64)
    target = CategoricalTDLoss(gamma=0.9, td_lambda=td_lambda, v_min=-50.0, v_max=50.0).compute_td_target(info, probs)
    scalar = TDLoss(gamma=0.9, td_lambda=td_lambda).compute_td_target(info, probs @ atoms)
    valid = info.step_type[:-1] != LAST
    torch.testing.assert_close((target @ atoms)[valid], scalar[valid], atol=1e-5, rtol=1e-5)


def test_one_step_targets_of_a_sequence_match_its_pairs():
    info, probs = random_info(), random_probs(7, 40, 5)
    loss = CategoricalTDLoss(gamma=0.9, td_lambda=0.0, v_min=-3.0, v_max=3.0)
    target = loss.compute_td_target(info, probs)
    for t in range(6):
        pair = Info(*(x[t:t + 2] for x in info))
        n_step = CategoricalTDLoss(gamma=0.9, td_lambda=1.0, v_min=-3.0, v_max=3.0)
        assert torch.equal(target[t], n_step.compute_td_target(pair, probs[t:t + 2])[0])


def test_the_loss_is_a_divergence_with_the_gradient_of_cross_entropy():
    info, probs = random_info(), random_probs(7, 40, 5)
    loss = CategoricalTDLoss(gamma=0.9, v_min=-3.0, v_max=3.0)
    logits = torch.randn(7, 40, 5, dtype=torch.float64, requires_grad=True)
    result = loss(info, torch.log_softmax(logits, -1), probs).loss
    gradient, = torch.autograd.grad(result.sum(), logits)
    target = loss.compute_td_target(info, probs)
    valid = (info.step_type[:-1] != LAST).double()
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Categorical(probs=target),
        torch.distributions.Categorical(logits=logits[:-1])) * valid
    assert result.shape == (7, 40) and bool((result >= 0).all()) and not result[-1].any()
    torch.testing.assert_close(result[:-1], divergence)
    expected = (torch.softmax(logits[:-1], -1) - target) * valid.unsqueeze(-1)
    torch.testing.assert_close(gradient[:-1], expected.detach())
    assert not gradient[-1].any()


def test_targets_have_no_gradient():
    info = random_info()
    probs = random_probs(7, 40, 5).requires_grad_()
    value = torch.log_softmax(torch.randn(7, 40, 5, dtype=torch.float64, requires_grad=True), -1)
    CategoricalTDLoss(v_min=-3.0, v_max=3.0)(info, value, probs).loss.sum().backward()
    assert probs.grad is None


@pytest.mark.parametrize('arguments', [dict(td_lambda=0.5), dict(v_min=1.0, v_max=1.0), dict(gamma=1.5)])
def test_values_out_of_range_are_rejected(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        CategoricalTDLoss(**arguments)


def test_shapes_that_disagree_are_rejected():
    info = random_info()
    with pytest.raises(ValueError, match=r'\[T, B, N\]'):
        CategoricalTDLoss().compute_td_target(info, random_probs(7, 39, 5))
    single = Info(*(x[:1] for x in info))
    with pytest.raises(ValueError, match='T >= 2'):
        CategoricalTDLoss().compute_td_target(single, random_probs(1, 40, 5))


def test_summaries_are_of_the_means(monkeypatch):
    written = {}
    monkeypatch.setattr('alfx.summary.scalar', lambda name, value: written.setdefault(name, value))
    monkeypatch.setattr('alfx.summary.should_record_summaries', lambda: True)
    monkeypatch.setattr('alfx.summary.histogram', lambda *args, **kwargs: None)
    info, probs = random_info(), random_probs(7, 40, 5).float()
    info = Info(info.reward.float(), info.step_type, info.discount.float())
    loss = CategoricalTDLoss(v_min=-3.0, v_max=3.0, debug_summaries=True)
    loss(info, torch.log_softmax(torch.randn(7, 40, 5), -1), probs)
    assert any('explained_variance' in name for name in written)
    context.reset()
