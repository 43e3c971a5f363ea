"""Building blocks of networks: modules that map a batch to a batch and have no state.

A layer whose name starts with ``Parallel`` computes ``n`` layers with separate, stacked weights at once;
``layer.make_parallel(n)`` creates one. Read next: :mod:`alfx.layers.fc`, then :mod:`alfx.networks.network` for modules
with state.
"""
from alfx.layers.activations import out_of_place
from alfx.layers.conv import Conv2D, ConvTranspose2D, ParallelConv2D, ParallelConvTranspose2D, Size2d, pair
from alfx.layers.decoding import FixedDecodingLayer
from alfx.layers.elementwise import (AddN, Cast, Detach, Dropout, ElementwiseLayerBase, GetFields, Identity, Lambda,
                                     OneHot, Permute, Reshape, Scale, ScaleGradient, Sum, Transpose)
from alfx.layers.fc import FC, ParallelFC
from alfx.layers.images import RandomCrop, ReplicationPad2d
from alfx.layers.param_layers import ParamConv2D, ParamFC
from alfx.layers.residual_blocks import BottleneckBlock, ResidueBlock
from alfx.layers.sequential import (Branch, NaiveParallelLayer, Sequential, copy_module, first_layers,
                                    make_parallel_input, make_parallel_net, make_parallel_spec, reset_parameters)
from alfx.layers.weights import Activation, Initializer, LayerNormOption, Norm, NormPosition

__all__ = [
    'Activation', 'AddN', 'BottleneckBlock', 'Branch', 'Cast', 'Conv2D', 'ConvTranspose2D', 'Detach', 'Dropout',
    'ElementwiseLayerBase', 'FC', 'FixedDecodingLayer', 'GetFields', 'Identity', 'Initializer', 'Lambda',
    'LayerNormOption', 'NaiveParallelLayer', 'Norm', 'NormPosition', 'OneHot', 'ParallelConv2D',
    'ParallelConvTranspose2D', 'ParallelFC', 'ParamConv2D', 'ParamFC', 'Permute', 'RandomCrop', 'ReplicationPad2d',
    'Reshape', 'ResidueBlock', 'Scale', 'ScaleGradient', 'Sequential', 'Size2d', 'Sum', 'Transpose', 'copy_module',
    'first_layers', 'make_parallel_input', 'make_parallel_net', 'make_parallel_spec', 'out_of_place', 'pair',
    'reset_parameters'
]
