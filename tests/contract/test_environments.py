"""Properties of every kind of environment."""
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers.gym_environments import CountEnv, DictEnv

from alfx import nest
from alfx.data_structures import StepType
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.alf_wrappers import CheckedEnvironment
from alfx.environments.autoreset import can_reset_some
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.tensor_specs import check_consistent
from environment_kinds import (IN_PROCESS, IN_PROCESSES, KINDS, POOLED, BatchedCountEnv, assert_same, random_actions,
                               record, tiny)

STEPS = 25


@pytest.fixture(params=[*KINDS, *POOLED])
def env(request):
    with (KINDS | POOLED)[request.param]() as environment:
        yield environment


class TestEveryKind:

    def test_every_time_step_obeys_the_specs_and_the_order_of_steps(self, env: AlfEnvironment):
        sequence = record(CheckedEnvironment(env), STEPS)
        assert len(sequence) == STEPS + 1

    def test_the_first_step_resets_new_environments(self, env: AlfEnvironment):
        time_step = env.step(random_actions(env, torch.Generator()))
        assert time_step.is_first().all()
        assert env.current_time_step() is time_step

    def test_seeds_reproduce_the_sequence_at_any_time(self, env: AlfEnvironment):
        env.seed(7)
        first = record(env, STEPS, reset=False)
        record(env, 3)
        env.seed(7)
        assert_same(first, record(env, STEPS, reset=False))

    def test_actions_are_not_written_to_and_may_be_reused_by_the_caller(self, env: AlfEnvironment):
        env.reset()
        action = random_actions(env, torch.Generator().manual_seed(0))
        given = nest.map_structure(torch.clone, action)
        time_step = env.step(action)
        nest.map_structure(lambda a, b: torch.testing.assert_close(a, b), action, given)
        copied = nest.map_structure(torch.clone, time_step.prev_action)
        nest.map_structure(lambda a: a.zero_(), action)
        nest.map_structure(lambda a, b: torch.testing.assert_close(a, b, equal_nan=True), time_step.prev_action, copied)

    def test_later_steps_do_not_change_earlier_tensors(self, env: AlfEnvironment):
        env.reset()
        generator = torch.Generator().manual_seed(0)
        steps, copies = [], []
        for _ in range(6):
            steps.append(env.step(random_actions(env, generator)))
            copies.append(nest.map_structure(torch.clone, steps[-1]))
        assert_same(steps, copies)

    def test_an_action_of_the_wrong_shape_is_rejected(self, env: AlfEnvironment):
        env.reset()
        wrong = nest.map_structure(lambda a: a[..., None], random_actions(env, torch.Generator()))
        with pytest.raises(ValueError, match='action: expected tensors of shapes'):
            env.step(wrong)

    def test_requested_resets_happen_at_the_next_step_and_only_there(self, env: AlfEnvironment):
        env.reset()
        generator = torch.Generator().manual_seed(0)
        before = env.step(random_actions(env, generator))
        mask = torch.arange(env.batch_size) % 2 == 0
        if isinstance(env, GymVectorEnvironment) and not can_reset_some(env.gym):
            with pytest.raises(UnsupportedOperationError, match='cannot end the episodes'):
                env.request_reset(mask)
            return
        env.request_reset(mask)
        after = env.step(random_actions(env, generator))
        assert torch.equal(after.is_first(), mask | before.is_last())
        assert not after.reward[mask].any()
        check_consistent(after, env.time_step_spec())
        assert not env.step(random_actions(env, generator)).is_first()[mask].any()


@pytest.mark.parametrize('kind', KINDS)
def test_a_saved_state_resumes_exactly_in_another_instance(kind):
    with KINDS[kind]() as env, KINDS[kind]() as other:
        record(env, 7)
        state = env.get_state()
        assert state is not None
        record(other, 4, seed=9)
        other.set_state(state)
        assert_same([env.current_time_step()], [other.current_time_step()])
        assert_same(record(env, STEPS, 5, reset=False), record(other, STEPS, 5, reset=False))


class TestAutoresetModes:

    @pytest.fixture(scope='class')
    def expected(self):
        with tiny(*_mixed(), env_info_keys=('step', )) as env:
            return record(env, 40)

    @pytest.mark.parametrize('implementation', [*IN_PROCESS, *IN_PROCESSES])
    def test_all_implementations_give_the_same_sequence(self, implementation, expected):
        with tiny(*_mixed(), vector={**IN_PROCESS, **IN_PROCESSES}[implementation], env_info_keys=('step', )) as env:
            assert_same(expected, record(CheckedEnvironment(env), 40))

    @pytest.mark.parametrize('implementation', [*list(IN_PROCESS)[1:], 'processes of two', 'async, same step'])
    def test_all_implementations_give_the_same_nested_observations(self, implementation):
        with tiny(*[DictEnv] * 3) as env:
            expected = record(env, 14)
        with tiny(*[DictEnv] * 3, vector={**IN_PROCESS, **IN_PROCESSES}[implementation]) as env:
            assert_same(expected, record(CheckedEnvironment(env), 14))

    def test_the_sequence_follows_the_rules(self, expected):
        """Compare with a hand-computed sequence: episodes of ``CountEnv(2)`` end after 3, 4, 5, 2, ... steps."""
        step_types = [int(step.step_type[1]) for step in expected[:15]]
        f, m, l = StepType.FIRST, StepType.MID, StepType.LAST
        assert step_types == [f, m, m, l, f, m, m, m, l, f, m, m, m, m, l]
        last = expected[3]
        assert last.observation[1, 1] == 3 and last.discount[1] == 0 and last.reward[1] != 0
        first = expected[4]
        assert first.observation[1, :2].tolist() == [2, 0] and first.observation[1, 2] == -1  # the action has no effect
        assert first.reward[1] == 0 and first.discount[1] == 1 and first.prev_action[1] == 0

    def test_truncation_keeps_the_discount_and_termination_does_not(self):
        with tiny(lambda: CountEnv(2, terminate=False), lambda: CountEnv(2, terminate=True), discount=0.9) as env:
            last = next(step for step in record(env, 10) if step.is_last().all())
        torch.testing.assert_close(last.discount, torch.tensor([0.9, 0.0]))

    @pytest.mark.parametrize('mode', [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
    def test_environments_that_reset_single_rows_are_reset_once_more(self, mode):
        """Check the first and last steps of episodes if a vector wrapper hides the environments.

        The steps are the same as without the wrapper, but the numbers of the episodes differ.
        """
        env = GymVectorEnvironment(RecordEpisodeStatistics(IN_PROCESS[
            'sync, same step' if mode is AutoresetMode.SAME_STEP else 'sync, disabled']([CountEnv] * 3)), seed=3)
        sequence = record(CheckedEnvironment(env), 40)
        lasts = [step.observation[0, 1].item() for step in sequence if step.is_last()[0]]
        firsts = [step.observation[0, 1:3].tolist() for step in sequence if step.is_first()[0]]
        assert len(lasts) > 3 and all(first == [0, -1] for first in firsts)

    @pytest.mark.parametrize('mode', list(AutoresetMode))
    def test_natively_batched_environments_show_each_first_step(self, mode):
        env = GymVectorEnvironment(BatchedCountEnv(4, mode))
        sequence = record(CheckedEnvironment(env), 30)
        times = torch.stack([step.observation[:, 2] for step in sequence])
        step_type = torch.stack([step.step_type for step in sequence])
        assert (times[step_type == StepType.FIRST] == 0).all()
        lengths = 2 + np.arange(4) % 3
        for i, length in enumerate(lengths):
            assert (times[step_type[:, i] == StepType.LAST, i] == length).all()

    @pytest.mark.parametrize('mode', list(AutoresetMode))
    @pytest.mark.parametrize('reset_mask', [True, False])
    def test_natively_batched_environments_may_give_several_rewards(self, mode, reset_mask, monkeypatch):
        step = BatchedCountEnv.step

        def step_with_two_rewards(self, actions):
            observation, reward, *rest = step(self, actions)
            return observation, np.stack([reward, 2 * reward], 1), *rest

        monkeypatch.setattr(BatchedCountEnv, 'step', step_with_two_rewards)
        monkeypatch.setattr(BatchedCountEnv, 'reward_space', gymnasium.spaces.Box(-9, 9, (2, 2)), raising=False)
        env = GymVectorEnvironment(BatchedCountEnv(2, mode, reset_mask=reset_mask or mode is AutoresetMode.DISABLED))
        rewards = torch.stack([step.reward for step in record(CheckedEnvironment(env), 30)])
        assert env.reward_spec().shape == (2, ) and rewards.any() and torch.equal(rewards[..., 1], 2 * rewards[..., 0])

    def test_natively_batched_environments_may_give_numbers_as_flags(self, monkeypatch):
        expected = record(GymVectorEnvironment(BatchedCountEnv(4, AutoresetMode.NEXT_STEP)), 30)
        step = BatchedCountEnv.step

        def step_with_numbers(self, actions):
            observation, reward, terminated, truncated, infos = step(self, actions)
            return observation, reward, terminated.astype(np.float64), truncated.tolist(), infos

        monkeypatch.setattr(BatchedCountEnv, 'step', step_with_numbers)
        assert_same(record(GymVectorEnvironment(BatchedCountEnv(4, AutoresetMode.NEXT_STEP)), 30), expected)

    def test_same_step_reset_without_single_resets_drops_a_step_and_logs_it(self, caplog):
        env = GymVectorEnvironment(BatchedCountEnv(4, AutoresetMode.SAME_STEP, reset_mask=False))
        assert 'observation after an ignored action' in caplog.text
        sequence = record(CheckedEnvironment(env), 30)
        first = next(step for step in sequence[1:] if step.is_first()[1])
        assert first.observation[1, 2] == 1 and first.reward[1] == 0


def _mixed() -> list:
    """Return constructors of environments that allocate every observation.

    With a reused buffer, the workers of ``AsyncVectorEnv`` would overwrite the final observation before they send it.
    """
    return [partial(CountEnv, length, terminate, one_buffer=False) for length, terminate in
            ((1, False), (2, True), (3, False), (1, True))]
