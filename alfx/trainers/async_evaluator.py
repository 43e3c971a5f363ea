"""Evaluation in a process of its own, while training goes on.

The process is started for the first evaluation; it makes its own environments and its own algorithm from the conf in
the run folder, and gets the weights with each request. Requests wait in a short queue: where evaluations take longer
than the training between them, training waits, so that no point of the curve is left out.
"""
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from alfx import context
from alfx.engine.remote.policy_state import load_policy_state, pack, policy_state, unpack
from alfx.engine.remote.remote_unroll import worker_settings
from alfx.runs import building
from alfx.trainers.acting import worker_process
from alfx.runs.evaluator import EvalJob, EvalLog, unused_for_evaluation
from alfx.utils import processes
from alfx.utils.processes import MessagingProcess

logger = logging.getLogger(__name__)

_MAX_WAITING = 3
_MAX_STARTS = 3


class Evaluator:
    """Evaluates in another process.

    If that process dies, this is reported with its own words, what it had not done yet is lost, and the next request
    starts another one; after three deaths no more evaluation takes place, and training goes on.

    Args:
        config: the configuration of the run.
        conf_file: the conf file that the process makes its algorithm from: one in which everything is resolved.

    Attributes:
        unused_bindings: keys of the bindings in scope ``evaluation/`` that the first evaluation did not use; None
            before it took place.
    """

    def __init__(self, config: Any, conf_file: str):
        self._config = config
        self._conf_file = conf_file
        self._process: MessagingProcess | None = None
        self._starts = 0
        self._messages: list[str] = []
        self.unused_bindings: list[tuple[str, str, str]] | None = None

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        """Ask for an evaluation of the present weights; waits only while several others are still to be done.

        Args:
            algorithm: what to evaluate.
            step_metrics: counters that go with the result by name, 'EnvironmentSteps' among them.
        """
        if not self._ensure_process():
            return
        job = EvalJob('eval', context.get_global_counter(), step_metrics, pack(policy_state(algorithm)),
                      context.get_all_progresses(), time.time())
        while self._is_alive():
            try:
                self._jobs.put(tuple(job), timeout=processes.POLL_SECONDS)
                return
            except queue.Full:
                continue

    def messages(self) -> list[str]:
        """What there is to tell about evaluations since the last call: results, and the death of the process."""
        self._is_alive()
        messages, self._messages = self._messages, []
        return messages

    def close(self, timeout: float | None = None) -> None:
        """Wait for the evaluations that have been asked for, and end the process.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.
        """
        end = time.monotonic() + (float('inf') if timeout is None else timeout)
        stop_sent = False
        while time.monotonic() < end and self._is_alive(expected_end=stop_sent):
            stop_sent = stop_sent or self._try_to_stop()
            time.sleep(processes.POLL_SECONDS)
        if self._process is not None:
            self._process.end(end, self._collect)
            self._process = None

    def _try_to_stop(self) -> bool:
        try:
            self._jobs.put(tuple(EvalJob('stop')), timeout=processes.POLL_SECONDS)
        except queue.Full:
            return False
        return True

    def _ensure_process(self) -> bool:
        if self._is_alive():
            return True
        if self._starts >= _MAX_STARTS:
            return False
        self._starts += 1
        self._jobs = processes.SPAWN.Queue(_MAX_WAITING)
        self._jobs.cancel_join_thread()  # weights that nobody reads any more must not keep this process from ending
        settings = worker_settings(self._config)
        self._process = MessagingProcess(_serve, (self._jobs, self._conf_file, settings), 'evaluation process')
        return True

    def _is_alive(self, expected_end: bool = False) -> bool:
        process = self._process
        if process is None:
            return False
        code = process.exitcode
        self._collect()
        if code is None:
            return True
        if not (expected_end and code == 0):
            again = 'no more evaluations' if self._starts >= _MAX_STARTS else 'the next one starts another'
            if process.error:
                self._messages.append(f'the evaluation failed:\n{process.error}')
            self._messages.append(f'the evaluation process died: it {process.ending()}; {again}')
            logger.error(self._messages[-1])
        process.end(0.0)
        self._process = None
        return False

    def _collect(self) -> None:
        assert self._process is not None, 'it has been started'
        for kind, content in self._process.listen():
            if kind == 'result':
                self._messages.append(content)
            else:
                self.unused_bindings = content


def _serve(tell: Callable[[str, Any], None], jobs: Any, conf_file: str, settings: dict[str, Any]) -> None:
    """Body of the evaluation process."""
    worker_process.prepare(settings)
    config = worker_process.load_config(conf_file, settings)
    env = building.create_eval_environment(config, config.num_eval_environments, nonparallel=True)
    algorithm = building.create_algorithm(config, env, trains=False)
    log, has_told_unused = EvalLog(config.root_dir, config), False
    while (job := _next_job(jobs)).type != 'stop':
        context.set_global_counter(job.global_counter)
        context.update_all_progresses(job.progresses)
        load_policy_state(algorithm, unpack(job.state_dict))
        result = log.evaluate(env, algorithm, config.num_eval_episodes)
        log.write(result, job.global_counter, job.step_metrics, job.walltime)
        tell('result', f'evaluation at {job.global_counter}: {result}')
        if not has_told_unused:
            tell('unused', unused_for_evaluation())
            has_told_unused = True
    log.close()
    env.close()


def _next_job(jobs: Any) -> EvalJob:
    """The next request; 'stop' if the trainer is gone."""
    while not processes.is_orphan():
        try:
            return EvalJob(*jobs.get(timeout=processes.POLL_SECONDS))
        except queue.Empty:
            continue
    return EvalJob('stop')
