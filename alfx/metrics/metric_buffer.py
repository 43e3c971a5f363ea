"""A ring buffer of the last values of a quantity, which a metric averages over."""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfx.metrics.host_module import HostModule
from alfx.metrics.merging import MergesRings
from alfx.metrics.segments import to_host


class MetricBuffer(MergesRings, HostModule):
    """A ring buffer of the last ``max_len`` values.

    Args:
        max_len: number of values that are kept.
        dtype: dtype of the returned values.
        shape: shape of one value.
    """

    def __init__(self, max_len: int, dtype: torch.dtype = torch.float32, shape: Sequence[int] = ()):
        super().__init__()
        if max_len < 1:
            raise ValueError(f'MetricBuffer.max_len: expected at least 1, found {max_len}')
        self._max_len = max_len
        self._dtype = dtype
        self._values = np.zeros((max_len, *shape))
        self._count = np.zeros((), dtype=np.int64)

    def _host_state(self) -> dict[str, np.ndarray]:
        return {'values': self._values, 'count': self._count}

    def __len__(self) -> int:
        return min(int(self._count), self._max_len)

    def append(self, value: Any) -> None:
        """Append one value of the buffer's shape."""
        self.extend(to_host(torch.as_tensor(value))[None])

    def extend(self, values: np.ndarray) -> None:
        """Append ``[n, ...]`` values, oldest first."""
        total = int(self._count) + len(values)
        kept = values[-self._max_len:]
        self._values[np.arange(total - len(kept), total) % self._max_len] = kept
        self._count[...] = total

    def values(self) -> np.ndarray:
        """Return a copy of the values, oldest first, float64 ``[n, ...]``."""
        count = int(self._count)
        return self._values[np.arange(count - len(self), count) % self._max_len]

    def mean(self) -> torch.Tensor:
        """Return the mean of the values, 0 if there are none."""
        return self._tensor(self._values[:len(self)].mean(0) if len(self) else 0 * self._values[0])

    def std(self) -> torch.Tensor:
        """Return the sample standard deviation (n - 1) of the values, 0 if there are fewer than two."""
        return self._tensor(self._values[:len(self)].std(0, ddof=1) if len(self) > 1 else 0 * self._values[0])

    def latest(self) -> torch.Tensor:
        """Return the value appended last, 0 if there is none."""
        return self._tensor(self._values[(int(self._count) - 1) % self._max_len])

    def clear(self) -> None:
        """Remove all values."""
        self._values.fill(0.0)
        self._count.fill(0)

    def _tensor(self, value: np.ndarray) -> torch.Tensor:
        return torch.tensor(value, dtype=self._dtype, device='cpu')
