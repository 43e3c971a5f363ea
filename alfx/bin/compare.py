"""Compare runs: returns, speed, differences between their confs, and paired differences over the same seeds.

Examples:

  alfx compare runs/a runs/b runs/c
  alfx compare runs/*

Returns are averages over the latest training episodes, as in progress.csv. If a run was evaluated, its last evaluation
is shown as well. A folder that contains runs of several seeds is one row, with interquartile means and, for returns,
their 95% intervals (as in alfx report). Runs of several confs with the same seeds are compared in pairs: the table
shows the mean difference from the conf named first, with its 95% confidence interval. Folders without a run are
skipped.
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
    groups: dict[str, list[dict[str, Any]]] = {}
    for folder in (os.path.normpath(os.path.expanduser(folder)) for folder in argv[1:]):
        if not (found := comparing.groups_in(folder)):
            print(f'{folder}: no progress.csv: not a run folder, or the run has logged nothing yet', file=sys.stderr)
        groups |= {title: [comparing.read_run(root_dir) for root_dir in group] for title, group in found.items()}
    if not groups:
        return 2
    runs = [run for group in groups.values() for run in group]
    rows = [comparing.summarize(title, group) for title, group in groups.items()]
    if FLAGS.sort not in rows[0]:
        raise alfx.gin_utils.ConfError(f'no column {FLAGS.sort!r}', f'available columns: {", ".join(rows[0])}')
    if FLAGS.sort != 'run':
        rows.sort(key=lambda row: row[FLAGS.sort], reverse=True)
    print(_table([list(rows[0]), *([_cell(value, name) for name, value in row.items()] for row in rows)]))
    titles = [row['run'] for row in rows]
    names = [os.path.basename(os.path.normpath(title)) for title in titles]
    unequal = comparing.differences([comparing.read_conf(groups[title][0]['run']) for title in titles])
    if unequal:
        print('\ndifferences between the confs:')
        print(_table([['binding', *(titles if len(set(names)) < len(names) else names)],
                      *([name, *values] for name, values in unequal)]))
    elif len(rows) > 1:
        print('\nthe confs are identical')
    if any(name.endswith('create_environment.env_name') for name, _ in unequal):
        print('\nthe runs have different environments, so their returns say little about each other')
    column = comparing.score_column(runs)
    for i, difference in enumerate(comparing.paired_differences(runs, column)):
        if i == 0:
            print(f'\n{column}: mean difference from {difference.baseline!r} over the same seeds (95% interval):')
        margin = 'one pair' if difference.num_pairs == 1 else \
            f'+- {difference.margin:.4g}, {difference.num_pairs} pairs'
        unclear = ': no clear difference' if abs(difference.mean) <= difference.margin else ''
        print(f'  {difference.name}: {difference.mean:+.5g} ({margin}){unclear}')
    return 0


def _cell(value: str | tuple[float, ...], column: str) -> str:
    if isinstance(value, str) or not value:
        return str(value or '-')
    if column == 'seed':
        return f'{len(value)} {"seeds" if len({*value}) == len(value) else "runs"}' if value[1:] else str(value[0])
    center, *ends = (f'{x:,.0f}' if column == 'env steps' or abs(x) >= 1e5 else f'{x:,.5g}' for x in value)
    return f'{center} ({" to ".join(ends)})' if ends else center


def _table(rows: list[list[str]]) -> str:
    """Return rows of cells as text with aligned columns, the first left-aligned. The first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return '\n'.join('  '.join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


if __name__ == '__main__':
    flags.run(main, PARSER, argument='*')
