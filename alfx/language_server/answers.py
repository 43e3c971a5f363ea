"""Hover, completion and definition at a position of a conf."""
import contextlib
import glob
import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import gin

from alfx import gin_utils
from alfx.gin_utils import reference_types, registry, type_check
from alfx.gin_utils.parsing import Reader, Statement, find_included, folders_of_includes
from alfx.language_server.text import Name, name_at
from alfx.utils import docstrings


class Completion(NamedTuple):
    """A name that can be written.

    Attributes:
        name: text that replaces the columns from ``start`` up to the position.
        start: first column that it replaces.
        kind: name of the kind in the protocol: 'Class' (also for functions), 'Field' for an argument, 'Variable' for a
            macro, 'File' for a conf.
        detail: type and default of an argument, value of a macro, complete name of a class or function.
        meaning: meaning of an argument, as Markdown.
    """
    name: str
    start: int
    kind: str
    detail: str = ''
    meaning: str = ''


def hover(path: str, texts: Mapping[str, str], line: int, column: int) -> str:
    """Return the description of the name at a position, as Markdown; '' if there is none.

    Args:
        path: path of the conf.
        texts: texts by path that replace the contents on disk; they include the text of ``path``.
        line: line of the position.
        column: column of the position.
    """
    name = name_at(texts[path], line, column)
    if name.kind == 'macro' and (macro := _macros(path, texts).get(name.name)):
        return f'```\n{macro.text} = {macro.value!r}\n```\n{macro.location}'
    described = _described(name)
    if described is None:
        return ''
    if name.kind == 'object':
        code = f'{described.name}({", ".join(_argument(described, key, False) for key in described.parameters)})'
        text = described.docstring.split('\n\n')[0]
    elif name.name in described.parameters:
        code = f'{described.name}.{_argument(described, name.name)}'
        text = gin_utils.meanings(described.selector).get(name.name, '')
    else:
        return ''
    return f'```python\n{code}\n```\n{docstrings.markdown(text)}'.rstrip()


def completions(path: str, texts: Mapping[str, str], line: int, column: int) -> list[Completion]:
    """Return the names that can be written at a position; for the arguments see :func:`hover`."""
    lines = texts[path].split('\n')
    name = name_at('\n'.join([*lines[:line], lines[line][:column]]), line, column)
    if name.kind == 'include':
        return [Completion(file, name.start, 'File') for file in _confs(path, name.name)]
    if name.kind == 'macro':
        others = '\n'.join([*lines[:line], '', *lines[line + 1:]])  # this line is not valid yet
        return [Completion(key, name.start, 'Variable', repr(macro.value))
                for key, macro in _macros(path, {**texts, path: others}).items()]
    if name.kind == 'argument' and (described := _described(name)):
        meanings = gin_utils.meanings(described.selector)
        return [Completion(key, name.start, 'Field', _argument(described, key),
                           docstrings.markdown(meanings.get(key, ''))) for key in described.parameters]
    start = name.start - (len(name.owner) + 1 if name.owner else 0)  # the owner may be a module
    names = {gin.config._REGISTRY.minimal_selector(full): full for full in registry.registered_selectors()}
    return [Completion(short, start, 'Class', full) for short, full in sorted(names.items()) if name.kind]


def definition(path: str, texts: Mapping[str, str], line: int, column: int) -> Optional[tuple[str, int]]:
    """Return file and line that define the name at a position, or ``None``; for the arguments see :func:`hover`.

    An argument is defined by its class or function.
    """
    name = name_at(texts[path], line, column)
    if name.kind == 'include' and (included := find_included(name.name, path)):
        return included, 0
    if name.kind == 'macro' and (macro := _macros(path, texts).get(name.name)):
        return macro.file, macro.line - 1
    described = _described(name)
    return _source_of(described.selector) if described else None


def _macros(path: str, texts: Mapping[str, str]) -> dict[str, Statement]:
    """Return the definitions in effect of the macros of a conf, up to its first syntax error."""
    reader = Reader(texts)
    reader.read_file(path)
    return {statement.text: statement for statement in reader.statements if statement.kind == 'macro'}


def _described(name: Name) -> Optional[Any]:
    """Return the description of an object or of the owner of an argument, or ``None`` if its name is not unique."""
    selector = name.owner or name.name
    with contextlib.suppress(gin_utils.ConfError):
        return gin_utils.describe('suite_gym.load' if selector == 'load' else selector)  # as in the check of a conf
    return None


def _argument(described: Any, name: str, complete: bool = True) -> str:
    """Return an argument with its default, and if ``complete`` with its type."""
    parameter = described.parameters[name]
    default = parameter.default
    shown = docstrings.show_default(default)
    if not complete:
        return name if default is parameter.empty else f'{name}={shown}'
    kinds = registry.annotations_of(reference_types.resolve(described.selector).wrapped)
    kind = kinds.get(name, parameter.annotation)
    text = '' if kind is parameter.empty else f': {kind if isinstance(kind, str) else type_check.show(kind)}'
    text = re.sub(r'\b(?:[a-z_]\w*\.)+(?=\w)', '', text)  # without modules
    return f'{name}{text}' + ('  # required' if default is parameter.empty else f' = {shown}')


def _confs(path: str, written: str) -> list[str]:
    """Return the confs that a conf can include, as names; ``written`` may begin with a folder."""
    below = os.path.dirname(written)
    found = [file for folder in folders_of_includes(path)
             for file in sorted(glob.glob(os.path.join(glob.escape(os.path.join(folder, below)), '*.gin')))]
    return list(dict.fromkeys(os.path.join(below, os.path.basename(file)) for file in found if file != path))


def _source_of(selector: str) -> Optional[tuple[str, int]]:
    """Return file and line of the definition of a class or function; ``None`` if it is not written in Python."""
    target = registry.step_function_of(selector) or inspect.unwrap(reference_types.resolve(selector).wrapped)
    module, _, name = selector.rpartition('.')
    own = getattr(target, '__qualname__', name).partition('.')[0]
    for at in (module, target.__module__):
        with contextlib.suppress(KeyError, TypeError, OSError):  # not the name of a module, or not written in Python
            text = inspect.getsource(sys.modules[at])
            if found := re.search(rf'^(?:(?:class|def) (?:{own}|{name})\b|{name}\b[^=\n(]*=)', text, re.MULTILINE):
                return inspect.getfile(sys.modules[at]), text.count('\n', 0, found.start())
    return None
