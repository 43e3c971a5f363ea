"""Counts that are part of checkpoints."""
import torch
from torch import nn


class SavedCount:
    """A count that a module saves and loads as one of its buffers.

    In between it is a number of Python: an operation on a tensor takes longer than all else that is done for most
    counts. The buffer itself is up to date in what ``state_dict()`` of the module returns, and nowhere else.

    Args:
        module: the owner; it gets the buffer.
        name: of the buffer, an int64 scalar.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._value: int | None = 0  # None: look it up in the buffer
        self._module = module
        module.register_buffer(name, torch.zeros((), dtype=torch.int64))
        module.register_state_dict_pre_hook(self._save)
        module.register_load_state_dict_pre_hook(self._save)  # what is loaded may lack the count
        module.register_load_state_dict_post_hook(self._forget)

    @property
    def value(self) -> int:
        """The count."""
        if self._value is None:
            self._value = int(getattr(self._module, self._name))
        return self._value

    def add(self, number: int = 1) -> int:
        """Count ``number`` more; returns the new count."""
        self._value = self.value + number
        return self._value

    def _save(self, module: nn.Module, *_: object) -> None:
        if self._value is not None:
            getattr(module, self._name).fill_(self._value)

    def _forget(self, *_: object) -> None:
        self._value = None
