"""The interface of every environment: batched, tensors in, :class:`~alfx.data_structures.TimeStep` out.

``B`` environments are stepped together; ``B`` = 1 is a batch like any other. Read next:
:mod:`alfx.environments.gym_vector_environment` (the adapter of gymnasium) and
:mod:`alfx.environments.alf_wrappers` (wrappers around a whole batch).
"""
import abc
import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from alfx import data_structures as ds
from alfx import nest
from alfx.data_structures import TimeStep
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec

_EPISODES = 10


class AlfEnvironment(abc.ABC):
    """``B`` environments that are stepped together.

    The time steps of each environment follow these rules:

    - An episode is ``FIRST, MID, ..., MID, LAST``. The step after LAST is the FIRST of the next episode, whatever the
      action.
    - LAST carries the true final observation. ``discount`` is 0 if the episode terminated; a truncation does not change
      it.
    - FIRST has reward 0, discount 1 and the ``prev_action`` within the bounds that is nearest to zeros.
    - All tensors are on the CPU, and a later step never writes to the tensors of an earlier one.
    """

    _current: TimeStep | None = None

    # Description -----------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """``B``, the number of environments."""

    @abc.abstractmethod
    def observation_spec(self) -> NestedTensorSpec:
        """Return the spec of one environment's observation, without ``B``."""

    @abc.abstractmethod
    def action_spec(self) -> NestedTensorSpec:
        """Return the spec of one environment's action, without ``B``; leaves are float32 or int64."""

    def reward_spec(self) -> TensorSpec:
        """Return the spec of one environment's reward: ``()`` or ``(K,)``."""
        return TensorSpec(())

    def env_info_spec(self) -> NestedTensorSpec:
        """Return the spec of ``TimeStep.env_info``; ``()`` if there are no infos."""
        return ()

    def time_step_spec(self) -> TimeStep:
        """Return the spec of one environment's time steps."""
        spec = ds.time_step_spec(self.observation_spec(), self.action_spec(), self.reward_spec())
        return spec._replace(env_info=self.env_info_spec())

    @property
    def is_tensor_based(self) -> bool:
        """Return True: actions and time steps are tensors."""
        return True

    @property
    def batched(self) -> bool:
        """Return True: actions and time steps have the dimension ``B``."""
        return True

    @property
    def num_tasks(self) -> int:
        """Number of tasks that the environment can switch between."""
        return 1

    @property
    def task_names(self) -> list[str]:
        """Name of each task."""
        return [str(i) for i in range(self.num_tasks)]

    @property
    def name(self) -> str:
        """Name of the environment in messages."""
        return type(self).__name__

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of gymnasium: 'render_modes', 'render_fps', ..."""
        return {}

    # Stepping --------------------------------------------------------------------------------------------------

    def reset(self) -> TimeStep:
        """Start a new episode in every environment and return FIRST steps ``[B, ...]``."""
        self._current = self._reset()
        return self._current

    def step(self, action: NestedTensor) -> TimeStep:
        """Take one step in every environment.

        Args:
            action: nest ``[B, ...]`` of :meth:`action_spec`. Environments whose current step is LAST ignore it and
                yield FIRST; so do all environments if none has been reset yet.

        Returns:
            Time steps ``[B, ...]``.

        Raises:
            EnvironmentStepError: an environment raised.
            SpecError: the action has the wrong structure or shape.
        """
        if self._current is None:
            return self.reset()
        self._current = self._step(action)
        return self._current

    def current_time_step(self) -> TimeStep:
        """Return the time step that ``reset`` or ``step`` returned last; reset if there is none yet."""
        return self.reset() if self._current is None else self._current

    def final_infos(self) -> dict[int, dict[str, float]]:
        """Return the numbers in the infos of the episodes that ended with the current step, by environment and name."""
        return {}

    @functools.cached_property
    def _latest_final_infos(self) -> collections.deque:
        return latest_episodes(self.batch_size)

    def latest_final_infos(self) -> list[dict[str, float]]:
        """Return the final infos of the latest episodes, oldest first; :func:`latest_episodes` limits their number."""
        return list(self._latest_final_infos)

    def add_final_infos(self, infos: Iterable[dict[str, float]]) -> None:
        """Add the final infos of episodes that have just ended, in this process or in others."""
        self._latest_final_infos.extend(infos)

    def _set_final_infos(self, state: dict[str, Any]) -> None:
        """Restore the final infos from a state of :meth:`get_state`; states of earlier versions have none."""
        self._latest_final_infos.clear()
        self.add_final_infos(state.get('final_infos', ()))

    def goal_reward_fn(self) -> Callable[..., Any] | None:
        """Return ``compute_reward(achieved_goal, desired_goal, info)`` of goal environments; ``None`` for others."""
        return None

    @abc.abstractmethod
    def _reset(self) -> TimeStep:
        """Start a new episode in every environment."""

    @abc.abstractmethod
    def _step(self, action: NestedTensor) -> TimeStep:
        """Take one step in every environment."""

    def request_reset(self, mask: torch.Tensor) -> None:
        """End the current episodes of some environments from outside: their next step is FIRST.

        Wrappers that end episodes call this. The current step is not changed; the caller marks it LAST.

        Args:
            mask: bool ``[B]``.

        Raises:
            UnsupportedOperationError: this kind of environment does not support it.
        """
        raise UnsupportedOperationError(f'{self.name} cannot end the episodes of some environments of the batch')

    def seed(self, seed: int | None) -> None:
        """Give each environment its own stream of random numbers, derived from ``seed``.

        The next ``step`` resets all environments, so the same seed gives the same sequence at any time.
        """
        self._current = None
        self._seed(seed)

    @abc.abstractmethod
    def _seed(self, seed: int | None) -> None:
        """Use ``seed`` at the next reset."""

    # Saving ----------------------------------------------------------------------------------------------------

    def get_state(self) -> Any:
        """Return the state needed to continue exactly from here, as a picklable object; ``None`` if it cannot be saved.
        """
        return None

    def set_state(self, state: Any) -> None:
        """Continue exactly from the result of :meth:`get_state` of an environment with the same arguments.

        Raises:
            UnsupportedOperationError: this kind of environment does not support it.
            ValueError: the state is of another kind of environment or another batch size.
        """
        raise UnsupportedOperationError(f'the state of {self.name} cannot be restored')

    # Rendering and closing -------------------------------------------------------------------------------------

    def render(self, mode: str = 'rgb_array') -> np.ndarray | None:
        """Render environment 0.

        Args:
            mode: 'rgb_array': return an image, uint8 ``[H, W, 3]``; 'human': show it in a window.

        Raises:
            UnsupportedOperationError: the environment cannot be rendered, or there is no display.
        """
        raise UnsupportedOperationError(f'{self.name} cannot be rendered')

    def close(self) -> None:  # noqa: B027 - nothing to free is the common case
        """Free the resources of the environments; may be called more than once."""

    def __enter__(self) -> 'AlfEnvironment':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpecifiedEnvironment(AlfEnvironment):
    """Base class of environments whose batch size and specs are attributes, unless a subclass overrides them."""

    _batch_size: int
    _observation_spec: NestedTensorSpec
    _action_spec: NestedTensorSpec
    _reward_spec = TensorSpec(())

    @property
    def batch_size(self) -> int:
        return self._batch_size

    def observation_spec(self) -> NestedTensorSpec:
        return self._observation_spec

    def action_spec(self) -> NestedTensorSpec:
        return self._action_spec

    def reward_spec(self) -> TensorSpec:
        return self._reward_spec


class EnvironmentAsAnother(AlfEnvironment):
    """Base class of environments that take specs, tasks, metadata and images from another one, unless overridden."""

    _env: AlfEnvironment

    @property
    def num_tasks(self) -> int:
        return self._env.num_tasks

    @property
    def task_names(self) -> list[str]:
        return self._env.task_names

    @property
    def metadata(self) -> dict[str, Any]:
        return self._env.metadata

    def observation_spec(self) -> NestedTensorSpec:
        return self._env.observation_spec()

    def action_spec(self) -> NestedTensorSpec:
        return self._env.action_spec()

    def reward_spec(self) -> TensorSpec:
        return self._env.reward_spec()

    def env_info_spec(self) -> NestedTensorSpec:
        return self._env.env_info_spec()

    def goal_reward_fn(self) -> Callable[..., Any] | None:
        return self._env.goal_reward_fn()

    def render(self, mode: str = 'rgb_array') -> np.ndarray | None:
        return self._env.render(mode)


def latest_episodes(batch_size: int) -> collections.deque:
    """Return an empty queue for results of the latest episodes; it holds the last ``max(10, B)`` of them."""
    return collections.deque(maxlen=max(_EPISODES, batch_size))


def check_action(action: NestedTensor, spec: NestedTensorSpec, batch_size: int) -> None:
    """Raise ``SpecError`` unless ``action`` has the structure and the shapes of ``spec``."""
    found = [tuple(leaf.shape) for leaf in nest.flatten(action)]
    expected = [(batch_size, *leaf.shape) for leaf in nest.flatten(spec)]
    if found != expected:
        raise SpecError(f'action: expected tensors of shapes {expected} (batch size first), found {found}')
