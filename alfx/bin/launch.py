"""Launcher of several ranks of one program on this machine, like ``torchrun`` on a single node.

The launcher waits for the ranks, forwards signals to them, and announces the exit of a rank in the store that the ranks
share.
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
    """Run ``command`` as ``count`` ranks and wait until they exit.

    Args:
        command: command line of each rank.
        count: number of ranks.

    Returns:
        The exit code: 0 if all ranks exit with 0; 1 if a rank was killed; otherwise the exit code of a rank that
        failed, or else of a rank that a signal stopped.
    """
    import torch.distributed as dist

    from alfx.engine.remote.data_parallel import PREFIX, ending_key
    with socket.create_server((_ADDRESS, 0)) as listener:  # by default the store listens on all interfaces
        port = listener.getsockname()[1]
        # libuv in torch 2.6 does not accept a listening socket
        store = dist.TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False,
                              master_listen_fd=listener.detach(), use_libuv=False)
    endings = dist.PrefixStore(PREFIX, store)
    ranks: list[subprocess.Popen] = []
    codes: dict[int, int] = {}
    give_up_at = float('inf')
    try:
        with forwarded_signals(ranks) as received:
            for rank in range(count):
                ranks.append(_start(command, rank, count, port))
                send(ranks[-1:], received)
            while len(codes) < count:
                for rank, process in enumerate(ranks):
                    code = process.poll()
                    if code is None or rank in codes:
                        continue
                    codes[rank] = code
                    endings.set(ending_key(rank), processes.describe_exit(code))
                    if code and not _is_stop(code):  # a rank stopped by a signal may take long to write a checkpoint
                        give_up_at = min(give_up_at, time.monotonic() + processes.LEAVE_SECONDS)
                if time.monotonic() > give_up_at:
                    break
                time.sleep(processes.POLL_SECONDS / 4)
    finally:
        kill(ranks)
    return exit_code([process.returncode for process in ranks], received)


def _start(command: Sequence[str], rank: int, count: int, port: int) -> subprocess.Popen:
    threads = os.environ.get('OMP_NUM_THREADS') or str(max(1, processes.num_cores() // count))
    environment = {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(count),
                   'LOCAL_WORLD_SIZE': str(count), 'MASTER_ADDR': _ADDRESS, 'MASTER_PORT': str(port),
                   'TORCHELASTIC_USE_AGENT_STORE': 'True', 'OMP_NUM_THREADS': threads}
    if sys.platform == 'linux':  # the only platform where the loopback interface is "lo"
        environment['GLOO_SOCKET_IFNAME'] = os.environ.get('GLOO_SOCKET_IFNAME', 'lo')
    return subprocess.Popen(list(command), env={**os.environ, **environment})


@contextlib.contextmanager
def forwarded_signals(ranks: Sequence[subprocess.Popen]) -> Iterator[list[int]]:
    """Forward signals to the ranks, except interrupts from a terminal, which reach them anyway. Yield the signals."""
    received: list[int] = []
    terminal = any(map(os.isatty, range(3)))

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        if not (terminal and number == signal.SIGINT):
            send(ranks, [number])

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    with processes.signal_handlers({number: forward for number in numbers if number != signal.SIGHUP
                                    or signal.getsignal(number) != signal.SIG_IGN}):
        yield received


def send(ranks: Sequence[subprocess.Popen], numbers: Sequence[int]) -> None:
    for process in ranks:
        for number in numbers:
            if process.poll() is None:
                process.send_signal(number)


def kill(ranks: Sequence[subprocess.Popen]) -> None:
    """Kill the ranks that still run."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.kill()
    for process in running:
        process.wait()


def _is_stop(code: int) -> bool:
    """Return whether the exit code means that a rank stopped cleanly after a signal."""
    return code >= 128


def exit_code(codes: Sequence[int], received: Sequence[int]) -> int:
    """Return one exit code for all ranks.

    A rank that died of one of the signals ``received`` had not yet installed its handler, so it counts as stopped.
    """
    codes = [128 - code if -code in received else code for code in codes]
    if any(code < 0 for code in codes):
        return 1
    errors = [code for code in codes if code and not _is_stop(code)]
    stops = [code for code in codes if _is_stop(code)]
    return (errors or stops or [0])[0]
