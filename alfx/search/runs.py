"""Execution of runs on this machine.

An :class:`Executor` starts a :class:`Run` and returns its :class:`Execution`. The standard input of a run in a separate
process is a pipe to which nothing is written: if the hyperparameter search dies, the pipe closes and the run exits
(``run_process.py``).
"""
import contextlib
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

_MAX_TAIL = 400
_ERROR = re.compile(r'^[\w.]*(Error|Exception|Interrupt|Exit|Killed)\b')
Observer = Callable[[], bool]


class Execution(Protocol):
    """Handle of a started run."""

    @property
    def is_queued(self) -> bool:
        """Return whether the run waits for a free machine."""

    def poll(self) -> int | None:
        """Return the exit code, None while the run is running, or minus the number of the signal that killed it."""

    def stop(self) -> None:
        """Ask the run to write a checkpoint and stop."""

    def kill(self) -> None:
        """Kill the run and all processes that it has started."""

    def log_tail(self) -> str:
        """Return the end of its log, which should contain the reason of a failure."""


class Executor(Protocol):
    """Interface of classes that start runs."""

    def start(self, run: Run, wants_to_stop: Observer) -> Execution:
        """Start a run.

        Args:
            run: the run; it is resumed if its folder has a checkpoint.
            wants_to_stop: called after each reported value by executors that return only when the run has ended;
                returns whether to stop the run.
        """

    def close(self) -> None:
        """Free the resources of the executor, after all runs have ended."""


class ProcessExecutor:
    """Executor that starts a process on this machine for each run."""

    def start(self, run: Run, wants_to_stop: Observer) -> 'ProcessExecution':
        """Start a process for a run."""
        return ProcessExecution(run)

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


class ProcessExecution:
    """Run in a separate process, which leads a new session and prints to a log file next to its run folder.

    Args:
        run: the run.
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
        """Return False: a process starts immediately."""
        return False

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is running."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            _kill_session(self._process.pid)  # its remaining children; its process id is not free yet
            assert self._process.stdin is not None
            self._process.stdin.close()
        return self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM to the process."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its session."""
        if self.poll() is None:
            _kill_session(self._process.pid)

    def log_tail(self) -> str:
        """Return the end of the log, or how the process exited."""
        text = log_tail(processes.tail(self._log, self._start_of_log))
        code = self.poll() or 0
        if code < 0:
            text = f'killed by {processes.signal_name(-code)}' + (f'; end of its log: {text}' if text else '')
        return text or f'exited with code {code} and printed nothing'


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def log_tail(text: str) -> str:
    """Return the end of the output of a process: the last error message and what follows, or the last line."""
    lines = [line for line in text.replace('\r', '\n').splitlines()
             if line.strip() and not line.startswith("  In call to configurable '")]
    start = next((i for i in range(len(lines) - 1, -1, -1) if _ERROR.match(lines[i])), len(lines) - 1)
    return '\n'.join(lines[max(start, 0):start + 4])[:_MAX_TAIL].strip()


class _Done(NamedTuple):
    """Handle of a run that has already ended."""
    code: int
    message: str

    @property
    def is_queued(self) -> bool:
        return False

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        """Do nothing: the run has ended."""

    def kill(self) -> None:
        """Do nothing: the run has ended."""

    def log_tail(self) -> str:
        return self.message


class InlineExecutor:
    """Executor that calls the function of a run in this process and waits for its result."""

    def start(self, run: Run, wants_to_stop: Observer) -> Execution:
        """Call the function of a run and return when it has returned."""
        try:
            run_process.call_function(run, wants_to_stop)
        except run_process.StoppedError:
            return _Done(128 + signal.SIGTERM, '')
        except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError,
                RuntimeError, TypeError, ValueError) as error:
            return _Done(1, f'{type(error).__name__}: {plain_text(error)}'[:_MAX_TAIL])
        return _Done(0, '')

    def close(self) -> None:
        """Do nothing: there are no resources to free."""
