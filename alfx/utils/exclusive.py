"""Exclusive use of the state of the process by one thread: the loaded conf, the counters and the random generators.

The conf belongs to gin, and everything that a run constructs reads it from there. Two runs in two threads of one
process would therefore train with each other's conf.
"""
import contextlib
import threading
from collections.abc import Iterator

from alfx.gin_utils.conf_error import ConfError

_lock = threading.RLock()
_holders: list[str] = []  # calls in progress, all of them in the thread that holds the lock
_LONG = 'alfx.train'
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def exclusive(call: str, loads_conf: bool = True) -> Iterator[None]:
    """Context manager for a call that uses the state of the process.

    It waits for short calls of other threads.

    Args:
        call: name of the call, for messages.
        loads_conf: whether the call replaces the loaded conf, so that it cannot happen within another call.

    Raises:
        ConfError: another thread is training, or another thread uses alfx and this call would train, or this call would
            replace the conf of the call that it is made from.
    """
    while not _lock.acquire(timeout=_POLL_SECONDS):
        busy = _holders[:1]
        if busy == [_LONG] or busy and call == _LONG:
            raise _refusal(call, f'while {busy[0]} runs in another thread')
    try:
        if _holders and loads_conf:
            raise _refusal(call, f'from code that {_holders[-1]} runs')
        _holders.append(call)
        try:
            yield
        finally:
            _holders.pop()
    finally:
        _lock.release()


def _refusal(call: str, when: str) -> ConfError:
    return ConfError(f'{call} was called {when}, but a process has one conf at a time',
                     'use a process of its own for each run, for example with multiprocessing or subprocess')
