"""Starting one program several times on this machine, as ranks that train together; what ``torchrun`` is for many.

This process does nothing but wait. It passes signals on, and tells the ranks through the store that they share how one
of them has ended.
"""
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from alfx.utils import processes

_ADDRESS = '127.0.0.1'


def launch(command: Sequence[str], count: int) -> int:
    """Run ``command`` as ``count`` ranks, and wait for their end.

    Args:
        command: what each of them runs.
        count: how many.

    Returns:
        The exit code: 0 if all end with that; otherwise that of a rank, an error being preferred to a stop by a signal;
        1 if a rank was killed.
    """
    import torch.distributed as dist

    from alfx.engine.remote.data_parallel import PREFIX, ending_key
    with socket.create_server((_ADDRESS, 0)) as listener:  # left to itself it listens to every network
        port = listener.getsockname()[1]
        store = dist.TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False,
                              master_listen_fd=listener.detach(), use_libuv=False)  # which in torch 2.6 cannot take it
    endings = dist.PrefixStore(PREFIX, store)
    ranks: list[subprocess.Popen] = []
    codes: dict[int, int] = {}
    give_up_at = float('inf')
    try:
        with _passing_signals_on(ranks) as received:
            for rank in range(count):
                ranks.append(_start(command, rank, count, port))
                _send(ranks[-1:], received)
            while len(codes) < count:
                for rank, process in enumerate(ranks):
                    code = process.poll()
                    if code is None or rank in codes:
                        continue
                    codes[rank] = code
                    endings.set(ending_key(rank), processes.describe_exit(code))
                    if code and not _is_stop(code):  # the last checkpoint may take long
                        give_up_at = min(give_up_at, time.monotonic() + processes.LEAVE_SECONDS)
                if time.monotonic() > give_up_at:
                    break
                time.sleep(processes.POLL_SECONDS / 4)
    finally:
        _end(ranks)
    return _exit_code([process.returncode for process in ranks], received)


def _start(command: Sequence[str], rank: int, count: int, port: int) -> subprocess.Popen:
    threads = os.environ.get('OMP_NUM_THREADS') or str(max(1, (os.cpu_count() or 1) // count))
    environment = {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(count),
                   'LOCAL_WORLD_SIZE': str(count), 'MASTER_ADDR': _ADDRESS, 'MASTER_PORT': str(port),
                   'TORCHELASTIC_USE_AGENT_STORE': 'True', 'OMP_NUM_THREADS': threads}
    if sys.platform == 'linux':  # where the loopback has this name
        environment['GLOO_SOCKET_IFNAME'] = os.environ.get('GLOO_SOCKET_IFNAME', 'lo')
    return subprocess.Popen(list(command), env={**os.environ, **environment})


@contextlib.contextmanager
def _passing_signals_on(ranks: Sequence[subprocess.Popen]) -> Iterator[list[int]]:
    """Hand signals to the ranks; an interrupt from a terminal reaches them by itself. Gives those that have come."""
    received: list[int] = []
    terminal = sys.stdin is not None and sys.stdin.isatty()

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        if not (terminal and number == signal.SIGINT):
            _send(ranks, [number])

    before = {number: signal.signal(number, pass_on)
              for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
              if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(ranks: Sequence[subprocess.Popen], numbers: Sequence[int]) -> None:
    for process in ranks:
        for number in numbers:
            if process.poll() is None:
                process.send_signal(number)


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    """See that none is left."""
    left = [process for process in ranks if process.poll() is None]
    for process in left:
        process.kill()
    for process in left:
        process.wait()


def _is_stop(code: int) -> bool:
    """Whether a rank has ended because a signal asked it to, in its own time."""
    return code >= 128


def _exit_code(codes: Sequence[int], received: Sequence[int]) -> int:
    """One exit code for all ranks; what died of one of the signals ``received`` was not yet there to take it."""
    codes = [128 - code if -code in received else code for code in codes]
    if any(code < 0 for code in codes):
        return 1
    errors = [code for code in codes if code and not _is_stop(code)]
    stops = [code for code in codes if _is_stop(code)]
    return (errors or stops or [0])[0]
