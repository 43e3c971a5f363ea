"""The way to a Ray cluster: one that runs already, or one on this machine for as long as it is needed.

Ray is an extra (``pip install 'alfx[ray]'``) and imported by :func:`import_ray` alone. Who uses it: ``ray_rollout.py``,
``search/ray_runs.py``.
"""
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from typing import Any

from alfx.engine.errors import LostProcessError
from alfx.gin_utils import ConfError

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = 'RAY_ADDRESS'  # Ray's own
_SERVERS = ('raylet', 'gcs_server')  # without either of which nothing goes on


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
        processes: those of a cluster that was started by this connection.
        ends_with_close: whether this connection is the one to be ended; False if the program had one before.
    """

    def __init__(self, ray: Any, processes: Collection[int] = (), ends_with_close: bool = False):
        self.ray = ray
        self.is_own_cluster = bool(processes)
        self._processes = processes
        self._is_open = ends_with_close

    def check(self) -> None:
        """Look whether the cluster is still there; Ray itself waits for it without an end.

        Raises:
            LostProcessError: a process of a cluster that was started here is gone, or Ray's process on this machine.
        """
        for pid in self._processes:
            if not _is_alive(pid):
                raise LostProcessError(f'a server of the Ray cluster of this run (pid {pid})', 'has ended')
        if not self.is_own_cluster:
            node = self.ray.get_runtime_context().get_node_id()
            if not any(other['NodeID'] == node and other['Alive'] for other in self.ray.nodes()):
                raise LostProcessError("Ray's process on this machine", 'has ended')

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
        return RayConnection(ray)
    address = address or os.environ.get(ADDRESS_VARIABLE, '') or 'local'
    if address.startswith('ray://'):
        raise ConfError(f'{address}: the learner has to run on a machine of the cluster, not as a client from outside',
                        "start it there with the address 'auto'")
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    options: dict[str, Any] = dict(log_to_driver=False, configure_logging=False)
    if address == 'local':
        options |= dict(num_cpus=num_cpus, include_dashboard=False)
    before = _children(os.getpid())
    logger.info('%s', 'starting a Ray cluster on this machine' if address == 'local' else
                f'connecting to the Ray cluster at {address}')
    try:
        with _own_signal_handlers(), _modules_of_this_program(address == 'local'):
            ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConfError(f'no Ray cluster answers at {address!r}: {error}',
                        "start one with 'ray start --head', or leave out the address to have one started here; to one "
                        'that asks for a token, RAY_AUTH_MODE=token lets this program send its own') from None
    logger.info('the Ray cluster has %s', ', '.join(
        f'{int(count)} {name}' for name, count in sorted(ray.cluster_resources().items()) if name in ('CPU', 'GPU')))
    servers = [pid for pid in _children(os.getpid()) - before if _name(pid) in _SERVERS] if address == 'local' else []
    return RayConnection(ray, servers, ends_with_close=True)


@contextlib.contextmanager
def _modules_of_this_program(is_wanted: bool) -> Iterator[None]:
    """Context manager within which processes that are started find the modules that this program finds."""
    before = os.environ.get('PYTHONPATH')
    if is_wanted:
        own = [os.path.abspath(path) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
        os.environ['PYTHONPATH'] = os.pathsep.join(dict.fromkeys(path for path in own if os.path.isdir(path)))
    try:
        yield
    finally:
        if before is not None:
            os.environ['PYTHONPATH'] = before
        else:
            os.environ.pop('PYTHONPATH', None)


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
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f'/proc/{pid}/task'):
            with open(f'/proc/{pid}/task/{thread}/children', encoding='ascii') as file:
                children.update(int(child) for child in file.read().split())
    return children


def _stat(pid: int) -> list[str]:
    """What ``/proc`` tells of a process, from its state and its parent on; nothing if it is gone."""
    try:
        with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as file:
            return file.read().rpartition(')')[2].split()
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] not in 'ZX'


def _name(pid: int) -> str:
    try:
        with open(f'/proc/{pid}/comm', encoding='ascii', errors='replace') as file:
            return file.read().strip()
    except OSError:
        return ''


def _is_left_over_agent(pid: int) -> bool:
    """Whether a process is an agent of Ray whose parent is gone."""
    try:
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            command = file.read()
    except OSError:
        return False
    return command.startswith(b'ray::') and b'Agent' in command and _stat(pid)[1:2] == ['1']
