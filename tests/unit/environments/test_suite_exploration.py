"""The corridor: how rarely a random policy reaches its end, computed in several ways."""
import itertools

import numpy as np
import pytest
import torch
from test_suites import run, same_continuation

from alfx import gin_utils
from alfx.environments import suite_exploration
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_exploration import CorridorEnv, NoisyCorridorEnv


def episode(env, actions):
    """Return the return and the length of an episode with these actions; excess actions are ignored."""
    env.reset(seed=0)
    total, count = 0.0, 0
    for action in actions:
        _, reward, terminated, truncated, _ = env.step(action)
        total, count = total + reward, count + 1
        assert not truncated
        if terminated:
            break
    return total, count


def random_policy(env):
    """Return the exact performance of a uniformly random policy in an episode.

    With k actions that move, and p[t, c] the probability of being in cell c after t steps, where the last cell is
    absorbing:

        p[0, 0] = 1
        p[t + 1, c + 1] += p[t, c] / k              for each c except the last
        p[t + 1, max(c - 1, 0)] += p[t, c] * (k - 1) / k
        success = p[num_steps, last],  steps = sum_{t < num_steps} (1 - p[t, last])

    With an action that does not move, all three divide by k + 1, and p[t + 1, c] += p[t, c] / (k + 1).

    Returns:
        The probability of reaching the end, and the expected number of steps of the episode.
    """
    count = int(env.action_space.n)
    on, stay = 1 / count, float(isinstance(env, NoisyCorridorEnv)) / count
    inside, success, steps = np.zeros(len(env.actions_on)), 0.0, 0.0
    inside[0] = 1
    for _ in range(env.num_steps):
        steps += 1 - success
        success += on * inside[-1]
        back = (1 - on - stay) * inside
        inside = stay * inside + np.concatenate([back[:1], on * inside[:-1]]) + np.concatenate([back[1:], [0.0]])
    return float(success), steps


def goals_of_random_policy(env, steps):
    """Return how often a uniformly random policy reaches the end within some steps, as a long-run average."""
    success, steps_of_episode = random_policy(env)
    return steps * success / steps_of_episode


class TestCorridor:

    def test_the_correct_actions_reach_the_end_in_the_fewest_steps(self):
        env = CorridorEnv()
        assert episode(env, env.actions_on) == (1.0, 24)
        assert episode(env, env.actions_on[:-1]) == (0.0, 23)

    def test_every_other_action_moves_one_cell_back_and_not_below_the_first(self):
        env = CorridorEnv(length=4, num_actions=3)
        env.reset(seed=0)
        right = env.actions_on

        def cell_after(action):
            observation, reward, terminated, _, _ = env.step(action)
            assert reward == 0 and not terminated and observation.sum() == 1
            return int(observation.argmax())

        for wrong in {0, 1, 2} - {right[0]}:
            assert cell_after(wrong) == 0
        assert [cell_after(right[0]), cell_after(right[1])] == [1, 2]
        for wrong in {0, 1, 2} - {right[2]}:
            assert [cell_after(wrong), cell_after(right[1])] == [1, 2]

    def test_policies_that_ignore_the_cell_get_low_returns(self):
        env = CorridorEnv()
        counts = np.bincount(env.actions_on, minlength=3)
        assert counts.max() < 0.5 * counts.sum()
        for action in range(3):
            env.reset(seed=0)
            cells = [int(env.step(action)[0].argmax()) for _ in range(100)]
            assert max(cells) < 6

    def test_the_layout_depends_on_the_seed_and_not_on_the_episode(self):
        layouts = [CorridorEnv(layout_seed=seed).actions_on for seed in (0, 0, 1)]
        assert layouts[0] == layouts[1] != layouts[2]
        env = CorridorEnv()
        for seed in (1, 2):
            env.reset(seed=seed)
            assert env.actions_on == layouts[0]

    def test_an_observation_that_was_given_is_not_changed(self):
        env = CorridorEnv()
        first, _ = env.reset(seed=0)
        second, *_ = env.step(env.actions_on[0])
        second[:] = 7
        env.step(env.actions_on[1])
        assert first.tolist() == [1.0] + [0.0] * 24
        assert env.reset(seed=0)[0].tolist() == first.tolist()

    @pytest.mark.parametrize('arguments', [{'length': 1}, {'num_actions': 1}, {'length': 10, 'num_steps': 8}])
    def test_a_number_that_is_too_small_is_rejected_by_name(self, arguments):
        with pytest.raises(ValueError, match=f'CorridorEnv.{list(arguments)[-1]}: expected at least'):
            CorridorEnv(**arguments)


class TestNoisyCorridor:

    def test_only_the_last_action_changes_the_noise_and_it_does_not_move(self):
        env = NoisyCorridorEnv(length=4, noise_size=5)
        first, _ = env.reset(seed=0)
        assert first.shape == (9, ) and env.action_space.n == 4 and first[:4].tolist() == [1, 0, 0, 0]
        moved, *_ = env.step(env.actions_on[0])
        assert moved[:4].tolist() == [0, 1, 0, 0] and np.array_equal(moved[4:], first[4:])
        watched, *rest, _ = env.step(3)
        assert watched[:4].tolist() == [0, 1, 0, 0] and (watched[4:] != first[4:]).all() and rest == [0, False, False]
        assert ((watched[4:] >= 0) & (watched[4:] < 1)).all() and env.observation_space.contains(watched)
        assert [env.step(action)[1:3] for action in env.actions_on[1:]] == [(0.0, False), (1.0, True)]

    def test_the_noise_follows_the_seed(self):
        env = NoisyCorridorEnv()
        first, repeated, other = (env.reset(seed=seed)[0] for seed in (1, 1, 2))
        assert np.array_equal(first, repeated) and not np.array_equal(first, other)

    def test_the_random_policy_matches_a_count_of_all_action_sequences(self):
        env = NoisyCorridorEnv(3, 2, 6)
        episodes = [episode(env, actions) for actions in itertools.product(range(3), repeat=6)]
        success, steps = np.mean(episodes, axis=0)
        assert random_policy(env) == (pytest.approx(success), pytest.approx(steps))

    def test_an_empty_screen_is_rejected_by_name(self):
        with pytest.raises(ValueError, match='NoisyCorridorEnv.noise_size: expected at least 1, found 0'):
            NoisyCorridorEnv(noise_size=0)


class TestRandomPolicy:

    def test_the_end_is_found_less_than_once_in_a_million_steps(self):
        env = CorridorEnv()
        assert goals_of_random_policy(env, 10**6) < 0.01
        # detailed balance: from cell c the walk leads on with 1/3 and back with 2/3, so that, where there is no end,
        # the cell has probability 1/2 ** (c + 1); the end is entered from cell 23 at the rate 2 ** -24 / 3 at most
        assert goals_of_random_policy(env, 10**6) < 10**6 * 2**-24 / 3

    def test_the_probability_worked_out_by_hand(self):
        # three cells, two actions, three steps: on on (1/4), back on on (1/8); it lasts 2 steps with 1/4, else 3
        success, steps = random_policy(CorridorEnv(length=3, num_actions=2, num_steps=3))
        assert success == pytest.approx(3 / 8) and steps == pytest.approx(2.75)

    @pytest.mark.parametrize('length, num_actions, num_steps', [(3, 2, 7), (4, 3, 6), (2, 4, 4)])
    def test_the_probability_matches_a_count_of_all_action_sequences(self, length, num_actions, num_steps):
        env = CorridorEnv(length, num_actions, num_steps)
        episodes = [episode(env, actions) for actions in itertools.product(range(num_actions), repeat=num_steps)]
        success, steps = np.mean(episodes, axis=0)
        assert random_policy(env) == (pytest.approx(success), pytest.approx(steps))

    def test_the_probability_matches_powers_of_the_transition_matrix(self):
        env = CorridorEnv()
        matrix = np.zeros((25, 25))
        matrix[24, 24] = 1
        for cell in range(24):
            matrix[cell, cell + 1] += 1 / 3
            matrix[cell, max(cell - 1, 0)] += 2 / 3
        assert random_policy(env)[0] == pytest.approx(np.linalg.matrix_power(matrix, 100)[0, 24], rel=1e-9)

    def test_the_goals_belong_to_successive_episodes(self):
        env = CorridorEnv(length=3, num_actions=2, num_steps=3)
        assert goals_of_random_policy(env, 22) == pytest.approx(22 * (3 / 8) / 2.75)  # 3: hand-computed


class TestLoad:

    @pytest.mark.parametrize('name', ['Corridor', 'NoisyCorridor'])
    def test_every_time_step_is_valid_and_a_saved_episode_resumes(self, name):
        run(suite_exploration.load(name, batch_size=3), steps=120)
        same_continuation(lambda: suite_exploration.load(name, batch_size=2), before=90)

    def test_an_episode_terminates_at_the_end_and_is_truncated_after_its_steps(self):
        env = suite_exploration.load('Corridor', env_args={'length': 3, 'num_steps': 4})
        on = CorridorEnv(3, num_steps=4).actions_on
        env.reset()
        steps = [env.step(torch.tensor([action])) for action in on]
        assert [float(step.reward) for step in steps] == [0.0, 1.0]
        assert bool(steps[-1].is_last()) and float(steps[-1].discount) == 0.0
        assert bool(env.step(torch.tensor([0])).is_first())
        steps = [env.step(torch.tensor([(on[0] + 1) % 3])) for _ in range(4)]
        assert bool(steps[-1].is_last()) and float(steps[-1].discount) == 1.0 and float(steps[-1].reward) == 0.0

    def test_an_unknown_name_and_an_empty_batch_are_rejected(self):
        with pytest.raises(EnvironmentLoadError, match="no exploration task is called 'Corrido'; did you mean 'Corr"):
            suite_exploration.load('Corrido')
        with pytest.raises(ValueError, match='batch_size must be an int >= 1, found int 0'):
            suite_exploration.load('Corridor', batch_size=0)

    def test_a_conf_binds_its_arguments(self, tmp_path):
        conf = tmp_path / 'short.gin'
        conf.write_text("suite_exploration.load.env_args = {'length': 7, 'num_steps': 9}\n")
        with gin_utils.loaded(str(conf)):
            assert suite_exploration.load('Corridor').observation_spec().shape == (7, )
