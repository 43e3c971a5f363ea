"""Counters that are part of checkpoints."""
import torch
from torch import nn


class SavedCount:
    """Counter that a module saves and loads as one of its buffers.

    At run time it is a Python number, because an operation on a tensor takes longer than everything else that happens
    for most counts. The buffer is updated only by ``state_dict()`` of the module.

    Args:
        module: owner of the buffer.
        name: name of the buffer, an int64 scalar.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._value: int | None = 0  # None: read it from the buffer
        self._module = module
        module.register_buffer(name, torch.zeros((), dtype=torch.int64))
        module.register_state_dict_pre_hook(self._save)
        module.register_load_state_dict_pre_hook(self._save)  # the loaded state may lack the count
        module.register_load_state_dict_post_hook(self._forget)

    @property
    def value(self) -> int:
        """Current count."""
        if self._value is None:
            self._value = int(getattr(self._module, self._name))
        return self._value

    def add(self, number: int = 1) -> int:
        """Add ``number`` and return the new count."""
        self._value = self.value + number
        return self._value

    def _save(self, module: nn.Module, *_: object) -> None:
        if self._value is not None:
            getattr(module, self._name).fill_(self._value)

    def _forget(self, *_: object) -> None:
        self._value = None
