"""Data of a report on runs, read from their run folders. Nothing from a run folder is executed.

Runs whose confs differ only in the seed and the environment belong to one method; the environment is the task.
"""
import datetime
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alfx import gin_utils
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.reports import comparing, curves
from alfx.reports.aggregates import (bootstrap_interval, interquartile_mean, interquartile_mean_interval,
                                     probability_of_improvement)
from alfx.runs import run_files

_TASK = re.compile(r'(^|/)create_environment\.env_name$')
_TASK_LINE = re.compile(r'^\s*(?:\w+\.)*create_environment\.env_name\s*=')


class Interval(NamedTuple):
    """Number with its 95% interval, which is NaN if it cannot be computed."""
    value: float
    low: float
    high: float


class Curves(NamedTuple):
    """Learning curves of one method on one task.

    Attributes:
        x: ``[P]``.
        center: ``[P]``, interquartile mean over the runs.
        low: ``[P]``, lower end of its 95% interval; NaN for a single run.
        high: ``[P]``, upper end.
        runs: logged curve of each run.
    """
    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: list[curves.Curve]


class Run(NamedTuple):
    """Data of one run.

    Attributes:
        folder: path of the run folder, as given.
        method: name of the method.
        task: name of the environment.
        row: result of :func:`alfx.reports.comparing.read_run`.
        finals: last value of the reported quantity, by panel ('training', 'evaluation').
        versions: version of each package.
        threads: number of torch threads; None if not recorded.
        starts: times at which the run was started and resumed, as text.
        checkpoints: numbers of its checkpoints.
        changed: time of the last row in its table.
        bindings: bindings of its conf.
    """
    folder: str
    method: str
    task: str
    row: dict[str, Any]
    finals: dict[str, float]
    versions: dict[str, str | None]
    threads: int | None
    starts: list[str]
    checkpoints: list[int]
    changed: str
    bindings: dict[str, str]


class Score(NamedTuple):
    """Final score of a method on a task.

    Attributes:
        method: the method.
        task: the task.
        panel: 'training' or 'evaluation'.
        runs: last value of each run, ``[N]``.
        iqm: interquartile mean of ``runs``.
    """
    method: str
    task: str
    panel: str
    runs: np.ndarray
    iqm: Interval


class Improvement(NamedTuple):
    """Probability that a run of one method is better than a run of another method.

    Attributes:
        better: the method that is better with this probability.
        other: the other method.
        tasks: tasks on which both methods have runs.
        panel: 'training' or 'evaluation'.
        chance: the probability, in ``[0, 1]``.
    """
    better: str
    other: str
    tasks: list[str]
    panel: str
    chance: Interval


class Report(NamedTuple):
    """Content of a report.

    Attributes:
        x: column of the horizontal axes.
        y: column of the vertical axes.
        runs: the runs in the given order.
        curves: curves by panel ('training', 'evaluation'), task and method.
        scores: score for each panel, task and method with runs.
        improvements: probability of improvement for each panel and pair of methods with a common task.
        differences: bindings that differ between methods: the name and the value of each method.
        methods: the methods in the given order.
    """
    x: str
    y: str
    runs: list[Run]
    curves: dict[str, dict[str, dict[str, Curves]]]
    scores: list[Score]
    improvements: list[Improvement]
    differences: list[tuple[str, list[str]]]
    methods: list[str]


def collect(folders: Sequence[str], x: str = 'env_steps', y: str = 'average_return') -> Report:
    """Read runs and compute the statistics of a report.

    Args:
        folders: run folders, each with a ``progress.csv``.
        x: column for the horizontal axes.
        y: column for the vertical axes; larger values are better.

    Raises:
        ConfError: no run has a row with both columns.
    """
    methods = _methods(folders)
    runs, recorded = [], {}
    for folder in folders:
        found = {panel: curve for panel, evaluation in (('training', False), ('evaluation', True))
                 if (curve := _read_curve(folder, x, y, evaluation)) is not None}
        recorded[folder] = found
        runs.append(_read_run(folder, methods[folder], {panel: float(c.y[-1]) for panel, c in found.items()}))
    if not any(recorded.values()):
        raise gin_utils.ConfError(f'no run has data for {y} over {x}',
                                  'train longer, or choose other columns with --x and --y')
    names = list(dict.fromkeys(methods.values()))
    by_panel: dict[str, dict[str, dict[str, Curves]]] = {}
    scores = []
    for panel in ('training', 'evaluation'):
        for task in dict.fromkeys(run.task for run in runs):
            for method in names:
                own = [run for run in runs if (run.task, run.method) == (task, method) and panel in run.finals]
                if own:
                    drawn = [recorded[run.folder][panel] for run in own]
                    by_panel.setdefault(panel, {}).setdefault(task, {})[method] = Curves(
                        *curves.average(drawn)[:4], drawn)
                    scores.append(_score(method, task, panel, np.array([run.finals[panel] for run in own])))
    first = [next(run for run in runs if run.method == name) for name in names]
    differences = comparing.differences([{k: v for k, v in run.bindings.items() if not _TASK.search(k)}
                                         for run in first])
    return Report(x, y, runs, by_panel, scores, _improvements(scores, names), differences, names)


def _methods(folders: Sequence[str]) -> dict[str, str]:
    """Return the name of the method of each run.

    Runs whose user files of the same name differ belong to different methods. A file that only some runs have does
    not matter, because it may belong to their task.
    """
    groups = list(curves.group_runs(list(folders)).values())
    codes = [curves.user_code(group[0]) for group in groups]
    keys: dict[tuple[str, ...], list[str]] = {}
    for group, code in zip(groups, codes):
        changed = [code[name] for name in code if any(other.get(name, code[name]) != code[name] for other in codes)]
        keys.setdefault((_without_task(group[0]), *changed), []).extend(group)
    first = [group[0] for group in keys.values()]
    labels = comparing.labels(first, [curves.conf_name(folder) for folder in first])
    named = {}
    for label, group in zip(labels, keys.values()):
        name = label if labels.count(label) == 1 else group[0]
        named.update(dict.fromkeys(group, name))
    return named


def _without_task(folder: str) -> str:
    return ''.join(sorted(line for line in curves.conf_lines(folder) if not _TASK_LINE.match(line)))


def _read_curve(folder: str, x: str, y: str, evaluation: bool) -> curves.Curve | None:
    if evaluation and x in curves.NOT_IN_EVALUATIONS:
        return None
    path = run_files.eval_table(folder) if evaluation else os.path.join(folder, 'progress.csv')
    rows = run_files.read_table(path)
    return curves.read_curve(folder, x, y, evaluation) if rows and x in rows[0] and y in rows[0] else None


def _read_run(folder: str, method: str, finals: dict[str, float]) -> Run:
    bindings = comparing.read_conf(folder)
    task = next((value for name, value in bindings.items() if _TASK.search(name)), '')
    info = gin_utils.stored_info(folder)
    tuning = run_files.StartRecord(folder).read().get('tuning')
    table = os.path.join(folder, 'progress.csv')
    changed = datetime.datetime.fromtimestamp(os.path.getmtime(table)).strftime('%Y-%m-%d %H:%M:%S')
    versions = info['versions'] if isinstance(info['versions'], dict) else {}
    return Run(folder, method, task.strip('\'"') or 'one task', comparing.read_run(folder), finals,
               {str(name): value and str(value) for name, value in versions.items()}, tuning[0] if tuning else None,
               [line.split('  ')[0] for line in info['command_lines'] or []],
               Checkpointer(run_files.checkpoint_dir(folder)).steps(), changed, bindings)


def _score(method: str, task: str, panel: str, finals: np.ndarray) -> Score:
    (low, ), (high, ) = interquartile_mean_interval(finals[:, None])
    return Score(method, task, panel, finals, Interval(float(interquartile_mean(finals)), float(low), float(high)))


def _improvements(scores: list[Score], methods: list[str]) -> list[Improvement]:
    found = []
    for panel in ('training', 'evaluation'):
        for i, other in enumerate(methods):
            for better in methods[i + 1:]:
                pairs = {a.task: (a.runs, b.runs) for a in scores for b in scores if a.task == b.task
                         and (a.panel, b.panel, a.method, b.method) == (panel, panel, better, other)}
                if pairs:
                    chance = probability_of_improvement(list(pairs.values()))
                    interval = bootstrap_interval(lambda runs: probability_of_improvement(
                        list(zip(runs[::2], runs[1::2]))), [runs for pair in pairs.values() for runs in pair])
                    found.append(Improvement(better, other, list(pairs), panel, Interval(chance, *interval)))
    return found
