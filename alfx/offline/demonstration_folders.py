"""Folders through which runs exchange demonstrations; see :class:`~alfx.algorithms.ppod_algorithm.PpodAlgorithm`."""
import logging
import os
from typing import Any

from alfx import context
from alfx.gin_utils import ConfError, problem_at
from alfx.offline import dataset_folder, dataset_loading
from alfx.offline.dataset_episodes import from_steps, joined, steps
from alfx.offline.dataset_files import DatasetError
from alfx.offline.dataset_spaces import specs_as_json
from alfx.offline.pools import Demonstration, Pools, score_of

logger = logging.getLogger(__name__)


def demonstrations_in(names: Any, env: Any, is_given: bool = False) -> list[Demonstration]:
    """Return the episodes of datasets that fit the environment ``env``.

    Raises:
        DatasetError: a dataset is missing or damaged, or does not fit.
    """
    specs = env.observation_spec(), env.action_spec(), env.reward_spec()
    found = []
    for dataset in dataset_loading.load(names, None, *specs):
        for i in range(len(dataset.episodes.lengths)):
            time_step, action = next(steps(dataset.episodes.part(i, i + 1), 0, *specs))
            found.append(Demonstration((time_step._replace(env_id=()), action), score_of(time_step), is_given=is_given))
    return found


class DemonstrationFolders:
    """Folder of datasets that are added during training, and dataset of the best collected episodes.

    Args:
        owner: name of the class with the arguments, for messages.
        source: folder that is searched for new datasets at each unroll; ``None``: none.
        target: dataset to write; ``None``: none.
        num_saved: number of episodes in it.
        save_every: number of unrolls between two writes of ``target``.
    """

    def __init__(self, owner: str, source: str | None, target: str | None, num_saved: int, save_every: int):
        self._owner = owner
        self._source, self._target = (folder and os.path.expanduser(folder) for folder in (source, target))
        self._num_saved, self._save_every = num_saved, save_every
        self._seen: set[str] = set()
        self._count = 0  # unrolls
        self._scores: list[float] = []  # of the episodes that were saved last

    def check(self) -> None:
        """Check, before training, that the target can be written and is not a dataset from another source.

        Raises:
            ConfError: it holds another dataset, or cannot be written.
        """
        if self._target is None:
            return
        if dataset_folder.is_dataset(self._target) and (
                dataset_folder.read_manifest(self._target)['about'].get('saved_by') != self._owner):
            raise ConfError([problem_at(self._owner, 'target_agent_demos_dir', f'= {self._target!r} is a dataset that '
                                        f'{self._owner} has not written', 'name another folder')])
        dataset_folder.check_writable(self._target, overwrite=True)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {'seen': sorted(self._seen), 'count': self._count}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state`."""
        self._seen, self._count = set(state['seen']), state['count']

    def new_episodes(self, env: Any) -> list[Demonstration]:
        """Return the episodes of datasets that have appeared in the source since the last call.

        A dataset that is damaged or does not fit is skipped with a warning, because it must not end a run.
        """
        source, found = self._source, []
        names = sorted(os.listdir(source)) if source is not None and os.path.isdir(source) else []
        for name in names:
            path = os.path.join(str(source), name)
            if name in self._seen or not dataset_folder.is_dataset(path):
                continue
            self._seen.add(name)
            try:
                found += demonstrations_in([path], env)
            except DatasetError as error:
                logger.warning('%s.supplementary_demos_dir: skipped: %s', self._owner, error)
        return found

    def save_best(self, pools: Pools, env: Any) -> None:
        """Write the best collected episodes of the pool with reward, if a write is due and they have changed."""
        self._count += 1
        ranks = context.get_ranks()
        if self._target is None or self._count % self._save_every or ranks is not None and ranks.rank:
            return
        own = sorted((demo for demo in pools.with_reward if not demo.is_given), key=lambda demo: -demo.score)
        best = own[:self._num_saved]
        if not best or self._scores == [demo.score for demo in best]:
            return
        self._scores = [demo.score for demo in best]
        episodes = [from_steps(*demo.steps) for demo in best]
        dataset_folder.write(self._target, joined([part for part in episodes if part is not None]),
                             {'saved_by': self._owner, 'env_name': env.name, **specs_as_json(env)}, overwrite=True)
