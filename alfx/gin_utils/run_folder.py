"""The ``conf/`` part of a run folder: conf, versions and command line of the run.

::

    root_dir/conf/
      <the conf file and its includes, unchanged>
      config.gin        every binding in one file, with includes and --conf_param resolved
      operative.gin     also every default that was used; sufficient to play or resume
      command_line.txt  one line for each start of the run
      versions.json     python, torch, numpy, gymnasium, alfx, and the platform
      <modules>         files of your own modules that the conf imports; used when the run is resumed
      modules.json      the folders that these were copied from
      git.txt           commit and uncommitted changes, if the run was started in a git work tree
"""

import contextlib
import glob
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Optional

from alfx.gin_utils.conf_error import ConfError, Problem
from .. import __version__
from . import locations, operative, settings, static_check, stored_files, user_modules
from .parsing import Conf, Reader, show_path, substitute

_OTHER_FILES = ('command_line.txt', 'git.txt', 'versions.json', user_modules.ORIGINS)
_GIT_LIMIT = 1_000_000  # maximum number of characters of uncommitted changes to store
_written: dict[str, dict[str, str | bytes]] = {}  # by this process: folder -> file name -> contents


def write_conf(root_dir: str, conf: Conf, command_line: Optional[Sequence[str]] = None) -> str:
    """Record the conf, the versions, the command line and the state of git.

    Call it when a run starts, after everything in the conf has been constructed, so that only valid confs are recorded.

    Args:
        root_dir: run folder; created if it does not exist.
        conf: the loaded conf.
        command_line: default ``sys.argv``.

    Returns:
        The path of the ``conf`` folder.
    """
    folder = os.path.join(root_dir, 'conf')
    os.makedirs(folder, exist_ok=True)
    resolved = os.path.join(folder, 'config.gin')
    if os.path.dirname(conf.conf_file) == os.path.abspath(folder) and os.path.isfile(resolved):
        _write(folder, 'config.gin', _with_overrides(resolved, conf))  # the run resumes with its stored conf
    else:
        taken = {'config.gin', 'operative.gin', *_OTHER_FILES}
        for source in conf.sources:
            name = _free_name(os.path.basename(source.path), taken)
            taken.add(name)
            _write(folder, name, source.text)
        _write(folder, 'config.gin', _flat_text(conf))
        resumes = has_checkpoint(root_dir)  # then only modules that the conf did not import before are missing
        new = [module for module in conf.modules if module.name not in taken
               and not (resumes and os.path.exists(os.path.join(folder, module.name)))]
        for module in new:
            os.makedirs(os.path.dirname(os.path.join(folder, module.name)), exist_ok=True)
            _write(folder, module.name, module.content)
        if new:
            origins = [*(user_modules.origins(folder) if resumes else ()), *(os.path.abspath(m.folder) for m in new)]
            _write(folder, user_modules.ORIGINS, json.dumps([*dict.fromkeys(origins)]) + '\n')
    if not has_checkpoint(root_dir):  # existing files are from a start that failed before the first checkpoint
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, 'operative.gin'))
    _write(folder, 'versions.json', json.dumps(versions(), indent=2) + '\n')
    arguments = sys.argv if command_line is None else command_line
    line = f'{time.strftime("%Y-%m-%d %H:%M:%S")}  {shlex.join(arguments)}\n'
    stored_files.check_regular(os.path.join(folder, 'command_line.txt'))
    with open(os.path.join(folder, 'command_line.txt'), 'a', encoding='utf8') as file:
        file.write(line)
    _written[os.path.abspath(folder)]['command_line.txt'] = line
    git = _git_state()
    if git:
        _write(folder, 'git.txt', git)
    return folder


def copy_conf(source: str, root_dir: str, conf: Conf) -> None:
    """Copy the conf files of a run into a new run folder, with the changes of ``--conf_param``.

    Args:
        source: existing run folder.
        root_dir: new run folder.
        conf: conf of ``source``, with the changes.
    """
    old, folder = (os.path.join(os.path.abspath(root), 'conf') for root in (source, root_dir))
    shutil.copytree(old, folder, ignore=shutil.ignore_patterns('__pycache__', 'command_line.txt'))
    for name in ('config.gin', 'operative.gin'):
        if os.path.isfile(os.path.join(old, name)):
            _write(folder, name, _with_overrides(os.path.join(old, name), conf))


def conf_folder(root_dir: str) -> Optional[str]:
    """Return the folder with the conf of the run in ``root_dir``; ``None`` if there is no run yet."""
    return os.path.abspath(os.path.join(root_dir, 'conf')) if has_checkpoint(root_dir) else None


def began_with(folder: str) -> str:
    """Return the conf file that a run was started with, read from its ``conf`` folder; '' if it is unknown."""
    path = os.path.join(folder, 'config.gin')
    if not os.path.isfile(path):
        return ''
    found = re.match('# From (.+)', stored_files.read_text(path))
    return found[1] if found else ''


def rewrite_conf(root_dir: str) -> bool:
    """Write the files of the ``conf`` folder again if the folder has been deleted since this process wrote it.

    Returns:
        Whether the folder was missing.
    """
    folder = os.path.abspath(os.path.join(root_dir, 'conf'))
    if os.path.isdir(folder) or folder not in _written:
        return False
    for name, text in _written[folder].items():
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        _write(folder, name, text)
    return True


def is_own_conf(root_dir: str) -> bool:
    """Return False if the ``conf`` folder exists, but another run has written it since this process did."""
    folder = os.path.abspath(os.path.join(root_dir, 'conf'))
    start, path = _written.get(folder, {}).get('command_line.txt', ''), os.path.join(folder, 'command_line.txt')
    return not os.path.isfile(path) or str(start) in stored_files.read_text(path, errors='replace')


def write_operative(root_dir: str) -> str:
    """Write ``conf/operative.gin``; call it after the first iteration.

    Returns:
        The path of the file.
    """
    folder = os.path.join(root_dir, 'conf')
    os.makedirs(folder, exist_ok=True)
    return _write(folder, 'operative.gin', operative.operative_config_str())


def stored_conf(root_dir: Optional[str]) -> str:
    """Return the path of the conf of an existing run: ``operative.gin``, or ``config.gin`` if that is missing or blank.

    Raises:
        ConfError: ``root_dir`` contains neither.
    """
    for name in ('operative.gin', 'config.gin'):
        path = os.path.join(root_dir or '.', 'conf', name)
        if os.path.isfile(path) and stored_files.read_text(path).strip():
            return os.path.abspath(path)
    runs = sorted(glob.glob(os.path.join(glob.escape(root_dir or '.'), '*', 'conf', 'operative.gin')))
    if runs:
        names = [os.path.dirname(os.path.dirname(run)) for run in runs]
        raise ConfError(f'{root_dir} is not a run folder, but contains {len(names)}',
                        f'name one of them: {", ".join(names[:5])}{", ..." if len(names) > 5 else ""}')
    raise ConfError(f'{root_dir} is not a run folder: it has no conf/operative.gin, or the file is blank',
                    'name the folder of a run, or a conf file')


def stored_info(root_dir: str) -> dict[str, Any]:
    """Return the records of a run folder: 'versions', 'command_lines', 'git', 'config', 'operative'.

    Missing records are ``None``.
    """
    def read(name):
        path = os.path.join(root_dir, 'conf', name)
        return stored_files.read_text(path, errors='replace') if os.path.isfile(path) else None

    versions_file, commands = os.path.join(root_dir, 'conf', 'versions.json'), read('command_line.txt')
    remedy = 'remove the file; reports then omit the versions of this run'
    return {
        'versions': stored_files.read_json(versions_file, dict, remedy) if os.path.isfile(versions_file) else None,
        'command_lines': None if commands is None else commands.splitlines(),
        'git': read('git.txt'),
        'config': read('config.gin'),
        'operative': read('operative.gin'),
    }


def check_same_conf(root_dir: str) -> None:
    """Check that a run folder, if it holds a run, belongs to the loaded conf.

    A folder holds a run once it has a checkpoint; other files are from a start that failed before the first one. The
    length of the run, the intervals of evaluation, summaries and checkpoints, and the processes that act may differ.
    The environment, the algorithm and everything else that affects learning must be the same.

    Raises:
        ConfError: the run has another conf, and the message lists the differences; or its conf is unknown.
    """
    folder = os.path.abspath(os.path.join(root_dir, 'conf'))
    if not has_checkpoint(root_dir):
        return
    recorded = next((name for name in ('config.gin', 'operative.gin')
                     if os.path.isfile(os.path.join(folder, name))), None)
    if recorded is None:
        raise ConfError(f'{show_path(root_dir)} holds checkpoints but no conf/config.gin, so their conf is unknown',
                        'restore conf/config.gin of that run, or use another root_dir')
    old = _read_bindings(os.path.join(folder, recorded))
    macros = {b.scope: b.value for b in locations.bindings() if b.selector == 'gin.macro'}
    bindings = {b.key: b for b in locations.bindings() if b.selector != 'gin.macro'}
    new = {b.key: substitute(b.value, macros) for b in (*bindings.values(), *locations.inherited())}
    # operative.gin lacks bindings that were never used
    keys = [*old, *bindings] if recorded == 'config.gin' else [*old]
    if any(os.path.dirname(b.file) == folder for b in bindings.values()):  # only --conf_param, and macros, can differ
        keys = [key for key, b in bindings.items()
                if os.path.dirname(b.file) != folder or repr(b.value) != repr(new[key])]
        if os.path.isfile(os.path.join(folder, 'operative.gin')):
            old = {**_read_bindings(os.path.join(folder, 'operative.gin')), **old}
    problems = []
    for key in dict.fromkeys(keys):
        known = static_check.find(key[1])
        if known is not None and key[2] in settings.may_change(known.wrapped):
            continue
        was, now = _effective(old, key), _effective(new, key)
        if repr(was) != repr(now) and _show(key) != 'TrainerConfig.random_seed':  # the trainer checks the seed
            location = bindings[key].location if key in bindings else ''
            problems.append(Problem(location, f'{_show(key)} is {now!r}, but the run in {show_path(root_dir)} has '
                                    f'{was!r}'))
    if problems:
        hint = 'remove the differences to resume the run, use another root_dir, or change a copy of it with alfx fork'
        raise ConfError([*problems[:-1], problems[-1]._replace(hint=hint)])


def versions() -> dict[str, Optional[str]]:
    """Return the versions of everything that affects the result of a run; ``None`` for packages not installed."""
    found: dict[str, Optional[str]] = {'python': platform.python_version(), 'platform': platform.platform(),
                                       'alfx': __version__}  # an installed alfx may differ from these sources
    for name in ('torch', 'numpy', 'gymnasium', 'gin-config', 'optree', 'mujoco', 'ale-py'):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def has_checkpoint(root_dir: str) -> bool:
    """Return whether a run folder has a checkpoint, from which the run resumes."""
    folder = os.path.join(root_dir, 'train', 'algorithm')
    return os.path.isdir(folder) and any(re.fullmatch(r'ckpt-\d+', name) for name in os.listdir(folder))


class _NotSet:

    def __repr__(self) -> str:
        return 'not set'


def _effective(bindings: dict[tuple[str, str, str], Any], key: tuple[str, str, str]) -> Any:
    """Return the value of an argument: bound in its scope or an outer scope, or its default."""
    scope, selector, name = key
    scopes = scope.split('/') if scope else []
    for depth in range(len(scopes), -1, -1):
        found = bindings.get(('/'.join(scopes[:depth]), selector, name))
        if found is not None or ('/'.join(scopes[:depth]), selector, name) in bindings:
            return found
    known = static_check.find(selector)
    parameter = static_check.parameters_of(known)[0].get(name) if known else None
    return _NotSet() if parameter is None or parameter.default is parameter.empty else parameter.default


def _show(key: tuple[str, str, str]) -> str:
    scope, selector, name = key
    return f'{scope}/{selector.split(".")[-1]}.{name}' if scope else f'{selector.split(".")[-1]}.{name}'


def _read_bindings(path: str) -> dict[tuple[str, str, str], Any]:
    reader = Reader()
    reader.read_file(path)
    if reader.problems:
        raise ConfError(reader.problems)
    macros = {s.text: s.value for s in reader.statements if s.kind == 'macro'}
    return {(s.scope, _full_name(s.selector), s.name): substitute(s.value, macros)
            for s in reader.statements if s.kind == 'binding'}


def _full_name(selector: str) -> str:
    """Return the complete selector of a name; the name itself if it is no longer registered."""
    known = static_check.find(selector)
    return known.selector if known else selector


def _flat_text(conf: Conf) -> str:
    header = [f'# From {show_path(conf.conf_file)}'] + [f'# --conf_param {param!r}' for param in conf.conf_params]
    return '\n'.join([*header, *conf.imports, *(locations.line(b) for b in conf.bindings)]) + '\n'


def _with_overrides(path: str, conf: Conf) -> str:
    """Return the text of an existing ``config.gin`` with the changes of ``--conf_param`` at the end."""
    text = stored_files.read_text(path)
    overrides = [locations.line(binding) for binding in conf.bindings if not binding.file]
    for line in overrides:  # gin indents the further lines of a long value
        text = re.sub(rf'(?m)^{re.escape(line.partition(" = ")[0])} = .*\n(?: .*\n)*', '', text)
    return text + ''.join(f'{line}\n' for line in overrides)


def _free_name(name: str, taken: set[str]) -> str:
    stem, extension = os.path.splitext(name)
    number = 2
    while name in taken:
        name, number = f'{stem}-{number}{extension}', number + 1
    return name


def _write(folder: str, name: str, text: str | bytes) -> str:
    path = os.path.join(folder, name)
    stored_files.write(path, text)
    _written.setdefault(os.path.abspath(folder), {})[name] = text
    return path


def _git_state() -> str:
    commit = _git('rev-parse', 'HEAD')
    if commit is None:
        return ''
    status, changes = _git('status', '--porcelain') or '', _git('diff', 'HEAD') or ''
    if len(changes) > _GIT_LIMIT:
        changes = changes[:_GIT_LIMIT] + '\n... cut off\n'
    return f'commit {commit.strip()}\n\n{status}\n{changes}'


def _git(*arguments: str) -> Optional[str]:
    try:
        done = subprocess.run(['git', *arguments], capture_output=True, text=True, timeout=20, errors='replace')
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or the work tree is very large
        return None
    return done.stdout if done.returncode == 0 else None
