"""Random images of a few colored shapes with the true segmentation: data for object-centric learning.

The images resemble multi-dSprites (Kabra et al. 2019, https://github.com/google-deepmind/multi_object_datasets). They
are smaller, and :func:`draw_sprites` draws them instead of reading stored images.
"""
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import SmallEnv, make_load

SHAPES = ('disc', 'square', 'triangle')
"""Names of the shapes; all have the same circumscribed circle."""


def draw_sprites(generator: np.random.Generator, count: int, image_size: int = 16,
                 num_sprites: tuple[int, int] = (2, 3), shapes: Sequence[str] = SHAPES,
                 diameter: tuple[float, float] = (0.3, 0.5), background: tuple[float, float] = (0.0, 0.3),
                 hue_jitter: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``count`` images at once.

    Number, shapes, positions, diameters and angles of the sprites, the hues and the gray of the background are
    uniformly random. A sprite lies within the image, and may cover earlier sprites, completely in rare cases. Edges are
    sharp: a pixel belongs to the last sprite that contains its center.

    Args:
        generator: draws the random numbers; each image takes the same number of them.
        count: number of images, ``N``.
        image_size: height and width in pixels, ``S``.
        num_sprites: minimum and maximum number of sprites.
        shapes: subset of :data:`SHAPES`.
        diameter: minimum and maximum diameter of the circumscribed circle, as a fraction of the image size.
        background: minimum and maximum brightness of the background, from 0 (black) to 1 (white).
        hue_jitter: the hues of an image, which are saturated and bright, lie at ``(u + (i + hue_jitter * v_i) / n)`` on
            the color circle for sprite i of n, u in [0, 1], ``v_i`` in [-0.5, 0.5]. 0: as different as possible; 1:
            neighbors may have the same hue.

    Returns:
        Images, uint8 ``[N, 3, S, S]``, and segmentations, uint8 ``[N, S, S]``: 0 for the background, i for the i-th
        sprite.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(image_size, num_sprites, shapes, diameter, background, hue_jitter)
    most = num_sprites[1]
    number = generator.integers(num_sprites[0], most + 1, (count, 1))
    kind = np.array([SHAPES.index(shape) for shape in shapes])[generator.integers(0, len(shapes), (count, most))]
    u = generator.random((6, count, most))
    radius = image_size * (diameter[0] + (diameter[1] - diameter[0]) * u[0]) / 2
    row, column = radius + (image_size - 2 * radius) * u[1], radius + (image_size - 2 * radius) * u[2]
    inside = _inside(kind, row, column, radius, 2 * math.pi * u[3], image_size)
    inside &= (np.arange(most) < number)[:, :, None, None]
    order = np.arange(1, most + 1, dtype=np.uint8)[:, None, None]
    mask = np.where(inside, order, np.uint8(0)).max(axis=1)
    hue = u[4][:, :1] + (np.arange(most) + hue_jitter * (u[5] - 0.5)) / number
    grey = background[0] + (background[1] - background[0]) * generator.random((count, 1, 1))
    colours = np.concatenate([np.broadcast_to(grey, (count, 1, 3)), _saturated(hue)], axis=1)
    colours = np.rint(255 * colours).astype(np.uint8)
    return np.ascontiguousarray(colours[np.arange(count)[:, None, None], mask].transpose(0, 3, 1, 2)), mask


def _check(image_size: int, num_sprites: tuple[int, int], shapes: Sequence[str], diameter: tuple[float, float],
           background: tuple[float, float], hue_jitter: float) -> None:
    if image_size < 1:
        raise ValueError(f'image_size: expected at least 1, found {image_size}')
    if not 1 <= num_sprites[0] <= num_sprites[1] <= 255:
        raise ValueError(f'num_sprites: expected 1 <= minimum <= maximum <= 255, found {num_sprites}')
    unknown = [shape for shape in shapes if shape not in SHAPES]
    if unknown or not shapes:
        raise ValueError(f'shapes: expected one or more of {SHAPES}, found {tuple(shapes)}')
    for name, (least, greatest) in (('diameter', diameter), ('background', background)):
        if not 0 <= least <= greatest <= 1:
            raise ValueError(f'{name}: expected 0 <= minimum <= maximum <= 1, found {(least, greatest)}')
    if not 0 <= hue_jitter <= 1:
        raise ValueError(f'hue_jitter: expected a number in [0, 1], found {hue_jitter}')


def _inside(kind: np.ndarray, row: np.ndarray, column: np.ndarray, radius: np.ndarray, angle: np.ndarray,
            size: int) -> np.ndarray:
    """Return which pixel centers are inside which shape, bool ``[N, K, S, S]``; the arguments are ``[N, K]``."""
    centre = np.arange(size) + 0.5
    down = (centre[:, None] - row[..., None, None]) / radius[..., None, None]
    right = (centre[None, :] - column[..., None, None]) / radius[..., None, None]
    cos, sin = np.cos(angle)[..., None, None], np.sin(angle)[..., None, None]
    x, y = cos * right + sin * down, cos * down - sin * right
    corner = math.sqrt(3) / 2
    disc = x * x + y * y <= 1
    square = np.maximum(np.abs(x), np.abs(y)) <= math.sqrt(0.5)
    triangle = np.maximum(-y, np.maximum(corner * x, -corner * x) + y / 2) <= 0.5
    kind = kind[..., None, None]
    return np.where(kind == 0, disc, np.where(kind == 1, square, triangle))


def _saturated(hue: np.ndarray) -> np.ndarray:
    """Return red, green and blue ``[..., 3]`` of the brightest saturated colors of these hues, which have period 1."""
    k = (np.array([5.0, 3.0, 1.0]) + 6 * hue[..., None]) % 6
    return 1 - np.clip(np.minimum(k, 4 - k), 0, 1)


class SpritesEnv(SmallEnv):
    """Shows a random image at each step, whatever the action; rewards are 0, and episodes are truncated.

    All images of an episode are drawn when it begins.

    Args:
        image_size: height and width in pixels, ``S``.
        num_sprites: see :func:`draw_sprites`.
        shapes: see :func:`draw_sprites`.
        diameter: see :func:`draw_sprites`.
        background: see :func:`draw_sprites`.
        hue_jitter: see :func:`draw_sprites`.
        with_mask: observe ``{'image': uint8 (3, S, S), 'mask': uint8 (S, S)}`` instead of the image alone.
        num_steps: number of steps of an episode, which has one more image.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, image_size: int = 16, num_sprites: tuple[int, int] = (2, 3), shapes: Sequence[str] = SHAPES,
                 diameter: tuple[float, float] = (0.3, 0.5), background: tuple[float, float] = (0.0, 0.3),
                 hue_jitter: float = 0.5, with_mask: bool = False, num_steps: int = 31):
        if num_steps < 1:
            raise ValueError(f'SpritesEnv.num_steps: expected at least 1, found {num_steps}')
        self._drawing: dict[str, Any] = dict(image_size=image_size, num_sprites=num_sprites, shapes=shapes,
                                             diameter=diameter, background=background, hue_jitter=hue_jitter)
        _check(**self._drawing)
        image = spaces.Box(0, 255, (3, image_size, image_size), np.uint8)
        mask = spaces.Box(0, num_sprites[1], (image_size, image_size), np.uint8)
        self.observation_space: spaces.Space = spaces.Dict({'image': image, 'mask': mask}) if with_mask else image
        self.action_space = spaces.Discrete(2)
        self.num_steps = num_steps
        self._with_mask = with_mask
        self._t = 0
        self._images = self._masks = np.zeros(0)

    def _observe(self) -> Any:
        image = self._images[self._t].copy()
        return {'image': image, 'mask': self._masks[self._t].copy()} if self._with_mask else image

    def _begin(self) -> None:
        self._t = 0
        self._images, self._masks = draw_sprites(self.np_random, self.num_steps + 1, **self._drawing)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t = (self._t + 1) % len(self._images)  # wraps around only without a time limit
        return self._observe(), 0.0, False, False, {}


load = make_load('alfx.environments.suite_sprites', 'environment of sprites', {'Sprites': SpritesEnv})
