"""Adapters that give vector environments of any autoreset mode next-step autoreset.

gymnasium vector environments start the next episode of a sub-environment in one of three ways (metadata
'autoreset_mode'):

- NEXT_STEP: the step after the last one ignores its action and returns the reset observation. The sequence FIRST, MID,
  ..., LAST, FIRST needs this mode.
- SAME_STEP: the last step returns the reset observation, and the final observation in its infos.
- DISABLED: the caller resets.

In the latter two modes, the environments whose next step is FIRST must stand still while the others move. The adapter
depends on the environment:

=========================  ==========================================================================================
gymnasium's SyncVectorEnv  :class:`SerialVectorEnv` takes over its environments and steps them one by one
gymnasium's AsyncVectorEnv only the workers of the other environments receive a step command (:class:`_PartialAsync`)
can reset some (DISABLED,  the environment moves and is reset again (:class:`_ResetAgain`): one more reset, with the
ale-py's AtariVectorEnv,   same distribution of episodes, but other random numbers than in NEXT_STEP mode
metadata 'reset_mask')
any other SAME_STEP        its FIRST shows the observation *after* the ignored action (:class:`_DropFirstStep`): a
                           slightly different task, whose episodes are one step shorter; a warning is logged
=========================  ==========================================================================================

The first two give exactly the sequences of NEXT_STEP, except that the workers of an AsyncVectorEnv in SAME_STEP mode
reset an environment before they send its final observation: an environment that reuses the array overwrites it.
"""
import logging
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate

from alfx.environments.spaces import flatten_sample, unflatten_sample
from alfx.environments.vector_env import SerialVectorEnv, SupervisedVectorEnv

_log = logging.getLogger(__name__)
Step = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


def autoreset_mode(vector_env: VectorEnv) -> AutoresetMode:
    """Return the mode that ``vector_env`` declares; without a declaration NEXT_STEP, as gymnasium does.

    Raises:
        ValueError: an unknown mode.
    """
    mode = vector_env.metadata.get('autoreset_mode')
    if mode is None:
        _log.warning("%s does not declare metadata['autoreset_mode']: assuming NEXT_STEP", vector_env)
        return AutoresetMode.NEXT_STEP
    return AutoresetMode(mode)


def with_next_step_autoreset(vector_env: VectorEnv) -> VectorEnv:
    """Return ``vector_env`` with next-step autoreset, wrapped if necessary; use only the returned object afterwards."""
    if isinstance(vector_env, SupervisedVectorEnv):
        return vector_env
    if type(vector_env) is SyncVectorEnv and vector_env.observation_mode == 'same':
        return SerialVectorEnv.adopt(vector_env)
    mode = autoreset_mode(vector_env)
    if mode is AutoresetMode.NEXT_STEP:
        return vector_env
    if type(vector_env) is AsyncVectorEnv:
        return _PartialAsync(vector_env, mode)
    if mode is AutoresetMode.DISABLED or can_reset_some(vector_env):
        return _ResetAgain(vector_env, mode)
    _log.warning('%s resets within the last step and cannot reset individual environments: every episode will begin '
                 'with the observation after an ignored action. Construct it with autoreset_mode=NEXT_STEP if '
                 'possible.', vector_env)
    return _DropFirstStep(vector_env, mode)


def can_reset_some(vector_env: VectorEnv) -> bool:
    """Return whether ``reset(options={'reset_mask': ...})`` is known to reset only the environments in the mask."""
    if isinstance(vector_env, NextStepAutoreset):
        return can_reset_some(vector_env.env)
    inner = vector_env.unwrapped
    if 'reset_mask' in inner.metadata:  # not part of gymnasium: custom environments can declare their support with it
        return bool(inner.metadata['reset_mask'])
    return (isinstance(inner, (SyncVectorEnv, AsyncVectorEnv, SupervisedVectorEnv))
            or type(inner).__name__ == 'AtariVectorEnv' or autoreset_mode(inner) is AutoresetMode.DISABLED)


class NextStepAutoreset(VectorWrapper):
    """Base class of the adapters: holds the reset observations of SAME_STEP back until the step in which they are due.

    Args:
        env: the vector environment.
        mode: its autoreset mode.
    """

    def __init__(self, env: VectorEnv, mode: AutoresetMode):
        super().__init__(env)
        self.metadata = {**env.metadata, 'autoreset_mode': AutoresetMode.NEXT_STEP}
        self.reward_space = getattr(env, 'reward_space', None)  # the base class does not forward it
        self._mode = mode
        self._due = np.zeros(self.num_envs, bool)
        self._held: tuple[Any, dict[str, Any]] = ((), {})

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options['reset_mask']``."""
        mask = (options or {}).get('reset_mask')
        observation, infos = self.env.reset(seed=seed, options=options)
        self._due = np.zeros(self.num_envs, bool) if mask is None else self._due & ~mask
        return observation, infos

    def step(self, actions: Any) -> Step:
        """Step all environments; those whose episode ended return their reset observation instead."""
        due = self._due
        if not due.any():
            return self._after(*self.env.step(actions))
        observation, rewards, terminated, truncated, infos = self._step_others(actions, due)
        moving = ~due
        rewards = np.where(due.reshape(-1, *[1] * (rewards.ndim - 1)), 0, rewards)
        return self._after(observation, rewards, terminated & moving, truncated & moving, infos)

    def _step_others(self, actions: Any, due: np.ndarray) -> Step:
        """Step the environments that are not due for a reset; the rows of the others hold their reset observation."""
        raise NotImplementedError

    def _standstill(self, observation: Any, infos: dict[str, Any]) -> Step:
        """Return the result of a step in which all environments are due for a reset, so that none moves."""
        count = self.num_envs
        rewards = np.zeros(count if self.reward_space is None else self.reward_space.shape)
        return observation, rewards, np.zeros(count, bool), np.zeros(count, bool), infos

    def _after(self, observation: Any, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray,
               infos: dict[str, Any]) -> Step:
        """Replace the reset observations of SAME_STEP with the final observations."""
        self._due = done = np.logical_or(terminated, truncated)
        if self._mode is not AutoresetMode.SAME_STEP or not done.any():
            return observation, rewards, terminated, truncated, infos
        self._held = (copied(self, observation), infos)
        rows = np.flatnonzero(done)
        observation = with_rows(self, observation, rows, infos['final_obs'])
        return observation, rewards, terminated, truncated, _with_final_infos(infos, rows)

    def _with_held(self, result: Step, due: np.ndarray) -> Step:
        """Return ``result`` with the held-back reset observations and infos of the environments in ``due``."""
        observation, rewards, terminated, truncated, infos = result
        observation = with_rows(self, observation, np.flatnonzero(due), self._held[0])
        return observation, rewards, terminated, truncated, merged_infos(infos, self._held[1], np.flatnonzero(due))


class _PartialAsync(NextStepAutoreset):
    """Adapter for gymnasium's AsyncVectorEnv that sends commands to its workers one by one."""

    env: AsyncVectorEnv

    def _step_others(self, actions: Any, due: np.ndarray) -> Step:
        env = self.env
        disabled = self._mode is AutoresetMode.DISABLED
        requested = []
        for i, (pipe, action) in enumerate(zip(env.parent_pipes, iterate(env.action_space, actions))):
            if disabled or not due[i]:
                pipe.send(('reset', {'seed': None, 'options': None}) if due[i] else ('step', action))
                requested.append(i)
        answers = {i: env.parent_pipes[i].recv() for i in requested}
        env._raise_if_errors([answers.get(i, (None, True))[1] for i in range(self.num_envs)])  # it counts all
        observation = copied(self, env.observations)
        rewards, flags = np.zeros(self.num_envs), np.zeros((2, self.num_envs), bool)
        infos: dict[str, Any] = {}
        for i, (answer, _) in answers.items():
            if not env.shared_memory:
                _put(self, observation, i, answer[0])
            if not due[i]:
                rewards[i], flags[0, i], flags[1, i] = answer[1:4]
            infos = env._add_info(infos, answer[-1], i)
        result = observation, rewards, flags[0], flags[1], infos
        return result if disabled else self._with_held(result, due)


class _ResetAgain(NextStepAutoreset):
    """Adapter for environments that can be reset individually: those due move with the others and are then reset."""

    def _step_others(self, actions: Any, due: np.ndarray) -> Step:
        rows = np.flatnonzero(due)
        if self._mode is AutoresetMode.DISABLED:
            observation, infos = self.env.reset(options={'reset_mask': due.copy()})
            if due.all():
                return self._standstill(observation, infos)
        elif due.all():
            return self._with_held(self._standstill(self._held[0], {}), due)
        observation, rewards, terminated, truncated, infos = self.env.step(actions)
        observation = copied(self, observation)
        again, reset_infos = self.env.reset(options={'reset_mask': due.copy()})
        _put_rows(self, observation, rows, again)
        return observation, rewards, terminated, truncated, merged_infos(infos, reset_infos, rows)


class _DropFirstStep(NextStepAutoreset):
    """Adapter for any other SAME_STEP environment: those due show the observation after the ignored action."""

    def _step_others(self, actions: Any, due: np.ndarray) -> Step:
        return self._with_held(self._standstill(self._held[0], {}), due) if due.all() else self.env.step(actions)


def copied(env: VectorEnv, observation: Any) -> Any:
    """Return a copy of a batch of observations of ``env``."""
    leaves = flatten_sample(env.single_observation_space, observation)
    return unflatten_sample(env.single_observation_space, [np.array(leaf) for leaf in leaves])


def with_rows(env: VectorEnv, observation: Any, rows: np.ndarray, source: Any) -> Any:
    """Return a copy of a batch of observations of ``env`` with ``rows`` taken from another batch."""
    result = copied(env, observation)
    _put_rows(env, result, rows, source)
    return result


def _put_rows(env: VectorEnv, observation: Any, rows: np.ndarray, source: Any) -> None:
    """Copy ``rows`` of ``source``, a batch or an array of single observations, into ``observation``."""
    if isinstance(source, np.ndarray) and source.dtype == object:
        for i in rows:
            _put(env, observation, i, source[i])
        return
    space = env.single_observation_space
    for leaf, value in zip(flatten_sample(space, observation), flatten_sample(space, source)):
        leaf[rows] = value[rows]


def _put(env: VectorEnv, observation: Any, i: int, single: Any) -> None:
    """Write the observation of one environment into row ``i`` of ``observation``."""
    space = env.single_observation_space
    for leaf, value in zip(flatten_sample(space, observation), flatten_sample(space, single)):
        leaf[i] = value


def _with_final_infos(infos: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Return the infos of a SAME_STEP step with the infos of the final steps, not of the resets, at ``rows``."""
    final = infos.get('final_info')
    rest = {key: value for key, value in infos.items() if not key.lstrip('_').startswith('final_')}
    return rest if final is None else merged_infos(rest, final, rows)


def merged_infos(infos: dict[str, Any], other: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Return ``infos`` with ``rows`` taken from ``other``; a key missing in one of them is 0 in its rows."""
    merged: dict[str, Any] = {}
    for key in infos.keys() | other.keys():
        first, second = infos.get(key), other.get(key)
        present: Any = second if first is None else first
        if isinstance(present, dict):
            merged[key] = merged_infos(first or {}, second or {}, rows)
            continue
        dtype = present.dtype if first is None or second is None else np.result_type(first, second)
        merged[key] = array = np.zeros_like(present) if first is None else np.array(first, dtype)
        array[rows] = 0 if second is None else second[rows]
    return merged
