"""Running averages of nests of tensors: windowed, exponential and adaptive.

The state is in buffers and so in checkpoints. Averages are not updated in evaluation, that is in run mode 'eval' or
after ``.eval()``. The arithmetic is in :mod:`alfx.utils.running_stats`.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from alfx import context, nest
from alfx.gin_utils import Count, Fraction, Positive, configurable
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.running_stats import AdaptiveStats, EMStats, RunningStats, WindowStats
from alfx.utils.running_stats import average_outer_dims as average_outer_dims


class Statistics(nn.Module):
    """Base of averagers and normalizers: statistics of the tensors of a nest.

    Args:
        tensor_spec: nest of specs of the tensors, without batch dimensions.
        make: creates the statistics for one spec.
        name: name of this module.
    """

    def __init__(self, tensor_spec: NestedTensorSpec, make: Callable[[TensorSpec], RunningStats], name: str):
        super().__init__()
        self._name = name
        self._structure = nest.structure(tensor_spec)
        # Torch forbids dots in the names of modules, and names of methods of the container.
        self._stats = nn.ModuleDict({'/' + path.replace('/', '//').replace('.', '/'): make(spec)
                                     for path, spec in nest.flatten_with_path(tensor_spec)})
        self._stats_list: list[Any] = list(self._stats.values())


class _Averager(Statistics):
    """Base of averagers."""

    def update(self, tensor: NestedTensor) -> None:
        """Add one batch, averaged over its leading dimensions; ignored in evaluation and auxiliary phases.

        Args:
            tensor: nest of ``[..., *spec.shape]``, with any number of leading dimensions.

        Raises:
            ValueError: the structure differs from the spec.
        """
        if context.freeze_statistics() or not self.training:
            return
        for stats, leaf in zip(self._stats_list, self._structure.flatten_up_to(tensor)):
            stats.update_mean(leaf)

    def get(self) -> NestedTensor:
        """Return the average, a nest of ``[*spec.shape]``; 0 before the first update."""
        return self._structure.unflatten([stats.mean.clone() for stats in self._stats_list])

    def average(self, tensor: NestedTensor) -> NestedTensor:
        """Call :meth:`update`, then :meth:`get`."""
        self.update(tensor)
        return self.get()

    def forward(self, tensor: NestedTensor) -> NestedTensor:
        """Call :meth:`average`."""
        return self.average(tensor)


@configurable
class WindowAverager(_Averager):
    """Average of the last ``window_size`` batches.

    Args:
        tensor_spec: nest of specs of the averaged tensors, without batch dimensions.
        window_size: number of batches; all have equal weight.
        name: name of this averager.
    """

    def __init__(self, tensor_spec: NestedTensorSpec, window_size: Count, name: str = 'WindowAverager'):
        super().__init__(tensor_spec, lambda spec: WindowStats(spec, window_size), name)


@configurable
class ScalarWindowAverager(WindowAverager):
    """:class:`WindowAverager` of a scalar.

    Args:
        window_size: number of batches.
        dtype: dtype of the scalar, or its name.
        name: name of this averager.
    """

    def __init__(self, window_size: Count, dtype: torch.dtype | str = torch.float32,
                 name: str = 'ScalarWindowAverager'):
        super().__init__(TensorSpec((), dtype), window_size, name)


@configurable
class EMAverager(_Averager):
    """Exponential moving average without bias towards its initial value.

    Args:
        tensor_spec: nest of specs of the averaged tensors, without batch dimensions.
        update_rate: weight of a new batch in (0, 1], or a scheduler of it.
        name: name of this averager.
    """

    def __init__(self, tensor_spec: NestedTensorSpec, update_rate: Fraction | Callable[[], Fraction],
                 name: str = 'EMAverager'):
        super().__init__(tensor_spec, lambda spec: EMStats(spec, update_rate), name)


@configurable
class ScalarEMAverager(EMAverager):
    """:class:`EMAverager` of a scalar.

    Args:
        update_rate: weight of a new batch in (0, 1], or a scheduler of it.
        dtype: dtype of the scalar, or its name.
        name: name of this averager.
    """

    def __init__(self, update_rate: Fraction | Callable[[], Fraction], dtype: torch.dtype | str = torch.float32,
                 name: str = 'ScalarEMAverager'):
        super().__init__(TensorSpec((), dtype), update_rate, name)


@configurable
class AdaptiveAverager(_Averager):
    """Average with the update rate ``speed / (n + speed)`` at batch n; it converges and favors recent batches.

    Args:
        tensor_spec: nest of specs of the averaged tensors, without batch dimensions.
        speed: positive; 1 is the plain average of all batches, larger values favor recent batches.
        name: name of this averager.
    """

    def __init__(self, tensor_spec: NestedTensorSpec, speed: Positive = 10.0, name: str = 'AdaptiveAverager'):
        super().__init__(tensor_spec, lambda spec: AdaptiveStats(spec, speed), name)


@configurable
class ScalarAdaptiveAverager(AdaptiveAverager):
    """:class:`AdaptiveAverager` of a scalar.

    Args:
        speed: positive; 1 is the plain average of all batches, larger values favor recent batches.
        dtype: dtype of the scalar, or its name.
        name: name of this averager.
    """

    def __init__(self, speed: Positive = 10, dtype: torch.dtype | str = torch.float32,
                 name: str = 'ScalarAdaptiveAverager'):
        super().__init__(TensorSpec((), dtype), speed, name)
