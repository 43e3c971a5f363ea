"""``create_environment``: what a run's environments are made by."""
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from alfx import context as run_context
from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.described_environment import NO_ENVIRONMENT, DescribedEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.multitask_wrappers import BatchEnvironmentWrapper
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.seeding import derived_seed
from alfx.environments.suite_gym import VectorEnvCtor
from alfx.environments.vector_env import SerialVectorEnv

_log = logging.getLogger(__name__)
_VERY_MANY = 10_000  # environments
EnvLoadFn = Callable[..., Any]


@gin_utils.configurable
def create_environment(env_name: str | Sequence[str] = 'CartPole-v1', env_load_fn: EnvLoadFn = suite_gym.load,
                       eval_env_load_fn: EnvLoadFn | None = None, for_evaluation: bool = False,
                       num_parallel_environments: int = 30, batch_size_per_env: int | None = None,
                       eval_batch_size_per_env: int | None = None, nonparallel: bool = False, flatten: bool = True,
                       start_serially: bool = True, num_spare_envs: int = 0, torch_num_threads_per_env: int = 1,
                       parallel_environment_ctor: Callable[..., Any] = ProcessVectorEnv, seed: int | None = None,
                       batched_wrappers: Sequence[Callable[[AlfEnvironment], AlfEnvironment]] = (),
                       max_restarts: int = 0, context: str | None = None, worker_timeout: float | None = None,
                       only_described: bool = False,
                       described_by: Callable[[int], AlfEnvironment] | None = None) -> AlfEnvironment:
    """``num_parallel_environments`` environments as one batch.

    What ``env_load_fn`` may be:

    - A function with the arguments ``batch_size`` and ``vector_env``, such as ``suite_gym.load``: it makes the whole
      batch; ``vector_env`` turns constructors of gymnasium environments into a vector environment.
    - A function with the argument ``batch_size`` only: it makes a batch of its own kind, in this process.
    - Any other function is called once for each environment, with the number of the environment if it has an argument
      ``env_id``. It returns a ``gymnasium.Env``; or, with ``nonparallel``, an :class:`AlfEnvironment`.

    Args:
        env_name: first argument of ``env_load_fn``; a list of names for ``MultitaskWrapper.load``; or 'offline': there
            is no environment, and a run that learns from datasets alone has its specs from these.
        env_load_fn: see above.
        eval_env_load_fn: used instead with ``for_evaluation``; ``None``: the same. In a scope that begins with
            ``evaluation/``, bindings that nothing uses are reported after the first evaluation, not before.
        for_evaluation: environments for evaluation: other random numbers from the same seed.
        num_parallel_environments: ``B``; of all processes together, where several train as one.
        batch_size_per_env: how many environments one process steps; ``None``: 1.
        eval_batch_size_per_env: used instead with ``for_evaluation``; ``None``: the same.
        nonparallel: step all environments one after the other in this process; faster where a step is short, as in
            classic control.
        flatten: must be True: steps travel as flat arrays in shared memory.
        start_serially: wait for each process to be ready before the next is started.
        num_spare_envs: must be 0: a process that dies is replaced by a new one.
        torch_num_threads_per_env: threads of torch in each process.
        parallel_environment_ctor: what makes the parallel vector environment; anything but ``ProcessVectorEnv`` gets
            only the constructors.
        seed: each environment gets its own stream of random numbers from it; ``None``: unpredictable ones.
        batched_wrappers: wrappers around the whole batch, innermost first.
        max_restarts: how often each environment may be made anew after it raised or its process died.
        context: how processes are started: 'fork', 'forkserver' or 'spawn'; ``None``: 'fork' where there is it.
        worker_timeout: seconds after which a process that gives no answer counts as dead; ``None``: never. In any case
            the log names an environment that has not returned for a minute.
        only_described: make one environment, and close it: what is returned has the specs and the size of the batch,
            and cannot be stepped. For a process that lets others act.
        described_by: with ``env_name='offline'``, makes what has the specs of so many environments.

    Raises:
        EnvironmentLoadError: an unknown name, a missing package, an argument that is not supported.
        UnsupportedSpaceError: a space has no tensor spec.
        EnvironmentStepError: a constructor raised.
    """
    _refuse(flatten, num_spare_envs, num_parallel_environments)
    if env_name == NO_ENVIRONMENT:
        return _described(described_by, num_parallel_environments)
    if num_parallel_environments >= _VERY_MANY:
        _log.warning('create_environment.num_parallel_environments = %d: making so many takes long, unless they batch '
                     'by themselves', num_parallel_environments)
    if for_evaluation:
        env_load_fn = eval_env_load_fn or env_load_fn
        batch_size_per_env = eval_batch_size_per_env or batch_size_per_env
    else:
        num_parallel_environments = _own_share(num_parallel_environments)
    if nonparallel:
        if batch_size_per_env not in (None, 1, num_parallel_environments):
            raise EnvironmentLoadError(f'batch_size_per_env={batch_size_per_env}: with nonparallel=True there are no '
                                       'other processes that could step several environments each; leave it out')
        vector_env: VectorEnvCtor = partial(SerialVectorEnv, max_restarts=max_restarts)
    elif getattr(parallel_environment_ctor, '__name__', '') != ProcessVectorEnv.__name__:
        vector_env = parallel_environment_ctor
    else:
        vector_env = partial(parallel_environment_ctor, envs_per_worker=batch_size_per_env or 1,
                             max_restarts=max_restarts, start_serially=start_serially,
                             torch_num_threads=torch_num_threads_per_env, context=context, timeout=worker_timeout)
    if only_described:
        with _load(env_name, env_load_fn, 1, SerialVectorEnv, True) as env:
            for wrapper in batched_wrappers:
                env = wrapper(env)
            return DescribedEnvironment(env, num_parallel_environments)
    env = _load(env_name, env_load_fn, num_parallel_environments, vector_env, nonparallel)
    for wrapper in batched_wrappers:
        env = wrapper(env)
    env.seed(derived_seed(seed, 1) if for_evaluation else seed)
    return env


def _described(described_by: Callable[[int], AlfEnvironment] | None, count: int) -> AlfEnvironment:
    if described_by is None:
        raise EnvironmentLoadError(f"create_environment.env_name = '{NO_ENVIRONMENT}': there is nothing to act in, "
                                   'only datasets to train on (TrainerConfig.offline_buffer_dir); name an environment, '
                                   "for instance by --conf_param \"create_environment.env_name='Pendulum-v1'\"")
    return described_by(count)


def _own_share(num_parallel_environments: int) -> int:
    """How many environments this process has, where several train together; from now on it numbers its own."""
    ranks = run_context.get_ranks()
    if ranks is None:
        return num_parallel_environments
    share = ranks.share('create_environment', 'num_parallel_environments', num_parallel_environments)
    run_context.set_first_environment(ranks.rank * share)
    return share


def _refuse(flatten: bool, num_spare_envs: int, num_parallel_environments: int) -> None:
    if num_parallel_environments < 1:
        raise EnvironmentLoadError('create_environment.num_parallel_environments: expected at least 1, found '
                                   f'{num_parallel_environments}')
    if not flatten:
        raise EnvironmentLoadError('create_environment.flatten=False is not supported: steps travel as flat arrays in '
                                   'shared memory')
    if num_spare_envs:
        raise EnvironmentLoadError(f'create_environment.num_spare_envs={num_spare_envs} is not supported: a process '
                                   'that dies is replaced by a new one (create_environment.max_restarts)')


def _load(env_name: Any, env_load_fn: EnvLoadFn, count: int, vector_env: VectorEnvCtor,
          nonparallel: bool) -> AlfEnvironment:
    accepts = _accepted_arguments(env_load_fn)
    if 'batch_size' in accepts:
        if 'vector_env' in accepts:
            env = env_load_fn(env_name, batch_size=count, vector_env=vector_env)
        else:
            if not nonparallel:
                _log.info('%s makes its own batch of environments, in this process', _function_name(env_load_fn))
            env = env_load_fn(env_name, batch_size=count)
        if not isinstance(env, AlfEnvironment) or env.batch_size != count:
            raise EnvironmentLoadError(f'{_function_name(env_load_fn)}: expected an AlfEnvironment of batch size '
                                       f'{count}, found {env}')
        return env
    first = run_context.first_environment()
    env_fns = [partial(env_load_fn, env_name, **({'env_id': i} if 'env_id' in accepts else {}))
               for i in range(first, first + count)]
    if nonparallel:
        envs = [env_fn() for env_fn in env_fns]
        if all(isinstance(env, AlfEnvironment) for env in envs):
            return envs[0] if count == 1 else BatchEnvironmentWrapper(envs)
        if all(isinstance(env, gymnasium.Env) for env in envs):
            return suite_gym.wrap_env(vector_env([_Once(env, env_fn) for env, env_fn in zip(envs, env_fns)]))
        raise EnvironmentLoadError(f'{_function_name(env_load_fn)}: expected a gymnasium.Env or an AlfEnvironment, '
                                   f'found a {type(envs[0]).__name__}')
    return suite_gym.wrap_env(vector_env([partial(_gym_env, env_fn, _function_name(env_load_fn))
                                          for env_fn in env_fns]))


class _Once:
    """A constructor that hands out an environment that was made already, then makes new ones."""

    def __init__(self, env: gymnasium.Env, env_fn: Callable[[], gymnasium.Env]):
        self._env: gymnasium.Env | None = env
        self._env_fn = env_fn

    def __call__(self) -> gymnasium.Env:
        env, self._env = self._env, None
        return self._env_fn() if env is None else env


def _gym_env(env_fn: Callable[[], Any], function_name: str) -> gymnasium.Env:
    env = env_fn()
    if not isinstance(env, gymnasium.Env):
        raise EnvironmentLoadError(f'{function_name}: expected a gymnasium.Env, found a {type(env).__name__}; a '
                                   'function that makes an AlfEnvironment needs an argument batch_size, or '
                                   'nonparallel=True')
    return env


def _accepted_arguments(function: Callable[..., Any]) -> set[str]:
    """The names that ``function`` takes as keywords and that are not bound already."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _function_name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return f'{getattr(function, "__module__", "")}.{getattr(function, "__name__", function)}'


@gin_utils.configurable
def load_with_random_max_episode_steps(env_name: str, env_load_fn: EnvLoadFn = suite_gym.load, min_steps: int = 200,
                                       max_steps: int = 250, batch_size: int = 1,
                                       vector_env: VectorEnvCtor = SerialVectorEnv,
                                       seed: int | None = None) -> AlfEnvironment:
    """A batch of environments with different time limits, so that their episodes do not end in step.

    Args:
        env_name: first argument of ``env_load_fn``.
        env_load_fn: takes ``max_episode_steps`` as a list, ``batch_size`` and ``vector_env``, as ``suite_gym.load``.
        min_steps: least number of steps.
        max_steps: greatest number of steps.
        batch_size: ``B``.
        vector_env: makes a gymnasium vector environment of constructors.
        seed: of the time limits.
    """
    if not 1 <= min_steps <= max_steps:
        raise EnvironmentLoadError('load_with_random_max_episode_steps: expected 1 <= min_steps <= max_steps, found '
                                   f'{min_steps} and {max_steps}')
    limits = np.random.default_rng(seed).integers(min_steps, max_steps + 1, batch_size)
    return env_load_fn(env_name, max_episode_steps=limits.tolist(), batch_size=batch_size, vector_env=vector_env)
