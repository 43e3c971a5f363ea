"""From a name in a conf to a dataset, wherever it lies."""
import os

from alfx.offline import folder
from alfx.offline.dataset import Dataset, DatasetError


def read(name: str) -> Dataset:
    """Read a dataset.

    Args:
        name: the path of a folder that ``python -m alfx.bin.record`` has written; ``~`` is expanded.

    Raises:
        DatasetError: there is none, or it is damaged.
    """
    path = os.path.expanduser(name)
    if folder.is_dataset(path):
        return folder.read(path)._replace(name=name)
    raise DatasetError(f'{name}: {_what_is_there(path)}', 'record one with python -m alfx.bin.record --dataset '
                       f'{name}')


def _what_is_there(path: str) -> str:
    if os.path.isdir(path):
        return f'this folder holds no {folder.MANIFEST}, so it is no dataset, or its writer was killed'
    if os.path.exists(path):
        return 'this file is no dataset'
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        return f'there is no such folder, nor {parent}'
    near = sorted(entry for entry in os.listdir(parent) if folder.is_dataset(os.path.join(parent, entry)))
    return f'there is no such folder; datasets beside it: {", ".join(near) or "none"}'
