"""Processes that this one starts and answers for: how they begin, what is told of their end, and that none is left.

:class:`Child` is one that ``multiprocessing`` starts; :class:`MessagingProcess` tells besides what it has to say.
Programs
and actors of Ray are started in other ways; what is the same for them are the functions. How long processes wait for
each other is here for all of them.
"""
import collections
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # how often who waits for another process looks around
LOOK_AROUND_SECONDS = 2.0  # likewise, where looking costs an exchange
GRACE_SECONDS = 5.0  # who was asked to end and has not is ended by force after this
ORPHAN_SECONDS = 2.0  # likewise for who has lost the process that started it
LEAVE_SECONDS = 30.0  # likewise for those that train together, when one of them has ended with an error
PATIENCE_SECONDS = 60.0  # who waits longer says what for
_LAST_LINES, _LAST_BYTES = 12, 8192

SPAWN = multiprocessing.get_context('spawn')
_STARTED_BY = os.getppid()


class LostProcessError(RuntimeError):
    """A process that a run needs is gone; the parameters of this one are sound.

    The trainer answers with a regular checkpoint, and the run ends with exit code 1 and this message: the same command
    goes on from there.

    Args:
        process: which one: 'the unroll process (pid 12)'.
        ending: how it ended: 'was killed by SIGKILL'.
        log_tail: the end of its traceback or of its log; '' if there is none.
        hint: what to do; '' for nothing in particular.
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
            message += '\n  its last words:\n' + '\n'.join(f'    {line}' for line in lines)
        return message

    def __reduce__(self) -> tuple:
        return type(self), (self.process, self.ending, self.log_tail, self.hint)


def signal_name(number: int) -> str:
    """'SIGKILL', or 'signal 40' for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f'signal {number}'


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words.

    Args:
        exitcode: as of ``multiprocessing.Process.exitcode``: negative for a signal, ``None`` if it is not known.
    """
    if exitcode is None:
        return 'does not answer any more'
    if exitcode >= 0:
        return f'ended with exit code {exitcode}'
    return f'was killed by {signal_name(-exitcode)}' + (' (often for want of memory)' if exitcode == -signal.SIGKILL
                                                        else '')


def tail(path: str, start: int = 0) -> str:
    """The end of a text file that somebody may be writing to; nothing if there is none.

    Args:
        path: of the file.
        start: what lies before this byte does not count.
    """
    try:
        with open(path, 'rb') as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return file.read().decode('utf8', errors='replace')
    except FileNotFoundError:
        return ''


def read_proc(pid: int, name: str) -> str:
    """What ``/proc`` tells of a process; '' if it is gone, or the kernel does not tell."""
    try:
        with open(f'/proc/{pid}/{name}', encoding='latin1') as file:
            return file.read()
    except OSError:
        return ''


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and that nobody has asked about does not."""
    if os.path.isdir('/proc/self'):
        return read_proc(pid, 'stat').rpartition(')')[2].split()[:1] not in ([], ['Z'], ['X'])
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


# Within a process that was started -------------------------------------------------------------------------------


def is_orphan() -> bool:
    """Whether the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    return os.getppid() != (_STARTED_BY if parent is None else parent.pid)


def leave_signals_to_parent() -> None:
    """Ignore what reaches all processes of a terminal or of a job: the one that trains decides what it means."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def _begin(work: Callable[..., None], pipe: Connection, arguments: tuple) -> None:
    # schedulers send it to all processes of a run; a function, since programs started here would inherit SIG_IGN
    signal.signal(signal.SIGTERM, lambda *_: None)
    leave_signals_to_parent()
    _watch_parent(threading.Event())
    work(pipe, *arguments)


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """Context manager within which this process is ended by force soon after the one that started it is gone."""
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
    time.sleep(ORPHAN_SECONDS)  # time to notice it by itself and to close what is open
    os._exit(1)


# Seen from the process that starts them --------------------------------------------------------------------------


class Child:
    """A process that this one starts through ``multiprocessing``, and a pipe to it.

    It takes no part in signals to all processes of a terminal or of a job, and ends within seconds when this one is
    gone.

    Args:
        context: of ``multiprocessing``.
        work: called there with its end of the pipe and ``arguments``.
        arguments: likewise.
        name: for the operating system and for messages.
        daemon: whether it ends with this process in any case; then it may start none of its own.

    Attributes:
        pipe: this end of the pipe.
        process: the process.
    """

    def __init__(self, context: Any, work: Callable[..., None], arguments: tuple, name: str, daemon: bool = True):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(work, theirs, arguments), name=name, daemon=daemon)
        self.process.start()
        theirs.close()
        # multiprocessing itself asks daemons to end by the signal that they ignore, and waits
        self._at_exit = Finalize(None, self.process.kill, exitpriority=0) if daemon else None

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        return self.process.exitcode

    def ending(self) -> str:
        """How it ended, in words."""
        self.process.join(LOOK_AROUND_SECONDS)
        return describe_exit(self.exitcode)

    def end(self, deadline: float, listen: Callable[[], Any] = lambda: None) -> None:
        """Wait for its end; after ``deadline`` (``time.monotonic``) end it by force.

        Args:
            deadline: until when.
            listen: called now and then: the process may wait for somebody to hear what it says.
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
    """A :class:`Child` that has something to say: pairs ``(kind, content)``.

    'log', of ``(level, text)``, is logged here; 'error', of a traceback, ends the process; others are for whoever asks.

    Args:
        work: called there with ``tell(kind, content)`` and ``arguments``.
        arguments: likewise.
        name: for messages, 'unroll process'.
        daemon: see :class:`Child`.
    """

    def __init__(self, work: Callable[..., None], arguments: tuple, name: str, daemon: bool = True):
        file, self._fault_file = tempfile.mkstemp(prefix='alfx-')
        os.close(file)
        self._name, self._said = name, collections.deque[str](maxlen=_LAST_LINES)
        self.error = ''
        super().__init__(SPAWN, _talk, (work, self._fault_file, arguments),
                         f'alfx-{name.replace(" ", "-")}', daemon)

    def listen(self) -> list[tuple[str, Any]]:
        """What it has said since the last call, apart from what is logged."""
        said = []
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, content = pickle.loads(self.pipe.recv_bytes())
                if kind == 'log':
                    self._said.append(content[1])
                    logger.log(content[0], '%s: %s', self._name, content[1])
                elif kind == 'error':
                    self.error = content
                else:
                    said.append((kind, content))
        return said

    def lost(self) -> LostProcessError:
        """What to raise when it is gone: its traceback, what a fault of the interpreter left, or the end of its log."""
        return LostProcessError(f'the {self._name} (pid {self.pid})', self.ending(),
                                self.error or tail(self._fault_file) or '\n'.join(self._said))

    def end(self, deadline: float, listen: Callable[[], Any] | None = None) -> None:
        """See :class:`Child`."""
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
            if is_orphan():  # nobody else is left to remove it
                _unlink(fault_file)
            if sys.exception() is not None:
                with contextlib.suppress(OSError):  # nobody listens any more
                    tell('error', traceback.format_exc())
                raise SystemExit(1)  # it is told there; nothing needs to be printed here as well


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
