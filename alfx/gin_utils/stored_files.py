"""Files of run folders and datasets: reading that turns damage into one message, and atomic writing.

Readers open regular files only, because opening a pipe could block forever. They check the size before they allocate
memory, and the types of JSON values before these are used.
"""
import contextlib
import json
import math
import os
import reprlib
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from alfx.gin_utils.conf_error import ConfError

MOST_BYTES = 2**26  # of a text file; parsed JSON takes about ten times as much memory
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class FileError(ConfError):
    """Damaged or unreadable file. The message contains the path, what was expected, what was found and a remedy.

    Args:
        path: path of the file.
        reason: what was expected, and what was found.
        remedy: what to do.
    """

    def __init__(self, path: str, reason: str, remedy: str):
        super().__init__(f'{path} is damaged: {reason}', remedy)
        self.reason = reason


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the file may not be read.
        FileError: it is a folder, a pipe, a device or a broken link, or cannot be read from the disk.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError) as error:
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            raise FileError(path, f'expected a file, found a link to {os.readlink(path)}, which does not exist',
                            'restore the file or remove the link') from None
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        found = 'a folder' if stat.S_ISDIR(mode) else 'a pipe, a socket or a device'
        raise FileError(path, f'expected a file, found {found}', 'move it away')
    return os.fdopen(descriptor, 'rb')


def check_regular(path: str) -> None:
    """Check that a path can be opened for appending, which blocks for a pipe.

    Raises:
        FileError: the path exists, but is not a regular file.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise FileError(path, 'expected a file, found a folder, a pipe, a device or a broken link', 'move it away')


def read_text(path: str, remedy: str = 'restore the file', most: int = MOST_BYTES, errors: str = 'strict') -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Args:
        path: file to read.
        remedy: what to do if the file is damaged.
        most: maximum number of bytes.
        errors: 'strict', or 'replace' to read bytes that are not UTF-8 as U+FFFD.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it cannot be read, has more than ``most`` bytes, or is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(most + 1) if size <= most else b''
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    if max(size, len(data)) > most:
        raise FileError(path, f'expected at most {most:,} bytes, found {max(size, len(data)):,}', remedy)
    try:
        return data.decode('utf-8-sig', errors)
    except UnicodeDecodeError as error:
        raise FileError(path, f'expected UTF-8 text, found the byte {data[error.start]:#04x} at position '
                        f'{error.start:,}', remedy) from None


def read_json(path: str, schema: Any, remedy: str = 'restore the file') -> Any:
    """Return the content of a JSON file.

    Args:
        path: file to read.
        schema: schema for :func:`mismatch`.
        remedy: what to do if the file is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it cannot be read, is not JSON, or does not match ``schema``.
    """
    text = read_text(path, remedy)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = 'too many nested lists' if isinstance(error, RecursionError) else error
        raise FileError(path, f'expected JSON, found {_short.repr(text)}: {reason}', remedy) from None
    problem = mismatch(found, schema)
    if problem:
        raise FileError(path, problem, remedy)
    return found


def mismatch(value: Any, schema: Any, where: str = '') -> str:
    """Describe the first difference between a value and its schema; '' if it matches.

    Args:
        value: the value.
        schema: a type, where ``float`` accepts every finite number; a range of integers; a tuple of alternatives;
            ``[schema]`` for a list; ``[schema, schema]`` for a list of two entries; ``{str: schema}`` for a dict; or a
            dict with the schema of each key, where the name of an optional key ends with '?' and other keys are
            allowed.
        where: name of the value.
    """
    if isinstance(schema, tuple):
        problems = [mismatch(value, each, where) for each in schema]
        return '' if '' in problems else _problem(where, ' or '.join(map(_name, schema)), value)
    if isinstance(schema, list) and isinstance(value, list):
        kinds = schema * len(value) if len(schema) == 1 else schema
        if len(kinds) != len(value):
            return _problem(where, f'{len(kinds)} entries', value)
        return next(filter(None, (mismatch(x, kind, f'{where}[{i}]') for i, (x, kind) in enumerate(zip(value, kinds)))),
                    '')
    if isinstance(schema, dict) and isinstance(value, Mapping):
        if str in schema:
            parts = [(key, x, schema[str]) for key, x in value.items()]
            if any(not isinstance(key, str) for key in value):
                return _problem(where, 'names', list(value))
        else:
            names = {key.removesuffix('?'): key for key in schema}
            missing = [key for key in schema if not key.endswith('?') and key not in value]
            if missing:
                return _problem(where, f'an entry {missing[0]!r}', list(value))
            parts = [(key, value[key], schema[long]) for key, long in names.items() if key in value]
        return next(filter(None, (mismatch(x, kind, f'{where}.{key}' if where else str(key))
                                  for key, x, kind in parts)), '')
    if isinstance(schema, range):
        return '' if type(value) is int and value in schema else _problem(where, _name(schema), value)
    if schema is float:
        is_number = type(value) is int and abs(value) < 2**63 or type(value) is float and math.isfinite(value)
        return '' if is_number else _problem(where, _name(schema), value)
    is_same = isinstance(schema, type) and isinstance(value, schema) and (type(value) is not bool or schema is not int)
    return '' if is_same else _problem(where, _name(schema), value)


def _problem(where: str, expected: str, value: Any) -> str:
    return f'{where + ": " if where else ""}expected {expected}, found {_short.repr(value)}'


def _name(schema: Any) -> str:
    names = {float: 'a finite number', int: 'an integer', str: 'text', dict: 'a dict', list: 'a list',
             type(None): 'nothing'}
    if isinstance(schema, range):
        return f'an integer from {schema.start:,} to {schema.stop - 1:,}'
    return names.get(schema if isinstance(schema, type) else type(schema), getattr(schema, '__name__', str(schema)))


def _unreadable(path: str, error: Exception) -> FileError:
    reason = getattr(error, 'strerror', None) or error
    return FileError(path, f'expected a readable file, found: {reason}', 'check the path, the permissions and the disk')


def write(path: str, content: str | bytes) -> None:
    """Write a file with :func:`replacing`; text is encoded as UTF-8."""
    with replacing(path) as temporary, open(temporary, 'wb') as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Provide a temporary file name, and rename that file to ``path`` at the end.

    The temporary file is in the same folder, has the same suffix and a unique name. It is flushed to disk before it is
    renamed, and removed after an error, so ``path`` is written completely or not at all.

    Args:
        path: file to write; its folder must exist.

    Raises:
        FileError: the path is a folder.
        OSError: the file cannot be written.
    """
    path = os.path.realpath(path)
    if os.path.isdir(path):
        raise FileError(path, 'expected a file, found a folder', 'move it away')
    if os.path.exists(path) and stat.S_ISCHR(os.stat(path).st_mode):  # such as /dev/null
        yield path
        return
    folder, name = os.path.split(path)
    descriptor, temporary = tempfile.mkstemp(os.path.splitext(name)[1], f'.{name[:100]}.', folder)
    try:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(descriptor, 0o666 & ~mask)
        yield temporary
        os.fsync(descriptor)
        os.replace(temporary, path)
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
