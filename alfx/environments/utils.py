"""``create_environment``, which creates the environments of a run."""
import contextlib
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gin
import gymnasium
import numpy as np

from alfx import context as run_context
from alfx import gin_utils
from alfx.environments import gym_make, rendering, suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.described_environment import NO_ENVIRONMENT, DescribedEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.multitask_wrappers import BatchEnvironmentWrapper
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.seeding import derived_seed, process_seed
from alfx.environments.suite_gym import VectorEnvCtor
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils.settings import changeable

_log = logging.getLogger(__name__)
_MANY_ENVIRONMENTS = 10_000
EnvLoadFn = Callable[..., Any]


@gin_utils.configurable
@changeable('max_restarts', 'worker_timeout')
def create_environment(env_name: str | Callable[..., Any] | Sequence[str] = 'CartPole-v1',
                       env_load_fn: EnvLoadFn = suite_gym.load,
                       eval_env_load_fn: EnvLoadFn | None = None, for_evaluation: bool = False,
                       num_parallel_environments: int = 30, batch_size_per_env: int | None = None,
                       eval_batch_size_per_env: int | None = None, nonparallel: bool = False, flatten: bool = True,
                       start_serially: bool = True, num_spare_envs: int = 0, torch_num_threads_per_env: int = 1,
                       parallel_environment_ctor: Callable[..., Any] = ProcessVectorEnv, seed: int | None = None,
                       batched_wrappers: Sequence[Callable[[AlfEnvironment], AlfEnvironment]] = (),
                       max_restarts: int = 0, context: str | None = None, worker_timeout: float | None = None,
                       only_described: bool = False,
                       described_by: Callable[[int], AlfEnvironment] | None = None) -> AlfEnvironment:
    """Create ``num_parallel_environments`` environments as one batch.

    ``env_load_fn`` is one of the following:

    - A function with the arguments ``batch_size`` and ``vector_env``, such as ``suite_gym.load``: it creates the whole
      batch; ``vector_env`` turns constructors of gymnasium environments into a vector environment.
    - A function with the argument ``batch_size`` only: it creates its own kind of batch, in this process.
    - Any other function is called once for each environment, with the number of the environment if it has an argument
      ``env_id``, and with 'rgb_array' if it has an argument ``render_mode`` and a video is recorded. It returns a
      ``gymnasium.Env``, to which ``wrap_env`` is applied, or an :class:`AlfEnvironment` with ``nonparallel``.

    The first argument is ``env_name``, except for a function that takes no name: one without positional arguments, or
    whose first argument has a default that is not a string and no 'name' in its name, as in ``make(render_mode=None)``.

    Args:
        env_name: first argument of ``env_load_fn``: for ``suite_gym.load`` a registered id, or a class or function that
            returns a gymnasium environment; a list of names for ``MultitaskWrapper.load``; or 'offline' for a run
            without an environment, which learns from datasets alone and takes its specs from them.
        env_load_fn: see above.
        eval_env_load_fn: function for evaluation environments; ``None``: ``env_load_fn``. Unused bindings in its scope,
            or in ``evaluation/``, are reported after the first evaluation, not before.
        for_evaluation: create environments for evaluation, with other random numbers from the same seed.
        num_parallel_environments: ``B``, the total over all processes of distributed training.
        batch_size_per_env: number of environments in each process; ``None``: 1.
        eval_batch_size_per_env: the same for evaluation environments; ``None``: ``batch_size_per_env``.
        nonparallel: step all environments one after the other in this process; faster where a step is short, as in
            classic control.
        flatten: must be True: steps are exchanged as flat arrays in shared memory.
        start_serially: wait for each process to be ready before the next is started.
        num_spare_envs: must be 0: a process that dies is replaced by a new one.
        torch_num_threads_per_env: torch threads in each process.
        parallel_environment_ctor: constructor of the parallel vector environment; any other than ``ProcessVectorEnv``
            gets only the constructors of the environments.
        seed: seed from which each environment gets its own random stream; ``None``: unpredictable.
        batched_wrappers: wrappers around the whole batch, innermost first.
        max_restarts: how many times each environment may be recreated after it raised or its process died.
        context: start method of the processes: 'fork', 'forkserver' or 'spawn'; ``None``: 'fork' where available.
        worker_timeout: seconds after which a process that does not answer counts as dead; ``None``: never. In any case
            an environment that has not returned for a minute is logged.
        only_described: create one environment, close it, and return an object that has the specs and the size of the
            batch but cannot be stepped. For a process that leaves acting to other processes.
        described_by: with ``env_name='offline'``, returns an object with the specs of the given number of environments.

    Raises:
        EnvironmentLoadError: an unknown name, a missing package, an argument that is not supported.
        UnsupportedSpaceError: a space has no tensor spec.
        EnvironmentStepError: a constructor raised.
    """
    _refuse(flatten, num_spare_envs, num_parallel_environments)
    if env_name == NO_ENVIRONMENT:
        return _described(described_by, num_parallel_environments)
    if num_parallel_environments >= _MANY_ENVIRONMENTS:
        _log.warning('create_environment.num_parallel_environments = %d: creating so many environments is slow unless '
                     'they are natively batched', num_parallel_environments)
    if for_evaluation:
        env_load_fn = eval_env_load_fn or env_load_fn
        batch_size_per_env = eval_batch_size_per_env or batch_size_per_env
    else:
        num_parallel_environments = _local_environments(num_parallel_environments)
    if nonparallel:
        # evaluation steps a single environment in this process, whatever the conf sets for training
        if not for_evaluation and batch_size_per_env not in (None, 1, num_parallel_environments):
            raise EnvironmentLoadError(f'batch_size_per_env={batch_size_per_env}: with nonparallel=True there are no '
                                       'other processes that could step several environments each; remove it')
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
        raise EnvironmentLoadError(f"create_environment.env_name = '{NO_ENVIRONMENT}': there is no environment to act "
                                   'in, only datasets to train on (TrainerConfig.offline_buffer_dir); set one, for '
                                   "example with --conf_param \"create_environment.env_name='Pendulum-v1'\"")
    return described_by(count)


def _local_environments(num_parallel_environments: int) -> int:
    """Return the number of environments of this process in distributed training, and set the number of its first."""
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
        raise EnvironmentLoadError('create_environment.flatten=False is not supported: steps are exchanged as flat '
                                   'arrays in shared memory')
    if num_spare_envs:
        raise EnvironmentLoadError(f'create_environment.num_spare_envs={num_spare_envs} is not supported: a process '
                                   'that dies is replaced by a new one (create_environment.max_restarts)')


def _load(env_name: Any, env_load_fn: EnvLoadFn, count: int, vector_env: VectorEnvCtor,
          nonparallel: bool) -> AlfEnvironment:
    accepts, name = _accepted_arguments(env_load_fn), gym_make.function_name(env_load_fn)
    first_parameter = next(iter(inspect.signature(env_load_fn).parameters.values()), None)
    if callable(env_name) and first_parameter is not None and first_parameter.annotation in (str, 'str'):
        raise EnvironmentLoadError(f'create_environment.env_name: {name} expects a name, found '
                                   f'{env_name}; to load an environment from its class or function, set '
                                   'create_environment.env_load_fn = @suite_gym.load')
    takes_name = first_parameter is not None and first_parameter.kind <= first_parameter.VAR_POSITIONAL and (
        first_parameter.default is first_parameter.empty or isinstance(first_parameter.default, str)
        or 'name' in first_parameter.name)
    load: EnvLoadFn = partial(env_load_fn, env_name) if takes_name else env_load_fn
    if 'batch_size' in accepts:
        if 'vector_env' not in accepts and not nonparallel:
            _log.info('%s creates its own batch of environments, in this process', name)
        env = load(batch_size=count, **({'vector_env': vector_env} if 'vector_env' in accepts else {}))
        if not isinstance(env, AlfEnvironment) or env.batch_size != count:
            raise EnvironmentLoadError(f'{name}: expected an AlfEnvironment of batch size {count}, found {env}')
        return env
    first = run_context.first_environment()
    env_fns = [partial(load, **({'env_id': i} if 'env_id' in accepts else {})) for i in range(first, first + count)]
    if rendering.is_wanted() and _may_render(env_load_fn):
        env_fns = [partial(gym_make.make_rendered, env_fn, 'rgb_array', str(env_name)) for env_fn in env_fns]
    if nonparallel:
        envs = [env_fn() for env_fn in env_fns]
        if all(isinstance(env, AlfEnvironment) for env in envs):
            return envs[0] if count == 1 else BatchEnvironmentWrapper(envs)
        if all(isinstance(env, gymnasium.Env) for env in envs):
            return suite_gym.wrap_env([_ExistingFirst(env, env_fn) for env, env_fn in zip(envs, env_fns)],
                                      vector_env=vector_env)
        raise EnvironmentLoadError(f'{name}: expected a gymnasium.Env or an AlfEnvironment, '
                                   f'found a {type(envs[0]).__name__}')
    return suite_gym.wrap_env([partial(_gym_env, env_fn, name) for env_fn in env_fns], vector_env=vector_env)


class _ExistingFirst:
    """A constructor that first returns an existing environment and creates new ones afterwards."""

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
                                   'function that creates an AlfEnvironment needs an argument batch_size, or '
                                   'nonparallel=True')
    return env


def _may_render(function: EnvLoadFn) -> bool:
    """Return whether ``function`` has an argument ``render_mode`` that neither its default nor the conf sets."""
    parameter = inspect.signature(function).parameters.get('render_mode')
    if (not gym_make.accepts_render_mode(function) or
            parameter is not None and parameter.default not in (None, inspect.Parameter.empty)):
        return False
    with contextlib.suppress(ValueError):  # it is not bound
        gin.query_parameter(f'{gym_make.function_name(function)}.render_mode')
        return False
    return True


def _accepted_arguments(function: Callable[..., Any]) -> set[str]:
    """Return the names that ``function`` accepts as keywords."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


@gin_utils.configurable
def load_with_random_max_episode_steps(env_name: Any, env_load_fn: EnvLoadFn = suite_gym.load, min_steps: int = 200,
                                       max_steps: int = 250, batch_size: int = 1,
                                       vector_env: VectorEnvCtor = SerialVectorEnv,
                                       seed: int | None = None) -> AlfEnvironment:
    """Create a batch of environments with different time limits, so that their episodes do not end in lockstep.

    Args:
        env_name: first argument of ``env_load_fn``.
        env_load_fn: takes ``max_episode_steps`` as a list, ``batch_size`` and ``vector_env``, as ``suite_gym.load``.
        min_steps: minimum number of steps.
        max_steps: maximum number of steps.
        batch_size: ``B``.
        vector_env: creates a gymnasium vector environment from constructors.
        seed: seed of the time limits; ``None``: determined by the seed of the run.
    """
    if not 1 <= min_steps <= max_steps:
        raise EnvironmentLoadError('load_with_random_max_episode_steps: expected 1 <= min_steps <= max_steps, found '
                                   f'{min_steps} and {max_steps}')
    generator = np.random.default_rng(process_seed(0) if seed is None else seed)
    limits = generator.integers(min_steps, max_steps + 1, batch_size)
    return env_load_fn(env_name, max_episode_steps=limits.tolist(), batch_size=batch_size, vector_env=vector_env)
