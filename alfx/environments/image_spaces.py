"""Helpers shared by the image wrappers in :mod:`alfx.environments.gym_wrappers`."""
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.utils.extras import pip_install


def require_box(space: spaces.Space, wrapper: Any, *ranks: int) -> spaces.Box:
    """Return ``space``, which must be a Box whose rank is one of ``ranks`` if any are given.

    Raises:
        EnvironmentLoadError: it is not; the message names the class of ``wrapper``.
    """
    if not isinstance(space, spaces.Box) or (ranks and len(space.shape) not in ranks):
        name = type(wrapper).__name__
        rank = f' of {" or ".join(map(str, ranks))} dimensions' if ranks else ''
        raise EnvironmentLoadError(f'{name}: expected a Box{rank}, found {space}; name the fields that are such boxes '
                                   f'in {name}.fields = [...]')
    return space


def box_like(space: spaces.Box, func: Callable[[np.ndarray], np.ndarray]) -> spaces.Box:
    """Return a Box whose bounds are ``func`` of the bounds of ``space``."""
    return spaces.Box(func(space.low), func(space.high), dtype=space.dtype.type)


def image_axes(channel_order: str) -> tuple[int, int]:
    """Return the height and width axes of an image."""
    return (0, 1) if channel_order == 'channels_last' else (1, 2)


def as_nest(space: spaces.Space) -> Any:
    """Return the nest of the fundamental spaces in Dict and Tuple spaces."""
    if isinstance(space, spaces.Dict):
        return {key: as_nest(child) for key, child in space.spaces.items()}
    return tuple(map(as_nest, space.spaces)) if isinstance(space, spaces.Tuple) else space


def is_channels_last_image(space: spaces.Space) -> bool:
    """Return whether a Box or MultiBinary looks like images ``(H, W, C)``: rank 3, first axis not the shortest.

    Squares of another size than the first axis are planes ``(C, H, W)``, such as those of chess, ``(12, 8, 8)``.
    """
    return (isinstance(space, (spaces.Box, spaces.MultiBinary)) and len(space.shape) == 3
            and space.shape[0] >= min(space.shape[1:]) and not space.shape[0] != space.shape[1] == space.shape[2])


def opencv(wrapper: str) -> Any:
    """Return the module ``cv2``.

    Raises:
        EnvironmentLoadError: it is not installed; the message says how to install it.
    """
    try:
        import cv2
    except ImportError:
        raise EnvironmentLoadError(f"{wrapper} needs opencv: {pip_install('atari')}") from None
    return cv2


def luma(image: np.ndarray) -> np.ndarray:
    """Return the luma ``(H, W)`` of an RGB image ``(H, W, 3)``, both uint8."""
    red, green, blue = (image[..., i].astype(np.uint32) for i in range(3))
    return ((red * 9798 + green * 19235 + blue * 3735 + 16384) >> 15).astype(np.uint8)
