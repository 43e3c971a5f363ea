"""Python confs of the Agent Learning Framework (ALF), executed to find out what they bind.

Inside such a conf, ``alf`` is a stand-in: its names are those of alfx, ``alf.config`` records bindings, and a class
or factory that the conf calls is recorded as :class:`Made` instead of being called. Read next:
:mod:`alfx.gin_utils.python_to_gin`, which writes the record as a gin file.
"""
import ast
import builtins
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
import tokenize
import traceback
import types
from collections.abc import Callable, Sequence, ValuesView
from typing import Any, NamedTuple, Optional

from . import registry, static_check, user_modules
from .aliases import instead_of
from .conf_error import ConfError, Problem, hint_nearest
from .conf_loading import import_configurables
from .parsing import Reader, show_path
from .reference_types import find, resolve

_MOVED = {'alfx.nn': 'alfx.networks', 'alfx.math': 'alfx.utils.math_ops', 'alfx.device_ctx': 'alfx.context',
          'alfx.utils.datagen': 'alfx.environments.datagen'}
_ENTRY_POINTS = ('alfx', 'alfx.config_util', 'alfx.config_helpers')
_COMPUTED = ('it exists only once a run has started: write the result, or compute it in a function of a module next to '
             'the conf, and bind @my_module.my_function()')
_OPERATORS = ('call getitem add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs '
              'lt le gt ge eq ne').split()


class Location(NamedTuple):
    """File and line of a statement."""

    file: str
    line: int

    def __str__(self) -> str:
        return f'{show_path(self.file)}:{self.line}' if self.file else '--conf_param'


class NotExpressible(Exception):
    """Raised where a conf needs a value that a gin file cannot express; it has been reported."""


class Unknown:
    """Result of an operation that a gin file cannot express; operations on it give the same object."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return self.report()

    def report(self, location: Optional[Location] = None) -> 'Unknown':
        """Report that the object cannot be used, by default at the line that is being executed."""
        return self

    def _stop(self) -> Any:
        self.report()
        raise NotExpressible

    __iter__ = __bool__ = __len__ = __int__ = __float__ = __index__ = __str__ = _stop
    __class__ = property(_stop)  # isinstance() of a type that is not its own
    __hash__ = object.__hash__


for _name in _OPERATORS:
    setattr(Unknown, f'__{_name}__', lambda self, *args, **kwargs: self.report())


class Made(Unknown):
    """A recorded call of a class or factory.

    Attributes:
        named: the class or factory.
        arguments: arguments of the call, by name.
    """

    def __init__(self, named: 'Named', arguments: dict[str, Any]):
        self.named, self.arguments = named, arguments

    def __repr__(self) -> str:
        return f'{self.named.name}(...)'

    def report(self, location: Optional[Location] = None) -> Unknown:
        return self.named.record.report(f'the conf computes with the result of {self.named.name}()', _COMPUTED,
                                        location)


class Absent(Unknown):
    """A name that alfx does not have; it is reported where the conf uses it."""

    def __init__(self, record: 'Record', name: str):
        self.record, self.name = record, name

    def report(self, location: Optional[Location] = None) -> Unknown:
        names = [name.rpartition('.')[2] for name in registry.registered_selectors()]
        hint = instead_of(self.name) or hint_nearest(self.name.rpartition('.')[2], names)
        return self.record.report(f"alfx has no '{self.name}'", hint or 'docs/coming_from_alf.md lists replacements',
                                  location)


class Named:
    """Stand-in for a class or function that a conf can name.

    Attributes:
        record: the record of the conf.
        target: the class or function itself.
        selector: its complete selector; '' if it is not configurable.
    """

    def __init__(self, record: 'Record', target: Any, selector: str):
        self.record, self.target, self.selector = record, target, selector

    @property
    def name(self) -> str:
        return getattr(self.target, '__name__', self.selector)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __eq__(self, other: Any) -> bool:
        return type(other) is Named and other.target is self.target

    def __hash__(self) -> int:
        return id(self.target)

    def __mro_entries__(self, bases: tuple) -> tuple:
        return self.target,

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.selector and registry.step_function_of(self.selector) is None:
            try:
                return Made(self, {**self.record.by_name(self, args), **kwargs})
            except NotExpressible:
                return self.record.unknown
        if _has_stand_in((args, kwargs)):
            return self.record.report(f'{self.name}() is called with objects that only a run creates', _COMPUTED)
        result = self.target(*args, **kwargs)
        return result if result is not None else self.record.report(
            f'a gin file cannot call {self.name}()', 'remove the call; see docs/coming_from_alf.md for a replacement')


class _Module:
    """Stand-in for a module of alfx or of the user."""

    def __init__(self, record: 'Record', name: str):
        self._record, self._name = record, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return self._record.look_up(self._name, name)


class Bound(NamedTuple):
    """A value with the location that binds it and the number of the call of ``alf.config``."""

    value: Any
    location: Location
    call: int = 0


class Record:
    """Bindings, macros and mistakes of a Python conf and the confs that it imports.

    Args:
        conf_params: values that take precedence over the conf: ``'name=value'`` for a name of ``alf.define_config``,
            ``'Class.parameter=value'`` for a binding.

    Attributes:
        bindings: complete selector and parameter -> value. A selector that alfx does not have is kept as written.
        macros: names defined by ``alf.define_config``.
        macro_of: id of a value -> the name that ``alf.define_config`` gave it.
        computed_from: names of ``alf.define_config`` whose values the conf used in an expression.
        variables: id of a value -> name of the variable of the conf.
        files: paths of the conf and the confs that it imports.
        classes: name of a conf and name of a class that it defines -> its line.
        modules: user modules that the conf imports.
        params: values for names that no ``alf.define_config`` has defined yet.
        problems: what cannot be expressed, with file and line.
        notes: further remarks, with file and line.
    """

    def __init__(self, conf_params: Sequence[str] = ()) -> None:
        import_configurables()
        self.bindings: dict[tuple[str, str], Bound] = {}
        self.macros: dict[str, Bound] = {}
        self.macro_of: dict[int, str] = {}
        self.computed_from: set[str] = set()
        self.variables: dict[int, str] = {}
        self.modules: list[str] = []
        self.params: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.unknown = Unknown()
        self.files: set[str] = set()
        self.classes: dict[tuple[str, str], Location] = {}
        self._fixed: set[tuple[str, str]] = set()
        self._files: list[str] = []  # being executed, the imported conf after the conf that imports it
        self._executed: dict[str, types.ModuleType] = {}
        self._names: dict[str, set[str]] = {}  # that each file uses
        self._kept: list[Any] = []  # objects whose ids are in macro_of and variables
        self._calls = 0
        self._selectors: dict[int, str] = {}
        self._api: dict[str, Callable] = {
            name: getattr(self, name) for name in ('config', 'define_config', 'get_config_value', 'import_config',
                                                   'pre_config', 'configurable')}
        self._api.update(load_config=self.import_config, repr_wrapper=self.configurable)
        self._read_params(conf_params)

    # What a conf can call ------------------------------------------------------------------------------------------

    def config(self, prefix_or_dict: Any, mutable: bool = True, raise_if_used: bool = True, sole_init: bool = False,
               override_sole_init: bool = False, **kwargs: Any) -> None:
        """Record bindings of one class or function, or ``{'Class.parameter': value}``, as ``alf.config`` does."""
        del raise_if_used, sole_init, override_sole_init
        self._calls += 1
        if isinstance(prefix_or_dict, dict):
            items = [(*name.rpartition('.')[::2], value) for name, value in prefix_or_dict.items()]
        else:
            items = [(prefix_or_dict, name, value) for name, value in kwargs.items()]
        for owner, name, value in items:
            key = self.selector(owner), name
            if key in self._fixed:
                if self.bindings[key].location.file:
                    self.notes.append(f'{self.location()}: ignored, because an earlier line fixes {owner}.{name}')
                continue
            self.bindings.pop(key, None)
            self.bindings[key] = Bound(value, self.location(), self._calls)
            if not mutable:
                self._fixed.add(key)

    def define_config(self, name: str, default_value: Any) -> Any:
        """Define a macro and return its value, as ``alf.define_config`` does."""
        value = self._watched(name, self.params.pop(name, default_value))
        self.macros[name] = Bound(value, self.location())
        return value

    def get_config_value(self, config_name: str) -> Any:
        """Return the value of a macro, or the value or default of a parameter, as ``alf.get_config_value`` does."""
        if (macro := config_name.removeprefix('_CONFIG._USER.')) in self.macros:
            return self.macros[macro].value
        owner, _, name = config_name.rpartition('.')
        selector = self.selector(owner)
        if (selector, name) in self.bindings:
            return self.bindings[selector, name].value
        known = find(selector)
        parameter = static_check.parameters_of(known)[0].get(name) if known else None
        if parameter is not None and parameter.default is not parameter.empty:
            return parameter.default
        return self.report(f"get_config_value: there is no value '{config_name}'", 'write the value')

    def import_config(self, conf_file: str) -> types.ModuleType:
        """Execute another Python conf, unless it was executed before, and return its names."""
        folders = [os.path.dirname(self._files[-1]), os.getcwd(), *os.environ.get('ALF_CONFIG_PATH', '').split(':')]
        path = next((path for folder in folders if os.path.isfile(path := os.path.join(folder, conf_file))), None)
        if path is None or os.path.abspath(path) in self._files:
            message = 'it imports itself' if path else 'not found next to the conf, in the working directory or in ' \
                'ALF_CONFIG_PATH'
            self.report(f"cannot import the conf '{conf_file}': {message}", 'copy it next to the conf')
            raise NotExpressible
        return self._executed.get(os.path.abspath(path)) or self.execute(path)

    def _example(self, name: str) -> Any:
        """Return a conf or module of ``alf.examples``, a file next to the conf. As in Python, it is executed once."""
        if not name.endswith('_conf') and user_modules.look_in(name, [os.path.dirname(self._files[-1]), os.getcwd()]):
            return self._import(name)
        return self.import_config(f'{name.replace(".", os.sep)}.py')

    def pre_config(self, configs: dict[str, Any]) -> None:
        """Record values that take precedence over later definitions and bindings, as ``alf.pre_config`` does."""
        for name, value in configs.items():
            if '.' in (name := name.removeprefix('_CONFIG._USER.')):
                self.config({name: value}, mutable=False)
            else:
                self.params[name] = value

    def configurable(self, target: Any = None, **_: Any) -> Any:
        """Return the decorated class or function itself; the record reports it where the conf uses it."""
        return target if callable(target) else lambda decorated: decorated

    # Executing a conf ----------------------------------------------------------------------------------------------

    def execute(self, path: str) -> types.ModuleType:
        """Execute a Python conf, one statement after the other, and return its names.

        A statement that fails is reported, and the names that it assigns become unknown.

        Raises:
            ConfError: the file cannot be read as Python.
        """
        path = os.path.abspath(path)
        try:
            with tokenize.open(path) as file:
                tree = ast.parse(file.read(), path)
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            location = Location(path, getattr(error, 'lineno', None) or 1)
            raise ConfError(f'not a Python file: {error}', location=str(location)) from None
        module = types.ModuleType(os.path.splitext(os.path.basename(path))[0])
        names = vars(module)
        names.update(__file__=path, __builtins__={**vars(builtins), '__import__': self._import})
        self._files.append(path)
        self.files.add(path)
        self._executed[path] = module
        self._names[path] = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef):
                self.classes[names['__name__'], statement.name] = Location(path, statement.lineno)
            if not self._succeeds(ast.Module([statement], []), names):
                self._continue_after(statement, names)
        self._files.pop()
        for name, value in names.items():
            if type(value) in (functools.partial, Made) and not name.startswith('_'):
                self.variables.setdefault(id(value), name)
                self._kept.append(value)
        return module

    def _succeeds(self, tree: ast.Module, names: dict[str, Any]) -> bool:
        before, line = len(self._files), getattr(tree.body[0], 'lineno', 1)
        try:
            exec(compile(tree, self._files[-1], 'exec'), names)
            return True
        except NotExpressible:
            pass
        except ConfError as error:
            self.problems += [problem._replace(location=problem.location or str(Location(self._files[-1], line)))
                              for problem in error.problems]
        except (Exception, SystemExit) as error:  # noqa: BLE001  the conf may raise anything
            locations = [Location(frame.filename, frame.lineno or 1)
                         for frame in traceback.extract_tb(error.__traceback__) if frame.filename in self.files]
            location = locations[-1] if locations else Location(self._files[-1], line)
            hint = ('the module uses alf: replace alf by alfx in it' if getattr(error, 'name', '') == 'alf' else
                    'correct the statement, or write its bindings in the gin file by hand')
            self.report(f'{type(error).__name__}: {error}', hint, location)
        del self._files[before:]
        return False

    def _continue_after(self, statement: ast.stmt, names: dict[str, Any]) -> None:
        """Mark names that a failed statement assigns as unknown; bind the arguments of ``alf.config`` one by one."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ('alf.config', 'config'):
            names['__unknown__'] = self.unknown
            for keyword in call.keywords:
                for value in (keyword.value, ast.Name('__unknown__', ast.Load())):
                    single = ast.Call(call.func, call.args, [ast.keyword(keyword.arg, value)])
                    line = ast.copy_location(ast.Expr(ast.copy_location(single, call)), call)
                    if self._succeeds(ast.fix_missing_locations(ast.Module([line], [])), names):
                        break
        elif hasattr(statement, 'body') or isinstance(call, ast.Call) and inspect.isfunction(
                names.get(ast.unparse(call.func))):
            here = Location(self._files[-1], statement.lineno)
            if self.problems[-1].location != str(here):
                self.report('the statements after the error in this block or function are not converted',
                            'write their bindings in the gin file by hand', here)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = self.unknown
            elif isinstance(node, ast.alias):
                names[node.asname or node.name.partition('.')[0]] = self.unknown
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.setdefault(node.name, self.unknown)

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        top, _, rest = name.partition('.')
        if top == 'alf':
            module = f'alfx.{rest}' if rest and fromlist else 'alfx'
            if not fromlist and rest.startswith('examples.'):
                self._example(rest.removeprefix('examples.'))
            if fromlist and '*' in fromlist:
                found = {name: self.look_up(module, name) for name in self._names[self._files[-1]]}
                return types.SimpleNamespace(**{k: v for k, v in found.items() if not isinstance(v, Absent)})
            return _Module(self, module)
        folder = user_modules.look_in(name, [os.path.dirname(self._files[-1]), os.getcwd()])
        if folder is None or level:
            return builtins.__import__(name, globals, locals, fromlist, level)
        path = pathlib.Path(folder, f'{top}.py')
        if path.is_file() and re.search(r'\balf\.(config|define_config|import_config)\(', path.read_text('latin1')):
            return self._executed.get(str(path)) or self.execute(str(path))
        imported = builtins.__import__(name, globals, locals, fromlist, level)
        if name not in self.modules:
            self.modules.append(name)
        if fromlist and '*' in fromlist:
            return types.SimpleNamespace(**{key: self.look_up(name, key) for key in vars(imported) if key[0] != '_'})
        return _Module(self, imported.__name__)

    # Names ---------------------------------------------------------------------------------------------------------

    def look_up(self, module: str, name: str) -> Any:
        """Return what ``module.name`` is in a conf, where the module is one of alfx or of the user."""
        if module in _ENTRY_POINTS and name in self._api:
            return self._api[name]
        if module == 'alfx.examples' or module.startswith('alfx.examples.'):
            inside, folders = module.removeprefix('alfx.examples').lstrip('.'), [os.path.dirname(self._files[-1]), '']
            if not inside or any(os.path.isdir(os.path.join(folder, *inside.split('.'))) for folder in folders):
                return self._example(f'{inside}.{name}'.lstrip('.'))
            return getattr(self._example(inside), name, Absent(self, f'examples.{inside}.{name}'))
        module = _MOVED.get(module, module)
        full = _MOVED.get(f'{module}.{name}', f'{module}.{name}')
        found = getattr(_imported(module), name, None)
        found = _imported(full) if found is None else found
        if found is None:
            known = find(f'{module.rpartition(".")[2]}.{name}', name)  # another module of alfx may define it
            return Named(self, known.wrapped, known.selector) if known else Absent(self, full.removeprefix('alfx.'))
        top = module.partition('.')[0]
        if isinstance(found, types.ModuleType) and found.__name__.partition('.')[0] in ('alfx', top):
            return _Module(self, found.__name__)
        if inspect.isclass(found) or inspect.isroutine(found):
            if (selector := self.registered(found)) or (found.__module__ or '').startswith('alfx.'):
                return Named(self, found, selector)
            if top != 'alfx' and inspect.isclass(found):
                return Named(self, found, self.selector_of(found))
        return found

    def registered(self, target: Any) -> str:
        """Return the complete selector of a registered class or function, '' for any other object."""
        selectors = registry.registered_selectors()
        if len(self._selectors) < len(selectors):
            for selector in sorted(selectors, key=lambda name: ('.' in name, -len(name))):
                found = registry.step_function_of(selector) or inspect.unwrap(resolve(selector).wrapped)
                self._selectors[id(found)] = selector
        path = f'{getattr(target, "__module__", "")}.{getattr(target, "__name__", "")}'
        by_gin = getattr(find(path), 'selector', '') == path  # or by gin.configurable
        return self._selectors.get(id(inspect.unwrap(target))) or (path if by_gin else '')

    def selector_of(self, target: Any) -> str:
        """Return the selector of a class or function of any module; '' if a conf cannot name it."""
        if selector := self.registered(target):
            return selector
        module, name = getattr(target, '__module__', None) or 'torch', getattr(target, '__qualname__', '')
        paths = [f'torch.nn.{name}', f'{module}.{name}'] if module.startswith('torch.nn') else [f'{module}.{name}']
        return next((path for path in paths if name.isidentifier() and registry.register_by_path(path)), '')

    def selector(self, written: str) -> str:
        """Return the complete selector of a name that the conf has written; the name itself if alfx has none."""
        name = written.removeprefix('alf.')
        known = find(f'alfx.{name}', name, *([name.rpartition('.')[2]] if name != written else []))
        return known.selector if known else name

    def by_name(self, named: Named, args: Sequence[Any], location: Optional[Location] = None) -> dict[str, Any]:
        """Return positional arguments by name.

        Raises:
            NotExpressible: they have no names, which is reported.
        """
        parameters = static_check.parameters_of(resolve(named.selector))[0] if args else {}
        names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            self.report(f'a gin file binds named parameters, and {named.name} has unnamed ones',
                        'construct it in a function of a module next to the conf, and bind @my_module.my_function()',
                        location)
            raise NotExpressible
        return dict(zip(names, args))

    # Reports -------------------------------------------------------------------------------------------------------

    def location(self) -> Location:
        """Return the line of the conf that is being executed."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back
        return Location(frame.f_code.co_filename, frame.f_lineno) if frame else Location('', 0)

    def report(self, message: str, hint: str = '', location: Optional[Location] = None) -> Unknown:
        """Add a problem, by default at the line that is being executed, and return ``unknown``."""
        problem = Problem(str(location or self.location()), message, hint)
        if problem not in self.problems:
            self.problems.append(problem)
        return self.unknown

    def _read_params(self, conf_params: Sequence[str]) -> None:
        reader = Reader()
        for param in conf_params:
            reader.read_param(param)
        if reader.problems:
            raise ConfError(reader.problems)
        for statement in reader.statements:
            if statement.scope or statement.kind not in ('binding', 'macro'):
                raise ConfError('Python confs have neither scopes nor imports',
                                "write 'Class.parameter=value' or 'name=value'", statement.location)
            self.pre_config({statement.text: statement.value})

    def _watched(self, name: str, value: Any) -> Any:
        """Return a copy of a value that is recognized as the macro ``name`` and notices when the conf computes."""
        base = type(value)
        if base in (int, float, str, tuple, list, dict):
            def watch(method: str) -> Callable:
                def watched(this: Any, *args: Any) -> Any:
                    self.computed_from.update(self.macro_of[id(x)] for x in (this, *args) if id(x) in self.macro_of)
                    return getattr(base, method)(this, *args)
                return watched
            operators = [f'__{name}__' for name in (*_OPERATORS, 'iter', 'format', 'bool', 'len', 'int', 'float')]
            own = {method: watch(method) for method in operators if hasattr(base, method)}
            value = type(base.__name__, (base,), {**own, '__hash__': base.__hash__})(value)
        elif base in (bool, type(None)):  # every True is the same object
            self.computed_from.add(name)
            return value
        self._kept.append(value)
        self.macro_of[id(value)] = name
        return value


def _imported(name: str) -> Optional[types.ModuleType]:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _has_stand_in(value: Any) -> bool:
    if issubclass(type(value), (Unknown, Named)):
        return True
    if isinstance(value, functools.partial):
        value = [value.func, *value.args, *value.keywords.values()]
    value = value.values() if isinstance(value, dict) else value
    return any(map(_has_stand_in, value)) if isinstance(value, (list, tuple, ValuesView)) else False
