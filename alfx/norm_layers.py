"""Normalization layers: batch norm for reinforcement learning, batch norm with optional statistics for each step of a
sequence, and stacked layer norm.

In a recurrent network the distribution of a layer's inputs changes over the first steps of a sequence, so batch norm
needs separate statistics for each step (Cooijmans et al. 2016, arXiv:1603.09025, section 4).
:func:`prepare_rnn_batch_norm`, :func:`set_batch_norm_max_steps` and :func:`set_batch_norm_current_step` control all
batch norm layers of this module inside a network. If they are not called, the layers behave like torch's.
"""
from contextlib import AbstractContextManager
from typing import Annotated, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from alfx import context
from alfx.context import running_statistics as running_statistics
from alfx.gin_utils import Count, Fraction, NonNegative, Positive, Range, configurable


class RowWeights(NamedTuple):
    """Weights of the rows of a batch.

    Attributes:
        weights: ``[B]``.
        total: their sum; 1 if no row counts.
        any: whether any row counts.
    """

    weights: torch.Tensor
    total: torch.Tensor
    any: torch.Tensor


def counted(weights: torch.Tensor | None) -> AbstractContextManager[None]:
    """Context manager in which the statistics of :class:`BatchNorm` are weighted means over the rows of a batch.

    Rows of weight 0 do not count, whatever is in them. Their results are finite, but have no meaning, and must not
    contribute to a loss.

    Args:
        weights: non-negative, ``[B]``; ``None`` gives all rows the same weight.
    """
    if weights is None:
        return context.set_counted_rows(None)
    total = weights.sum()
    return context.set_counted_rows(RowWeights(_stored(weights), torch.where(total > 0, total, 1.0), total > 0))


def repeated_rows(count: int) -> AbstractContextManager[None]:
    """Context manager for ``count`` concatenated batches whose rows have the weights of :func:`counted`."""
    rows = context.counted_rows()
    if rows is None:
        return context.set_counted_rows(None)
    weights = _stored(torch.cat((rows.weights, ) * count))
    return context.set_counted_rows(RowWeights(weights, rows.total * count, rows.any))


def _stored(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a vector that compiled graphs store; they would recompute a ``clone`` for every use.

    The compiler always stores the result of a reduction, unless it is over few elements.
    """
    return x.expand(16, -1).amax(0)


@configurable
class BatchNorm(nn.Module):
    """Batch norm (Ioffe and Szegedy 2015, arXiv:1502.03167) and batch renorm (Ioffe 2017, arXiv:1702.03275) of vectors.

    It differs from torch's as reinforcement learning requires. The statistics of a batch are used only in training:
    in supervised training, or in the run modes 'replay' and 'pretrain'. The running statistics are used in rollouts, in
    evaluation, after ``.eval()`` and within :func:`running_statistics`, and they are updated only in calls that use the
    statistics of the batch while gradients are recorded. Rows can be left out, see :func:`counted`: SAC, DDPG and TD3
    leave out the transitions that begin with a LAST step. Updates with this layer can be traced and compiled.

    With mean m and (biased) variance v, of the batch or running,

        y = weight * (x - m) / sqrt(v + eps) + bias

    With ``renorm``, training normalizes like acting, except for the gradient. With ``sd = sqrt(v + eps)``:

        r = clip(sd_batch / sd_running, 1 / r_max, r_max)
        d = clip((m_batch - m_running) / sd_running, -d_max, d_max)
        y = weight * ((x - m_batch) / sd_batch * r + d) + bias

    where r and d have no gradient and use the running statistics before the update.

    Args:
        size: number of features.
        momentum: step size of the running statistics at an update; smaller values are more stable but follow the
            activations more slowly.
        eps: added to the variance.
        renorm: use batch renorm.
        r_max: bound of r, at least 1.
        d_max: bound of d.
        warm_up: number of updates with plain batch norm (r = 1, d = 0) at first.
        unit: keep the sum of squares of weight and bias at ``size``, the initial value, after each update that trains
            them.
        n: number of stacked layers with separate statistics; ``None`` for a single layer.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_updates: torch.Tensor

    def __init__(self, size: Count, momentum: Fraction = 0.01, eps: Positive = 1e-3, renorm: bool = False,
                 r_max: Annotated[float, Range(minimum=1)] = 3.0, d_max: NonNegative = 5.0, warm_up: int = 100000,
                 unit: bool = False, n: Count | None = None):
        super().__init__()
        self._config: dict[str, Any] = dict(size=size, momentum=momentum, eps=eps, renorm=renorm, r_max=r_max,
                                            d_max=d_max, warm_up=warm_up, unit=unit)
        self.projects_parameters = unit
        self._n, self._size, self._momentum, self._eps = n, size, momentum, eps
        self._renorm, self._r_max, self._d_max, self._warm_up = renorm, r_max, d_max, warm_up
        total = size if n is None else n * size
        self.weight = nn.Parameter(torch.ones(total))
        self.bias = nn.Parameter(torch.zeros(total))
        self.register_buffer('running_mean', torch.zeros(total))
        self.register_buffer('running_var', torch.ones(total))
        self.register_buffer('num_updates', torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset to scale 1, shift 0, and running statistics of mean 0 and variance 1."""
        for x, value in ((self.weight, 1), (self.bias, 0), (self.running_var, 1), (self.running_mean, 0)):
            x.fill_(value)
        self.num_updates.zero_()

    @torch.no_grad()
    def project_parameters(self) -> None:
        """Scale weight and bias so that the sum of their squares is ``size``."""
        weight, bias = self.weight.view(-1, self._size), self.bias.view(-1, self._size)
        norm = torch.linalg.vector_norm(torch.cat((weight, bias), 1), dim=1, keepdim=True)
        factor = self._size**0.5 / norm.clamp_(min=1e-12)
        weight.mul_(factor), bias.mul_(factor)

    def make_parallel(self, n: int) -> 'BatchNorm':
        """Create ``n`` stacked layers like this one, with separate parameters and statistics."""
        return BatchNorm(**self._config, n=n)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize ``[..., size]``; with ``n``, map ``[B, n, size]``, or ``[B, size]`` for all, to ``[B, n, size]``.

        Raises:
            ValueError: there is only one row in training, or not one row for each weight.
        """
        if self._n is None:
            x = inputs.reshape(-1, self._size)
        else:
            if inputs.ndim == 2:
                inputs = inputs.unsqueeze(1).expand(-1, self._n, -1)
            x = inputs.flatten(1)
        x = x.to(torch.float32)
        if self.training and context.normalizes_by_batch():
            # products of stacked layers have the batch last in memory, see ParallelFC; keep it there
            y = self._by_batch(x.t(), 1).t() if x.stride(0) == 1 else self._by_batch(x, 0)
            return y.view(inputs.shape)
        scale = self.weight * torch.rsqrt(self.running_var + self._eps)
        return ((x - self.running_mean) * scale + self.bias).view(inputs.shape)

    def _by_batch(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Normalize rows by their own statistics.

        Args:
            x: ``[B, F]``, or ``[F, B]`` if ``dim`` is 1.
            dim: dimension of the rows.
        """
        rows, num = context.counted_rows(), x.shape[dim]
        if num < 2:
            raise ValueError('BatchNorm: expected at least 2 rows in training, found 1; use larger batches')
        if rows is not None and len(rows.weights) != num:
            raise ValueError(f'BatchNorm: expected a row for each of {len(rows.weights)} weights, found {num}')
        weights = None if rows is None else rows.weights.unsqueeze(1 - dim)
        is_tracked = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if rows is None or weights is None:
                mean = x.mean(dim)
                centered = x - mean.unsqueeze(dim)
                variance = centered.square().mean(dim)
            else:
                counted = torch.where(weights > 0, x, 0.0)  # multiplication would keep NaN
                mean = _weighted_sum(counted, rows.weights, dim) / rows.total
                centered = counted - mean.unsqueeze(dim)
                variance = _weighted_sum(centered.square(), rows.weights, dim) / rows.total
            inverse = torch.rsqrt(variance + self._eps)
            r, d = self._correction(mean, variance) if self._renorm else (None, None)
            if is_tracked:
                self._track(mean, variance, self._momentum if rows is None else rows.any * self._momentum)
        total = num if rows is None else rows.total
        return _Normalized.apply(x, self.weight, self.bias, centered, inverse, r, d, weights, total, dim)

    def _correction(self, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return r and d of batch renorm."""
        inverse = torch.rsqrt(self.running_var + self._eps)
        r = ((variance + self._eps).sqrt() * inverse).clamp(1.0 / self._r_max, self._r_max)
        d = ((mean - self.running_mean) * inverse).clamp(-self._d_max, self._d_max)
        is_warm = self.num_updates >= self._warm_up
        return torch.where(is_warm, r, 1.0), torch.where(is_warm, d, 0.0)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, rate: float | torch.Tensor) -> None:
        """Update the running statistics; a batch with NaN is rejected later and must not corrupt them."""
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(torch.where(new.isfinite(), new, running), rate)
        self.num_updates.add_(1)

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        return ', '.join([str(self._size), *(f'{k}={v}' for k, v in (('n', self._n), ('renorm', self._renorm)) if v)])


def _weighted_sum(x: torch.Tensor, weights: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum of the rows of ``x`` along ``dim``, with weights ``[B]``."""
    return torch.mv(x if dim else x.t(), weights)


class _Normalized(torch.autograd.Function):
    """``(x - m) / sd * (weight r) + bias + weight d`` with the gradient through the statistics m and sd of x.

    Autograd would need three times as many operations on whole batches, which take as long as the linear layers.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, centered: torch.Tensor,
                inverse: torch.Tensor, r: torch.Tensor | None, d: torch.Tensor | None, weights: torch.Tensor | None,
                total: torch.Tensor | int, dim: int) -> torch.Tensor:
        """Normalize ``centered`` rows ``[B, F]``, or ``[F, B]`` if ``dim`` is 1.

        Args:
            x: rows, which get the gradient.
            weight: ``[F]``.
            bias: ``[F]``.
            centered: ``x - m``, in the shape of ``x``.
            inverse: ``1 / sd``, ``[F]``.
            r: factor of batch renorm ``[F]``; ``None`` is 1.
            d: shift of batch renorm ``[F]``; ``None`` is 0.
            weights: weights of the rows in the statistics, ``[B, 1]`` or ``[1, B]``; ``None`` for equal weights.
            total: sum of the weights.
            dim: dimension of the rows.
        """
        ratio = inverse if r is None else inverse * r
        scale = _stored(weight * ratio)
        ctx.save_for_backward(scale, centered, inverse, ratio, d, weights)
        ctx.total, ctx.dim = total, dim
        shift = bias if d is None else torch.addcmul(bias, weight, d)
        return (centered * scale.unsqueeze(dim)).add_(shift.unsqueeze(dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients of ``x``, ``weight`` and ``bias``.

        With g the gradient of the result and p the weights divided by their sum, the gradient of x[i] is
        ``weight ratio (g[i] - p[i] (sum_j g[j] + (x[i] - m) / sd^2 sum_j g[j] (x[j] - m)))``.
        """
        scale, centered, inverse, ratio, d, weights = ctx.saved_tensors
        dim = ctx.dim
        total, product = grad.sum(dim), (grad * centered).sum(dim)
        slope, mean = _stored(inverse.square() * product / ctx.total), _stored(total / ctx.total)
        of_x = (centered * slope.unsqueeze(dim)).add_(mean.unsqueeze(dim))
        if weights is not None:
            of_x = of_x.mul_(weights)
        of_x = of_x.neg_().add_(grad).mul_(scale.unsqueeze(dim))
        of_weight = product * ratio
        return of_x, of_weight if d is None else torch.addcmul(of_weight, total, d), total, *[None] * 7


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467): ``y = weight * x / sqrt(mean(x^2) + eps)``.

    Args:
        size: number of features.
        eps: added to the mean square.
        unit: keep the sum of squares of the weight at ``size``, the initial value, after each update that trains it.
        n: number of stacked layers; ``None`` for a single layer.
    """

    def __init__(self, size: int, eps: float = 1e-6, unit: bool = False, n: int | None = None):
        super().__init__()
        self._size, self._eps, self.projects_parameters = size, eps, unit
        self.weight = nn.Parameter(torch.ones((size, ) if n is None else (n, size)))

    def reset_parameters(self) -> None:
        """Reset to scale 1."""
        nn.init.ones_(self.weight)

    @torch.no_grad()
    def project_parameters(self) -> None:
        """Scale the weight so that the sum of its squares is ``size``."""
        norm = torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True)
        self.weight.mul_(self._size**0.5 / norm.clamp_(min=1e-12))

    def make_parallel(self, n: int) -> 'RmsNorm':
        """Create ``n`` stacked layers like this one."""
        return RmsNorm(self._size, self._eps, self.projects_parameters, n)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize ``[..., size]``, or ``[..., n, size]`` with ``n``."""
        return inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + self._eps) * self.weight


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer that normalizes by the statistics of a batch."""
    return isinstance(module, (BatchNorm, nn.modules.batchnorm._BatchNorm))


def has_batch_norm(module: Any) -> bool:
    """Return whether a module contains a :class:`BatchNorm`; False for ``None``."""
    return module is not None and any(isinstance(part, BatchNorm) for part in module.modules())


class _StepwiseBatchNorm:
    """Mixin for torch's batch norm classes: running statistics ``[max_steps, C]`` instead of ``[C]``."""

    _max_steps = 1
    _current_step = 0

    def set_max_steps(self, max_steps: int) -> None:
        """Keep separate running statistics for the first ``max_steps`` steps; later steps share those of the last.

        Every step starts from the statistics collected so far. Call this before loading a checkpoint that was saved
        with ``max_steps``.

        Raises:
            ValueError: ``max_steps`` is smaller than 1.
        """
        if max_steps < 1:
            raise ValueError(f'max_steps must be at least 1, found {max_steps}')
        if self.track_running_stats and max_steps != self._max_steps:  # type: ignore[attr-defined]
            for name in ('running_mean', 'running_var', 'num_batches_tracked'):
                value = getattr(self, name)
                first = value if self._max_steps == 1 else value[0]
                stacked = first.clone() if max_steps == 1 else first.expand(max_steps, *first.shape).clone()
                setattr(self, name, stacked)
        self._max_steps = max_steps
        self._current_step = 0

    def set_current_step(self, current_step: int) -> None:
        """Choose the step whose statistics the next calls use and update."""
        self._current_step = min(int(current_step), self._max_steps - 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``[B, C, ...]``."""
        if self._max_steps == 1 or not self.track_running_stats:  # type: ignore[attr-defined]
            return super().forward(input)  # type: ignore[misc]
        self._check_input_dim(input)  # type: ignore[attr-defined]
        return self._normalize_step(input, self._current_step)

    def _normalize_step(self, input: torch.Tensor, step: int) -> torch.Tensor:
        mean, var = self.running_mean[step], self.running_var[step]  # type: ignore[attr-defined]
        momentum = self.momentum  # type: ignore[attr-defined]
        if self.training:  # type: ignore[attr-defined]
            count = self.num_batches_tracked[step].add_(1)  # type: ignore[attr-defined]
            momentum = 1.0 / float(count) if momentum is None else momentum
        return F.batch_norm(input, mean, var, self.weight, self.bias,  # type: ignore[attr-defined]
                            self.training, momentum or 0.0, self.eps)  # type: ignore[attr-defined]


@configurable
class BatchNorm1d(_StepwiseBatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` with the same arguments and optional statistics for each step of a sequence."""


@configurable
class BatchNorm2d(_StepwiseBatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` with the same arguments and optional statistics for each step of a sequence."""


def _stepwise_layers(module: nn.Module) -> list[_StepwiseBatchNorm]:
    return [m for m in module.modules() if isinstance(m, _StepwiseBatchNorm)]


def set_batch_norm_max_steps(module: nn.Module, max_steps: int) -> None:
    """Call ``set_max_steps`` of every :class:`BatchNorm1d` and :class:`BatchNorm2d` in ``module``."""
    for layer in _stepwise_layers(module):
        layer.set_max_steps(max_steps)


def set_batch_norm_current_step(module: nn.Module, current_step: int) -> None:
    """Call ``set_current_step`` of every :class:`BatchNorm1d` and :class:`BatchNorm2d` in ``module``."""
    for layer in _stepwise_layers(module):
        layer.set_current_step(current_step)


def prepare_rnn_batch_norm(module: nn.Module) -> bool:
    """Return whether ``module`` contains batch norm layers that can keep statistics for each step.

    Raises:
        ValueError: some batch norm layers are plain torch layers; the message names them.
    """
    plain = [name for name, m in module.named_modules()
             if isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, _StepwiseBatchNorm)]
    if plain:
        raise ValueError(f'the batch norm layers {plain} of a recurrent network share one statistic between all '
                         'steps; use bn_ctor=@alfx.norm_layers.BatchNorm1d (BatchNorm2d)')
    return bool(_stepwise_layers(module))


class ParallelLayerNorm(nn.Module):
    """Layer norm over the last dimension for ``n`` stacked layers.

    Args:
        n: number of layers.
        size: number of features of each layer.
        eps: added to the variance.
    """

    def __init__(self, n: int, size: int, eps: float = 1e-5):
        super().__init__()
        self._size, self._eps = size, eps
        self.weight = nn.Parameter(torch.ones(n, size))
        self.bias = nn.Parameter(torch.zeros(n, size))

    def reset_parameters(self) -> None:
        """Reset to scale 1 and shift 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, inputs: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Normalize ``[..., n, size]``, or ``[..., first, size]`` with the first ``first`` layers only."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor = self.bias
        if first is not None:
            weight, bias = weight.narrow(0, 0, first), bias.narrow(0, 0, first)
        return torch.addcmul(bias, F.layer_norm(inputs, (self._size, ), eps=self._eps), weight)


class ChannelLayerNorm(nn.Module):
    """Layer norm over the channels of each position of ``[B, (n *) channels, H, W]``, for ``n`` stacked convolutions.

    Args:
        channels: channels of each convolution.
        n: number of convolutions.
    """

    def __init__(self, channels: int, n: int = 1):
        super().__init__()
        self._n = n
        self._norm = nn.LayerNorm(channels) if n == 1 else ParallelLayerNorm(n, channels)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize the features of each position."""
        x = inputs.movedim(-3, -1)
        x = self._norm(x) if self._n == 1 else self._norm(x.unflatten(-1, (self._n, -1))).flatten(-2)
        return x.movedim(-1, -3)
