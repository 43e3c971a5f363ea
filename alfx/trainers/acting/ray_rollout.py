"""Rollout workers on Ray: processes on one or more machines that collect data for one learner.

Each worker has its own environments. The learner concatenates their unrolls along the batch dimension, so environment
``b`` of the run always has the same index and the same ring in the replay buffer. The actors are in ``ray_worker.py``.
"""
import collections
import logging
import re
import socket
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import alfx
from alfx import context, nest, summary
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import StepType
from alfx.engine.contract import Acts
from alfx.engine.remote.policy_state import pack, policy_state, unpack
from alfx.engine.remote.remote_unroll import ActingStatistics, UnrollSource, check_source, conf_file_of, worker_settings
from alfx.engine.rollout import Steps
from alfx.trainers.acting import ray_cluster
from alfx.trainers.acting.ray_worker import CONTROL, Delivery, RayWorker, Started, Weights
from alfx.utils import processes
from alfx.utils.processes import LostProcessError

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # consecutive deaths of a worker without a delivered step
_LAST_LINES = 20
_RAY_LOG_MARKS = (':job_id:', ':actor_name:', ':task_name:')  # in the log files of Ray processes
_REPLACEMENT_SEEDS = 1_000_003  # far from the start numbers of a run


class RayRollout(UnrollSource):
    """Source of unrolls that Ray actors collect.

    The actors start immediately and act as soon as they have weights. Each runs ahead of the learner by at most
    ``unroll_queue_size`` steps. The newest step of every worker is held back until its next step arrives: if the worker
    dies, this step becomes the last step of a truncated episode, followed by the steps of the replacement worker.

    Args:
        algorithm: root algorithm, finalized. Only the specs and the batch size of its environment are used.
        config: configuration of the run; uses ``num_ray_workers``, ``ray_address``, ``unroll_queue_size``,
            ``random_seed`` and ``root_dir``, the folder with the conf for the actors.

    Raises:
        ConfError: the algorithm cannot learn from data of older policies, the run folder has no conf, Ray is not
            installed, or no cluster is found at the address.
    """

    def __init__(self, algorithm: RLAlgorithm, config: TrainerConfig):
        check_source(algorithm, config, 'num_ray_workers')
        with open(conf_file_of(config, 'num_ray_workers'), encoding='utf8') as file:
            conf = file.read()
        num_environments = algorithm.environment.batch_size // config.num_ray_workers
        settings = {**worker_settings(config), 'num_environments': num_environments}
        self._queue_size = config.unroll_queue_size
        self._connection = ray_cluster.connect(f'TrainerConfig.num_ray_workers = {config.num_ray_workers}',
                                               config.ray_address, config.num_ray_workers)
        self._ray = self._connection.ray
        actor_class = self._ray.remote(num_cpus=1, max_concurrency=1, concurrency_groups={CONTROL: 1}, max_restarts=0,
                                       scheduling_strategy='SPREAD')(RayWorker)
        self._num_environments = num_environments
        self._algorithm = algorithm
        self._num_updates = 0
        self._statistics: bytes | None = None
        self._own_statistics = ActingStatistics(algorithm)
        self._is_closed = False
        self._workers = [_Worker(index, config.num_ray_workers, actor_class, conf, settings,
                                 self._connection.is_own_cluster) for index in range(config.num_ray_workers)]

    @property
    def worker_pids(self) -> list[int | None]:
        """Process id of each worker, None until it has started."""
        return [worker.started and worker.started.pid for worker in self._workers]

    def gather(self, length: int, at_least: int | None = None) -> Steps | None:
        """Return the next ``length`` steps ``[length, B, ...]`` with ``B = num_ray_workers * E``; see the base class.

        Raises:
            LostProcessError: a worker raised an error, or died repeatedly without delivering a step.
        """
        if not length:
            return None
        assert all(worker.has_weights for worker in self._workers), 'update_parameter must be called before gather'
        started, records = time.perf_counter(), context.should_record_summaries()
        needed = length + 1  # the newest step is held back
        for worker in self._workers:
            worker.request(needed - worker.ahead)
        for worker in self._workers:
            while worker.stream.steps < needed:
                self._receive(worker)
        if records:
            summary.scalar('ray_rollout/seconds_waited', time.perf_counter() - started)
            summary.scalar('ray_rollout/workers_replaced', sum(worker.replacements for worker in self._workers))
        structure = self._workers[0].stream.structure
        leaves = _concatenate([list(worker.stream.take(length)) for worker in self._workers], self._num_environments)
        portion = min(length, self._queue_size)
        for worker in self._workers:
            while worker.ahead - 1 + portion <= self._queue_size:
                worker.request(portion)
        return nest.unflatten(structure, leaves)

    def update_parameter(self, algorithm: Acts) -> None:
        """Put the weights into the object store and send them to all workers."""
        weights = self._put_weights()
        for worker in self._workers:
            worker.load(weights)

    def take_statistics(self, algorithm: Acts) -> None:
        """Copy the tensors that acting has changed in worker 0 to ``algorithm``."""
        packed, self._statistics = self._statistics, None
        if packed is not None:
            self._own_statistics.write(unpack(packed))

    def request_summaries(self, step: int) -> None:
        """Make worker 0 record summaries of acting, as the representative of all workers."""
        self._workers[0].tell('record', step)

    def close(self) -> None:
        """Stop the actors, and the cluster if it was started here."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._connection.check()
            self._end_workers()
        except (LostProcessError, self._ray.exceptions.RayError) as error:
            logger.warning('the rollout workers did not shut down cleanly: %s', error)
        self._connection.close()

    # -----------------------------------------------------------------------------------------------------------

    def _end_workers(self) -> None:
        waiting = []
        for worker in self._workers:
            worker.tell('stop')
            waiting.append(worker.actor.close.remote())
        self._ray.wait(waiting, num_returns=len(waiting), timeout=processes.GRACE_SECONDS)
        for worker in self._workers:
            self._ray.kill(worker.actor)

    def _put_weights(self) -> Any:
        self._connection.check()
        self._num_updates += 1
        packed = pack(policy_state(self._algorithm))
        return self._ray.put(Weights(self._num_updates, packed, context.get_global_counter(),
                                     context.get_all_progresses()))

    def _receive(self, worker: '_Worker') -> None:
        """Wait for the next answer of a worker, and replace the worker if it has died."""
        exceptions = self._ray.exceptions
        try:
            answer = self._wait(worker)
        except exceptions.RayTaskError as error:
            raise LostProcessError(worker.title, 'raised an error', _plain(str(error)),
                                   'set create_environment.max_restarts to restart an environment after an error'
                                   if 'EnvironmentStepError' in str(error) else '') from None
        except exceptions.RayError as error:
            self._replace(worker, error)
            return
        for level, text in answer.log:
            worker.log_lines.append(text)
            logger.log(level, '%s: %s', worker.name, text)
        if isinstance(answer, Started):
            worker.started = answer
            _check_version(worker)
            logger.info('%s has started', worker.title)
            return
        self._take_delivery(worker, answer)

    def _wait(self, worker: '_Worker') -> Any:
        """Wait for the oldest unread answer of a worker, and log a warning if this takes long."""
        while True:
            try:
                answer = self._ray.get(worker.answers[0], timeout=processes.LIVENESS_CHECK_SECONDS)
                worker.answers.popleft()
                worker.waited = 0
                return answer
            except self._ray.exceptions.GetTimeoutError:
                self._connection.check()
                worker.waited += 1
                if worker.waited % (processes.PATIENCE_SECONDS // processes.LIVENESS_CHECK_SECONDS) == 0:
                    self._warn_of_wait(worker)

    def _warn_of_wait(self, worker: '_Worker') -> None:
        free = self._ray.available_resources().get('CPU', 0)
        logger.warning('still waiting for %s%s', worker.title, '' if worker.started is not None else
                       f': it needs a free CPU of the cluster, which has {free:g}')

    def _take_delivery(self, worker: '_Worker', delivery: Delivery) -> None:
        worker.deaths = 0
        worker.stream.add(delivery)
        if delivery.statistics is not None:
            self._statistics = delivery.statistics
        if delivery.final_infos:
            self._algorithm.environment.add_final_infos(delivery.final_infos)
        writer = context.get_summary_writer()
        for method, arguments in delivery.summaries if writer is not None else ():
            getattr(writer, method)(*arguments)

    def _replace(self, worker: '_Worker', error: Exception) -> None:
        self._connection.check()  # if the cluster is lost, Ray would exit this process
        worker.deaths += 1
        log_tail = worker.log_tail(error)
        if worker.deaths >= MAX_DEATHS:
            raise LostProcessError(worker.title, f'died without delivering a step, like the {MAX_DEATHS - 1} workers '
                                   'that it replaced', log_tail) from None
        logger.warning('%s died; a new worker replaces it and starts new episodes; end of its log:\n%s', worker.title,
                       textwrap.indent(log_tail, '  '))
        self._ray.kill(worker.actor)
        missing = worker.ahead - worker.stream.steps
        worker.stream.end_episode()
        worker.replace_actor()
        worker.load(self._put_weights())
        worker.request(missing)


class _Worker:
    """Worker as seen by the learner. If its actor dies, a new actor replaces it.

    Attributes:
        name: 'rollout worker 2'.
        actor: the Ray actor.
        answers: references to the unread answers, the oldest first.
        ahead: number of steps that were requested and not taken.
        started: start message of the actor; None before it has started.
        has_weights: whether the actor has weights, so that it can act.
        waited: number of timeouts while waiting for the next answer.
        deaths: number of consecutive actors that died without delivering a step.
        replacements: number of actors that have died.
        stream: steps that have arrived.
        log_lines: latest lines of its log.
    """

    def __init__(self, index: int, count: int, actor_class: Any, conf: str, settings: dict[str, Any],
                 is_own_cluster: bool):
        self.name = f'rollout worker {index}'
        self._actor_class, self._conf, self._settings = actor_class, conf, settings
        self._index, self._count, self._is_own_cluster = index, count, is_own_cluster
        self.replacements = 0
        self.stream = _Stream()
        self.deaths = 0
        self.waited = 0
        self._create()

    def _create(self) -> None:
        start = self._settings['start'] + _REPLACEMENT_SEEDS * self.replacements
        self.actor = self._actor_class.remote(self._conf, self._settings | {'start': start}, self._index, self._count,
                                              self._is_own_cluster)
        self.answers: collections.deque = collections.deque()
        self.log_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.started: Started | None = None
        self.has_weights = False
        # Sent with the next request as well, because calls of the two concurrency groups may overtake each other.
        self._next_weights: Any = None

    @property
    def title(self) -> str:
        """Name of the worker for messages."""
        if self.started is None:
            return f'{self.name} (which has not started yet)'
        return f'{self.name} (pid {self.started.pid} on {self.started.host})'

    @property
    def ahead(self) -> int:
        return self.stream.requested

    def replace_actor(self) -> None:
        """Start a new actor. Undelivered steps of the old actor are lost."""
        self.replacements += 1
        self.stream.requested = self.stream.steps
        self._create()

    def load(self, weights: Any) -> None:
        """Send weights to the actor. The first weights make it create its environments."""
        if self.has_weights:
            self.tell('load', weights)  # for steps that were already requested
            self._next_weights = weights
        else:
            self.has_weights = True
            self.answers.append(self.actor.start.remote(weights))

    def request(self, length: int) -> None:
        """Request ``length`` more steps."""
        if length > 0:
            self.stream.requested += length
            weights, self._next_weights = self._next_weights, None
            self.answers.append(self.actor.collect.remote(length, weights))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a control method of the actor without waiting for an answer."""
        getattr(self.actor, method).options(concurrency_group=CONTROL).remote(*arguments)

    def log_tail(self, error: Exception) -> str:
        """Return the last lines of stderr or of the log of the actor, and the reason of its death given by Ray."""
        lines: list[str] = []
        if self.started is not None and self.started.host == socket.gethostname():
            lines = [line.rstrip() for line in processes.tail(self.started.log_file).splitlines()
                     if line.strip() and not line.startswith(_RAY_LOG_MARKS)][-_LAST_LINES:]
        known = _plain(str(error)).splitlines()
        begin = next((i for i, line in enumerate(known) if line.startswith('The actor is dead because')), 0)
        return '\n'.join([*(lines or self.log_lines), *known[begin:]])


class _Stream:
    """Queue of the steps of one worker that have arrived and not been taken.

    Attributes:
        structure: structure of ``Steps``.
        steps: number of steps in the queue.
        requested: number of steps in the queue and of requested steps.
    """

    def __init__(self) -> None:
        self.structure: Any = None
        self.steps = 0
        self.requested = 0
        self._portions: collections.deque = collections.deque()  # lists of arrays [T, E, ...]
        self._step_types: list[int] = []

    def add(self, delivery: Delivery) -> None:
        """Append a delivery."""
        if self.structure is None:
            self.structure = delivery.structure
            self._step_types = _step_types(delivery.structure)
        self._portions.append(delivery.leaves)
        self.steps += _length(delivery.leaves)

    def take(self, length: int) -> Iterator[list[Any]]:
        """Remove and yield the oldest ``length`` steps, in portions."""
        self.steps -= length
        self.requested -= length
        while length:
            leaves = self._portions.popleft()
            count = _length(leaves)
            if count > length:
                self._portions.appendleft(_cut(leaves, length, count))
                leaves = _cut(leaves, 0, length)
                count = length
            length -= count
            yield leaves

    def end_episode(self) -> None:
        """Make the newest step the last step of its episode, without changing its discount."""
        if not self.steps:
            return
        leaves = self._portions[-1] = list(self._portions[-1])
        for i in self._step_types:
            leaves[i] = np.array(leaves[i])
            leaves[i][-1] = StepType.LAST


def _step_types(structure: Any) -> list[int]:
    """Return the indices of the leaves of ``Steps`` with the step types for training. Metrics use other leaves."""
    leaves = range(structure.num_leaves)
    paths = nest.flatten_with_path(nest.unflatten(structure, leaves))
    return [i for path, i in paths if path.split('.')[-1] == 'step_type' and not path.startswith('env_steps.')]


def _length(leaves: list[Any]) -> int:
    return next(len(leaf) for leaf in leaves if leaf is not None)


def _cut(leaves: list[Any], begin: int, end: int) -> list[Any]:
    return [None if leaf is None else leaf[begin:end] for leaf in leaves]


def _concatenate(workers: list[list[list[Any]]], num_environments: int) -> list[torch.Tensor | None]:
    """Concatenate the steps of all workers along the batch dimension.

    Args:
        workers: for each worker the portions ``[t, E, ...]`` of its steps, each a list of leaves. All workers must have
            the same number of steps.
        num_environments: E.

    Returns:
        The leaves ``[T, workers * E, ...]``.
    """
    length = sum(_length(leaves) for leaves in workers[0])
    batch_size = len(workers) * num_environments
    out: list[torch.Tensor | None] = []
    for i, example in enumerate(workers[0][0]):
        if example is None:
            out.append(None)
            continue
        whole = torch.empty((length, batch_size, *example.shape[2:]), dtype=_torch_dtype(example))
        target: Any = whole.numpy() if isinstance(example, np.ndarray) else whole
        for w, portions in enumerate(workers):
            begin = 0
            for leaves in portions:
                end = begin + len(leaves[i])
                target[begin:end, w * num_environments:(w + 1) * num_environments] = leaves[i]
                begin = end
        out.append(whole)
    return out


def _torch_dtype(example: Any) -> torch.dtype:
    return example.dtype if isinstance(example, torch.Tensor) else torch.from_numpy(np.empty(0, example.dtype)).dtype


def _check_version(worker: _Worker) -> None:
    assert worker.started is not None, 'the worker has not started'
    if worker.started.version != alfx.__version__:
        raise LostProcessError(worker.title, f'has alfx {worker.started.version}, the learner has {alfx.__version__}',
                               hint='install the same version on every machine of the cluster')


def _plain(text: str) -> str:
    """Remove the color codes from a message of Ray."""
    return re.sub(r'\x1b\[[0-9;]*m', '', text)

