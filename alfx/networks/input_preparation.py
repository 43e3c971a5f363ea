"""Automatic preprocessing of inputs that an encoder does not support directly: categories and nests.

Bounded integers become one-hot vectors, images in a nest pass through convolutions, and the resulting vectors of a nest
are concatenated. Integers with very many values need preprocessors in the conf, and images of integers a data
transformer that scales them. ``prepare_inputs.enabled = False`` disables all of this.
"""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import nest
from alfx.gin_utils import configurable
from alfx.layers import FC, Activation, ElementwiseLayerBase, Initializer, LayerNormOption, Reshape, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.image_layers import conv_layers
from alfx.tensor_specs import BoundedTensorSpec, Nested, NestedTensorSpec, TensorSpec


class Categories(ElementwiseLayerBase):
    """One-hot encoding of integers; the vectors of several components are concatenated.

    Args:
        spec: spec of the integers; its bounds define the categories.
    """

    _values: torch.Tensor

    def __init__(self, spec: BoundedTensorSpec):
        super().__init__()
        shape = tuple(spec.shape)
        low, high = (np.broadcast_to(x, shape).astype(np.int64) for x in (spec.minimum, spec.maximum))
        values = low[..., None] + np.arange(int((high - low).max()) + 1)
        self._ndim = spec.ndim
        self.register_buffer('_values', torch.from_numpy(values), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, *shape]`` to float ``[B, N]``."""
        one_hot = (inputs.unsqueeze(-1) == self._values).to(torch.get_default_dtype())
        return one_hot.flatten(-1 - self._ndim) if self._ndim else one_hot


class Prepared(NamedTuple):
    """Preprocessing chosen for an input.

    Attributes:
        preprocessors: ``input_preprocessors`` of a network, or None.
        combiner: ``preprocessing_combiner`` of a network, or None.
        description: summary of the automatic preprocessing, '' for none.
        has_convolutions: the preprocessors include the convolutions of the network.
    """
    preprocessors: Nested
    combiner: Callable | None
    description: str
    has_convolutions: bool = False


@configurable
def prepare_inputs(spec: NestedTensorSpec, combiner: Callable | None = None, enabled: bool = True,
                   most_values: int = 1024, conv_layer_params: Sequence[tuple] | None = None,
                   image_features: int = 256, activation: Activation = torch.relu_,
                   kernel_initializer: Initializer | None = None, use_conv_ln: LayerNormOption = False) -> Prepared:
    """Choose preprocessors for an input without preprocessors in the conf.

    Args:
        spec: nest of specs of the input.
        combiner: combiner of the conf, if any.
        enabled: pass False to choose none.
        most_values: integers with more values, counted over all components, are not encoded.
        conv_layer_params: convolutions for each image ``(C, H, W)`` of a nest without combiner. By default, images of
            at least 36 x 36 pixels get those of Mnih et al. 2015 (32 filters of 8 x 8, 64 of 4 x 4 and 64 of 3 x 3 with
            strides of 4, 2 and 1). Smaller images get 16 and 32 filters of 3 x 3 with strides of 2, and below 20 x 20
            pixels with strides of 1 and 2.
        image_features: units of the layer after the convolutions of an image.
        activation: activation of these layers.
        kernel_initializer: see ``EncodingNetwork``.
        use_conv_ln: see ``EncodingNetwork``.
    """
    leaves = nest.flatten_with_path(spec)
    if not enabled or not _can_be_prepared(spec, combiner):
        return Prepared(None, combiner, '')
    is_alone = isinstance(spec, TensorSpec)
    # a combiner of the conf may combine the images themselves, such as NestConcat(dim=-3)
    images = set() if is_alone or combiner is not None else {path for path, leaf in leaves
                                                             if leaf.is_continuous and leaf.ndim == 3}
    layers = [_convolutions(leaf, path, conv_layer_params, image_features, activation, kernel_initializer, use_conv_ln)
              if path in images else _layer_for(leaf, most_values, is_alone, combiner is not None)
              for path, leaf in leaves]
    descriptions = [f"{f'{path!r}: ' if path else ''}" +
                    (f'image {list(leaf.shape)} through convolutions' if path in images else
                     f'{_text(leaf)} as one-hot')
                    for (path, leaf), layer in zip(leaves, layers) if path in images or isinstance(layer, Categories)]
    are_vectors = all(path in images or isinstance(layer, (Categories, Reshape)) or
                      leaf.ndim == 1 and leaf.is_continuous for (path, leaf), layer in zip(leaves, layers))
    if combiner is None and not isinstance(spec, TensorSpec) and are_vectors:
        combiner = NestConcat()
        if len(leaves) > 1:
            descriptions.append(', '.join(repr(path) for path, _ in leaves) + ' concatenated')
    is_used = any(layer is not None for layer in layers) and (combiner is not None or isinstance(spec, TensorSpec))
    return Prepared(nest.structure(spec).unflatten(layers) if is_used else None, combiner, '; '.join(descriptions),
                    bool(images))


def _can_be_prepared(spec: NestedTensorSpec, combiner: Any) -> bool:
    if isinstance(spec, TensorSpec):
        return combiner is None and spec.is_discrete
    return bool(nest.flatten(spec)) and (combiner is None or isinstance(combiner, NestConcat))


def _layer_for(spec: TensorSpec, most_values: int, alone: bool, has_combiner: bool) -> Any:
    """Create the layer that turns one part of the input into a vector; ``None`` if it needs no layer."""
    if spec.is_continuous:
        is_flattened = not alone and (spec.ndim == 0 or spec.ndim == 2 and not has_combiner)
        return Reshape(spec.numel) if is_flattened else None
    if not isinstance(spec, BoundedTensorSpec) or spec.ndim > 2:
        return None
    count = float(np.max(np.asarray(spec.maximum, np.float64) - np.asarray(spec.minimum, np.float64), initial=0)) + 1
    return Categories(spec) if count * spec.numel <= most_values else None


def _convolutions(spec: TensorSpec, path: str, conv_layer_params: Sequence[tuple] | None, features: int,
                  activation: Activation, initializer: Initializer | None, use_ln: LayerNormOption) -> Sequential:
    """Create the layers that map an image ``(C, H, W)`` to a vector of ``features`` numbers."""
    if not conv_layer_params:
        size = min(spec.shape[1:])
        small = ((16, 3, 1 if size < 20 else 2, 1), (32, 3, 2, 1))
        conv_layer_params = ((32, 8, 4), (64, 4, 2), (64, 3, 1)) if size >= 36 else small
    layers, shape = conv_layers(spec.shape, conv_layer_params, False, activation, initializer, f'the image {path!r}',
                                use_ln=use_ln)
    size = TensorSpec(shape).numel
    return Sequential(*layers, Reshape(size), FC(size, features, activation, kernel_initializer=initializer))


def _text(spec: Any) -> str:
    low, high = np.min(spec.minimum), np.max(spec.maximum)
    return f'integers {list(spec.shape)} from {low} to {high}' if spec.ndim else f'an integer from {low} to {high}'
