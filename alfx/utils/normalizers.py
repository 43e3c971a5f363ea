"""Normalizers: they shift and scale nests of tensors by running statistics.

The statistics are in buffers and so in checkpoints. They are not updated in evaluation, that is in run mode 'eval' or
after ``.eval()``. The arithmetic is in :mod:`alfx.utils.running_stats`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context, summary
from alfx.gin_utils import Count, Fraction, NonNegative, Positive, configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.averager import Statistics
from alfx.utils.running_stats import AdaptiveStats, EMStats, RunningStats, WindowStats


@configurable
class Normalizer(Statistics):
    """Base of normalizers, which differ in the weights of past batches.

    With mean m, variance v and second moment ``s = v + m^2`` of a component, x is mapped to

    * ``(x - m) / sqrt(v + eps)`` if ``zero_mean``,
    * ``x / sqrt(v + eps)`` if ``unit_std`` only,
    * ``x / sqrt(s + eps)`` if neither.

    Before the first update m is 0 and v is 1.

    Args:
        tensor_spec: nest of specs of the normalized tensors, without batch dimensions; each component has separate
            statistics.
        auto_update: update the statistics in every call of :meth:`normalize` first.
        zero_mean: subtract the mean.
        unit_std: divide by the standard deviation if the mean is not subtracted.
        variance_epsilon: eps.
        debug_summaries: log the statistics.
        max_dims_to_summarize: number of components of a spec to log.
        name: name of this normalizer and prefix of its summaries.
    """

    def __init__(self, tensor_spec: NestedTensorSpec, auto_update: bool = True, zero_mean: bool = True,
                 unit_std: bool = False, variance_epsilon: NonNegative = 1e-10, debug_summaries: bool = False,
                 max_dims_to_summarize: int = 10, name: str = 'Normalizer'):
        super().__init__(tensor_spec, self._make_stats, name)
        self._auto_update = auto_update
        self._zero_mean = zero_mean
        self._unit_std = unit_std
        self._variance_epsilon = variance_epsilon
        self._debug_summaries = debug_summaries
        self._max_dims_to_summarize = max_dims_to_summarize

    def _make_stats(self, spec: TensorSpec) -> RunningStats:
        raise NotImplementedError(f'{type(self).__name__} does not define statistics; use WindowNormalizer, '
                                  'EMNormalizer or AdaptiveNormalizer')

    def update(self, tensor: NestedTensor) -> None:
        """Add one batch; ignored in evaluation and auxiliary phases.

        Args:
            tensor: nest of ``[..., *spec.shape]``, with any number of leading dimensions.

        Raises:
            ValueError: the structure differs from the spec.
        """
        if context.freeze_statistics() or not self.training:
            return
        for stats, leaf in zip(self._stats_list, self._structure.flatten_up_to(tensor)):
            stats.update(leaf)
        if self._debug_summaries and summary.should_record_summaries():
            self._summarize()

    def set_moments(self, moments: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Set the statistics: mean and variance of each leaf, ``[*spec.shape]``."""
        for stats, (mean, variance) in zip(self._stats_list, moments):
            stats.mean.copy_(mean)
            stats.variance.copy_(variance)

    def normalize(self, tensor: NestedTensor, clip_value: float = -1.0) -> NestedTensor:
        """Update the statistics if ``auto_update`` is set (not in evaluation), then normalize by them.

        Args:
            tensor: nest of ``[..., *spec.shape]``, with any number of leading dimensions.
            clip_value: if positive, clip the result to ``[-clip_value, clip_value]``.

        Returns:
            Nest of floating point tensors of the same shapes, with gradients to the inputs but not to the statistics.

        Raises:
            ValueError: the structure differs from the spec.
        """
        if self._auto_update:
            self.update(tensor)
        return self.transform(tensor, clip_value)

    def transform(self, tensor: NestedTensor, clip_value: float = -1.0) -> NestedTensor:
        """Normalize by the current statistics without updating them; otherwise as :meth:`normalize`."""
        leaves: list[Any] = self._structure.flatten_up_to(tensor)
        return self._structure.unflatten([self._normalize(stats, leaf, clip_value)
                                          for stats, leaf in zip(self._stats_list, leaves)])

    def _normalize(self, stats: RunningStats, tensor: Tensor, clip_value: float) -> Tensor:
        mean, variance = stats.moments()
        if not tensor.is_floating_point():
            tensor = tensor.to(mean.dtype)
        if self._zero_mean:
            tensor = tensor - mean
        elif not self._unit_std:
            variance = torch.addcmul(variance, mean, mean)
        tensor = tensor * torch.rsqrt(variance + self._variance_epsilon)
        return tensor.clamp(-clip_value, clip_value) if clip_value > 0 else tensor

    def forward(self, tensor: NestedTensor, clip_value: float = -1.0) -> NestedTensor:
        """Call :meth:`normalize`."""
        return self.normalize(tensor, clip_value)

    def _summarize(self) -> None:
        with summary.scope(self._name):
            for path, stats in zip(self._stats, self._stats_list):
                mean, variance = (moment.reshape(-1) for moment in stats.moments())
                path = path.rstrip('/')
                for i in range(min(mean.shape[0], self._max_dims_to_summarize)):
                    suffix = f'{path}/{i}' if mean.shape[0] > 1 else path
                    summary.scalar(f'mean{suffix}', mean[i])
                    summary.scalar(f'variance{suffix}', variance[i])


@configurable
class WindowNormalizer(Normalizer):
    """Normalizer by the statistics of the last ``window_size`` batches.

    Args:
        window_size: number of batches; all have equal weight.
        kwargs: arguments of :class:`Normalizer`, except ``max_dims_to_summarize``.
    """

    @takes_arguments_of(Normalizer, without=('max_dims_to_summarize', ), defaults={'name': 'WindowNormalizer'},
                        after={'window_size': 'tensor_spec'})
    def __init__(self, window_size: Count = 1000, **kwargs: Any):
        self._window_size = window_size
        super().__init__(**kwargs)

    def _make_stats(self, spec: TensorSpec) -> RunningStats:
        return WindowStats(spec, self._window_size)


@configurable
class ScalarWindowNormalizer(WindowNormalizer):
    """:class:`WindowNormalizer` of a scalar.

    Args:
        kwargs: arguments of :class:`WindowNormalizer`, except ``tensor_spec``.
    """

    @takes_arguments_of(WindowNormalizer, without=('tensor_spec', ), defaults={'name': 'ScalarWindowNormalizer'})
    def __init__(self, **kwargs: Any):
        super().__init__(TensorSpec(()), **kwargs)


@configurable
class EMNormalizer(Normalizer):
    """Normalizer by exponential moving statistics without bias towards their initial values.

    Args:
        update_rate: weight of a new batch in (0, 1], or a scheduler of it.
        kwargs: arguments of :class:`Normalizer`, except ``max_dims_to_summarize``.
    """

    @takes_arguments_of(Normalizer, without=('max_dims_to_summarize', ), defaults={'name': 'EMNormalizer'},
                        after={'update_rate': 'tensor_spec'})
    def __init__(self, update_rate: Fraction | Callable[[], Fraction] = 0.001, **kwargs: Any):
        self._update_rate = update_rate
        super().__init__(**kwargs)

    def _make_stats(self, spec: TensorSpec) -> RunningStats:
        return EMStats(spec, self._update_rate)


@configurable
class ScalarEMNormalizer(EMNormalizer):
    """:class:`EMNormalizer` of a scalar.

    Args:
        kwargs: arguments of :class:`EMNormalizer`, except ``tensor_spec``.
    """

    @takes_arguments_of(EMNormalizer, without=('tensor_spec', ), defaults={'name': 'ScalarEMNormalizer'},
                        after={'variance_epsilon': 'auto_update'})
    def __init__(self, **kwargs: Any):
        super().__init__(TensorSpec(()), **kwargs)


@configurable
class AdaptiveNormalizer(Normalizer):
    """Normalizer by statistics with the update rate ``speed / (n + speed)`` at batch n, which converge.

    Args:
        speed: positive; 1 weights all batches equally, larger values favor recent batches.
        kwargs: arguments of :class:`Normalizer`, except ``max_dims_to_summarize``.
    """

    @takes_arguments_of(Normalizer, without=('max_dims_to_summarize', ), defaults={'name': 'AdaptiveNormalizer'},
                        after={'speed': 'tensor_spec'})
    def __init__(self, speed: Positive = 8.0, **kwargs: Any):
        self._speed = speed
        super().__init__(**kwargs)

    def _make_stats(self, spec: TensorSpec) -> RunningStats:
        return AdaptiveStats(spec, self._speed)


@configurable
class ScalarAdaptiveNormalizer(AdaptiveNormalizer):
    """:class:`AdaptiveNormalizer` of a scalar.

    Args:
        kwargs: arguments of :class:`AdaptiveNormalizer`, except ``tensor_spec``.
    """

    @takes_arguments_of(AdaptiveNormalizer, without=('tensor_spec', ), defaults={'name': 'ScalarAdaptiveNormalizer'})
    def __init__(self, **kwargs: Any):
        super().__init__(TensorSpec(()), **kwargs)
