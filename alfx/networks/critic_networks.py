"""Critic networks: they map an observation and an action to values.

Observation and action have an encoder each, followed by a joint encoder with the values as output. A critic is called
as ``critic((observation, action), state)``. A stack of ``n`` critics (``make_parallel(n)``) concatenates a shared
observation and action only once. Read next: :mod:`alfx.networks.q_networks`, which outputs the values of all actions.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfx import nest
from alfx.gin_utils import Count, Fraction, configurable, takes_arguments_of
from alfx.initializers import small_last_layer_init
from alfx.layers import Activation, Initializer, Norm, NormPosition, make_parallel_input
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import NORM_ARGUMENTS, EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.network import NaiveParallelNetwork, Network, is_stacked
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

_SCALAR = TensorSpec(())
# Initial values near zero (Lillicrap et al. 2016, arXiv:1509.02971, section 7).
_last_kernel_initializer = small_last_layer_init(0.003)


class _SharedEncoder(Network):
    """Stack of ``n`` encoders without parameters; a shared input is encoded only once.

    Args:
        encoder: network without parameters and state.
        n: number of encoders.
    """

    def __init__(self, encoder: Network, n: int):
        super().__init__(encoder.input_tensor_spec, (), 'shared_' + encoder.name)
        self._parallelism = n
        self._encoder = encoder.copy()

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map a nest of ``[B, ...]`` to ``[B, ...]``, or of ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            return self._encoder(inputs)[0], state
        flat = nest.map_structure(lambda x: x.flatten(0, 1), inputs)
        return self._encoder(flat)[0].unflatten(0, nest.get_nest_shape(inputs)[:2]), state

    def _first_networks(self, k: int) -> Callable[[NestedTensor], torch.Tensor]:
        """Compute only the first ``k`` networks; see the base class."""
        return lambda inputs: self.forward(inputs)[0]


def _stacked_encoder(encoder: Network, n: int) -> Network:
    has_parameters = any(True for _ in encoder.parameters())
    return encoder.make_parallel(n) if has_parameters else _SharedEncoder(encoder, n)


class _CriticBase(Network):
    """Encoders of observation and action, followed by the joint encoder of the pair of results."""

    def _set_parts(self, observation_encoder: Network, action_encoder: Network, joint_encoder: Network) -> None:
        self._observation_encoder = observation_encoder
        self._action_encoder = action_encoder
        self._joint_encoder = joint_encoder

    def _stack_parts(self, single: '_CriticBase', n: int) -> None:
        """Set the parts of a stack of ``n`` critics like ``single``."""
        self._parallelism = n
        self._set_parts(_stacked_encoder(single._observation_encoder, n), _stacked_encoder(single._action_encoder, n),
                        single._joint_encoder.make_parallel(n))

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Spec of the state of the joint encoder."""
        return self._joint_encoder.state_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map a pair of nests (observation, action) of ``[B, ...]`` to values ``[B, *output_tensor_spec.shape]``."""
        observation, action = inputs
        observation, action = self._observation_encoder(observation)[0], self._action_encoder(action)[0]
        return self._joint_encoder(_aligned(observation, action, self._parallelism), state)


def _aligned(observation: torch.Tensor, action: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand one encoding to ``[B, n, ...]`` if only the other one has the stack dimension."""
    if observation.ndim < action.ndim:
        observation = make_parallel_input(observation, n)
    elif action.ndim < observation.ndim:
        action = make_parallel_input(action, n)
    return observation, action


class ParallelCriticNetwork(_CriticBase):
    """Stack of ``n`` critics: a pair of nests of ``[B, ...]`` or ``[B, n, ...]`` to values ``[B, n, ...]``.

    Args:
        critic_network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, critic_network: _CriticBase, n: int, name: str = 'ParallelCriticNetwork'):
        super().__init__(critic_network.input_tensor_spec, (), name)
        self._stack_parts(critic_network, n)

    def _first_networks(self, k: int) -> Callable[[NestedTensor], torch.Tensor] | None:
        """Compute only the first ``k`` networks; see the base class."""
        encode_observation = self._observation_encoder._first_networks(k)
        encode_action = self._action_encoder._first_networks(k)
        encode_both = self._joint_encoder._first_networks(k)
        if encode_observation is None or encode_action is None or encode_both is None:
            return None

        def values(inputs: NestedTensor) -> torch.Tensor:
            observation, action = inputs
            return encode_both(_aligned(encode_observation(observation), encode_action(action), k))

        return values


def _encoders(input_tensor_spec: NestedTensorSpec, name: str, layers: dict[str, Any], *,
              observation_input_processors: Nested, observation_preprocessing_combiner: Callable | None,
              observation_conv_layer_params: Sequence[tuple] | None, observation_fc_layer_params: Sequence[int] | None,
              action_input_processors: Nested, action_preprocessing_combiner: Callable | None,
              action_fc_layer_params: Sequence[int] | None, observation_input_processors_ctor: Callable | None = None,
              action_input_processors_ctor: Callable | None = None) -> tuple[Network, Network]:
    """Create the encoders of the observation and of the action from arguments of :class:`CriticNetwork`."""
    if not isinstance(input_tensor_spec, (tuple, list)) or len(input_tensor_spec) != 2:
        raise SpecError(f'{name}: expected input_tensor_spec=(observation_spec, action_spec), found '
                        f'{input_tensor_spec}')
    observation_encoder = EncodingNetwork(
        input_tensor_spec[0], input_preprocessors=observation_input_processors,
        input_preprocessors_ctor=observation_input_processors_ctor,
        preprocessing_combiner=observation_preprocessing_combiner, conv_layer_params=observation_conv_layer_params,
        fc_layer_params=observation_fc_layer_params, name=f'{name}.observation', **layers)
    action_encoder = EncodingNetwork(
        input_tensor_spec[1], input_preprocessors=action_input_processors,
        input_preprocessors_ctor=action_input_processors_ctor, preprocessing_combiner=action_preprocessing_combiner,
        fc_layer_params=action_fc_layer_params, name=f'{name}.action', **layers)
    return observation_encoder, action_encoder


@configurable
class CriticNetwork(_CriticBase):
    """Critic network: values of an observation and an action.

    The observation and the action are encoded separately, the encodings are combined, and the result passes through
    joint layers; the outputs of the last layer are the values. Every part except the last layer is optional.

    Args:
        input_tensor_spec: pair ``(observation_spec, action_spec)`` of nests of specs.
        output_tensor_spec: spec of the values: ``()`` for a scalar, ``(K, )`` for K rewards, ``(N, )`` for N
            quantiles, ``(K, N)`` for both.
        observation_input_processors: ``input_preprocessors`` of the
            :class:`~alfx.networks.encoding_networks.EncodingNetwork` of the observation.
        observation_input_processors_ctor: creates ``observation_input_processors``, called with ``observation_spec``.
        observation_preprocessing_combiner: ``preprocessing_combiner`` of that encoder; needed for a nested observation.
        observation_conv_layer_params: convolutions of that encoder.
        observation_fc_layer_params: sizes of the fully connected layers of that encoder.
        action_input_processors: ``input_preprocessors`` of the ``EncodingNetwork`` of the action; needed for a
            discrete action.
        action_input_processors_ctor: creates ``action_input_processors``, called with ``action_spec``.
        action_preprocessing_combiner: ``preprocessing_combiner`` of that encoder; needed for a nested action.
        action_fc_layer_params: sizes of the fully connected layers of that encoder.
        observation_action_combiner: combines the pair of encodings into one vector; ``None`` concatenates them.
        joint_fc_layer_params: sizes of the joint layers before the last one.
        activation: activation of all layers except the last.
        kernel_initializer: initializer of all layers except the last.
        use_fc_bn: use batch norm in all fully connected layers except the last.
        use_fc_ln: use layer norm in all fully connected layers except the last.
        last_use_fc_bn: use batch norm in the last layer.
        last_use_fc_ln: use layer norm in the last layer.
        last_layer_activation: activation of the last layer.
        use_naive_parallel_network: let :meth:`make_parallel` create ``n`` networks that are called one after the other
            instead of stacked weights. The values are the same.
        name: name of the network.
        norm: creates a norm of all fully connected layers except the last from their number of features, such as
            :class:`~alfx.norm_layers.BatchNorm`; not with ``use_fc_bn`` or ``use_fc_ln``.
        norm_position: apply ``norm`` ``'before'`` or ``'after'`` the activation.
        input_norm: creates a norm of the combined encodings, the input of the joint layers.
        dropout: rate of :class:`~alfx.layers.Dropout` in all fully connected layers except the last, before their norm.
        joint_encoder_ctor: creates the joint layers, including the last one, such as
            :class:`~alfx.networks.block_networks.BlockEncodingNetwork`; called with the arguments of
            ``EncodingNetwork``. It cannot be combined with ``joint_fc_layer_params`` or the arguments of norms and of
            dropout.

    Raises:
        SpecError: the encoders do not support an input; the message says what to do.
        ValueError: arguments contradict each other.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec = _SCALAR,
                 observation_input_processors: Nested = None,
                 observation_input_processors_ctor: Callable[[NestedTensorSpec], Nested] | None = None,
                 observation_preprocessing_combiner: Callable | None = None,
                 observation_conv_layer_params: Sequence[tuple] | None = None,
                 observation_fc_layer_params: Sequence[Count] | None = None, action_input_processors: Nested = None,
                 action_input_processors_ctor: Callable[[NestedTensorSpec], Nested] | None = None,
                 action_preprocessing_combiner: Callable | None = None,
                 action_fc_layer_params: Sequence[Count] | None = None,
                 observation_action_combiner: Callable | None = None,
                 joint_fc_layer_params: Sequence[Count] | None = None, activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None, use_fc_bn: bool = False, use_fc_ln: bool = False,
                 last_use_fc_bn: bool = False, last_use_fc_ln: bool = False,
                 last_layer_activation: Activation = identity, use_naive_parallel_network: bool = False,
                 name: str = 'CriticNetwork', norm: Norm | None = None, norm_position: NormPosition = 'before',
                 input_norm: Norm | None = None, dropout: Fraction = 0.0,
                 joint_encoder_ctor: Callable[..., Network] | None = None):
        super().__init__(input_tensor_spec, (), name)
        layers: dict[str, Any] = dict(activation=activation, kernel_initializer=kernel_initializer,
                                      use_fc_bn=use_fc_bn, use_fc_ln=use_fc_ln, norm=norm, norm_position=norm_position,
                                      dropout=dropout)
        observation_encoder, action_encoder = _encoders(
            input_tensor_spec, name, layers, observation_input_processors=observation_input_processors,
            observation_input_processors_ctor=observation_input_processors_ctor,
            observation_preprocessing_combiner=observation_preprocessing_combiner,
            observation_conv_layer_params=observation_conv_layer_params,
            observation_fc_layer_params=observation_fc_layer_params, action_input_processors=action_input_processors,
            action_input_processors_ctor=action_input_processors_ctor,
            action_preprocessing_combiner=action_preprocessing_combiner,
            action_fc_layer_params=action_fc_layer_params)
        common: dict[str, Any] = dict(
            input_tensor_spec=(observation_encoder.output_spec, action_encoder.output_spec),
            output_tensor_spec=output_tensor_spec, preprocessing_combiner=observation_action_combiner or NestConcat(),
            last_layer_size=output_tensor_spec.numel, last_activation=last_layer_activation,
            last_kernel_initializer=_last_kernel_initializer, name=f'{name}.joint')
        if joint_encoder_ctor is None:
            joint_encoder: Network = EncodingNetwork(
                fc_layer_params=joint_fc_layer_params, last_use_fc_bn=last_use_fc_bn, last_use_fc_ln=last_use_fc_ln,
                input_norm=input_norm, **common, **layers)
        elif (joint_fc_layer_params or use_fc_bn or use_fc_ln or last_use_fc_bn or last_use_fc_ln or dropout
              or not norm is input_norm is None):
            raise ValueError(f'{name}: joint_encoder_ctor creates all joint layers; remove it, or '
                             'joint_fc_layer_params and the arguments of norms and of dropout')
        else:
            joint_encoder = joint_encoder_ctor(**common)
        self._set_parts(observation_encoder, action_encoder, joint_encoder)
        self._use_naive_parallel_network = use_naive_parallel_network

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        if self._use_naive_parallel_network:
            return NaiveParallelNetwork(self, n)
        return ParallelCriticNetwork(self, n, 'parallel_' + self._name)


@configurable
class CriticRNNNetwork(_CriticBase):
    """Recurrent critic network: the joint encoder is an :class:`~alfx.networks.encoding_networks.LSTMEncodingNetwork`.

    Args:
        joint_fc_layer_params: sizes of the joint layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or the size of a single one.
        critic_fc_layer_params: sizes of the layers after the LSTM layers.
        kwargs: arguments of :class:`CriticNetwork`, except ``observation_input_processors_ctor``,
            ``action_input_processors_ctor``, ``observation_action_combiner``, ``last_layer_activation``,
            ``use_naive_parallel_network`` and the arguments of norms.

    Raises:
        SpecError: the encoders do not support an input; the message says what to do.
    """

    @takes_arguments_of(
        CriticNetwork, without=('observation_input_processors_ctor', 'action_input_processors_ctor',
                                'observation_action_combiner', 'use_fc_bn', 'use_fc_ln', 'last_use_fc_bn',
                                'last_use_fc_ln', 'last_layer_activation', 'use_naive_parallel_network',
                                'joint_encoder_ctor', *NORM_ARGUMENTS),
        defaults={'name': 'CriticRNNNetwork'})
    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec, activation: Activation,
                 kernel_initializer: Initializer | None, name: str, joint_fc_layer_params: Sequence[Count] | None,
                 lstm_hidden_size: Count | Sequence[Count] = 100, critic_fc_layer_params: Sequence[Count] | None = None,
                 **kwargs: Any):
        super().__init__(input_tensor_spec, (), name)
        layers: dict[str, Any] = dict(activation=activation, kernel_initializer=kernel_initializer)
        observation_encoder, action_encoder = _encoders(input_tensor_spec, name, layers, **kwargs)
        joint_encoder = LSTMEncodingNetwork(
            (observation_encoder.output_spec, action_encoder.output_spec), output_tensor_spec,
            preprocessing_combiner=NestConcat(), pre_fc_layer_params=joint_fc_layer_params,
            hidden_size=lstm_hidden_size, post_fc_layer_params=critic_fc_layer_params,
            last_layer_size=output_tensor_spec.numel, last_activation=identity,
            last_kernel_initializer=_last_kernel_initializer, name=f'{name}.joint', **layers)
        self._set_parts(observation_encoder, action_encoder, joint_encoder)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelCriticNetwork(self, n, 'parallel_' + self._name)


class _QuantileCriticBase(_CriticBase):
    """Critic whose joint encoding is modulated by the embedding of each quantile fraction."""

    def _set_quantile_parts(self, embedding: Network, tau_encoder: Network, final_encoder: Network) -> None:
        self._tau_embedding = embedding
        self._tau_encoder = tau_encoder
        self._final_encoder = final_encoder

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``((observation, action), tau)`` to quantiles ``[B, *output_tensor_spec.shape, N]``.

        Observation and action are nests of ``[B, ...]``, ``tau`` is ``[B, N]``.
        """
        pair, tau = inputs
        joint, state = super().forward(pair, state)
        embedded = self._tau_embedding(tau)[0]
        if embedded.ndim == 4:  # [B, n, N, D]: each network of the stack has separate fractions
            embedded = embedded.transpose(1, 2)
        outer = embedded.shape[:2]
        modulation = self._tau_encoder(embedded.flatten(0, 1))[0].unflatten(0, outer)
        quantiles = self._final_encoder((joint.unsqueeze(1) * modulation).flatten(0, 1))[0]
        return quantiles.unflatten(0, outer).movedim(1, -1), state


class ParallelCriticQuantileNetwork(_QuantileCriticBase):
    """Stack of ``n`` quantile critics: ``((observation, action), tau)`` to quantiles ``[B, n, ..., N]``.

    The inputs are ``[B, ...]`` or ``[B, n, ...]``.

    Args:
        critic_network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, critic_network: _QuantileCriticBase, n: int, name: str = 'ParallelCriticQuantileNetwork'):
        super().__init__(critic_network.input_tensor_spec, (), name)
        self._stack_parts(critic_network, n)
        self._set_quantile_parts(_stacked_encoder(critic_network._tau_embedding, n),
                                 critic_network._tau_encoder.make_parallel(n),
                                 critic_network._final_encoder.make_parallel(n))


@configurable
class CriticQuantileNetwork(_QuantileCriticBase):
    """Quantiles of the return of an observation and an action at given fractions.

    Implicit quantile network (Dabney et al. 2018, arXiv:1806.06923, section 3.1). It is called as
    ``critic(((observation, action), tau), state)``, with fractions ``tau`` ``[B, N]`` in (0, 1). The encoding of
    observation and action is multiplied by an encoding of ``cos(pi k tau)`` and passes through further layers. Unlike
    in the paper, the default encoding of the fractions ends in a sigmoid, and layers use layer norm by default (Ma et
    al. 2020, arXiv:2004.14547).

    Args:
        tau_spec: spec of the fractions, of shape ``(N, )``.
        output_tensor_spec: ``()`` for one return, ``(K, )`` for K rewards; the quantiles are an additional last
            dimension.
        obs_act_joint_fc_layer_params: sizes of the layers after the combined encodings.
        obs_act_activation: activation of all layers except those of the fractions and the last one.
        tau_embedding_dim: size of the embedding of a fraction.
        tau_input_processors: computes the embeddings ``[B, N, tau_embedding_dim]`` of the fractions; ``None`` uses
            :class:`~alfx.networks.preprocessors.CosineEmbeddingPreprocessor`.
        tau_fc_layer_params: sizes of the layers after the embedding; the last size must equal the size of the encoding
            of observation and action. ``None`` uses one layer of that size.
        tau_activation: activation of the layers after the embedding.
        obs_act_tau_joint_fc_layer_params: sizes of the layers after the product, before the last one.
        last_kernel_initializer: initializer of the last layer; ``None`` is uniform in [-0.003, 0.003].
        kwargs: arguments of :class:`CriticNetwork`, except ``joint_fc_layer_params``, ``activation`` and the arguments
            of the last layer; ``use_fc_ln`` is True by default.

    Raises:
        SpecError: the encoders do not support an input; the message says what to do.
        ValueError: arguments contradict each other.
    """

    @takes_arguments_of(
        CriticNetwork, without=('joint_fc_layer_params', 'activation', 'last_use_fc_bn', 'last_use_fc_ln',
                                'last_layer_activation', 'joint_encoder_ctor', *NORM_ARGUMENTS),
        defaults={'use_fc_ln': True, 'name': 'CriticQuantileNetwork'},
        after={'tau_spec': 'input_tensor_spec', 'obs_act_joint_fc_layer_params': 'observation_action_combiner',
               'kernel_initializer': 'use_fc_ln', 'last_kernel_initializer': 'kernel_initializer'})
    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec,
                 observation_action_combiner: Callable | None, use_fc_bn: bool, use_fc_ln: bool,
                 kernel_initializer: Initializer | None, use_naive_parallel_network: bool, name: str,
                 tau_spec: TensorSpec, obs_act_joint_fc_layer_params: Sequence[Count] | None = None,
                 obs_act_activation: Activation = torch.relu_, tau_embedding_dim: Count = 64,
                 tau_input_processors: Nested = None, tau_fc_layer_params: Sequence[Count] | None = None,
                 tau_activation: Activation = torch.sigmoid_,
                 obs_act_tau_joint_fc_layer_params: Sequence[Count] | None = None,
                 last_kernel_initializer: Initializer | None = None, **kwargs: Any):
        super().__init__((input_tensor_spec, tau_spec), (), name)
        common: dict[str, Any] = dict(kernel_initializer=kernel_initializer, use_fc_bn=use_fc_bn, use_fc_ln=use_fc_ln)
        layers = dict(common, activation=obs_act_activation)
        observation_encoder, action_encoder = _encoders(input_tensor_spec, name, layers, **kwargs)
        joint_encoder = EncodingNetwork(
            (observation_encoder.output_spec, action_encoder.output_spec),
            preprocessing_combiner=observation_action_combiner or NestConcat(),
            fc_layer_params=obs_act_joint_fc_layer_params, name=f'{name}.joint', **layers)
        self._set_parts(observation_encoder, action_encoder, joint_encoder)
        size = joint_encoder.output_spec.numel
        if tau_fc_layer_params and tau_fc_layer_params[-1] != size:
            raise ValueError(f'{name}: the encodings of the fractions and of observation and action are multiplied, so '
                             f'tau_fc_layer_params must end in {size}, found {tau_fc_layer_params}')
        self._set_quantile_parts(
            _tau_embedding(tau_spec, tau_input_processors, tau_embedding_dim, name),
            EncodingNetwork(TensorSpec((tau_embedding_dim, )), fc_layer_params=tau_fc_layer_params or (size, ),
                            activation=tau_activation, name=f'{name}.tau', **common),
            EncodingNetwork(TensorSpec((size, )), output_tensor_spec,
                            fc_layer_params=obs_act_tau_joint_fc_layer_params, last_layer_size=output_tensor_spec.numel,
                            last_activation=identity,
                            last_kernel_initializer=last_kernel_initializer or _last_kernel_initializer,
                            name=f'{name}.final', **layers))
        self._use_naive_parallel_network = use_naive_parallel_network

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        if self._use_naive_parallel_network:
            return NaiveParallelNetwork(self, n)
        return ParallelCriticQuantileNetwork(self, n, 'parallel_' + self._name)


def _tau_embedding(tau_spec: TensorSpec, preprocessor: Any, size: int, name: str) -> Network:
    """Create the network that embeds fractions ``[B, N]`` as ``[B, N, size]``."""
    if not isinstance(tau_spec, TensorSpec) or tau_spec.ndim != 1:
        raise SpecError(f'{name}: expected a tau_spec of shape (N,), found {tau_spec}')
    if preprocessor is None:
        preprocessor = CosineEmbeddingPreprocessor(tau_spec, size)
    embedding = PreprocessorNetwork(tau_spec, preprocessor, name=f'{name}.tau_embedding')
    found, expected = tuple(embedding.processed_input_tensor_spec.shape), (tau_spec.numel, size)
    if found != expected:
        raise SpecError(f'{name}: tau_input_processors must map the fractions to {expected}, as '
                        f'tau_embedding_dim={size}; found {found}')
    return embedding
