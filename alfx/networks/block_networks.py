"""Encoders of residual blocks for actors and critics of continuous control.

With W fully connected layers, LN layer norm, BN batch norm, h the hidden size and ``l2(x) = x / |x|``:

=========  =====================================  =====================================  =====================
block      input                                  block                                  output
=========  =====================================  =====================================  =====================
'simba'    ``x = W x``                            ``x + W2 relu(W1 LN x)``, W1 to 4 h    ``LN x``
'bro'      ``x = relu(LN(W x))``                  ``x + LN(W2 relu(LN(W1 x)))``          ``x``
'hyper'    ``x = l2(c * W l2(cat(x, 3)))``        ``l2(x + a * (l2(f(x)) - x))``,        ``c * W x``
                                                  ``f(x) = W2 relu(c * W1 x)``, to 4 h
'flash'    ``x = W BN x``                         ``x + relu(BN(W2 relu(BN(W1 x))))``,   RMS norm of x
                                                  W1 to 4 h
=========  =====================================  =====================================  =====================

SimBa: Lee et al. 2024 (arXiv:2410.09754). BRO: Nauman et al. 2024 (arXiv:2405.16158). SimbaV2, 'hyper': Lee et al. 2025
(arXiv:2502.15280); the vectors a and c are trained, and rows of W have norm 1. FlashSAC, 'flash' (arXiv:2604.04539):
rows of W have norm 1, and scale and shift of a norm of n features together have norm ``sqrt(n)``. Unlike in SimbaV2,
mean and scale of a policy share one output layer. Read next: :mod:`alfx.networks.encoding_networks`.
"""
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import Count, configurable
from alfx.layers import FC, Activation, ElementwiseLayerBase, Initializer, Reshape, Sequential, make_parallel_net
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.norm_layers import BatchNorm, ParallelLayerNorm, RmsNorm
from alfx.tensor_specs import Nested, NestedTensorSpec, TensorSpec
from alfx.utils.math_ops import identity

_orthogonal = nn.init.orthogonal_
_he_normal = partial(nn.init.kaiming_normal_, nonlinearity='relu')
_scaled_orthogonal = partial(nn.init.orthogonal_, gain=2.0**0.5)


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` of vectors that can be stacked."""

    def make_parallel(self, n: int) -> ParallelLayerNorm:
        """Create ``n`` stacked layers like this one."""
        return ParallelLayerNorm(n, self.normalized_shape[0], self.eps)


class _AroundLayers(nn.Module):
    """Base class of modules that add a computation without weights to ``layers``."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self._layers = layers

    def make_parallel(self, n: int) -> nn.Module:
        """Create ``n`` stacked layers like this one."""
        return type(self)(make_parallel_net(self._layers, n))  # type: ignore[arg-type]


class Residual(_AroundLayers):
    """Residual connection ``x + layers(x)``.

    Args:
        layers: module with as many outputs as inputs.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, ..., size]`` to the same shape."""
        return inputs + self._layers(inputs)


def _l2(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1)


class HyperScale(nn.Module):
    """Trained factor of each feature, ``y = parameter * initial / scale * x``, where ``parameter`` starts at ``scale``.

    With a small ``scale`` the factor changes faster at the same step size of the optimizer (SimbaV2).

    Args:
        size: number of features.
        initial: initial factor.
        scale: initial value of the parameter.
        n: number of stacked layers; ``None`` for a single layer.
    """

    def __init__(self, size: int, initial: float, scale: float, n: int | None = None):
        super().__init__()
        self._arguments, self._scale, self._ratio = (size, initial, scale), scale, initial / scale
        self.weight = nn.Parameter(torch.full((size, ) if n is None else (n, size), scale))

    def reset_parameters(self) -> None:
        """Reset to the initial factor."""
        nn.init.constant_(self.weight, self._scale)

    def make_parallel(self, n: int) -> 'HyperScale':
        """Create ``n`` stacked layers like this one."""
        return HyperScale(*self._arguments, n=n)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scale ``[..., size]``, or ``[..., n, size]`` with ``n``."""
        return inputs * (self.weight * self._ratio)


class HyperEmbedding(_AroundLayers):
    """``l2(c * W l2(cat(x, 3)))``: maps vectors to the unit sphere; the appended 3 preserves their length.

    Args:
        layers: the module ``c * W``.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, ..., size]`` to ``[B, ..., h]`` of norm 1."""
        return _l2(self._layers(_l2(F.pad(inputs, (0, 1), value=3.0))))


class HyperBlock(nn.Module):
    """Block on the sphere, ``l2(x + a * (l2(f(x)) - x))``.

    Args:
        layers: the module f.
        rate: the module ``a *``.
    """

    def __init__(self, layers: nn.Module, rate: nn.Module):
        super().__init__()
        self._layers, self._rate = layers, rate

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, ..., h]`` of norm 1 to the same."""
        return _l2(inputs + self._rate(_l2(self._layers(inputs)) - inputs))

    def make_parallel(self, n: int) -> 'HyperBlock':
        """Create ``n`` stacked layers like this one."""
        return HyperBlock(make_parallel_net(self._layers, n),  # type: ignore[arg-type]
                          make_parallel_net(self._rate, n))  # type: ignore[arg-type]


class _RaisedRelu(ElementwiseLayerBase):
    """ReLU that never outputs a vector of zeros, which l2 could not scale."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(inputs) + 1e-8


def _simba(size: int, h: int, num_blocks: int) -> list[nn.Module]:
    layer = partial(FC, kernel_initializer=_he_normal)
    blocks = [Residual(Sequential(LayerNorm(h), layer(h, 4 * h, torch.relu_), layer(4 * h, h)))
              for _ in range(num_blocks)]
    return [FC(size, h, kernel_initializer=_orthogonal), *blocks, LayerNorm(h)]


def _bro(size: int, h: int, num_blocks: int) -> list[nn.Module]:
    layer = partial(FC, use_ln=True, kernel_initializer=_scaled_orthogonal)
    return [layer(size, h, torch.relu_),
            *[Residual(Sequential(layer(h, h, torch.relu_), layer(h, h))) for _ in range(num_blocks)]]


def _hyper(size: int, h: int, num_blocks: int) -> list[nn.Module]:
    layer = partial(FC, use_bias=False, unit_weights=True, kernel_initializer=_orthogonal)
    c = (2.0 / h)**0.5
    blocks = [HyperBlock(Sequential(layer(h, 4 * h), HyperScale(4 * h, c / 2, c / 2), _RaisedRelu(), layer(4 * h, h)),
                         HyperScale(h, 1.0 / (num_blocks + 1), h**-0.5)) for _ in range(num_blocks)]
    return [HyperEmbedding(Sequential(layer(size + 1, h), HyperScale(h, c, c))), *blocks, layer(h, h),
            HyperScale(h, 1.0, 1.0)]


def _flash(size: int, h: int, num_blocks: int) -> list[nn.Module]:
    norm = partial(BatchNorm, unit=True)
    layer = partial(FC, activation=torch.relu_, norm=norm, unit_weights=True, kernel_initializer=_orthogonal)
    blocks = [Residual(Sequential(layer(h, 4 * h), layer(4 * h, h))) for _ in range(num_blocks)]
    return [norm(size), FC(size, h, use_bias=False, unit_weights=True, kernel_initializer=_orthogonal), *blocks,
            RmsNorm(h, unit=True)]


_BLOCKS: dict[str, Callable[[int, int, int], list[nn.Module]]] = {'simba': _simba, 'bro': _bro, 'hyper': _hyper,
                                                                  'flash': _flash}


@configurable
class BlockEncodingNetwork(EncodingNetwork):
    """Encoder of residual blocks; see the module docstring for the kinds of blocks.

    Use it as ``CriticNetwork.joint_encoder_ctor`` and ``ActorDistributionNetworkBase.encoding_network_ctor``. In a
    stack of ``n`` networks each layer is one batched product. With 'hyper' and 'flash' the rows of the last layer have
    norm 1 too; bind ``actor/FC.unit_weights = True`` to include the output layers of a policy.

    Args:
        input_tensor_spec: nest of specs of the input.
        output_tensor_spec: reshapes the output to the shape of this spec.
        block: kind of the blocks: 'simba', 'bro', 'hyper' or 'flash'.
        hidden_size: number h of features between blocks.
        num_blocks: number of blocks.
        input_preprocessors: see :class:`~alfx.networks.encoding_networks.EncodingNetwork`.
        preprocessing_combiner: see ``EncodingNetwork``.
        last_layer_size: size of an additional last layer with ``last_activation``.
        last_activation: activation of the last layer; ``None``: none.
        last_kernel_initializer: initializer of the last layer.
        name: name of the network.

    Raises:
        SpecError: the layers do not support the input; the message says what to do.
        ValueError: ``block`` is unknown, or the outputs do not fit ``output_tensor_spec``.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec | None = None,
                 block: Literal['simba', 'bro', 'hyper', 'flash'] = 'simba', hidden_size: Count = 128,
                 num_blocks: Count = 1, input_preprocessors: Nested = None,
                 preprocessing_combiner: Callable | None = None, last_layer_size: Count | None = None,
                 last_activation: Activation | None = None,
                 last_kernel_initializer: Initializer | None = None, name: str = 'BlockEncodingNetwork'):
        super().__init__(input_tensor_spec, input_preprocessors=input_preprocessors,
                         preprocessing_combiner=preprocessing_combiner, name=name)
        modules: list[Any] = [*self._chain, *_BLOCKS[block](self._output_spec.numel, hidden_size, num_blocks)]
        size = hidden_size
        if last_layer_size is None and (last_activation or last_kernel_initializer) is not None:
            raise ValueError(f'{name}: last_activation and last_kernel_initializer need a last_layer_size')
        if last_layer_size is not None:
            size = last_layer_size
            unit: dict[str, Any] = {'unit_weights': True} if block in ('hyper', 'flash') else {}
            modules.append(FC(hidden_size, size, last_activation or identity,
                              kernel_initializer=last_kernel_initializer, **unit))
        self._output_spec = TensorSpec((size, ) if output_tensor_spec is None else output_tensor_spec.shape)
        if self._output_spec.numel != size:
            raise ValueError(f'{name}: the {size} outputs cannot be reshaped to {output_tensor_spec}')
        if self._output_spec.ndim != 1:
            modules.append(Reshape(*self._output_spec.shape))
        self._set_layers(modules)
