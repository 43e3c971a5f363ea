"""Reader of the replay buffer in a checkpoint as a dataset."""
import os
from typing import Any

import torch

from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.files import CheckpointError
from alfx.checkpoints.reading import read_checkpoint
from alfx.experience_replayers.saved_contents import saved_steps
from alfx.offline.dataset_episodes import Episodes, from_arrays, joined
from alfx.offline.dataset_files import Dataset, DatasetError, fingerprint

_CHECKPOINTS = os.path.join('train', 'algorithm')


def is_run(path: str) -> bool:
    """Return whether a folder is a run folder with a checkpoint."""
    return Checkpointer(os.path.join(path, _CHECKPOINTS)).has_checkpoint()


def read(path: str) -> Dataset:
    """Read a dataset.

    The steps of each environment become episodes; an unfinished episode is truncated at the newest step.

    Args:
        path: ``RUN/train/algorithm/ckpt-N``; ``RUN`` for the latest checkpoint.

    Raises:
        DatasetError: the file is not a checkpoint, is damaged, or contains no replay buffer.
    """
    if os.path.isdir(path):
        checkpointer = Checkpointer(os.path.join(path, _CHECKPOINTS))
        path = checkpointer.path(max(checkpointer.steps()))
    try:
        states = read_checkpoint(path)
    except CheckpointError as error:
        raise DatasetError(f'{path}: {error}', 'use a checkpoint of alfx, .../train/algorithm/ckpt-N') from error
    extra: Any = states.get('alg', {}).get('_extra_state', {})
    state = extra.get('replay_buffer') if isinstance(extra, dict) else None
    if state is None:
        raise DatasetError(f'{path}: this checkpoint contains no replay buffer',
                           'use one of the latest two of a run, which contain it up to '
                           'TrainerConfig.replay_checkpoint_megabytes')
    parts = [part for part in map(_episodes, saved_steps(state)) if part is not None]
    if not parts or 'context' in states.get('trainer', {}).get('rollout', {}):  # only the context of frame stacks
        raise DatasetError(f'{path}: its replay buffer contains no episode',
                           'train the run for longer; on-policy algorithms empty their buffer after each update')
    episodes = joined(parts)
    return Dataset(path, episodes, {'checkpoint': os.path.abspath(path)}, fingerprint(episodes), is_verified=True)


def _episodes(leaves: dict[str, torch.Tensor]) -> Episodes | None:
    """Return the episodes of one environment."""
    def below(field: str) -> dict[str, Any]:
        return {path[len(field) + 1:]: x.numpy() for path, x in leaves.items()
                if path == field or path.startswith(f'{field}.')}

    step_type, reward, discount = (leaves[f'time_step.{name}'].numpy() for name in ('step_type', 'reward', 'discount'))
    return from_arrays(step_type, reward, discount, below('time_step.observation'), below('action'))
