"""Reader of datasets of Minari (https://minari.farama.org), if the package is installed.

Its episodes have T + 1 observations and T actions, like those of alfx. Its actions are in the units of the gymnasium
environment; if the environment of a run uses actions in [-1, 1], they are rescaled by the bounds of the action space.
"""
from typing import Any

import numpy as np

from alfx import nest
from alfx.offline.dataset_files import Dataset, DatasetError, fingerprint
from alfx.offline.dataset_episodes import Episodes, joined
from alfx.utils.extras import pip_install

PREFIX = 'minari:'


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
    try:
        parts = [_episode(name, number, episode) for number, episode in enumerate(source.iterate_episodes())]
    except (OSError, KeyError) as error:
        raise DatasetError(f'{name}: is damaged: {error}', f'minari download {identity}') from error
    if not parts:
        raise DatasetError(f'{name}: has no episodes', 'choose another dataset')
    episodes = joined(parts)
    about: dict[str, Any] = {'minari': identity, 'action_bounds': _bounds(source.action_space)}
    if source.env_spec is not None:
        about['env_name'] = source.env_spec.id
    metadata = source.storage.metadata
    if {'ref_min_score', 'ref_max_score'} <= metadata.keys():
        about['reference_returns'] = [float(metadata['ref_min_score']), float(metadata['ref_max_score'])]
    return Dataset(name, episodes, about, fingerprint(episodes))


def _episode(name: str, number: int, episode: Any) -> Episodes:
    """Return one episode of a dataset."""
    count = len(episode.rewards)
    discount = np.ones(count, np.float32)
    observation = {path: np.asarray(x) for path, x in nest.flatten_with_path(episode.observations)}
    action = {path: np.asarray(x) for path, x in nest.flatten_with_path(episode.actions)}
    rows = {f'observation {path}': len(x) - 1 for path, x in observation.items()}
    rows.update({f'action {path}': len(x) for path, x in action.items()})
    wrong = {what: n for what, n in rows.items() if n != count}
    if not count or wrong or np.any(np.asarray(episode.terminations[:-1])):
        raise DatasetError(f'{name}: episode {number}: expected T + 1 observations, T actions and T rewards, and no '
                           f'termination before its end; found {count} rewards' +
                           ''.join(f', {n} of {what.strip()}' for what, n in wrong.items()), 'remove it')
    if episode.terminations[-1]:
        discount[-1] = 0.0
    return Episodes(observation, action, np.asarray(episode.rewards), discount, np.array([count]))


def _bounds(space: Any) -> dict[str, list[Any]]:
    """Return the lower and upper bounds of the continuous actions with finite bounds, by path."""
    from alfx.environments.spaces import action_spec_from_gym_space
    found = {}
    for path, spec in nest.flatten_with_path(action_spec_from_gym_space(space)):
        if spec.is_continuous and spec.is_bounded():
            found[path] = [np.broadcast_to(x, spec.shape).tolist() for x in (spec.minimum, spec.maximum)]
    return found
