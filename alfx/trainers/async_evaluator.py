"""Evaluation in a separate process while training continues.

The process is started at the first evaluation. It creates its own environments and algorithm from the conf in the run
folder and receives the weights with each request. Requests wait in a short queue: if evaluations take longer than the
training between them, training waits, so that no evaluation is skipped.
"""
import contextlib
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from alfx import context
from alfx.engine.remote.policy_state import load_policy_state, pack, policy_state, unpack
from alfx.engine.remote.remote_unroll import worker_settings
from alfx.environments.seeding import derived_seed
from alfx.runs import building
from alfx.runs.evaluator import EvalJob, EvalLog, RunEvaluator, unused_for_evaluation
from alfx.trainers.acting import worker_process
from alfx.utils import processes, random_state
from alfx.utils.processes import MessagingProcess

logger = logging.getLogger(__name__)

_MAX_WAITING = 3
_ACTING = 9  # stream of the seeds of actions that are sampled in evaluations
_MAX_STARTS = 3


class Evaluator(RunEvaluator):
    """Evaluator in a separate process.

    If the process dies, its error is logged, its pending evaluations are lost, and the next request starts a new
    process. After three deaths evaluation is disabled and training continues.

    Args:
        config: configuration of the run.
        conf_file: resolved conf of the run, from which the process creates its algorithm.
    """

    def __init__(self, config: Any, conf_file: str):
        super().__init__()
        self._config = config
        self._conf_file = conf_file
        self._process: MessagingProcess | None = None
        self._starts = 0
        self._waiting: list[int] = []  # counters of the evaluations that have been requested

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        """Request an evaluation of the current weights. Waits only if the queue of requests is full."""
        if not self._ensure_process():
            return
        job = EvalJob('eval', context.get_global_counter(), step_metrics, pack(policy_state(algorithm)),
                      context.get_all_progresses(), time.time())
        while self._is_alive():
            with contextlib.suppress(queue.Full):
                self._jobs.put(tuple(job), timeout=processes.POLL_SECONDS)
                self._waiting.append(job.global_counter)
                return

    def messages(self) -> list[str]:
        """Return log messages since the last call: results, and the death of the process."""
        self._is_alive()
        return super().messages()

    def close(self, timeout: float | None = None) -> None:
        """Wait for the requested evaluations, and stop the process.

        Args:
            timeout: maximum time to wait in seconds; None for no limit.
        """
        end = time.monotonic() + (float('inf') if timeout is None else timeout)
        stop_sent = False
        while time.monotonic() < end and self._is_alive(expected_end=stop_sent):
            stop_sent = stop_sent or self._try_to_stop()
            time.sleep(processes.POLL_SECONDS)
        if self._process is not None:
            self._process.end(end, self._collect)
            self._process = None
        if self._waiting:
            self._messages.append(f'not completed: evaluations at {", ".join(map(str, self._waiting))}')

    def _try_to_stop(self) -> bool:
        with contextlib.suppress(queue.Full):
            self._jobs.put(tuple(EvalJob('stop')), timeout=processes.POLL_SECONDS)
            return True
        return False

    def _ensure_process(self) -> bool:
        if self._is_alive():
            return True
        if self._starts >= _MAX_STARTS:
            return False
        self._starts += 1
        self._jobs = processes.SPAWN.Queue(_MAX_WAITING)
        self._jobs.cancel_join_thread()  # unread weights must not block the exit of this process
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
            again = 'evaluation is disabled' if self._starts >= _MAX_STARTS else 'the next evaluation starts a new one'
            if process.error:
                self._messages.append(f'the evaluation failed:\n{process.error}')
            self._messages.append(f'the evaluation process died: it {process.ending()}; {again}')
            logger.error(self._messages[-1])
        process.end(0.0)
        self._process = None
        self._waiting.clear()
        return False

    def _collect(self) -> None:
        assert self._process is not None, 'the process has not been started'
        for kind, content in self._process.listen():
            if kind == 'result':
                self._messages.append(content)
                del self._waiting[:1]
            else:
                self.unused_bindings = content


def _serve(tell: Callable[[str, Any], None], jobs: Any, conf_file: str, settings: dict[str, Any]) -> None:
    """Body of the evaluation process."""
    worker_process.prepare(settings)
    config = worker_process.load_config(conf_file, settings)
    env = building.create_eval_environment(config, config.num_eval_environments, nonparallel=True,
                                           renders=config.eval_video_steps > 0)
    algorithm = building.create_algorithm(config, env, trains=False)
    log, unused_sent = EvalLog(config.root_dir, config), False
    while (job := _next_job(jobs)).type != 'stop':
        context.set_global_counter(job.global_counter)
        context.update_all_progresses(job.progresses)
        random_state.set_random_seed(derived_seed(config.random_seed, _ACTING, job.global_counter))
        load_policy_state(algorithm, unpack(job.state_dict))
        result = log.evaluate(env, algorithm, config.num_eval_episodes)
        log.write(result, job.global_counter, job.step_metrics, job.walltime)
        tell('result', f'evaluation at {job.global_counter}: {result}')
        if not unused_sent:
            tell('unused', unused_for_evaluation())
            unused_sent = True
    log.close()
    env.close()


def _next_job(jobs: Any) -> EvalJob:
    """Wait for the next request and return it; 'stop' if the trainer has exited."""
    while not processes.is_orphan():
        with contextlib.suppress(queue.Empty):
            return EvalJob(*jobs.get(timeout=processes.POLL_SECONDS))
    return EvalJob('stop')
