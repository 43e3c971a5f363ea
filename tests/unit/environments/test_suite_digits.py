"""The digits as an environment: splits, rewards, labels."""
import numpy as np
import pytest
import torch

pytest.importorskip('sklearn')

from alfx.environments import suite_digits
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_digits import DigitsEnv, load_digits


def test_the_splits_part_the_images():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8) and images.dtype == np.float32 and labels.dtype == np.int64
    assert images.min() == 0 and images.max() == 1 and set(labels) == set(range(10))
    assert not images.flags.writeable and not labels.flags.writeable
    train, test = load_digits('train')[0], load_digits('test')[0]
    assert (len(train), len(test)) == (1437, 360)
    assert np.array_equal(test, images[::5])
    unseen = {image.tobytes() for image in test} - {image.tobytes() for image in train}
    assert len(unseen) == 360
    with pytest.raises(ValueError, match="found 'valid'"):
        load_digits('valid')


def test_a_step_shows_a_digit_of_its_split_and_rewards_the_right_guess():
    env = DigitsEnv(split='test', with_label=True)
    known = {image.tobytes(): label for image, label in zip(*load_digits('test'))}
    observation, _ = env.reset(seed=0)
    seen, rewards = set(), []
    for i in range(60):
        assert env.observation_space.contains(observation)
        assert known[observation['image'].tobytes()] == observation['label']
        seen.add(observation['image'].tobytes())
        guess = (observation['label'] + i % 2) % 10
        observation, reward, terminated, truncated, _ = env.step(guess)
        rewards.append(reward)
        assert not terminated and not truncated
    assert rewards == [1.0, 0.0] * 30 and len(seen) > 40


def test_seeds_reproduce_the_digits_and_observations_are_writable():
    shown = []
    for _ in range(2):
        env = DigitsEnv()
        images = [env.reset(seed=3)[0], *(env.step(0)[0] for _ in range(5))]
        shown.append(np.stack(images))
        images[0][:] = 7
    assert np.array_equal(*shown) and load_digits()[0].max() == 1


def test_it_is_loaded_as_a_batch_whose_episodes_are_truncated():
    env = suite_digits.load('Digits', batch_size=3, env_args={'num_steps': 4})
    env.seed(0)
    steps = [env.reset(), *(env.step(torch.zeros(3, dtype=torch.int64)) for _ in range(4))]
    assert env.observation_spec().shape == (1, 8, 8) and env.action_spec().maximum == 9
    assert [step.step_type.tolist() for step in steps] == [[0] * 3, [1] * 3, [1] * 3, [1] * 3, [2] * 3]
    assert (steps[-1].discount == 1).all() and steps[-1].observation.shape == (3, 1, 8, 8)
    with pytest.raises(EnvironmentLoadError, match="did you mean 'Digits'"):
        suite_digits.load('Digit')
    with pytest.raises(ValueError, match='num_steps'):
        DigitsEnv(num_steps=0)
