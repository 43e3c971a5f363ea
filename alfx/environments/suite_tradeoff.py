"""A small environment with a two-dimensional reward, whose best trade-off is known in closed form."""
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import SmallEnv, make_load


class FuelEnv(SmallEnv):
    """Drive as far as possible with little fuel; an episode has 20 steps.

    The observation is the slope g of the road, uniformly random in [0.5, 1.5] at each step; the action is the throttle
    u in [0, 1]. The rewards are the progress ``g u`` and minus the fuel consumption, ``-u**2``. With weights ``w`` of
    the two the best throttle is ``min(k g, 1)`` with ``k = w[0] / (2 w[1])``, and as long as ``1.5 k <= 1`` a step
    yields on average, with ``E[g**2] = 13 / 12``,

        progress  13/12 k          fuel  13/12 k**2

    Among all policies that use ``fuel <= 0.48`` per step, the best one makes ``sqrt(13/12 fuel)`` of progress, with
    ``k = sqrt(12/13 fuel)``. The ``env_info`` has the means of both rewards over the steps of an episode.
    """

    reward_space = spaces.Box(-1.0, 1.5, (2, ), np.float32)
    num_steps = 20

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.5, 1.5, (1, ), np.float32)
        self.action_space = spaces.Box(0.0, 1.0, (1, ), np.float32)
        self._slope = 1.0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        throttle = min(max(float(action[0]), 0.0), 1.0)
        progress, fuel = self._slope * throttle, throttle**2
        info = {'progress@step': progress, 'minus_fuel@step': -fuel}
        return self._observe(), np.array([progress, -fuel], np.float32), False, False, info

    def _observe(self) -> np.ndarray:
        """Draw the next slope and return it."""
        self._slope = float(self.np_random.uniform(0.5, 1.5))
        return np.array([self._slope], np.float32)


load = make_load(__name__, 'environment with two rewards', {'Fuel': FuelEnv},
                 env_info_keys=('progress@step', 'minus_fuel@step'))
