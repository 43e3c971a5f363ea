"""Reading a dataset by its name in a conf, in any format."""
import os
from collections.abc import Sequence

from alfx.checkpoints.module_states import NOT_FITTING
from alfx.gin_utils import ConfError
from alfx.offline import alf_buffers, dataset_folder, minari_sets, saved_replay
from alfx.offline.dataset_files import Dataset, DatasetError


def read(name: str) -> Dataset:
    """Read a dataset.

    Args:
        name: the path of a folder written by ``python -m alfx.bin.record``, of a run folder, or of a checkpoint with a
            replay buffer, from alfx or ALF; ``~`` is expanded. Or ``minari:ID``.

    Raises:
        DatasetError: it does not exist or is damaged.
    """
    try:
        return _read(name)
    except ConfError:
        raise
    except NOT_FITTING as error:
        raise DatasetError(f'{name}: expected stored experience, found other contents: {error!r}',
                           'use another dataset, or record it again') from error


def _read(name: str) -> Dataset:
    if name.startswith(minari_sets.PREFIX):
        return minari_sets.read(name)
    path = os.path.expanduser(name)
    if dataset_folder.is_dataset(path):
        return dataset_folder.read(path)._replace(name=name)
    if saved_replay.is_run(path):
        return saved_replay.read(path)._replace(name=name)
    if os.path.isfile(path):
        return (alf_buffers.read(path) or saved_replay.read(path))._replace(name=name)
    raise DatasetError(f'{name}: {_describe_path(path)}', 'record one with python -m alfx.bin.record '
                       f'--root_dir RUN --dataset {name}')


def reference_returns(names: Sequence[str]) -> tuple[float, float] | None:
    """Return the returns of a random and of an expert policy from the first of these datasets that contains them.

    ``None`` if no dataset contains them. A dataset that no longer exists is skipped, because scores are optional.
    """
    for name in names:
        path, found = os.path.expanduser(name), None
        if name.startswith(minari_sets.PREFIX):
            found = minari_sets.reference_returns(name)
        elif dataset_folder.is_dataset(path):
            found = dataset_folder.read_manifest(path)['about'].get('reference_returns')
        if found and found[0] < found[1]:
            return found[0], found[1]
    return None


def _describe_path(path: str) -> str:
    if os.path.isdir(path):
        return f'this folder contains no {dataset_folder.MANIFEST}: it is not a dataset, or recording was killed'
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        return f'there is no such folder, and no folder {parent}'
    near = sorted(entry for entry in os.listdir(parent) if dataset_folder.is_dataset(os.path.join(parent, entry)))
    return f'there is no such folder; datasets in {parent}: {", ".join(near) or "none"}'
