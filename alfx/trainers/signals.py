"""What signals ask of a run; it complies at the end of the iteration, when everything is consistent.

SIGTERM, SIGINT and SIGHUP (the terminal is gone, but not under ``nohup``): write a checkpoint and stop (a second SIGINT
stops at once). SIGUSR1: write a checkpoint and go on. SIGUSR2: print where every thread stands, at once.
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


class StopSignals:
    """Takes signals while ``handled()`` is active."""

    def __init__(self) -> None:
        self._stop_signal: int | None = None
        self._checkpoint_requested = False

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked the run to stop, or None."""
        return self._stop_signal

    def take_checkpoint_request(self) -> bool:
        """Whether a checkpoint has been asked for since the last call."""
        requested, self._checkpoint_requested = self._checkpoint_requested, False
        return requested

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Take the signals of this process; outside of the main thread, where Python has none, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop,
                    signal.SIGUSR1: self._on_checkpoint_request}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_hangup
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        dumps_stacks = _register_stack_dump()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if dumps_stacks:
                faulthandler.unregister(signal.SIGUSR2)

    def _on_stop(self, number: int, frame: Any) -> None:
        if self._stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop_signal = number
        again = '; interrupt again to stop at once, without one' if number == signal.SIGINT else ''
        _tell(f'\n{signal.Signals(number).name}: stopping after this iteration with a checkpoint{again}\n')

    def _on_hangup(self, number: int, frame: Any) -> None:
        leave_terminal()
        self._on_stop(number, frame)

    def _on_checkpoint_request(self, number: int, frame: Any) -> None:
        self._checkpoint_requested = True


def _tell(text: str) -> None:
    """Write from within a handler, which may have interrupted a write to the same stream."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # it is kept in memory
        sys.stderr.write(text)
    else:
        os.write(descriptor, text.encode())


def leave_terminal() -> None:
    """Print to nobody from now on, if it was to a terminal: one that is gone refuses to be written to."""
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
    except (OSError, ValueError, AttributeError):  # stderr is no file, as under some test runners
        return False
    return True
