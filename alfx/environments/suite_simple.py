"""Small environments that each demonstrate one property; names and arguments are those of ALF's suite_simple."""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.gym_make import EnvWrapper
from alfx.environments.gym_wrappers import FrameSkip, FrameStack
from alfx.environments.suite_gym import AlfWrapper, VectorEnvCtor
from alfx.environments.suite_helpers import SmallEnv, constructor_of
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils import Count, StepLimit, configurable


class StochasticWithRiskyBranch(SmallEnv):
    """A choice between a safe and a risky branch; a deterministic model prefers the risky one by mistake.

    In the first step action 0 leads to the safe branch and action 1 to the risky one, where the task is won with
    probability 0.7 and lost otherwise. The second step, with any action, gives the reward and ends the episode: 0.5 on
    the safe branch, 1 for a win and -2 for a loss. The expected returns are

        safe  0.5        risky  0.7 * 1 - 0.3 * 2 = 0.1

    while the most likely outcome of the risky branch is worth 1. The observation is one-hot: start, safe, won, lost.
    """

    num_steps = 2
    rewards = (0.0, 0.5, 1.0, -2.0)
    win_probability = 0.7

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (4, ), np.float32)
        self.action_space = spaces.Discrete(2)
        self._place = 0

    def _begin(self) -> None:
        self._place = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._place:
            return self._observe(), self.rewards[self._place], True, False, {}
        risky = 2 if self.np_random.random() < self.win_probability else 3
        self._place = risky if action else 1
        return self._observe(), 0.0, False, False, {}

    def _observe(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self._place]


@configurable
def load(game: str, env_id: int | None = None, env_args: Mapping[str, Any] | None = None, discount: float = 1.0,
         frame_skip: int | None = None, frame_stack: int | None = None, gym_env_wrappers: Sequence[EnvWrapper] = (),
         alf_env_wrappers: Sequence[AlfWrapper] = (), max_episode_steps: StepLimit = 0, batch_size: Count = 1,
         vector_env: VectorEnvCtor = SerialVectorEnv) -> AlfEnvironment:
    """Create a batch of a simple environment.

    Args:
        game: name of the environment: ``'StochasticWithRiskyBranch'``.
        env_id: ``TimeStep.env_id`` of the first environment.
        env_args: arguments of the environment's constructor.
        discount: the discount of every step that is neither FIRST nor a termination.
        frame_skip: number of times each action is repeated; ``None``: once.
        frame_stack: number of stacked observations; ``None``: no stacking.
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        max_episode_steps: steps after which an episode is truncated; 0: never.
        batch_size: ``B``.
        vector_env: creates a gymnasium vector environment from constructors.

    Raises:
        EnvironmentLoadError: an unknown name.
    """
    wrappers: list[EnvWrapper] = [] if frame_skip is None else [partial(FrameSkip, skip=frame_skip)]
    wrappers += [] if frame_stack is None else [partial(FrameStack, stack_size=frame_stack)]
    make = constructor_of('simple environment', {'StochasticWithRiskyBranch': StochasticWithRiskyBranch}, game,
                          max_episode_steps, env_args, [*wrappers, *gym_env_wrappers])
    return suite_gym.wrap_env(vector_env([make] * batch_size), env_id=env_id, discount=discount,
                              alf_env_wrappers=alf_env_wrappers, image_channel_first=False)
