"""The environments with known values have these values."""
import pytest
import torch
from helpers.gym_environments import ChainEnv, OffsetActionEnv

from alfx import nest
from alfx.environments.alf_wrappers import CheckedEnvironment
from alfx.environments.suite_gym import wrap_env
from alfx.environments.suite_unittest import (ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv,
                                              RNNPolicyUnittestEnv, UnittestEnv, ValueUnittestEnv)

GAMMA = 0.9


def geometric(count):
    """Return 1 + g + ... of ``count`` terms."""
    return sum(GAMMA**k for k in range(count))


def returns(env, policy, steps):
    """Return the discounted return ``[B]`` of the first episode."""
    env = CheckedEnvironment(env)
    time_step = env.reset()
    total, weight = torch.zeros_like(time_step.reward), 1.0
    memory = time_step
    for _ in range(steps):
        time_step = env.step(policy(time_step, memory))
        total += weight * time_step.reward
        weight *= GAMMA
    assert time_step.is_last().all() and (time_step.discount == 0).all()
    return total


def signal(time_step):
    observation = time_step.observation
    return (observation['signal'] if isinstance(observation, dict) else observation)[:, 0]


def discrete(s):
    return (s > 0).long()


@pytest.mark.parametrize('nested', [False, True])
@pytest.mark.parametrize('action_type', ActionType)
@pytest.mark.parametrize('reward_dim', [1, 3])
def test_values_match_the_docstrings(nested, action_type, reward_dim):
    options = {'action_type': action_type, 'nested_observation': nested, 'reward_dim': reward_dim, 'obs_dim': 2}
    scale = torch.ones(4) if reward_dim == 1 else torch.arange(1., reward_dim + 1).expand(4, -1)

    def right(s):
        return discrete(s) if action_type is ActionType.Discrete else 0.5 * s[:, None]

    anything = lambda t, _: right(torch.ones(4))
    torch.testing.assert_close(returns(ValueUnittestEnv(4, 5, **options), anything, 4), geometric(4) * scale)
    torch.testing.assert_close(returns(UnittestEnv(4, 5, **options), anything, 4), 0 * scale)
    torch.testing.assert_close(returns(PolicyUnittestEnv(4, 5, **options), lambda t, _: right(signal(t)), 4),
                               geometric(4) * scale)
    torch.testing.assert_close(returns(RNNPolicyUnittestEnv(4, 7, 2, **options), lambda _, m: right(signal(m)), 6),
                               GAMMA**2 * geometric(4) * scale)


def test_mixed_actions_earn_half_for_each_part():
    env = MixedPolicyUnittestEnv(4, 5)
    both = lambda t, _: {'discrete': discrete(signal(t)), 'continuous': 0.5 * signal(t)[:, None]}
    torch.testing.assert_close(returns(env, both, 4), torch.full((4, ), geometric(4)))
    half = lambda t, _: {'discrete': 1 - discrete(signal(t)), 'continuous': 0.5 * signal(t)[:, None]}
    torch.testing.assert_close(returns(MixedPolicyUnittestEnv(4, 5), half, 4), torch.full((4, ), geometric(4) / 2))


def test_a_random_policy_earns_half_and_a_wrong_one_nothing():
    env = PolicyUnittestEnv(4000, 3)
    env.seed(0)
    random = returns(env, lambda t, _: torch.randint(0, 2, (4000, )), 2)
    assert abs(random.mean() - geometric(2) / 2) < 0.03
    assert not returns(PolicyUnittestEnv(5, 3), lambda t, _: 1 - discrete(signal(t)), 2).any()
    assert not returns(RNNPolicyUnittestEnv(5, 5, 2), lambda t, m: 1 - discrete(signal(m)), 4).any()


def test_the_signal_to_remember_is_shown_only_at_the_first_step():
    env = RNNPolicyUnittestEnv(3, 5, 2)
    shown = [signal(env.reset())] + [signal(env.step(torch.zeros(3, dtype=torch.int64))) for _ in range(5)]
    assert shown[0].abs().min() == 1 and shown[5].abs().min() == 1
    assert not torch.stack(shown[1:5]).any()


def test_wrong_sizes_are_rejected():
    with pytest.raises(ValueError, match='episode_length >= 2'):
        ValueUnittestEnv(1, 1)
    with pytest.raises(ValueError, match=r'gap \+ 2 = 5'):
        RNNPolicyUnittestEnv(1, 4)
    with pytest.raises(ValueError, match='action: expected'):
        env = ValueUnittestEnv(2, 3)
        env.reset()
        env.step(torch.zeros(3, dtype=torch.int64))


def test_the_chain_has_the_value_of_its_docstring():
    env = wrap_env(ChainEnv(5))
    torch.testing.assert_close(returns(env, lambda t, _: torch.ones(1, dtype=torch.int64), 4),
                               torch.tensor([GAMMA**3]))


def test_offset_actions_have_the_value_of_the_docstring():
    env = wrap_env(OffsetActionEnv())
    torch.testing.assert_close(returns(env, lambda t, _: t.observation - 5, 3), torch.tensor([geometric(3)]))


def test_sequences_follow_the_seed():
    env = PolicyUnittestEnv(2, 4, nested_observation=True)
    env.seed(3)
    first = [env.reset().observation, env.step(torch.zeros(2, dtype=torch.int64)).observation]
    env.seed(3)
    second = [env.reset().observation, env.step(torch.zeros(2, dtype=torch.int64)).observation]
    nest.map_structure(torch.testing.assert_close, first, second)
