"""Runs on a Ray cluster: each is an actor that starts the same process as on this machine, on a machine with room.

A machine that sees the search folder under the same path (one machine, or a shared file system) writes into it. Any
other one works in a folder of its own, and what is in it comes back while the run goes on: the tables whenever they
have grown, everything now and then and at the end. A worker that is lost is replaced, and the run goes on from the
checkpoint that came back last.
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

from alfx.search.search_folder import read_text, write_text
from alfx.search.run_process import Run
from alfx.search.runs import Observer, ProcessExecution
from alfx.search.search_settings import Search
from alfx.trainers.acting.ray_cluster import connect
from alfx.utils.processes import LOOK_AROUND_SECONDS, LostProcessError

_COPY_SECONDS = 60.0
_TABLES = ('progress.csv', 'eval/progress.csv', 'result.json')


class RayExecutor:
    """Spreads runs over a Ray cluster: the one that the settings name, or one of its own on this machine.

    Args:
        settings: ``ray_address``, ``cpus_per_run``, ``gpus_per_run``, ``num_parallel``.

    Raises:
        ConfError: ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, settings: Search):
        room = max(1, math.ceil(settings.cpus_per_run * settings.num_parallel))
        self.connection = connect("Search.executor = 'ray'", settings.ray_address or '', room)
        self.ray = self.connection.ray
        self.is_lost = False
        self._checked = time.monotonic()
        self._actor = self.ray.remote(num_cpus=settings.cpus_per_run, num_gpus=settings.gpus_per_run)(RemoteRun)

    def start(self, run: Run, wants_to_stop: Observer) -> 'RayExecution':
        """See :class:`~alfx.search.runs.Executor`."""
        base_text = read_text(run.base_file)
        assert base_text is not None
        token_file, token = f'{run.root_dir}.token', uuid.uuid4().hex
        write_text(token_file, token)
        actor = self._actor.remote(run._asdict(), base_text, token_file, token, pack(run.root_dir))
        return RayExecution(self, actor, run)

    def check(self) -> None:
        """Look now and then whether the cluster is still there.

        Raises:
            LostProcessError: it is not.
        """
        if time.monotonic() - self._checked > LOOK_AROUND_SECONDS:
            self._checked = time.monotonic()
            try:
                self.connection.check()
            except LostProcessError:
                self.is_lost = True
                raise

    def close(self) -> None:
        """Leave the cluster; one of its own ends."""
        self.connection.close()


class RayExecution:
    """A run on the cluster.

    Args:
        executor: that started it.
        actor: handle of a :class:`RemoteRun`.
        run: what runs.
    """

    def __init__(self, executor: RayExecutor, actor: Any, run: Run):
        self._executor, self._ray, self._actor, self._run = executor, executor.ray, actor, run
        self._code: int | None = None
        self._words = ''
        self._question: Any = actor.poll.remote()
        self._is_queued = True

    @property
    def is_queued(self) -> bool:
        """See :class:`~alfx.search.runs.Execution`."""
        return self._is_queued

    def poll(self) -> int | None:
        """See :class:`~alfx.search.runs.Execution`.

        Raises:
            LostProcessError: the cluster is gone.
        """
        if self._executor.is_lost:
            return -signal.SIGTERM
        self._executor.check()
        if self._code is not None or not self._ray.wait([self._question], timeout=0)[0]:
            return self._code
        self._is_queued = False
        try:
            code, words, archive = self._ray.get(self._question)
        except self._ray.exceptions.RayError as error:
            self._lost(str(error))
            return self._code
        if archive:
            unpack(archive, self._run.root_dir)
        if code is None:
            self._question = self._actor.poll.remote()
        else:
            self._code, self._words = code, words
            self._ray.kill(self._actor)
        return self._code

    def _lost(self, why: str) -> None:
        """The worker is gone: like a run that was ended by a signal, it is started again."""
        self._code = -signal.SIGTERM
        self._words = f'the Ray worker was lost: {why.strip().splitlines()[-1] if why.strip() else ""}'

    def stop(self) -> None:
        """See :class:`~alfx.search.runs.Execution`."""
        if self._is_queued:
            self.kill()
        elif self._code is None:
            self._actor.stop.remote()

    def kill(self) -> None:
        """See :class:`~alfx.search.runs.Execution`."""
        if self._code is None and not self._executor.is_lost:
            self._ray.kill(self._actor)  # its process notices that, and ends

    def log_tail(self) -> str:
        """See :class:`~alfx.search.runs.Execution`."""
        return self._words


class RemoteRun:
    """The actor of a run.

    Args:
        fields: of the :class:`~alfx.search.run_process.Run`, as the search has it.
        base_text: the conf that all trials have in common.
        token_file: a file of the search.
        token: what is in it; where it is not, this machine does not see the folder of the search.
        archive: the run folder so far.
        start: starts the process.
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
        """Exit code (None while it runs), last words, and what is new in the run folder, packed.

        It takes up to a second, so that the caller can ask again at once.
        """
        deadline = time.monotonic() + 1.0
        while (code := self._execution.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        archive = self._news(is_over=code is not None)
        if code is not None and self._temporary is not None:
            words = self._execution.log_tail()
            shutil.rmtree(self._temporary, ignore_errors=True)
            return code, words, archive
        return code, '' if code is None else self._execution.log_tail(), archive

    def stop(self) -> None:
        """Ask the process to write a checkpoint and end."""
        self._execution.stop()

    def _news(self, is_over: bool) -> bytes:
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
    """A run folder, or some of its files, and the log beside it, as an archive; files may grow meanwhile."""
    stream, base = io.BytesIO(), os.path.basename(root_dir)
    paths = [os.path.join(folder, file) for folder, _, files in os.walk(root_dir) for file in files]
    chosen = [path for path in sorted(paths) if names is None or os.path.relpath(path, root_dir) in names]
    with tarfile.open(fileobj=stream, mode='w') as archive:
        for path in [*chosen, f'{root_dir}.log']:
            try:
                with open(path, 'rb') as file:
                    data = file.read()
            except FileNotFoundError:  # a temporary file, or a checkpoint that was replaced
                continue
            name = f'{base}.log' if path == f'{root_dir}.log' else os.path.join(base, os.path.relpath(path, root_dir))
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def unpack(data: bytes, root_dir: str) -> None:
    """The inverse of :func:`pack`; each file appears whole."""
    parent, base = os.path.dirname(root_dir), os.path.basename(root_dir)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            if entry.name != f'{base}.log' and not entry.name.startswith(f'{base}/') or '..' in entry.name.split('/'):
                raise ValueError(f'{entry.name} does not belong to {base}')
            content = archive.extractfile(entry)
            assert content is not None
            path = os.path.join(parent, entry.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + '.part', 'wb') as file:
                file.write(content.read())
            os.replace(path + '.part', path)
