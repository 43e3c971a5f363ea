"""Reader of replay buffers in checkpoints of ALF as datasets.

Only tensors are read from the file, so no code in it is executed. For B environments and L slots it contains::

    _replay_buffer._current_size              [B]     number of steps in the buffer
    _replay_buffer._current_pos               [B]     number of steps ever stored
    _replay_buffer.time_step|reward           [B, L]  also discount, step_type, observation, prev_action
    _replay_buffer.time_step|observation|arm  [B, L, ...]

The action taken at a step is the ``prev_action`` of the next step.
"""
import os
import pickle
import zipfile

import numpy as np
import torch

from alfx.checkpoints.module_states import NOT_FITTING
from alfx.checkpoints.reading import load_archive
from alfx.data_structures import StepType
from alfx.offline.dataset_episodes import Episodes, from_arrays, joined
from alfx.offline.dataset_files import Dataset, DatasetError, fingerprint

_PREFIX = '_replay_buffer.'


def read(path: str) -> Dataset | None:
    """Read a dataset; return ``None`` if the file is not such a checkpoint.

    Raises:
        DatasetError: the buffer is incomplete or empty.
    """
    tensors = _tensors(path)
    if tensors is None:
        return None
    needed = ['_current_size', '_current_pos', *(f'time_step|{x}' for x in ('step_type', 'reward', 'discount'))]
    missing = [_PREFIX + name for name in needed if name not in tensors]
    for field in ('time_step|observation', 'time_step|prev_action'):
        if not any(name == field or name.startswith(f'{field}|') for name in tensors):
            missing.append(_PREFIX + field)
    if missing:
        raise DatasetError(f'{path}: its replay buffer lacks {", ".join(missing)}', 'choose another file')
    parts = []
    for env_id, (size, position) in enumerate(zip(tensors['_current_size'].tolist(), tensors['_current_pos'].tolist())):
        part = _episodes({name: x[env_id].numpy() for name, x in tensors.items() if x.ndim > 1}, size, position)
        if part is not None:
            parts.append(part)
    if not parts:
        raise DatasetError(f'{path}: its replay buffer contains no episode', 'choose another file')
    episodes = joined(parts)
    return Dataset(path, episodes, {'checkpoint': os.path.abspath(path)}, fingerprint(episodes))


def _tensors(path: str) -> dict[str, torch.Tensor] | None:
    """Return the tensors of the buffer by their names without the prefix."""
    if not zipfile.is_zipfile(path):  # torch.save writes zip files
        return None
    try:
        with open(path, 'rb') as file:
            content = load_archive(file, os.path.getsize(path))
    except (pickle.UnpicklingError, zipfile.BadZipFile, *NOT_FITTING, EOFError, OSError):
        return None  # it contains more than tensors, or is another archive
    for state in ([content, *content.values()] if isinstance(content, dict) else []):
        if isinstance(state, dict) and f'{_PREFIX}_current_pos' in state:
            return {name.removeprefix(_PREFIX): x for name, x in state.items()
                    if str(name).startswith(_PREFIX) and isinstance(x, torch.Tensor)}
    return None


def _episodes(leaves: dict[str, np.ndarray], size: int, position: int) -> Episodes | None:
    """Return the episodes of one environment."""
    length = len(leaves['time_step|reward'])
    order = np.arange(position - size, position) % length

    def below(field: str) -> dict[str, np.ndarray]:
        return {name[len(field) + 1:].replace('|', '.'): x[order] for name, x in leaves.items()
                if name == field or name.startswith(f'{field}|')}

    action = {path: np.roll(x, -1, 0) for path, x in below('time_step|prev_action').items()}
    return from_arrays(leaves['time_step|step_type'][order], leaves['time_step|reward'][order],
                       leaves['time_step|discount'][order], below('time_step|observation'), action)


assert (int(StepType.FIRST), int(StepType.MID), int(StepType.LAST)) == (0, 1, 2), 'expected the numbers in these files'
