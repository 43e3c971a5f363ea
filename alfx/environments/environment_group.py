"""A group of gymnasium environments that one process steps one after the other, with errors per environment.

:class:`~alfx.environments.vector_env.SerialVectorEnv` and each worker of
:class:`~alfx.environments.process_vector_env.ProcessVectorEnv` run such a group, so both give the same sequences.
"""
import contextlib
import inspect
import logging
import math
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit

from alfx.environments import saved_state
from alfx.environments.environment_errors import (EnvironmentLoadError, EnvironmentStepError,
                                                  UnsupportedOperationError, UnsupportedSpaceError)
from alfx.environments.rendering import as_frame
from alfx.environments.seeding import derived_seed
from alfx.environments.spaces import flatten_sample, flatten_space
from alfx.environments.step_checks import INFINITE, WRONG_VALUE, described_outside, is_check_due, warn_once
from alfx.gin_utils import ConfError
from alfx.utils import random_state

_log = logging.getLogger(__name__)
_SAME_REWARD = {cls.step for cls in (gymnasium.Wrapper, gymnasium.ObservationWrapper, gymnasium.ActionWrapper,
                                     TimeLimit, OrderEnforcing, RecordEpisodeStatistics)}
_OLD_INTERFACE = ('this looks like the old interface of gym: define reset(self, *, seed=None, options=None), which '
                  'returns (observation, info), where info is a dict; '
                  'step(action) returns (observation, reward, terminated, truncated, info)')
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

        The declaration of the outermost wrapper counts. Wrappers outside of it may make the reward a number: one step
        is taken to find out.
        """
        layer, is_changed = env, False
        while not (declares := hasattr(type(layer), 'reward_space') or 'reward_space' in vars(layer)) and isinstance(
                layer, gymnasium.Wrapper):
            is_changed |= type(layer).step not in _SAME_REWARD
            layer = layer.env
        reward_space = layer.reward_space if declares else None  # type: ignore[attr-defined]
        shape = () if reward_space is None else tuple(getattr(reward_space, 'shape', ()))
        if shape and (is_changed or layer is not env.unwrapped):
            env.reset()
            reward: Any = env.step(env.action_space.sample())[1]
            shape = np.shape(reward)
        return cls(env.observation_space, env.action_space, shape)


class EnvironmentGroup:
    """``n`` environments with next-step autoreset.

    Args:
        env_fns: constructors.
        first_index: index of the first environment in the whole batch, for messages.
        name: name of the environments in messages.
        max_restarts: how many times each environment may be recreated after it raised. An environment that raised
            in a step yields its last known observation, reward 0 and a truncation, then a reset of the new environment.
        info_keys: keys of the info dicts that are kept; ``None``: all.
        expected: spaces that all environments must have; ``None``: the spaces of the first.
        owns_process: also seed the global random generators of the process, which nothing else may use.

    Attributes:
        envs: the environments.
        restarts: how many times each environment was restarted.
        name: name of the environments in messages.

    Raises:
        EnvironmentStepError: in all methods, if an environment raises and has no restart left.
    """

    def __init__(self, env_fns: Sequence[EnvFn], first_index: int = 0, name: str = 'environment', max_restarts: int = 0,
                 info_keys: Sequence[str] | None = None, expected: EnvSpaces | None = None, owns_process: bool = False):
        self._env_fns = list(env_fns)
        self._first = first_index
        self.name = name
        self._max_restarts = max_restarts
        self.info_keys = info_keys
        self._owns_process = owns_process
        self._calls = 0
        self._checks = True  # whether the current call compares observations with their space
        count = len(self._env_fns)
        self.restarts = [0] * count
        self._pending = [True] * count
        self._steps = [0] * count  # since the last reset
        self._last_infos: list[dict[str, Any]] = [{}] * count
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
        self._calls += 1
        checks = self._checks = is_check_due(self._calls)
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
                    if checks:
                        self._check(self.envs[i], observation)
                        self._check_values(i, observation)
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
                    self._last_infos[i] = info or {}
                if info and (keep or pending[i]):
                    infos.append((i, self._kept(info, has_ended=pending[i])))
            except (Exception, SystemExit) as error:
                if isinstance(error, _SELF_EXPLANATORY):
                    raise
                if result is not _NO_RESULT:
                    self._refuse_invalid(i, result, rewards.shape[1:])
                if pending[i]:  # it raised in a reset: reset the new environment
                    self._handle(error)
                    continue
                self._recover(error, out, previous)
            i += 1
        if self._floats and self._may_be_infinite(observations):  # one call for the whole batch: calls cost time
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

    def _may_be_infinite(self, observations: Any) -> bool:
        leaves = self._leaves(observations)
        # takes a third of the time of np.isfinite; the square of a large number is checked again in _check_finite
        return not all(float(np.vdot(x, x)) <= _MAX_SQUARES for x in (leaves[leaf] for leaf in self._floats))

    def _check_finite(self, i: int, observations: Any) -> None:
        """Raise if the observation of environment ``i`` has NaN, which an update would spread; warn of infinity."""
        leaves = self._leaves(observations)
        for leaf in self._floats:
            x = leaves[leaf][i]
            with np.errstate(over='ignore'):
                stored = x.astype(np.float32)
            if not np.isfinite(stored).all():
                path = flatten_space(self.envs[i].observation_space, 'observation')[leaf][0]
                where = f'{path} of step {self._steps[i]} of its episode contains'
                if np.isnan(x).any():
                    raise ValueError(f'{where} NaN')
                found = 'a number too large for float32' if np.isfinite(x).all() else 'infinity'
                warn_once(self._first + i, self.name, f'{where} {found}', INFINITE)

    def _check_values(self, i: int, observation: Any) -> None:
        """Raise ``EnvironmentStepError`` if the dtype of its space would change an observation.

        Numbers outside the bounds of a floating point space are only logged, because they are stored as they are.
        """
        space = self.envs[i].observation_space
        leaves = zip(flatten_space(space, 'observation'), [observation] if self._flat else
                     self._parts(space, observation))
        for (path, leaf), value in leaves:
            wrong = described_outside(leaf, value)
            if wrong and np.issubdtype(leaf.dtype, np.floating) and np.asarray(value).dtype.kind in 'biuf':
                if self._first == 0:  # not in every process
                    warn_once(i, self.name, f'{path} of step {self._steps[i]} contains {wrong}', '')
            elif wrong:
                raise EnvironmentStepError(self._first + i, self.name, self._during, f'{path} contains {wrong}',
                                           hint=WRONG_VALUE)

    def _check_flags(self, i: int, terminated: Any, truncated: Any) -> None:
        for name, flag in (('terminated', terminated), ('truncated', truncated)):
            if not isinstance(flag, (bool, np.bool_)) and not (isinstance(flag, (int, np.integer, np.ndarray))
                                                               and flag in (0, 1)):
                raise TypeError(f'{name} of step {self._steps[i]} of its episode is {flag!r}, expected True or False')

    def _refuse_invalid(self, i: int, result: Any, reward_shape: tuple[int, ...]) -> None:
        """Raise ``EnvironmentStepError`` if a step result has a wrong type or shape, which no restart changes."""
        names, hint = 'observation, reward, terminated, truncated, info', ''
        reward = result[1] if isinstance(result, tuple) and len(result) == 5 else 0.0
        if not isinstance(result, tuple):
            wrong = f'it returned a {type(result).__name__}, expected a tuple of 5: {names}'
        elif len(result) != 5:
            wrong = f'it returned {len(result)} values, expected 5: {names}'
            hint = _OLD_INTERFACE if len(result) == 4 else ''
        elif isinstance(reward, (str, dict)) or reward is None or np.shape(reward) != reward_shape:
            expected = f'{reward_shape[0]} numbers' if reward_shape else 'a number'
            wrong = f'the reward of step {self._steps[i]} of its episode is {reward!r}, expected {expected}'
            hint = 'a reward of K numbers needs self.reward_space = Box(low, high, (K,))' if np.ndim(reward) else ''
        elif result[4] and not isinstance(result[4], dict):
            wrong = f'its info is {result[4]!r}, expected a dict'
        else:
            return
        raise EnvironmentStepError(self._first + i, self.name, self._during, wrong, hint=hint) from None

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
            random_state.seed_generators(derived_seed(seed, 10), env.unwrapped, unseeded_only=True)
            if self._owns_process:  # for environments that draw from the generators of numpy, Python or torch
                process_seed = random_state.set_random_seed(derived_seed(seed, 9))
                module = sys.modules.get(type(env.unwrapped).__module__, sys)
                imported = filter(inspect.ismodule, vars(module).values())
                random_state.seed_generators(process_seed, module, type(env.unwrapped), *imported)
            with contextlib.suppress(AttributeError):  # for a reset that ignores its seed
                env.unwrapped.np_random = np.random.default_rng(derived_seed(seed, 3))
            for part in (env.unwrapped, env):  # the spaces of a wrapper may be different objects
                for number, name in enumerate(('action_space', 'observation_space'), start=1):
                    if hasattr(part, name):
                        getattr(part, name).seed(derived_seed(seed, number))
        try:
            result = env.reset(seed=seed, options=options)
        except TypeError as error:
            if not re.search(r"reset\(\) got (an unexpected|some positional-only) .*'(seed|options)", str(error)):
                raise
            raise EnvironmentStepError(self._first + i, self.name, 'reset()', str(error), hint=_OLD_INTERFACE) from None
        observation, info = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, result)
        if info is None or isinstance(info, list) and not info:
            info = {}
        if not isinstance(info, dict) or info is observation or (
                isinstance(env.observation_space, spaces.Tuple) and env.observation_space.contains(result)):
            raise EnvironmentStepError(self._first + i, self.name, 'reset()', 'it returned '
                                       f'{reprlib.repr(result)}, expected (observation, info)', hint=_OLD_INTERFACE)
        self._check(env, observation)
        if self._checks:
            self._check_values(i, observation)
        self._write(out.observations, i, observation)
        self._steps[i] = 0
        if self._floats:
            self._check_finite(i, out.observations)
        out.rewards[i], out.terminations[i], out.truncations[i] = 0, False, False
        self._seeds[i], self._pending[i] = None, False
        return info

    def request_reset(self, rows: Sequence[int]) -> list[Info]:
        """Reset the environments ``rows`` at the next step; return the numbers in the infos of their last steps."""
        for i in rows:
            self._pending[i] = True
        return [(i, _numbers(self._last_infos[i])) for i in rows]

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
                                               self._parts(env.observation_space, observation),
                                               self._observation_shapes):
            if np.shape(value) != shape or value is None:
                found = 'None' if value is None else f'shape {np.shape(value)}'
                raise _WrongObservation(f'{path}: expected a sample of its space {space}, but {self._during} returned '
                                        f'{found}')

    def _parts(self, space: spaces.Space, observation: Any) -> list[Any]:
        """Return the parts of one observation; an observation of another structure raises ``ValueError``."""
        with contextlib.suppress(LookupError, TypeError):
            parts = flatten_sample(space, observation)
            if len(parts) == len(self._observation_shapes):
                return parts
        raise _WrongObservation(f'observation: expected a sample of its space {space}, but {self._during} returned '
                                f'{reprlib.repr(observation)}')

    def _kept(self, info: dict[str, Any], has_ended: bool = False) -> dict[str, Any]:
        keys = self.info_keys
        if keys is None:
            return dict(info)
        if has_ended:  # the last info contains the results of the episode
            return {**_numbers(info), **{key: info[key] for key in keys if key in info}}
        return {key: info[key] for key in keys if key in info}

    # Errors and restarts ---------------------------------------------------------------------------------------

    def _construct(self, i: int) -> gymnasium.Env:
        self._cursor, self._during = i, 'its constructor'
        with _Guard(self._fail):
            env = self._env_fns[i]()
        if not isinstance(env, gymnasium.Env):
            raise EnvironmentLoadError(f'the constructor of environment {self._first + i} of {self.name!r} returned a '
                                       f'{type(env).__name__}, expected a gymnasium.Env')
        if i and env.unwrapped is self.envs[0].unwrapped:
            raise EnvironmentLoadError(f'the constructor of environment {self._first + i} of {self.name!r} returned '
                                       'the same object as the first; create a new environment in each call')
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
                'correct the environment, or set create_environment.max_restarts if it fails only occasionally')
        if re.search(r'\.(step|reset)\(.*\n[\s^~]*ValueError: .* to unpack \(expected [25]\b', _format(error)):
            hint = _OLD_INTERFACE  # a wrapper unpacked the result
        if isinstance(error, FileNotFoundError):
            hint = 'name files relative to the module that reads them: pathlib.Path(__file__).parent / NAME'
        if isinstance(error, _WrongObservation):
            raise EnvironmentStepError(self._first + i, self.name, self._during, str(error),
                                       hint='change the space, or what the environment returns') from None
        reason = (f'it called sys.exit({error.code})' if isinstance(error, SystemExit) else
                  f'{type(error).__name__}: {error}')
        raise EnvironmentStepError(self._first + i, self.name, self._during, reason, _format(error), hint) from None

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
        process = [random_state.capture() if self._owns_process else None] + [None] * len(states)
        rest = zip(self._pending, self._seeds, self._base_seeds, self.restarts, process)
        return [None if state is None else (state, *more) for state, more in zip(states, rest)]

    def set_states(self, states: Sequence[Any]) -> str:
        """Restore the states of :meth:`get_states`; return why that failed, or '', so that a worker survives it."""
        for i, (state, pending, seed, base_seed, restarts, *process) in enumerate(states):
            try:
                if self._owns_process and any(process):
                    random_state.restore(process[0])
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

    def render_first(self) -> Any:
        """Return the frame of environment 0, uint8 ``[H, W, 3]``, or the error, not raised, if there is none."""
        try:
            return as_frame(self.envs[0].render())
        except Exception as error:  # noqa: BLE001 (a failed frame must not end the run)
            reason = str(error) if isinstance(error, UnsupportedOperationError) else f'{type(error).__name__}: {error}'
            return UnsupportedOperationError(reason)

    def close(self) -> None:
        """Close all environments; a failure is logged and the other environments are still closed."""
        for i in range(len(self.envs)):
            self._close(i)
        self.envs = []


def _numbers(info: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in an info and in the dicts inside it."""
    found = {}
    for key, value in info.items():
        if getattr(value, 'shape', None) in ((), (1, ), (1, 1)) and hasattr(value, 'item'):  # of numpy or torch
            value = value.item()
        if isinstance(value, dict):
            value = _numbers(value)
        if isinstance(value, float) or isinstance(value, int) and abs(value) < 2**63 or (
                isinstance(value, dict) and value):
            found[key] = value
    return found


def _all_finite(reward: Any, shape: tuple[int, ...]) -> bool:
    if np.shape(reward) != shape:
        raise ValueError('its reward has another shape')  # replaced by the message of _describe_invalid
    return bool(np.isfinite(reward).all())


_MAX_SQUARES = 1e77  # about the square of the largest float32
_NO_RESULT = object()
_SELF_EXPLANATORY = (EnvironmentStepError, EnvironmentLoadError, UnsupportedSpaceError, ConfError)


class _WrongObservation(ValueError):
    """Raised if an observation does not have the structure of its space."""


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
