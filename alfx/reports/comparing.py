"""Comparing runs by their folders: how well, how fast, where their confs differ, and by how much pairs of runs do."""
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alfx.reports import curves
from alfx.runs import run_files
from alfx.utils.confidence import confidence_interval

_NOT_COMPARED = ('TrainerConfig.root_dir', 'TrainerConfig.conf_file', 'TrainerConfig.random_seed')


def _numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    """The values of a column, rows without one left out."""
    return [float(row[column]) for row in rows if row.get(column)]


def read_run(root_dir: str) -> dict[str, Any]:
    """What the table shows of one run.

    Args:
        root_dir: a run folder with a `progress.csv`.

    Returns:
        The columns of the table by name; None where the run has no such number yet.
    """
    rows = run_files.read_table(os.path.join(root_dir, 'progress.csv'))
    returns, seconds, steps = (_numbers(rows, name) for name in ('average_return', 'seconds', 'env_steps'))
    evaluations = run_files.eval_table(root_dir)
    evaluated = _numbers(run_files.read_table(evaluations), 'average_return') if os.path.exists(evaluations) else []
    elapsed = seconds[-1] - seconds[0] if seconds else 0.0
    rate = (steps[-1] - steps[0]) / elapsed if elapsed > 0 else None
    return {'run': root_dir, 'seed': run_files.StartRecord(root_dir).read().get('random_seed'),
            'env steps': int(steps[-1]) if steps else None,
            'final return': returns[-1] if returns else None, 'best return': max(returns, default=None),
            'last evaluation': evaluated[-1] if evaluated else None, 'steps/s': rate,
            'minutes': seconds[-1] / 60 if seconds else None}


def read_bindings(root_dir: str) -> dict[str, str]:
    """Every binding of the run by name (`ppo/Adam.lr`), from `conf/config.gin`, as text; the seed left out."""
    path = os.path.join(root_dir, 'conf', 'config.gin')
    if not os.path.exists(path):
        return {}
    with open(path, encoding='utf8') as file:
        statements = [line.split(' = ', 1) for line in file.read().splitlines() if not line.startswith('#')]
    named = {_short_name(parts[0]): parts[1] for parts in statements if len(parts) == 2}
    return {name: value for name, value in named.items() if name not in _NOT_COMPARED}


def _short_name(name: str) -> str:
    """`ac/alfx.optimizers.Adam.lr` without the module: `ac/Adam.lr`."""
    *scopes, selector = name.split('/')
    return '/'.join([*scopes, '.'.join(selector.split('.')[-2:])])


def differences(bindings: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """The bindings that are not the same in all runs: name, then the value in each run ('-' where it is not bound)."""
    names = sorted(set().union(*bindings)) if bindings else []
    table = [(name, [run.get(name, '-') for run in bindings]) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def labels(root_dirs: Sequence[str], names: Sequence[str], most: int = 3) -> list[str]:
    """What to call runs, or groups of runs, next to each other.

    Args:
        root_dirs: one run of each.
        names: what they are called by themselves.
        most: how many bindings a label tells at most.

    Returns:
        The names, where no two are the same; else with the bindings in which those of the same name differ; with the
        folder, where these are too many or none.
    """
    result = list(names)
    for name in dict.fromkeys(name for name in names if list(names).count(name) > 1):
        same = [i for i, other in enumerate(names) if other == name]
        unequal = differences([read_bindings(root_dirs[i]) for i in same])
        for position, i in enumerate(same):
            bound = ', '.join(f'{binding}={values[position]}' for binding, values in unequal)
            folder = os.path.basename(os.path.normpath(root_dirs[i]))
            result[i] = f'{name}: {bound if 0 < len(unequal) <= most else folder}'
    return result


class Difference(NamedTuple):
    """How much better runs of a conf are than those of another one with the same seeds.

    Attributes:
        name: what the conf is called.
        baseline: what the other one is called.
        mean: of the differences of the returns of pairs.
        margin: half the width of the 95% confidence interval of that (Student's t); NaN for a single pair.
        num_pairs: number of pairs.
    """
    name: str
    baseline: str
    mean: float
    margin: float
    num_pairs: int


def paired_differences(runs: Sequence[dict[str, Any]], column: str) -> list[Difference]:
    """Compare each conf with the first one, seed by seed.

    Args:
        runs: as of :func:`read_run`.
        column: which of their numbers.

    Returns:
        One for each conf after the first one that has seeds in common with it.
    """
    groups = curves.group_runs([run['run'] for run in runs])
    if len(groups) < 2:
        return []
    by_folder = {run['run']: run for run in runs}
    values = {name: {by_folder[folder]['seed']: by_folder[folder][column] for folder in folders
                     if None not in (by_folder[folder]['seed'], by_folder[folder][column])}
              for name, folders in groups.items()}
    names = labels([folders[0] for folders in groups.values()], [curves.conf_name(f[0]) for f in groups.values()])
    (baseline, first), *others = zip(names, values.values())
    found = []
    for name, of_seed in others:
        pairs = np.array([value - first[seed] for seed, value in of_seed.items() if seed in first])
        if len(pairs):
            margin = float(confidence_interval(pairs))
            found.append(Difference(name, baseline, float(pairs.mean()), margin, len(pairs)))
    return found
