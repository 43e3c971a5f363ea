"""Checks that stored experience can be used for training like collected experience."""
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.offline.dataset_episodes import Episodes
from alfx.offline.dataset_files import Dataset, DatasetError
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec, TensorSpec

logger = logging.getLogger(__name__)
_TOLERANCE = 1e-4  # fraction of the range of an action that rounding may exceed
_ROWS_AT_ONCE = 2**15


def check_consistent(dataset: Dataset) -> None:
    """Raise unless the arrays of a dataset agree with each other and all numbers are finite, also in float32.

    Raises:
        DatasetError: the message names the array, and for bad numbers the episode and the step.
    """
    episodes, name = dataset.episodes, dataset.name
    lengths = episodes.lengths
    if lengths.ndim != 1 or lengths.dtype.kind not in 'iu' or not len(lengths):
        raise DatasetError(f'{name}: expected the lengths of one episode or more, found {_describe(lengths)}',
                           'record some episodes')
    if lengths.min() < 1:
        raise DatasetError(f'{name}: episode {int(lengths.argmin())} has {int(lengths.min())} actions; expected at '
                           'least 1', 'remove it')
    total, count = int(lengths.sum()), len(lengths)
    arrays = [('reward', episodes.reward, total, 'actions'), ('discount', episodes.discount, total, 'actions')]
    arrays += [(_name('action', path), x, total, 'actions') for path, x in episodes.action.items()]
    arrays += [(_name('observation', path), x, total + count, 'actions and one more observation per episode')
               for path, x in episodes.observation.items()]
    for what, array, rows, unit in arrays:
        if not array.ndim or len(array) != rows:
            hint = ('each episode of T actions needs T + 1 observations: the final one is missing'
                    if what.startswith('observation') and array.ndim and len(array) == total else
                    'the number of rows does not match the lengths of the episodes')
            raise DatasetError(f'{name}: {what}: expected {rows} rows, for {count} episodes of {total} {unit}, found '
                               f'{_describe(array)}', hint)
        if array.dtype.kind not in 'fiub':
            raise DatasetError(f'{name}: {what}: expected numbers, found {_describe(array)}', 'convert it')
        bad = _first_bad(array)
        if bad is not None:
            episode, step = _episode_and_step(lengths + what.startswith('observation'), bad)
            raise DatasetError(f'{name}: {what}: NaN or infinite in episode {episode}, step {step}, as float32',
                               'remove that episode, or scale the numbers')
    if episodes.discount.min() < 0 or episodes.discount.max() > 1:
        raise DatasetError(f'{name}: discount: expected numbers from 0 to 1, found {episodes.discount.min()} to '
                           f'{episodes.discount.max()}', 'use 0 where an episode terminates, otherwise 1')
    early = np.setdiff1d(np.flatnonzero(np.asarray(episodes.discount) == 0), episodes.ends() - 1)
    if len(early):
        episode, step = _episode_and_step(lengths, int(early[0]))
        raise DatasetError(f'{name}: discount: 0 in episode {episode}, step {step}, but the episode has '
                           f'{int(lengths[episode])} actions; expected 0 only at the last one, where it terminates',
                           'split the episode there, or use another discount')
    for path, bounds in dataset.about.get('action_bounds', {}).items():
        _check_bounds(f"{name}: action_bounds[{path!r}]", bounds, episodes.action.get(path))


def _check_bounds(where: str, bounds: Any, action: np.ndarray | None) -> None:
    """Raise unless ``bounds`` are the lower and the upper bounds of actions ``[N, ...]``."""
    try:
        low, high = (np.asarray(x, np.float64) for x in bounds)
    except (TypeError, ValueError):
        low = high = np.full((), np.nan)
    fits = action is not None and low.shape == high.shape == action.shape[1:]
    if not fits or not (np.isfinite(high - low) & (low <= high)).all():
        shape = 'a recorded action' if action is None else f'[low, high], finite and of shape {action.shape[1:]}'
        raise DatasetError(f'{where}: expected {shape}, with low <= high, found {bounds}',
                           'correct them in the metadata of the dataset, or record it again')


def fitted(dataset: Dataset, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
           reward_spec: TensorSpec) -> Dataset:
    """Return the dataset for a run with these specs; actions that exceed their bounds by rounding errors are clipped.

    Args:
        dataset: a consistent dataset.
        observation_spec: spec of the environment's observation, before any data transformer.
        action_spec: spec of the environment's action.
        reward_spec: spec of the environment's reward.

    Raises:
        DatasetError: the message lists each leaf that differs, with the expected and the found value.
    """
    dataset = _in_layout_of(observation_spec, reward_spec, _in_units_of(action_spec, dataset))
    episodes, name = dataset.episodes, dataset.name
    problems = [*_differences('observation', episodes.observation, observation_spec),
                *_differences('action', episodes.action, action_spec)]
    problems = problems or [*_bounds_problems(dataset.about, action_spec)]
    if episodes.reward.shape[1:] != tuple(reward_spec.shape):
        problems.append(f'reward: expected {_numbers(tuple(reward_spec.shape))} a step, found '
                        f'{_numbers(episodes.reward.shape[1:])}')
    if problems:
        raise DatasetError(f'{name}: does not fit the environment of this run:\n  ' + '\n  '.join(problems),
                           'choose the environment, with its wrappers, that it was recorded in, or another dataset')
    bounded = {path: _within_bounds(name, _name('action', path), episodes.action[path], spec)
               for path, spec in nest.flatten_with_path(action_spec)}
    return dataset._replace(episodes=episodes._replace(action=bounded))


def _in_units_of(action_spec: NestedTensorSpec, dataset: Dataset) -> Dataset:
    """Rescale actions recorded in the units of a gymnasium environment to [-1, 1] where the spec has these bounds."""
    bounds, action = dataset.about.get('action_bounds', {}), dict(dataset.episodes.action)
    for path, spec in nest.flatten_with_path(action_spec):
        if path not in bounds or path not in action or not isinstance(spec, BoundedTensorSpec):
            continue
        low, high = (np.asarray(x, np.float64) for x in bounds[path])
        is_unit = np.all(spec.minimum == -1) and np.all(spec.maximum == 1)
        if is_unit and low.shape == tuple(spec.shape) and not (np.all(low == -1) and np.all(high == 1)):
            half = np.where(high > low, high - low, np.inf) / 2  # the action between equal bounds does not matter
            action[path] = ((action[path] - (low + high) / 2) / half).astype(np.float32)
    return dataset._replace(episodes=dataset.episodes._replace(action=action))


def _in_layout_of(observation_spec: NestedTensorSpec, reward_spec: TensorSpec, dataset: Dataset) -> Dataset:
    """Transpose images ``(H, W, C)`` where the environment does so, and turn rewards ``[N, 1]`` into numbers."""
    observation, reward = dict(dataset.episodes.observation), dataset.episodes.reward
    specs = dict(nest.flatten_with_path(observation_spec))
    for path in dataset.about.get('channels_last', ()):
        if path in observation and observation[path].ndim == 4 and path in specs:
            turned = observation[path].transpose(0, 3, 1, 2)
            if turned.shape[1:] == tuple(specs[path].shape):  # environments transpose images of equal sides as well
                observation[path] = turned
    if reward.shape[1:] == (1, ) and reward_spec.ndim == 0:
        reward = reward[:, 0]
    return dataset._replace(episodes=dataset.episodes._replace(observation=observation, reward=reward))


def check_env_name(dataset: Dataset, env_name: str) -> None:
    """Log a warning if the dataset was recorded in another environment."""
    recorded = dataset.about.get('env_name')
    if recorded and env_name and recorded != env_name:
        logger.warning('%s was recorded in %s; this run uses %s', dataset.name, recorded, env_name)


def _differences(what: str, arrays: dict[str, np.ndarray], specs: NestedTensorSpec) -> Iterator[str]:
    wanted = dict(nest.flatten_with_path(specs))
    for path in sorted(wanted.keys() | arrays.keys()):
        name, spec, array = _name(what, path), wanted.get(path), arrays.get(path)
        if array is None:
            yield f'{name}: expected {spec}, found nothing'
        elif spec is None:
            yield f'{name}: expected nothing, found {_describe(array)}'
        elif array.shape[1:] != tuple(spec.shape):
            yield f'{name}: expected shape {tuple(spec.shape)}, found {array.shape[1:]}'
        elif not _is_convertible(array, np.dtype(spec.dtype_str)):
            yield f'{name}: expected {spec.dtype_str}, found {array.dtype}'
        elif spec.is_discrete and (limits := _range_problem(array, spec)) is not None:
            yield f'{name}: expected numbers from {limits[0]} to {limits[1]}, found {limits[2]} to {limits[3]}'


def _bounds_problems(about: dict[str, Any], action_spec: NestedTensorSpec) -> Iterator[str]:
    """Yield the continuous actions that were recorded with other bounds, so that their numbers mean something else."""
    recorded, converted = about.get('specs', {}).get('action', {}), about.get('action_bounds', {})
    for path, spec in nest.flatten_with_path(action_spec):
        if isinstance(spec, BoundedTensorSpec) and spec.is_continuous and path not in converted:
            low, high = (recorded.get(path, {}).get(name) for name in ('minimum', 'maximum'))
            if low is not None and not (np.allclose(low, spec.minimum) and np.allclose(high, spec.maximum)):
                yield (f'{_name("action", path)}: expected bounds from {spec.minimum.tolist()} to '
                       f'{spec.maximum.tolist()}, found actions recorded with bounds from {low} to {high}')


def _is_convertible(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether ``array`` has the same kind of number as ``dtype``, possibly with more bits."""
    if dtype.kind == 'f':
        return array.dtype.kind == 'f'
    if array.dtype.kind == 'f' or dtype == np.uint8 and array.dtype not in (np.uint8, bool):
        return False
    return array.dtype.kind in 'iub'


def _range_problem(array: np.ndarray, spec: TensorSpec) -> tuple[int, int, int, int] | None:
    """Return the limits of integers and their actual range, ``(low, high, minimum, maximum)``; ``None`` if within."""
    low, high = (0, 1) if spec.dtype == torch.bool else (np.iinfo(spec.dtype_str).min, np.iinfo(spec.dtype_str).max)
    if isinstance(spec, BoundedTensorSpec):
        low, high = int(np.min(spec.minimum)), int(np.max(spec.maximum))
        parts = (array[i:i + _ROWS_AT_ONCE] for i in range(0, len(array), _ROWS_AT_ONCE))
        if all(((rows >= spec.minimum) & (rows <= spec.maximum)).all() for rows in parts):
            return None
    least, most = int(array.min()), int(array.max())
    return None if low <= least and most <= high and not isinstance(spec, BoundedTensorSpec) else (low, high, least,
                                                                                                  most)


def _within_bounds(name: str, what: str, array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    if not isinstance(spec, BoundedTensorSpec) or not spec.is_continuous:
        return array
    low, high = (np.asarray(x, np.float64) for x in (spec.minimum, spec.maximum))
    count, most, is_far = 0, 0.0, False
    for start in range(0, len(array), _ROWS_AT_ONCE):
        rows = np.asarray(array[start:start + _ROWS_AT_ONCE])
        beyond = np.maximum(low - rows, rows - high)
        count += int((beyond > 0).reshape(len(rows), -1).any(1).sum())
        most = max(most, float(beyond.max()))
        is_far |= bool((beyond > _TOLERANCE * (high - low)).any())
    if not count:
        return array
    if is_far:
        raise DatasetError(f'{name}: {what}: {count} of {len(array)} are out of bounds, by up to {most:.4g}; '
                           f'expected {low.min():g} to {high.max():g}',
                           'the dataset was recorded with other bounds, or before actions were clipped')
    logger.warning('%s: %s: %d of %d are out of bounds, by up to %.2g: clipping them', name, what, count, len(array),
                   most)
    return np.clip(array, low, high).astype(array.dtype)


def _first_bad(array: np.ndarray) -> int | None:
    """Return the first row with a number that is not finite in float32."""
    if array.dtype.kind != 'f':
        return None
    for start in range(0, len(array), _ROWS_AT_ONCE):
        with np.errstate(over='ignore'):
            rows = np.asarray(array[start:start + _ROWS_AT_ONCE], np.float32)
        if not torch.isfinite(torch.from_numpy(rows.copy())).all():
            finite = np.isfinite(rows).reshape(len(rows), -1).all(1)
            return start + int(finite.argmin())
    return None


def _episode_and_step(lengths: np.ndarray, row: int) -> tuple[int, int]:
    """Return the episode and the step of a row."""
    ends = np.cumsum(lengths)
    episode = int(np.searchsorted(ends, row, side='right'))
    return episode, row - int(ends[episode] - lengths[episode])


def _name(field: str, path: str) -> str:
    return f'{field}.{path}' if path else field


def _numbers(shape: tuple[int, ...]) -> str:
    return 'one number' if not shape else f'an array of shape {shape}'


def _describe(array: np.ndarray) -> str:
    return f'{array.dtype} of shape {array.shape}'


def check_long_enough(dataset: Dataset, episodes: Episodes, batch_length: int) -> None:
    """Raise if a dataset has no sequence of ``batch_length`` steps.

    Raises:
        DatasetError: the message contains the length of the longest episode.
    """
    longest = int(episodes.lengths.max()) + 1
    if longest < batch_length:
        raise DatasetError(f'{dataset.name}: its longest episode has {longest} steps, fewer than a sequence to train '
                           f'on: TrainerConfig.mini_batch_length = {batch_length}',
                           'use shorter sequences, or load more steps (TrainerConfig.offline_buffer_length)')
