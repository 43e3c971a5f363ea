"""What the wrappers of images in :mod:`alfx.environments.gym_wrappers` have in common."""
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.utils.extras import pip_install


def require_box(space: spaces.Space, wrapper: Any, *ranks: int) -> spaces.Box:
    """``space``, which must be a Box, of one of ``ranks`` if there are any.

    Raises:
        EnvironmentLoadError: it is not; the message names the class of ``wrapper``.
    """
    if not isinstance(space, spaces.Box) or (ranks and len(space.shape) not in ranks):
        name = type(wrapper).__name__
        rank = f' of {" or ".join(map(str, ranks))} dimensions' if ranks else ''
        raise EnvironmentLoadError(f'{name}: expected a Box{rank}, found {space}; give the fields that are such boxes: '
                                   f'{name}.fields = [...]')
    return space


def box_like(space: spaces.Box, func: Callable[[np.ndarray], np.ndarray]) -> spaces.Box:
    """The Box whose bounds are ``func`` of those of ``space``."""
    return spaces.Box(func(space.low), func(space.high), dtype=space.dtype.type)


def image_axes(channel_order: str) -> tuple[int, int]:
    """Height and width axes of an image."""
    if channel_order not in ('channels_last', 'channels_first'):
        raise EnvironmentLoadError("channel_order: expected 'channels_last' or 'channels_first', found "
                                   f'{channel_order!r}')
    return (0, 1) if channel_order == 'channels_last' else (1, 2)


def is_channels_last_image(space: spaces.Space) -> bool:
    """Whether ``space`` looks like images ``(H, W, C)``: a uint8 Box of rank 3 whose first axis is not the shortest."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 3 or space.dtype != np.uint8:
        return False
    return space.shape[0] >= min(space.shape[1:])


def opencv(wrapper: str) -> Any:
    """The module ``cv2``.

    Raises:
        EnvironmentLoadError: it is not installed; says how to get it.
    """
    try:
        import cv2
    except ImportError:
        raise EnvironmentLoadError(f"{wrapper} needs opencv: {pip_install('atari')}") from None
    return cv2


def luma(image: np.ndarray) -> np.ndarray:
    """Brightness ``(H, W)`` of an RGB image ``(H, W, 3)``, both uint8."""
    red, green, blue = (image[..., i].astype(np.uint32) for i in range(3))
    return ((red * 9798 + green * 19235 + blue * 3735 + 16384) >> 15).astype(np.uint8)
