"""A vector environment whose environments run in other processes, one or several in each.

This is the parent's side: starting, messaging, replacing and ending the processes. The workers' side and the shared
memory are in :mod:`alfx.environments.worker`.
"""
import contextlib
import logging
import multiprocessing
import pickle
import time
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle
import gin
import numpy as np

from alfx.environments.environment_errors import EnvironmentLoadError, EnvironmentStepError
from alfx.environments.environment_group import Buffers, EnvFn, EnvSpaces, Info
from alfx.environments.seeding import process_seed
from alfx.environments.spaces import flatten_sample, unflatten_sample
from alfx.environments.vector_env import SupervisedVectorEnv, environment_name, goal_reward_fn
from alfx.environments.worker import COMMAND, DONE, ERROR, STEP_0, STEP_1, SharedSteps, WorkerArguments, work
from alfx.gin_utils import Count, configurable
from alfx.utils import processes
from alfx.utils.processes import Child

_log = logging.getLogger(__name__)
_DEAD = (EOFError, BrokenPipeError, ConnectionResetError)


class _WorkerDied(Exception):
    """A worker ended without an answer, or did not answer in time; the message says which."""


class _Worker(Child):
    """Handle of one worker process in the parent."""

    def __init__(self, context: Any, arguments: WorkerArguments, timeout: float | None):
        self.rows = arguments.rows
        self._name, self._call, self._timeout = arguments.name, 'its constructor', timeout
        self._unread = 1  # the worker sends a message when it is ready
        super().__init__(context, work, (arguments, ), f'{arguments.name}[{self.rows.start}:{self.rows.stop}]')

    def current_call(self) -> str:
        """Return the worker's environments and the call they are in, for messages."""
        first, last = self.rows.start, self.rows.stop - 1
        which = f'environment {first}' if first == last else f'one of environments {first} to {last}'
        return f'{which} of {self._name!r} in {self._call}'

    def send(self, message: bytes, call: str = 'step()') -> None:
        """Send a message; first drop answers to earlier messages that an interrupt left unread."""
        while self._unread:
            self.receive()
        self._call = call
        try:
            self.pipe.send_bytes(message)
        except OSError:
            raise _WorkerDied(f'its process {self.ending()}') from None
        self._unread += 1

    def command(self, name: str, *arguments: Any) -> None:
        """Send a command with its arguments."""
        self.send(COMMAND + pickle.dumps((name, arguments)), f'{name}()')

    def receive(self) -> Any:
        """Return the answer to the oldest message.

        Raises:
            EnvironmentStepError: an environment raised in the worker, which has ended.
            _WorkerDied: the worker died.
        """
        try:
            if self._timeout is not None and not self.pipe.poll(self._timeout):
                self.end(0.0)
                raise _WorkerDied(f'its process did not answer {self._call} within {self._timeout} s')
            answer = self.pipe.recv_bytes()
        except _DEAD:
            self._unread = 0
            raise _WorkerDied(f'its process {self.ending()}') from None
        self._unread -= 1
        if answer == DONE:
            return None
        if answer[:1] == ERROR:
            raise pickle.loads(answer[1:])
        return pickle.loads(answer[1:])

    def ask_to_end(self) -> None:
        """Ask the worker to end, if it is still listening."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(COMMAND + pickle.dumps(('close', ())))


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.ask_to_end()
    deadline = time.monotonic() + processes.GRACE_SECONDS
    for worker in workers:
        worker.end(deadline)
    workers.clear()


@configurable
class ProcessVectorEnv(SupervisedVectorEnv):
    """Vector environment whose environments run in other processes.

    Args:
        env_fns: constructors of gymnasium environments.
        envs_per_worker: number of environments in each process; the last process may have fewer.
        max_restarts: how many times each environment may be recreated after it raised or its process died. The
            environment then yields its last known observation, reward 0 and a truncation, and next a reset of the new
            environment.
        name: name of the environments in messages; '': the id of the first.
        start_serially: wait for each process to be ready before the next is started.
        torch_num_threads: torch threads of each worker, if torch is imported there.
        context: start method of the processes: 'fork', 'forkserver' or 'spawn'; ``None``: 'fork' where available. With
            'fork' the processes inherit everything. With the other two, ``env_fns`` are cloudpickled and the bindings
            of the conf are sent along, but registrations at run time (gymnasium ids) are lost.
        timeout: seconds after which a worker that does not answer counts as dead; ``None``: never.

    Raises:
        EnvironmentLoadError: the environments have different spaces.
        UnsupportedSpaceError: a space has no tensor spec.
        EnvironmentStepError: in all methods: an environment raised and may not be restarted. All processes have been
            ended.
    """

    owns_arrays = True
    _hang_hint = 'set create_environment.worker_timeout to end such a process after a number of seconds'

    def __init__(self, env_fns: Sequence[EnvFn], envs_per_worker: Count = 1, max_restarts: int = 0, name: str = '',
                 start_serially: bool = True, torch_num_threads: int = 1, context: str | None = None,
                 timeout: float | None = None):
        if not env_fns:
            raise EnvironmentLoadError('expected at least one environment, found none')
        example = env_fns[0]()  # its spaces determine the size of the shared memory
        env_spaces = EnvSpaces.of(example)
        super().__init__(env_spaces, len(env_fns), example.metadata, example.render_mode,
                         name or environment_name(example))
        self.goal_reward_fn = goal_reward_fn(example)
        example.close()
        inherits = context in (None, 'fork') and 'fork' in multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context('fork' if inherits else context or 'spawn')
        self._inherits = inherits
        self._env_fns, self._env_spaces = list(env_fns), env_spaces
        self._max_restarts, self._num_threads, self._timeout = max_restarts, torch_num_threads, timeout
        self._shared = SharedSteps(env_spaces, self.num_envs)
        self._results = [self._shared.buffers(0), self._shared.buffers(1)]
        self._actions = self._shared.actions()
        self._current = 0
        self._pending = np.ones(self.num_envs, bool)
        self._seeds: list[int | None] = [None] * self.num_envs
        self._restarts = [0] * self.num_envs
        self._stepping = False
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end_all, self._workers)
        with self._ending_all_on_error(), self._watch:
            self._start_all(envs_per_worker, start_serially)

    def _start_all(self, envs_per_worker: int, serially: bool) -> None:
        for start in range(0, self.num_envs, envs_per_worker):
            self._workers.append(self._start(slice(start, min(start + envs_per_worker, self.num_envs))))
            if serially:
                self._receive(self._workers[-1])
        if not serially:
            for worker in self._workers:
                self._receive(worker)

    def _start(self, rows: slice) -> _Worker:
        env_fns: Any = self._env_fns[rows]
        arguments = WorkerArguments(env_fns if self._inherits else cloudpickle.dumps(env_fns), rows, self._env_spaces,
                                    self._shared, self.name, self._max_restarts, self._info_keys, self._num_threads,
                                    '' if self._inherits else gin.config_str(), process_seed(rows.start))
        return _Worker(self._context, arguments, self._timeout)

    # Stepping --------------------------------------------------------------------------------------------------

    def _reset(self, mask: np.ndarray, seeds: list[int | None] | None,
               options: dict[str, Any] | None) -> tuple[Buffers, list[Info]]:
        for i in np.flatnonzero(mask):
            if seeds is not None and seeds[i] is not None:
                self._seeds[i] = seeds[i]
        self._current = 1 - self._current

        def message(worker: _Worker) -> tuple:
            rows = np.flatnonzero(mask[worker.rows]).tolist()
            return 'reset', self._current, rows, None if seeds is None else seeds[worker.rows], options

        self._stepping = False
        with self._ending_all_on_error():
            infos = self._exchange_restarting(lambda worker: worker.command(*message(worker)), mask)
        return self._finish(infos)

    def _step(self, actions: Any) -> tuple[Buffers, list[Info]]:
        for shared, array in zip(self._actions, flatten_sample(self.single_action_space, actions)):
            shared[:] = array
        self._current = 1 - self._current
        message = STEP_1 if self._current else STEP_0
        self._stepping = True
        with self._ending_all_on_error():
            infos = self._exchange_restarting(lambda worker: worker.send(message), self._pending)
        return self._finish(infos)

    def _finish(self, infos: list[Info]) -> tuple[Buffers, list[Info]]:
        observations, *rest = self._results[self._current]
        leaves = [leaf.copy() for leaf in flatten_sample(self.single_observation_space, observations)]
        out = Buffers(unflatten_sample(self.single_observation_space, leaves), *(array.copy() for array in rest))
        self._pending = out.terminations | out.truncations
        return out, infos

    def _exchange_restarting(self, send: Any, resets: np.ndarray) -> list[Info]:
        """Send a message to every worker and collect the answers; a worker that dies is replaced.

        Args:
            send: sends the message to a worker.
            resets: environments that the message resets rather than steps, bool ``[num_envs]``.
        """
        dead: dict[int, str] = {}
        for k, worker in enumerate(self._workers):
            try:
                send(worker)
            except _WorkerDied as death:
                dead[k] = str(death)
        infos: list[Info] = []
        for k, worker in enumerate(self._workers):
            if k not in dead:
                try:
                    first, self._watch.current_call = worker.rows.start, worker.current_call
                    infos += [(first + i, info) for i, info in worker.receive() or ()]
                except _WorkerDied as death:
                    dead[k] = str(death)
        for k, reason in dead.items():
            infos += self._replace(k, reason, resets)
        return infos

    def _replace(self, k: int, reason: str, resets: np.ndarray) -> list[Info]:
        """Start worker ``k`` again and give its environments a result of the current step."""
        rows = self._workers[k].rows
        self._workers[k].end(0.0)
        lost = range(rows.start, rows.stop)
        for i in lost:
            self._restarts[i] += 1
        in_partial_reset = not self._stepping and not all(resets[i] for i in lost)
        if in_partial_reset or max(self._restarts[i] for i in lost) > self._max_restarts:
            raise EnvironmentStepError(rows.start, self.name, 'its worker process', reason, hint=_hint(lost))
        _log.warning('the process of environments %d to %d of %s is restarted: %s', lost[0], lost[-1], self.name,
                     reason)
        worker = self._workers[k] = self._start(rows)
        self._receive(worker)
        worker.command('inherit', [self._seeds[i] for i in lost], [self._restarts[i] for i in lost])
        self._receive(worker)
        # environments that are not reset keep their last known observation
        worker.command('reset', self._current, [i - rows.start for i in lost if resets[i]], None, None)
        infos = [(rows.start + i, info) for i, info in self._receive(worker)]
        out = self._results[self._current]
        ended = [i for i in lost if not resets[i]]
        out.rewards[ended], out.terminations[ended], out.truncations[ended] = 0, False, True
        return infos

    # Messages to workers ---------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker) -> Any:
        self._watch.current_call = worker.current_call
        try:
            return worker.receive()
        except _WorkerDied as death:
            rows = range(worker.rows.start, worker.rows.stop)
            raise EnvironmentStepError(rows[0], self.name, 'its worker process', str(death), hint=_hint(rows)) from None

    def _ask(self, workers: Sequence[_Worker], name: str, *arguments: Any) -> list[Any]:
        """Return the answers of ``workers`` to a command; no worker is restarted."""
        self._assert_open()
        with self._ending_all_on_error(), self._watch:
            try:
                for worker in workers:
                    worker.command(name, *arguments)
            except _WorkerDied as death:
                raise EnvironmentStepError(worker.rows.start, self.name, 'its worker process', str(death)) from None
            return [self._receive(worker) for worker in workers]

    def _set_info_keys(self, keys: tuple[str, ...] | None) -> None:
        self._ask(self._workers, 'info_keys', keys)

    def request_reset(self, mask: np.ndarray) -> list[Info]:
        self._pending = self._pending | mask
        infos: list[Info] = []
        for worker in self._workers:
            rows, first = np.flatnonzero(mask[worker.rows]).tolist(), worker.rows.start
            if rows:
                infos += [(first + i, info) for i, info in self._ask([worker], 'request_reset', rows)[0]]
        return infos

    def get_states(self, count: int | None = None) -> list[Any] | None:
        if self._busy:
            return None
        workers = [worker for worker in self._workers if count is None or worker.rows.start < count]
        states = [state for answer in self._ask(workers, 'get_states', count) for state in answer][:count]
        return None if any(state is None for state in states) else states

    def set_states(self, states: list[Any]) -> None:
        if self._pending.all():  # perhaps never reset: an environment may create parts of itself in reset()
            self.reset()
        for worker in self._workers:
            if reason := self._ask([worker], 'set_states', states[worker.rows])[0]:
                raise ValueError(reason)
        self._pending = np.array([state[1] for state in states], bool)
        self._seeds, self._restarts = ([state[i] for state in states] for i in (3, 4))
        self._busy = False

    @property
    def restarts(self) -> np.ndarray:
        return np.array([count for answer in self._ask(self._workers, 'restarts') for count in answer])

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(value for answer in self._ask(self._workers, 'call', name, args, kwargs) for value in answer)

    def render_first(self) -> Any:
        return self._ask(self._workers[:1], 'render')[0]

    # Ending ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ending_all_on_error(self) -> Any:
        try:
            yield
        except (EnvironmentStepError, EnvironmentLoadError):
            self.close()
            raise

    def close_extras(self, **kwargs: Any) -> None:
        """End all processes; those that do not end within ``processes.GRACE_SECONDS`` are killed."""
        if hasattr(self, '_finalizer'):  # older gymnasium also closes an object whose constructor failed
            self._finalizer()

    @property
    def worker_pids(self) -> list[int | None]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]


def _hint(rows: range) -> str:
    together = '' if len(rows) == 1 else f'environments {rows[0]} to {rows[-1]} ran in that process; '
    return together + 'set create_environment.max_restarts to restart environments'
