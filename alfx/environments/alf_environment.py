"""The interface of every environment: batched, tensors in, :class:`~alfx.data_structures.TimeStep` out.

``B`` environments are stepped together; ``B`` = 1 is a batch like any other. Read next:
:mod:`alfx.environments.gym_vector_environment` (the one implementation for gymnasium) and
:mod:`alfx.environments.alf_wrappers` (wrappers around a whole batch).
"""
import abc
import collections
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from alfx import data_structures as ds
from alfx import nest
from alfx.data_structures import TimeStep
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec

_EPISODES = 10


class AlfEnvironment(abc.ABC):
    """``B`` environments that are stepped together.

    What holds for the sequence of time steps of each of them:

    - An episode is ``FIRST, MID, ..., MID, LAST``; after LAST comes the FIRST of the next episode, whatever
      the action given.
    - LAST carries the true final observation. ``discount`` is 0 where the episode terminated; a truncation
      keeps it.
    - FIRST has reward 0, discount 1 and a ``prev_action`` of zeros.
    - All tensors are on the CPU, and a later step never writes to the tensors of an earlier one.
    """

    _current: TimeStep | None = None

    # What it is ------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """``B``, the number of environments."""

    @abc.abstractmethod
    def observation_spec(self) -> NestedTensorSpec:
        """Spec of one environment's observation, without ``B``."""

    @abc.abstractmethod
    def action_spec(self) -> NestedTensorSpec:
        """Spec of one environment's action, without ``B``; leaves are float32 or int64."""

    def reward_spec(self) -> TensorSpec:
        """Spec of one environment's reward: ``()`` or ``(K,)``."""
        return TensorSpec(())

    def env_info_spec(self) -> NestedTensorSpec:
        """Spec of ``TimeStep.env_info``; ``()`` if there is none."""
        return ()

    def time_step_spec(self) -> TimeStep:
        """Spec of the time steps of one environment."""
        spec = ds.time_step_spec(self.observation_spec(), self.action_spec(), self.reward_spec())
        return spec._replace(env_info=self.env_info_spec())

    @property
    def is_tensor_based(self) -> bool:
        """Always True: actions and time steps are tensors."""
        return True

    @property
    def batched(self) -> bool:
        """Always True: actions and time steps have the dimension ``B``."""
        return True

    @property
    def num_tasks(self) -> int:
        """Number of tasks between which the environment can switch."""
        return 1

    @property
    def task_names(self) -> list[str]:
        """Name of each task."""
        return [str(i) for i in range(self.num_tasks)]

    @property
    def name(self) -> str:
        """What to call the environment in messages."""
        return type(self).__name__

    @property
    def metadata(self) -> dict[str, Any]:
        """What gymnasium calls metadata: 'render_modes', 'render_fps', ..."""
        return {}

    # Stepping --------------------------------------------------------------------------------------------------

    def reset(self) -> TimeStep:
        """Start a new episode in every environment; returns FIRST steps ``[B, ...]``."""
        self._current = self._reset()
        return self._current

    def step(self, action: NestedTensor) -> TimeStep:
        """Take one step in every environment.

        Args:
            action: nest ``[B, ...]`` of :meth:`action_spec`. It is ignored by environments whose current step is
                LAST: these yield FIRST. If nothing was ever reset, all of them do.

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
        """The time step that ``reset`` or ``step`` returned last; resets if there is none yet."""
        return self.reset() if self._current is None else self._current

    def final_infos(self) -> dict[int, dict[str, float]]:
        """The numbers in the infos of the episodes that ended with the current step, by environment and name."""
        return {}

    @functools.cached_property
    def _latest_final_infos(self) -> collections.deque:
        return latest_episodes(self.batch_size)

    def latest_final_infos(self) -> list[dict[str, float]]:
        """Those of the latest episodes, the oldest first, as many as :func:`latest_episodes` keeps."""
        return list(self._latest_final_infos)

    def add_final_infos(self, infos: Iterable[dict[str, float]]) -> None:
        """Those of episodes that have just ended, here or in other processes."""
        self._latest_final_infos.extend(infos)

    def _set_final_infos(self, state: dict[str, Any]) -> None:
        """Take those that :meth:`get_state` has put into its ``state``; earlier versions had none there."""
        self._latest_final_infos.clear()
        self.add_final_infos(state.get('final_infos', ()))

    @abc.abstractmethod
    def _reset(self) -> TimeStep:
        """Start a new episode in every environment."""

    @abc.abstractmethod
    def _step(self, action: NestedTensor) -> TimeStep:
        """Take one step in every environment."""

    def request_reset(self, mask: torch.Tensor) -> None:
        """End the current episodes of some environments from outside: their next step is FIRST.

        What wrappers that end episodes are made of. The step at hand stays what it is; the caller marks it LAST.

        Args:
            mask: bool ``[B]``.

        Raises:
            UnsupportedOperationError: this kind of environment cannot.
        """
        raise UnsupportedOperationError(f'{self.name} cannot end the episodes of some environments of the batch')

    def reset_envs(self, mask: torch.Tensor) -> TimeStep:
        """Start a new episode in some environments at once.

        Args:
            mask: bool ``[B]``.

        Returns:
            Time steps ``[B, ...]``: FIRST where ``mask``, the current step elsewhere. It becomes the current one.

        Raises:
            UnsupportedOperationError: this kind of environment cannot.
        """
        raise UnsupportedOperationError(f'{self.name} cannot reset some environments of the batch')

    def seed(self, seed: int | None) -> None:
        """Give each environment its own stream of random numbers derived from ``seed``, from the next reset on.

        The next ``step`` resets all environments, so that the same seed gives the same sequence at any time.
        """
        self._current = None
        self._seed(seed)

    @abc.abstractmethod
    def _seed(self, seed: int | None) -> None:
        """Take ``seed`` for the next reset."""

    # Saving ----------------------------------------------------------------------------------------------------

    @property
    def resumable(self) -> bool:
        """Whether :meth:`get_state` gives a state now."""
        return self.get_state() is not None

    def get_state(self) -> Any:
        """All that is needed to go on exactly from here, as a picklable object; ``None`` if that is impossible."""
        return None

    def set_state(self, state: Any) -> None:
        """Go on exactly from where :meth:`get_state` was called on an equally constructed environment.

        Raises:
            UnsupportedOperationError: this kind of environment cannot.
            ValueError: the state is of another kind or number of environments.
        """
        raise UnsupportedOperationError(f'the state of {self.name} cannot be restored')

    # Showing and closing ---------------------------------------------------------------------------------------

    def render(self, mode: str = 'rgb_array') -> np.ndarray | None:
        """Show environment 0.

        Args:
            mode: 'rgb_array': return a picture, uint8 ``[H, W, 3]``; 'human': show it in a window.

        Raises:
            UnsupportedOperationError: there is nothing to show, or no display.
        """
        raise UnsupportedOperationError(f'{self.name} cannot be rendered')

    def close(self) -> None:  # noqa: B027 - nothing to free is the common case
        """Free what the environments hold; may be called more than once."""

    def __enter__(self) -> 'AlfEnvironment':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def latest_episodes(batch_size: int) -> collections.deque:
    """Keeps what there is to tell of the latest episodes: of ten at least, and one for each of ``B`` environments."""
    return collections.deque(maxlen=max(_EPISODES, batch_size))


def select(mask: torch.Tensor, ours: NestedTensor, theirs: NestedTensor) -> NestedTensor:
    """The nest whose rows are those of ``ours`` where ``mask``, bool ``[B]``, and those of ``theirs`` elsewhere."""
    return nest.map_structure(
        lambda x, y: torch.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y), ours, theirs)
