"""Networks of TD7 (Fujimoto et al. 2023, arXiv:2306.02451, section 4): state-action embeddings, and the actor and the
critic that take them as inputs.

An encoder embeds a state as z and a state with an action as p, which predicts the z of the next state. Layers whose
size depends on the environment end in :func:`avg_l1_norm`, so that all inputs of a layer have the same scale. Read
next: :mod:`alfx.algorithms.td7_algorithm`.
"""
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import nest
from alfx.gin_utils import Count, configurable, register_function
from alfx.layers import Activation, Reshape
from alfx.nest.utils import NestConcat
from alfx.networks.actor_networks import ActorNetworkBase
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity


@register_function
def avg_l1_norm(x: Tensor) -> Tensor:
    """Divide ``[..., N]`` by its mean absolute value over the last dimension (eq. 4)."""
    return x / x.abs().mean(-1, keepdim=True).clamp(min=1e-8)


@configurable
class SaleEncoder(Network):
    """Encoder of states and of state-action pairs.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of continuous actions.
        embedding_size: size N of both embeddings.
        fc_layer_params: sizes of the layers before the last one, in both encoders.
        activation: activation of these layers.
        name: name of the network.

    Raises:
        SpecError: the observation contains images, or the encoder does not support it or the action.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, embedding_size: Count = 256,
                 fc_layer_params: Sequence[Count] = (256, 256), activation: Activation = F.elu,
                 name: str = 'SaleEncoder'):
        super().__init__((observation_spec, action_spec), (), name)
        if any(leaf.ndim == 3 for leaf in nest.flatten(observation_spec)):
            raise SpecError(f'{name}: expected vectors, found an image; encode images with @EncodingAlgorithm first')
        layers: dict[str, Any] = dict(fc_layer_params=fc_layer_params, activation=activation,
                                      last_layer_size=embedding_size)
        self._of_state = EncodingNetwork(observation_spec, last_activation=avg_l1_norm, name=f'{name}.state', **layers)
        is_flat = all(spec.ndim < 2 for spec in nest.flatten(action_spec))
        flatten = None if is_flat else (None, nest.map_structure(lambda spec: Reshape(spec.numel), action_spec))
        self._of_pair = EncodingNetwork((self.embedding_spec, action_spec), input_preprocessors=flatten,
                                        preprocessing_combiner=NestConcat(), last_activation=identity,
                                        name=f'{name}.pair', **layers)

    @property
    def embedding_spec(self) -> TensorSpec:
        """Spec of an embedding, ``(N, )``."""
        return self._of_state.output_spec

    def embed_state(self, observation: NestedTensor) -> Tensor:
        """Map a nest of ``[B, ...]`` to z ``[B, N]``, whose mean absolute value is 1."""
        return self._of_state(observation)[0]

    def embed_pair(self, z: Tensor, action: NestedTensor) -> Tensor:
        """Map z ``[B, N]`` and actions ``[B, ...]`` to p ``[B, N]``."""
        return self._of_pair((z, action))[0]

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Map a pair of nests (observation, action) of ``[B, ...]`` to p ``[B, N]``."""
        observation, action = inputs
        return self.embed_pair(self.embed_state(observation), action), state


@configurable
class SaleActorNetwork(ActorNetworkBase):
    """Actor of an observation and its embedding z.

    Args:
        input_tensor_spec: pair of the nest of specs of the observation and the spec of z.
        action_spec: nest of bounded specs of continuous actions.
        observation_layer_size: size of the layer of the observation, whose output is concatenated with z.
        fc_layer_params: sizes of the following layers.
        activation: activation of these layers.
        squashing_func: function with values in (-1, 1), which are then scaled to the bounds of the action.
        name: name of the network.

    Raises:
        SpecError: an action is not continuous or has no bounds, or the network does not support the observation.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 observation_layer_size: Count = 256, fc_layer_params: Sequence[Count] = (256, 256),
                 activation: Activation = torch.relu_, squashing_func: Activation = torch.tanh,
                 name: str = 'SaleActorNetwork'):
        of_observation = EncodingNetwork(input_tensor_spec[0], fc_layer_params=(observation_layer_size, ),
                                         activation=avg_l1_norm, name=f'{name}.observation')
        super().__init__(input_tensor_spec, action_spec, squashing_func=squashing_func, name=name,
                         input_preprocessors=(of_observation, None), preprocessing_combiner=NestConcat(),
                         fc_layer_params=fc_layer_params, activation=activation)


@configurable
class SaleCriticNetwork(CriticNetwork):
    """Critic of an observation, an action and their embeddings.

    Args:
        input_tensor_spec: pair of pairs: the nests of specs of observation and action, and the specs of z and p.
        output_tensor_spec: spec of the value.
        pair_layer_size: size of the layer of observation and action, whose output is concatenated with z and p.
        joint_fc_layer_params: sizes of the following layers.
        activation: activation of these layers.
        name: name of the network.

    Raises:
        SpecError: the network does not support the observation or the action.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec = TensorSpec(()),
                 pair_layer_size: Count = 256, joint_fc_layer_params: Sequence[Count] = (256, 256),
                 activation: Activation = F.elu, name: str = 'SaleCriticNetwork'):
        super().__init__(input_tensor_spec, output_tensor_spec, observation_fc_layer_params=(pair_layer_size, ),
                         action_preprocessing_combiner=NestConcat(), activation=avg_l1_norm,
                         joint_encoder_ctor=partial(EncodingNetwork, fc_layer_params=joint_fc_layer_params,
                                                    activation=activation), name=name)


class EmbeddedCritic(Network):
    """Critic with the encoder whose embeddings it reads; a stack of critics shares one encoder.

    Args:
        encoder: encoder, of which only ``embed_pair`` is used here.
        critic: critic, or stack of critics, called with ``((observation, action), (z, p))``.
        name: name of the network.
    """

    def __init__(self, encoder: SaleEncoder, critic: Network, name: str = 'EmbeddedCritic'):
        observation_spec, action_spec = encoder.input_tensor_spec
        super().__init__(((observation_spec, encoder.embedding_spec), action_spec), critic.state_spec, name)
        self.encoder, self.critic = encoder, critic

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Map ``((observation, z), action)`` of ``[B, ...]`` to values, ``[B]`` or of a stack ``[B, n]``."""
        (observation, z), action = inputs
        return self.critic(((observation, action), (z, self.encoder.embed_pair(z, action))), state)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` critics with the encoder of this one."""
        return EmbeddedCritic(self.encoder, self.critic.make_parallel(n), 'parallel_' + self._name)
