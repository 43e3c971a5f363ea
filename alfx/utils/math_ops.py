"""Elementary functions: squashing and clipping, reductions, and invertible transforms of scalars.

Functions that are called at every step can be named in conf files (``@clipped_exp``) and are passed as plain functions.
"""
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alfx import nest
from alfx.gin_utils import Positive, configurable, register_function
from alfx.tensor_specs import NestedTensor


@register_function
def identity(x: Any) -> Any:
    """Return ``x``."""
    return x


@register_function
def squashed_exp(value: Tensor, low: float = -10.0, high: float = 2.0) -> Tensor:
    """Compute ``exp(low + (high - low) (1 + tanh(value)) / 2)``, a standard deviation between ``exp(low)`` and
    ``exp(high)``."""
    return torch.exp(low + 0.5 * (high - low) * (1.0 + torch.tanh(value)))


@register_function
def clipped_exp(value: Tensor, clip_value_min: float = -20, clip_value_max: float = 2) -> Tensor:
    """Exponential of clipped values, ``exp(min(max(value, clip_value_min), clip_value_max))``; elementwise."""
    return torch.exp(value.clamp(clip_value_min, clip_value_max))


@register_function
def swish(x: Tensor) -> Tensor:
    """Swish activation ``x * sigmoid(x)`` (Ramachandran et al. 2017, arXiv:1710.05941), elementwise."""
    return F.silu(x)


def _softplus(x: Tensor, hinge_softness: float) -> Tensor:
    return F.softplus(x, beta=1.0 / hinge_softness)


@register_function
def softlower(x: Tensor, low: float | Tensor, hinge_softness: float = 1.0) -> Tensor:
    """Smooth ``max(x, low)``: ``low + h log(1 + exp((x - low) / h))``, elementwise.

    Args:
        x: tensor of any shape.
        low: bound, a number or a tensor that broadcasts with ``x``; approached but not attained.
        hinge_softness: ``h > 0``; smaller values are closer to the hard bound.
    """
    return low + _softplus(x - low, hinge_softness)


@register_function
def softupper(x: Tensor, high: float | Tensor, hinge_softness: float = 1.0) -> Tensor:
    """Smooth ``min(x, high)``: ``high - h log(1 + exp((high - x) / h))``; see :func:`softlower`."""
    return high - _softplus(high - x, hinge_softness)


@register_function
def softclip_tf(x: Tensor, low: float, high: float, hinge_softness: float = 1.0) -> Tensor:
    """Soft clip of TensorFlow Probability: a soft lower bound, then a soft upper bound, rescaled to reach ``low``.

    ``high - s softplus(high - low - softplus(x - low))``, ``s = (high - low) / softplus(high - low)``, with
    ``softplus(z) = h log(1 + exp(z / h))``; elementwise.

    Args:
        x: tensor of any shape.
        low: lower limit.
        high: upper limit, above ``low``.
        hinge_softness: ``h > 0``.
    """
    width = high - low
    scale = width / (width + hinge_softness * math.log1p(math.exp(-width / hinge_softness)))
    return high - scale * _softplus(width - _softplus(x - low, hinge_softness), hinge_softness)


@register_function
def softclip(x: Tensor, low: float, high: float, hinge_softness: float = 1.0) -> Tensor:
    """Smooth clip, symmetric about the middle: ``low + softplus(x - low) - softplus(x - high)``, elementwise.

    Args:
        x: tensor of any shape.
        low: lower limit.
        high: upper limit, above ``low``.
        hinge_softness: ``h > 0`` in ``softplus(z) = h log(1 + exp(z / h))``.
    """
    return low + _softplus(x - low, hinge_softness) - _softplus(x - high, hinge_softness)


class Softsign(torch.autograd.Function):
    """Softsign ``x / (1 + |x|)`` that stores only its output for the backward pass; use ``Softsign.apply``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute ``x / (1 + |x|)``, elementwise."""
        y = x / (1.0 + x.abs())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Multiply the gradient by ``dy/dx = (1 - |y|)^2``."""
        (y, ) = ctx.saved_tensors
        return grad * (1.0 - y.abs()).square()


class Softsign_(Softsign):
    """:class:`Softsign` in place; use ``Softsign_.apply``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute ``x / (1 + |x|)``, elementwise, overwriting ``x``."""
        x.div_(1.0 + x.abs())
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


@register_function(module='alfx.math')  # without a module the name refers to torch.nn.functional.softsign
def softsign(x: Tensor) -> Tensor:
    """Softsign activation, see :class:`Softsign`."""
    return Softsign.apply(x)


@register_function(module='alfx.math')
def softsign_(x: Tensor) -> Tensor:
    """Softsign activation in place, see :class:`Softsign_`."""
    return Softsign_.apply(x)


# Reductions -------------------------------------------------------------------------------------------------------


def add_ignore_empty(x: Any, y: Any) -> Any:
    """Return ``x + y``, where ``()`` and ``None`` count as nothing."""
    if x is None or (isinstance(x, tuple) and not x):
        return y
    return x if y is None or (isinstance(y, tuple) and not y) else x + y


def max_n(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise maximum of tensors of one shape."""
    return functools.reduce(torch.maximum, inputs)


def min_n(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise minimum of tensors of one shape."""
    return functools.reduce(torch.minimum, inputs)


def add_n(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise sum of tensors of one shape."""
    return functools.reduce(operator.add, inputs)


def mul_n(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise product of tensors of one shape."""
    return functools.reduce(operator.mul, inputs)


def square(x: Tensor) -> Tensor:
    """Elementwise square ``x * x``."""
    return x * x


def weighted_reduce_mean(x: Tensor, weight: Tensor, dim: int | Sequence[int] = ()) -> Tensor:
    """Weighted mean ``sum(x * weight) / sum(weight)``; 0 where the weights sum to 0.

    Args:
        x: values.
        weight: non-negative, broadcasts with ``x``.
        dim: dimensions to reduce; ``()`` means all.
    """
    weight = weight.to(x.dtype).expand_as(x)
    dims = (dim, ) if isinstance(dim, int) else tuple(dim) or tuple(range(x.dim()))
    total = weight.sum(dims)
    return (torch.where(weight != 0, x, 0) * weight).sum(dims) / torch.where(total == 0, torch.ones_like(total), total)


def sum_to_leftmost(value: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions except the first ``dim``."""
    return value if value.dim() <= dim else value.flatten(dim).sum(-1)


def argmin(x: Tensor) -> Tensor:
    """Index of the first smallest element of each row of ``x [B, n]``, int64 ``[B]``.

    ``torch.argmin`` may return any of several equal elements.
    """
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amin(-1, keepdim=True), columns, x.shape[-1]).amin(-1)


def shuffle(values: NestedTensor) -> NestedTensor:
    """Permute the first dimension of all tensors of a nest in the same random order."""
    order = torch.randperm(nest.get_nest_batch_size(values))
    return nest.map_structure(lambda x: x[order.to(x.device)], values)


def normalize_min_max(x: Tensor) -> Tensor:
    """Shift and scale each sample so that its smallest element is 0 and its largest is 1; all 0 if they are equal.

    MuZero normalizes latent states like this (Schrittwieser et al. 2020, arXiv:1911.08265, appendix G).

    Args:
        x: ``[B, ...]``, or one sample of rank 1.
    """
    samples = x.flatten(1) if x.ndim > 1 else x
    low, high = torch.aminmax(samples, dim=-1, keepdim=True)
    width = high - low
    return ((samples - low) / torch.where(width > 0, width, torch.ones_like(width))).view(x.shape)


def binary_neg_entropy(p: Tensor) -> Tensor:
    """Negative entropy ``p log p + (1 - p) log(1 - p)``, elementwise; 0 at ``p = 0`` and ``p = 1``."""
    return torch.xlogy(p, p) + torch.special.xlog1py(1.0 - p, -p)


# Invertible transforms of scalars -----------------------------------------------------------------------------------


class InvertibleTransform:
    """Odd, increasing function of scalars, for predictions of values with very different magnitudes."""

    def transform(self, x: Tensor) -> Tensor:
        """Compute ``h(x)``, elementwise."""
        raise NotImplementedError

    def inverse_transform(self, y: Tensor) -> Tensor:
        """Compute the ``x`` with ``h(x) = y``, elementwise."""
        raise NotImplementedError


@configurable
class SqrtLinearTransform(InvertibleTransform):
    """Transform ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x`` (Pohlen et al. 2018, arXiv:1805.11593).

    Args:
        eps: positive slope that makes the inverse Lipschitz continuous.

    Raises:
        ValueError: ``eps`` is not positive.
    """

    def __init__(self, eps: Positive = 0.001):
        self._eps = eps

    def transform(self, x: Tensor) -> Tensor:
        """Compute ``h(x)``, elementwise."""
        return x / (torch.sqrt(x.abs() + 1.0) + 1.0) + self._eps * x

    def inverse_transform(self, y: Tensor) -> Tensor:
        """Compute the inverse by the quadratic formula, written without cancellation."""
        c = y.abs() + (1.0 + self._eps)
        root = 2.0 * c / (torch.sqrt(1.0 + 4.0 * self._eps * c) + 1.0)
        return torch.sign(y) * ((root - 1.0) * (root + 1.0))


@configurable
class Sqrt1pTransform(InvertibleTransform):
    """Transform ``h(x) = sign(x) (sqrt(|x| + 1) - 1)``."""

    def transform(self, x: Tensor) -> Tensor:
        """Compute ``h(x)``, elementwise."""
        return x / (torch.sqrt(x.abs() + 1.0) + 1.0)

    def inverse_transform(self, y: Tensor) -> Tensor:
        """Compute the inverse, elementwise."""
        return y * (y.abs() + 2.0)


@configurable
class Log1pTransform(InvertibleTransform):
    """Transform ``h(x) = alpha sign(x) log(1 + |x|)``.

    Args:
        alpha: positive scale of the result.

    Raises:
        ValueError: ``alpha`` is not positive.
    """

    def __init__(self, alpha: Positive = 20):
        self._alpha = alpha

    def transform(self, x: Tensor) -> Tensor:
        """Compute ``h(x)``, elementwise."""
        return self._alpha * torch.sign(x) * torch.log1p(x.abs())

    def inverse_transform(self, y: Tensor) -> Tensor:
        """Compute the inverse, elementwise."""
        return torch.sign(y) * torch.expm1(y.abs() / self._alpha)
