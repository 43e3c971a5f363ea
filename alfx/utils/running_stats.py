"""Running mean and variance of batches, the state behind averagers and normalizers.

Each class decides the weight that a new batch gets. The mean and the variance about it are updated directly (Chan
et al. 1979, the pairwise formula with weights in the place of counts): forming ``E[x^2] - E[x]^2`` loses all digits
when the mean is large.
"""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from alfx.tensor_specs import TensorSpec
from alfx.utils.schedulers import as_scheduler


def _as_float(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def batch_moments(tensor: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``tensor [..., *spec.shape]`` over its leading dimensions: ``[*spec.shape]`` each."""
    tensor = _as_float(tensor)
    outer = tensor.dim() - spec.ndim
    if outer == 0:
        return tensor, torch.zeros_like(tensor)
    variance, mean = torch.var_mean(tensor, tuple(range(outer)), correction=0)
    return mean, variance


class RunningStats(nn.Module):
    """Weighted running mean and variance for one spec.

    Before the first update the mean is 0 and the variance 1, so that normalizing by them changes nothing.

    Args:
        spec: of the elements that are averaged.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, spec: TensorSpec):
        super().__init__()
        self._spec = spec
        dtype = spec.dtype if spec.dtype in (torch.float32, torch.float64) else torch.float32
        self.register_buffer('mean', torch.zeros(spec.shape, dtype=dtype))
        self.register_buffer('variance', torch.ones(spec.shape, dtype=dtype))

    def _next_weight(self) -> Tensor:
        """The weight of the next batch relative to everything, a 0-d tensor in (0, 1]; 1 for the first."""
        raise NotImplementedError

    @torch.no_grad()
    def update(self, tensor: Tensor) -> None:
        """Take in ``tensor [..., *spec.shape]``, with any number of leading dimensions (empty ones are ignored)."""
        if tensor.numel() == 0:
            return
        mean, variance = batch_moments(tensor, self._spec)
        weight = self._next_weight()
        delta = mean - self.mean
        # var' = (1 - w) var + w v + w (1 - w) delta^2
        self.variance.lerp_(variance.addcmul_(delta * (1.0 - weight), delta).to(self.variance.dtype), weight)
        self.mean.add_(delta * weight)

    @torch.no_grad()
    def update_mean(self, tensor: Tensor) -> None:
        """:meth:`update` of the mean only, for those who do not read the variance."""
        if tensor.numel() == 0:
            return
        tensor = _as_float(tensor)
        outer = tensor.dim() - self._spec.ndim
        mean = tensor.mean(tuple(range(outer))) if outer else tensor
        self.mean.lerp_(mean.to(self.mean.dtype), self._next_weight())

    def moments(self) -> tuple[Tensor, Tensor]:
        """``(mean, variance)``, ``[*spec.shape]`` each."""
        return self.mean, self.variance


class EMStats(RunningStats):
    """Exponential moving statistics without the bias towards the initial values.

    The weights of batches fall off geometrically and are divided by their sum (``mass``), as Adam's are.

    Args:
        spec: of the elements that are averaged.
        update_rate: weight of a new batch in (0, 1], or a scheduler of it.
    """

    mass: Tensor

    def __init__(self, spec: TensorSpec, update_rate: float | Callable[[], float]):
        super().__init__(spec)
        self._update_rate = as_scheduler(update_rate)
        self.register_buffer('mass', torch.zeros((), dtype=torch.float64))

    def _next_weight(self) -> Tensor:
        rate = self._update_rate()
        self.mass.mul_(1.0 - rate).add_(rate)
        return (rate / self.mass).to(self.mean.dtype)


class AdaptiveStats(RunningStats):
    """Statistics whose window grows with time: batch t of n has a weight that grows about as ``t ** (speed - 1)``.

    The update rate is ``speed / (n + speed)`` for batch n = 0, 1, ...: quick at first, and converging.

    Args:
        spec: of the elements that are averaged.
        speed: positive; 1 weights all batches equally, more favours the recent.
    """

    steps: Tensor

    def __init__(self, spec: TensorSpec, speed: float):
        super().__init__(spec)
        if not speed > 0:
            raise ValueError(f'speed must be positive, found {speed}')
        self._speed = speed
        self.register_buffer('steps', torch.zeros((), dtype=torch.int64))

    def _next_weight(self) -> Tensor:
        weight = self._speed / (self.steps + self._speed)
        self.steps.add_(1)
        return weight.to(self.mean.dtype)


class WindowStats(RunningStats):
    """Statistics of the last ``window_size`` batches, each with the same weight.

    Args:
        spec: of the elements that are averaged.
        window_size: number of batches.
    """

    means: Tensor
    variances: Tensor
    steps: Tensor

    def __init__(self, spec: TensorSpec, window_size: int):
        super().__init__(spec)
        if window_size < 1:
            raise ValueError(f'window_size must be at least 1, found {window_size}')
        self._window_size = window_size
        self.register_buffer('means', torch.zeros((window_size, *spec.shape), dtype=self.mean.dtype))
        self.register_buffer('variances', torch.zeros((window_size, *spec.shape), dtype=self.mean.dtype))
        self.register_buffer('steps', torch.zeros((), dtype=torch.int64))

    def _push(self, mean: Tensor, variance: Tensor | None) -> slice:
        """Put one batch into the ring; return the part of the ring in use."""
        steps = int(self.steps)
        self.means[steps % self._window_size] = mean
        if variance is not None:
            self.variances[steps % self._window_size] = variance
        self.steps.add_(1)
        return slice(0, min(steps + 1, self._window_size))

    @torch.no_grad()
    def update(self, tensor: Tensor) -> None:
        """Take in ``tensor [..., *spec.shape]``, with any number of leading dimensions (empty ones are ignored)."""
        if tensor.numel() == 0:
            return
        used = self._push(*batch_moments(tensor, self._spec))
        between, mean = torch.var_mean(self.means[used], 0, correction=0)
        self.mean.copy_(mean)
        self.variance.copy_(between.add_(self.variances[used].mean(0)))

    @torch.no_grad()
    def update_mean(self, tensor: Tensor) -> None:
        """:meth:`update` of the mean only, for those who do not read the variance."""
        if tensor.numel() == 0:
            return
        mean, _ = batch_moments(tensor, self._spec)
        self.mean.copy_(self.means[self._push(mean, None)].mean(0))
