"""Ray actor with a :class:`~alfx.trainers.acting.rollout_worker.RolloutWorker`, and its messages.

Calls in the concurrency group 'control' run concurrently with :meth:`RayWorker.collect`; they only store values for the
next ``collect``. All other calls run one after the other in a single thread, which also creates the environments and
the algorithm.
"""
import logging
import os
import socket
import tempfile
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

import alfx
from alfx import context, nest
from alfx.engine.remote.policy_state import pack, unpack
from alfx.trainers.acting import worker_process
from alfx.trainers.acting.ray_cluster import end_with_cluster
from alfx.trainers.acting.rollout_worker import RolloutWorker
from alfx.utils.processes import leave_signals_to_parent

CONTROL = 'control'
_MAX_LOG_LINES = 1000  # per delivery


class Weights(NamedTuple):
    """Weights for acting.

    Attributes:
        number: version number, increased by the learner.
        packed: weights, packed by :func:`~alfx.engine.remote.policy_state.pack`.
        global_counter: counter of the learner.
        progresses: training progress, which schedules depend on.
    """

    number: int
    packed: bytes
    global_counter: int
    progresses: dict[str, float]


class Started(NamedTuple):
    """Message of an actor that has started.

    Attributes:
        pid: process id of the actor.
        host: name of its machine.
        log_file: file to which it writes stderr, on its machine; '' if stderr is not a file.
        version: version of alfx.
        log: see :class:`Delivery`.
    """

    pid: int
    host: str
    log_file: str
    version: str
    log: list[tuple[int, str]]


class Delivery(NamedTuple):
    """Result of one ``collect``.

    Attributes:
        leaves: leaves of ``Steps`` as arrays ``[T, E, ...]``; tensors if numpy lacks the dtype, None for empty leaves.
        structure: structure of ``Steps``.
        statistics: tensors that acting has changed in worker 0, packed.
        log: log records ``(level, text)``.
        summaries: calls ``(method, arguments)`` of the summary writer.
        final_infos: numbers in the final infos of the latest episodes.
    """

    leaves: list[Any]
    structure: Any
    statistics: bytes | None
    log: list[tuple[int, str]]
    summaries: list[tuple[str, tuple]]
    final_infos: list[dict[str, float]]


class RayWorker:
    """Body of the actor. The environments and the algorithm are created by :meth:`start`.

    Args:
        conf: text of the resolved conf, because other machines cannot access the run folder.
        settings: settings of :class:`~alfx.trainers.acting.rollout_worker.RolloutWorker`.
        index: index of this worker.
        count: number of workers.
        ends_with_cluster: whether the learner started the cluster, so that this process exits with it.
    """

    def __init__(self, conf: str, settings: dict[str, Any], index: int, count: int, ends_with_cluster: bool):
        self._conf, self._settings, self._index, self._count = conf, settings, index, count
        self._worker: Any = None
        self._weights: Weights | None = None  # latest received weights, not loaded yet
        self._number = 0  # version number of the loaded weights
        self._summary_step: int | None = None
        self._stopped = threading.Event()
        self._log: list[tuple[int, str]] = []
        self._summaries: list[tuple[str, tuple]] = []
        self._writer = worker_process.SummaryForwarding(lambda *call: self._summaries.append(call))
        self._forwarding = worker_process.LogForwarding(self._add_to_log).active()
        self._forwarding.__enter__()  # active until the process exits
        if ends_with_cluster:
            threading.Thread(target=end_with_cluster, args=(self._stopped, ), daemon=True).start()

    def start(self, weights: Weights) -> Started:
        """Create the environments and the algorithm.

        Raises:
            ConfError, EnvironmentLoadError: the same as in a run with a single process.
        """
        leave_signals_to_parent()
        worker_process.prepare(self._settings)
        with tempfile.TemporaryDirectory(prefix='alfx-') as folder:
            conf_file = os.path.join(folder, 'config.gin')
            with open(conf_file, 'w', encoding='utf8') as file:
                file.write(self._conf)
            self._worker = RolloutWorker(conf_file, self._settings, self._index, self._count)
        context.set_summary_writer(self._writer)
        self._use_if_newer(weights)
        return Started(os.getpid(), socket.gethostname(), _stderr_file(), alfx.__version__, self._take_log())

    def collect(self, length: int, weights: Weights | None = None) -> Delivery | None:
        """Act for ``length`` steps with the latest weights; return None after :meth:`stop`.

        Args:
            length: number of steps.
            weights: weights to use unless newer ones were received by :meth:`load`.

        Raises:
            EnvironmentStepError: an environment raised an error.
        """
        if self._stopped.is_set():
            return None
        self._use_if_newer(weights)
        weights, self._weights = self._weights, None
        self._use_if_newer(weights)
        step, self._summary_step = self._summary_step, None
        with context.record_if(step is not None), context.summaries_at(lambda: step or 0):
            steps = self._worker.collect(length)
        leaves, structure = nest.flatten_with_structure(steps)
        statistics = self._worker.statistics()
        summaries, self._summaries = self._summaries, []
        return Delivery(_as_arrays(leaves), structure, pack(statistics) if statistics else None, self._take_log(),
                        summaries, self._worker.take_final_infos())

    def close(self) -> None:
        """Close the environments."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # Control methods, which run concurrently with collect --------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Use these weights from the next ``collect`` on."""
        self._weights = weights

    def record(self, step: int) -> None:
        """Record summaries in the next ``collect``, at step ``step``."""
        self._summary_step = step

    def stop(self) -> None:
        """Make every ``collect`` that has not started return immediately."""
        self._stopped.set()

    # -----------------------------------------------------------------------------------------------------------

    def _use_if_newer(self, weights: Weights | None) -> None:
        if weights is not None and weights.number > self._number:
            self._number = weights.number
            self._worker.load(unpack(weights.packed), weights.global_counter, weights.progresses)

    def _add_to_log(self, level: int, text: str) -> None:
        if len(self._log) < _MAX_LOG_LINES:
            self._log.append((level, text))
        elif len(self._log) == _MAX_LOG_LINES:
            self._log.append((logging.WARNING, 'too many log lines: the others are dropped'))

    def _take_log(self) -> list[tuple[int, str]]:
        log, self._log = self._log, []
        return log


def _as_arrays(leaves: list[Any]) -> list[Any]:
    """Convert tensors to arrays where possible. A repeated tensor is converted to one array, which is sent once."""
    arrays: dict[tuple, Any] = {}

    def as_array(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        key = leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()
        if key not in arrays:
            arrays[key] = leaf.detach() if leaf.dtype == torch.bfloat16 else np.asarray(leaf.detach())
        return arrays[key]

    return [as_array(leaf) for leaf in leaves]


def _stderr_file() -> str:
    try:
        path = os.readlink('/proc/self/fd/2')
    except OSError:
        return ''
    return path if os.path.isfile(path) else ''
