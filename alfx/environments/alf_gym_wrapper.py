"""One gymnasium environment as a batch of size 1, and the tensor specs of gymnasium spaces."""
from typing import Any

import gymnasium

from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.spaces import tensor_spec_from_gym_space
from alfx.environments.vector_env import SerialVectorEnv, environment_name

__all__ = ['AlfGymWrapper', 'tensor_spec_from_gym_space']


class AlfGymWrapper(GymVectorEnvironment):
    """One gymnasium environment as an :class:`AlfEnvironment` with ``B`` = 1.

    Args:
        gym_env: the environment.
        env_id: ``TimeStep.env_id``; ``None``: 0.
        discount: the discount of every step that is neither FIRST nor a termination.
        auto_reset: must be True: LAST is always followed by FIRST.
        simplify_box_bounds: use a scalar bound where the bound is the same for all elements.
        **kwargs: further arguments of :class:`GymVectorEnvironment`.

    Raises:
        EnvironmentLoadError: ``auto_reset`` is False.
        UnsupportedSpaceError: a space has no tensor spec.
    """

    def __init__(self, gym_env: gymnasium.Env, env_id: int | None = None, discount: float = 1.0,
                 auto_reset: bool = True, simplify_box_bounds: bool = True, **kwargs: Any):
        if not auto_reset:
            raise EnvironmentLoadError('AlfGymWrapper: auto_reset=False is not supported: the step after LAST is '
                                       'always FIRST')
        super().__init__(SerialVectorEnv([lambda: gym_env], name=environment_name(gym_env)), discount, env_id,
                         simplify_box_bounds=simplify_box_bounds, **kwargs)
