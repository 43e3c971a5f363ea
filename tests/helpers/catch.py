"""Catch: a ball falls through a grid of 10 x 5 cells, and a paddle at the bottom has to be below it at the end.

The smallest task with images; see bsuite (Osband et al. 2020, arXiv:1908.03568). The best return is 1, and a random
policy has about -0.6.
"""
import gymnasium
import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import make_load


class Catch(gymnasium.Env):
    """The observation is uint8 ``(1, 10, 5)``; the actions move the paddle left, not at all, or right.

    An episode has 9 steps. Its last reward is 1 if the paddle is below the ball and -1 otherwise.
    """

    metadata = {'render_modes': []}
    num_steps = 9

    def __init__(self):
        self.observation_space = spaces.Box(0, 1, (1, 10, 5), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._row, self._column, self._paddle = 0, 0, 2

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._row, self._column, self._paddle = 0, int(self.np_random.integers(5)), 2
        return self._observation(), {}

    def step(self, action):
        self._row += 1
        self._paddle = min(max(self._paddle + int(action) - 1, 0), 4)
        is_over = self._row == 9
        reward = (1.0 if self._paddle == self._column else -1.0) if is_over else 0.0
        return self._observation(), reward, is_over, False, {}

    def _observation(self):
        grid = np.zeros((1, 10, 5), np.uint8)
        grid[0, self._row, self._column] = grid[0, 9, self._paddle] = 1
        return grid


load = make_load('helpers.catch', 'task', {'Catch': Catch})
