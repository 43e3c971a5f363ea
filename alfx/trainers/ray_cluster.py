"""The way to a Ray cluster: one that runs already, or one on this machine for as long as it is needed.

Ray is an extra (``pip install 'alfx[ray]'``) and imported by :func:`import_ray` alone. Who uses it: ``ray_rollout.py``.
"""
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from alfx.gin_utils import ConfError

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = 'RAY_ADDRESS'  # Ray's own


def import_ray(wanted_by: str) -> Any:
    """The package ``ray``.

    Args:
        wanted_by: what needs it, for the message: 'TrainerConfig.num_ray_workers = 2'.

    Raises:
        ConfError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfError(f'{wanted_by} needs Ray, which is not installed', "pip install 'alfx[ray]'") from None
    return ray


class RayConnection:
    """A connection of this process to a cluster.

    Attributes:
        ray: the package.
        is_own_cluster: whether the cluster was started by this connection and ends with it.

    Args:
        ray: the package.
        is_own_cluster: see above.
        ends_with_close: whether this connection is the one to be ended; False if the program had one before.
    """

    def __init__(self, ray: Any, is_own_cluster: bool, ends_with_close: bool):
        self.ray = ray
        self.is_own_cluster = is_own_cluster
        self._is_open = ends_with_close

    def close(self) -> None:
        """Disconnect; a cluster of its own ends. May be called more than once."""
        if self._is_open:
            self._is_open = False
            self.ray.shutdown()


def connect(wanted_by: str, address: str = '', num_cpus: int = 1) -> RayConnection:
    """Connect to a cluster.

    A program that is connected already stays with what it has.

    Args:
        wanted_by: what needs it, for messages.
        address: 'host:port' of a running cluster; 'auto' for the one that this machine belongs to; 'local' to start one
            on this machine; '' for what the environment variable ``RAY_ADDRESS`` says, 'local' if it is not set.
        num_cpus: how many actors or tasks of one CPU each a cluster started here has to have room for.

    Raises:
        ConfError: Ray is not installed, no cluster is at ``address``, or it is one of Ray's client server.
    """
    ray = import_ray(wanted_by)
    if ray.is_initialized():
        return RayConnection(ray, is_own_cluster=False, ends_with_close=False)
    address = address or os.environ.get(ADDRESS_VARIABLE, '') or 'local'
    if address.startswith('ray://'):
        raise ConfError(f'{address}: the learner has to run on a machine of the cluster, not as a client from outside',
                        "start it there with the address 'auto'")
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    options: dict[str, Any] = dict(log_to_driver=False, configure_logging=False)
    if address == 'local':
        options |= dict(num_cpus=num_cpus, include_dashboard=False)
    try:
        with _own_signal_handlers():
            ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConfError(f'there is no Ray cluster at {address!r}: {error}',
                        "start one with 'ray start --head', or leave out the address to start one here") from None
    logger.info('%s a Ray cluster (%s)', 'started' if address == 'local' else 'connected to',
                ', '.join(f'{int(count)} {name}' for name, count in sorted(ray.cluster_resources().items())
                          if name in ('CPU', 'GPU')))
    return RayConnection(ray, is_own_cluster=address == 'local', ends_with_close=True)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Context manager that puts back the handlers of the signals that Ray sets its own for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_cluster(stop: threading.Event, poll_seconds: float = 0.2) -> None:
    """Watch, from an actor of a cluster that a learner has started for itself, for the end of this cluster.

    When the learner is killed, Ray ends the actors within seconds, but two helpers of its own (the agents beside them)
    wait for a minute for a server that is gone. They are ended here.

    Args:
        stop: ends the watch.
        poll_seconds: how often to look.
    """
    raylet = os.getppid()
    siblings: set[int] = set()
    while not stop.wait(poll_seconds):
        if os.getppid() == raylet:
            siblings = _children(raylet) or siblings
            continue
        for pid in siblings:
            if _is_left_over_agent(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)


def _children(pid: int) -> set[int]:
    """The children of a process; none where the kernel does not tell."""
    try:
        with open(f'/proc/{pid}/task/{pid}/children', encoding='ascii') as file:
            return {int(child) for child in file.read().split()}
    except OSError:
        return set()


def _is_left_over_agent(pid: int) -> bool:
    """Whether a process is an agent of Ray whose parent is gone."""
    try:
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            command = file.read()
        with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as file:
            parent = int(file.read().rpartition(')')[2].split()[1])
    except OSError:
        return False
    return command.startswith(b'ray::') and b'Agent' in command and parent == 1
