"""Python confs of the Agent Learning Framework (ALF), written as gin files.

:func:`convert` executes a conf with :mod:`alfx.gin_utils.python_confs` and writes what it bound: literals as they are,
classes and functions as references, partials and instances as references with a separate scope, and values of
``alf.define_config`` as macros.
"""
import ast
import functools
import inspect
import math
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple, Optional

import gin
import numpy as np
import torch

from . import static_check
from .conf_error import ConfError, Problem, hint_nearest
from .conf_loading import import_configurables
from .parsing import Macro, Reader, Reference
from .python_confs import Bound, Made, Named, NotExpressible, Location, Record, Unknown
from .reference_types import find, resolve

_MOVE = 'move it to a module next to the conf, and import it from there'
_REQUIRED = Macro('gin.REQUIRED')


class Converted(NamedTuple):
    """A gin file.

    Attributes:
        text: its contents. If there are problems, it contains bindings without a value, so that it cannot be loaded
            before the user has completed it.
        problems: what a gin file cannot express and what alfx does not have, with file and line of the Python conf.
        notes: remarks that need no change, with file and line.
    """

    text: str
    problems: list[Problem]
    notes: list[str]


def convert(path: str, conf_params: Sequence[str] = ()) -> Converted:
    """Convert a Python conf to a gin file. This executes the conf, with a stand-in for ``alf``.

    Args:
        path: the Python conf.
        conf_params: values that take precedence over the conf: ``'name=value'`` for a name of ``alf.define_config``,
            ``'Class.parameter=value'`` for a binding.

    Raises:
        ConfError: the file does not exist or is not a Python file, or ``conf_params`` are wrong.
    """
    if not os.path.isfile(path):
        raise ConfError(f"there is no file '{path}'", 'pass the path of a Python conf, X_conf.py')
    if path.endswith('.gin'):
        raise ConfError(f'{path} is a gin file already', 'pass it to alfx train or alfx check')
    record = Record(conf_params)
    with redirect_stdout(sys.stderr):
        record.execute(path)
    for name in record.params:
        raise ConfError(f"the conf defines no value '{name}'", hint_nearest(name, list(record.macros)) or
                        f'it defines {", ".join(record.macros) or "no values"}')
    writer = _Writer(record)
    for key in record.bindings:
        writer.write_binding(*key)
    macros = writer.macro_lines()
    record.problems.sort(key=lambda problem: (problem.location.rpartition(':')[0], len(problem.location),
                                              problem.location))
    head = [*_header(path), (f'# Converted from {os.path.basename(path)} by alfx convert', None)]
    if record.problems:
        head += [('', None), ('# Not converted; write these by hand, then delete this block:', None)]
        head += [(f'#   {line}', None) for problem in record.problems for line in str(problem).splitlines()]
        head += [(f'not_converted = {_REQUIRED!r}', None)]
    if record.modules:
        head += [('', None), *((f'import {module}', None) for module in record.modules)]
    lines = head + ([('', None), *macros] if macros else []) + writer.lines
    text = '\n'.join(line for line, _ in lines) + '\n'
    found = record.problems + _check(text, [location for _, location in lines])
    return Converted(text, list(dict.fromkeys(found)), record.notes)  # a call can have a problem once per argument


def _header(path: str) -> Iterator[tuple[str, Optional[Location]]]:
    """Yield the comments and the docstring at the top of a file as lines of comments."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.NAME, tokenize.OP):
                break
            if token.type == tokenize.COMMENT and not re.match(r'#!|# *-\*-', token.string):
                yield token.string, None
        file.seek(0)
        for line in (ast.get_docstring(ast.parse(file.read())) or '').splitlines():
            yield f'# {line}'.rstrip(), None


def _check(text: str, locations: Sequence[Optional[Location]]) -> list[Problem]:
    """Check the names and types of the gin text; the problems name the locations in the Python conf."""
    reader = Reader()
    reader.read_text(text)
    statements = [statement for statement in reader.statements if statement.kind != 'import']
    empty = [statement.location for statement in statements if statement.value == _REQUIRED]
    found = reader.problems + static_check.check(statements, import_configurables())[1]
    return [problem._replace(location=str(locations[int(problem.location.split()[-1]) - 1] or problem.location))
            for problem in found if problem.location not in empty]


class _Writer:
    """Lines of gin text for a record.

    Attributes:
        lines: each line with the location in the Python conf that it comes from.
    """

    def __init__(self, record: Record):
        self.lines: list[tuple[str, Optional[Location]]] = []
        self._record = record
        self._scopes: dict[int, str] = {}
        self._taken = set(static_check._declared_scopes)
        self._used_macros: set[str] = set()
        self._call = -1
        self._waiting: list[tuple[str, str, dict[str, Any]]] = []  # scope, selector, arguments

    def write_binding(self, selector: str, name: str) -> None:
        """Write a binding, followed by the bindings of the scopes that it refers to."""
        bound = self._record.bindings[selector, name]
        if bound.call != self._call:
            self.lines.append(('', None))
            self._call = bound.call
        self._write(f'{_short(selector)}.{name}', bound, name)

    def macro_lines(self) -> list[tuple[str, Optional[Location]]]:
        """Return the definitions of the macros; a macro that no line uses becomes a comment."""
        body, computed_from = self.lines, set(self._record.computed_from)
        macros: list[tuple[str, Optional[Location]]] = []
        for name, bound in reversed(self._record.macros.items()):  # a macro can be used by later ones
            self.lines = []
            if name in self._used_macros:
                self._record.macro_of = {key: own for key, own in self._record.macro_of.items() if own != name}
                self._write(name, bound, name)
            else:
                self.lines.append((f'# {name} = {" ".join(repr(bound.value).split())}', None))
            if name in computed_from:
                self.lines.append(("#   also used by the Python code: to change it, convert again with --conf_param "
                                   f"'{name}=...'", None))
            macros = self.lines + macros
        self.lines = body
        return macros

    def _write(self, left: str, bound: Bound, name: str) -> None:
        value = self._expressed(bound.value, name, bound.location)
        self.lines.append((f'{left} = {value!r}', bound.location))
        while self._waiting:
            scope, selector, arguments = self._waiting.pop(0)
            for argument, item in arguments.items():
                value = self._expressed(item, argument, bound.location)
                self.lines.append((f'{scope}/{_short(selector)}.{argument} = {value!r}', bound.location))

    def _expressed(self, value: Any, name: str, location: Location) -> Any:
        try:
            return self._expression(value, name, location)
        except NotExpressible:
            return _REQUIRED

    def _expression(self, value: Any, name: str, location: Location) -> Any:
        """Return an object whose ``repr`` is the gin text of a value.

        Raises:
            NotExpressible: there is none; it has been reported.
        """
        if id(value) in self._record.macro_of:
            self._used_macros.add(self._record.macro_of[id(value)])
            return Macro(self._record.macro_of[id(value)])
        if issubclass(type(value), Made):
            return self._reference(value, value.named, value.arguments, name, location)
        if issubclass(type(value), Unknown):
            value.report(location)
            raise NotExpressible
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (Reference, Macro)) or value is None or isinstance(value, bool):
            return value
        if isinstance(value, float) and math.isinf(value):
            return Macro(f'alfx.{"minus_" if value < 0 else ""}infinity')
        for base in (int, float, str, bytes):
            if isinstance(value, base) and value == value:  # not NaN
                return str.__str__(value) if base is str else base(value)  # type: ignore[arg-type]
        if isinstance(value, torch.dtype):
            return str(value).removeprefix('torch.')
        if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
            items = [self._expression(item, name, location) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {self._expression(key, name, location): self._expression(item, name, location)
                    for key, item in value.items()}
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, functools.partial):
            named = self._named(value.func, location)
            arguments = {**self._record.by_name(named, value.args, location), **value.keywords}
            return self._reference(value, named, arguments, name, location)
        return Reference((), _short(self._named(value, location).selector), False)

    def _reference(self, value: Any, named: Named, arguments: dict[str, Any], name: str,
                   location: Location) -> Reference:
        """Return a reference with a scope for its arguments, which are written later."""
        evaluate = type(value) is Made
        if not arguments:
            return Reference((), _short(named.selector), evaluate)
        if id(value) not in self._scopes:
            scope = self._record.variables.get(id(value)) or re.sub('_(ctor|cls|class|fn|func)$', '', name)
            self._scopes[id(value)] = scope = self._free(scope)
            self._waiting.append((scope, named.selector, arguments))
        elif evaluate and inspect.isclass(resolve(named.selector).wrapped):
            self._record.notes.append(f'{location}: the conf uses one {named.name} in several places; the gin file '
                                      'makes one for each')
        return Reference((self._scopes[id(value)],), _short(named.selector), evaluate)

    def _free(self, scope: str) -> str:
        number, name = 2, scope
        while name in self._taken:
            name, number = f'{scope}_{number}', number + 1
        self._taken.add(name)
        return name

    def _named(self, value: Any, location: Location) -> Named:
        """Return the class or function that a conf can refer to.

        Raises:
            NotExpressible: a conf cannot refer to the value, which is reported.
        """
        if issubclass(type(value), Unknown):
            value.report(location)
            raise NotExpressible
        if not isinstance(value, Named) and (inspect.isclass(value) or inspect.isroutine(value)):
            value = self._of_module(value)
        if isinstance(value, Named) and value.selector:
            return value
        what = f'{value.name}, which is not configurable' if isinstance(value, Named) else f'the value {value!r:.80}'
        self._record.report(f'a gin file cannot express {what}', 'return it from a function of a module next to '
                            'the conf, and bind @my_module.my_function()', location)
        raise NotExpressible

    def _of_module(self, value: Any) -> Named:
        """Return a class or function of a module; one that the conf defines is reported."""
        code = getattr(value, '__code__', None)
        found = self._record.classes.get((value.__module__, value.__name__))
        if code is not None and code.co_filename in self._record.files:
            found = Location(code.co_filename, code.co_firstlineno)
        if found is not None:
            name = 'a lambda' if value.__name__ == '<lambda>' else f'{value.__name__}, which the conf defines'
            self._record.report(f'a gin file cannot express {name}', _MOVE, found)
            raise NotExpressible
        return Named(self._record, value, self._record.selector_of(value))


def _short(selector: str) -> str:
    """Return the shortest unambiguous form of a selector of alfx; names of other packages stay complete."""
    known = find(selector) if selector.startswith('alfx.') else None
    return gin.config._REGISTRY.minimal_selector(known.selector) if known else selector
