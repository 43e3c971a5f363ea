"""Base of networks that are lists of layers on images: convolutions, pooling and the list itself.

Read next: :mod:`alfx.networks.encoding_networks` and :mod:`alfx.networks.decoding_networks`.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alfx.layers import (Activation, Conv2D, Initializer, LayerNormOption, Sequential, make_parallel_net, pair)
from alfx.layers.elementwise import MaxPool2D
from alfx.networks.network import Network, ParallelNetworkWrapper
from alfx.tensor_specs import NestedTensor


def conv_layers(shape: Sequence[int], conv_layer_params: Sequence[tuple], same_padding: bool, activation: Activation,
                kernel_initializer: Initializer | None, where: str, use_bias: bool | None = None,
                use_ln: LayerNormOption = False) -> tuple[list[nn.Module], tuple[int, int, int]]:
    """Create the convolutions; returns them and the ``(C, H, W)`` of their output."""
    if not conv_layer_params:
        raise ValueError(f'{where}: expected at least one layer in conv_layer_params')
    channels, height, width = shape
    modules: list[nn.Module] = []
    for i, params in enumerate(conv_layer_params):
        if not 3 <= len(params) <= 5:
            raise ValueError(f'{where}: conv_layer_params[{i}]: expected (filters, kernel_size, strides[, padding[, '
                             f'pooling_kernel]]), found {params}')
        filters, pooling = params[0], params[4] if len(params) > 4 else 0
        kernel, strides, padding = pair(params[1]), pair(params[2]), pair(params[3] if len(params) > 3 else 0)
        if same_padding:
            padding = ((kernel[0] - 1) // 2, (kernel[1] - 1) // 2)
        modules.append(Conv2D(channels, filters, kernel, activation, strides, padding, use_bias, use_ln=use_ln,
                              kernel_initializer=kernel_initializer))
        channels = filters
        height, width = ((size + 2 * p - k) // s + 1
                         for size, p, k, s in zip((height, width), padding, kernel, strides))
        if pooling:
            modules.append(MaxPool2D(pooling))
            height, width = height // pooling, width // pooling
        if height < 1 or width < 1:
            raise ValueError(f'{where}: an image {tuple(shape)} becomes empty after conv_layer_params[{i}] {params}')
    return modules, (channels, height, width)


class LayersNetwork(Network):
    """Network that consists of a list of layers."""

    def _set_layers(self, modules: list[Any]) -> None:
        self._layers = nn.ModuleList(modules)
        self._chain = modules

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, ...]`` to ``[B, ...]``."""
        for layer in self._chain:
            inputs = layer(inputs)
        return inputs, state

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        stacked = Sequential(*(make_parallel_net(layer, n) for layer in self._chain))
        return ParallelNetworkWrapper(stacked, self._input_tensor_spec, n, 'parallel_' + self._name)
