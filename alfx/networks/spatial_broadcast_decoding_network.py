"""From a vector to an image by convolutions over copies of the vector at every place.

Watters et al. 2019, "Spatial Broadcast Decoder: A Simple Architecture for Learning Disentangled Representations in
VAEs" (https://arxiv.org/abs/1901.07017): without upsampling it is easy to say what is where. Differs from the paper:
sizes and padding of the layers are arguments; the canvas is enlarged by what convolutions without padding cut off, as
by Burgess et al. 2019 (arXiv:1901.11390, appendix B.1).
"""
from collections.abc import Sequence

import torch

from alfx.gin_utils import configurable
from alfx.layers import FC, Conv2D, ElementwiseLayerBase
from alfx.layers.conv import pair
from alfx.layers.weights import Activation
from alfx.networks.containers import Sequential
from alfx.networks.network import Network
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity


class SpatialBroadcast(ElementwiseLayerBase):
    """A vector at every place of an image, and the coordinates of the place behind it.

    Args:
        height: of the image.
        width: of the image.
    """

    _coordinates: torch.Tensor

    def __init__(self, height: int, width: int):
        super().__init__()
        rows, columns = _coordinates(height)[:, None], _coordinates(width)[None, :]
        self.register_buffer('_coordinates', torch.stack(torch.broadcast_tensors(rows, columns)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` to ``[..., D + 2, height, width]``; the coordinates, from -1 to 1, are row and column."""
        coordinates = self._coordinates.expand(*inputs.shape[:-1], *self._coordinates.shape)
        image = inputs[..., None, None].expand(*inputs.shape, *self._coordinates.shape[1:])
        return torch.cat([image, coordinates], dim=-3)


def _coordinates(size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, size) if size > 1 else torch.zeros(1)


@configurable
def SpatialBroadcastDecodingNetwork(input_size: int, output_height: int, conv_layer_params: Sequence[tuple],
                                    output_width: int | None = None, fc_layer_params: Sequence[int] | None = None,
                                    activation: Activation = torch.relu_, output_activation: Activation = identity,
                                    name: str = 'SpatialBroadcastDecodingNetwork') -> Network:
    """A network from ``[B, input_size]`` to ``[B, channels, output_height, output_width]``.

    Fully connected layers come first, then :class:`SpatialBroadcast`, then convolutions.

    Args:
        input_size: number of inputs.
        output_height: height of the image.
        conv_layer_params: for each convolution ``(filters, kernel_size, strides[, padding])``, with strides of 1; the
            filters of the last one are the channels of the image. The canvas is as much larger than the image as
            the convolutions make it smaller.
        output_width: width of the image; ``None``: as its height.
        fc_layer_params: sizes of the fully connected layers.
        activation: activation of all layers but the last.
        output_activation: activation of the last layer.
        name: name of the network.

    Raises:
        ValueError: no or malformed convolutions, or some that enlarge the image beyond its size.
    """
    if not conv_layer_params:
        raise ValueError(f'{name}: expected at least one layer in conv_layer_params')
    layers: list[torch.nn.Module] = []
    size = input_size
    for width in fc_layer_params or ():
        layers.append(FC(size, width, activation))
        size = width
    canvas = [output_height, output_height if output_width is None else output_width]
    convolutions: list[torch.nn.Module] = []
    channels = size + 2
    for i, params in enumerate(conv_layer_params):
        if not 3 <= len(params) <= 4 or pair(params[2]) != (1, 1):
            raise ValueError(f'{name}: conv_layer_params[{i}]: expected (filters, kernel_size, strides[, padding]) '
                             f'with strides of 1, found {params}')
        filters, kernel, padding = params[0], pair(params[1]), pair(params[3] if len(params) > 3 else 0)
        last = i == len(conv_layer_params) - 1
        convolutions.append(Conv2D(channels, filters, kernel, output_activation if last else activation,
                                   padding=padding))
        channels = filters
        canvas = [c + k - 1 - 2 * p for c, k, p in zip(canvas, kernel, padding)]
    if min(canvas) < 1:
        raise ValueError(f'{name}: the padding of conv_layer_params {tuple(conv_layer_params)} is larger than the '
                         'image')
    return Sequential(*layers, SpatialBroadcast(*canvas), *convolutions, input_tensor_spec=TensorSpec((input_size, )),
                      name=name)
