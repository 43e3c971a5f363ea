"""The T-maze, and the possible returns with and without memory."""
from functools import partial

import numpy as np
import pytest
import torch

from alfx.environments import suite_memory
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_memory import TMazeEnv

FORWARD, LEFT, RIGHT = range(3)


def play(env, policy, seed):
    """Return the return and the length of an episode of ``policy(observation, cue)``; the cue is shown at first."""
    observation, _ = env.reset(seed=seed)
    cue, total = observation, 0.0
    for t in range(env.num_steps):
        observation, reward, terminated, truncated, _ = env.step(policy(observation, cue))
        total += reward
        assert not truncated
        if terminated:
            return total, t + 1
    return total, env.num_steps


def with_memory(observation, cue):
    return (LEFT if cue[0] else RIGHT) if observation[3] else FORWARD


def test_remembering_the_cue_returns_one_in_the_fewest_steps():
    env = TMazeEnv(length=20)
    assert {play(env, with_memory, seed) for seed in range(20)} == {(1.0, 21)}


def without_memory(actions, observation, cue):
    return actions[int(observation.argmax())]


@pytest.mark.parametrize('turn', [LEFT, RIGHT])
def test_policies_without_memory_return_at_most_half(turn):
    env, policy = TMazeEnv(length=3), partial(without_memory, [FORWARD, FORWARD, FORWARD, turn])
    returns = [play(env, policy, seed)[0] for seed in range(400)]
    assert abs(np.mean(returns) - 0.5) < 0.08 and set(returns) == {0.0, 1.0}


def test_every_deterministic_memoryless_policy_returns_at_most_half():
    env, best = TMazeEnv(length=2, num_steps=6), 0.0
    seeds = [next(s for s in range(99) if env.reset(seed=s)[0][cue]) for cue in (0, 1)]
    for number in range(3**4):
        actions = [number // 3**i % 3 for i in range(4)]
        policy = partial(without_memory, actions)
        returns = [play(env, policy, seed)[0] for seed in seeds]
        best = max(best, np.mean(returns))
    assert best == 0.5


def test_corridor_cells_look_the_same_and_walls_block():
    env = TMazeEnv(length=3)
    first, _ = env.reset(seed=1)
    assert first[:2].sum() == 1 and first.sum() == 1
    assert np.array_equal(env.step(LEFT)[0], first) and np.array_equal(env.step(RIGHT)[0], first)
    seen = [env.step(FORWARD)[0].argmax() for _ in range(4)]
    assert seen == [2, 2, 3, 3]
    assert env.step(FORWARD)[2] is False
    observation, reward, terminated, _, _ = env.step(1 + first[:2].argmin())
    assert observation.argmax() == 3 and reward == 0.0 and terminated


def test_observations_are_not_shared_between_steps():
    env = TMazeEnv(length=2)
    first, _ = env.reset(seed=0)
    before = first.copy()
    env.step(FORWARD)
    assert np.array_equal(first, before)


def test_both_cues_come_equally_often_and_repeat_with_the_seed():
    env = TMazeEnv()
    cues = [int(env.reset(seed=seed)[0].argmax()) for seed in range(200)]
    assert cues == [int(env.reset(seed=seed)[0].argmax()) for seed in range(200)]
    assert 70 < sum(cues) < 130


def test_it_is_loaded_as_a_batch_and_truncated_after_its_steps():
    env = suite_memory.load('TMaze', batch_size=3, env_args={'length': 2, 'num_steps': 5})
    env.seed(0)
    step = env.reset()
    assert step.observation.shape == (3, 4) and step.observation.dtype == torch.float32
    for _ in range(5):
        step = env.step(torch.zeros(3, dtype=torch.int64))
    assert step.is_last().all() and (step.discount == 1).all()
    assert env.step(torch.zeros(3, dtype=torch.int64)).is_first().all()
    for action in (FORWARD, FORWARD, LEFT):
        step = env.step(torch.full((3, ), action))
    assert step.is_last().all() and (step.discount == 0).all()


def test_wrong_names_and_numbers_are_rejected():
    with pytest.raises(EnvironmentLoadError, match='TMaze'):
        suite_memory.load('TMase')
    with pytest.raises(ValueError, match='length: expected at least 1'):
        TMazeEnv(length=0)
    with pytest.raises(ValueError, match='num_steps: expected at least 21'):
        TMazeEnv(num_steps=20)
