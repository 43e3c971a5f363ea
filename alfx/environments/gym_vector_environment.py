"""Adapter: a gymnasium vector environment in, :class:`~alfx.data_structures.TimeStep` of tensors out.

Each step converts once between numpy and tensors, without a Python loop over environments. Any autoreset mode gives
the same sequence of time steps, see :mod:`alfx.environments.autoreset`.
"""
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from alfx import nest
from alfx.data_structures import TimeStep
from alfx.environments import autoreset, saved_state, step_checks
from alfx.environments.alf_environment import SpecifiedEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError
from alfx.environments.rendering import Window, as_frame
from alfx.environments.seeding import environment_seeds
from alfx.environments.spaces import ActionCodec, ObservationCodec
from alfx.environments.vector_env import SupervisedVectorEnv, collected_infos
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec, nearest_zeros, torch_dtype_to_str

_STATE_FORMAT = 1


class GymVectorEnvironment(SpecifiedEnvironment):
    """A gymnasium vector environment as an :class:`AlfEnvironment`.

    Args:
        vector_env: a sync, async, natively batched or alfx vector environment, of any autoreset mode. The adapter owns
            it from now on.
        discount: the discount of every step that is neither FIRST nor a termination.
        env_id: ``TimeStep.env_id`` of environment 0; the other environments count up from it.
        env_info_keys: numbers of the info dicts that become ``TimeStep.env_info``, a dict ``[B, ...]`` that is 0 where
            an environment gave none: names (float32 scalars), or a mapping from names to specs.
        normalize_action: rescale continuous actions with finite bounds to [-1, 1].
        clip_action: clip continuous actions with finite bounds.
        simplify_box_bounds: use a scalar bound where the bound is the same for all elements.
        float_dtype: numpy type of floating point observations.
        seed: see :meth:`seed`; ``None``: unpredictable.
        name: name in messages; '': the name of the vector environment.

    Raises:
        UnsupportedSpaceError: a space has no tensor spec.
    """

    def __init__(self, vector_env: VectorEnv, discount: float = 1.0, env_id: int | None = None,
                 env_info_keys: Sequence[str] | Mapping[str, TensorSpec] = (), normalize_action: bool = False,
                 clip_action: bool = False, simplify_box_bounds: bool = True, float_dtype: Any = np.float32,
                 seed: int | None = None, name: str = ''):
        self._observations = ObservationCodec(vector_env.single_observation_space, simplify_box_bounds, float_dtype)
        self._actions = ActionCodec(vector_env.single_action_space, vector_env.num_envs, normalize_action, clip_action)
        self._observation_spec, self._action_spec = self._observations.spec, self._actions.spec
        self._no_action = [leaf.numpy() for leaf in nest.flatten(nearest_zeros(self._actions.spec, ()))]
        self._env = env = autoreset.with_next_step_autoreset(vector_env)
        self._batch_size = env.num_envs
        self._name = name or _name(vector_env)
        self._discount = float(discount)
        # step types and discounts of a step at which no episode begins or ends
        self._mid_types = np.ones(self._batch_size, np.int32)
        self._mid_discounts = np.full(self._batch_size, self._discount, np.float32)
        self._owned = getattr(env, 'owns_arrays', False)
        first = 0 if env_id is None else int(env_id)
        self._env_ids = torch.arange(first, first + self._batch_size)
        reward_space = getattr(env, 'reward_space', None)
        self._reward_spec = TensorSpec(() if reward_space is None else reward_space.shape[1:])
        if not isinstance(env_info_keys, Mapping):
            env_info_keys = {key: TensorSpec(()) for key in env_info_keys}
        self._info_specs = dict(env_info_keys)
        if isinstance(env, SupervisedVectorEnv):
            env.info_keys = tuple(self._info_specs)
        self._calls = 0
        self._first: np.ndarray | None = None  # environments whose next step is FIRST
        self._forced: np.ndarray | None = None  # of these, the ones that the vector environment will not reset itself
        self._seeds: list[int | None] | None = environment_seeds(seed, self._batch_size)
        self._window = Window(self.name)
        self._infos: dict[str, Any] = {}  # of the latest step
        self._final_infos: dict[int, dict[str, float]] = {}
        self.recorder: Any = None  # see alfx.environments.state_check

    # Description -----------------------------------------------------------------------------------------------

    @property
    def gym(self) -> VectorEnv:
        """Vector environment, with next-step autoreset."""
        return self._env

    @property
    def name(self) -> str:
        return self._name

    @property
    def metadata(self) -> dict[str, Any]:
        return self._env.metadata

    def env_info_spec(self) -> NestedTensorSpec:
        return dict(self._info_specs) if self._info_specs else ()

    @property
    def action_codec(self) -> ActionCodec:
        """Converter of actions, which works without the environment."""
        return self._actions

    def encode_action(self, action: NestedTensor) -> Any:
        """Return actions ``[B, ...]`` in the format and bounds of the vector environment."""
        return self._actions.encode(action)[0]

    # Stepping --------------------------------------------------------------------------------------------------

    def _reset(self) -> TimeStep:
        seeds, self._seeds = self._seeds, None
        if self.recorder is not None:
            self.recorder.end()
        observation, infos = self._env.reset(seed=_seed_argument(self._env, seeds))
        self._first = self._forced = None
        self._final_infos = {}
        return self._first_steps(self._decode(observation, 'reset()'), infos)

    def _first_steps(self, observation: NestedTensor, infos: dict[str, Any]) -> TimeStep:
        count = self._batch_size
        return TimeStep(torch.zeros(count, dtype=torch.int32), self._reward_spec.zeros((count, )), torch.ones(count),
                        observation, nearest_zeros(self._actions.spec, count), self._env_ids, (),
                        self._decode_infos(infos) if self._info_specs else ())

    def _step(self, action: NestedTensor) -> TimeStep:
        encoded, given = self._actions.encode(action)
        first = self._first
        if self._forced is None:
            observation, reward, terminated, truncated, infos = self._env.step(encoded)
        else:
            observation, reward, terminated, truncated, infos = self._step_and_force(encoded)
        self._infos = infos
        if not self._owned:  # natively batched environments may return something other than numpy arrays
            count = self._batch_size
            reward = step_checks.checked_rewards(reward, (count, *self._reward_spec.shape), first, self._name)
            terminated = step_checks.checked_flags(terminated, count, 'terminated', self._name)
            truncated = step_checks.checked_flags(truncated, count, 'truncated', self._name)
        rewards, step_types, discounts = reward.astype(np.float32), self._mid_types.copy(), self._mid_discounts.copy()
        # a search in bytes takes a third of the time of np.count_nonzero
        if first is not None or 1 in terminated.tobytes() or 1 in truncated.tobytes():
            done = terminated | truncated
            step_types += done
            discounts[terminated] = 0.0
            if first is not None:
                done &= ~first
                step_types[first], discounts[first], rewards[first] = 0, 1.0, 0.0
                for leaf, nothing in zip(given, self._no_action):
                    leaf[first] = nothing
            self._first = done if np.count_nonzero(done) else None
            self._final_infos = {} if self._first is None else self._episode_numbers(infos, done)
            self.add_final_infos(self._final_infos.values())
        from_numpy = torch.from_numpy
        if self.recorder is not None:
            self.recorder.add(encoded, observation, reward, terminated, truncated)
        return TimeStep(from_numpy(step_types), from_numpy(rewards), from_numpy(discounts),
                        self._decode(observation, 'step()'), self._actions.pack(given), self._env_ids, (),
                        self._decode_infos(infos) if self._info_specs else ())

    def _decode(self, observation: Any, during: str) -> NestedTensor:
        if not self._owned:
            self._calls += 1
        if not self._owned and step_checks.is_check_due(self._calls):
            step_checks.check_values(observation, self._env.single_observation_space, during, self._name)
        decoded = self._observations.decode(observation, self._owned)
        if not self._owned:
            step_checks.check_observation(decoded, self._observations.spec, self._batch_size, during, self._name)
        return decoded

    def _decode_infos(self, infos: dict[str, Any]) -> dict[str, torch.Tensor]:
        decoded = {}
        for key, spec in self._info_specs.items():
            values = np.zeros((self._batch_size, *spec.shape), torch_dtype_to_str(spec.dtype))
            if key in infos:
                present = infos.get('_' + key, slice(None))
                if getattr(infos[key], 'dtype', None) is np.dtype(object):
                    present = infos.get('_' + key, True) & np.array([value is not None for value in infos[key]])
                try:
                    values[present] = infos[key][present]
                except (TypeError, ValueError, IndexError):
                    raise EnvironmentLoadError(f"env_info_keys: expected {spec} as info[{key!r}], found "
                                               f'{reprlib.repr(infos[key])}') from None
            decoded[key] = torch.from_numpy(values)
        return decoded

    def _episode_numbers(self, infos: dict[str, Any], done: np.ndarray) -> dict[int, dict[str, float]]:
        """Return the numbers in the infos of ended episodes, except those in ``env_info``, by environment and name.

        A number in a dict inside the info is named by its path, such as 'episode/r'.
        """
        found: dict[int, dict[str, float]] = {}
        for key, values in infos.items():
            if key in self._info_specs or not isinstance(key, str) or key.startswith('_') or not key.isprintable():
                continue
            ended = done & infos.get('_' + key, True)
            if isinstance(values, dict):
                for i, numbers in self._episode_numbers(values, ended).items():
                    found.setdefault(i, {}).update({f'{key}/{name}': number for name, number in numbers.items()})
            elif isinstance(values, np.ndarray) and values.shape == (self._batch_size, ):
                if values.dtype == object:  # gymnasium's own vector environments give numpy.bool_ like this
                    ended = ended & [isinstance(value, (bool, int, float, np.number, np.bool_)) for value in values]
                elif values.dtype.kind not in 'biuf':
                    continue
                for i in np.flatnonzero(ended).tolist():
                    if math.isfinite(number := float(values[i])):
                        found.setdefault(i, {})[key] = number
        return found

    def final_infos(self) -> dict[int, dict[str, float]]:
        return self._final_infos

    def goal_reward_fn(self) -> Callable[..., Any] | None:
        return getattr(self._env, 'goal_reward_fn', None)

    # Ending episodes from outside --------------------------------------------------------------------------------

    def request_reset(self, mask: torch.Tensor) -> None:
        if not isinstance(self._env, SupervisedVectorEnv) and not autoreset.can_reset_some(self._env):
            super().request_reset(mask)
        rows = mask.cpu().numpy()
        if not rows.any():
            return
        if self.recorder is not None:
            self.recorder.request_reset(rows)
        infos = self._infos
        if isinstance(self._env, SupervisedVectorEnv):
            infos = collected_infos(self._env.request_reset(rows), self._batch_size)
        else:  # the reset cannot be requested in advance: it takes one more step, which is dropped, before the reset
            self._forced = rows.copy() if self._forced is None else self._forced | rows
        found = self._episode_numbers(infos, rows if self._first is None else rows & ~self._first)
        self._final_infos = {**self._final_infos, **found}
        self.add_final_infos(found.values())
        self._first = rows.copy() if self._first is None else self._first | rows

    def _step_and_force(self, encoded: Any) -> tuple:
        forced, self._forced = self._forced, None
        assert forced is not None
        observation, reward, terminated, truncated, infos = self._env.step(encoded)
        again, reset_infos = self._env.reset(options={'reset_mask': forced.copy()})
        rows = np.flatnonzero(forced)
        infos = autoreset.merged_infos(infos, reset_infos, rows)
        return autoreset.with_rows(self._env, observation, rows, again), reward, terminated, truncated, infos

    def _seed(self, seed: int | None) -> None:
        self._seeds = environment_seeds(seed, self._batch_size)

    # Saving ----------------------------------------------------------------------------------------------------

    def environment_states(self, count: int | None = None) -> Any:
        """Return the states of the environments without those of this adapter; ``None`` if they cannot be saved.

        Args:
            count: number of environments, from the first; ``None``: all. A natively batched environment has one state.
        """
        if isinstance(self._env, SupervisedVectorEnv):
            return self._env.get_states(count)
        # the workers of AsyncVectorEnv have no command for it
        return None if isinstance(self._env.unwrapped, AsyncVectorEnv) else saved_state.capture(self._env)

    def set_environment_states(self, states: Any) -> None:
        """Restore the result of :meth:`environment_states`.

        Raises:
            ValueError: the states cannot be restored.
        """
        if isinstance(self._env, SupervisedVectorEnv):
            self._env.set_states(states)
        else:
            saved_state.restore(self._env, states)

    def get_state(self) -> Any:
        if self._current is None:
            self.reset()
        envs = self.environment_states()
        if envs is None:
            return None
        return {'format': _STATE_FORMAT, 'batch_size': self._batch_size, 'envs': envs,
                'current': nest.map_structure(torch.clone, self._current), 'first': self._first,
                'forced': self._forced, 'seeds': self._seeds, 'final_infos': self.latest_final_infos()}

    def set_state(self, state: Any) -> None:
        if state['format'] != _STATE_FORMAT or state['batch_size'] != self._batch_size:
            raise ValueError(f"saved state: expected {self._batch_size} environments (format {_STATE_FORMAT}), found "
                             f"{state['batch_size']} (format {state['format']})")
        self.set_environment_states(state['envs'])
        self._first, self._forced, self._seeds = state['first'], state['forced'], state['seeds']
        self._current = nest.map_structure(torch.clone, state['current'])
        self._final_infos = {}
        self._set_final_infos(state)

    # Rendering and closing -------------------------------------------------------------------------------------

    def render(self, mode: str = 'rgb_array') -> np.ndarray | None:
        if mode not in ('rgb_array', 'human'):
            raise ValueError(f"render mode: expected 'rgb_array' or 'human', found {mode!r}")
        self.current_time_step()
        if self._env.render_mode == 'human' and mode == 'human':
            return None  # the environment renders itself at every step
        if self._env.render_mode is None:
            remedy = ("construct it with render_mode='rgb_array', which its constructor has to accept and keep as "
                      "self.render_mode; metadata['render_modes'] has to contain 'rgb_array' (found "
                      f"{self._env.metadata.get('render_modes') or []}), and render() takes no argument 'mode'")
            if self.name == 'AtariVectorEnv':
                remedy = 'set create_environment.eval_env_load_fn = @suite_atari.load'
            raise UnsupportedOperationError(f'{self.name} returns no images: {remedy}')
        if isinstance(self._env, SupervisedVectorEnv):
            frame = self._env.render_first()
        else:
            frames = self._env.render()
            frame = as_frame(None if frames is None or not len(frames) else frames[0])
        if isinstance(frame, UnsupportedOperationError):
            raise UnsupportedOperationError(f'{self.name} cannot be rendered with render_mode='
                                            f'{self._env.render_mode!r}: {frame}')
        if mode == 'rgb_array':
            return frame
        self._window.show(frame)
        return None

    def close(self) -> None:
        self._window.close()
        self._env.close()


def _seed_argument(env: VectorEnv, seeds: list[int | None] | None) -> Any:
    """Return ``seeds`` in the form that ``env.reset`` accepts."""
    if seeds is None or seeds[0] is None:
        return None
    inner = env if isinstance(env, SupervisedVectorEnv) else env.unwrapped
    if isinstance(inner, (SupervisedVectorEnv, SyncVectorEnv, AsyncVectorEnv)) or inner.metadata.get('seed_per_env'):
        return seeds
    if type(inner).__name__ == 'AtariVectorEnv':
        return np.array(seeds)
    return seeds[0]  # natively batched environments have one stream, or derive several from one seed


def _name(env: VectorEnv) -> str:
    return getattr(env, 'name', '') or getattr(env.spec, 'id', None) or type(env.unwrapped).__name__
