"""Convolutions and transposed convolutions: single ones, and ``n`` of them as one grouped convolution."""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import Count, configurable, takes_arguments_of
from alfx.layers import weights as w
from alfx.layers.activations import out_of_place
from alfx.layers.sequential import NaiveParallelLayer, stacked_activation

_LEAST_PIXELS = 32 * 32  # convolutions of larger images are faster with channels last; smaller ones gain nothing
Size2d = int | tuple[int, int]


def _in_fast_format(images: torch.Tensor) -> torch.Tensor:
    if images.device.type != 'cpu' or images.shape[-2] * images.shape[-1] < _LEAST_PIXELS:
        return images
    if torch.is_autocast_enabled('cpu') and images.dtype == torch.float32:
        # Autocast converts them in any case, and half as many bytes are rearranged faster.
        images = images.to(torch.get_autocast_dtype('cpu'))
    return images.contiguous(memory_format=torch.channels_last)  # later layers keep it


def pair(value: Size2d) -> tuple[int, int]:
    """Return ``(3, 3)`` for ``3``, and a pair unchanged."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


class _ConvBase(nn.Module):
    """Weights, normalization and activation of the four convolutions; ``n`` is ``None`` for a single convolution."""

    _transposed = False

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size2d, n: int | None = None, **config: Any):
        super().__init__()
        name, shape = type(self).__name__, (in_channels, out_channels)
        use_torch_init, use_ln = config.get('use_torch_init', False), config.get('use_ln', False)
        w.check_init_arguments(name, use_torch_init, config['kernel_initializer'], config['use_bn'], use_ln)
        use_bias = not config['use_bn'] if config['use_bias'] is None else config['use_bias']
        self._config = config
        self._in_channels, self._out_channels = shape
        self._kernel_size = pair(kernel_size)
        self._n: Any = n
        self._strides, self._padding = pair(config['strides']), pair(config['padding'])
        self._output_padding = pair(config.get('output_padding', 0))
        # The activation of a stack, or after layer norm over channels, is applied to a view; in place, its backward
        # pass would copy everything.
        activation = out_of_place(config['activation']) if use_ln == 'channels' else config['activation']
        self._activation = activation if n is None else stacked_activation(activation, n)
        kernel = (shape[::-1] if not self._transposed else shape) + self._kernel_size
        stack = () if n is None else (n, )
        self.weight = w.parameter(stack + kernel, config.get('weight_opt_args'))
        self.bias = w.parameter(stack + shape[1:], None) if use_bias else None
        self._norm: Any = w.conv_norm(shape[1], n, config['use_bn'], use_ln, config['bn_ctor'])
        self._has_norm = self._norm is not None
        self._is_separable = not (self._has_norm or isinstance(self._activation, NaiveParallelLayer))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        c = self._config
        use_torch_init = c.get('use_torch_init', False)
        for i in range(self._n or 1):
            weight: torch.Tensor = self.weight
            bias: torch.Tensor | None = self.bias
            if self._n is not None:
                weight, bias = weight[i], None if bias is None else bias[i]
            w.init_kernel(weight, c['kernel_initializer'], c['kernel_init_gain'], c['activation'], use_torch_init,
                          self._transposed)
            if bias is not None:
                w.init_bias(bias, weight, None, c['bias_init_value'], use_torch_init, self._transposed)
        w.reset_norm(self._norm)

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        """Normalize ``[B, (n *) out, H, W]``, unstack it to ``[B, n, out, H, W]`` and apply the activation."""
        if self._has_norm:
            y = self._norm(y)
        if self._n is not None:
            y = y.view(y.shape[0], y.shape[1] // self._out_channels, self._out_channels, *y.shape[2:])
        return self._activation(y)

    def _stacked(self, inputs: torch.Tensor, n: int) -> bool:
        """Return whether each of the ``n`` layers has its own input."""
        if inputs.ndim == 5 and inputs.shape[1] == n:
            return True
        if inputs.ndim == 4:
            return False
        raise ValueError(f'{type(self).__name__}: expected [B, {self._in_channels}, H, W] or '
                         f'[B, {n}, {self._in_channels}, H, W], found {list(inputs.shape)}')

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        n = '' if self._n is None else f', n={self._n}'
        return (f'{self._in_channels}, {self._out_channels}, kernel_size={self._kernel_size}{n}, '
                f'strides={self._strides}, padding={self._padding}, bias={self.bias is not None}')


@configurable(module='alfx.layers')
class Conv2D(_ConvBase):
    """``activation(norm(conv(x) + b))`` over images.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: height and width of the kernel, or one number for both.
        activation: applied to the result; may be an in-place function.
        strides: vertical and horizontal stride, or one number for both.
        padding: rows and columns of zeros on each side, or one number for both.
        use_bias: add a bias; ``None`` adds one unless there is batch norm.
        use_bn: use batch norm before the activation.
        use_ln: normalize over channels and positions before the activation, or with ``'channels'`` over the channels
            of each position; not with ``use_bn``.
        weight_opt_args: optimizer arguments of the weights, stored as ``weight.opt_args``.
        bn_ctor: creates the batch norm from the number of channels.
        kernel_initializer: initializes the weights in place; ``None`` uses
            :func:`~alfx.initializers.variance_scaling_init`.
        kernel_init_gain: ``gain`` of that initializer.
        bias_init_value: initial bias.
        use_torch_init: initialize weights and bias like ``torch.nn.Conv2d`` instead.

    Raises:
        ValueError: two arguments cannot be used together.
    """

    def __init__(self, in_channels: Count, out_channels: Count, kernel_size: Size2d,
                 activation: w.Activation = torch.relu_, strides: Size2d = 1, padding: Size2d = 0,
                 use_bias: bool | None = None, use_bn: bool = False, use_ln: w.LayerNormOption = False,
                 weight_opt_args: dict | None = None, bn_ctor: Callable[[int], nn.Module] = nn.BatchNorm2d,
                 kernel_initializer: w.Initializer | None = None, kernel_init_gain: float = 1.0,
                 bias_init_value: float = 0.0, use_torch_init: bool = False):
        super().__init__(
            in_channels, out_channels, kernel_size, activation=activation, strides=strides, padding=padding,
            use_bias=use_bias, use_bn=use_bn, use_ln=use_ln, weight_opt_args=weight_opt_args, bn_ctor=bn_ctor,
            kernel_initializer=kernel_initializer, kernel_init_gain=kernel_init_gain, bias_init_value=bias_init_value,
            use_torch_init=use_torch_init)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, in_channels, H, W]`` to ``[B, out_channels, H', W']``."""
        return self._finish(F.conv2d(_in_fast_format(inputs), self.weight, self.bias, self._strides, self._padding))

    def make_parallel(self, n: int) -> 'ParallelConv2D':
        """Create ``n`` layers like this one, with separate initial weights."""
        return ParallelConv2D(self._in_channels, self._out_channels, self._kernel_size, n, **self._config)


@configurable(module='alfx.layers')
class ParallelConv2D(_ConvBase):
    """``n`` convolutions computed as one; ``weight [n, out, in, kh, kw]``, ``bias [n, out]``.

    Args:
        n: number of layers.
        kwargs: arguments of :class:`Conv2D`.
    """

    @takes_arguments_of(Conv2D, after={'n': 'kernel_size'})
    def __init__(self, n: Count, **kwargs: Any):
        super().__init__(n=n, **kwargs)

    def forward(self, inputs: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Map ``[B, n, in, H, W]``, or ``[B, in, H, W]`` shared by all layers, to ``[B, n, out, H', W']``.

        Args:
            inputs: see above.
            first: compute only the first ``first`` layers; it replaces n in all shapes. Excludes a norm.

        Raises:
            ValueError: the input has another shape.
        """
        n, groups = self._n, 1
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if first is not None:
            n, weight, bias = first, weight.narrow(0, 0, first), None if bias is None else bias.narrow(0, 0, first)
        if self._stacked(inputs, n):
            inputs, groups = inputs.flatten(1, 2), n
        bias = None if bias is None else bias.flatten()
        return self._finish(F.conv2d(_in_fast_format(inputs), weight.flatten(0, 1), bias, self._strides, self._padding,
                                     1, groups))

    def first_layers(self, k: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the first layers, see :func:`alfx.layers.sequential.first_layers`; ``None`` with a norm."""
        return partial(self, first=k) if self._is_separable else None


@configurable(module='alfx.layers')
class ConvTranspose2D(_ConvBase):
    """``activation(norm(transposed_conv(x) + b))`` over images.

    Args:
        padding: rows and columns that are removed on each side, or one number for both.
        output_padding: rows and columns added at the end, or one number for both.
        kernel_initializer: initializes the weights ``[in, out, kh, kw]`` in place.
        kwargs: arguments of :class:`Conv2D`, except ``use_ln``, ``weight_opt_args`` and ``use_torch_init``.
    """

    _transposed = True

    @takes_arguments_of(Conv2D, without=('use_ln', 'weight_opt_args', 'use_torch_init'),
                        after={'output_padding': 'padding'})
    def __init__(self, output_padding: Size2d = 0, **kwargs: Any):
        super().__init__(output_padding=output_padding, **kwargs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, in_channels, H, W]`` to ``[B, out_channels, H', W']``."""
        return self._finish(F.conv_transpose2d(inputs, self.weight, self.bias, self._strides, self._padding,
                                               self._output_padding))

    def make_parallel(self, n: int) -> 'ParallelConvTranspose2D':
        """Create ``n`` layers like this one, with separate initial weights."""
        return ParallelConvTranspose2D(self._in_channels, self._out_channels, self._kernel_size, n, **self._config)


@configurable(module='alfx.layers')
class ParallelConvTranspose2D(_ConvBase):
    """``n`` transposed convolutions computed as one; ``weight [n, in, out, kh, kw]``, ``bias [n, out]``.

    Args:
        n: number of layers.
        kwargs: arguments of :class:`ConvTranspose2D`.
    """

    _transposed = True

    @takes_arguments_of(ConvTranspose2D, after={'n': 'kernel_size'})
    def __init__(self, n: Count, **kwargs: Any):
        super().__init__(n=n, **kwargs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, n, in, H, W]``, or ``[B, in, H, W]`` shared by all layers, to ``[B, n, out, H', W']``.

        Raises:
            ValueError: the input has another shape.
        """
        if self._stacked(inputs, self._n):
            inputs, groups, kernel = inputs.flatten(1, 2), self._n, self.weight.flatten(0, 1)
        else:
            groups, kernel = 1, self.weight.transpose(0, 1).flatten(1, 2)
        bias = None if self.bias is None else self.bias.flatten()
        return self._finish(F.conv_transpose2d(inputs, kernel, bias, self._strides, self._padding,
                                               self._output_padding, groups))
