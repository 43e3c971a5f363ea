r"""Convert formulas in docstrings to LaTeX for the documentation pages.

Docstrings contain formulas as indented blocks that are readable in a terminal:

    A(s, a) = min_i Q_i(s, a) - V(s),  a ~ pi(. | s)        (eq. 3)

:func:`to_latex` understands

- names: Greek letters, subscripts (``Q_i``, ``sum_{s < t}``), indices (``r[t+1]``), primes; names of more than one
  letter are set upright;
- operators: ``+ - * / ^ .``, products without a sign, relations, absolute values and norms, conditions (``p(a | s)``),
  ``sum``, ``prod``, ``mean``, ``E[...]``, ``min``, ``max``, ``log``, ``sqrt`` and other functions;
- words (``with``, ``if``, two or more words in a row), and cells separated by two or more spaces: labels at the
  beginning, comments at the end, further formulas.

A block with anything else is not converted. ``1/2 x`` without spaces is half of x; ``1 / 2 x`` is ambiguous and
therefore not converted. The LaTeX is restricted to macros that GitHub allows in Markdown, which excludes operatorname.
"""
import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

_GREEK = set('alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi psi omega '
             'Gamma Delta Theta Lambda Sigma Phi Psi Omega'.split())
_FUNCTIONS = {**{name: f'\\{name}' for name in ('log', 'exp', 'min', 'max', 'tanh', 'sin', 'cos')},
              'sum': r'\sum', 'prod': r'\prod', 'grad': r'\nabla', 'argmin': r'\arg\min',
              'argmax': r'\arg\max', 'mean': r'\mathop{\mathrm{mean}}'}
_INDEXED = {'sum', 'prod', 'mean', 'grad', 'min', 'max', 'argmin', 'argmax'}
_LINEAR = {'sum', 'prod', 'mean', 'grad', 'min', 'max'}  # a fraction after these does not contain them
_RELATIONS = {'=': '=', '~': r'\sim', '->': r'\to', '<-': r'\leftarrow', '<=': r'\le', '>=': r'\ge', '<': '<',
              '>': '>', '+=': r'\mathrel{+}=', '-=': r'\mathrel{-}='}
_VERBS = {'minimizes', 'maximizes'}
_BASES = {'sd'}  # names of more than one letter with words as subscripts
_WORDS = _VERBS | set('minimize maximize with without where if or and else otherwise over of in for to at by from on '
                      'each all write'.split())
_ARTICLES = {'a', 'an', 'the'}
_TOKEN = re.compile(r"""(?P<gap>[ ]{2,}) | (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    | (?P<name>[A-Za-z]+\d*'*(?:_[A-Za-z0-9]+)*'*) (?P<star>\*(?![\w(*]))?
    | (?P<sign>\.\.\.|\.\.|\|\||->|<-(?=[ ])|<=|>=|\+=|-=|\*\*|[-+*/^()\[\]{},;~<>=|._])""", re.VERBOSE)
_NAME = re.compile(r"([A-Za-z]+)(\d*)('*)((?:_[A-Za-z0-9]+)*)('*)")
_COMMENT = re.compile(r'[ ]{2,}(\([\w.,:; -]+\))$')
_TALL = re.compile(r'\\(?:frac|sum|prod)(?![a-z])')
_CLOSES = {'(': ')', '[': ']', '{': '}', '|': '|', '||': '||'}
_OPERANDS = ('atom', 'group', 'fraction')


class _NotAFormula(ValueError):
    """The text has something that is not understood."""


class _Token(NamedTuple):
    """Part of a line: kind (a group of the pattern, or 'end'), text, and spaces around it."""

    kind: str
    text: str
    spaced: bool
    followed: bool


class _Part(NamedTuple):
    """Converted part of a formula.

    Attributes:
        kind: 'atom', 'group' (in parentheses that a fraction does not need), 'operator' (applies to what follows),
            'fraction', 'text', 'relation', 'sign', 'comma' or 'gap'.
        latex: LaTeX.
        name: name of an operator or relation, content of a group, 'tight' for a fraction without spaces, or 'word'.
    """

    kind: str
    latex: str
    name: str = ''


class _Row(NamedTuple):
    """Converted line: label, LaTeX before and after the place of alignment, and comment."""

    label: str
    left: str
    right: str
    comment: str
    is_indented: bool


def to_latex(block: str) -> str | None:
    """Convert a block of formulas to LaTeX for display mode.

    Args:
        block: lines, with any common indentation.

    Returns:
        LaTeX without delimiters; several lines are aligned. None if the block is no formula (confs, code, tables,
        diagrams), or if any part of it is not understood.
    """
    lines = textwrap.dedent(block).strip('\n').split('\n')
    try:
        latex = _aligned([_row(line) for line in lines])
    except _NotAFormula:
        return None
    is_conf = all(re.fullmatch(r' *\w+ = -?[\d.e-]+', line) for line in lines)
    return latex if _has_mathematics(latex) and not is_conf else None


def convert_blocks(lines: Iterable[str]) -> Iterator[str]:
    """Replace the formulas among the code blocks of a Markdown text with math fences.

    Code blocks are indented by four spaces or more, relative to the list item that they belong to, and begin after
    an empty line.

    Args:
        lines: lines of the text.

    Yields:
        Lines of the converted text. Blocks that :func:`to_latex` does not convert are unchanged.
    """
    lines = list(lines)
    at, margin, is_fenced = 0, 0, False
    while at < len(lines):
        line = lines[at]
        begins = line and not is_fenced and (at == 0 or not lines[at - 1]) and _indentation(line) >= margin + 4
        stop = _end_of_code(lines, at, margin + 4) if begins else at + 1
        latex = to_latex('\n'.join(lines[at:stop])) if begins else None
        if latex is not None:
            yield from (' ' * margin + row for row in ('```math', *latex.split('\n'), '```'))
        else:
            yield from lines[at:stop]
        if line and not begins and not is_fenced:
            marker = re.match(r' *(?:[-*]|\d+\.) ', line)
            margin = marker.end() if marker else min(margin, _indentation(line))
        is_fenced ^= line.lstrip().startswith('```')
        at = stop


def _end_of_code(lines: list[str], start: int, indentation: int) -> int:
    """Return the index after the last line of a code block."""
    block = itertools.takewhile(lambda line: not line or _indentation(line) >= indentation, lines[start:])
    return start + len('\n'.join(block).rstrip().split('\n'))


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(' '))


def _aligned(rows: list[_Row]) -> str:
    if len(rows) == 1:
        row = rows[0]
        return _cells(row.label, f'{row.left} {row.right}'.strip(), row.comment)
    if any(row.label for row in rows):
        is_table = all(row.label or row.is_indented for row in rows)
        formulas = [f'{row.left} {row.right}'.strip() for row in rows]
        written = [('', f'{row.label} && {formula}'.strip() if is_table else _cells(row.label, formula), row.comment)
                   for row, formula in zip(rows, formulas)]
    else:
        written = [(row.left, row.right, row.comment) if row.right else ('', row.left, row.comment) for row in rows]
    body = ' \\\\\n'.join(f'{left} & {right}{f" && {comment}" if comment else ""}'.strip()
                          for left, right, comment in written)
    return f'\\begin{{aligned}}\n{body}\n\\end{{aligned}}'


def _has_mathematics(latex: str) -> bool:
    """Return whether there is more than words, numbers, and assignments of names of several letters."""
    bare = re.sub(r'\\(?:text|mathrm|begin|end)\{[^{}]*\}', '', latex)
    symbols = re.findall(rf'(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\\(?:{"|".join(_GREEK)})(?![a-z])', bare)
    if re.search(r'[=<>]|\\(?:sim|to|leftarrow|[lg]e)(?![a-z])', bare) or any(verb in latex for verb in _VERBS):
        return bool(symbols)
    return bool(re.search(r'\\(?:sum|prod|log|exp|sqrt|mathbb|nabla|min|max)(?![a-z])', bare))


def _row(line: str) -> _Row:
    comment = ''
    found = _COMMENT.search(line)
    if found and re.search('[A-Za-z]{2}.* ', found[1]) and not re.search(r' - |_', found[1]):
        line, comment = line[:found.start()], rf'\text{{{found[1]}}}'
    label = ''
    labelled = re.match(r' *([A-Za-z]+): {2,}', line)
    if labelled:
        label, line = rf'\text{{{labelled[1]}:}}', line[labelled.end():]
    parts = _Reader(_tokens(line.strip())).sequence(())
    if not parts:
        raise _NotAFormula(line)
    cells = _split(parts)
    if not label and len(cells) > 1 and _is_text(cells[0]):
        label, cells = cells[0][0].latex, cells[1:]
    if not comment and len(cells) > 1 and _is_text(cells[-1]):
        comment, cells = cells[-1][0].latex, cells[:-1]
    parts = []
    for cell in cells:
        if parts and 'relation' not in (parts[-1].kind, cell[0].kind) and not (
                parts[-1].kind == 'text' and parts[-1].latex.split()[-2] in _WORDS):
            parts.append(_Part('gap', r'\qquad'))
        parts += cell
    split = next((i for i, part in enumerate(parts) if part.kind == 'relation' and part.name not in ('<', '>')), None)
    if split is None:
        return _Row(_trim(label), _join(parts), '', _trim(comment), line.startswith(' '))
    right = _join(parts[split:])
    return _Row(_trim(label), _join(parts[:split]), right if split else right.removeprefix(r'\;'), _trim(comment),
                line.startswith(' '))


def _is_text(cell: list[_Part]) -> bool:
    return len(cell) == 1 and (cell[0].kind == 'text' or cell[0].name == 'word')


def _split(parts: list[_Part]) -> list[list[_Part]]:
    cells: list[list[_Part]] = [[]]
    for part in parts:
        if part.kind == 'gap':
            cells.append([])
        else:
            cells[-1].append(part)
    return cells


def _tokens(line: str) -> list[_Token]:
    tokens: list[_Token] = []
    position, spaced = 0, False
    while position < len(line):
        if line[position] == ' ' and not line.startswith('  ', position):
            position, spaced = position + 1, True
            continue
        found = _TOKEN.match(line, position)
        if found is None:
            raise _NotAFormula(line[position:])
        kind = 'star' if found['star'] else str(found.lastgroup)
        text = found.group()
        position = found.end()
        followed = position == len(line) or line[position] == ' '
        if kind in ('name', 'star', 'number') and not followed and (line[position].isalnum() or line[position] == "'"):
            raise _NotAFormula(line)
        tokens.append(_Token(kind, text, spaced or not tokens or tokens[-1].kind == 'gap', followed))
        spaced = False
    return [token for i, token in enumerate(tokens) if token.kind != 'gap' or not _only_aligns(*tokens[i - 1:i + 2])]


def _only_aligns(before: _Token, gap: _Token, after: _Token) -> bool:
    """Return whether a gap is within a formula: beside a relation or an operator."""
    signs = ('+', '-', '*', '/')
    return (after.text in _RELATIONS or before.text in _RELATIONS or before.text in signs
            or after.text in signs and after.followed or bool(re.match('(?:sum|prod|mean)_', before.text)))


class _Reader:
    """Recursive descent over the tokens of a line."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = [*tokens, _Token('end', '', True, True)]
        self._at = 0

    def sequence(self, ends: Collection[str]) -> list[_Part]:
        """Read up to one of the given signs, which is not consumed, or to the end of the line."""
        parts: list[_Part] = []
        while True:
            token = self._tokens[self._at]
            operand_before = bool(parts) and parts[-1].kind in _OPERANDS
            if token.kind == 'end' or token.text in ends and (
                    token.text not in ('|', '||') or operand_before and not (token.spaced and not token.followed)):
                if (token.kind == 'end') != (not ends) or parts and parts[-1].kind in ('operator', 'sign', 'relation'):
                    raise _NotAFormula(token.text)
                return parts
            if token.kind == 'gap':
                self._at += 1
                if not ends:
                    parts.append(_Part('gap', r'\qquad'))
            elif self._is_hyphen():
                raise _NotAFormula('a word with a hyphen')
            elif token.text == '/':
                self._fraction(parts)
            elif token.kind == 'sign' and (sign := self._sign(token, operand_before, ends)):
                self._at += 1
                if sign.kind in ('relation', 'comma') and not operand_before and (
                        not parts or parts[-1].kind != 'text') or sign.latex == r'\cdot' and not operand_before:
                    raise _NotAFormula(token.text)
                if parts and parts[-1].kind in ('sign', 'operator') and sign.latex not in '+-' or (
                        parts and parts[-1].kind == sign.kind == 'sign'):
                    raise _NotAFormula(token.text)
                if sign.latex in '+-' and (not parts and not ends or parts and parts[-1].kind in ('gap', 'text')):
                    sign = sign._replace(latex='{-}' if sign.latex == '-' else '{} +')
                parts.append(sign)
            else:
                part = self._operand()
                if parts and parts[-1].kind == 'fraction' and parts[-1].name != 'tight' and part.kind != 'text':
                    raise _NotAFormula('a / b c')
                parts.append(part)

    def _sign(self, token: _Token, operand_before: bool, ends: Collection[str]) -> _Part | None:
        """Return a sign between operands; None if the token begins an operand."""
        text = token.text
        if text in _RELATIONS:
            if text == '=' and ')' in ends and not token.spaced:
                raise _NotAFormula('keyword argument')
            return _Part('relation', _RELATIONS[text], text)
        if text in ('+', '-'):
            return _Part('sign', text)
        if text == '*' or text == '.' and token.spaced and token.followed and operand_before:
            return _Part('sign', r'\cdot')
        if text == ',':
            return _Part('comma', ',')
        if text == ';' and ')' in ends:
            return _Part('comma', ';')
        if text == '..' and (']' in ends or '}' in ends):
            return _Part('comma', r', \ldots,')
        if text in ('|', '||') and ')' in ends and operand_before and token.spaced == token.followed:
            return _Part('relation', r'\mid' if text == '|' else r'\,\|\,', text)
        return None

    def _is_hyphen(self) -> bool:
        """Return whether the next sign joins two words, as in `and/or`."""
        token = self._tokens[self._at]
        return token.text in ('-', '/') and not token.spaced and not token.followed and all(
            len(name) > 1 and name.isalpha() and name not in _GREEK
            for name in (self._tokens[self._at - 1].text, self._tokens[self._at + 1].text))

    def _fraction(self, parts: list[_Part]) -> None:
        slash = self._next()
        tight = not slash.spaced and not slash.followed
        if slash.spaced != slash.followed:
            raise _NotAFormula('a /b')
        above: list[_Part] = []
        while parts and parts[-1].kind in ('atom', 'group') and not (tight and above):
            above.insert(0, parts.pop())
        factors = itertools.takewhile(lambda part: part.kind in (*_OPERANDS, 'operator'), reversed(parts))
        is_number = tight and len(above) == 1 and above[0].latex.isdigit() and self._tokens[self._at].text.isdigit()
        if not above or parts and parts[-1].kind == 'fraction' or not is_number and any(
                part.kind == 'operator' and part.name not in _LINEAR for part in factors):
            raise _NotAFormula('log a / b')
        below = self._operand()
        if below.kind == 'operator':  # mean|x|
            if self._tokens[self._at].spaced:
                raise _NotAFormula('a / sum b')
            below = _Part('atom', f'{below.latex} {self._operand().latex}')
        if below.kind not in ('atom', 'group'):
            raise _NotAFormula('a / text')
        parts.append(_Part('fraction', rf'\{"tfrac" if is_number else "frac"}{{{_bare(above)}}}{{{_bare([below])}}}',
                           'tight' if tight else ''))

    def _next(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _operand(self) -> _Part:
        """Read a name, a number, words, or something in brackets, with its exponent."""
        words = self._words()
        if words is not None:
            return words
        token = self._next()
        if token.kind == 'number':
            return self._number(token)
        if token.kind in ('name', 'star'):
            return self._name(token)
        if token.text == '...':
            before = self._tokens[max(self._at - 2, 0)]
            is_range = before.kind == 'number' or before.text == ','
            return _Part('atom', r'\ldots' if is_range else r'\cdots')
        if token.text == '.' and self._tokens[self._at].text in ('|', ',', ')'):
            return _Part('atom', r'\cdot')
        if token.text not in ('(', '[', '|', '||'):
            raise _NotAFormula(token.text)
        if token.text in ('|', '||') and token.followed:
            raise _NotAFormula('| without an end')
        return self._with_exponent(self._bracket(token.text))

    def _bracket(self, opening: str) -> _Part:
        """Read the rest of something in brackets."""
        parts = self.sequence((_CLOSES[opening], ))
        self._at += 1
        if not parts:
            raise _NotAFormula('empty brackets')
        inner = _join(parts)
        left, right = {'(': ('(', ')'), '[': ('[', ']'), '|': (r'\lvert', r'\rvert'),
                       '||': (r'\lVert', r'\rVert')}[opening]
        if _TALL.search(inner):
            left, right = rf'\left{left}', rf'\right{right}'
        space = ' ' if left.startswith('\\') else ''
        is_group = opening == '(' and all(part.kind != 'comma' for part in parts)
        return _Part('group' if is_group else 'atom', f'{left}{space}{inner}{space}{right}', inner if is_group else '')

    def _with_exponent(self, part: _Part) -> _Part:
        token = self._tokens[self._at]
        if token.text not in ('^', '**'):
            return part
        self._at += 1
        if token.text == '^' and (token.spaced or token.followed):
            raise _NotAFormula('a ^ b')
        minus = ''
        if self._tokens[self._at].text == '-':
            self._at += 1
            minus = '-'
        token = self._next()
        if token.text == '(':
            inner = self._bracket('(')
            exponent = inner.name or inner.latex
        elif token.kind == 'number':
            exponent = token.text
        elif token.kind == 'name':
            base, subscript = _symbol(token.text)
            exponent = base + _sub(subscript)
        else:
            raise _NotAFormula(token.text)
        if self._tokens[self._at].text in ('^', '**') or (
                not self._tokens[self._at].spaced and self._tokens[self._at].text in ('(', '[', '_')):
            raise _NotAFormula('a^b^c')
        return _Part('atom', f'{part.latex}^{_braced(minus + exponent)}')

    def _number(self, token: _Token) -> _Part:
        following = self._tokens[self._at]
        if following.text == '(' and not following.spaced:
            if token.text != '1':
                raise _NotAFormula('2(x)')
            self._at += 1
            indicator = self._bracket('(')
            if not re.search(r'[<>=]|\\[lg]e\b', indicator.latex):
                raise _NotAFormula('1(x)')
            return _Part('atom', rf'\mathbf{{1}}{indicator.latex}')
        mantissa, _, power = token.text.partition('e')
        if power:
            latex = f'10^{{{power}}}' if mantissa == '1' else rf'{mantissa} \cdot 10^{{{power}}}'
            return _Part('atom', latex)
        return self._with_exponent(_Part('atom', token.text))

    def _name(self, token: _Token) -> _Part:
        """Read a name with its subscript, its arguments and its exponent."""
        name = token.text.rstrip('*')
        following = self._tokens[self._at]
        adjacent = '' if following.spaced else following.text
        base, subscript = _symbol(name)
        plain, _, rest = name.partition('_')
        if adjacent == '_':
            self._at += 1
            if subscript or self._next().text != '{':
                raise _NotAFormula('_')
            subscript = self._range(plain)
            adjacent = '' if self._tokens[self._at].spaced else self._tokens[self._at].text
            if name != 'E' or adjacent not in ('[', '|'):
                return self._function(plain, base, subscript)
        if plain in _FUNCTIONS and (not rest or len(rest) == 1 or plain in ('sum', 'prod')):
            return self._function(plain, base, subscript)
        if name == 'sqrt':
            if adjacent != '(':
                raise _NotAFormula(name)
            self._at += 1
            inner = self._bracket('(')
            return self._with_exponent(_Part('atom', rf'\sqrt{{{inner.name or inner.latex}}}'))
        if plain == 'E' and adjacent in ('[', '|'):
            self._at += 1
            bracket = self._bracket(adjacent)
            return self._with_exponent(_Part('atom', rf'\mathbb{{E}}{_sub(subscript)}{bracket.latex}'))
        if name == 'sg' and adjacent == '[':
            self._at += 1
            return self._with_exponent(_Part('atom', rf'\mathrm{{sg}}{self._bracket("[").latex}'))
        if adjacent == '[':
            self._at += 1
            index = self._index()
            subscript = f'{subscript}, {index}' if subscript else index
        if token.kind == 'star':
            subscript += '}^{*' if subscript else ''
            base += '' if subscript else '^*'
        latex = base + _sub(subscript)
        return self._applied(latex, '' if subscript else name)

    def _applied(self, latex: str, name: str) -> _Part:
        """Read the arguments after a name, if there are any."""
        following = self._tokens[self._at]
        if following.text == '(' and not following.spaced:
            self._at += 1
            inside = self._bracket('(').latex
            if latex == 'N' and re.search('[,;]', inside):
                latex = r'\mathcal{N}'
            latex, name = latex + inside, ''
        following = self._tokens[self._at]
        if following.text in ('(', '[', '_') and not following.spaced:
            raise _NotAFormula('f(x)[i]')
        is_word = len(name) > 1 and name.isalpha() and name not in _GREEK
        return self._with_exponent(_Part('atom', latex, 'word' if is_word else ''))

    def _function(self, plain: str, base: str, subscript: str) -> _Part:
        """Return an operator, or the function with its arguments if they are in parentheses."""
        following = self._tokens[self._at]
        if plain not in _FUNCTIONS or following.text == '(' and not following.spaced and plain not in ('sum', 'prod'):
            return self._applied(base + _sub(subscript), '')
        if following.text in ('[', '^', '**', '_') and not following.spaced:
            raise _NotAFormula(plain)
        if following.kind in ('end', 'gap') or following.kind == 'sign' and following.text not in (
                '(', '[', '|', '||') or following.text in ('|', '||') and following.followed:
            if plain in ('min', 'max', 'mean') and (not subscript or plain == 'mean'):  # the name of an argument
                return _Part('atom', rf'\mathrm{{{plain}}}{_sub(subscript)}')
            raise _NotAFormula(plain)
        if plain in ('min', 'max') and not subscript:
            raise _NotAFormula(plain)
        return _Part('operator', base + _sub(subscript), plain)

    def _range(self, name: str) -> str:
        """Read a subscript in braces; ``k=1..n`` under a sum or product becomes its limits."""
        parts = self.sequence(('}', ))
        self._at += 1
        cells: list[list[_Part]] = [[]]
        for part in parts:
            if part.latex == r', \ldots,' and name in ('sum', 'prod'):
                cells.append([])
            else:
                cells[-1].append(part)
        if len(cells) > 2 or not all(cells):
            raise _NotAFormula('a..b..c')
        return '}^{'.join(_join(cell) for cell in cells)

    def _index(self) -> str:
        parts = self.sequence((']', ))
        self._at += 1
        if any(part.kind in ('text', 'relation') for part in parts):
            raise _NotAFormula('index')
        return _join(parts).replace(' + ', '+').replace(' - ', '-')

    def _words(self) -> _Part | None:
        """Read words that are not part of the formula."""
        count, end = 0, self._at
        while self._is_word(end):
            count += 1
            end += 1
        first = self._tokens[self._at].text
        if not count or count == 1 and first not in _WORDS or first in _ARTICLES and count == 1:
            return None
        words = [token.text for token in self._tokens[self._at:end]]
        if all(word in _GREEK or word in _FUNCTIONS for word in words):
            return None
        self._at = end
        if len(words) == 1 and first in _VERBS:
            return _Part('relation', rf'\;\text{{{first}}}\;', first)
        return _Part('text', rf'\text{{ {" ".join(words)} }}')

    def _is_word(self, at: int) -> bool:
        token, following = self._tokens[at], self._tokens[min(at + 1, len(self._tokens) - 1)]
        if token.kind != 'name' or not token.text.isalpha() or token.text in _GREEK:
            return False
        if not following.spaced and following.text not in (',', ')') and following.kind != 'gap':
            return False
        if token.text in _ARTICLES or token.text in _FUNCTIONS:
            return following.kind == 'name' and self._is_word(at + 1)
        return len(token.text) > 1


def _symbol(name: str) -> tuple[str, str]:
    """Return the LaTeX of a name and of its subscript, '' if there is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise _NotAFormula(name)
    base, digits, primes, below, more = found.groups()
    parts = below.split('_')[1:]
    is_letter = len(base) == 1 or base in _GREEK
    if digits and (parts or not is_letter) or len(parts) > 1 and is_letter:
        raise _NotAFormula(name)
    if parts and not (is_letter or base in _BASES or base in ('sum', 'prod')):
        is_indexed = len(parts[-1]) == 1 and parts[-1].islower()
        base = '_'.join([base, *parts[:-1]] if is_indexed else [base, *parts])  # a name such as target_update_tau
        parts = parts[-1:] if is_indexed else []
    if base in _FUNCTIONS and base not in _INDEXED and parts:
        raise _NotAFormula(name)
    if base in _FUNCTIONS:
        latex = _FUNCTIONS[base]
    elif base in _GREEK:
        latex = f'\\{base}'
    elif base == 'inf':
        latex = r'\infty'
    elif len(base) == 1:
        latex = base
    else:
        latex = rf'\mathrm{{{base}}}'.replace('_', r'\_')
    subscript = digits or ''.join(_below(part) for part in parts)
    if primes and more:
        raise _NotAFormula(name)
    return latex + primes + more, subscript


def _below(text: str) -> str:
    """Return the LaTeX of a subscript: upright if it is a word."""
    if text in _GREEK:
        return f'\\{text}'
    if len(text) == 1 or text.isdigit() or re.fullmatch('[i-n]{2}', text):
        return text
    return rf'\mathrm{{{text}}}'


def _sub(subscript: str) -> str:
    return f'_{_braced(subscript)}' if subscript else ''


def _braced(latex: str) -> str:
    return latex if len(latex) == 1 else f'{{{latex}}}'


def _bare(parts: list[_Part]) -> str:
    """Return the LaTeX of an argument of a fraction, without parentheses around all of it."""
    return parts[0].name if len(parts) == 1 and parts[0].kind == 'group' else _join(parts)


def _join(parts: list[_Part]) -> str:
    """Return the LaTeX of adjacent parts."""
    latex = ''
    for before, part in zip([_Part('gap', ''), *parts], parts):
        if part.kind == 'comma' or not latex:
            space = ''
        elif before.kind in _OPERANDS and part.kind in _OPERANDS and r'\ldots' not in (before.latex, part.latex):
            space = r' \, '
        elif before.kind == 'operator' and re.match(r'[(\[]|\\l[vV]ert', part.latex) or (
                before.name == 'mean' or part.name == 'mean' and before.kind in _OPERANDS):
            space = r' \, '  # mean (a - b)^2; MathJax adds no space beside a mathop with an index
        else:
            space = ' '
        latex += space + part.latex
    latex = re.sub(r', \\qquad', r', \\quad', latex)
    latex = re.sub(r'(^|quad |= |\\cdot |\\;)\\text\{ ', r'\1\\text{', latex)
    return re.sub(r' \}(?=$|,| \\q?quad)', '}', latex) if r'\text{' in latex else latex


def _trim(latex: str) -> str:
    return latex.replace('{ ', '{').replace(' }', '}').replace(r'\mathrm{', r'\text{')


def _cells(*cells: str) -> str:
    return r' \quad '.join(cell for cell in cells if cell)
