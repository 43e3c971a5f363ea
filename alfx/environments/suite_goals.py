"""Small goal-conditioned environments in pure Python: solved in seconds with hindsight, and not at all without it.

Observations are dicts of ``observation``, ``achieved_goal`` and ``desired_goal``, rewards are sparse, and
``TimeStep.env_info`` contains the success, as in :mod:`alfx.environments.suite_robotics`.
"""
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import SmallEnv, make_load
from alfx.environments.suite_robotics import SuccessAtEnd

Step = tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]


class GoalEnv(SmallEnv):
    """Base class of these environments: the reward is 0 where the goal is reached, -1 elsewhere.

    Args:
        state_space: space of the state, which is both the observation and the achieved goal.
        action_space: space of the actions.
        terminate: terminate the episode when the goal is reached.
    """

    def __init__(self, state_space: spaces.Box, action_space: spaces.Space, terminate: bool):
        self.observation_space = spaces.Dict(
            {name: state_space for name in ('observation', 'achieved_goal', 'desired_goal')})
        self.action_space = action_space
        self._terminate = terminate
        self._state = self._goal = np.zeros(state_space.shape, np.float32)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the state and the goal of a new episode."""
        raise NotImplementedError(f'{type(self).__name__}._draw')

    def _move(self, action: Any) -> np.ndarray:
        """Return the state after an action, as a new array."""
        raise NotImplementedError(f'{type(self).__name__}._move')

    def _reached(self) -> bool:
        """Return whether the state is the goal."""
        raise NotImplementedError(f'{type(self).__name__}._reached')

    def _observe(self) -> dict[str, np.ndarray]:
        return {'observation': self._state, 'achieved_goal': self._state, 'desired_goal': self._goal}

    def _begin(self) -> None:
        self._state, self._goal = self._draw()

    def step(self, action: Any) -> Step:
        self._state = self._move(action)
        reached = self._reached()
        return self._observe(), float(reached) - 1, reached and self._terminate, False, {'is_success': reached}


class BitFlipEnv(GoalEnv):
    """Bits that have to be flipped one at a time until they equal the goal (Andrychowicz et al. 2017, section 3.1).

    State and goal are uniformly random and differ. Reaching the goal terminates the episode, because no action would
    keep the state there. With k bits that differ the optimal return is ``-(k - 1)``.

    Args:
        num_bits: n, the number of bits, of actions, and of steps of an episode.
    """

    def __init__(self, num_bits: int = 12):
        super().__init__(spaces.Box(0, 1, (num_bits, ), np.float32), spaces.Discrete(num_bits), terminate=True)
        self.num_steps = num_bits

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        state = self.np_random.integers(0, 2, self.num_steps)
        goal = state
        while (goal == state).all():
            goal = self.np_random.integers(0, 2, self.num_steps)
        return state.astype(np.float32), goal.astype(np.float32)

    def _move(self, action: Any) -> np.ndarray:
        state = self._state.copy()
        state[int(action)] = 1 - state[int(action)]
        return state

    def _reached(self) -> bool:
        return bool((self._state == self._goal).all())


class PointGoalEnv(GoalEnv):
    """A point in a box, ``[-1, 1]`` in every direction, that has to be moved to a goal; an episode has 50 steps.

    An action is the movement, at most ``speed`` in each direction. The goal is reached within the Euclidean distance
    0.05, as in the Fetch tasks. The point starts in the center, and goals are uniformly random: the farthest takes
    ``ceil(1 / speed)`` steps.

    Args:
        num_dimensions: number of dimensions of the box.
        speed: maximum movement per step.
        terminate: terminate the episode when the goal is reached.
    """

    def __init__(self, num_dimensions: int = 2, speed: float = 0.1, terminate: bool = False):
        super().__init__(spaces.Box(-1, 1, (num_dimensions, ), np.float32),
                         spaces.Box(-1, 1, (num_dimensions, ), np.float32), terminate)
        self.num_steps, self._speed = 50, speed

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(self._state), self.np_random.uniform(-1, 1, self._state.shape).astype(np.float32)

    def _move(self, action: Any) -> np.ndarray:
        return np.clip(self._state + self._speed * np.clip(action, -1, 1), -1, 1).astype(np.float32)

    def _reached(self) -> bool:
        return bool(np.linalg.norm(self._state - self._goal) < 0.05)


load = make_load(__name__, 'environment with goals', {'BitFlip': BitFlipEnv, 'PointGoal': PointGoalEnv},
                 wrappers=(SuccessAtEnd, ), env_info_keys=('success', ))
