"""What an environment that batches by itself has sent: numbers of each that can be learned from, or whose they are not.

What is in alfx's own vector environments is looked at one by one (:mod:`alfx.environments.environment_group`).
"""
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.environments.environment_errors import EnvironmentStepError
from alfx.tensor_specs import NestedTensor, NestedTensorSpec


def checked_rewards(rewards: Any, shape: tuple[int, ...], ignored: np.ndarray | None, name: str) -> np.ndarray:
    """The rewards of a step as an array.

    Args:
        rewards: of the step.
        shape: ``[B]`` or ``[B, K]``, which they must have.
        ignored: bool ``[B]``: those that will not be used; None for none.
        name: what the environment is called.

    Raises:
        EnvironmentStepError: they are no finite numbers; the message names the first environment of which that is so.
            Or there are not as many as there should be.
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
    if found.shape != shape:  # it would be stretched over the batch without a word
        raise EnvironmentStepError(None, name, during, f'{what} has shape {tuple(found.shape)}, expected {shape}')


def checked_flags(flags: Any, batch_size: int, what: str, name: str) -> np.ndarray:
    """``terminated`` or ``truncated`` as an array of bools ``[B]``.

    Raises:
        EnvironmentStepError: some are neither True nor False, or there are not ``batch_size`` of them.
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
    """Refuse NaN in an observation ``[B, ...]``, which would be in every parameter after an update, and other shapes.

    Raises:
        EnvironmentStepError: there is; the message names the first environment that sent it. Or a part of the
            observation does not have the shape of its spec for each environment.
    """
    for (path, leaf), part in zip(nest.flatten_with_path(observation), nest.flatten(spec)):
        _check_shape(leaf, (batch_size, *part.shape), f'their observation{f".{path}" if path else ""}', during, name)
        # a sum is NaN as well, in a fraction of the time; infinities of both signs are looked at again
        if leaf.dtype.is_floating_point and torch.isnan(leaf.sum()) and torch.isnan(leaf).any():
            row = int(torch.isnan(leaf).reshape(len(leaf), -1).any(1).int().argmax())
            raise EnvironmentStepError(row, name, during, f"its observation{f'.{path}' if path else ''} has NaN in it")
