"""Common state of all tests: one thread, fixed seeds, no display, process state as in a fresh process."""
import atexit
import gc
import os
import shutil
import signal
import tempfile

# Before torch, MuJoCo and pygame are imported, here and in the processes that tests start.
for _name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
    os.environ[_name] = '1'
# Ray lowers the priority of its workers; next to other tests they would hardly start.
os.environ['RAY_worker_niceness'] = '0'
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # each process that a test starts would compile all of alfx again
os.environ['XDG_CONFIG_HOME'] = tempfile.mkdtemp(prefix='alfx_tests_')  # not the user's own configuration
atexit.register(shutil.rmtree, os.environ['XDG_CONFIG_HOME'], ignore_errors=True)
os.environ.setdefault('SDL_VIDEODRIVER', 'dummy')
os.environ.setdefault('MPLBACKEND', 'Agg')

import logging  # noqa: E402
import random  # noqa: E402

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from alfx import context, gin_utils  # noqa: E402
from alfx.engine.plan import backends, torch_internals  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

hypothesis.settings.register_profile('alfx', deadline=None, derandomize=True, database=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])  # on a busy machine
hypothesis.settings.load_profile('alfx')


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread, so that results do not depend on the number of cores, default signals and quick writes."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, for the programs of the tests as well
    os.fsync = lambda descriptor: None  # files of tests need not survive a power failure


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection during collection of the tests and make it rarer afterwards.

    Garbage collection took a tenth of the time of all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 2)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `gpu` without a CUDA device; run tests first that others wait for at the end."""
    items.sort(key=lambda item: 'ending_processes' not in getattr(item, 'fixturenames', ()))
    if torch.cuda.is_available():
        return
    without_device = [item for item in items if item.get_closest_marker('gpu')]
    if without_device:
        config.hook.pytest_deselected(items=without_device)
        items[:] = [item for item in items if not item.get_closest_marker('gpu')]


def _reset_logging() -> None:
    logger = logging.getLogger('alfx')
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Seed all generators; afterwards reset configuration, run mode, counters, writers, signal and log handlers."""
    signals_before = [(number, signal.getsignal(number)) for number in SIGNALS]
    _reset_logging()  # fixtures of a module may have run a program
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries under test draw from the global generator
    torch.manual_seed(0)
    yield
    _reset_logging()
    for number, handler in signals_before:
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    context.reset()
    gin_utils.clear()
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision('highest')


@pytest.fixture
def warm_up(monkeypatch):
    """Return a function that sets the number of eager updates and policy calls before graphs are replayed."""
    def set_to(count: int) -> None:
        monkeypatch.setattr(backends, 'WARM_UP', backends.WarmUp(updates=count, calls=count, compiled_calls=count,
                                                           rare_updates=count))

    return set_to


@pytest.fixture
def replayed_at_once(warm_up):
    """Replay or compile updates and policies from the second call on."""
    warm_up(1)


@pytest.fixture
def never_replayed(warm_up):
    """Disable replayed graphs."""
    warm_up(10**9)


@pytest.fixture
def bfloat16_instructions(monkeypatch):
    """Let ``enable_amp`` compute in bfloat16 on every CPU, however slowly."""
    monkeypatch.setattr(torch_internals, 'has_bfloat16_instructions', lambda: True)


@pytest.fixture
def repository() -> str:
    """Path of the folder that holds setup.cfg."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def with_capabilities(monkeypatch):
    """Return a function that changes capabilities of a class: ``with_capabilities(cls, traceable_update=False)``."""
    def change(cls, **capabilities):
        own_capabilities = cls.own_capabilities
        monkeypatch.setattr(cls, 'own_capabilities', lambda self: own_capabilities(self)._replace(**capabilities))

    return change
