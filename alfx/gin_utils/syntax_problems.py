"""Messages for text that is not gin: what was read, and how to write it."""
import re
import unicodedata
from collections.abc import Iterator

from alfx.gin_utils.conf_error import Problem

_NOT_CLOSED, _CLOSE = 'a bracket or a string is not closed, or a comma is missing', 'close it, or add the comma'
_STRINGS_AND_COMMENTS = re.compile(r"""'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|\#.*""")
_EXPRESSION = re.compile(r'=.*[\w.)\]\s]\s*(\*\*?|//?|\+|-|[%^<>]|==|\b(if|for|and|or|is|in)\b)\s*[-+\w.(%=]'
                         r'|\]\s*\[|\.format')
_VALUES = {'true': 'True', 'yes': 'True', 'on': 'True', 'false': 'False', 'no': 'False', 'off': 'False', 'none': 'None',
           'null': 'None', 'nil': 'None'}
_LOOKS_LIKE = {'`': "'", **dict.fromkeys('\u2018\u2019\u201a\u201b\u2032', "'"),
               **dict.fromkeys('\u201c\u201d\u201e\u201f\u2033', '"'),
               **dict.fromkeys('\u2010\u2011\u2012\u2013\u2014\u2015\u2212', '-'),
               **dict.fromkeys('\u2028\u2029\u0085', 'a new line')}
"""ASCII characters that editors and web pages replace; compatibility characters are found by normalization."""


def odd_characters(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and hint for each line with a character that gin does not read, outside strings and comments.

    Letters of other alphabets count, because a name with one of them looks like another name.
    """
    if re.search(r'[^\t\n\f\r -_a-~]', text) is None:
        return
    for number, line in enumerate(text.split('\n'), 1):
        code = _blanked(line)
        found = re.search(r'[^\t\f\r -_a-~]', code)
        if found:
            character = found[0]
            name = unicodedata.name(character, '') or 'a control character'
            ascii_text = _LOOKS_LIKE.get(character) or unicodedata.normalize('NFKC', character)
            what = 'remove it' if unicodedata.category(character) in ('Cf', 'Cc') else 'use ASCII'
            if ascii_text.isascii() and ascii_text.isprintable():
                what = f'write {ascii_text if len(ascii_text) > 1 else "a space" if ascii_text == " " else ascii_text}'
            yield number, f'column {found.start() + 1} is U+{ord(character):04X} ({name}): {what}'


def _blanked(line: str) -> str:
    """Return a line with its strings and comments replaced by spaces."""
    return _STRINGS_AND_COMMENTS.sub(lambda found: ' ' * len(found[0]), line)


def syntax_problem(message: str, line_text: str, location: str, offset: int | None = None) -> Problem:
    """Return the problem of a syntax error.

    Args:
        message: message of gin or of Python's tokenizer.
        line_text: line of the error; '' if unknown.
        location: location of the error.
        offset: number of characters before the error; ``None`` if unknown.
    """
    hint = ''
    column = '' if offset is None else f' (column {offset + 1})'
    token = re.search(r"Failed to parse token '(.*)'", message)
    code = _blanked(line_text)
    if token:
        word = token.group(1)
        name, _, value = line_text.partition('=')
        written = value.split('#')[0].strip() or line_text.split('#')[0].strip() or word
        if value and name.strip().startswith(word) and word not in value:  # a new statement where a value continues
            return Problem(location, f'syntax error: {_NOT_CLOSED}{column}  [{line_text.strip()}]', _CLOSE)
        if word.lower() in _VALUES:
            hint = f'write {_VALUES[word.lower()]}'
        elif word.lower() in ('inf', 'infinity'):
            hint = 'write %alfx.infinity'
        elif re.search(r'\w[(\[]|\b(for|lambda|not)\b|:=', written):
            hint = 'a conf cannot contain calls or expressions: write the result'
        elif '\\' in written:
            hint = 'write / instead of a backslash'
        elif written.startswith('include '):
            hint = f"write include '{written.split()[-1]}'"
        elif re.match(r"""\w+['"]""", written):
            hint = 'remove the letters before the quotes'
        else:
            text = word if written[0] in '([{' else written
            hint = f"text needs quotes: '{text}'; a reference begins with @, a macro with %"
        message = f'cannot read the value {written}'
    elif 'EOF in multi-line' in message:  # Python 3.12 adds words around it
        message, hint = 'the file ends inside a bracket or a string', 'close it'
    elif re.search("""['"]""", code):
        message, hint = 'a string is not closed', 'close it'
    elif code.isascii() and _EXPRESSION.search(re.sub(r'(?<=\d)[eE][-+](?=\d)', 'e', code).replace('= -', '=')):
        message, hint = 'expressions are not allowed in conf files', 'write the result'
    elif message.startswith("Expected ',' or") or message.startswith('unterminated string'):
        message, hint = _NOT_CLOSED, _CLOSE
    elif re.match(r'\s*[\w./]+\s*:\s*[^\s]', code) and '=' not in code:
        message = 'a colon is followed by a value'
        hint = 'write Name.parameter = value, or parameter = value in a block'
    elif ';' in code:
        message, hint = 'a line has two statements', 'write each statement on a line of its own'
    elif message.startswith("Expected ':'") and '{' in code:
        message, hint = 'a conf cannot contain a set', "write a tuple: (1, 2); or a dict: {'key': value}"
    elif message.startswith('Unable to parse value'):
        message = 'cannot read the value'
        hint = 'values are Python literals, @references and %macros'
    elif re.search("Unexpected token|Invalid identifier|Malformatted|[Ee]xpected ('=|indent|':' or)", message):
        message, hint = 'not a statement', "expected 'Name.parameter = value', 'macro = value', an import or an include"
    elif message.startswith('Expected newline'):
        message, hint = 'the line continues after the value', 'write one statement per line; text needs quotes'
        if re.search(r'=\s*[-+]?0\d', code):
            hint = 'write numbers without leading zeros'
        if re.search(r'=[^(\[{]*,\s*\S', _STRINGS_AND_COMMENTS.sub(lambda found: found[0][0].strip('#'), line_text)):
            hint = 'write a tuple in parentheses: (64, 64); a number has no commas: 1000000'
    shown = line_text.strip()
    return Problem(location, f'syntax error: {message}{column}' + (f'  [{shown}]' if shown and not token else ''), hint)
