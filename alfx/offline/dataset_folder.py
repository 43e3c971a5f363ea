"""The dataset format of alfx: a folder with one ``.npy`` file for each array, and a manifest with their digests.

::

    NAME/dataset.json             the manifest: metadata, and a digest of each array
    NAME/data-1f3a.../reward.npy  ...

The manifest names the folder of the arrays and is replaced atomically. A killed writer therefore leaves either the old
or the new dataset, and at most unreferenced files, which the next writer removes. Arrays are memory-mapped, so they
are not read until they are used.
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

from alfx.gin_utils import stored_files
from alfx.offline.dataset_episodes import Episodes
from alfx.offline.dataset_files import Dataset, DatasetError, arrays_of, digest, episodes_of, fingerprint_of

MANIFEST = 'dataset.json'
_FORMAT, _VERSION = 'alfx episodes', 1
_DATA = 'alfx-data-'  # folders of another name in the same folder belong to the user
_AGAIN = 'record the dataset again'
_LEAVES = {str: {'shape': [range(2**31)], 'dtype': str}}
_ABOUT = {'reference_returns?': (type(None), [float, float]), 'env_name?': str,
          'action_bounds?': {str: [object, object]},
          'specs?': {'observation': _LEAVES, 'action': _LEAVES, 'reward': _LEAVES}}
_SCHEMA = {'episodes': range(2**62), 'actions': range(2**62), 'data': str, 'about': _ABOUT,
           'arrays': {str: {'file': str, 'sha256': str}}}


def is_dataset(path: str) -> bool:
    """Return whether a folder contains a dataset, intact or damaged."""
    return os.path.isfile(os.path.join(path, MANIFEST))


def write(path: str, episodes: Episodes, about: dict[str, Any], overwrite: bool = False) -> None:
    """Write a dataset.

    Args:
        path: folder of the dataset; it is created.
        episodes: the contents.
        about: see :class:`~alfx.offline.dataset_files.Dataset`.
        overwrite: replace an existing dataset.

    Raises:
        DatasetError: a dataset exists already, another process is writing it, or the folder cannot be written.
    """
    path = os.path.expanduser(path)
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(path, exist_ok=True)
            stack.enter_context(_locked(path))
            if is_dataset(path) and not overwrite:
                raise DatasetError(f'{path}: a dataset exists already', 'use another name, or add --overwrite')
            _write(path, episodes, about)
        except OSError as error:  # numpy gives no error number if the disk is full
            raise DatasetError(f'{path}: cannot be written: {os.strerror(error.errno or errno.ENOSPC)}',
                               'nothing has been changed; free some space or correct the permissions') from error


def check_writable(path: str, overwrite: bool) -> None:
    """Raise early in the cases in which :func:`write` would raise.

    Raises:
        DatasetError: see :func:`write`.
    """
    parent = os.path.abspath(os.path.expanduser(path))
    if is_dataset(parent) and not overwrite:
        raise DatasetError(f'{path}: a dataset exists already', 'use another name, or add --overwrite')
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise DatasetError(f'{path}: {parent} is not a writable folder', 'use another path')


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
    except BaseException:  # including Ctrl-C: a folder without a manifest is useless
        shutil.rmtree(data, ignore_errors=True)
        raise
    # outside the try block: after an interrupt the manifest may already refer to the new folder
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
                                   'wait until it has finished, or use another name') from error
        yield  # on a file system without locks the last writer wins
    finally:
        os.close(folder)


def read(path: str) -> Dataset:
    """Read a dataset and verify all of it against its manifest.

    Raises:
        DatasetError: it does not exist or is damaged.
    """
    manifest = read_manifest(path)
    arrays, found = {}, {}
    for name, entry in manifest['arrays'].items():
        file = os.path.join(path, os.path.basename(manifest['data']), os.path.basename(entry['file']))
        array = _read_array(file)
        found[name] = digest(array)
        if found[name] != entry['sha256']:
            raise DatasetError(f'{file}: its contents have changed since it was written: expected SHA-256 '
                               f'{entry["sha256"][:16]}..., found {found[name][:16]}...', _AGAIN)
        arrays[name] = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder('='))
    try:
        episodes = episodes_of(arrays)
    except KeyError as error:
        raise DatasetError(f'{os.path.join(path, MANIFEST)}: the array {error} is missing', _AGAIN) from error
    for field, leaves in manifest['about'].get('specs', {}).items():
        for leaf, spec in leaves.items():
            stored = arrays.get(f'{field}.{leaf}' if leaf else field)
            if stored is not None and list(stored.shape[1:]) != spec['shape']:
                raise DatasetError(f'{os.path.join(path, MANIFEST)}: about.specs.{field}.{leaf}: expected shape '
                                   f'{list(stored.shape[1:])}, as in the arrays, found {spec["shape"]}', _AGAIN)
    return Dataset(path, episodes, manifest['about'], fingerprint_of(found), is_verified=True)


def _read_array(file: str) -> np.ndarray:
    """Map an array of numbers from a file."""
    try:
        stored_files.open_regular(file).close()
        array = np.load(file, mmap_mode='r', allow_pickle=False)
    except Exception as error:  # numpy raises errors of many types for a damaged header
        raise DatasetError(f'{file}: cannot be read: {error}', _AGAIN) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in 'fiub' or array.dtype.itemsize > 8:
        raise DatasetError(f'{file}: expected an array of numbers of at most 64 bits, found '
                           f'{getattr(array, "dtype", "an archive")}', _AGAIN)
    return array


def read_manifest(path: str) -> dict[str, Any]:
    """Return the manifest of the dataset in a folder.

    Raises:
        DatasetError: it does not exist or is damaged.
    """
    file_name = os.path.join(path, MANIFEST)
    try:
        manifest = stored_files.read_json(file_name, {'format': str, 'version': int}, _AGAIN)
    except FileNotFoundError as error:
        raise DatasetError(f'{file_name}: cannot be read: {error.strerror}',
                           'if recording was killed, record the dataset again') from error
    except stored_files.FileError as error:
        raise DatasetError(f'{file_name}: is damaged: {error.reason}', _AGAIN) from error
    version, wanted = (manifest['format'], manifest['version']), (_FORMAT, _VERSION)
    if version != wanted:
        raise DatasetError(f'{file_name}: expected format {wanted}, found {version}',
                           'this version of alfx reads no other format')
    problem = stored_files.mismatch(manifest, _SCHEMA)
    if problem:
        raise DatasetError(f'{file_name}: is damaged: {problem}', _AGAIN)
    return manifest
