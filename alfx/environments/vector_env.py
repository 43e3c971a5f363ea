"""gymnasium vector environments that restart, reset and save individual environments, and report their errors.

:class:`SupervisedVectorEnv` is the base class. :class:`SerialVectorEnv` steps its environments in this process,
:class:`~alfx.environments.process_vector_env.ProcessVectorEnv` in others. For the same seed both give the same
sequences. They differ from gymnasium's SyncVectorEnv and AsyncVectorEnv:

- The error of an environment names it and contains its traceback, and it is restarted where that is allowed.
- Individual environments can be reset (``request_reset``), and their states saved and restored.
- The arrays that a step returns are never written to again (``owns_arrays``), so no copies are needed.
"""
import abc
import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError
from alfx.environments.environment_group import Buffers, EnvFn, EnvironmentGroup, EnvSpaces, Info
from alfx.environments.seeding import derived_seed
from alfx.environments.spaces import flatten_sample, flatten_space, tensor_spec_from_gym_space, unflatten_sample
from alfx.environments.watchdog import Watch
from alfx.gin_utils import configurable

_log = logging.getLogger(__name__)
_ARRAYS = (bool, int, float, np.generic, np.ndarray)


class SupervisedVectorEnv(VectorEnv, abc.ABC):
    """A vector environment with next-step autoreset and access to individual environments.

    Args:
        env_spaces: the spaces of one environment.
        count: number of environments.
        metadata: metadata of one environment.
        render_mode: render mode of one environment.
        name: name of the environments in messages.

    Attributes:
        info_keys: keys of the info dicts that are kept; ``None``: all.
        reward_space: batched space of the rewards, if they are multi-dimensional.
        owns_arrays: returned arrays are never written to again.
        goal_reward_fn: ``compute_reward`` of one of the environments if they have goals.
    """

    owns_arrays = False
    goal_reward_fn: Callable[..., Any] | None = None
    _hang_hint = 'set create_environment.nonparallel = False to run it in a separate process, which can be ended'

    def __init__(self, env_spaces: EnvSpaces, count: int, metadata: dict[str, Any], render_mode: str | None, name: str):
        # clearer errors than those of batch_space
        tensor_spec_from_gym_space(env_spaces.observation, where='observation')
        tensor_spec_from_gym_space(env_spaces.action, where='action')
        self.name = name
        self.num_envs = count
        self.metadata = {**metadata, 'autoreset_mode': AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode
        self.single_observation_space = copy.deepcopy(env_spaces.observation)
        self.single_action_space = copy.deepcopy(env_spaces.action)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.reward_shape = env_spaces.reward_shape
        if self.reward_shape:
            self.reward_space = spaces.Box(-np.inf, np.inf, (count, *self.reward_shape), np.float64)
        leaves = [leaf for _, leaf in flatten_space(self.single_observation_space)]
        self._leaves = [(tuple(leaf.shape or ()), np.dtype(leaf.dtype)) for leaf in leaves]
        self._flat_action = not isinstance(self.single_action_space, (spaces.Dict, spaces.Tuple))
        self._flat_observation = not isinstance(self.single_observation_space, (spaces.Dict, spaces.Tuple))
        self._info_keys: tuple[str, ...] | None = None
        self._busy = False
        self._watch = Watch(self._hang_hint)

    @property
    def info_keys(self) -> tuple[str, ...] | None:
        return self._info_keys

    @info_keys.setter
    def info_keys(self, keys: Sequence[str] | None) -> None:
        self._info_keys = None if keys is None else tuple(keys)
        self._set_info_keys(self._info_keys)

    # Stepping --------------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options['reset_mask']``.

        Args:
            seed: a list with one seed (or ``None``) for each environment, or a number: ``seed + i`` for each.
            options: options of the environments' ``reset``, and ``reset_mask``: bool ``[num_envs]``.

        Returns:
            Observations and infos of all environments; those that were not reset repeat their last observation.
        """
        self._assert_open()
        options = dict(options) if options else {}
        mask = np.asarray(options.pop('reset_mask', np.ones(self.num_envs, bool)))
        if mask.shape != (self.num_envs, ) or mask.dtype != bool:
            raise ValueError(f"options['reset_mask']: expected bool ({self.num_envs},), found {mask.dtype} "
                             f'{mask.shape}')
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, (int, np.integer)) else seed
        if seeds is not None:
            seeds = list(seeds)
            if len(seeds) != self.num_envs:
                raise ValueError(f'seed: expected {self.num_envs} seeds, found {len(seeds)}')
            for i, space in enumerate((self.action_space, self.single_action_space, self.observation_space,
                                       self.single_observation_space)):
                space.seed(derived_seed(seeds[0], 3 + i))
        with self._watch:
            out, infos = self._reset(mask, seeds, options or None)
        self._busy = False
        return out.observations, self._collect(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments; one whose episode ended is reset instead.

        Raises:
            EnvironmentStepError: an environment raised.
        """
        if self.closed or self._busy:
            self._assert_open()
            raise RuntimeError('the last step was interrupted, and some environments have moved: call reset() first')
        self._busy = True
        with self._watch:
            out, infos = self._step(actions)
        self._busy = False
        return out.observations, out.rewards, out.terminations, out.truncations, self._collect(infos) if infos else {}

    def _assert_open(self) -> None:
        if self.closed:
            raise UnsupportedOperationError(f'the environments of {self.name} have been closed')

    def _collect(self, infos: list[Info]) -> dict[str, Any]:
        return collected_infos(infos, self.num_envs)

    def _rows(self, actions: Any) -> list[Any]:
        """Return nests of actions, one for each environment."""
        columns = flatten_sample(self.single_action_space, actions)
        return [unflatten_sample(self.single_action_space, row) for row in zip(*columns)]

    def _buffers(self) -> Buffers:
        count = self.num_envs
        arrays = [np.empty((count, *shape), dtype) for shape, dtype in self._leaves]
        return Buffers(unflatten_sample(self.single_observation_space, arrays), np.zeros((count, *self.reward_shape)),
                       np.zeros(count, bool), np.zeros(count, bool))

    # Methods of subclasses -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _reset(self, mask: np.ndarray, seeds: list[int | None] | None,
               options: dict[str, Any] | None) -> tuple[Buffers, list[Info]]:
        """Reset the environments in ``mask``."""

    @abc.abstractmethod
    def _step(self, actions: Any) -> tuple[Buffers, list[Info]]:
        """Step all environments."""

    @abc.abstractmethod
    def _set_info_keys(self, keys: tuple[str, ...] | None) -> None:
        """Keep only these keys of the infos."""

    @abc.abstractmethod
    def request_reset(self, mask: np.ndarray) -> list[Info]:
        """Reset the environments in ``mask``, bool ``[num_envs]``, at the next step.

        Returns:
            The numbers in the infos of their last steps.
        """

    @abc.abstractmethod
    def get_states(self, count: int | None = None) -> list[Any] | None:
        """Return the exact state of each environment; ``None`` if one cannot be saved or a step was interrupted.

        Args:
            count: number of environments, from the first; ``None``: all.
        """

    @abc.abstractmethod
    def set_states(self, states: list[Any]) -> None:
        """Restore the states of :meth:`get_states`.

        Raises:
            ValueError: the states cannot be restored.
        """

    @abc.abstractmethod
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the attribute ``name``, or the result of the method ``name``, of each environment."""

    @abc.abstractmethod
    def render_first(self) -> Any:
        """Return the frame of environment 0, uint8 ``[H, W, 3]``, or the ``UnsupportedOperationError`` without one."""

    @property
    @abc.abstractmethod
    def restarts(self) -> np.ndarray:
        """Number of restarts of each environment, int ``[num_envs]``."""

    def render(self) -> tuple[Any, ...]:
        """Return the results of ``render()`` of all environments."""
        return self.call('render')


@configurable
class SerialVectorEnv(SupervisedVectorEnv):
    """Vector environment that steps its environments one after the other in this process.

    Args:
        env_fns: constructors of gymnasium environments.
        max_restarts: how many times each environment may be recreated after it raised.
        name: name of the environments in messages; '': the id of the first.

    Raises:
        EnvironmentLoadError: the environments have different spaces.
        UnsupportedSpaceError: a space has no tensor spec.
        EnvironmentStepError: a constructor raised.
    """

    owns_arrays = True

    def __init__(self, env_fns: Sequence[EnvFn], max_restarts: int = 0, name: str = ''):
        if not env_fns:
            raise EnvironmentLoadError('expected at least one environment, found none')
        self._group = EnvironmentGroup(env_fns, 0, name or 'environment', max_restarts)
        first = self._group.envs[0]
        assert self._group.spaces is not None
        super().__init__(self._group.spaces, len(env_fns), first.metadata, first.render_mode,
                         name or environment_name(first))
        self._group.name, self.goal_reward_fn = self.name, goal_reward_fn(first)
        self._watch.current_call = self._group.current_call
        self._last: Buffers | None = None
        if self._flat_observation:
            self._shape, self._dtype = (self.num_envs, *self._leaves[0][0]), self._leaves[0][1]

    @classmethod
    def adopt(cls, vector_env: SyncVectorEnv) -> 'SerialVectorEnv':
        """Take over the environments of a gymnasium SyncVectorEnv, which must not be used any more."""
        adopted = cls([partial(_identity, env) for env in vector_env.envs])
        vector_env.closed = True
        return adopted

    @property
    def envs(self) -> list[gymnasium.Env]:
        """The environments."""
        return self._group.envs

    @property
    def restarts(self) -> np.ndarray:
        return np.array(self._group.restarts)

    def _reset(self, mask: np.ndarray, seeds: list[int | None] | None,
               options: dict[str, Any] | None) -> tuple[Buffers, list[Info]]:
        out = self._buffers()
        if not mask.all():
            if self._last is None:
                raise UnsupportedOperationError('reset all environments before resetting some of them')
            for new, old in zip(flatten_sample(self.single_observation_space, out.observations),
                                flatten_sample(self.single_observation_space, self._last.observations)):
                new[:] = old
        infos = self._group.reset(np.flatnonzero(mask).tolist(), seeds, options, out)
        self._last = out
        return out, infos

    def _step(self, actions: Any) -> tuple[Buffers, list[Info]]:
        count = self.num_envs
        if self._flat_observation and not self.reward_shape:
            out = Buffers(np.empty(self._shape, self._dtype), np.empty(count), np.empty(count, bool),
                          np.empty(count, bool))
        else:
            out = self._buffers()
        infos = self._group.step(actions if self._flat_action else self._rows(actions), out, self._last)
        self._last = out
        return out, infos

    def request_reset(self, mask: np.ndarray) -> list[Info]:
        return self._group.request_reset(np.flatnonzero(mask).tolist())

    def _set_info_keys(self, keys: tuple[str, ...] | None) -> None:
        self._group.info_keys = keys

    def get_states(self, count: int | None = None) -> list[Any] | None:
        states = None if self._busy else self._group.get_states(count)
        return None if states is None or any(state is None for state in states) else states

    def set_states(self, states: list[Any]) -> None:
        if self._last is None:
            self.reset()
        if reason := self._group.set_states(states):
            raise ValueError(reason)
        self._busy = False

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(self._group.call(name, args, kwargs))

    def render_first(self) -> Any:
        return self._group.render_first()

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments."""
        if hasattr(self, '_group'):  # older gymnasium also closes an object whose constructor failed
            self._group.close()


def goal_reward_fn(env: gymnasium.Env) -> Callable[..., Any] | None:
    """Return the method ``compute_reward`` of a goal environment; ``None`` for others."""
    return env.get_wrapper_attr('compute_reward') if env.has_wrapper_attr('compute_reward') else None


def collected_infos(infos: Iterable[Info], count: int) -> dict[str, Any]:
    """Return the infos of individual environments in the format of a vector environment.

    Args:
        infos: numbers and infos of the environments.
        count: number of environments.

    Returns:
        For each key an array ``[count, ...]``, whose dtype holds the values of all environments (gymnasium's has the
        type of the first value), and a mask ``_KEY``, bool ``[count]``, of the environments that gave the key; dicts
        for dicts.
    """
    columns: dict[Any, list[tuple[int, Any]]] = {}
    for i, info in infos:
        for key, value in info.items():
            columns.setdefault(key, []).append((i, value))
    collected: dict[str, Any] = {}
    for key, column in columns.items():
        rows, values = [i for i, _ in column], [value for _, value in column]
        if all(isinstance(value, dict) for value in values):
            collected[key] = collected_infos(column, count)
        else:
            array = np.empty(len(values), object)
            array[:] = values
            if all(isinstance(value, _ARRAYS) for value in values) and len({np.shape(value) for value in values}) == 1:
                array = np.stack([np.asarray(value) for value in values])
            collected[key] = np.zeros((count, *array.shape[1:]), array.dtype)
            if array.dtype == object:
                collected[key][:] = None
            collected[key][rows] = array
        collected[f'_{key}'] = mask = np.zeros(count, bool)
        mask[rows] = True
    return collected


def environment_name(env: gymnasium.Env) -> str:
    """Return the id of ``env``, or the name of its class."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _identity(env: gymnasium.Env) -> gymnasium.Env:
    return env
