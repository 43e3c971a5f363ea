"""Flags shared by all programs, and exit codes.

``--conf FILE`` (alias ``--gin_file``) names the conf file; an argument ``X.y=z``, or ``--conf_param 'X.y=z'`` (alias
``--gin_param``, repeatable), overrides one of its bindings. A user error ends the program with one message on stderr
and exit code 2, without a traceback; ``--debug`` shows the traceback as well.
"""

import ast
import errno
import faulthandler
import inspect
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Optional

from absl import flags

from alfx import gin_utils
from alfx.bin import command
from alfx.gin_utils.aliases import ELSEWHERE

# absl attributes a flag to the module that defines it; these flags belong to the program that requests them.
flags.disclaim_key_flags()

__all__ = ['define_conf_flags', 'define_untrusted_flag', 'define_device_flag', 'define_unused_flag', 'conf_from_flags',
           'device_from_flags', 'root_dir_from_flags', 'check_output', 'run']

FLAGS = flags.FLAGS
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.EPERM)
_ALIASES = ('gin_file', 'gin_param')  # of --conf and --conf_param
_TEXT = re.compile(r'^([^=]*= *)([A-Za-z][\w.:/-]*)$')  # an override whose value is a word
_OVERRIDE = re.compile(r'[\w./]*\w\.\w+ *=')  # X.y=z or scope/X.y=z


def define_conf_flags(root_dir: bool = True) -> None:
    """Define ``--conf``, ``--conf_param``, their aliases, and ``--debug``. Call this when a program is imported.

    Args:
        root_dir: also define ``--root_dir``.
    """
    _define('conf', flags.DEFINE_string, None, 'conf file: a path, or the name of a conf included in alfx')
    _define('conf_param', flags.DEFINE_multi_string, [], "override a binding, --conf_param 'Adam.lr=1e-4'; repeatable")
    _define('gin_file', flags.DEFINE_multi_string, [], 'same as --conf')
    _define('gin_param', flags.DEFINE_multi_string, [], 'same as --conf_param')
    _define('debug', flags.DEFINE_bool, False, 'show the traceback of every error')
    if root_dir:
        _define('root_dir', flags.DEFINE_string, None, 'the run folder')


def define_untrusted_flag() -> None:
    """Define ``--untrusted``, which :func:`conf_from_flags` applies. Call this when a program is imported."""
    _define('untrusted', flags.DEFINE_bool, False, 'for run folders from untrusted sources: import only alfx and '
            'gymnasium tasks, and reject confs that need more')


def define_unused_flag() -> None:
    """Define ``--allow_unused`` and ``--must_be_used`` for training programs. Call this when a program is imported."""
    _define('allow_unused', flags.DEFINE_bool, False, 'train even if some bindings of the conf or of --conf_param are '
            'unused; unused bindings are logged')
    _define('must_be_used', flags.DEFINE_multi_string, [], 'with --allow_unused: a binding, given by its complete '
            'selector, that must be used nevertheless; repeatable')


def define_seed_flag() -> None:
    """Define ``--seed``. Call this when a program is imported."""
    _define('seed', partial(flags.DEFINE_integer, lower_bound=0, upper_bound=2**32 - 1), None, 'random seed of the '
            'run; same as --random_seed in programs that use a trained policy, otherwise TrainerConfig.random_seed=N')


def define_device_flag() -> None:
    """Define ``--device`` for programs that build networks. Call this when a program is imported."""
    _define('device', flags.DEFINE_string, 'cpu', 'device of the networks: cpu; cuda (the first GPU); cuda:N; auto '
            '(the first GPU if one is available, otherwise the CPU)')


def device_from_flags() -> Any:
    """Make the device of ``--device`` the default device of this process, and return it.

    Raises:
        ConfError: the device does not exist.
    """
    from alfx.trainers import devices
    device = devices.find_device(FLAGS.device)
    devices.use_device(device)
    return device


def conf_from_flags(root_dir: Optional[str] = None, same_run: bool = True,
                    allow_unused: bool = False) -> gin_utils.Conf:
    """Load and check the conf selected by the flags; with ``--untrusted`` it may not import modules.

    Args:
        root_dir: run folder whose conf is used if ``--conf`` is not given.
        same_run: whether the program resumes the run in ``root_dir``, so that the conf must be the same.
        allow_unused: see :func:`alfx.gin_utils.load`.

    Returns:
        The loaded conf.

    Raises:
        ConfError: the conf has errors, no conf is given, or the run folder belongs to another conf.
    """
    given = ([FLAGS.conf] if FLAGS.conf else []) + list(FLAGS.gin_file)
    if len(given) > 1:
        raise gin_utils.ConfError(f'expected one conf file, found {len(given)}: {", ".join(given)}',
                                  "put include '...' statements into one file")
    if not given and root_dir is None:
        raise gin_utils.ConfError('no conf file is given', 'add --conf FILE')
    must_be_used = FLAGS.must_be_used if 'must_be_used' in FLAGS else ()
    return gin_utils.load(given[0] if given else None, [*FLAGS.conf_param, *FLAGS.gin_param], root_dir,
                          same_run, allow_unused, not is_untrusted(), must_be_used)


def is_untrusted() -> bool:
    """Return whether the program has the flag ``--untrusted`` and it is given."""
    return 'untrusted' in FLAGS and bool(FLAGS.untrusted)


def root_dir_from_flags() -> str:
    """Return the run folder of ``--root_dir``, with ``~`` expanded.

    Raises:
        ConfError: the flag is not given.
    """
    if not FLAGS.root_dir:
        raise gin_utils.ConfError('no run folder is given', 'add --root_dir DIR')
    return os.path.expanduser(FLAGS.root_dir)


def check_output(name: str) -> None:
    """Check that the output file of the flag ``name`` can be written, before the program computes its content.

    Raises:
        ConfError: the folder of the file does not exist, or the path is a folder.
    """
    path = FLAGS[name].value
    if path in (None, '-'):
        return
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise gin_utils.ConfError(f'--{name} {path} is a folder', 'name a file')
    if folder and not os.path.isdir(folder):
        raise gin_utils.ConfError(f'--{name} {path}: folder {folder!r} does not exist',
                                  'create it, or name another file')


class _Stopped(KeyboardInterrupt):
    """A signal asks the program to stop; its argument is the number of the signal."""


def stop_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the program like Ctrl-C, so that it removes its temporary files."""
    owner = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a forked worker
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise _Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def run(main: Callable[[list[str]], Optional[int]], unknown: Mapping[str, str] = MappingProxyType({}),
        argument: str = '') -> None:
    """Parse the flags, call ``main(argv)`` and exit the process with the code it returns (None is 0).

    Args:
        main: the program.
        unknown: error messages for flags that other programs have but this one does not, by flag name.
        argument: the flag that can be given without its name, as the only positional argument; '*' for a program with
            positional arguments, which ``main`` receives in ``argv[1:]``.

    Exit code 1 means that the work was done with a negative result, or that the program failed; 2 is a user error; 130
    is an interrupt.
    """
    command.prepare_streams()
    faulthandler.enable()  # prints the Python traceback if a C library crashes
    argv = parse(sys.argv, unknown)
    if argument == '*':
        code = call(lambda _: main(argv), argv[:1])
    else:
        code = call(main, take_argument(argv, argument) if argument else argv)
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt during shutdown would print a traceback
    sys.exit(code)


def parse(argv: list[str], unknown: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Parse the flags in ``argv`` and return the remaining arguments. An error exits with code 2; see :func:`run`.

    Hyphens in names of flags are underscores. Arguments ``X.y=z`` are overrides, and are not returned.
    """
    command.prepare_streams()
    try:
        '\n'.join([*argv, os.getcwd()]).encode()
    except UnicodeEncodeError:
        print(f'expected arguments and a working directory that are valid UTF-8, found {argv[1:]} in {os.getcwd()!r}\n'
              '  rename the file or folder, or set PYTHONUTF8=1', file=sys.stderr)
        sys.exit(2)
    if {'--help', '-help', '-h', '-?'}.intersection(argv[1:]):
        print(help_text(sys.modules['__main__'].__doc__ or '', argv[0]))
        sys.exit(0)
    try:
        return _take_overrides(FLAGS([argv[0], *map(_with_underscores, argv[1:])]))
    except flags.Error as error:
        name = getattr(error, 'flagname', '')
        hint = '--help shows all flags'
        target = ELSEWHERE.get(name) or _config_field(name)
        if target and 'conf_param' in FLAGS:
            hint = f'set it in the conf, or on the command line: {target}=VALUE'
        print(unknown[name] if name in unknown else f'{error}\n{hint}', file=sys.stderr)
        sys.exit(2)


def _with_underscores(argument: str) -> str:
    name, equals, value = argument.partition('=')
    return name[:2] + name[2:].replace('-', '_') + equals + value if name.startswith('--') else argument


def _config_field(name: str) -> str:
    from alfx.config import TrainerConfig
    return f'TrainerConfig.{name}' if name in inspect.signature(TrainerConfig).parameters else ''


def _take_overrides(argv: list[str]) -> list[str]:
    """Add the arguments ``X.y=z`` to ``--conf_param``, or to ``--set`` of a fork; return ``argv`` without them.

    Text needs no quotes, because the shell removes them: ``create_environment.env_name=CartPole-v1``.
    """
    flag = next((name for name in ('conf_param', 'set') if name in FLAGS), None)
    found = [argument for argument in argv[1:] if _OVERRIDE.match(argument) and not os.path.exists(argument)]
    if flag is None or not found:
        return argv
    setattr(FLAGS, flag, [*(FLAGS[flag].value or []), *(_TEXT.sub(_quoted, argument) for argument in found)])
    return [argument for argument in argv if argument not in found]


def _quoted(override: re.Match) -> str:
    try:
        ast.literal_eval(override[2])
    except (ValueError, SyntaxError):
        return f'{override[1]}{override[2]!r}'
    return override[0]


def take_argument(argv: list[str], name: str) -> list[str]:
    """Set a flag to the first positional argument and return ``argv`` without it.

    If the argument is a run folder and the program has ``--root_dir``, that flag is set instead of ``--conf``, so the
    run is resumed. Excess arguments remain in ``argv``; :func:`call` rejects them.
    """
    if len(argv) < 2:
        return argv
    if name == 'conf' and 'root_dir' in FLAGS and os.path.isdir(os.path.join(os.path.expanduser(argv[1]), 'conf')):
        name = 'root_dir'
    if FLAGS[name].value or name == 'conf' and FLAGS.gin_file:
        return argv
    FLAGS[name].parse(argv[1])
    return [argv[0], *argv[2:]]


def help_text(description: str, program: str) -> str:
    """Return the text of ``--help``: the docstring of a program and its flags.

    Args:
        description: docstring of the program.
        program: name of the module that owns the flags, as absl names the running program.
    """
    lines = [description.strip(), '', 'Options:']
    for flag in sorted(FLAGS.get_key_flags_for_module(program), key=lambda flag: flag.name):
        if flag.name in _ALIASES:
            continue
        name = f'--[no]{flag.name}' if flag.boolean else f'--{flag.name}'
        default = '' if flag.default in (None, False, []) else f' (default: {flag.default_as_str})'
        description = ' '.join(flag.help.split()).removesuffix('; repeat this option to specify a list of values')
        text = textwrap.fill(f'{description}{default}', 116, initial_indent=' ' * 26,
                             subsequent_indent=' ' * 26)
        lines.append(f'  {name:23} {text.lstrip()}')
    return '\n'.join(lines)


def call(main: Callable[[list[str]], Optional[int]], argv: list[str]) -> int:
    """Call ``main`` with the parsed arguments, print errors as :func:`run` describes, and return the exit code."""
    if len(argv) > 1:
        print(f"unexpected argument {argv[1]!r}; flags start with --, and values with spaces need quotes",
              file=sys.stderr)
        return 2
    try:
        return main(argv) or 0
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if isinstance(error, _Stopped) else signal.SIGINT)
        print('interrupted' if number == signal.SIGINT else f'stopped by {number.name}', file=sys.stderr)
        return 128 + number
    except SystemExit as error:  # raised by user code; the programs return their exit code
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f'the process was ended by sys.exit({"" if error.code is None else error.code}) in '
              f'{where.filename}:{where.lineno}', file=sys.stderr)
        return 1
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, OSError) as error:
        code = _exit_code(error)
        lines = [f'{type(error).__name__}: {gin_utils.plain_text(error)}', *getattr(error, '__notes__', ())]
        if code is None and gin_utils.is_explained(error):  # most likely one of the listed bindings is wrong
            code = 2
            where = traceback.extract_tb(error.__traceback__)[-1]
            lines.append(f'raised at {where.filename}:{where.lineno}; --debug shows the traceback')
        if isinstance(error, OSError) and error.errno in _DISK:
            lines.append('  free some space, correct the permissions, or use another folder')
        if code is None:
            raise
        if FLAGS.debug:
            traceback.print_exc()
        print('\n'.join(lines), file=sys.stderr)
        return code


def _exit_code(error: BaseException) -> Optional[int]:
    """Return the exit code of an error that needs no traceback, or None for other errors."""
    from alfx.algorithms.base.ownership import OwnershipError
    from alfx.checkpoints.files import CheckpointError
    from alfx.engine.loss_reduction import NonFiniteLossError
    from alfx.environments.environment_errors import (EnvironmentLoadError, EnvironmentStepError,
                                                      UnsupportedOperationError)
    from alfx.tensor_specs import SpecError
    from alfx.tree_search.batched_search import SearchError
    from alfx.trainers.team.team import ParameterMismatchError
    from alfx.utils.discrete_action import NoValidActionError
    from alfx.utils.processes import LostProcessError
    mistakes = (gin_utils.ConfError, SpecError, OwnershipError, EnvironmentLoadError, UnsupportedOperationError,
                FileNotFoundError, NotADirectoryError, PermissionError)
    if isinstance(error, mistakes):
        return 2
    disk = isinstance(error, OSError) and error.errno in _DISK
    broken = (EnvironmentStepError, NonFiniteLossError, CheckpointError, LostProcessError, NoValidActionError,
              ParameterMismatchError, SearchError)
    return 1 if disk or isinstance(error, broken) else None


def _define(name: str, define: Callable, default: Any, text: str) -> None:
    if name in FLAGS:
        flags.declare_key_flag(name)
    else:
        define(name, default, text)
