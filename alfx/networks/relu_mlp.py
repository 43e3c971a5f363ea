"""Multi-layer perceptron with an explicit Jacobian: with ReLU it is a product of masked weights."""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx.gin_utils import configurable
from alfx.layers.fc import FC
from alfx.layers.weights import Activation
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, TensorSpec
from alfx.utils.math_ops import identity


@configurable
class SimpleFC(FC):
    """Fully connected layer that stores its latest output.

    Args:
        input_size: number of inputs.
        output_size: number of outputs.
        activation: applied to the result.

    Attributes:
        hidden_neurons: latest output ``[B, output_size]``, detached; ``None`` before the first call.
    """

    def __init__(self, input_size: int, output_size: int, activation: Activation = identity):
        super().__init__(input_size, output_size, activation)
        self.hidden_neurons: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[B, input_size]`` to ``[B, output_size]``."""
        output = super().forward(inputs)
        self.hidden_neurons = output.detach()
        return output


@configurable
class ReluMLP(Network):
    """Fully connected layers with ReLU after all layers except the last.

    With W_l the weights and M_l the diagonal matrix of the active units, its Jacobian is
    ``W_L M_{L-1} W_{L-1} ... M_1 W_1``. Gradients flow from the Jacobian to the weights.

    Args:
        input_tensor_spec: spec of the input, a vector.
        output_size: number of outputs; ``None`` uses the number of inputs.
        hidden_layers: sizes of the hidden layers; none for a linear map.
        name: name of the network.

    Raises:
        ValueError: the input is not a vector.
    """

    def __init__(self, input_tensor_spec: TensorSpec, output_size: int | None = None,
                 hidden_layers: Sequence[int] | None = (64, 64), name: str = 'ReluMLP'):
        if input_tensor_spec.ndim != 1:
            raise ValueError(f'{name}: expected a vector, found {tuple(input_tensor_spec.shape)}')
        hidden_layers = hidden_layers or ()
        super().__init__(input_tensor_spec, (), name)
        size = input_tensor_spec.numel
        self._output_size = size if output_size is None else output_size
        self._output_spec = TensorSpec((self._output_size, ))
        sizes = [size, *hidden_layers, self._output_size]
        activations: list[Any] = [torch.relu] * len(hidden_layers) + [identity]
        self._layers: Any = nn.ModuleList([SimpleFC(*x) for x in zip(sizes, sizes[1:], activations)])

    def forward(self, inputs: Tensor, state: NestedTensor = (), requires_jac: bool = False,
                requires_jac_diag: bool = False) -> tuple[Any, NestedTensor]:
        """Map ``[B, I]`` to ``[B, O]``, or to a pair of the output and the Jacobian or its diagonal if required."""
        output, masks = self._run(inputs)
        if requires_jac:
            return (output, self._jacobian(masks, output)), state
        return ((output, self._jacobian_diagonal(masks, output)), state) if requires_jac_diag else (output, state)

    def compute_jac(self, inputs: Tensor) -> Tensor:
        """Jacobian ``d output_o / d input_i``, ``[B, O, I]``."""
        output, masks = self._run(inputs)
        return self._jacobian(masks, output)

    def compute_jac_diag(self, inputs: Tensor) -> Tensor:
        """Diagonal of the Jacobian, ``[B, O]``.

        Raises:
            ValueError: the numbers of inputs and outputs differ.
        """
        output, masks = self._run(inputs)
        return self._jacobian_diagonal(masks, output)

    def compute_vjp(self, inputs: Tensor, vec: Tensor, output_partial_idx: Any = None) -> Tensor:
        """Vector-Jacobian product ``vec^T J``, ``[B, I]``.

        Args:
            inputs: ``[B, I]``.
            vec: ``[B, O]``; ``[B, N]`` for N outputs.
            output_partial_idx: indices ``[N]`` of these outputs; ``None``: all.

        Raises:
            ValueError: ``vec`` has another number of elements.
        """
        weight = self._layers[-1].weight
        weight = weight if output_partial_idx is None else weight[output_partial_idx]
        if vec.shape[-1:] != weight.shape[:1]:
            raise ValueError(f'{self._name}: expected a vector for each of {len(weight)} outputs, found '
                             f'{list(vec.shape)}')
        masks = self._run(inputs)[1]
        vec = vec @ weight
        for layer, mask in zip(reversed(self._layers[:-1]), reversed(masks)):
            vec = (vec * mask) @ layer.weight
        return vec

    def compute_jvp(self, inputs: Tensor, vec: Tensor) -> Tensor:
        """Jacobian-vector product ``J vec``, ``[B, O]``, for ``vec [B, I]``."""
        for layer, mask in zip(self._layers, self._run(inputs)[1]):
            vec = (vec @ layer.weight.t()) * mask
        return vec @ self._layers[-1].weight.t()

    def _run(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the mask of active units of each hidden layer."""
        masks = []
        for layer in self._layers[:-1]:
            inputs = layer(inputs)
            masks.append((inputs > 0).to(inputs.dtype))
        return self._layers[-1](inputs), masks

    def _behind_first(self, masks: list[Tensor]) -> Tensor:
        """Product ``W_L M_{L-1} ... W_2 M_1``, ``[B, O, H]``."""
        product = self._layers[-1].weight * masks[-1].unsqueeze(1)
        for layer, mask in zip(reversed(self._layers[1:-1]), reversed(masks[:-1])):
            product = (product @ layer.weight) * mask.unsqueeze(1)
        return product

    def _jacobian(self, masks: list[Tensor], output: Tensor) -> Tensor:
        weight = self._layers[0].weight
        return self._behind_first(masks) @ weight if masks else weight.expand(len(output), *weight.shape)

    def _jacobian_diagonal(self, masks: list[Tensor], output: Tensor) -> Tensor:
        if self._output_size != self._input_tensor_spec.numel:
            raise ValueError(f'{self._name}: a Jacobian of {self._output_size} outputs by '
                             f'{self._input_tensor_spec.numel} inputs has no diagonal')
        if not masks:
            return self._layers[0].weight.diagonal().expand_as(output)
        return (self._behind_first(masks) * self._layers[0].weight.t()).sum(-1)
