"""Wrappers around one gymnasium environment, for ``suite_gym.load.gym_env_wrappers`` (innermost first).

Wrappers of observations take ``fields``: paths such as ``'camera.front'`` of the parts of a Dict or Tuple
observation that they change. Without ``fields`` they change the whole observation. Images are ``(H, W, C)`` unless
``channel_order='channels_first'`` is given. Wrappers around a whole batch are in
:mod:`alfx.environments.alf_wrappers`.
"""
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from alfx import nest
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_action_wrappers import (ContinuousActionClip, ContinuousActionMapping, NonEpisodicEnv,
                                                   NormalizedAction)
from alfx.environments.image_spaces import (as_nest, box_like, image_axes, is_channels_last_image, luma, opencv,
                                            require_box)
from alfx.gin_utils import Count, PositiveFraction, StepLimit, configurable

__all__ = [
    'ActionMaskFromInfo', 'BaseObservationWrapper', 'ContinuousActionClip', 'ContinuousActionMapping',
    'DMAtariPreprocessing', 'EpisodicRandomFrameCrop', 'FrameCrop', 'FrameFlip', 'FrameGrayScale', 'FrameResize',
    'FrameSkip', 'FrameStack', 'ImageChannelFirst', 'NonEpisodicEnv', 'NormalizedAction', 'ObservationSubset',
    'is_channels_last_image', 'luma', 'opencv', 'transform_space',
]

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]
ChannelOrder = Literal['channels_last', 'channels_first']


def transform_space(observation_space: spaces.Space, field: str | None,
                    func: Callable[[spaces.Space], spaces.Space]) -> spaces.Space:
    """Return ``observation_space`` with the part at the path ``field`` replaced by ``func`` of that part.

    Args:
        observation_space: the space; it is not modified.
        field: keys of Dict and positions in Tuple spaces joined by dots; ``None`` or '': the whole space.
        func: maps the old space of the field to the new one.

    Raises:
        EnvironmentLoadError: there is no such field.
    """
    return _with_part(observation_space, _keys(observation_space, field), func)


def _keys(space: spaces.Space, field: str | None) -> tuple:
    """Return the keys of Dict and positions in Tuple spaces that lead to a field."""
    try:
        return nest.locate_field(as_nest(space), field)
    except LookupError as error:
        raise EnvironmentLoadError(f'{error}; the space is {space}') from None


def _with_part(space: Any, keys: tuple, func: Callable[[spaces.Space], spaces.Space]) -> spaces.Space:
    if not keys:
        return func(space)
    is_dict = isinstance(space, spaces.Dict)
    children: dict[Any, spaces.Space] = dict(space.spaces if is_dict else enumerate(space.spaces))
    children[keys[0]] = _with_part(children[keys[0]], keys[1:], func)
    return spaces.Dict(children) if is_dict else spaces.Tuple(list(children.values()))


def _get(observation: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        observation = observation[key]
    return observation


def _replaced(observation: Any, keys: Sequence[Any], value: Any) -> Any:
    if not keys:
        return value
    if isinstance(observation, dict):
        return {**observation, keys[0]: _replaced(observation[keys[0]], keys[1:], value)}
    return tuple(_replaced(part, keys[1:], value) if i == keys[0] else part for i, part in enumerate(observation))


@configurable
class BaseObservationWrapper(gymnasium.ObservationWrapper):
    """Base class of wrappers that change some fields of the observation.

    A subclass defines :meth:`transform_space` and :meth:`transform_observation`.

    Args:
        env: the environment.
        fields: paths of the fields to change; ``None``: the whole observation.
    """

    def __init__(self, env: gymnasium.Env, fields: Sequence[str] | None = None):
        super().__init__(env)
        self._fields: list[str] = [''] if fields is None else list(fields)
        space = env.observation_space
        self._paths = [() if fields is None else _keys(space, field) for field in self._fields]
        for keys in self._paths:
            space = _with_part(space, keys, self.transform_space)
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            return result  # the environment group explains what is wrong
        return self.observation(result[0]), result[1]

    def observation(self, observation: Any) -> Any:
        """Return the changed observation; the argument is not modified."""
        for field, path in zip(self._fields, self._paths):
            observation = _replaced(observation, path, self.transform_observation(_get(observation, path), field))
        return observation

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        """Return the new space of a field."""
        raise NotImplementedError(f'{type(self).__name__}.transform_space')

    def transform_observation(self, observation: Any, field: str) -> Any:
        """Return the new value of a field.

        Args:
            observation: the value of the field.
            field: the path of the field; '' for the whole observation.
        """
        raise NotImplementedError(f'{type(self).__name__}.transform_observation')


@configurable
class ImageChannelFirst(BaseObservationWrapper):
    """Transposes images from ``(H, W, C)`` to ``(C, H, W)``.

    Args:
        env: the environment.
        fields: fields to change; ``None``: every field for which :func:`is_channels_last_image` holds.
    """

    def __init__(self, env: gymnasium.Env, fields: Sequence[str] | None = None):
        if fields is None:
            fields = [path for path, space in nest.flatten_with_path(as_nest(env.observation_space))
                      if is_channels_last_image(space)]
        super().__init__(env, fields)

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        if isinstance(observation_space, spaces.MultiBinary) and len(observation_space.shape) == 3:
            return spaces.MultiBinary([observation_space.shape[axis] for axis in (2, 0, 1)])
        return box_like(require_box(observation_space, self, 3), lambda bound: bound.transpose(2, 0, 1))

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        image = np.asarray(observation)
        return image.transpose(2, 0, 1) if image.ndim == 3 else image  # the later shape check names the field


@configurable
class ObservationSubset(BaseObservationWrapper):
    """Keeps selected elements of a flat observation; ``indices=(0, 2)`` hides the velocities of CartPole.

    Args:
        env: the environment.
        indices: indices of the elements to keep, in this order.
        fields: fields to change, each a Box of rank 1; ``None``: the whole observation.
    """

    def __init__(self, env: gymnasium.Env, indices: Sequence[int], fields: Sequence[str] | None = None):
        self._indices = np.asarray(indices, dtype=np.int64)
        super().__init__(env, fields)

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        box = require_box(observation_space, self, 1)
        size = box.shape[0]
        if np.any((self._indices < -size) | (self._indices >= size)):
            raise EnvironmentLoadError(f'ObservationSubset.indices: expected numbers from {-size} to {size - 1}, found '
                                       f'{self._indices.tolist()}')
        return box_like(box, lambda bound: bound[self._indices])

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        return np.asarray(observation)[self._indices]


@configurable
class FrameStack(BaseObservationWrapper):
    """Concatenates the last ``stack_size`` observations along the channels, oldest first.

    Args:
        env: the environment.
        stack_size: number of observations; at the start of an episode, the stack is filled with copies of the first.
        channel_order: 'channels_last': along the last axis; 'channels_first': along the first. Images without a
            channel axis (rank 2) get one.
        fields: fields to change; ``None``: the whole observation.
    """

    def __init__(self, env: gymnasium.Env, stack_size: Count = 4, channel_order: ChannelOrder = 'channels_last',
                 fields: Sequence[str] | None = None):
        self._stack_size = stack_size
        self._axis = -1 if channel_order == 'channels_last' else 0
        self._frames: dict[str, deque] = {}
        super().__init__(env, fields)

    def _joined(self, frames: Sequence[np.ndarray]) -> np.ndarray:
        join = np.stack if np.ndim(frames[0]) == 2 else np.concatenate
        return join(frames, axis=self._axis)

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        box = require_box(observation_space, self, 1, 2, 3)
        return box_like(box, lambda bound: self._joined([bound] * self._stack_size))

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._frames = {}
        return super().reset(**kwargs)

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        frames, observation = self._frames.get(field), np.array(observation)  # environments may reuse their array
        if frames is None:
            frames = self._frames[field] = deque([observation] * self._stack_size, self._stack_size)
        else:
            frames.append(observation)
        return self._joined(frames)


@configurable
class FrameResize(BaseObservationWrapper):
    """Resizes images ``(H, W, C)`` or ``(H, W)``; needs opencv.

    Args:
        env: the environment.
        width: new width.
        height: new height.
        fields: fields to change; ``None``: the whole observation.
        interpolation: a constant of opencv such as ``cv2.INTER_LINEAR``; ``None``: ``cv2.INTER_AREA``.
    """

    def __init__(self, env: gymnasium.Env, width: int = 84, height: int = 84, fields: Sequence[str] | None = None,
                 interpolation: int | None = None):
        self._size = (width, height)
        self._cv2 = opencv('FrameResize')
        self._interpolation = self._cv2.INTER_AREA if interpolation is None else interpolation
        super().__init__(env, fields)

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        box = require_box(observation_space, self, 2, 3)
        try:
            self.transform_observation(box.low, '')
        except self._cv2.error as error:
            raise EnvironmentLoadError(f'FrameResize: opencv cannot resize images of shape {box.shape} and type '
                                       f'{box.dtype}: {error}') from None
        return spaces.Box(box.low.min(), box.high.max(), (self._size[1], self._size[0], *box.shape[2:]),
                          box.low.dtype.type)

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        resized = self._cv2.resize(observation, self._size, interpolation=self._interpolation)
        return resized.reshape(*resized.shape[:2], *observation.shape[2:])


@configurable
class FrameCrop(BaseObservationWrapper):
    """Crops images to a fixed rectangle.

    Args:
        env: the environment.
        sx: first column.
        sy: first row.
        width: width of the rectangle.
        height: height of the rectangle.
        channel_order: 'channels_last' or 'channels_first'.
        fields: fields to change; ``None``: the whole observation.
    """

    def __init__(self, env: gymnasium.Env, sx: int = 0, sy: int = 0, width: int = 84, height: int = 84,
                 channel_order: ChannelOrder = 'channels_last', fields: Sequence[str] | None = None):
        window = (slice(sy, sy + height), slice(sx, sx + width))
        self._row_axis, self._column_axis = image_axes(channel_order)
        self._window = window if channel_order == 'channels_last' else (slice(None), *window)
        super().__init__(env, fields)

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        box = require_box(observation_space, self, *((2, 3) if self._row_axis == 0 else (3, )))
        rows, columns = self._window[self._row_axis], self._window[self._column_axis]
        height, width = box.shape[self._row_axis], box.shape[self._column_axis]
        if rows.stop > height or columns.stop > width or rows.start < 0 or columns.start < 0:
            raise EnvironmentLoadError(f'FrameCrop: rows {rows.start}:{rows.stop} and columns {columns.start}:'
                                       f'{columns.stop} are not within an image of {height} rows, {width} columns')
        return box_like(box, lambda bound: bound[self._window])

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        return observation[self._window]


class _EpisodicAugmentation(BaseObservationWrapper):
    """Base class of wrappers that draw a random change at each reset and keep it during the episode."""

    _generator: np.random.Generator | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or self._generator is None:
            self._generator = np.random.default_rng(None if seed is None else [seed, *type(self).__name__.encode()])
        self._draw(self._generator)
        return super().reset(seed=seed, options=options)

    def _draw(self, generator: np.random.Generator) -> None:
        """Draw the change for the new episode."""
        raise NotImplementedError(f'{type(self).__name__}._draw')


@configurable
class EpisodicRandomFrameCrop(_EpisodicAugmentation):
    """Crops images to a rectangle whose position is drawn for each episode.

    Args:
        env: the environment.
        cropping_fraction: height and width of the rectangle as a fraction of those of the image.
        channel_order: 'channels_last' or 'channels_first'.
        share_cropping: use the same relative position for all fields.
        fields: fields to change; ``None``: the whole observation.
    """

    def __init__(self, env: gymnasium.Env, cropping_fraction: PositiveFraction = 0.8,
                 channel_order: ChannelOrder = 'channels_last', share_cropping: bool = True,
                 fields: Sequence[str] | None = None):
        self._fraction = cropping_fraction
        self._leading = (slice(None), ) * image_axes(channel_order)[0]
        self._share = share_cropping
        self._places: dict[str, np.ndarray] = {}
        super().__init__(env, fields)

    def _draw(self, generator: np.random.Generator) -> None:
        places = generator.random((len(self._fields), 2))
        self._places = {field: places[0 if self._share else i] for i, field in enumerate(self._fields)}

    def _crop(self, image: np.ndarray, place: np.ndarray) -> np.ndarray:
        axis = len(self._leading)
        window = []
        for size, where in zip(image.shape[axis:axis + 2], place):
            kept = max(1, round(size * self._fraction))
            start = int(where * (size - kept + 1))
            window.append(slice(start, start + kept))
        return image[(*self._leading, *window)]

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        return box_like(require_box(observation_space, self, 2, 3), lambda bound: self._crop(bound, np.zeros(2)))

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        return self._crop(observation, self._places[field])


@configurable
class FrameFlip(_EpisodicAugmentation):
    """Flips all images of an episode, with a random choice for each episode.

    Args:
        env: the environment.
        ud_flip_prob: probability of a vertical flip.
        lr_flip_prob: probability of a horizontal flip.
        channel_order: 'channels_last' or 'channels_first'.
        fields: fields to change; ``None``: the whole observation.
    """

    def __init__(self, env: gymnasium.Env, ud_flip_prob: float = 0.5, lr_flip_prob: float = 0.5,
                 channel_order: ChannelOrder = 'channels_last', fields: Sequence[str] | None = None):
        self._probabilities = np.array([ud_flip_prob, lr_flip_prob])
        self._image_axes = image_axes(channel_order)
        self._flipped: tuple[int, ...] = ()
        super().__init__(env, fields)

    def _draw(self, generator: np.random.Generator) -> None:
        flips = generator.random(2) < self._probabilities
        self._flipped = tuple(axis for axis, flip in zip(self._image_axes, flips) if flip)

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        return require_box(observation_space, self, 2, 3)

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        return np.flip(observation, self._flipped) if self._flipped else observation


@configurable
class FrameGrayScale(BaseObservationWrapper):
    """Converts RGB images ``(H, W, 3)``, uint8, to their luma ``(H, W, 1)`` (ITU-R BT.601, rounded as in opencv).

    Args:
        env: the environment.
        fields: fields to change; ``None``: the whole observation.
    """

    def transform_space(self, observation_space: spaces.Space) -> spaces.Space:
        box = require_box(observation_space, self, 3)
        if box.shape[2] != 3 or box.dtype != np.uint8:
            raise EnvironmentLoadError(f'FrameGrayScale: expected uint8 (H, W, 3), found {box}')
        return spaces.Box(0, 255, (*box.shape[:2], 1), np.uint8)

    def transform_observation(self, observation: np.ndarray, field: str) -> np.ndarray:
        return luma(observation)[..., None]


@configurable
class FrameSkip(gymnasium.Wrapper):
    """Repeats each action, sums the rewards and returns the last observation.

    Args:
        env: the environment.
        skip: number of repetitions.
    """

    def __init__(self, env: gymnasium.Env, skip: Count):
        super().__init__(env)
        self._skip = skip

    def step(self, action: Any) -> StepResult:
        total: Any = 0.0
        for _ in range(self._skip):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


@configurable
class DMAtariPreprocessing(gymnasium.Wrapper):
    """DeepMind's preprocessing of Atari games.

    The protocol is that of Mnih et al. 2015 (Methods) and Machado et al. 2018 (arXiv:1709.06009, table 5).
    Each action is repeated; the pixelwise maximum of the last two frames is converted to gray and resized. An
    episode begins with a random number of no-ops, and with FIRE in games that wait for it: for one frame, or with
    sticky actions for so many frames that the game sees it with a probability above 99.99%. This wrapper neither clips
    rewards nor ends episodes when a life is lost: see ``data_transformer.RewardClipping`` and
    ``alf_wrappers.AtariTerminalOnLifeLossWrapper``.

    Args:
        env: an environment that does not repeat actions itself (``suite_atari.load``, or ``frameskip=1``) and yields
            RGB or gray images.
        frame_skip: number of times each action is repeated.
        noop_max: maximum number of no-ops at the start; 0: none.
        screen_size: height and width of the observation.
        gray_scale: convert the observation to gray, ``(screen_size, screen_size, 1)``; otherwise it stays RGB.
            ``suite_atari.load`` loads gray images unless its ``env_args`` are ``{'obs_type': 'rgb'}``.

    Raises:
        EnvironmentLoadError: the environment repeats actions itself, ``gray_scale`` is not set but its images are gray,
            or opencv is missing.
    """

    def __init__(self, env: gymnasium.Env, frame_skip: Count = 4, noop_max: StepLimit = 30, screen_size: Count = 84,
                 gray_scale: bool = True):
        super().__init__(env)
        own_skip = getattr(env.unwrapped, '_frameskip', 1)
        if own_skip != 1 and frame_skip != 1:
            raise EnvironmentLoadError(f'DMAtariPreprocessing: the environment repeats actions itself (frameskip='
                                       f"{own_skip}); use suite_atari.load, or env_args={{'frameskip': 1}}")
        box = require_box(env.observation_space, self, 2, 3)
        if not gray_scale and len(box.shape) == 2:
            raise EnvironmentLoadError('DMAtariPreprocessing.gray_scale: the environment yields gray images already; '
                                       "for RGB images, set suite_atari.load.env_args = {'obs_type': 'rgb'}")
        self._cv2 = opencv('DMAtariPreprocessing')
        self._to_gray = gray_scale and len(box.shape) == 3
        self._skip, self._noop_max, self._size = frame_skip, noop_max, screen_size
        channels = 1 if gray_scale else box.shape[2]
        self.observation_space = spaces.Box(0, 255, (screen_size, screen_size, channels), np.uint8)
        meanings: list[str] = getattr(env.unwrapped, 'get_action_meanings', list)()
        emulator = getattr(env.unwrapped, 'ale', None)
        sticky = emulator.getFloat('repeat_action_probability') if emulator is not None else 0.0
        # the game misses FIRE in all of n frames with probability sticky ** n
        frames = max(1, math.ceil(math.log(1e-4) / math.log(sticky))) if 0.0 < sticky < 1.0 else 1
        self._fire_frames = frames if meanings[1:2] == ['FIRE'] else 0

    def fire(self, observation: np.ndarray, info: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Press FIRE in games that have it as action 1; reset again if this ends the episode."""
        return self._start_with(1, self._fire_frames, observation, info)

    def _start_with(self, action: int, count: int, observation: np.ndarray, info: dict[str, Any]) -> tuple:
        for _ in range(count):
            observation, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                observation, info = self.env.reset()
        return observation, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        if self._noop_max:
            count = int(self.env.unwrapped.np_random.integers(1, self._noop_max + 1))
            observation, info = self._start_with(0, count, observation, info)
        observation, info = self.fire(observation, info)
        return self._processed(observation), info

    def step(self, action: Any) -> StepResult:
        total, previous = 0.0, None
        for repeat in range(self._skip):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated or repeat == self._skip - 1:
                break
            previous = observation
        # a sprite may be drawn in every other frame only
        frame = observation if previous is None else np.maximum(previous, observation)
        return self._processed(frame), total, terminated, truncated, info

    def _processed(self, frame: np.ndarray) -> np.ndarray:
        gray = luma(frame) if self._to_gray else frame
        scaled = self._cv2.resize(gray, (self._size, self._size), interpolation=self._cv2.INTER_AREA)
        return scaled.reshape(self.observation_space.shape)


@configurable
class ActionMaskFromInfo(gymnasium.Wrapper):
    """Adds the mask of valid actions that an environment puts into its infos, as Taxi does, to the observation.

    The observation becomes a Dict with the fields ``observation`` and 'valid_action_mask', the default field of the
    data transformer ``ActionMask``; an observation that is a Dict keeps its fields.

    Args:
        env: an environment whose action is Discrete.
        key: key of the mask in the info of every reset and step: N numbers, of which nonzero ones are valid.

    Raises:
        EnvironmentLoadError: the action is not Discrete.
        ValueError: from ``reset`` and ``step``: an info has no such mask.
    """

    _FIELD = 'valid_action_mask'

    def __init__(self, env: gymnasium.Env, key: str = 'action_mask'):
        super().__init__(env)
        if not isinstance(env.action_space, spaces.Discrete):
            raise EnvironmentLoadError(f'ActionMaskFromInfo: expected a Discrete action, found {env.action_space}')
        self._key = key
        space = env.observation_space
        fields = space.spaces if isinstance(space, spaces.Dict) else {'observation': space}
        self.observation_space = spaces.Dict({**fields, self._FIELD: spaces.MultiBinary(int(env.action_space.n))})

    def _masked(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask, shape = np.asarray(info.get(self._key)), self.observation_space[self._FIELD].shape  # type: ignore[index]
        if mask.shape != shape or mask.dtype.kind not in 'biuf':
            raise ValueError(f'ActionMaskFromInfo: expected info[{self._key!r}] of shape {shape}, found '
                             f'{info.get(self._key)!r}; the info has {sorted(map(str, info))}')
        fields = observation if isinstance(observation, dict) else {'observation': observation}
        return {**fields, self._FIELD: (mask != 0).astype(np.int8)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._masked(observation, info), info

    def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(observation, info), reward, terminated, truncated, info
