"""Categorical distributions that are cheap to construct, sample and evaluate.

They are subclasses of torch's distributions and agree with them numerically. Their construction takes about a
microsecond, and ``log_softmax`` is computed once, when it is first needed. A logit of ``-inf`` is a category of
probability 0: it is never drawn, adds nothing to the entropy and has gradient 0.

All names are importable from :mod:`alfx.utils.dist_utils`.
"""
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from alfx.distributions import nests as dist_nests
from alfx.distributions.nests import rebuilt
from alfx.gin_utils import register_function
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

_TINY = torch.finfo(torch.float32).tiny
_SMALLEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


# Up to this size the exponential race is faster than the search, whose cost is mostly calls.
_RACE_LIMIT = 128


def sample_categories(logits: Tensor, sample_shape: Sequence[int] = ()) -> Tensor:
    """Draw categories.

    Small tensors use an exponential race (the category with the smallest ``E_i / p_i``), large ones the inverse of the
    cumulative distribution; both are exact.

    Args:
        logits: ``[..., N]``, unnormalized log-probabilities.
        sample_shape: shape of the samples to draw from each distribution.

    Returns:
        int64 ``[*sample_shape, ...]`` without a gradient. A category of probability 0 is never drawn.
    """
    logits = logits.detach()
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    probs = torch.softmax(logits, -1)
    if sample_shape:
        probs = probs.expand(*sample_shape, *probs.shape).contiguous()
    if probs.numel() <= _RACE_LIMIT:
        # the tiny number makes 0 / E be 0 even if E is 0
        return (probs / torch.empty_like(probs).exponential_().add_(_TINY)).argmax(-1)
    cumulative = probs.cumsum(-1)
    total = cumulative.narrow(-1, cumulative.shape[-1] - 1, 1)
    # u < 1 implies u * total < total in floating point too, so the index is in range
    return torch.searchsorted(cumulative, torch.rand_like(total).mul_(total), right=True).squeeze(-1)


def _gather_log_prob(log_probs: Tensor, index: Tensor) -> Tensor:
    """Return ``log_probs[..., index]``; ``index`` may have additional (sample) dimensions in front."""
    if index.dtype != torch.int64:
        index = index.long()
    if index.shape == log_probs.shape[:-1]:
        return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    shape = torch.broadcast_shapes(index.shape, log_probs.shape[:-1])
    log_probs = log_probs.expand(*shape, log_probs.shape[-1])
    return log_probs.gather(-1, index.expand(shape).unsqueeze(-1)).squeeze(-1)


def _logits_of(probs: Tensor | None, logits: Tensor | None) -> Tensor:
    if (probs is None) == (logits is None):
        raise ValueError('expected exactly one of probs and logits')
    assert probs is not None
    positive = probs > 0
    log = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return torch.where(positive, log, -torch.inf)


class Categorical(td.Categorical):
    """Categorical distribution over ``0 .. N - 1``.

    Args:
        probs: ``[..., N]`` non-negative weights; they need not sum to 1.
        logits: ``[..., N]`` unnormalized log-probabilities; ``-inf`` excludes a category. Give exactly one of the two.
        validate_args: check the parameters, and values in :meth:`log_prob`.

    Raises:
        ValueError: not exactly one of ``probs`` and ``logits`` is given, or (with ``validate_args``) a row of them
            defines no distribution.
    """

    _validate_args = False
    _log_probs: Tensor | None = None

    def __init__(self, probs: Tensor | None = None, logits: Tensor | None = None, validate_args: bool | None = None):
        self._param = logits if logits is not None and probs is None else _logits_of(probs, logits)
        if validate_args:
            self._validate_args = True
            top = self._param.amax(-1)
            if not bool(torch.isfinite(top).all()):
                raise ValueError('expected each row of logits to have a finite maximum and no nan, found '
                                 f'{self._param[~torch.isfinite(top)][:3]}')

    @property
    def logits(self) -> Tensor:
        """Normalized log-probabilities ``[..., N]``."""
        log_probs = self._log_probs
        # a result computed under no_grad cannot be reused when gradients are needed
        if log_probs is None or (not log_probs.requires_grad and self._param.requires_grad and torch.is_grad_enabled()):
            log_probs = self._log_probs = torch.log_softmax(self._param, -1)
        return log_probs

    @property
    def probs(self) -> Tensor:
        """Probabilities ``[..., N]``."""
        return torch.softmax(self._param, -1)

    @property
    def _num_events(self) -> int:  # type: ignore[override]
        return self._param.shape[-1]

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        return dist_nests.shape_of(self._param)[:-1]

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size()

    @property
    def mode(self) -> Tensor:
        """Most probable category, the first one if several are equal, int64 ``[...]``."""
        return self._param.argmax(-1)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'Categorical':
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return self._like(self._param.expand(*batch_shape, self._num_events))

    def _like(self, logits: Any) -> 'Categorical':
        return rebuilt(type(self), _param=logits)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples, int64 ``[*sample_shape, ...]``."""
        return sample_categories(self._param, sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of the categories ``value``."""
        if self._validate_args:
            self._validate_sample(value)
        return _gather_log_prob(self.logits, value)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, ``[...]``."""
        log_probs = self.logits
        # 0 * log 0 = 0: the bound makes the product with a probability of 0 finite and changes nothing else
        return -(log_probs.exp() * log_probs.clamp_min(_SMALLEST[log_probs.dtype])).sum(-1)

    def __repr__(self) -> str:
        return f'{type(self).__name__}(logits: {dist_nests.shape_of(self._param)})'


class ShiftedCategorical(Categorical):
    """Categorical distribution over ``start .. start + N - 1``, for actions that do not count from 0.

    Args:
        logits: ``[..., N]`` unnormalized log-probabilities.
        start: value of the first category.
        dtype: dtype of the values.
    """

    def __init__(self, logits: Tensor, start: int, dtype: torch.dtype = torch.int64):
        super().__init__(logits=logits)
        self.start = int(start)
        self.dtype = dtype

    def _like(self, logits: Any) -> 'ShiftedCategorical':
        return rebuilt(type(self), _param=logits, start=self.start, dtype=self.dtype)

    @property
    def support(self) -> constraints.Constraint:
        """Set of values that can be drawn."""
        return constraints.integer_interval(self.start, self.start + self._num_events - 1)

    @property
    def mode(self) -> Tensor:
        """Most probable value."""
        return (super().mode + self.start).to(self.dtype)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ...]``."""
        return super().sample(sample_shape).add_(self.start).to(self.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of ``value``."""
        if self._validate_args:
            self._validate_sample(value)
        return _gather_log_prob(self.logits, value.long() - self.start)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all values, ``[N, ...]``."""
        return (super().enumerate_support(expand) + self.start).to(self.dtype)


@lru_cache(maxsize=64)
def _start_tensor(start: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(start, device=device).view(shape)


@lru_cache(maxsize=64)
def _excluded(counts: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(shape[-1], device=device) >= torch.tensor(counts, device=device).view(shape[:-1]).unsqueeze(-1)


class DiagMultivariateCategorical(td.Independent):
    """Joint distribution of independent categoricals, one for each component of an action (MultiDiscrete).

    Args:
        logits: ``[..., *event_shape, N]`` unnormalized log-probabilities, N the largest number of categories.
        num_categories: number of categories of each component; the rest of the N are excluded. ``None``: all N.
        start: value of the first category of each component.
        reinterpreted_batch_ndims: number of dimensions of ``event_shape``.
        dtype: dtype of the values.

    Raises:
        ValueError: ``num_categories`` or ``start`` do not have one entry for each component.
    """

    _validate_args = False
    has_rsample = False
    has_enumerate_support = False

    def __init__(self, logits: Tensor, num_categories: Sequence[int] | np.ndarray | None = None,
                 start: int | Sequence[int] | np.ndarray = 0, reinterpreted_batch_ndims: int = 1,
                 dtype: torch.dtype = torch.int64):
        self.reinterpreted_batch_ndims = reinterpreted_batch_ndims
        self._dtype = dtype
        shape = tuple(logits.shape[-1 - reinterpreted_batch_ndims:])
        if num_categories is not None:
            counts = tuple(int(n) for n in np.broadcast_to(num_categories, shape[:-1]).flat)
            if any(n != shape[-1] for n in counts):
                logits = logits.masked_fill(_excluded(counts, shape, logits.device), -torch.inf)
        starts = tuple(int(n) for n in np.broadcast_to(start, shape[:-1]).flat)
        self._start = starts if any(starts) else ()
        self._base = Categorical(logits=logits)

    @property
    def base_dist(self) -> Categorical:
        """Categorical distributions over ``0 .. N - 1`` of all components."""
        return self._base

    @property
    def logits(self) -> Tensor:
        """Normalized log-probabilities ``[..., *event_shape, N]``."""
        return self._base.logits

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        shape = self._base._batch_shape
        return shape[:len(shape) - self.reinterpreted_batch_ndims]

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        shape = self._base._batch_shape
        return shape[len(shape) - self.reinterpreted_batch_ndims:]

    def _shift(self, device: torch.device) -> Tensor:
        return _start_tensor(self._start, tuple(self._event_shape), device)

    @property
    def mode(self) -> Tensor:
        """Most probable value of each component."""
        return self._values(self._base.mode)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ..., *event_shape]``."""
        return self._values(self._base.sample(sample_shape))

    def _values(self, index: Tensor) -> Tensor:
        return (index + self._shift(index.device) if self._start else index).to(self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of ``value``, summed over the components."""
        if self._start:
            value = value - self._shift(value.device)
        return sum_event(self._base.log_prob(value), self.reinterpreted_batch_ndims)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, summed over the components."""
        return sum_event(self._base.entropy(), self.reinterpreted_batch_ndims)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> 'DiagMultivariateCategorical':
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return self._like(self._base._param.expand(*batch_shape, *self._event_shape, self._base._num_events))

    def _like(self, logits: Tensor) -> 'DiagMultivariateCategorical':
        return rebuilt(type(self), **{**vars(self), '_base': self._base._like(logits)})

    def __repr__(self) -> str:
        return f'{type(self).__name__}(logits: {dist_nests.shape_of(self._base._param)}, start: {self._start or 0})'


def sum_event(value: Tensor, ndims: int) -> Tensor:
    """Return the sum over the last ``ndims`` dimensions."""
    if ndims == 1:
        return value.sum(-1)
    return value.sum(tuple(range(-ndims, 0))) if ndims else value


def categorical_from_spec(logits: Tensor, spec: BoundedTensorSpec) -> Categorical | DiagMultivariateCategorical:
    """Return the categorical distribution over the values of a spec with integer bounds.

    Args:
        logits: ``[..., *spec.shape, N]`` with ``N = num_categories(spec)``.
        spec: its values run from ``minimum`` to ``maximum``, which may differ between components, in steps of 1. They
            have the dtype of the spec if it is a float, otherwise int64.

    Returns:
        :class:`Categorical` for a scalar integer spec that starts at 0, :class:`ShiftedCategorical` for another scalar,
        :class:`DiagMultivariateCategorical` for a spec with a shape.

    Raises:
        SpecError: the spec has no integer bounds, or ``logits`` has the wrong shape.
    """
    count = num_categories(spec)
    if tuple(logits.shape[logits.dim() - spec.ndim - 1:]) != (*spec.shape, count):
        raise SpecError(f'logits for {spec}: expected shape [..., {(*spec.shape, count)}], found {tuple(logits.shape)}')
    dtype = spec.dtype if spec.is_continuous else torch.int64
    if spec.ndim == 0:
        start = int(spec.minimum)
        return ShiftedCategorical(logits, start, dtype) if start or spec.is_continuous else Categorical(logits=logits)
    counts = spec.maximum.astype(np.int64) - spec.minimum.astype(np.int64) + 1
    return DiagMultivariateCategorical(logits, counts, spec.minimum, spec.ndim, dtype)


def num_categories(spec: BoundedTensorSpec) -> int:
    """Return the number of integers within the bounds of a component of a spec; the maximum if components differ.

    Raises:
        SpecError: there are no bounds, or they are not integers.
    """
    if not has_integer_bounds(spec):
        raise SpecError(f'expected a spec with integer bounds, found {spec}')
    return int(np.max(spec.maximum.astype(np.int64) - spec.minimum.astype(np.int64))) + 1


def has_integer_bounds(spec: TensorSpec) -> bool:
    """Return whether a spec, of integers or of floats, has integer bounds."""
    return isinstance(spec, BoundedTensorSpec) and (spec.is_discrete or all(
        bool(np.all(np.abs(bound) < _LARGEST_INTEGER) and np.all(bound == np.round(bound)))
        for bound in (spec.minimum, spec.maximum)))


_LARGEST_INTEGER = 1 << 24  # float32 cannot represent all integers above it


class OneHotCategoricalStraightThrough(td.OneHotCategoricalStraightThrough):
    """One-hot categorical with the straight-through gradient estimator (Bengio et al. 2013, arXiv:1308.3432).

    The gradient of a sample is the gradient of the probabilities.

    Args:
        probs: ``[..., N]`` non-negative weights.
        logits: ``[..., N]`` unnormalized log-probabilities. Give exactly one of the two.
        validate_args: check the parameters.
    """

    _validate_args = False

    def __init__(self, probs: Tensor | None = None, logits: Tensor | None = None, validate_args: bool | None = None):
        self._categorical = Categorical(probs, logits, validate_args)

    @property
    def _batch_shape(self) -> torch.Size:  # type: ignore[override]
        return dist_nests.shape_of(self._categorical._param)[:-1]

    @property
    def _event_shape(self) -> torch.Size:  # type: ignore[override]
        return dist_nests.shape_of(self._categorical._param)[-1:]

    @property
    def mode(self) -> Tensor:
        """One-hot vector of the most probable category, without gradient."""
        return self._one_hot(self._categorical.mode)

    @property
    def rmode(self) -> Tensor:
        """Value of :attr:`mode` with the gradient of the probabilities."""
        return self._straight_through(self.mode)

    def _one_hot(self, index: Tensor) -> Tensor:
        return F.one_hot(index, self._categorical._num_events).to(self._categorical._param.dtype)

    def _straight_through(self, one_hot: Tensor) -> Tensor:
        probs = self._categorical.probs
        return one_hot + (probs - probs.detach())

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return one-hot samples ``[*sample_shape, ..., N]`` without gradient."""
        return self._one_hot(self._categorical.sample(sample_shape))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return one-hot samples ``[*sample_shape, ..., N]`` with the gradient of the probabilities."""
        return self._straight_through(self.sample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of the category at which ``value [..., N]`` is largest."""
        return self._categorical.log_prob(value.argmax(-1))

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        """Return the distribution with its batch dimensions expanded to ``batch_shape``."""
        return self._like(self._categorical.expand(batch_shape))

    def _like(self, categorical: Any) -> Any:
        return rebuilt(type(self), **{**vars(self), '_categorical': categorical})

    def __repr__(self) -> str:
        return f'{type(self).__name__}(logits: {dist_nests.shape_of(self._categorical._param)})'


@register_function(module='alfx.utils.dist_utils')
class OneHotCategoricalGumbelSoftmax(OneHotCategoricalStraightThrough):
    """One-hot categorical with the gradient of a Gumbel softmax (Jang et al. 2017, arXiv:1611.01144).

    Args:
        hard_sample: return one-hot samples with the gradient of the relaxed sample from :meth:`rsample`; otherwise
            return the relaxed samples.
        tau: temperature of the softmax, positive.
        kwargs: ``probs`` or ``logits``, see :class:`OneHotCategoricalStraightThrough`.

    Raises:
        ValueError: ``tau`` is not positive.
    """

    def __init__(self, hard_sample: bool = True, tau: float = 1.0, **kwargs: Any):
        super().__init__(**kwargs)
        if not tau > 0:
            raise ValueError(f'tau: expected a positive number, found {tau}')
        self._hard_sample, self._tau = hard_sample, tau

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, ..., N]`` with gradient."""
        logits = self._categorical.logits
        logits = logits.expand(*sample_shape, *logits.shape)
        gumbel = -torch.empty_like(logits).exponential_().log()
        relaxed = torch.softmax((logits + gumbel) / self._tau, -1)
        return self._one_hot(relaxed.argmax(-1)) + (relaxed - relaxed.detach()) if self._hard_sample else relaxed


@td.register_kl(Categorical, Categorical)
def _kl_categorical(p: Categorical, q: Categorical) -> Tensor:
    # a category of probability 0 under p adds nothing and has gradient 0, whatever its probability under q
    change = torch.nan_to_num(p.logits - q.logits, nan=0.0, posinf=torch.inf, neginf=0.0)
    return (p.logits.exp() * change).sum(-1)


@td.register_kl(OneHotCategoricalStraightThrough, OneHotCategoricalStraightThrough)
def _kl_one_hot(p: Any, q: Any) -> Tensor:
    return _kl_categorical(p._categorical, q._categorical)


_LOGITS = ('logits', )
dist_nests.register(Categorical, _LOGITS, lambda d: ((d._param, ), None),
                    lambda p, _: rebuilt(Categorical, _param=p[0]))
dist_nests.register(ShiftedCategorical, _LOGITS, lambda d: ((d._param, ), (d.start, d.dtype)),
                    lambda p, static: rebuilt(ShiftedCategorical, _param=p[0], start=static[0], dtype=static[1]))
dist_nests.register(
    DiagMultivariateCategorical, _LOGITS,
    lambda d: ((d._base._param, ), (d.reinterpreted_batch_ndims, d._start, d._dtype)),
    lambda p, static: rebuilt(DiagMultivariateCategorical, _base=rebuilt(Categorical, _param=p[0]),
                              reinterpreted_batch_ndims=static[0], _start=static[1], _dtype=static[2]))
dist_nests.register(
    OneHotCategoricalStraightThrough, _LOGITS, lambda d: ((d._categorical._param, ), None),
    lambda p, _: rebuilt(OneHotCategoricalStraightThrough, _categorical=rebuilt(Categorical, _param=p[0])))
dist_nests.register(
    OneHotCategoricalGumbelSoftmax, _LOGITS, lambda d: ((d._categorical._param, ), (d._hard_sample, d._tau)),
    lambda p, static: rebuilt(OneHotCategoricalGumbelSoftmax, _categorical=rebuilt(Categorical, _param=p[0]),
                              _hard_sample=static[0], _tau=static[1]))
