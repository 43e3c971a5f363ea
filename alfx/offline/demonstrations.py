"""Demonstrations: recorded episodes that an algorithm uses in its own way."""
from collections.abc import Sequence
from typing import Any

from alfx.data_structures import Experience, time_step_spec
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError, problem_at
from alfx.offline import dataset_loading
from alfx.offline.buffer import make_buffer
from alfx.offline.dataset_files import Dataset


def dataset_names(names: str | Sequence[str], owner: str) -> tuple[str, ...]:
    """Return the argument ``demonstrations`` of the class ``owner`` as a tuple.

    Raises:
        ConfError: it contains no path.
    """
    found = (names, ) if isinstance(names, str) else tuple(names)
    if not found or not all(isinstance(name, str) and name for name in found):
        raise ConfError([problem_at(owner, 'demonstrations', f'expected the path of a dataset, or several, found '
                                    f'{names!r}', 'record a dataset with alfx.bin.record (docs/offline.md)')])
    return found


class Demonstrations:
    """Datasets that are read once the root algorithm is known, and transformed like its collected data.

    Args:
        names: paths of datasets, as in ``TrainerConfig.offline_buffer_dir``.
        owner: name of the class with the argument ``demonstrations``, for messages.

    Raises:
        ConfError: ``names`` contains no path.
    """

    def __init__(self, names: str | Sequence[str], owner: str):
        self._names = dataset_names(names, owner)
        self._buffer: ReplayBuffer | None = None
        self._root: Any = None

    def load(self, root: Any) -> list[Dataset]:
        """Read the datasets for the environment and the data transformer of ``root``.

        Args:
            root: an :class:`~alfx.algorithms.rl_algorithm.RLAlgorithm` with an environment.

        Returns:
            The datasets.

        Raises:
            DatasetError: a dataset is missing or damaged, or does not fit the environment.
        """
        env = root.environment
        specs = env.observation_spec(), env.action_spec(), env.reward_spec()
        datasets = dataset_loading.load(self._names, None, *specs, batch_length=2)
        step_spec = time_step_spec(*specs)
        transformer = root.data_transformer
        self._buffer = make_buffer(
            datasets, Experience(step_spec, step_spec.prev_action, ()), name='demonstrations', new_priority_period=0,
            keep_episodic_info=True if getattr(transformer, 'needs_episodic_info', False) else None)
        self._root = root
        return datasets

    def draw(self, batch_size: int, length: int) -> Experience:
        """Sample sequences ``[batch_size, length, ...]``, transformed like the collected data of the root algorithm."""
        assert self._buffer is not None, 'call load() first'
        experience, batch_info = self._buffer.get_batch(batch_size, length)
        return self._root.transform_batch(experience, batch_info, self._buffer)
