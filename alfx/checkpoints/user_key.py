"""A secret of the user, by which a program knows again what it has written itself.

It lies in the user's configuration folder (``$XDG_CONFIG_HOME/alfx/key``, by default ``~/.config/alfx/key``), readable
by the user alone, and never in a run folder: who is handed a run folder is not handed the key.
"""
import contextlib
import os
import secrets
import stat

_SIZE = 32


class NoKeyError(RuntimeError):
    """There is no key, or it is no secret; the message says why and what to do."""


def path() -> str:
    """Where the key is."""
    home = os.environ.get('XDG_CONFIG_HOME') or os.path.join(os.path.expanduser('~'), '.config')
    return os.path.join(home, 'alfx', 'key')


def user_key() -> bytes:
    """The key, which is made if there is none.

    Raises:
        NoKeyError: it cannot be made or read, or others can read or replace it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            _make(path())
        with open(path(), 'rb') as file:
            mode = os.fstat(file.fileno())
            key = file.read(_SIZE + 1)
    except OSError as error:
        raise NoKeyError(f'the key {path()} cannot be made or read: {error.strerror}; set XDG_CONFIG_HOME to a folder '
                         'of yours') from error
    if mode.st_uid != os.geteuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise NoKeyError(f'the key {path()} is no secret: it belongs to somebody else or others may read it; remove '
                         'it, another one is made')
    if len(key) != _SIZE:
        raise NoKeyError(f'the key {path()} is damaged: expected {_SIZE} bytes, found {len(key)}; remove it, another '
                         'one is made')
    return key


def _make(name: str) -> None:
    """Make the key; whoever is first makes the one that all use.

    Raises:
        FileExistsError: there is one.
    """
    if os.path.lexists(name):
        return
    os.makedirs(os.path.dirname(name), mode=0o700, exist_ok=True)
    temporary = f'{name}.{os.getpid()}'
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, 'wb') as file:
            file.write(secrets.token_bytes(_SIZE))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, name)
    finally:
        os.remove(temporary)
