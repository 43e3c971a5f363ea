"""What the programs that use a trained policy share; and how programs log."""
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable
from typing import Any

from absl import flags as absl_flags

from alfx import gin_utils
from alfx.bin import flags

# absl attributes a flag to the module that defines it; these belong to the program that asks for them.
absl_flags.disclaim_key_flags()

FLAGS = absl_flags.FLAGS


def define_policy_flags() -> None:
    """Define ``--device``, ``--checkpoint_step``, ``--random_seed``, ``--epsilon_greedy`` and ``--untrusted``."""
    flags.define_device_flag()
    absl_flags.DEFINE_bool('untrusted', False, 'for the run folder of a stranger: import nothing but alfx and tasks of '
                           'gymnasium, and refuse what needs more')
    absl_flags.DEFINE_string('checkpoint_step', 'latest', "which checkpoint: the N of ckpt-N, or 'latest'")
    absl_flags.DEFINE_integer('random_seed', None, 'of the environments and of sampled actions; default: the seed of '
                              'the run', lower_bound=0, upper_bound=2**32 - 1)
    absl_flags.DEFINE_float('epsilon_greedy', None, 'chance of sampling an action instead of taking the most likely '
                            'one; default: what the conf says', lower_bound=0, upper_bound=1)


def define_dataset_flags() -> None:
    """Define ``--overwrite`` and ``--reference_returns``, for programs that write datasets."""
    absl_flags.DEFINE_bool('overwrite', False, 'take the place of a dataset that is there')
    define_reference_flag()


def define_reference_flag() -> None:
    """Define ``--reference_returns``."""
    absl_flags.DEFINE_list('reference_returns', None, 'the returns of a random and of an expert policy, R,E: scores '
                           'are normalized by them')


def reference_returns() -> tuple[float, float] | None:
    """The two numbers of ``--reference_returns``.

    Raises:
        ConfError: they are not two numbers, or the second one is not the larger.
    """
    given = FLAGS.reference_returns
    if given is None:
        return None
    try:
        low, high = map(float, given)
        if low < high:
            return low, high
    except ValueError:
        pass
    raise gin_utils.ConfError('--reference_returns: expected the return of a random policy and a higher one, found '
                              f'{",".join(given)}', 'write --reference_returns=-1200,-150')


def reference_returns_of_run(root_dir: str) -> tuple[float, float] | None:
    """Those that a dataset tells which the run in a folder, whose conf has been loaded, is trained on."""
    from alfx.config import TrainerConfig
    from alfx.offline import dataset_sources
    return dataset_sources.reference_returns(TrainerConfig(root_dir=root_dir).offline_datasets())


def checkpoint_step_from_flags() -> int | str:
    """The value of ``--checkpoint_step``.

    Raises:
        ConfError: it is neither a number nor 'latest'.
    """
    if FLAGS.checkpoint_step == 'latest' or FLAGS.checkpoint_step.isdecimal():
        return FLAGS.checkpoint_step if FLAGS.checkpoint_step == 'latest' else int(FLAGS.checkpoint_step)
    raise gin_utils.ConfError(f"--checkpoint_step: expected a number or 'latest', found {FLAGS.checkpoint_step!r}",
                              'ckpt-100 has the number 100')


def check_run_folder(root_dir: str) -> None:
    """Refuse what is no folder, with a ConfError."""
    if not os.path.isdir(root_dir):
        raise gin_utils.ConfError(f'there is no run folder {root_dir}', 'give the --root_dir of a run')


def run_from_flags(root_dir: str) -> None:
    """Load the conf of the run in a folder, for the device that the flags say.

    Raises:
        ConfError: there is no such folder or device.
    """
    check_run_folder(root_dir)
    flags.device_from_flags()
    flags.conf_from_flags(root_dir, same_run=False, trusted=not FLAGS.untrusted)


def policy_from_flags(root_dir: str, num_environments: int) -> tuple[Any, Any]:
    """The environments, and the algorithm without its checkpoint, of the run in a folder.

    Args:
        root_dir: the run folder.
        num_environments: how many environments.

    Returns:
        Environment and algorithm.

    Raises:
        ConfError: the folder holds no run in environments, or there is no such device.
    """
    from alfx.runs import playing
    run_from_flags(root_dir)
    return playing.make_policy(root_dir, num_environments, FLAGS.random_seed, FLAGS.epsilon_greedy)


def set_up_logging() -> None:
    """Log what alfx has to say to stderr."""
    logger = logging.getLogger('alfx')
    logger.setLevel(logging.INFO)
    logger.propagate = False
    _add_handler(logging.StreamHandler(sys.stderr))


def log_to_file_later() -> Callable[[str], None]:
    """Keep what is logged from now on in memory.

    Returns:
        A function of the path of a file, which gets what was kept, and what is logged after that.
    """
    kept = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    _add_handler(kept)

    def open_file(path: str) -> None:
        logging.getLogger('alfx').removeHandler(kept)
        file = logging.FileHandler(path)
        _add_handler(file)
        logging.getLogger('alfx.console').addHandler(file)  # what alfx.trainers.progress_display shows
        kept.setTarget(file)
        kept.close()

    return open_file


def _add_handler(handler: logging.Handler) -> None:
    has_colors = getattr(getattr(handler, 'stream', None), 'isatty', bool)() and 'NO_COLOR' not in os.environ
    handler.setFormatter((_ColorFormatter if has_colors else logging.Formatter)(
        '%(asctime)s %(levelname)s %(message)s', '%H:%M:%S'))
    logging.getLogger('alfx').addHandler(handler)


class _ColorFormatter(logging.Formatter):
    """Warnings in yellow and errors in red."""

    def format(self, record: logging.LogRecord) -> str:
        color = 31 if record.levelno >= logging.ERROR else 33 if record.levelno >= logging.WARNING else 0
        return f'\x1b[{color}m{super().format(record)}\x1b[0m' if color else super().format(record)
