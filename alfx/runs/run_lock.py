"""Lock of a run folder, which prevents two runs from training in the same folder.

The lock uses ``flock``, so the system releases it when the last process that holds it exits, even by a crash. In
distributed training rank 0 takes an exclusive lock first; then all ranks share it until the last of them exits.
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

from alfx import context, gin_utils
from alfx.gin_utils import ConfError, user_modules
from alfx.runs import run_files

logger = logging.getLogger(__name__)
_MOST_TEXT = 1000  # characters
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class ReplacedFolderError(ConfError):
    """The folder of another run has taken the place of the run folder during training."""


@contextlib.contextmanager
def held(root_dir: str) -> Iterator[None]:
    """Lock a run folder for this process, together with the other ranks of distributed training.

    If this process already holds the lock, nothing happens. If the file system does not support locks, a warning is
    logged and the folder is not locked.

    Args:
        root_dir: run folder, which must exist.

    Raises:
        ConfError: another run holds the lock (raised on all ranks; the message names its process and machine), or the
            folder cannot be written.
        OSError: the disk is full.
    """
    ranks = context.get_ranks()
    key = os.path.realpath(root_dir), ranks is None or ranks.is_first
    if key in _held:
        yield
        return
    with contextlib.ExitStack() as stack:
        holder = None
        if ranks is None or ranks.is_first:
            holder = stack.enter_context(_exclusive(root_dir, then_share=ranks is not None))
        if ranks is not None:
            holder = ranks.broadcast_from_rank0(holder)
        _check_holder(root_dir, holder)
        if ranks is not None and not ranks.is_first:
            file = stack.enter_context(_opened(root_dir))
            _lock(file, fcntl.LOCK_SH)
        _held[key] = stack
        try:
            yield
        finally:
            del _held[key]


def renew(root_dir: str) -> None:
    """Lock a run folder again if it was removed while this process, alone or as rank 0, held its lock.

    The folder is created if it does not exist.

    Raises:
        ConfError: another run has started in the folder since.
        ReplacedFolderError: the folder of another run has been moved there.
    """
    ranks, folder = context.get_ranks(), os.path.realpath(root_dir)
    stack, path = _held.get((folder, True)), os.path.join(folder, user_modules.LOCK)
    if stack is None or any(os.path.realpath(file.name) == path and _is_current(file) for file in _open_files):
        return
    if not gin_utils.is_own_conf(root_dir):
        raise ReplacedFolderError(f'{root_dir} was replaced by the folder of another run while this run was training',
                                  'move that folder away, and resume this run from a copy of its own folder')
    os.makedirs(root_dir, exist_ok=True)
    _check_holder(root_dir, stack.enter_context(_exclusive(root_dir, then_share=ranks is not None)))


def _check_holder(root_dir: str, holder: str | None) -> None:
    """Raise a ConfError if another process holds the lock."""
    if holder is not None:
        raise ConfError(f'another process is training in {root_dir}: {holder or "unknown process"}',
                        'wait until it has finished, stop it (kill -TERM PID makes it write a checkpoint and exit), '
                        'or use another --root_dir')


@contextlib.contextmanager
def _exclusive(root_dir: str, then_share: bool) -> Iterator[str | None]:
    """Lock the folder and yield None, or yield the process that holds the lock, '' if it is unknown."""
    with _opened(root_dir) as file:
        if not (_lock(file, fcntl.LOCK_EX) and (not then_share or _lock(file, fcntl.LOCK_SH))):
            file.seek(0)
            yield file.read(_MOST_TEXT).strip()
            return
        _write(file, f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %H:%M:%S")}\n')
        try:
            yield None
        finally:
            _write(file, '')
            if os.path.isdir(root_dir) and os.listdir(root_dir) == [user_modules.LOCK]:  # the run did not start
                os.remove(os.path.join(root_dir, user_modules.LOCK))


@contextlib.contextmanager
def _opened(root_dir: str) -> Iterator[Any]:
    """Open the lock file. Forked processes close it, because they would hold the lock as well."""
    path = os.path.join(root_dir, user_modules.LOCK)
    try:
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            raise ConfError(f'{path}: expected a file, found a link, a folder or a pipe', 'remove it')
        opened = open(path, 'a+', encoding='utf8', errors='replace',
                      opener=lambda name, mode: os.open(name, mode | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))
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
    """Lock ``file``; return whether it is locked or the file system does not support locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return _is_current(file)  # not removed by the previous holder
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning('%s cannot be locked (%s): make sure that no other process trains in this folder', file.name,
                       error.strerror)
    return True


def _is_current(file: Any) -> bool:
    """Return whether the name of an open file still refers to this file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _write(file: Any, text: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full; the lock works without the text
        file.truncate(0)
        file.write(text)
        file.flush()


_open_files: set[Any] = set()
_held: dict[tuple[str, bool], contextlib.ExitStack] = {}  # key: folder, and whether the process is rank 0 or alone


def _close_in_child() -> None:
    for file in _open_files:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
