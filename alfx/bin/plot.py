"""Plot the learning curves of runs. Runs of the same conf are averaged over their seeds.

Example:

  alfx plot /tmp/cart_pole_seed* --output cart_pole.png

A curve is the interquartile mean over the runs of a group, the band its 95% interval (as in alfx report). If runs were
evaluated, a second panel shows the evaluations. --x and --y are columns of progress.csv in the run folders; --y all
draws every column in a separate panel.
"""
from absl import flags as absl_flags

from alfx.bin import flags, policy_flags

absl_flags.DEFINE_string('output', 'curves.png', 'file to write: .png, .pdf or .svg')
absl_flags.DEFINE_string('x', None, 'horizontal axis: env_steps, iteration, seconds, ...; default: env_steps, or '
                         'iteration if a run has no environment steps, as in offline training')
absl_flags.DEFINE_list('y', ['average_return'], 'vertical axis: average_return, average_length, loss, ...; several, '
                       "comma-separated, or 'all'; each gets its own panel")
absl_flags.DEFINE_enum('group_by', 'conf', ['conf', 'none'], 'average runs of the same conf, or draw each run '
                       'separately')
absl_flags.DEFINE_integer('smoothing', 1, 'smooth each curve with a moving average over this many points',
                          lower_bound=1)
absl_flags.DEFINE_list('labels', [], 'labels of the curves, comma-separated, in the order of the run folders; '
                       'default: the names of the confs, with the bindings that differ between confs of the same name')
absl_flags.DEFINE_bool('untrusted', False, 'accepted for run folders from untrusted sources, but without effect: '
                       'plot never executes anything from a run folder')
absl_flags.DEFINE_bool('debug', False, 'show the traceback of every error')
FLAGS = absl_flags.FLAGS


def main(argv: list[str]) -> int:
    """Plot the given runs.

    Returns:
        The exit code.
    """
    from alfx.reports import comparing, curves
    policy_flags.set_up_logging()
    flags.check_output('output')
    groups = comparing.labelled_groups(argv[1:], FLAGS.group_by, FLAGS.labels)
    x, panels = curves.read_panels(groups, FLAGS.x, FLAGS.y, FLAGS.smoothing)
    for title, bands in panels.items():
        for name, band in bands.items():
            runs = f', {band.num_runs} runs, 95% interval {band.low[-1]:.5g} to {band.high[-1]:.5g}'
            print(f'{title}: {name}: {band.center[-1]:.5g} at {band.x[-1]:,.6g}{runs if band.num_runs > 1 else ""}')
    curves.draw(panels, x, FLAGS.output)
    print(f'plot: {FLAGS.output}')
    return 0


if __name__ == '__main__':
    flags.run(main, argument='*')
