"""EnvPool's environments: batches that C++ threads step, without Python between (Weng et al. 2022, arXiv:2206.10558).

They plug into the same adapter as gymnasium's vector environments and give the same sequences of time steps.
"""
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError, nearest
from alfx.environments.gym_wrappers import is_channels_last_image
from alfx.environments.spaces import flatten_sample, flatten_space, tensor_spec_from_gym_space, unflatten_sample
from alfx.environments.suite_gym import AlfWrapper
from alfx.tensor_specs import TensorSpec
from alfx.gin_utils.value_checks import StepLimit
from alfx.utils.extras import pip_install

# Where the time limit decides nothing but when an episode is cut off. EnvPool does not tell a termination that falls on
# the last step from a truncation; for these the limit is kept here, so that both are seen.
_PLAIN_LIMITS = ('envpool.atari', 'envpool.box2d', 'envpool.classic_control', 'envpool.mujoco.gym',
                 'envpool.mujoco.robotics', 'envpool.toy_text')
_NO_LIMIT = 2**30
_INSTEAD = {'num_envs': 'batch_size', 'batch_size': 'batch_size', 'seed': 'the seed of the run',
            'env_seed': 'the seed of the run', 'max_episode_steps': 'max_episode_steps', 'render_mode': 'render_mode'}
_SETTINGS = ('from_pixels', 'render_width', 'render_height', 'render_camera_id', 'render_env_id')


@gin_utils.configurable
def load(environment_name: str, env_id: int | None = None, discount: float = 1.0,
         max_episode_steps: StepLimit | None = None, alf_env_wrappers: Sequence[AlfWrapper] = (),
         image_channel_first: bool = True, batch_size: int = 1, num_threads: int = 0,
         env_args: Mapping[str, Any] | None = None, env_info_keys: Sequence[str] | Mapping[str, TensorSpec] = (),
         render_mode: str | None = None) -> AlfEnvironment:
    """A batch of EnvPool's environment ``environment_name``; needs the extra ``envpool``.

    Environment i draws from a stream of its own. The state of the environments cannot be saved: a run that is resumed
    begins new episodes. Continuous actions are given in [-1, 1] and clipped, as by ``suite_gym.load``.

    Args:
        environment_name: a name of ``envpool.list_all_envs()``, such as 'CartPole-v1', 'HalfCheetah-v4' or 'Pong-v5'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps after which an episode is truncated; ``None``: as registered; 0: never. In
            classic control, toy text, Box2D, Atari and Gym's MuJoCo tasks, an episode that terminates in that very
            step counts as terminated, as in gymnasium; in other families EnvPool reports it as truncated.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        image_channel_first: make images ``(C, H, W)`` of ``(H, W, C)``.
        batch_size: ``B``.
        num_threads: that step them; 0: EnvPool decides.
        env_args: further options of the environment, such as ``frame_skip`` or ``reward_clip`` for Atari.
        env_info_keys: which of EnvPool's infos become ``TimeStep.env_info``: names of float32 scalars, or a mapping
            from names to specs.
        render_mode: 'rgb_array' allows ``render`` where EnvPool can draw the environment.

    Raises:
        EnvironmentLoadError: an unknown name, option or info, EnvPool is missing, an environment of several players.
        UnsupportedSpaceError: a space has no tensor spec.
    """
    vector_env = EnvPoolVectorEnv(environment_name, batch_size, max_episode_steps, image_channel_first, num_threads,
                                  env_args, render_mode)
    unknown = [key for key in env_info_keys if key not in vector_env.info_names]
    if unknown:
        raise EnvironmentLoadError(f'env_info_keys: {environment_name} of EnvPool gives no info {unknown[0]!r}; it '
                                   f'gives {sorted(vector_env.info_names)}')
    return suite_gym.wrap_env(vector_env, env_id=env_id, discount=discount, alf_env_wrappers=alf_env_wrappers,
                              image_channel_first=False, env_info_keys=env_info_keys)


class EnvPoolVectorEnv(VectorEnv):
    """A pool as a gymnasium vector environment with next-step autoreset.

    EnvPool takes its seeds when a pool is made, so that a reset with seeds makes a new one.

    Args:
        name: EnvPool's name of the environment.
        num_envs: number of environments.
        max_episode_steps: see :func:`load`.
        image_channel_first: likewise.
        num_threads: likewise.
        options: further options of the environment.
        render_mode: 'rgb_array' or ``None``.

    Attributes:
        info_names: names of the infos.

    Raises:
        EnvironmentLoadError: as for :func:`load`.
        UnsupportedSpaceError: a space has no tensor spec.
    """

    owns_arrays = True  # a pool allocates what each step returns

    def __init__(self, name: str, num_envs: int, max_episode_steps: StepLimit | None = None,
                 image_channel_first: bool = True, num_threads: int = 0, options: Mapping[str, Any] | None = None,
                 render_mode: str | None = None):
        if num_envs < 1 or num_threads < 0:
            raise EnvironmentLoadError(f'expected batch_size of at least 1 and num_threads of at least 0, found '
                                       f'{num_envs} and {num_threads}')
        if render_mode not in (None, 'rgb_array'):
            raise EnvironmentLoadError(f"render_mode: expected 'rgb_array' or None for EnvPool, found {render_mode!r}; "
                                       "with 'rgb_array', the program play shows them in a window")
        self._envpool = _import_envpool()
        self._options = {**_checked_options(self._envpool, name, dict(options or {})), 'num_envs': num_envs,
                         'num_threads': num_threads}
        if render_mode is not None:
            self._options['render_mode'] = render_mode
        spec = _make(self._envpool.make_spec, name, self._options)
        if spec.config.max_num_players != 1:
            raise EnvironmentLoadError(f'{name} of EnvPool has {spec.config.max_num_players} players: only '
                                       'environments of one are supported')
        self.name, self.num_envs, self.render_mode = name, num_envs, render_mode
        self._limit = self._choose_limit(max_episode_steps, spec)
        self.metadata = {'render_modes': ['rgb_array'], 'autoreset_mode': AutoresetMode.NEXT_STEP, 'reset_mask': True,
                         'seed_per_env': True}
        self.info_names = {key.split(':', 1)[1] for key in spec._state_keys
                           if key.startswith('info:') and '.' not in key} | {'elapsed_step'}
        self._set_spaces(spec, image_channel_first)
        self._pool: Any = None
        self._due: np.ndarray | None = None  # the pool does not know that their episodes are over
        self._last: tuple[list[np.ndarray], dict[str, Any]] = ([], {})

    def _choose_limit(self, steps: int | None, spec: Any) -> int | None:
        """The limit that is kept here, or None if the pool keeps it."""
        if steps is not None and steps < 0:
            raise EnvironmentLoadError(f'max_episode_steps: expected at least 0, found {steps}')
        family = self._envpool.registration.registry.specs[self.name][0]
        if family in _PLAIN_LIMITS:
            self._options['max_episode_steps'] = _NO_LIMIT
            limit = spec.config.max_episode_steps if steps is None else steps
            return limit if 0 < limit < _NO_LIMIT else None
        if steps == 0:
            raise EnvironmentLoadError(f'max_episode_steps=0: {self.name} of EnvPool needs a limit, which may be part '
                                       'of its rewards; give one or leave it out')
        if steps is not None:
            self._options['max_episode_steps'] = steps
        return None

    def _set_spaces(self, spec: Any, image_channel_first: bool) -> None:
        with warnings.catch_warnings():  # of bounds that are rounded to the type of the space
            warnings.simplefilter('ignore')
            space, self.single_action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        tensor_spec_from_gym_space(space, where='observation')  # refuses by name what batch_space would fail on
        leaves = [leaf for _, leaf in flatten_space(space)]
        self._turned = [image_channel_first and is_channels_last_image(leaf) for leaf in leaves]
        self.single_observation_space = unflatten_sample(space, [
            _channel_first(leaf) if turned else leaf for leaf, turned in zip(leaves, self._turned)])
        if isinstance(self.single_observation_space, dict):
            self.single_observation_space = spaces.Dict(self.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # Stepping --------------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options['reset_mask']``.

        Args:
            seed: a number for each environment, or one for all of them together; makes a new pool.
            options: ``reset_mask``: bool ``[num_envs]``.
        """
        mask = (options or {}).get('reset_mask')
        if seed is not None or self._pool is None:
            self._make_pool(seed)
            mask = None
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        leaves, infos = self._reset_rows(rows)
        if len(rows) < self.num_envs:
            leaves = _scattered(self.num_envs, [(slice(None), self._last[0]), (rows, leaves)])
            infos = _scattered_infos(self.num_envs, [(slice(None), self._last[1]), (rows, infos)])
        if self._due is not None:
            self._due = None if mask is None or not (self._due & ~mask).any() else self._due & ~mask
        self._last = leaves, infos
        return self._observation(leaves), infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments; those whose episode ended yield the first observation of the next one."""
        if self._pool is None:
            raise UnsupportedOperationError(f'{self.name} of EnvPool: call reset() before step()')
        if self._due is None:
            leaves, rewards, terminated, truncated, infos = self._received(self._pool.step(actions))
        else:
            leaves, rewards, terminated, truncated, infos = self._step_others(actions, self._due)
            self._due = None
        if self._limit is not None:
            over = infos['elapsed_step'] >= self._limit
            if over.any():
                truncated = truncated | over
                due = over & ~terminated  # those that terminated the pool resets by itself
                self._due = due if due.any() else None
        self._last = leaves, infos
        return self._observation(leaves), rewards, terminated, truncated, infos

    def _step_others(self, actions: Any, due: np.ndarray) -> tuple:
        """Reset those that are due, step the others."""
        parts: list[tuple] = []
        moving = np.flatnonzero(~due).astype(np.int32)
        if len(moving):
            leaves = [leaf[moving] for leaf in flatten_sample(self.single_action_space, actions)]
            chosen = unflatten_sample(self.single_action_space, leaves)
            self._pool.send(chosen, moving)
            result = self._pool.recv()
            parts.append((result[-1]['env_id'], *self._received(result)))
        rows = np.flatnonzero(due)
        leaves, infos = self._reset_rows(rows)
        none = np.zeros(len(rows), bool)
        parts.append((rows, leaves, np.zeros(len(rows), np.float32), none, none, infos))
        count = self.num_envs
        rewards, terminated, truncated = _scattered(count, [(part[0], part[2:5]) for part in parts])
        return (_scattered(count, [part[:2] for part in parts]), rewards, terminated, truncated,
                _scattered_infos(count, [(part[0], part[5]) for part in parts]))

    def _reset_rows(self, rows: np.ndarray) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Observations and infos of the environments ``rows``, in that order, after a reset."""
        observation, infos = self._pool.reset(rows.astype(np.int32))
        order = np.argsort(infos['env_id'])
        leaves, infos = self._leaves(observation), _flat(infos)
        if (order[1:] < order[:-1]).any():
            leaves = [leaf[order] for leaf in leaves]
            infos = {key: value[order] for key, value in infos.items()}
        return leaves, infos

    def _received(self, result: tuple) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        observation, rewards, terminated, truncated, infos = result
        return self._leaves(observation), rewards, terminated, truncated, _flat(infos)

    def _leaves(self, observation: Any) -> list[np.ndarray]:
        leaves = flatten_sample(self.single_observation_space, observation)
        return [np.ascontiguousarray(np.moveaxis(leaf, -1, -3)) if turned else leaf
                for leaf, turned in zip(leaves, self._turned)]

    def _observation(self, leaves: list[np.ndarray]) -> Any:
        return unflatten_sample(self.single_observation_space, leaves)

    def _make_pool(self, seed: Any) -> None:
        self._pool = None  # its threads end before new ones begin
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = np.random.SeedSequence(seed).generate_state(self.num_envs) & 0x7fffffff
        else:
            seeds = np.asarray(seed)
        options = {**self._options, 'env_seed': [int(x) for x in seeds]}
        self._pool = _make(self._envpool.make_gymnasium, self.name, options)
        with warnings.catch_warnings():  # the pool makes its spaces at its first step
            warnings.simplefilter('ignore')
            assert self._pool.observation_space is not None
        self._due = None

    # Showing and closing ---------------------------------------------------------------------------------------

    def render(self) -> tuple[np.ndarray, ...] | None:
        """A picture uint8 ``[H, W, 3]`` of environment 0; ``None`` without a ``render_mode``.

        Raises:
            UnsupportedOperationError: EnvPool cannot draw this environment.
        """
        if self.render_mode is None:
            return None
        if self._pool is None:
            self.reset()
        try:
            return tuple(self._pool.render())
        except RuntimeError as error:
            raise UnsupportedOperationError(f'EnvPool cannot draw {self.name}: {error}') from error

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        self._pool = None

    def __reduce__(self) -> Any:
        raise TypeError(f'{self.name} of EnvPool: the state of its environments cannot be saved')


def _import_envpool() -> Any:
    gin_utils.require_trust('the package envpool')
    try:
        import envpool
    except ImportError as error:
        raise EnvironmentLoadError(f"suite_envpool needs the package envpool: {pip_install('envpool')} ({error})"
                                   ) from error
    return envpool


def _checked_options(envpool: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options``, all of which the environment ``name`` has."""
    registered = envpool.list_all_envs()
    if name not in registered:
        stem = name.rsplit('/', 1)[-1]
        similar = nearest(name, registered) or nearest(stem, registered)
        hint = f'did you mean {" or ".join(map(repr, similar))}?' if similar else 'envpool.list_all_envs() lists all'
        raise EnvironmentLoadError(f'EnvPool has no environment {name!r}; {hint}')
    known = [key for key in _make(envpool.make_spec, name, {})._config_keys if key not in _INSTEAD]
    for key in options:
        if key in _INSTEAD:
            raise EnvironmentLoadError(f'env_args[{key!r}] is not taken for EnvPool: it is given by {_INSTEAD[key]}')
        if key not in known and key not in _SETTINGS:
            similar = nearest(key, known) or known
            raise EnvironmentLoadError(f'{name} of EnvPool has no option {key!r} (env_args); did you mean '
                                       f'{" or ".join(map(repr, similar))}?')
    if options.get('noop_max', 1) < 1:
        raise EnvironmentLoadError(f"env_args['noop_max']: expected at least 1, found {options['noop_max']}; EnvPool "
                                   'draws from 0 to noop_max - 1 no-operations, so that 1 means none')
    return options


def _make(maker: Any, name: str, options: dict[str, Any]) -> Any:
    """What EnvPool makes; with errors that say what it was."""
    try:
        return maker(name, **options)
    except (ImportError, AssertionError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise EnvironmentLoadError(f'EnvPool cannot make {name}: {error}') from error


def _channel_first(space: spaces.Space) -> spaces.Box:
    assert isinstance(space, spaces.Box)
    return spaces.Box(np.moveaxis(space.low, -1, -3), np.moveaxis(space.high, -1, -3), dtype=space.dtype.type)


def _flat(infos: dict[str, Any]) -> dict[str, Any]:
    """The infos of the environments, without those of players."""
    return {key: value for key, value in infos.items() if isinstance(value, np.ndarray)}


def _scattered(count: int, parts: Sequence[tuple[Any, Sequence[np.ndarray]]]) -> list[np.ndarray]:
    """Arrays ``[count, ...]`` put together of parts: ``(rows, arrays of these rows)``."""
    result = []
    for arrays in zip(*(arrays for _, arrays in parts)):
        whole = np.empty((count, *arrays[0].shape[1:]), arrays[0].dtype)
        for (rows, _), array in zip(parts, arrays):
            whole[rows] = array
        result.append(whole)
    return result


def _scattered_infos(count: int, parts: Sequence[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """The same for infos, which have the same keys."""
    names = list(parts[0][1])
    return dict(zip(names, _scattered(count, [(rows, [infos[name] for name in names]) for rows, infos in parts])))
