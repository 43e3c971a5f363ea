"""Fully connected networks for the models of a tree search, and checks of the actions that they support."""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.distributions.discrete import num_categories
from alfx.gin_utils import Count, configurable
from alfx.layers import FC
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.networks.projection_networks import CategoricalProjectionNetwork, StableNormalProjectionNetwork
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec


class _AsVector(nn.Module):
    """Flattening of a nest of tensors ``[B, ...]`` to one float vector; integers are used as numbers."""

    def forward(self, inputs: NestedTensor) -> Tensor:
        return torch.cat([x.reshape(len(x), -1).to(torch.get_default_dtype()) for x in nest.flatten(inputs)], -1)


class _VectorNetwork(Network):
    """Fully connected layers on the flattened nest of inputs; actions are encoded.

    Args:
        input_tensor_spec: nest of specs.
        output_shape: shape of the output.
        fc_layer_params: sizes of the layers before the last one.
        action_spec: spec of the last element of the input, if it is an action.
        last_activation: activation of the last layer.
        name: name of the network.
    """

    def __init__(self, input_tensor_spec: Any, output_shape: tuple[int, ...], fc_layer_params: tuple[int, ...],
                 action_spec: BoundedTensorSpec | None = None, last_activation: Any = torch.relu_,
                 name: str = 'VectorNetwork'):
        super().__init__(input_tensor_spec, (), name)
        self._encoder = None if action_spec is None else SimpleActionEncoder(action_spec)
        self._flatten = _AsVector()
        spec = input_tensor_spec if action_spec is None else input_tensor_spec[0]
        size: int = sum(x.numel for x in nest.flatten(spec))
        if self._encoder is not None:
            size += self._encoder.output_spec.numel
        shape = TensorSpec(output_shape)
        self._layers = EncodingNetwork(TensorSpec((size, )), output_tensor_spec=shape, fc_layer_params=fc_layer_params,
                                       last_layer_size=shape.numel, last_activation=last_activation)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Return the output ``[B, *output_shape]``."""
        if self._encoder is None:
            return self._layers(self._flatten(inputs))[0], state
        latent, action = inputs
        return self._layers(torch.cat((self._flatten(latent), self._encoder(action)), -1))[0], state


@configurable
def create_simple_encoding_net(observation_spec: NestedTensorSpec, latent_size: Count = 64,
                               fc_layer_params: tuple[Count, ...] = (128, )) -> Network:
    """Create a network from observations to latent states.

    The observation is flattened to one vector.

    Args:
        observation_spec: nest of specs.
        latent_size: size of the latent state.
        fc_layer_params: sizes of the layers before the last one.
    """
    return _VectorNetwork(observation_spec, (latent_size, ), tuple(fc_layer_params), name='SimpleEncodingNet')


@configurable
def create_simple_dynamics_net(input_tensor_spec: tuple[TensorSpec, BoundedTensorSpec],
                               fc_layer_params: tuple[Count, ...] = (128, )) -> Network:
    """Create a network from latent states and actions to the next latent states.

    Args:
        input_tensor_spec: specs of the latent state and of the action.
        fc_layer_params: sizes of the layers before the last one.
    """
    latent_spec, action_spec = input_tensor_spec
    return _VectorNetwork(input_tensor_spec, tuple(latent_spec.shape), tuple(fc_layer_params), action_spec,
                          name='SimpleDynamicsNet')


@configurable
class SimplePredictionNet(Network):
    """Network that predicts value, reward, policy and the end of the game from a latent state.

    Args:
        observation_spec: spec of the latent state.
        action_spec: spec of the action.
        trunk_net_ctor: called as ``trunk_net_ctor(input_tensor_spec=observation_spec)``; creates the network whose
            output is the input of all heads.
        num_quantiles: size of the encoding of value and reward; with 1 they are ``[B]``.
        discrete_projection_net_ctor: creates the head of a discrete action.
        continuous_projection_net_ctor: creates the head of a continuous action.
        initial_game_over_bias: initial logit of the end of the game; ``log(p / (1 - p))`` for a probability p.
    """

    def __init__(self, observation_spec: TensorSpec, action_spec: BoundedTensorSpec, trunk_net_ctor: Callable[..., Any],
                 num_quantiles: Count = 1,
                 discrete_projection_net_ctor: Callable[..., Any] = CategoricalProjectionNetwork,
                 continuous_projection_net_ctor: Callable[..., Any] = StableNormalProjectionNetwork,
                 initial_game_over_bias: float = 0.0):
        super().__init__(observation_spec, (), 'SimplePredictionNet')
        self._trunk = trunk_net_ctor(input_tensor_spec=observation_spec)
        size = self._trunk.output_spec.numel
        # Initial predictions are 0, so that the first searches follow the prior.
        self._value_layer = FC(size, num_quantiles, kernel_initializer=nn.init.zeros_)
        self._reward_layer = FC(size, num_quantiles, kernel_initializer=nn.init.zeros_)
        self._game_over_layer = FC(size, 1, kernel_initializer=nn.init.zeros_, bias_init_value=initial_game_over_bias)
        head = discrete_projection_net_ctor if action_spec.is_discrete else continuous_projection_net_ctor
        self._action_net = head(input_size=size, action_spec=action_spec)
        self._is_scalar = num_quantiles == 1

    def forward(self, inputs: Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Return ``(value, reward, action_distribution, game_over_logit)`` and ``()`` for latents ``[B, ...]``."""
        hidden, _ = self._trunk(inputs)
        value, reward = self._value_layer(hidden), self._reward_layer(hidden)
        if self._is_scalar:
            value, reward = value.squeeze(-1), reward.squeeze(-1)
        return (value, reward, self._action_net(hidden)[0], self._game_over_layer(hidden).squeeze(-1)), ()


@configurable
def create_simple_prediction_net(observation_spec: TensorSpec, action_spec: BoundedTensorSpec,
                                 fc_layer_params: tuple[Count, ...] = (128, ),
                                 initial_game_over_bias: float = 0.0) -> SimplePredictionNet:
    """Create a :class:`SimplePredictionNet` with fully connected layers.

    Args:
        observation_spec: spec of the latent state.
        action_spec: spec of the action.
        fc_layer_params: sizes of the layers.
        initial_game_over_bias: see :class:`SimplePredictionNet`.
    """
    return SimplePredictionNet(observation_spec, action_spec, partial(EncodingNetwork, fc_layer_params=fc_layer_params),
                               initial_game_over_bias=initial_game_over_bias)


def check_actions(action_spec: Any, num_sampled_actions: int | None, name: str) -> None:
    """Reject actions that a search cannot enumerate or sample.

    Raises:
        SpecError: the actions are nested.
        ValueError: ``num_sampled_actions`` is missing for infinitely many actions, or not below the number of actions.
    """
    if not isinstance(action_spec, BoundedTensorSpec):
        raise SpecError(f'{name}: expected a single bounded action, found {action_spec}; nested actions cannot be '
                        'searched')
    if num_sampled_actions is not None and num_sampled_actions < 2:
        raise ValueError(f'{name}.num_sampled_actions: expected at least 2, found {num_sampled_actions}')
    if action_spec.is_continuous or action_spec.ndim:
        if num_sampled_actions is None:
            raise ValueError(f'{name}.num_sampled_actions: expected a number for {action_spec}, whose values cannot be '
                             'enumerated, found None; 20 is a common choice')
        return
    count = num_categories(action_spec)
    if num_sampled_actions is not None and num_sampled_actions >= count:
        raise ValueError(f'{name}.num_sampled_actions: expected a number below the number of actions, {count}, found '
                         f'{num_sampled_actions}; None considers all of them')
