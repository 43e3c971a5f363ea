"""Comparison of runs: returns, speed, conf differences, and paired differences over the same seeds."""
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alfx.gin_utils import ConfError, stored_files
from alfx.reports import curves
from alfx.reports.aggregates import interquartile_mean, interquartile_mean_interval
from alfx.runs import run_files
from alfx.utils.confidence import confidence_interval

_NOT_COMPARED = ('TrainerConfig.root_dir', 'TrainerConfig.conf_file', 'TrainerConfig.random_seed')


def _numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    """Return the values of a column, without rows that have no value."""
    return [float(row[column]) for row in rows if row.get(column)]


def read_run(root_dir: str) -> dict[str, Any]:
    """Return the row of a run in the comparison table.

    Args:
        root_dir: run folder with a ``progress.csv``.

    Returns:
        The cells by column name; None if the run has no such value yet.
    """
    rows = run_files.read_table(os.path.join(root_dir, 'progress.csv'))
    returns, seconds, steps = (_numbers(rows, name) for name in ('average_return', 'seconds', 'env_steps'))
    evaluated = _numbers(run_files.read_table(run_files.eval_table(root_dir)), 'average_return')
    elapsed = seconds[-1] - seconds[0] if seconds else 0.0
    rate = (steps[-1] - steps[0]) / elapsed if elapsed > 0 else None
    return {'run': root_dir, 'seed': run_files.StartRecord(root_dir).read().get('random_seed'),
            'env steps': int(steps[-1]) if steps else None,
            'final return': returns[-1] if returns else None, 'best return': max(returns, default=None),
            'last evaluation': evaluated[-1] if evaluated else None, 'steps/s': rate,
            'minutes': seconds[-1] / 60 if seconds else None}


def score_column(runs: Sequence[dict[str, Any]]) -> str:
    """Return the column that ranks runs: the last evaluation, or the return in training if a run was not evaluated."""
    return 'final return' if any(run['last evaluation'] is None for run in runs) else 'last evaluation'


def summarize(title: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a conf, over its seeds, in the comparison table.

    Args:
        title: first cell.
        runs: results of :func:`read_run`.

    Returns:
        A tuple of numbers for each column, so that rows can be sorted: the interquartile mean over the runs that have a
        value, for returns of several runs followed by the ends of its 95% bootstrap interval; empty if no run has a
        value; the seeds.
    """
    row: dict[str, Any] = {'run': title}
    for name in list(runs[0])[1:]:
        row[name] = tuple(run[name] for run in runs if run[name] is not None)
        values = np.reshape(row[name], (-1, 1))
        if name != 'seed' and len(values) > 1:
            interval = interquartile_mean_interval(values) if 'return' in name or 'evaluation' in name else ()
            row[name] = (interquartile_mean(values).item(), *np.ravel(interval).tolist())
    return row


def read_bindings(root_dir: str) -> dict[str, str]:
    """Return the bindings in ``conf/config.gin`` as text, by name (``ppo/Adam.lr``), without the seed."""
    path = os.path.join(root_dir, 'conf', 'config.gin')
    if not os.path.exists(path):
        return {}
    lines = stored_files.read_text(path).splitlines()
    statements = [line.split(' = ', 1) for line in lines if not line.startswith('#')]
    named = {short_name(parts[0]): parts[1] for parts in statements if len(parts) == 2}
    return {name: value for name, value in named.items() if name not in _NOT_COMPARED}


def read_conf(root_dir: str) -> dict[str, str]:
    """Return the bindings of a run and the checksums of the user's code, see :func:`~alfx.reports.curves.user_code`."""
    return read_bindings(root_dir) | curves.user_code(root_dir)


def short_name(name: str) -> str:
    """Return the name of a binding without the module: ``ac/Adam.lr`` for ``ac/alfx.optimizers.Adam.lr``."""
    *scopes, selector = name.split('/')
    return '/'.join([*scopes, '.'.join(selector.split('.')[-2:])])


def differences(bindings: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the bindings that differ between runs: the name and the value in each run ('-' if it is not bound)."""
    names = sorted(set().union(*bindings)) if bindings else []
    table = [(name, [run.get(name, '-') for run in bindings]) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def labels(root_dirs: Sequence[str], names: Sequence[str], most: int = 3) -> list[str]:
    """Return unique labels for runs or groups of runs.

    Args:
        root_dirs: run folder of one run of each group.
        names: names of the groups, possibly with duplicates.
        most: maximum number of bindings in a label.

    Returns:
        The names. Duplicate names are followed by the arguments in which the groups differ, or by the name of the
        folder if there are none or more than ``most`` of them.
    """
    result = list(names)
    for name in dict.fromkeys(name for name in names if list(names).count(name) > 1):
        same = [i for i, other in enumerate(names) if other == name]
        unequal = differences([read_conf(root_dirs[i]) for i in same])
        arguments = [binding.rpartition('.')[2] for binding, _ in unequal]
        if len(set(arguments)) < len(arguments):
            arguments = [binding for binding, _ in unequal]
        for position, i in enumerate(same):
            bound = ', '.join(f'{argument}={_short(values[position])}' for argument, (_, values)
                              in zip(arguments, unequal))
            folder = os.path.basename(os.path.normpath(root_dirs[i]))
            result[i] = f'{name}: {bound if 0 < len(unequal) <= most else folder}'
    return result


def labelled_groups(folders: Sequence[str], group_by: str = 'conf', names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the run folders of each curve, by its label.

    Args:
        folders: run folders, or folders that contain them.
        group_by: 'conf' for a curve of all runs of a conf, 'none' for a curve of each run.
        names: labels of the curves in the order of the folders; empty for the names of the confs, with the bindings
            that differ between confs of the same name.

    Raises:
        ConfError: a folder is or contains no run, or the number of labels is wrong.
    """
    if not folders:
        raise ConfError('no run folder is given', 'name at least one')
    root_dirs = list(dict.fromkeys(root_dir for folder in folders for root_dir in run_files.run_folders(folder)))
    groups = [[root_dir] for root_dir in root_dirs]
    if group_by == 'conf':
        groups = list(curves.group_runs(root_dirs).values())
    if names:
        if len(names) != len(groups) or len(set(names)) < len(groups):
            raise ConfError(f'labels: expected {len(groups)} different names, found {len(names)}: {", ".join(names)}',
                            'the curves are, in this order: ' + '; '.join(', '.join(group) for group in groups))
        return dict(zip(names, groups))
    first = [group[0] for group in groups]
    return dict(zip(first if group_by == 'none' else _unique_labels(first), groups))


def _unique_labels(root_dirs: Sequence[str]) -> list[str]:
    """Return a label for each group, given its first run; the run folder if several labels would be equal."""
    found = labels(root_dirs, [curves.conf_name(root_dir) for root_dir in root_dirs])
    return [label if found.count(label) == 1 else root_dir for label, root_dir in zip(found, root_dirs)]


def groups_in(folder: str) -> dict[str, list[str]]:
    """Return the runs in a folder that have logged anything, grouped by conf, by the title of each group.

    The title is the folder, or the folder inside it that contains the runs of the conf, or its label if several confs
    have runs in the same folder. Empty if the folder neither is nor contains a run.
    """
    try:
        found = run_files.run_folders(folder)
    except ConfError:
        return {}
    logged = [x for x in found if os.path.exists(os.path.join(x, 'progress.csv'))]
    groups = labelled_groups(logged) if logged else {}
    titles = [folder] if len(groups) == 1 else [os.path.commonpath(group) for group in groups.values()]
    return {title if titles.count(title) == 1 else f'{folder}: {label}': group
            for title, (label, group) in zip(titles, groups.items())}


def _short(value: str) -> str:
    """Return the value of a binding with floating-point numbers rounded to four digits."""
    return re.sub(r'(?<![\w.])\d*\.\d+(e[+-]?\d+)?(?![\w.])', lambda number: f'{float(number[0]):.4g}', value)


class Difference(NamedTuple):
    """Difference between the runs of a conf and the runs of a baseline with the same seeds.

    Attributes:
        name: label of the conf.
        baseline: label of the baseline.
        mean: mean difference between the returns of pairs.
        margin: half the width of the 95% confidence interval of ``mean`` (Student's t); NaN for a single pair.
        num_pairs: number of pairs.
    """
    name: str
    baseline: str
    mean: float
    margin: float
    num_pairs: int


def paired_differences(runs: Sequence[dict[str, Any]], column: str) -> list[Difference]:
    """Compare each conf with the first conf, over the same seeds.

    Args:
        runs: results of :func:`read_run`.
        column: column to compare.

    Returns:
        A difference for each other conf that has seeds in common with the first.
    """
    groups = curves.group_runs([run['run'] for run in runs])
    if len(groups) < 2:
        return []
    by_folder = {run['run']: run for run in runs}
    values = {name: {by_folder[folder]['seed']: by_folder[folder][column] for folder in folders
                     if None not in (by_folder[folder]['seed'], by_folder[folder][column])}
              for name, folders in groups.items()}
    names = _unique_labels([folders[0] for folders in groups.values()])
    (baseline, first), *others = zip(names, values.values())
    found = []
    for name, by_seed in others:
        pairs = np.array([value - first[seed] for seed, value in by_seed.items() if seed in first])
        if len(pairs):
            margin = float(confidence_interval(pairs))
            found.append(Difference(name, baseline, float(pairs.mean()), margin, len(pairs)))
    return found
