"""Wrappers around one gymnasium environment."""
import re
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from alfx.environments import gym_wrappers, suite_gym
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_wrappers import (
    ActionMaskFromInfo, BaseObservationWrapper, ContinuousActionClip, ContinuousActionMapping, DMAtariPreprocessing,
    EpisodicRandomFrameCrop, FrameCrop, FrameFlip, FrameGrayScale, FrameResize, FrameSkip, FrameStack,
    ImageChannelFirst, NonEpisodicEnv, NormalizedAction, ObservationSubset, transform_space)
from alfx.utils.extras import pip_install


class ImageEnv(gymnasium.Env):
    """Each step shows an image filled with its number; the last of ``length`` steps truncates."""

    def __init__(self, shape=(6, 4, 3), length=5, nested=False, action_space=None):
        self.image = spaces.Box(0, 255, shape, np.uint8)
        self.nested = nested
        self.observation_space = spaces.Dict({'camera': spaces.Dict({'front': self.image}), 'rest': spaces.Tuple(
            [self.image, spaces.Discrete(2)])}) if nested else self.image
        self.action_space = action_space or spaces.Discrete(4)
        self.length, self.count, self.actions = length, 0, []

    def _observe(self):
        image = np.full(self.image.shape, self.count, np.uint8)
        image[(0, ) * min(2, image.ndim)] = 200
        return {'camera': {'front': image}, 'rest': (image, 1)} if self.nested else image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.actions.append(action)
        self.count += 1
        return self._observe(), 1.0, False, self.count == self.length, {}


def run(env, actions=()):
    """Return all observations of a reset and the actions."""
    observations = [env.reset(seed=0)[0]]
    for action in actions:
        observations.append(env.step(action)[0])
    assert all(env.observation_space.contains(np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x)
               for x in observations)
    return observations


class TestFields:

    def test_a_nested_field_is_replaced_in_a_copy(self):
        space = ImageEnv(nested=True).observation_space
        new = transform_space(space, 'rest.0', lambda _: spaces.Discrete(9))
        assert new['rest'][0] == spaces.Discrete(9) and new['rest'][1] == spaces.Discrete(2)
        assert space['rest'][0] == spaces.Box(0, 255, (6, 4, 3), np.uint8)
        assert transform_space(space, None, lambda s: s) is space

    @pytest.mark.parametrize('field', ['side', 'camera.side', 'camera.front.x', 'rest.7', 'rest.x'])
    def test_a_missing_field_is_reported_with_the_available_ones(self, field):
        with pytest.raises(EnvironmentLoadError, match='does not exist'):
            transform_space(ImageEnv(nested=True).observation_space, field, lambda s: s)

    @pytest.mark.parametrize('keys', [('camera.front', 'camera.back'), ('', 'x'), (0, 1), ('a', 'a.b')])
    def test_keys_may_be_unusual(self, keys):
        env, image = ImageEnv(), np.zeros((6, 4, 3), np.uint8)
        env.observation_space = spaces.Dict({key: env.image for key in keys})
        env._observe = lambda: {key: image for key in keys}
        seen = FrameGrayScale(env, fields=[str(keys[0])]).reset()[0]
        assert [seen[key].shape[-1] for key in keys] == [1, 3]
        assert suite_gym.wrap_env(env).reset().observation[keys[0]].shape == (1, 3, 6, 4)

    def test_only_the_chosen_fields_change(self):
        env = FrameGrayScale(ImageEnv(nested=True), fields=['camera.front', 'rest.0'])
        observation = run(env, [0])[1]
        assert observation['camera']['front'].shape == (6, 4, 1) and observation['rest'][0].shape == (6, 4, 1)
        assert observation['rest'][1] == 1

    def test_a_field_that_is_no_image_is_rejected_with_the_remedy(self):
        with pytest.raises(EnvironmentLoadError, match=r'FrameGrayScale: expected a Box of 3 dimensions, found Dict.*'
                                                       r'FrameGrayScale.fields = \[...\]'):
            FrameGrayScale(ImageEnv(nested=True))

    def test_a_custom_wrapper_defines_two_methods(self):
        class Negative(BaseObservationWrapper):

            def transform_space(self, observation_space):
                return spaces.Box(-255, 0, observation_space.shape, np.int16)

            def transform_observation(self, observation, field):
                return -observation.astype(np.int16)

        assert run(Negative(ImageEnv()), [0])[1].min() == -200


class TestImages:

    def test_channels_come_first(self):
        image = run(ImageChannelFirst(ImageEnv()))[0]
        assert image.shape == (3, 6, 4) and (image[:, 0, 0] == 200).all()

    def test_without_fields_every_image_of_a_nest_is_turned_around(self):
        env = ImageChannelFirst(ImageEnv(nested=True))
        observation = run(env)[0]
        assert observation['camera']['front'].shape == observation['rest'][0].shape == (3, 6, 4)

    @pytest.mark.parametrize('shape, last', [((84, 84, 4), True), ((84, 84, 1), True), ((7, 7, 20), True),
                                             ((4, 84, 84), False), ((1, 84, 84), False),
                                             ((8, 8, 12), True), ((12, 8, 8), False)])  # planes of chess
    def test_images_that_have_channels_first_already_are_left(self, shape, last):
        assert gym_wrappers.is_channels_last_image(spaces.Box(0, 255, shape, np.uint8)) is last

    @pytest.mark.parametrize('dtype', [bool, np.int8, np.int64, np.float32, np.float64])
    def test_images_of_all_dtypes_are_turned_around(self, dtype):
        env = ImageEnv()
        env.observation_space = spaces.Box(np.zeros((6, 4, 3), dtype), np.ones((6, 4, 3), dtype), dtype=dtype)
        image = np.zeros((6, 4, 3), dtype)
        image[..., 1] = 1
        env._observe = lambda: image
        seen = suite_gym.wrap_env(env).reset().observation[0]
        assert seen.shape == (3, 6, 4) and seen.float().mean((1, 2)).tolist() == [0, 1, 0]

    def test_binary_images_are_turned_around(self):
        env = ImageEnv()
        env.observation_space = spaces.MultiBinary((6, 4, 3))
        env._observe = lambda: np.eye(3, dtype=np.int8)[np.ones((6, 4), np.int64)]
        wrapped = suite_gym.wrap_env(env)
        assert wrapped.observation_spec().shape == (3, 6, 4)
        assert wrapped.reset().observation[0].float().mean((1, 2)).tolist() == [0, 1, 0]

    def test_frames_are_stacked_oldest_first_and_start_as_copies(self):
        env = FrameStack(ImageEnv(), stack_size=3)
        observations = run(env, [0, 0, 0, 0])
        assert observations[0].shape == (6, 4, 9)
        assert [[int(o[5, 3, 3 * i]) for i in range(3)] for o in observations] == [
            [0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
        assert int(run(env)[0].max(initial=0, where=np.arange(72 * 3).reshape(6, 4, 9) > 8)) == 0

    def test_stacked_frames_do_not_change_with_the_array_of_the_environment(self):
        env = ImageEnv()
        reused, observe = np.empty((6, 4, 3), np.uint8), env._observe

        def observe_again():
            np.copyto(reused, observe())
            return reused

        env._observe = observe_again
        assert [[int(o[5, 3, 3 * i]) for i in range(3)] for o in run(FrameStack(env, stack_size=3), [0, 0, 0])] == [
            [0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]

    @pytest.mark.parametrize('shape, order, stacked', [((6, 4), 'channels_last', (6, 4, 2)),
                                                       ((6, 4), 'channels_first', (2, 6, 4)),
                                                       ((3, 6, 4), 'channels_first', (6, 6, 4)),
                                                       ((5, ), 'channels_last', (10, ))])
    def test_stacks_along_the_channels(self, shape, order, stacked):
        env = FrameStack(ImageEnv(shape), stack_size=2, channel_order=order)
        assert run(env, [0])[1].shape == stacked == env.observation_space.shape

    def test_luma_matches_opencv(self):
        cv2 = pytest.importorskip('cv2')
        image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
        np.testing.assert_array_equal(gym_wrappers.luma(image), cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))

    def test_images_are_scaled(self):
        pytest.importorskip('cv2')
        env = FrameResize(ImageEnv((6, 4, 1)), width=2, height=3)
        assert run(env, [0])[1].shape == (3, 2, 1)

    @pytest.mark.parametrize('shape, dtype', [((90, 90, 5), np.uint8), ((6, 4, 3), np.int64)])
    def test_images_that_opencv_cannot_scale_are_rejected_at_once(self, shape, dtype):
        pytest.importorskip('cv2')
        env = ImageEnv(shape)
        env.observation_space = spaces.Box(0, 255, shape, dtype)
        with pytest.raises(EnvironmentLoadError, match=f'FrameResize: opencv cannot resize .*{dtype.__name__}'):
            FrameResize(env)

    def test_without_opencv_the_error_names_the_package(self, monkeypatch):
        monkeypatch.setitem(__import__('sys').modules, 'cv2', None)
        with pytest.raises(EnvironmentLoadError, match=re.escape(f"FrameResize needs opencv: {pip_install('atari')}")):
            FrameResize(ImageEnv())

    @pytest.mark.parametrize('shape, order', [((6, 4, 3), 'channels_last'), ((3, 6, 4), 'channels_first')])
    def test_a_fixed_rectangle_is_cut_out(self, shape, order):
        env = FrameCrop(ImageEnv(shape), sx=1, sy=2, width=3, height=4, channel_order=order)
        size = run(env)[0].shape
        assert size == ((4, 3, 3) if order == 'channels_last' else (3, 4, 3))
        with pytest.raises(EnvironmentLoadError, match='not within an image of 6 rows, 4 columns'):
            FrameCrop(ImageEnv(shape), sx=2, width=3, height=4, channel_order=order)

    def test_a_random_crop_moves_only_between_episodes(self):
        class Ramp(ImageEnv):

            def _observe(self):
                return np.arange(100, dtype=np.uint8).reshape(10, 10, 1)

        env = EpisodicRandomFrameCrop(Ramp((10, 10, 1)), cropping_fraction=0.5)
        corners = []
        for episode in range(12):
            first = env.reset(seed=0 if episode == 0 else None)[0]
            assert first.shape == (5, 5, 1)
            np.testing.assert_array_equal(first, env.step(0)[0])
            corners.append(int(first[0, 0, 0]))
        assert len(set(corners)) > 3 and max(corners) <= 55
        repeated = [int(env.reset(seed=0 if episode == 0 else None)[0][0, 0, 0]) for episode in range(12)]
        assert repeated == corners

    def test_flips_follow_their_probabilities(self):
        shown = [run(FrameFlip(ImageEnv(), up, left))[0] for up, left in ((0, 0), (1, 0), (0, 1), (1, 1))]
        corners = [tuple(np.argwhere(image[..., 0] == 200)[0]) for image in shown]
        assert corners == [(0, 0), (5, 0), (0, 3), (5, 3)]

    def test_chosen_elements_are_selected(self):
        env = ObservationSubset(gymnasium.make('CartPole-v1'), indices=(0, 2))
        full = env.env.reset(seed=4)[0]
        np.testing.assert_array_equal(env.reset(seed=4)[0], full[[0, 2]])
        assert env.observation_space.shape == (2, )
        with pytest.raises(EnvironmentLoadError, match='from -4 to 3'):
            ObservationSubset(gymnasium.make('CartPole-v1'), indices=(4, ))


class TestSteps:

    def test_skipped_frames_sum_their_rewards_and_stop_at_the_end(self):
        env = FrameSkip(ImageEnv(length=5), skip=3)
        env.reset()
        assert env.step(0)[1:4] == (3.0, False, False)
        assert env.step(0)[1:4] == (2.0, False, True)

    def test_an_environment_without_ends(self):
        env = NonEpisodicEnv(ImageEnv(length=1))
        env.reset()
        assert env.step(0)[2:4] == env.step(0)[2:4] == (False, False)

    def test_deepmind_wrapper_takes_the_maximum_of_the_last_two_frames(self):
        """Observations are the maximum of the last two frames, after the no-ops and FIRE."""
        pytest.importorskip('cv2')

        class Game(ImageEnv):

            def get_action_meanings(self):
                return ['NOOP', 'FIRE', 'UP']

        game = Game((10, 10), length=200)
        env = DMAtariPreprocessing(game, frame_skip=4, noop_max=5, screen_size=10)
        env.reset(seed=0)
        started = game.actions
        assert 1 <= len(started) - 1 <= 5 and started[-1] == 1 and set(started[:-1]) == {0}
        count = game.count
        observation, reward, *_ = env.step(2)
        assert reward == 4 and game.actions[-4:] == [2] * 4
        assert observation.shape == (10, 10, 1) and observation[5, 5, 0] == count + 4

    @pytest.mark.parametrize('sticky, frames', [(0.0, 1), (0.25, 7), (0.5, 14), (1.0, 1)])
    def test_fire_is_pressed_until_a_sticky_game_must_have_seen_it(self, sticky, frames):
        """0.25 ** 7 = 6e-5 and 0.5 ** 14 = 6e-5 are below 1e-4, 0.25 ** 6 and 0.5 ** 13 are not."""
        pytest.importorskip('cv2')

        class Game(ImageEnv):
            ale = SimpleNamespace(getFloat=lambda name: {'repeat_action_probability': sticky}[name])

            def get_action_meanings(self):
                return ['NOOP', 'FIRE']

        game = Game((10, 10), length=200)
        DMAtariPreprocessing(game, noop_max=0, screen_size=10).reset(seed=0)
        assert game.actions == [1] * frames

    @pytest.mark.parametrize('sticky, frames', [(0.0, 1), (0.25, 7)])
    def test_the_ball_of_breakout_is_in_play_after_every_reset(self, sticky, frames):
        """Frames do not change until the ball is in play; without sticky actions FIRE is pressed for one frame."""
        gymnasium.register_envs(pytest.importorskip('ale_py'))
        game = gymnasium.make('ALE/Breakout-v5', frameskip=1, obs_type='grayscale', repeat_action_probability=sticky)
        env = DMAtariPreprocessing(game, noop_max=5)
        for seed in range(40):
            env.reset(seed=seed)
            emulator = env.unwrapped.ale
            assert frames < emulator.getEpisodeFrameNumber() <= frames + 5
            before = emulator.getScreenGrayscale()
            emulator.act(0)
            assert (emulator.getScreenGrayscale() != before).any()

    def test_deepmind_cannot_give_rgb_images_of_a_gray_game(self):
        pytest.importorskip('cv2')
        env = DMAtariPreprocessing(ImageEnv((10, 10, 3)), screen_size=5, gray_scale=False)
        assert env.reset(seed=0)[0].shape == (5, 5, 3)
        with pytest.raises(EnvironmentLoadError, match=r"gray images already; .*env_args = {'obs_type': 'rgb'}"):
            DMAtariPreprocessing(ImageEnv((10, 10)), gray_scale=False)

    def test_deepmind_rejects_environments_that_repeat_actions_themselves(self):
        game = ImageEnv((10, 10))
        game._frameskip = 4
        with pytest.raises(EnvironmentLoadError, match='use suite_atari.load'):
            DMAtariPreprocessing(game)


class TestActions:

    @staticmethod
    def nested():
        return ImageEnv(action_space=spaces.Dict({
            'force': spaces.Box(np.array([0, -np.inf], np.float64), np.array([4, np.inf]), dtype=np.float64),
            'gear': spaces.Discrete(3)}))

    def test_actions_are_clipped_and_unbounded_ones_become_bounded(self):
        game = self.nested()
        env = ContinuousActionClip(game, min_v=-2, max_v=3)
        assert env.action_space['force'] == spaces.Box(np.array([0., -2]), np.array([3., 3.]), dtype=np.float64)
        env.reset()
        env.step({'force': np.array([9., -9.]), 'gear': 1})
        np.testing.assert_array_equal(game.actions[0]['force'], [3, -2])
        assert game.actions[0]['gear'] == 1

    def test_a_clipped_scalar_action_stays_a_scalar(self):
        game = ImageEnv(action_space=spaces.Box(-5, 5, (), np.float32))
        env = ContinuousActionClip(game, min_v=-2, max_v=3)
        assert env.action_space == spaces.Box(-2, 3, (), np.float32)
        env.reset()
        env.step(np.array(4.0, np.float32))
        assert game.actions[0] == 3 and np.shape(game.actions[0]) == ()

    def test_actions_are_mapped_linearly(self):
        """Bounds 1 and 5, given in [0, 10]: 2.5 is a quarter, hence 1 + 4 / 4 = 2."""
        game = ImageEnv(action_space=spaces.Box(1, 5, (1, ), np.float32))
        env = ContinuousActionMapping(game, 0, 10)
        assert env.action_space == spaces.Box(0, 10, (1, ), np.float32)
        env.reset()
        env.step(np.array([2.5], np.float32))
        np.testing.assert_allclose(game.actions[0], [2])
        assert game.actions[0].dtype == np.float32

    def test_normalized_actions_reach_both_bounds(self):
        game = ImageEnv(action_space=spaces.Box(np.array([0., -3.]), np.array([4., 3.]), dtype=np.float64))
        env = NormalizedAction(game)
        env.reset()
        for action in (-1, 1):
            env.step(np.full(2, action, np.float64))
        np.testing.assert_allclose(game.actions, [[0, -3], [4, 3]])

    def test_unbounded_actions_cannot_be_mapped(self):
        with pytest.raises(EnvironmentLoadError, match='put ContinuousActionClip before it'):
            NormalizedAction(self.nested())


class TestActionMaskFromInfo:

    @staticmethod
    def masking(infos, **kwargs):
        class Masking(ImageEnv):
            def step(self, action):
                return *super().step(action)[:4], infos[1]

            def reset(self, *, seed=None, options=None):
                return super().reset(seed=seed)[0], infos[0]

        return ActionMaskFromInfo(Masking((2, 2, 3)), **kwargs)

    def test_the_mask_of_each_info_becomes_a_field(self):
        env = self.masking([{'valid': np.array([0, 1, 1, 0])}, {'valid': [True, False, False, False]}], key='valid')
        observation, _ = env.reset()
        assert observation in env.observation_space and observation['valid_action_mask'].tolist() == [0, 1, 1, 0]
        observation = env.step(0)[0]
        assert observation in env.observation_space and observation['valid_action_mask'].tolist() == [1, 0, 0, 0]
        nested = ActionMaskFromInfo(env, 'valid')
        assert list(nested.reset()[0]) == ['observation', 'valid_action_mask']

    @pytest.mark.parametrize('info', [{}, {'action_mask': np.ones(3)}, {'action_mask': None},
                                      {'action_mask': ['a'] * 4}])
    def test_an_info_without_a_mask_of_all_actions_is_rejected(self, info):
        with pytest.raises(ValueError, match=r"expected info\['action_mask'\] of shape \(4,\), found"):
            self.masking([info]).reset()
        with pytest.raises(EnvironmentLoadError, match='expected a Discrete action'):
            ActionMaskFromInfo(ImageEnv(action_space=spaces.MultiBinary(2)))


def test_wrong_arguments_are_rejected_by_name():
    with pytest.raises(ValueError, match=r'FrameSkip\.skip'):
        FrameSkip(ImageEnv(), 0)
    with pytest.raises(ValueError, match=r'FrameStack\.stack_size'):
        FrameStack(ImageEnv(), 0)
    with pytest.raises(ValueError, match="must be 'channels_last' or 'channels_first'"):
        FrameCrop(ImageEnv(), channel_order='first')
    with pytest.raises(ValueError, match='cropping_fraction'):
        EpisodicRandomFrameCrop(ImageEnv(), 1.5)
    with pytest.raises(EnvironmentLoadError, match='min_v < max_v'):
        ContinuousActionClip(ImageEnv(), 1, 0)
    with pytest.raises(EnvironmentLoadError, match='low < high'):
        ContinuousActionMapping(ImageEnv(), 1, 0)


def test_stacked_random_augmentations_draw_different_numbers():
    wrappers = [FrameFlip(ImageEnv()), EpisodicRandomFrameCrop(ImageEnv(), 0.5)]
    for seed in (0, 3):
        for env in wrappers:
            env.reset(seed=seed)
        first, second = (env._generator.random(8) for env in wrappers)
        assert not np.isclose(first, second).any()
