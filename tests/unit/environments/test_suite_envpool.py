"""EnvPool through the adapter: the same time steps as gymnasium's own environments."""
import math

import numpy as np
import pytest
import torch

from alfx.environments import suite_envpool, suite_gym
from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError
from alfx.environments.utils import create_environment
from alfx.gin_utils import ConfError

pytest.importorskip('envpool')


def cart_pole(observation, action):
    """Return the next observation of CartPole (Barto, Sutton and Anderson 1983) after a force of 10 N to one side."""
    x, x_dot, theta, theta_dot = (observation[:, i].double() for i in range(4))
    force = torch.where(action == 1, 10.0, -10.0).double()
    sin, cos = theta.sin(), theta.cos()
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    tau = 0.02
    return torch.stack([x + tau * x_dot, x_dot + tau * x_acc, theta + tau * theta_dot, theta_dot + tau * theta_acc], 1)


def sequence(env, steps, action):
    found = [env.reset()]
    for _ in range(steps):
        found.append(env.step(action))
    return found


@pytest.fixture
def cart_poles():
    with suite_envpool.load('CartPole-v1', batch_size=3) as env:
        env.seed(5)
        yield env


class TestTimeSteps:

    def test_cart_pole_follows_its_equations_up_to_the_final_observation(self, cart_poles):
        action = torch.tensor([0, 1, 1])
        steps, lasts = sequence(cart_poles, 60, action), 0
        for before, after in zip(steps, steps[1:]):
            begins = after.is_first()
            expected = cart_pole(before.observation, action).float()
            torch.testing.assert_close(after.observation[~begins], expected[~begins], rtol=1e-4, atol=1e-5)
            assert (after.observation[begins].abs() <= 0.05).all() and not after.reward[begins].any()
            assert (after.reward[~begins] == 1).all()
            assert torch.equal(begins, before.is_last())
            fallen = (after.observation[:, 2].abs() > 12 * 2 * math.pi / 360) | (after.observation[:, 0].abs() > 2.4)
            assert torch.equal(after.is_last(), fallen & ~begins)
            assert torch.equal(after.discount == 0, after.is_last())
            lasts += int(after.is_last().sum())
        assert lasts > 6

    def test_episode_lengths_match_gymnasium_from_the_same_state(self, cart_poles):
        first = cart_poles.reset().observation
        lengths = torch.zeros(3, dtype=torch.int64)
        running = torch.ones(3, dtype=torch.bool)
        while running.any():
            lengths += running
            running &= ~cart_poles.step(torch.ones(3, dtype=torch.int64)).is_last()
        for i in range(3):
            env = suite_gym.load('CartPole-v1').gym.envs[0]
            env.reset()
            env.unwrapped.state = tuple(first[i].double().tolist())
            length, over = 0, False
            while not over:
                over, length = env.step(1)[2], length + 1
            assert length == lengths[i]

    def test_truncation_keeps_the_discount_and_termination_does_not(self):
        env = suite_envpool.load('Pendulum-v1', batch_size=2, discount=0.9)
        steps = sequence(env, 202, torch.zeros(2, 1))
        assert [t for t, step in enumerate(steps) if step.is_last().all()] == [200]
        assert torch.equal(steps[200].discount, torch.full((2, ), 0.9))
        assert steps[201].is_first().all() and torch.equal(steps[201].discount, torch.ones(2))

    def test_pendulum_has_the_reward_of_gymnasium(self):
        env = suite_envpool.load('Pendulum-v1', batch_size=4)
        steps = sequence(env, 20, torch.full((4, 1), 0.5))
        for before, after in zip(steps, steps[1:]):
            cos, sin, speed = before.observation.unbind(1)
            expected = -(torch.atan2(sin, cos)**2 + 0.1 * speed**2 + 0.001 * 1.0**2)
            torch.testing.assert_close(after.reward, expected, rtol=1e-4, atol=1e-4)

    def test_a_fall_in_the_last_step_of_the_time_limit_is_a_termination(self):
        lengths = {}
        for limit in (None, 7, 8, 9):
            env = suite_envpool.load('CartPole-v1', max_episode_steps=limit)
            env.seed(6)
            env.reset()
            time_step, count = env.step(torch.ones(1, dtype=torch.int64)), 1
            while not time_step.is_last():
                time_step, count = env.step(torch.ones(1, dtype=torch.int64)), count + 1
            lengths[limit] = count, float(time_step.discount)
        falls_at = lengths.pop(None)[0]
        assert falls_at in (8, 9, 10)
        for limit, (count, discount) in lengths.items():
            assert count == min(limit, falls_at) and discount == float(count < falls_at)

    def test_time_limits_are_kept_where_some_environments_have_ended_before(self):
        env = suite_envpool.load('CartPole-v1', batch_size=8, max_episode_steps=12)
        env.seed(1)
        generator = torch.Generator().manual_seed(0)
        lengths, kinds = torch.zeros(8, dtype=torch.int64), set()
        env.reset()
        for _ in range(200):
            time_step = env.step(torch.randint(2, (8, ), generator=generator))
            lengths = torch.where(time_step.is_first(), 0, lengths + 1)
            assert (lengths <= 12).all() and torch.equal(time_step.env_id, torch.arange(8))
            last = time_step.is_last()
            kinds |= set(zip(lengths[last].tolist(), time_step.discount[last].tolist()))
        assert (12, 1.0) in kinds and any(discount == 0.0 for _, discount in kinds)

    def test_a_limit_that_is_part_of_the_rewards_stays_with_the_pool(self):
        env = suite_envpool.load('MiniGrid-Empty-5x5-v0', max_episode_steps=3)
        steps = sequence(env, 4, torch.zeros(1, dtype=torch.int64))
        assert [int(step.step_type) for step in steps] == [0, 1, 1, 2, 0] and steps[3].discount == 1
        with pytest.raises(EnvironmentLoadError, match='max_episode_steps=0: MiniGrid-Empty-5x5-v0 of EnvPool needs'):
            suite_envpool.load('MiniGrid-Empty-5x5-v0', max_episode_steps=0)


class TestSeeds:

    def test_each_environment_has_its_own_stream_whatever_their_number(self):
        observations = {}
        for count in (1, 4):
            env = suite_envpool.load('Pendulum-v1', batch_size=count)
            env.seed(3)
            observations[count] = torch.stack([step.observation for step in sequence(env, 210, torch.zeros(count, 1))])
        assert torch.equal(observations[1], observations[4][:, :1])
        assert len(observations[4][0].unique(dim=0)) == len(observations[4][205].unique(dim=0)) == 4

    def test_other_and_missing_seeds_give_other_sequences(self):
        env = suite_envpool.load('Pendulum-v1')
        first = []
        for seed in (1, 2, None, None):
            env.seed(seed)
            first.append(tuple(env.reset().observation[0].tolist()))
        assert len(set(first)) == 4

    def test_evaluation_and_training_have_different_streams_of_one_seed(self):
        envs = [create_environment('CartPole-v1', suite_envpool.load, for_evaluation=evaluation,
                                   num_parallel_environments=2, seed=7).reset().observation
                for evaluation in (False, True, False)]
        assert torch.equal(envs[0], envs[2]) and not torch.equal(envs[0], envs[1])


class TestWhatItLacks:

    @pytest.mark.parametrize('arguments, message', [
        (dict(environment_name='CartPol-v1'), "no environment 'CartPol-v1'; did you mean .*'CartPole-v1'"),
        (dict(environment_name='ALE/Pong-v5'), "no environment 'ALE/Pong-v5'; did you mean 'Pong-v5'"),
        (dict(env_args={'frame_skp': 2}, environment_name='Pong-v5'), "no option 'frame_skp' .*'frame_skip'"),
        (dict(env_args={'seed': 2}), r"env_args\['seed'\] is not accepted .*: set the seed of the run instead"),
        (dict(env_args={'noop_max': 0}, environment_name='Pong-v5'), 'expected at least 1, found 0'),
        (dict(env_info_keys=('lives', )), "has no info 'lives'; expected some of .*'elapsed_step'"),
        (dict(render_mode='human'), "expected 'rgb_array' or None"),
        (dict(batch_size=0), 'batch_size of at least 1'),
        (dict(env_args={'max_num_players': 2}), '2 players'),
    ])
    def test_is_rejected_by_name(self, arguments, message):
        with pytest.raises(EnvironmentLoadError, match=message):
            suite_envpool.load(**{'environment_name': 'CartPole-v1', **arguments})

    def test_a_negative_time_limit_is_rejected(self):
        with pytest.raises(ConfError, match=r'max_episode_steps must be an int >= 0 or None, found int -1'):
            suite_envpool.load('CartPole-v1', max_episode_steps=-1)

    def test_the_state_cannot_be_saved(self, cart_poles):
        cart_poles.reset()
        assert cart_poles.get_state() is None

    def test_rendering_needs_a_render_mode(self, cart_poles):
        with pytest.raises(UnsupportedOperationError, match="CartPole-v1 returns no images.*render_mode='rgb_array'"):
            cart_poles.render()
        picture = suite_envpool.load('CartPole-v1', batch_size=2, render_mode='rgb_array').render()
        assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.std() > 0

    def test_images_become_channels_first_by_default(self):
        shapes = []
        for first in (True, False):
            env = suite_envpool.load('MiniGrid-Empty-5x5-v0', batch_size=2, image_channel_first=first)
            env.seed(0)
            shapes.append(env.reset().observation['image'])
            assert env.observation_spec()['image'].shape == tuple(shapes[-1].shape[1:])
        assert torch.equal(shapes[0], shapes[1].movedim(-1, 1))

    def test_no_thread_remains_after_close(self, cart_poles):
        cart_poles.reset()
        pool = cart_poles.gym
        cart_poles.close()
        assert pool._pool is None
