"""Files of a run folder other than the conf and the checkpoints: ``progress.csv``, ``start.json`` and event files.

When a run resumes from a checkpoint, entries written after that checkpoint are removed first, because the run writes
them again.
"""
import contextlib
import csv
import errno
import glob
import json
import logging
import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from typing import Any

from alfx.gin_utils import ConfError, stored_files

logger = logging.getLogger(__name__)
BEST = 'best'  # folder of the best checkpoint, and its name for the user
HOW_TO_KEEP_BEST = 'TrainerConfig.callbacks = (@KeepBestCheckpoint(),) writes one during training'
_MOST_TABLE_BYTES = 2**28
_MOST_THREADS = 4096
LEARNING_COLUMN = re.compile(r'(^|/)(((scalar_)?loss|alpha)(/|$)|train/)')  # scalars of learning in progress.csv
PROGRESS_COLUMNS = ('iteration', 'global_counter', 'env_steps', 'episodes', 'seconds', 'average_return',
                    'average_length', 'steps_per_second')  # first columns of progress.csv
_COUNTS = frozenset(('iteration', 'global_counter', 'env_steps', 'episodes', 'seconds'))  # columns with finite numbers


def train_dir(root_dir: str) -> str:
    """Return the folder of the event files of training."""
    return os.path.join(root_dir, 'train')


def eval_dir(root_dir: str) -> str:
    """Return the folder of the event files and the ``progress.csv`` of evaluations."""
    return os.path.join(root_dir, 'eval')


def eval_table(root_dir: str) -> str:
    """Return the path of the ``progress.csv`` of evaluations."""
    return os.path.join(eval_dir(root_dir), 'progress.csv')


def checkpoint_dir(root_dir: str) -> str:
    """Return the folder of the checkpoints."""
    return os.path.join(root_dir, 'train', 'algorithm')


def best_checkpoint_dir(root_dir: str) -> str:
    """Return the folder of the best checkpoint, see :class:`alfx.runs.callbacks.KeepBestCheckpoint`."""
    return os.path.join(checkpoint_dir(root_dir), BEST)


def explain_folder_error(root_dir: str, error: OSError) -> None:
    """Raise a ConfError for an error in a run folder, unless the disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return
    reason = error.strerror
    if os.path.islink(root_dir) and not os.path.isdir(root_dir):
        reason = f'it is a link to {os.readlink(root_dir)}, which is not a folder'
    raise ConfError(f'the run folder {root_dir} cannot be created or written: {reason}',
                    'fix this, or choose another folder with --root_dir') from error


@contextlib.contextmanager
def created_folder(root_dir: str) -> Iterator[None]:
    """Create a run folder if it does not exist, and remove it at the end if it is empty.

    Raises:
        ConfError: the folder cannot be created.
        OSError: the disk is full.
    """
    created, folder = [], os.path.abspath(root_dir)
    while not os.path.isdir(folder):
        created.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(root_dir, exist_ok=True)
    except OSError as error:
        explain_folder_error(root_dir, error)
        raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # raised by the first folder that is not empty
            for folder in created:
                os.rmdir(folder)


def run_folders(argument: str) -> list[str]:
    """Return the run folder ``argument``, or the run folders inside it.

    Raises:
        ConfError: no run folder is found.
    """
    found = _runs_in(os.path.normpath(os.path.expanduser(argument)), 3)  # 3: runs of a search
    if not found:
        raise ConfError(f'{argument} is not a run folder and contains none', 'name the folder of a run')
    return found


def _runs_in(folder: str, depth: int) -> list[str]:
    if any(os.path.exists(os.path.join(folder, part)) for part in ('progress.csv', 'conf', 'train')):
        return [folder]
    inner = sorted(glob.glob(os.path.join(glob.escape(folder), '*'))) if depth else []
    return [run for path in inner for run in _runs_in(path, depth - 1)]


class StartRecord:
    """File ``train/start.json`` with values chosen at the start of a run, which are kept when the run is resumed.

    Args:
        root_dir: the run folder.
    """

    def __init__(self, root_dir: str):
        self._path = os.path.join(train_dir(root_dir), 'start.json')
        self._operative_conf = os.path.join(root_dir, 'conf', 'operative.gin')

    def read(self) -> dict[str, Any]:
        """Return the recorded values, empty for a new run. Damaged values are dropped with a warning."""
        try:
            found = stored_files.read_json(self._path, object)
        except FileNotFoundError:
            return {}
        except stored_files.FileError:
            found = None
        good = {key: value for key, value in found.items() if _is_valid(key, value)} if type(found) is dict else {}
        if good != found:
            logger.warning('%s is damaged: the missing values are chosen again', self._path)
        if 'summary_axis' not in good and self._predates_summary_axis():
            good['summary_axis'] = 'global_counter'
        return good

    def _predates_summary_axis(self) -> bool:
        try:
            return 'TrainerConfig.summary_axis' not in stored_files.read_text(self._operative_conf, errors='replace')
        except (FileNotFoundError, stored_files.FileError):
            return False

    def write(self, **values: Any) -> None:
        """Add values to the file."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        stored_files.write(self._path, json.dumps({**self.read(), **values}, indent=2) + '\n')


def _is_valid(key: str, value: Any) -> bool:
    if key == 'random_seed':
        return type(value) is int and 0 <= value < 2**32
    if key == 'summary_axis':
        return value in ('env_steps', 'global_counter')
    return key == 'tuning' and is_tuning(value)


def is_tuning(value: Any) -> bool:
    """Return whether ``value`` is a list of the fields of :class:`alfx.trainers.cpu_tuning.Tuning`."""
    kinds = [type(x) for x in value] if type(value) is list else []
    return (kinds[:2] == [int, str] and len(kinds) in (2, 3) and 0 < value[0] <= _MOST_THREADS and
            all(x in ('highest', 'high', 'medium') for x in value[1:2] + [x for x in value[2:] if x is not None]))


class ProgressLog:
    """CSV file with a row each time metrics are logged.

    Args:
        path: path of the file, which is created with the first row.
        first_columns: names of the first columns, in this order.
    """

    def __init__(self, path: str, first_columns: tuple[str, ...]):
        self._path = path
        self._columns: list[str] = list(first_columns)
        if os.path.lexists(path) and (rows := _parse(path)[0]):
            self._columns = list(rows[0])

    def append(self, row: dict[str, Any]) -> None:
        """Append a row. New columns are added to all earlier rows as empty cells."""
        new = [name for name in row if name not in self._columns]
        if new or not os.path.isfile(self._path):
            self._columns += new
            self._rewrite(read_table(self._path))
        with open(self._path, 'a', newline='', encoding='utf8') as file:
            csv.writer(file).writerow([_text(row.get(name, '')) for name in self._columns])

    def last_row(self) -> dict[str, Any]:
        """Return the last row as strings; empty if there is none."""
        return dict((read_table(self._path) or [{}])[-1])

    def cut(self, column: str, last: float) -> None:
        """Remove the rows in which ``column`` exceeds ``last``, and an incomplete last row."""
        if os.path.isfile(self._path):
            rows = read_table(self._path)
            if rows and column not in rows[0]:
                logger.warning('%s is damaged: it has no column %s; the table starts again', self._path, column)
            self._rewrite([row for row in rows if _number(row.get(column)) <= last])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        os.makedirs(os.path.dirname(self._path) or '.', exist_ok=True)
        with (stored_files.replacing(self._path) as temporary,
              open(temporary, 'w', newline='', encoding='utf8') as file):
            writer = csv.DictWriter(file, self._columns, restval='')
            writer.writeheader()
            writer.writerows(rows)


def read_table(path: str) -> list[dict[str, str]]:
    """Return the complete rows of a ``progress.csv``, which contain numbers and ''; none if there is no such file.

    A last line without line break is still being written and is ignored. Damaged lines are skipped with a warning.
    """
    rows, num_damaged = _parse(path) if os.path.isfile(path) else ([], 0)
    if num_damaged:
        logger.warning('%s is damaged: %d lines are skipped', path, num_damaged)
    return rows


def _parse(path: str) -> tuple[list[dict[str, str]], int]:
    """Return the rows and the number of damaged lines. Lines are parsed separately: a stray quote damages only one."""
    text = stored_files.read_text(path, 'restore the file or move it away', _MOST_TABLE_BYTES, errors='replace')
    lines = text[:text.rfind('\n') + 1].replace('\r\n', '\n').split('\n')[:-1]
    fields = [_fields(line) for line in lines if line]
    if not fields:
        return [], 0
    columns = fields[0]
    if any('\ufffd' in name for name in columns):
        return [], len(fields)
    rows = [dict(zip(columns, values)) for values in fields[1:]
            if len(values) == len(columns) and all(not x or _is_number(x, name) for name, x in zip(columns, values))]
    return rows, len(fields) - 1 - len(rows)


def _fields(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error:
        return []


def _is_number(text: str, column: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return column not in _COUNTS or math.isfinite(number) and abs(number) < 2**63


def _text(value: Any) -> str:
    return f'{value:.9g}' if isinstance(value, float) else str(value)


def _number(text: str | None) -> float:
    return float(text or 'nan')


def cut_results(root_dir: str, last: float, global_counter: int) -> None:
    """Remove evaluation results and events that are later than a checkpoint.

    Args:
        root_dir: run folder.
        last: time of the checkpoint, in seconds since the epoch.
        global_counter: counter of the checkpoint.
    """
    ProgressLog(eval_table(root_dir), ()).cut('global_counter', global_counter)
    for folder in (train_dir(root_dir), eval_dir(root_dir)):
        cut_event_files(folder, last)


def cut_event_files(folder: str, last: float) -> None:
    """Remove events that are later than a point in time from the event files of a folder.

    Truncated records and files that become empty are removed as well.

    Args:
        folder: folder of the event files; it need not exist.
        last: latest time to keep, in seconds since the epoch.
    """
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if '.tfevents.' not in name or not os.path.isfile(path):
            continue
        size = os.path.getsize(path)
        if size and _rewrite_events(path, size, last):
            continue
        os.remove(path)


def _rewrite_events(path: str, size: int, last: float) -> int:
    """Remove the events after ``last`` from an event file if others remain; return the number of bytes to keep."""
    with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        kept = [(start, end) for start, end, time in _records(data, size) if time <= last]
        num_kept = sum(end - start for start, end in kept)
        if 0 < num_kept < size:
            with stored_files.replacing(path) as temporary, open(temporary, 'wb') as target:
                target.writelines(data[start:end] for start, end in kept)
    return num_kept


def _records(data: Any, size: int) -> Iterator[tuple[int, int, float]]:
    """Yield start, end and time of the records of an event file: length, its checksum, event, its checksum.

    The time is the first field of an ``Event`` message; 0 if the field is missing.
    """
    position = 0
    while position + 12 <= size:
        length, = struct.unpack_from('<Q', data, position)
        end = position + 12 + length + 4
        if end > size or not length:  # no event is empty
            return
        has_time = length >= 9 and data[position + 12] == 9
        yield position, end, struct.unpack_from('<d', data, position + 13)[0] if has_time else 0.0
        position = end
