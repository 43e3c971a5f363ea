"""Show a trained policy in a window, or record a video of it.

Examples:

  alfx play /tmp/cart_pole
  alfx play /tmp/cart_pole --record_file /tmp/cart_pole.mp4 --num_episodes 3
  alfx play /tmp/cart_pole --record_file /tmp/cart_pole.mp4 --checkpoint_step all
"""
import os
import sys

from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number

PARSER = flags.Parser(__file__, __doc__, flags.RUN)
PARSER.add('num_episodes N', 'number of episodes', number(int, 1), 10)
PARSER.add('record_file FILE', 'record a video to this file, .mp4 or .gif, instead of opening a window')
PARSER.add('sleep_time_per_step X', 'seconds to wait after each step in a window', number(float, 0), 0.01)
PARSER.add('last_step_repeats N', 'number of times to repeat the last frame of each episode in the video',
           number(int, 0), 0)
PARSER.add('append_blank_frames N', 'number of black frames after each episode in the video', number(int, 0), 0)
PARSER.add('max_frames N', 'maximum number of frames of the video', number(int, 1), 20_000)
PARSER.add('render', 'show the environment; --norender only prints the episodes', default=True)
policy_flags.define_policy_flags(PARSER, "; 'all' plays all checkpoints in turn and records a video NAME-N of each")


def main() -> int:
    """Play the policy selected by the flags.

    Returns:
        The exit code.
    """
    from alfx.environments.rendering import has_display
    from alfx.runs.playing import play
    policy_flags.set_up_logging()
    flags.check_output('record_file')
    root_dir = flags.root_dir_from_flags()
    if FLAGS.render and not FLAGS.record_file and not has_display():
        print('no display is available, so no window opens; --record_file play.mp4 records a video', file=sys.stderr)
    env, algorithm = policy_flags.policy_from_flags(root_dir, num_environments=1, renders=FLAGS.render or
                                                    bool(FLAGS.record_file))
    with env:
        for step, record_file in _checkpoints(root_dir):
            if FLAGS.checkpoint_step == 'all':
                print(f'checkpoint {step}')
            result = play(root_dir, env, algorithm, step, FLAGS.num_episodes, FLAGS.sleep_time_per_step, record_file,
                          FLAGS.last_step_repeats, FLAGS.append_blank_frames, FLAGS.render,
                          report=lambda line: print(line, flush=True), max_frames=FLAGS.max_frames)
            print(f'mean: {result}')
            if record_file:
                print(f'video: {record_file}')
    return 0


def _checkpoints(root_dir: str) -> list[tuple[int | str, str | None]]:
    """Return the checkpoints to play, and the video file of each."""
    if FLAGS.checkpoint_step != 'all':
        return [(policy_flags.checkpoint_step_from_flags(), FLAGS.record_file)]
    from alfx.checkpoints.checkpointer import Checkpointer
    from alfx.checkpoints.files import CheckpointError
    from alfx.runs import run_files
    folder = run_files.checkpoint_dir(root_dir)
    steps = Checkpointer(folder).steps()
    if not steps:
        raise CheckpointError(f'there is no checkpoint in {folder}')
    stem, suffix = os.path.splitext(FLAGS.record_file or '')
    return [(step, f'{stem}-{step}{suffix}' if stem else None) for step in steps]


if __name__ == '__main__':
    flags.run(main, PARSER, argument='root_dir')
