"""Targets of the MuZero model against a slow loop over whole episodes in float64."""
import numpy as np
import pytest
import torch

from alfx import context, nest
from alfx.algorithms.mcts_algorithm import MCTSInfo
from alfx.algorithms.muzero.targets import TargetMaker, TargetSettings
from alfx.data_structures import BatchInfo, Experience, StepType, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import extract_spec

GAMMA, ACTIONS = 0.9, 3
R = 4


def random_steps(rng, count, num_envs, only_last_reward=False):
    """Return steps ``[count, num_envs]`` of 1 to 9 step episodes that terminate, are truncated, or lack a LAST step."""
    step_type, discount = np.zeros((count, num_envs), np.int32), np.ones((count, num_envs))
    for env in range(num_envs):
        t = 0
        while t < count:
            length, end = int(rng.integers(2, 10)), rng.choice(['terminated', 'truncated', 'broken off'])
            last = t + length - 1
            step_type[t:last + 1, env] = StepType.MID
            step_type[t, env] = StepType.FIRST
            if last < count and end != 'broken off':
                step_type[last, env] = StepType.LAST
                discount[last, env] = 0.0 if end == 'terminated' else 1.0
            t += length
    reward = rng.normal(size=(count, num_envs)) * (step_type != StepType.FIRST)
    if only_last_reward:
        reward *= (step_type == StepType.LAST) & (discount == 0)
    policy = rng.dirichlet(np.ones(ACTIONS), size=(count, num_envs))
    tensors = [torch.from_numpy(x) for x in (step_type, reward, discount, rng.normal(size=(count, num_envs)), policy,
                                             rng.integers(0, ACTIONS, (count, num_envs)))]
    step_type, reward, discount, value, policy, action = tensors
    time_step = TimeStep(step_type=step_type, reward=reward, discount=discount, prev_action=action)
    return Experience(time_step=time_step, rollout_info=MCTSInfo(value=value, candidate_action_policy=policy))


def stored(steps, max_length):
    count, num_envs = steps.step_type.shape
    buffer = ReplayBuffer(extract_spec(steps, from_dim=2), num_envs, max_length, keep_episodic_info=True)
    buffer.add_sequence(steps)
    return buffer


class Slow:
    """Targets computed one step at a time."""

    def __init__(self, steps, td_steps, predicts_reward):
        self.steps, self.td_steps, self.predicts_reward = steps, td_steps, predicts_reward
        self.count = steps.step_type.shape[0]

    def end(self, t, env):
        """Return the last step of the episode that contains t, and whether the episode terminated there."""
        step_type = self.steps.step_type[:, env]
        while step_type[t] != StepType.LAST and t + 1 < self.count and step_type[t + 1] != StepType.FIRST:
            t += 1
        return t, bool(step_type[t] == StepType.LAST and self.steps.discount[t, env] == 0)

    def value(self, t, env):
        """Sum discounted rewards from t on, until n steps have passed or the episode has ended."""
        end, terminated = self.end(t, env)
        total, factor, n = 0.0, 1.0, 0
        while t < end and (self.td_steps < 0 or n < self.td_steps):
            t, n = t + 1, n + 1
            if self.predicts_reward:
                total += factor * float(self.steps.reward[t, env])
            factor *= GAMMA
        if t == end and terminated:
            return total if self.predicts_reward else total + factor * float(self.steps.reward[t, env])
        return total + factor * float(self.steps.rollout_info.value[t, env])

    def of(self, t, env):
        """Return all targets of the steps t, ..., t + R as dictionaries."""
        end, terminated = self.end(t, env)
        targets = []
        for i in range(R + 1):
            at = min(t + i, end)
            is_over = at == end and terminated
            reward = float(self.steps.reward[at, env]) if t + i <= end and self.predicts_reward else 0.0
            learns = t + i <= end and not is_over
            policy = self.steps.rollout_info.candidate_action_policy[at, env].tolist() if learns else [0.0] * ACTIONS
            targets.append(dict(reward=reward, value=self.value(at, env), game_over=is_over, action_policy=policy,
                                beyond_episode_end=t + i > end))
        return targets, not terminated


def settings(**changes):
    return TargetSettings(**{**dict(
        num_unroll_steps=R, discount=GAMMA, scalar_reward=lambda x: x, predicts_reward=True, td_steps=3,
        reanalyze_ratio=0.0, reanalyze_td_steps=1, td_steps_func=None, full_reanalyze=False), **changes})


@pytest.mark.parametrize('predicts_reward', [True, False], ids=['rewards', 'outcome only'])
@pytest.mark.parametrize('td_steps', [1, 3, 20, -1])
@pytest.mark.parametrize('length', [1, 5])
def test_targets_match_a_slow_loop(td_steps, predicts_reward, length):
    rng = np.random.default_rng(td_steps + 10 * length)
    count, num_envs, max_length = 90, 4, 40  # the ring is overwritten more than once
    steps = random_steps(rng, count, num_envs, only_last_reward=not predicts_reward)
    buffer = stored(steps, max_length)
    maker = TargetMaker(settings(td_steps=td_steps, predicts_reward=predicts_reward), 'rollout_info', None)
    slow = Slow(steps, td_steps, predicts_reward)
    envs = torch.arange(num_envs).repeat_interleave(max_length - length + 1)
    positions = torch.arange(count - max_length, count - length + 1).repeat(num_envs)
    target, batch = maker.targets(BatchInfo(envs, positions, replay_buffer=buffer), length)
    assert target.value.dtype == torch.float64
    for b, (env, position) in enumerate(zip(envs.tolist(), positions.tolist())):
        for t in range(length):
            expected, is_partial = slow.of(position + t, env)
            assert bool(target.is_partial_trajectory[b, t]) == is_partial
            for name in expected[0]:
                found = getattr(target, name)[b, t].tolist()
                expected_values = [x[name] for x in expected]
                np.testing.assert_allclose(found, expected_values, rtol=0, atol=1e-12,
                                   err_msg=f'{name} {env} {position} {t}')
    actions = batch.actions()
    for b in range(0, len(envs), 7):
        end, _ = slow.end(int(positions[b]), int(envs[b]))
        indices = [min(int(positions[b]) + i + 1, end) for i in range(R)]
        assert actions[b, 0].tolist() == [int(steps.prev_action[t, envs[b]]) for t in indices]


class StoredSearch:
    """A reanalyzer that returns the stored search results."""

    def search(self, buffer, env_ids, positions):
        return buffer.get_field('rollout_info', env_ids, positions)

    def values(self, buffer, env_ids, positions):
        return buffer.get_field('rollout_info.value', env_ids, positions)


@pytest.mark.parametrize('full', [False, True])
@pytest.mark.parametrize('ratio', [0.5, 1.0])
def test_reanalysis_that_finds_the_stored_results_changes_no_target(full, ratio):
    buffer = stored(random_steps(np.random.default_rng(0), 60, 3), 60)
    info = BatchInfo(torch.arange(3).repeat_interleave(50), torch.arange(50).repeat(3), replay_buffer=buffer)
    expected, _ = TargetMaker(settings(td_steps=3), 'rollout_info', None).targets(info, 5)
    found, _ = TargetMaker(settings(td_steps=3, reanalyze_ratio=ratio, reanalyze_td_steps=3, full_reanalyze=full),
                           'rollout_info', StoredSearch()).targets(info, 5)
    nest.map_structure(torch.testing.assert_close, found, expected)


def test_the_steps_of_reanalyzed_values_follow_from_the_age():
    """Derive the number of steps from the age: after 90 steps, the age of position p is (89 - p) / 90 of the run."""
    buffer = stored(random_steps(np.random.default_rng(0), 90, 2), 40)
    context.update_progress('percent', 1.0)
    maker = TargetMaker(settings(td_steps_func=lambda age, n, oldest: (1 + 90 * age).round(), reanalyze_td_steps=90),
                        'rollout_info', StoredSearch())
    positions = torch.tensor([50, 60, 85, 89])
    info = BatchInfo(torch.tensor([0, 1, 0, 1]), positions, replay_buffer=buffer)
    assert maker._td_steps(info).tolist() == (90 - positions).tolist()
    for value in (0.0, 91.0):
        maker._settings = settings(td_steps_func=lambda age, n, oldest, v=value: torch.full_like(age, v),
                                   reanalyze_td_steps=90)
        with pytest.raises(ValueError, match='expected numbers from 1 to reanalyze_td_steps = 90'):
            maker._td_steps(info)


def one_episode(rewards, values, last_discount):
    n = len(values)
    step_type = torch.full((n, 1), StepType.MID, dtype=torch.int32)
    step_type[0], step_type[-1] = StepType.FIRST, StepType.LAST
    discount = torch.ones(n, 1, dtype=torch.float64)
    discount[-1] = last_discount
    policy = torch.full((n, 1, ACTIONS), 1 / 3, dtype=torch.float64)
    return Experience(
        time_step=TimeStep(step_type, torch.tensor(rewards, dtype=torch.float64)[:, None], discount,
                           prev_action=torch.zeros(n, 1, dtype=torch.int64)),
        rollout_info=MCTSInfo(value=torch.tensor(values, dtype=torch.float64)[:, None], candidate_action_policy=policy))


def values_of_first(steps, td_steps):
    maker = TargetMaker(settings(td_steps=td_steps), 'rollout_info', None)
    info = BatchInfo(torch.tensor([0]), torch.tensor([0]), replay_buffer=stored(steps, 8))
    return maker.targets(info, 1)[0].value[0, 0].tolist()


def test_values_worked_out_by_hand():
    # rewards 1 and 2 for arriving at steps 1 and 2, where the episode terminates; stored values 10, 20, 30
    terminated = one_episode([0, 1, 2], [10, 20, 30], 0.0)
    assert values_of_first(terminated, 1) == pytest.approx([1 + 0.9 * 20, 2, 0, 0, 0])
    assert values_of_first(terminated, -1) == pytest.approx([1 + 0.9 * 2, 2, 0, 0, 0])
    # truncated by a time limit: the value of the last step estimates the rest of the return
    truncated = one_episode([0, 1, 2], [10, 20, 30], 1.0)
    assert values_of_first(truncated, 1) == pytest.approx([1 + 0.9 * 20, 2 + 0.9 * 30, 30, 30, 30])
    assert values_of_first(truncated, -1) == pytest.approx([1 + 0.9 * 2 + 0.81 * 30, 2 + 27, 30, 30, 30])


def test_td_steps_of_episode_length_give_the_monte_carlo_return():
    steps = random_steps(np.random.default_rng(3), 60, 3)
    buffer = stored(steps, 60)
    info = BatchInfo(torch.arange(3).repeat_interleave(60), torch.arange(60).repeat(3), replay_buffer=buffer)
    n_step, to_the_end = (TargetMaker(settings(td_steps=n), 'rollout_info', None).targets(info, 1)[0].value
                          for n in (9, -1))
    torch.testing.assert_close(n_step, to_the_end, rtol=0, atol=1e-12)


def test_values_are_from_the_view_of_player_0():
    """Let player 1 win after five moves: all values are -1, also where it is the turn of player 1."""
    steps = one_episode([0, 0, 0, 0, -1.0], [0.3, -0.2, 0.1, 0.4, 0.5], 0.0)
    maker = TargetMaker(settings(td_steps=-1, discount=1.0), 'rollout_info', None)
    info = BatchInfo(torch.tensor([0]), torch.tensor([0]), replay_buffer=stored(steps, 8))
    assert maker.targets(info, 1)[0].value[0, 0].tolist() == [-1, -1, -1, -1, 0]


def test_a_model_without_rewards_rejects_rewards_before_the_end():
    steps = one_episode([0, 1, 2], [10, 20, 30], 0.0)
    maker = TargetMaker(settings(predicts_reward=False), 'rollout_info', None)
    with pytest.raises(ValueError, match='train_reward_function = False.*last step'):
        maker.targets(BatchInfo(torch.tensor([0]), torch.tensor([0]), replay_buffer=stored(steps, 8)), 1)
