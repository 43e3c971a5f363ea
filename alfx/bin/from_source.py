"""Definitions of alfx, executed one by one from the source code, without importing alfx or the packages that it needs.

:class:`Module` executes a class or function, and everything that its definition refers to, when its name is looked up.
Only the fields and constructors of classes are executed. Names from other packages are replaced with empty classes
(:class:`Other`), so describing a class or function takes a tenth of a second, while the imports would take seconds.
"""
import abc
import ast
import functools
import importlib
import inspect
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_KEPT = ('__init__', '__new__', '__repr__', '__str__')


def path_of(module: str) -> str:
    """Return the file of a module of alfx."""
    path = os.path.join(_ROOT, *module.split('.')[1:])
    return f'{path}.py' if os.path.isfile(f'{path}.py') else os.path.join(path, '__init__.py')


def describe(selector: str, module: str, name: str) -> Any:
    """Return the ``alfx.gin_utils.describe.Description`` of a class or function of alfx.

    Args:
        selector: its complete name in confs.
        module: module that defines it.
        name: its name in that module.

    Raises:
        Exception: any, if the description depends on another package; importing the module then describes it.
    """
    target = load(module)[name]
    constructor_of = load('alfx.gin_utils.registry')['construction_function']
    if inspect.isclass(target) and constructor_of(target)[1] is Other.__init__:
        raise LookupError(f'{name} inherits the constructor of a class of another package')
    step_function = target if 'is_step_function' in vars(target) else None
    found = SimpleNamespace(selector=selector, wrapped=target, allowlist=None, denylist=None)
    described = load('alfx.gin_utils.describe')['description_of'](found, step_function)
    show = load('alfx.gin_utils.type_check')['show']
    return described._replace(parameters={
        name: p if p.annotation in (p.empty, str(p.annotation)) else p.replace(annotation=show(p.annotation))
        for name, p in described.parameters.items()})


class _Kind(abc.ABCMeta):
    """Metaclass of :class:`Other`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return _other(f'{cls.__module__}.{cls.__name__}'.removeprefix('.'), name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if Other in cls.__bases__:  # a function or class of the package; decorators return what they decorate
            return args[0] if args else cls
        return super().__call__(*args, **kwargs)


class Other(metaclass=_Kind):
    """Base of the classes that stand for names of other packages."""

    name = ''

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __repr__(self) -> str:
        return f'torch.{self.name}' if self.name else f'{type(self).__name__}()'


@functools.cache
def _other(package: str, name: str) -> Any:
    if package == 'numpy' and hasattr(math, name):
        return getattr(math, name)
    if package == 'torch' and name.rstrip('0123456789') in ('float', 'int', 'bfloat', 'uint', 'bool'):
        dtype = object.__new__(_other(package, 'dtype'))
        dtype.name = name
        return dtype
    return _Kind(name, (Other, ), {'__module__': package})


class Module(dict):
    """Namespace of a module of alfx. Its names are defined when they are needed."""

    def __init__(self, name: str):
        super().__init__(__name__=name)
        self._path, self._is_package = path_of(name), path_of(name).endswith('__init__.py')
        with open(self._path, encoding='utf8') as file:
            self._statements = dict(_statements(file.read()))
        if name == 'alfx.gin_utils.registry':
            self['configurable'], self['register_function'] = _configurable, _register_function

    def __missing__(self, name: str) -> Any:
        text = self._statements.pop(name, None)
        if text is None:
            path = f"{self['__name__']}.{name}"
            if self._is_package and os.path.isfile(path_of(path)):
                return load(path)
            raise KeyError(name)
        node = ast.parse(text).body[0]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            alias = next(each for each in node.names if (each.asname or each.name.split('.')[0]) == name)
            self[name] = self._imported(node, alias)
            return self[name]
        if isinstance(node, ast.ClassDef):
            node.body = [each for each in node.body if isinstance(each, (ast.AnnAssign, ast.Expr)) or isinstance(
                each, ast.FunctionDef) and each.name in _KEPT] or [ast.Pass()]
        for used in _used_by(node):
            if used in self._statements:
                self[used]
        exec(compile(ast.Module([node], []), self._path, 'exec'), self)
        return self[name]

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def _imported(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Any:
        if isinstance(node, ast.Import):
            return _module(alias.name if alias.asname else alias.name.split('.')[0])
        parts = self['__name__'].split('.')
        base = '.'.join([*(parts[:len(parts) - node.level + self._is_package] if node.level else ()),
                         *filter(None, [node.module])])
        return getattr(_module(base), alias.name)


load = functools.cache(Module)


def _module(name: str) -> Any:
    root = name.split('.')[0]
    if root in sys.stdlib_module_names:
        return importlib.import_module(name)
    return load(name) if root == 'alfx' else _other('.'.join(name.split('.')[:-1]), name.split('.')[-1])


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each definition, assignment and import of a module, without parsing all of them."""
    decorators = ''
    for block in re.split(r'\n(?=[@\w])', text):
        if block.startswith('@'):
            decorators += f'{block}\n'
            continue
        if match := re.match(r'(?:class|def) (\w+)', block):
            yield match[1], decorators + block
        elif block.startswith('try:'):
            yield from _statements(textwrap.dedent(block[5:]))
        elif re.match(r'(?:from \S+ )?import ', block):
            for name in re.sub(r'^(?:from \S+ )?import |#.*|[()]', '', block).split(','):
                yield name.split()[-1].split('.')[0], block
        elif match := re.match(r'(\w+(?:, \w+)*)(?:: [^=\n]*)? = ', block):
            yield from ((name, block.split('\n"""')[0]) for name in match[1].split(', '))
        decorators = ''


def _used_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that the definition refers to, except in bodies of functions."""
    if isinstance(node, ast.Name):
        yield node.id
    skipped = node.body if isinstance(node, ast.FunctionDef) else ()
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _used_by(child)


def _configurable(target: Any = None, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get('allowlist') or kwargs.get('denylist'):
        raise NotImplementedError
    return target if callable(target) else lambda decorated: decorated


def _register_function(target: Any = None, **kwargs: Any) -> Any:
    if target is None:
        return _register_function
    target.is_step_function = True
    return target
