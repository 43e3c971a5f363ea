"""From the names in a conf to datasets that a run can be trained on."""
import logging
from collections.abc import Sequence

from alfx.offline import dataset_checks
from alfx.offline import dataset_sources
from alfx.offline import dataset_statistics
from alfx.offline.dataset_files import Dataset, DatasetError
from alfx.offline.dataset_episodes import shortened
from alfx.tensor_specs import NestedTensorSpec, TensorSpec

logger = logging.getLogger(__name__)


def load(names: Sequence[str], num_steps: int | None, observation_spec: NestedTensorSpec,
         action_spec: NestedTensorSpec, reward_spec: TensorSpec, batch_length: int = 1,
         env_name: str = '') -> list[Dataset]:
    """Read datasets, check them, and tell in the log what they are like.

    Args:
        names: as :func:`alfx.offline.dataset_sources.read` takes them.
        num_steps: at most so many steps of each; ``None`` for all.
        observation_spec: of the environment, before any data transformer.
        action_spec: of the environment.
        reward_spec: likewise.
        batch_length: of the sequences to train on.
        env_name: the environment of the run, if that is known.

    Raises:
        DatasetError: one is missing or damaged, does not fit the environment, or is too short.
    """
    datasets = []
    for name in names:
        dataset = dataset_sources.read(name)
        if not dataset.is_vouched_for:
            logger.warning('%s: there is nothing to compare its contents with; if they have been changed, nobody knows',
                           name)
        dataset_checks.check_consistent(dataset)
        dataset_checks.check_env_name(dataset, env_name)
        dataset = dataset_checks.fitted(dataset, observation_spec, action_spec, reward_spec)
        episodes = shortened(dataset.episodes, num_steps)
        if not len(episodes.lengths):
            raise DatasetError(f'{name}: nothing is left of it with TrainerConfig.offline_buffer_length = {num_steps}',
                               'set it to 2 or more')
        dataset_checks.check_long_enough(dataset, episodes, batch_length)
        datasets.append(dataset._replace(episodes=episodes))
        for line in dataset_statistics.lines(datasets[-1]):
            logger.info('%s', line)
    return datasets
