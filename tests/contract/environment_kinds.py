"""Kinds of environments, and functions that record their sequences, for the tests of environments."""
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from helpers.gym_environments import (ChainEnv, CountEnv, DictEnv, MultiRewardEnv, OffsetActionEnv)

from alfx import nest
from alfx.environments import (board_games, suite_ale_vector, suite_envpool, suite_gym, suite_tic_tac_toe,
                               suite_unittest)
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.suite_unittest import ActionType
from alfx.environments.vector_env import SerialVectorEnv
from alfx.tensor_specs import BoundedTensorSpec


def random_actions(env: AlfEnvironment, generator: torch.Generator) -> Any:
    """Return a batch of actions within the specs."""
    def draw(spec: Any) -> torch.Tensor:
        shape = (env.batch_size, *spec.shape)
        if not isinstance(spec, BoundedTensorSpec):
            return torch.randn(shape, generator=generator).to(spec.dtype)
        low, high = (torch.from_numpy(np.array(bound)).expand(spec.shape) for bound in (spec.minimum, spec.maximum))
        uniform = torch.rand(shape, generator=generator)
        if spec.is_discrete:
            return low + (uniform * (high - low + 1)).long()
        return low + uniform * (high - low)

    return nest.map_structure(draw, env.action_spec())


def record(env: AlfEnvironment, steps: int, seed: int = 0, reset: bool = True) -> list[Any]:
    """Return the time steps of an optional reset and of ``steps`` random actions."""
    generator = torch.Generator().manual_seed(seed)
    sequence = [env.reset()] if reset else []
    for _ in range(steps):
        sequence.append(env.step(random_actions(env, generator)))
    return sequence


def assert_same(first: list[Any], second: list[Any], fields: tuple[str, ...] | None = None) -> None:
    """Assert that two recorded sequences are equal, tensor by tensor."""
    assert len(first) == len(second)
    for t, (a, b) in enumerate(zip(first, second)):
        for name in fields or a._fields:
            for (path, x), y in zip(nest.flatten_with_path(getattr(a, name)), nest.flatten(getattr(b, name))):
                assert torch.equal(x, y), f'step {t}, {name}.{path}: {x} and {y}'


class BatchedCountEnv(VectorEnv):
    """A natively batched counter with any autoreset mode; the observation is (environment, episode, step)."""

    def __init__(self, num_envs: int, mode: AutoresetMode, reset_mask: bool = True):
        self.num_envs = num_envs
        self.metadata = {'autoreset_mode': mode, 'reset_mask': reset_mask}
        self._mode, self._reset_mask = mode, reset_mask
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3, ), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._episode, self._time = np.zeros(num_envs, int), np.zeros(num_envs, int)
        self._done = np.zeros(num_envs, bool)

    def _observe(self) -> np.ndarray:
        return np.stack([np.arange(self.num_envs), self._episode, self._time], 1).astype(np.float32)

    def _begin(self, mask: np.ndarray) -> None:
        self._episode[mask] += 1
        self._time[mask] = 0
        self._done[mask] = False

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        mask = (options or {}).get('reset_mask') if self._reset_mask else None
        if seed is not None:
            self._episode[:] = 0
        self._begin(np.ones(self.num_envs, bool) if mask is None else mask)
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> tuple:
        before = self._done.copy()
        if self._mode is AutoresetMode.DISABLED:
            assert not before.any(), 'stepped beyond the end of an episode'
        self._time += 1
        if self._mode is AutoresetMode.NEXT_STEP:
            self._begin(before)
        ended = self._time >= 2 + np.arange(self.num_envs) % 3
        if self._mode is AutoresetMode.NEXT_STEP:
            ended &= ~before
        self._done = ended
        infos: dict[str, Any] = {}
        rewards = np.where(before & (self._mode is AutoresetMode.NEXT_STEP), 0.0, self._time * 1.0)
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            infos = {'final_obs': self._observe(), '_final_obs': ended}
            terminated = ended.copy()
            self._begin(ended)
            return self._observe(), rewards, terminated, np.zeros_like(ended), infos
        return self._observe(), rewards, ended.copy(), np.zeros_like(ended), infos


VectorCtor = Callable[[list[Callable[[], gymnasium.Env]]], VectorEnv]

# every way to step the same constructors that must give the same sequence
IN_PROCESS: dict[str, VectorCtor] = {
    'serial': SerialVectorEnv,
    'sync, next step': lambda fns: SyncVectorEnv(fns),
    'sync, same step': lambda fns: SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP),
    'sync, disabled': lambda fns: SyncVectorEnv(fns, autoreset_mode=AutoresetMode.DISABLED),
}
IN_PROCESSES: dict[str, VectorCtor] = {
    'processes': ProcessVectorEnv,
    'processes of two': lambda fns: ProcessVectorEnv(fns, envs_per_worker=2, start_serially=False),
    'async, next step': lambda fns: AsyncVectorEnv(fns),
    'async, same step': lambda fns: AsyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP, copy=False),
    'async, disabled': lambda fns: AsyncVectorEnv(fns, autoreset_mode=AutoresetMode.DISABLED, shared_memory=False),
}


def tiny(*constructors: Callable[[], gymnasium.Env], vector: VectorCtor = SerialVectorEnv, seed: int | None = 3,
         **kwargs: Any) -> GymVectorEnvironment:
    """Wrap gymnasium environments of tests as an AlfEnvironment."""
    return GymVectorEnvironment(vector(list(constructors)), seed=seed, **kwargs)


def _count(length: int) -> Callable[[], gymnasium.Env]:
    return lambda: CountEnv(length, terminate=length % 2 == 0)


KINDS: dict[str, Callable[[], AlfEnvironment]] = {
    'count': lambda: tiny(*[_count(n) for n in (1, 2, 3, 4)], env_info_keys=('step', ), discount=0.9),
    'chain': lambda: tiny(*[lambda: ChainEnv(3, start_noise=1)] * 2),
    'nested': lambda: tiny(*[DictEnv] * 3),
    'nested, actions in [-1, 1]': lambda: tiny(*[DictEnv] * 3, normalize_action=True, clip_action=True),
    'offset actions': lambda: tiny(*[OffsetActionEnv] * 2),
    'two rewards': lambda: tiny(*[MultiRewardEnv] * 2),
    'batch of one': lambda: tiny(_count(2)),
    'processes': lambda: tiny(*[DictEnv] * 3, vector=lambda fns: ProcessVectorEnv(fns, envs_per_worker=2)),
    'CartPole': lambda: suite_gym.load('CartPole-v1', batch_size=3, max_episode_steps=9),
    'CartPole, native': lambda: suite_gym.load('CartPole-v1', batch_size=3, native=True),
    'Pendulum': lambda: suite_gym.load('Pendulum-v1', batch_size=2, max_episode_steps=7),
    'FrozenLake': lambda: suite_gym.load('FrozenLake-v1', batch_size=2),
    'native, same step': lambda: GymVectorEnvironment(BatchedCountEnv(4, AutoresetMode.SAME_STEP, False), seed=3),
    'native, disabled': lambda: GymVectorEnvironment(BatchedCountEnv(4, AutoresetMode.DISABLED), seed=3),
    'unittest value': lambda: suite_unittest.ValueUnittestEnv(3, 4, reward_dim=2),
    'unittest policy': lambda: suite_unittest.PolicyUnittestEnv(3, 4, 2, ActionType.Continuous, True),
    'unittest mixed': lambda: suite_unittest.MixedPolicyUnittestEnv(3, 4),
    'unittest memory': lambda: suite_unittest.RNNPolicyUnittestEnv(3, 6),
    'board game': lambda: board_games.load('connect_four', 3),
    'board game, opponent': lambda: board_games.load('tic_tac_toe', 3, board_games.random_opponent),
    'tic_tac_toe': lambda: suite_tic_tac_toe.load(batch_size=2),
}


def _needs(package: str, make: Callable[..., AlfEnvironment], *args: Any,
           **kwargs: Any) -> Callable[[], AlfEnvironment]:
    def made() -> AlfEnvironment:
        pytest.importorskip(package)
        return make(*args, **kwargs)

    return made


# batches stepped in C++, whose state is not accessible
POOLED: dict[str, Callable[[], AlfEnvironment]] = {
    'EnvPool, CartPole': _needs('envpool', suite_envpool.load, 'CartPole-v1', batch_size=3, max_episode_steps=9),
    'EnvPool, Pendulum': _needs('envpool', suite_envpool.load, 'Pendulum-v1', batch_size=2, max_episode_steps=7),
    'EnvPool, MiniGrid': _needs('envpool', suite_envpool.load, 'MiniGrid-Empty-5x5-v0', batch_size=3,
                                max_episode_steps=6, env_info_keys=('elapsed_step', )),
    'ALE, vector': _needs('ale_py', suite_ale_vector.load, 'Pong', batch_size=3, max_episode_steps=8, noop_max=3,
                          screen_size=20),
}
