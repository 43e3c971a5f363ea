"""A small environment with mixed actions, a choice and a number, whose optimal return is known in closed form."""
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.errors import EnvironmentLoadError, nearest
from alfx.environments.making import EnvWrapper
from alfx.environments.suite_gym import AlfWrapper, VectorEnvCtor
from alfx.environments.vector_env import SerialVectorEnv


class GearsEnv(gymnasium.Env):
    """A point on a line is to be brought to 0 with one of two gears and a thrust; 10 steps an episode.

    The state x is uniformly random in [-1, 1]. An action ``(gear, thrust)`` moves it by ``reach[gear] * thrust`` with
    thrust in [-1, 1] and ``reach = (0.1, 1)``; the reward is ``-|x| - cost[gear]`` at the new x, with ``cost = (0,
    0.5)``. So the high gear pays from some distance on, once, and with the right thrust. From x the optimal return is

        ``-min(0.5, sum_{i=1..10} max(|x| - 0.1 i, 0))``,

    the high gear being the better choice from ``|x| = 11 / 30`` on. Its mean over initial states is -0.3683.
    """

    metadata: dict[str, Any] = {'render_modes': []}
    num_steps = 10
    reach = (0.1, 1.0)
    cost = (0.0, 0.5)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-2, 2, (1, ), np.float32)
        self.action_space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1, ), np.float32)))
        self._x = 0.0

    @classmethod
    def optimal_return(cls, x: float) -> float:
        """The greatest return of an episode that begins at ``x``."""
        low = sum(max(abs(x) - cls.reach[0] * i, 0.0) for i in range(1, cls.num_steps + 1))
        return -min(cls.cost[1], low)

    def reset(self, *, seed: int | None = None,
              options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._x = float(self.np_random.uniform(-1, 1))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        gear, thrust = int(action[0]), float(np.clip(action[1], -1, 1)[0])
        self._x = min(max(self._x + self.reach[gear] * thrust, -2.0), 2.0)
        return self._observe(), -abs(self._x) - self.cost[gear], False, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self._x], np.float32)


_ENVIRONMENTS: dict[str, Callable[..., Any]] = {'Gears': GearsEnv}


def _make(environment_name: str, max_episode_steps: int | None, env_args: Mapping[str, Any],
          wrappers: Sequence[EnvWrapper]) -> gymnasium.Env:
    env = _ENVIRONMENTS[environment_name](**env_args)
    steps = env.num_steps if max_episode_steps is None else max_episode_steps
    if steps:
        env = gymnasium.wrappers.TimeLimit(env, steps)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


@gin_utils.configurable
def load(environment_name: str, env_id: int | None = None, discount: float = 1.0, max_episode_steps: int | None = None,
         gym_env_wrappers: Sequence[EnvWrapper] = (), alf_env_wrappers: Sequence[AlfWrapper] = (), batch_size: int = 1,
         vector_env: VectorEnvCtor = SerialVectorEnv, env_args: Mapping[str, Any] | None = None) -> AlfEnvironment:
    """A batch of one of these environments.

    Args:
        environment_name: 'Gears'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps after which an episode is truncated; ``None``: the environment's own number; 0: never.
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        batch_size: ``B``.
        vector_env: makes a gymnasium vector environment of constructors.
        env_args: further arguments of the environment's constructor.

    Raises:
        EnvironmentLoadError: an unknown name, or arguments that the environment does not have.
    """
    if environment_name not in _ENVIRONMENTS:
        hint = nearest(environment_name, _ENVIRONMENTS) or sorted(_ENVIRONMENTS)
        raise EnvironmentLoadError(f'no environment with mixed actions is called {environment_name!r}; did you mean '
                                   f'{" or ".join(map(repr, hint))}?')
    make = partial(_make, environment_name, max_episode_steps, dict(env_args or {}), tuple(gym_env_wrappers))
    return suite_gym.wrap_env(vector_env([make] * batch_size), env_id=env_id, discount=discount,
                              alf_env_wrappers=alf_env_wrappers, image_channel_first=False)
