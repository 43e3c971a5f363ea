"""Parse conf files into statements with their locations, without looking up any name.

The grammar is gin's own: ``gin.config_parser`` does the parsing. References and macros become :class:`Reference` and
:class:`Macro`, which print as they are written, so ``repr`` turns a value back into gin text.
"""

import dataclasses
import glob
import io
import logging
import os
import pathlib
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

from gin import config_parser

from alfx.gin_utils.conf_error import ConfError, Problem, nearest_name
from .locations import Binding
from .syntax_problems import odd_characters, syntax_problem
from .user_modules import OwnFile

_MOST_BYTES = 2**24  # of a conf file
_logger = logging.getLogger(__name__)
CONFS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'examples', 'confs')
"""The folder of the confs shipped with alfx."""


@dataclasses.dataclass(frozen=True, repr=False)
class Reference:
    """``@scopes/selector`` or, if ``evaluate``, ``@scopes/selector()``."""

    scopes: tuple[str, ...]
    selector: str
    evaluate: bool

    def __repr__(self) -> str:
        return f'@{"/".join((*self.scopes, self.selector))}{"()" if self.evaluate else ""}'


@dataclasses.dataclass(frozen=True, repr=False)
class Macro:
    """``%name``."""

    name: str

    def __repr__(self) -> str:
        return f'%{self.name}'


class Statement(NamedTuple):
    """A binding, macro definition, block header or import, with its location.

    Attributes:
        kind: 'binding', 'macro', 'block' or 'import'.
        scope: scopes joined by '/'.
        selector: selector as written; the name of a macro; the module of an import.
        name: argument; '' for statements other than bindings.
        value: value of a binding or macro; text of an import.
        file: path; '' for ``--conf_param``.
        line: line number from 1.
        location: location as shown in messages.
    """

    kind: str
    scope: str
    selector: str
    name: str
    value: Any
    file: str
    line: int
    location: str

    @property
    def text(self) -> str:
        """Left side as written."""
        scope = f'{self.scope}/' if self.scope else ''
        return f'{scope}{self.selector}.{self.name}' if self.name else f'{scope}{self.selector}'


class Source(NamedTuple):
    """Path and contents of a file that was read."""

    path: str
    text: str


class Conf(NamedTuple):
    """A loaded conf.

    Attributes:
        conf_file: path of the file.
        sources: the file and its includes, with their contents when they were read.
        conf_params: overrides from the command line.
        bindings: every binding in effect, including macros, in the order written.
        imports: import statements.
        modules: files of the imported modules that lie next to the conf or in the working directory.
    """

    conf_file: str
    sources: tuple[Source, ...]
    conf_params: tuple[str, ...]
    bindings: tuple[Binding, ...]
    imports: tuple[str, ...]
    modules: tuple[OwnFile, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class _Call(Reference):
    """Reference with arguments, ``@Name(argument=value)``."""

    arguments: tuple[tuple[str, Any], ...] = ()


class _Parser(config_parser.ConfigParser):
    """gin's parser, which also reads ``@Name(argument=value)`` and ``functools.partial(@name, argument=value)``.

    ALF's version of gin reads these, too. They abbreviate a separate scope with these bindings. An argument without
    a name has its index, '0', as its name. References to ``torch`` and ``alfx`` may lack the ``@``.
    """

    def _maybe_parse_configurable_reference(self):
        if self._current_token.string != '@' and not self._is_path():
            return False, None
        if self._current_token.string == '@':
            self._advance_one_token()
        name = self._parse_selector(allow_periods_in_scope=True)
        arguments, evaluate = (), self._current_token.string == '('
        if evaluate:
            self._advance()
            arguments = self._parse_arguments()
            self._advance_one_token()
        self._skip_whitespace_and_comments()
        return True, self._delegate.configurable_reference(name, evaluate, arguments)

    def _parse_dict_item(self):
        key, value = super()._parse_dict_item()
        if isinstance(key, (list, dict)):
            self._raise_syntax_error('a key of a dict must not be a list or a dict')
        return key, value

    def _is_path(self) -> bool:
        rest = self._current_token.line[self._current_token.start[1]:]
        return re.match(r'(torch|alfx)\.(?!b?float|u?int|bool)\w', rest) is not None

    def _maybe_parse_basic_type(self):
        if self._is_path():
            return self._maybe_parse_configurable_reference()
        if re.match(r'-\s*[^\s\d.]', self._current_token.line[self._current_token.start[1]:]):
            self._raise_syntax_error('a minus sign may only precede a number')
        if self._current_token.string != 'functools':
            return super()._maybe_parse_basic_type()
        name = self._parse_selector(scoped=False)
        if name != 'functools.partial' or self._current_token.string != '(':
            self._raise_syntax_error(f"Failed to parse token '{name}'")
        self._advance()
        function = self.parse_value()
        if not isinstance(function, Reference) or function.evaluate:
            self._raise_syntax_error('functools.partial expects a reference without (), @name')
        if self._current_token.string == ',':
            self._advance()
        arguments = self._parse_arguments()
        self._advance()
        name = '/'.join((*function.scopes, function.selector))
        return True, self._delegate.configurable_reference(name, False, arguments)

    def _parse_arguments(self):
        """Return the pairs up to the closing bracket, which becomes the current token."""
        arguments = []
        while self._current_token.string != ')':
            name, rest = self._current_token.string, self._current_token.line[self._current_token.end[1]:]
            if name.isidentifier() and re.match(r'\s*=', rest):
                self._advance()
                self._advance()
                if name in dict(arguments):
                    self._raise_syntax_error(f'the reference has two arguments {name}')
            elif (arguments and not arguments[-1][0].isdigit()
                  or name.isidentifier() and name not in ('True', 'False', 'None', 'functools', 'torch', 'alfx')):
                self._raise_syntax_error('arguments in a reference are written name=value')
            else:
                name = str(len(arguments))
            arguments.append((name, self.parse_value()))
            if self._current_token.string == ',':
                self._advance()
            elif self._current_token.string != ')':
                self._raise_syntax_error("Expected ',' or ')'.")
        return tuple(arguments)


class _Delegate(config_parser.ParserDelegate):

    def configurable_reference(self, scoped_configurable_name, evaluate, arguments=()):
        *scopes, selector = scoped_configurable_name.split('/')
        if arguments:
            return _Call(tuple(scopes), selector, evaluate, arguments)
        return Reference(tuple(scopes), selector, evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


class Reader:
    """Reader of a conf file, its includes and ``--conf_param``; it collects mistakes instead of raising.

    Args:
        unsaved: text of files, by path, that replaces their contents on disk.

    Attributes:
        statements: statements in the order in which they take effect.
        sources: files that were read.
        problems: missing files and syntax errors.
        included_by: for each file, the files that include it, directly or not.
        odd_characters: for each location, hints about invalid characters that look like valid ones.
    """

    def __init__(self, unsaved: Optional[Mapping[str, str]] = None) -> None:
        self._unsaved = unsaved or {}
        self.included_by: dict[str, set[str]] = {}
        self.odd_characters: dict[str, str] = {}
        self.statements: list[Statement] = []
        self.sources: list[Source] = []
        self.problems: list[Problem] = []
        self._scopes: dict[str, list[str]] = {}  # of calls, by the statement that contains them

    def read_file(self, path: str, including: tuple[str, ...] = ()) -> None:
        """Read a file and the files it includes.

        Args:
            path: path of an existing file.
            including: chain of files that include this one.
        """
        if os.path.isfile(path) and os.path.getsize(path) > _MOST_BYTES:
            self.problems.append(Problem(show_path(path), f'expected a conf of at most {_MOST_BYTES:,} bytes, found '
                                         f'{os.path.getsize(path):,}', 'restore the file'))
            return
        if path.endswith('.py'):
            name = show_path(path)
            self.problems.append(Problem('', f'{name} is a Python conf, not a gin file', 'convert it: alfx convert '
                                         f'{name} > {name.removesuffix(".py").removesuffix("_conf")}.gin'))
            return
        self.included_by.setdefault(path, set()).update(including)
        try:
            text = self._unsaved[path] if path in self._unsaved else pathlib.Path(path).read_text(encoding='utf-8')
            text = text.removeprefix('\ufeff')  # Windows editors write a byte order mark
        except OSError as error:
            self.problems.append(Problem(show_path(path), f'cannot be read: {error}'))
            return
        except UnicodeDecodeError as error:
            self.problems.append(Problem(show_path(path), f'is not valid UTF-8: {error.reason} at byte {error.start}',
                                         'save it as UTF-8'))
            return
        if text.startswith(('{\\rtf', '<!DOCTYPE', '<html')):
            self.problems.append(Problem(show_path(path), f'is not plain text: it begins with {text[:9]!r}',
                                         'save it as plain text'))
            return
        if all(source.path != path for source in self.sources):
            self.sources.append(Source(path, text))
        self._read(text, path, lambda line: f'{show_path(path)}:{line}', (*including, path))

    def read_param(self, text: str) -> None:
        """Read the statement of one ``--conf_param``."""
        self._read(text, '', lambda line: f'override {_quote(text)}', ())

    def read_text(self, text: str) -> None:
        """Read text that is not in a file."""
        self._read(text, '', lambda line: f'line {line}', ())

    def _read(self, text: str, path: str, locate: Callable[[int], str], including: tuple[str, ...]) -> None:
        for line, hint in odd_characters(text):
            self.odd_characters.setdefault(locate(line), hint)
        try:
            for statement in _Parser(io.StringIO(text), _Delegate()):
                self._add(statement, path, locate, including)
        except SyntaxError as error:
            self.problems.append(syntax_problem(error.msg, error.text or '', locate(error.lineno or 1), error.offset))
        except (RecursionError, MemoryError):
            brackets = [sum(map(line.count, '([{')) for line in text.splitlines()]
            self.problems.append(Problem(locate(1 + brackets.index(max(brackets))), 'brackets are nested too deeply',
                                         'use fewer levels of nesting'))
        except tokenize.TokenError as error:
            message, (line, _) = error.args
            self.problems.append(syntax_problem(message, '', locate(line)))

    def _add(self, statement, path, locate, including) -> None:
        line = statement.location.line_num
        location = (path, line, locate(line))
        if getattr(statement, 'selector', '') == 'load' and getattr(statement, 'arg_name', 'block'):
            statement = statement._replace(selector='suite_gym.load')  # many suites have one; ALF imports only this one
        if isinstance(statement, config_parser.BindingStatement):
            kind = 'binding' if statement.arg_name else 'macro'
            read = Statement(kind, statement.scope, statement.selector, statement.arg_name, statement.value, *location)
            scope = re.sub(r'\W', '_', read.text)
            overridden = self._scopes.pop(scope, ())
            if overridden:
                self.statements = [s for s in self.statements if s.scope.rpartition('/')[2] not in overridden]
            self.statements.append(read._replace(value=self._without_calls(read, read.value, scope)))
        elif isinstance(statement, config_parser.BlockDeclaration):
            self.statements.append(Statement('block', statement.scope, statement.selector, '', None, *location))
        elif isinstance(statement, config_parser.ImportStatement):
            self.statements.append(Statement('import', '', statement.module, '', statement.format(), *location))
        else:
            self._include(statement.filename, location[2], including)

    def _without_calls(self, statement: Statement, value: Any, scope: str) -> Any:
        """Return a value with a reference to a separate scope for each call, whose arguments become bindings."""
        if isinstance(value, _Call):
            scopes = self._scopes.setdefault(scope, [])
            scopes.append(f'{scope}_{len(scopes) + 1}' if scopes else scope)
            own = (*value.scopes, scopes[-1])
            for name, argument in value.arguments:
                binding = statement._replace(kind='binding', scope='/'.join(own), selector=value.selector, name=name)
                self.statements.append(binding._replace(value=self._without_calls(statement, argument, scope)))
            return Reference(own, value.selector, value.evaluate)
        if isinstance(value, (list, tuple)):
            return type(value)(self._without_calls(statement, item, scope) for item in value)
        if isinstance(value, dict):
            return {key: self._without_calls(statement, item, scope) for key, item in value.items()}
        return value

    def _include(self, name: str, location: str, including: tuple[str, ...]) -> None:
        """Read an included file, see :func:`find_included`."""
        folders = folders_of_includes(*including[-1:])
        folder, found = folders[0], find_included(name, *including[-1:])
        if found and is_shipped(found) and not (including and is_shipped(including[-1])):
            near = [os.path.join(folder, '..', name), *(os.path.join(os.path.dirname(path), name)
                                                        for path in including),
                    *glob.glob(os.path.join(glob.escape(folder), '*', glob.escape(name)))]
            if other := next((path for path in near if os.path.isfile(path) and not is_shipped(path)
                              and os.path.abspath(path) not in including), None):
                _logger.info("%s: include '%s' is the conf shipped with alfx, not %s; write the path of the file to "
                             'include it instead', location, name, show_path(os.path.abspath(other)))
        if found is None:
            at_home = name.startswith('~')
            where = os.path.dirname(os.path.expanduser(name)) if at_home else folder
            places = where if at_home else ' or '.join(dict.fromkeys(folders[:-1]))
            self.problems.append(Problem(location, f"include {name!a}: there is no such file in {places}",
                                         _hint_file(name, where)))
        elif found in including:
            chain = ' -> '.join(os.path.basename(p) for p in (*including[including.index(found):], found))
            self.problems.append(Problem(location, f'circular include: {chain}'))
        else:
            self.read_file(found, including)


def find_conf(name: str) -> str:
    """Return the path of a conf.

    Args:
        name: path, or name of a conf shipped with alfx, with or without ``.gin``.

    Raises:
        ConfError: it does not exist.
    """
    name = os.path.expanduser(name)
    for candidate in (name, f'{name}.gin', os.path.join(CONFS, name), os.path.join(CONFS, f'{name}.gin')):
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    if os.path.isdir(name):
        confs = sorted(file for file in os.listdir(name) if file.endswith('.gin'))
        hint = (f'it contains {", ".join(confs[:5])}' if confs else
                'name conf/config.gin in a run folder; most commands take the folder as --root_dir')
        raise ConfError([Problem('', f"'{name}' is a folder, not a conf file", hint)])
    folder = os.path.dirname(name) or '.'
    raise ConfError([Problem('', f"there is no conf file '{name}', neither in {os.path.abspath(folder)} nor among the "
                             'confs shipped with alfx', _hint_file(name, folder))])


def folders_of_includes(including: str = '') -> list[str]:
    """Return the folders in which an included file is searched, in this order.

    These are the folder of the including file, the working directory (as in gin), and the folder of the shipped confs.
    A shipped conf does not include files of the working directory.

    Args:
        including: path of the file that includes; '' for the command line.
    """
    folder = os.path.dirname(including) if including else os.getcwd()
    return [folder, CONFS] if including and is_shipped(including) else [folder, os.getcwd(), CONFS]


def find_included(name: str, including: str = '') -> Optional[str]:
    """Return the path of an included file, or ``None`` if it does not exist.

    If a file includes its own name, another file of that name is meant.

    Args:
        name: name or path, as written in the conf.
        including: path of the file that includes it; '' for the command line.
    """
    candidates = [os.path.join(folder, os.path.expanduser(name)) for folder in folders_of_includes(including)]
    existing = [os.path.abspath(candidate) for candidate in candidates if os.path.isfile(candidate)]
    return next((path for path in existing if path != including), next(iter(existing), None))


def is_shipped(path: str) -> bool:
    """Return whether a file is one of the confs shipped with alfx."""
    return os.path.realpath(path).startswith(os.path.realpath(CONFS) + os.sep)


def show_path(path: str) -> str:
    """Return a path relative to the working directory if it is inside it, else unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith('..') else relative


def iterate_nested(value: Any) -> Iterator[Any]:
    """Yield every leaf of a value: the contents of lists, tuples and dicts (also keys); references are leaves."""
    if isinstance(value, (Reference, Macro)) or not isinstance(value, (list, tuple, dict)):
        yield value
        return
    for item in ([*value.keys(), *value.values()] if isinstance(value, dict) else value):
        yield from iterate_nested(item)


def substitute(value: Any, macros: dict[str, Any], within: frozenset[str] = frozenset()) -> Any:
    """Replace macros in ``value`` with their values, if known; the macros in ``within`` are left, which ends cycles."""
    if isinstance(value, Macro):
        if value.name not in macros or value.name in within:  # ends a cycle
            return value
        return substitute(macros[value.name], macros, within | {value.name})
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(item, macros, within) for item in value)
    if isinstance(value, dict):
        return {substitute(k, macros, within): substitute(v, macros, within) for k, v in value.items()}
    return value


def _quote(text: str) -> str:
    text = text if len(text) <= 200 else f'{text[:197]}...'
    return f'"{text}"' if "'" in text and '"' not in text else f"'{text}'"


def _hint_file(name: str, folder: str) -> str:
    here = sorted(f for f in os.listdir(folder) if f.endswith('.gin')) if os.path.isdir(folder) else []
    shipped = sorted(map(os.path.basename, glob.glob(os.path.join(os.path.dirname(CONFS), '[cs]*', '*.gin'))))
    base = os.path.basename(name)
    if os.path.isfile(os.path.join(os.path.dirname(CONFS), 'searches', f'{base.removesuffix(".gin")}.gin')):
        return f'it is the conf of a search: alfx search {base}'
    nearest = nearest_name(base if base.endswith('.gin') else f'{base}.gin', [*here, *shipped])
    return f"did you mean '{nearest}'?" if nearest else ''
