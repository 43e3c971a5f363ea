"""Discretization of continuous actions into bins."""
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.gin_utils import Range, configurable
from alfx.networks.action_specs import action_range, require_continuous
from alfx.tensor_specs import NestedTensor, NestedTensorSpec


@configurable
class ActionQuantizer(nn.Module):
    """Conversion between a nest of continuous actions and bins of their D components.

    Bin ``i`` of ``n`` stands for ``low + i (high - low) / (n - 1)``, so the bounds are among the actions, and so is the
    middle if ``n`` is odd. With ``rep_mode='center'`` it stands for the center of the i-th of ``n`` equal parts of the
    range, ``low + (i + 1/2) (high - low) / n``.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of floats.
        action_bins: number of bins n of each component, at least 2.
        rep_mode: actions that the bins stand for, 'boundary' or 'center'.
        sampling_method: 'uniform', bins at equal distances; the only method.

    Attributes:
        num_bins: number of bins of each component.

    Raises:
        SpecError: an action is discrete, a bound is missing or infinite, or the bounds of a component are equal.
        ValueError: ``action_bins`` is below 2, or the mode or method is unknown.
    """

    _middle: Tensor
    _half: Tensor

    def __init__(self, action_spec: NestedTensorSpec, action_bins: Annotated[int, Range(minimum=2)] = 15,
                 rep_mode: Literal['boundary', 'center'] = 'boundary', sampling_method: Literal['uniform'] = 'uniform'):
        super().__init__()
        specs = nest.flatten(action_spec)
        for spec in specs:
            require_continuous(spec, 'ActionQuantizer')
        ranges = [action_range(spec, 'ActionQuantizer', 'the bins divide their range', True) for spec in specs]
        self._structure = nest.structure(action_spec)
        self._shapes = [tuple(spec.shape) for spec in specs]
        self._sizes = [spec.numel for spec in specs]
        self.num_bins = action_bins
        # position = scale * bin + first
        self._scale, self._first = ((2.0 / (action_bins - 1), -1.0) if rep_mode == 'boundary' else
                                    (2.0 / action_bins, 1.0 / action_bins - 1.0))
        self.register_buffer('_middle', torch.cat([middle.reshape(-1) for middle, _ in ranges]), persistent=False)
        self.register_buffer('_half', torch.cat([half.reshape(-1) for _, half in ranges]), persistent=False)

    @property
    def num_components(self) -> int:
        """Number of components of all actions together, D."""
        return sum(self._sizes)

    def position(self, bins: Tensor) -> Tensor:
        """Positions of bins ``[...]`` within their bounds, from -1 to 1."""
        return bins * self._scale + self._first

    def normalized(self, action: NestedTensor) -> Tensor:
        """Components ``[B, D]`` of a nest of actions ``[B, ...]``, scaled from their bounds to [-1, 1]."""
        leaves = [leaf.reshape(leaf.shape[0], leaf.shape[1:].numel()) for leaf in nest.flatten(action)]
        flat = leaves[0] if len(leaves) == 1 else torch.cat(leaves, 1)
        return (flat - self._middle) / self._half

    def bins(self, action: NestedTensor) -> Tensor:
        """Nearest bins, int64 ``[B, D]``, of a nest of actions ``[B, ...]``."""
        return ((self.normalized(action) - self._first) / self._scale).round().clamp(0, self.num_bins - 1).long()

    def action(self, bins: Tensor) -> NestedTensor:
        """Nest of actions ``[B, ...]`` for bins ``[B, D]``."""
        flat = torch.addcmul(self._middle, self._half, self.position(bins))
        leaves = [part.reshape(-1, *shape) for part, shape in zip(flat.split(self._sizes, 1), self._shapes)]
        return self._structure.unflatten(leaves)
