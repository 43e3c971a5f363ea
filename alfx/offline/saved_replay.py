"""The replay buffer in a checkpoint as a dataset: what a policy saw while it learned."""
import os
from typing import Any

import torch

from alfx.experience_replayers.saved_contents import saved_steps
from alfx.offline.dataset_files import Dataset, DatasetError, fingerprint
from alfx.offline.dataset_episodes import Episodes, from_arrays, joined
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError, read_checkpoint

_CHECKPOINTS = os.path.join('train', 'algorithm')


def is_run(path: str) -> bool:
    """Whether that is the folder of a run with a checkpoint."""
    return Checkpointer(os.path.join(path, _CHECKPOINTS)).has_checkpoint()


def read(path: str) -> Dataset:
    """Read a dataset.

    Each environment's steps become episodes; one that has not ended is cut off at the newest step.

    Args:
        path: ``RUN/train/algorithm/ckpt-N``; ``RUN`` for the latest one.

    Raises:
        DatasetError: the file is no checkpoint, is damaged, or holds no replay buffer.
    """
    if os.path.isdir(path):
        checkpointer = Checkpointer(os.path.join(path, _CHECKPOINTS))
        path = checkpointer.path(max(checkpointer.steps()))
    try:
        states = read_checkpoint(path)
    except CheckpointError as error:
        raise DatasetError(f'{path}: {error}', 'name a checkpoint of alfx, .../train/algorithm/ckpt-N') from error
    extra: Any = states.get('alg', {}).get('_extra_state', {})
    state = extra.get('replay_buffer') if isinstance(extra, dict) else None
    if state is None:
        raise DatasetError(f'{path}: this checkpoint holds no replay buffer',
                           'the latest two of a run do, up to TrainerConfig.replay_checkpoint_megabytes')
    parts = [part for part in map(_episodes, saved_steps(state)) if part is not None]
    if not parts:
        raise DatasetError(f'{path}: its replay buffer holds no episode', 'let the run go on for longer')
    episodes = joined(parts)
    return Dataset(path, episodes, {'checkpoint': os.path.abspath(path)}, fingerprint(episodes), is_vouched_for=True)


def _episodes(leaves: dict[str, torch.Tensor]) -> Episodes | None:
    """Those of one environment."""
    def below(field: str) -> dict[str, Any]:
        return {path[len(field) + 1:]: x.numpy() for path, x in leaves.items()
                if path == field or path.startswith(f'{field}.')}

    step_type, reward, discount = (leaves[f'time_step.{name}'].numpy() for name in ('step_type', 'reward', 'discount'))
    return from_arrays(step_type, reward, discount, below('time_step.observation'), below('action'))
