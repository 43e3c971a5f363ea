"""Samplers of actions."""
import pytest
import torch

from alfx.utils.action_samplers import CategoricalSeedSampler, EpsilonGreedySampler, MultinomialSampler

PROBS = torch.tensor([0.5, 0.0, 0.3, 0.2])
MANY = PROBS.expand(20000, 4)


def frequencies(actions):
    return torch.bincount(actions, minlength=4) / len(actions)


def close(actions, expected):
    torch.testing.assert_close(frequencies(actions), torch.as_tensor(expected), atol=0.015, rtol=0)


@pytest.mark.parametrize('sampler', [MultinomialSampler(), CategoricalSeedSampler(4), EpsilonGreedySampler(1.0)])
def test_samplers_follow_probabilities_and_never_take_impossible_actions(sampler):
    torch.manual_seed(0)
    state = torch.zeros(20000, 4) if sampler.state_spec else ()
    actions, _ = sampler(MANY, state)
    assert actions.dtype == torch.int64 and actions.shape == (20000, )
    close(actions, PROBS)
    assert (actions != 1).all()


def test_epsilon_greedy_samples_with_probability_epsilon():
    torch.manual_seed(0)
    close(EpsilonGreedySampler(0.4)(MANY)[0], 0.4 * PROBS + torch.tensor([0.6, 0.0, 0.0, 0.0]))
    assert (EpsilonGreedySampler(0.0)(MANY)[0] == 0).all()


def test_concentration_sharpens_the_probabilities():
    torch.manual_seed(0)
    squared = PROBS.square() / PROBS.square().sum()
    close(CategoricalSeedSampler(4, concentration=2)(MANY, torch.zeros(20000, 4))[0], squared)
    uniform = (PROBS > 0) / 3
    close(CategoricalSeedSampler(4, concentration=0)(MANY, torch.zeros(20000, 4))[0], uniform)


def test_stored_noise_repeats_the_action_until_resampled():
    torch.manual_seed(0)
    sampler = CategoricalSeedSampler(4, new_noise_prob=0.0)
    first, noise = sampler(MANY, torch.zeros(20000, 4))
    repeated, same = sampler(MANY, noise)
    assert torch.equal(first, repeated) and torch.equal(noise, same)
    _, renewed = CategoricalSeedSampler(4, new_noise_prob=0.25)(MANY, noise)
    changed = (renewed != noise).any(-1)
    assert changed.float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(renewed[~changed], noise[~changed])


def test_new_noise_at_the_start_of_an_episode_only_where_it_starts():
    sampler = CategoricalSeedSampler(4, new_noise_prob=0.0)
    state = torch.tensor([[0.0] * 4, [1.0, 2.0, 3.0, 4.0]])
    _, noise = sampler(PROBS.expand(2, 4), state)
    assert (noise[0] > 0).all() and torch.equal(noise[1], state[1]) and (state[0] == 0).all()


@pytest.mark.parametrize('make', [lambda: EpsilonGreedySampler(1.5), lambda: CategoricalSeedSampler(3, -0.1),
                                  lambda: CategoricalSeedSampler(0), lambda: CategoricalSeedSampler(3, 0.1, -1)])
def test_arguments_out_of_range_are_rejected(make):
    with pytest.raises(ValueError, match='Sampler'):
        make()
