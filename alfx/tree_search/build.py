"""Compile ``kernel.c`` on first use and load it.

The library is kept in a folder of the user alone (``$XDG_CACHE_HOME/alfx``, else ``~/.cache/alfx``; if that cannot be
written, a folder that ends with the process), under a name made of the source, the compiler and its flags. Beside it
stands its checksum, so that a damaged or foreign file is noticed and built again. A library is written under another
name and renamed, so that processes that build at once do no harm to each other. Without a compiler, or with
``ALFX_NATIVE=0`` in the environment, there is none; the search then runs on tensors.
"""
import atexit
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
    """The library cannot be built here."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernel, or ``None`` where there cannot be one; says why once, in the log."""
    if os.environ.get('ALFX_NATIVE', '1') == '0':
        _logger.info('tree search: compiled code is switched off by ALFX_NATIVE=0; searching with tensors')
        return None
    try:
        return _load_from(_cache_folder())
    except (BuildError, OSError) as error:
        _logger.warning('tree search: %s; searching with tensors, which takes many times as long', error)
        return None


def _cache_folder() -> Path:
    """A folder that only this user can write, made if necessary."""
    base = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    folder = Path(base) / 'alfx'
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.mkdtemp(prefix='alfx-'))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _load_from(folder: Path) -> ctypes.CDLL:
    """The library in ``folder``, built if it is missing or not what was built."""
    compiler = _compiler()
    path = folder / f'tree_search-{_key(compiler)}.so'
    if not _is_intact(path):
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # intact, but not for this machine: a home folder that several share
        _build(compiler, path)
        return ctypes.CDLL(str(path))


def _compiler() -> str:
    for name in (os.environ.get('CC', ''), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError(f'found no C compiler (looked for {", ".join(_COMPILERS)}; CC names another)')


def _key(compiler: str) -> str:
    """Names the library by all that it depends on."""
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
        # Another process may build at the same time. Compilers make the same file of the same source; if this one
        # does not, what does not fit is built again by whoever loads next.
        os.replace(made, path)
        os.replace(checksum, path.with_suffix('.sha256'))
