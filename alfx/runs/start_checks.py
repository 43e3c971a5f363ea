"""What would only fail in the first update, and is known before the first step in the environment."""
from collections.abc import Iterator
from typing import Any

import torch

from alfx import nest
from alfx.config import TrainerConfig
from alfx.algorithms.td_loss import TDLoss
from alfx.experience_replayers.row_store import memory_of
from alfx.gin_utils import ConfError, Problem
from alfx.gin_utils.value_checks import problem_at
from alfx.tensor_specs import NestedTensorSpec


def check_observation(observation_spec: NestedTensorSpec) -> None:
    """Refuse an observation that has no elements.

    Raises:
        ConfError: names the field.
    """
    for path, spec in nest.flatten_with_path(observation_spec):
        if spec.numel == 0:
            raise ConfError([problem_at(
                'create_environment', 'env_name', f'has an observation{f" {path!r}" if path else ""} without elements, '
                f'of shape {tuple(spec.shape)}: nothing can be learned from it',
                'leave it out by a wrapper, or choose another environment')])


def check_learning(algorithm: Any, config: TrainerConfig, env: Any) -> None:
    """Refuse settings with which an algorithm cannot make an update.

    Args:
        algorithm: before ``finalize``.
        config: of the run.
        env: the batched environment.

    Raises:
        ConfError: names the settings.
    """
    if algorithm.on_policy is False:
        problems = [*_too_short_sequences(algorithm, config), *_missing_priorities(algorithm, config)]
    else:
        problems = list(_too_long_unrolls(config, env))
    if problems:
        raise ConfError(problems)


def _too_long_unrolls(config: TrainerConfig, env: Any) -> Iterator[Problem]:
    """A replay buffer, which has its own check, is made for other ways of training."""
    step = sum(spec.numel * spec.dtype.itemsize for spec in nest.flatten(env.observation_spec()))
    needed, there_is = int(config.unroll_length) * env.batch_size * step, memory_of(torch.device('cpu'))
    if needed > there_is:
        yield problem_at('TrainerConfig', 'unroll_length', f'= {config.unroll_length:g}: the observations of an unroll '
                         f'take {needed:,} bytes; there are {there_is:,} bytes of memory', 'shorten it')


def _too_short_sequences(algorithm: Any, config: TrainerConfig) -> Iterator[Problem]:
    unroll = max(int(config.unroll_length), 1) if config.whole_replay_buffer_training else 1
    length = config.mini_batch_length or unroll
    losses = [type(part).__name__ for part in algorithm.modules() if isinstance(part, TDLoss)]
    if length < 2 and losses:
        yield problem_at('TrainerConfig', 'mini_batch_length', f'= {length}: {losses[0]} learns from a step and the '
                         'one that follows, and finds none in sequences of one step',
                         'set it to 2, which makes one transition of each sample')


def _missing_priorities(algorithm: Any, config: TrainerConfig) -> Iterator[Problem]:
    able = [part for part in algorithm.modules() if hasattr(part, '_calculate_priority')]
    if config.priority_replay and able and not any(part._calculate_priority for part in able):
        name = type(able[0]).__name__
        yield problem_at('TrainerConfig', 'priority_replay', f'= True, but {name} gives no priorities',
                         f'set {name}.calculate_priority = True')
