"""A hard-exploration corridor whose end a random policy almost never finds, as a test of exploration bonuses."""
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import SmallEnv, make_load


class CorridorEnv(SmallEnv):
    """A corridor of cells. In each cell one action moves forward, and every other action moves one cell back.

    An episode begins in cell 0, where the wrong actions change nothing, and terminates with reward 1 in the last cell;
    all other rewards are 0. The return is therefore 1 or 0, and the optimal policy reaches the end in ``length - 1``
    steps. The action that moves forward is drawn once for each cell, from ``layout_seed``, and never changes: the right
    action of one cell gives no information about another, and a bias of the policy towards one action does not help.
    The observation is the cell, one-hot.

    With k actions a random policy walks with drift ``(2 - k) / k``: the cell is about geometrically distributed with
    ratio ``1 / (k - 1)``, and the probability of finding the end decreases exponentially with ``length``. By default
    the end is found once in 250 million steps.

    Args:
        length: number of cells, at least 2.
        num_actions: k, at least 2.
        num_steps: number of steps of an episode, at least ``length - 1``.
        layout_seed: seed of the actions that move forward.

    Raises:
        ValueError: a number is too small.
    """

    def __init__(self, length: int = 25, num_actions: int = 3, num_steps: int = 100, layout_seed: int = 0):
        for name, value, least in (('length', length, 2), ('num_actions', num_actions, 2),
                                   ('num_steps', num_steps, length - 1)):
            if value < least:
                raise ValueError(f'CorridorEnv.{name}: expected at least {least}, found {value}')
        self.observation_space = spaces.Box(0, 1, (length, ), np.float32)
        self.action_space: spaces.Discrete = spaces.Discrete(num_actions)
        self.num_steps = num_steps
        self._num_actions = num_actions
        self._actions_on = np.random.default_rng(layout_seed).integers(0, num_actions, length - 1).tolist()
        self._observations = np.eye(length, dtype=np.float32)
        self._cell = 0

    @property
    def actions_on(self) -> list[int]:
        """Action that moves forward, for each cell except the last."""
        return list(self._actions_on)

    def _begin(self) -> None:
        self._cell = 0

    def _observe(self) -> np.ndarray:
        return self._observations[self._cell].copy()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._cell = self._cell + 1 if action == self._actions_on[self._cell] else max(self._cell - 1, 0)
        at_the_end = self._cell == len(self._actions_on)
        return self._observe(), float(at_the_end), at_the_end, False, {}


class NoisyCorridorEnv(CorridorEnv):
    """:class:`CorridorEnv` with a distraction: a screen of random numbers, and an action that changes them.

    The observation is the cell, one-hot, followed by ``noise_size`` numbers, uniform in [0, 1]. They change only at the
    beginning of an episode and with the action "watch", the last one, which does not move. Bonuses for prediction
    errors of the observation reward watching (Burda et al. 2018, arXiv:1808.04355, section 5); bonuses for what the
    agent controls should not.

    Args:
        length: number of cells, at least 2.
        num_actions: number of actions besides "watch", at least 2.
        num_steps: number of steps of an episode, at least ``length - 1``.
        layout_seed: seed of the actions that move forward.
        noise_size: number of random numbers, at least 1.

    Raises:
        ValueError: a number is too small.
    """

    def __init__(self, length: int = 25, num_actions: int = 3, num_steps: int = 100, layout_seed: int = 0,
                 noise_size: int = 16):
        if noise_size < 1:
            raise ValueError(f'NoisyCorridorEnv.noise_size: expected at least 1, found {noise_size}')
        super().__init__(length, num_actions, num_steps, layout_seed)
        self.observation_space = spaces.Box(0, 1, (length + noise_size, ), np.float32)
        self.action_space = spaces.Discrete(num_actions + 1)
        self._noise = np.zeros(noise_size, np.float32)

    def _begin(self) -> None:
        super()._begin()
        self._draw_noise()

    def _draw_noise(self) -> None:
        self._noise = self.np_random.random(len(self._noise), dtype=np.float32)

    def _observe(self) -> np.ndarray:
        return np.concatenate([super()._observe(), self._noise])

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if action != self._num_actions:
            return super().step(action)
        self._draw_noise()
        return self._observe(), 0.0, False, False, {}


load = make_load(__name__, 'exploration task', {'Corridor': CorridorEnv, 'NoisyCorridor': NoisyCorridorEnv})
