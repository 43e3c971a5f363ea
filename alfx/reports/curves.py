"""Learning curves of runs: read from run folders, group by conf, average over seeds and plot.

A curve is read from ``progress.csv``, or from the TensorBoard event files of a run without this file. Runs that differ
only in their seed and folder form a group. The curve of a group is the interquartile mean
of its runs, and the band around it the 95% bootstrap interval.
"""
import ast
import contextlib
import glob
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from alfx.gin_utils import ConfError, hint_nearest, stored_files
from alfx.reports.aggregates import interquartile_mean, interquartile_mean_interval
from alfx.runs import run_files

_log = logging.getLogger(__name__)
_POINTS = 200
_SEED_BINDING = re.compile(r'^\s*(?:\w+\.)*TrainerConfig\.(random_seed|root_dir|conf_file)\s*=')
_EVENT_TAG = 'Metrics/AverageReturn'
_EVENT_TAG_OVER_STEPS = 'Metrics_vs_EnvironmentSteps/AverageReturn'  # if the other tag is logged over iterations


class Curve(NamedTuple):
    """Curve of one quantity of one run.

    Attributes:
        x: float64 ``[N]``, ascending.
        y: float64 ``[N]``.
    """
    x: np.ndarray
    y: np.ndarray


class Band(NamedTuple):
    """Interquartile mean of the curves of a group, as in reports (:mod:`alfx.reports.aggregates`).

    Attributes:
        x: ``[N]``.
        center: ``[N]``, interquartile mean over the runs; with fewer than four the mean.
        low: ``[N]``, lower end of the 95% bootstrap interval; NaN for a single run.
        high: ``[N]``, its upper end.
        num_runs: number of runs.
    """
    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_runs: int


def read_curve(root_dir: str, x: str, y: str, evaluation: bool) -> Curve | None:
    """Return a curve of a run, or None if the run has no data for it.

    Args:
        root_dir: the run folder.
        x: column for the horizontal axis.
        y: column for the vertical axis.
        evaluation: read the evaluations of the run instead of its training.

    Raises:
        ConfError: the table has no such column.
    """
    path = _table(root_dir, evaluation)
    if not os.path.isfile(path):
        folder = run_files.eval_dir(root_dir) if evaluation else run_files.train_dir(root_dir)
        return _read_events(folder) if (x, y) == ('env_steps', 'average_return') else None
    rows = run_files.read_table(path)
    if not rows:
        return None
    x, y = (_full_name(column, list(rows[0]), path) for column in (x, y))
    points = np.array([(float(row[x]), float(row[y])) for row in rows if row[x] and row[y]])
    return _sorted_curve(points) if len(points) else None


def _matching_columns(name: str, columns: list[str]) -> list[str]:
    """Return the column called ``name``, or the columns with this part: ``approx_kl`` matches ``train/approx_kl``."""
    return [column for column in columns if column == name] or [
        column for column in columns if column.endswith(f'/{name}') or f'/{name}/' in column]


def _full_name(name: str, columns: list[str], path: str) -> str:
    """Return the only column that matches a name.

    Raises:
        ConfError: no column matches, or several do.
    """
    found = _matching_columns(name, columns)
    if len(found) == 1:
        return found[0]
    raise ConfError(f'{path} has ' + (f'several columns that match {name!r}' if found else f'no column {name!r}'),
                    f'the columns are {", ".join(found)}' if found else
                    hint_nearest(name, [column.rpartition('/')[2] for column in columns])
                    or f'the columns are {", ".join(columns)}')


def _read_events(folder: str) -> Curve | None:
    if not glob.glob(os.path.join(glob.escape(folder), '*tfevents*')):
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(folder, size_guidance={'scalars': 0}).Reload()
    tag = next((tag for tag in (_EVENT_TAG_OVER_STEPS, _EVENT_TAG) if tag in events.Tags()['scalars']), None)
    if tag is None:
        return None
    return _sorted_curve(np.array([(float(event.step), event.value) for event in events.Scalars(tag)]))


def _sorted_curve(points: np.ndarray) -> Curve:
    points = points[np.argsort(points[:, 0], kind='stable')]
    return Curve(points[:, 0], points[:, 1])


def group_runs(root_dirs: list[str]) -> dict[str, list[str]]:
    """Group runs by their conf.

    Returns:
        The name and the run folders of each group. The name is the name of the conf file, with a number if several
        confs have the same name.
    """
    keys: dict[str, list[str]] = {}
    for root_dir in root_dirs:
        keys.setdefault(''.join([*conf_lines(root_dir), *map(str, user_code(root_dir).items())]), []).append(root_dir)
    groups: dict[str, list[str]] = {}
    for folders in keys.values():
        name = base = conf_name(folders[0])
        number = 1
        while name in groups:
            number += 1
            name = f'{base} ({number})'
        groups[name] = folders
    return groups


def conf_lines(root_dir: str) -> list[str]:
    """Return the conf of a run without comments, the seed and other parameters that differ between runs of a group.

    Without a conf file the only line is the folder that contains the run.
    """
    path = os.path.join(root_dir, 'conf', 'config.gin')
    if not os.path.isfile(path):
        return [os.path.dirname(os.path.abspath(root_dir))]
    lines = stored_files.read_text(path).splitlines(keepends=True)
    return [line for line in lines if not _SEED_BINDING.match(line) and not line.startswith('#')]


def user_code(root_dir: str) -> dict[str, str]:
    """Return a checksum of each Python file that a run copied from the user, by 'code of NAME'.

    Comments and the formatting of the code have no effect on it.
    """
    folder, found = os.path.join(root_dir, 'conf'), {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), '**', '*.py'), recursive=True)):
        text = stored_files.read_text(path, errors='replace')
        with contextlib.suppress(SyntaxError, ValueError):
            text = ast.dump(ast.parse(text))
        name = os.path.splitext(os.path.relpath(path, folder))[0]
        found[f'code of {name}'] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return found


def conf_name(root_dir: str) -> str:
    """Return the name of the conf file of a run, or the name of the run folder if it is unknown."""
    path = os.path.join(root_dir, 'conf', 'config.gin')
    if os.path.isfile(path):
        match = re.match('# From (.+)', stored_files.read_text(path))
        if match:
            return os.path.splitext(os.path.basename(match[1].strip()))[0]
    path = os.path.join(root_dir, 'conf', 'command_line.txt')
    if os.path.isfile(path):
        match = re.search(r'--(?:conf|gin_file)[= ](\S+)', stored_files.read_text(path, errors='replace'))
        if match:
            return os.path.splitext(os.path.basename(match[1].strip('\'"')))[0]
    return os.path.basename(os.path.normpath(root_dir))


def average(curves: list[Curve], smoothing: int = 1) -> Band:
    """Interquartile mean of curves over the range that all of them cover.

    Args:
        curves: at least one.
        smoothing: window of a moving average that is applied to each curve first.
    """
    smoothed = [Curve(curve.x, _moving_average(curve.y, smoothing)) for curve in curves]
    ends = [curve.x[-1] for curve in smoothed]
    low, high = max(curve.x[0] for curve in smoothed), min(ends)
    if high < 0.9 * max(ends):
        _log.warning('the mean of %d runs ends with the shortest one, at %g of %g', len(ends), high, max(ends))
    if len(smoothed) == 1:
        x = smoothed[0].x
    else:  # without a common range, the end of the shortest curve
        x = np.linspace(low, high, _POINTS) if high > low else np.array([high])
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in smoothed])
    return Band(x, interquartile_mean(values), *interquartile_mean_interval(values), len(curves))


def _moving_average(y: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last ``width`` values."""
    # not from a cumulative sum, in which a NaN or a huge value would spoil all later means
    return np.array([y[max(end - width, 0):end].mean() for end in range(1, len(y) + 1)])


NOT_IN_EVALUATIONS = ('seconds', 'episodes')  # columns that evaluations lack, or that mean something else there
_NO_QUANTITY = ('env_steps', 'iteration', 'global_counter', 'seconds')  # columns for the horizontal axis
_MOST_COLUMNS = 4
_MARKED_POINTS = 10  # curves of fewer points have markers


def _table(root_dir: str, evaluation: bool) -> str:
    return run_files.eval_table(root_dir) if evaluation else os.path.join(root_dir, 'progress.csv')


def _tables(root_dirs: list[str]) -> Iterator[list[dict[str, str]]]:
    for path in (_table(root_dir, evaluation) for root_dir in root_dirs for evaluation in (False, True)):
        if rows := run_files.read_table(path):
            yield rows


def axis_of(root_dirs: list[str]) -> str:
    """Return the column for the horizontal axis: 'env_steps', or 'iteration' if a run has no environment steps.

    Training on a dataset takes no environment steps, so its whole curve would be a single point.
    """
    for rows in _tables(root_dirs):
        if sum(row.get('env_steps') in ('0', '0.0', '') for row in rows) > max(1, len(rows) // 20):
            return 'iteration'
    return 'env_steps'


def has_column(root_dir: str, column: str, evaluation: bool) -> bool:
    """Return whether a run has a column, or event files to read the curve from."""
    path = _table(root_dir, evaluation)
    if not os.path.isfile(path):
        return column == 'average_return'
    rows = run_files.read_table(path)
    return bool(rows) and bool(_matching_columns(column, list(rows[0])))


def columns(root_dirs: list[str]) -> list[str]:
    """Return all columns, except those for the horizontal axis, for which any of the runs has values."""
    found: dict[str, None] = {}
    for rows in _tables(root_dirs):
        found.update(dict.fromkeys(name for name in rows[0] if name not in _NO_QUANTITY
                                   and any(row[name] for row in rows)))
    return list(found)


def read_panels(groups: Mapping[str, Sequence[str]], x: str | None, y: Sequence[str],
                smoothing: int = 1) -> tuple[str, dict[str, dict[str, Band]]]:
    """Read the curves of runs and average them over each group. A warning names the runs that lack a column.

    Args:
        groups: run folders by label, see :func:`alfx.reports.comparing.labelled_groups`.
        x: column for the horizontal axis; None for :func:`axis_of`.
        y: columns for the vertical axes, or ``['all']``.
        smoothing: number of points of the moving average.

    Returns:
        The column of the horizontal axis, and bands by title of the panel and label.

    Raises:
        ConfError: no run has such data, or no run has one of the columns.
    """
    all_runs = [root_dir for group in groups.values() for root_dir in group]
    x = x or axis_of(all_runs)
    panels: dict[str, dict[str, Band]] = {}
    for name in columns(all_runs) if list(y) == ['all'] else y:
        lacking = [root_dir for root_dir in all_runs if not any(
            has_column(root_dir, name, evaluation) for evaluation in (False, True))]
        if 0 < len(lacking) < len(all_runs) and list(y) != ['all']:
            _log.warning('%s is not drawn for runs without such a column: %s', name, ', '.join(lacking))
        for evaluation in (False, ) if x in NOT_IN_EVALUATIONS else (False, True):
            for label, root_dirs in groups.items():
                found = [curve for root_dir in root_dirs if (  # if no run has the column, reading it is an error
                    has_column(root_dir, name, evaluation) or lacking == all_runs)
                         and (curve := read_curve(root_dir, x, name, evaluation)) is not None]
                if found:
                    title = f'{name} in {"evaluation" if evaluation else "training"}'
                    panels.setdefault(title, {})[label] = average(found, smoothing)
    if not panels:
        raise ConfError(f'no run has data for {", ".join(y)} over {x} yet', 'train longer, or choose other columns for '
                        'x and y')
    return x, panels


def draw(panels: dict[str, dict[str, Band]], x_label: str, path: str) -> Any:
    """Plot bands to a file and return the figure; see :func:`figure_of`.

    Args:
        panels: bands by title of the panel (``'QUANTITY in ...'``) and name of the group.
        x_label: label of the horizontal axis.
        path: file to write; the suffix determines the format.
    """
    from matplotlib.backend_bases import FigureCanvasBase
    formats = FigureCanvasBase.get_supported_filetypes()
    if os.path.isdir(path) or os.path.splitext(path)[1].lower().removeprefix('.') not in formats:
        raise ConfError(f'--output {path}: expected a file name that ends with one of '
                        f'{", ".join(f".{name}" for name in sorted(formats))}')
    figure = figure_of(panels, x_label)
    with stored_files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
    return figure


def figure_of(panels: dict[str, dict[str, Band]], x_label: str) -> Any:
    """Plot bands to a ``matplotlib.figure.Figure``, which matplotlib does not show by itself.

    Args:
        panels: bands by title of the panel (``'QUANTITY in ...'``) and name of the group.
        x_label: label of the horizontal axis.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    class ShownFigure(Figure):
        """Figure that a notebook shows although pyplot, which would register it, is not used."""

        def _repr_png_(self) -> bytes:
            self.savefig(image := io.BytesIO(), format='png', dpi=90)
            return image.getvalue()

    across = min(len(panels), _MOST_COLUMNS)
    down = -(-len(panels) // across)
    names = list(dict.fromkeys(name for bands in panels.values() for name in bands))
    height = 4.4 * down + 0.2 * len(names)  # the legend is below the panels, so that it covers no curve
    figure = ShownFigure(figsize=(6.4 * across, height), layout='constrained')
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    for axis, (title, bands) in zip(axes.flat, panels.items()):
        for name, band in bands.items():
            _draw_band(axis, name, band, f'C{names.index(name) % 10}')
        axis.set_title(title.replace('_', ' '))
        axis.set_xlabel(x_label.replace('_', ' '))
        axis.set_ylabel(title.rpartition(' in ')[0].replace('_', ' '))
        axis.xaxis.set_major_formatter(EngFormatter(sep=''))  # 100k
        axis.grid(alpha=0.3)
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(lines.values(), lines, loc='outside lower center', fontsize='small', frameon=False)
    return figure


def _draw_band(axis: Any, name: str, band: Band, color: str) -> None:
    label = name if band.num_runs == 1 else f'{name} ({band.num_runs} runs)'
    axis.plot(band.x, band.center, label=label, color=color, marker='o' if len(band.x) < _MARKED_POINTS else '',
              markersize=4)
    if np.isfinite(band.low).all():
        axis.fill_between(band.x, band.low, band.high, color=color, alpha=0.2, linewidth=0)
        if len(band.x) == 1:  # a band has no width
            axis.vlines(band.x, band.low, band.high, color=color, alpha=0.5)
