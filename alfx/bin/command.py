"""The command ``alfx``. It runs the program that its first argument names.

Every executable module of this folder is a program: ``alfx train ...`` is ``python -m alfx.bin.train ...``. This module
imports only the standard library, so that ``alfx list`` and ``alfx help`` respond quickly.
"""
import ast
import difflib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Sequence

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_FIRST = ('train', 'evaluate', 'play', 'plot', 'check', 'compare', 'search', 'fork', 'list', 'show', 'convert', 'help')
_ALIASES = {'branch': 'fork'}  # former names of programs
_STARTED_AS = 'ALFX_STARTED_AS'  # how the user called the command; the processes of a run inherit it


def programs() -> dict[str, str]:
    """Return the name and a one-sentence summary of each program, the most common programs first."""
    found = {}
    for file in os.listdir(_FOLDER):
        name, extension = os.path.splitext(file)
        if extension == '.py' and name not in _ALIASES and is_program(text := source(name)):
            found[name] = (ast.get_docstring(ast.parse(text)) or '').split('\n\n')[0].replace('\n', ' ')
    order = [name for name in _FIRST if name in found]
    return {name: found[name] for name in [*order, *sorted(found.keys() - order)]}


def source(name: str) -> str:
    """Return the source code of a module of this folder."""
    with open(os.path.join(_FOLDER, f'{name}.py'), encoding='utf8') as file:
        return file.read()


def is_program(text: str) -> bool:
    """Return whether a module with this source code can be run as a program."""
    return re.search(r"^if __name__ == '__main__':", text, re.MULTILINE) is not None


def command_of(program: str, *arguments: str) -> str:
    """Return the command line that runs a program, in the same style as the current command line."""
    start = os.environ.get(_STARTED_AS)
    words = f'{start} {program}' if start else f'{python()} -m alfx.bin.{program}'
    return ' '.join([words, *map(shlex.quote, arguments)])


def with_flags(arguments: Sequence[str], *flags: str) -> list[str]:
    """Return arguments with flags added at the end, but before ``--``, after which words are not flags."""
    end = list(arguments).index('--') if '--' in arguments else len(arguments)
    return [*arguments[:end], *flags, *arguments[end:]]


def python() -> str:
    """Return the command of this Python interpreter: ``python`` if that is the one on the path, otherwise its file."""
    found = shutil.which('python')
    if found is not None and os.path.abspath(found) == os.path.abspath(sys.executable):
        return 'python'
    path = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd() + os.sep) else sys.executable
    return shlex.quote(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program.

    Args:
        arguments: the name of the program and its arguments; default: the arguments of this process.

    Returns:
        The exit code, unless the program exits the process itself.
    """
    prepare_streams()
    program, *rest = (sys.argv[1:] if arguments is None else arguments) or ['--help']
    if program in ('--version', '-V'):
        from alfx import __version__
        print(f'alfx {__version__}')
        return 0
    known, program = programs(), _ALIASES.get(program, program)
    if program in ('--help', '-h', '-?') or program == 'help' and not rest:
        print(_overview(known))
        return 0
    if program not in known:
        nearest = difflib.get_close_matches(program, known, n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f'available: {", ".join(known)}'
        print(f"alfx has no command '{program}'\n  {hint}", file=sys.stderr)
        return 2
    os.environ[_STARTED_AS] = f'{python()} -m alfx' if sys.argv[0].endswith('__main__.py') else 'alfx'
    sys.argv[1:] = rest
    runpy.run_module(f'alfx.bin.{program}', run_name='__main__', alter_sys=True)
    return 0


class _Output(io.FileIO):
    """Standard output or error that is discarded once its reader has closed the pipe, for example ``| head``."""

    def write(self, data):
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def prepare_streams() -> None:
    """Make output work in any state of the standard streams.

    Closed streams are replaced by ``os.devnull``, a program continues after its reader has closed the pipe, and
    characters that the encoding does not have are escaped.
    """
    for descriptor, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            os.fstat(descriptor)
        except OSError:  # closed; the lowest free descriptor is this one
            os.open(os.devnull, os.O_RDWR)
        stream = getattr(sys, name)
        if stream is None:
            stream = open(descriptor, 'r' if name == 'stdin' else 'w', encoding='utf8', closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f'__{name}__', stream)
        if name != 'stdin' and stream is getattr(sys, f'__{name}__'):
            stream.flush()
            raw = _Output(descriptor, 'w', closefd=False)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, 'backslashreplace',
                                                line_buffering=stream.line_buffering or stream.write_through))


def _overview(known: dict[str, str]) -> str:
    width = max(map(len, known))
    return '\n'.join([
        'Train, evaluate and compare reinforcement-learning agents.', '', 'usage: alfx COMMAND ...', '',
        *(f'  {name:{width}}  {text}' for name, text in known.items()), '',
        'alfx COMMAND --help shows the options of a command, alfx --version the version.', '',
        'Get started: alfx train ppo_cart_pole --root_dir runs/cart_pole'])
