"""Says in the log which environment one has been waiting for, in which call, and since when."""
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from alfx.utils import processes

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


class Watch:
    """Context manager for the calls of some environments; a thread tells of one that takes longer than a minute.

    Attributes:
        who: says who is at work at the moment, and in which call: "environment 3 of 'Walker' in step()".

    Args:
        hint: what to do about it.
    """

    def __init__(self, hint: str):
        self._hint = hint
        self.who: Callable[[], str] = str
        self._calls = 0
        self._is_waiting = False
        self._seen: Any = None
        self._since = self._tells_at = 0.0
        _watches[id(self)] = self
        _start_looking()

    def __enter__(self) -> None:
        self._calls += 1
        self._is_waiting = True

    def __exit__(self, *_: Any) -> None:
        self._is_waiting = False

    def look(self) -> None:
        """Tell if there has been nothing new for long; and again each time that it has been twice as long."""
        seen, now = (self._calls, self.who()) if self._is_waiting else None, time.time()
        if seen is None or seen != self._seen:
            self._seen, self._since, self._tells_at = seen, now, now + processes.PATIENCE_SECONDS
        elif now > self._tells_at:
            self._tells_at = now + (now - self._since)
            _log.warning('%s has not returned since %s, for %.0f s; %s', seen[1],
                         time.strftime('%H:%M:%S', time.localtime(self._since)), now - self._since, self._hint)


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
_thread: threading.Thread | None = None


def _start_looking() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():  # a process that was forked has no threads
        _thread = threading.Thread(target=_look, name='environment-watch', daemon=True)
        _thread.start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        for reference in _watches.valuerefs():  # a list that is made at once, whatever other threads do
            watch = reference()
            if watch is not None:
                watch.look()
            del watch  # nothing is kept alive until the next look
