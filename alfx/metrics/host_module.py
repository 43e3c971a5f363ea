"""Base class of modules whose state is a few numbers on the host."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn


class HostModule(nn.Module):
    """A module whose state is a few numpy arrays, updated in place; saved and loaded like buffers.

    The state is in numpy because a metric does a handful of operations on a few numbers at each environment step. It
    stays on the host when the module that contains it is moved to another device.
    """

    def _host_state(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _apply(self, fn: Callable, recurse: bool = True) -> 'HostModule':
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, array in self._host_state().items():
            destination[prefix + name] = torch.from_numpy(array.copy())

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool,
                              missing_keys: list, unexpected_keys: list, error_msgs: list) -> None:
        for name, array in self._host_state().items():
            saved = state_dict.get(prefix + name)
            if saved is None:
                missing_keys.append(prefix + name)
            elif tuple(saved.shape) != array.shape:
                error_msgs.append(f'{prefix}{name}: expected shape {array.shape}, found {tuple(saved.shape)}')
            else:
                array[...] = saved.cpu().numpy()
