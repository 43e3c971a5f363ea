"""A window that shows images of an environment."""
from typing import Any

import numpy as np

from alfx.environments.environment_errors import UnsupportedOperationError


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
