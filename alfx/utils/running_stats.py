"""Running mean and variance of batches, the state of averagers and normalizers.

Each class defines the weight of a new batch. The mean and the variance are updated directly (Chan et al. 1979, the
pairwise formula with weights instead of counts), because ``E[x^2] - E[x]^2`` loses all digits if the mean is large.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context
from alfx.tensor_specs import TensorSpec
from alfx.utils.schedulers import as_scheduler


_LARGE = 512
_MOST_KEPT = 2**22  # maximum size of deferred batches, in numbers; beyond it only their moments are kept


def _as_float(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def average_outer_dims(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Mean of ``tensor [..., *spec.shape]`` over its leading dimensions, ``[*spec.shape]``."""
    outer = tensor.dim() - spec.ndim
    return tensor.mean(tuple(range(outer))) if outer else tensor


def batch_moments(tensor: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``tensor [..., *spec.shape]`` over its leading dimensions.

    Returns:
        Mean and variance ``[*spec.shape]``, without gradient.
    """
    tensor = _as_float(tensor)
    outer = tensor.dim() - spec.ndim
    if outer == 0:
        return tensor, torch.zeros_like(tensor)
    dims = tuple(range(outer))
    if tensor.numel() > _LARGE:  # two passes are as accurate as torch's single one, and several times faster
        mean = tensor.mean(dims)
        return mean, (tensor - mean).square_().mean(dims)
    variance, mean = torch.var_mean(tensor, dims, correction=0)
    return mean, variance


def count_and_moments(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Number of elements, means and variances, float64 ``[1 + 2 * spec.numel]``."""
    size = spec.numel
    row = torch.zeros(1 + 2 * size, dtype=torch.float64, device=tensor.device)
    if tensor.numel():
        mean, variance = batch_moments(tensor, spec)
        row[0] = tensor.numel() / max(size, 1)
        row[1:1 + size], row[1 + size:] = mean.reshape(-1), variance.reshape(-1)
    return row


def joined_moments(rows: Tensor) -> Tensor:
    """Combine ``rows [K, 1 + 2 * size]`` to the row of all their elements as one batch (Chan et al. 1979)."""
    size = (rows.shape[1] - 1) // 2
    count, means, variances = rows[:, :1], rows[:, 1:1 + size], rows[:, 1 + size:]
    total = count.sum(0)
    mean = (count * means).sum(0) / total
    variance = (count * (variances + (means - mean).square())).sum(0) / total
    return torch.cat((total, mean, variance))


def _moments_of_row(row: Tensor, spec: TensorSpec, ranks: Any) -> tuple[Tensor, Tensor] | None:
    if ranks is not None:
        row = joined_moments(ranks.gather(row))
    if not row[0]:
        return None
    mean, variance = row[1:].view(2, *spec.shape)
    return mean, variance


def _pooled_moments(tensor: Tensor, spec: TensorSpec, ranks: Any) -> tuple[Tensor, Tensor] | None:
    """Compute :func:`batch_moments` over all ranks as one batch; ``None`` if it is empty.

    The ranks may have different numbers of elements.
    """
    return _moments_of_row(count_and_moments(tensor, spec), spec, ranks)


class _Waiting:
    """Deferred batches, which are added as one batch."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec, self._batches, self._rows, self._size = spec, list[Tensor](), list[Tensor](), 0

    def add(self, batch: Tensor) -> None:
        self._batches.append(batch.detach())
        self._size += batch.numel()
        if self._size > _MOST_KEPT:
            self._reduce()

    def row(self) -> Tensor:
        """Row of all deferred batches, see :func:`count_and_moments`."""
        self._reduce()
        return joined_moments(torch.stack(self._rows)) if len(self._rows) > 1 else self._rows[0]

    def _reduce(self) -> None:
        if self._batches:
            elements = torch.cat([batch.reshape(-1, *self.spec.shape) for batch in self._batches])
            self._rows.append(count_and_moments(elements, self.spec))
            self._batches, self._size = [], 0


@contextmanager
def updated_at_the_end() -> Iterator[None]:
    """Context manager that defers updates of all :class:`RunningStats`, and adds the batches of each as one on exit.

    The ranks may have added different numbers of batches, but at least one each.
    """
    waiting: dict[RunningStats, _Waiting] = {}
    with context.defer_statistics(waiting):
        yield
    for stats, batches in waiting.items():
        stats.take(_moments_of_row(batches.row(), stats.spec, context.get_ranks()))


class RunningStats(nn.Module):
    """Weighted running mean and variance for one spec.

    Before the first update the mean is 0 and the variance is 1, so normalizing has no effect.

    Args:
        spec: spec of the elements.
    """

    mean: Tensor
    variance: Tensor
    _count: Tensor

    def __init__(self, spec: TensorSpec):
        super().__init__()
        self.spec = spec
        dtype = spec.dtype if spec.dtype in (torch.float32, torch.float64) else torch.float32
        self.register_buffer('mean', torch.zeros(spec.shape, dtype=dtype))
        self.register_buffer('variance', torch.ones(spec.shape, dtype=dtype))
        # The weight of the next batch depends on this count. The Python number is used in updates, so that they do not
        # wait for a device. The buffer is for checkpoints; it is read again after it has been written from outside.
        self.register_buffer('_count', torch.zeros((), dtype=torch.float64))
        self._number, self._version = 0.0, self._count._version

    def _get_count(self) -> float:
        if self._count._version != self._version:
            self._number, self._version = float(self._count), self._count._version
        return self._number

    def _set_count(self, count: float) -> None:
        self._count.fill_(count)
        self._number, self._version = count, self._count._version

    def _next_weight(self) -> float:
        """Weight of the next batch relative to the total, in (0, 1]; 1 for the first batch."""
        raise NotImplementedError

    def update(self, tensor: Tensor) -> None:
        """Add the batch ``tensor [..., *spec.shape]``, with any number of leading dimensions; ignore an empty one."""
        waiting = context.waiting_statistics()
        if waiting is not None:
            waiting.setdefault(self, _Waiting(self.spec)).add(tensor)
        else:
            self.take(self._moments_of(tensor))

    def take(self, moments: tuple[Tensor, Tensor] | None) -> None:
        """Add a batch with the given mean and variance ``[*spec.shape]``; ``None`` stands for an empty batch."""
        if moments is None:
            return
        new_mean, new_variance = moments
        weight = self._next_weight()
        mean = self.mean
        delta = new_mean.to(mean.dtype) - mean
        # var' = (1 - w) var + w v + w (1 - w) delta^2
        spread = torch.addcmul(new_variance.to(mean.dtype), delta, delta, value=1.0 - weight)
        self.variance.lerp_(spread, weight)
        mean.add_(delta, alpha=weight)

    def update_mean(self, tensor: Tensor) -> None:
        """Update only the mean, for users that do not read the variance; see :meth:`update`."""
        mean = self._mean_of(tensor)
        if mean is not None:
            self.mean.lerp_(mean.to(self.mean.dtype), self._next_weight())

    def _moments_of(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of a batch over all ranks; ``None`` for an empty batch."""
        ranks = context.get_ranks()
        if ranks is not None:
            return _pooled_moments(tensor, self.spec, ranks)
        return batch_moments(tensor, self.spec) if tensor.numel() else None

    def _mean_of(self, tensor: Tensor) -> Tensor | None:
        """Mean of a batch over all ranks; ``None`` for an empty batch."""
        if context.get_ranks() is None:
            return average_outer_dims(_as_float(tensor), self.spec) if tensor.numel() else None
        moments = self._moments_of(tensor)
        return None if moments is None else moments[0]

    def moments(self) -> tuple[Tensor, Tensor]:
        """``(mean, variance)``, ``[*spec.shape]`` each."""
        return self.mean, self.variance


class EMStats(RunningStats):
    """Exponential moving statistics without bias towards the initial values.

    The weights of batches decrease geometrically and are divided by their sum, as in Adam.

    Args:
        spec: spec of the elements.
        update_rate: weight of a new batch in (0, 1], or a scheduler of it.
    """

    def __init__(self, spec: TensorSpec, update_rate: float | Callable[[], float]):
        super().__init__(spec)
        self._update_rate = as_scheduler(update_rate)

    def _next_weight(self) -> float:
        rate = self._update_rate()
        total = self._get_count() * (1.0 - rate) + rate
        self._set_count(total)
        return rate / total if total > 0.0 else 0.0


class AdaptiveStats(RunningStats):
    """Statistics whose window grows with time: the weight of batch t grows about as ``t ** (speed - 1)``.

    The update rate is ``speed / (n + speed)`` for batch n = 0, 1, ...: fast at first, and converging.

    Args:
        spec: spec of the elements.
        speed: positive; 1 weights all batches equally, larger values favor recent batches.
    """

    def __init__(self, spec: TensorSpec, speed: float):
        super().__init__(spec)
        self._speed = speed

    def _next_weight(self) -> float:
        steps = self._get_count()
        self._set_count(steps + 1.0)
        return self._speed / (steps + self._speed)


class WindowStats(RunningStats):
    """Statistics of the last ``window_size`` batches with equal weights.

    Args:
        spec: spec of the elements.
        window_size: number of batches.
    """

    means: Tensor
    variances: Tensor

    def __init__(self, spec: TensorSpec, window_size: int):
        super().__init__(spec)
        self._window_size = window_size
        self.register_buffer('means', torch.zeros((window_size, *spec.shape), dtype=self.mean.dtype))
        self.register_buffer('variances', torch.zeros((window_size, *spec.shape), dtype=self.mean.dtype))

    def _push(self, mean: Tensor, variance: Tensor | None) -> int:
        """Store a batch in the ring buffer and return the number of stored batches."""
        steps = int(self._get_count())
        self.means[steps % self._window_size] = mean
        if variance is not None:
            self.variances[steps % self._window_size] = variance
        self._set_count(steps + 1.0)
        return min(steps + 1, self._window_size)

    def take(self, moments: tuple[Tensor, Tensor] | None) -> None:
        """Add a batch to the window; see the base class."""
        if moments is None:
            return
        used = self._push(*moments)
        between, mean = torch.var_mean(self.means[:used], 0, correction=0)
        self.mean.copy_(mean)
        self.variance.copy_(between.add_(self.variances[:used].mean(0)))

    def update_mean(self, tensor: Tensor) -> None:
        """Update only the mean, for users that do not read the variance; see :meth:`update`."""
        mean = self._mean_of(tensor)
        if mean is None:
            return
        used = self._push(mean, None)
        self.mean.copy_(self.means[:used].mean(0))
