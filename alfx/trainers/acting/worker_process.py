"""Setup shared by the processes that a run starts for acting or evaluation.

The learner sends :func:`~alfx.engine.remote.remote_unroll.worker_settings`; the process calls :func:`prepare`, then
:func:`load_config`.
"""
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.utils import random_state


def prepare(settings: dict[str, Any]) -> None:
    """Set up this process with one thread and the arithmetic settings of the learner.

    Args:
        settings: see :func:`~alfx.engine.remote.remote_unroll.worker_settings`.
    """
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    set_arithmetic(settings)


def set_arithmetic(settings: dict[str, Any]) -> None:
    """Use the arithmetic settings of the learner, and one thread."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision(settings['float32_matmul_precision'])


def load_config(conf_file: str, settings: dict[str, Any]) -> TrainerConfig:
    """Load the conf of the run with the settings of the learner, and seed this process like the learner."""
    gin_utils.load(conf_file)
    config = TrainerConfig(root_dir=settings['root_dir'])
    config.summary_axis = settings['summary_axis']
    config.random_seed = random_state.set_random_seed(settings['random_seed'])
    return config


class LogForwarding(logging.Handler):
    """Handler that forwards the log records of alfx and all warnings to another process.

    Args:
        send: called with ``(level, text)`` of each record.
    """

    def __init__(self, send: Callable[[int, str], None]):
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Forward one record."""
        text = record.getMessage()
        if record.exc_info:
            text += '\n' + logging.Formatter().formatException(record.exc_info)
        self._send(record.levelno, text if record.name.startswith('alfx') else f'{record.name}: {text}')

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Forward records while the context is active."""
        root, own = logging.getLogger(), logging.getLogger('alfx')
        level = own.level
        own.setLevel(logging.INFO)
        root.addHandler(self)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(self)
            own.setLevel(level)


class SummaryForwarding:
    """Summary writer that forwards the calls of its methods to another process.

    Attributes:
        latest_scalars: see the summary writer.

    Args:
        send: called with ``(method, arguments)`` of each call.
    """

    def __init__(self, send: Callable[[str, tuple], None]):
        self._send = send
        self.latest_scalars: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith('add_'):
            raise AttributeError(name)
        return lambda *arguments: self._send(name, arguments)
