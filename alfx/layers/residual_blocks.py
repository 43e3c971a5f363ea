"""Residual blocks of convolutions, for images ``[B, C, H, W]`` (He et al. 2015, arXiv:1512.03385).

A block computes ``activation(body(x) + shortcut(x))``. The shortcut is the identity or, if the shape changes, a
convolution with kernel size 1. A block with ``transpose`` enlarges the image by transposed convolutions.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from alfx.gin_utils import Count, configurable
from alfx.layers import weights as w
from alfx.layers.conv import Conv2D, ConvTranspose2D, Size2d, pair
from alfx.utils.math_ops import identity


def _odd(kernel_size: Size2d, where: str) -> tuple[int, int]:
    kernel = pair(kernel_size)
    if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
        raise ValueError(f'{where}: expected an odd kernel_size, found {kernel_size}')
    return kernel


class _ResidualBlock(nn.Module):
    """Convolutions, shortcut and sum shared by the residual blocks."""

    def __init__(self, transpose: bool, activation: w.Activation, options: dict[str, Any]):
        super().__init__()
        self._transpose = transpose
        self._activation = activation
        self._options = options

    def _conv(self, in_channels: int, channels: int, kernel: Size2d, stride: int,
              activation: w.Activation) -> nn.Module:
        """Create a convolution with output size ceil(size / stride), or size * stride with ``transpose``."""
        height, width = pair(kernel)
        padding = (height // 2, width // 2)
        if self._transpose:
            return ConvTranspose2D(in_channels, channels, (height, width), activation, stride, padding,
                                   output_padding=stride - 1, **self._options)
        return Conv2D(in_channels, channels, (height, width), activation, stride, padding, **self._options)

    def _make_shortcut(self, in_channels: int, channels: int, stride: int) -> nn.Module | None:
        if stride == 1 and in_channels == channels:
            return None
        return self._conv(in_channels, channels, 1, stride, identity)

    def _add(self, inputs: torch.Tensor, body: torch.Tensor, shortcut: nn.Module | None) -> torch.Tensor:
        return self._activation(body + (inputs if shortcut is None else shortcut(inputs)))


@configurable(module='alfx.layers')
class ResidueBlock(_ResidualBlock):
    """Basic block of a residual network (He et al. 2015, figure 5, left): two convolutions.

    Args:
        in_channels: channels of the input.
        channels: channels of the output.
        kernel_size: odd height and width of the kernels, or one number for both.
        stride: factor by which the image shrinks.
        transpose: enlarge the image by that factor instead, by transposed convolutions.
        activation: applied after both convolutions; may be an in-place function.
        with_batch_normalization: use batch norm after each convolution.
        weight_opt_args: optimizer arguments of the weights, stored as ``weight.opt_args``.
        bn_ctor: creates a batch norm from the number of channels.

    Raises:
        ValueError: the kernel size is even, or ``weight_opt_args`` is set together with ``transpose``.
    """

    def __init__(self, in_channels: Count, channels: Count, kernel_size: Size2d, stride: Count, transpose: bool = False,
                 activation: w.Activation = torch.relu_, with_batch_normalization: bool = True,
                 weight_opt_args: dict | None = None, bn_ctor: Callable[[int], nn.Module] = nn.BatchNorm2d):
        kernel = _odd(kernel_size, 'ResidueBlock')
        if transpose and weight_opt_args is not None:
            raise ValueError('ResidueBlock: weight_opt_args cannot be used with transpose=True')
        options: dict[str, Any] = dict(use_bn=with_batch_normalization, bn_ctor=bn_ctor)
        if not transpose:
            options['weight_opt_args'] = weight_opt_args
        super().__init__(transpose, activation, options)
        self._conv1 = self._conv(in_channels, channels, kernel, stride, activation)
        self._conv2 = self._conv(channels, channels, kernel, 1, identity)
        self._shortcut = self._make_shortcut(in_channels, channels, stride)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, in_channels, H, W]`` to ``[B, channels, H', W']``, with H' = ceil(H / stride) or H * stride."""
        return self._add(inputs, self._conv2(self._conv1(inputs)), self._shortcut)


@configurable(module='alfx.layers')
class BottleneckBlock(_ResidualBlock):
    """Bottleneck block (He et al. 2015, figure 5, right): convolutions with kernel sizes 1, k and 1.

    ReLU follows the first two convolutions and the sum.

    Args:
        in_channels: channels of the input.
        kernel_size: odd height and width k of the middle kernel, or one number for both.
        filters: channels of the three convolutions.
        stride: factor by which the image shrinks.
        transpose: enlarge the image by that factor instead, by transposed convolutions.
        v1_5: put the stride into the middle convolution, which loses less of the input; in the paper the first
            convolution has the stride.
        with_batch_normalization: use batch norm after each convolution.
        bn_ctor: creates a batch norm from the number of channels.

    Raises:
        ValueError: the kernel size is even, or there are not three ``filters``.
    """

    def __init__(self, in_channels: Count, kernel_size: Size2d, filters: Sequence[Count], stride: Count,
                 transpose: bool = False, v1_5: bool = True, with_batch_normalization: bool = True,
                 bn_ctor: Callable[[int], nn.Module] = nn.BatchNorm2d):
        kernel = _odd(kernel_size, 'BottleneckBlock')
        if len(filters) != 3:
            raise ValueError(f'BottleneckBlock: expected three filters, found {filters}')
        super().__init__(transpose, torch.relu_, dict(use_bn=with_batch_normalization, bn_ctor=bn_ctor))
        first, middle, last = filters
        self._in_channels, self._out_channels, self._stride = in_channels, last, stride
        self._body = nn.Sequential(
            self._conv(in_channels, first, 1, 1 if v1_5 else stride, torch.relu_),
            self._conv(first, middle, kernel, stride if v1_5 else 1, torch.relu_),
            self._conv(middle, last, 1, 1, identity))
        self._shortcut = self._make_shortcut(in_channels, last, stride)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, in_channels, H, W]`` to ``[B, filters[2], H', W']``; see :meth:`calc_output_shape`."""
        return self._add(inputs, self._body(inputs), self._shortcut)

    def calc_output_shape(self, input_shape: Sequence[int]) -> tuple[int, int, int]:
        """Map ``(in_channels, H, W)`` to ``(filters[2], H', W')``, with H' = ceil(H / stride) or H * stride.

        Raises:
            ValueError: ``input_shape`` is not ``(in_channels, H, W)``.
        """
        if len(input_shape) != 3 or input_shape[0] != self._in_channels:
            raise ValueError(f'BottleneckBlock: expected a shape ({self._in_channels}, H, W), found '
                             f'{tuple(input_shape)}')
        height, width = ((size * self._stride if self._transpose else -(-size // self._stride))
                         for size in input_shape[1:])
        return self._out_channels, height, width
