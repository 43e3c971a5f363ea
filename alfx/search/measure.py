"""Value of a run, read from its run folder during and after the run."""
import json
import math
import os
from collections.abc import Sequence

from alfx.gin_utils import hint_nearest, stored_files
from alfx.runs import run_files
from alfx.search.search_settings import Search

VALUE = 'value'
"""Column of ``progress.csv`` with the values that a function reports."""
_RESULT = 'result.json'


class MeasureError(ValueError):
    """Raised if a run has no value, or a value that is not finite."""


class Measure:
    """Reader of the values of runs.

    Args:
        settings: uses ``function``, ``measure``, ``measured_in``, ``score``, ``score_window``, ``direction``.
    """

    def __init__(self, settings: Search):
        self._settings = settings
        self._is_function = settings.function is not None
        self._pick = max if settings.direction == 'maximize' else min
        self._seen: dict[str, tuple[tuple, list[float]]] = {}

    def curve(self, root_dir: str) -> list[float]:
        """Return the score after each row that the run has logged so far; empty before the first row."""
        values = self._values(root_dir)
        return values if self._is_function else [self._score(values[:i + 1]) for i in range(len(values))]

    def final(self, root_dir: str) -> float:
        """Return the score of a finished run.

        Raises:
            MeasureError: the run has no score, or the score is not finite.
        """
        if self._is_function:
            value = read_result(root_dir)
            if value is None:
                raise MeasureError('the function returned nothing')
        else:
            values = self._values(root_dir)
            if not values:
                raise MeasureError(self._missing(root_dir))
            value = self._score(values)
        if not math.isfinite(value):
            raise MeasureError(f'the value is {value}')
        return value

    def _score(self, values: Sequence[float]) -> float:
        if self._settings.score == 'best':
            return self._pick([value for value in values if not math.isnan(value)] or [math.nan])
        window = values[-(self._settings.score_window or 5):] if self._settings.score == 'mean' else values[-1:]
        return math.fsum(window) / len(window)

    def _values(self, root_dir: str) -> list[float]:
        """Return the column of the table. The file is read again only when it has changed."""
        path = self._table(root_dir)
        status = os.stat(path) if os.path.isfile(path) else None
        state = () if status is None else (status.st_size, status.st_mtime_ns)
        known = self._seen.get(root_dir)
        if known is None or known[0] != state:
            known = self._seen[root_dir] = (state, self._read(root_dir))
        return known[1]

    def _read(self, root_dir: str) -> list[float]:
        column = VALUE if self._is_function else self._settings.measure
        return [float(row[column]) for row in run_files.read_table(self._table(root_dir)) if row.get(column)]

    def _table(self, root_dir: str) -> str:
        if self._is_function or self._settings.measured_in == 'training':
            return os.path.join(root_dir, 'progress.csv')
        return run_files.eval_table(root_dir)

    def _missing(self, root_dir: str) -> str:
        settings, path = self._settings, self._table(root_dir)
        if not os.path.isfile(path):
            what = 'was never evaluated' if settings.measured_in == 'evaluation' else 'logged nothing'
            return f'the run {what}'
        rows = run_files.read_table(path)
        if rows and settings.measure not in rows[0]:
            hint = hint_nearest(settings.measure, list(rows[0])) or f'its columns are {", ".join(rows[0])}'
            return f'{os.path.relpath(path, root_dir)} has no column {settings.measure!r}; {hint}'
        return f'{os.path.relpath(path, root_dir)} has no value of {settings.measure!r} yet'


def write_result(root_dir: str, value: float) -> None:
    """Write the return value of a function to the run folder."""
    stored_files.write(os.path.join(root_dir, _RESULT), json.dumps({VALUE: value}))


def read_result(root_dir: str) -> float | None:
    """Return the return value of a function, or None if it has not returned."""
    try:
        return float(stored_files.read_json(os.path.join(root_dir, _RESULT), {VALUE: object})[VALUE])
    except (FileNotFoundError, ValueError, TypeError):
        return None
