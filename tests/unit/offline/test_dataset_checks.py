"""Checks of stored experience: every mismatch is reported, and invalid data is never trained on."""
import logging

import numpy as np
import pytest
import torch

from alfx.offline import dataset_checks
from alfx.offline.dataset_episodes import Episodes
from alfx.offline.dataset_files import Dataset, DatasetError
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION = {'camera': BoundedTensorSpec((2, 2), torch.uint8, 0, 255), 'speed': TensorSpec((3, ))}
ACTION = BoundedTensorSpec((1, ), torch.float32, -2, 2)


def make(**changes):
    episodes = Episodes({'camera': np.zeros((7, 2, 2), np.uint8), 'speed': np.zeros((7, 3), np.float32)},
                        {'': np.zeros((5, 1), np.float32)}, np.zeros(5, np.float32), np.ones(5, np.float32),
                        np.array([3, 2]))
    return Dataset('here', episodes._replace(**changes), {}, '')


def with_speed(**kwargs):
    return {**make().episodes.observation, **kwargs}


def check(dataset, action_spec=ACTION, reward_spec=TensorSpec(())):
    dataset_checks.check_consistent(dataset)
    return dataset_checks.fitted(dataset, OBSERVATION, action_spec, reward_spec)


def bad_speed():
    speed = np.zeros((7, 3), np.float32)
    speed[5, 1] = np.nan
    return speed


@pytest.mark.parametrize('changes, message', [
    (dict(lengths=np.array([], np.int64)), 'one episode or more'),
    (dict(lengths=np.array([5, 0])), 'episode 1 has 0 actions'),
    (dict(observation=with_speed(speed=np.zeros((5, 3), np.float32))), 'T \\+ 1 observations'),
    (dict(reward=np.zeros(4, np.float32)), 'reward: expected 5 rows'),
    (dict(reward=np.array(['x'] * 5)), 'expected numbers'),
    (dict(reward=np.array([0, 0, 0, np.inf, 0])), 'reward: NaN or infinite in episode 1, step 0'),
    (dict(observation=with_speed(speed=bad_speed())), 'observation.speed: NaN or infinite in episode 1, step 1'),
    (dict(observation=with_speed(speed=np.full((7, 3), 1e300))), 'observation.speed: .* episode 0, step 0, as float32'),
    (dict(action={'': np.array([[0], [0], [0], [0], [-1e39]])}), 'action: .* episode 1, step 1, as float32'),
    (dict(discount=np.array([1, 1, 0, 0, 1])), 'discount: 0 in episode 1, step 0, but the episode has 2 actions'),
    (dict(discount=np.full(5, 1.5)), 'discount: expected numbers from 0 to 1'),
    (dict(observation={'camera': np.zeros((7, 2, 2), np.uint8)}), 'observation.speed: expected .*, found nothing'),
    (dict(observation=with_speed(touch=np.zeros(7))), 'observation.touch: expected nothing'),
    (dict(observation=with_speed(speed=np.zeros((7, 4)))), r'observation.speed: expected shape \(3,\), found \(4,\)'),
    (dict(observation=with_speed(camera=np.zeros((7, 2, 2)))), 'observation.camera: expected uint8, found float64'),
    (dict(reward=np.zeros((5, 2))), r'reward: expected one number a step, found an array of shape \(2,\)'),
    (dict(action={'': np.full((5, 1), 2.1, np.float32)}), 'action: 5 of 5 are out of bounds, by up to 0.1'),
])
def test_errors_are_reported_with_their_location(changes, message):
    with pytest.raises(DatasetError, match=f'(?s)^here: .*{message}'):
        check(make(**changes))


def test_booleans_are_images_of_zeros_and_ones():
    camera = np.eye(2, dtype=bool)[None].repeat(7, 0)
    found = check(make(observation=with_speed(camera=camera)))
    assert (found.episodes.observation['camera'] == camera).all()


def test_all_differences_are_listed_at_once():
    with pytest.raises(DatasetError) as error:
        check(make(observation=with_speed(speed=np.zeros((7, 4)), camera=np.zeros((7, 2, 2))), reward=np.zeros((5, 2))))
    assert all(word in str(error.value) for word in ('speed', 'camera', 'reward'))


def test_a_multi_dimensional_reward_is_not_a_scalar():
    with pytest.raises(DatasetError, match=r'expected an array of shape \(2,\) a step, found one number'):
        check(make(), reward_spec=TensorSpec((2, )))


def test_actions_rounded_out_of_bounds_are_clipped_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        found = check(make(action={'': np.full((5, 1), 2.00001, np.float32)}))
    assert (found.episodes.action[''] == 2).all() and 'out of bounds' in caplog.text


@pytest.mark.parametrize('values, is_right', [([0, 1, 2, 1, 0], True), ([0, 1, 3, 1, 0], False),
                                              ([-1, 1, 2, 1, 0], False), ([0, 1, 2, 1, 3], False)])
def test_discrete_actions_must_be_in_the_action_space(values, is_right, monkeypatch):
    monkeypatch.setattr(dataset_checks, '_ROWS_AT_ONCE', 2)
    dataset = make(action={'': np.array(values, np.int32)})
    spec = BoundedTensorSpec((), torch.int64, 0, 2)
    if is_right:
        check(dataset, spec)
    else:
        with pytest.raises(DatasetError, match='action: expected numbers from 0 to 2'):
            check(dataset, spec)


@pytest.mark.parametrize('most', [1, 2])
def test_actions_that_are_booleans_may_be_stored_as_integers(most):
    dataset = make(action={'': np.array([0, 1, 0, most, 0], np.uint8)})
    if most == 1:
        check(dataset, TensorSpec((), torch.bool))
    else:
        with pytest.raises(DatasetError, match='action: expected numbers from 0 to 1, found 0 to 2'):
            check(dataset, TensorSpec((), torch.bool))


def test_other_widths_of_the_same_number_type_are_accepted():
    check(make(observation=with_speed(speed=np.zeros((7, 3), np.float64)), reward=np.zeros(5, np.float64)))


def test_sequences_longer_than_every_episode_are_rejected():
    dataset_checks.check_long_enough(make(), make().episodes, 4)
    with pytest.raises(DatasetError, match='longest episode has 4 steps'):
        dataset_checks.check_long_enough(make(), make().episodes, 5)


def test_another_compatible_environment_logs_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        dataset_checks.check_env_name(make()._replace(about={'env_name': 'Hopper-v4'}), 'Hopper-v5')
    assert 'Hopper-v4' in caplog.text and 'Hopper-v5' in caplog.text


@pytest.mark.parametrize('bounds', [
    {'': [[6.0], [-2.0]]}, {'': [[-2.0, 6.0], [2.0, 2.0]]}, {'': [[-2.0]]}, {'': 3}, {'': [['x'], ['y']]},
    {'': [[float('-inf')], [1.0]]}, {'': [[float('nan')], [1.0]]}, {'arm': [[-1.0], [1.0]]}])
def test_bounds_that_would_corrupt_the_actions_are_rejected(bounds):
    with pytest.raises(DatasetError, match=r'(?s)^here: action_bounds\[.*expected .*, with low <= high, found'):
        dataset_checks.check_consistent(make()._replace(about={'action_bounds': bounds}))


def test_equal_bounds_give_the_middle_of_the_range():
    dataset = make()._replace(about={'action_bounds': {'': [[3.0], [3.0]]}})
    dataset = dataset._replace(episodes=dataset.episodes._replace(action={'': np.full((5, 1), 3.0)}))
    unit = BoundedTensorSpec((1, ), torch.float32, -1, 1)
    assert check(dataset, unit).episodes.action[''].tolist() == [[0.0]] * 5


@pytest.mark.parametrize('low, high, is_right', [(-2, 2, True), ([-2.0], [2.0], True), (-1, 1, False), (-2, 3, False)])
def test_actions_recorded_in_other_units_are_rejected(low, high, is_right):
    recorded = {'shape': [1], 'dtype': 'float32', 'minimum': low, 'maximum': high}
    dataset = make()._replace(about={'specs': {'action': {'': recorded}}})
    if is_right:
        assert check(dataset) is not None
    else:
        with pytest.raises(DatasetError, match=r'expected bounds from .*2.* found actions recorded with bounds from'):
            check(dataset)
    converted = dataset._replace(about={**dataset.about, 'action_bounds': {'': [[-2.0], [2.0]]}})
    assert check(converted) is not None, 'action_bounds are the units of the stored actions'
