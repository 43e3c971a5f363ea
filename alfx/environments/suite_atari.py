"""Atari 2600 games of the Arcade Learning Environment, with DeepMind's preprocessing."""
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from alfx import gin_utils
from alfx.environments import suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.alf_wrappers import TimeLimit
from alfx.environments.gym_make import EnvWrapper
from alfx.environments.gym_wrappers import DMAtariPreprocessing, FrameStack
from alfx.environments.suite_gym import AlfWrapper, VectorEnvCtor
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils.value_checks import Count, Fraction, StepLimit


@gin_utils.configurable
def load(environment_name: str, env_id: int | None = None, discount: float = 1.0,
         max_episode_steps: Count | Sequence[Count] | None = None, gym_env_wrappers: Sequence[EnvWrapper] = (),
         alf_env_wrappers: Sequence[AlfWrapper] = (), batch_size: Count = 1,
         vector_env: VectorEnvCtor = SerialVectorEnv, frame_skip: Count = 4, noop_max: StepLimit = 30,
         screen_size: Count = 84, stack_size: Count = 4, sticky_action_probability: Fraction | None = None,
         full_action_space: bool = False, env_info_keys: Sequence[str] = ('lives', ),
         env_args: Mapping[str, Any] | None = None, render_mode: str | None = 'rgb_array') -> AlfEnvironment:
    """Create a batch of an Atari game: gray images uint8 ``(stack_size, screen_size, screen_size)``.

    Args:
        environment_name: 'Pong', or an id such as 'ALE/Pong-v5'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps (of ``frame_skip`` frames) after which an episode is truncated; ``None``: only the
            game's limit of 108,000 frames; a sequence: one number for each environment.
        gym_env_wrappers: further wrappers, between the preprocessing and the stacking.
        alf_env_wrappers: wrappers around the whole batch, innermost first, such as
            ``alf_wrappers.AtariTerminalOnLifeLossWrapper``.
        batch_size: ``B``.
        vector_env: creates a gymnasium vector environment from constructors.
        frame_skip: number of times each action is repeated.
        noop_max: maximum number of no-ops at the start of an episode.
        screen_size: height and width of the images.
        stack_size: number of stacked images.
        sticky_action_probability: probability that the game repeats the previous action instead (Machado et al. 2018,
            arXiv:1709.06009); ``None``: as registered, 0.25 for 'Pong' and 'ALE/Pong-v5', 0 for 'PongNoFrameskip-v4'
            (the protocol of Mnih et al. 2015).
        full_action_space: use all 18 actions instead of the actions that the game needs.
        env_info_keys: numbers of the info dicts that become ``TimeStep.env_info``.
        env_args: further arguments of ``ale_py.AtariEnv``.
        render_mode: 'human' shows every step; 'rgb_array' allows ``render``.

    Raises:
        EnvironmentLoadError: an unknown game, or the extra ``atari`` is not installed.
    """
    name = environment_name if '/' in environment_name or '-v' in environment_name else f'ALE/{environment_name}-v5'
    wrappers = [partial(DMAtariPreprocessing, frame_skip=frame_skip, noop_max=noop_max, screen_size=screen_size),
                *gym_env_wrappers, partial(FrameStack, stack_size=stack_size)]
    arguments = {'frameskip': 1, 'obs_type': 'grayscale', 'full_action_space': full_action_space, **(env_args or {})}
    if sticky_action_probability is not None:
        arguments.setdefault('repeat_action_probability', sticky_action_probability)
    if max_episode_steps is not None:  # the argument of the game would count frames
        alf_env_wrappers = [partial(TimeLimit, duration=max_episode_steps), *alf_env_wrappers]
    return suite_gym.load(name, env_id=env_id, discount=discount, gym_env_wrappers=wrappers,
                          alf_env_wrappers=alf_env_wrappers, image_channel_first=True, batch_size=batch_size,
                          vector_env=vector_env, env_args=arguments, env_info_keys=env_info_keys,
                          render_mode=render_mode)
