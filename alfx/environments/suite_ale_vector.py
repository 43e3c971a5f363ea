"""Atari games that the Arcade Learning Environment itself steps together, in C++ threads.

What is seen, done and rewarded is as in :mod:`alfx.environments.suite_atari`, without Python, processes and copies in
between. Two things differ: the images before the first one of an episode are black instead of copies of it, and an
episode can be drawn from another number of no-operations.
"""
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from alfx import gin_utils
from alfx.environments import making, suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.alf_wrappers import TimeLimit
from alfx.environments.environment_errors import EnvironmentLoadError, nearest
from alfx.environments.suite_gym import AlfWrapper
from alfx.tensor_specs import TensorSpec
from alfx.gin_utils.value_checks import StepLimit
from alfx.utils.extras import pip_install

_INSTEAD = {
    'game': 'it is the name of the environment', 'num_envs': 'it is given by batch_size',
    'batch_size': 'all environments are stepped together', 'num_threads': 'it is an argument of its own',
    'repeat_action_probability': 'it is given by sticky_action_probability', 'frameskip': 'it is given by frame_skip',
    'stack_num': 'it is given by stack_size', 'img_height': 'it is given by screen_size',
    'img_width': 'it is given by screen_size', 'noop_max': 'it is an argument of its own',
    'full_action_space': 'it is an argument of its own',
    'autoreset_mode': 'the others give the infos of the next episode with the last step of one',
    'grayscale': 'the images are gray',
    'episodic_life': 'it would start the whole game anew after each lost life; use '
                     'alf_wrappers.AtariTerminalOnLifeLossWrapper among alf_env_wrappers',
    'life_loss_info': 'it would end episodes without beginning new ones; use '
                      'alf_wrappers.AtariTerminalOnLifeLossWrapper among alf_env_wrappers',
}
_INFOS = ('lives', 'frame_number', 'episode_frame_number')


@gin_utils.configurable
def load(environment_name: str, env_id: int | None = None, discount: float = 1.0,
         max_episode_steps: StepLimit | None = None, alf_env_wrappers: Sequence[AlfWrapper] = (), batch_size: int = 1,
         num_threads: int = 0, frame_skip: int = 4, noop_max: int = 30, screen_size: int = 84, stack_size: int = 4,
         sticky_action_probability: float = 0.25, full_action_space: bool = False,
         env_info_keys: Sequence[str] | Mapping[str, TensorSpec] = ('lives', ),
         env_args: Mapping[str, Any] | None = None) -> AlfEnvironment:
    """A batch of an Atari game: gray images uint8 ``(stack_size, screen_size, screen_size)``.

    Each environment draws from a stream of its own. Their state cannot be saved: a run that is resumed begins new
    episodes; and there are no pictures of them (``play`` uses ``eval_env_load_fn`` or ``suite_atari.load``).

    Args:
        environment_name: 'Pong', or an id such as 'ALE/Pong-v5'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps (of ``frame_skip`` frames) after which an episode is truncated; ``None``: no other
            limit than that of 108,000 frames.
        alf_env_wrappers: wrappers around the whole batch, innermost first, such as
            ``alf_wrappers.AtariTerminalOnLifeLossWrapper``.
        batch_size: ``B``.
        num_threads: that step them; 0: one for each core, at most ``B``.
        frame_skip: how often each action is repeated.
        noop_max: most no-operations at the start of an episode.
        screen_size: height and width of the images.
        stack_size: how many images are joined.
        sticky_action_probability: probability that the game repeats the action before instead (Machado et al. 2018,
            arXiv:1709.06009); 0 for the protocol of Mnih et al. 2015.
        full_action_space: all 18 actions instead of those that the game uses.
        env_info_keys: which of 'lives', 'frame_number' and 'episode_frame_number' become ``TimeStep.env_info``.
        env_args: further arguments of ``ale_py.vector_env.AtariVectorEnv``.

    Raises:
        EnvironmentLoadError: an unknown game, argument or info, or packages of the extra ``atari`` are missing.
    """
    name = environment_name if '/' in environment_name or '-v' in environment_name else f'ALE/{environment_name}-v5'
    game = making.find_spec(name).kwargs.get('game')
    if game is None:
        raise EnvironmentLoadError(f'{name} is no game of the Arcade Learning Environment')
    if max_episode_steps is not None and max_episode_steps < 1:
        raise EnvironmentLoadError(f'max_episode_steps: expected at least 1 or None, found {max_episode_steps}')
    if batch_size < 1:
        raise EnvironmentLoadError(f'batch_size: expected at least 1, found {batch_size}')
    unknown = [key for key in env_info_keys if key not in _INFOS]
    if unknown:
        raise EnvironmentLoadError(f'env_info_keys: there is no info {unknown[0]!r}; expected some of {_INFOS}')
    arguments = {'reward_clipping': False, **_checked(env_args or {})}
    vector_env = _vector_env_class()(
        game, batch_size, num_threads=num_threads, frameskip=frame_skip, noop_max=noop_max, img_height=screen_size,
        img_width=screen_size, stack_num=stack_size, repeat_action_probability=sticky_action_probability,
        full_action_space=full_action_space, **arguments)
    if max_episode_steps is not None:
        alf_env_wrappers = [partial(TimeLimit, duration=max_episode_steps), *alf_env_wrappers]
    return suite_gym.wrap_env(vector_env, env_id=env_id, discount=discount, alf_env_wrappers=alf_env_wrappers,
                              image_channel_first=False, env_info_keys=env_info_keys)


def _checked(env_args: Mapping[str, Any]) -> Mapping[str, Any]:
    """``env_args``, all of which the vector environment has and none of which is given in another way."""
    known = [name for name in inspect.signature(_vector_env_class()).parameters if name not in _INSTEAD]
    for name in env_args:
        if name in _INSTEAD:
            raise EnvironmentLoadError(f'env_args[{name!r}] is not taken: {_INSTEAD[name]}')
        if name not in known:
            similar = nearest(name, known) or known
            raise EnvironmentLoadError(f'env_args: AtariVectorEnv has no argument {name!r}; did you mean '
                                       f'{" or ".join(map(repr, similar))}?')
    return env_args


def _vector_env_class() -> Any:
    try:
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise EnvironmentLoadError(f"the vector environment of ale-py needs a newer ale-py: "
                                   f"{pip_install('atari')} ({error})") from error
    return AtariVectorEnv
