"""Elementwise invertible transforms for squashing and shifting distributions.

All names are importable from :mod:`alfx.utils.dist_utils`. The transforms follow ``torch.distributions.transforms``:
``t(x)``, ``t.inv(y)``, ``t.log_abs_det_jacobian(x, y)``. They cache their last ``(x, y)`` pair (``cache_size=1``), so
the inverse of the latest output is exact.
"""
import math
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from alfx.gin_utils import Positive, configurable

_MODULE = 'alfx.utils.dist_utils'

ELEMENTWISE: set[type] = {td.ExpTransform, td.SigmoidTransform, td.TanhTransform, td.SoftplusTransform,
                          td.PowerTransform}
"""Classes whose instances transform each element independently, whatever their arguments."""


def get_invertible(cls: type[td.Transform]) -> type[td.Transform]:
    """Return a subclass of the transform class ``cls`` that caches its last input and output.

    Use it for a transform whose inverse loses precision or does not exist in closed form.
    """

    class Invertible(cls):  # type: ignore[misc, valid-type]

        def __init__(self, *args: Any, **kwargs: Any):
            kwargs.setdefault('cache_size', 1)
            super().__init__(*args, **kwargs)

        def __getstate__(self) -> dict[str, Any]:
            return _without_cache(self)

    Invertible.__name__, Invertible.__qualname__ = cls.__name__, cls.__qualname__
    Invertible.__doc__ = cls.__doc__
    Invertible.__module__ = __name__
    return Invertible


def _without_cache(transform: td.Transform) -> dict[str, Any]:
    """Return the state to copy or pickle, without the cached pair, which may be part of an autograd graph."""
    state = transform.__dict__.copy()
    state['_inv'] = None
    if '_cached_x_y' in state:
        state['_cached_x_y'] = (None, None)
    return state


AbsTransform = get_invertible(td.AbsTransform)
ExpTransform = get_invertible(td.ExpTransform)
PowerTransform = get_invertible(td.PowerTransform)
SigmoidTransform = get_invertible(td.SigmoidTransform)
SoftmaxTransform = get_invertible(td.SoftmaxTransform)
_Affine: Any = get_invertible(td.AffineTransform)
ELEMENTWISE.update((ExpTransform, PowerTransform, SigmoidTransform))


class AffineTransform(_Affine):
    """Affine transform ``y = loc + scale * x``.

    Args:
        loc: offset, a number or a tensor.
        scale: factor, a number or a tensor; not 0.
        event_dim: number of dimensions that make up one event, see ``torch.distributions``.
        cache_size: 1 to cache the last pair, otherwise 0.
    """

    def __init__(self, loc: Tensor | float, scale: Tensor | float, event_dim: int = 0, cache_size: int = 1):
        super().__init__(loc, scale, event_dim=event_dim, cache_size=cache_size)
        self._log_det: tuple[torch.Size, Tensor | float] | None = None

    def summed_log_det(self, event_shape: torch.Size) -> Tensor | float:
        """Return ``log |dy/dx|`` summed over an event: a number, or a 0-d tensor if scale is a tensor."""
        scale = self.scale
        if not isinstance(scale, Tensor):
            return event_shape.numel() * math.log(abs(scale))
        if self._log_det is None or self._log_det[0] != event_shape or scale.requires_grad:
            self._log_det = event_shape, scale.abs().log().expand(event_shape).sum()
        return self._log_det[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**_without_cache(self), '_log_det': None}


class _Elementwise(td.Transform):
    """Base class of the increasing elementwise bijections of this module."""

    domain: constraints.Constraint = constraints.real
    codomain: constraints.Constraint = constraints.real
    bijective = True
    sign = +1

    def __init__(self, cache_size: int = 1):
        super().__init__(cache_size=cache_size)

    def _settings(self) -> tuple:
        return ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash((type(self), self._settings()))

    def __getstate__(self) -> dict[str, Any]:
        return _without_cache(self)

    def with_cache(self, cache_size: int = 1) -> td.Transform:
        """Return the same transform with another ``cache_size``."""
        if self._cache_size == cache_size:
            return self
        cls: Any = type(self)
        return cls(*self._settings(), cache_size=cache_size)


@configurable(module=_MODULE)
class StableTanh(_Elementwise):
    """Transform ``y = tanh(x)``, with a log-determinant that is exact for any ``x``.

    ``log(1 - tanh(x)^2) = 2 log 2 - 2 log(exp(x) + exp(-x))`` neither overflows nor vanishes. The inverse is only used
    for values whose ``x`` is unknown; it first clips ``y`` to the open interval.
    """

    codomain = constraints.interval(-1.0, 1.0)

    def _call(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _inverse(self, y: Tensor) -> Tensor:
        bound = 1.0 - torch.finfo(y.dtype).eps
        return torch.atanh(y.clamp(-bound, bound))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``log |dy/dx|``, elementwise, from ``x`` alone."""
        return torch.rsub(torch.logaddexp(x, -x), 2.0 * math.log(2.0), alpha=2)


@configurable(module=_MODULE)
class Softsign(_Elementwise):
    """Transform ``y = x / (1 + |x|)``; like tanh with tails that approach the limits as ``1/|x|``."""

    codomain = constraints.interval(-1.0, 1.0)

    def _call(self, x: Tensor) -> Tensor:
        return F.softsign(x)

    def _inverse(self, y: Tensor) -> Tensor:
        bound = 1.0 - torch.finfo(y.dtype).eps
        y = y.clamp(-bound, bound)
        return y / (1.0 - y.abs())

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``log |dy/dx| = -2 log(1 + |x|)``, elementwise."""
        return -2.0 * torch.log1p(x.abs())


@configurable(module=_MODULE)
class Softplus(_Elementwise):
    """Transform ``y = h * log(1 + exp(x / h))``, a smooth ``max(x, 0)``.

    Args:
        hinge_softness: ``h > 0``; smaller values are closer to the hinge.
        cache_size: 1 to cache the last pair, otherwise 0.

    Raises:
        ValueError: ``hinge_softness`` is not positive.
    """

    codomain = constraints.positive

    def __init__(self, hinge_softness: Positive = 1.0, cache_size: int = 1):
        super().__init__(cache_size)
        self._softness = float(hinge_softness)

    def _settings(self) -> tuple:
        return (self._softness, )

    def _call(self, x: Tensor) -> Tensor:
        return F.softplus(x, beta=1.0 / self._softness)

    def _inverse(self, y: Tensor) -> Tensor:
        y = y.clamp_min(self._softness * torch.finfo(y.dtype).eps)  # saturated samples are rounded to the limit
        return y + self._softness * torch.log(-torch.expm1(-y / self._softness))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``log |dy/dx| = log sigmoid(x / h)``, elementwise."""
        return F.logsigmoid(x / self._softness)


@configurable(module=_MODULE)
class Softclip(_Elementwise):
    """Smooth clip, ``y = low + h (log(1 + exp((x - low) / h)) - log(1 + exp((x - high) / h)))``.

    The transform is symmetric about the middle of the interval and close to the identity inside it.

    Args:
        low: lower limit, not attained.
        high: upper limit, not attained.
        hinge_softness: ``h > 0``; smaller values are closer to the hard clip.
        cache_size: 1 to cache the last pair, otherwise 0.

    Raises:
        ValueError: ``low >= high`` or ``hinge_softness`` is not positive.
    """

    def __init__(self, low: float, high: float, hinge_softness: Positive = 1.0, cache_size: int = 1):
        super().__init__(cache_size)
        if not low < high:
            raise ValueError(f'Softclip: expected low < high, found low={low}, high={high}')
        self._low, self._high, self._softness = float(low), float(high), float(hinge_softness)

    @property
    def codomain(self) -> constraints.Constraint:  # type: ignore[override]
        """Interval of the outputs."""
        return constraints.interval(self._low, self._high)

    def _settings(self) -> tuple:
        return self._low, self._high, self._softness

    def _call(self, x: Tensor) -> Tensor:
        beta = 1.0 / self._softness
        y = self._low + F.softplus(x - self._low, beta=beta) - F.softplus(x - self._high, beta=beta)
        return y.clamp(self._low, self._high)

    def _inverse(self, y: Tensor) -> Tensor:
        margin = max(self._high - self._low, abs(self._low), abs(self._high)) * torch.finfo(y.dtype).eps
        y = y.clamp(self._low + margin, self._high - margin)
        above, below = (y - self._low) / self._softness, (self._high - y) / self._softness
        return y + self._softness * (torch.log(-torch.expm1(-above)) - torch.log(-torch.expm1(-below)))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``log(sigmoid((x - low) / h) - sigmoid((x - high) / h))``, elementwise, without cancellation."""
        h = self._softness
        constant = math.log(-math.expm1(-(self._high - self._low) / h))
        return F.logsigmoid((x - self._low) / h) + F.logsigmoid((self._high - x) / h) + constant


ELEMENTWISE.update((StableTanh, Softsign, Softplus, Softclip))


@configurable(module=_MODULE)
def Softlower(low: float, hinge_softness: Positive = 1.0) -> td.Transform:
    """Return the transform ``y = low + softplus(x - low)``, a smooth ``max(x, low)``."""
    return td.ComposeTransform([AffineTransform(-low, 1.0), Softplus(hinge_softness), AffineTransform(low, 1.0)],
                               cache_size=1)


@configurable(module=_MODULE)
def Softupper(high: float, hinge_softness: Positive = 1.0) -> td.Transform:
    """Return the transform ``y = high - softplus(high - x)``, a smooth ``min(x, high)``."""
    return td.ComposeTransform([AffineTransform(high, -1.0), Softplus(hinge_softness),
                                AffineTransform(high, -1.0)], cache_size=1)


@configurable(module=_MODULE)
def SoftclipTF(low: float, high: float, hinge_softness: Positive = 1.0) -> td.Transform:
    """Return the soft clip of TensorFlow Probability: a soft lower, then a soft upper bound, rescaled to reach ``low``.

    ``y = high - s softplus(high - low - softplus(x - low))`` with ``s = (high - low) / softplus(high - low)``.

    Raises:
        ValueError: ``low >= high`` or ``hinge_softness`` is not positive.
    """
    if not low < high:
        raise ValueError(f'SoftclipTF: expected low < high, found low={low}, high={high}')
    h = float(hinge_softness)
    width = float(high) - float(low)
    scale = width / (width + h * math.log1p(math.exp(-width / h)))
    return td.ComposeTransform([AffineTransform(-low, 1.0), Softplus(h), AffineTransform(width, -1.0),
                                Softplus(h), AffineTransform(high, -scale)], cache_size=1)


def is_elementwise(transform: td.Transform) -> bool:
    """Return whether ``transform`` maps each element independently, so its log-determinant has the shape of its input.
    """
    return type(transform) in ELEMENTWISE or (transform.domain.event_dim == 0 and transform.codomain.event_dim == 0)
