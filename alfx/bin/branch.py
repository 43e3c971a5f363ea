"""Begin a run from a checkpoint of another one, with bindings changed: same history, same random numbers.

Examples:

  alfx branch runs/cart_pole --at 120 --set 'ppo/Adam.lr=1e-4' --root_dir runs/slow
  alfx branch runs/cart_pole --set PPOLoss.importance_ratio_clipping=0.1

The new run has a folder of its own and trains on to the end that the conf says; alfx compare shows the two next to each
other. Learning rates and other settings of optimizers take effect at the branch; what is learned (a temperature, the
statistics of a normaliser) goes on from its value there, whatever its initial value is set to. Replay buffers are kept
with the latest two checkpoints; from an earlier one a run fills its buffer anew.
"""
import os
import sys

from absl import flags as absl_flags

from alfx import gin_utils
from alfx.bin import command, flags

absl_flags.DEFINE_string('at', 'latest', "which checkpoint: the N of ckpt-N, or 'latest'")
absl_flags.DEFINE_multi_string('set', [], "what is changed, --set 'Adam.lr=1e-4'; repeatable")
absl_flags.DEFINE_string('root_dir', None, 'the new run folder; default: beside the other one, with -branch-1 or so '
                         'added to its name')
absl_flags.DEFINE_bool('start', True, 'train; --nostart only makes the folder')
flags.define_device_flag()
absl_flags.DEFINE_bool('debug', False, 'show the traceback of every error')
FLAGS = absl_flags.FLAGS


def main(argv: list[str]) -> int:
    """Make the run folder and, unless told otherwise, train in it; returns the exit code."""
    from alfx.runs import forking
    if len(argv) != 2:
        raise gin_utils.ConfError(f'expected the folder of one run, found {len(argv) - 1} arguments',
                                  'alfx branch RUN --at N --set X.y=z')
    if FLAGS.at != 'latest' and not FLAGS.at.isdecimal():
        raise gin_utils.ConfError(f"--at: expected a number or 'latest', found {FLAGS.at!r}", 'ckpt-100 is 100')
    run = os.path.abspath(os.path.expanduser(argv[1]))
    root_dir = os.path.abspath(os.path.expanduser(FLAGS.root_dir or _free_folder(run)))
    step = forking.branch(run, FLAGS.at if FLAGS.at == 'latest' else int(FLAGS.at), FLAGS.set, root_dir)
    print(f'{root_dir}: goes on from checkpoint {step} of {run}', flush=True)
    arguments = ['--root_dir', root_dir, '--device', FLAGS.device,
                 *(part for param in FLAGS.set for part in ('--conf_param', param))]
    if not FLAGS.start:
        print(f'to start it: {command.command_of("train", *arguments)}')
        return 0
    os.execv(sys.executable, [sys.executable, '-m', 'alfx', 'train', *arguments])


def _free_folder(run: str) -> str:
    number = 1
    while os.path.exists(f'{run}-branch-{number}'):
        number += 1
    return f'{run}-branch-{number}'


if __name__ == '__main__':
    flags.run(main, argument='*')
