"""Fork a run from a checkpoint: a new run with the same history and random numbers, and some bindings changed.

Examples:

  alfx fork runs/cart_pole --at 120 --set 'ppo/Adam.lr=1e-4' --root_dir runs/slow
  alfx fork runs/cart_pole --set PPOLoss.entropy_regularization=0.01

The fork has its own run folder and trains to the end set in the conf; alfx compare shows both runs side by side. New
learning rates and other optimizer settings take effect immediately. Learned values (a temperature, the statistics of a
normalizer) continue from the checkpoint, even if their initial value is changed. Only the latest two checkpoints
include the replay buffer; a run forked from another checkpoint, such as the best one, starts with an empty buffer.
"""
import os
import sys

import alfx
from alfx.bin import command, flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, ('RUN [KEY=VALUE ...]', 'folder of the run to fork, and bindings to change'))
PARSER.add('at N', "checkpoint to fork from: the N of ckpt-N, 'latest', or 'best' (see KeepBestCheckpoint)",
           default='latest')
PARSER.add('set KEY=VALUE...', "binding to change, --set 'Adam.lr=1e-4'; repeatable")
PARSER.add('root_dir DIR', 'the new run folder; default: the folder of the original run with -fork-1 (-fork-2, ...) '
           'added to its name')
PARSER.add('start', 'start training; --nostart only creates the folder', default=True)
flags.define_device_flag(PARSER)
flags.define_untrusted_flag(PARSER)


def main(argv: list[str]) -> int:
    """Create the run folder of the fork and, unless ``--nostart`` is given, start to train; return the exit code."""
    from alfx.runs import forking, zoo
    flags.stop_on_signals()
    if len(argv) != 2:
        raise alfx.gin_utils.ConfError(f'expected one run folder, found {len(argv) - 1} arguments',
                                       'alfx fork RUN --at N --set X.y=z')
    if FLAGS.at not in ('latest', 'best') and not FLAGS.at.isdecimal():
        raise alfx.gin_utils.ConfError(f"--at: expected a number, 'latest' or 'best', found {FLAGS.at!r}",
                                       'the number of ckpt-100 is 100')
    run = os.path.abspath(zoo.run_folder(argv[1], trains=True))
    root_dir = os.path.abspath(os.path.expanduser(FLAGS.root_dir or _free_folder(run)))
    step = forking.branch(run, int(FLAGS.at) if FLAGS.at.isdecimal() else FLAGS.at, FLAGS.set, root_dir,
                          not flags.is_untrusted())
    print(f'{root_dir}: forked from checkpoint {step} of {run}', flush=True)
    arguments = ['--root_dir', root_dir, '--device', FLAGS.device,
                 *(part for param in FLAGS.set for part in ('--conf_param', param))]
    if not FLAGS.start or FLAGS.untrusted:  # training has no such option
        print(f'to start the run: {command.command_of("train", *arguments)}')
        return 0
    os.execv(sys.executable, [sys.executable, '-m', 'alfx.bin.train', *arguments])


def _free_folder(run: str) -> str:
    number = 1
    while os.path.exists(f'{run}-fork-{number}'):
        number += 1
    return f'{run}-fork-{number}'


if __name__ == '__main__':
    flags.run(main, PARSER, argument='*')
