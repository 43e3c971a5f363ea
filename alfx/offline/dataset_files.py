"""Datasets and their metadata."""
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alfx.gin_utils import ConfError
from alfx.offline.dataset_episodes import Episodes


class DatasetError(ConfError):
    """Stored experience is missing, damaged, or does not fit. The message begins with its location."""


class Dataset(NamedTuple):
    """Episodes and their metadata.

    Attributes:
        name: name or path by which the dataset was requested.
        episodes: the contents.
        about: metadata that can be written as JSON: the source, ``reference_returns``, ``env_name``.
        fingerprint: hash of the contents, independent of their location.
        is_verified: the contents were verified against a stored digest.
    """

    name: str
    episodes: Episodes
    about: dict[str, Any]
    fingerprint: str
    is_verified: bool = False

    def reference_returns(self) -> tuple[float, float] | None:
        """Return the returns of a random and an expert policy; ``None`` if they are unknown or the first is not lower.
        """
        found = self.about.get('reference_returns')
        return tuple(found) if found and found[0] < found[1] else None


def normalized_score(average_return: float, reference_returns: Sequence[float]) -> float:
    """Return the normalized score: 0 for a random policy, 100 for an expert (Fu et al. 2020, arXiv:2004.07219).

    Raises:
        ValueError: the return of the expert is not higher.
    """
    low, high = reference_returns
    if not low < high:
        raise ValueError('reference returns: expected the return of a random policy and a higher return, found '
                         f'{low}, {high}')
    return 100.0 * (average_return - low) / (high - low)


def arrays_of(episodes: Episodes) -> dict[str, np.ndarray]:
    """Return all arrays by name: ``observation``, ``action.arm``, ``reward``, ..."""
    named = {f'{field}.{path}' if path else field: x for field in ('observation', 'action')
             for path, x in getattr(episodes, field).items()}
    return {**named, 'reward': episodes.reward, 'discount': episodes.discount, 'lengths': episodes.lengths}


def episodes_of(arrays: dict[str, np.ndarray]) -> Episodes:
    """Return the episodes with these arrays; the inverse of :func:`arrays_of`.

    Raises:
        KeyError: an array is missing.
    """
    def of(field: str) -> dict[str, np.ndarray]:
        found = {name[len(field) + 1:]: x for name, x in arrays.items() if name.split('.')[0] == field}
        if not found:
            raise KeyError(field)
        return found

    lengths = arrays['lengths'].astype(np.int64, casting='safe')
    return Episodes(of('observation'), of('action'), arrays['reward'], arrays['discount'], lengths)


def check_alike(datasets: Sequence[Dataset]) -> None:
    """Raise unless the arrays of all datasets have the same names, types and shapes, and actions the same units.

    Raises:
        DatasetError: the message names the first difference.
    """
    def describe(dataset: Dataset) -> dict[str, str]:
        recorded = dataset.about.get('specs', {}).get('action', {})
        bounds = {path: [np.broadcast_to(spec[bound], spec['shape']).tolist() for bound in ('minimum', 'maximum')]
                  for path, spec in recorded.items() if 'float' in spec['dtype'] and 'minimum' in spec}
        units = {f'the range of action {path or "values"}': f'from {low} to {high}'
                 for path, (low, high) in (bounds | dataset.about.get('action_bounds', {})).items()
                 if set(np.ravel(low)) != {-1.0} or set(np.ravel(high)) != {1.0}}  # [-1, 1] is the default
        units |= {f'the layout of observation {path}': '(H, W, C)' for path in dataset.about.get('channels_last', ())}
        return {**{name: f'{"float" if x.dtype.kind == "f" else x.dtype} {x.shape[1:]}'
                   for name, x in arrays_of(dataset.episodes).items()}, **units}

    first = describe(datasets[0])
    for dataset in datasets[1:]:
        own = describe(dataset)
        for name in sorted(first.keys() | own.keys()):
            if first.get(name) != own.get(name):
                found, expected = (x.get(name, 'not given') for x in (own, first))
                raise DatasetError(f'{dataset.name}: {name} is {found}, in {datasets[0].name} it is {expected}',
                                   'only datasets of the same environment, with actions in the same units, can be '
                                   'joined')


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of the type, shape and contents of an array."""
    array = np.ascontiguousarray(array)
    found = hashlib.sha256(f'{array.dtype.str}{array.shape}'.encode())
    found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def fingerprint_of(digests: dict[str, str]) -> str:
    """Return the fingerprint of a dataset, given the :func:`digest` of each of its arrays by name."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def fingerprint(episodes: Episodes) -> str:
    """Return the fingerprint of a dataset; equal numbers have equal fingerprints."""
    return fingerprint_of({name: digest(x) for name, x in arrays_of(episodes).items()})
