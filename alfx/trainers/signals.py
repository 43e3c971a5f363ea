"""Signals that control a run. They take effect at the end of the iteration, when the state is consistent.

SIGTERM, SIGINT and SIGHUP (the terminal is closed; ignored under ``nohup``) write a checkpoint and stop the run; a
second SIGINT stops it immediately. SIGUSR1 writes a checkpoint without stopping the run. SIGUSR2 immediately prints the
stack of every thread.
"""
import contextlib
import faulthandler
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Any

from alfx.utils.processes import signal_handlers


class StopSignals:
    """Handler of signals, installed while ``handled()`` is active."""

    def __init__(self) -> None:
        self._stop_signal: int | None = None
        self._checkpoint_requested = self._is_disabled = False

    def disable(self) -> None:
        """Leave all signals to the program, for a run that cannot be resumed."""
        self._is_disabled = True

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked the run to stop, or None."""
        return self._stop_signal

    def take_checkpoint_request(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        requested, self._checkpoint_requested = self._checkpoint_requested, False
        return requested

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals of this process. Do nothing when disabled or, as Python requires, in other threads."""
        if self._is_disabled or threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop,
                    signal.SIGUSR1: self._on_checkpoint_request}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_hangup
        dumps_stacks = _register_stack_dump()
        try:
            with signal_handlers(handlers):
                yield
        finally:
            if dumps_stacks:
                faulthandler.unregister(signal.SIGUSR2)

    def _on_stop(self, number: int, frame: Any) -> None:
        if self._stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop_signal = number
        again = '; interrupt again to stop immediately without a checkpoint' if number == signal.SIGINT else ''
        _tell(f'\n{signal.Signals(number).name}: writing a checkpoint and stopping after this iteration{again}\n')

    def _on_hangup(self, number: int, frame: Any) -> None:
        leave_terminal()
        self._on_stop(number, frame)

    def _on_checkpoint_request(self, number: int, frame: Any) -> None:
        self._checkpoint_requested = True


def _tell(text: str) -> None:
    """Write to stderr from a signal handler, which may have interrupted a write to the same stream."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # stderr is an in-memory stream
        sys.stderr.write(text)
    else:
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, text.encode())


def leave_terminal() -> None:
    """Redirect stdout and stderr from a terminal to ``os.devnull``, because writing to a closed terminal fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:  # closed
            continue
        if stat.S_ISCHR(mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _register_stack_dump() -> bool:
    try:
        faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    except (OSError, ValueError, AttributeError):  # stderr is not a file, as under some test runners
        return False
    return True
