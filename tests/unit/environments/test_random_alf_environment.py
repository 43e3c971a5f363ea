"""Random observations: within their specs, episodes of the right lengths, rewards, seeds, a saved state."""
import pytest
import torch
from test_alf_wrappers import assert_state_continues, record, zeros

from alfx.data_structures import StepType
from alfx.environments.random_alf_environment import RandomAlfEnvironment
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

OBSERVATION = {'image': BoundedTensorSpec((3, 4, 4), torch.uint8, 0, 255), 'x': (TensorSpec((2, )), BoundedTensorSpec(
    (3, ), torch.float32, -10.0, 10.0)), 'kind': BoundedTensorSpec((), torch.int64, 2, 4)}
ACTION = {'a': BoundedTensorSpec((), torch.int64, 0, 3), 'b': BoundedTensorSpec((2, ), torch.float32, -1, 1)}


def make(**kwargs):
    return RandomAlfEnvironment(OBSERVATION, ACTION, **kwargs)


def test_time_steps_fit_their_specs_and_episodes_end_at_random():
    steps = record(make(batch_size=3, episode_end_probability=0.2, discount=0.9), 200)  # checks each step
    assert set(steps.observation['kind'].unique().tolist()) == {2, 3, 4}
    assert steps.observation['x'][1].abs().max() > 9 and steps.observation['image'].max() > 250
    last, middle = steps.step_type == StepType.LAST, steps.step_type == StepType.MID
    assert 0.1 < last.sum() / (last | middle).sum() < 0.3
    assert (steps.discount[last] == 0).all() and (steps.discount[middle] == 0.9).all()
    assert not torch.equal(last[:, 0], last[:, 1])
    assert make().batch_size == 1 and make(env_id=4, batch_size=2).reset().env_id.tolist() == [4, 5]


@pytest.mark.parametrize('least, most, lengths', [(2, 4, {3, 4}), (0, 1, {1}), (3, None, None)])
def test_episodes_have_the_requested_length(least, most, lengths):
    kinds = record(make(episode_end_probability=0.5, min_duration=least, max_duration=most), 200).step_type[:, 0]
    firsts = (kinds == StepType.FIRST).nonzero().flatten()
    found = set((firsts.diff() - 1).tolist())
    assert found == lengths if lengths else min(found) == least + 1 and max(found) > 5
    with pytest.raises(ValueError, match='max_duration: expected more than min_duration = 2'):
        make(min_duration=2, max_duration=2)


def test_rewards_are_those_of_the_function_except_at_first():
    env = make(batch_size=2, reward_fn=lambda kind, action, observation: observation['kind'] + action['a'])
    steps = record(env, 50)
    moved = steps.step_type != StepType.FIRST
    assert torch.equal(steps.reward[moved], steps.observation['kind'][moved].float()) and not steps.reward[~moved].any()


def test_an_action_outside_of_its_spec_is_rejected():
    env = make()
    env.reset()
    with pytest.raises(SpecError, match='action.a: expected values within'):
        env.step({**zeros(env), 'a': torch.tensor([4])})


def test_a_seed_repeats_the_episodes_and_a_saved_state_continues_them():
    first, second = (record(make(batch_size=2), 20) for _ in range(2))
    assert torch.equal(first.observation['image'], second.observation['image'])
    assert not torch.equal(first.observation['image'], record(make(batch_size=2, seed=1), 20).observation['image'])
    assert_state_continues(lambda: make(batch_size=2))
    assert make(render_size=(5, 6, 3)).render().shape == (5, 6, 3)


def test_no_action_before_the_first_step_is_within_its_spec():
    env = RandomAlfEnvironment(OBSERVATION, BoundedTensorSpec((), torch.int64, 2, 4), batch_size=3, max_duration=2)
    step = env.reset()
    for _ in range(6):
        is_first = step.step_type == StepType.FIRST
        assert torch.equal(step.prev_action, torch.where(is_first, 2, 4))
        step = env.step(torch.full((3, ), 4))


def test_rendering_does_not_change_the_random_numbers_of_training():
    before = torch.get_rng_state()
    make().render()
    assert torch.equal(torch.get_rng_state(), before)
