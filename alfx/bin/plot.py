"""Plot the learning curves of runs. Runs of the same conf are averaged over their seeds.

Example:

  alfx plot /tmp/cart_pole_seed* --output cart_pole.png

A curve is the interquartile mean over the runs of a group, the band its 95% interval (as in alfx report). If runs were
evaluated, a second panel shows the evaluations. --x and --y are columns of progress.csv in the run folders; --y all
draws every column in a separate panel.
"""
from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number, words

PARSER = flags.Parser(__file__, __doc__, ('RUN ...', 'run folders'))
PARSER.add('output FILE', 'file to write: .png, .pdf or .svg', default='curves.png')
PARSER.add('x COLUMN', 'horizontal axis: env_steps, iteration, seconds, ...; default: env_steps, or iteration if a run '
           'has no environment steps, as in offline training')
PARSER.add('y COLUMNS', "vertical axis: average_return, average_length, loss, ...; several, comma-separated, or 'all'; "
           'each gets its own panel', words, ['average_return'])
PARSER.add('group_by conf|none', 'average runs of the same conf, or draw each run separately', default='conf')
PARSER.add('smoothing N', 'smooth each curve with a moving average over this many points', number(int, 1), 1)
PARSER.add('labels LABELS', 'labels of the curves, comma-separated, in the order of the run folders; default: the '
           'names of the confs, with the bindings that differ between confs of the same name', words, [])
PARSER.add('untrusted', 'accepted for run folders from untrusted sources, but without effect: plot never executes '
           'anything from a run folder')


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
    flags.run(main, PARSER, argument='*')
