"""Encoding of actions as vectors, for models of the environment and inverse models."""
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import nest
from alfx.networks.action_specs import require_continuous, require_discrete
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


class ActionPart(NamedTuple):
    """Columns ``start .. stop - 1`` of an encoded action.

    Attributes:
        start: first column.
        stop: one more than the last column.
        num_categories: number of columns of each element of a discrete action; 0 for a continuous action.
    """

    start: int
    stop: int
    num_categories: int


class SimpleActionEncoder(nn.Module):
    """Encoder of a nest of actions as one vector.

    Each element of a discrete action becomes a one-hot vector (counted from its minimum); a continuous action is not
    changed. The results are concatenated in the order of the nest.

    Args:
        action_spec: nest of specs. Discrete specs need bounds, which may differ between the elements of an action.

    Attributes:
        parts: layout of the columns.

    Raises:
        SpecError: a discrete action has no bounds, or has too many values for a one-hot encoding.
    """

    def __init__(self, action_spec: NestedTensorSpec):
        super().__init__()
        self._structure = nest.structure(action_spec)
        self._specs: list[Any] = nest.flatten(action_spec)
        self.parts: list[ActionPart] = []
        for i, spec in enumerate(self._specs):
            self._add(f'_values{i}', f'_elements{i}', spec)
        self._size = self.parts[-1].stop if self.parts else 0

    def _add(self, values_name: str, elements_name: str, spec: Any) -> None:
        """Lay out the columns of one action; a column of a discrete action stands for an element and its value."""
        start = self.parts[-1].stop if self.parts else 0
        if spec.is_continuous:
            require_continuous(spec, 'SimpleActionEncoder')
            self.parts.append(ActionPart(start, start + spec.numel, 0))
            return
        require_discrete(spec, 'SimpleActionEncoder')
        low, high = (np.broadcast_to(bound, tuple(spec.shape)).reshape(-1).astype(np.int64)
                     for bound in (spec.minimum, spec.maximum))
        counts = high - low + 1
        values = np.concatenate([np.arange(a, b + 1) for a, b in zip(low, high)])
        elements = np.repeat(np.arange(len(counts)), counts)
        self.register_buffer(values_name, torch.from_numpy(values), persistent=False)
        self.register_buffer(elements_name, torch.from_numpy(elements) if len(counts) > 1 else None, persistent=False)
        if len(set(counts.tolist())) == 1:
            self.parts.append(ActionPart(start, start + len(values), int(counts[0])))
            return
        for count in counts.tolist():
            self.parts.append(ActionPart(start, start + count, count))
            start += count

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the encoded action, float32 ``(D, )``."""
        return TensorSpec((self._size, ))

    def forward(self, inputs: NestedTensor) -> Tensor:
        """Encode a nest of actions ``[..., *spec.shape]`` as float32 ``[..., D]``.

        Raises:
            ValueError: the structure differs from the spec.
        """
        actions: list[Any] = self._structure.flatten_up_to(inputs)
        encoded = [self._encode(i, spec, action) for i, (spec, action) in enumerate(zip(self._specs, actions))]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)

    def _encode(self, i: int, spec: Any, action: Tensor) -> Tensor:
        outer = action.shape[:action.ndim - spec.ndim]
        if spec.is_continuous:
            return action if spec.ndim == 1 else action.reshape(*outer, spec.numel)
        values, elements = getattr(self, f'_values{i}'), getattr(self, f'_elements{i}')
        if elements is None:
            return (action.reshape(*outer, 1) == values).float()
        return (action.reshape(*outer, spec.numel).index_select(-1, elements) == values).float()

    def prediction_loss(self, prediction: Tensor, encoded: Tensor) -> Tensor:
        """Return the loss of a predicted action.

        It is the cross-entropy of each element of a discrete action, plus the mean squared error of each continuous
        action.

        Args:
            prediction: ``[..., D]``: logits for discrete actions, values for continuous ones.
            encoded: ``[..., D]``: the encoded action.

        Returns:
            The loss ``[...]``.
        """
        losses = []
        for start, stop, count in self.parts:
            found, wanted = prediction[..., start:stop], encoded[..., start:stop]
            if not count:
                losses.append((found - wanted).square().mean(-1))
            elif count == stop - start:
                losses.append(-(wanted * F.log_softmax(found, -1)).sum(-1))
            else:
                log_probs = F.log_softmax(found.unflatten(-1, (-1, count)), -1)
                losses.append(-(wanted.unflatten(-1, (-1, count)) * log_probs).sum((-2, -1)))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    def accuracy(self, prediction: Tensor, encoded: Tensor) -> Tensor | None:
        """Share of the elements of discrete actions for which the most likely value is correct.

        Args:
            prediction: ``[..., D]``.
            encoded: ``[..., D]``.

        Returns:
            float32 ``[...]``; ``None`` if there are no discrete actions.
        """
        right = []
        for start, stop, count in self.parts:
            if count:
                found, wanted = (x[..., start:stop].unflatten(-1, (-1, count)).argmax(-1)
                                 for x in (prediction, encoded))
                right.append((found == wanted).float())
        return torch.cat(right, -1).mean(-1) if right else None
