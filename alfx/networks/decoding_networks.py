"""Decoders that map a vector to an image.

They use transposed convolutions, upsampling and convolutions, or convolutions over copies of the vector at every
position. In conf files their module is ``encoding_networks``. The first two kinds start with fully connected layers
that output a small image. Upsampling instead of strides avoids the checkerboard artifacts of transposed convolutions
(Odena et al. 2016, https://distill.pub/2016/deconv-checkerboard).
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import Count, check_value, configurable, takes_arguments_of
from alfx.layers import (FC, Activation, Conv2D, ConvTranspose2D, ElementwiseLayerBase, Initializer, Reshape, Size2d,
                         pair)
from alfx.networks.containers import Sequential
from alfx.networks.image_layers import LayersNetwork, conv_layers
from alfx.networks.network import Network
from alfx.tensor_specs import SpecError, TensorSpec
from alfx.utils.math_ops import identity

_MODULE = 'alfx.networks.encoding_networks'
UPSAMPLING_MODES = ('area', 'bicubic', 'bilinear', 'nearest', 'nearest-exact')
"""Kinds of interpolation in :class:`ImageDecodingNetworkV2`."""


def vector_spec(size: int | TensorSpec, where: str) -> TensorSpec:
    """Return the spec of a vector of ``size`` elements; a spec of a vector is returned unchanged.

    Raises:
        SpecError: ``size`` is a spec of another shape.
    """
    spec = size if isinstance(size, TensorSpec) else TensorSpec((size, ))
    if spec.ndim != 1:
        raise SpecError(f'{where}: expected a vector as input, found {spec}')
    return spec


def _image_from_vector(size: int, shape: tuple[int, int, int], fc_layer_params: Sequence[int] | None,
                       activation: Activation, kernel_initializer: Initializer | None) -> list[nn.Module]:
    """Create fully connected layers of these sizes for ``[B, size]``, and a last one that outputs ``[B, *shape]``."""
    widths = (*(fc_layer_params or ()), TensorSpec(shape).numel)
    return [*_fc_layers(size, widths, activation, kernel_initializer), Reshape(*shape)]


def _fc_layers(size: int, widths: Sequence[int], activation: Activation,
               kernel_initializer: Initializer | None = None) -> list[nn.Module]:
    return [FC(*sizes, activation, kernel_initializer=kernel_initializer) for sizes in zip((size, *widths), widths)]


@configurable(module=_MODULE)
class ImageDecodingNetwork(LayersNetwork):
    """Image decoder: fully connected layers, then transposed convolutions.

    Args:
        input_size: number of inputs, or their spec.
        transconv_layer_params: for each layer ``(filters, kernel_size, strides[, padding[, output_padding]])``.
        start_decoding_size: height and width of the image after the last fully connected layer.
        start_decoding_channels: number of channels of that image.
        same_padding: pad by ``(kernel_size - 1) // 2``; overrides the padding in ``transconv_layer_params``. A layer
            with an odd kernel and a stride of 1 then keeps the size of the image.
        preprocess_fc_layer_params: sizes of further fully connected layers before it.
        activation: activation of all layers except the last.
        kernel_initializer: initializes the weights of a layer in place; ``None`` uses variance scaling.
        output_activation: activation of the last layer.
        name: name of the network.

    Raises:
        SpecError: the input is not a vector.
        ValueError: there are no layers, or a layer is malformed.
    """

    def __init__(self, input_size: Count | TensorSpec, transconv_layer_params: Sequence[tuple],
                 start_decoding_size: Size2d, start_decoding_channels: Count, same_padding: bool = False,
                 preprocess_fc_layer_params: Sequence[Count] | None = None, activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None, output_activation: Activation = torch.tanh,
                 name: str = 'ImageDecodingNetwork'):
        _check_layers(transconv_layer_params, name)
        spec = vector_spec(input_size, name)
        super().__init__(spec, (), name)
        start = start_decoding_channels, *pair(start_decoding_size)
        modules = _image_from_vector(spec.numel, start, preprocess_fc_layer_params, activation, kernel_initializer)
        channels = start_decoding_channels
        for i, params in enumerate(transconv_layer_params):
            filters, kernel, strides, padding, output_padding = (*params, 0, 0)[:5]
            if same_padding:
                rows, columns = pair(kernel)
                padding = (rows - 1) // 2, (columns - 1) // 2
            last = i == len(transconv_layer_params) - 1
            modules.append(ConvTranspose2D(channels, filters, kernel, output_activation if last else activation,
                                           strides, padding, output_padding, kernel_initializer=kernel_initializer))
            channels = filters
        self._set_layers(modules)


def _check_layers(transconv_layer_params: Sequence[tuple], where: str) -> None:
    if not transconv_layer_params:
        raise ValueError(f'{where}: expected at least one layer in transconv_layer_params')
    for i, params in enumerate(transconv_layer_params):
        if not 3 <= len(params) <= 5:
            raise ValueError(f'{where}: transconv_layer_params[{i}]: expected (filters, kernel_size, strides[, '
                             f'padding[, output_padding]]), found {params}')


@configurable(module=_MODULE)
class AutoShapeImageDeconvNetwork(ImageDecodingNetwork):
    """:class:`ImageDecodingNetwork` for images of a given shape; it computes the size of the first image.

    A layer maps a side of n pixels to ``(n - 1) * stride - 2 * padding + kernel_size + output_padding``. From the last
    layer to the first, the output padding is chosen so that n is a whole number.

    Args:
        transconv_layer_params: for each layer ``(filters, kernel_size, strides[, padding])``; the last layer must have
            as many filters as the images have channels.
        output_shape: ``(channels, height, width)`` of the images, or their spec.
        kwargs: arguments of :class:`ImageDecodingNetwork`, except ``start_decoding_size`` and ``same_padding``.

    Raises:
        SpecError: the input is not a vector.
        ValueError: there are no layers, a layer is malformed, or the layers cannot output images of this shape.
    """

    @takes_arguments_of(ImageDecodingNetwork, without=('start_decoding_size', 'same_padding'),
                        defaults={'name': 'AutoShapeImageDeconvNetwork'},
                        after={'output_shape': 'transconv_layer_params'})
    def __init__(self, transconv_layer_params: Sequence[tuple], name: str, output_shape: Sequence[int] | TensorSpec,
                 **kwargs: Any):
        _check_layers(transconv_layer_params, name)
        shape = tuple(output_shape.shape if isinstance(output_shape, TensorSpec) else output_shape)
        if len(shape) != 3 or transconv_layer_params[-1][0] != shape[0]:
            raise ValueError(f'{name}: expected an output_shape (channels, height, width) with as many channels as the '
                             f'last layer has filters, found {shape} and {transconv_layer_params[-1]}')
        layers, size = [], (shape[1], shape[2])
        for i, params in reversed(list(enumerate(transconv_layer_params))):
            if len(params) > 4:
                raise ValueError(f'{name}: transconv_layer_params[{i}]: expected (filters, kernel_size, strides[, '
                                 f'padding]), as the output padding follows from output_shape, found {params}')
            size, output_padding = _transposed_input_size(size, *(pair(x) for x in (*params[1:], 0)[:3]))
            if min(size) < 1:
                raise ValueError(f'{name}: transconv_layer_params[{i}] {params} cannot output images as small as '
                                 f'needed for output_shape {shape}; choose smaller kernels or strides')
            layers.append((*params[:3], params[3] if len(params) > 3 else 0, output_padding))
        super().__init__(transconv_layer_params=layers[::-1], start_decoding_size=size, same_padding=False, name=name,
                         **kwargs)


def _transposed_input_size(size: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int],
                           padding: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return input size and output padding of a transposed convolution with the output size ``size``."""
    reach = [n + 2 * p - k for n, k, p in zip(size, kernel, padding)]
    return ((reach[0] // strides[0] + 1, reach[1] // strides[1] + 1), (reach[0] % strides[0], reach[1] % strides[1]))


class _Upsample2D(ElementwiseLayerBase):
    """Interpolation of ``[..., C, H, W]`` to an image ``scale`` times as large."""

    def __init__(self, scale: float, mode: str):
        super().__init__()
        self._scale, self._mode = scale, mode

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = F.interpolate(inputs.flatten(0, -4), scale_factor=self._scale, mode=self._mode)
        return images.view(*inputs.shape[:-2], *images.shape[-2:])


@configurable(module=_MODULE)
class ImageDecodingNetworkV2(LayersNetwork):
    """Image decoder: fully connected layers, then upsampling and convolutions in any order.

    Args:
        input_size: number of inputs, or their spec.
        upsample_conv_layer_params: layers after the fully connected ones: a number enlarges the image by this factor by
            interpolation, ``(filters, kernel_size, strides[, padding])`` is a convolution. The last one must be a
            convolution.
        start_decoding_size: height and width of the image after the last fully connected layer.
        start_decoding_channels: number of channels of that image.
        preprocess_fc_layer_params: sizes of further fully connected layers before it.
        upsampling_mode: kind of interpolation, one of :data:`UPSAMPLING_MODES`.
        same_padding: pad by ``(kernel_size - 1) // 2``; overrides the given padding.
        activation: activation of all layers except the last.
        kernel_initializer: initializes the weights of a layer in place; ``None`` uses variance scaling.
        output_activation: activation of the last layer.
        name: name of the network.

    Raises:
        ConfError: ``upsampling_mode`` is unknown.
        SpecError: the input is not a vector.
        ValueError: there are no layers, a layer is malformed, or the image becomes empty.
    """

    def __init__(self, input_size: Count | TensorSpec, upsample_conv_layer_params: Sequence[float | tuple],
                 start_decoding_size: Size2d, start_decoding_channels: Count,
                 preprocess_fc_layer_params: Sequence[Count] | None = None, upsampling_mode: str = 'nearest',
                 same_padding: bool = False, activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None, output_activation: Activation = torch.tanh,
                 name: str = 'ImageDecodingNetworkV2'):
        check_value('ImageDecodingNetworkV2', 'upsampling_mode', upsampling_mode, str, choices=UPSAMPLING_MODES)
        if not upsample_conv_layer_params or isinstance(upsample_conv_layer_params[-1], (int, float)):
            raise ValueError(f'{name}: expected upsample_conv_layer_params whose last element is a convolution, found '
                             f'{upsample_conv_layer_params}')
        spec = vector_spec(input_size, name)
        super().__init__(spec, (), name)
        shape = start_decoding_channels, *pair(start_decoding_size)
        modules = _image_from_vector(spec.numel, shape, preprocess_fc_layer_params, activation, kernel_initializer)
        for i, params in enumerate(upsample_conv_layer_params):
            where = f'{name}: upsample_conv_layer_params[{i}]'
            if isinstance(params, (int, float)):
                if not params > 0:
                    raise ValueError(f'{where}: expected a number above 0, found {params}')
                modules.append(_Upsample2D(params, upsampling_mode))
                shape = shape[0], int(shape[1] * params), int(shape[2] * params)
            elif not 3 <= len(params) <= 4:
                raise ValueError(f'{where}: expected a number or (filters, kernel_size, strides[, padding]), found '
                                 f'{params}')
            else:
                last = i == len(upsample_conv_layer_params) - 1
                convolutions, shape = conv_layers(shape, [params], same_padding,
                                                  output_activation if last else activation, kernel_initializer, where)
                modules += convolutions
        self._set_layers(modules)


class SpatialBroadcast(ElementwiseLayerBase):
    """Copies of a vector at every position of an image, with the coordinates of the position appended.

    Args:
        height: height of the image.
        width: width of the image.
    """

    _coordinates: torch.Tensor

    def __init__(self, height: int, width: int):
        super().__init__()
        rows, columns = _coordinates(height)[:, None], _coordinates(width)[None, :]
        self.register_buffer('_coordinates', torch.stack(torch.broadcast_tensors(rows, columns)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[..., D]`` to ``[..., D + 2, height, width]``; the coordinates (row, column) range from -1 to 1."""
        coordinates = self._coordinates.expand(*inputs.shape[:-1], *self._coordinates.shape)
        image = inputs[..., None, None].expand(*inputs.shape, *self._coordinates.shape[1:])
        return torch.cat([image, coordinates], dim=-3)


def _coordinates(size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, size) if size > 1 else torch.zeros(1)


@configurable(module=_MODULE)
def SpatialBroadcastDecodingNetwork(input_size: Count | TensorSpec, output_height: Count,
                                    conv_layer_params: Sequence[tuple], output_width: Count | None = None,
                                    fc_layer_params: Sequence[Count] | None = None,
                                    activation: Activation = torch.relu_, output_activation: Activation = identity,
                                    name: str = 'SpatialBroadcastDecodingNetwork') -> Network:
    """Create a decoder without upsampling, ``[B, input_size]`` to ``[B, channels, output_height, output_width]``.

    Fully connected layers come first, then :class:`SpatialBroadcast`, then convolutions (Watters et al. 2019, "Spatial
    Broadcast Decoder", https://arxiv.org/abs/1901.07017), which makes positions easy to represent. Unlike in the paper,
    sizes and padding of the layers are arguments, and the canvas is enlarged by the pixels that convolutions without
    padding remove, as in Burgess et al. 2019 (arXiv:1901.11390, appendix B.1).

    Args:
        input_size: number of inputs, or the spec of a vector of them.
        output_height: height of the image.
        conv_layer_params: for each convolution ``(filters, kernel_size, strides[, padding])``, with strides of 1. The
            filters of the last one are the channels of the image. The canvas is larger than the image by the amount
            that the convolutions shrink it.
        output_width: width of the image; ``None`` uses the height.
        fc_layer_params: sizes of the fully connected layers.
        activation: activation of all layers except the last.
        output_activation: activation of the last layer.
        name: name of the network.

    Raises:
        SpecError: ``input_size`` is a spec but not of a vector.
        ValueError: there are no convolutions, one is malformed, or their padding is larger than the image.
    """
    if not conv_layer_params:
        raise ValueError(f'{name}: expected at least one layer in conv_layer_params')
    spec = vector_spec(input_size, name)
    layers = _fc_layers(spec.numel, fc_layer_params or (), activation)
    canvas = [output_height, output_height if output_width is None else output_width]
    convolutions: list[nn.Module] = []
    channels = (fc_layer_params[-1] if fc_layer_params else spec.numel) + 2  # and the coordinates
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
    return Sequential(*layers, SpatialBroadcast(*canvas), *convolutions, input_tensor_spec=spec, name=name)
