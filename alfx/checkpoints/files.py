"""Checkpoint files: their format, and atomic writing.

A file is the output of ``torch.save``, followed by its SHA-256 in a separate line (which ``torch.load`` ignores). It is
written under a temporary name, flushed to disk and renamed, so a file with its final name is complete unless something
else damaged it, which the checksum detects. :mod:`alfx.checkpoints.reading` reads the files.
"""
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from alfx import nest
from alfx.gin_utils import stored_files

FORMAT = 1
MARK = 'alfx_checkpoint'
_TRAILER = b'\nalfx-sha256:'
TRAILER_SIZE = len(_TRAILER) + 64


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the message says which one, why, and what to do."""


class Damaged(Exception):
    """A file is unusable as a checkpoint; the message says why."""


def open_file(path: str) -> BinaryIO:
    """Open a file for reading without blocking.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it is not a regular file, is a broken link, or cannot be read from the disk.
    """
    try:
        return stored_files.open_regular(path)
    except stored_files.FileError as error:
        raise Damaged(error.reason) from error


def trailer(file: Any) -> bytes:
    """Return the checksum at the end of a checkpoint file."""
    size = file.seek(0, os.SEEK_END)
    if size < TRAILER_SIZE:
        raise Damaged('expected a checkpoint, found ' + ('an empty file' if size == 0 else f'only {size} bytes'))
    file.seek(size - TRAILER_SIZE)
    found = file.read()
    if not found.startswith(_TRAILER):
        raise Damaged('expected a checksum at its end, found none: it is truncated')
    return found[len(_TRAILER):]


def file_digest(file: Any, size: int) -> bytes:
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(size, 1 << 20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest().encode()


def save(file: Any, content: dict[str, Any]) -> str:
    """Write a checkpoint file and return its checksum."""
    writer = _HashingWriter(file)
    writer.save(content)
    file.write(_TRAILER + writer.hexdigest().encode())
    return writer.hexdigest()


class _HashingWriter:
    """File for ``torch.save`` that computes a checksum and records the error of a failed write.

    torch replaces that error with one that does not state the cause.
    """

    def __init__(self, file: Any):
        self._file = file
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def save(self, content: Any) -> None:
        try:
            torch.save(_with_one_dtype_per_storage(content), self)  # type: ignore[arg-type]
            self._file.flush()
        except RuntimeError as error:
            if self._error is None:
                raise
            raise self._error from error

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self._digest.update(data)
        return written

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _with_one_dtype_per_storage(content: Any) -> Any:
    """Copy tensors that share a storage with tensors of other dtypes, because torch cannot save these.

    Tensors that were transferred to a GPU together share a storage.
    """
    dtypes: dict[int, set[torch.dtype]] = {}
    for x in nest.flatten(content):
        if isinstance(x, Tensor) and x.layout == torch.strided:
            dtypes.setdefault(x.untyped_storage().data_ptr(), set()).add(x.dtype)
    if all(len(found) == 1 for found in dtypes.values()):
        return content

    def separate(x: Any) -> Any:
        is_strided = isinstance(x, Tensor) and x.layout == torch.strided
        return x.clone() if is_strided and len(dtypes[x.untyped_storage().data_ptr()]) > 1 else x

    return nest.map_structure(separate, content)


@contextlib.contextmanager
def temporary_file(path: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield an open temporary file and a function ``commit()`` that flushes it to disk and renames it to ``path``.

    The file is removed if ``commit`` is not called or an error occurs.
    """
    temporary = f'{path}.tmp{os.getpid()}'

    def commit() -> None:
        file.flush()
        os.fsync(file.fileno())
        _put_aside_folder(path)
        os.replace(temporary, path)
        _sync_folder(os.path.dirname(path) or '.')

    try:
        with open(temporary, 'wb') as file:
            yield file, commit
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def remove(path: str) -> None:
    """Remove a file if it exists."""
    _put_aside_folder(path)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _put_aside_folder(path: str) -> None:
    """Rename a folder with the name of a file to be written; files are simply overwritten."""
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, f'{path}.{time.time_ns()}')


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
