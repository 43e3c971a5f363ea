"""Tasks that need memory: information that is needed at the end is visible only at the start."""
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import SmallEnv, make_load


class TMazeEnv(SmallEnv):
    """A corridor that ends in a junction; a cue in its first cell shows which way to turn there (Bakker 2001, NeurIPS).

    An episode begins in the first cell, with a cue that is left or right with equal probability. Action 0 moves one
    cell forward; at the junction it changes nothing. Actions 1 (left) and 2 (right) change nothing in the corridor. At
    the junction they end the episode, with reward 1 for the turn that the cue showed and 0 for the other; all other
    rewards are 0.

    The observation is a one-hot vector of four: cue left, cue right, corridor, junction. The cells of the corridor look
    alike. The return is therefore 1 or 0; with memory the optimal policy always gets 1, in ``length + 1`` steps. The
    observation at the junction is independent of the cue, so a policy without memory gets 0.5 at most.

    Args:
        length: steps from the first cell to the junction, at least 1.
        num_steps: number of steps of an episode, at least ``length + 1``; ``None``: four times as many, with which a
            uniformly random policy reaches the end in most episodes.

    Raises:
        ValueError: a number is too small.
    """

    def __init__(self, length: int = 20, num_steps: int | None = None):
        num_steps = 4 * (length + 1) if num_steps is None else num_steps
        for name, value, least in (('length', length, 1), ('num_steps', num_steps, length + 1)):
            if value < least:
                raise ValueError(f'TMazeEnv.{name}: expected at least {least}, found {value}')
        self.observation_space = spaces.Box(0, 1, (4, ), np.float32)
        self.action_space = spaces.Discrete(3)
        self.num_steps = num_steps
        self._length = length
        self._cell = self._cue = 0

    def _begin(self) -> None:
        self._cell, self._cue = 0, int(self.np_random.integers(2))

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._cell < self._length:
            self._cell += int(action == 0)
            return self._observe(), 0.0, False, False, {}
        turned = bool(action != 0)
        return self._observe(), float(turned and action == 1 + self._cue), turned, False, {}

    def _observe(self) -> np.ndarray:
        observation = np.zeros(4, np.float32)
        observation[self._cue if self._cell == 0 else 2 if self._cell < self._length else 3] = 1
        return observation


load = make_load(__name__, 'memory task', {'TMaze': TMazeEnv})
