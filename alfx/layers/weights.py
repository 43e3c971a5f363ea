"""Shared parts of layers with weights: initial values, optimizer arguments, normalization."""
import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn

from alfx.initializers import default_init, initial_weights
from alfx.layers.sequential import make_parallel_net, reset_parameters
from alfx.norm_layers import ChannelLayerNorm, ParallelLayerNorm

Activation = Callable[[torch.Tensor], torch.Tensor]
Initializer = Callable[[torch.Tensor], Any]
Norm = Callable[[int], nn.Module]
LayerNormOption = bool | Literal['channels']
NormPosition = Literal['before', 'after']  # the activation


def parameter(shape: tuple[int, ...], opt_args: dict | None) -> nn.Parameter:
    """Return an uninitialized parameter with ``opt_args`` as an attribute, which the optimizer reads.

    Raises:
        ValueError: it would have no elements.
    """
    if 0 in shape:
        raise ValueError(f'a layer with weights of shape {tuple(shape)} computes nothing: every layer needs at least '
                         'one unit, and one input')
    weights = nn.Parameter(torch.empty(shape))
    if opt_args is not None:
        weights.opt_args = dict(opt_args)  # type: ignore[attr-defined]
    return weights


def check_init_arguments(layer: str, use_torch_init: bool, kernel_initializer: Initializer | None, use_bn: bool,
                         use_ln: bool, norm: Norm | None = None) -> None:
    """Raise ``ValueError`` for arguments that cannot be used together."""
    if use_torch_init and kernel_initializer is not None:
        raise ValueError(f'{layer}: use_torch_init=True and kernel_initializer cannot be used together')
    if use_bn and use_ln:
        raise ValueError(f'{layer}: use_bn=True and use_ln=True cannot be used together')
    if norm is not None and (use_bn or use_ln):
        raise ValueError(f'{layer}: norm replaces use_bn=True and use_ln=True; remove one or the other')


def init_kernel(weight: torch.Tensor, initializer: Initializer | None, gain: float, activation: Activation,
                use_torch_init: bool = False, transposed: bool = False) -> None:
    """Fill the weights ``[out, in, ...]`` (``[in, out, ...]`` if ``transposed``) of one layer in place.

    Args:
        weight: tensor to fill.
        initializer: called with the weights; ``None`` for the scheme of :func:`~alfx.initializers.initial_weights`.
        gain: factor of the weights in that scheme.
        activation: the activation after the layer.
        use_torch_init: initialize like ``torch.nn.Linear`` and ``torch.nn.Conv2d`` instead.
        transposed: whether the layer is a transposed convolution.
    """
    if use_torch_init:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    elif initializer is not None:
        with torch.no_grad():
            initializer(weight)
    else:
        default_init(weight, gain, activation, transposed)


def init_bias(bias: torch.Tensor, weight: torch.Tensor, initializer: Initializer | None, value: float,
              use_torch_init: bool = False, transposed: bool = False) -> None:
    """Fill the biases ``[out]`` of one layer in place; arguments as in :func:`init_kernel`."""
    with torch.no_grad():
        if use_torch_init or (initializer is None and not value and initial_weights().biases == 'torch'):
            fan_in = math.prod((weight[:, 0] if transposed else weight[0]).shape)
            bound = 1 / math.sqrt(max(1, fan_in))
            bias.uniform_(-bound, bound)
        elif initializer is not None:
            initializer(bias)
        else:
            bias.fill_(value)


@torch.no_grad()
def project_rows(weight: torch.Tensor) -> None:
    """Divide the weights ``[..., out, in]`` of each output by their norm, in place."""
    weight.div_(torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp_(min=1e-12))


def fc_norm(size: int, n: int | None, use_bn: bool, use_ln: bool, bn_ctor: Norm, norm: Norm | None = None
            ) -> nn.Module | None:
    """Create the normalization after a fully connected layer, or after ``n`` stacked ones."""
    if norm is not None:
        return norm(size) if n is None else cast(nn.Module, make_parallel_net(norm(size), n))
    if use_bn:
        return bn_ctor(size if n is None else n * size)
    if use_ln:
        return nn.LayerNorm(size) if n is None else ParallelLayerNorm(n, size)
    return None


def conv_norm(channels: int, n: int | None, use_bn: bool, use_ln: LayerNormOption, bn_ctor: Norm) -> nn.Module | None:
    """Create the normalization after a convolution, or after ``n`` stacked ones, of ``[B, (n *) channels, H, W]``.

    Layer norm is over channels and positions together, or with ``'channels'`` over the channels of each position.
    Both have a scale and a shift for each channel.
    """
    if use_bn:
        return bn_ctor(channels if n is None else n * channels)
    if use_ln == 'channels':
        return ChannelLayerNorm(channels, n or 1)
    if use_ln:
        return nn.GroupNorm(1, channels) if n is None else nn.GroupNorm(n, n * channels)
    return None


def reset_norm(norm: nn.Module | None) -> None:
    """Reset a normalization layer, running statistics included."""
    if norm is not None:
        reset_parameters(norm)
