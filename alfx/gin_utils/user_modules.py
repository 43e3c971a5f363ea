"""User modules that a conf imports: found next to the conf, and copied into the run folder.

A module lies next to the conf or in the working directory. The ``conf`` folder of the run gets copies of its file (for
a package all its files), the files of modules that it imports from the same folder, and the files and folders that the
text of these files names in quotes, by name or pattern, if they are next to the file or to a package that contains it.
A resumed run searches that folder first. As long as the originals are unchanged it uses them instead, because a module
may read files that its text does not name.
"""
import ast
import glob
import importlib
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import NamedTuple

from alfx.gin_utils.conf_error import ConfError, Problem

LOCK = 'train.lock'  # file in the folder of each run
ORIGINS = 'modules.json'  # file in the conf folder of a run: folders from which its modules were copied
_MOST_FILES, _MOST_BYTES = 500, 20 * 2**20  # larger data is not copied into every run
_logger = logging.getLogger(__name__)


class OwnFile(NamedTuple):
    """A file of the user's code or a file that the code reads, with its contents at the time of the import.

    Attributes:
        name: path relative to the folder that is searched for modules.
        content: contents of the file.
        folder: that folder.
    """
    name: str
    content: bytes
    folder: str


def look_in(module: str, folders: Iterable[str]) -> str | None:
    """Make a module importable from the first folder that contains it.

    Args:
        module: dotted name of the module.
        folders: folders in the order in which they are searched. For the ``conf`` folder of a run, this is the folder
            from which the module was copied, if nothing has changed there.

    Returns:
        The folder; ``None`` if no folder contains the module.

    Raises:
        ConfError: this process has already imported a different module of this name.
    """
    top = module.partition('.')[0]
    folder = next((folder for folder in folders if _file_of(folder, module)), None)
    if folder is None or top == 'alfx':
        return None
    folder = next((origin for origin in origins(folder) if _are_equal(origin, copies([(module, folder)]))), folder)
    known = getattr(sys.modules.get(top), '__file__', None)
    path = _file_of(folder, module) or ''
    if known is not None and os.path.realpath(known) != os.path.realpath(path) and not (
            os.path.isfile(known) and _read(known) == _read(path)):
        raise ConfError([Problem('', f"'{top}' refers to {path} here, but this process has already imported a "
                                 f'different file, {known}', 'use a separate process for each, or rename one')])
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    return folder


def copies(found: Iterable[tuple[str, str]]) -> tuple[OwnFile, ...]:
    """Return the files to copy into the run folder.

    Args:
        found: dotted names of modules, each with the folder it was found in.
    """
    files: dict[str, OwnFile] = {}
    code = [(path, folder) for module, folder in found for path in _files_of(_file_of(folder, module))]
    data: list[tuple[str, str]] = []
    left_out, bytes_left = [], _MOST_BYTES
    while code or data:
        path, folder = (code or data).pop()
        name = os.path.relpath(path, folder)
        if name in files or name in left_out or name.startswith('..') or '__pycache__' in name:
            continue
        is_code, size = path.endswith('.py'), os.path.getsize(path)
        if not is_code and (size > bytes_left or len(files) >= _MOST_FILES or os.path.isdir(path)):
            left_out.append(name)
            continue
        bytes_left -= 0 if is_code else size
        files[name] = OwnFile(name, _read(path), folder)
        text = files[name].content.decode('utf8', errors='replace') if is_code or size < _MOST_BYTES // 20 else ''
        within = filter(None, os.path.dirname(name).split(os.sep))
        places = itertools.accumulate(within, os.path.join, initial=folder)
        others = [file for place in places for file in _named_in(text, place)]
        if is_code:
            others += [file for file in glob.glob(glob.escape(path[:-3]) + '.*') if not file.endswith(('.py', '.gin'))]
            package = os.path.dirname(name).replace(os.sep, '.')
            imported = [module for module in _imported_by(text, package) if module.partition('.')[0] != 'alfx']
            paths = dict.fromkeys(_file_of(folder, module) for module in imported)  # each once, in a fixed order
            others += [file for path in paths for file in _files_of(path)]
        for other in others:
            (code if other.endswith('.py') else data).append((other, folder))
    if left_out:
        _logger.warning('not copied into the run folder, because they are too large or too many: %s',
                        ', '.join(left_out[:5] + ['...'] * (len(left_out) > 5)))
    return tuple(files.values())


def changed_since(folder: str, files: Iterable[OwnFile]) -> list[str]:
    """Return the names of files that differ from the files of the same name in a folder; missing files are skipped."""
    return [file.name for file in files
            if os.path.isfile(path := os.path.join(folder, file.name)) and _read(path) != file.content]


def origins(folder: str) -> list[str]:
    """Return the folders from which the modules in the ``conf`` folder of a run were copied."""
    try:
        with open(os.path.join(folder, ORIGINS), encoding='utf8') as file:
            folders = json.load(file)
    except (OSError, ValueError):
        return []
    return [origin for origin in folders if isinstance(origin, str)] if isinstance(folders, list) else []


def _are_equal(folder: str, files: Iterable[OwnFile]) -> bool:
    return all(os.path.isfile(path := os.path.join(folder, file.name)) and _read(path) == file.content
               for file in files)


def _file_of(folder: str, module: str) -> str | None:
    """Return the file of a module in a folder, or of the package that contains it; ``None`` if there is none.

    A folder without ``__init__.py`` is a package as well; each of its modules is a separate file.
    """
    endings = (f'{os.sep}__init__.py', '.py', *EXTENSION_SUFFIXES)
    names = [path + ending for path in itertools.accumulate(module.split('.'), os.path.join) for ending in endings]
    return next((path for name in names if os.path.isfile(path := os.path.join(folder, name))), None)


def _files_of(path: str | None) -> list[str]:
    """Return all files of the package of an ``__init__.py``, or another file itself."""
    if path is None or not path.endswith('__init__.py'):
        return [] if path is None else [path]
    files = _files_in(folder := os.path.dirname(path))
    return files if path in files else files + sorted(glob.glob(f'{glob.escape(folder)}/**/*.py', recursive=True))


def _files_in(folder: str) -> list[str]:
    """Return the files of a folder and its subfolders except those of runs; the folder itself if there are too many."""
    files = []
    for at, folders, names in os.walk(folder):
        folders[:], names = ([], []) if LOCK in names else ([x for x in folders if x[0] != '.'], names)
        files += [path for name in sorted(names) if os.path.isfile(path := os.path.join(at, name))]  # no broken links
        if len(files) > _MOST_FILES:
            return [folder]
    return files


def _named_in(text: str, folder: str) -> list[str]:
    """Return the existing files, and the files in existing folders, that a text names in quotes.

    Files of a folder that the text names as well are returned even if the folder has too many files.
    """
    named = {match[1] for match in re.finditer(r"""["']([^"'\n\0]{1,200})["']""", text)}
    paths = [path for name in sorted(named)
             if not os.path.isabs(name) and not name.endswith('.gin') and name.strip('./*')
             for path in sorted(glob.glob(os.path.join(glob.escape(folder), name)))]
    return [file for path in paths for file in (
        [path] if os.path.isfile(path) else [*_named_in(text, path), *_files_in(path)])]


def _imported_by(text: str, package: str) -> Iterator[str]:
    """Yield the names of the modules that a module of ``package`` imports, and of objects that may be modules."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split('.')[:1 - node.level or None] if node.level else []
            module = '.'.join(filter(None, (*above, node.module)))
            yield from (module, *(f'{module}.{alias.name}' for alias in node.names))


def _read(path: str) -> bytes:
    with open(path, 'rb') as file:
        return file.read()
