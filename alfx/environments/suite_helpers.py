"""Helpers shared by the suites of environments that alfx defines itself: ``load``, which creates a batch by name.

The environments are gymnasium classes in pure Python. Each has ``num_steps``, the length of an episode.
"""
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError, nearest
from alfx.environments.gym_make import EnvWrapper
from alfx.environments.suite_gym import AlfWrapper, VectorEnvCtor
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils.value_checks import Count, StepLimit

Constructor = Callable[..., Any]
ResetResult = tuple[Any, dict[str, Any]]  # observation and info


class SmallEnv(gymnasium.Env):
    """Base class of environments that are not rendered and whose infos are empty at the start of an episode."""

    metadata: dict[str, Any] = {'render_modes': []}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self._begin()
        return self._observe(), {}

    def _begin(self) -> None:
        """Draw the first state of an episode."""

    def _observe(self) -> Any:
        """Return the observation of a step, as new arrays."""
        raise NotImplementedError(f'{type(self).__name__}._observe')


def _make(constructor: Constructor, max_episode_steps: StepLimit | None, env_args: Mapping[str, Any],
          wrappers: Sequence[EnvWrapper]) -> gymnasium.Env:
    try:
        inspect.signature(constructor).bind(**env_args)
    except TypeError as error:
        raise EnvironmentLoadError(f'env_args: {error}') from error
    env = constructor(**env_args)
    steps = env.num_steps if max_episode_steps is None else max_episode_steps
    if steps:
        env = gymnasium.wrappers.TimeLimit(env, steps)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def constructor_of(kind: str, environments: Mapping[str, Constructor], name: str, max_episode_steps: StepLimit | None,
                   env_args: Mapping[str, Any] | None, wrappers: Sequence[EnvWrapper]) -> Callable[[], gymnasium.Env]:
    """Return a constructor of one environment of a suite, with its wrappers; for the arguments see :func:`make_load`.

    Raises:
        EnvironmentLoadError: an unknown name.
    """
    if name not in environments:
        hint = nearest(name, environments) or sorted(environments)
        raise EnvironmentLoadError(f'no {kind} is called {name!r}; did you mean {" or ".join(map(repr, hint))}?')
    return partial(_make, environments[name], max_episode_steps, dict(env_args or {}), wrappers)


def make_load(module: str, kind: str, environments: Mapping[str, Constructor], wrappers: Sequence[EnvWrapper] = (),
              env_info_keys: Sequence[str] = ()) -> Callable[..., AlfEnvironment]:
    """Return the function ``load`` of a suite, which conf files know as ``<module>.load``.

    Args:
        module: name of the module of the suite.
        kind: kind of the environments in messages, such as 'environment with goals'.
        environments: constructor of each environment by its name; the environments have ``num_steps``.
        wrappers: wrappers around every environment, inside the wrappers given to ``load``.
        env_info_keys: numbers of the info dicts that become ``TimeStep.env_info``.

    Returns:
        A configurable with the applicable arguments of :func:`alfx.environments.suite_gym.load`.
    """

    def load(environment_name: str, env_id: int | None = None, discount: float = 1.0,
             max_episode_steps: StepLimit | None = None, gym_env_wrappers: Sequence[EnvWrapper] = (),
             alf_env_wrappers: Sequence[AlfWrapper] = (), batch_size: Count = 1,
             vector_env: VectorEnvCtor = SerialVectorEnv, env_args: Mapping[str, Any] | None = None) -> AlfEnvironment:
        """Create a batch of one of these environments.

        Args:
            environment_name: a name of the suite.
            env_id: ``TimeStep.env_id`` of the first environment.
            discount: the discount of every step that is neither FIRST nor a termination.
            max_episode_steps: steps after which an episode is truncated; ``None``: the environment's own number; 0:
                never.
            gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
            alf_env_wrappers: wrappers around the whole batch, innermost first.
            batch_size: ``B``.
            vector_env: creates a gymnasium vector environment from constructors.
            env_args: arguments of the environment's constructor.

        Raises:
            EnvironmentLoadError: an unknown name or argument.
        """
        make = constructor_of(kind, environments, environment_name, max_episode_steps, env_args,
                              (*wrappers, *gym_env_wrappers))
        return suite_gym.wrap_env(vector_env([make] * batch_size), env_id=env_id, discount=discount,
                                  alf_env_wrappers=alf_env_wrappers, image_channel_first=False,
                                  env_info_keys=env_info_keys)

    load.__module__, load.__qualname__ = module, 'load'
    return gin_utils.configurable(load)
