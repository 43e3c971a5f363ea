"""Train the algorithm described by a conf file.

Examples:

  alfx train ppo_cart_pole --root_dir /tmp/cart_pole
  alfx train sac_pendulum --seeds 1,2,3 TrainerConfig.num_env_steps=20000
  alfx train ppo_cart_pole --root_dir /tmp/cart_pole --num_processes 2
  torchrun --nproc_per_node=2 -m alfx.bin.train --conf ppo_cart_pole --root_dir /tmp/cart_pole

The same command resumes an interrupted run. Ctrl-C, SIGTERM and SIGHUP (the terminal closes) write a checkpoint and
stop the run; the exit code is 128 + the number of the signal. SIGUSR1 writes a checkpoint without stopping the run.
SIGUSR2 prints the stack of every thread.

Distributed training runs in several processes, on one machine with --num_processes, or started by torchrun on one or
more machines.
"""
import logging
import os
import shlex
import signal
import sys
import time
from typing import Any

import alfx
from alfx.bin import command, flags, policy_flags, ranks, seeds
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, flags.RUN_OR_CONF, {'list': 'alfx list shows the confs shipped with alfx'})
seeds.define_flags(PARSER)
flags.define_device_flag(PARSER)
ranks.define_flags(PARSER)
flags.define_conf_flags(PARSER)
flags.define_unused_flag(PARSER)


def main() -> int:
    """Train the conf selected by the flags.

    Returns:
        The exit code.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # ignored before and after training
        signal.signal(number, signal.SIG_IGN)
    seeds.apply_seed()
    if FLAGS.seeds:
        return seeds.train(_conf_and_root_dir()[1])
    count = ranks.num_to_start()
    if count > 1:
        return ranks.start(count, _conf_and_root_dir()[1])
    if ranks.is_rank():
        return ranks.train_as_rank(_conf_and_root_dir, _train)
    flags.device_from_flags()
    return _train(*_conf_and_root_dir())


def _train(conf: Any, root_dir: str, rank: int = -1) -> int:
    """Train in one process (``rank`` -1) or as one of several ranks, of which rank 0 writes; return the exit code."""
    from alfx.runs import run_files, run_lock
    from alfx.trainers import devices
    policy_flags.set_up_logging()
    if rank > 0:
        logging.getLogger('alfx').setLevel(logging.ERROR)
        with run_lock.held(root_dir):
            return _run(_make_trainer(root_dir, conf.conf_file, rank), root_dir)
    print(f'run folder: {root_dir}', flush=True)
    if 'device' not in FLAGS.given and (gpu := devices.unused_gpu()):
        print(f'networks compute on the CPU; --device cuda selects the {gpu}', flush=True)
    with run_files.created_folder(root_dir), run_lock.held(root_dir):
        open_log = policy_flags.log_to_file_later()
        trainer = _make_trainer(root_dir, conf.conf_file, rank)
        open_log(os.path.join(root_dir, 'train.log'))
        alfx.gin_utils.write_conf(root_dir, conf)
        return _run(trainer, root_dir)


def _run(trainer: Any, root_dir: str) -> int:
    trainer.train()
    if trainer.stop_signal is not None:
        program = shlex.split(command.command_of('train')) if sys.argv[0].endswith('train.py') else sys.argv[:1]
        print(f'to resume: {shlex.join([*program, *_arguments(root_dir)])}')
        return 128 + trainer.stop_signal
    _print_end(trainer, root_dir)
    return 0


def _conf_and_root_dir() -> tuple[Any, str]:
    """Return the conf and the run folder, which is a new folder below ``runs`` unless ``--root_dir`` is given."""
    if FLAGS.root_dir:
        root_dir = os.path.abspath(flags.root_dir_from_flags(trains=True))
        if os.path.exists(root_dir) and not os.path.isdir(root_dir):
            raise alfx.gin_utils.ConfError(f'--root_dir {root_dir} is a file', 'name a folder')
        return flags.conf_from_flags(root_dir, allow_unused=FLAGS.allow_unused), root_dir
    conf = flags.conf_from_flags(allow_unused=FLAGS.allow_unused)
    name = os.path.splitext(os.path.basename(conf.conf_file))[0]
    return conf, os.path.abspath(os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'))


def _make_trainer(root_dir: str, conf_file: str, rank: int) -> Any:
    from alfx.config import TrainerConfig
    from alfx.trainers.policy_trainer import RLTrainer, SLTrainer
    config = TrainerConfig(root_dir=root_dir, conf_file=conf_file)
    return RLTrainer(config, rank) if config.ml_type == 'rl' else SLTrainer(config, rank)


def _print_end(trainer: Any, root_dir: str) -> None:
    """Print the score, and commands to use the result."""
    console = logging.getLogger('alfx.console')
    done = f'done: {trainer.current_iterations():,} iterations, {trainer.score()}'
    console.info(done)
    for log in (logging.getLogger('alfx'), console):
        log.handlers.clear()
    print(f'\n{done}')
    arguments: dict[str, tuple[str, ...]] = {'train longer': ('train', root_dir, *trainer.doubled_length())}
    if kept := trainer.last_scheduled_values():  # a longer run would move schedules back; a fork can keep the values
        arguments['train longer'] = ('fork', root_dir, *trainer.doubled_length(),
                                     *(f'{name}={value:.4g}' for name, value in kept.items()))
    if trainer.algorithm.environment is not None:
        arguments = {'play': ('play', root_dir), 'video': ('play', root_dir, '--record_file', 'play.mp4'),
                     'evaluate': ('evaluate', root_dir), 'plot': ('plot', root_dir), **arguments}
    for name, (program, *rest) in arguments.items():
        print(f'  {name + ":":14}{command.command_of(program, *rest)}')
    print(f'  {"curves:":14}{command.python()} -m tensorboard.main --logdir {shlex.quote(root_dir)}')


def _arguments(root_dir: str) -> list[str]:
    """Return the arguments of this program, with the run folder added if it was not given."""
    given = sys.argv[1:]
    return given if FLAGS.root_dir else command.with_flags(given, '--root_dir', root_dir)


if __name__ == '__main__':
    flags.run(main, PARSER, argument='conf')
