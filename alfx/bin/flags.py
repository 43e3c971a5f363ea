"""Command lines of the programs: declaration and parsing, flags that programs share, errors and exit codes.

Each program declares its command line as ``PARSER``, a :class:`Parser`, and imports libraries only after it was parsed,
so that ``--help`` and completion respond quickly. :func:`run` stores the values of the flags in :data:`FLAGS`.

``--conf FILE`` (alias ``--gin_file``) names the conf file; an argument ``X.y=z``, or ``--conf_param 'X.y=z'`` (alias
``--gin_param``, repeatable), overrides one of its bindings. A user error ends the program with one message on stderr
and exit code 2, without a traceback; ``--debug`` shows the traceback as well.
"""

import argparse
import ast
import csv
import difflib
import errno
import faulthandler
import inspect
import math
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Optional

import alfx
from alfx.bin import command

FLAGS = argparse.Namespace(given=())
"""Values of the flags of the running program; ``given`` has the names of those on its command line."""
CONF = '[CONF] [KEY=VALUE ...]', 'conf file, or the name of a conf shipped with alfx, and bindings to override'
RUN_OR_CONF = '[CONF | RUN] [KEY=VALUE ...]', CONF[1].replace(', and', ', or the folder of a run; and')
RUN = '[RUN | AGENT] [KEY=VALUE ...]', 'folder of a run, or a trained agent zoo:NAME; and bindings to override'
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.EPERM)
_TEXT = re.compile(r'^([^=]*= *)([A-Za-z./~][\w.:/~-]*)$')  # an override whose value is a word or path
_OVERRIDE = re.compile(r'[\w./]*\w *=')  # X.y=z, scope/X.y=z or macro=z
_EXAMPLES = re.compile(r'^Examples?:\n\n((?:  .*\n|\n(?=  ))+)\n?', re.MULTILINE)


class Parser(argparse.ArgumentParser):
    """Command line of a program.

    Flags begin with one or two dashes, have hyphens or underscores, and may follow arguments. ``--name`` and
    ``--noname`` set a flag of type :func:`boolean`. Any other flag takes the next word, or the text after ``=``.

    Args:
        file: path of the program.
        docstring: docstring of the program: its purpose, examples and remarks.
        arguments: its positional arguments as shown to the user, and a description; '' if it has none. Uppercase words
            (``CONF``, ``KEY=VALUE``) say what to complete, see :mod:`alfx.bin.completion`.
        unknown: error messages for flags that other programs have but this one does not, by name.
    """

    def __init__(self, file: str, docstring: Optional[str], arguments: tuple[str, str] = ('', ''),
                 unknown: Mapping[str, str] = MappingProxyType({})):
        text = f'{docstring}\n'
        examples = _EXAMPLES.search(text)
        folder, program = os.path.split(file)
        program = f'alfx {program.removesuffix(".py")}' if folder == os.path.dirname(__file__) else program
        super().__init__(program, f'{program} [options] {arguments[0]}'.rstrip(), _EXAMPLES.sub('', text),
                         f'examples:\n{examples[1].rstrip()}' if examples else None, formatter_class=_Formatter,
                         add_help=False, allow_abbrev=False)
        self._unknown = unknown
        self.add_argument('arguments', nargs='*', metavar=arguments[0], help=arguments[1] or argparse.SUPPRESS)
        self.group: argparse._ArgumentGroup = self._optionals
        self.add_argument('--help', action='help', help='show this text')
        self.add('debug', 'show the traceback of every error')

    def add(self, flag: str, text: str, kind: Callable[[str], Any] = str, default: Any = None) -> None:
        """Define a flag in the current group of flags.

        Args:
            flag: its name alone if it is on or off, otherwise name and value as shown to the user: ``'num_steps N'``,
                ``'mode greedy|sampled'`` for the only valid values, ``'set KEY=VALUE...'`` for a repeatable flag.
            text: description; '' hides the flag.
            kind: function that returns the value for its text, or raises an ``argparse.ArgumentTypeError``.
            default: value if the flag is not given; None means an empty list if repeatable, False without a value.
        """
        name, _, value = flag.partition(' ')
        repeats, default = value.endswith('...'), default if value else bool(default)
        options: dict[str, Any] = dict(action='append', default=[]) if repeats else dict(default=default)
        self.group.add_argument(f'--{name}', metavar=value.removesuffix('...'), type=kind if value else boolean,
                                choices=value.split('|') if '|' in value else None, help=text or argparse.SUPPRESS,
                                **options)

    def start_group(self, title: str) -> None:
        """Show flags that are defined from now on under this title."""
        self.group = self.add_argument_group(title)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the values of the flags, and positional arguments as ``arguments``. Mistakes exit with code 2."""
        flags: dict[str, list[str]] = {}
        positional: list[str] = []
        rest = iter(arguments)
        for word in rest:
            if word == '--':
                positional += rest
            elif not word.startswith('-') or word == '-':
                positional.append(word)
            else:
                written, equals, value = word.lstrip('-').replace('-', '_').partition('=')
                if written in ('help', 'h', '?') and not equals:
                    self.print_help()
                    self.exit()
                action = self._flag_of(written)
                if equals and action.dest != written:
                    self.error(f'--{written}: expected no value', f'--{written} or --{action.dest}=VALUE')
                if equals:
                    value = word.partition('=')[2]
                elif action.type is boolean:
                    value = str(action.dest == written)
                elif (value := next(rest, '--')) == '--':
                    self.error(f'--{written}: expected a value')
                flags.setdefault(action.dest, []).append(f'--{action.dest}={value}')
        found = self.parse_args([*(text for given in flags.values() for text in given), '--', *positional])
        found.given = tuple(flags)
        return found

    def _flag_of(self, name: str) -> argparse.Action:
        known = {action.dest: action for action in self._actions if action.option_strings}
        negated = known.get(name.removeprefix('no').removeprefix('_'))
        if name in known:
            return known[name]
        if negated is not None and negated.type is boolean:
            return negated
        if name in self._unknown:
            self.error(self._unknown[name], hint='')
        near = difflib.get_close_matches(name, known, n=1)
        target = _binding_of(name) if 'conf_param' in known else ''
        hint = f'did you mean --{near[0]}?' if near else '--help shows all flags'
        self.error(f'unknown flag --{name}', f'set it in the conf, or on the command line: {target}=VALUE' if target
                   else hint)

    def error(self, message: str, hint: str = '--help shows all flags') -> NoReturn:
        """Print a mistake in the command line and end the program with exit code 2."""
        print('\n'.join(filter(None, (message.removeprefix('argument '), hint))), file=sys.stderr)
        sys.exit(2)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help in the style ``--name VALUE   description (default: value)``, with paragraphs that fit the terminal."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split('\n\n')
        return '\n\n'.join(part if '\n  ' in f'\n{part}' else textwrap.fill(part, width) for part in paragraphs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.type is boolean and action.default:
            return f'--[no]{action.dest}'
        value = f' {action.metavar}' if action.metavar and action.option_strings else ''
        return f'--{action.dest}{value}' if action.option_strings else str(action.metavar)

    def _get_help_string(self, action: argparse.Action) -> str:
        default = ','.join(action.default) if isinstance(action.default, list) else action.default
        shown = action.option_strings and default not in (None, False, '', argparse.SUPPRESS)
        return (f'{action.help} (default: {default})' if shown else str(action.help)).replace('%', '%%')


def boolean(text: str) -> bool:
    """Type of a flag that is given as ``--name`` or ``--noname``."""
    if text.lower() in ('true', 't', '1', 'yes', 'y', 'false', 'f', '0', 'no', 'n'):
        return text.lower() in ('true', 't', '1', 'yes', 'y')
    raise argparse.ArgumentTypeError(f'expected true or false, found {text!r}')


def words(text: str) -> list[str]:
    """Type of a flag whose value is a comma-separated list; double quotes protect a comma."""
    return [word.strip() for word in next(csv.reader([text], skipinitialspace=True))] if text else []


def number(kind: type, minimum: float = -math.inf, maximum: float = math.inf) -> Callable[[str], Any]:
    """Return the type of a flag whose value is an int or float (``kind``) in the given range."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if minimum <= value <= maximum:
            return value
        raise argparse.ArgumentTypeError(f'expected {kind.__name__} in [{minimum}, {maximum}], found {text!r}')

    return read


def define_conf_flags(parser: Parser, root_dir: bool = True, untrusted: bool = False) -> None:
    """Define ``--conf``, ``--conf_param`` and their aliases.

    Args:
        parser: command line of the program.
        root_dir: also define ``--root_dir``.
        untrusted: also define ``--untrusted``.
    """
    parser.start_group('conf')
    parser.add('conf CONF', 'conf file: a path, or the name of a conf shipped with alfx')
    parser.add('conf_param KEY=VALUE...', "override a binding, --conf_param 'Adam.lr=1e-4'; repeatable")
    for alias in ('gin_file CONF...', 'gin_param KEY=VALUE...'):
        parser.add(alias, '')
    if root_dir:
        parser.add('root_dir RUN', 'the run folder')
    if untrusted:
        define_untrusted_flag(parser)


def define_untrusted_flag(parser: Parser) -> None:
    """Define ``--untrusted``, which :func:`conf_from_flags` applies."""
    parser.add('untrusted', 'for run folders from untrusted sources: import only alfx and gymnasium tasks, and reject '
               'confs that need more')


def define_unused_flag(parser: Parser) -> None:
    """Define ``--allow_unused`` and ``--must_be_used``, for training programs."""
    parser.add('allow_unused', 'train even if some bindings of the conf or of --conf_param are unused; unused bindings '
               'are logged')
    parser.add('must_be_used KEY...', 'with --allow_unused: a binding, given by its complete selector, that must be '
               'used nevertheless; repeatable')


def define_seed_flag(parser: Parser) -> None:
    """Define ``--seed``."""
    parser.add('seed N', 'random seed of the run; same as --random_seed in programs that use a trained policy, '
               'otherwise TrainerConfig.random_seed=N', number(int, 0, 2**32 - 1))


def define_device_flag(parser: Parser) -> None:
    """Define ``--device``, for programs that build networks."""
    parser.add('device DEVICE', 'device of the networks: cpu; cuda (the first GPU); cuda:N; auto (the first GPU if one '
               'is available, otherwise the CPU)', default='cpu')


def device_from_flags() -> None:
    """Make the device of ``--device`` the default device of this process.

    Raises:
        ConfError: the device does not exist.
    """
    from alfx.trainers import devices
    devices.use_device(devices.find_device(FLAGS.device))


def conf_from_flags(root_dir: Optional[str] = None, same_run: bool = True, allow_unused: bool = False) -> Any:
    """Load and check the conf selected by the flags; with ``--untrusted`` it may not import modules.

    Args:
        root_dir: run folder whose conf is used if ``--conf`` is not given.
        same_run: whether the program resumes the run in ``root_dir``, so that the conf must be the same.
        allow_unused: see :func:`alfx.gin_utils.load`.

    Returns:
        The loaded :class:`alfx.gin_utils.Conf`.

    Raises:
        ConfError: the conf has errors, no conf is given, or the run folder belongs to another conf.
    """
    given = ([FLAGS.conf] if FLAGS.conf else []) + list(FLAGS.gin_file)
    if len(given) > 1:
        raise alfx.gin_utils.ConfError(f'expected one conf file, found {len(given)}: {", ".join(given)}',
                                       "put include '...' statements into one file")
    if not given and root_dir is None:
        raise alfx.gin_utils.ConfError('no conf file is given', 'add --conf FILE')
    must_be_used = getattr(FLAGS, 'must_be_used', ())
    return alfx.gin_utils.load(given[0] if given else None, [*FLAGS.conf_param, *FLAGS.gin_param], root_dir,
                          same_run, allow_unused, not is_untrusted(), must_be_used)


def is_untrusted() -> bool:
    """Return whether the program has the flag ``--untrusted`` and it is given."""
    return getattr(FLAGS, 'untrusted', False)


def root_dir_from_flags(trains: bool = False) -> str:
    """Return the run folder of ``--root_dir``, with ``~`` expanded.

    Args:
        trains: whether the run will be trained, which the agents ``zoo:NAME`` of alfx do not support.

    Raises:
        ConfError: the flag is not given, or names an agent that does not exist or cannot be trained.
    """
    from alfx.runs import zoo
    if not FLAGS.root_dir:
        raise alfx.gin_utils.ConfError('no run folder is given', 'add --root_dir DIR')
    return zoo.run_folder(FLAGS.root_dir, trains)


def check_output(name: str) -> None:
    """Check that the output file of the flag ``name`` can be written, before the program computes its content.

    Raises:
        ConfError: the folder of the file does not exist, or the path is a folder.
    """
    path = getattr(FLAGS, name)
    if path in (None, '-'):
        return
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise alfx.gin_utils.ConfError(f'--{name} {path} is a folder', 'name a file')
    if folder and not os.path.isdir(folder) or not os.access(folder or '.', os.W_OK):
        reason = 'cannot be written' if os.path.isdir(folder or '.') else 'does not exist'
        raise alfx.gin_utils.ConfError(f'--{name} {path}: folder {folder!r} {reason}',
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


def run(main: Callable[..., Optional[int]], parser: Parser, argument: str = '') -> None:
    """Parse the command line, call ``main`` and exit the process with the code it returns (None is 0).

    Args:
        main: the program; called without arguments, or with ``argv`` if ``argument`` is '*'.
        parser: its command line.
        argument: the flag that can be given without its name, as the only positional argument; '*' for a program with
            positional arguments, ``argv[1:]``.

    Exit code 1 means that the work was done with a negative result, or that the program failed; 2 is a user error; 130
    is an interrupt.
    """
    argv = parse(parser, sys.argv)
    faulthandler.enable()  # prints the Python traceback if a C library crashes
    if argument == '*':
        code = call(lambda: main(argv), argv[:1])
    else:
        code = call(main, take_argument(argv, argument) if argument else argv)
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt during shutdown would print a traceback
    sys.exit(code)


def parse(parser: Parser, argv: list[str]) -> list[str]:
    """Set :data:`FLAGS` to the flags in ``argv`` and return the remaining arguments. Mistakes exit with code 2.

    Arguments ``X.y=z`` are overrides, and are not returned.
    """
    command.prepare_streams()
    try:
        '\n'.join([*argv, os.getcwd()]).encode()
    except UnicodeEncodeError:
        print(f'expected arguments and a working directory that are valid UTF-8, found {argv[1:]} in {os.getcwd()!r}\n'
              '  rename the file or folder, or set PYTHONUTF8=1', file=sys.stderr)
        sys.exit(2)
    found = parser.read(argv[1:])
    vars(FLAGS).clear()
    vars(FLAGS).update(vars(found))
    return _take_overrides([argv[0], *found.arguments])


def _binding_of(name: str) -> str:
    """Return the binding that a flag with the name of a parameter, here or in other libraries, may mean; or ''."""
    from alfx.config import TrainerConfig
    field = f'TrainerConfig.{name}' if name in inspect.signature(TrainerConfig).parameters else ''
    return alfx.gin_utils.aliases.ELSEWHERE.get(name, field)


def _take_overrides(argv: list[str]) -> list[str]:
    """Add the arguments ``X.y=z`` to ``--conf_param``, or to ``--set`` of a fork; return ``argv`` without them.

    Text needs no quotes, because the shell removes them: ``create_environment.env_name=CartPole-v1``.
    """
    flag = next((name for name in ('conf_param', 'set') if name in FLAGS), None)
    found = [argument for argument in argv[1:] if _OVERRIDE.match(argument) and not os.path.exists(argument)]
    if flag is None or not found:
        return argv
    setattr(FLAGS, flag, [*getattr(FLAGS, flag), *(_TEXT.sub(_quoted, argument) for argument in found)])
    return [argument for argument in argv if argument not in found]


def _quoted(override: re.Match) -> str:
    try:
        ast.literal_eval(override[2])
    except (ValueError, SyntaxError):
        return f'{override[1]}{override[2]!r}'
    return override[0]


def take_argument(argv: list[str], name: str) -> list[str]:
    """Set a flag to the first positional argument and return ``argv`` without it.

    If the argument is a run folder, or an agent ``zoo:NAME``, and the program has ``--root_dir``, that flag is set
    instead of ``--conf``, so the run is resumed. Excess arguments remain in ``argv``; :func:`call` rejects them.
    """
    if len(argv) < 2:
        return argv
    if name == 'conf' and 'root_dir' in FLAGS and not FLAGS.root_dir and (
            argv[1].startswith('zoo:') or os.path.isdir(os.path.join(os.path.expanduser(argv[1]), 'conf'))):
        name = 'root_dir'
    if getattr(FLAGS, name) or name == 'conf' and FLAGS.gin_file:
        return argv
    setattr(FLAGS, name, argv[1])
    return [argv[0], *argv[2:]]


def call(main: Callable[[], Optional[int]], argv: list[str]) -> int:
    """Call ``main``, print errors as :func:`run` describes, and return the exit code; reject excess arguments."""
    if len(argv) > 1:
        print(f'unexpected argument {argv[1]!r}: expected one conf or run folder; flags start with --, and values with '
              'spaces need quotes', file=sys.stderr)
        return 2
    try:
        return main() or 0
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
        lines = [f'{type(error).__name__}: {alfx.gin_utils.plain_text(error)}', *getattr(error, '__notes__', ())]
        if code is None and alfx.gin_utils.is_explained(error):  # most likely one of the listed bindings is wrong
            code = 2
            frames = traceback.extract_tb(error.__traceback__)
            where = next((frame for frame in reversed(frames) if 'site-packages' not in frame.filename), frames[-1])
            lines.append(f'raised at {where.filename}:{where.lineno}; --debug shows the traceback')
        if isinstance(error, OSError) and error.errno in _DISK:
            lines.append('  free some space, correct the permissions, or use another folder')
        if code is None:
            raise
        if getattr(FLAGS, 'debug', False):
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
    from alfx.trainers.callback_runner import CallbackError
    from alfx.trainers.distributed.strategies import ParameterMismatchError
    from alfx.utils.discrete_action import NoValidActionError
    from alfx.utils.processes import LostProcessError
    mistakes = (alfx.gin_utils.ConfError, SpecError, OwnershipError, EnvironmentLoadError, UnsupportedOperationError,
                FileNotFoundError, NotADirectoryError, PermissionError)
    if isinstance(error, mistakes):
        return 2
    disk = isinstance(error, OSError) and error.errno in _DISK
    broken = (EnvironmentStepError, NonFiniteLossError, CheckpointError, LostProcessError, NoValidActionError,
              ParameterMismatchError, SearchError, CallbackError)
    return 1 if disk or isinstance(error, broken) else None
