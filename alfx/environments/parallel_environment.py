"""Gymnasium environments in other processes as one :class:`~alfx.environments.alf_environment.AlfEnvironment`."""
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.gin_utils import configurable


@configurable
class ParallelAlfEnvironment(GymVectorEnvironment):
    """A :class:`GymVectorEnvironment` around a :class:`ProcessVectorEnv`.

    Args:
        env_constructors: constructors of gymnasium environments.
        start_serially: wait for each process to be ready before the next is started.
        blocking: must be False: all processes step at the same time.
        flatten: must be True: steps are exchanged as flat arrays in shared memory.
        num_spare_envs_for_reload: must be 0: a process that dies is replaced by a new one (``max_restarts``).
        torch_num_threads_per_env: torch threads in each process.
        max_restarts: how many times each environment may be recreated after it raised or its process died.
        envs_per_worker: number of environments in each process.
        **kwargs: further arguments of :class:`GymVectorEnvironment`.

    Raises:
        EnvironmentLoadError: an argument has a value that is not supported.
    """

    def __init__(self, env_constructors: Sequence[Callable[[], gymnasium.Env]], start_serially: bool = True,
                 blocking: bool = False, flatten: bool = True, num_spare_envs_for_reload: int = 0,
                 torch_num_threads_per_env: int = 1, max_restarts: int = 0, envs_per_worker: int = 1, **kwargs: Any):
        if blocking or not flatten or num_spare_envs_for_reload:
            raise EnvironmentLoadError('ParallelAlfEnvironment: expected blocking=False, flatten=True and '
                                       f'num_spare_envs_for_reload=0, found {blocking}, {flatten} and '
                                       f'{num_spare_envs_for_reload}: processes step at the same time, through shared '
                                       'memory, and are replaced when they die (max_restarts)')
        super().__init__(ProcessVectorEnv(env_constructors, envs_per_worker, max_restarts,
                                          start_serially=start_serially,
                                          torch_num_threads=torch_num_threads_per_env), **kwargs)
