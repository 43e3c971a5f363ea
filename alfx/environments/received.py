"""Checks of the results of natively batched environments: finite rewards, valid flags, observations without NaN.

The environments in alfx's own vector environments are checked one by one (:mod:`alfx.environments.environment_group`).
"""
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.environments.environment_errors import EnvironmentStepError
from alfx.tensor_specs import NestedTensor, NestedTensorSpec


def checked_rewards(rewards: Any, shape: tuple[int, ...], ignored: np.ndarray | None, name: str) -> np.ndarray:
    """Return the rewards of a step as an array.

    Args:
        rewards: rewards of the step.
        shape: expected shape, ``[B]`` or ``[B, K]``.
        ignored: environments whose reward is not used, bool ``[B]``; ``None``: none.
        name: name of the environments in messages.

    Raises:
        EnvironmentStepError: a reward is not a finite number (the message names the first such environment), or the
            shape is wrong.
    """
    array = np.asarray(rewards)
    _check_shape(array, shape, 'their reward', 'step()', name)
    if array.dtype.kind not in 'fiub':
        row = next((i for i, x in enumerate(rewards) if not isinstance(x, (int, float, np.number, np.ndarray))), None)
        found = array if row is None else rewards[row]
        raise EnvironmentStepError(row, name, 'step()', f'its reward is {found!r}, expected a number')
    if array.dtype.kind == 'f':
        wrong = ~np.isfinite(array.reshape(len(array), -1)).all(1)
        if ignored is not None:
            wrong &= ~ignored
        if wrong.any():
            row = int(wrong.argmax())
            raise EnvironmentStepError(row, name, 'step()', f'its reward is {array[row]!r}, expected a finite number')
    return array


def _check_shape(found: Any, shape: tuple[int, ...], what: str, during: str, name: str) -> None:
    if found.shape != shape:  # it would be broadcast over the batch silently
        raise EnvironmentStepError(None, name, during, f'{what} has shape {tuple(found.shape)}, expected {shape}')


def checked_flags(flags: Any, batch_size: int, what: str, name: str) -> np.ndarray:
    """Return ``terminated`` or ``truncated`` as a bool array ``[B]``.

    Raises:
        EnvironmentStepError: some are neither True nor False, or the shape is wrong.
    """
    array = np.asarray(flags)
    _check_shape(array, (batch_size, ), what, 'step()', name)
    if array.dtype == bool:
        return array
    wrong = [i for i, flag in enumerate(array.tolist()) if isinstance(flag, str) or flag not in (0, 1)]
    if wrong:
        raise EnvironmentStepError(wrong[0], name, 'step()', f'{what} is {array.tolist()[wrong[0]]!r}, expected True '
                                   'or False')
    return array.astype(bool)


def check_observation(observation: NestedTensor, spec: NestedTensorSpec, batch_size: int, during: str,
                      name: str) -> None:
    """Check that an observation ``[B, ...]`` has the shapes of its spec and no NaN, which an update would spread.

    Raises:
        EnvironmentStepError: there is a NaN (the message names the first such environment), or a part of the
            observation does not have the shape of its spec.
    """
    for (path, leaf), part in zip(nest.flatten_with_path(observation), nest.flatten(spec)):
        _check_shape(leaf, (batch_size, *part.shape), f'their observation{f".{path}" if path else ""}', during, name)
        # the sum is NaN too and takes a fraction of the time; infinities of both signs need the second check
        if leaf.dtype.is_floating_point and torch.isnan(leaf.sum()) and torch.isnan(leaf).any():
            row = int(torch.isnan(leaf).reshape(len(leaf), -1).any(1).int().argmax())
            raise EnvironmentStepError(row, name, during, f"its observation{f'.{path}' if path else ''} contains NaN")
