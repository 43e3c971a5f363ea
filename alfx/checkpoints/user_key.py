"""Secret key of the user, which authenticates files that alfx has written itself.

The key is stored in the user's configuration folder (``$XDG_CONFIG_HOME/alfx/key``, by default ``~/.config/alfx/key``),
readable only by the user, and never in a run folder, so sharing a run folder does not share the key.
"""
import contextlib
import os
import secrets
import stat

_SIZE = 32


class NoKeyError(RuntimeError):
    """Raised if the key is unavailable or not secret; the message contains the reason and a remedy."""


def path() -> str:
    """Return the path of the key."""
    home = os.environ.get('XDG_CONFIG_HOME') or os.path.join(os.path.expanduser('~'), '.config')
    return os.path.join(home, 'alfx', 'key')


def user_key() -> bytes:
    """Return the key. It is created if it does not exist.

    Raises:
        NoKeyError: the key cannot be created or read, or other users can read or replace it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            _create(path())
        with open(path(), 'rb') as file:
            mode = os.fstat(file.fileno())
            key = file.read(_SIZE + 1)
    except OSError as error:
        raise NoKeyError(f'the key {path()} cannot be created or read: {error.strerror}; set XDG_CONFIG_HOME to a '
                         'folder that you can write') from error
    if mode.st_uid != os.geteuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise NoKeyError(f'the key {path()} is not secret: it belongs to another user, or other users can read it; '
                         'remove it, and a new key is created')
    if len(key) != _SIZE:
        raise NoKeyError(f'the key {path()} is damaged: expected {_SIZE} bytes, found {len(key)}; remove it, and a '
                         'new key is created')
    return key


def _create(name: str) -> None:
    """Create the key atomically, so that concurrent processes all use the first one.

    Raises:
        FileExistsError: the key exists.
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
