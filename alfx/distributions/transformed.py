"""Distributions of transformed samples: squashed, shifted and scaled.

All names are importable from :mod:`alfx.utils.dist_utils`; the transforms are in :mod:`alfx.distributions.transforms`.
"""
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from alfx.distributions import nests as dist_nests
from alfx.distributions.discrete import sum_event
from alfx.distributions.nests import TransformChain, rebuilt
from alfx.distributions.transforms import AffineTransform, is_elementwise

_CACHED = (td.ComposeTransform, td.transforms._InverseTransform)  # they return the last result for the same tensor


class TransformedDistribution(td.TransformedDistribution):
    """Distribution of ``y = f(x)`` for ``x`` of ``base_dist`` and a chain ``f`` of elementwise bijections.

    The last sample is cached with all intermediate values, so the log-density of an action that this distribution drew
    is computed from its own ``x``. The chain is inverted only for other actions.

    Args:
        base_dist: distribution over vectors (or numbers).
        transforms: applied in this order; their tensors (loc and scale of an affine transform) must broadcast to the
            event, so they have no batch dimensions.

    Raises:
        ValueError: a transform is not elementwise; use ``torch.distributions.TransformedDistribution`` for those.
    """

    _validate_args = False
    _last: list[Tensor] | None = None

    def __init__(self, base_dist: td.Distribution, transforms: td.Transform | Sequence[td.Transform]):
        self.base_dist = base_dist
        self.transforms = [transforms] if isinstance(transforms, td.Transform) else list(transforms)
        for transform in self.transforms:
            if not is_elementwise(transform):
                raise ValueError(f'{type(transform).__name__} is not elementwise; use '
                                 'torch.distributions.TransformedDistribution')

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        return getattr(self.base_dist, 'batch_shape', torch.Size())

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        return getattr(self.base_dist, 'event_shape', torch.Size())

    def forward(self, x: Tensor) -> Tensor:
        """Return ``f(x)``."""
        return self._forward(x)[-1]

    def _forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for t in self.transforms:
            values.append(t(values[-1].clone()) if isinstance(t, _CACHED) else t._call(values[-1]))
        return values

    def _inverse(self, y: Tensor) -> list[Tensor]:
        values = [y]
        for t in reversed(self.transforms):
            values.append(t.inv(values[-1].clone()) if isinstance(t, _CACHED) else t._inverse(values[-1]))
        return values[::-1]

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ...]`` with gradient."""
        self._last = self._forward(self.base_dist.rsample(torch.Size(sample_shape)))
        return self._last[-1]

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ...]`` without gradient."""
        with torch.no_grad():
            self._last = self._forward(self.base_dist.sample(torch.Size(sample_shape)))
        return self._last[-1]

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Return a sample ``[...]`` and its log-density, both with gradients to the parameters."""
        base: Any = self.base_dist
        if hasattr(base, 'rsample_with_log_prob'):
            x, log_prob = base.rsample_with_log_prob()
        else:
            x = base.rsample()
            log_prob = base.log_prob(x)
        self._last = self._forward(x)
        return self._last[-1], self._transformed(log_prob, self._last)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value``; exact if it is the last sample, which must not be changed in place."""
        last = self._last
        values = last if last is not None and last[-1] is value else self._inverse(value)
        return self._transformed(self.base_dist.log_prob(values[0]), values)

    def _transformed(self, log_prob: Tensor, values: list[Tensor]) -> Tensor:
        """Return the log-density of the last of ``values``, given the log-density of the first."""
        event_shape = self._event_shape
        for transform, x, y in zip(self.transforms, values, values[1:]):
            if isinstance(transform, AffineTransform):
                log_prob = log_prob - transform.summed_log_det(event_shape)
            else:
                log_prob = log_prob - sum_event(transform.log_abs_det_jacobian(x, y), len(event_shape))
        return log_prob

    @property
    def mode(self) -> Tensor:
        """Transformed mode of the base distribution, ``f(base_dist.mode)``.

        It is the median of ``y`` for a symmetric base, and the mode only if ``f`` is affine. The mode of a strongly
        squashed distribution lies at the limits, which is useless as a greedy action.
        """
        return self.forward(self.base_dist.mode)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return self._like(self.base_dist.expand(torch.Size(batch_shape)))

    def _like(self, base_dist: Any) -> Any:
        return rebuilt(type(self), base_dist=base_dist, transforms=self.transforms)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != '_last'}

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.base_dist}, {self.transforms})'


class AffineTransformedDistribution(TransformedDistribution):
    """Distribution of ``y = loc + scale * x`` for ``x`` of ``base_dist``.

    Args:
        base_dist: distribution over vectors (or numbers).
        loc: offset, a number or a tensor that broadcasts to the event.
        scale: factor, a number or a tensor that broadcasts to the event; not 0.
    """

    def __init__(self, base_dist: td.Distribution, loc: Tensor | float, scale: Tensor | float):
        super().__init__(base_dist, AffineTransform(loc, scale))

    @property
    def _affine(self) -> Any:
        return self.transforms[0]

    @property
    def loc(self) -> Any:
        """Offset."""
        return self._affine.loc

    @property
    def scale(self) -> Any:
        """Factor."""
        return self._affine.scale

    def entropy(self) -> Tensor:
        """Return the differential entropy: the entropy of the base plus ``log |scale|`` for each element of the event.
        """
        scale = torch.as_tensor(self.scale).abs().log()
        return self.base_dist.entropy() + scale.expand(self._event_shape).sum()

    @property
    def mean(self) -> Tensor:
        """Mean."""
        return self.loc + self.scale * self.base_dist.mean

    @property
    def variance(self) -> Tensor:
        """Variance of each element."""
        return self.scale**2 * self.base_dist.variance

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of each element."""
        return abs(self.scale) * self.base_dist.stddev


def _register(cls: type[TransformedDistribution]) -> None:
    dist_nests.register(cls, ('base', ), lambda d: ((d.base_dist, ), TransformChain(d.transforms)),
                        lambda p, chain: rebuilt(cls, base_dist=p[0], transforms=chain.transforms))


_register(TransformedDistribution)
_register(AffineTransformedDistribution)
