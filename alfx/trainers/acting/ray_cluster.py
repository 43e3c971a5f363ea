"""Connection to a Ray cluster that is already running or is started on this machine.

Ray is an optional dependency (``pip install ray``) that only :func:`import_ray` imports. ``ray_rollout.py`` and
``search/ray_runs.py`` use this module.
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
from alfx.utils.processes import POLL_SECONDS, LostProcessError, is_running, read_proc, signal_handlers

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = 'RAY_ADDRESS'  # defined by Ray
_SERVERS = ('raylet', 'gcs_server')  # Ray stops working if either of them exits


def import_ray(wanted_by: str) -> Any:
    """Import and return the package ``ray``.

    Args:
        wanted_by: setting that needs Ray, for the message: 'TrainerConfig.num_ray_workers = 2'.

    Raises:
        ConfError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfError(f'{wanted_by} needs Ray, which is not installed', pip_install('ray')) from None
    return ray


class RayConnection:
    """Connection of this process to a Ray cluster.

    Attributes:
        ray: the package ``ray``.
        is_own_cluster: whether this connection started the cluster and shuts it down.

    Args:
        ray: the package ``ray``.
        processes: process ids of the servers, if this connection started the cluster.
        ends_with_close: whether :meth:`close` disconnects; False if the program was connected before.
    """

    def __init__(self, ray: Any, processes: Collection[int] = (), ends_with_close: bool = False):
        self.ray = ray
        self.is_own_cluster = bool(processes)
        self._processes = processes
        self._is_open = ends_with_close

    def check(self) -> None:
        """Check that the cluster is alive, because Ray itself would wait forever.

        Raises:
            LostProcessError: a server of a cluster started here, or the Ray process on this machine, has exited.
        """
        for pid in self._processes:
            if not is_running(pid):
                raise LostProcessError(f'a server of the Ray cluster of this run (pid {pid})', 'has exited')
        if not self.is_own_cluster:
            node = self.ray.get_runtime_context().get_node_id()
            if not any(other['NodeID'] == node and other['Alive'] for other in self.ray.nodes()):
                raise LostProcessError("the Ray process on this machine", 'has exited')

    def close(self) -> None:
        """Disconnect, and shut down a cluster started by this connection. Repeated calls do nothing."""
        if self._is_open:
            self._is_open = False
            self.ray.shutdown()


def connect(wanted_by: str, address: str = '', num_cpus: int = 1) -> RayConnection:
    """Connect to a Ray cluster, or use the existing connection of this program.

    Args:
        wanted_by: setting that needs Ray, for messages.
        address: 'host:port' of a running cluster; 'auto' for the cluster of this machine; 'local' to start a cluster on
            this machine; '' for the environment variable ``RAY_ADDRESS``, or 'local' if it is not set.
        num_cpus: number of CPUs of a cluster started here; each actor or task takes one.

    Raises:
        ConfError: Ray is not installed, no cluster answers at ``address``, or it is the address of a Ray client server.
    """
    ray = import_ray(wanted_by)
    if ray.is_initialized():
        return RayConnection(ray)
    address = address or os.environ.get(ADDRESS_VARIABLE, '') or 'local'
    if address.startswith('ray://'):
        raise ConfError(f'{address}: the learner must run on a machine of the cluster, not as a Ray client',
                        "start it on such a machine with the address 'auto'")
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    options: dict[str, Any] = dict(log_to_driver=False, configure_logging=False)
    if address == 'local':
        options |= dict(num_cpus=num_cpus, include_dashboard=False)
    before = _children(os.getpid())
    logger.info('%s', 'starting a Ray cluster on this machine' if address == 'local' else
                f'connecting to the Ray cluster at {address}')
    try:
        unchanged = signal_handlers({signal.SIGTERM: signal.getsignal(signal.SIGTERM)})  # Ray replaces it
        with unchanged, _shared_module_path(address == 'local'):
            ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConfError(f'no Ray cluster answers at {address!r}: {error}',
                        "start a cluster with 'ray start --head', or remove the address to start one automatically; "
                        'if the cluster requires a token, set RAY_AUTH_MODE=token') from None
    logger.info('the Ray cluster has %s', ', '.join(
        f'{int(count)} {name}' for name, count in sorted(ray.cluster_resources().items()) if name in ('CPU', 'GPU')))
    started = _children(os.getpid()) - before if address == 'local' else ()
    return RayConnection(ray, [pid for pid in started if read_proc(pid, 'comm').strip() in _SERVERS], True)


@contextlib.contextmanager
def _shared_module_path(is_wanted: bool) -> Iterator[None]:
    """Set ``PYTHONPATH`` so that started processes find the same modules as this program."""
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


def end_with_cluster(stop: threading.Event) -> None:
    """Exit this actor process, and kill the agents of Ray, when the cluster started by the learner has ended.

    If the learner is killed, Ray ends the actors within seconds, but its two agent processes wait a minute for the lost
    server. This function kills them.

    Args:
        stop: event that ends the watch.
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
    """Return the child processes of a process; empty if the kernel does not provide them."""
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f'/proc/{pid}/task'):
            children.update(map(int, read_proc(pid, f'task/{thread}/children').split()))
    return children


def _is_left_over_agent(pid: int) -> bool:
    """Return whether a process is an agent of Ray whose parent has exited."""
    command, stat = read_proc(pid, 'cmdline'), read_proc(pid, 'stat')
    return command.startswith('ray::') and 'Agent' in command and stat.rpartition(')')[2].split()[1:2] == ['1']
