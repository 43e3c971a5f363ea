"""Values behind :mod:`alfx.context`; all other modules access them through the context.

They are in a separate module because the context imports :mod:`alfx.nest`, which needs the default device.
"""
from typing import Any

import torch

PROGRESS_TYPES = ('percent', 'iterations', 'env_steps', 'global_counter')


class State:
    """Global state; one instance per process."""

    __slots__ = ('exe_mode', 'global_counter', 'progress', 'writer', 'recording', 'scopes', 'device', 'specs',
                 'first_environment', 'ranks', 'acting_precision', 'summary_step', 'waiting_statistics',
                 'uses_running_statistics', 'counted_rows', 'freezes_statistics')

    def __init__(self) -> None:
        self.exe_mode = 'normal'
        self.global_counter = 0
        self.progress = dict.fromkeys(PROGRESS_TYPES, 0.0)
        self.writer: Any = None
        self.recording = False
        self.scopes: list[str] = []
        self.device = torch.device('cpu')
        self.specs: dict[str, Any] = {}
        self.first_environment = 0
        self.ranks: Any = None
        self.acting_precision: str | None = None
        self.summary_step: Any = None
        self.waiting_statistics: dict[Any, Any] | None = None
        self.uses_running_statistics = False
        self.counted_rows: Any = None
        self.freezes_statistics = False


state = State()
