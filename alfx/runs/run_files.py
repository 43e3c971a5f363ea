"""The files of a run folder besides the conf and the checkpoints: ``progress.csv``, ``start.json``, event files.

When a run goes on from a checkpoint, what it had written after that checkpoint will be written once more; it is cut off
first.
"""
import contextlib
import csv
import errno
import glob
import json
import logging
import os
import struct
from collections.abc import Iterator
from typing import Any

from alfx.gin_utils import ConfError

logger = logging.getLogger(__name__)


def train_dir(root_dir: str) -> str:
    """Where the event files of training are."""
    return os.path.join(root_dir, 'train')


def eval_dir(root_dir: str) -> str:
    """Where the event files and the ``progress.csv`` of evaluations are."""
    return os.path.join(root_dir, 'eval')


def eval_table(root_dir: str) -> str:
    """The table of the results of evaluations."""
    return os.path.join(eval_dir(root_dir), 'progress.csv')


def checkpoint_dir(root_dir: str) -> str:
    """Where the checkpoints are."""
    return os.path.join(root_dir, 'train', 'algorithm')


def explain_folder_error(root_dir: str, error: OSError) -> None:
    """Raise a ConfError for an error in making a run folder, or in it, that another folder would not have."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return
    what = error.strerror
    if os.path.islink(root_dir) and not os.path.isdir(root_dir):
        what = f'it is a link to {os.readlink(root_dir)}, where no folder is'
    raise ConfError(f'the run folder {root_dir} cannot be made or written to: {what}',
                    'correct that, or name another folder with --root_dir') from error


@contextlib.contextmanager
def made_folder(root_dir: str) -> Iterator[None]:
    """Make a run folder if it does not exist, and remove it again if nothing has been written into it at the end.

    Raises:
        ConfError: it cannot be made.
        OSError: the disk is full.
    """
    made, folder = [], os.path.abspath(root_dir)
    while not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(root_dir, exist_ok=True)
    except OSError as error:
        explain_folder_error(root_dir, error)
        raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # of the first one that is not empty
            for folder in made:
                os.rmdir(folder)


def run_folders(argument: str) -> list[str]:
    """A run folder, or the run folders in a folder.

    Raises:
        ConfError: there are none.
    """
    argument = os.path.expanduser(argument)
    for pattern in ('', '*', '*/*'):
        folders = sorted(glob.glob(os.path.join(glob.escape(argument), pattern)))
        found = [folder.rstrip('/') for folder in folders
                 if any(os.path.exists(os.path.join(folder, part)) for part in ('progress.csv', 'conf', 'train'))]
        if found:
            return found
    raise ConfError(f'{argument} is no run folder and holds none', 'give the --root_dir of a run')


class StartRecord:
    """``train/start.json``: what a run decided at its start, and keeps to when it is started again.

    Args:
        root_dir: the run folder.
    """

    def __init__(self, root_dir: str):
        self._path = os.path.join(train_dir(root_dir), 'start.json')
        self._operative_conf = os.path.join(root_dir, 'conf', 'operative.gin')

    def read(self) -> dict[str, Any]:
        """What was recorded, empty for a new run; what is damaged is left out, with a warning."""
        try:
            with open(self._path, encoding='utf8') as file:
                found = json.load(file)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            found = None
        good = {key: value for key, value in found.items() if _is_decision(key, value)} if type(found) is dict else {}
        if good != found:
            logger.warning('%s is damaged: what it does not tell any more is decided again', self._path)
        if 'summary_axis' not in good and self._began_before_there_were_axes():
            good['summary_axis'] = 'global_counter'
        return good

    def _began_before_there_were_axes(self) -> bool:
        try:
            with open(self._operative_conf, encoding='utf8', errors='replace') as file:
                return 'TrainerConfig.summary_axis' not in file.read()
        except FileNotFoundError:
            return False

    def write(self, **values: Any) -> None:
        """Add to what is recorded."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        _replace(self._path, json.dumps({**self.read(), **values}, indent=2).encode() + b'\n')


def _is_decision(key: str, value: Any) -> bool:
    if key == 'random_seed':
        return type(value) is int and 0 <= value < 2**32
    if key == 'summary_axis':
        return value in ('env_steps', 'global_counter')
    kinds = [type(x) for x in value] if type(value) is list else []
    return (key == 'tuning' and kinds[:2] == [int, str] and len(kinds) in (2, 3) and value[0] > 0 and
            all(x in ('highest', 'high', 'medium') for x in value[1:2] + [x for x in value[2:] if x is not None]))


class ProgressLog:
    """A table with a row for each summary, in a file of comma-separated values.

    Args:
        path: the file; it is made with the first row.
        first_columns: columns that come first, in this order.
    """

    def __init__(self, path: str, first_columns: tuple[str, ...]):
        self._path = path
        self._columns: list[str] = list(first_columns)
        if os.path.isfile(path) and (rows := _parse(path)[0]):
            self._columns = list(rows[0])

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; a column that is new is added to all rows before it, empty."""
        new = [name for name in row if name not in self._columns]
        if new or not os.path.isfile(self._path):
            self._columns += new
            self._rewrite(read_table(self._path) if os.path.isfile(self._path) else [])
        with open(self._path, 'a', newline='', encoding='utf8') as file:
            csv.writer(file).writerow([_text(row.get(name, '')) for name in self._columns])

    def cut(self, column: str, last: float) -> None:
        """Remove the rows in which ``column`` exceeds ``last``, and what is left of a row that was being written."""
        if os.path.isfile(self._path):
            rows = read_table(self._path)
            if rows and column not in rows[0]:
                logger.warning('%s is damaged: it has no column %s; the table begins anew', self._path, column)
            self._rewrite([row for row in rows if _number(row.get(column)) <= last])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        os.makedirs(os.path.dirname(self._path) or '.', exist_ok=True)
        temporary = self._path + '.tmp'
        with open(temporary, 'w', newline='', encoding='utf8') as file:
            writer = csv.DictWriter(file, self._columns, restval='')
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self._path)


def read_table(path: str) -> list[dict[str, str]]:
    """The complete rows of a ``progress.csv``, which hold numbers and ''; a line that does not end is being written.

    What is damaged is left out, with a warning.
    """
    rows, num_damaged = _parse(path)
    if num_damaged:
        logger.warning('%s is damaged: %d of its lines are left out', path, num_damaged)
    return rows


def _parse(path: str) -> tuple[list[dict[str, str]], int]:
    """The rows, and how many lines are damaged. Each line is read by itself: a stray quote takes none with it."""
    with open(path, encoding='utf8', errors='replace', newline='') as file:
        text = file.read()
    lines = text[:text.rfind('\n') + 1].replace('\r\n', '\n').split('\n')[:-1]
    fields = [_fields(line) for line in lines if line]
    if not fields:
        return [], 0
    columns = fields[0]
    if any('\ufffd' in name for name in columns):
        return [], len(fields)
    rows = [dict(zip(columns, values)) for values in fields[1:]
            if len(values) == len(columns) and all(not x or _is_number(x) for x in values)]
    return rows, len(fields) - 1 - len(rows)


def _fields(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error:
        return []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    return f'{value:.9g}' if isinstance(value, float) else str(value)


def _number(text: str | None) -> float:
    return float(text or 'nan')


def _replace(path: str, data: bytes) -> None:
    temporary = path + '.tmp'
    with open(temporary, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def cut_results(root_dir: str, last: float, global_counter: int) -> None:
    """Remove the results of evaluations, and what is in event files, that are later than a checkpoint.

    Args:
        root_dir: the run folder.
        last: when the checkpoint was written, in seconds since the epoch.
        global_counter: its counter.
    """
    ProgressLog(eval_table(root_dir), ()).cut('global_counter', global_counter)
    for folder in (train_dir(root_dir), eval_dir(root_dir)):
        cut_event_files(folder, last)


def cut_event_files(folder: str, last: float) -> None:
    """Remove from the event files of a folder what is later than a point in time.

    A record that is cut off is removed as well, and a file of which nothing is left.

    Args:
        folder: it may not exist.
        last: in seconds since the epoch.
    """
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if '.tfevents.' not in name or not os.path.isfile(path):
            continue
        with open(path, 'rb') as file:
            data = file.read()
        kept = b''.join(record for record, event in _records(data) if _walltime(event) <= last)
        if not kept:
            os.remove(path)
        elif kept != data:
            _replace(path, kept)


def _records(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """The records of an event file (length, its checksum, the event, its checksum), and the event in each."""
    position = 0
    while position + 12 <= len(data):
        length, = struct.unpack_from('<Q', data, position)
        end = position + 12 + length + 4
        if end > len(data):
            return
        yield data[position:end], memoryview(data)[position + 12:end - 4]
        position = end


def _walltime(event: memoryview) -> float:
    """The first field of an ``Event`` message, 0 if it is left out."""
    return struct.unpack_from('<d', event, 1)[0] if event[:1] == b'\x09' else 0.0
