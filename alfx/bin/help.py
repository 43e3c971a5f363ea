"""Show the parameters, defaults and docstring of a class or function, and the confs that bind it.

Examples:

  alfx help PPOLoss
  alfx help PPOLoss.gamma
  alfx help networks
  alfx help suite_gym.load --module my_package.my_module

For a package or module of alfx (networks, ppo_loss, environments.suite_gym), lists the classes and functions that confs
can use. For a command, shows its options. The records of alfx.data_structures (TimeStep, AlgStep, LossInfo, Experience)
are explained as well. Use --module to import your own modules first.
"""
import ast
import contextlib
import difflib
import glob
import importlib
import inspect
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from alfx.bin import command, flags, from_source
from alfx.bin.list import CONFS
from alfx.utils import docstrings

PARSER = flags.Parser(__file__, __doc__, ('CLASS', 'class, function, argument, module or package of alfx, or command'))
PARSER.add('module MODULE...', 'import this module first; repeatable')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_REGISTERED = re.compile(r'^@(?:\w+\.)?(?:configurable|register_function)(\([^\n]*\))?(?:  #[^\n]*)?\n'
                         r'(?:(?!class |def ).*\n)*?(?:class|def) (\w+)', re.MULTILINE)
_LOADERS = re.compile(r'^(\w+) = make_load\(', re.MULTILINE)  # functions created by a factory function


class Entry(NamedTuple):
    """A class or function that a conf can use.

    Attributes:
        selector: complete name, for example ``alfx.networks.value_networks.ValueNetwork``.
        module: module that defines it.
        defined_as: its name in that module.
    """
    selector: str
    module: str
    defined_as: str


def entries() -> list[Entry]:
    """Return all classes and functions that confs can use, found in the source code of alfx without importing it."""
    found: list[Entry] = []
    for path in sorted(glob.glob(os.path.join(_ROOT, '**', '*.py'), recursive=True)):
        parts = os.path.relpath(path, _ROOT).removesuffix('.py').split(os.sep)
        if parts[0] not in ('bin', 'gin_utils'):
            text = pathlib.Path(path).read_text(encoding='utf8')
            found += _entries_of('.'.join(['alfx', *parts]).removesuffix('.__init__'), text)
    return found


def _entries_of(module: str, text: str) -> Iterator[Entry]:
    for arguments, name in _REGISTERED.findall(text):
        own_name = re.match(r"\('([^']*)'", arguments)
        given = re.search(r"module=(?:'([^']*)'|(\w+))", arguments)
        prefix = module if given is None else from_source.load(module)[given[2]] if given[2] else given[1]
        yield Entry('.'.join(filter(None, (prefix, own_name[1] if own_name else name))), module, name)
    for name in _LOADERS.findall(text):
        yield Entry(f'{module}.{name}', module, name)


def matching(name: str, known: Sequence[Entry]) -> list[Entry]:
    """Return the entries whose complete name ends with ``name``, as in a conf."""
    return [entry for entry in known if f'.{entry.selector}'.endswith(f'.{name}')]


def in_module(name: str, known: Sequence[Entry]) -> list[Entry]:
    """Return the entries in the package or module of alfx called ``name``."""
    inside = re.compile(rf'(^|\.){re.escape(name.removeprefix("alfx."))}(\.|$)')
    return [entry for entry in known if inside.search(entry.module.removeprefix('alfx'))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the help and return the exit code."""
    args = PARSER.read(sys.argv[1:] if arguments is None else arguments)
    if len(args.arguments) != 1:
        PARSER.error(f'expected one name, found {len(args.arguments)}')
    name = args.arguments[0].lstrip('@').removesuffix('()')
    if name in command.programs():
        importlib.import_module(f'alfx.bin.{name}').PARSER.print_help()
        return 0
    known = entries()
    listed = in_module(name, known)
    if not args.module and listed and not matching(name, known):
        print('\n'.join(_lines_of_list(listed)))
        return 0
    sys.path.insert(0, os.getcwd())
    for module in args.module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            sys.exit(f'--module {module}: {error}')
    lines = _lines_of_class(name, known)
    print('\n'.join(lines), file=sys.stdout if lines[0].startswith(('@', 'alfx.')) else sys.stderr)
    return 0 if lines[0].startswith(('@', 'alfx.')) else 2


def _lines_of_list(listed: Sequence[Entry]) -> Iterator[str]:
    """Yield the first sentence of each entry as a line; if all are in one module, its docstring comes first."""
    module, is_single = '', len({entry.module for entry in listed}) == 1
    for entry in listed:
        if entry.module != module:
            module = entry.module
            yield f'{module}'
            source = pathlib.Path(from_source.path_of(module)).read_text(encoding='utf8')
            tree = ast.parse(source)
            nodes = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
            if is_single:
                yield f'\n{docstrings.plain(ast.get_docstring(tree) or "")}\n'
        node = nodes.get(entry.defined_as)
        docstring = docstrings.plain(node and ast.get_docstring(node) or '')
        sentence = re.split(r'(?<=[.:])\s', ' '.join(docstring.split('\n\n')[0].split()))[0]
        own = entry.selector.rsplit('.', 1)[-1]
        shown = own if entry.selector == f'{module}.{own}' else '.'.join(entry.selector.split('.')[-2:])
        yield f'  {shown:34}  {sentence}'


def _lines_of_class(name: str, known: Sequence[Entry]) -> list[str]:
    """Return the help on a class or function.

    The first line is its complete name, with ``@`` if confs can use it, or an error message.
    """
    found = matching(name, known)
    owner, _, argument = name.rpartition('/')[2].rpartition('.')
    if not found and matching(owner, known):  # a binding
        name, found = owner, matching(owner, known)
    else:
        argument = ''
    description = described(found[0]) if len(found) == 1 and name != 'softsign' else None  # softsign is torch's
    if description is None:
        from alfx import gin_utils
        for entry in found:
            importlib.import_module(entry.module)
        if not found:
            gin_utils.import_configurables()
            for module in ('alfx.data_structures', 'alfx.runs.callbacks'):
                record: Any = vars(importlib.import_module(module)).get(name.removeprefix(f'{module}.'))
                if getattr(record, '__module__', '') == module:
                    return _lines_of_record(record)
        try:
            description = gin_utils.describe(name)
        except gin_utils.ConfError as error:
            with contextlib.suppress(gin_utils.ConfError):  # a binding of a user-defined class
                return _lines_of_argument(owner, name.rpartition('.')[2], gin_utils.describe(owner))
            names = sorted({entry.selector.rsplit('.', 1)[-1] for entry in known})
            modules = sorted({part for entry in known for part in entry.module.split('.')[1:]})
            longer = sorted((other for other in names if other.lower().startswith(name.lower())), key=len)
            message, _, hint = str(error).partition('\n  ')
            meant = hint or gin_utils.aliases.instead_of_parameter('', name) or (
                f"did you mean '{longer[0]}'?" if longer else gin_utils.hint_nearest(name, [*names, *modules]))
            conf = name.removesuffix('.gin')
            shown = os.path.isfile(os.path.join(CONFS, f'{conf}.gin')) and f'alfx show {conf} prints {conf}.gin'
            unknown = not (meant or shown or vars(flags.FLAGS).get('module'))
            own = unknown and 'for a class of your own, also write --module your_module'
            return [message, *(f'  {text}' for text in (meant, shown, own) if text)]
    # A conf cannot use a name that several modules define, such as load.
    parts = description.selector.split('.')
    endings = ('.'.join(parts[-count:]) for count in range(1, len(parts) + 1))
    shortest = next(ending for ending in endings if len(matching(ending, known)) <= 1)
    if argument:
        return _lines_of_argument(shortest, argument, description)
    return [f'@{description.selector}', '', *_signature_lines(shortest, description.parameters), '',
            *textwrap.dedent(docstrings.plain(description.docstring)).splitlines(), '', *_inherited_lines(description),
            *_bound_lines(shortest)]


def _lines_of_record(cls: type) -> list[str]:
    """Return the help on a class that confs do not construct, with its methods."""
    lines = [f'{cls.__module__}.{cls.__name__}', '', docstrings.plain(inspect.getdoc(cls) or '')]
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not name.startswith('_'):
            text = docstrings.plain(inspect.getdoc(method) or '')
            lines += ['', f'{name}{inspect.signature(method)}', textwrap.indent(text, '    ')]
    return lines


def _lines_of_argument(name: str, argument: str, description: Any) -> list[str]:
    """Return the help on an argument of the class or function that confs call ``name``."""
    if argument not in description.parameters:
        nearest = difflib.get_close_matches(argument, description.parameters, n=1)
        return [f"{name} has no argument '{argument}'", *(f"  did you mean '{name}.{other}'?" for other in nearest)]
    owner, meaning = description.meanings.get(argument, ('', ''))
    explained = f'{docstrings.plain(meaning)}{owner and f" (argument of {owner})"}'
    return [f'@{description.selector}', '',
            *_signature_lines(name, {argument: description.parameters[argument]}), '',
            *textwrap.wrap(explained, 120, break_on_hyphens=False), '', *_bound_lines(name, argument)]


def described(entry: Entry) -> Any:
    """Return the description of an entry from its source code; None if it needs other packages, or alfx is imported."""
    if 'alfx.gin_utils' in sys.modules:
        return None
    try:
        return from_source.describe(entry.selector, entry.module, entry.defined_as)
    except (LookupError, NameError, TypeError, ValueError, AttributeError, NotImplementedError, OSError):
        return None


def _signature_lines(name: str, parameters: dict[str, inspect.Parameter]) -> Iterator[str]:
    """Yield a line for each parameter: the binding with its default as in a conf, and the type."""
    if not parameters:
        yield f'{name} has no parameters that a conf can bind'
    bindings = [_with_default(f'{name}.{key}', p) for key, p in parameters.items()]
    width = min(max(map(len, bindings), default=0), 72)
    for binding, p in zip(bindings, parameters.values()):
        required = 'required, ' if p.default is p.empty else ''
        kind = '' if p.annotation is p.empty else type_name(p.annotation)
        yield f'{binding:{width}}  # {required}{kind}'.removesuffix('  # ').rstrip(', ')


def _inherited_lines(description: Any) -> Iterator[str]:
    """Yield the arguments that other classes explain, by class, with default and meaning."""
    meanings = {key: description.meanings.get(key, ('', '')) for key in description.parameters}
    for owner in dict.fromkeys(owner for owner, _ in meanings.values() if owner):
        texts = [f'{_with_default(key, description.parameters[key])}: {docstrings.plain(meaning)}'
                 for key, (other, meaning) in meanings.items() if other == owner]
        yield from (f'Arguments of {owner}:', *(textwrap.fill(text, 116, initial_indent='    ', break_on_hyphens=False,
                                                              subsequent_indent=' ' * 8) for text in texts), '')


def _with_default(name: str, parameter: inspect.Parameter) -> str:
    return name if parameter.default is parameter.empty else f'{name} = {docstrings.show_default(parameter.default)}'


def type_name(annotation: Any) -> str:
    """Return a type hint as text, without module names."""
    if not isinstance(annotation, str):
        from alfx.gin_utils import type_check
        annotation = type_check.show(annotation)
    return re.sub(r'\b(typing|collections\.abc|alfx(\.\w+)*|torch(\.\w+)*|gymnasium(\.\w+)*)\.', '', annotation)


def _bound_lines(name: str, argument: str = r'\w+') -> Iterator[str]:
    """Yield the bindings of ``name`` in the confs shipped with alfx, of all arguments or of one."""
    pattern = re.compile(rf"^(?:[\w/]*/)?(?:\w+\.)*{re.escape(name)}\.{argument} = [^#\n]*", re.MULTILINE)
    confs = {path.name: [line.strip() for line in pattern.findall(path.read_text(encoding='utf8'))]
             for path in sorted(pathlib.Path(CONFS).glob('*.gin'))}
    bound = {conf: lines for conf, lines in confs.items() if lines}
    yield 'bound by: none of the confs shipped with alfx' if not bound else 'bound by:'
    for conf, lines in bound.items():
        yield f'  {conf:32}  {lines[0]}'
        yield from (f'  {"":32}  {line}' for line in lines[1:])


if __name__ == '__main__':
    flags.run(lambda _: main(), PARSER, argument='*')
