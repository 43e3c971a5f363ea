"""What signals ask of a run; it complies at the end of the iteration, when everything is consistent.

SIGTERM and SIGINT: write a checkpoint and stop (a second SIGINT stops at once). SIGUSR1: write a checkpoint and go on.
SIGUSR2: print where every thread stands, at once.
"""
import contextlib
import faulthandler
import os
import signal
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


def _register_stack_dump() -> bool:
    try:
        faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    except (OSError, ValueError, AttributeError):  # stderr is no file, as under some test runners
        return False
    return True
