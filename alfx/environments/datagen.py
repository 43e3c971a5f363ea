"""Data sets for supervised learning, without environments: functions that return ``(train_loader, test_loader)``.

A conf binds one of them to ``data_creator``, and another one, or the same in another scope, to
``data_creator_outlier``::

    FuncParVIAlgorithm.data_creator = @inlier/load_digits
    FuncParVIAlgorithm.data_creator_outlier = @outlier/load_digits
    inlier/load_digits.label_idx = (0, 1, 2, 3, 4, 5)
    outlier/load_digits.label_idx = (6, 7, 8, 9)
"""
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alfx.gin_utils import ConfError, configurable
from alfx.utils.extras import pip_install
from alfx.utils.tensor_loader import TensorLoader

Loaders = tuple[TensorLoader, TensorLoader]


@functools.cache
def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """Return the 1,797 images of handwritten digits that come with scikit-learn.

    Returns:
        Images, float32 ``[1797, 1, 8, 8]`` from 0 (paper) to 1 (ink), and labels, int64 ``[1797]``; both read-only.

    Raises:
        ConfError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfError('the digit images come with scikit-learn, which is not installed',
                        pip_install('digits')) from error
    data = datasets.load_digits()
    images, labels = (data.images / 16).astype(np.float32)[:, None], data.target.astype(np.int64)
    images.setflags(write=False)
    labels.setflags(write=False)
    return images, labels


@configurable
def load_digits(label_idx: Sequence[int] | None = None, train_bs: int = 100, test_bs: int = 500) -> Loaders:
    """Return loaders of handwritten digits, images ``[1, 8, 8]`` from 0 to 1 (UCI, https://doi.org/10.24432/C50P49).

    Every fifth of the 1,797 images is a test image.

    Args:
        label_idx: the digits to use, which become the classes 0, 1, ... in this order; ``None`` for all.
        train_bs: batch size for training.
        test_bs: batch size for tests.

    Raises:
        ConfError: scikit-learn is not installed, or ``label_idx`` is not a sequence of distinct digits.
    """
    chosen = tuple(range(10)) if label_idx is None else tuple(label_idx)
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(10)):
        raise ConfError(f'load_digits.label_idx: expected distinct digits from 0 to 9, found {label_idx!r}')
    images, labels = (torch.tensor(x) for x in digit_images())
    classes = torch.full((10, ), -1)
    classes[list(chosen)] = torch.arange(len(chosen))
    targets, is_test = classes[labels], torch.arange(len(labels)) % 5 == 0
    train, test = ((targets >= 0) & ~is_test, (targets >= 0) & is_test)
    return (TensorLoader(images[train], targets[train], train_bs),
            TensorLoader(images[test], targets[test], test_bs, shuffle=False))


@configurable
def load_test(train_bs: int = 50, test_bs: int = 50, input_dim: int = 3, output_dim: int = 1, size: int = 1000,
              noise_stddev: float = 0.0, seed: int = 0) -> Loaders:
    """Return loaders of a linear regression problem with standard normal inputs and weights.

    Args:
        train_bs: batch size for training.
        test_bs: batch size for tests.
        input_dim: number of inputs.
        output_dim: number of outputs.
        size: number of training samples, and of test samples.
        noise_stddev: standard deviation of the noise on the outputs.
        seed: seed of the weights, the inputs and the noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(input_dim, output_dim)
    inputs = normal(2 * size, input_dim)
    targets = inputs @ weight + noise_stddev * normal(2 * size, output_dim)
    return (TensorLoader(inputs[:size], targets[:size], train_bs),
            TensorLoader(inputs[size:], targets[size:], test_bs, shuffle=False))


@configurable
def load_curve(train_bs: int = 80, test_bs: int = 80, size: int = 80, noise_stddev: float = 0.1, seed: int = 0
               ) -> Loaders:
    """Return loaders of regression on ``y = x^3`` with a gap: x is uniform in [-1, -0.5] and [0.5, 1].

    Args:
        train_bs: batch size for training.
        test_bs: batch size for tests.
        size: number of training samples, and of test samples.
        noise_stddev: standard deviation of the noise on y.
        seed: seed of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 0.5 + 0.5 * torch.rand(2 * size, 1, generator=generator)
    x = torch.where(torch.rand(2 * size, 1, generator=generator) < 0.5, x, -x)
    y = x**3 + noise_stddev * torch.randn(2 * size, 1, generator=generator)
    return (TensorLoader(x[:size], y[:size], train_bs), TensorLoader(x[size:], y[size:], test_bs, shuffle=False))
