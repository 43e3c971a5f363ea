"""Base class of wrappers around an :class:`AlfEnvironment`."""
import copy
from collections.abc import Iterable
from typing import Any

import torch

from alfx import nest
from alfx.data_structures import TimeStep
from alfx.environments.alf_environment import AlfEnvironment, EnvironmentAsAnother
from alfx.tensor_specs import NestedTensor

_MODULE = 'alfx.environments.alf_wrappers'


class AlfEnvironmentBaseWrapper(EnvironmentAsAnother):
    """A wrapper that changes nothing.

    A subclass changes actions in ``_inner`` and time steps in ``_outer``. A subclass with its own state overrides
    ``_reset`` and ``_step`` and lists its attributes in ``_STATE``.

    Args:
        env: the environment.
    """

    _STATE: tuple[str, ...] = ()

    def __init__(self, env: AlfEnvironment):
        self._env = env

    def wrapped_env(self) -> AlfEnvironment:
        """Return the wrapped environment."""
        return self._env

    # Stepping --------------------------------------------------------------------------------------------------

    def _inner(self, action: NestedTensor) -> NestedTensor:
        """Return the action of the wrapped environment for an action given from outside."""
        return action

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        """Return the outer time step for a time step of the wrapped environment.

        Args:
            time_step: it is not changed.
            action: the action given from outside; ``None`` after a reset.
        """
        return time_step

    def _reset(self) -> TimeStep:
        return self._outer(self._env.reset(), None)

    def _step(self, action: NestedTensor) -> TimeStep:
        return self._outer(self._env.step(self._inner(action)), action)

    def final_infos(self) -> dict[int, dict[str, float]]:
        return self._env.final_infos()

    def latest_final_infos(self) -> list[dict[str, float]]:
        return self._env.latest_final_infos()

    def add_final_infos(self, infos: Iterable[dict[str, float]]) -> None:
        self._env.add_final_infos(infos)

    def request_reset(self, mask: torch.Tensor) -> None:
        self._env.request_reset(mask)

    def _seed(self, seed: int | None) -> None:
        self._env.seed(seed)

    # Description -----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return self._env.batch_size

    @property
    def name(self) -> str:
        return self._env.name

    # Saving and closing -----------------------------------------------------------------------------------------

    def get_state(self) -> Any:
        inner = self._env.get_state()
        if inner is None:
            return None
        own = {name: _saved(getattr(self, name)) for name in self._STATE}
        current = None if self._current is None else nest.map_structure(torch.clone, self._current)
        return {'env': inner, 'wrapper': type(self).__name__, 'own': own, 'current': current}

    def set_state(self, state: Any) -> None:
        if state.get('wrapper') != type(self).__name__:
            raise ValueError(f"saved state: expected a {type(self).__name__}, found a {state.get('wrapper')}: the "
                             'environment had different wrappers when it was saved')
        self._env.set_state(state['env'])
        for name, value in state['own'].items():
            current = getattr(self, name)
            if isinstance(current, torch.Generator):
                current.set_state(value)
            else:
                setattr(self, name, copy.deepcopy(value))
        current = state['current']
        self._current = None if current is None else nest.map_structure(torch.clone, current)

    def close(self) -> None:
        self._env.close()


def _saved(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
