"""A run of a trial, and the ways to execute it on this machine.

An executor starts a :class:`Run` and returns its :class:`Execution`. Where that is a process of its own, its standard
input is a pipe that nothing is written to: when the search dies, the pipe closes and the run ends
(``run_process.py``).
"""
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

from alfx.gin_utils import plain_text
from alfx.search import run_process
from alfx.search.run_process import Run
from alfx.utils import processes

_LAST_WORDS = 400
_ERROR = re.compile(r'^[\w.]*(Error|Exception|Interrupt|Exit|Killed)\b')
Observer = Callable[[], bool]


class Execution(Protocol):
    """A run that was started."""

    @property
    def is_queued(self) -> bool:
        """Whether it waits for room on a machine."""

    def poll(self) -> int | None:
        """The exit code; None while it runs. That of a process ended by a signal is minus the signal's number."""

    def stop(self) -> None:
        """Ask it to write a checkpoint and end."""

    def kill(self) -> None:
        """End it now, with every process that it has started."""

    def log_tail(self) -> str:
        """Why it failed, as far as it said."""


class Executor(Protocol):
    """Starts runs."""

    def start(self, run: Run, wants_to_stop: Observer) -> Execution:
        """Start a run.

        Args:
            run: what to run; it goes on from its checkpoint if its folder has one.
            wants_to_stop: called by executors that return only when the run has ended, after each value that it
                reports: whether it should end there.
        """

    def close(self) -> None:
        """Free what the executor holds; every run has ended."""


class ProcessExecutor:
    """Each run is a process on this machine."""

    def start(self, run: Run, wants_to_stop: Observer) -> 'ProcessExecution':
        """See :class:`Executor`."""
        return ProcessExecution(run)

    def close(self) -> None:
        """Nothing is held."""


class ProcessExecution:
    """A run in a process of its own, the leader of a session; what it prints goes to a log beside its folder.

    Args:
        run: what to run.
    """

    def __init__(self, run: Run):
        self._log = run.log_file
        os.makedirs(os.path.dirname(self._log), exist_ok=True)
        environment = {**os.environ, 'OMP_NUM_THREADS': str(run.threads)} if run.threads else dict(os.environ)
        with open(self._log, 'ab') as log:
            self._start_of_log = log.tell()
            self._process = subprocess.Popen([sys.executable, '-m', run_process.__name__, json.dumps(run._asdict())],
                                             stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
                                             start_new_session=True)

    @property
    def is_queued(self) -> bool:
        """See :class:`Execution`."""
        return False

    def poll(self) -> int | None:
        """See :class:`Execution`."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            _kill_session(self._process.pid)  # what it may have left behind; its number is not free yet
            assert self._process.stdin is not None
            self._process.stdin.close()
        return self._process.wait()

    def stop(self) -> None:
        """See :class:`Execution`."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See :class:`Execution`."""
        if self.poll() is None:
            _kill_session(self._process.pid)

    def log_tail(self) -> str:
        """See :class:`Execution`."""
        text = log_tail(processes.tail(self._log, self._start_of_log))
        code = self.poll() or 0
        if code < 0:
            text = f'killed by {processes.signal_name(-code)}' + (f'; its last words: {text}' if text else '')
        return text or f'it ended with code {code} and said nothing'


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def log_tail(text: str) -> str:
    """The end of what a process printed: from its last error message on, if there is one, else the last line."""
    lines = [line for line in text.replace('\r', '\n').splitlines()
             if line.strip() and not line.startswith("  In call to configurable '")]
    start = next((i for i in range(len(lines) - 1, -1, -1) if _ERROR.match(lines[i])), len(lines) - 1)
    return '\n'.join(lines[max(start, 0):start + 4])[:_LAST_WORDS].strip()


class _Done(NamedTuple):
    """A run that ended before it was looked at."""
    code: int
    words: str

    @property
    def is_queued(self) -> bool:
        return False

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        """It has ended."""

    def kill(self) -> None:
        """It has ended."""

    def log_tail(self) -> str:
        return self.words


class InlineExecutor:
    """Calls the function of a run in this process, and returns when it has returned."""

    def start(self, run: Run, wants_to_stop: Observer) -> Execution:
        """See :class:`Executor`."""
        try:
            run_process.call_function(run, wants_to_stop)
        except run_process.StoppedError:
            return _Done(128 + signal.SIGTERM, '')
        except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError,
                RuntimeError, TypeError, ValueError) as error:
            return _Done(1, f'{type(error).__name__}: {plain_text(error)}'[:_LAST_WORDS])
        return _Done(0, '')

    def close(self) -> None:
        """Nothing is held."""
