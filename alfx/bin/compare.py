"""Compare run folders: how well, how fast, where their confs differ, and by how much runs of the same seed do.

Examples:

  alfx compare runs/a runs/b runs/c
  alfx compare runs/*

Returns are those of the episodes of training (averages over the latest ones, as in progress.csv); where a run was
evaluated, its last evaluation is shown as well. Runs of several confs with the same seeds are compared in pairs: the
mean of the differences from the conf named first, with its 95% confidence interval. Folders that hold no run are left
out.
"""
import os
import sys
from typing import Any

from absl import flags as absl_flags

from alfx import gin_utils
from alfx.bin import flags

absl_flags.DEFINE_string('sort', 'final return', "column of the table, largest first; 'run' keeps the order given")
absl_flags.DEFINE_bool('debug', False, 'show the traceback of every error')
FLAGS = absl_flags.FLAGS


def main(argv: list[str]) -> int:
    """Print the comparison of the runs that the arguments name; returns the exit code."""
    from alfx.reports import comparing
    if not argv[1:]:
        raise gin_utils.ConfError('no run folder is given', 'name at least one')
    folders = [os.path.expanduser(folder) for folder in argv[1:]]
    found = [folder for folder in folders if os.path.exists(os.path.join(folder, 'progress.csv'))]
    for folder in folders:
        if folder not in found:
            print(f'{folder}: no progress.csv, not a run or nothing summarised yet', file=sys.stderr)
    if not found:
        return 2
    runs = [comparing.read_run(folder) for folder in found]
    if FLAGS.sort not in runs[0]:
        raise gin_utils.ConfError(f'no column {FLAGS.sort!r}', f'there are {", ".join(runs[0])}')
    given = list(runs)
    if FLAGS.sort != 'run':
        runs.sort(key=lambda run: float('-inf') if run[FLAGS.sort] is None else run[FLAGS.sort], reverse=True)
    print(_table([list(runs[0]), *([_cell(value, name) for name, value in run.items()] for run in runs)]))
    unequal = comparing.differences([comparing.read_bindings(run['run']) for run in runs])
    if unequal:
        print('\nwhere their confs differ:')
        print(_table([['binding', *(os.path.basename(os.path.normpath(run['run'])) for run in runs)],
                      *([name, *values] for name, values in unequal)]))
    elif len(runs) > 1:
        print('\ntheir confs are the same')
    column = 'final return' if any(run['last evaluation'] is None for run in runs) else 'last evaluation'
    for i, difference in enumerate(comparing.paired_differences(given, column)):
        if i == 0:
            print(f'\ndifference from {difference.baseline!r}, {column}, of runs with the same seed (95% interval):')
        margin = 'one pair alone' if difference.num_pairs == 1 else \
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
    """Rows of cells, the first being the head, with aligned columns; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return '\n'.join('  '.join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


if __name__ == '__main__':
    flags.run(main, argument='*')
