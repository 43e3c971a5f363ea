"""Show a trained policy in a window, or record a video of it.

Examples:

  alfx play /tmp/cart_pole
  alfx play /tmp/cart_pole --record_file /tmp/cart_pole.mp4 --num_episodes 3
  alfx play /tmp/cart_pole --record_file /tmp/cart_pole.mp4 --checkpoint_step all
"""
import os
import sys

from absl import flags as absl_flags

from alfx.bin import flags, policy_flags

flags.define_conf_flags()
policy_flags.define_policy_flags()
absl_flags.FLAGS['checkpoint_step'].help += "; 'all' plays all checkpoints in turn and records a video NAME-N of each"
absl_flags.DEFINE_integer('num_episodes', 10, 'number of episodes', lower_bound=1)
absl_flags.DEFINE_string('record_file', None, 'record a video to this file, .mp4 or .gif, instead of opening a window')
absl_flags.DEFINE_float('sleep_time_per_step', 0.01, 'seconds to wait after each step in a window', lower_bound=0)
absl_flags.DEFINE_integer('last_step_repeats', 0, 'number of times to repeat the last frame of each episode in the '
                          'video', lower_bound=0)
absl_flags.DEFINE_integer('append_blank_frames', 0, 'number of black frames after each episode in the video',
                          lower_bound=0)
absl_flags.DEFINE_integer('max_frames', 20_000, 'length at which the video ends', lower_bound=1)
absl_flags.DEFINE_bool('render', True, 'show the environment; --norender only prints the episodes')
FLAGS = absl_flags.FLAGS


def main(argv: list[str]) -> int:
    """Play the policy selected by the flags.

    Returns:
        The exit code.
    """
    del argv
    from alfx.runs.playing import play
    policy_flags.set_up_logging()
    flags.check_output('record_file')
    root_dir = flags.root_dir_from_flags()
    if FLAGS.render and not FLAGS.record_file and not _has_display():
        print('no display is available, so no window opens; --record_file play.mp4 records a video', file=sys.stderr)
    env, algorithm = policy_flags.policy_from_flags(root_dir, num_environments=1, renders=FLAGS.render or
                                                    bool(FLAGS.record_file))
    try:
        for step, record_file in _checkpoints(root_dir):
            if FLAGS.checkpoint_step == 'all':
                print(f'checkpoint {step}')
            result = play(root_dir, env, algorithm, step, FLAGS.num_episodes, FLAGS.sleep_time_per_step, record_file,
                          FLAGS.last_step_repeats, FLAGS.append_blank_frames, FLAGS.render,
                          report=lambda line: print(line, flush=True), max_frames=FLAGS.max_frames)
            print(f'mean: {result}')
            if record_file:
                print(f'video: {record_file}')
    finally:
        env.close()
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


def _has_display() -> bool:
    return not sys.platform.startswith('linux') or any(os.environ.get(name) for name in ('DISPLAY', 'WAYLAND_DISPLAY'))


if __name__ == '__main__':
    flags.run(main, argument='root_dir')
