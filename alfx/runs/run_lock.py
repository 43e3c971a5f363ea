"""One run folder, one run: the processes that train in a folder hold a lock on a file in it.

The lock is that of ``flock``: the system lets go of it when the last of them ends, however it ends. Rank 0 of several
that train together takes it alone; then all of them share it, so that it is held as long as one of them lives.
"""
import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from alfx import context
from alfx.gin_utils import ConfError
from alfx.runs import run_files

logger = logging.getLogger(__name__)
_NAME = 'train.lock'
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def held(root_dir: str) -> Iterator[None]:
    """Hold a run folder for this process, together with the other ranks if there are any.

    Where this process holds it already, nothing more is done. Where the file system cannot lock there is a warning, and
    nothing is held.

    Args:
        root_dir: the folder, which exists.

    Raises:
        ConfError: another run holds it; in all ranks alike. The message names its process and its machine. Or the
            folder cannot be written to.
        OSError: the disk is full.
    """
    ranks = context.get_ranks()
    mine = os.path.realpath(root_dir), ranks is None or ranks.is_first
    if mine in _held:
        yield
        return
    with contextlib.ExitStack() as stack:
        holder = None
        if ranks is None or ranks.is_first:
            holder = stack.enter_context(_exclusive(root_dir, then_share=ranks is not None))
        if ranks is not None:
            holder = ranks.broadcast_from_rank0(holder)
        _refuse(root_dir, holder)
        if ranks is not None and not ranks.is_first:
            file = stack.enter_context(_opened(root_dir))
            _lock(file, fcntl.LOCK_SH)
        _held[mine] = stack
        try:
            yield
        finally:
            del _held[mine]


def renew(root_dir: str) -> None:
    """Hold a folder again that this process holds, alone or as the first rank, if it has been removed meanwhile.

    The folder is made where there is none.

    Raises:
        ConfError: another run has begun in it since.
    """
    ranks, folder = context.get_ranks(), os.path.realpath(root_dir)
    stack, path = _held.get((folder, True)), os.path.join(folder, _NAME)
    if stack is None or any(os.path.realpath(file.name) == path and _is_there(file) for file in _open_files):
        return
    os.makedirs(root_dir, exist_ok=True)
    _refuse(root_dir, stack.enter_context(_exclusive(root_dir, then_share=ranks is not None)))


def _refuse(root_dir: str, holder: str | None) -> None:
    """End if another process holds the folder."""
    if holder is not None:
        raise ConfError(f'another process trains in {root_dir}: {holder or "one that does not tell its number"}',
                        'wait for its end, stop it (kill -TERM and its number: it writes a checkpoint), or use '
                        'another --root_dir')


@contextlib.contextmanager
def _exclusive(root_dir: str, then_share: bool) -> Iterator[str | None]:
    """Lock the folder, and gives None; or who holds it, '' if that is not known."""
    with _opened(root_dir) as file:
        if not (_lock(file, fcntl.LOCK_EX) and (not then_share or _lock(file, fcntl.LOCK_SH))):
            file.seek(0)
            yield file.read().strip()
            return
        _write(file, f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %H:%M:%S")}\n')
        try:
            yield None
        finally:
            _write(file, '')
            if os.path.isdir(root_dir) and os.listdir(root_dir) == [_NAME]:  # of a start that came to nothing
                os.remove(os.path.join(root_dir, _NAME))


@contextlib.contextmanager
def _opened(root_dir: str) -> Iterator[Any]:
    """The file, which processes that are forked off do not keep open: they would hold the lock as well."""
    path = os.path.join(root_dir, _NAME)
    try:
        opened = open(path, 'a+', encoding='utf8')
    except OSError as error:
        run_files.explain_folder_error(root_dir, error)
        raise
    with opened as file:
        _open_files.add(file)
        try:
            yield file
        finally:
            _open_files.discard(file)


def _lock(file: Any, kind: int) -> bool:
    """Whether ``file`` is locked, or cannot be."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return _is_there(file)  # not removed by the one before
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning('%s cannot be locked (%s): see to it that no other process trains in this folder', file.name,
                       error.strerror)
    return True


def _is_there(file: Any) -> bool:
    """Whether an open file is still what has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _write(file: Any, text: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk: the lock holds without a name
        file.truncate(0)
        file.write(text)
        file.flush()


_open_files: set[Any] = set()
_held: dict[tuple[str, bool], contextlib.ExitStack] = {}  # by folder, and whether by one that is alone or the first


def _close_in_child() -> None:
    for file in _open_files:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
