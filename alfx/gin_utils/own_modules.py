"""Modules of the user that a conf imports: found next to the conf, and copied into the run folder.

A module lies next to the conf or in the working directory. Its file (for a package all its files), and the files of
modules that it imports from the same folder, are copied into the ``conf`` folder of the run. A resumed run searches
that folder first.
"""
import ast
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from alfx.gin_utils.conf_error import ConfError, Problem

__all__ = ['OwnFile', 'changed_since', 'copies', 'look_in']

_MOST_FILES = 500  # per package; a larger folder is unlikely to be a package that a conf imports


class OwnFile(NamedTuple):
    """A file of the user's code, with its contents at the time of the import.

    Attributes:
        name: path relative to the folder that is searched for modules.
        text: contents of the file.
    """
    name: str
    text: str


def look_in(module: str, folders: Iterable[str]) -> str | None:
    """Make a module importable from the first folder that contains it.

    Args:
        module: dotted name of the module.
        folders: folders in the order in which they are searched.

    Returns:
        The folder; ``None`` if no folder contains the module.

    Raises:
        ConfError: this process has already imported a different module of this name.
    """
    top = module.partition('.')[0]
    folder = next((folder for folder in folders if _file_of(folder, top)), None)
    if folder is None or top == 'alfx':
        return None
    known = getattr(sys.modules.get(top), '__file__', None)
    path = _file_of(folder, top) or ''
    if known is not None and os.path.realpath(known) != os.path.realpath(path) and _text(known) != _text(path):
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
    waiting = [(module.partition('.')[0], folder) for module, folder in found]
    done = set()
    while waiting:
        top, folder = waiting.pop()
        if (top, folder) in done:
            continue
        done.add((top, folder))
        for path in _files_of(folder, top):
            text = _text(path)
            files.setdefault(os.path.relpath(path, folder), OwnFile(os.path.relpath(path, folder), text))
            waiting += [(name, folder) for name in _imported_by(text) if name != 'alfx' and _file_of(folder, name)]
    return tuple(files.values())


def changed_since(folder: str, files: Iterable[OwnFile]) -> list[str]:
    """Return the names of files that differ from the files of the same name in a folder; missing files are skipped."""
    return [file.name for file in files
            if os.path.isfile(path := os.path.join(folder, file.name)) and _text(path) != file.text]


def _file_of(folder: str, top: str) -> str | None:
    """Return the file of a module or package in a folder; ``None`` if there is none."""
    paths = os.path.join(folder, top, '__init__.py'), os.path.join(folder, f'{top}.py')
    return next((path for path in paths if os.path.isfile(path)), None)


def _files_of(folder: str, top: str) -> list[str]:
    path = _file_of(folder, top)
    if path is None:
        return []
    if not path.endswith('__init__.py'):
        return [path]
    inside = [os.path.join(at, name) for at, _, names in os.walk(os.path.dirname(path)) for name in sorted(names)
              if name.endswith('.py')]
    return inside if len(inside) <= _MOST_FILES else []


def _imported_by(text: str) -> Iterator[str]:
    """Yield the top-level names of the modules that a source text imports."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition('.')[0]


def _text(path: str) -> str:
    with open(path, encoding='utf8', errors='replace') as file:
        return file.read()
