"""Compare runs: returns, speed, differences between their confs, and paired differences over equal seeds.

Examples:

  alfx compare runs/a runs/b runs/c
  alfx compare runs/*

Returns are averages over the latest training episodes, as in progress.csv. If a run was evaluated, its last evaluation
is shown as well. Runs of several confs with the same seeds are compared in pairs: the table shows the mean difference
from the conf named first, with its 95% confidence interval. Folders without a run are skipped.
"""
import os
import sys
from typing import Any

import alfx
from alfx.bin import flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, ('RUN ...', 'run folders'))
PARSER.add('sort COLUMN', "column to sort by, largest first; 'run' keeps the order of the arguments",
           default='final return')


def main(argv: list[str]) -> int:
    """Print the comparison of the given runs and return the exit code."""
    from alfx.reports import comparing
    if not argv[1:]:
        raise alfx.gin_utils.ConfError('no run folder is given', 'name at least one')
    folders = [os.path.expanduser(folder) for folder in argv[1:]]
    found = [folder for folder in folders if os.path.exists(os.path.join(folder, 'progress.csv'))]
    for folder in folders:
        if folder not in found:
            print(f'{folder}: no progress.csv: not a run folder, or the run has logged nothing yet', file=sys.stderr)
    if not found:
        return 2
    runs = [comparing.read_run(folder) for folder in found]
    if FLAGS.sort not in runs[0]:
        raise alfx.gin_utils.ConfError(f'no column {FLAGS.sort!r}', f'available columns: {", ".join(runs[0])}')
    given = list(runs)
    if FLAGS.sort != 'run':
        runs.sort(key=lambda run: float('-inf') if run[FLAGS.sort] is None else run[FLAGS.sort], reverse=True)
    print(_table([list(runs[0]), *([_cell(value, name) for name, value in run.items()] for run in runs)]))
    unequal = comparing.differences([comparing.read_bindings(run['run']) for run in runs])
    if unequal:
        print('\ndifferences between the confs:')
        print(_table([['binding', *(os.path.basename(os.path.normpath(run['run'])) for run in runs)],
                      *([name, *values] for name, values in unequal)]))
    elif len(runs) > 1:
        print('\nthe confs are identical')
    column = 'final return' if any(run['last evaluation'] is None for run in runs) else 'last evaluation'
    for i, difference in enumerate(comparing.paired_differences(given, column)):
        if i == 0:
            print(f'\n{column}: mean difference from {difference.baseline!r} over equal seeds (95% interval):')
        margin = 'one pair' if difference.num_pairs == 1 else \
            f'+- {difference.margin:.4g}, {difference.num_pairs} pairs'
        print(f'  {difference.name}: {difference.mean:+.5g} ({margin})')
    return 0


def _cell(value: Any, column: str) -> str:
    if value is None:
        return '-'
    if column == 'seed':
        return str(value)
    return value if isinstance(value, str) else f'{value:,}' if isinstance(value, int) else f'{value:,.5g}'


def _table(rows: list[list[str]]) -> str:
    """Return rows of cells as text with aligned columns, the first left-aligned. The first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return '\n'.join('  '.join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


if __name__ == '__main__':
    flags.run(main, PARSER, argument='*')
