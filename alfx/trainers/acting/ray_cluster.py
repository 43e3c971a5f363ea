"""The way to a Ray cluster: one that runs already, or one on this machine for as long as it is needed.

Ray is an extra (``pip install ray``) and imported by :func:`import_ray` alone. Who uses it: ``ray_rollout.py``,
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

from alfx.gin_utils import ConfError
from alfx.utils.extras import pip_install
from alfx.utils.processes import POLL_SECONDS, LostProcessError, is_running, read_proc

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
        raise ConfError(f'{wanted_by} needs Ray, which is not installed', pip_install('ray')) from None
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
            if not is_running(pid):
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
    started = _children(os.getpid()) - before if address == 'local' else ()
    return RayConnection(ray, [pid for pid in started if read_proc(pid, 'comm').strip() in _SERVERS], True)


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


def end_with_cluster(stop: threading.Event) -> None:
    """Watch, from an actor of a cluster that a learner has started for itself, for the end of this cluster.

    When the learner is killed, Ray ends the actors within seconds, but two helpers of its own (the agents beside them)
    wait for a minute for a server that is gone. They are ended here.

    Args:
        stop: ends the watch.
    """
    raylet = os.getppid()
    siblings: set[int] = set()
    while not stop.wait(POLL_SECONDS):
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
            children.update(map(int, read_proc(pid, f'task/{thread}/children').split()))
    return children


def _is_left_over_agent(pid: int) -> bool:
    """Whether a process is an agent of Ray whose parent is gone."""
    command, stat = read_proc(pid, 'cmdline'), read_proc(pid, 'stat')
    return command.startswith('ray::') and 'Agent' in command and stat.rpartition(')')[2].split()[1:2] == ['1']
