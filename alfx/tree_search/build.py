"""Compile ``kernel.c`` on first use and load it.

The library is cached in a private folder of the user (``$XDG_CACHE_HOME/alfx``, else ``~/.cache/alfx``; if that is not
writable, a temporary folder). Its name is a hash of the source, the compiler and the flags. A checksum
file next to it detects damaged and foreign files, which are built again. A library is written under a temporary name
and renamed, so processes that build concurrently do not interfere. Without a compiler, or with ``ALFX_NATIVE=0`` in the
environment, the search runs on tensors instead.
"""
import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name('kernel.c')
_FLAGS = ('-O3', '-std=c99', '-ffp-contract=off', '-fPIC', '-shared')
_COMPILERS = ('cc', 'gcc', 'clang')
_SECONDS = 120
_logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """Building the library failed."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled kernel, or ``None`` if it is unavailable; the reason is logged once."""
    if os.environ.get('ALFX_NATIVE', '1') == '0':
        _logger.info('tree search: compiled code is disabled by ALFX_NATIVE=0; searching with tensors')
        return None
    try:
        return _load_from(_cache_folder())
    except (BuildError, OSError) as error:
        _logger.warning('tree search: %s; searching with tensors, which is many times slower', error)
        return None


def _cache_folder() -> Path:
    """Return a folder that only this user can write; it is created if necessary."""
    base = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    folder = Path(base) / 'alfx'
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.mkdtemp(prefix='alfx-'))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _load_from(folder: Path) -> ctypes.CDLL:
    """Load the library in ``folder``; it is built if it is missing or fails the checksum."""
    compiler = _compiler()
    path = folder / f'tree_search-{_key(compiler)}.so'
    if not _is_intact(path):
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # intact, but for another machine: home folders may be shared
        _build(compiler, path)
        return ctypes.CDLL(str(path))


def _compiler() -> str:
    for name in (os.environ.get('CC', ''), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError(f'found no C compiler (looked for {", ".join(_COMPILERS)}; set CC to use another)')


def _key(compiler: str) -> str:
    """Return the hash of everything that the library depends on."""
    state = os.stat(compiler)
    parts = [_SOURCE.read_bytes(), repr((os.path.realpath(compiler), state.st_size, state.st_mtime_ns, _FLAGS,
                                         platform.machine(), platform.libc_ver())).encode()]
    return hashlib.sha256(b'\0'.join(parts)).hexdigest()[:24]


def _is_intact(path: Path) -> bool:
    try:
        return _checksum(path) == path.with_suffix('.sha256').read_text().strip()
    except OSError:
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix='build-', dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            subprocess.run([compiler, *_FLAGS, '-o', str(made), str(_SOURCE), '-lm'], check=True, capture_output=True,
                           timeout=_SECONDS, text=True)
        except subprocess.CalledProcessError as error:
            raise BuildError(f'{compiler} failed: {error.stderr.strip()[-500:]}') from error
        except subprocess.TimeoutExpired as error:
            raise BuildError(f'{compiler} took more than {_SECONDS} seconds') from error
        checksum = made.with_suffix('.sha256')
        checksum.write_text(_checksum(made))
        # Another process may build at the same time. Compilers usually produce identical files; if they differ, the
        # mismatch of library and checksum makes the next load build again.
        os.replace(made, path)
        os.replace(checksum, path.with_suffix('.sha256'))
