"""What of a run is not in its checkpoints, so that it does not go on exactly as if it had not stopped: said in the log.

The replay buffer is told of here. What else there is (the state of some environments, acting in other processes) says
so where it is saved and restored.
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
    """Tell what will not be in the checkpoints of a run, and which setting changes that.

    Args:
        algorithm: the root algorithm.
        config: of the run.
        num_environments: in all processes together.
    """
    for buffer in _sampled_buffers(algorithm, config):
        num_bytes = buffer.num_bytes(_rows_of_run(buffer, config, num_environments)) * context.num_ranks()
        if buffer.enable_checkpoint is False:
            logger.warning('%s is not part of checkpoints (ReplayBuffer.enable_checkpoint = False): a run that goes on '
                           'does so with an empty one, not exactly', buffer.name)
        elif buffer.enable_checkpoint is None and num_bytes > buffer.checkpoint_limit * context.num_ranks():
            size = math.ceil(num_bytes / _MEGABYTE)
            logger.warning('%s will hold %d MiB: above TrainerConfig.replay_checkpoint_megabytes = %g it is not part '
                           'of checkpoints any more, and a run that goes on does so with an empty one, not exactly; '
                           'set it to %d to keep it', buffer.name, size, config.replay_checkpoint_megabytes, size)


def warn_on_resume(algorithm: nn.Module, config: TrainerConfig) -> None:
    """Tell what was not in the checkpoint that has been loaded."""
    for buffer in _sampled_buffers(algorithm, config):
        if not buffer.total_size:
            logger.warning('%s was not in the checkpoint: it is filled anew, and the run does not go on exactly as if '
                           'it had not stopped; TrainerConfig.replay_checkpoint_megabytes and '
                           'ReplayBuffer.enable_checkpoint decide about it', buffer.name)
    if config.compile:
        logger.warning('TrainerConfig.compile: until it is compiled again, what is computed step by step rounds '
                       'differently, so that the run does not go on bit for bit as if it had not stopped')


def _sampled_buffers(algorithm: nn.Module, config: TrainerConfig) -> Iterator[ReplayBuffer]:
    """The replay buffers that hold more than the latest unroll."""
    for part in () if config.trains_on_whole_unrolls else algorithm.modules():
        buffer = getattr(part, 'replay_buffer', None)
        if isinstance(buffer, ReplayBuffer):
            yield buffer


def _rows_of_run(buffer: ReplayBuffer, config: TrainerConfig, num_environments: int) -> int:
    """How many steps of each environment there will be in the end, about."""
    if config.num_env_steps:
        steps = math.ceil(config.num_env_steps / num_environments)
    else:
        steps = math.ceil(config.num_iterations * (config.unroll_length or config.max_unroll_length))
    return min(steps, buffer.max_length)
