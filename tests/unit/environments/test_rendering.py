"""Conversion of images to frames, and environments that are created with a render mode only where one is needed."""
import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import ChainEnv

from alfx.environments import rendering, suite_gym
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.environments.gym_make import make_rendered
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.rendering import as_frame, fitted, frame_rate
from alfx.environments.utils import create_environment
from alfx.environments.vector_env import SerialVectorEnv

RGB = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
ALPHA = np.full((4, 5, 1), 7, np.uint8)


@pytest.mark.parametrize('image, expected', [
    (RGB, RGB),
    (RGB[::-1], RGB[::-1]),
    (RGB.transpose(2, 0, 1), RGB),
    (np.concatenate([RGB, ALPHA], 2), RGB),
    (RGB / 255, RGB),
    (RGB.astype(np.float64), RGB),
    (RGB.astype(np.int64), RGB),
    (RGB.astype(np.uint16), RGB),
    (RGB.astype(np.uint16) * 257, RGB),
    (RGB.astype(np.int64) * 300 - 1, np.where(RGB == 0, 0, 255)),
    (torch.from_numpy(RGB), RGB),
    ([np.zeros_like(RGB), RGB], RGB),
    (np.stack([np.zeros_like(RGB), RGB]), RGB),
    (ALPHA, np.full((4, 5, 3), 7)),
    (ALPHA[..., 0], np.full((4, 5, 3), 7)),
    (ALPHA.transpose(2, 0, 1) > 6, np.full((4, 5, 3), 255)),
    (ALPHA[..., 0].astype(np.int64) // 7, np.full((4, 5, 3), 255)),  # a map of a grid with 0 and 1
    ([[1, 2], [3, 4]], np.array([[[1] * 3, [2] * 3], [[3] * 3, [4] * 3]])),
    (RGB.tolist(), RGB),
    ([RGB.tolist()], RGB),
    ([ALPHA[..., 0], RGB[..., 0]], np.repeat(RGB[..., :1], 3, 2)),
    (np.full((2, 2, 3), np.nan), np.zeros((2, 2, 3))),
])
def test_images_of_any_kind_become_frames(image, expected):
    frame = as_frame(image)
    assert frame.dtype == np.uint8 and frame.flags.c_contiguous and np.array_equal(frame, expected)


@pytest.mark.parametrize('image, found', [
    (None, 'render.. returned None, expected an image'), ([], r'returned float64 \[0\]'), ('text', "'text'"),
    (3, r'int64 \[\]'),
    (np.zeros((5, 5, 7)), r'float64 \[5, 5, 7\]'), (np.zeros((0, 5, 3)), r'\[0, 5, 3\]')])
def test_other_tensors_are_not_images(image, found):
    with pytest.raises(UnsupportedOperationError, match=found):
        as_frame(image)


def test_frames_are_fitted_into_the_size_of_a_video():
    assert fitted(RGB, 4, 5) is RGB
    assert np.array_equal(fitted(RGB, 6, 6)[:4, :5], RGB) and not fitted(RGB, 6, 6)[4:].any()
    small = fitted(np.repeat(np.repeat(RGB, 2, 0), 2, 1), 4, 7)
    assert np.array_equal(small[:, :5], RGB) and not small[:, 5:].any()
    assert fitted(np.full((100, 1, 3), 9, np.uint8), 4, 4)[:, 0].all()


@pytest.mark.parametrize('fps, expected', [(10, 10), (0.5, 0.5), ('20', 20), (None, 30), (0, 30), (-1, 30),
                                           (float('nan'), 30), ('fast', 30), ([1], 30)])
def test_a_frame_rate_that_is_no_positive_number_is_30(fps, expected):
    assert frame_rate({'render_fps': fps}) == expected
    assert frame_rate({}) == 30


class Base(ChainEnv):
    """An environment that stores the render mode of its creation."""

    def __init__(self, render_mode=None):
        super().__init__(3, render_mode=render_mode)


class WithoutArgument(Base):
    def __init__(self):
        super().__init__()


class WithoutScreen(Base):
    def __init__(self, render_mode=None):
        super().__init__()
        if render_mode is not None:
            raise OSError('no display')


class NoModes(Base):
    metadata = {'render_modes': None}


for creator in (Base, WithoutArgument, WithoutScreen, NoModes):
    gymnasium.register(f'{creator.__name__}-v0', creator)
gymnasium.register('Made-v0', lambda render_mode=None: Base(render_mode))
gymnasium.register('MadeOfAll-v0', lambda **kwargs: Base(**kwargs))
gymnasium.register('MadeWithout-v0', lambda: Base())


def load_made(name, render_mode=None):
    return gymnasium.make(name, render_mode=render_mode)


def mode_of(flag, name, **kwargs):
    with rendering.wanted(flag), create_environment(name, num_parallel_environments=1, nonparallel=True,
                                                    **kwargs) as env:
        env.reset()
        return env.gym.render_mode


@pytest.mark.parametrize('name, mode', [('Base', 'rgb_array'), ('Made', 'rgb_array'), ('MadeOfAll', 'rgb_array'),
                                        ('MadeWithout', None), ('WithoutArgument', None), ('WithoutScreen', None),
                                        ('NoModes', None)])
def test_a_render_mode_is_passed_only_where_something_is_rendered(name, mode, caplog):
    assert mode_of(False, f'{name}-v0') is None and not caplog.records
    assert mode_of(None, f'{name}-v0') == mode_of(True, f'{name}-v0') == mode
    assert ('no display' in caplog.text) == (name == 'WithoutScreen')


def test_wrappers_may_render_during_training():
    def load(name, batch_size, vector_env):
        return suite_gym.load(name, batch_size=batch_size, vector_env=vector_env,
                              gym_env_wrappers=[gymnasium.wrappers.AddRenderObservation])

    assert mode_of(False, 'Base-v0', env_load_fn=load) == 'rgb_array'


def test_a_function_gets_a_render_mode_for_a_video_only():
    def human(name, render_mode='human'):
        raise AssertionError(render_mode)

    assert mode_of(True, 'Base-v0', env_load_fn=load_made) == 'rgb_array'
    assert mode_of(False, 'Base-v0', env_load_fn=load_made) is mode_of(None, 'Base-v0', env_load_fn=load_made) is None
    assert mode_of(True, 'WithoutScreen-v0', env_load_fn=load_made) is None
    with pytest.raises(AssertionError, match='human'):
        mode_of(True, 'Base-v0', env_load_fn=human)


def test_a_mode_that_the_environment_sets_itself_is_accepted(caplog):
    class ReadOnlyMode(gymnasium.Env):
        render_mode = property(lambda self: 'rgb_array')

    assert make_rendered(ReadOnlyMode, 'rgb_array', 'ReadOnlyMode').render_mode == 'rgb_array'
    assert not caplog.records


class Failing(ChainEnv):
    def render(self):
        raise OSError('the screen is dark')


class OldInterface(ChainEnv):
    metadata = {'render.modes': ['rgb_array']}

    def render(self, mode='human'):
        return np.zeros((8, 8, 3), np.uint8)


def test_the_old_interface_of_render_gets_advice_about_itself():
    with GymVectorEnvironment(SerialVectorEnv([lambda: OldInterface(3)])) as env:
        env.reset()
        with pytest.raises(UnsupportedOperationError, match=r"no images: .*'rgb_array' \(found \[\]\), and render\(\) "
                           "takes no argument 'mode'$"):
            env.render()


@pytest.mark.parametrize('make', [SerialVectorEnv, pytest.param(ProcessVectorEnv, marks=pytest.mark.processes)])
def test_an_environment_continues_after_an_error_in_render(make):
    with GymVectorEnvironment(make([lambda: Failing(3, render_mode='rgb_array')])) as env:
        env.reset()
        with pytest.raises(UnsupportedOperationError, match="Failing cannot be rendered .*'rgb_array': OSError: the "
                           'screen is dark'):
            env.render()
        env.step(torch.zeros(1, dtype=torch.int64))
