"""Benchmark of the steps until Catch is solved: it uses the game of the tests, and its bare loops train."""
import pathlib

import numpy as np
import pytest
import torch
from helpers import catch

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / 'benchmarks'))
    import bare_catch_loops
    return bare_catch_loops


class Counter:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def test_the_vectorised_game_plays_like_the_game_of_the_tests(loops):
    games, random = loops.VectorCatch(3, seed=0), np.random.default_rng(0)
    for _ in range(3):
        envs = [catch.Catch() for _ in range(3)]
        for env, column in zip(envs, games.column):
            env.reset(seed=0)
            env._column = int(column)
        for _ in range(loops.EPISODE):
            expected = np.stack([env._observation() for env in envs])
            np.testing.assert_array_equal(games.observe().numpy(), 2.0 * expected - 1)
            actions = random.integers(0, 3, 3)
            reward, is_over, final = games.step(torch.from_numpy(actions))
            steps = [env.step(action) for env, action in zip(envs, actions)]
            np.testing.assert_array_equal(final.numpy(), 2.0 * np.stack([step[0] for step in steps]) - 1)
            assert reward.tolist() == [step[1] for step in steps] and {is_over} == {step[2] for step in steps}
        assert is_over


def test_the_return_of_the_best_policy_is_one_and_that_of_another_is_less(loops):
    def best(observation):
        ball, paddle = (rows.amax(-2).argmax(-1) for rows in (observation[:, 0, :9], observation[:, 0, 9:]))
        return torch.nn.functional.one_hot(1 + (ball - paddle).sign(), 3)

    assert loops.greedy_return(best) == 1.0
    assert loops.greedy_return(lambda observation: torch.eye(3)[torch.ones(5, dtype=int)]) == pytest.approx(-0.6)


@pytest.mark.parametrize('name', ['dqn', 'rainbow', 'ppo', 'sac', 'pqn'])
def test_a_bare_loop_trains_until_the_game_is_solved(loops, name, monkeypatch):
    returns = iter([-1.0, 0.5, 1.0])
    monkeypatch.setattr(loops, 'greedy_return', lambda values: next(returns))
    counted = Counter(loops._minimize)
    monkeypatch.setattr(loops, '_minimize', counted)
    steps = loops.LOOPS[name](0, 6000)
    assert steps == (3 * 512 if name in ('ppo', 'pqn') else 512 + 2 * 128)
    assert counted.calls == (3 * 16 if name in ('ppo', 'pqn') else (1 + (steps - 512) // 32) * 8)

