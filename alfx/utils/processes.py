"""Child processes: starting them, reporting how they ended, and making sure that none is left behind.

:class:`Child` is a process started by ``multiprocessing``; :class:`MessagingProcess` also sends messages. Programs and
Ray actors are started in other ways and share the functions of this module, and so do the timeouts for processes that
wait for each other.
"""
import collections
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # interval of checks while waiting for another process
LIVENESS_CHECK_SECONDS = 2.0  # the same, where a check needs communication
GRACE_SECONDS = 5.0  # time between a request to end and a kill
ORPHAN_SECONDS = 2.0  # the same, after the parent process has ended
LEAVE_SECONDS = 30.0  # the same, after another rank has ended with an error
PATIENCE_SECONDS = 60.0  # after waiting this long, a process logs what it waits for
_LAST_LINES, _LAST_BYTES = 12, 8192

SPAWN = multiprocessing.get_context('spawn')
_STARTED_BY = os.getppid()


def num_cores() -> int:
    """Return the number of processor cores that this process may use (``taskset``, containers), at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class LostProcessError(RuntimeError):
    """A process that a run needs has ended; the parameters of this process are intact.

    The trainer writes a regular checkpoint, except before the first iteration, and the run ends with exit code 1 and
    this message. The same command resumes the run.

    Args:
        process: name of the process: 'the unroll process (pid 12)'.
        ending: how it ended: 'was killed by SIGKILL'.
        log_tail: end of its traceback or log; '' if there is none.
        hint: what to do; '' for no hint.
    """

    def __init__(self, process: str, ending: str, log_tail: str = '', hint: str = ''):
        super().__init__(process, ending, log_tail, hint)
        self.process, self.ending, self.log_tail, self.hint = process, ending, log_tail, hint

    def __str__(self) -> str:
        message = f'{self.process} {self.ending}'
        if self.hint:
            message += f'\n  {self.hint}'
        if self.log_tail.strip():
            lines = self.log_tail.rstrip().split('\n')
            message += '\n  its log ends with:\n' + '\n'.join(f'    {line}' for line in lines)
        return message

    def __reduce__(self) -> tuple:
        return type(self), (self.process, self.ending, self.log_tail, self.hint)


def signal_name(number: int) -> str:
    """Return the name of a signal, 'SIGKILL', or 'signal 40' for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f'signal {number}'


def describe_exit(exitcode: int | None) -> str:
    """Describe how a process ended.

    Args:
        exitcode: ``multiprocessing.Process.exitcode``: negative for a signal, ``None`` if unknown.
    """
    if exitcode is None:
        return 'does not respond any more'
    if exitcode >= 0:
        return f'ended with exit code {exitcode}'
    return f'was killed by {signal_name(-exitcode)}' + (' (often out of memory)' if exitcode == -signal.SIGKILL else '')


def tail(path: str, start: int = 0) -> str:
    """Return the end of a text file that another process may be writing; '' if it does not exist.

    Args:
        path: path of the file.
        start: bytes before this position are ignored.
    """
    try:
        with open(path, 'rb') as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return file.read().decode('utf8', errors='replace')
    except FileNotFoundError:
        return ''


def read_proc(pid: int, name: str) -> str:
    """Read a file of a process in ``/proc``; '' if the process has ended or the file is unavailable."""
    try:
        with open(f'/proc/{pid}/{name}', encoding='latin1') as file:
            return file.read()
    except OSError:
        return ''


def is_running(pid: int) -> bool:
    """Return whether a process of this machine is running; a zombie counts as ended."""
    if os.path.isdir('/proc/self'):
        return read_proc(pid, 'stat').rpartition(')')[2].split()[:1] not in ([], ['Z'], ['X'])
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handle signals while the context is active, and restore the previous handlers afterwards.

    Outside of the main thread, where Python does not allow it, do nothing.

    Args:
        handlers: handler by signal, as for ``signal.signal``.
    """
    is_allowed = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()} if is_allowed else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Within a process that was started -------------------------------------------------------------------------------


def is_orphan() -> bool:
    """Return whether the process that started this one has ended."""
    parent: Any = multiprocessing.parent_process()  # a 'forkserver' is another process, which forked this one
    return os.getppid() != _STARTED_BY if parent is None else os.getppid() != parent.pid and not is_running(parent.pid)


def leave_signals_to_parent() -> None:
    """Ignore signals sent to all processes of a terminal or job; the training process decides how to react."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def _begin(work: Callable[..., None], pipe: Connection, arguments: tuple) -> None:
    # schedulers send SIGTERM to all processes of a run; a function, because child programs would inherit SIG_IGN
    signal.signal(signal.SIGTERM, lambda *_: None)
    leave_signals_to_parent()
    _watch_parent(threading.Event())
    work(pipe, *arguments)


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """Context manager that kills this process soon after its parent process has ended."""
    is_over = threading.Event()
    _watch_parent(is_over)
    try:
        yield
    finally:
        is_over.set()


def _watch_parent(is_over: threading.Event) -> None:
    threading.Thread(target=_end_with_parent, args=(is_over, ), name='parent-watch', daemon=True).start()


def _end_with_parent(is_over: threading.Event) -> None:
    while not is_orphan():
        if is_over.wait(POLL_SECONDS):
            return
    time.sleep(ORPHAN_SECONDS)  # time for the process to notice it and to close files
    os._exit(1)


def lost_program() -> str:
    """Return why a new process could not import what the running program defines; '' if it could.

    A process started with 'spawn' imports the file of the program again. This runs the program once more unless it has
    a ``__main__`` guard. A notebook or standard input has no file, and the ``__main__.py`` of a folder is not imported.
    """
    main = sys.modules['__main__']
    path, name = getattr(main, '__file__', None), getattr(getattr(main, '__spec__', None), 'name', '')
    if path is None or not os.path.isfile(path):
        return 'the program is not a file'
    if name.endswith('__main__') and name != 'alfx.__main__' and 'site-packages' not in path:
        return f'{path} is not imported by other processes; define it in another file of this folder'
    with open(path, encoding='utf8', errors='replace') as file:  # a comment is no guard
        has_guard = re.search(r'^[^#\n]*(\b__name__\s*==|==\s*__name__\b)', file.read(), re.MULTILINE)
    return '' if has_guard else f"{path} has no line if __name__ == '__main__':"


# Seen from the process that starts them --------------------------------------------------------------------------


class Child:
    """Process started through ``multiprocessing``, with a pipe to it.

    It ignores signals sent to all processes of a terminal or job, and ends within seconds after this process has ended.

    Args:
        context: ``multiprocessing`` context.
        work: function that runs in the process; called with its end of the pipe and ``arguments``.
        arguments: further arguments of ``work``.
        name: name for the operating system and for messages.
        daemon: end the process together with this one in any case; a daemon cannot start child processes.

    Raises:
        ConfError: the new process would run the program of this process again.

    Attributes:
        pipe: this end of the pipe.
        process: the process.
    """

    def __init__(self, context: Any, work: Callable[..., None], arguments: tuple, name: str, daemon: bool = True):
        if context.get_start_method() != 'fork' and 'no line' in (reason := lost_program()):
            from alfx.gin_utils.conf_error import ConfError
            raise ConfError(f'{name}: cannot be started, because it would run the program again: {reason}',
                            'put the code of the program below such a line, or use alfx train')
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(work, theirs, arguments), name=name, daemon=daemon)
        self.process.start()
        theirs.close()
        # at exit multiprocessing terminates daemons with a signal that they ignore, and waits
        self._at_exit = Finalize(None, self.process.kill, exitpriority=0) if daemon else None

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        """Exit code; ``None`` while the process runs."""
        return self.process.exitcode

    def ending(self) -> str:
        """Describe how the process ended."""
        self.process.join(LIVENESS_CHECK_SECONDS)
        return describe_exit(self.exitcode)

    def end(self, deadline: float, listen: Callable[[], Any] = lambda: None) -> None:
        """Wait for the process to end; kill it after ``deadline`` (``time.monotonic``).

        Args:
            deadline: end of the wait.
            listen: called regularly, because the process may wait until its messages are read.
        """
        while self.exitcode is None and (left := deadline - time.monotonic()) > 0:
            listen()
            self.process.join(min(left, POLL_SECONDS / 4))
        self.process.kill()
        self.process.join()
        if self._at_exit is not None:
            self._at_exit.cancel()
        listen()
        self.pipe.close()


class MessagingProcess(Child):
    """:class:`Child` that sends messages: pairs ``(kind, content)``.

    'log', with ``(level, text)``, is logged here; 'error', with a traceback, ends the process; the caller of
    :meth:`listen` receives all other kinds.

    Args:
        work: function that runs in the process; called with ``tell(kind, content)`` and ``arguments``.
        arguments: further arguments of ``work``.
        name: name for messages, 'unroll process'.
        daemon: see :class:`Child`.
    """

    def __init__(self, work: Callable[..., None], arguments: tuple, name: str, daemon: bool = True):
        file, self._fault_file = tempfile.mkstemp(prefix='alfx-')
        os.close(file)
        self._name, self._log_lines = name, collections.deque[str](maxlen=_LAST_LINES)
        self.error = ''
        super().__init__(SPAWN, _talk, (work, self._fault_file, arguments), f'alfx-{name.replace(" ", "-")}', daemon)

    def listen(self) -> list[tuple[str, Any]]:
        """Return the messages since the last call; log messages are logged instead."""
        messages = []
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, content = pickle.loads(self.pipe.recv_bytes())
                if kind == 'log':
                    self._log_lines.append(content[1])
                    logger.log(content[0], '%s: %s', self._name, content[1])
                elif kind == 'error':
                    self.error = content
                else:
                    messages.append((kind, content))
        return messages

    def lost(self) -> LostProcessError:
        """Create the error for a process that has ended, with its traceback, its fault dump or the end of its log."""
        return LostProcessError(f'the {self._name} (pid {self.pid})', self.ending(),
                                self.error or tail(self._fault_file) or '\n'.join(self._log_lines))

    def end(self, deadline: float, listen: Callable[[], Any] | None = None) -> None:
        """Wait for the process to end, see :class:`Child`, and remove its files."""
        super().end(deadline, listen or self.listen)
        _unlink(self._fault_file)


def _talk(pipe: Connection, work: Callable[..., None], fault_file: str, arguments: tuple) -> None:
    def tell(kind: str, content: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, content)))

    with open(fault_file, 'w', encoding='utf8') as file:
        faulthandler.enable(file)
        try:
            work(tell, *arguments)
        finally:
            faulthandler.disable()
            if is_orphan():  # the parent cannot remove the file any more
                _unlink(fault_file)
            if sys.exception() is not None:
                with contextlib.suppress(OSError):  # the parent does not read the pipe any more
                    tell('error', traceback.format_exc())
                raise SystemExit(1)  # the parent reports the error, so do not print it here


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
