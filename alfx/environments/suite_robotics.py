"""gymnasium-robotics: goals to reach with a Fetch arm, a Shadow hand, a point or an ant in a maze.

An observation is a dict of ``observation``, ``achieved_goal`` and ``desired_goal``. Rewards are sparse, -1 until the
goal is reached and 0 while it is; ids with 'Dense' use the negative distance. The episodes of the Fetch and Shadow hand
tasks never terminate. ``TimeStep.env_info`` contains the success at the end of an episode, from which evaluations
compute the success rate. Read next: ``HindsightExperienceTransformer`` of :mod:`alfx.algorithms.data_transformer`.
"""
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import FilterObservation, FlattenObservation

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.making import EnvWrapper

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
        success = float(info[key]) if terminated or truncated else 0.0
        return observation, reward, terminated, truncated, {**info, 'success': success}


@gin_utils.configurable
@gin_utils.takes_arguments_of(suite_gym.load, without=('image_channel_first', 'native'))
def load(gym_env_wrappers: Sequence[EnvWrapper], env_info_keys: Sequence[str], concat_desired_goal: bool = False,
         **kwargs: Any) -> AlfEnvironment:
    """Create a batch of an environment of gymnasium-robotics.

    ``TimeStep.env_info`` is a dict with ``success`` of :class:`SuccessAtEnd`.

    Args:
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
        env_info_keys: further numbers of the info dicts that become ``TimeStep.env_info``.
        concat_desired_goal: use one vector as the observation, ``desired_goal`` followed by ``observation``. It lacks
            ``achieved_goal``, which hindsight relabelling needs.
        kwargs: arguments of :func:`~alfx.environments.suite_gym.load`, except ``image_channel_first`` and ``native``.

    Raises:
        EnvironmentLoadError: an unknown name, or the extra ``robotics`` is not installed.
    """
    concat = [_GoalAndState, FlattenObservation] if concat_desired_goal else []
    return suite_gym.load(gym_env_wrappers=[SuccessAtEnd, *concat, *gym_env_wrappers], image_channel_first=False,
                          env_info_keys=list(dict.fromkeys(['success', *env_info_keys])), **kwargs)
