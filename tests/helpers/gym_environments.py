"""Tiny gymnasium environments; each needs one special case of the adapter. They are not registered."""
import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class ChainEnv(gymnasium.Env):
    """A chain of ``length`` states: action 1 moves right, 0 left (not beyond the first); the last state is terminal.

    The reward is 1 for arriving at the last state. From state s the optimal return is ``g ** (length - 2 - s)``, from
    the start ``g ** (length - 2)``. The observation is the state, one-hot. With ``start_noise`` the episode starts in a
    random state among the first ``start_noise + 1``.

    Args:
        length: number of states, at least 2.
        start_noise: largest initial state.
    """

    metadata = {'render_modes': ['rgb_array'], 'render_fps': 10}

    def __init__(self, length: int = 5, start_noise: int = 0, render_mode: str | None = None):
        self.observation_space = spaces.Box(0, 1, (length, ), np.float32)
        self.action_space = spaces.Discrete(2)
        self.render_mode = render_mode
        self._length, self._start_noise, self._state = length, start_noise, 0

    def _observe(self) -> np.ndarray:
        observation = np.zeros(self._length, np.float32)
        observation[self._state] = 1
        return observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._state = int(self.np_random.integers(0, self._start_noise + 1))
        return self._observe(), {'position': self._state}

    def step(self, action: Any) -> Step:
        self._state = max(0, self._state + (1 if action == 1 else -1))
        done = self._state == self._length - 1
        return self._observe(), float(done), done, False, {'position': self._state}

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        picture = np.zeros((1, self._length, 3), np.uint8)
        picture[0, self._state] = 255
        return picture


class CountEnv(gymnasium.Env):
    """Counts its steps and ends after ``length`` of them, by truncation or termination; rewards are random.

    The observation is (episode, counted from the last seed; step; last action; random number).

    Args:
        length: number of steps; each episode is 1 step longer than the previous, up to ``length + 3``, then short
            again.
        terminate: end episodes by termination instead of truncation.
        one_buffer: overwrite the array of the previous observation at every step, as environments in native code do.
    """

    def __init__(self, length: int = 3, terminate: bool = False, one_buffer: bool = True):
        self.observation_space = spaces.Box(-np.inf, np.inf, (4, ), np.float64)
        self.action_space = spaces.Discrete(3)
        self._length, self._terminate = length, terminate
        self._episode, self._step = 0, 0
        self._buffer, self._one_buffer = np.zeros(4), one_buffer

    def _observe(self, action: float) -> np.ndarray:
        if not self._one_buffer:
            self._buffer = np.zeros(4)
        self._buffer[:] = self._episode, self._step, action, self.np_random.random()
        return self._buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = 1 if seed is not None else self._episode + 1, 0
        return self._observe(-1), {'step': self._step}

    def step(self, action: Any) -> Step:
        self._step += 1
        done = self._step >= self._length + self._episode % 4
        reward = float(self.np_random.normal())
        return (self._observe(float(action)), reward, done and self._terminate, done and not self._terminate,
                {'step': self._step})


class DictEnv(gymnasium.Env):
    """Environment with nested observations and actions of every supported kind of space; episodes are truncated.

    The reward is 1 if ``action['move']`` equals ``observation['wanted']``, else 0. Episodes have 4 steps: the optimal
    return is ``S(4)``, in the notation of :mod:`alfx.environments.suite_unittest`.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({
            'wanted': spaces.Discrete(3, start=-1),
            'image': spaces.Box(0, 255, (4, 4, 3), np.uint8),
            'parts': spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 5]),
                                   spaces.Box(-np.inf, np.inf, (2, ), np.float64)]),
            'nothing': spaces.Box(0, 1, (0, ), np.float32),
        })
        self.action_space = spaces.Dict({
            'move': spaces.Discrete(3, start=-1),
            'force': spaces.Tuple([spaces.Box(-2, 2, (2, ), np.float64), spaces.MultiBinary(2)]),
            'pick': spaces.MultiDiscrete([2, 3]),
        })
        self._step, self._wanted = 0, np.int64(0)

    def _observe(self) -> dict[str, Any]:
        generator = self.np_random
        self._wanted = generator.integers(-1, 2)
        return {'wanted': self._wanted, 'image': generator.integers(0, 256, (4, 4, 3), np.uint8),
                'parts': (generator.integers(0, 2, 3, np.int8), generator.integers(0, 2, 2), generator.normal(size=2)),
                'nothing': np.zeros(0, np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        if not self.action_space.contains(action):
            raise ValueError(f'{action} is not in {self.action_space}')
        self._step += 1
        reward = float(action['move'] == self._wanted)
        return self._observe(), reward, False, self._step == 4, {}


class OffsetActionEnv(gymnasium.Env):
    """Discrete actions and observations that do not start at 0; the reward is 1 for the action 5 + observation - 10.

    Episodes have 3 steps and terminate: the optimal return is ``S(3)``.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(3, start=10)
        self.action_space = spaces.Discrete(3, start=5)
        self._step, self._shown = 0, np.int64(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._shown = 0, self.np_random.integers(10, 13)
        return self._shown, {}

    def step(self, action: Any) -> Step:
        if not 5 <= action <= 7:
            raise ValueError(f'action {action} is not in {self.action_space}')
        reward = float(action - 5 == self._shown - 10)
        self._step, self._shown = self._step + 1, self.np_random.integers(10, 13)
        return self._shown, reward, self._step == 3, False, {}


class MultiRewardEnv(CountEnv):
    """A :class:`CountEnv` with the reward (1, number of the step); it declares ``reward_space`` as MO-Gymnasium does.
    """

    reward_space = spaces.Box(0, np.inf, (2, ), np.float32)

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, np.array([1, self._step], np.float32), terminated, truncated, info


class RaisingEnv(CountEnv):
    """A :class:`CountEnv` that fails after ``after`` steps.

    Args:
        where: 'step': raise in ``step``; 'reset': raise in ``reset``; 'init': raise in the constructor; 'kill': kill
            the process; 'hang': never return from ``step``.
        after: number of steps until the failure; with 'reset' the number of episodes.
        length: see :class:`CountEnv`.
    """

    def __init__(self, where: str = 'step', after: int = 2, length: int = 3):
        if where == 'init':
            raise RuntimeError('boom in the constructor')
        super().__init__(length)
        self._where, self._after, self._total = where, after, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._where == 'reset' and self._episode >= self._after:
            raise RuntimeError('boom in reset')
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        self._total += 1
        if self._total > self._after:
            if self._where == 'step':
                raise RuntimeError('boom in step')
            if self._where == 'kill':
                os.kill(os.getpid(), signal.SIGKILL)
            if self._where == 'hang':
                signal.pause()
        return super().step(action)
