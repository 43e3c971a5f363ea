"""Compares run folders: how well, how fast, and where their configurations differ.

    python tools/compare_runs.py runs/a runs/b runs/c
    python tools/compare_runs.py runs/*            # folders that hold no run are left out

Returns are those of the episodes of training (averages over the latest ones, as in `progress.csv`); where a run
was evaluated, its last evaluation is shown as well.
"""
import argparse
import sys
from pathlib import Path
from typing import Any

from alfx.trainers.run_files import read_table

_NOT_COMPARED = ('TrainerConfig.root_dir', 'TrainerConfig.conf_file', 'TrainerConfig.random_seed')


def _numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    """The values of a column, rows without one left out."""
    return [float(row[column]) for row in rows if row.get(column)]


def read_run(folder: Path) -> dict[str, Any]:
    """What the table shows of one run.

    Args:
        folder: a run folder with a `progress.csv`.

    Returns:
        The columns of the table by name; `None` where the run has no such number yet.
    """
    rows = read_table(str(folder / 'progress.csv'))
    returns, seconds, steps = (_numbers(rows, name) for name in ('average_return', 'seconds', 'env_steps'))
    evaluations = folder / 'eval' / 'progress.csv'
    evaluated = _numbers(read_table(str(evaluations)), 'average_return') if evaluations.exists() else []
    elapsed = seconds[-1] - seconds[0] if seconds else 0.0
    rate = (steps[-1] - steps[0]) / elapsed if elapsed > 0 else None
    return {'run': str(folder), 'env steps': int(steps[-1]) if steps else None,
            'final return': returns[-1] if returns else None, 'best return': max(returns, default=None),
            'last evaluation': evaluated[-1] if evaluated else None, 'steps/s': rate,
            'minutes': seconds[-1] / 60 if seconds else None}


def read_bindings(folder: Path) -> dict[str, str]:
    """Every binding of the run by name (`ppo/Adam.lr`), from `conf/config.gin`, as text; the seed left out."""
    path = folder / 'conf' / 'config.gin'
    if not path.exists():
        return {}
    statements = (line.split(' = ', 1) for line in path.read_text().splitlines() if not line.startswith('#'))
    named = {_short_name(parts[0]): parts[1] for parts in statements if len(parts) == 2}
    return {name: value for name, value in named.items() if name not in _NOT_COMPARED}


def _short_name(name: str) -> str:
    """`ac/alfx.optimizers.Adam.lr` without the module: `ac/Adam.lr`."""
    *scopes, selector = name.split('/')
    return '/'.join([*scopes, '.'.join(selector.split('.')[-2:])])


def differences(bindings: list[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """The bindings that are not the same in all runs: name, then the value in each run ('-' where it is not bound)."""
    names = sorted(set().union(*bindings)) if bindings else []
    table = [(name, [run.get(name, '-') for run in bindings]) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def _cell(value: Any) -> str:
    if value is None:
        return '-'
    return value if isinstance(value, str) else f'{value:,}' if isinstance(value, int) else f'{value:,.5g}'


def format_table(rows: list[list[str]]) -> str:
    """Rows of cells, the first being the head, with aligned columns; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return '\n'.join('  '.join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


def main() -> int:
    """Prints the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', nargs='+', type=Path, help='run folders')
    parser.add_argument('--sort', default='final return', help='column of the table, largest first')
    args = parser.parse_args()
    folders = [folder for folder in args.runs if (folder / 'progress.csv').exists()]
    for folder in args.runs:
        if folder not in folders:
            print(f'{folder}: no progress.csv, not a run or nothing summarised yet', file=sys.stderr)
    if not folders:
        return 2
    runs = [read_run(folder) for folder in folders]
    if args.sort not in runs[0]:
        print(f'no column {args.sort!r}; there are {", ".join(runs[0])}', file=sys.stderr)
        return 2
    if args.sort != 'run':
        runs.sort(key=lambda run: float('-inf') if run[args.sort] is None else run[args.sort], reverse=True)
    print(format_table([list(runs[0]), *([_cell(value) for value in run.values()] for run in runs)]))
    unequal = differences([read_bindings(Path(run['run'])) for run in runs])
    if unequal:
        print('\nwhere their confs differ, in the same order:')
        print(format_table([['binding', *(f'({i + 1})' for i in range(len(runs)))],
                            *([name, *values] for name, values in unequal)]))
    elif len(runs) > 1:
        print('\ntheir confs are the same')
    return 0


if __name__ == '__main__':
    sys.exit(main())
