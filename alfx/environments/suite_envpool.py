"""Environments of EnvPool (Weng et al. 2022, arXiv:2206.10558): batches stepped by C++ threads, without Python.

They use the same adapter as gymnasium's vector environments and give the same sequences of time steps.
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
from alfx.environments.image_spaces import box_like, is_channels_last_image, require_box
from alfx.environments.spaces import flatten_sample, flatten_space, tensor_spec_from_gym_space, unflatten_sample
from alfx.environments.suite_gym import AlfWrapper
from alfx.gin_utils.value_checks import StepLimit
from alfx.tensor_specs import TensorSpec
from alfx.utils.extras import pip_install

# Families whose time limit only truncates episodes. EnvPool does not distinguish a termination at the last step from a
# truncation; for these families this module applies the limit, which keeps the two apart.
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
    """Create a batch of EnvPool's environment ``environment_name``; needs the extra ``envpool``.

    Each environment has its own random stream. Their state cannot be saved, so a resumed run begins new episodes.
    Continuous actions are given in [-1, 1] and clipped, as by ``suite_gym.load``.

    Args:
        environment_name: a name of ``envpool.list_all_envs()``, such as 'CartPole-v1', 'HalfCheetah-v4' or 'Pong-v5'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps after which an episode is truncated; ``None``: as registered; 0: never. An episode
            that terminates at exactly this step counts as terminated in classic control, toy text, Box2D, Atari and
            Gym's MuJoCo tasks, as in gymnasium; in other families EnvPool reports it as truncated.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        image_channel_first: transpose images from ``(H, W, C)`` to ``(C, H, W)``.
        batch_size: ``B``.
        num_threads: number of threads that step the environments; 0: EnvPool decides.
        env_args: further options of the environment, such as ``frame_skip`` or ``reward_clip`` for Atari.
        env_info_keys: infos of EnvPool that become ``TimeStep.env_info``: names of float32 scalars, or a mapping from
            names to specs.
        render_mode: 'rgb_array' allows ``render`` where EnvPool can render the environment.

    Raises:
        EnvironmentLoadError: an unknown name, option or info, a multi-player environment, or EnvPool is missing.
        UnsupportedSpaceError: a space has no tensor spec.
    """
    vector_env = EnvPoolVectorEnv(environment_name, batch_size, max_episode_steps, image_channel_first, num_threads,
                                  env_args, render_mode)
    unknown = [key for key in env_info_keys if key not in vector_env.info_names]
    if unknown:
        raise EnvironmentLoadError(f'env_info_keys: {environment_name} of EnvPool has no info {unknown[0]!r}; expected '
                                   f'some of {sorted(vector_env.info_names)}')
    return suite_gym.wrap_env(vector_env, env_id=env_id, discount=discount, alf_env_wrappers=alf_env_wrappers,
                              image_channel_first=False, env_info_keys=env_info_keys)


class EnvPoolVectorEnv(VectorEnv):
    """A pool as a gymnasium vector environment with next-step autoreset.

    EnvPool takes its seeds when a pool is created, so a reset with seeds creates a new pool.

    Args:
        name: EnvPool's name of the environment.
        num_envs: number of environments.
        max_episode_steps: see :func:`load`.
        image_channel_first: see :func:`load`.
        num_threads: see :func:`load`.
        options: further options of the environment.
        render_mode: 'rgb_array' or ``None``.

    Attributes:
        info_names: names of the infos.

    Raises:
        EnvironmentLoadError: for the reasons of :func:`load`.
        UnsupportedSpaceError: a space has no tensor spec.
    """

    owns_arrays = True  # a pool allocates new arrays at each step

    def __init__(self, name: str, num_envs: int, max_episode_steps: StepLimit | None = None,
                 image_channel_first: bool = True, num_threads: int = 0, options: Mapping[str, Any] | None = None,
                 render_mode: str | None = None):
        if num_envs < 1 or num_threads < 0:
            raise EnvironmentLoadError(f'expected batch_size of at least 1 and num_threads of at least 0, found '
                                       f'{num_envs} and {num_threads}')
        if render_mode not in (None, 'rgb_array'):
            raise EnvironmentLoadError(f"render_mode: expected 'rgb_array' or None for EnvPool, found {render_mode!r}; "
                                       "with 'rgb_array', the command play shows the images in a window")
        self._envpool = _import_envpool()
        self._options = {**_checked_options(self._envpool, name, dict(options or {})), 'num_envs': num_envs,
                         'num_threads': num_threads}
        if render_mode is not None:
            self._options['render_mode'] = render_mode
        spec = _make(self._envpool.make_spec, name, self._options)
        if spec.config.max_num_players != 1:
            raise EnvironmentLoadError(f'{name} of EnvPool has {spec.config.max_num_players} players: only '
                                       'single-player environments are supported')
        self.name, self.num_envs, self.render_mode = name, num_envs, render_mode
        self._limit = self._choose_limit(max_episode_steps, spec)
        self.metadata = {'render_modes': ['rgb_array'], 'autoreset_mode': AutoresetMode.NEXT_STEP, 'reset_mask': True,
                         'seed_per_env': True}
        self.info_names = {key.split(':', 1)[1] for key in spec._state_keys
                           if key.startswith('info:') and '.' not in key} | {'elapsed_step'}
        self._set_spaces(spec, image_channel_first)
        self._pool: Any = None
        self._due: np.ndarray | None = None  # environments to reset next, whose limit the pool does not know
        self._last: tuple[list[np.ndarray], dict[str, Any]] = ([], {})

    def _choose_limit(self, steps: int | None, spec: Any) -> int | None:
        """Return the limit that this class applies, or ``None`` if the pool applies it."""
        if steps is not None and steps < 0:
            raise EnvironmentLoadError(f'max_episode_steps: expected at least 0, found {steps}')
        if self._envpool.registration.registry.specs[self.name][0] in _PLAIN_LIMITS:
            self._options['max_episode_steps'] = _NO_LIMIT
            limit = spec.config.max_episode_steps if steps is None else steps
            return limit if 0 < limit < _NO_LIMIT else None
        if steps == 0:
            raise EnvironmentLoadError(f'max_episode_steps=0: {self.name} of EnvPool needs a limit, because its '
                                       'rewards may depend on it; use a positive number or None')
        if steps is not None:
            self._options['max_episode_steps'] = steps
        return None

    def _set_spaces(self, spec: Any, image_channel_first: bool) -> None:
        with warnings.catch_warnings():  # about bounds that are rounded to the type of the space
            warnings.simplefilter('ignore')
            space, self.single_action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        tensor_spec_from_gym_space(space, where='observation')  # raises a clearer error than batch_space
        leaves = [leaf for _, leaf in flatten_space(space)]
        self._turned = [image_channel_first and is_channels_last_image(leaf) for leaf in leaves]
        self.single_observation_space = unflatten_sample(space, [
            box_like(require_box(leaf, self), lambda bound: np.moveaxis(bound, -1, -3)) if turned else leaf
            for leaf, turned in zip(leaves, self._turned)])
        if isinstance(self.single_observation_space, dict):
            self.single_observation_space = spaces.Dict(self.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # Stepping --------------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options['reset_mask']``.

        Args:
            seed: one number for each environment, or one number from which their seeds are derived; creates a new pool.
            options: ``reset_mask``: bool ``[num_envs]``.
        """
        mask = (options or {}).get('reset_mask')
        if seed is not None or self._pool is None:
            self._create_pool(seed)
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
        """Step all environments; those whose episode ended return the first observation of the next episode."""
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
                due = over & ~terminated  # the pool itself resets environments that terminated
                self._due = due if due.any() else None
        self._last = leaves, infos
        return self._observation(leaves), rewards, terminated, truncated, infos

    def _step_others(self, actions: Any, due: np.ndarray) -> tuple:
        """Reset the environments that are due and step the others."""
        parts: list[tuple] = []
        moving = np.flatnonzero(~due).astype(np.int32)
        if len(moving):
            leaves = [leaf[moving] for leaf in flatten_sample(self.single_action_space, actions)]
            self._pool.send(unflatten_sample(self.single_action_space, leaves), moving)
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
        """Reset the environments ``rows`` and return their observations and infos in that order."""
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

    def _create_pool(self, seed: Any) -> None:
        self._pool = None  # ends its threads before the new pool starts its own
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = np.random.SeedSequence(seed).generate_state(self.num_envs) & 0x7fffffff
        else:
            seeds = np.asarray(seed)
        options = {**self._options, 'env_seed': [int(x) for x in seeds]}
        self._pool = _make(self._envpool.make_gymnasium, self.name, options)
        with warnings.catch_warnings():  # the pool would otherwise create its spaces at the first step
            warnings.simplefilter('ignore')
            assert self._pool.observation_space is not None
        self._due = None

    # Rendering and closing -------------------------------------------------------------------------------------

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Return an image uint8 ``[H, W, 3]`` of environment 0; ``None`` without a ``render_mode``.

        Raises:
            UnsupportedOperationError: EnvPool cannot render this environment.
        """
        if self.render_mode is None:
            return None
        if self._pool is None:
            self.reset()
        try:
            return tuple(self._pool.render())
        except RuntimeError as error:
            raise UnsupportedOperationError(f'EnvPool cannot render {self.name}: {error}') from error

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads of the pool."""
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
    """Return ``options``; raise for an unknown environment or option."""
    registered = envpool.list_all_envs()
    if name not in registered:
        similar = nearest(name, registered) or nearest(name.rsplit('/', 1)[-1], registered)
        hint = f'did you mean {" or ".join(map(repr, similar))}?' if similar else 'envpool.list_all_envs() lists all'
        raise EnvironmentLoadError(f'EnvPool has no environment {name!r}; {hint}')
    known = [key for key in _make(envpool.make_spec, name, {})._config_keys if key not in _INSTEAD]
    for key in options:
        if key in _INSTEAD:
            raise EnvironmentLoadError(f'env_args[{key!r}] is not accepted for EnvPool: set {_INSTEAD[key]} instead')
        if key not in known and key not in _SETTINGS:
            similar = nearest(key, known) or known
            raise EnvironmentLoadError(f'{name} of EnvPool has no option {key!r} (env_args); did you mean '
                                       f'{" or ".join(map(repr, similar))}?')
    if options.get('noop_max', 1) < 1:
        raise EnvironmentLoadError(f"env_args['noop_max']: expected at least 1, found {options['noop_max']}; EnvPool "
                                   'draws from 0 to noop_max - 1 no-ops, so 1 means none')
    return options


def _make(maker: Any, name: str, options: dict[str, Any]) -> Any:
    """Return the result of EnvPool's function ``maker``; its errors become ``EnvironmentLoadError``."""
    try:
        return maker(name, **options)
    except (ImportError, AssertionError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise EnvironmentLoadError(f'EnvPool cannot create {name}: {error}') from error


def _flat(infos: dict[str, Any]) -> dict[str, Any]:
    """Return the infos of the environments, without the infos of players."""
    return {key: value for key, value in infos.items() if isinstance(value, np.ndarray)}


def _scattered(count: int, parts: Sequence[tuple[Any, Sequence[np.ndarray]]]) -> list[np.ndarray]:
    """Return arrays ``[count, ...]`` assembled from parts: ``(rows, arrays of these rows)``."""
    result = []
    for arrays in zip(*(arrays for _, arrays in parts)):
        whole = np.empty((count, *arrays[0].shape[1:]), arrays[0].dtype)
        for (rows, _), array in zip(parts, arrays):
            whole[rows] = array
        result.append(whole)
    return result


def _scattered_infos(count: int, parts: Sequence[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return infos assembled from parts that have the same keys: ``(rows, infos of these rows)``."""
    names = list(parts[0][1])
    return dict(zip(names, _scattered(count, [(rows, [infos[name] for name in names]) for rows, infos in parts])))
