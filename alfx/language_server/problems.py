"""The mistakes of a conf, with their locations in its text."""
import os
import re
from collections.abc import Mapping

from alfx import gin_utils
from alfx.gin_utils.parsing import Reader, find_included, show_path
from alfx.language_server.text import INCLUDE

Mistake = tuple[int, int, int, str]
"""Line, first column, column after the last one, and message."""


def mistakes(path: str, texts: Mapping[str, str], import_modules: bool = False) -> list[Mistake]:
    """Return the mistakes of a conf.

    A mistake in an included file is shown at the line of the include.

    Args:
        path: path of the conf.
        texts: texts by path that replace the contents on disk; they include the text of ``path``.
        import_modules: import the modules that the conf imports; see :func:`~alfx.gin_utils.check_file`.
    """
    reader, problems = gin_utils.check_file(path, texts, import_modules)
    paths = {show_path(source.path): source.path for source in reader.sources}
    lines = texts[path].split('\n')
    found = []
    for location, message, hint in problems:
        message = f'{message}\n{hint}' if hint else message
        shown, _, number = location.rpartition(':')
        at = paths.get(shown, os.path.abspath(location))
        found.append(_placed(reader, path, lines, min(int(number), len(lines)) - 1, message)
                     if at == path and number.isdigit() else
                     _at_include(reader, path, lines, at, f'{location}: {message}'.removeprefix(': ')))
    return list(dict.fromkeys(found))


def _placed(reader: Reader, path: str, lines: list[str], first: int, message: str) -> Mistake:
    """Return a mistake of a statement at the word that its message quotes, at the value, or at the whole line."""
    after = min((s.line - 1 for s in reader.statements if s.file == path and s.line - 1 > first), default=len(lines))
    quoted = re.search(r"'[@%]?([\w./]+)'", message.partition('\n')[0])
    pattern = rf'(?<!\w){re.escape(quoted[1])}(?!\w)' if quoted else '(?!)'
    if re.match(r'\S+ expects |syntax error: cannot read the value', message):
        pattern = r'(?<==)\s*\S.*'
    for number in range(first, after):
        if word := re.search(pattern, re.sub(r'\s*#[^\'"]*$', '', lines[number])):
            return number, word.end() - len(word[0].lstrip()), word.end(), message
    return first, len(lines[first]) - len(lines[first].lstrip()), len(lines[first].rstrip()), message


def _at_include(reader: Reader, path: str, lines: list[str], at: str, message: str) -> Mistake:
    """Return a mistake of an included file at the include that leads to it; at the first line if there is none."""
    for number, line in enumerate(lines):
        include = INCLUDE.match(line)
        if include and find_included(include[1], path) in (at, *reader.included_by.get(at, ())):
            return number, *include.span(1), message
    return 0, 0, len(lines[0]), message
