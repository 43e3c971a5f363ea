"""A dataset, and what is told of it."""
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alfx.gin_utils import ConfError
from alfx.offline.dataset_episodes import Episodes


class DatasetError(ConfError):
    """Stored experience is missing, damaged, or not what was asked for. The message begins with where it is."""


class Dataset(NamedTuple):
    """Episodes, and what is known of them.

    Attributes:
        name: what it was asked for by.
        episodes: its contents.
        about: further facts, which can be written as JSON: where it comes from, ``reference_returns``, ``env_name``.
        fingerprint: of its contents; the same wherever they lie.
        is_vouched_for: whether something has been there to compare the contents with.
    """

    name: str
    episodes: Episodes
    about: dict[str, Any]
    fingerprint: str
    is_vouched_for: bool = False

    def reference_returns(self) -> tuple[float, float] | None:
        """What a random and an expert policy get, if that is known and one is above the other."""
        found = self.about.get('reference_returns')
        return tuple(found) if found and found[0] < found[1] else None


def normalized_score(average_return: float, reference_returns: Sequence[float]) -> float:
    """0 for the return of a random policy, 100 for that of an expert (Fu et al. 2020, arXiv:2004.07219).

    Raises:
        ValueError: the expert is not better.
    """
    low, high = reference_returns
    if not low < high:
        raise ValueError(f'reference returns: expected that of a random policy and a higher one, found {low}, {high}')
    return 100.0 * (average_return - low) / (high - low)


def arrays_of(episodes: Episodes) -> dict[str, np.ndarray]:
    """All arrays by name: ``observation``, ``action.arm``, ``reward``, ..."""
    named = {f'{field}.{path}' if path else field: x for field in ('observation', 'action')
             for path, x in getattr(episodes, field).items()}
    return {**named, 'reward': episodes.reward, 'discount': episodes.discount, 'lengths': episodes.lengths}


def episodes_of(arrays: dict[str, np.ndarray]) -> Episodes:
    """The inverse of :func:`arrays_of`.

    Raises:
        KeyError: one is missing, or none is an observation or an action.
    """
    def of(field: str) -> dict[str, np.ndarray]:
        found = {name[len(field) + 1:]: x for name, x in arrays.items() if name.split('.')[0] == field}
        if not found:
            raise KeyError(field)
        return found

    return Episodes(of('observation'), of('action'), arrays['reward'], arrays['discount'], arrays['lengths'])


def check_alike(datasets: Sequence[Dataset]) -> None:
    """Refuse to join datasets whose arrays have other names, types or shapes, or whose actions are in other units.

    Raises:
        DatasetError: names the first difference.
    """
    def forms(dataset: Dataset) -> dict[str, str]:
        units = {f'the range of action {path or "values"}': f'from {low} to {high}'
                 for path, (low, high) in dataset.about.get('action_bounds', {}).items()
                 if set(np.ravel(low)) != {-1.0} or set(np.ravel(high)) != {1.0}}  # otherwise as where none is named
        return {**{name: f'{x.dtype} {x.shape[1:]}' for name, x in arrays_of(dataset.episodes).items()}, **units}

    first = forms(datasets[0])
    for dataset in datasets[1:]:
        own = forms(dataset)
        for name in sorted(first.keys() | own.keys()):
            if first.get(name) != own.get(name):
                found, expected = (x.get(name, 'not named') for x in (own, first))
                raise DatasetError(f'{dataset.name}: {name} is {found}, in {datasets[0].name} it is {expected}',
                                   'only datasets of one environment, with actions in the same units, can be joined')


def digest(array: np.ndarray) -> str:
    """SHA-256 of type, shape and contents."""
    array = np.ascontiguousarray(array)
    found = hashlib.sha256(f'{array.dtype.str}{array.shape}'.encode())
    found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def fingerprint_of(digests: dict[str, str]) -> str:
    """Of a dataset, given the :func:`digest` of each of its arrays by name."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def fingerprint(episodes: Episodes) -> str:
    """Of a dataset: the same for the same numbers."""
    return fingerprint_of({name: digest(x) for name, x in arrays_of(episodes).items()})
