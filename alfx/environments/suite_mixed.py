"""A small environment with mixed discrete and continuous actions, whose optimal return is known in closed form."""
from typing import Any

import numpy as np
from gymnasium import spaces

from alfx.environments.suite_helpers import SmallEnv, make_load


class GearsEnv(SmallEnv):
    """A point on a line that has to be brought to 0 with one of two gears and a thrust; an episode has 10 steps.

    The state x is uniformly random in [-1, 1]. An action ``(gear, thrust)`` moves it by ``reach[gear] * thrust`` with
    thrust in [-1, 1] and ``reach = (0.1, 1)``; the reward is ``-|x| - cost[gear]`` at the new x, with ``cost = (0,
    0.5)``. The high gear therefore pays off beyond some distance, once, and with the right thrust. The optimal return
    from x is

        ``-min(0.5, sum_{i=1..10} max(|x| - 0.1 i, 0))``,

    where the high gear is the better choice from ``|x| = 11 / 30`` on. Its mean over initial states is -0.3683.
    """

    num_steps = 10
    reach = (0.1, 1.0)
    cost = (0.0, 0.5)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-2, 2, (1, ), np.float32)
        self.action_space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1, ), np.float32)))
        self._x = 0.0

    def _begin(self) -> None:
        self._x = float(self.np_random.uniform(-1, 1))

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        gear, thrust = int(action[0]), float(np.clip(action[1], -1, 1)[0])
        self._x = min(max(self._x + self.reach[gear] * thrust, -2.0), 2.0)
        return self._observe(), -abs(self._x) - self.cost[gear], False, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self._x], np.float32)


load = make_load(__name__, 'environment with mixed actions', {'Gears': GearsEnv})
