"""Preprocessor networks for one part of a nested observation."""
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from alfx.gin_utils import Count, configurable
from alfx.layers import Activation, ElementwiseLayerBase
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network, ParallelNetworkWrapper
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

_MAX_EMBEDDINGS = 1 << 24


@configurable
class EmbeddingPreprocessor(Network):
    """Embedding of integers, vectors or images as a vector of ``embedding_dim`` numbers.

    Each integer value has a learned vector; the vectors of the components of an integer vector are summed. Other inputs
    are encoded by an :class:`~alfx.networks.encoding_networks.EncodingNetwork` whose last layer has ``embedding_dim``
    outputs. With ``fc_layer_params`` the embedding of integers passes through such layers too.

    Args:
        input_tensor_spec: spec of the input; integers need bounds. ``None`` uses the input spec of the network that has
            this as its preprocessor.
        embedding_dim: number of outputs.
        conv_layer_params: convolutions for images, see ``EncodingNetwork``.
        fc_layer_params: sizes of the layers before the last one.
        activation: activation of all layers except the last.
        last_activation: activation of the last layer.
        name: name of the network.

    Raises:
        SpecError: the input is several tensors, or integers without bounds or with too many values.
        ValueError: ``conv_layer_params`` are set for integers.
    """

    _offset: torch.Tensor

    def __init__(self, input_tensor_spec: TensorSpec | None = None, embedding_dim: Count = 16,
                 conv_layer_params: Sequence[tuple] | None = None, fc_layer_params: Sequence[Count] | None = None,
                 activation: Activation = torch.relu_, last_activation: Activation = identity,
                 name: str = 'EmbeddingPreproc'):
        super().__init__(input_tensor_spec, (), name)
        if input_tensor_spec is None:
            return
        if not isinstance(input_tensor_spec, TensorSpec):
            raise SpecError(f'{name}: expected the spec of one tensor, found {input_tensor_spec}')
        layers = dict(fc_layer_params=fc_layer_params, activation=activation, last_layer_size=embedding_dim,
                      last_activation=last_activation)
        self._embedding: Any = None
        self._encoder: Any = None
        self._last_activation = last_activation
        if not _is_category(input_tensor_spec):
            self._encoder = EncodingNetwork(input_tensor_spec, conv_layer_params=conv_layer_params, name=name,
                                            **layers)  # type: ignore[arg-type]
            return
        if conv_layer_params:
            raise ValueError(f'{name}: conv_layer_params need images, found the input {input_tensor_spec}')
        self._make_table(input_tensor_spec, embedding_dim)
        if fc_layer_params:
            self._encoder = EncodingNetwork(TensorSpec((embedding_dim, )), name=name,
                                            **layers)  # type: ignore[arg-type]

    def _make_table(self, spec: TensorSpec, embedding_dim: int) -> None:
        """Create one table for the values of all components, each component at a separate offset."""
        if not isinstance(spec, BoundedTensorSpec):
            raise SpecError(f'{self._name}: integers need bounds to be embedded, found {spec}')
        low = np.broadcast_to(spec.minimum, tuple(spec.shape)).astype(np.int64).reshape(-1)
        high = np.broadcast_to(spec.maximum, tuple(spec.shape)).astype(np.int64).reshape(-1)
        sizes = high - low + 1
        if sizes.sum() > _MAX_EMBEDDINGS or np.any(sizes <= 0):
            raise SpecError(f'{self._name}: {spec} has too many values for one embedding each')
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - low
        self.register_buffer('_offset', torch.from_numpy(first), persistent=False)
        self._embedding = nn.Embedding(int(sizes.sum()), embedding_dim)

    def forward(self, inputs: torch.Tensor, state: tuple = ()) -> tuple[torch.Tensor, tuple]:
        """Map ``[B, ...]`` to ``[B, embedding_dim]``."""
        if self._embedding is None:
            return self._encoder(inputs)[0], state
        index = inputs.reshape(inputs.shape[0], self._offset.numel()).long() + self._offset
        embedded = self._embedding(index).sum(dim=1)
        if self._encoder is not None:
            return self._encoder(embedded)[0], state
        return self._last_activation(embedded), state


def _is_category(spec: TensorSpec) -> bool:
    """Return whether the values of ``spec`` are categories; uint8 images are not, and their encoder rejects them."""
    return spec.is_discrete and not (spec.ndim == 3 and spec.dtype == torch.uint8)


@configurable
class CosineEmbeddingPreprocessor(Network):
    """Cosine embedding ``cos(pi k x)``, ``k = 0 .. embedding_dim - 1`` (Dabney et al. 2018, arXiv:1806.06923, eq. 4).

    Args:
        input_tensor_spec: spec of the input, of any shape. ``None`` uses the input spec of the network that has this as
            its preprocessor.
        embedding_dim: number of cosines.
        name: name of the network.
    """

    def __init__(self, input_tensor_spec: TensorSpec | None = None, embedding_dim: Count = 64,
                 name: str = 'CosineEmbeddingNetwork'):
        super().__init__(input_tensor_spec, (), name)
        self._cosines = _Cosines(embedding_dim)

    def forward(self, inputs: torch.Tensor, state: tuple = ()) -> tuple[torch.Tensor, tuple]:
        """Map ``[B, ...]`` to ``[B, ..., embedding_dim]``."""
        return self._cosines(inputs), state

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelNetworkWrapper(self._cosines, self._input_tensor_spec, n, 'parallel_' + self._name)


class _Cosines(ElementwiseLayerBase):
    _frequency: torch.Tensor

    def __init__(self, count: int):
        super().__init__()
        self.register_buffer('_frequency', math.pi * torch.arange(count, dtype=torch.float32), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cos(inputs.unsqueeze(-1) * self._frequency)
