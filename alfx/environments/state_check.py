"""Verification of saved states of environments: restore one in another process, repeat recorded actions, and compare.

A pickle contains the attributes of an environment, but not what exists only in this process: a simulator behind a
handle, an address, a class attribute, a file that is deleted at the end. :class:`Recorder` records one environment
during the run. :func:`replay` restores the recorded state in another process and repeats the actions. Results have to
be equal bit for bit. :mod:`alfx.trainers.environment_state` decides when to do this and what follows.
"""
import hashlib
import time
from typing import Any, NamedTuple

import numpy as np

from alfx.environments import saved_state
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.spaces import flatten_sample, unflatten_sample
from alfx.environments.vector_env import SupervisedVectorEnv

_FIRST_STEPS = 23  # the first states of a run may equal the state of a new environment by chance
_MIN_STEPS, _MAX_STEPS = 20, 1000
_MAX_SECONDS = 60.0  # of a replay


class Result(NamedTuple):
    """Result of a step of the recorded environments; the observation is represented by its hash."""

    observation: str
    reward: list[float]
    terminated: list[bool]
    truncated: list[bool]


class Recording(NamedTuple):
    """State of the first environment of a batch (of the whole batch if it is natively batched) and what followed.

    Fields:
        states: see ``GymVectorEnvironment.environment_states``.
        restarts: number of restarts of the environment when the state was saved.
        steps: leaves ``[n, ...]`` of the actions of ``n`` environments and the result, for each step; None where
            the episode was ended from outside.
    """

    states: Any
    restarts: int
    steps: list[tuple[list[np.ndarray], Result] | None]

    @property
    def is_complete(self) -> bool:
        """Return whether the recording has 20 steps and the beginning of an episode, or 1,000 steps."""
        begins = any(step is None or any(step[1].terminated) or any(step[1].truncated) for step in self.steps[:-1])
        return len(self.steps) >= _MAX_STEPS or begins and len(self.steps) >= _MIN_STEPS


class Recorder:
    """Recorder of a :class:`GymVectorEnvironment`.

    Recording begins again whenever the number of steps has doubled, so that the state is from the middle of the run.

    Attributes:
        recording: latest complete recording, or the one in progress; None before the first.
        num_bytes: estimated size of the states of all environments; 0 before the first recording.

    Args:
        env: environment to record; it calls :meth:`add` for each step until :meth:`stop` is called.
        max_bytes: do not record states if those of all environments would take more.
    """

    def __init__(self, env: GymVectorEnvironment, max_bytes: float):
        self._env, self._max_bytes = env, max_bytes
        self._count = 1 if isinstance(env.gym, SupervisedVectorEnv) else env.batch_size
        self._steps, self._next = 0, _FIRST_STEPS
        self._current: Recording | None = None
        self.recording: Recording | None = None
        self.num_bytes = 0
        env.recorder = self

    def add(self, actions: Any, *results: Any) -> None:
        """Record a step: batches of actions, observations, rewards and flags as the vector environment has them."""
        self._steps += 1
        gym, count, current = self._env.gym, self._count, self._current
        if current is not None:
            given = [leaf[:count].copy() for leaf in flatten_sample(gym.single_action_space, actions)]
            current.steps.append((given, _result(gym, count, *results)))
            if current.is_complete:
                self._end()
        if self._steps == self._next:  # 23, 49, 101, ...: no length of episodes has all of these at their ends
            self._next = 2 * self._next + 3
            self.end()
            self._begin()

    def _begin(self) -> None:
        states = self._env.environment_states(self._count)
        if states is not None:
            state = states if isinstance(states, bytes) else states[0][0]
            self.num_bytes = len(state) * self._env.batch_size // self._count
        if not saved_state.needs_check(states) or self.num_bytes > self._max_bytes:
            self.stop()
        else:
            self._current = Recording(states, self._restarts(), [])

    def request_reset(self, rows: np.ndarray) -> None:
        """Record that episodes of ``rows``, bool ``[B]``, are ended from outside."""
        if self._current is not None and rows[:self._count].any():
            if isinstance(self._env.gym, SupervisedVectorEnv):
                self._current.steps.append(None)
            else:
                self.end()

    def end(self) -> None:
        """End the recording, because environments are reset."""
        if self.recording is None or not self.recording.is_complete:
            self._end()
        self._current = None

    def _end(self) -> None:
        current, self._current = self._current, None
        if current is not None and current.steps and current.restarts == self._restarts():
            self.recording = current

    def _restarts(self) -> int:
        return int(self._env.gym.restarts[0]) if isinstance(self._env.gym, SupervisedVectorEnv) else 0

    def latest(self) -> Recording | None:
        """Return the latest complete recording, or else the one in progress; None if there is none."""
        if self.recording is None and self._current is not None and self._current.steps:
            current = self._current
            self._end()
            self._current = current
        return self.recording

    def stop(self) -> None:
        """Stop recording."""
        self._current, self._env.recorder = None, None


def gym_environments(env: Any) -> list[GymVectorEnvironment]:
    """Return the environments of gymnasium in ``env``, which may be wrapped or a batch of several environments."""
    if isinstance(env, GymVectorEnvironment):
        return [env]
    inner = getattr(env, '_envs', None) or [getattr(env, '_env', None)]
    return [found for part in inner if isinstance(part, AlfEnvironment) for found in gym_environments(part)]


def replay(env: GymVectorEnvironment, recording: Recording) -> str:
    """Restore the state of a recording in ``env`` and repeat its actions.

    Args:
        env: environment that was constructed in the same way, in another process.
        recording: the recording.

    Returns:
        '' if all results are equal; else the first difference.
    """
    gym = env.gym
    gym.reset()
    own = _temporary_folders(env)
    try:
        env.set_environment_states(recording.states)
    except ValueError as error:
        return str(error)
    foreign = _temporary_folders(env) - own
    if foreign:
        return f'it refers to {min(foreign)!r}, a file or folder of the process that saved it'
    deadline = time.monotonic() + _MAX_SECONDS
    for number, step in enumerate(recording.steps, start=1):
        if number > _MIN_STEPS and time.monotonic() > deadline:  # steps are slow
            break
        if step is None:
            gym.request_reset(np.ones(1, bool))  # type: ignore[attr-defined]
            continue
        actions, expected = step
        results = gym.step(unflatten_sample(gym.single_action_space, actions))
        found = _result(gym, len(expected.reward), *results[:4])
        for name, a, b in zip(Result._fields, expected, found):
            if a != b:
                values = '' if name == 'observation' else f': {b} where it was {a}'
                return f'in another process the {name} differs {number} steps after the state was restored{values}'
    return ''


def _temporary_folders(env: GymVectorEnvironment) -> set[str]:
    envs = env.gym.envs if isinstance(env.gym, SupervisedVectorEnv) else [env.gym]  # type: ignore[attr-defined]
    return set().union(*map(saved_state.temporary_folders, envs))


def _result(gym: Any, count: int, observation: Any, reward: Any, terminated: Any, truncated: Any) -> Result:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in flatten_sample(gym.single_observation_space, observation):
        digest.update(np.ascontiguousarray(leaf[:count]).tobytes())
    return Result(digest.hexdigest(), *(np.asarray(x)[:count].tolist() for x in (reward, terminated, truncated)))
