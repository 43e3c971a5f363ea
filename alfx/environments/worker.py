"""Worker process of a :class:`~alfx.environments.process_vector_env.ProcessVectorEnv`, and the memory that it shares.

Observations, rewards, flags and actions are in shared memory; a pipe carries one byte per step in each direction.
Results are written to two sets of buffers in turn, so the last known observation survives a worker that dies while it
writes.
"""
import contextlib
import math
import pickle
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gin
import numpy as np
import torch
from gymnasium import spaces

from alfx.environments.environment_errors import EnvironmentLoadError, EnvironmentStepError
from alfx.environments.environment_group import Buffers, EnvFn, EnvironmentGroup, EnvSpaces
from alfx.environments.spaces import flatten_sample, flatten_space, unflatten_sample
from alfx.tensor_specs import TensorSpec
from alfx.utils import random_state
from alfx.utils.shared_memory import SharedTensors

# Answers of a worker: done; done with infos or a result (a pickle follows); an environment raised (a pickle follows).
DONE, RESULT, ERROR = b'd', b'r', b'e'
# Messages of the parent: step into buffers 0 or 1; any other command (a pickle follows).
STEP_0, STEP_1, COMMAND = b'0', b'1', b'c'


class SharedSteps:
    """Shared memory of the parent and all workers: two sets of result buffers, and the actions.

    Args:
        env_spaces: spaces of one environment.
        count: number of environments.

    Raises:
        ConfError: there is too little shared memory.
    """

    def __init__(self, env_spaces: EnvSpaces, count: int):
        self._spaces, self._count = env_spaces, count
        observation_leaves, action_leaves = ([(tuple(leaf.shape or ()), np.dtype(leaf.dtype)) for _, leaf in
                                              flatten_space(space)] for space in env_spaces[:2])
        result = [*observation_leaves, (env_spaces.reward_shape, np.dtype(np.float64)), ((), np.dtype(bool)),
                  ((), np.dtype(bool))]
        self._parts = result, result, action_leaves
        self._memory = [SharedTensors([TensorSpec((count, math.prod(shape) * dtype.itemsize), torch.uint8)
                                       for shape, dtype in part], f'the exchange with {count} environments')
                        for part in self._parts]

    def _arrays(self, part: int, rows: slice) -> list[np.ndarray]:
        return [memory.numpy().reshape(-1).view(dtype).reshape(self._count, *shape)[rows]
                for memory, (shape, dtype) in zip(self._memory[part].tensors, self._parts[part])]

    def buffers(self, which: int, rows: slice = slice(None)) -> Buffers:
        """Return result buffers 0 or 1 of the environments ``rows``."""
        *observations, rewards, terminations, truncations = self._arrays(which, rows)
        return Buffers(unflatten_sample(self._spaces.observation, observations), rewards, terminations, truncations)

    def actions(self, rows: slice = slice(None)) -> list[np.ndarray]:
        """Return the leaves of the actions of the environments ``rows``."""
        return self._arrays(2, rows)


class WorkerArguments(NamedTuple):
    """Arguments of a worker process.

    Fields:
        env_fns: the constructors, cloudpickled for a process that does not inherit them.
        rows: indices of the environments in the batch.
        spaces: spaces that the environments must have.
        shared: the shared memory.
        name: name of the environments in messages.
        max_restarts: restarts allowed for each environment, less those already used.
        info_keys: keys of the infos that are kept.
        num_threads: number of torch threads.
        conf: gin configuration for processes that do not inherit it; '' if they do.
        seed: seed of the random number generators of the process while it creates its environments.
    """

    env_fns: bytes | list[EnvFn]
    rows: slice
    spaces: EnvSpaces
    shared: SharedSteps
    name: str
    max_restarts: int
    info_keys: tuple[str, ...] | None
    num_threads: int
    conf: str
    seed: int


def work(pipe: Connection, arguments: WorkerArguments) -> None:
    """Serve the parent in the worker process until it sends 'close' or ends."""
    torch.set_num_threads(arguments.num_threads)
    random_state.set_random_seed(arguments.seed)
    with _Reporting(pipe, arguments.name):
        worker = _Worker(arguments)
        pipe.send_bytes(DONE)
        with contextlib.closing(worker.group):
            _serve(pipe, worker)


class _Reporting:
    """Context manager that sends the error that ends the worker to the parent."""

    def __init__(self, pipe: Connection, name: str):
        self._pipe, self._name = pipe, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> bool:
        # EOFError and OSError of the pipe: the parent has ended or no longer listens
        if isinstance(error, Exception) and not isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
            if not isinstance(error, (EnvironmentStepError, EnvironmentLoadError)):
                error = EnvironmentStepError(None, self._name, 'its worker process', f'{type(error).__name__}: {error}',
                                             ''.join(traceback.format_exception(error)))
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(ERROR + pickle.dumps(error))
        self._pipe.close()
        return isinstance(error, Exception)


class _Worker:
    """Environments of one worker and its rows of the shared memory."""

    def __init__(self, arguments: WorkerArguments):
        env_fns = arguments.env_fns
        if isinstance(env_fns, bytes):
            env_fns = pickle.loads(env_fns)
            gin.parse_config(arguments.conf, skip_unknown=True)
        self.group = EnvironmentGroup(env_fns, arguments.rows.start, arguments.name, arguments.max_restarts,
                                      arguments.info_keys, arguments.spaces, owns_process=True)
        self._buffers = [arguments.shared.buffers(which, arguments.rows) for which in (0, 1)]
        self._actions = arguments.shared.actions(arguments.rows)
        self._action_space = arguments.spaces.action
        self._flat = not isinstance(self._action_space, (spaces.Dict, spaces.Tuple))

    def step(self, which: int) -> list:
        """Step the environments and write to result buffers ``which``."""
        # copies: an environment may write to its action or keep it
        columns = [actions.copy() for actions in self._actions]
        rows = list(columns[0]) if self._flat else [unflatten_sample(self._action_space, row) for row in zip(*columns)]
        return self.group.step(rows, self._buffers[which], self._buffers[1 - which])

    def reset(self, which: int, rows: list[int], seeds: list[int | None] | None, options: dict | None) -> list:
        """Reset the environments ``rows``; the rows of the others are copied from the other buffers."""
        out, last = self._buffers[which], self._buffers[1 - which]
        observation_space = self.group.envs[0].observation_space
        for new, old in zip([*flatten_sample(observation_space, out.observations), *out[1:]],
                            [*flatten_sample(observation_space, last.observations), *last[1:]]):
            new[:] = old
        return self.group.reset(rows, seeds, options, out)


def _serve(pipe: Connection, worker: _Worker) -> None:
    while True:
        message = pipe.recv_bytes()
        if message == STEP_0 or message == STEP_1:
            infos = worker.step(message == STEP_1)
            pipe.send_bytes(RESULT + pickle.dumps(infos) if infos else DONE)
            continue
        name, arguments = pickle.loads(message[1:])
        if name == 'close':
            pipe.send_bytes(DONE)
            return
        group = worker.group
        if name == 'info_keys':
            group.info_keys, result = arguments[0], None
        elif name == 'restarts':
            result = group.restarts
        elif name == 'render':
            result = group.render_first()
        else:
            result = (getattr(worker, name, None) or getattr(group, name))(*arguments)
        pipe.send_bytes(RESULT + pickle.dumps(result))
