"""Networks that map observations to distributions of actions: an encoder and a head."""
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfx import nest
from alfx.gin_utils import Count, configurable, takes_arguments_of
from alfx.initializers import small_last_layer_init
from alfx.layers import FC
from alfx.networks.action_specs import require_continuous
from alfx.networks.encoding_networks import (LAST_LAYER_ARGUMENTS, NORM_ARGUMENTS, UNFORWARDED_ARGUMENTS,
                                             EncodingNetwork, LSTMEncodingNetwork, vector_encoder)
from alfx.networks.network import Network
from alfx.networks.projection_networks import (CategoricalProjectionNetwork, NestedProjectionNetwork,
                                               NormalProjectionNetwork, make_projection_net)
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.dist_utils import DiagMultivariateNormal


class _EncoderAndHead(Network):
    """Encoder followed by a head. The state is the encoder's state, or a pair if the head is recurrent too."""

    def _set_parts(self, encoder: Network, head: Network) -> None:
        self._encoding_net = encoder
        self._projection_net = head
        self._head_has_state = head.is_rnn
        self._state_spec = (encoder.state_spec, head.state_spec) if self._head_has_state else encoder.state_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of observations ``[B, ...]`` to a nest of distributions with batch shape ``[B]``."""
        if self._head_has_state:
            encoded, encoder_state = self._encoding_net(inputs, state[0])
            dist, head_state = self._projection_net(encoded, state[1])
            return dist, (encoder_state, head_state)
        encoded, state = self._encoding_net(inputs, state)
        return self._projection_net(encoded)[0], state


@configurable
class ActorDistributionNetworkBase(_EncoderAndHead):
    """Encoder of any kind with a head for the actions.

    Args:
        input_tensor_spec: nest of specs of the observation.
        action_spec: nest of specs of the action; the output is a nest of distributions with its structure.
        encoding_network_ctor: creates the encoder; called with ``input_tensor_spec`` and ``encoder_kwargs``. The output
            of the encoder must be a vector.
        discrete_projection_net_ctor: creates the head of a discrete action; called with the size of the vector and the
            spec of the action.
        continuous_projection_net_ctor: creates the head of a continuous action, called with the same arguments.
        name: name of the network.
        encoder_kwargs: arguments of the encoder.

    Raises:
        SpecError: the encoder or a head does not fit its spec.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 encoding_network_ctor: Callable[..., Network] = EncodingNetwork,
                 discrete_projection_net_ctor: Callable[..., Network] = CategoricalProjectionNetwork,
                 continuous_projection_net_ctor: Callable[..., Network] = NormalProjectionNetwork,
                 name: str = 'ActorDistributionNetworkBase', **encoder_kwargs: Any):
        super().__init__(input_tensor_spec, (), name)
        encoder, size = vector_encoder(encoding_network_ctor, input_tensor_spec, name, **encoder_kwargs)
        make_head = make_projection_net if isinstance(action_spec, TensorSpec) else NestedProjectionNetwork
        self._action_spec = action_spec
        self._set_parts(encoder, make_head(size, action_spec, discrete_projection_net_ctor,
                                           continuous_projection_net_ctor))

    @property
    def action_spec(self) -> NestedTensorSpec:
        """Nest of specs of the action."""
        return self._action_spec

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelActorDistributionNetwork(self, n, 'parallel_' + self._name)


@configurable
class ActorDistributionNetwork(ActorDistributionNetworkBase):
    """Actor with an :class:`~alfx.networks.encoding_networks.EncodingNetwork` and a head for the actions.

    Args:
        action_spec: nest of specs of the action; the output is a nest of distributions with its structure.
        discrete_projection_net_ctor: creates the head of a discrete action.
        continuous_projection_net_ctor: creates the head of a continuous action.
        kwargs: arguments of :class:`~alfx.networks.encoding_networks.EncodingNetwork`, except ``output_tensor_spec``
            and the arguments of the last layer and of ensembles.

    Raises:
        SpecError: the encoder does not support the observation, or a head does not fit its action.
    """

    @takes_arguments_of(
        EncodingNetwork, without=('output_tensor_spec', *UNFORWARDED_ARGUMENTS, *LAST_LAYER_ARGUMENTS),
        defaults={'name': 'ActorDistributionNetwork'},
        after={'action_spec': 'input_tensor_spec', 'discrete_projection_net_ctor': 'use_fc_ln'})
    def __init__(self, action_spec: NestedTensorSpec,
                 discrete_projection_net_ctor: Callable[..., Network] = CategoricalProjectionNetwork,
                 continuous_projection_net_ctor: Callable[..., Network] = NormalProjectionNetwork, **kwargs: Any):
        super().__init__(
            action_spec=action_spec, encoding_network_ctor=EncodingNetwork,
            discrete_projection_net_ctor=discrete_projection_net_ctor,
            continuous_projection_net_ctor=continuous_projection_net_ctor, **kwargs)


@configurable
class AuxiliaryValueActorNetwork(ActorDistributionNetworkBase):
    """Actor network that can also predict values from the output of its encoder.

    A call of the network returns the distributions of actions only.

    Args:
        value_spec: spec of the values; ``()`` for a scalar.
        kwargs: arguments of :class:`ActorDistributionNetworkBase`.
    """

    @takes_arguments_of(ActorDistributionNetworkBase, defaults={'name': 'AuxiliaryValueActorNetwork'},
                        after={'value_spec': 'continuous_projection_net_ctor'})
    def __init__(self, value_spec: TensorSpec = TensorSpec(()), **kwargs: Any):
        super().__init__(**kwargs)
        self._value_shape = tuple(value_spec.shape)
        self._value_head = FC(self._encoding_net.output_spec.numel, value_spec.numel,
                              kernel_initializer=small_last_layer_init(0.03))

    def with_value(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Return distributions of actions and values ``[B, *value_spec.shape]``: ``(distributions, values), state``."""
        encoder_state, head_state = state if self._head_has_state else (state, ())
        encoded, encoder_state = self._encoding_net(inputs, encoder_state)
        distribution, head_state = self._projection_net(encoded, head_state)
        value = self._value_head(encoded).reshape(-1, *self._value_shape)
        return (distribution, value), (encoder_state, head_state) if self._head_has_state else encoder_state


class ParallelActorDistributionNetwork(_EncoderAndHead):
    """Stack of ``n`` actor networks; the distributions have batch shape ``[B, n]``.

    Args:
        actor_network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, actor_network: ActorDistributionNetworkBase, n: int,
                 name: str = 'ParallelActorDistributionNetwork'):
        super().__init__(actor_network.input_tensor_spec, (), name)
        self._parallelism = n
        self._set_parts(actor_network._encoding_net.make_parallel(n), actor_network._projection_net.make_parallel(n))


@configurable
class ActorDistributionRNNNetwork(ActorDistributionNetworkBase):
    """Actor with an :class:`~alfx.networks.encoding_networks.LSTMEncodingNetwork` and a head for the actions.

    Args:
        fc_layer_params: sizes of the layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or the size of a single one.
        actor_fc_layer_params: sizes of the layers after the LSTM layers.
        kwargs: arguments of :class:`ActorDistributionNetwork`, except ``input_preprocessors_ctor`` and those of
            norms.

    Raises:
        SpecError: the encoder does not support the observation, or a head does not fit its action.
    """

    @takes_arguments_of(
        ActorDistributionNetwork, without=('input_preprocessors_ctor', 'use_fc_bn', 'use_fc_ln', *NORM_ARGUMENTS),
        defaults={'name': 'ActorRNNDistributionNetwork'})
    def __init__(self, fc_layer_params: Sequence[Count] | None, lstm_hidden_size: Count | Sequence[Count] = 100,
                 actor_fc_layer_params: Sequence[Count] | None = None, **kwargs: Any):
        super().__init__(
            encoding_network_ctor=LSTMEncodingNetwork, pre_fc_layer_params=fc_layer_params,
            hidden_size=lstm_hidden_size, post_fc_layer_params=actor_fc_layer_params, **kwargs)


@configurable
class UnitNormalActorDistributionNetwork(Network):
    """Standard normal distribution of actions, independent of the observation.

    Args:
        input_tensor_spec: nest of specs of the observation.
        action_spec: nest of specs of continuous actions.
        name: name of the network.

    Raises:
        SpecError: an action is not continuous.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 name: str = 'UnitNormalActorDistributionNetwork'):
        super().__init__(input_tensor_spec, (), name)
        for spec in nest.flatten(action_spec):
            require_continuous(spec, name)
        self._action_spec = action_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to a nest of distributions with batch shape ``[B]``."""
        leaf = nest.extract_any_leaf_from_nest(inputs)
        return self._unit_normals(leaf.shape[:1], leaf.device), state

    def _unit_normals(self, batch_shape: Sequence[int], device: torch.device) -> Any:

        def unit_normal(spec: TensorSpec) -> DiagMultivariateNormal:
            zeros = torch.zeros((*batch_shape, *spec.shape), dtype=spec.dtype, device=device)
            return DiagMultivariateNormal(zeros, torch.ones_like(zeros), spec.ndim)

        return nest.map_structure(unit_normal, self._action_spec)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return _StackedUnitNormals(self, n)


class _StackedUnitNormals(UnitNormalActorDistributionNetwork):
    """Standard normal distributions of actions with batch shape ``[B, n]``."""

    def __init__(self, network: UnitNormalActorDistributionNetwork, n: int):
        super().__init__(network.input_tensor_spec, network._action_spec, 'parallel_' + network.name)
        self._parallelism = n

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        leaf = nest.extract_any_leaf_from_nest(inputs)
        return self._unit_normals((leaf.shape[0], self._parallelism), leaf.device), state
