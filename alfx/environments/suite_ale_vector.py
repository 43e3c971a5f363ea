"""Atari games that the Arcade Learning Environment itself steps as a batch, in C++ threads.

Observations, actions and rewards are those of :mod:`alfx.environments.suite_atari`, without Python, processes and
copies in between. Three things differ: the stacked images before the first image of an episode are black instead of
copies of it, the number of no-ops at the start of an episode may be drawn differently, and FIRE is pressed for one
frame only, which a game with sticky actions may miss.
"""
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from alfx import gin_utils
from alfx.environments import gym_make, suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.alf_wrappers import TimeLimit
from alfx.environments.environment_errors import EnvironmentLoadError, nearest
from alfx.environments.suite_gym import AlfWrapper
from alfx.gin_utils.value_checks import Count, Fraction, StepLimit
from alfx.tensor_specs import TensorSpec
from alfx.utils.extras import pip_install

_INSTEAD = {
    'game': 'it is the name of the environment', 'num_envs': 'set batch_size',
    'batch_size': 'all environments are stepped together', 'num_threads': 'load has this argument',
    'repeat_action_probability': 'set sticky_action_probability', 'frameskip': 'set frame_skip',
    'stack_num': 'set stack_size', 'img_height': 'set screen_size',
    'img_width': 'set screen_size', 'noop_max': 'load has this argument',
    'full_action_space': 'load has this argument',
    'autoreset_mode': 'the other modes return the infos of the next episode with the last step of an episode',
    'grayscale': 'the images are gray',
    'episodic_life': 'it would restart the whole game after each lost life; use '
                     'alf_wrappers.AtariTerminalOnLifeLossWrapper among alf_env_wrappers',
    'life_loss_info': 'it would end episodes without starting new ones; use '
                      'alf_wrappers.AtariTerminalOnLifeLossWrapper among alf_env_wrappers',
}
_INFOS = ('lives', 'frame_number', 'episode_frame_number')


@gin_utils.configurable
def load(environment_name: str, env_id: int | None = None, discount: float = 1.0,
         max_episode_steps: Count | None = None, alf_env_wrappers: Sequence[AlfWrapper] = (), batch_size: Count = 1,
         num_threads: StepLimit = 0, frame_skip: Count = 4, noop_max: StepLimit = 30, screen_size: Count = 84,
         stack_size: Count = 4, sticky_action_probability: Fraction | None = None, full_action_space: bool = False,
         env_info_keys: Sequence[str] | Mapping[str, TensorSpec] = ('lives', ),
         env_args: Mapping[str, Any] | None = None) -> AlfEnvironment:
    """Create a batch of an Atari game: gray images uint8 ``(stack_size, screen_size, screen_size)``.

    Each environment has its own random stream. Their state cannot be saved, so a resumed run begins new episodes. They
    cannot be rendered: ``play`` needs ``create_environment.eval_env_load_fn = @suite_atari.load``.

    Args:
        environment_name: 'Pong', or an id such as 'ALE/Pong-v5'.
        env_id: ``TimeStep.env_id`` of the first environment.
        discount: the discount of every step that is neither FIRST nor a termination.
        max_episode_steps: steps (of ``frame_skip`` frames) after which an episode is truncated; ``None``: only the
            game's limit of 108,000 frames.
        alf_env_wrappers: wrappers around the whole batch, innermost first, such as
            ``alf_wrappers.AtariTerminalOnLifeLossWrapper``.
        batch_size: ``B``.
        num_threads: number of threads that step the environments; 0: one for each core, at most ``B``.
        frame_skip: number of times each action is repeated.
        noop_max: maximum number of no-ops at the start of an episode.
        screen_size: height and width of the images.
        stack_size: number of stacked images.
        sticky_action_probability: probability that the game repeats the previous action instead (Machado et al. 2018,
            arXiv:1709.06009); ``None``: as registered, 0.25 for 'Pong' and 'ALE/Pong-v5', 0 for 'PongNoFrameskip-v4'
            (the protocol of Mnih et al. 2015).
        full_action_space: use all 18 actions instead of the actions that the game needs.
        env_info_keys: infos that become ``TimeStep.env_info``: 'lives', 'frame_number' or 'episode_frame_number'.
        env_args: further arguments of ``ale_py.vector_env.AtariVectorEnv``.

    Raises:
        EnvironmentLoadError: an unknown game, argument or info, or the extra ``atari`` is not installed.
    """
    name = environment_name if '/' in environment_name or '-v' in environment_name else f'ALE/{environment_name}-v5'
    registered = gym_make.find_spec(name).kwargs
    game = registered.get('game')
    if game is None:
        raise EnvironmentLoadError(f'{name} is not a game of the Arcade Learning Environment')
    unknown = [key for key in env_info_keys if key not in _INFOS]
    if unknown:
        raise EnvironmentLoadError(f'env_info_keys: expected some of {_INFOS}, found {unknown[0]!r}')
    if sticky_action_probability is None:
        sticky_action_probability = registered['repeat_action_probability']
    suite_gym.log_sticky_actions(name, sticky_action_probability)
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
    """Return ``env_args``; raise for unknown arguments and for those that ``load`` sets itself."""
    known = [name for name in inspect.signature(_vector_env_class()).parameters if name not in _INSTEAD]
    for name in env_args:
        if name in _INSTEAD:
            raise EnvironmentLoadError(f'env_args[{name!r}] is not accepted: {_INSTEAD[name]}')
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
