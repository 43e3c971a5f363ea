"""Sizes that no machine is made for are told when a run starts, before its memory or its patience ends."""
import logging
import os
from typing import Any

from alfx import context, nest
from alfx.config import TrainerConfig

logger = logging.getLogger(__name__)
_GIBIBYTE = 2**30
_SHARE_OF_MEMORY = 0.5
_MANY_PROCESSES = 4  # for each core


def warn_of_processes(count: int, what: str) -> None:
    """Warn if so many processes would share the cores of this machine that they mostly wait for each other.

    Args:
        count: how many there will be.
        what: they are, and how many are a conf's or a flag's to say.
    """
    cores = os.cpu_count() or 1
    if count > _MANY_PROCESSES * cores:
        logger.warning('%s: %d processes share the %d core(s) of this machine, and mostly wait for each other', what,
                       count, cores)


def warn_of_unroll(env: Any, config: TrainerConfig) -> None:
    """Warn if the observations of one unroll take more than half of this machine's memory.

    Args:
        env: the environments of this process.
        config: of the run.
    """
    length = max(1, int(config.unroll_length or config.max_unroll_length))
    specs = nest.flatten(env.observation_spec())
    num_bytes = sum(spec.numel * spec.dtype.itemsize for spec in specs) * length * env.batch_size * context.num_ranks()
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    if num_bytes > _SHARE_OF_MEMORY * memory:
        logger.warning('the observations of one unroll (TrainerConfig.unroll_length = %d steps of %d environments) '
                       'take %.0f GiB, and this machine has %.0f', length, env.batch_size * context.num_ranks(),
                       num_bytes / _GIBIBYTE, memory / _GIBIBYTE)


def warn_of_mini_batch(num_environments: int, config: TrainerConfig) -> None:
    """Warn if a minibatch is to be larger than the unroll that is trained on as a whole.

    Args:
        num_environments: of the run.
        config: of the run.
    """
    steps = int(config.unroll_length)
    if not (config.trains_on_whole_unrolls and config.mini_batch_size and steps):
        return
    length = config.mini_batch_length or steps
    count = num_environments * (steps // length)
    if 0 < count < config.mini_batch_size:
        logger.warning('TrainerConfig.mini_batch_size = %d, but an unroll of %d steps of %d environments has %d '
                       'sequences of %d step(s): every update is on all of them', config.mini_batch_size, steps,
                       num_environments, count, length)
