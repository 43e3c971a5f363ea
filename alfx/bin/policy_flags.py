"""Flags and loading code shared by the programs that use a trained policy, and the logging of all programs."""
import contextlib
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable
from typing import Any

import alfx
from alfx.bin import flags
from alfx.bin.flags import FLAGS, Parser, number


def define_policy_flags(parser: Parser, checkpoints: str = '') -> None:
    """Define the flags of programs that act with the policy of a run, including those of its conf.

    Args:
        parser: command line of the program.
        checkpoints: more values of ``--checkpoint_step``, for its description.
    """
    parser.start_group('policy')
    flags.define_device_flag(parser)
    define_checkpoint_flag(parser, checkpoints)
    parser.add('random_seed N', 'seed of the environments and of sampled actions; default: the seed of the run',
               number(int, 0, 2**32 - 1))
    flags.define_seed_flag(parser)
    parser.add('epsilon_greedy X', 'probability of sampling an action instead of taking the most likely one; default: '
               'the value in the conf', number(float, 0, 1))
    flags.define_conf_flags(parser, untrusted=True)


def define_checkpoint_flag(parser: Parser, more: str = '') -> None:
    """Define ``--checkpoint_step``; ``more`` is added to its description."""
    parser.add('checkpoint_step N', "checkpoint to load: the N of ckpt-N, 'latest', or 'best' for that of "
               f'KeepBestCheckpoint{more}', default='latest')


def is_value_based(algorithm: Any) -> bool:
    """Return whether the policy has no action distribution, so that sampled actions are uniformly random."""
    return any(hasattr(part, 'exploration_rate') for part in algorithm.modules())


def random_seed() -> int | None:
    """Return the seed of ``--random_seed`` or ``--seed``; None if neither is given."""
    return FLAGS.seed if FLAGS.random_seed is None else FLAGS.random_seed


def define_dataset_flags(parser: Parser) -> None:
    """Define ``--overwrite`` and ``--reference_returns``, for programs that write datasets."""
    parser.add('overwrite', 'replace an existing dataset')
    define_reference_flag(parser)


def define_reference_flag(parser: Parser) -> None:
    """Define ``--reference_returns``."""
    parser.add('reference_returns R,E', 'the returns R,E of a random and of an expert policy, used to compute '
               'normalized scores', flags.words)


def reference_returns() -> tuple[float, float] | None:
    """Return the two numbers of ``--reference_returns``, or None if it is not given.

    Raises:
        ConfError: the flag does not have two numbers, or the second is not larger than the first.
    """
    given = FLAGS.reference_returns
    if given is None:
        return None
    with contextlib.suppress(ValueError):
        low, high = map(float, given)
        if low < high:
            return low, high
    raise alfx.gin_utils.ConfError('--reference_returns: expected the return of a random policy and a larger return of '
                                   f'an expert, found {",".join(given)}', 'for example --reference_returns=-1200,-150')


def reference_returns_of_run(root_dir: str) -> tuple[float, float] | None:
    """Return the reference returns stored in the training dataset of a run, or None.

    The conf of the run in ``root_dir`` must be loaded.
    """
    from alfx.config import TrainerConfig
    from alfx.offline import dataset_sources
    return dataset_sources.reference_returns(TrainerConfig(root_dir=root_dir).offline_datasets())


def checkpoint_step_from_flags() -> int | str:
    """Return the value of ``--checkpoint_step``.

    Raises:
        ConfError: the value is not a number, 'latest' or 'best'.
    """
    if FLAGS.checkpoint_step in ('latest', 'best'):
        return FLAGS.checkpoint_step
    if FLAGS.checkpoint_step.isdecimal():
        return int(FLAGS.checkpoint_step)
    raise alfx.gin_utils.ConfError("--checkpoint_step: expected a number, 'latest' or 'best', found "
                                   f'{FLAGS.checkpoint_step!r}', 'the number of ckpt-100 is 100')


def check_run_folder(root_dir: str) -> None:
    """Raise a ConfError if the run folder does not exist."""
    if not os.path.isdir(root_dir):
        raise alfx.gin_utils.ConfError(f'run folder {root_dir} does not exist', 'name the folder of a run, or zoo:NAME')


def run_from_flags(root_dir: str) -> None:
    """Load the conf of the run in a folder, and select the device of ``--device``.

    Raises:
        ConfError: the folder or the device does not exist.
    """
    check_run_folder(root_dir)
    flags.device_from_flags()
    flags.conf_from_flags(root_dir, same_run=False)


def policy_from_flags(root_dir: str, num_environments: int, renders: bool | None = None) -> tuple[Any, Any]:
    """Create the environments and the algorithm of the run in a folder, without loading a checkpoint.

    Args:
        root_dir: the run folder.
        num_environments: number of environments.
        renders: whether the environments will be rendered; None: unknown.

    Returns:
        Environment and algorithm.

    Raises:
        ConfError: the run has no environment, or the folder or device does not exist.
    """
    from alfx.runs import playing
    run_from_flags(root_dir)
    return playing.make_policy(root_dir, num_environments, random_seed(), FLAGS.epsilon_greedy, renders)


def set_up_logging() -> None:
    """Log the messages of alfx to stderr."""
    logger = logging.getLogger('alfx')
    logger.setLevel(logging.INFO)
    logger.propagate = False
    _add_handler(logging.StreamHandler(sys.stderr))


def log_to_file_later() -> Callable[[str], None]:
    """Buffer log messages in memory until the log file can be opened.

    Returns:
        A function that takes the path of the log file, writes the buffered messages to it, and logs to it from then on.
    """
    buffer = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    _add_handler(buffer)

    def open_file(path: str) -> None:
        logging.getLogger('alfx').removeHandler(buffer)
        alfx.gin_utils.stored_files.check_regular(path)
        file = logging.FileHandler(path)
        _add_handler(file)
        logging.getLogger('alfx.console').addHandler(file)  # progress lines of alfx.trainers.progress_display
        buffer.setTarget(file)
        buffer.close()

    return open_file


def _add_handler(handler: logging.Handler) -> None:
    has_colors = getattr(getattr(handler, 'stream', None), 'isatty', bool)() and 'NO_COLOR' not in os.environ
    handler.setFormatter((_ColorFormatter if has_colors else logging.Formatter)(
        '%(asctime)s %(levelname)s %(message)s', '%H:%M:%S'))
    logging.getLogger('alfx').addHandler(handler)


class _ColorFormatter(logging.Formatter):
    """Log formatter that shows warnings in yellow and errors in red."""

    def format(self, record: logging.LogRecord) -> str:
        color = 31 if record.levelno >= logging.ERROR else 33 if record.levelno >= logging.WARNING else 0
        return f'\x1b[{color}m{super().format(record)}\x1b[0m' if color else super().format(record)
