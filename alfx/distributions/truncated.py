"""Truncated distributions, sampled by inverting the cumulative distribution function.

:class:`TruncatedDistribution` takes an :class:`InverseTransformSampling`, which implements one standard distribution
(normal, Cauchy, Student's t with 2 degrees of freedom) that is symmetric about 0.
"""
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from alfx.distributions import nests as dist_nests
from alfx.distributions.nests import rebuilt
from alfx.gin_utils import register_function


class InverseTransformSampling:
    """A standard distribution, symmetric about 0, with its cumulative distribution function and its inverse."""

    def cdf(self, x: Tensor) -> Tensor:
        """Return the probability of a value up to ``x``, elementwise; the relative error is small for ``x < 0``."""
        raise NotImplementedError

    def icdf(self, p: Tensor) -> Tensor:
        """Return the value whose :meth:`cdf` is ``p``, elementwise; the relative error is small for ``p < 0.5``."""
        raise NotImplementedError

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density at ``x``, elementwise."""
        raise NotImplementedError

    def log_prob_within(self, x: Tensor, a: Tensor, b: Tensor, width: Tensor, gap: Tensor) -> Tensor:
        """Return the log-density at ``x`` of the distribution restricted to ``[a, b]``, elementwise.

        Args:
            x: in ``[a, b]``.
            a: lower end.
            b: upper end, at most ``-a``: an interval on one side of 0 is on the left side.
            width: ``b - a``, more accurate than the difference.
            gap: ``b - x``, more accurate than the difference.
        """
        mass = (self.cdf(b) - self.cdf(a)).clamp_min(torch.finfo(a.dtype).tiny)
        return self.log_prob(x) - mass.log()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class NormalITS(InverseTransformSampling):
    """The standard normal distribution."""

    def cdf(self, x: Tensor) -> Tensor:
        """Return the cumulative probability, see the base class."""
        return 0.5 * torch.special.erfc(-math.sqrt(0.5) * x)  # torch.special.ndtr loses all digits in the left tail

    def icdf(self, p: Tensor) -> Tensor:
        """Return the quantile, see the base class."""
        return torch.special.ndtri(p)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density, see the base class."""
        return -0.5 * x.square() - 0.5 * math.log(2.0 * math.pi)

    def log_prob_within(self, x: Tensor, a: Tensor, b: Tensor, width: Tensor, gap: Tensor) -> Tensor:
        """Return the log-density of the restricted distribution, see the base class.

        In a tail, density and mass are computed relative to the density at ``b``: both underflow long before their
        ratio does, and the difference of their logarithms would lose all digits. In a narrow interval, the difference
        of two probabilities would lose more digits than neglecting the curvature of the log-density does; the mass
        there is the integral of an exponential function.
        """
        is_narrow = width < torch.finfo(a.dtype).eps**(1 / 3)
        in_tail = (b < -1.0) & ~is_narrow
        near, far = torch.where(in_tail, -b, 1.0), torch.where(in_tail, -a, 2.0)
        tail_mass = _mills_ratio(near) - torch.exp(-0.5 * width * (near + far)) * _mills_ratio(far)
        narrow = torch.where(is_narrow, width, 1e-3)
        slope = torch.where(is_narrow, 0.5 * width * (a + b), -1.0)
        is_flat = slope > -1e-4
        ratio = torch.where(is_flat, 1.0 + 0.5 * slope, torch.expm1(slope) / torch.where(is_flat, -1.0, slope))
        narrow_mass = narrow * ratio * torch.exp(0.125 * narrow.square())
        relative_mass = torch.where(is_narrow, narrow_mass, torch.where(in_tail, tail_mass, 1.0))
        relative = 0.5 * gap * (b + x) - relative_mass.log()
        is_plain = ~(is_narrow | in_tail)
        plain = super().log_prob_within(torch.where(is_plain, x, 0.0), torch.where(is_plain, a, -1.0),
                                        torch.where(is_plain, b, 1.0), width, gap)
        return torch.where(is_plain, plain, torch.where(is_plain, 0.0, relative))


def _mills_ratio(z: Tensor) -> Tensor:
    """Return ``(1 - cdf(z)) / density(z)`` of the standard normal distribution for ``z >= 0``, elementwise.

    It uses the scaled complementary error function. For large z, where the gradient of that function loses all digits,
    it uses the first terms of the asymptotic series (Abramowitz & Stegun 1964, 26.2.12), with a relative error below
    1e-11.
    """
    middle, inverse = z.clamp_max(_LARGE), 1.0 / z.clamp_min(_LARGE).square()
    series = 1.0 - inverse * (1.0 - 3.0 * inverse * (1.0 - 5.0 * inverse * (1.0 - 7.0 * inverse)))
    return torch.where(z < _LARGE, math.sqrt(0.5 * math.pi) * torch.special.erfcx(math.sqrt(0.5) * middle),
                       series / z.clamp_min(_LARGE))


_LARGE = 25.0
_FAR = 1e30  # stands for infinite bounds, whose gradients would be NaN


class CauchyITS(InverseTransformSampling):
    """The standard Cauchy distribution."""

    def cdf(self, x: Tensor) -> Tensor:
        """Return the cumulative probability, see the base class."""
        return torch.atan2(torch.ones_like(x), -x) / math.pi

    def icdf(self, p: Tensor) -> Tensor:
        """Return the quantile, see the base class."""
        return -1.0 / torch.tan(math.pi * p)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density, see the base class."""
        return -math.log(math.pi) - torch.log1p(x.square())

    def log_prob_within(self, x: Tensor, a: Tensor, b: Tensor, width: Tensor, gap: Tensor) -> Tensor:
        """Return the log-density of the restricted distribution, see the base class.

        For close ends, the difference of two arctangents is computed as one arctangent.
        """
        is_close = width < (-b).clamp_min(1.0)
        low, high = torch.where(is_close, a, -1.0), torch.where(is_close, b, 1.0)
        close_mass = torch.atan2(width, 1.0 + low * high) / math.pi
        return self.log_prob(x) - torch.where(is_close, close_mass, self.cdf(b) - self.cdf(a)).log()


class T2ITS(InverseTransformSampling):
    """Student's t distribution with 2 degrees of freedom: density ``(2 + x^2)^(-3/2)``."""

    def cdf(self, x: Tensor) -> Tensor:
        """Return the cumulative probability, see the base class."""
        root = torch.hypot(x, torch.full_like(x, math.sqrt(2.0)))  # the square of an infinite bound overflows
        tail = 1.0 / (root * (root + x.abs()))
        return torch.where(x < 0, tail, 1.0 - tail)

    def icdf(self, p: Tensor) -> Tensor:
        """Return the quantile, see the base class."""
        return (2.0 * p - 1.0) / torch.sqrt(2.0 * p * (1.0 - p))

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density, see the base class."""
        return -1.5 * torch.log(2.0 + x.square())

    def log_prob_within(self, x: Tensor, a: Tensor, b: Tensor, width: Tensor, gap: Tensor) -> Tensor:
        """Return the log-density of the restricted distribution, see the base class.

        For close ends on one side, the difference of the probabilities is computed with ``b - a`` as a factor.
        """
        is_close = width < (-b).clamp_min(1.0)
        low, high = torch.where(is_close, a, -1.0), torch.where(is_close, b, -1.0)
        root_low, root_high = torch.sqrt(2.0 + low.square()), torch.sqrt(2.0 + high.square())
        one_sided = high < 0
        crossed = torch.where(one_sided, high * root_low + low * root_high, 1.0)
        close_mass = torch.where(one_sided, width * (low + high) / (crossed * root_low * root_high),
                                 0.5 * (high / root_high - low / root_low))
        return self.log_prob(x) - torch.where(is_close, close_mass, self.cdf(b) - self.cdf(a)).log()


class TruncatedDistribution(td.Distribution):
    """A distribution restricted to a box, with independent components.

    Args:
        loc: ``[..., D]`` center of the untruncated distribution; may lie outside the box.
        scale: ``[..., D]`` scale of the untruncated distribution; positive.
        lower_bound: lower bound of the box, a number or ``[D]``; must be below ``upper_bound`` (not checked).
        upper_bound: upper bound of the box, a number or ``[D]``.
        its: the standard form of the untruncated distribution.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True
    _validate_args = False

    def __init__(self, loc: Tensor, scale: Tensor, lower_bound: Tensor | float, upper_bound: Tensor | float,
                 its: InverseTransformSampling):
        self._loc, self._scale = torch.broadcast_tensors(loc, scale)
        self._lower, self._upper = (b.to(loc).clamp(-_FAR, _FAR) if isinstance(b, Tensor) else
                                    min(max(float(b), -_FAR), _FAR) for b in (lower_bound, upper_bound))
        self._its = its

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        return dist_nests.shape_of(self._loc)[:-1]

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        return dist_nests.shape_of(self._loc)[-1:]

    @property
    def loc(self) -> Tensor:
        """Center of the untruncated distribution, ``[..., D]``."""
        return self._loc

    @property
    def scale(self) -> Tensor:
        """Scale of the untruncated distribution, ``[..., D]``."""
        return self._scale

    @property
    def lower_bound(self) -> Tensor | float:
        """Lower bound of the box."""
        return self._lower

    @property
    def upper_bound(self) -> Tensor | float:
        """Upper bound of the box."""
        return self._upper

    @property
    def support(self) -> constraints.Constraint:
        """Constraint that values lie in the box."""
        return constraints.independent(constraints.interval(self._lower, self._upper), 1)

    @property
    def mode(self) -> Tensor:
        """Point of the box nearest to ``loc``."""
        low, high = (torch.as_tensor(b, dtype=self._loc.dtype, device=self._loc.device)
                     for b in (self._lower, self._upper))
        return torch.minimum(torch.maximum(self._loc, low), high)

    def _left_interval(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the standardized box, mirrored if it lies on the right: ``(a, b, mirrored)``.

        The reason is that cumulative probabilities are accurate close to 0, but not close to 1.
        """
        a, b = (self._lower - self._loc) / self._scale, (self._upper - self._loc) / self._scale
        mirrored = a + b > 0
        return torch.where(mirrored, -b, a), torch.where(mirrored, -a, b), mirrored

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ..., D]`` with gradient."""
        a, b, mirrored = self._left_interval()
        low, high = self._its.cdf(a), self._its.cdf(b)
        uniform = torch.rand((*sample_shape, *self._loc.shape), dtype=a.dtype, device=a.device)
        uniform = uniform.clamp_min(0.5 * torch.finfo(a.dtype).eps)  # 0 would look like an underflow of the mass
        p = low + (high - low) * uniform
        # if the probabilities underflow, all the mass is at the end nearest to loc, which is b
        usable = (p > 0) & (p < 1)
        x = torch.where(usable, self._its.icdf(torch.where(usable, p, 0.25)), b)
        x = torch.minimum(torch.maximum(x, a), b)
        value = self._loc + self._scale * torch.where(mirrored, -x, x)
        return value.clamp_min(self._lower).clamp_max(self._upper)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value [..., D]``, summed over the components; ``value`` must be inside the box.
        """
        return self._log_densities(value).sum(-1)

    def _log_densities(self, value: Tensor) -> Tensor:
        """Return the log-density of each component of ``value [..., D]``."""
        a, b, mirrored = self._left_interval()
        x = (value - self._loc) / self._scale
        from_low, to_high = (value - self._lower) / self._scale, (self._upper - value) / self._scale
        width, gap = (self._upper - self._lower) / self._scale, torch.where(mirrored, from_low, to_high)
        density = self._its.log_prob_within(torch.where(mirrored, -x, x), a, b, width, gap)
        return density - torch.log(self._scale)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        shape = (*batch_shape, *self._event_shape)
        return self._like(self._loc.expand(shape), self._scale.expand(shape))

    def _like(self, loc: Any, scale: Any) -> Any:
        return rebuilt(type(self), **{**vars(self), '_loc': loc, '_scale': scale})

    def __repr__(self) -> str:
        return f'{type(self).__name__}(loc: {dist_nests.shape_of(self._loc)}, [{self._lower}, {self._upper}])'


@register_function(module='alfx.utils.dist_utils')
class TruncatedNormal(TruncatedDistribution):
    """A normal distribution restricted to a box; see :class:`TruncatedDistribution` for the arguments."""

    def __init__(self, loc: Tensor, scale: Tensor, lower_bound: Tensor | float, upper_bound: Tensor | float):
        super().__init__(loc, scale, lower_bound, upper_bound, NormalITS())


@register_function(module='alfx.utils.dist_utils')
class TruncatedCauchy(TruncatedDistribution):
    """A Cauchy distribution restricted to a box; see :class:`TruncatedDistribution` for the arguments."""

    def __init__(self, loc: Tensor, scale: Tensor, lower_bound: Tensor | float, upper_bound: Tensor | float):
        super().__init__(loc, scale, lower_bound, upper_bound, CauchyITS())


@register_function(module='alfx.utils.dist_utils')
class TruncatedT2(TruncatedDistribution):
    """A t distribution with 2 degrees of freedom restricted to a box; see :class:`TruncatedDistribution`."""

    def __init__(self, loc: Tensor, scale: Tensor, lower_bound: Tensor | float, upper_bound: Tensor | float):
        super().__init__(loc, scale, lower_bound, upper_bound, T2ITS())


@td.register_kl(TruncatedDistribution, TruncatedDistribution)
def _kl_truncated_normal(p: TruncatedDistribution, q: TruncatedDistribution) -> Tensor:
    """Return ``KL(p || q)`` of two truncated normal distributions, ``[...]``; infinite if q excludes part of p's box.

    It is computed by Gauss-Legendre quadrature in float64 where p is above exp(-40) of its maximum density. The closed
    form uses moments that are differences of densities at the ends, and loses all digits in a tail and in a narrow box.
    """
    if not p._its == q._its == NormalITS():
        raise NotImplementedError(f'the KL divergence of {p} and {q} is not implemented')
    wide_p, wide_q = _in_double(p), _in_double(q)
    a, b, mirrored = wide_p._left_interval()
    peak = b.clamp_max(0.0)
    reach = 80.0 / (torch.sqrt(peak.square() + 80.0) - peak)  # distance to the left at which the density has dropped
    start, end = torch.maximum(a, peak - reach), b.clamp_max(math.sqrt(80.0))
    nodes, weights = (torch.as_tensor(x, device=a.device).view(-1, *[1] * a.dim())
                      for x in np.polynomial.legendre.leggauss(_NODES))
    z = torch.lerp(start, end, 0.5 * (nodes + 1.0))
    value = wide_p._loc + wide_p._scale * torch.where(mirrored, -z, z)
    log_p = wide_p._log_densities(value)
    mass = weights * (log_p - log_p.amax(0, keepdim=True).detach()).exp()
    divergence = (mass * (log_p - wide_q._log_densities(value))).sum(0) / mass.sum(0)
    outside = torch.as_tensor((wide_p._lower < wide_q._lower) | (wide_p._upper > wide_q._upper), device=a.device)
    return torch.where(outside, torch.inf, divergence).sum(-1).to(p._loc.dtype)


def _in_double(dist: TruncatedDistribution) -> TruncatedDistribution:
    low, high = (b.double() if isinstance(b, Tensor) else b for b in (dist._lower, dist._upper))
    return TruncatedDistribution(dist._loc.double(), dist._scale.double(), low, high, dist._its)


_NODES = 64


class _Box:
    """Bounds and standard form of a truncated distribution, comparable and hashable."""

    __slots__ = ('lower', 'upper', 'its')

    def __init__(self, dist: TruncatedDistribution):
        self.lower, self.upper, self.its = dist._lower, dist._upper, dist._its

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, _Box) and self.its == other.its and dist_nests.same_setting(self.lower, other.lower)
                and dist_nests.same_setting(self.upper, other.upper))

    def __hash__(self) -> int:
        return hash(self.its)


def _register(cls: type[TruncatedDistribution]) -> None:
    dist_nests.register(
        cls, ('loc', 'scale'), lambda d: ((d._loc, d._scale), _Box(d)),
        lambda p, box: rebuilt(cls, _loc=p[0], _scale=p[1], _lower=box.lower, _upper=box.upper, _its=box.its))


for _cls in (TruncatedDistribution, TruncatedNormal, TruncatedCauchy, TruncatedT2):
    _register(_cls)
