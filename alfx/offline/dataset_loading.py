"""Loading of the datasets named in a conf."""
import logging
from collections.abc import Sequence

from alfx.offline import dataset_checks, dataset_sources, dataset_statistics
from alfx.offline.dataset_episodes import shortened
from alfx.offline.dataset_files import Dataset, DatasetError
from alfx.tensor_specs import NestedTensorSpec, TensorSpec

logger = logging.getLogger(__name__)


def load(names: Sequence[str], num_steps: int | None, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
         reward_spec: TensorSpec, batch_length: int = 1, env_name: str = '') -> list[Dataset]:
    """Read datasets, check them, and log their statistics.

    Args:
        names: names for :func:`alfx.offline.dataset_sources.read`.
        num_steps: maximum number of steps of each; ``None`` for all.
        observation_spec: spec of the environment's observation, before any data transformer.
        action_spec: spec of the environment's action.
        reward_spec: spec of the environment's reward.
        batch_length: length of the sequences for training.
        env_name: the environment of the run, if known.

    Raises:
        DatasetError: a dataset is missing or damaged, does not fit the environment, or is too short.
    """
    datasets = []
    for name in names:
        dataset = dataset_sources.read(name)
        if not dataset.is_verified:
            logger.warning('%s: there is no digest to verify its contents with; changes cannot be detected', name)
        dataset_checks.check_consistent(dataset)
        dataset_checks.check_env_name(dataset, env_name)
        dataset = dataset_checks.fitted(dataset, observation_spec, action_spec, reward_spec)
        episodes = shortened(dataset.episodes, num_steps)
        if not len(episodes.lengths):
            raise DatasetError(f'{name}: no step is left with TrainerConfig.offline_buffer_length = {num_steps}',
                               'set it to 2 or more')
        dataset_checks.check_long_enough(dataset, episodes, batch_length)
        datasets.append(dataset._replace(episodes=episodes))
        for line in dataset_statistics.lines(datasets[-1]):
            logger.info('%s', line)
    return datasets
