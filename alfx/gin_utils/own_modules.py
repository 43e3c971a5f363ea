"""Modules of the user's own that a conf imports: found beside the conf, and kept with the run that they were used in.

A module lies beside the conf, or in the working directory. Its file (of a package all its files), and the files of
modules that it imports from there, are copied into the ``conf`` folder of the run; a run that goes on looks there
first.
"""
import ast
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from alfx.gin_utils.conf_error import ConfError, Problem

__all__ = ['OwnFile', 'changed_since', 'copies', 'look_in']

_MOST_FILES = 500  # of a package; a folder with more is hardly what a conf imports


class OwnFile(NamedTuple):
    """A file of the user's code, as it was when it was imported.

    Attributes:
        name: relative to the folder that is searched for modules.
        text: what is in it.
    """
    name: str
    text: str


def look_in(module: str, folders: Iterable[str]) -> str | None:
    """Let ``import`` find a module in the first of some folders that has it.

    Args:
        module: its dotted name.
        folders: in the order in which they are searched.

    Returns:
        The folder; None if none of them has the module.

    Raises:
        ConfError: this process has imported another module of this name before.
    """
    top = module.partition('.')[0]
    folder = next((folder for folder in folders if _file_of(folder, top)), None)
    if folder is None or top == 'alfx':
        return None
    known = getattr(sys.modules.get(top), '__file__', None)
    path = _file_of(folder, top) or ''
    if known is not None and os.path.realpath(known) != os.path.realpath(path) and _text(known) != _text(path):
        raise ConfError([Problem('', f"'{top}' means {path} here, but this process has imported {known}, which is not "
                                 'the same', 'use a process of its own for each of them, or other names')])
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    return folder


def copies(found: Iterable[tuple[str, str]]) -> tuple[OwnFile, ...]:
    """The files to be kept with a run.

    Args:
        found: dotted names of modules with the folder each was found in.
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
    """The names of files that differ from those of the same name in a folder; what is not there does not differ."""
    return [file.name for file in files
            if os.path.isfile(path := os.path.join(folder, file.name)) and _text(path) != file.text]


def _file_of(folder: str, top: str) -> str | None:
    """The file of a module or package that lies in a folder."""
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
    """The first parts of the names of the modules that a text imports."""
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
