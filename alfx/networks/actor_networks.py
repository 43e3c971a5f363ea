"""Networks that map observations to continuous actions: an encoder and one output layer for each action."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.gin_utils import Count, configurable, takes_arguments_of
from alfx.initializers import small_last_layer_init
from alfx.layers import FC, Activation, Reshape, make_parallel_net, out_of_place
from alfx.networks.action_specs import action_range, require_continuous
from alfx.networks.encoding_networks import (LAST_LAYER_ARGUMENTS, NORM_ARGUMENTS, UNFORWARDED_ARGUMENTS,
                                             EncodedNetwork, EncodingNetwork, LSTMEncodingNetwork, vector_encoder)
from alfx.networks.network import Network
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, TensorSpec

# Initial actions near the middle of their bounds, where the squashing does not saturate (Lillicrap et al. 2016,
# arXiv:1509.02971, section 7).
_last_kernel_initializer = small_last_layer_init(0.003)


class _ActionLayer(nn.Module):
    """Output layer that maps the encoding to one action within its bounds.

    Args:
        layers: layers with the output ``[B, *action_shape]``.
        squashing_func: function with values in (-1, 1).
        middle: middle of the bounds of the action.
        half: half width of the bounds.
    """

    _middle: torch.Tensor
    _half: torch.Tensor

    def __init__(self, layers: list[Any], squashing_func: Activation, middle: torch.Tensor, half: torch.Tensor):
        super().__init__()
        self._layers = nn.ModuleList(layers)
        self._chain = layers
        self._squash = squashing_func
        self.register_buffer('_middle', middle, persistent=False)
        self.register_buffer('_half', half, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self._chain:
            inputs = layer(inputs)
        return torch.addcmul(self._middle, self._half, self._squash(inputs))

    def make_parallel(self, n: int) -> '_ActionLayer':
        return _ActionLayer([make_parallel_net(layer, n) for layer in self._chain], self._squash, self._middle,
                            self._half)


def _action_layer(input_size: int, spec: TensorSpec, squashing_func: Activation, name: str) -> _ActionLayer:
    require_continuous(spec, name)
    middle, half = action_range(spec, name, 'the outputs are scaled to the bounds')
    layers: list[nn.Module] = [FC(input_size, spec.numel, kernel_initializer=_last_kernel_initializer)]
    if spec.ndim != 1:
        layers.append(Reshape(*spec.shape))
    return _ActionLayer(layers, out_of_place(squashing_func), middle, half)


class _EncoderAndActions(EncodedNetwork):
    """Encoder followed by an output layer for each action."""

    def _set_parts(self, encoder: Network, layers: Nested) -> None:
        self._encoding_net = encoder
        self._structure = nest.structure(layers)
        self._action_list = nest.flatten(layers)
        self._action_layers = nn.ModuleList(self._action_list)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[NestedTensor, NestedTensor]:
        """Map a nest of observations ``[B, ...]`` to a nest of actions ``[B, ...]``."""
        encoded, state = self._encoding_net(inputs, state)
        return self._structure.unflatten([layer(encoded) for layer in self._action_list]), state


@configurable
class ActorNetworkBase(_EncoderAndActions):
    """Encoder of any kind with an output layer for each action.

    Args:
        input_tensor_spec: nest of specs of the observation.
        action_spec: nest of bounded specs of continuous actions.
        encoding_network_ctor: creates the encoder; called with ``input_tensor_spec`` and ``encoder_kwargs``. The output
            of the encoder must be a vector.
        squashing_func: function with values in (-1, 1), which are then scaled to the bounds of the action.
        name: name of the network.
        encoder_kwargs: arguments of the encoder.

    Raises:
        SpecError: an action is not continuous or has no bounds, or the encoder does not support the observation.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 encoding_network_ctor: Callable[..., Network] = EncodingNetwork,
                 squashing_func: Activation = torch.tanh, name: str = 'ActorNetworkBase', **encoder_kwargs: Any):
        super().__init__(input_tensor_spec, (), name)
        encoder, size = vector_encoder(encoding_network_ctor, input_tensor_spec, name, **encoder_kwargs)
        self._action_spec = action_spec
        self._set_parts(encoder, nest.map_structure(
            lambda spec: _action_layer(size, spec, squashing_func, name), action_spec))

    @property
    def action_spec(self) -> NestedTensorSpec:
        """Nest of specs of the action."""
        return self._action_spec

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelActorNetwork(self, n, 'parallel_' + self._name)


class ParallelActorNetwork(_EncoderAndActions):
    """Stack of ``n`` actor networks.

    Args:
        actor_network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, actor_network: ActorNetworkBase, n: int, name: str = 'ParallelActorNetwork'):
        super().__init__(actor_network.input_tensor_spec, (), name)
        self._parallelism = n
        layers = [layer.make_parallel(n) for layer in actor_network._action_list]
        self._set_parts(actor_network._encoding_net.make_parallel(n), actor_network._structure.unflatten(layers))


@configurable
class ActorNetwork(ActorNetworkBase):
    """Actor with an :class:`~alfx.networks.encoding_networks.EncodingNetwork` and an output layer for each action.

    Args:
        action_spec: nest of bounded specs of continuous actions.
        squashing_func: function with values in (-1, 1), which are then scaled to the bounds of the action.
        kwargs: arguments of :class:`~alfx.networks.encoding_networks.EncodingNetwork`, except ``output_tensor_spec``,
            ``input_preprocessors_ctor``, ``use_fc_bn``, ``use_fc_ln`` and the arguments of the last layer and of
            ensembles.

    Raises:
        SpecError: an action is not continuous or has no bounds, or the encoder does not support the observation.
    """

    @takes_arguments_of(
        EncodingNetwork, without=('output_tensor_spec', 'input_preprocessors_ctor', 'use_fc_bn', 'use_fc_ln',
                                  *UNFORWARDED_ARGUMENTS, *LAST_LAYER_ARGUMENTS),
        defaults={'name': 'ActorNetwork'}, after={'action_spec': 'input_tensor_spec', 'squashing_func': 'activation'})
    def __init__(self, action_spec: NestedTensorSpec, squashing_func: Activation = torch.tanh, **kwargs: Any):
        super().__init__(action_spec=action_spec, encoding_network_ctor=EncodingNetwork, squashing_func=squashing_func,
                         **kwargs)


@configurable
class ActorRNNNetwork(ActorNetworkBase):
    """Actor with an :class:`~alfx.networks.encoding_networks.LSTMEncodingNetwork` and an output layer for each action.

    Args:
        fc_layer_params: sizes of the layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or the size of a single one.
        actor_fc_layer_params: sizes of the layers after the LSTM layers.
        kwargs: arguments of :class:`ActorNetwork`, except those of norms.

    Raises:
        SpecError: an action is not continuous or has no bounds, or the encoder does not support the observation.
    """

    @takes_arguments_of(ActorNetwork, without=NORM_ARGUMENTS, defaults={'name': 'ActorRNNNetwork'})
    def __init__(self, fc_layer_params: Sequence[Count] | None, lstm_hidden_size: Count | Sequence[Count] = 100,
                 actor_fc_layer_params: Sequence[Count] | None = None, **kwargs: Any):
        super().__init__(
            encoding_network_ctor=LSTMEncodingNetwork, pre_fc_layer_params=fc_layer_params,
            hidden_size=lstm_hidden_size, post_fc_layer_params=actor_fc_layer_params, **kwargs)
