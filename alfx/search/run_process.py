"""The process of a run: ``python -m alfx.search.run_process JSON``.

It trains as ``alfx.bin.train`` does, or calls a function, and never outlives the search: when standard input closes it
writes a checkpoint and ends, and is killed where that takes longer than ten seconds.
"""
import fcntl
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from alfx.utils.processes import PATIENCE_SECONDS

_GRACE_SECONDS = 8.0


class Run(NamedTuple):
    """What to run.

    Attributes:
        trial: number of the trial.
        repeat: which of its seeds.
        root_dir: the run folder.
        base_file: the conf that all trials have in common.
        params: bindings that override it, those of the trial and the seed.
        seed: the random seed.
        function: ``@scopes/name`` to call; None to train.
        device: as ``--device`` of ``alfx.bin.train``.
        threads: of torch; None: as many as it likes.
        must_be_used: bindings of the user that have to be used in each run.
    """
    trial: int
    repeat: int
    root_dir: str
    base_file: str
    params: tuple[str, ...]
    seed: int
    function: str | None = None
    device: str = 'cpu'
    threads: int | None = None
    must_be_used: tuple[str, ...] = ()

    @property
    def log_file(self) -> str:
        """What the process prints."""
        return f'{self.root_dir}.log'

    def arguments(self) -> list[str]:
        """Of ``alfx.bin.train``."""
        params = [part for param in self.params for part in ('--conf_param', param)]
        return ['--conf', self.base_file, '--root_dir', self.root_dir, '--device', self.device, '--allow_unused',
                *(f'--must_be_used={name}' for name in self.must_be_used), *params]


class StoppedError(RuntimeError):
    """A function was asked to end by a signal or by the pruner."""


def main(run: Run) -> None:
    """Run it; ends the process."""
    threading.Thread(target=_end_with_the_search, daemon=True).start()
    os.makedirs(run.root_dir, exist_ok=True)
    with _alone_in(run.root_dir):
        if run.function is None:
            sys.argv = ['alfx.bin.train', *run.arguments()]
            runpy.run_module('alfx.bin.train', run_name='__main__', alter_sys=True)
        else:
            call_function(run, lambda: False)


def _end_with_the_search() -> None:
    """Wait until standard input closes, which is when the search has ended; then end as well."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL) if os.getpgid(0) == os.getpid() else os.kill(os.getpid(), signal.SIGKILL)


def _alone_in(root_dir: str) -> Any:
    """An open file that is locked while this process lives: what is left of an earlier search ends within seconds."""
    file = open(f'{root_dir}.lock', 'w', encoding='utf8')
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(f'another process is at work in {root_dir}; end it and start again') from None
            time.sleep(0.1)


def call_function(run: Run, wants_to_stop: Callable[[], bool]) -> None:
    """Call the function of a run; what it reports and returns is written to the run folder.

    Args:
        run: what to call. Nothing is done if it has returned before.
        wants_to_stop: called after each value that it reports.

    Raises:
        ConfError: the conf of the run has mistakes, or the function returns no number.
        StoppedError: ``wants_to_stop`` said so.
    """
    import inspect

    import gin

    from alfx import gin_utils
    from alfx.gin_utils import static_check
    from alfx.search import measure
    from alfx.utils import random_state
    from alfx.runs import run_files
    if measure.read_result(run.root_dir) is not None:
        return
    os.makedirs(run.root_dir, exist_ok=True)
    table = run_files.ProgressLog(os.path.join(run.root_dir, 'progress.csv'), ('step', measure.VALUE))
    table.cut('step', float('-inf'))

    def report(step: int, value: float) -> None:
        table.append({'step': step, measure.VALUE: float(value)})
        if wants_to_stop():
            raise StoppedError(f'stopped at step {step}')

    assert run.function is not None
    *scopes, name = run.function.removeprefix('@').split('/')
    with gin_utils.loaded(run.base_file, run.params):
        random_state.set_random_seed(run.seed)
        configurable = static_check.resolve(name)
        offered = {'report': report, 'random_seed': run.seed}
        accepted = inspect.signature(configurable.wrapped).parameters
        with gin.config_scope('/'.join(scopes) or None):
            value = gin.get_configurable(configurable.selector)(
                **{key: argument for key, argument in offered.items() if key in accepted})
    if isinstance(value, bool) or not hasattr(value, '__float__'):
        raise gin_utils.ConfError(f'{run.function} must return a number, it returned {value!r}')
    measure.write_result(run.root_dir, float(value))


if __name__ == '__main__':
    fields = json.loads(sys.argv[1])
    main(Run(**{**fields, 'params': tuple(fields['params'])}))
