"""A group of gymnasium environments that one process steps one after the other, with errors per environment.

:class:`~alfx.environments.vector_env.SerialVectorEnv` and each worker of
:class:`~alfx.environments.process_vector_env.ProcessVectorEnv` run such a group, so both give the same sequences.
"""
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from alfx.environments import saved_state
from alfx.environments.environment_errors import EnvironmentLoadError, EnvironmentStepError, UnsupportedSpaceError
from alfx.environments.seeding import derived_seed
from alfx.environments.spaces import flatten_sample, flatten_space
from alfx.gin_utils import ConfError

_log = logging.getLogger(__name__)
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
EnvFn = Callable[[], gymnasium.Env]
Info = tuple[int, dict[str, Any]]


class Buffers(NamedTuple):
    """Buffers for the results of a step; row i belongs to environment i.

    Fields:
        observations: arrays ``[n, ...]`` in the structure of the space.
        rewards: float64 ``[n]`` or ``[n, K]``.
        terminations: bool ``[n]``.
        truncations: bool ``[n]``.
    """

    observations: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


class EnvSpaces(NamedTuple):
    """Spaces that all environments of a batch share, and the shape of their rewards."""

    observation: spaces.Space
    action: spaces.Space
    reward_shape: tuple[int, ...]

    @classmethod
    def of(cls, env: gymnasium.Env) -> 'EnvSpaces':
        """Return the spaces of ``env``; a multi-dimensional reward is declared by ``reward_space``, as in MO-Gymnasium.
        """
        reward_space = getattr(env.unwrapped, 'reward_space', None)
        shape = () if reward_space is None else tuple(reward_space.shape)
        return cls(env.observation_space, env.action_space, shape)


class EnvironmentGroup:
    """``n`` environments with next-step autoreset.

    Args:
        env_fns: constructors.
        first_index: index of the first environment in the whole batch, for messages.
        name: name of the environments in messages.
        max_restarts: how often each environment may be constructed again after it raised. An environment that raised
            in a step yields its last known observation, reward 0 and a truncation, then a reset of the new environment.
        info_keys: keys of the info dicts that are kept; ``None``: all.
        expected: spaces that all environments must have; ``None``: the spaces of the first.

    Attributes:
        envs: the environments.
        restarts: how often each environment was restarted.
        name: name of the environments in messages.

    Raises:
        EnvironmentStepError: in all methods, if an environment raises and has no restart left.
    """

    def __init__(self, env_fns: Sequence[EnvFn], first_index: int = 0, name: str = 'environment',
                 max_restarts: int = 0, info_keys: Sequence[str] | None = None, expected: EnvSpaces | None = None):
        self._env_fns = list(env_fns)
        self._first = first_index
        self.name = name
        self._max_restarts = max_restarts
        self.info_keys = info_keys
        count = len(self._env_fns)
        self.restarts = [0] * count
        self._pending = [True] * count
        self._steps = [0] * count  # since the last reset
        self._seeds: list[int | None] = [None] * count
        self._base_seeds: list[int | None] = [None] * count
        self._guard = _Guard(self._handle)
        self._cursor = 0
        self._during = ''
        self.envs: list[gymnasium.Env] = []
        self.spaces = expected
        for i in range(count):
            self.envs.append(self._construct(i))
        self._floats = [index for index, (_, leaf) in enumerate(flatten_space(self.envs[0].observation_space))
                        if leaf.dtype is not None and np.issubdtype(leaf.dtype, np.floating)]
        self._observation_shapes = [leaf.shape for _, leaf in flatten_space(self.envs[0].observation_space)]
        self._flat = not isinstance(self.envs[0].observation_space, (spaces.Dict, spaces.Tuple))

    # Stepping --------------------------------------------------------------------------------------------------

    def step(self, actions: Sequence[Any], out: Buffers, previous: Buffers | None) -> list[Info]:
        """Step every environment, resetting those whose last step ended an episode.

        Args:
            actions: one action for each environment.
            out: buffers for the results.
            previous: the results of the previous step; an environment that raises repeats its observation from there.

        Returns:
            ``[(environment, info), ...]``.
        """
        infos: list[Info] = []
        observations, rewards, terminations, truncations = out
        pending, flat, keep = self._pending, self._flat, self.info_keys != ()
        shape = self._observation_shapes[0] if flat else ()  # a scalar cannot be broadcast by mistake
        is_finite = math.isfinite if rewards.ndim == 1 else partial(_all_finite, shape=rewards.shape[1:])
        i, count = 0, len(self.envs)
        while i < count:
            self._cursor = i
            result: Any = _NO_RESULT
            try:
                if pending[i]:
                    self._during = 'reset()'
                    info = self._reset(i, None, out)
                else:
                    self._during = 'step()'
                    result = self.envs[i].step(actions[i])
                    observation, reward, terminated, truncated, info = result
                    if flat:
                        if shape and getattr(observation, 'shape', None) != shape:
                            self._check(self.envs[i], observation)
                        observations[i] = observation
                    else:
                        self._write(observations, i, observation)
                    self._steps[i] += 1
                    if not is_finite(reward):
                        raise ValueError(f'the reward of step {self._steps[i]} of its episode is {reward!r}, expected '
                                         'a finite number')
                    if terminated is not False or truncated is not False:
                        self._check_flags(i, terminated, truncated)
                    rewards[i] = reward
                    terminations[i] = terminated
                    truncations[i] = truncated
                    pending[i] = bool(terminated or truncated)
                if info and (keep or pending[i]):
                    infos.append((i, self._kept(info, has_ended=pending[i])))
            except (Exception, SystemExit) as error:
                if isinstance(error, _SELF_EXPLANATORY):
                    raise
                if result is not _NO_RESULT and (wrong := self._describe_invalid(i, result, rewards.shape[1:])):
                    error = TypeError(wrong).with_traceback(error.__traceback__)
                if pending[i]:  # it raised in a reset: reset the new environment
                    self._handle(error)
                    continue
                self._recover(error, out, previous)
            i += 1
        if self._floats and self._may_have_nan(observations):  # one call for the whole batch: calls cost time
            for i in range(count):
                self._cursor, self._during = i, 'step()'
                with _Guard(lambda error: self._recover(error, out, previous)):
                    self._check_finite(i, observations)
        return infos

    def _recover(self, error: Exception | SystemExit, out: Buffers, previous: Buffers | None) -> None:
        self._handle(error)
        self._repeat(self._cursor, out, previous)

    def _leaves(self, observations: Any) -> list[np.ndarray]:
        return [observations] if self._flat else flatten_sample(self.envs[0].observation_space, observations)

    def _may_have_nan(self, observations: Any) -> bool:
        leaves = self._leaves(observations)
        for leaf in self._floats:
            x = leaves[leaf]
            # takes a third of the time of np.isnan; infinities are checked again in _check_finite
            if not math.isfinite(np.vdot(x, x)):
                return True
        return False

    def _check_finite(self, i: int, observations: Any) -> None:
        """Raise if the observation of environment ``i`` has NaN, which an update would spread to every parameter."""
        leaves = self._leaves(observations)
        for leaf in self._floats:
            if np.isnan(leaves[leaf][i]).any():
                path = flatten_space(self.envs[i].observation_space, 'observation')[leaf][0]
                raise ValueError(f'{path} of step {self._steps[i]} of its episode contains NaN')

    def _check_flags(self, i: int, terminated: Any, truncated: Any) -> None:
        for name, flag in (('terminated', terminated), ('truncated', truncated)):
            if not isinstance(flag, (bool, np.bool_)) and not (isinstance(flag, (int, np.integer, np.ndarray))
                                                               and flag in (0, 1)):
                raise TypeError(f'{name} of step {self._steps[i]} of its episode is {flag!r}, expected True or False')

    def _describe_invalid(self, i: int, result: Any, reward_shape: tuple[int, ...]) -> str:
        """Return a description of an invalid step result; '' if the result has the right types and shapes."""
        names = 'observation, reward, terminated, truncated, info'
        if not isinstance(result, tuple):
            return f'it returned a {type(result).__name__}, expected a tuple of 5: {names}'
        if len(result) != 5:
            old = ('\n  this looks like the old interface of gym, with one flag for the end of an episode: return '
                   'terminated and truncated instead') if len(result) == 4 else ''
            return f'it returned {len(result)} values, expected 5: {names}{old}'
        reward = result[1]
        if isinstance(reward, str) or reward is None or np.shape(reward) != reward_shape:
            expected = f'{reward_shape[0]} numbers' if reward_shape else 'a number'
            return f'the reward of step {self._steps[i]} of its episode is {reward!r}, expected {expected}'
        return ''

    def _repeat(self, i: int, out: Buffers, previous: Buffers | None) -> None:
        """Give this step a result for environment ``i``, which raised and was restarted."""
        self._pending[i] = True
        assert previous is not None
        for row, last in zip(flatten_sample(self.envs[i].observation_space, out.observations),
                             flatten_sample(self.envs[i].observation_space, previous.observations)):
            row[i] = last[i]
        out.rewards[i], out.terminations[i], out.truncations[i] = 0, False, True

    def reset(self, rows: Iterable[int], seeds: Sequence[int | None] | None, options: dict[str, Any] | None,
              out: Buffers) -> list[Info]:
        """Reset the environments ``rows`` and write their rows of ``out``.

        Args:
            rows: indices of the environments.
            seeds: one for each environment of the group; ``None`` where its random stream continues.
            options: options of gymnasium's ``reset``.
            out: buffers for the results.
        """
        infos: list[Info] = []
        for i in rows:
            self._pending[i] = True
            if seeds is not None and seeds[i] is not None:
                self._base_seeds[i] = self._seeds[i] = seeds[i]
            self._cursor, self._during = i, 'reset()'
            while self._pending[i]:
                with self._guard:
                    infos.append((i, self._kept(self._reset(i, options, out))))
        return infos

    def _reset(self, i: int, options: dict[str, Any] | None, out: Buffers) -> dict[str, Any]:
        env, seed = self.envs[i], self._seeds[i]
        if seed is not None:
            env.action_space.seed(derived_seed(seed, 1))
            env.observation_space.seed(derived_seed(seed, 2))
        observation, info = env.reset(seed=seed, options=options)
        self._check(env, observation)
        self._write(out.observations, i, observation)
        self._steps[i] = 0
        if self._floats:
            self._check_finite(i, out.observations)
        out.rewards[i], out.terminations[i], out.truncations[i] = 0, False, False
        self._seeds[i], self._pending[i] = None, False
        return info

    def request_reset(self, rows: Iterable[int]) -> None:
        """Reset the environments ``rows`` at the next step."""
        for i in rows:
            self._pending[i] = True

    def _write(self, observations: Any, i: int, observation: Any) -> None:
        if self._flat:
            observations[i] = observation
            return
        space = self.envs[i].observation_space
        values = flatten_sample(space, observation)
        for array, value, shape in zip(flatten_sample(space, observations), values, self._observation_shapes):
            if shape and getattr(value, 'shape', None) != shape:
                self._check(self.envs[i], observation)
            array[i] = value

    def _check(self, env: gymnasium.Env, observation: Any) -> None:
        # numpy would silently broadcast an observation of a wrong shape over its row, and convert None to NaN
        for (path, space), value, shape in zip(flatten_space(env.observation_space, 'observation'),
                                               flatten_sample(env.observation_space, observation),
                                               self._observation_shapes):
            if np.shape(value) != shape or value is None:
                found = 'None' if value is None else f'shape {np.shape(value)}'
                raise ValueError(f'{path}: expected a sample of its space {space}, but {self._during} returned {found}')

    def _kept(self, info: dict[str, Any], has_ended: bool = False) -> dict[str, Any]:
        keys = self.info_keys
        if keys is None:
            return info
        if has_ended:  # the last info contains the results of the episode
            return {key: value for key, value in info.items() if key in keys or isinstance(value, _NUMBERS)}
        return {key: info[key] for key in keys if key in info}

    # Errors and restarts ---------------------------------------------------------------------------------------

    def _construct(self, i: int) -> gymnasium.Env:
        self._cursor, self._during = i, 'its constructor'
        with _Guard(self._fail):
            env = self._env_fns[i]()
        if not isinstance(env, gymnasium.Env):
            raise EnvironmentLoadError(f'the constructor of environment {self._first + i} of {self.name!r} returned a '
                                       f'{type(env).__name__}, expected a gymnasium.Env')
        found = EnvSpaces.of(env)
        if self.spaces is None:
            self.spaces = found
        elif found != self.spaces:
            raise EnvironmentLoadError(f'environment {self._first + i} of {self.name!r} has different spaces from the '
                                       f'first: expected {self.spaces}, found {found}')
        return env

    def current_call(self) -> str:
        """Return the environment that is running and the call it is in, for messages."""
        return f'environment {self._first + self._cursor} of {self.name!r} in {self._during}'

    def _handle(self, error: Exception | SystemExit) -> None:
        """Restart the environment that raised, or raise ``EnvironmentStepError``."""
        i = self._cursor
        if self.restarts[i] >= self._max_restarts:
            self._fail(error)
        self.restarts[i] += 1
        _log.warning('environment %d of %s failed in %s and is restarted (%d of %d):\n%s', self._first + i, self.name,
                     self._during, self.restarts[i], self._max_restarts, _format(error))
        self._close(i)
        during = self._during
        self.envs[i] = self._construct(i)
        self._during = during
        self._seeds[i] = derived_seed(self._base_seeds[i], self.restarts[i])

    def _fail(self, error: Exception | SystemExit) -> None:
        i = self._cursor
        hint = (f'it was restarted {self.restarts[i]} times, the limit set by max_restarts' if self._max_restarts else
                'set create_environment.max_restarts to restart it')
        reason = (f'it called sys.exit({error.code})' if isinstance(error, SystemExit) else
                  f'{type(error).__name__}: {error}')
        raise EnvironmentStepError(self._first + i, self.name, self._during, reason,
                                   _format(error), hint) from None

    def _close(self, i: int) -> None:
        with _Guard(lambda error: _log.warning('environment %d of %s failed in close(): %s', self._first + i,
                                               self.name, error)):
            self.envs[i].close()

    # State, attributes and closing -----------------------------------------------------------------------------

    def get_states(self, count: int | None = None) -> list[Any]:
        """Return ``(bytes, next step resets, ...)`` for each environment; ``None`` for one that cannot be saved.

        Args:
            count: number of environments, from the first; ``None``: all.
        """
        states = [saved_state.capture(env) for env in self.envs[:count]]
        rest = zip(self._pending, self._seeds, self._base_seeds, self.restarts)
        return [None if state is None else (state, *more) for state, more in zip(states, rest)]

    def set_states(self, states: Sequence[Any]) -> str:
        """Restore the states of :meth:`get_states`; return why that failed, or '', so that a worker survives it."""
        for i, (state, pending, seed, base_seed, restarts) in enumerate(states):
            try:
                saved_state.restore(self.envs[i], state)
            except Exception as error:  # noqa: BLE001 - unpickling calls code of the environment
                return f'environment {self._first + i} of {self.name!r}: {type(error).__name__}: {error}'
            self._pending[i], self._seeds[i], self._base_seeds[i], self.restarts[i] = pending, seed, base_seed, restarts
        return ''

    def inherit(self, seeds: Sequence[int | None], restarts: Sequence[int]) -> None:
        """Continue for environments that died with their process, given their base seeds and numbers of restarts."""
        self._base_seeds, self.restarts = list(seeds), list(restarts)
        self._seeds = [derived_seed(seed, count) for seed, count in zip(seeds, restarts)]

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the attribute ``name``, or the result of the method ``name``, of each environment."""
        values = []
        for i, env in enumerate(self.envs):
            self._cursor, self._during = i, f'{name}()'
            with _Guard(self._fail):
                value = env.get_wrapper_attr(name)
                values.append(value(*args, **kwargs) if callable(value) else value)
        return values

    def close(self) -> None:
        """Close all environments; a failure is logged and the other environments are still closed."""
        for i in range(len(self.envs)):
            self._close(i)
        self.envs = []


def _all_finite(reward: Any, shape: tuple[int, ...]) -> bool:
    if np.shape(reward) != shape:
        raise ValueError('its reward has another shape')  # replaced by the message of _describe_invalid
    return bool(np.isfinite(reward).all())


_NO_RESULT = object()
_SELF_EXPLANATORY = (EnvironmentStepError, EnvironmentLoadError, UnsupportedSpaceError, ConfError)


class _Guard:
    """Context manager that passes an error or ``sys.exit`` (not an interrupt) inside it to ``handle`` and continues."""

    def __init__(self, handle: Callable[[Exception | SystemExit], None]):
        self._handle = handle

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, _SELF_EXPLANATORY):
            return False
        self._handle(error)
        return True


def _format(error: Exception | SystemExit) -> str:
    """Return the traceback of ``error`` from the first frame below this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_globals.get('__name__') == __name__:
        frames = frames.tb_next
    return ''.join(traceback.format_exception(type(error), error, frames))
