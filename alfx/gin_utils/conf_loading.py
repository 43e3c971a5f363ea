"""Load a conf: read it, import the modules it needs, check every name, and pass it to gin.

The conf is passed to gin only after it has passed all checks, so a conf with mistakes leaves gin empty.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import pkgutil
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import gin

from alfx.gin_utils import locations, operative, run_folder, static_check, trust, user_modules
from alfx.gin_utils.aliases import instead_of
from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest
from alfx.gin_utils.parsing import (Conf, Macro, Reader, Reference, Statement, find_conf, is_shipped, iterate_nested,
                                    substitute)

_logger = logging.getLogger(__name__)
_unavailable: dict[str, str] = {}
_imported = False
_NOT_WALKED = ('alfx.bin', 'alfx.examples', 'alfx.gin_utils', 'alfx.language_server')


def load(conf: Optional[str], conf_params: Sequence[str] = (), root_dir: Optional[str] = None, same_run: bool = True,
         allow_unused: bool = False, trusted: bool = True, must_be_used: Sequence[str] = ()) -> Conf:
    """Check a conf file and load it, replacing the conf that was loaded before.

    Args:
        conf: path, or name of a conf shipped with alfx, with or without ``.gin``. ``None`` loads the conf stored
            in ``root_dir``.
        conf_params: bindings that override the file, ``'Adam.lr=1e-4'``.
        root_dir: run folder. If it already holds a run, the conf must match the conf of that run, except for settings
            that may change: the length of the run and the intervals of evaluation, summaries and checkpoints.
        same_run: pass False in programs that do not resume the run in ``root_dir``; the conf may then differ.
        allow_unused: continue the run if a binding of ``conf`` or ``conf_params`` is never used; see
            :func:`~alfx.gin_utils.operative.refuse_unused`.
        must_be_used: bindings that must be used even with ``allow_unused``; see
            :func:`~alfx.gin_utils.operative.allow_unused`.
        trusted: pass False for a conf from an untrusted source; it can then import only alfx and gymnasium tasks.

    Returns:
        The loaded conf.

    Raises:
        ConfError: the conf has mistakes; the message lists all of them, each with file and line (or
            the override), what was expected, what was found and the nearest valid name.
    """
    clear()
    if conf is None and root_dir is None:
        raise ConfError('no conf file was given', 'pass its path, or the name of a conf shipped with alfx')
    path = run_folder.stored_conf(root_dir) if conf is None else find_conf(conf)
    import_configurables()
    trust.set_trusted(trusted)
    reader = Reader()
    reader.read_file(path)
    for param in conf_params:
        reader.read_param(param)
    kept = run_folder.conf_folder(root_dir) if root_dir is not None and same_run else None
    resolved, imports, modules, problems = _check(reader, kept)
    if problems:
        raise ConfError(_merged(problems))
    _apply(resolved, imports)
    if conf is not None and not is_shipped(path) and not operative.is_generated(path):
        locations.written_by_user(path)
    operative.allow_unused(allow_unused, must_be_used)
    result = Conf(path, tuple(reader.sources), tuple(conf_params), tuple(locations.bindings()), tuple(imports), modules)
    if root_dir is not None and same_run:
        try:
            run_folder.check_same_conf(root_dir)
        except ConfError:
            clear()
            raise
    return result


def check_file(path: str, unsaved: Mapping[str, str], import_modules: bool = False) -> tuple[Reader, list[Problem]]:
    """Check a conf file without loading it.

    Unless ``import_modules`` is set, no user code is executed: modules outside alfx are not imported, and names
    that such a module may register are not reported.

    Args:
        path: path of the file.
        unsaved: text of files, by path, that replaces their contents on disk.
        import_modules: import the modules that the conf imports, as :func:`load` does.

    Returns:
        The reader, which has the statements and their files, and the problems.
    """
    import_configurables()
    reader = Reader(unsaved)
    reader.read_file(path)
    trust.set_trusted(import_modules)
    imports = [s for s in reader.statements if s.kind == 'import' and not trust.may_import(s.selector)]
    reader.statements = [s for s in reader.statements if s not in imports]
    try:
        problems = _check(reader, None)[-1]
    finally:
        trust.set_trusted(True)
    return reader, [p for p in problems if import_modules or not _may_be_right(p, bool(imports))]


def _may_be_right(problem: Problem, imports_modules: bool) -> bool:
    """Return whether a problem may vanish once modules that the conf imports, or names by its path, are imported."""
    unknown = re.match(r"there is no configurable '@?(?:(?!alfx\.|__main__\.)(\w+)\.)?|no reference uses the scope",
                       problem.message)
    return unknown is not None and (imports_modules or bool(unknown[1] and importlib.util.find_spec(unknown[1])))


def _check(reader: Reader, kept: Optional[str]) -> tuple[list[static_check.Resolved], list[str], tuple, list[Problem]]:
    """Carry out the imports and check every name.

    Returns:
        The resolved bindings, followed by the results of :func:`_do_imports` with the problems of all checks.
    """
    complete = not reader.problems
    imports, modules, problems = _do_imports(reader.statements, kept)
    rest = [s for s in reader.statements if s.kind != 'import']
    resolved, more = static_check.check(rest, _unavailable, complete and not problems)
    problems = reader.problems + problems + more + _two_algorithms(reader)
    return resolved, imports, modules, [_with_odd_characters(problem, reader) for problem in problems]


@contextlib.contextmanager
def loaded(conf: Optional[str], conf_params: Sequence[str] = (), root_dir: Optional[str] = None,
           same_run: bool = True, allow_unused: bool = False, trusted: bool = True) -> Iterator[Conf]:
    """Context manager that loads a conf with :func:`load` and clears gin on exit, also after an exception."""
    try:
        yield load(conf, conf_params, root_dir, same_run, allow_unused, trusted)
    finally:
        clear()


def clear() -> None:
    """Clear the loaded conf. Registered configurables stay registered."""
    gin.clear_config()
    locations.clear()
    trust.set_trusted(True)


def import_configurables() -> dict[str, str]:
    """Import every module of alfx, so that conf files can refer to everything they register.

    Returns:
        The modules that could not be imported because a package is not installed, with the reason.
    """
    global _imported
    if not _imported:
        _imported = True
        for name in sorted(_module_names(importlib.import_module('alfx').__path__, 'alfx.')):
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
    """Return the problems without duplicates; a mistake repeated in several places lists the other places."""
    places: dict[tuple[str, str], dict[str, None]] = {}  # dicts as ordered sets
    for problem in problems:
        places.setdefault((problem.message, problem.hint), {})[problem.location] = None
    return [Problem(first, f'{message} (also in {", ".join(others)})' if others else message, hint)
            for (message, hint), (first, *others) in places.items()]


def _two_algorithms(reader: Reader) -> list[Problem]:
    """Return a problem for each choice of an algorithm on which two included files disagree.

    A file may replace the algorithm of a file that it includes, and may wrap it in another algorithm.
    """
    chosen: dict[str, Statement] = {}
    problems: dict[str, Problem] = {}
    choices = [s for s in reader.statements
               if s.kind == 'binding' and re.search(r'algorithm_(ctor|cls|class)$', s.name)]
    for new in choices:
        old = chosen.get(new.text, new)
        chosen[new.text] = new
        problems.pop(new.text, None)
        related = new.file in {'', old.file, *reader.included_by.get(old.file, ())} \
            or old.file in reader.included_by[new.file]
        if not related and not any(s.file == new.file and repr(s.value) == repr(old.value) for s in choices):
            problems[new.text] = Problem(
                new.location, f'{new.text} = {new.value!r}, but {old.location} sets it to {old.value!r}: the conf '
                'includes two algorithms', f'include only one of them, or set {new.text} in your own conf')
    return list(problems.values())


def _with_odd_characters(problem: Problem, reader: Reader) -> Problem:
    """Add the hint about a character of the same line, or of an earlier line for a syntax error."""
    odd = reader.odd_characters.get(problem.location)
    file = problem.location.rpartition(':')[0]
    if odd is None and (problem.message.startswith('syntax error') or not problem.hint.isascii()):
        odd = next((f'{place}: {hint}' for place, hint in reader.odd_characters.items()
                    if place.rpartition(':')[0] == file), None)
    if odd is None:
        return problem
    is_guess = not problem.hint or problem.message.startswith('syntax error')
    return problem._replace(hint=odd if is_guess else f'{problem.hint}\n  {odd}')


def _do_imports(statements: Sequence[Statement],
                kept: Optional[str]) -> tuple[list[str], tuple[user_modules.OwnFile, ...], list[Problem]]:
    """Carry out the imports of the conf.

    Args:
        statements: statements of the conf.
        kept: folder of the resumed run with copies of the user's modules; ``None`` for a new run.

    Returns:
        The import statements that were carried out, the files of the user's modules, and the problems.
    """
    texts: list[str] = []
    problems: list[Problem] = []
    own: list[tuple[str, str]] = []
    macros = {statement.text: statement.value for statement in statements if statement.kind == 'macro'}
    for statement in statements:
        env_id = re.fullmatch(r'([\w.]+):[^:]+', str(substitute(statement.value, macros))
                              if statement.name == 'env_name' else '')
        if statement.kind != 'import' and (env_id is None or not trust.is_trusted()):
            continue
        module = statement.selector if env_id is None else env_id[1]
        if module.startswith('__gin__'):
            problems.append(Problem(statement.location, f"'{statement.value}' is not supported: a conf uses registered "
                                    'names', 'remove the line'))
            continue
        if not trust.may_import(module):
            problems.append(Problem(statement.location, f"import of '{module}' is not allowed with --untrusted",
                                    'if you trust this conf, remove --untrusted'))
            continue
        beside = [os.path.dirname(os.path.abspath(statement.file))] if statement.file else []
        folders = list(dict.fromkeys(folder for folder in (kept, *beside, os.getcwd()) if folder is not None))
        try:
            folder = user_modules.look_in(module, folders)
        except ConfError as error:
            problems += [problem._replace(location=statement.location) for problem in error.problems]
            continue
        if folder is not None:
            own.append((module, folder))
            _warn_of_changes(module, folder, kept, folders[1:])
        if env_id is not None:  # imported by the loader of the environment
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            hint = (_hint_for_module_imports(module, error) or _hint_for(module)
                    or _hint_for_own_module(statement.file))
            problems.append(Problem(statement.location, f"cannot import '{module}': {error}", hint))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the module may raise anything
            problems.append(Problem(statement.location, *_failed_import(module, error, folder)))
        else:
            if statement.value not in texts:
                texts.append(statement.value)
    return texts, user_modules.copies(own), problems


def _warn_of_changes(module: str, folder: str, kept: Optional[str], others: Sequence[str]) -> None:
    """Warn if the user's modules next to the conf differ from the copies that the resumed run uses."""
    if folder != kept:
        return
    for other in others:
        for name in user_modules.changed_since(folder, user_modules.copies([(module, other)]) if other != kept else ()):
            _logger.warning('%s has changed since the run was started; the run keeps using its copy %s; to use the '
                            'new version, copy it there or start a new run', os.path.join(other, name),
                            os.path.join(folder, name))


def _hint_for_own_module(conf_file: str) -> str:
    """Return a hint for a module that the conf of a run folder imports and that the folder does not contain."""
    if os.path.basename(conf_file) not in ('operative.gin', 'config.gin'):
        return 'your own modules are searched for next to the conf file, in the working directory and on PYTHONPATH'
    began_with = run_folder.began_with(os.path.dirname(conf_file))
    return (f'the run was started with {began_with}; ' if began_with else '') + \
        f'copy the module into {os.path.dirname(conf_file)}, or add its folder to PYTHONPATH'


def _hint_for(module: str) -> str:
    """Return a hint for a module that does not exist."""
    names = list(_module_names(importlib.import_module('alfx').__path__, 'alfx.'))
    top, _, rest = module.partition('.')
    if top not in ('alf', 'alfx'):
        return hint_nearest(module, names)
    name = f'alfx.{rest}' if rest else 'alfx'
    if top == 'alf' and name in ('alfx', *names):
        return f"this package is called alfx: did you mean '{name}'?"
    return (instead_of(rest) or hint_nearest(name, names, 0.85)
            or 'remove the line: a conf can use everything in alfx without importing it, '
            'and names that differ in alfx are reported where they are used')


def _hint_for_module_imports(module: str, error: ImportError) -> str:
    """Return a hint for a user module that imports something alfx does not have; '' for other errors."""
    package = (error.name or '').split('.')[0]
    if module.split('.')[0] in ('alf', 'alfx') or package not in ('alf', 'alfx'):
        return ''
    if package == 'alf':
        frame = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line][-1]
        return f'{frame.filename}:{frame.lineno}: this package is called alfx: import alfx instead of alf'
    name = re.search(r"cannot import name '(\w+)'", str(error))
    return instead_of(name[1]) if name else ''


def _failed_import(module: str, error: BaseException, folder: Optional[str]) -> tuple[str, str]:
    """Return the message and the hint for a module, found in a folder, that failed while it was imported."""
    if isinstance(error, SyntaxError):
        return f"cannot import '{module}': {type(error).__name__}: {error.msg}", f'see {error.filename}:{error.lineno}'
    frames = traceback.extract_tb(error.__traceback__)
    libraries = sysconfig.get_path('stdlib'), os.path.dirname(os.path.dirname(__file__)), '<'
    own = [x for x in frames if 'site-packages' not in x.filename and not x.filename.startswith(libraries)]
    place = '{0.filename}:{0.lineno}'.format((own or frames)[-1])
    if isinstance(error, SystemExit):
        return (f"importing '{module}' ends the program: it calls sys.exit({'' if error.code is None else error.code})",
                f"see {place}; move the code of the program below: if __name__ == '__main__':")
    is_copy = isinstance(error, OSError) and folder is not None and os.path.isfile(os.path.join(folder, 'config.gin'))
    copy = f'; {folder} holds a copy of the module: copy the files that it reads there too' if is_copy else ''
    return f"importing '{module}' fails: {type(error).__name__}: {error}", f'see {place}{copy}'


def _apply(resolved: Sequence[static_check.Resolved], imports: Sequence[str]) -> None:
    """Pass the checked statements to gin and record where each was written."""
    for statement, selector, value, is_inherited in resolved:
        locations.mention_macros(leaf.name for leaf in iterate_nested(statement.value) if isinstance(leaf, Macro))
        scope, name = statement.scope, statement.name
        if statement.kind == 'macro':  # gin stores the name of a macro as a scope
            scope, name = statement.text, 'value'
        locations.record(locations.Binding(statement.file, statement.line, scope, selector, name, statement.text,
                                           value, statement.location), is_inherited)
    macros = {statement.text: statement.value for statement, *_ in resolved if statement.kind == 'macro'}
    # the bindings in a scope of the evaluation environment may name further scopes
    for binding in sorted(locations.bindings(), key=lambda each: each.name != 'eval_env_load_fn'):
        if binding.name == 'eval_env_load_fn' or binding.is_for_evaluation:
            for leaf in iterate_nested(substitute(binding.value, macros)):
                if isinstance(leaf, Reference) and leaf.scopes:
                    locations.add_evaluation_scope(leaf.scopes)
    try:
        gin.parse_config([*imports, *map(locations.line, [*locations.bindings(), *locations.inherited()])])
    except (ValueError, KeyError, SyntaxError, RuntimeError) as error:
        clear()
        raise ConfError(f'gin rejected the conf: {error}') from error
