"""Reader of datasets of Minari (https://minari.farama.org), if the package is installed.

Its episodes have T + 1 observations and T actions, like those of alfx. Its actions are in the units of the gymnasium
environment; if the environment of a run uses actions in [-1, 1], they are rescaled by the bounds of the action space.
Text observations are left out. Images ``(H, W, C)`` are transposed if the environment of a run transposes them.
"""
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from gymnasium import spaces

from alfx import nest
from alfx.environments.image_spaces import as_nest, is_channels_last_image
from alfx.offline.dataset_episodes import Episodes, joined
from alfx.offline.dataset_files import Dataset, DatasetError, fingerprint
from alfx.utils.extras import pip_install

PREFIX = 'minari:'
_log = logging.getLogger(__name__)


def read(name: str) -> Dataset:
    """Read a dataset.

    Args:
        name: ``minari:ID`` of a dataset on this machine; ``minari list local`` lists them.

    Raises:
        DatasetError: Minari is not installed, there is no such dataset, or it cannot be read.
    """
    identity = name.removeprefix(PREFIX)
    try:
        import minari
        source = minari.load_dataset(identity)
    except ImportError as error:  # Minari itself, or a package that it needs to read files
        raise DatasetError(f'{name}: {error}', pip_install('offline')) from error
    except FileNotFoundError as error:
        local = ', '.join(sorted(minari.list_local_datasets())) or 'none'
        raise DatasetError(f'{name}: there is no such dataset on this machine; found {local}',
                           f'minari download {identity}') from error
    except (OSError, ValueError, KeyError) as error:
        raise DatasetError(f'{name}: cannot be read: {error}', f'minari download {identity}') from error
    leaves = nest.flatten_with_path(as_nest(source.observation_space))
    texts = [path for path, space in leaves if isinstance(space, spaces.Text)]
    if texts:
        _log.warning('%s: text parts are left out: %s', name, nest.listed(texts))
    try:
        parts = [_episode(name, number, episode, texts) for number, episode in enumerate(source.iterate_episodes())]
    except KeyError as error:
        raise DatasetError(f'{name}: Minari cannot read {error}', 'if the name of a part contains "/", which Minari '
                           f'cannot store, create the dataset with another name; otherwise minari download {identity}'
                           ) from error
    except OSError as error:
        raise DatasetError(f'{name}: is damaged: {error}', f'minari download {identity}') from error
    if not parts:
        raise DatasetError(f'{name}: has no episodes', 'choose another dataset')
    episodes = joined(parts)
    about: dict[str, Any] = {'minari': identity, 'action_bounds': _bounds(source.action_space)}
    if images := [path for path, space in leaves if is_channels_last_image(space)]:
        about['channels_last'] = images
    if source.env_spec is not None:
        about['env_name'] = source.env_spec.id
    if reference := _reference(source):
        about['reference_returns'] = reference
    return Dataset(name, episodes, about, fingerprint(episodes))


def reference_returns(name: str) -> list[float] | None:
    """Return the returns of a random and of an expert policy; ``None`` if they or the dataset are missing."""
    try:
        import minari
        return _reference(minari.load_dataset(name.removeprefix(PREFIX)))
    except (ImportError, OSError, ValueError, KeyError):
        return None


def _reference(source: Any) -> list[float] | None:
    metadata, keys = source.storage.metadata, ('ref_min_score', 'ref_max_score')
    return [float(metadata[key]) for key in keys] if all(key in metadata for key in keys) else None


def _episode(name: str, number: int, episode: Any, left_out: Sequence[str]) -> Episodes:
    """Return one episode of a dataset without the parts ``left_out`` of the observation."""
    count = len(episode.rewards)
    discount = np.ones(count, np.float32)
    observation, action = ({path: np.asarray(x) for path, x in nest.flatten_with_path(
        part, lambda x: not isinstance(x, (dict, tuple)))  # lists are arrays or strings
        if part is episode.actions or path not in left_out} for part in (episode.observations, episode.actions))
    rows = {f'observation {path}': len(x) - 1 for path, x in observation.items()}
    rows.update({f'action {path}': len(x) for path, x in action.items()})
    wrong = {what: n for what, n in rows.items() if n != count}
    if count and wrong and all(what.startswith('observation') and n == count - 1 for what, n in wrong.items()):
        raise DatasetError(f'{name}: episode {number}: expected {count + 1} observations for {count} actions, found '
                           f'{count}: the last one, after the last action, is missing',
                           'record the dataset with Minari 0.5 or newer, or choose another dataset')
    if not count or wrong or np.any(episode.terminations[:-1]) or np.any(episode.truncations[:-1]):
        raise DatasetError(f'{name}: episode {number}: expected T + 1 observations, T actions and T rewards, and no '
                           f'termination or truncation before its end; found {count} rewards' +
                           ''.join(f', {n} of {what.strip()}' for what, n in wrong.items()), 'remove or split it')
    if episode.terminations[-1]:
        discount[-1] = 0.0
    return Episodes(observation, action, np.asarray(episode.rewards), discount, np.array([count]))


def _bounds(space: Any) -> dict[str, list[Any]]:
    """Return the lower and upper bounds of the continuous actions with finite bounds, by path."""
    from alfx.environments.spaces import tensor_spec_from_gym_space
    leaves = nest.flatten_with_path(tensor_spec_from_gym_space(space))
    return {path: [np.broadcast_to(x, spec.shape).tolist() for x in (spec.minimum, spec.maximum)]
            for path, spec in leaves if spec.is_continuous and spec.is_bounded()}
