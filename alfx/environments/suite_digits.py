"""Handwritten digits as observations: small images for representation learning, which come with scikit-learn.

1,797 digits by 13 writers, 8 x 8 pixels: the test part of E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository 1998 (https://doi.org/10.24432/C50P49). To evaluate on digits that were not
used for training, give the evaluation environments another split::

    create_environment.env_load_fn = @suite_digits.load
    create_environment.eval_env_load_fn = @evaluation/suite_digits.load
    evaluation/suite_digits.load.env_args = {'split': 'test'}
"""
import functools
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.datagen import digit_images
from alfx.environments.suite_helpers import SmallEnv, make_load

SPLITS = ('all', 'test', 'train')
"""Names of the splits. 'test': every fifth image; 'train': the other images."""


@functools.cache
def load_digits(split: str = 'all') -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of a split.

    Args:
        split: one of :data:`SPLITS`.

    Returns:
        Images, float32 ``[N, 1, 8, 8]`` of 17 shades from 0 (paper) to 1 (ink), and labels, int64 ``[N]`` from 0 to 9;
        both read-only. N is 1,797; 360 for 'test' and 1,437 for 'train'.

    Raises:
        ConfError: scikit-learn is not installed.
        ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f'split: expected one of {SPLITS}, found {split!r}')
    images, labels = digit_images()
    is_test = np.arange(len(labels)) % 5 == 0
    chosen = {'all': np.ones_like(is_test), 'test': is_test, 'train': ~is_test}[split]
    images, labels = images[chosen], labels[chosen]
    images.setflags(write=False)
    labels.setflags(write=False)
    return images, labels


class DigitsEnv(SmallEnv):
    """Shows a uniformly random digit at each step; the action is a guess of the digit.

    The reward is 1 if the action is the digit shown before it, otherwise 0. Episodes are truncated. The optimal return
    is ``num_steps``; random guesses get a tenth of it.

    Args:
        split: the images to use: one of :data:`SPLITS`.
        with_label: observe ``{'image': float32 (1, 8, 8), 'label': int64 ()}`` instead of the image alone.
        num_steps: number of steps of an episode, which has one more image.

    Raises:
        ConfError: scikit-learn is not installed.
        ValueError: an argument is out of range.
    """

    def __init__(self, split: str = 'train', with_label: bool = False, num_steps: int = 15):
        if num_steps < 1:
            raise ValueError(f'DigitsEnv.num_steps: expected at least 1, found {num_steps}')
        self._images, self._labels = load_digits(split)
        image = spaces.Box(0, 1, self._images.shape[1:], np.float32)
        self.observation_space: spaces.Space = image
        if with_label:
            self.observation_space = spaces.Dict({'image': image, 'label': spaces.Discrete(10)})
        self.action_space = spaces.Discrete(10)
        self.num_steps = num_steps
        self._with_label = with_label
        self._shown = 0

    def _observe(self) -> Any:
        """Draw the next digit and return it."""
        self._shown = int(self.np_random.integers(len(self._images)))
        image = self._images[self._shown].copy()
        return {'image': image, 'label': self._labels[self._shown]} if self._with_label else image

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(int(action) == self._labels[self._shown])
        return self._observe(), reward, False, False, {}


load = make_load(__name__, 'environment of digits', {'Digits': DigitsEnv})
