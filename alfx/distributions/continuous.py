"""Distributions over real vectors: diagonal normal, Beta and Cauchy.

They are subclasses of torch's distributions with closed forms instead of layers of wrappers, and their construction
takes about a microsecond. All names are importable from :mod:`alfx.utils.dist_utils`.
"""
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from alfx.distributions import nests as dist_nests
from alfx.distributions.discrete import sum_event
from alfx.distributions.nests import rebuilt, shape_of
from alfx.gin_utils import register_function

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_NORMAL_ENTROPY = 0.5 + _HALF_LOG_2PI


def _broadcast(a: Tensor, b: Tensor | float) -> tuple[Tensor, Tensor]:
    if not isinstance(b, Tensor):
        b = torch.full_like(a, b)
    if a.shape == b.shape:
        return a, b
    first, second = torch.broadcast_tensors(a, b)
    return first, second


class _DiagonalBase(td.Independent):
    """Base class of distributions over vectors; ``_param_shape`` returns the shape of the first parameter."""

    _validate_args = False
    has_rsample = True
    has_enumerate_support = False
    reinterpreted_batch_ndims: int

    def _param_shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        shape = self._param_shape()
        return shape[:len(shape) - self.reinterpreted_batch_ndims]

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        shape = self._param_shape()
        return shape[len(shape) - self.reinterpreted_batch_ndims:]


class DiagMultivariateNormal(_DiagonalBase):
    """Normal distribution with a diagonal covariance.

    Args:
        loc: ``[..., D]`` mean.
        scale: standard deviation, a number or a tensor that broadcasts with ``loc``.
        reinterpreted_batch_ndims: number of trailing dimensions that make up the event.
    """

    _log_scale: Tensor | None = None

    def __init__(self, loc: Tensor, scale: Tensor | float, reinterpreted_batch_ndims: int = 1):
        self.loc, self.scale = _broadcast(loc, scale)
        self.reinterpreted_batch_ndims = reinterpreted_batch_ndims

    def _param_shape(self) -> torch.Size:
        return shape_of(self.loc)

    @property
    def base_dist(self) -> td.Normal:
        """Normal distribution of each element."""
        return td.Normal(self.loc, self.scale, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """All real vectors."""
        return constraints.independent(constraints.real, self.reinterpreted_batch_ndims)

    @property
    def mean(self) -> Tensor:
        """Mean, ``[..., D]``."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """Mode, ``[..., D]``."""
        return self.loc

    @property
    def stddev(self) -> Tensor:
        """Standard deviation, ``[..., D]``."""
        return self.scale

    @property
    def variance(self) -> Tensor:
        """Variance of each element, ``[..., D]``."""
        return self.scale.square()

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ..., D]`` with gradient."""
        return torch.addcmul(self.loc, self.scale, self._noise((*sample_shape, *self.loc.shape)))

    def _noise(self, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Return a sample ``[..., D]`` and its log-density, both with gradients to the parameters.

        The log-density is computed from the noise, because ``(x - loc) / scale`` does not depend on the parameters. For
        the gradient of the log-density with respect to the sample alone use :meth:`log_prob`.
        """
        loc = self.loc
        noise = self._noise(loc.shape)
        log_density = torch.addcmul(self.scale.log(), noise, noise, value=0.5)
        negative = sum_event(log_density, self.reinterpreted_batch_ndims)
        return torch.addcmul(loc, self.scale, noise), torch.rsub(negative, -self._size() * _HALF_LOG_2PI)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ..., D]`` without gradient."""
        noise = self._noise((*sample_shape, *self.loc.shape))
        return noise.mul_(self.scale.detach()).add_(self.loc.detach())

    def _size(self) -> int:
        return self.loc.shape[-1] if self.reinterpreted_batch_ndims == 1 else self._event_shape.numel()

    def _summed_log_scale(self) -> Tensor:
        cached = self._log_scale
        if cached is None or (not cached.requires_grad and self.scale.requires_grad and torch.is_grad_enabled()):
            cached = self._log_scale = sum_event(self.scale.log(), self.reinterpreted_batch_ndims)
        return cached

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value [..., D]``, summed over the event."""
        squares = ((value - self.loc) / self.scale).square()
        normalizer = self._summed_log_scale() + self._size() * _HALF_LOG_2PI
        return torch.sub(sum_event(squares, self.reinterpreted_batch_ndims) * -0.5, normalizer)

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats, summed over the event."""
        return self._summed_log_scale() + self._size() * _NORMAL_ENTROPY

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'DiagMultivariateNormal':
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        shape = (*batch_shape, *self._event_shape)
        return DiagMultivariateNormal(self.loc.expand(shape), self.scale.expand(shape), self.reinterpreted_batch_ndims)

    def __repr__(self) -> str:
        return f'{type(self).__name__}(loc: {shape_of(self.loc)}, scale: {shape_of(self.scale)})'


@td.register_kl(DiagMultivariateNormal, DiagMultivariateNormal)
def _kl_normal(p: DiagMultivariateNormal, q: DiagMultivariateNormal) -> Tensor:
    ratio = (p.scale / q.scale).square()
    shift = ((p.loc - q.loc) / q.scale).square()
    return sum_event(0.5 * (ratio + shift - 1.0 - ratio.log()), p.reinterpreted_batch_ndims)


@register_function(module='alfx.utils.dist_utils')
class Beta(td.Beta):
    """Beta distribution of each element.

    Args:
        concentration1: ``[...]``, alpha; positive.
        concentration0: ``[...]``, beta; positive.
        eps: samples are clipped to ``[eps, 1 - eps]``, so that their log-density is finite; ``None``: the smallest
            number for which ``1 - eps`` is below 1.
        validate_args: check values in :meth:`log_prob`.
    """

    _validate_args = False

    def __init__(self, concentration1: Tensor, concentration0: Tensor, eps: float | None = None,
                 validate_args: bool | None = None):
        self._concentration1, self._concentration0 = _broadcast(concentration1, concentration0)
        self._eps = eps
        if validate_args:
            self._validate_args = True

    @property
    def concentration1(self) -> Tensor:
        """Parameter alpha."""
        return self._concentration1

    @property
    def concentration0(self) -> Tensor:
        """Parameter beta."""
        return self._concentration0

    @property
    def _dirichlet(self) -> td.Dirichlet:  # type: ignore[override]
        return td.Dirichlet(torch.stack([self._concentration1, self._concentration0], -1), validate_args=False)

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        return shape_of(self._concentration1)

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size()

    @property
    def mode(self) -> Tensor:
        """Most probable value; 0.5 if both ends are equally probable."""
        alpha, beta = self._concentration1, self._concentration0
        inner = (alpha - 1.0) / (alpha + beta - 2.0).clamp_min(torch.finfo(alpha.dtype).tiny)
        end = torch.where(alpha == beta, 0.5, (alpha > beta).to(alpha.dtype))
        return torch.where((alpha > 1.0) & (beta > 1.0), inner, end)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ...]`` with gradient."""
        return self._clipped(self._dirichlet.rsample(torch.Size(sample_shape)).select(-1, 0))

    def _clipped(self, value: Tensor) -> Tensor:
        eps = torch.finfo(value.dtype).eps if self._eps is None else self._eps
        return value.clamp(eps, 1.0 - eps)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value`` clipped as samples are, elementwise.

        Rescaling an action from other bounds, such as [20, 25], may round it to 0 or 1, where the density may be
        infinite.
        """
        if self._validate_args:
            self._validate_sample(value)
        value = self._clipped(value)
        alpha, beta = self._concentration1, self._concentration0
        log_beta = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
        return torch.xlogy(alpha - 1.0, value) + torch.special.xlog1py(beta - 1.0, -value) - log_beta

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats, elementwise."""
        alpha, beta = self._concentration1, self._concentration0
        total = alpha + beta
        log_beta = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(total)
        return (log_beta - (alpha - 1.0) * torch.digamma(alpha) - (beta - 1.0) * torch.digamma(beta)
                + (total - 2.0) * torch.digamma(total))

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'Beta':
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return Beta(self._concentration1.expand(batch_shape), self._concentration0.expand(batch_shape), self._eps)

    def __repr__(self) -> str:
        return f'{type(self).__name__}(concentration1: {self._batch_shape}, concentration0: {self._batch_shape})'


class _Diagonal(_DiagonalBase):
    """Base class of distributions with independent elements of ``base_dist`` over the last dimension."""

    reinterpreted_batch_ndims = 1

    def __init__(self, base_dist: td.Distribution):
        self.base_dist = base_dist

    def _param_shape(self) -> torch.Size:
        return getattr(self.base_dist, 'batch_shape', torch.Size())

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return rebuilt(type(self), base_dist=self.base_dist.expand(torch.Size((*batch_shape, *self._event_shape))))


class DiagMultivariateBeta(_Diagonal):
    """Independent Beta distributions over ``[0, 1]^D``.

    Args:
        concentration1: ``[..., D]``, alpha; positive.
        concentration0: ``[..., D]``, beta; positive.
    """

    def __init__(self, concentration1: Tensor, concentration0: Tensor):
        super().__init__(Beta(concentration1, concentration0))


class StableCauchy(td.Cauchy):
    """Cauchy distribution whose samples are finite and not extremely far from the median.

    Args:
        loc: ``[...]`` median.
        scale: ``[...]`` half width at half maximum; positive.
        validate_args: check values in ``log_prob``.
    """

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = False):
        super().__init__(loc, scale, validate_args=validate_args)

    def rsample(self, sample_shape: Sequence[int] = (), clipping_value: float = 0.49) -> Tensor:
        """Return samples ``[*sample_shape, ...]`` with gradient.

        Args:
            sample_shape: shape of the samples to draw.
            clipping_value: the cumulative probability is drawn from ``0.5 +- clipping_value``; with 0.49 samples are
                within about 32 scales of the median.
        """
        loc = self.loc
        centered = (torch.rand((*sample_shape, *loc.shape), dtype=loc.dtype, device=loc.device) - 0.5)
        return loc + torch.tan(math.pi * 2.0 * clipping_value * centered) * self.scale

    @property
    def mode(self) -> Tensor:
        """Mode, which is the median."""
        return self.loc

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'StableCauchy':
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return StableCauchy(self.loc.expand(batch_shape), self.scale.expand(batch_shape))


class DiagMultivariateCauchy(_Diagonal):
    """Independent Cauchy distributions.

    Args:
        loc: ``[..., D]`` median.
        scale: ``[..., D]`` half width at half maximum; positive.
    """

    def __init__(self, loc: Tensor, scale: Tensor):
        super().__init__(StableCauchy(*_broadcast(loc, scale)))

    @property
    def loc(self) -> Tensor:
        """Median, ``[..., D]``."""
        return self.base_dist.loc

    @property
    def scale(self) -> Tensor:
        """Half width at half maximum, ``[..., D]``."""
        return self.base_dist.scale


dist_nests.register(
    DiagMultivariateNormal, ('loc', 'scale'), lambda d: ((d.loc, d.scale), d.reinterpreted_batch_ndims),
    lambda p, ndims: rebuilt(DiagMultivariateNormal, loc=p[0], scale=p[1], reinterpreted_batch_ndims=ndims))
dist_nests.register(
    Beta, ('concentration1', 'concentration0'), lambda d: ((d._concentration1, d._concentration0), d._eps),
    lambda p, eps: rebuilt(Beta, _concentration1=p[0], _concentration0=p[1], _eps=eps))
dist_nests.register(
    StableCauchy, ('loc', 'scale'), lambda d: ((d.loc, d.scale), None),
    lambda p, _: rebuilt(StableCauchy, loc=p[0], scale=p[1], _validate_args=False, _batch_shape=shape_of(p[0]),
                         _event_shape=torch.Size()))


def _register_diagonal(cls: type[_Diagonal]) -> None:
    dist_nests.register(cls, ('base', ), lambda d: ((d.base_dist, ), None), lambda p, _: rebuilt(cls, base_dist=p[0]))


_register_diagonal(DiagMultivariateBeta)
_register_diagonal(DiagMultivariateCauchy)
