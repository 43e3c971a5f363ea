"""Wrappers around a whole batch of environments."""
import cProfile
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import ChainEnv, CountEnv, MultiRewardEnv

from alfx import context, nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.alf_gym_wrapper import AlfGymWrapper
from alfx.environments.alf_wrappers import (
    ActionObservationWrapper, AlfEnvironmentBaseWrapper, AtariTerminalOnLifeLossWrapper, BatchEnvironmentWrapper,
    CheckedEnvironment, CurriculumWrapper, DiscreteActionWrapper, MultitaskWrapper, NonEpisodicAgent,
    NormalizedActionWrapper, PerformanceProfiler, RandomFirstEpisodeLength, ReturnLimit,
    ScalarRewardWrapper, TemporallyCorrelatedNoiseWrapper, TimeLimit)
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.suite_unittest import (ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv, ValueUnittestEnv)
from alfx.environments.vector_env import SerialVectorEnv
from alfx.metrics.metrics import averaged_infos
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec


def count_env(*lengths: int, **kwargs) -> GymVectorEnvironment:
    """Return a batch of counters; the second element of the observation is the step."""
    return GymVectorEnvironment(SerialVectorEnv([partial(CountEnv, n) for n in lengths]), seed=0, **kwargs)


def zeros(env: AlfEnvironment):
    return nest.map_structure(lambda spec: spec.zeros((env.batch_size, )), env.action_spec())


def record(env: AlfEnvironment, steps: int) -> TimeStep:
    """Return the checked and stacked time steps of a reset and of zero actions."""
    checked = CheckedEnvironment(env)
    return nest.stack([checked.reset()] + [checked.step(zeros(env)) for _ in range(steps)])


def assert_state_continues(make, steps: int = 9):
    """Check that an instance continues exactly from the state saved in another instance."""
    env, other = make(), make()
    env.seed(1)
    record(env, 6)
    state = env.get_state()
    other.seed(2)
    record(other, 3)
    other.set_state(state)
    for _ in range(steps):
        nest.map_structure(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), env.step(zeros(env)),
                           other.step(zeros(other)))


class TestLimits:

    def test_episodes_are_truncated_after_duration_steps(self):
        steps = record(TimeLimit(count_env(100, 2, discount=0.9), 3), 8)
        f, m, l = StepType.FIRST, StepType.MID, StepType.LAST
        assert steps.step_type[:, 0].tolist() == [f, m, m, l, f, m, m, l, f]
        assert steps.step_type[:, 1].tolist() == [f, m, m, l, f, m, m, l, f]
        assert steps.observation[:, 0, 1].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
        torch.testing.assert_close(steps.discount[3], torch.tensor([0.9, 0.9]))

    def test_a_limit_around_environments_without_single_resets_is_rejected(self):
        class Unresettable(PolicyUnittestEnv):
            request_reset = AlfEnvironment.request_reset

        with pytest.raises(EnvironmentLoadError, match='TimeLimit: .* cannot end the episodes of some environments'):
            TimeLimit(BatchEnvironmentWrapper([Unresettable(1, 3), Unresettable(1, 3)]), 2)

    def test_an_end_of_the_environment_itself_is_kept(self):
        steps = record(TimeLimit(ValueUnittestEnv(2, 3), 5), 5)
        assert steps.step_type[:, 0].tolist() == [0, 1, 2, 0, 1, 2] and steps.discount[2].tolist() == [0, 0]

    def test_the_first_episodes_have_random_lengths_and_later_ones_do_not(self):
        env = RandomFirstEpisodeLength(count_env(*[50] * 30), random_length_range=10, num_episodes=1)
        env.seed(0)
        steps = record(env, 75)
        ends = [np.flatnonzero(steps.step_type[:, i] == StepType.LAST) for i in range(30)]
        firsts = [end[0] for end in ends]
        assert min(firsts) >= 1 and max(firsts) == 10 and len(set(firsts)) > 5
        assert all(end[1] - end[0] > 50 for end in ends if len(end) > 1)

    def test_episodes_are_truncated_when_their_return_reaches_a_value(self):
        """Truncate CartPole, whose reward is 1, at the fifth step of each episode of each environment."""
        env = ReturnLimit(suite_gym.load('CartPole-v1', batch_size=2), 4.5)
        steps = record(env, 12)
        assert steps.step_type.T.tolist() == [[0, 1, 1, 1, 1, 2, 0, 1, 1, 1, 1, 2, 0]] * 2
        assert steps.discount.min() == 1

    @pytest.mark.parametrize('value', [-1, 0, float('nan')])
    def test_a_return_to_reach_must_be_positive(self, value):
        with pytest.raises(EnvironmentLoadError, match='max_total_reward above 0.*leave the wrapper out for no limit'):
            ReturnLimit(count_env(1), value)

    def test_limits_resume_from_a_saved_state(self):
        assert_state_continues(lambda: ReturnLimit(count_env(9, 9), 1.0))
        assert_state_continues(lambda: RandomFirstEpisodeLength(TimeLimit(count_env(9, 9), 7), 5, 3))

    def test_processes_of_a_run_draw_different_limits(self):
        limits = []
        for first in (0, 8):
            with context.environments_from(first):
                env = RandomFirstEpisodeLength(count_env(*[99] * 8), 1000)
                env.seed(3)
                env.reset()
            limits.append(env._limits.tolist())
        assert limits[0] != limits[1]

    def test_a_limit_must_be_positive(self):
        with pytest.raises(EnvironmentLoadError, match=r'TimeLimit\.duration'):
            TimeLimit(count_env(1), 0)


class TestTimeStepWrappers:

    def test_terminations_look_like_truncations(self):
        steps = record(NonEpisodicAgent(ValueUnittestEnv(1, 3), discount=0.5), 5)
        assert steps.discount[:, 0].tolist() == [1, 1, 0.5, 1, 1, 0.5]

    def test_the_previous_action_is_observed(self):
        env = ActionObservationWrapper(PolicyUnittestEnv(2, 4))
        env.reset()
        time_step = env.step(torch.tensor([1, 0]))
        assert time_step.observation['prev_action'].tolist() == [1, 0]
        record(env, 5)

    def test_rewards_are_weighted(self):
        """Weight rewards of (1, number of the step)."""
        inner = [GymVectorEnvironment(SerialVectorEnv([MultiRewardEnv])) for _ in range(2)]
        assert record(ScalarRewardWrapper(inner[0], [2, 10]), 2).reward[:, 0].tolist() == [0, 12, 22]
        assert record(ScalarRewardWrapper(inner[1]), 2).reward[:, 0].tolist() == [0, 1, 1]
        with pytest.raises(EnvironmentLoadError, match='expected 2 numbers'):
            ScalarRewardWrapper(inner[0], [1])
        with pytest.raises(EnvironmentLoadError, match=r'expected rewards of shape \(K,\)'):
            ScalarRewardWrapper(count_env(1))

    def test_the_base_wrapper_has_no_effect(self):
        env = AlfEnvironmentBaseWrapper(count_env(2, 3))
        assert env.wrapped_env().batch_size == env.batch_size == 2
        assert env.time_step_spec() == env.wrapped_env().time_step_spec()
        record(env, 9)
        assert_state_continues(lambda: AlfEnvironmentBaseWrapper(count_env(2, 3)))

    def test_a_state_of_other_wrappers_is_rejected(self):
        state = TimeLimit(count_env(2), 3).get_state()
        with pytest.raises(ValueError, match='expected a NonEpisodicAgent, found a TimeLimit'):
            NonEpisodicAgent(count_env(2)).set_state(state)


class TestActionWrappers:

    @staticmethod
    def continuous(**kwargs):
        return PolicyUnittestEnv(3, 5, action_type=ActionType.Continuous, **kwargs)

    def test_continuous_actions_become_discrete(self):
        env = DiscreteActionWrapper(suite_gym.wrap_env(_Push(2), normalize_action=False), 3)
        assert env.action_spec() == BoundedTensorSpec((), torch.int64, 0, 8)
        env.reset()
        assert env._inner(torch.tensor([0, 5, 8])).tolist() == [[-2, -2], [0, 2], [2, 2]]
        assert env.step(torch.tensor([5])).prev_action.tolist() == [5]
        record(env, 9)
        with pytest.raises(EnvironmentLoadError, match='actions_num'):
            DiscreteActionWrapper(self.continuous(), 1)
        with pytest.raises(EnvironmentLoadError, match='expected one bounded continuous action'):
            DiscreteActionWrapper(PolicyUnittestEnv(1, 3), 2)

    def test_actions_are_normalized(self):
        """Scale 0.25 to 0.5 for bounds of -2 and 2."""
        game = _Push(1)
        env = NormalizedActionWrapper(suite_gym.wrap_env(game, normalize_action=False))
        assert env.action_spec() == BoundedTensorSpec((1, ), torch.float32, -1, 1)
        env.reset()
        time_step = env.step(torch.tensor([[0.25]]))
        assert game.last.tolist() == [0.5] and time_step.prev_action.tolist() == [[0.25]]

    def test_normalization_does_not_change_discrete_parts(self):
        env = NormalizedActionWrapper(MixedPolicyUnittestEnv(2, 3))
        assert env.action_spec()['discrete'] == BoundedTensorSpec((), torch.int64, 0, 1)
        record(env, 5)

    def test_noise_is_correlated_and_starts_at_zero_in_each_episode(self):
        game = _Push(1, length=400)
        env = TemporallyCorrelatedNoiseWrapper(suite_gym.wrap_env(game, normalize_action=False), sigma=0.1,
                                               past_noise_weight=0.9)
        env.seed(0)
        env.reset()
        noise = []
        for _ in range(399):
            time_step = env.step(torch.zeros(1, 1))
            noise.append(float(game.last[0]))
            assert not time_step.prev_action.any()
        x = np.array(noise)
        assert abs(np.corrcoef(x[1:], x[:-1])[0, 1] - 0.9) < 0.06
        assert abs(np.std(x[1:] - 0.9 * x[:-1]) - 0.1) < 0.02
        while not env.step(torch.zeros(1, 1)).is_first():
            assert env._noise.all()
        assert not env._noise.any()
        env.step(torch.zeros(1, 1))
        assert env._noise.all()
        assert_state_continues(lambda: TemporallyCorrelatedNoiseWrapper(self.continuous()))


class _Push(CountEnv):
    """An environment that keeps the last action, which is in [-2, 2]."""

    def __init__(self, size: int, length: int = 5):
        super().__init__(length)
        self.action_space = gymnasium.spaces.Box(-2, 2, (size, ), np.float32)
        self.last = None

    def step(self, action):
        self.last = action
        return super().step(0)


class _Lives(CountEnv):
    """An environment that loses a life at every second step and ends the game after ``length`` steps."""

    def _with_lives(self, result):
        return (*result[:-1], {'lives': 3 - self._step // 2})

    def reset(self, **kwargs):
        return self._with_lives(super().reset(**kwargs))

    def step(self, action):
        return self._with_lives(super().step(action))


class TestLives:

    def test_a_lost_life_is_a_termination_in_returns_only(self):
        """Lose lives at steps 2, 4, ... of games with 5 and 10 steps."""
        env = AtariTerminalOnLifeLossWrapper(GymVectorEnvironment(
            SerialVectorEnv([lambda: _Lives(4), lambda: _Lives(9)]), env_info_keys=('lives', ), seed=0))
        plain = GymVectorEnvironment(SerialVectorEnv([lambda: _Lives(4), lambda: _Lives(9)]), seed=0)
        env.reset(), plain.reset()
        discounts = []
        for _ in range(9):
            time_step, same = env.step(torch.zeros(2, dtype=torch.int64)), plain.step(torch.zeros(2, dtype=torch.int64))
            assert torch.equal(time_step.step_type, same.step_type)
            assert torch.equal(time_step.observation, same.observation)
            assert torch.equal(time_step.reward, same.reward)
            discounts.append(time_step.discount.int().tolist())
        # the sixth step is the first of a new game, with all lives
        assert [x for x, _ in discounts] == [1, 0, 1, 0, 1, 1, 1, 0, 1]
        assert [x for _, x in discounts] == [1, 0, 1, 0, 1, 0, 1, 0, 1]

    def test_fire_is_pressed_after_a_lost_life(self):
        """Lose lives at steps 2 and 4 of a game with 5 steps; the sixth step resets it."""
        env = AtariTerminalOnLifeLossWrapper(GymVectorEnvironment(
            SerialVectorEnv([lambda: _Lives(4)]), env_info_keys=('lives', ), seed=0), fire_action=1)
        env.reset()
        pressed = [int(env.step(torch.zeros(1, dtype=torch.int64)).prev_action) for _ in range(4)]
        env.reset()
        pressed.append(int(env.step(torch.zeros(1, dtype=torch.int64)).prev_action))
        assert pressed == [0, 0, 1, 0, 0]

    def test_a_fire_action_must_exist(self):
        env = GymVectorEnvironment(SerialVectorEnv([lambda: _Lives(4)]), env_info_keys=('lives', ), seed=0)
        with pytest.raises(EnvironmentLoadError, match='fire_action: expected 0 to .*, found 99'):
            AtariTerminalOnLifeLossWrapper(env, fire_action=99)

    def test_an_environment_without_a_life_counter_is_rejected(self):
        with pytest.raises(EnvironmentLoadError, match=r"env_info_keys=\('lives',\)"):
            AtariTerminalOnLifeLossWrapper(count_env(1))


class TestSeveral:

    def test_batches_are_joined(self):
        env = BatchEnvironmentWrapper([count_env(2, 3), count_env(4)])
        assert env.batch_size == 3
        steps = record(env, 12)
        assert steps.env_id[0].tolist() == [0, 1, 2]
        assert steps.step_type[3].tolist() == [2, 1, 1] and steps.observation[3, :, 1].tolist() == [3, 3, 3]
        env.request_reset(torch.tensor([False, False, True]))
        assert env.step(torch.zeros(3, dtype=torch.int64)).is_first()[2]
        assert_state_continues(lambda: BatchEnvironmentWrapper([count_env(2, 3), count_env(4)]))
        with pytest.raises(EnvironmentLoadError, match='environment 1 has different specs'):
            BatchEnvironmentWrapper([count_env(2), ValueUnittestEnv(1, 3)])

    @staticmethod
    def tasks(env_id: int = 0) -> MultitaskWrapper:
        return MultitaskWrapper([AlfGymWrapper(ChainEnv(4)), AlfGymWrapper(_AllOnes(4))], ['chain', 'ones'], env_id)

    def test_the_task_is_chosen_at_the_end_of_an_episode_only(self):
        env = CheckedEnvironment(self.tasks())
        env.reset()
        seen = []
        for task in (1, 1, 1, 1, 0, 0, 0, 0, 0):
            time_step = env.step({'action': torch.tensor([1]), 'task_id': torch.tensor([task])})
            seen.append((int(time_step.step_type), int(time_step.env_info['task_id'])))
        assert seen == [(1, 0), (1, 0), (2, 0), (0, 1), (1, 1), (1, 1), (2, 1), (0, 0), (1, 0)]
        assert env.num_tasks == 2 and env.task_names == ['chain', 'ones']

    def test_the_task_is_chosen_at_the_end_of_a_truncated_episode(self):
        env = TimeLimit(self.tasks(), 2)
        env.reset()
        action = {'action': torch.tensor([1]), 'task_id': torch.tensor([1])}
        seen = [(int(t.step_type), int(t.env_info['task_id'])) for t in (env.step(action) for _ in range(4))]
        assert seen == [(1, 0), (2, 0), (0, 1), (1, 1)]

    def test_the_curriculum_chooses_a_task_after_a_truncated_episode(self):
        """Truncate every episode, of 2 steps each, by a limit outside of the curriculum."""
        inner = CurriculumWrapper(BatchEnvironmentWrapper([self.tasks(0), self.tasks(1)]))
        env = TimeLimit(inner, 2)
        env.seed(0)
        tasks = record(env, 30).env_info['task_id']
        assert [len(column.unique()) for column in tasks.T] == [2, 2]
        assert inner._counts.sum() == 20 and inner._current_score.tolist() == [0, 1]

    def test_tasks_and_the_curriculum_start_again_with_the_same_seed(self):
        env = CurriculumWrapper(self.tasks(1), warmup_period=1)
        records = []
        for _ in range(2):
            env.seed(3)
            records.append(record(env, 31).env_info)
        assert all(torch.equal(records[0][key], records[1][key]) for key in records[0])

    def test_the_goal_reward_of_a_joined_environment_is_that_of_the_first(self):
        class Goal(CountEnv):

            def compute_reward(self, achieved, desired, info):
                return 7.0

        inner = [GymVectorEnvironment(SerialVectorEnv([partial(Goal, 3)])) for _ in range(2)]
        assert BatchEnvironmentWrapper(inner).goal_reward_fn()(0, 0, {}) == 7
        assert BatchEnvironmentWrapper([count_env(2)]).goal_reward_fn() is None

    def test_tasks_are_loaded_by_name(self):
        env = MultitaskWrapper.load(suite_gym.load, ['CartPole-v1', 'CartPole-v0'], env_id=1)
        assert int(env.reset().env_info['task_id']) == 1 and env.task_names == ['CartPole-v1', 'CartPole-v0']
        with pytest.raises(EnvironmentLoadError, match='batch sizes'):
            MultitaskWrapper([count_env(1, 1)], ['two'])

    def test_tasks_resume_from_a_saved_state(self):
        assert_state_continues(lambda: CurriculumWrapper(BatchEnvironmentWrapper([self.tasks(0), self.tasks(1)])))

    def test_the_curriculum_favors_the_task_that_progresses(self):
        """Compare probabilities after the warmup: 10 / 11 and 1 / 11 for progress 0.02 and 0 with favor 10."""
        env = CurriculumWrapper(BatchEnvironmentWrapper([self.tasks(i) for i in range(4)]), progress_favor=10,
                                warmup_period=1)
        env.seed(0)
        record(env, 30)
        np.testing.assert_allclose(env.task_probabilities().sum(), 1)
        env._current_score[:], env._past_score[:], env._counts[:] = (0.03, 0.5), (0.01, 0.6), 100
        np.testing.assert_allclose(env.task_probabilities(), [10 / 11, 1 / 11])
        env._past_score[:] = 1
        np.testing.assert_allclose(env.task_probabilities(), [0.5, 0.5])
        tasks = record(env, 80).env_info['task_id']
        assert 0 < tasks.float().mean() < 1

    def test_the_sum_of_an_info_of_the_curriculum_is_its_last_value(self):
        env = CurriculumWrapper(self.tasks(1))
        env.seed(0)
        env.reset()
        steps = [env.step(torch.tensor([1])) for _ in range(3)]
        assert steps[-1].is_last().all()
        total = sum(step.env_info['curriculum_task_prob'] for step in steps)
        assert total.tolist() == [[0.5, 0.5]] and not env.step(torch.tensor([1])).env_info['curriculum_task_prob'].any()
        assert 'task_id' not in averaged_infos(steps[0].env_info)

    def test_scores_are_mean_rewards(self):
        """Score a chain of 4, which never ends with zero actions, and a task with a reward of 1 per step."""
        env = CurriculumWrapper(self.tasks(1))
        env.seed(0)
        env.reset()
        for _ in range(3):
            time_step = env.step(torch.tensor([1]))
        assert time_step.is_last().all() and env._current_score[1] == 1 and env._counts.tolist() == [0, 1]


class _AllOnes(ChainEnv):

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 1.0, terminated, truncated, info


class TestCheckedEnvironment:

    @pytest.mark.parametrize('change, message', [
        (lambda t: t._replace(reward=t.reward * float('nan')), 'reward: expected finite'),
        (lambda t: t._replace(reward=t.reward.double()), 'expected float32'),
        (lambda t: t._replace(observation=t.observation + 5), 'observation: expected values within'),
        (lambda t: t._replace(observation=t.observation[:, :1]), r'expected float32 \(2,\)'),
        (lambda t: t._replace(step_type=t.step_type * 0, reward=t.reward * 0, prev_action=t.prev_action * 0),
         'FIRST exactly where'),
        (lambda t: t._replace(step_type=t.step_type + 4), '0, 1 or 2'),
        (lambda t: t._replace(discount=t.discount * 0), '0 only at LAST'),
        (lambda t: t._replace(prev_action=t.prev_action + 1), 'the action that was given'),
        (lambda t: t._replace(env_id=t.env_id + 1), 'the same as before'),
        (lambda t: nest.map_structure(lambda x: x[:1], t), 'a batch of 2'),
    ])
    def test_invalid_use_raises(self, change, message):
        class Wrong(AlfEnvironmentBaseWrapper):

            def _step(self, action):
                return change(self._env.step(action))

        env = CheckedEnvironment(Wrong(PolicyUnittestEnv(2, 5, obs_dim=2)))
        env.reset()
        with pytest.raises(SpecError, match=message):
            env.step(torch.zeros(2, dtype=torch.int64))

    def test_a_step_that_overwrites_the_previous_one_is_detected(self):
        class Writing(AlfEnvironmentBaseWrapper):

            def _step(self, action):
                self._env.current_time_step().observation.zero_()
                return self._env.step(action)

        env = CheckedEnvironment(Writing(PolicyUnittestEnv(2, 5)))
        env.reset()
        with pytest.raises(SpecError, match='observation: expected a step that does not write to tensors'):
            env.step(torch.zeros(2, dtype=torch.int64))

    def test_episodes_may_be_ended_from_outside(self):
        env = TimeLimit(CheckedEnvironment(count_env(9, 9)), 2)
        env.reset()
        kinds = [env.step(zeros(env)).step_type.tolist() for _ in range(4)]
        assert kinds == [[1, 1], [2, 2], [0, 0], [1, 1]]

    def test_an_action_out_of_bounds_is_rejected(self):
        env = CheckedEnvironment(PolicyUnittestEnv(2, 5))
        env.reset()
        with pytest.raises(SpecError, match='action: expected values within'):
            env.step(torch.tensor([0, 2]))

    def test_floats_of_an_action_may_be_out_of_bounds_but_finite(self):
        env = CheckedEnvironment(PolicyUnittestEnv(2, 5, action_type=ActionType.Continuous))
        env.reset()
        env.step(torch.full((2, 1), 3.0))
        with pytest.raises(SpecError, match='action: expected finite numbers'):
            env.step(torch.full((2, 1), float('nan')))


def test_steps_are_profiled():
    profiles = []
    env = PerformanceProfiler(count_env(3), profiles.append, process_steps=2)
    record(env, 5)
    assert len(profiles) == 2 and isinstance(profiles[0], cProfile.Profile) and env.duration == 5


def test_a_wrapped_environment_has_the_specs_of_its_time_steps():
    env = ActionObservationWrapper(count_env(1))
    assert env.time_step_spec().observation == {'observation': TensorSpec((4, )),
                                                'prev_action': BoundedTensorSpec((), torch.int64, 0, 2)}
