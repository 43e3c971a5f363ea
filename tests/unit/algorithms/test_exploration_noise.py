"""Exploration noise: its units, its bounds, its statistics."""
import pytest
import torch

from alfx.algorithms.base.exploration_noise import (ActionBounds, GaussianNoise, HeldNoise, OrnsteinUhlenbeckNoise,
                                                    ZetaRepeat, choose, gaussian_like)
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

UNIT = BoundedTensorSpec((3, ), torch.float32, -1, 1)
UNEQUAL = {'a': BoundedTensorSpec((2, ), torch.float32, [-2, 0], [4, 10]),
           'b': BoundedTensorSpec((), torch.float32, -1, 1)}


def test_noise_is_in_units_of_half_the_range_and_clipped():
    bounds = ActionBounds(UNEQUAL, 'test')
    action = {'a': torch.tensor([[1.0, 5.0], [4.0, 0.0]]), 'b': torch.tensor([0.5, -1.0])}
    noise = {'a': torch.tensor([[0.5, -0.5], [0.5, 0.25]]), 'b': torch.tensor([0.25, -1.0])}
    noisy = bounds.add_noise(action, noise)
    # half ranges: 3 and 5 for 'a', 1 for 'b'; 4 + 1.5 and -1 - 1 are outside
    torch.testing.assert_close(noisy['a'], torch.tensor([[2.5, 2.5], [4.0, 1.25]]))
    torch.testing.assert_close(noisy['b'], torch.tensor([0.75, -1.0]))


def test_random_actions_are_uniform_within_the_bounds():
    torch.manual_seed(0)
    sample = ActionBounds(UNEQUAL, 'test').sample_like({'a': torch.zeros(20000, 2), 'b': torch.zeros(20000)})
    for values, low, high in ((sample['a'][:, 0], -2, 4), (sample['a'][:, 1], 0, 10), (sample['b'], -1, 1)):
        assert low <= values.min() and values.max() <= high
        quarters = torch.histc(values, 4, low, high) / 20000
        torch.testing.assert_close(quarters, torch.full((4, ), 0.25), atol=0.02, rtol=0)


@pytest.mark.parametrize('spec', [TensorSpec((2, )), BoundedTensorSpec((), torch.int64, 0, 3),
                                  BoundedTensorSpec((1, ), torch.float32, -1, float('inf'))])
def test_actions_without_a_finite_range_are_rejected(spec):
    with pytest.raises(SpecError, match='DdpgAlgorithm'):
        ActionBounds(spec, 'DdpgAlgorithm')


def test_ornstein_uhlenbeck_noise_follows_its_recursion_from_zero(monkeypatch):
    monkeypatch.setattr(torch, 'randn_like', torch.ones_like)
    noise = OrnsteinUhlenbeckNoise(UNIT, stddev=0.1, damping=0.5)
    action, state = torch.zeros(2, 3), torch.zeros(2, 3)
    for expected in (0.1, 0.15, 0.175):  # x' = x / 2 + 0.1
        noisy, state = noise(action, state)
        torch.testing.assert_close(noisy, torch.full((2, 3), expected))
    torch.testing.assert_close(noise.first_step(action), torch.full((2, 3), 0.1))


def test_ornstein_uhlenbeck_noise_has_its_stationary_moments():
    """Variance and correlation of Ornstein-Uhlenbeck noise reach their stationary values."""
    torch.manual_seed(0)
    noise = OrnsteinUhlenbeckNoise(UNIT, stddev=0.05, damping=0.15)
    state = action = torch.zeros(20000, 3)
    states = []
    for _ in range(40):
        _, state = noise(action, state)
        states.append(state)
    # 0.05 / sqrt(1 - 0.85^2) = 0.0949; consecutive steps are correlated by 0.85
    assert states[-1].std().item() == pytest.approx(0.0949, rel=0.02)
    correlation = (states[-1] * states[-2]).mean() / states[-1].square().mean()
    assert correlation.item() == pytest.approx(0.85, abs=0.02)


def test_gaussian_noise_takes_a_number_or_a_schedule():
    torch.manual_seed(0)
    level = [0.0]
    noise = GaussianNoise(UNIT, stddev=lambda: level[0])
    action = torch.zeros(10000, 3)
    assert torch.equal(noise(action, ())[0], action)
    level[0] = 0.2
    assert noise(action, ())[0].std().item() == pytest.approx(0.2, rel=0.02)
    assert GaussianNoise(UNIT, stddev=0.1)(action, ())[0].std().item() == pytest.approx(0.1, rel=0.02)
    with pytest.raises(ValueError, match='stddev'):
        GaussianNoise(UNIT, stddev=-0.1)


def test_clipped_gaussian_noise_stays_within_its_clip():
    torch.manual_seed(0)
    noise = gaussian_like({'a': torch.zeros(10000)}, 0.2, 0.3)['a']
    assert noise.abs().max().item() == pytest.approx(0.3)
    # two sides of 6.7% of a normal distribution are beyond 1.5 standard deviations
    assert (noise.abs() >= 0.3 - 1e-6).float().mean().item() == pytest.approx(0.1336, abs=0.015)


def test_a_choice_is_made_for_all_actions_of_a_nest_together():
    torch.manual_seed(0)
    ones = {'a': torch.ones(2000, 2), 'b': torch.ones(2000)}
    zeros = {'a': torch.zeros(2000, 2), 'b': torch.zeros(2000)}
    chosen = choose(0.3, ones, zeros)
    assert torch.equal(chosen['a'], chosen['b'].unsqueeze(-1).expand(-1, 2))
    assert chosen['b'].mean().item() == pytest.approx(0.3, abs=0.04)


def test_lengths_of_held_noise_have_their_frequencies():
    repeat = ZetaRepeat(exponent=2.0, max_length=3)  # P(1), P(2), P(3) are 36/49, 9/49, 4/49
    state = HeldNoise(torch.zeros(20000, *UNIT.shape), torch.zeros(20000, dtype=torch.int64))
    _, state = repeat(state)
    counts = torch.bincount(state.steps_left, minlength=3) / 20000
    torch.testing.assert_close(counts, torch.tensor([36.0, 9.0, 4.0]) / 49, atol=0.015, rtol=0)
    new = HeldNoise(state.noise, torch.zeros_like(state.steps_left))
    assert ZetaRepeat(max_length=1)(new)[1].steps_left.max() == 0


def test_noise_is_held_until_its_last_step():
    repeat = ZetaRepeat()
    state = HeldNoise(torch.zeros(50, *UNIT.shape), torch.zeros(50, dtype=torch.int64))
    for _ in range(40):
        before = state
        noise, state = repeat(before)
        is_held = before.steps_left > 0
        assert torch.equal(noise[is_held], before.noise[is_held])
        assert (noise[~is_held] != before.noise[~is_held]).all()
        assert torch.equal(state.steps_left[is_held], before.steps_left[is_held] - 1)
    assert (state.steps_left >= 0).all() and noise.std().item() == pytest.approx(1.0, abs=0.2)


def test_held_gaussian_noise_is_scaled_and_clipped():
    noise = GaussianNoise(UNIT, stddev=0.5, repeat=ZetaRepeat())
    action = torch.zeros(20000, *UNIT.shape)
    state = HeldNoise(torch.zeros_like(action), torch.zeros(20000, dtype=torch.int64))
    noisy, state = noise(action, state)
    torch.testing.assert_close(noisy, (state.noise * 0.5).clamp(-1.0, 1.0))
    repeated, _ = noise(action, state)
    is_held = state.steps_left > 0
    assert torch.equal(repeated[is_held], noisy[is_held]) and is_held.any()
    assert noise.state_spec == ZetaRepeat().state_spec(UNIT)
