"""Loading a conf: read, import what it needs, check every name, then hand it to gin.

Nothing reaches gin before the whole conf has passed the checks, so a conf with mistakes leaves gin empty.
"""

import contextlib
import importlib
import logging
import os
import pkgutil
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Optional

import gin

from alfx.gin_utils import locations, operative, own_modules, run_folder, static_check, trust
from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest
from alfx.gin_utils.aliases import instead_of
from alfx.gin_utils.parsing import Conf, Macro, Reader, Statement, find_conf, is_shipped, iterate_nested

__all__ = ['load', 'loaded', 'clear', 'import_configurables']

_logger = logging.getLogger(__name__)
_unavailable: dict[str, str] = {}
_imported = False
_NOT_WALKED = ('alfx.bin', 'alfx.examples', 'alfx.gin_utils')


def load(conf: Optional[str], conf_params: Sequence[str] = (), root_dir: Optional[str] = None,
         same_run: bool = True, allow_unused: bool = False, trusted: bool = True,
         must_be_used: Sequence[str] = ()) -> Conf:
    """Load a conf file in place of whatever was loaded before, after checking all of it.

    Args:
        conf: a path, or the name of a conf that comes with alfx, with or without ``.gin``. None takes the conf
            stored in ``root_dir``.
        conf_params: bindings that override the file, ``'Adam.lr=1e-4'``.
        root_dir: a run folder. If it holds a run already, the conf has to be the conf of that run, apart from
            how long it runs and how often it evaluates, summarises and writes checkpoints.
        same_run: False for programs that do not go on with the run in ``root_dir``: the conf may differ.
        allow_unused: whether a run goes on if nothing uses a binding of ``conf`` or ``conf_params``; see
            :func:`~alfx.gin_utils.operative.refuse_unused`.
        must_be_used: with ``allow_unused``, bindings that have to be used all the same; see
            :func:`~alfx.gin_utils.operative.allow_unused`.
        trusted: False for the conf of a stranger: nothing that it names is imported but alfx and tasks of gymnasium.

    Returns:
        What was loaded.

    Raises:
        ConfError: there are mistakes; the message lists all of them, each with file and line (or
            ``--conf_param``), what was expected, what was found and the nearest right name.
    """
    clear()
    if conf is None and root_dir is None:
        raise ConfError('no conf file is given', 'give its path, or the name of a conf that comes with alfx')
    path = run_folder.stored_conf(root_dir) if conf is None else _existing(conf)
    import_configurables()
    trust.set_trusted(trusted)
    reader = Reader()
    reader.read_file(path)
    for param in conf_params:
        reader.read_param(param)
    complete = not reader.problems
    kept = run_folder.conf_folder(root_dir) if root_dir is not None and same_run else None
    imports, modules, problems = _do_imports(reader.statements, kept)
    rest = [s for s in reader.statements if s.kind != 'import']
    resolved, more = static_check.check(rest, _unavailable, complete and not problems)
    problems = reader.problems + problems + more
    if problems:
        raise ConfError(_merged(problems))
    _apply(resolved, imports)
    if conf is not None and not is_shipped(path):
        locations.written_by_user(path)
    operative.allow_unused(allow_unused, must_be_used)
    result = Conf(path, tuple(reader.sources), tuple(conf_params), tuple(locations.bindings()), tuple(imports),
                  modules)
    if root_dir is not None and same_run:
        try:
            run_folder.check_same_conf(root_dir)
        except ConfError:
            clear()
            raise
    return result


@contextlib.contextmanager
def loaded(conf: Optional[str], conf_params: Sequence[str] = (), root_dir: Optional[str] = None,
           same_run: bool = True, allow_unused: bool = False) -> Iterator[Conf]:
    """:func:`load` for the length of a ``with`` block; gin is empty afterwards, whatever happens inside."""
    try:
        yield load(conf, conf_params, root_dir, same_run, allow_unused)
    finally:
        clear()


def clear() -> None:
    """Forget the loaded conf. What is registered stays registered."""
    gin.clear_config()
    locations.clear()
    trust.set_trusted(True)


def import_configurables() -> dict[str, str]:
    """Import every module of alfx, so that conf files can name what they register.

    Returns:
        The modules that could not be imported, because of a package that is not installed, with the reason.
    """
    global _imported
    if not _imported:
        _imported = True
        package = importlib.import_module('alfx')
        for name in sorted(_module_names(package.__path__, 'alfx.')):
            try:
                importlib.import_module(name)
            except ImportError as error:
                _unavailable[name] = str(error)
                missing_here = (error.name or '').split('.')[0] == 'alfx'
                _logger.log(logging.ERROR if missing_here else logging.INFO, '%s is not available: %s', name, error)
    return dict(_unavailable)


def _module_names(path: Sequence[str], prefix: str) -> Iterator[str]:
    for module in pkgutil.iter_modules(path, prefix):
        if module.name in _NOT_WALKED or module.name.endswith('.__main__'):
            continue
        yield module.name
        if module.ispkg:
            folder = os.path.join(list(path)[0], module.name.rsplit('.', 1)[-1])
            yield from _module_names([folder], module.name + '.')


def _merged(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, each once; the same mistake in several places tells the others."""
    places: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        known = places.setdefault((problem.message, problem.hint), [])
        if problem.location not in known:
            known.append(problem.location)
    return [Problem(first, f'{message} (also in {", ".join(others)})' if others else message, hint)
            for (message, hint), (first, *others) in places.items()]


def _existing(conf: str) -> str:
    path, problem = find_conf(conf)
    if problem is not None:
        raise ConfError([problem])
    assert path is not None
    return path


def _do_imports(statements: Sequence[Statement],
                kept: Optional[str]) -> tuple[list[str], tuple[own_modules.OwnFile, ...], list[Problem]]:
    """Import what the conf says.

    Args:
        statements: of the conf.
        kept: the folder in which the run that goes on has modules of the user; None if none does.

    Returns:
        The import statements that were carried out, the files of the user that they lead to, and the problems.
    """
    texts: list[str] = []
    problems: list[Problem] = []
    own: list[tuple[str, str]] = []
    for statement in statements:
        if statement.kind != 'import':
            continue
        module = statement.selector
        if module.startswith('__gin__'):
            problems.append(Problem(statement.location, f"'{statement.value}' is not supported: names in a conf are "
                                    'those that were registered', 'remove the line'))
            continue
        if not trust.may_import(module):
            problems.append(Problem(statement.location, f"imports '{module}', which --untrusted does not do",
                                    'if you know where it comes from, leave out --untrusted'))
            continue
        beside = [os.path.dirname(os.path.abspath(statement.file))] if statement.file else []
        folders = [folder for folder in (kept, *beside, os.getcwd()) if folder is not None]
        try:
            folder = own_modules.look_in(module, folders)
        except ConfError as error:
            problems += [problem._replace(location=statement.location) for problem in error.problems]
            continue
        if folder is not None:
            own.append((module, folder))
            _warn_of_changes(module, folder, kept, folders[1:])
        try:
            importlib.import_module(module)
        except ImportError as error:
            hint = (_hint_for_what_it_imports(module, error) or _hint_for(module)
                    or _where_it_was(statement.file))
            problems.append(Problem(statement.location, f"cannot import '{module}': {error}", hint))
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the code of the module does
            problems.append(Problem(statement.location, *_failed_import(module, error)))
        else:
            if statement.value not in texts:
                texts.append(statement.value)
    return texts, own_modules.copies(own), problems


def _warn_of_changes(module: str, folder: str, kept: Optional[str], others: Sequence[str]) -> None:
    """Say that a run goes on with the modules that it began with, if those beside the conf are others by now."""
    if folder != kept:
        return
    for other in others:
        for name in own_modules.changed_since(folder, own_modules.copies([(module, other)]) if other != kept else ()):
            _logger.warning('%s has changed since the run began, which goes on with its own copy, %s; to use the new '
                            'one begin another run', os.path.join(other, name), os.path.join(folder, name))


def _where_it_was(conf_file: str) -> str:
    """A hint for a module that the conf of a run folder imports, and that is not in it."""
    if os.path.basename(conf_file) not in ('operative.gin', 'config.gin'):
        return 'a module of your own is looked for beside the conf file, in the working directory and on PYTHONPATH'
    began_with = run_folder.began_with(os.path.dirname(conf_file))
    return (f'the run began with {began_with}; ' if began_with else '') + \
        f'copy the module into {os.path.dirname(conf_file)}, or put its folder on PYTHONPATH'


def _hint_for(module: str) -> str:
    """What to write in place of a module that there is not."""
    names = list(_module_names(importlib.import_module('alfx').__path__, 'alfx.'))
    top, _, rest = module.partition('.')
    if top not in ('alf', 'alfx'):
        return hint_nearest(module, names)
    name = f'alfx.{rest}' if rest else 'alfx'
    if top == 'alf' and name in ('alfx', *names):
        return f"this package is called alfx: did you mean '{name}'?"
    return (instead_of(rest) or hint_nearest(name, names, 0.85)
            or 'leave the line out: a conf can name everything of alfx without importing it, '
            'and what has another name here is told where it is used')


def _hint_for_what_it_imports(module: str, error: ImportError) -> str:
    """What to write in a module of the user in place of what is not in alfx; '' if that is not the matter."""
    package = (error.name or '').split('.')[0]
    if module.split('.')[0] in ('alf', 'alfx') or package not in ('alf', 'alfx'):
        return ''
    if package == 'alf':
        frame = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line][-1]
        return f'{frame.filename}:{frame.lineno}: this package is called alfx: write it in place of alf'
    name = re.search(r"cannot import name '(\w+)'", str(error))
    return instead_of(name[1]) if name else ''


def _failed_import(module: str, error: BaseException) -> tuple[str, str]:
    """What the code of a module did when it was imported, and a hint."""
    if isinstance(error, SyntaxError):
        return f"cannot import '{module}': {type(error).__name__}: {error.msg}", f'see {error.filename}:{error.lineno}'
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f'{frame.filename}:{frame.lineno}'
    if isinstance(error, SystemExit):
        return (f"importing '{module}' ends the program: it calls sys.exit({'' if error.code is None else error.code})",
                f"see {place}; what a program does belongs below: if __name__ == '__main__':")
    return f"importing '{module}' fails: {type(error).__name__}: {error}", f'see {place}'


def _apply(resolved: Sequence[static_check.Resolved], imports: Sequence[str]) -> None:
    """Hand the checked statements to gin, and remember where each was written."""
    for statement, selector, value in resolved:
        locations.mention_macros(leaf.name for leaf in iterate_nested(statement.value) if isinstance(leaf, Macro))
        scope, name = statement.scope, statement.name
        if statement.kind == 'macro':  # gin keeps the name of a macro as a scope
            scope, name = statement.text, 'value'
        locations.record(locations.Binding(statement.file, statement.line, scope, selector, name, statement.text,
                                           value, statement.location))
    try:
        gin.parse_config([*imports, *(locations.line(binding) for binding in locations.bindings())])
    except (ValueError, KeyError, SyntaxError, RuntimeError) as error:
        clear()
        raise ConfError(f'gin refuses the conf: {error}') from error
