"""A Ray actor that acts: a :class:`~alfx.trainers.acting.rollout_worker.RolloutWorker` and what travels to and from it.

Calls of the concurrency group 'control' are answered while :meth:`RayWorker.collect` is at work; they only leave
something to be found by the next ``collect``. All others run one after the other in one thread, in which everything is
made that acts.
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
_MAX_LOG_LINES = 1000  # of one delivery


class Weights(NamedTuple):
    """What to act with.

    Attributes:
        number: counted up by the learner.
        packed: of :func:`~alfx.engine.remote.policy_state.pack`.
        global_counter: the learner's.
        progresses: what schedules depend on.
    """

    number: int
    packed: bytes
    global_counter: int
    progresses: dict[str, float]


class Started(NamedTuple):
    """Who has started.

    Attributes:
        pid: its process.
        host: its machine.
        log_file: on that machine: what it writes to stderr; '' if that is no file.
        version: of alfx.
        log: as in :class:`Delivery`.
    """

    pid: int
    host: str
    log_file: str
    version: str
    log: list[tuple[int, str]]


class Delivery(NamedTuple):
    """The outcome of one ``collect``.

    Attributes:
        leaves: those of ``Steps``, as arrays ``[T, E, ...]``; tensors where numpy lacks the type, ``None`` for none.
        structure: of ``Steps``.
        statistics: packed, of worker 0: what acting has changed.
        log: ``(level, text)``.
        summaries: ``(method, arguments)`` of calls of a summary writer.
        final_infos: the numbers that the latest episodes ended with.
    """

    leaves: list[Any]
    structure: Any
    statistics: bytes | None
    log: list[tuple[int, str]]
    summaries: list[tuple[str, tuple]]
    final_infos: list[dict[str, float]]


class RayWorker:
    """Body of the actor; it makes nothing before :meth:`start`.

    Args:
        conf: the text of a conf in which everything is resolved: other machines do not see the run folder.
        settings: of :class:`~alfx.trainers.acting.rollout_worker.RolloutWorker`.
        index: number of this worker.
        count: how many there are.
        ends_with_cluster: whether the cluster is the learner's own.
    """

    def __init__(self, conf: str, settings: dict[str, Any], index: int, count: int, ends_with_cluster: bool):
        self._conf, self._settings, self._index, self._count = conf, settings, index, count
        self._worker: Any = None
        self._weights: Weights | None = None  # the latest that have come in
        self._number = 0  # of those in use
        self._summary_step: int | None = None
        self._stopped = threading.Event()
        self._log: list[tuple[int, str]] = []
        self._summaries: list[tuple[str, tuple]] = []
        self._writer = worker_process.SummaryForwarding(lambda *call: self._summaries.append(call))
        self._forwarding = worker_process.LogForwarding(self._add_to_log).active()
        self._forwarding.__enter__()  # until the process ends
        if ends_with_cluster:
            threading.Thread(target=end_with_cluster, args=(self._stopped, ), daemon=True).start()

    def start(self, weights: Weights) -> Started:
        """Make environments and algorithm.

        Raises:
            ConfError, EnvironmentLoadError: as in a run of one process.
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
        """Act for ``length`` steps, with the latest weights that have been loaded; ``None`` after :meth:`stop`.

        Args:
            length: how many.
            weights: at least as new as these, which may not have come in by :meth:`load` yet.

        Raises:
            EnvironmentStepError: an environment raised.
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

    # Control: called while collect is at work ------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Act with these from the next ``collect`` on."""
        self._weights = weights

    def record(self, step: int) -> None:
        """Record summaries in the next ``collect``, and write them at ``step``."""
        self._summary_step = step

    def stop(self) -> None:
        """Let every ``collect`` that has not begun end at once."""
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
            self._log.append((logging.WARNING, 'more lines than these in a few steps: left out'))

    def _take_log(self) -> list[tuple[int, str]]:
        log, self._log = self._log, []
        return log


def _as_arrays(leaves: list[Any]) -> list[Any]:
    """Tensors as arrays where possible; the same tensor twice is the same array twice, and travels once."""
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
