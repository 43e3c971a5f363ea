"""Plot the learning curves of runs. Runs of the same conf are averaged over their seeds.

Example:

  alfx plot /tmp/cart_pole_seed* --output cart_pole.png

A curve is the interquartile mean over the runs of a group, the band its 95% interval (as in alfx report). If runs were
evaluated, a second panel shows the evaluations. --x and --y are columns of progress.csv in the run folders; --y all
draws every column in a separate panel.
"""
import itertools

from absl import flags as absl_flags

from alfx import gin_utils
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
    from alfx.reports import curves
    policy_flags.set_up_logging()
    flags.check_output('output')
    groups = _groups(argv[1:])
    all_runs = [root_dir for group in groups.values() for root_dir in group]
    x = FLAGS.x or curves.axis_of(all_runs)
    panels: dict = {}
    wanted = curves.columns(all_runs) if FLAGS.y == ['all'] else FLAGS.y
    for y, (words, evaluation) in itertools.product(wanted, (('training', False), ('evaluation', True))):
        if evaluation and x == 'seconds':
            continue  # eval.csv has no such column
        for name, root_dirs in groups.items():
            found = [curve for root_dir in root_dirs if (curve := _read(root_dir, x, y, evaluation)) is not None]
            if found:
                panels.setdefault(f'{y} in {words}', {})[name] = curves.average(found, FLAGS.smoothing)
    if not panels:
        raise gin_utils.ConfError(f'no run has data for {", ".join(FLAGS.y)} over {x} yet',
                                  'train longer, or choose other columns with --x and --y')
    for title, bands in panels.items():
        for name, band in bands.items():
            runs = f', {band.num_runs} runs, 95% interval {band.low[-1]:.5g} to {band.high[-1]:.5g}'
            print(f'{title}: {name}: {band.center[-1]:.5g} at {band.x[-1]:,.6g}{runs if band.num_runs > 1 else ""}')
    curves.draw(panels, x, FLAGS.output)
    print(f'plot: {FLAGS.output}')
    return 0


def _groups(arguments: list[str]) -> dict[str, list[str]]:
    """Return the run folders of each curve, by its label."""
    from alfx.reports import comparing
    from alfx.reports import curves
    from alfx.runs import run_files
    if not arguments:
        raise gin_utils.ConfError('no run folder is given', 'name at least one')
    root_dirs = list(dict.fromkeys(root_dir for argument in arguments for root_dir in run_files.run_folders(argument)))
    groups = [[root_dir] for root_dir in root_dirs]
    if FLAGS.group_by == 'conf':
        groups = list(curves.group_runs(root_dirs).values())
    if FLAGS.labels:
        if len(FLAGS.labels) != len(groups) or len(set(FLAGS.labels)) < len(groups):
            raise gin_utils.ConfError(f'--labels: expected {len(groups)} different names, found {len(FLAGS.labels)}: '
                                      f'{", ".join(FLAGS.labels)}', 'the curves are, in this order: '
                                      + '; '.join(', '.join(group) for group in groups))
        return dict(zip(FLAGS.labels, groups))
    first = [group[0] for group in groups]
    if FLAGS.group_by == 'none':
        return dict(zip(first, groups))
    labels = comparing.labels(first, [curves.conf_name(root_dir) for root_dir in first])
    return {label if labels.count(label) == 1 else group[0]: group for label, group in zip(labels, groups)}


def _read(root_dir: str, x: str, y: str, evaluation: bool):
    from alfx.reports import curves
    if not curves.has_column(root_dir, y, evaluation) and (
            FLAGS.y == ['all'] or curves.has_column(root_dir, y, not evaluation)):
        return None  # it is enough if one of the two files has the column
    return curves.read_curve(root_dir, x, y, evaluation)


if __name__ == '__main__':
    flags.run(main, argument='*')
