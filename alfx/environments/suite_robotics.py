"""gymnasium-robotics: goals to reach with a Fetch arm, a Shadow hand, a point or an ant in a maze.

An observation is a dict of ``observation``, ``achieved_goal`` and ``desired_goal``. Rewards are sparse, -1 until the
goal is reached and 0 while it is; ids with 'Dense' use the negative distance. The episodes of the Fetch and Shadow hand
tasks never terminate. ``TimeStep.env_info`` contains the success at the end of an episode, from which evaluations
compute the success rate. Read next: ``HindsightExperienceTransformer`` of :mod:`alfx.algorithms.data_transformer`.
"""
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import FilterObservation, FlattenObservation

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_make import EnvWrapper
from alfx.gin_utils.value_checks import Count

_GoalAndState = partial(FilterObservation, filter_keys=['desired_goal', 'observation'])
_SUCCESS_KEYS = ('is_success', 'success')


@gin_utils.configurable
class SuccessAtEnd(gymnasium.Wrapper):
    """Sets ``info['success']``: 1 at the last step of an episode if the goal is reached there, else 0.

    The sum over an episode is 1 for a success, and the mean over episodes is the success rate.

    Args:
        env: an environment whose info contains ``is_success`` or ``success`` at each step. It includes the time limit.

    Raises:
        EnvironmentLoadError: from ``step``: the info contains neither.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        key = next((key for key in _SUCCESS_KEYS if key in info), None)
        if key is None:
            raise EnvironmentLoadError(f'{self.env.unwrapped}: its info does not contain whether the goal is reached: '
                                       f'expected one of {_SUCCESS_KEYS}, found {sorted(info)}; load it with '
                                       '@suite_gym.load')
        success = float(info[key]) if self._is_last(terminated or truncated) else 0.0
        return observation, reward, terminated, truncated, {**info, 'success': success}

    def _is_last(self, is_over: bool) -> bool:
        """Return whether a step is the last of its episode, given whether the environment ended the episode."""
        return is_over


@gin_utils.configurable
class SuccessWrapper(SuccessAtEnd):
    """:class:`SuccessAtEnd` that also counts the steps since a given one.

    Args:
        env: see :class:`SuccessAtEnd`. It may lack a time limit.
        since_episode_steps: number of steps of an episode after which each step at the goal has the success 1; use the
            length of an episode, so that the sum over an episode is at most 1. ``None``: only the last step.
    """

    def __init__(self, env: gymnasium.Env, since_episode_steps: Count | None = None):
        super().__init__(env)
        self._since_episode_steps, self._steps = since_episode_steps, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self.env.reset(**kwargs)

    def _is_last(self, is_over: bool) -> bool:
        self._steps += 1
        return is_over or self._since_episode_steps is not None and self._steps >= self._since_episode_steps


@gin_utils.configurable
@gin_utils.takes_arguments_of(suite_gym.load, without=('image_channel_first', 'native'))
def load(gym_env_wrappers: Sequence[EnvWrapper], env_info_keys: Sequence[str], concat_desired_goal: bool = False,
         use_success_wrapper: bool = True, **kwargs: Any) -> AlfEnvironment:
    """Create a batch of an environment of gymnasium-robotics.

    ``TimeStep.env_info`` is a dict with ``success`` of :class:`SuccessAtEnd` or :class:`SuccessWrapper`.

    Args:
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
        env_info_keys: further numbers of the info dicts that become ``TimeStep.env_info``.
        concat_desired_goal: use one vector as the observation, ``desired_goal`` followed by ``observation``. It lacks
            ``achieved_goal``, which hindsight relabeling needs.
        use_success_wrapper: add :class:`SuccessAtEnd` as the innermost wrapper.
        kwargs: arguments of :func:`~alfx.environments.suite_gym.load`, except ``image_channel_first`` and ``native``.

    Raises:
        EnvironmentLoadError: an unknown name, or the extra ``robotics`` is not installed.
    """
    wrappers: list[Any] = [SuccessAtEnd] if use_success_wrapper else []
    wrappers += [*([_GoalAndState, FlattenObservation] if concat_desired_goal else []), *gym_env_wrappers]
    success = ['success'] if any(_sets_success(wrapper) for wrapper in wrappers) else []
    return suite_gym.load(gym_env_wrappers=wrappers, image_channel_first=False,
                          env_info_keys=list(dict.fromkeys([*success, *env_info_keys])), **kwargs)


def _sets_success(wrapper: Any) -> bool:
    made = inspect.unwrap(wrapper.func if isinstance(wrapper, partial) else wrapper)
    return inspect.isclass(made) and issubclass(made, SuccessAtEnd)
