"""Reproducibility checks: warnings about state missing in checkpoints, with which a run cannot be resumed exactly.

This module handles replay buffers. The state of environments and asynchronous actors is handled where it is saved and
restored.
"""
import logging
import math
from collections.abc import Iterator

from torch import nn

from alfx import context
from alfx.config import TrainerConfig
from alfx.experience_replayers.replay_buffer import ReplayBuffer

logger = logging.getLogger(__name__)
_MEGABYTE = 2**20


def warn_at_start(algorithm: nn.Module, config: TrainerConfig, num_environments: int) -> None:
    """Log warnings about state that the checkpoints of a run will not include, and the settings that change this.

    Args:
        algorithm: root algorithm.
        config: configuration of the run.
        num_environments: number of environments in all processes.
    """
    for buffer in _sampled_buffers(algorithm, config):
        num_bytes = buffer.num_bytes(_rows_of_run(buffer, config, num_environments)) * context.num_ranks()
        if buffer.enable_checkpoint is False:
            logger.warning('%s is not saved in checkpoints (ReplayBuffer.enable_checkpoint = False): a resumed run '
                           'starts with an empty replay buffer and is not exactly reproducible', buffer.name)
        elif buffer.enable_checkpoint is None and num_bytes > buffer.checkpoint_limit * context.num_ranks():
            size = math.ceil(num_bytes / _MEGABYTE)
            logger.warning('%s will need %d MiB, more than TrainerConfig.replay_checkpoint_megabytes = %g, so it will '
                           'not be saved in checkpoints, and a resumed run starts with an empty replay buffer and is '
                           'not exactly reproducible; set it to %d to save the replay buffer', buffer.name, size,
                           config.replay_checkpoint_megabytes, size)


def warn_on_resume(algorithm: nn.Module, config: TrainerConfig, env_steps: int) -> None:
    """Log warnings about state that was missing in the loaded checkpoint.

    Args:
        algorithm: root algorithm.
        config: configuration of the run.
        env_steps: environment steps so far; before the first one replay buffers are empty.
    """
    for buffer in _sampled_buffers(algorithm, config):
        if env_steps and not buffer.total_size:
            logger.warning('%s was not in the checkpoint: it starts empty, and the results will differ from an '
                           'uninterrupted run; see TrainerConfig.replay_checkpoint_megabytes and '
                           'ReplayBuffer.enable_checkpoint', buffer.name)
    if config.compile:
        logger.warning('TrainerConfig.compile: eager mode rounds differently until the update is compiled again, '
                       'so the results will not be bit-identical to an uninterrupted run')


def _sampled_buffers(algorithm: nn.Module, config: TrainerConfig) -> Iterator[ReplayBuffer]:
    """Yield the replay buffers that keep more than the latest unroll."""
    for part in () if config.trains_on_whole_unrolls else algorithm.modules():
        buffer = getattr(part, 'replay_buffer', None)
        if isinstance(buffer, ReplayBuffer):
            yield buffer


def _rows_of_run(buffer: ReplayBuffer, config: TrainerConfig, num_environments: int) -> int:
    """Return the approximate number of steps per environment at the end of the run."""
    if config.num_env_steps:
        steps = math.ceil(config.num_env_steps / num_environments)
    elif config.num_iterations:
        steps = math.ceil(config.num_iterations * (config.unroll_length or config.max_unroll_length))
    else:  # num_episodes limits the run, and their length is unknown
        return buffer.max_length
    return min(steps, buffer.max_length)
