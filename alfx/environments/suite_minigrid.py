"""MiniGrid and BabyAI: grid worlds with observations encoded for neural networks."""
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_make import EnvWrapper
from alfx.environments.gym_wrappers import ImageChannelFirst

_NUM_KINDS, _NUM_COLORS = 11, 6  # of objects, in minigrid.core.constants
GridEncoding = Literal['one_hot', 'image', 'indices']


@gin_utils.configurable
class MiniGridObservation(gymnasium.ObservationWrapper):
    """Drops the mission, which is text, and encodes the grid.

    Args:
        env: a MiniGrid environment.
        observation: 'one_hot': uint8 ``(H, W, 17 + num_states)`` with kind, color and state of each cell one-hot;
            'image': uint8 ``(H, W, 3)`` with these as numbers; 'indices': int64 ``(H, W, 3)``, bounded, for embeddings.
        direction: include the agent's direction: the observation is a dict of 'image' and 'direction'.
        num_states: number of states of a cell: 3, or 4 with ``FullyObsWrapper``, where the state of the agent's cell is
            its direction.

    Raises:
        EnvironmentLoadError: unknown ``observation``, or the environment has no grid.
    """

    def __init__(self, env: gymnasium.Env, observation: GridEncoding = 'one_hot', direction: bool = False,
                 num_states: int = 3):
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict) or 'image' not in space.spaces:
            raise EnvironmentLoadError(f"MiniGridObservation: expected a Dict with 'image', found {space}")
        self._kind, self._direction = observation, direction
        height, width, _ = space['image'].shape or ()
        self._sizes = (_NUM_KINDS, _NUM_COLORS, num_states)
        self._offsets = np.cumsum((0, *self._sizes[:-1]))
        self._rows, self._columns = np.ogrid[:height, :width]
        if observation == 'one_hot':
            image: spaces.Space = spaces.Box(0, 1, (height, width, sum(self._sizes)), np.uint8)
        elif observation == 'image':
            image = spaces.Box(0, max(self._sizes) - 1, (height, width, 3), np.uint8)
        else:
            image = spaces.MultiDiscrete(np.broadcast_to(self._sizes, (height, width, 3)))
        self.observation_space = spaces.Dict({'image': image, 'direction': space['direction']}) if direction else image

    def observation(self, observation: dict[str, Any]) -> Any:
        """Return the encoded grid, with the direction if requested."""
        grid = observation['image']
        if self._kind == 'one_hot':
            encoded = np.zeros((*grid.shape[:2], sum(self._sizes)), np.uint8)
            for channel, offset in enumerate(self._offsets):
                encoded[self._rows, self._columns, offset + grid[..., channel]] = 1
        else:
            encoded = grid if self._kind == 'image' else grid.astype(np.int64)
        return {'image': encoded, 'direction': observation['direction']} if self._direction else encoded


@gin_utils.configurable
@gin_utils.takes_arguments_of(suite_gym.load, without=('native', ), after={'observation': 'vector_env'})
def load(gym_env_wrappers: Sequence[EnvWrapper], env_info_keys: Sequence[str], image_channel_first: bool,
         observation: GridEncoding = 'one_hot', direction: bool = False, fully_observable: bool = False,
         **kwargs: Any) -> AlfEnvironment:
    """Create a batch of a MiniGrid environment.

    Args:
        gym_env_wrappers: wrappers around the encoded observation, innermost first.
        env_info_keys: numbers of the info dicts that become ``TimeStep.env_info``.
        image_channel_first: transpose the grid to ``(C, H, W)``; not with ``observation='indices'``.
        observation: 'one_hot', 'image' or 'indices': see :class:`MiniGridObservation`.
        direction: include the agent's direction in the observation.
        fully_observable: observe the whole grid instead of the agent's view.
        kwargs: arguments of :func:`~alfx.environments.suite_gym.load`, except ``native``.

    Raises:
        EnvironmentLoadError: an unknown name, or the extra ``minigrid`` is not installed.
    """
    wrappers = [partial(MiniGridObservation, observation=observation, direction=direction,
                        num_states=4 if fully_observable else 3), *gym_env_wrappers]
    if fully_observable:
        wrappers.insert(0, _fully_observable)
    if image_channel_first and observation != 'indices':
        wrappers.append(partial(ImageChannelFirst, fields=['image' if direction else '']))
    return suite_gym.load(gym_env_wrappers=wrappers, image_channel_first=False, env_info_keys=env_info_keys, **kwargs)


def _fully_observable(env: gymnasium.Env) -> gymnasium.Env:
    from minigrid.wrappers import FullyObsWrapper  # the extra is installed if env exists
    return FullyObsWrapper(env)
