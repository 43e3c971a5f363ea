"""Watchdog that logs an environment that does not return: its name, the call, and since when."""
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from alfx.utils import processes

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0


class Watch:
    """Context manager for calls of environments; a thread logs calls that take longer than a minute.

    Attributes:
        current_call: returns the running environment and call: "environment 3 of 'Walker' in step()".

    Args:
        hint: remedy, for the log line.
    """

    def __init__(self, hint: str):
        self._hint = hint
        self.current_call: Callable[[], str] = str
        self._calls = 0
        self._is_waiting = False
        self._seen: Any = None
        self._since = self._warn_at = 0.0
        _watches[id(self)] = self
        _start_thread()

    def __enter__(self) -> None:
        self._calls += 1
        self._is_waiting = True

    def __exit__(self, *_: Any) -> None:
        self._is_waiting = False

    def check(self) -> None:
        """Log a call that takes long, and again whenever its duration has doubled."""
        seen, now = (self._calls, self.current_call()) if self._is_waiting else None, time.time()
        if seen is None or seen != self._seen:
            self._seen, self._since, self._warn_at = seen, now, now + processes.PATIENCE_SECONDS
        elif now > self._warn_at:
            self._warn_at = now + (now - self._since)
            _log.warning('%s has not returned since %s, for %.0f s; %s', seen[1],
                         time.strftime('%H:%M:%S', time.localtime(self._since)), now - self._since, self._hint)


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
_thread: threading.Thread | None = None


def _start_thread() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():  # a forked process has no threads
        _thread = threading.Thread(target=_check_all, name='environment-watch', daemon=True)
        _thread.start()


def _check_all() -> None:
    while True:
        time.sleep(_CHECK_SECONDS)
        for reference in _watches.valuerefs():  # a list, which other threads cannot change
            watch = reference()
            if watch is not None:
                watch.check()
            del watch  # keep no reference until the next check
