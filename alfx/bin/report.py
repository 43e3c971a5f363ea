"""Write an HTML report on runs: learning curves, statistics over seeds, conf differences, versions and speed.

Examples:

  alfx report runs/cart_pole_seed*
  alfx report runs/a runs/b --output comparison.html

Runs that differ only in seed and environment count as runs of the same conf. The report is a single self-contained
file that opens without a network connection. Nothing from a run folder is executed.
"""
import os

import alfx
from alfx.bin import flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, ('RUN ...', 'run folders'))
PARSER.add('output FILE', 'file to write', default='report.html')
PARSER.add('title TEXT', 'heading of the report', default='Training report')
PARSER.add('x COLUMN', 'horizontal axis: env_steps, iteration, seconds, ...; default: same as alfx plot')
PARSER.add('y COLUMN', 'metric to report: a column of progress.csv where larger is better', default='average_return')


def main(argv: list[str]) -> int:
    """Write the report on the given runs and return the exit code."""
    from alfx.bin import policy_flags
    from alfx.reports import collecting, curves, page
    from alfx.runs import run_files
    policy_flags.set_up_logging()
    flags.check_output('output')
    folders = list(dict.fromkeys(folder for argument in argv[1:] for folder in run_files.run_folders(argument)))
    folders = [folder for folder in folders if os.path.isfile(os.path.join(folder, 'progress.csv'))]
    if not folders:
        raise alfx.gin_utils.ConfError('no given folder contains a run with a progress.csv',
                                       'name at least one run folder')
    report = collecting.collect(folders, FLAGS.x or curves.axis_of(folders), FLAGS.y)
    alfx.gin_utils.stored_files.write(FLAGS.output, page.render(report, FLAGS.title))
    for score in report.scores:
        between = '' if len(score.runs) == 1 else f' ({page.number(score.iqm.low)} to {page.number(score.iqm.high)})'
        runs = '1 run' if len(score.runs) == 1 else f'{len(score.runs)} runs'
        print(f'{score.method} on {score.task}, {score.panel}: IQM {page.number(score.iqm.value)}{between}, {runs}')
    print(f'report: {FLAGS.output}')
    return 0


if __name__ == '__main__':
    flags.run(main, PARSER, argument='*')
