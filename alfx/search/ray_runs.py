"""Runs of a hyperparameter search on a Ray cluster.

Each run is a Ray actor that starts the same process as a local run. A machine that can access the search folder under
the same path (the same machine, or a shared file system) writes into it directly. Any other machine works in a
temporary folder and sends its files back: the tables whenever they have grown, all files once a minute and at the end.
A lost worker is replaced, and its run resumes from the last checkpoint that was sent back.
"""
import io
import math
import os
import shutil
import signal
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any

from alfx.search.run_process import Run
from alfx.search.runs import Observer, ProcessExecution
from alfx.search.search_folder import read_text, write_text
from alfx.search.search_settings import Search
from alfx.trainers.acting.ray_cluster import connect
from alfx.utils.processes import LIVENESS_CHECK_SECONDS, LostProcessError

_COPY_SECONDS = 60.0
_TABLES = ('progress.csv', 'eval/progress.csv', 'result.json')


class RayExecutor:
    """Executor that distributes runs over a Ray cluster, which may be a new cluster on this machine.

    Args:
        settings: uses ``ray_address``, ``cpus_per_run``, ``gpus_per_run``, ``num_parallel``.

    Raises:
        ConfError: ray is not installed, or no cluster is found at the address.
    """

    def __init__(self, settings: Search):
        room = max(1, math.ceil(settings.cpus_per_run * settings.num_parallel))
        self.connection = connect("Search.executor = 'ray'", settings.ray_address or '', room)
        self.ray = self.connection.ray
        self.is_lost = False
        self._checked = time.monotonic()
        self._actor = self.ray.remote(num_cpus=settings.cpus_per_run, num_gpus=settings.gpus_per_run)(RemoteRun)

    def start(self, run: Run, wants_to_stop: Observer) -> 'RayExecution':
        """Start a run on the cluster."""
        base_text = read_text(run.base_file)
        assert base_text is not None
        token_file, token = f'{run.root_dir}.token', uuid.uuid4().hex
        write_text(token_file, token)
        actor = self._actor.remote(run._asdict(), base_text, token_file, token, pack(run.root_dir))
        return RayExecution(self, actor, run)

    def check(self) -> None:
        """Check periodically that the cluster still exists.

        Raises:
            LostProcessError: the connection to the cluster is lost.
        """
        if time.monotonic() - self._checked > LIVENESS_CHECK_SECONDS:
            self._checked = time.monotonic()
            try:
                self.connection.check()
            except LostProcessError:
                self.is_lost = True
                raise

    def close(self) -> None:
        """Disconnect from the cluster, and shut it down if this executor started it."""
        self.connection.close()


class RayExecution:
    """A run on the cluster.

    Args:
        executor: executor that started the run.
        actor: handle of a :class:`RemoteRun`.
        run: the run.
    """

    def __init__(self, executor: RayExecutor, actor: Any, run: Run):
        self._executor, self._ray, self._actor, self._run = executor, executor.ray, actor, run
        self._code: int | None = None
        self._log_tail = ''
        self._pending_poll: Any = actor.poll.remote()
        self._is_queued = True

    @property
    def is_queued(self) -> bool:
        """Return whether the run waits for a free machine."""
        return self._is_queued

    def poll(self) -> int | None:
        """Return the exit code, or None while the run is running.

        Raises:
            LostProcessError: the connection to the cluster is lost.
        """
        if self._executor.is_lost:
            return -signal.SIGTERM
        self._executor.check()
        if self._code is not None or not self._ray.wait([self._pending_poll], timeout=0)[0]:
            return self._code
        self._is_queued = False
        try:
            code, log_tail, archive = self._ray.get(self._pending_poll)
        except self._ray.exceptions.RayError as error:
            self._lost(str(error))
            return self._code
        if archive:
            unpack(archive, self._run.root_dir)
        if code is None:
            self._pending_poll = self._actor.poll.remote()
        else:
            self._code, self._log_tail = code, log_tail
            self._ray.kill(self._actor)
        return self._code

    def _lost(self, reason: str) -> None:
        """Record that the worker is lost. The run is restarted, like a run that was stopped by a signal."""
        self._code = -signal.SIGTERM
        self._log_tail = f'the Ray worker was lost: {reason.strip().splitlines()[-1] if reason.strip() else ""}'

    def stop(self) -> None:
        """Ask the run to write a checkpoint and stop."""
        if self._is_queued:
            self.kill()
        elif self._code is None:
            self._actor.stop.remote()

    def kill(self) -> None:
        """Kill the run."""
        if self._code is None and not self._executor.is_lost:
            self._ray.kill(self._actor)  # the process of the run notices this and exits

    def log_tail(self) -> str:
        """Return the end of the log of the run."""
        return self._log_tail


class RemoteRun:
    """Ray actor of a run.

    Args:
        fields: fields of the :class:`~alfx.search.run_process.Run`, with paths on the machine of the search folder.
        base_text: conf shared by all trials.
        token_file: file in the search folder.
        token: content of that file; if this machine reads anything else, it cannot access the search folder.
        archive: packed run folder.
        start: function that starts the process.
    """

    def __init__(self, fields: dict[str, Any], base_text: str, token_file: str, token: str, archive: bytes,
                 start: Callable[[Run], ProcessExecution] = ProcessExecution):
        run = Run(**fields)
        self._temporary = None
        if read_text(token_file) != token:
            self._temporary = tempfile.mkdtemp(prefix='alfx_search_')
            root_dir = os.path.join(self._temporary, os.path.basename(run.root_dir))
            run = run._replace(root_dir=root_dir, base_file=os.path.join(self._temporary, 'base.gin'))
            write_text(run.base_file, base_text)
            unpack(archive, root_dir)
        self._run = run
        self._copied_at, self._sizes = time.monotonic(), self._table_sizes()
        self._execution = start(run)

    def poll(self) -> tuple[int | None, str, bytes]:
        """Return the exit code (None while the run is running), the log tail, and new files of the run folder, packed.

        The call takes up to one second, so the caller can call it again immediately.
        """
        deadline = time.monotonic() + 1.0
        while (code := self._execution.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        archive = self._new_files(is_over=code is not None)
        if code is not None and self._temporary is not None:
            log_tail = self._execution.log_tail()
            shutil.rmtree(self._temporary, ignore_errors=True)
            return code, log_tail, archive
        return code, '' if code is None else self._execution.log_tail(), archive

    def stop(self) -> None:
        """Ask the process to write a checkpoint and stop."""
        self._execution.stop()

    def _new_files(self, is_over: bool) -> bytes:
        if self._temporary is None:
            return b''
        if is_over or time.monotonic() - self._copied_at > _COPY_SECONDS:
            self._copied_at, self._sizes = time.monotonic(), self._table_sizes()
            return pack(self._run.root_dir)
        sizes = self._table_sizes()
        if sizes == self._sizes:
            return b''
        self._sizes = sizes
        return pack(self._run.root_dir, _TABLES)

    def _table_sizes(self) -> list[int]:
        paths = [os.path.join(self._run.root_dir, name) for name in _TABLES]
        return [os.path.getsize(path) if os.path.isfile(path) else -1 for path in paths]


def pack(root_dir: str, names: tuple[str, ...] | None = None) -> bytes:
    """Pack a run folder, or some of its files, and its log into a tar archive. Files may grow meanwhile."""
    stream, base = io.BytesIO(), os.path.basename(root_dir)
    paths = [os.path.join(folder, file) for folder, _, files in os.walk(root_dir) for file in files]
    chosen = [path for path in sorted(paths) if names is None or os.path.relpath(path, root_dir) in names]
    with tarfile.open(fileobj=stream, mode='w') as archive:
        for path in [*chosen, f'{root_dir}.log']:
            try:
                with open(path, 'rb') as file:
                    data = file.read()
            except FileNotFoundError:  # a temporary file or a deleted checkpoint
                continue
            name = f'{base}.log' if path == f'{root_dir}.log' else os.path.join(base, os.path.relpath(path, root_dir))
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def unpack(data: bytes, root_dir: str) -> None:
    """Unpack an archive created by :func:`pack`. Each file is replaced atomically."""
    parent, base = os.path.dirname(root_dir), os.path.basename(root_dir)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            if entry.name != f'{base}.log' and not entry.name.startswith(f'{base}/') or '..' in entry.name.split('/'):
                raise ValueError(f'{entry.name} is not a file of the run folder {base}')
            content = archive.extractfile(entry)
            assert content is not None
            path = os.path.join(parent, entry.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + '.part', 'wb') as file:
                file.write(content.read())
            os.replace(path + '.part', path)
