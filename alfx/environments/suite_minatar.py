"""MinAtar: five Atari games on a grid of 10 x 10 cells (Young and Tian 2019, arXiv:1903.03176).

All environments of a batch are stepped in one process, since a step costs less than a message to another process. The
games come from the package ``minatar`` (extra ``minatar``).
"""
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_helpers import ResetResult, make_load
from alfx.utils.extras import pip_install

GAMES = ('asterix', 'breakout', 'freeway', 'seaquest', 'space_invaders')


class MinAtarEnv(gymnasium.Env):
    """One game; the observation is uint8 ``(channels, 10, 10)`` of zeros and ones.

    Args:
        game: a name of :data:`GAMES`.
        sticky_action_probability: probability that the game repeats the previous action instead; 0.1 in the paper.
        difficulty_ramping: let the game become more difficult with time, as in the paper.
        minimal_actions: offer only the actions that have an effect in this game instead of all six.

    Raises:
        EnvironmentLoadError: the probability is out of range, or the extra ``minatar`` is not installed.
    """

    metadata: dict[str, Any] = {'render_modes': ['rgb_array'], 'render_fps': 10}
    num_steps = 5000  # asterix and breakout may last forever

    def __init__(self, game: str, sticky_action_probability: float = 0.1, difficulty_ramping: bool = True,
                 minimal_actions: bool = True):
        if not 0.0 <= sticky_action_probability <= 1.0:
            raise EnvironmentLoadError(f'env_args: expected a sticky_action_probability from 0 to 1, found '
                                       f'{sticky_action_probability}')
        self.render_mode = 'rgb_array'
        self._game = _environment_class()(game, sticky_action_prob=sticky_action_probability,
                                          difficulty_ramping=difficulty_ramping)
        self._is_seeded = False
        self._actions = self._game.minimal_action_set() if minimal_actions else list(range(self._game.num_actions()))
        height, width, channels = self._game.state_shape()
        self.observation_space = spaces.Box(0, 1, (channels, height, width), np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        if seed is not None or not self._is_seeded:
            self._game.seed(int(self.np_random.integers(2**31)))
            self._game.last_action, self._is_seeded = 0, True  # sticky actions repeat the last one
        self._game.reset()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, terminated = self._game.act(self._actions[action])
        return self._observation(), float(reward), bool(terminated), False, {}

    def _observation(self) -> np.ndarray:
        return np.ascontiguousarray(self._game.state().transpose(2, 0, 1)).view(np.uint8)

    def render(self) -> np.ndarray:
        """Return the grid as an RGB image, 16 pixels for each cell; later channels cover earlier ones."""
        state = self._game.state()
        channels = state.shape[-1]
        hues = np.linspace(0.0, 2 * np.pi, channels, endpoint=False)
        palette = 128 + 127 * np.cos(hues[:, None] - np.array([0.0, 2.1, 4.2]))
        top = np.where(state.any(-1), channels - 1 - state[..., ::-1].argmax(-1), channels)
        return np.concatenate([palette, np.zeros((1, 3))]).astype(np.uint8)[top].repeat(16, 0).repeat(16, 1)


def _environment_class() -> Any:
    """Import MinAtar without Matplotlib and seaborn, which only its own window needs and which take seconds to import.

    Raises:
        EnvironmentLoadError: it is not installed.
    """
    imported = {name: sys.modules.get(name) for name in ('matplotlib', 'seaborn')}
    sys.modules.update(dict.fromkeys(imported, SimpleNamespace(pyplot=None, colors=None)))  # type: ignore[arg-type]
    try:
        from minatar import Environment
    except ImportError as error:
        raise EnvironmentLoadError(f'MinAtar is not installed: {pip_install("minatar")}') from error
    finally:
        for name, module in imported.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
    return Environment


load = make_load(__name__, 'MinAtar game', {game: partial(MinAtarEnv, game) for game in GAMES})
