"""What is written at a position of a conf.

Lines are read one by one, because a conf that is being written is often not valid gin.
"""
import re
from typing import NamedTuple

INCLUDE = re.compile(r"""[ \t]*include[ \t]+['"]([^'"]*)""")
_STRING_OR_COMMENT = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\#.*""")
_WORD = re.compile(r'[@%]?[\w./]*')


class Name(NamedTuple):
    """A name in a conf.

    Attributes:
        kind: 'object' for a class or function, 'argument', 'macro', 'include' for the name of a file, or '' if there is
            no name.
        name: the name, without scopes.
        start: column of its first character.
        end: column after its last character.
        owner: the class or function of an argument; '' for other kinds.
    """
    kind: str
    name: str
    start: int
    end: int
    owner: str = ''


_NOTHING = Name('', '', 0, 0)


def name_at(text: str, line: int, column: int) -> Name:
    """Return the name at a position, or a name of kind '' within a comment, a string or a literal value.

    The name may be empty if one can be written there, and it need not exist.
    """
    lines = text.split('\n')
    if include := INCLUDE.match(lines[line]):
        is_inside = include.start(1) <= column <= include.end(1)
        return Name('include', include[1], *include.span(1)) if is_inside else _NOTHING
    code = _STRING_OR_COMMENT.sub(lambda found: ('#' if found[0][0] == '#' else ' ') * len(found[0]), lines[line])
    start = re.search(rf'{_WORD.pattern}$', code[:column]).start()  # type: ignore[union-attr]
    word = _WORD.match(code, start)[0]  # type: ignore[index]
    before, end = code[:start], start + len(word)
    name = word.lstrip('@%').rpartition('/')[2]
    start = end - len(name)
    if re.search('[\'"#]', before) or re.match(r'\s*(import|from)\s', before):
        return _NOTHING
    if word.startswith(('@', '%')):
        return Name('object' if word[0] == '@' else 'macro', name, start, end)
    if before.strip():  # in a value
        call = re.search(r'@(?:[\w.]+/)*([\w.]+)\((?:[^()]*,)?\s*$', before)
        return Name('argument', name, start, end, call[1]) if call else _NOTHING
    if before and (block := _block_of(lines[:line])):
        return Name('argument', name, start, end, block)
    owner, dot, argument = name.rpartition('.')
    if not dot or re.match(r'\s*:', code[end:]):
        return Name('macro' if re.match(r'\s*=', code[end:]) else 'object', name, start, end)
    first = end - len(argument)
    return Name('argument', argument, first, end, owner) if column >= first else Name('object', owner, start, first - 1)


def _block_of(above: list[str]) -> str:
    """Return the class or function whose block continues after these lines; '' if there is none."""
    code = next((line for line in reversed(above) if line.strip() and line[0] not in ' \t#'), '')
    block = re.match(r'(?:[\w.]+/)*([\w.]+)[ \t]*:', code)
    return block[1] if block else ''
