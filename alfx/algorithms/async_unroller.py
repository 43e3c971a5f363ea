"""Acting in another process while this one trains (``TrainerConfig.async_unroll``).

:class:`AsyncUnroller` starts the process (``trainers/acting/unroll_process.py``), which makes the environments and the
algorithm of the run anew from the conf in the run folder, and acts as fast as its steps are taken. Steps lie in a ring
of ``unroll_queue_size`` in shared memory: where it is full the process waits, where it is empty the learner does.
Weights are handed over every ``unroll_parameter_update_period`` iterations. Steps are therefore older than the weights
that train on them, by the steps that wait in the ring and by that period.

Summaries ``async_unroll/...``: how long the latest steps took, and their ``age``: how much the global counter has moved
since the weights that acted were handed over.

What acting changes (statistics of normalizers, counts of visits) belongs to that process: it comes back with the steps,
so that checkpoints hold it, and is not overwritten by weights. It may be ahead of the steps that have been taken by
those that wait in the ring. Summaries and log records of the process arrive in the event files and the log of the run.

If the process dies the run ends with a checkpoint and a
:class:`~alfx.utils.processes.LostProcessError` with its last words; if the learner dies the process ends by itself.
"""
import atexit
import importlib
import logging
import math
import time
from typing import Any, NamedTuple

from alfx import context, nest, summary
from alfx.config import TrainerConfig
from alfx.algorithms.rl_algorithm import RLAlgorithm
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
    """What the other process does. Its program stands above the algorithms, and is looked up by name, there."""
    importlib.import_module('alfx.trainers.acting.unroll_process').work(*arguments)


class UnrollJob(NamedTuple):
    """What the learner tells the process that acts.

    Attributes:
        type: 'update_parameter' or 'stop'.
        step_metrics: what schedules depend on, by name: the progresses of the run.
        global_counter: the learner's counter.
        state_dict: the weights, tensors by key.
    """

    type: str
    step_metrics: Any = None
    global_counter: int | None = None
    state_dict: Any = None


class UnrollResult(NamedTuple):
    """One step of all environments.

    Attributes:
        time_step: ``[B, ...]``: what the step began with; transformed on-policy, otherwise as the environment gave it.
        policy_step: ``output``, the action ``[B, ...]``, and ``info`` of ``rollout_step``.
        policy_state: nest ``[B, ...]``: the state given to ``rollout_step``; ``()`` unless training starts from it.
        env_step_time: seconds that stepping the environments took.
        step_time: seconds that all of the step took.
    """

    time_step: Any
    policy_step: AlgStep
    policy_state: NestedTensor
    env_step_time: float
    step_time: float


class AsyncUnroller(UnrollSource):
    """Has another process act, and gathers its steps.

    Attributes:
        is_ready: whether the other process has said that it has made everything.

    Args:
        algorithm: the root algorithm, finalized; its environment tells the specs and the number of environments, and
            is not stepped.
        config: of the run: ``unroll_queue_size``, ``unroll_step_interval``, ``root_dir``, which holds the conf that
            the other process is made from, ``random_seed``.

    Raises:
        ConfError: the algorithm cannot learn from old steps, the run folder holds no conf, or there is too little
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
        # no daemon: it may have processes of its own, which step its environments
        self._process: MessagingProcess | None = MessagingProcess(_work, (self._channel, conf_file, settings),
                                                                  'unroll process',
                                                          daemon=False)
        atexit.register(self.close)  # before multiprocessing waits for its processes

    # Gathering -------------------------------------------------------------------------------------------------

    def gather(self, length: int, at_least: int | None = None) -> Steps | None:
        """The next ``at_least`` to ``length`` steps ``[T, B, ...]``; see ``UnrollSource``."""
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
        """Gather steps one by one.

        Args:
            unroll_length: how many; 0: as many as there are, possibly none.
            max_unroll_length: at most so many with ``unroll_length`` 0.

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
        self._listen_now_and_then()
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

    # Telling ---------------------------------------------------------------------------------------------------

    def update_parameter(self, algorithm: Acts) -> None:
        """Hand over the present weights, global counter and progresses.

        Raises:
            LostProcessError: the process that acts is gone.
        """
        if algorithm is not self._algorithm:
            raise ValueError('update_parameter: expected the algorithm that the AsyncUnroller was made for, found '
                             f'another one ({algorithm.name})')
        self._listen_now_and_then()
        look_up_buffers(self._tensors, self._buffers)
        self._send(UnrollJob('update_parameter', context.get_all_progresses(), context.get_global_counter(),
                             self._tensors))

    def wants_summaries(self, step: int) -> None:
        """Let the next step that is taken record summaries, and write them at ``step``."""
        self._records = True
        self._channel.ask_for_summaries(step)

    def _send(self, job: UnrollJob) -> None:
        if job.type == 'stop':
            self._channel.stop()
        else:
            self._channel.publish_weights(job.state_dict, job.global_counter or 0, job.step_metrics, self._listen)

    # The process -----------------------------------------------------------------------------------------------

    def _listen_now_and_then(self) -> None:
        """:meth:`_listen`, but not at each step: that would take longer than to fetch the step."""
        if time.monotonic() - self._listened_at > _LISTEN_SECONDS:
            self._listen()

    def _listen(self) -> None:
        """Take in what the process has to say.

        Raises:
            LostProcessError: it is gone.
        """
        self._listened_at = time.monotonic()
        process = self._process
        if process is None:
            raise LostProcessError('the unroll process', 'has been closed')
        has_ended = process.exitcode is not None
        self._take_in(process)
        if has_ended:
            self._listened_at = -math.inf  # from now on nobody is to believe that it is there
            raise process.lost()

    def _take_in(self, process: MessagingProcess) -> None:
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
        """End the process: ask it, and after some seconds end it by force. May be called more than once."""
        process, self._process = self._process, None
        self._listened_at = -math.inf
        if process is not None:
            atexit.unregister(self.close)
            self._send(UnrollJob('stop'))
            process.end(time.monotonic() + processes.GRACE_SECONDS, lambda: self._take_in(process))
