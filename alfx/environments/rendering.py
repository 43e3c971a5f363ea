"""Images of environments: when they are wanted, their conversion to frames of a video, and a window that shows them."""
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from alfx.environments.environment_errors import UnsupportedOperationError

_DEFAULT_FPS = 30.0
_is_wanted: bool | None = None


def is_wanted() -> bool | None:
    """Return whether the environments that are being created will be rendered; ``None``: unknown."""
    return _is_wanted


def has_display() -> bool:
    """Return whether a window can be opened."""
    return not sys.platform.startswith('linux') or any(os.environ.get(name) for name in ('DISPLAY', 'WAYLAND_DISPLAY'))


@contextlib.contextmanager
def wanted(flag: bool | None) -> Iterator[None]:
    """Context manager for the creation of environments that will, or will not, be rendered; ``None``: unknown.

    If they will be rendered and there is no display, SDL draws in memory, also in processes that are started later, and
    does not print that it found no display.
    """
    global _is_wanted
    if flag and not has_display():
        os.environ.setdefault('SDL_VIDEODRIVER', 'dummy')
    before, _is_wanted = _is_wanted, flag
    try:
        yield
    finally:
        _is_wanted = before


def as_frame(image: Any) -> np.ndarray:
    """Return an image that ``render()`` of an environment returned as a frame, uint8 ``[H, W, 3]``.

    Args:
        image: gray, with one, three or four channels, first or last; integers or bools, floats in [0, 1] or
            [0, 255], or 16-bit integers up to 65,535. Of several images, such as those since the last call, the last.

    Raises:
        UnsupportedOperationError: anything else.
    """
    frame = np.asarray(image[-1] if isinstance(image, (list, tuple)) and image and np.ndim(image[-1]) > (
        2 if isinstance(image[-1], (list, tuple)) else 1) else image)
    if frame.ndim == 4 and len(frame):
        frame = frame[-1]
    if frame.ndim == 3 and frame.shape[0] in (1, 3, 4) and frame.shape[2] not in (1, 3, 4):
        frame = frame.transpose(1, 2, 0)
    if frame.ndim == 2:
        frame = frame[..., None]
    if frame.ndim != 3 or frame.shape[2] not in (1, 3, 4) or not frame.size or frame.dtype.kind not in 'biuf':
        found = f'{frame.dtype} {list(frame.shape)}' if frame.dtype.kind in 'biuf' else repr(image)[:100]
        raise UnsupportedOperationError(f'render() returned {found}, expected an image [H, W, 3] of dtype uint8')
    frame = frame[..., :3]  # without alpha
    if frame.dtype.kind == 'f':
        frame = np.nan_to_num(frame)
    if frame.dtype != np.uint8 and frame.max() <= 1:
        frame = frame * 255.0
    elif frame.dtype == np.uint16 and frame.max() > 255:
        frame = frame / 257.0
    if frame.dtype != np.uint8:
        frame = np.clip(frame, 0, 255).astype(np.uint8)
    return np.repeat(frame, 3 // frame.shape[2], axis=2) if frame.shape[2] < 3 else np.ascontiguousarray(frame)


def fitted(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return ``frame`` in the fixed size of a video: scaled down if it is larger, padded with black."""
    if frame.shape[:2] == (height, width):
        return frame
    scale = max(frame.shape[0] / height, frame.shape[1] / width, 1.0)
    rows, columns = (np.arange(max(1, int(size / scale))) * scale for size in frame.shape[:2])
    result = np.zeros((height, width, 3), np.uint8)
    result[:len(rows), :len(columns)] = frame[rows.astype(int)][:, columns.astype(int)]
    return result


def frame_rate(metadata: Mapping[str, Any]) -> float:
    """Return the frames per second that an environment declares; 30 if it declares no positive number."""
    try:
        fps = float(metadata.get('render_fps') or 0)
    except (TypeError, ValueError):
        fps = 0.0
    return fps if fps > 0 and math.isfinite(fps) else _DEFAULT_FPS


class Window:
    """Shows images in a window, which opens with the first image.

    Args:
        title: title of the window.
    """

    def __init__(self, title: str):
        self._title = title
        self._screen: Any = None

    def show(self, frame: np.ndarray) -> None:
        """Show ``frame``, uint8 ``[H, W, 3]``.

        Raises:
            UnsupportedOperationError: pygame is missing, or there is no display.
        """
        try:
            import pygame
        except ImportError:
            raise UnsupportedOperationError('showing an environment needs pygame: pip install pygame; '
                                            "render('rgb_array') returns images without it") from None
        height, width = frame.shape[:2]
        try:
            if self._screen is None or self._screen.get_size() != (width, height):
                pygame.display.init()
                self._screen = pygame.display.set_mode((width, height))
                pygame.display.set_caption(self._title)
            self._screen.blit(pygame.surfarray.make_surface(frame.swapaxes(0, 1)), (0, 0))
            pygame.event.pump()
            pygame.display.flip()
        except pygame.error as error:
            raise UnsupportedOperationError(f"cannot open a window ({error}); render('rgb_array') returns images "
                                            'without one') from None

    def close(self) -> None:
        """Close the window, if it was opened."""
        if self._screen is not None:
            import pygame
            pygame.display.quit()
            self._screen = None
