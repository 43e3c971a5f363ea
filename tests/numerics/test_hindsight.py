"""Hindsight goals against slow loops, over random histories: any lengths of episodes, unfinished, wrapped around."""
import copy
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alfx import nest
from alfx.algorithms.data_transformer import HindsightExperienceTransformer, l2_dist_close_reward_fn
from alfx.algorithms.transformers import hindsight
from alfx.data_structures import Experience, StepType, TimeStep, add_batch_info
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec, extract_spec

F, M, L = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = {'achieved_goal': TensorSpec((1, )), 'desired_goal': TensorSpec((1, )), 'observation': TensorSpec((2, ))}
NEVER = -99.0


def reward_fn(achieved, desired):
    """0 where both are the same, -1 elsewhere."""
    return (achieved == desired).all(-1).to(torch.float32) - 1


def episodes(ends, steps, terminates=False):
    """Time steps [steps] of one environment, in episodes that end where ``ends`` says.

    What is achieved at time t of the run is t // 2, so that two steps in a row achieve the same and no others do; the
    goal of an episode is out of reach, or if ``terminates`` what its last step achieves.
    """
    step_type = torch.ones(steps, dtype=torch.int32)
    step_type[0] = F
    for t in range(1, steps):
        if step_type[t - 1] == L:
            step_type[t] = F
        elif ends[t] and not (terminates and t % 2):  # the step before has not reached the goal yet
            step_type[t] = L
    achieved = torch.arange(steps) // 2 * 1.0
    desired = torch.full((steps, ), NEVER)
    if terminates:
        for t in reversed(range(steps)):
            last = step_type[t] == L
            desired[t] = achieved[t] if last else NEVER if t == steps - 1 or step_type[t + 1] == F else desired[t + 1]
    first = step_type == F
    reward = torch.where(first, 0.0, (achieved == desired).float() - 1)
    discount = torch.where((reward == 0) & ~first, 0.0, 1.0) if terminates else torch.ones(steps)
    observation = {'achieved_goal': achieved[:, None], 'desired_goal': desired[:, None],
                   'observation': torch.rand(steps, 2)}
    return TimeStep(step_type=step_type, reward=reward, discount=discount, observation=observation,
                    env_id=torch.zeros(steps, dtype=torch.int64))


def stored(histories, max_length):
    """Return a buffer with the histories of several environments, whose lengths can differ."""
    spec = Experience(time_step=extract_spec(histories[0]))
    buffer = ReplayBuffer(spec, len(histories), max_length, keep_episodic_info=True)
    for t in range(max(len(h.reward) for h in histories)):
        ids = [i for i, h in enumerate(histories) if t < len(h.reward)]
        batch = nest.stack([nest.map_structure(lambda x, t=t: x[t], histories[i]) for i in ids])
        buffer.add_batch(Experience(time_step=batch._replace(env_id=torch.tensor(ids))), torch.tensor(ids))
    return buffer


def sampled(buffer, batch_size, length):
    batch, info = buffer.get_batch(batch_size, length)
    return add_batch_info(batch, info, buffer)


def episode_end(history, position):
    """Return the last stored position of the episode of ``position``."""
    while position + 1 < len(history.reward) and history.step_type[position] != L:
        position += 1
    return position


def transformer(**kwargs):
    return HindsightExperienceTransformer(OBSERVATION, **{'reward_fn': reward_fn, **kwargs})


histories = st.lists(st.lists(st.booleans(), min_size=30, max_size=30), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(ends=histories, sizes=st.lists(st.integers(6, 30), min_size=3, max_size=3), max_length=st.integers(6, 40),
       length=st.integers(1, 5), proportion=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 10**6))
def test_goals_are_from_the_same_episodes_future_and_the_rest_is_unchanged(ends, sizes, max_length, length,
                                                                           proportion, seed):
    torch.manual_seed(seed)
    runs = [episodes(e, n) for e, n in zip(ends, sizes)]
    buffer = stored(runs, max_length)
    before = sampled(buffer, 16, length)
    copy = nest.map_structure(torch.clone, before._replace(batch_info=(), replay_buffer=(), rollout_info_field=()))
    after = transformer(her_proportion=proportion).transform_experience(before)
    unchanged = before._replace(batch_info=(), replay_buffer=(), rollout_info_field=())
    assert all(torch.equal(a, b) for a, b in zip(nest.flatten(copy), nest.flatten(unchanged))), 'inputs do not change'
    for b in range(16):
        run, position = runs[int(before.batch_info.env_ids[b])], int(before.batch_info.positions[b])
        begin = 0
        for t in range(length):
            if before.step_type[b, t] == F or (t and before.step_type[b, t - 1] == L):
                begin = t
            goal, old = (float(x.observation['desired_goal'][b, t, 0]) for x in (after.time_step, before.time_step))
            goal_of_first = float(after.observation['desired_goal'][b, begin, 0])
            end = episode_end(run, position + begin)
            if goal != old:
                future = run.observation['achieved_goal'][position + begin + 1:end + 1, 0].tolist()
                assert goal in future
                assert goal == goal_of_first, 'one goal for all steps of an episode'
            else:
                assert goal_of_first == old
                assert proportion < 1 or end == position + begin, 'nothing lies ahead'
            achieved = float(before.observation['achieved_goal'][b, t, 0])
            is_first = before.step_type[b, t] == F
            assert float(after.reward[b, t]) == (0.0 if is_first else float(achieved == goal) - 1)
        for field in ('step_type', 'discount'):
            assert torch.equal(getattr(after.time_step, field)[b], getattr(before.time_step, field)[b])
        for name in ('achieved_goal', 'observation'):
            assert torch.equal(after.observation[name][b], before.observation[name][b])
    if proportion == 0:
        assert torch.equal(after.observation['desired_goal'], before.observation['desired_goal'])


@settings(max_examples=150, deadline=None)
@given(ends=histories, max_length=st.integers(6, 40), length=st.integers(2, 5), seed=st.integers(0, 10**6))
def test_relabeling_moves_the_termination_to_the_new_goal(ends, max_length, length, seed):
    """Success terminates at the new goal and no longer at the old one."""
    torch.manual_seed(seed)
    runs = [episodes(e, 30, terminates=True) for e in ends]
    buffer = stored(runs, max_length)
    before = sampled(buffer, 16, length)
    after = transformer(her_proportion=0.7, terminal_reward=0.0).transform_experience(before)
    changed = (after.observation['desired_goal'] != before.observation['desired_goal'])[..., 0]
    for b in range(16):
        for t in range(length):
            is_first = before.step_type[b, t] == F
            reached = bool(after.observation['desired_goal'][b, t] == after.observation['achieved_goal'][b, t])
            kind, discount = int(after.step_type[b, t]), float(after.discount[b, t])
            assert float(after.reward[b, t]) == (0.0 if is_first else float(reached) - 1)
            if changed[b, t] and not is_first:
                assert discount == (0.0 if reached else 1.0)
                assert kind == (L if reached else int(before.step_type[b, t]))
            else:
                assert kind == before.step_type[b, t] and discount == before.discount[b, t]


def test_other_terminations_stay_and_reopened_ends_get_the_usual_discount():
    """Terminations for another reason stay; a reopened end gets the discount of the other steps."""
    # steps: reached the old goal (reward 1), fell (reward -2), an ordinary one with the environment's discount 0.9
    step_type = torch.tensor([[L], [L], [M]], dtype=torch.int32)
    old, new = torch.tensor([[1.0], [-2.0], [0.0]]), torch.tensor([[0.0], [-2.0], [1.0]])
    discount = torch.tensor([[0.0], [0.0], [0.9]])
    changed = torch.ones(3, 1, dtype=torch.bool)
    kinds, discounts = hindsight.ends_at(1.0, changed, new, old, step_type, discount)
    assert kinds[:, 0].tolist() == [L, L, L] and kinds.dtype == torch.int32
    torch.testing.assert_close(discounts[:, 0], torch.tensor([0.9, 0.0, 0.0]))


def test_the_first_step_of_each_episode_in_a_sequence():
    # M M L F M M | L F F: by hand; an episode of FIRST alone is cut off at the write seam or by a restart
    step_type = torch.tensor([[M, M, L, F, M, M], [L, F, F, M, L, F]], dtype=torch.int32)
    assert hindsight.first_of_episode(step_type).tolist() == [[0, 0, 0, 3, 3, 3], [0, 1, 2, 2, 2, 5]]


def test_later_steps_are_drawn_uniformly_and_at_the_given_proportion():
    torch.manual_seed(0)
    first, to_end = torch.zeros(200000, 2, dtype=torch.int64), torch.full((200000, 2), 5)
    chosen, ahead = hindsight.draw_future(first, to_end, 0.8)
    assert torch.equal(chosen[:, 0], chosen[:, 1]) and torch.equal(ahead[:, 0], ahead[:, 1])
    # binomial: the standard deviation of 200,000 draws is sqrt(0.8 * 0.2 / 2e5) = 0.0009
    assert chosen.float().mean().item() == pytest.approx(0.8, abs=0.004)
    shares = torch.bincount(ahead[:, 0], minlength=6) / 200000
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.16, 0.16, 0.16, 0.16, 0.16]), atol=0.004, rtol=0)


def test_a_history_by_hand():
    # One episode of 4 steps, achieved 0 0 1 1; goal out of reach. From step 0 the future is steps 1, 2, 3, which
    # achieve 0, 1, 1; arriving at step 1 achieves 0. So a relabeled pair (0, 1) is rewarded 0 with goal 0 (1 in 3),
    # else -1 (2 in 3).
    torch.manual_seed(0)
    run = episodes([False, False, False, True], 4)
    buffer = stored([run], 10)
    ids, positions = torch.zeros(3000, dtype=torch.int64), torch.zeros(3000, dtype=torch.int64)
    steps = buffer.get_field('', ids[:, None], positions[:, None] + torch.arange(2))
    info = buffer.get_batch(1, 2)[1]._replace(env_ids=ids, positions=positions)
    after = transformer(her_proportion=1.0).transform_experience(add_batch_info(steps, info, buffer))
    goal, reward = after.observation['desired_goal'][:, 1, 0], after.reward[:, 1]
    assert set(goal.tolist()) == {0.0, 1.0}
    assert torch.equal(reward, torch.where(goal == 0, 0.0, -1.0))
    assert (goal == 0).float().mean().item() == pytest.approx(1 / 3, abs=0.04)


def test_the_whole_buffer_gets_one_goal_for_each_of_its_episodes():
    torch.manual_seed(0)
    run = episodes([t % 6 == 5 for t in range(24)], 24)
    buffer = stored([run], 30)
    batch, info = buffer.gather_all()
    after = transformer(her_proportion=1.0).transform_experience(add_batch_info(batch, info, buffer))
    goals = after.observation['desired_goal'].view(4, 6)
    assert (goals == goals[:, :1]).all()
    assert ((goals[:, 0] >= torch.arange(4) * 3) & (goals[:, 0] <= torch.arange(4) * 3 + 2)).all()


class TestRewardCheck:

    def batch(self, run=None):
        return sampled(stored([episodes([t % 5 == 4 for t in range(20)], 20) if run is None else run], 20), 16, 2)

    def test_a_reward_function_that_contradicts_stored_rewards_is_rejected(self):
        """Raise an error that names the fields and shows both rewards."""
        wrong = transformer(reward_fn=l2_dist_close_reward_fn)
        wrong.transform_experience(self.batch())  # it agrees with this history
        with pytest.raises(ValueError) as error:
            transformer(reward_fn=lambda a, d: -l2_dist_close_reward_fn(a, d)).transform_experience(self.batch())
        for part in ('HindsightExperienceTransformer.reward_fn', 'expected -1.0', 'found 1.0', '-99.0',
                     'time_step.observation.achieved_goal', 'time_step.observation.desired_goal', 'position'):
            assert part in str(error.value)

    def test_a_single_step_that_disagrees_is_enough(self):
        run = episodes([False] * 20, 20)
        run.reward[7] = 0.5
        buffer = stored([run], 20)
        batch, info = buffer.gather_all()
        with pytest.raises(ValueError, match=r'expected 0.5, as stored, found -1.0 .*1 of 20 steps'):
            transformer().transform_experience(add_batch_info(batch, info, buffer))

    def test_the_reward_of_a_first_step_is_not_compared(self):
        run = episodes([True] * 20, 20)
        run.reward[run.step_type == F] = 7.0
        after = transformer().transform_experience(self.batch(run))
        assert (after.reward[after.step_type == F] == 7.0).all()

    def test_higher_environment_precision_may_differ_at_the_threshold(self):
        """Rewards of an environment with more digits may differ at the threshold."""
        run = episodes([False] * 20, 20)
        threshold = torch.tensor(0.05)
        achieved = run.observation['achieved_goal']
        run.observation['desired_goal'][:] = achieved + torch.nextafter(threshold, torch.tensor(1.0))
        run.reward[1:] = 0.0  # in float64 it was just within 0.05
        wrong = transformer(reward_fn=l2_dist_close_reward_fn)
        wrong.transform_experience(self.batch(run))
        run.observation['desired_goal'][:] = achieved + 0.0501
        with pytest.raises(ValueError, match='does not reproduce the rewards'):
            wrong.transform_experience(self.batch(run))

    def test_a_reward_of_another_shape_is_rejected(self):
        with pytest.raises(ValueError, match=r'expected a reward \(16, 2\).*found \(16, 2, 1\)'):
            transformer(reward_fn=lambda a, d: (a == d).float()).transform_experience(self.batch())

    def test_terminal_reward_has_to_be_right(self):
        run = episodes([False] * 20, 20)
        run.observation['desired_goal'][:] = run.observation['achieved_goal']
        run.reward[1:] = 0.0
        with pytest.raises(ValueError, match='every step with this reward to terminate.*discount 1.0'):
            transformer(terminal_reward=0.0).transform_experience(self.batch(run))

    def test_terminations_that_look_like_success_cause_one_warning(self, caplog):
        run = episodes([t % 5 == 4 for t in range(20)], 20, terminates=True)
        without = transformer()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                without.transform_experience(self.batch(run))
        assert len(caplog.records) == 1 and 'terminal_reward' in caplog.text


def test_all_reward_dimensions_are_recomputed():
    torch.manual_seed(0)
    run = episodes([t % 5 == 4 for t in range(20)], 20)
    run = run._replace(reward=torch.stack([run.reward, 2 * run.reward], -1))
    both = transformer(reward_fn=lambda a, d: torch.stack([reward_fn(a, d), 2 * reward_fn(a, d)], -1))
    after = both.transform_experience(sampled(stored([run], 20), 64, 2))
    assert torch.equal(after.reward[..., 1], 2 * after.reward[..., 0])
    assert (after.reward[:, 1][after.step_type[:, 1] != F] == 0).any()
    with pytest.raises(ValueError, match='terminal_reward'):
        transformer(reward_fn=both._relabel._check.reward_fn, terminal_reward=0.0).transform_experience(
            sampled(stored([run], 20), 4, 2))


def test_buffer_contents_and_collected_data_do_not_change():
    run = episodes([t % 5 == 4 for t in range(20)], 20)
    buffer = stored([run], 20)
    before = nest.map_structure(torch.clone, buffer.gather_all()[0])
    hindsight_transformer = transformer(her_proportion=1.0)
    for _ in range(5):
        hindsight_transformer.transform_experience(sampled(buffer, 16, 2))
    assert all(torch.equal(a, b) for a, b in zip(nest.flatten(before), nest.flatten(buffer.gather_all()[0])))
    assert hindsight_transformer.transform_timestep(run, ()) == (run, ())
    assert not hindsight_transformer.state_dict()


def pairwise(achieved, desired, info):
    """Return rewards of goals [..., 1]."""
    return -np.abs(achieved - desired).sum(-1)


class TestGoalReward:

    @pytest.mark.parametrize('compute_reward, calls', [
        (pairwise, 6 + 1 + 1),
        (lambda a, d, info: -np.abs(a - d).sum(), 6 + 1 + 6),  # one number for a batch
        (lambda a, d, info: -abs(a.item() - d.item()), 6 + 1 + 6),  # raises for a batch
        (lambda a, d, info: -np.abs(a - d).sum(-1) - (a.ndim > 1), 6 + 1 + 6),  # other numbers for a batch
    ])
    def test_it_gives_the_rewards_of_single_pairs(self, compute_reward, calls):
        called = []
        reward = hindsight.GoalReward(lambda *goals: called.append(goals) or compute_reward(*goals), reward_fn)
        achieved, desired = torch.rand(2, 3, 1), torch.rand(2, 3, 1)
        found = reward(achieved, desired)
        assert found.shape == (2, 3) and found.dtype == torch.float32 and len(called) == calls
        assert torch.allclose(found, -(achieved - desired).abs()[..., 0])
        assert all(info == {} for _, _, info in called) and copy.deepcopy(reward) is reward

    def test_goals_may_be_numbers_or_nests(self):
        reward = hindsight.GoalReward(lambda a, d, info: float(a == d), reward_fn)
        assert reward(torch.tensor([[1, 2]]), torch.tensor([[1, 3]])).tolist() == [[1.0, 0.0]]
        reward = hindsight.GoalReward(lambda a, d, info: a['x'] - d['y'][..., 0], reward_fn)
        goal = {'x': torch.ones(2, 2), 'y': torch.zeros(2, 2, 3)}
        assert reward(goal, goal).tolist() == [[1.0, 1.0]] * 2

    def test_a_failing_reward_function_is_replaced_with_a_warning(self, caplog):
        def needs_info(achieved, desired, info):
            return info['crashed']

        reward = hindsight.GoalReward(needs_info, reward_fn)
        for _ in range(2):
            assert reward(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)).tolist() == [[0.0, 0.0]]
        assert caplog.text.count("is not used: KeyError: 'crashed'") == 1

    def test_rewards_that_do_not_depend_on_the_goal_are_kept(self, caplog):
        def compute_reward(achieved, desired, info):
            return (achieved == desired).all(-1) - 1.0

        run = episodes([t % 6 == 5 for t in range(24)], 24)
        run.reward[5::6] -= 5.0  # the last step of each episode is a crash
        buffer = stored([run], 30)
        batch, info = buffer.gather_all()
        goal_reward = hindsight.GoalReward(compute_reward, reward_fn)
        hindsight_transformer = transformer(her_proportion=1.0, reward_fn=goal_reward)
        after = hindsight_transformer.transform_experience(add_batch_info(batch, info, buffer))
        goals = after.observation
        expected = (goals['achieved_goal'] == goals['desired_goal'])[..., 0].float() - 1
        expected[:, 5::6] -= 5.0
        expected[:, ::6] = 0
        assert torch.equal(after.reward, expected) and 'the difference is added to relabeled' in caplog.text
        run.reward[:] = 7.0
        buffer = stored([run], 30)
        batch, info = buffer.gather_all()
        with pytest.raises(ValueError, match='compute_reward of the environment does not reproduce the rewards'):
            hindsight_transformer.transform_experience(add_batch_info(batch, info, buffer))

    def test_the_default_reward_function_is_that_of_the_environment(self):
        for reward, expected in ((l2_dist_close_reward_fn, hindsight.GoalReward), (reward_fn, type(reward_fn))):
            hindsight_transformer = HindsightExperienceTransformer(OBSERVATION, reward_fn=reward)
            hindsight_transformer.use_goal_reward(None)
            assert hindsight_transformer._relabel._check.reward_fn is reward
            hindsight_transformer.use_goal_reward(pairwise)
            assert isinstance(hindsight_transformer._relabel._check.reward_fn, expected)


@pytest.mark.parametrize('dtype', [torch.int8, torch.uint8, torch.bool, torch.int64])
def test_goals_of_bits_are_compared(dtype):
    achieved, goal = torch.tensor([[[0, 1], [1, 1]]]).to(dtype), torch.tensor([[[1, 1], [1, 1]]]).to(dtype)
    assert l2_dist_close_reward_fn(achieved, goal).tolist() == [[-1.0, 0.0]]
    assert l2_dist_close_reward_fn(achieved[..., 0], goal[..., 0]).tolist() == [[-1.0, 0.0]]
