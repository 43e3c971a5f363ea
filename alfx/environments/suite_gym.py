"""gymnasium environments by their registered names.

:func:`load` is the default of ``create_environment.env_load_fn``. It finds classic control, toy text, Box2D, MuJoCo,
Atari ('ALE/Pong-v5') and MiniGrid by their ids. :mod:`alfx.environments.suite_atari` and
:mod:`alfx.environments.suite_minigrid` also preprocess their observations.
"""
import functools
import logging
import multiprocessing
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from alfx import gin_utils
from alfx.environments import alf_wrappers, gym_make, gym_wrappers, rendering
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.environment_group import EnvFn
from alfx.environments.gym_make import EnvWrapper
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.spaces import flatten_space
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils.value_checks import Count, StepLimit
from alfx.tensor_specs import TensorSpec

_log = logging.getLogger(__name__)
_TRANSFORMERS = {'NormalizeObservation': 'ObservationNormalizer', 'NormalizeReward': 'DiscountedReturnScaling'}
AlfWrapper = Callable[[AlfEnvironment], AlfEnvironment]
VectorEnvCtor = Callable[[Sequence[Callable[[], gymnasium.Env]]], VectorEnv]


@gin_utils.configurable
def load(environment_name: str | gym_make.EnvCtor, env_id: int | None = None, discount: float = 1.0,
         max_episode_steps: StepLimit | Sequence[StepLimit] | None = None, gym_env_wrappers: Sequence[EnvWrapper] = (),
         alf_env_wrappers: Sequence[AlfWrapper] = (), image_channel_first: bool = True, batch_size: Count = 1,
         vector_env: VectorEnvCtor = SerialVectorEnv, native: bool = False, env_args: Mapping[str, Any] | None = None,
         env_info_keys: Sequence[str] | Mapping[str, TensorSpec] = (),
         render_mode: str | None = 'rgb_array') -> AlfEnvironment:
    """Create a batch of the environment ``environment_name``.

    Continuous actions are given in [-1, 1] and clipped: see ``wrap_env.normalize_action`` and
    ``wrap_env.clip_action``.

    Args:
        environment_name: a registered id; 'module:id', which imports the module first; or a class or function that
            returns an environment.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps after which an episode is truncated; ``None``: as registered; 0: never; a sequence:
            one number for each environment.
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        image_channel_first: transpose images to ``(C, H, W)``: see ``gym_wrappers.ImageChannelFirst``.
        batch_size: ``B``.
        vector_env: creates a gymnasium vector environment from constructors.
        native: use the natively batched implementation, if it exists; it does not support ``gym_env_wrappers``.
        env_args: further arguments of the environment's constructor.
        env_info_keys: numbers of the info dicts that become ``TimeStep.env_info``: names of float32 scalars, or a
            mapping from names to specs. If empty, 'lives' for Atari games.
        render_mode: 'human' shows every step; 'rgb_array' allows ``render``. Training and evaluation without a video
            do not pass 'rgb_array' to the constructor.

    Raises:
        EnvironmentLoadError: an unknown name, a missing package, arguments that contradict each other.
        UnsupportedSpaceError: a space has no tensor spec.
    """
    if render_mode == 'rgb_array' and rendering.is_wanted() is False and not gym_env_wrappers:
        render_mode = None  # a wrapper may render
    if native:
        if callable(environment_name):
            raise EnvironmentLoadError('native=True: only registered ids have a natively batched implementation, found '
                                       'a function')
        vectorized = _native(environment_name, max_episode_steps, gym_env_wrappers, image_channel_first, batch_size,
                             render_mode, env_args)
    else:
        # raises for an unknown name in this process, not in a worker
        spec = None if callable(environment_name) else gym_make.find_spec(environment_name)
        env_info_keys = _infos(env_info_keys, spec)
        arguments = {**(spec.kwargs if spec else {}), **(env_args or {})}
        if 'repeat_action_probability' in arguments:
            log_sticky_actions(environment_name, arguments['repeat_action_probability'])
        if max_episode_steps is None or isinstance(max_episode_steps, int):
            max_episode_steps = [max_episode_steps] * batch_size  # type: ignore[list-item]
        if len(max_episode_steps) != batch_size:
            raise EnvironmentLoadError(f'max_episode_steps: expected {batch_size} numbers, found '
                                       f'{len(max_episode_steps)}')
        vectorized = vector_env([
            partial(_make_and_wrap, partial(gym_make.make_env, environment_name, steps, render_mode, env_args),
                    tuple(gym_env_wrappers), image_channel_first, not i) for i, steps in enumerate(max_episode_steps)])
    return wrap_env(vectorized, env_id=env_id, discount=discount, alf_env_wrappers=alf_env_wrappers,
                    image_channel_first=False, env_info_keys=env_info_keys)


@functools.cache
def log_sticky_actions(name: str, probability: float) -> None:
    """Log, once for each game, whether its actions are sticky: results with and without cannot be compared."""
    _log.info('%s: %s', name, f'sticky actions with probability {probability:g}' if probability else
              'no sticky actions')


def _warn_of_statistics(env: Any) -> None:
    """Log a warning for wrappers whose statistics are not saved with the policy."""
    while isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
        for cls in type(env).__mro__:
            if transformer := _TRANSFORMERS.get(cls.__name__):
                _log.warning('%s has statistics that are not saved with the policy: evaluation and play start with '
                             'different ones; use TrainerConfig.data_transformer_ctor = @%s instead', cls.__name__,
                             transformer)
        env = env.env


def _infos(keys: Sequence[str] | Mapping[str, TensorSpec], spec: Any) -> Sequence[str] | Mapping[str, TensorSpec]:
    """Return ``env_info_keys``, by default the number of lives of an Atari game."""
    is_game = str(getattr(spec, 'entry_point', '')).startswith('ale_py')
    return ('lives', ) if is_game and not keys else keys


def _make_and_wrap(env_fn: EnvFn, wrappers: Sequence[EnvWrapper], image_channel_first: bool,
                   warns: bool) -> gymnasium.Env:
    env = env_fn()
    for name in ('observation_space', 'action_space') if isinstance(env, gymnasium.Env) else ():
        if not isinstance(space := getattr(env, name, None), gymnasium.Space):
            raise EnvironmentLoadError(f'{name} of {type(env.unwrapped).__name__}: expected a space of gymnasium, such '
                                       f'as gymnasium.spaces.Box, found {reprlib.repr(space)}')
    for wrapper in wrappers:
        env = wrapper(env)
    _warn_of_statistics(env if warns and multiprocessing.parent_process() is None else None)
    if image_channel_first and any(gym_wrappers.is_channels_last_image(leaf)
                                   for _, leaf in flatten_space(env.observation_space)):
        env = gym_wrappers.ImageChannelFirst(env)
    return env


def _native(environment_name: str, max_episode_steps: Any, gym_env_wrappers: Sequence[EnvWrapper],
            image_channel_first: bool, batch_size: int, render_mode: str | None,
            env_args: Mapping[str, Any] | None) -> VectorEnv:
    if gym_env_wrappers:
        raise EnvironmentLoadError('native=True: a natively batched environment has no separate environments that '
                                   'gym_env_wrappers could wrap; use only one of the two')
    if not (max_episode_steps is None or isinstance(max_episode_steps, int)):
        raise EnvironmentLoadError('native=True: max_episode_steps must be one number for all environments')
    vectorized = gym_make.make_native(environment_name, batch_size, max_episode_steps, render_mode, env_args)
    if image_channel_first and any(gym_wrappers.is_channels_last_image(leaf)
                                   for _, leaf in flatten_space(vectorized.single_observation_space)):
        raise EnvironmentLoadError(f'native=True: {environment_name} yields images (H, W, C), which are not transposed '
                                   'for natively batched environments; set image_channel_first=False')
    return vectorized


@gin_utils.configurable
def wrap_env(gym_env: gymnasium.Env | VectorEnv | Sequence[EnvFn], env_id: int | None = None, discount: float = 1.0,
             max_episode_steps: StepLimit = 0, gym_env_wrappers: Sequence[EnvWrapper] = (),
             time_limit_wrapper: Callable[[AlfEnvironment, int], AlfEnvironment] = alf_wrappers.TimeLimit,
             normalize_action: bool = True, clip_action: bool = True, alf_env_wrappers: Sequence[AlfWrapper] = (),
             image_channel_first: bool = True, auto_reset: bool = True,
             env_info_keys: Sequence[str] | Mapping[str, TensorSpec] = (),
             vector_env: VectorEnvCtor = SerialVectorEnv) -> AlfEnvironment:
    """Convert an existing gymnasium environment to an :class:`AlfEnvironment`.

    Args:
        gym_env: one gymnasium environment (a batch of 1), constructors of the environments of a batch, or a vector
            environment.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps after which an episode is truncated; 0: only the limit of the environment itself.
        gym_env_wrappers: wrappers around each gymnasium environment, innermost first; none for a vector environment.
        time_limit_wrapper: wrapper that truncates episodes after ``max_episode_steps``.
        normalize_action: rescale continuous actions with finite bounds to [-1, 1].
        clip_action: clip continuous actions with finite bounds.
        alf_env_wrappers: wrappers around the whole batch, innermost first.
        image_channel_first: transpose images to ``(C, H, W)``; not for a vector environment.
        auto_reset: must be True: LAST is always followed by FIRST.
        env_info_keys: see :func:`load`.
        vector_env: creates a vector environment from constructors.

    Raises:
        EnvironmentLoadError: arguments that contradict each other.
        UnsupportedSpaceError: a space has no tensor spec.
    """
    if not auto_reset:
        raise EnvironmentLoadError('wrap_env.auto_reset=False is not supported: the step after LAST is always FIRST')
    if isinstance(gym_env, VectorEnv):
        if gym_env_wrappers:
            raise EnvironmentLoadError('gym_env_wrappers wrap one gymnasium environment, found a vector environment')
        vectorized = gym_env
        _warn_of_statistics(gym_env)
    else:
        if isinstance(gym_env, gymnasium.Env) and 'ProcessVectorEnv' in gym_make.function_name(vector_env):
            raise EnvironmentLoadError('wrap_env.vector_env: an existing environment cannot be stepped in another '
                                       'process; pass a list of functions that create environments')
        env_fns = [lambda: gym_env] if isinstance(gym_env, gymnasium.Env) else gym_env
        vectorized = vector_env([partial(_make_and_wrap, env_fn, tuple(gym_env_wrappers), image_channel_first, not i)
                                 for i, env_fn in enumerate(env_fns)])
    info_keys = _infos(env_info_keys, getattr(gym_env, 'spec', None))
    env: AlfEnvironment = GymVectorEnvironment(vectorized, discount, env_id, info_keys, normalize_action, clip_action)
    if max_episode_steps > 0:
        env = time_limit_wrapper(env, max_episode_steps)
    for wrapper in alf_env_wrappers:
        env = wrapper(env)
    return env
