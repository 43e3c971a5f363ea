"""Layers for images ``[B, C, H, W]``: augmentation and residual blocks."""
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import configurable
from alfx.layers import weights as w
from alfx.layers.conv import Conv2D, ConvTranspose2D, Size2d, pair
from alfx.utils.math_ops import identity


@configurable(module='alfx.layers')
class ReplicationPad2d(nn.Module):
    """Repeat the border of images outwards.

    Args:
        padding: number of rows and columns on each side, or (left, right, top, bottom).
    """

    def __init__(self, padding: int | tuple[int, int, int, int]):
        super().__init__()
        self._padding = (padding, ) * 4 if isinstance(padding, int) else tuple(padding)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., H, W]`` of any dtype to ``[..., H + top + bottom, W + left + right]``."""
        left, right, top, bottom = self._padding
        height, width = inputs.shape[-2:]
        rows = torch.arange(-top, height + bottom, device=inputs.device).clamp_(0, height - 1)
        columns = torch.arange(-left, width + right, device=inputs.device).clamp_(0, width - 1)
        return inputs[..., rows[:, None], columns]


@configurable(module='alfx.layers')
class RandomCrop(nn.Module):
    """Cut a part of the same size out of each image, at a position drawn for each image.

    Args:
        size: height and width of the part, or one number for both.
        padding: rows and columns of zeros put around the image before, or one number for both.
    """

    def __init__(self, size: Size2d, padding: Size2d = 0):
        super().__init__()
        self._size, self._padding = pair(size), pair(padding)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., C, H, W]`` of any dtype to ``[..., C, h, w]``.

        Raises:
            ValueError: the padded image is smaller than the part.
        """
        pad_h, pad_w = self._padding
        if pad_h or pad_w:
            inputs = F.pad(inputs, (pad_w, pad_w, pad_h, pad_h))
        (height, width), (h, w_) = inputs.shape[-2:], self._size
        if height < h or width < w_:
            raise ValueError(f'RandomCrop: cannot cut {self._size} out of images of size {(height, width)}')
        images = inputs.reshape(-1, *inputs.shape[-3:])
        count, device = images.shape[0], images.device
        top = torch.randint(height - h + 1, (count, ), device=device)
        left = torch.randint(width - w_ + 1, (count, ), device=device)
        rows = (top[:, None] + torch.arange(h, device=device))[:, None, :, None]
        columns = (left[:, None] + torch.arange(w_, device=device))[:, None, None, :]
        image = torch.arange(count, device=device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=device)[None, :, None, None]
        return images[image, channel, rows, columns].view(*inputs.shape[:-2], h, w_)


@configurable(module='alfx.layers')
class ResidueBlock(nn.Module):
    """The basic block of a residual network (He et al. 2015, arXiv:1512.03385, figure 2).

    Two convolutions and a shortcut, which is a convolution of kernel size 1 where the shape changes.

    Args:
        in_channels: channels of the input.
        channels: channels of the output.
        kernel_size: odd height and width of the kernels, or one number for both.
        stride: the image gets smaller by this factor.
        transpose: whether it gets larger instead, by transposed convolutions.
        activation: used behind both convolutions; may work in place.
        with_batch_normalization: whether to use batch norm behind each convolution.
        weight_opt_args: arguments of the optimizer for the weights, kept as ``weight.opt_args``.
        bn_ctor: called with the number of channels to make a batch norm.

    Raises:
        ValueError: even kernel size; or ``weight_opt_args`` with ``transpose``, whose layers do not take it.
    """

    def __init__(self,
                 in_channels: int,
                 channels: int,
                 kernel_size: Size2d,
                 stride: int,
                 transpose: bool = False,
                 activation: w.Activation = torch.relu_,
                 with_batch_normalization: bool = True,
                 weight_opt_args: dict | None = None,
                 bn_ctor: Callable[[int], nn.Module] = nn.BatchNorm2d):
        super().__init__()
        kernel = pair(kernel_size)
        if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
            raise ValueError(f'ResidueBlock: expected an odd kernel_size, found {kernel_size}')
        if transpose and weight_opt_args is not None:
            raise ValueError('ResidueBlock: weight_opt_args cannot be used with transpose=True')
        options: dict = dict(use_bn=with_batch_normalization, bn_ctor=bn_ctor)
        padding = (kernel[0] // 2, kernel[1] // 2)
        conv_options = dict(options, weight_opt_args=weight_opt_args)
        self._activation = activation
        first: Callable[..., nn.Module] = Conv2D
        if transpose:
            first, first_options = ConvTranspose2D, dict(options, output_padding=stride - 1)
        else:
            first_options = conv_options
        self._conv1 = first(in_channels, channels, kernel, activation, stride, padding, **first_options)
        second, second_options = (ConvTranspose2D, options) if transpose else (Conv2D, conv_options)
        self._conv2 = second(channels, channels, kernel, identity, 1, padding, **second_options)
        self._shortcut = None
        if stride != 1 or in_channels != channels:
            self._shortcut = first(in_channels, channels, 1, identity, stride, 0, **first_options)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[B, in_channels, H, W]`` to ``[B, channels, H', W']``, with H' = ceil(H / stride) or H * stride."""
        shortcut = inputs if self._shortcut is None else self._shortcut(inputs)
        return self._activation(self._conv2(self._conv1(inputs)) + shortcut)
