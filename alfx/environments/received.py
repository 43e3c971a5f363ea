"""What an environment that batches by itself has sent: numbers that can be learned from, or whose they are not.

What is in alfx's own vector environments is looked at one by one (:mod:`alfx.environments.environment_group`).
"""
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.environments.errors import EnvironmentStepError
from alfx.tensor_specs import NestedTensor


def checked_rewards(rewards: Any, ignored: np.ndarray | None, name: str) -> np.ndarray:
    """The rewards of a step as an array.

    Args:
        rewards: ``[B]`` or ``[B, K]``.
        ignored: bool ``[B]``: those that will not be used; None for none.
        name: what the environment is called.

    Raises:
        EnvironmentStepError: they are no finite numbers; the message names the first environment of which that is so.
    """
    array = np.asarray(rewards)
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


def checked_flags(flags: Any, what: str, name: str) -> np.ndarray:
    """``terminated`` or ``truncated`` as an array of bools ``[B]``.

    Raises:
        EnvironmentStepError: some are neither True nor False.
    """
    array = np.asarray(flags)
    if array.dtype == bool:
        return array
    wrong = [i for i, flag in enumerate(array.tolist()) if isinstance(flag, str) or flag not in (0, 1)]
    if wrong:
        raise EnvironmentStepError(wrong[0], name, 'step()', f'{what} is {array.tolist()[wrong[0]]!r}, expected True '
                                   'or False')
    return array.astype(bool)


def check_observation(observation: NestedTensor, during: str, name: str) -> None:
    """Refuse NaN in an observation ``[B, ...]``, which would be in every parameter after an update.

    Raises:
        EnvironmentStepError: there is; the message names the first environment that sent it.
    """
    for path, leaf in nest.flatten_with_path(observation):
        # a sum is NaN as well, in a fraction of the time; infinities of both signs are looked at again
        if leaf.dtype.is_floating_point and torch.isnan(leaf.sum()) and torch.isnan(leaf).any():
            row = int(torch.isnan(leaf).reshape(len(leaf), -1).any(1).int().argmax())
            raise EnvironmentStepError(row, name, during, f"its observation{f'.{path}' if path else ''} has NaN in it")
