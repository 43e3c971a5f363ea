"""The risky branch: its optimal value, and loading it."""
import numpy as np
import pytest
import torch

from alfx.environments import suite_simple
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_simple import StochasticWithRiskyBranch


@pytest.mark.parametrize('action, expected, most_likely', [(0, 0.5, 0.5), (1, 0.1, 1.0)])
def test_the_risky_branch_is_worth_less_but_usually_seems_better(action, expected, most_likely):
    env, returns = StochasticWithRiskyBranch(), []
    for seed in range(3000):
        env.reset(seed=seed)
        observation, first, terminated, truncated, _ = env.step(action)
        assert not terminated and not truncated and observation.sum() == 1
        _, second, terminated, truncated, _ = env.step(1 - action)
        assert terminated and not truncated
        returns.append(first + second)
    np.testing.assert_allclose(np.mean(returns), expected, atol=0.08)
    assert np.median(returns) == most_likely


def test_it_is_loaded_in_batches_with_frames_skipped_and_stacked():
    env = suite_simple.load('StochasticWithRiskyBranch', batch_size=3, frame_stack=2)
    assert env.batch_size == 3 and env.observation_spec().shape == (8, )
    env.reset()
    step = env.step(torch.tensor([0, 0, 1]))
    assert step.is_mid().all()
    assert env.step(torch.tensor([0, 0, 1])).is_last().all()
    env = suite_simple.load('StochasticWithRiskyBranch', frame_skip=2)
    env.reset()
    step = env.step(torch.tensor([0]))
    assert step.is_last().all() and step.reward == 0.5 and step.discount == 0


def test_an_unknown_name_is_rejected_with_the_nearest_one():
    with pytest.raises(EnvironmentLoadError, match="did you mean 'StochasticWithRiskyBranch'"):
        suite_simple.load('StochasticWithRiskyBranches')
