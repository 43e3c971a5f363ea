"""Description of an environment by its specs, for a process that leaves stepping to other processes."""
from collections.abc import Callable
from typing import Any

from alfx.data_structures import TimeStep
from alfx.environments.alf_environment import AlfEnvironment, SpecifiedEnvironment
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.tensor_specs import NestedTensor, NestedTensorSpec

NO_ENVIRONMENT = 'offline'  # create_environment.env_name of a run that has only datasets


class DescribedEnvironment(SpecifiedEnvironment):
    """Specs, name and size of a batch of environments that live in other processes.

    Args:
        env: one such environment, or a batch of them; it may be closed afterwards.
        batch_size: ``B`` of the described batch.
    """

    def __init__(self, env: AlfEnvironment, batch_size: int):
        self._batch_size, self._name, self._metadata = batch_size, env.name, env.metadata
        self._observation_spec, self._action_spec = env.observation_spec(), env.action_spec()
        self._reward_spec, self._env_info_spec = env.reward_spec(), env.env_info_spec()
        self._task_names, self._goal_reward_fn = env.task_names, env.goal_reward_fn()

    def env_info_spec(self) -> NestedTensorSpec:
        return self._env_info_spec

    @property
    def num_tasks(self) -> int:
        return len(self._task_names)

    @property
    def task_names(self) -> list[str]:
        return self._task_names

    @property
    def name(self) -> str:
        return self._name

    @property
    def metadata(self) -> dict[str, Any]:
        return self._metadata

    def goal_reward_fn(self) -> Callable[..., Any] | None:
        return self._goal_reward_fn

    def _reset(self) -> TimeStep:
        raise UnsupportedOperationError(f'{self._name} is stepped by other processes and cannot be reset in this one')

    def _step(self, action: NestedTensor) -> TimeStep:
        raise UnsupportedOperationError(f'{self._name} is stepped by other processes and cannot be stepped in this one')

    def _seed(self, seed: int | None) -> None:
        """Do nothing: the processes that step the environments have seeded them."""
