"""Folder of a hyperparameter search::

    ROOT/search/search.gin   search conf, with includes and --conf_param resolved
    ROOT/search/base.gin     conf shared by all trials
    ROOT/search/study.log    the trials, in the journal format of optuna
    ROOT/search/lock         held by the process of the hyperparameter search
    ROOT/trials/0007/params.gin     parameters of a trial
    ROOT/trials/0007/seed_0/        run folder of its first seed
    ROOT/trials/0007/seed_0.log     output of that run
    ROOT/best.gin results.md results.csv plot.png
"""
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator

from alfx.gin_utils import ConfError, stored_files


class SearchFolder:
    """Paths and lock of a hyperparameter search.

    Args:
        root_dir: search folder; it need not exist.
    """

    def __init__(self, root_dir: str):
        self.root_dir = os.path.abspath(root_dir)
        self.conf_file = self.path('search', 'search.gin')
        self.base_file = self.path('search', 'base.gin')
        self.study_file = self.path('search', 'study.log')
        self._lock_file = self.path('search', 'lock')

    def path(self, *names: str) -> str:
        """Return the path of a file or folder in this folder."""
        return os.path.join(self.root_dir, *names)

    def trial_dir(self, trial: int) -> str:
        """Return the folder of a trial."""
        return self.path('trials', f'{trial:04}')

    def run_dir(self, trial: int, repeat: int) -> str:
        """Return the run folder of one seed of a trial."""
        return os.path.join(self.trial_dir(trial), f'seed_{repeat}')

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process. The lock is released even if the process is killed.

        Raises:
            ConfError: another process holds the lock.
        """
        os.makedirs(os.path.dirname(self._lock_file), exist_ok=True)
        with open(self._lock_file, 'a+', encoding='utf8') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfError(f'another hyperparameter search is running in {self.root_dir}: {file.read().strip()}',
                                'wait for it, stop it, or use another --root_dir') from None
            file.truncate(0)
            file.write(f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %H:%M:%S")}\n')
            file.flush()
            yield


def write_text(path: str, text: str) -> None:
    """Write a file atomically."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    stored_files.write(path, text)


def read_text(path: str) -> str | None:
    """Return the text of a file, or None if it does not exist."""
    return stored_files.read_text(path) if os.path.isfile(path) else None
