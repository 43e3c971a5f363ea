"""gymnasium wrappers that change actions or the ends of episodes, exported by
:mod:`alfx.environments.gym_wrappers`.
"""
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.spaces import flatten_sample, flatten_space, unflatten_sample
from alfx.gin_utils import configurable

_MODULE = 'alfx.environments.gym_wrappers'


class _ContinuousActions(gymnasium.ActionWrapper):
    """Base class of wrappers that change the floating point leaves of the action, however it is nested."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        inner = [leaf for _, leaf in flatten_space(env.action_space)]
        self._boxes = [leaf if isinstance(leaf, spaces.Box) and np.dtype(leaf.dtype).kind == 'f' else None
                       for leaf in inner]
        leaves = [leaf if box is None else self._outer(box) for leaf, box in zip(inner, self._boxes)]
        self.action_space = _rebuilt(env.action_space, leaves)

    def action(self, action: Any) -> Any:
        """Return the action for the wrapped environment."""
        space = self.env.action_space
        return unflatten_sample(space, [part if box is None else self._inner_action(np.asarray(part), box)
                                        for part, box in zip(flatten_sample(space, action), self._boxes)])

    def _outer(self, box: spaces.Box) -> spaces.Box:
        """Return the space seen from outside for a ``box`` of the wrapped environment."""
        raise NotImplementedError(f'{type(self).__name__}._outer')

    def _inner_action(self, action: np.ndarray, box: spaces.Box) -> np.ndarray:
        """Return the action in ``box`` for an action given from outside."""
        raise NotImplementedError(f'{type(self).__name__}._inner_action')


def _rebuilt(space: spaces.Space, leaves: list[spaces.Space]) -> spaces.Space:
    """Return ``space`` with its fundamental spaces replaced by ``leaves``."""
    def build(nested: Any) -> spaces.Space:
        if isinstance(nested, dict):
            return spaces.Dict({key: build(part) for key, part in nested.items()})
        return spaces.Tuple([build(part) for part in nested]) if isinstance(nested, tuple) else nested

    return build(unflatten_sample(space, leaves))


@configurable(module=_MODULE)
class ContinuousActionClip(_ContinuousActions):
    """Clips continuous actions to their bounds and to ``[min_v, max_v]``; unbounded actions become bounded.

    Args:
        env: the environment.
        min_v: minimum value.
        max_v: maximum value.
    """

    def __init__(self, env: gymnasium.Env, min_v: float = -1.e9, max_v: float = 1.e9):
        if not min_v < max_v:
            raise EnvironmentLoadError(f'ContinuousActionClip: expected min_v < max_v, found {min_v} and {max_v}')
        self._min, self._max = min_v, max_v
        super().__init__(env)

    def _outer(self, box: spaces.Box) -> spaces.Box:
        return spaces.Box(np.maximum(box.low, self._min).astype(box.dtype),
                          np.minimum(box.high, self._max).astype(box.dtype), box.shape, box.dtype.type)

    def _inner_action(self, action: np.ndarray, box: spaces.Box) -> np.ndarray:
        return np.clip(action, np.maximum(box.low, self._min), np.minimum(box.high, self._max)).astype(box.dtype)


@configurable(module=_MODULE)
class ContinuousActionMapping(_ContinuousActions):
    """Rescales continuous actions: they are given in ``[low, high]`` and mapped linearly to the environment's bounds.

    Args:
        env: an environment whose continuous actions all have finite bounds.
        low: new lower bound.
        high: new upper bound.
    """

    def __init__(self, env: gymnasium.Env, low: float, high: float):
        if not low < high:
            raise EnvironmentLoadError(f'{type(self).__name__}: expected low < high, found {low} and {high}')
        self._low, self._high = low, high
        super().__init__(env)

    def _outer(self, box: spaces.Box) -> spaces.Box:
        if not box.is_bounded():
            raise EnvironmentLoadError(f'{type(self).__name__}: expected finite bounds, found {box}; put '
                                       'ContinuousActionClip before it')
        return spaces.Box(self._low, self._high, box.shape, box.dtype.type)

    def _inner_action(self, action: np.ndarray, box: spaces.Box) -> np.ndarray:
        fraction = (action.astype(np.float64) - self._low) / (self._high - self._low)
        return (box.low + fraction * (box.high.astype(np.float64) - box.low)).astype(box.dtype)


@configurable(module=_MODULE)
class NormalizedAction(ContinuousActionMapping):
    """Rescales continuous actions to [-1, 1].

    Args:
        env: an environment whose continuous actions all have finite bounds.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env, low=-1.0, high=1.0)


@configurable(module=_MODULE)
class NonEpisodicEnv(gymnasium.Wrapper):
    """Ignores terminations and truncations, so that episodes never end.

    The environment must allow further steps after it has ended an episode.

    Args:
        env: the environment.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = self.env.step(action)
        return observation, reward, False, False, info
