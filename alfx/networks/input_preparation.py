"""What an encoder does unasked with inputs that it could not take otherwise: categories and several vectors.

Integers with bounds become one-hot vectors, and the vectors of a nest are concatenated. Images, and integers with very
many values, are left to the conf. ``prepare_inputs.enabled = False`` turns all of it off.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import nest
from alfx.gin_utils import configurable
from alfx.layers import ElementwiseLayerBase, Reshape
from alfx.nest.utils import NestConcat
from alfx.tensor_specs import BoundedTensorSpec, Nested, NestedTensorSpec, TensorSpec


class Categories(ElementwiseLayerBase):
    """Integers to one-hot vectors, those of several components one behind the other.

    Args:
        spec: of the integers: their bounds say which values there are.
    """

    _values: torch.Tensor

    def __init__(self, spec: BoundedTensorSpec):
        super().__init__()
        shape = tuple(spec.shape)
        low, high = (np.broadcast_to(x, shape).astype(np.int64) for x in (spec.minimum, spec.maximum))
        values = low[..., None] + np.arange(int((high - low).max()) + 1)
        self._ndim = spec.ndim
        self.register_buffer('_values', torch.from_numpy(values), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[B, *shape]`` to float ``[B, N]``."""
        one_hot = (inputs.unsqueeze(-1) == self._values).to(torch.get_default_dtype())
        return one_hot.flatten(-1 - self._ndim) if self._ndim else one_hot


class Prepared(NamedTuple):
    """How an input is prepared.

    Attributes:
        preprocessors: ``input_preprocessors`` of a network, or None.
        combiner: its ``preprocessing_combiner``, or None.
        description: what is done unasked, '' for nothing.
    """
    preprocessors: Nested
    combiner: Callable | None
    description: str


@configurable
def prepare_inputs(spec: NestedTensorSpec, combiner: Callable | None = None, enabled: bool = True,
                   most_values: int = 1024) -> Prepared:
    """Choose preprocessors for an input for which the conf names none.

    Args:
        spec: nest of specs of the input.
        combiner: the combiner that the conf names, if it does.
        enabled: False to choose none.
        most_values: integers with more values in all their components are left as they are.
    """
    leaves = nest.flatten_with_path(spec)
    if not enabled or not _can_be_prepared(spec, combiner):
        return Prepared(None, combiner, '')
    layers = [_layer_for(leaf, most_values, isinstance(spec, TensorSpec)) for _, leaf in leaves]
    said = [f"{f'{path!r}: ' if path else ''}{_text(leaf)} as one-hot"
            for (path, leaf), layer in zip(leaves, layers) if isinstance(layer, Categories)]
    are_vectors = all(isinstance(layer, (Categories, Reshape)) or leaf.ndim == 1 and leaf.is_continuous
                      for (_, leaf), layer in zip(leaves, layers))
    if combiner is None and not isinstance(spec, TensorSpec) and are_vectors:
        combiner = NestConcat()
        if len(leaves) > 1:
            said.append(', '.join(repr(path) for path, _ in leaves) + ' concatenated')
    is_used = any(layer is not None for layer in layers) and (combiner is not None or isinstance(spec, TensorSpec))
    return Prepared(nest.structure(spec).unflatten(layers) if is_used else None, combiner, '; '.join(said))


def _can_be_prepared(spec: NestedTensorSpec, combiner: Any) -> bool:
    if isinstance(spec, TensorSpec):
        return combiner is None and spec.is_discrete
    return bool(nest.flatten(spec)) and (combiner is None or isinstance(combiner, NestConcat))


def _layer_for(spec: TensorSpec, most_values: int, alone: bool) -> Any:
    """What makes a vector of one part of the input; None to leave it as it is."""
    if spec.is_continuous:
        return Reshape(1) if spec.ndim == 0 and not alone else None
    if not isinstance(spec, BoundedTensorSpec) or spec.ndim > 2:
        return None
    count = float(np.max(np.asarray(spec.maximum, np.float64) - np.asarray(spec.minimum, np.float64), initial=0)) + 1
    return Categories(spec) if count * spec.numel <= most_values else None


def _text(spec: Any) -> str:
    low, high = np.min(spec.minimum), np.max(spec.maximum)
    return f'integers {list(spec.shape)} from {low} to {high}' if spec.ndim else f'an integer from {low} to {high}'
