"""Elementwise invertible transforms for squashing and shifting distributions.

All are importable from :mod:`alfx.utils.dist_utils`. They follow ``torch.distributions.transforms``: ``t(x)``,
``t.inv(y)``, ``t.log_abs_det_jacobian(x, y)``, and keep their last ``(x, y)`` pair (``cache_size=1``) so that
inverting an output that was just computed is exact.
"""
import math
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from alfx.gin_utils import configurable
from alfx.gin_utils.value_checks import Positive

_MODULE = 'alfx.utils.dist_utils'

ELEMENTWISE: set[type] = {td.ExpTransform, td.SigmoidTransform, td.TanhTransform, td.SoftplusTransform,
                          td.PowerTransform}
"""Classes whose instances map each element by itself, whatever their arguments."""


def get_invertible(cls: type[td.Transform]) -> type[td.Transform]:
    """A subclass of the transform class ``cls`` that keeps its last input and output.

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
    """The state to copy or pickle: the cached pair may be part of an autograd graph, which can be neither."""
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
    """``y = loc + scale * x``.

    Args:
        loc: offset, a number or a tensor.
        scale: factor, likewise; not 0.
        event_dim: number of dimensions that make up one event, see ``torch.distributions``.
        cache_size: 1 to keep the last pair, 0 not to.
    """

    def __init__(self, loc: Tensor | float, scale: Tensor | float, event_dim: int = 0, cache_size: int = 1):
        super().__init__(loc, scale, event_dim=event_dim, cache_size=cache_size)
        self._log_det: tuple[torch.Size, Tensor | float] | None = None

    def summed_log_det(self, event_shape: torch.Size) -> Tensor | float:
        """``log |dy/dx|`` summed over an event, the same for every ``x``: a number, or 0-d if scale is a tensor."""
        scale = self.scale
        if not isinstance(scale, Tensor):
            return event_shape.numel() * math.log(abs(scale))
        if self._log_det is None or self._log_det[0] != event_shape or scale.requires_grad:
            self._log_det = event_shape, scale.abs().log().expand(event_shape).sum()
        return self._log_det[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**_without_cache(self), '_log_det': None}


class _Elementwise(td.Transform):
    """Base of the increasing elementwise bijections of this module."""

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
        """The same transform, keeping its last pair if ``cache_size`` is 1 and nothing if it is 0."""
        if self._cache_size == cache_size:
            return self
        cls: Any = type(self)
        return cls(*self._settings(), cache_size=cache_size)


@configurable(module=_MODULE)
class StableTanh(_Elementwise):
    """``y = tanh(x)``, with a log-determinant that is exact for any ``x``.

    ``log(1 - tanh(x)^2) = 2 log 2 - 2 log(exp(x) + exp(-x))`` neither overflows nor vanishes. The inverse is only for
    values whose ``x`` is unknown (actions from elsewhere): it clips ``y`` to the open interval first.
    """

    codomain = constraints.interval(-1.0, 1.0)

    def _call(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _inverse(self, y: Tensor) -> Tensor:
        bound = 1.0 - torch.finfo(y.dtype).eps
        return torch.atanh(y.clamp(-bound, bound))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """``log |dy/dx|``, elementwise, from ``x`` alone."""
        return torch.rsub(torch.logaddexp(x, -x), 2.0 * math.log(2.0), alpha=2)


@configurable(module=_MODULE)
class Softsign(_Elementwise):
    """``y = x / (1 + |x|)``; like tanh with tails that approach the limits as ``1/|x|``."""

    codomain = constraints.interval(-1.0, 1.0)

    def _call(self, x: Tensor) -> Tensor:
        return F.softsign(x)

    def _inverse(self, y: Tensor) -> Tensor:
        bound = 1.0 - torch.finfo(y.dtype).eps
        y = y.clamp(-bound, bound)
        return y / (1.0 - y.abs())

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """``log |dy/dx| = -2 log(1 + |x|)``, elementwise."""
        return -2.0 * torch.log1p(x.abs())


@configurable(module=_MODULE)
class Softplus(_Elementwise):
    """``y = h * log(1 + exp(x / h))``, a smooth ``max(x, 0)``.

    Args:
        hinge_softness: ``h > 0``; the smaller, the closer to the hinge.
        cache_size: 1 to keep the last pair, 0 not to.

    Raises:
        ValueError: ``hinge_softness`` is not positive.
    """

    codomain = constraints.positive

    def __init__(self, hinge_softness: Positive = 1.0, cache_size: int = 1):
        super().__init__(cache_size)
        self._softness = _positive(hinge_softness)

    def _settings(self) -> tuple:
        return (self._softness, )

    def _call(self, x: Tensor) -> Tensor:
        return F.softplus(x, beta=1.0 / self._softness)

    def _inverse(self, y: Tensor) -> Tensor:
        return y + self._softness * torch.log(-torch.expm1(-y / self._softness))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """``log |dy/dx| = log sigmoid(x / h)``, elementwise."""
        return F.logsigmoid(x / self._softness)


@configurable(module=_MODULE)
class Softclip(_Elementwise):
    """``y = low + h (log(1 + exp((x - low) / h)) - log(1 + exp((x - high) / h)))``, a smooth clip.

    Symmetric about the middle of the interval, and close to the identity inside it.

    Args:
        low: lower limit, not attained.
        high: upper limit, not attained.
        hinge_softness: ``h > 0``; the smaller, the closer to the hard clip.
        cache_size: 1 to keep the last pair, 0 not to.

    Raises:
        ValueError: ``low >= high`` or ``hinge_softness`` is not positive.
    """

    def __init__(self, low: float, high: float, hinge_softness: Positive = 1.0, cache_size: int = 1):
        super().__init__(cache_size)
        if not low < high:
            raise ValueError(f'Softclip needs low < high, found low={low}, high={high}')
        self._low, self._high, self._softness = float(low), float(high), _positive(hinge_softness)

    @property
    def codomain(self) -> constraints.Constraint:  # type: ignore[override]
        """The interval of the outputs."""
        return constraints.interval(self._low, self._high)

    def _settings(self) -> tuple:
        return self._low, self._high, self._softness

    def _call(self, x: Tensor) -> Tensor:
        beta = 1.0 / self._softness
        y = self._low + F.softplus(x - self._low, beta=beta) - F.softplus(x - self._high, beta=beta)
        return y.clamp(self._low, self._high)

    def _inverse(self, y: Tensor) -> Tensor:
        margin = (self._high - self._low) * torch.finfo(y.dtype).eps
        y = y.clamp(self._low + margin, self._high - margin)
        above, below = (y - self._low) / self._softness, (self._high - y) / self._softness
        return y + self._softness * (torch.log(-torch.expm1(-above)) - torch.log(-torch.expm1(-below)))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """``log(sigmoid((x - low) / h) - sigmoid((x - high) / h))``, elementwise, without cancellation."""
        h = self._softness
        constant = math.log(-math.expm1(-(self._high - self._low) / h))
        return F.logsigmoid((x - self._low) / h) + F.logsigmoid((self._high - x) / h) + constant


ELEMENTWISE.update((StableTanh, Softsign, Softplus, Softclip))


@configurable(module=_MODULE)
def Softlower(low: float, hinge_softness: Positive = 1.0) -> td.Transform:
    """``y = low + softplus(x - low)``: a smooth ``max(x, low)``."""
    return td.ComposeTransform([AffineTransform(-low, 1.0), Softplus(hinge_softness), AffineTransform(low, 1.0)],
                               cache_size=1)


@configurable(module=_MODULE)
def Softupper(high: float, hinge_softness: Positive = 1.0) -> td.Transform:
    """``y = high - softplus(high - x)``: a smooth ``min(x, high)``."""
    return td.ComposeTransform([AffineTransform(high, -1.0), Softplus(hinge_softness),
                                AffineTransform(high, -1.0)], cache_size=1)


@configurable(module=_MODULE)
def SoftclipTF(low: float, high: float, hinge_softness: Positive = 1.0) -> td.Transform:
    """The soft clip of TensorFlow Probability: a soft lower bound, then a soft upper one, rescaled to reach ``low``.

    ``y = high - s softplus(high - low - softplus(x - low))`` with ``s = (high - low) / softplus(high - low)``.

    Raises:
        ValueError: ``low >= high`` or ``hinge_softness`` is not positive.
    """
    if not low < high:
        raise ValueError(f'SoftclipTF needs low < high, found low={low}, high={high}')
    h = _positive(hinge_softness)
    width = float(high) - float(low)
    scale = width / (width + h * math.log1p(math.exp(-width / h)))
    return td.ComposeTransform([AffineTransform(-low, 1.0), Softplus(h), AffineTransform(width, -1.0),
                                Softplus(h), AffineTransform(high, -scale)], cache_size=1)


def _positive(hinge_softness: float) -> float:
    if not hinge_softness > 0:
        raise ValueError(f'hinge_softness must be positive, found {hinge_softness}')
    return float(hinge_softness)


def is_elementwise(transform: td.Transform) -> bool:
    """Whether ``transform`` maps each element by itself, so that its log-determinant has the shape of its input."""
    return type(transform) in ELEMENTWISE or (transform.domain.event_dim == 0 and transform.codomain.event_dim == 0)
