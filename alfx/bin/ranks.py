"""Flags, start and output of distributed training.

``torchrun`` starts the training program as several ranks. With ``--num_processes`` or ``--distributed=multi-gpu`` the
program starts the ranks itself (:mod:`alfx.bin.launch`). Only rank 0 prints. If another rank fails, its output is
written to a separate file; if rank 0 is lost, the first surviving rank prints the error.
"""
import copy
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import alfx
from alfx.bin.command import with_flags
from alfx.bin.flags import FLAGS, Parser, number

_UNSET = 'torchrun sets these variables; to train in one process: env -u RANK -u WORLD_SIZE ...'
_STARTED_HERE = 'ALFX_STARTED_RANKS'  # environment variable of ranks started by this program


def define_flags(parser: Parser) -> None:
    """Define ``--distributed`` and ``--num_processes``."""
    parser.add('distributed none|multi-gpu', 'multi-gpu: train with one process per GPU of this machine, or with '
               '--num_processes processes', default='none')
    parser.add('num_processes N', 'train with this many processes on this machine, which split the environments and '
               'batches; with --device=cuda each process uses its own GPU', number(int, 1))


def is_rank() -> bool:
    """Return whether this process is one of several ranks.

    Raises:
        ConfError: some of the environment variables of a rank are missing or invalid.
    """
    if 'RANK' not in os.environ or _number_in_environment('WORLD_SIZE', '1') <= 1:
        return False
    _number_in_environment('RANK')
    missing = [name for name in ('MASTER_ADDR', 'MASTER_PORT') if name not in os.environ]
    if missing:
        raise alfx.gin_utils.ConfError(f'the environment variables RANK and WORLD_SIZE are set, but not '
                                       f'{" and ".join(missing)}', _UNSET)
    return True


def _number_in_environment(name: str, default: str = '') -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise alfx.gin_utils.ConfError(f'environment variable {name}: expected a number, found {text!r}', _UNSET)
    return int(text)


def num_to_start() -> int:
    """Return the number of ranks to start; 1 means to train in this process.

    Raises:
        ConfError: the flags contradict each other, or there are not enough GPUs.
    """
    count, distributed = FLAGS.num_processes, FLAGS.distributed
    if is_rank():
        if _STARTED_HERE not in os.environ and (count is not None or distributed != 'none'):
            raise alfx.gin_utils.ConfError('--num_processes and --distributed start processes, but torchrun has '
                                           'already started the processes', 'remove the flags')
        return 1
    if distributed == 'none':
        if count is not None and count > 1 and 'distributed' in FLAGS.given:
            raise alfx.gin_utils.ConfError(f'--distributed=none and --num_processes={count} contradict each other',
                                           'remove one of them')
        if (count or 1) == 1 or not FLAGS.device.startswith('cuda'):
            return count or 1
    elif 'device' in FLAGS.given and FLAGS.device not in ('cuda', 'auto'):
        raise alfx.gin_utils.ConfError(f'--distributed={distributed} and --device={FLAGS.device} contradict each '
                                       'other: each process uses its own GPU', 'remove one of them')
    return _num_on_gpus(count)


def _num_on_gpus(count: int | None) -> int:
    import torch
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not available:
        raise alfx.gin_utils.ConfError('--distributed=multi-gpu (--device=cuda): torch finds no GPU',
                                       'on CPUs use --num_processes N, or torchrun --nproc_per_node=N -m '
                                       'alfx.bin.train')
    if count is not None and count > available:
        raise alfx.gin_utils.ConfError(f'--num_processes={count}: torch finds {available} GPU(s), and each process '
                                       f'needs one', f'use --num_processes={available}')
    return count or available


def start(count: int, root_dir: str) -> int:
    """Run the current command line as ``count`` ranks in one run folder and return the exit code.

    Raises:
        ConfError: the loaded conf cannot be split over ``count`` ranks.
    """
    from alfx.config import TrainerConfig
    from alfx.bin.launch import launch
    from alfx.engine.remote.data_parallel import share
    from alfx.runs import start_checks
    from alfx.trainers.distributed.strategies import shares_of
    start_checks.warn_of_processes(count, f'--num_processes={count}')
    config = TrainerConfig(root_dir=root_dir)
    shares_of(config, count)
    if config.ml_type == 'rl':
        share('create_environment', 'num_parallel_environments', _num_environments(), count)
    os.environ[_STARTED_HERE] = '1'
    command = [sys.executable, '-m', 'alfx.bin.train', *sys.argv[1:]]
    return launch(command if FLAGS.root_dir else with_flags(command, f'--root_dir={root_dir}'), count)


def _num_environments() -> int:
    import gin

    from alfx.environments.utils import create_environment
    name = 'num_parallel_environments'
    try:
        return copy.deepcopy(gin.query_parameter(f'create_environment.{name}'))  # deepcopy resolves macros
    except ValueError:  # the conf has no such binding
        return inspect.signature(create_environment).parameters[name].default


def train_as_rank(load: Callable[[], tuple[Any, str]], train: Callable[[Any, str, int], int]) -> int:
    """Train as one of several ranks.

    Args:
        load: function that returns the conf and the run folder.
        train: function of the conf, the run folder of rank 0 and the rank that returns the exit code.

    Returns:
        The result of ``train``.
    """
    output = _Output(int(os.environ['RANK']))
    try:
        _choose_device()
        conf, root_dir = load()
        from alfx import context
        from alfx.engine.remote import data_parallel
        ranks = data_parallel.join(context.get_default_device())
        root_dir = output.root_dir = ranks.broadcast_from_rank0(root_dir)
        try:
            code = train(conf, root_dir, ranks.rank)
        except alfx.gin_utils.ConfError as error:  # usually raised on all ranks
            ranks.report(error)
            data_parallel.leave()  # stops the communication threads before Python exits
            raise
        data_parallel.leave()
        return code
    finally:
        output.end(sys.exception())


def _choose_device() -> None:
    from alfx.engine.remote.data_parallel import local_rank
    from alfx.trainers.devices import use_device
    use_device(device_of_rank('cuda' if FLAGS.distributed == 'multi-gpu' else FLAGS.device, local_rank()))


def device_of_rank(name: str, number: int) -> Any:
    """Return the ``torch.device`` of a rank.

    Args:
        name: value of ``--device``.
        number: local rank, the index of the process on its machine.

    Raises:
        ConfError: the device does not exist, or there are fewer GPUs than ranks.
    """
    import torch

    from alfx.trainers.devices import find_device
    if name.startswith('cuda:'):
        raise alfx.gin_utils.ConfError(f'--device={name}: each process needs its own GPU', 'use --device=cuda')
    if find_device(name).type == 'cpu':
        return torch.device('cpu')
    available = torch.cuda.device_count()
    if max(number + 1, int(os.environ.get('LOCAL_WORLD_SIZE', 1))) > available:  # the same error on all ranks
        raise alfx.gin_utils.ConfError(f'--device={name}: no GPU is left for process {number} of this machine, torch '
                                       f'finds {available} GPU(s)',
                                       f'start {available} process(es), or use --device=cpu')
    return torch.device('cuda', number)


class _Output:
    """Output of a rank. Rank 0 prints; the output of other ranks goes to a file in the run folder if they fail.

    Attributes:
        root_dir: the run folder, '' until it is known.
    """

    def __init__(self, rank: int):
        self._rank, self.root_dir = rank, ''
        self._streams = sys.stdout, sys.stderr
        self._kept = io.StringIO()
        if rank:
            sys.stdout, sys.stderr = io.StringIO(), self._kept

    def end(self, error: BaseException | None) -> None:
        """Write the file after an error, and restore stdout and stderr if this rank has to print the error."""
        if error is None:
            return
        from alfx import context
        if context.get_ranks() is not None:
            context.get_ranks().report(error)
        if not self._rank:
            return
        if self.root_dir and not isinstance(error, (SystemExit, alfx.gin_utils.ConfError)):  # rank 0 reports it as well
            folder = os.path.join(self.root_dir, 'train')
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f'rank-{self._rank}.log'), 'a', encoding='utf8') as file:
                file.write(self._kept.getvalue() + ''.join(traceback.format_exception(error)))
        if self._prints_error(error):
            sys.stdout, sys.stderr = self._streams

    def _prints_error(self, error: BaseException) -> bool:
        from alfx import context
        from alfx.utils.processes import LostProcessError
        ranks = context.get_ranks()
        return isinstance(error, LostProcessError) and ranks is not None and ranks.survivors()[0] == self._rank
