"""Normalization layers: batch norm with optional statistics for each step of a sequence, and stacked layer norm.

In a recurrent network the distribution of a layer's inputs changes over the first steps of a sequence, so batch norm
needs separate statistics for each step (Cooijmans et al. 2016, arXiv:1603.09025, section 4).
:func:`prepare_rnn_batch_norm`, :func:`set_batch_norm_max_steps` and :func:`set_batch_norm_current_step` control all
batch norm layers of this module inside a network. Without calls of these functions the layers behave like torch's.
"""
import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import configurable


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
