"""Asynchronous acting in another process while this one trains (``TrainerConfig.async_unroll``).

:class:`AsyncUnroller` starts the process (``trainers/acting/unroll_process.py``). The process creates the environments
and the algorithm again from the conf in the run folder and acts as fast as its steps are consumed. Steps are stored in
a ring of ``unroll_queue_size`` in shared memory: the process waits when it is full, the learner waits when it is empty.
Weights are published every ``unroll_parameter_update_period`` iterations. Steps are therefore collected with older
weights than the trained ones: older by up to that period, plus the time that the steps wait in the ring.

Summaries ``async_unroll/...`` log how long the latest steps took, and their ``age``: how far the global counter has
advanced since the weights that acted were published.

State that changes while acting (statistics of normalizers, visit counts) belongs to that process. It is sent back with
the steps, so that checkpoints contain it, and published weights do not overwrite it. It may be ahead of the consumed
steps by the steps waiting in the ring. Summaries and log records of the process go to the event files and the log of
the run.

If the process dies, the run ends with a checkpoint and a :class:`~alfx.utils.processes.LostProcessError` that shows the
log tail of the process. If the learner dies, the process ends by itself.
"""
import atexit
import importlib
import logging
import math
import time
from typing import Any, NamedTuple

from alfx import context, nest, summary
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep
from alfx.engine.contract import Acts
from alfx.engine.remote.channel import Timing, UnrollChannel
from alfx.engine.remote.policy_state import look_up_buffers, policy_buffers, policy_tensors
from alfx.engine.remote.remote_unroll import ActingStatistics, UnrollSource, check_source, conf_file_of, worker_settings
from alfx.engine.rollout import Steps
from alfx.tensor_specs import NestedTensor
from alfx.utils import processes
from alfx.utils.processes import LostProcessError, MessagingProcess

logger = logging.getLogger(__name__)

_LISTEN_SECONDS = 0.05


def _work(*arguments: Any) -> None:
    """Run the unroll process. Its module is imported by name because it is in a layer above the algorithms."""
    importlib.import_module('alfx.trainers.acting.unroll_process').work(*arguments)


class UnrollJob(NamedTuple):
    """Message from the learner to the process that acts.

    Attributes:
        type: 'update_parameter' or 'stop'.
        step_metrics: progress values that schedules depend on, by name.
        global_counter: the learner's counter.
        state_dict: weights, tensors by key.
    """

    type: str
    step_metrics: Any = None
    global_counter: int | None = None
    state_dict: Any = None


class UnrollResult(NamedTuple):
    """One step of all environments.

    Attributes:
        time_step: ``[B, ...]``: time step that the step began with; transformed if on-policy, otherwise as the
            environment returned it.
        policy_step: ``output``, the action ``[B, ...]``, and ``info`` of ``rollout_step``.
        policy_state: nest ``[B, ...]``: state passed to ``rollout_step``; ``()`` unless training starts from it.
        env_step_time: seconds spent stepping the environments.
        step_time: seconds of the whole step.
    """

    time_step: Any
    policy_step: AlgStep
    policy_state: NestedTensor
    env_step_time: float
    step_time: float


class AsyncUnroller(UnrollSource):
    """Source of steps that another process collects.

    Attributes:
        is_ready: the other process has reported that it has finished its setup.

    Args:
        algorithm: the root algorithm, finalized; its environment provides specs and the number of environments, and is
            not stepped.
        config: configuration of the run: ``unroll_queue_size``, ``unroll_step_interval``, ``root_dir``, which contains
            the conf that the other process is created from, ``random_seed``.

    Raises:
        ConfError: the algorithm cannot learn from old steps, the run folder contains no conf, or there is too little
            shared memory for the queue.
    """

    def __init__(self, algorithm: RLAlgorithm, config: TrainerConfig):
        check_source(algorithm, config, 'async_unroll')
        conf_file = conf_file_of(config, 'async_unroll')
        self._algorithm = algorithm
        self._channel = UnrollChannel(algorithm, algorithm.environment, config.unroll_queue_size, processes.SPAWN)
        self._tensors, self._buffers = policy_tensors(algorithm), policy_buffers(algorithm)
        self._statistics = ActingStatistics(algorithm)
        self._records = False
        self.is_ready = False
        self._listened_at = -math.inf
        settings = {**worker_settings(config), 'num_environments': algorithm.environment.batch_size,
                    'unroll_step_interval': config.unroll_step_interval}
        # not a daemon: it may start processes that step its environments
        self._process: MessagingProcess | None = MessagingProcess(_work, (self._channel, conf_file, settings),
                                                                  'unroll process',
                                                          daemon=False)
        atexit.register(self.close)  # before multiprocessing waits for its processes

    # Gathering -------------------------------------------------------------------------------------------------

    def gather(self, length: int, at_least: int | None = None) -> Steps | None:
        """Return the next ``at_least`` to ``length`` steps ``[T, B, ...]``; see ``UnrollSource``."""
        gathered = self._gather(length, length if at_least is None else at_least)
        if gathered is None:
            return None
        steps, timing = gathered
        if self._records:
            self._records = False
            summary.scalar('async_unroll/seconds_of_env_step', timing.env_step.mean())
            summary.scalar('async_unroll/seconds_of_step', timing.step.mean())
            summary.scalar('async_unroll/age', context.get_global_counter() - timing.global_counter.mean())
        return steps

    def gather_unroll_results(self, unroll_length: int, max_unroll_length: int) -> list[UnrollResult]:
        """Return steps as a list, one result per step.

        Args:
            unroll_length: number of steps; 0: as many as are available, possibly none.
            max_unroll_length: upper limit with ``unroll_length`` 0.

        Raises:
            LostProcessError: the process that acts is gone.
        """
        gathered = self._gather(unroll_length or max_unroll_length, unroll_length)
        if gathered is None:
            return []
        steps, timing = gathered
        results = []
        for t, (env_seconds, seconds) in enumerate(zip(timing.env_step.tolist(), timing.step.tolist())):
            step = nest.map_structure(lambda x, t=t: x[t], steps.experience)
            results.append(UnrollResult(step.time_step, AlgStep(step.action, (), step.rollout_info), step.state,
                                        env_seconds, seconds))
        return results

    def _gather(self, length: int, at_least: int) -> tuple[Steps, Timing] | None:
        self._listen_at_intervals()
        out, count = self._channel.ring.empty_steps(length), 0
        while True:
            count += self._channel.get(out, count, length - count, processes.POLL_SECONDS if count < at_least else 0.0)
            if count >= at_least:
                break
            self._listen()
        if not count:
            return None
        return self._channel.steps_of([x[:count] for x in out], self._algorithm.capabilities.needs_unroll_inputs)

    def take_statistics(self, algorithm: Acts) -> None:
        """Write the latest statistics that acting changes into ``algorithm``."""
        self._channel.take_statistics(self._statistics.write, self._listen)

    # Messages --------------------------------------------------------------------------------------------------

    def update_parameter(self, algorithm: Acts) -> None:
        """Publish the current weights, global counter and progress values.

        Raises:
            LostProcessError: the process that acts is gone.
        """
        if algorithm is not self._algorithm:
            raise ValueError('update_parameter: expected the algorithm that the AsyncUnroller was created for, found '
                             f'another one ({algorithm.name})')
        self._listen_at_intervals()
        look_up_buffers(self._tensors, self._buffers)
        self._channel.publish_weights(self._tensors, context.get_global_counter(), context.get_all_progresses(),
                                      self._listen)

    def request_summaries(self, step: int) -> None:
        """Let the next step taken record summaries, and write them at ``step``."""
        self._records = True
        self._channel.request_summaries(step)

    # The process -----------------------------------------------------------------------------------------------

    def _listen_at_intervals(self) -> None:
        """Call :meth:`_listen` at intervals: at each step it would take longer than fetching the step."""
        if time.monotonic() - self._listened_at > _LISTEN_SECONDS:
            self._listen()

    def _listen(self) -> None:
        """Process the messages of the other process.

        Raises:
            LostProcessError: the process is gone.
        """
        self._listened_at = time.monotonic()
        process = self._process
        if process is None:
            raise LostProcessError('the unroll process', 'has been closed')
        has_ended = process.exitcode is not None
        self._handle_messages(process)
        if has_ended:
            self._listened_at = -math.inf  # the next call must notice that the process is gone
            raise process.lost()

    def _handle_messages(self, process: MessagingProcess) -> None:
        for kind, content in process.listen():
            if kind == 'ready':
                self.is_ready = True
                logger.info('the unroll process (pid %d) acts in %d environment(s)', process.pid, content)
            elif kind == 'final_infos':
                self._algorithm.environment.add_final_infos(content)
            elif (writer := context.get_summary_writer()) is not None:
                for method, arguments in content:
                    getattr(writer, method)(*arguments)

    def close(self) -> None:
        """End the process: send a stop message and terminate it after a grace period. May be called more than once."""
        process, self._process = self._process, None
        self._listened_at = -math.inf
        if process is not None:
            atexit.unregister(self.close)
            self._channel.stop()
            process.end(time.monotonic() + processes.GRACE_SECONDS, lambda: self._handle_messages(process))
