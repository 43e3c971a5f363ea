"""Checks of the results of environments: finite rewards and observations, valid flags, values that the space allows.

Most are for natively batched environments. alfx's own vector environments check each environment separately
(:mod:`alfx.environments.environment_group`).
"""
import logging
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfx import nest
from alfx.environments.environment_errors import EnvironmentStepError
from alfx.environments.spaces import flatten_sample, flatten_space
from alfx.tensor_specs import NestedTensor, NestedTensorSpec

_log = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()
WRONG_VALUE = 'return observations that observation_space contains, or declare a space that fits them'
INFINITE = 'a network turns it into NaN: limit it with a wrapper in gym_env_wrappers'
_FIRST_CALLS = 64
_CALLS_PER_CHECK = 256  # a check of an environment takes as long as a few steps of a simple one


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


def is_check_due(call: int) -> bool:
    """Return whether a step compares the observations with their space: the first steps do, then a few of them.

    Args:
        call: number of the step, from 1.
    """
    return call <= _FIRST_CALLS or call % _CALLS_PER_CHECK == 0


def described_outside(space: spaces.Space, value: Any) -> str:
    """Return a description of the first number in ``value`` that ``space`` does not allow; '' if there is none.

    Args:
        space: a fundamental space.
        value: one sample or a batch ``[B, ...]`` of samples, of any dtype.
    """
    low: Any
    high: Any
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.MultiBinary):
        low, high = 0, 1
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        low, high = space.start, space.start + (space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
    else:
        return ''
    array, dtype = np.asarray(value), np.dtype(space.dtype)
    if array.dtype == dtype and dtype.kind in 'bu' and isinstance(space, spaces.Box) and _is_full(space):
        return ''  # images
    if array.dtype.kind not in 'biuf':
        return f'{array.dtype} values, which its space {space} does not allow' if array.dtype.kind in 'cmMUS' else ''
    wrong = (array < low) | (array > high)
    if dtype.kind != 'f' and array.dtype.kind == 'f':
        wrong |= array != np.floor(array)  # also NaN
    if not wrong.any():
        return ''
    found = array[wrong].flat[0]
    place = ''.join(f'[{i}]' for i in np.argwhere(wrong)[0])
    return f'{found}{f" (at {place})" if place else ""}, which its space {space} does not allow'


def check_values(observation: Any, space: spaces.Space, during: str, name: str) -> None:
    """Check that conversion to the dtypes of ``space`` does not change a batch of observations.

    Raises:
        EnvironmentStepError: it does; the message has the first value that ``space`` does not allow.
    """
    for (path, leaf), values in zip(flatten_space(space, 'observation'), flatten_sample(space, observation)):
        if not np.issubdtype(leaf.dtype, np.floating) and (wrong := described_outside(leaf, values)):
            raise EnvironmentStepError(None, name, during, f'{path} contains {wrong}', hint=WRONG_VALUE)


def _is_full(space: spaces.Box) -> bool:
    """Return whether ``space`` contains all values of its dtype, bool or unsigned."""
    most = 1 if space.dtype == bool else np.iinfo(space.low.dtype).max  # type: ignore[type-var]
    return bool((space.low == 0).all() and (space.high == most).all())


def check_observation(observation: NestedTensor, spec: NestedTensorSpec, batch_size: int, during: str,
                      name: str) -> None:
    """Check that an observation ``[B, ...]`` has the shapes of its spec and no NaN, which an update would spread.

    Infinity is logged.

    Raises:
        EnvironmentStepError: there is a NaN (the message names the first such environment), or a part of the
            observation does not have the shape of its spec.
    """
    for (path, leaf), part in zip(nest.flatten_with_path(observation), nest.flatten(spec)):
        _check_shape(leaf, (batch_size, *part.shape), f'their observation{f".{path}" if path else ""}', during, name)
        # the sum takes a fraction of the time; if it overflows, the second check decides
        if leaf.dtype.is_floating_point and not torch.isfinite(leaf.sum()) and not torch.isfinite(leaf).all():
            where = f"its observation{f'.{path}' if path else ''} contains"
            wrong = torch.isnan(leaf) if torch.isnan(leaf).any() else ~torch.isfinite(leaf)
            row = int(wrong.reshape(len(leaf), -1).any(1).int().argmax())
            if torch.isnan(leaf[row]).any():
                raise EnvironmentStepError(row, name, during, f'{where} NaN')
            warn_once(row, name, f'in {during}, {where} infinity', INFINITE)


def warn_once(index: int, name: str, wrong: str, hint: str) -> None:
    """Log what is wrong with environment ``index`` of ``name``, once in this process for each name and hint."""
    if (name, hint) not in _logged:
        _logged.add((name, hint))
        _log.warning('environment %d of %r: %s%s', index, name, wrong, f'; {hint}' if hint else '')
