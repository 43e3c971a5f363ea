"""Networks from an observation and an action to values: an encoder for each, and a joint encoder that ends in values.

A critic is called as ``critic((observation, action), state)``. A stack of ``n`` (``make_parallel(n)``) combines an
observation and an action which all share once, not once for each. Read next: :mod:`alfx.networks.q_networks`, which
has the values of all actions as outputs.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.gin_utils import configurable
from alfx.layers import make_parallel_input, make_parallel_spec
from alfx.layers.weights import Activation, Initializer
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.network import NaiveParallelNetwork, Network, is_stacked
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

_SCALAR = TensorSpec(())
# Initial values near zero (Lillicrap et al. 2016, arXiv:1509.02971, section 7).
_last_kernel_initializer = partial(nn.init.uniform_, a=-0.003, b=0.003)


class _SharedEncoder(Network):
    """``n`` encoders without parameters are one: it is called once on what all share.

    Args:
        encoder: a network without parameters and memory.
        n: number of encoders that it stands for.
    """

    def __init__(self, encoder: Network, n: int):
        super().__init__(encoder.input_tensor_spec, (), 'shared_' + encoder.name)
        self._parallelism = n
        self._encoder = encoder.copy()

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """A nest of ``[B, ...]`` to ``[B, ...]``, or of ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            return self._encoder(inputs)[0], state
        flat = nest.map_structure(lambda x: x.flatten(0, 1), inputs)
        return self._encoder(flat)[0].unflatten(0, (-1, self._parallelism)), state


def _stacked_encoder(encoder: Network, n: int) -> Network:
    has_parameters = any(True for _ in encoder.parameters())
    return encoder.make_parallel(n) if has_parameters else _SharedEncoder(encoder, n)


class _CriticBase(Network):
    """Runs the encoders of observation and action, then the joint encoder on the pair of results."""

    def _set_parts(self, observation_encoder: Network, action_encoder: Network, joint_encoder: Network) -> None:
        self._observation_encoder = observation_encoder
        self._action_encoder = action_encoder
        self._joint_encoder = joint_encoder

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Spec of the state of the joint encoder."""
        return self._joint_encoder.state_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """A pair of nests (observation, action) of ``[B, ...]`` to values ``[B, *output_tensor_spec.shape]``."""
        observation, action = inputs
        encoded = self._observation_encoder(observation)[0], self._action_encoder(action)[0]
        return self._joint_encoder(encoded, state)


class ParallelCriticNetwork(_CriticBase):
    """``n`` critics as one.

    Args:
        critic_network: the network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, critic_network: _CriticBase, n: int, name: str = 'ParallelCriticNetwork'):
        super().__init__(critic_network.input_tensor_spec, (), name)
        self._parallelism = n
        self._set_parts(_stacked_encoder(critic_network._observation_encoder, n),
                        _stacked_encoder(critic_network._action_encoder, n),
                        critic_network._joint_encoder.make_parallel(n))

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """A pair of nests of ``[B, ...]`` or ``[B, n, ...]`` to values ``[B, n, *output_tensor_spec.shape]``."""
        return self._joint_encoder(_encode_alike(self, inputs), state)


def _encode_alike(critic: Any, inputs: NestedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodings of observation and action, both ``[B, size]`` or both ``[B, n, size]``."""
    observation, action = inputs
    encoded_observation = critic._observation_encoder(observation)[0]
    encoded_action = critic._action_encoder(action)[0]
    if encoded_observation.ndim < encoded_action.ndim:
        encoded_observation = make_parallel_input(encoded_observation, critic._parallelism)
    elif encoded_action.ndim < encoded_observation.ndim:
        encoded_action = make_parallel_input(encoded_action, critic._parallelism)
    return encoded_observation, encoded_action


def _pair_of_specs(input_tensor_spec: NestedTensorSpec, name: str) -> tuple[NestedTensorSpec, NestedTensorSpec]:
    if not isinstance(input_tensor_spec, (tuple, list)) or len(input_tensor_spec) != 2:
        raise SpecError(f'{name}: expected input_tensor_spec=(observation_spec, action_spec), found '
                        f'{input_tensor_spec}')
    return input_tensor_spec[0], input_tensor_spec[1]


@configurable
class CriticNetwork(_CriticBase):
    """Values of an observation and an action.

    The observation and the action are encoded on their own, what results is combined and passes through joint layers;
    the last one has the values as outputs. Each part but the last layer is optional.

    Args:
        input_tensor_spec: the pair ``(observation_spec, action_spec)`` of nests of specs.
        output_tensor_spec: spec of the values: ``()`` for one number, ``(K, )`` for K rewards, ``(N, )`` for N
            quantiles, ``(K, N)`` for both.
        observation_input_processors: ``input_preprocessors`` of the
            :class:`~alfx.networks.encoding_networks.EncodingNetwork` of the observation.
        observation_input_processors_ctor: called with ``observation_spec`` to make ``observation_input_processors``.
        observation_preprocessing_combiner: its ``preprocessing_combiner``; needed for a nested observation.
        observation_conv_layer_params: its convolutions.
        observation_fc_layer_params: its fully connected layers.
        action_input_processors: ``input_preprocessors`` of the ``EncodingNetwork`` of the action; needed for a
            discrete action.
        action_input_processors_ctor: called with ``action_spec`` to make ``action_input_processors``.
        action_preprocessing_combiner: its ``preprocessing_combiner``; needed for a nested action.
        action_fc_layer_params: its fully connected layers.
        observation_action_combiner: makes one vector of the pair of encodings; ``None``: they are concatenated.
        joint_fc_layer_params: sizes of the joint layers before the last one.
        activation: activation of all layers but the last.
        kernel_initializer: initializer of all layers but the last.
        use_fc_bn: whether to use batch norm in all fully connected layers but the last.
        use_fc_ln: whether to use layer norm in all fully connected layers but the last.
        last_use_fc_bn: whether the last layer uses batch norm.
        last_use_fc_ln: whether the last layer uses layer norm.
        last_layer_activation: activation of the last layer.
        use_naive_parallel_network: whether :meth:`make_parallel` makes ``n`` networks that are called one after the
            other instead of stacked weights. The values are the same.
        name: name of the network.

    Raises:
        SpecError: an input that the encoders cannot take; says what to do about it.
        ValueError: arguments that contradict each other.
    """

    def __init__(self,
                 input_tensor_spec: NestedTensorSpec,
                 output_tensor_spec: TensorSpec = _SCALAR,
                 observation_input_processors: Nested = None,
                 observation_input_processors_ctor: Callable[[NestedTensorSpec], Nested] | None = None,
                 observation_preprocessing_combiner: Callable | None = None,
                 observation_conv_layer_params: Sequence[tuple] | None = None,
                 observation_fc_layer_params: Sequence[int] | None = None,
                 action_input_processors: Nested = None,
                 action_input_processors_ctor: Callable[[NestedTensorSpec], Nested] | None = None,
                 action_preprocessing_combiner: Callable | None = None,
                 action_fc_layer_params: Sequence[int] | None = None,
                 observation_action_combiner: Callable | None = None,
                 joint_fc_layer_params: Sequence[int] | None = None,
                 activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None,
                 use_fc_bn: bool = False,
                 use_fc_ln: bool = False,
                 last_use_fc_bn: bool = False,
                 last_use_fc_ln: bool = False,
                 last_layer_activation: Activation = identity,
                 use_naive_parallel_network: bool = False,
                 name: str = 'CriticNetwork'):
        super().__init__(input_tensor_spec, (), name)
        observation_spec, action_spec = _pair_of_specs(input_tensor_spec, name)
        layers = dict(activation=activation, kernel_initializer=kernel_initializer, use_fc_bn=use_fc_bn,
                      use_fc_ln=use_fc_ln)
        observation_encoder = EncodingNetwork(
            observation_spec, input_preprocessors=observation_input_processors,
            input_preprocessors_ctor=observation_input_processors_ctor,
            preprocessing_combiner=observation_preprocessing_combiner,
            conv_layer_params=observation_conv_layer_params, fc_layer_params=observation_fc_layer_params,
            name=f'{name}.observation', **layers)  # type: ignore[arg-type]
        action_encoder = EncodingNetwork(
            action_spec, input_preprocessors=action_input_processors,
            input_preprocessors_ctor=action_input_processors_ctor,
            preprocessing_combiner=action_preprocessing_combiner, fc_layer_params=action_fc_layer_params,
            name=f'{name}.action', **layers)  # type: ignore[arg-type]
        joint_encoder = EncodingNetwork(
            (observation_encoder.output_spec, action_encoder.output_spec), output_tensor_spec,
            preprocessing_combiner=observation_action_combiner or NestConcat(),
            fc_layer_params=joint_fc_layer_params, last_layer_size=output_tensor_spec.numel,
            last_activation=last_layer_activation, last_kernel_initializer=_last_kernel_initializer,
            last_use_fc_bn=last_use_fc_bn, last_use_fc_ln=last_use_fc_ln,
            name=f'{name}.joint', **layers)  # type: ignore[arg-type]
        self._set_parts(observation_encoder, action_encoder, joint_encoder)
        self._use_naive_parallel_network = use_naive_parallel_network

    def make_parallel(self, n: int) -> Network:
        """See the base class."""
        if self._use_naive_parallel_network:
            return NaiveParallelNetwork(self, n)
        return ParallelCriticNetwork(self, n, 'parallel_' + self._name)


@configurable
class CriticRNNNetwork(_CriticBase):
    """Values of an observation and an action, with memory: the joint encoder is an
    :class:`~alfx.networks.encoding_networks.LSTMEncodingNetwork`.

    Args:
        input_tensor_spec: the pair ``(observation_spec, action_spec)`` of nests of specs.
        output_tensor_spec: spec of the values, see :class:`CriticNetwork`.
        observation_input_processors: see ``CriticNetwork``.
        observation_preprocessing_combiner: see ``CriticNetwork``; needed for a nested observation.
        observation_conv_layer_params: see ``CriticNetwork``.
        observation_fc_layer_params: see ``CriticNetwork``.
        action_input_processors: see ``CriticNetwork``; needed for a discrete action.
        action_preprocessing_combiner: see ``CriticNetwork``; needed for a nested action.
        action_fc_layer_params: see ``CriticNetwork``.
        joint_fc_layer_params: sizes of the joint layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or of the only one.
        critic_fc_layer_params: sizes of the layers behind the LSTM layers.
        activation: activation of all layers but the last.
        kernel_initializer: initializer of all layers but the LSTM and the last one.
        name: name of the network.

    Raises:
        SpecError: an input that the encoders cannot take; says what to do about it.
    """

    def __init__(self,
                 input_tensor_spec: NestedTensorSpec,
                 output_tensor_spec: TensorSpec = _SCALAR,
                 observation_input_processors: Nested = None,
                 observation_preprocessing_combiner: Callable | None = None,
                 observation_conv_layer_params: Sequence[tuple] | None = None,
                 observation_fc_layer_params: Sequence[int] | None = None,
                 action_input_processors: Nested = None,
                 action_preprocessing_combiner: Callable | None = None,
                 action_fc_layer_params: Sequence[int] | None = None,
                 joint_fc_layer_params: Sequence[int] | None = None,
                 lstm_hidden_size: int | Sequence[int] = 100,
                 critic_fc_layer_params: Sequence[int] | None = None,
                 activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None,
                 name: str = 'CriticRNNNetwork'):
        super().__init__(input_tensor_spec, (), name)
        observation_spec, action_spec = _pair_of_specs(input_tensor_spec, name)
        observation_encoder = EncodingNetwork(
            observation_spec, input_preprocessors=observation_input_processors,
            preprocessing_combiner=observation_preprocessing_combiner,
            conv_layer_params=observation_conv_layer_params, fc_layer_params=observation_fc_layer_params,
            activation=activation, kernel_initializer=kernel_initializer, name=f'{name}.observation')
        action_encoder = EncodingNetwork(
            action_spec, input_preprocessors=action_input_processors,
            preprocessing_combiner=action_preprocessing_combiner, fc_layer_params=action_fc_layer_params,
            activation=activation, kernel_initializer=kernel_initializer, name=f'{name}.action')
        joint_encoder = LSTMEncodingNetwork(
            (observation_encoder.output_spec, action_encoder.output_spec), output_tensor_spec,
            preprocessing_combiner=NestConcat(), pre_fc_layer_params=joint_fc_layer_params,
            hidden_size=lstm_hidden_size, post_fc_layer_params=critic_fc_layer_params, activation=activation,
            kernel_initializer=kernel_initializer, last_layer_size=output_tensor_spec.numel, last_activation=identity,
            last_kernel_initializer=_last_kernel_initializer, name=f'{name}.joint')
        self._set_parts(observation_encoder, action_encoder, joint_encoder)

    def make_parallel(self, n: int) -> Network:
        """See the base class."""
        return ParallelCriticNetwork(self, n, 'parallel_' + self._name)
