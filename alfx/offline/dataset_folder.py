"""A dataset as a folder: one ``.npy`` file for each array, and a manifest that vouches for them.

::

    NAME/dataset.json             what there is, with a digest of each array
    NAME/data-1f3a.../reward.npy  ...

The manifest names the folder of the arrays, and is replaced in one step: whoever is killed while writing leaves the old
dataset or the new one, and at most files that nothing names, which the next writer removes. Arrays are mapped into
memory, not read, until they are used.
"""
import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np

from alfx.offline.dataset_files import Dataset, DatasetError, arrays_of, digest, episodes_of, fingerprint_of
from alfx.offline.dataset_episodes import Episodes

MANIFEST = 'dataset.json'
_FORMAT, _VERSION = 'alfx episodes', 1
_DATA = 'data-'


def is_dataset(path: str) -> bool:
    """Whether there is one in that folder, sound or not."""
    return os.path.isfile(os.path.join(path, MANIFEST))


def write(path: str, episodes: Episodes, about: dict[str, Any], overwrite: bool = False) -> None:
    """Write a dataset.

    Args:
        path: its folder, which is made.
        episodes: its contents.
        about: see :class:`~alfx.offline.dataset_files.Dataset`.
        overwrite: whether it may take the place of another one.

    Raises:
        DatasetError: there is one, another process writes it, or the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(path, exist_ok=True)
            stack.enter_context(_locked(path))
            if is_dataset(path) and not overwrite:
                raise DatasetError(f'{path}: there is a dataset already', 'give another name, or add --overwrite')
            _write(path, episodes, about)
        except OSError as error:
            raise DatasetError(f'{path}: cannot be written: {error.strerror or error}',
                               'nothing has been changed') from error


def check_writable(path: str, overwrite: bool) -> None:
    """Refuse early what :func:`write` would refuse.

    Raises:
        DatasetError: see there.
    """
    if is_dataset(path) and not overwrite:
        raise DatasetError(f'{path}: there is a dataset already', 'give another name, or add --overwrite')
    parent = os.path.abspath(path)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise DatasetError(f'{path}: {parent} is not a folder that can be written to', 'name another one')


def _write(path: str, episodes: Episodes, about: dict[str, Any]) -> None:
    data = tempfile.mkdtemp(prefix=_DATA, dir=path)
    try:
        os.chmod(data, 0o755)
        arrays = {}
        for name, array in arrays_of(episodes).items():
            file_name = urllib.parse.quote(name, safe='') + '.npy'
            with open(os.path.join(data, file_name), 'wb') as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            arrays[name] = {'file': file_name, 'sha256': digest(array)}
        manifest = {'format': _FORMAT, 'version': _VERSION, 'episodes': len(episodes.lengths),
                    'actions': episodes.num_actions, 'data': os.path.basename(data), 'arrays': arrays, 'about': about}
        with open(os.path.join(data, MANIFEST), 'w', encoding='utf8') as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # Ctrl-C as well: a folder without a manifest is of no use to anybody
        shutil.rmtree(data, ignore_errors=True)
        raise
    # whoever interrupts this one finds the old dataset or the new one; the folder is not to go while it may be in use
    os.replace(os.path.join(data, MANIFEST), os.path.join(path, MANIFEST))
    for name in os.listdir(path):
        if name.startswith(_DATA) and name != os.path.basename(data):
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise DatasetError(f'{path}: another process is writing this dataset',
                                   'wait for its end, or give another name') from error
        yield  # where a file system cannot lock, the last writer wins
    finally:
        os.close(folder)


def read(path: str) -> Dataset:
    """Read a dataset, and compare all of it with its manifest.

    Raises:
        DatasetError: there is none, or it is damaged.
    """
    manifest = read_manifest(path)
    arrays, found = {}, {}
    for name, entry in manifest['arrays'].items():
        file = os.path.join(path, manifest['data'], entry['file'])
        try:
            arrays[name] = np.load(file, mmap_mode='r', allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DatasetError(f'{file}: cannot be read: {error}', 'record the dataset again') from error
        found[name] = digest(arrays[name])
        if found[name] != entry['sha256']:
            raise DatasetError(f'{file}: its contents are not those that were written: expected SHA-256 '
                               f'{entry["sha256"][:16]}..., found {found[name][:16]}...', 'record the dataset again')
    try:
        episodes = episodes_of(arrays)
    except KeyError as error:
        raise DatasetError(f'{os.path.join(path, MANIFEST)}: names no array {error}',
                           'record the dataset again') from error
    return Dataset(path, episodes, manifest['about'], fingerprint_of(found), is_vouched_for=True)


def read_manifest(path: str) -> dict[str, Any]:
    """What the manifest of the dataset in a folder says.

    Raises:
        DatasetError: there is none, or it is damaged.
    """
    file_name = os.path.join(path, MANIFEST)
    try:
        with open(file_name, encoding='utf8') as file:
            manifest = json.load(file)
        version, wanted = (manifest['format'], manifest['version']), (_FORMAT, _VERSION)
        missing = {'data', 'arrays', 'about', 'episodes', 'actions'} - manifest.keys()
    except OSError as error:
        raise DatasetError(f'{file_name}: cannot be read: {error.strerror}',
                           'nothing is left of a dataset whose writer was killed: record it again') from error
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f'{file_name}: is damaged: {error!r}', 'record the dataset again') from error
    if version != wanted:
        raise DatasetError(f'{file_name}: expected format {wanted}, found {version}', 'this alfx reads only that one')
    if missing:
        raise DatasetError(f'{file_name}: is damaged: {sorted(missing)} are missing', 'record the dataset again')
    return manifest
