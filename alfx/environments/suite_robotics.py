"""gymnasium-robotics: goals to reach with a Fetch arm, a Shadow hand, a point or an ant in a maze.

An observation is a dict of ``observation``, ``achieved_goal`` and ``desired_goal``. Rewards are sparse, -1 until the
goal is reached and 0 while it is; ids with 'Dense' give the negative distance. The episodes of the Fetch and Shadow
hand tasks never terminate. Whether the goal is reached at the end of an episode is in ``TimeStep.env_info``, from where
evaluations take the success rate. Read next: ``HindsightExperienceTransformer`` of
:mod:`alfx.algorithms.data_transformer`.
"""
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.errors import EnvironmentLoadError
from alfx.environments.making import EnvWrapper
from alfx.environments.suite_gym import AlfWrapper, VectorEnvCtor
from alfx.environments.vector_env import SerialVectorEnv

_SUCCESS_KEYS = ('is_success', 'success')


@gin_utils.configurable
class SuccessAtEnd(gymnasium.Wrapper):
    """Puts ``info['success']`` at the last step of an episode: 1 if the goal is reached there, else 0; 0 elsewhere.

    The sum over an episode is thus whether it succeeded, and the mean over episodes the success rate.

    Args:
        env: an environment that says at each step whether the goal is reached, as ``is_success`` or ``success``. It
            includes the time limit.

    Raises:
        EnvironmentLoadError: from ``step``: the environment does not say it.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        key = next((key for key in _SUCCESS_KEYS if key in info), None)
        if key is None:
            raise EnvironmentLoadError(f'{self.env.unwrapped} does not say in its info whether the goal is reached '
                                       f'(expected one of {_SUCCESS_KEYS}, found {sorted(info)}); load it with '
                                       '@suite_gym.load')
        success = float(info[key]) if terminated or truncated else 0.0
        return observation, reward, terminated, truncated, {**info, 'success': success}


@gin_utils.configurable
def load(environment_name: str, env_id: int | None = None, discount: float = 1.0,
         max_episode_steps: int | Sequence[int] | None = None, gym_env_wrappers: Sequence[EnvWrapper] = (),
         alf_env_wrappers: Sequence[AlfWrapper] = (), batch_size: int = 1,
         vector_env: VectorEnvCtor = SerialVectorEnv, env_args: Mapping[str, Any] | None = None,
         env_info_keys: Sequence[str] = (), render_mode: str | None = 'rgb_array') -> AlfEnvironment:
    """A batch of an environment of gymnasium-robotics.

    ``TimeStep.env_info`` is a dict with ``success`` of :class:`SuccessAtEnd`.

    Args:
        environment_name: an id such as 'FetchReach-v4'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps after which an episode is truncated; ``None``: as registered (50 for Fetch).
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        batch_size: ``B``.
        vector_env: makes a gymnasium vector environment of constructors.
        env_args: further arguments of the environment's constructor, such as ``{'reward_type': 'dense'}``.
        env_info_keys: which further numbers of the info dicts become ``TimeStep.env_info``.
        render_mode: 'human' shows every step; 'rgb_array' allows ``render``.

    Raises:
        EnvironmentLoadError: an unknown name, or the packages of the extra ``robotics`` are missing.
    """
    return suite_gym.load(environment_name, env_id=env_id, discount=discount, max_episode_steps=max_episode_steps,
                          gym_env_wrappers=[SuccessAtEnd, *gym_env_wrappers], alf_env_wrappers=alf_env_wrappers,
                          image_channel_first=False, batch_size=batch_size, vector_env=vector_env, env_args=env_args,
                          env_info_keys=list(dict.fromkeys(['success', *env_info_keys])), render_mode=render_mode)
