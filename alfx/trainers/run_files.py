"""The files of a run folder besides the conf and the checkpoints: ``progress.csv``, ``start.json``, event files.

When a run goes on from a checkpoint, what it had written after that checkpoint will be written once more; it is cut off
first.
"""
import contextlib
import csv
import io
import json
import os
import struct
from collections.abc import Iterator
from typing import Any


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


@contextlib.contextmanager
def made_folder(root_dir: str) -> Iterator[None]:
    """Make a run folder if it does not exist, and remove it again if nothing has been written into it at the end.

    Raises:
        OSError: it cannot be made.
    """
    made, folder = [], os.path.abspath(root_dir)
    while not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    os.makedirs(root_dir, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # of the first one that is not empty
            for folder in made:
                os.rmdir(folder)


class StartRecord:
    """``train/start.json``: what a run decided at its start, and keeps to when it is started again.

    Args:
        root_dir: the run folder.
    """

    def __init__(self, root_dir: str):
        self._path = os.path.join(train_dir(root_dir), 'start.json')

    def read(self) -> dict[str, Any]:
        """What was recorded, empty for a new run."""
        try:
            with open(self._path, encoding='utf8') as file:
                return json.load(file)
        except (FileNotFoundError, ValueError):
            return {}

    def write(self, **values: Any) -> None:
        """Add to what is recorded."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        _replace(self._path, json.dumps({**self.read(), **values}, indent=2).encode() + b'\n')


class ProgressLog:
    """A table with a row for each summary, in a file of comma-separated values.

    Args:
        path: the file; it is made with the first row.
        first_columns: columns that come first, in this order.
    """

    def __init__(self, path: str, first_columns: tuple[str, ...]):
        self._path = path
        self._columns: list[str] = list(first_columns)
        if os.path.isfile(path) and (rows := read_table(path)):
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
            self._rewrite([row for row in read_table(self._path) if _number(row.get(column)) <= last])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        os.makedirs(os.path.dirname(self._path) or '.', exist_ok=True)
        temporary = self._path + '.tmp'
        with open(temporary, 'w', newline='', encoding='utf8') as file:
            writer = csv.DictWriter(file, self._columns, restval='')
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self._path)


def read_table(path: str) -> list[dict[str, str]]:
    """The complete rows of a ``progress.csv``; a line that does not end is being written."""
    with open(path, newline='', encoding='utf8') as file:
        text = file.read()
    rows = list(csv.DictReader(io.StringIO(text[:text.rfind('\n') + 1], newline='')))
    return [row for row in rows if None not in row and None not in row.values()]


def _text(value: Any) -> str:
    return f'{value:.9g}' if isinstance(value, float) else str(value)


def _number(text: str | None) -> float:
    try:
        return float(text or 'nan')
    except ValueError:
        return float('nan')


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
