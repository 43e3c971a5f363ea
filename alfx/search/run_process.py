"""Process of a run of a hyperparameter search: ``python -m alfx.search.run_process JSON``.

The process trains like ``alfx.bin.train``, or calls a function. It never outlives the hyperparameter search: when
standard input closes, it writes a checkpoint and exits, and is killed if that takes longer than eight seconds.
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
    """Description of a run.

    Attributes:
        trial: number of the trial.
        repeat: index of the seed within the trial.
        root_dir: run folder.
        base_file: conf shared by all trials.
        params: bindings that override the conf: the parameters of the trial and the random seed.
        seed: random seed.
        function: function to call, ``@scopes/name``; None to train.
        device: see ``--device`` of ``alfx.bin.train``.
        threads: number of torch threads; None for the default of torch.
        must_be_used: user bindings that must be used in each run.
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
        """File with the output of the process."""
        return f'{self.root_dir}.log'

    def arguments(self) -> list[str]:
        """Return the command line arguments for ``alfx.bin.train``."""
        params = [part for param in self.params for part in ('--conf_param', param)]
        return ['--conf', self.base_file, '--root_dir', self.root_dir, '--device', self.device, '--allow_unused',
                *(f'--must_be_used={name}' for name in self.must_be_used), *params]


class StoppedError(RuntimeError):
    """Raised in a function to stop it after a signal or a decision of the pruner."""


def main(run: Run) -> None:
    """Execute a run and exit the process."""
    threading.Thread(target=_exit_with_search, daemon=True).start()
    os.makedirs(run.root_dir, exist_ok=True)
    with _locked(run.root_dir):
        if run.function is None:
            sys.argv = ['alfx.bin.train', *run.arguments()]
            runpy.run_module('alfx.bin.train', run_name='__main__', alter_sys=True)
        else:
            call_function(run, lambda: False)


def _exit_with_search() -> None:
    """Wait until standard input closes because the hyperparameter search has ended, then stop this process."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL) if os.getpgid(0) == os.getpid() else os.kill(os.getpid(), signal.SIGKILL)


def _locked(root_dir: str) -> Any:
    """Return an open lock file, locked until this process exits.

    A process left over from an earlier search exits within seconds, so this function waits for the lock.
    """
    file = open(f'{root_dir}.lock', 'w', encoding='utf8')
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(f'another process is using {root_dir}; stop it and try again') from None
            time.sleep(0.1)


def call_function(run: Run, wants_to_stop: Callable[[], bool]) -> None:
    """Call the function of a run, and write the reported values and the return value to the run folder.

    Args:
        run: the run; if its function has already returned, nothing is done.
        wants_to_stop: called after each reported value; returns whether to stop.

    Raises:
        ConfError: the conf of the run has errors, or the function does not return a number.
        StoppedError: ``wants_to_stop`` returned True.
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
        raise gin_utils.ConfError(f'{run.function} must return a number, but returned {value!r}')
    measure.write_result(run.root_dir, float(value))


if __name__ == '__main__':
    fields = json.loads(sys.argv[1])
    main(Run(**{**fields, 'params': tuple(fields['params'])}))
