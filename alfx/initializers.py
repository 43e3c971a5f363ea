"""Initial values of weights; only :mod:`alfx.layers` needs to call the functions of this module."""
import copy
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import nn

from alfx.gin_utils import configurable
from alfx.utils.math_ops import identity

# Standard deviation of a standard normal variable that is cut off at two standard deviations.
_TRUNCATED_STD = 0.87962566103423978


class InitialWeights(NamedTuple):
    """The scheme that layers without a separate initializer follow; see :func:`initial_weights`."""

    weights: str
    biases: str
    last_layers: str


@configurable
def initial_weights(weights: Literal['variance_scaling', 'torch', 'orthogonal'] = 'variance_scaling',
                    biases: Literal['zeros', 'torch'] = 'zeros', last_layers: Literal['small', 'same'] = 'small'
                    ) -> InitialWeights:
    """Choose the initial weights of all layers without a separate initializer.

    Off-policy algorithms learn much faster with ``'torch'`` than with ``'variance_scaling'``, whose weights are 2.4
    times as large for ReLU networks; the shipped confs choose the scheme of each family by measurement.

    Args:
        weights: ``'variance_scaling'`` (:func:`variance_scaling_init`), ``'torch'`` (uniform in
            ``gain * [-1 / sqrt(fan_in), 1 / sqrt(fan_in)]``, the default of ``torch.nn.Linear``) or ``'orthogonal'``
            (Saxe et al. 2014, arXiv:1312.6120; scaled by the gain of the activation, sqrt(2) for ReLU).
        biases: ``'zeros'`` (the layer's ``bias_init_value``) or ``'torch'`` (uniform in
            ``[-1 / sqrt(fan_in), 1 / sqrt(fan_in)]``, unless the layer is given another value or initializer).
        last_layers: ``'small'`` for the small uniform weights that critics, value networks and deterministic actors
            use for their last layers, or ``'same'`` to initialize them like all other layers.

    Raises:
        ValueError: an unknown scheme.
    """
    return InitialWeights(weights, biases, last_layers)


def default_init(weight: torch.Tensor, gain: float = 1.0, activation: Callable[[torch.Tensor], torch.Tensor] = identity,
                 transposed: bool = False) -> torch.Tensor:
    """Fill ``weight`` ``[out, in, ...]`` in place with the scheme of :func:`initial_weights`.

    Args:
        weight: the weights of one layer, at least rank 2.
        gain: factor of the initial weights.
        activation: the activation after the layer.
        transposed: whether ``weight`` is ``[in, out, ...]``, as in a transposed convolution.

    Returns:
        ``weight``.
    """
    scheme = initial_weights().weights
    if scheme == 'variance_scaling':
        return variance_scaling_init(weight, gain=gain, nonlinearity=activation, transposed=transposed)
    with torch.no_grad():
        if scheme == 'torch':
            bound = gain / math.sqrt(max(1.0, _fan(weight, 'fan_in', transposed)))
            return weight.uniform_(-bound, bound)
        return nn.init.orthogonal_(weight, gain * activation_gain(activation))


def small_last_layer_init(bound: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an initializer: uniform in ``[-bound, bound]``, unless ``initial_weights.last_layers`` is 'same'."""
    return partial(_init_last_layer, bound)


def _init_last_layer(bound: float, weight: torch.Tensor) -> torch.Tensor:
    if initial_weights().last_layers == 'same':
        return default_init(weight)
    return nn.init.uniform_(weight, -bound, bound)


@configurable
def variance_scaling_init(tensor: torch.Tensor, gain: float = 1.0, mode: str = 'fan_in',
                          distribution: str = 'truncated_normal', calc_gain_after_activation: bool = True,
                          nonlinearity: Callable[[torch.Tensor], torch.Tensor] = identity, transposed: bool = False
                         ) -> torch.Tensor:
    """Fill ``tensor`` in place with zero-mean values of variance ``(gain * g)^2 / fan`` (He et al. 2015,
    arXiv:1502.01852, eq. 10).

    ``g = 1 / sqrt(E[f(z)^2])``, ``z`` standard normal, keeps the second moment at ``gain^2`` after the
    activation ``f``; it is sqrt(2) for relu. It is found by numerical integration, so any elementwise ``f`` will
    do; for one that is not elementwise (softmax) it is 1.

    Args:
        tensor: weights ``[out, in, *kernel]``, at least rank 2.
        gain: standard deviation after the activation.
        mode: 'fan_in' (inputs of a unit), 'fan_out' (uses of an input) or 'fan_avg' (their mean).
        distribution: 'truncated_normal' (cut off at two standard deviations; the variance is exact nevertheless),
            'normal' (also called 'untruncated_normal') or 'uniform'.
        calc_gain_after_activation: whether to use ``g``; it concerns the forward pass, so it is used with
            'fan_in' only.
        nonlinearity: the activation ``f`` after the layer.
        transposed: whether the first two dimensions are ``[in, out]``, as in a transposed convolution.

    Returns:
        ``tensor``.

    Raises:
        ValueError: unknown mode or distribution, or ``tensor`` has fewer than two dimensions.
    """
    size = _fan(tensor, mode, transposed)
    if calc_gain_after_activation and mode == 'fan_in':
        gain = gain * activation_gain(nonlinearity)
    std = gain / math.sqrt(max(1.0, size))
    with torch.no_grad():
        if distribution == 'truncated_normal':
            std /= _TRUNCATED_STD
            return nn.init.trunc_normal_(tensor, 0.0, std, -2 * std, 2 * std) if std else tensor.zero_()
        if distribution in ('normal', 'untruncated_normal'):
            return tensor.normal_(0.0, std)
        if distribution == 'uniform':
            return tensor.uniform_(-math.sqrt(3.0) * std, math.sqrt(3.0) * std)
    raise ValueError(f"unknown distribution {distribution!r}; expected 'truncated_normal', 'normal' or 'uniform'")


def _fan(tensor: torch.Tensor, mode: str, transposed: bool) -> float:
    if tensor.ndim < 2:
        raise ValueError(f'fan in and out need weights of at least 2 dimensions, found {tuple(tensor.shape)}')
    receptive_field = math.prod(tensor.shape[2:])
    fan_out, fan_in = tensor.shape[0] * receptive_field, tensor.shape[1] * receptive_field
    if transposed:
        fan_in, fan_out = fan_out, fan_in
    fans = {'fan_in': fan_in, 'fan_out': fan_out, 'fan_avg': (fan_in + fan_out) / 2}
    if mode not in fans:
        raise ValueError(f'unknown mode {mode!r}; expected one of {sorted(fans)}')
    return fans[mode]


def activation_gain(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """``1 / sqrt(E[f(z)^2])`` of an activation ``f``; 1 if it is not elementwise or maps everything to 0."""
    if nonlinearity is identity:
        return 1.0
    if isinstance(nonlinearity, nn.Module):
        return _integrated_gain(copy.deepcopy(nonlinearity).eval())
    try:
        return _cached_gain(nonlinearity)
    except TypeError:  # cannot be hashed
        return _integrated_gain(nonlinearity)


def _integrated_gain(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> float:
    z = torch.linspace(-8.0, 8.0, 4001)
    weight = torch.exp(-0.5 * z * z)
    with torch.no_grad():
        # In a column, as activations such as a softmax over the last dimension expect a batch.
        column = z.unsqueeze(1)
        try:
            values = nonlinearity(column.clone())
        except (RuntimeError, IndexError, ValueError):  # it needs other features, as nn.PReLU with a slope for each
            return 1.0
        if values.shape != column.shape or not _is_elementwise(nonlinearity, z):
            return 1.0
    moment = float((weight * values.squeeze(1).square()).sum() / weight.sum())
    return 1.0 / math.sqrt(moment) if moment > 0 and math.isfinite(moment) else 1.0


_cached_gain = lru_cache(maxsize=256)(_integrated_gain)


def _is_elementwise(nonlinearity: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor) -> bool:
    pairs = torch.stack([z, z.flip(0)], dim=1)
    together = nonlinearity(pairs.clone())
    if together.shape != pairs.shape:
        return False
    alone = nonlinearity(z.unsqueeze(1).clone())
    return torch.allclose(together[:, :1], alone, rtol=1e-4, atol=1e-5)
