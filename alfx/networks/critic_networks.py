"""Networks from an observation and an action to values: an encoder for each, and a joint encoder that ends in values.

A critic is called as ``critic((observation, action), state)``. A stack of ``n`` (``make_parallel(n)``) combines an
observation and an action which all share once, not once for each. Read next: :mod:`alfx.networks.q_networks`, which
has the values of all actions as outputs.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfx import nest
from alfx.gin_utils import configurable, takes_arguments_of
from alfx.gin_utils.value_checks import Count
from alfx.initializers import small_last_layer_init
from alfx.layers import make_parallel_input
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
_last_kernel_initializer = small_last_layer_init(0.003)


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
        return self._encoder(flat)[0].unflatten(0, nest.get_nest_shape(inputs)[:2]), state

    def _first_networks(self, k: int) -> Callable[[NestedTensor], torch.Tensor]:
        """See the base class."""
        return lambda inputs: self.forward(inputs)[0]


def _stacked_encoder(encoder: Network, n: int) -> Network:
    has_parameters = any(True for _ in encoder.parameters())
    return encoder.make_parallel(n) if has_parameters else _SharedEncoder(encoder, n)


class _CriticBase(Network):
    """Runs the encoders of observation and action, then the joint encoder on the pair of results."""

    def _set_parts(self, observation_encoder: Network, action_encoder: Network, joint_encoder: Network) -> None:
        self._observation_encoder = observation_encoder
        self._action_encoder = action_encoder
        self._joint_encoder = joint_encoder

    def _stack_parts(self, single: '_CriticBase', n: int) -> None:
        """Become the stack of ``n`` critics like ``single``."""
        self._parallelism = n
        self._set_parts(_stacked_encoder(single._observation_encoder, n), _stacked_encoder(single._action_encoder, n),
                        single._joint_encoder.make_parallel(n))

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Spec of the state of the joint encoder."""
        return self._joint_encoder.state_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """A pair of nests (observation, action) of ``[B, ...]`` to values ``[B, *output_tensor_spec.shape]``."""
        observation, action = inputs
        observation, action = self._observation_encoder(observation)[0], self._action_encoder(action)[0]
        return self._joint_encoder(_aligned(observation, action, self._parallelism), state)


def _aligned(observation: torch.Tensor, action: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as they are, or both ``[B, n, ...]`` where one encoder of a stack is shared and the other is not."""
    if observation.ndim < action.ndim:
        observation = make_parallel_input(observation, n)
    elif action.ndim < observation.ndim:
        action = make_parallel_input(action, n)
    return observation, action


class ParallelCriticNetwork(_CriticBase):
    """``n`` critics as one.

    Args:
        critic_network: the network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, critic_network: _CriticBase, n: int, name: str = 'ParallelCriticNetwork'):
        super().__init__(critic_network.input_tensor_spec, (), name)
        self._stack_parts(critic_network, n)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """A pair of nests of ``[B, ...]`` or ``[B, n, ...]`` to values ``[B, n, *output_tensor_spec.shape]``."""
        return super().forward(inputs, state)

    def _first_networks(self, k: int) -> Callable[[NestedTensor], torch.Tensor] | None:
        """See the base class."""
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
    """The encoders of the observation and of the action, of arguments of :class:`CriticNetwork`."""
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
                 observation_fc_layer_params: Sequence[Count] | None = None,
                 action_input_processors: Nested = None,
                 action_input_processors_ctor: Callable[[NestedTensorSpec], Nested] | None = None,
                 action_preprocessing_combiner: Callable | None = None,
                 action_fc_layer_params: Sequence[Count] | None = None,
                 observation_action_combiner: Callable | None = None,
                 joint_fc_layer_params: Sequence[Count] | None = None,
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
        layers: dict[str, Any] = dict(activation=activation, kernel_initializer=kernel_initializer,
                                      use_fc_bn=use_fc_bn, use_fc_ln=use_fc_ln)
        observation_encoder, action_encoder = _encoders(
            input_tensor_spec, name, layers, observation_input_processors=observation_input_processors,
            observation_input_processors_ctor=observation_input_processors_ctor,
            observation_preprocessing_combiner=observation_preprocessing_combiner,
            observation_conv_layer_params=observation_conv_layer_params,
            observation_fc_layer_params=observation_fc_layer_params, action_input_processors=action_input_processors,
            action_input_processors_ctor=action_input_processors_ctor,
            action_preprocessing_combiner=action_preprocessing_combiner,
            action_fc_layer_params=action_fc_layer_params)
        joint_encoder = EncodingNetwork(
            (observation_encoder.output_spec, action_encoder.output_spec), output_tensor_spec,
            preprocessing_combiner=observation_action_combiner or NestConcat(),
            fc_layer_params=joint_fc_layer_params, last_layer_size=output_tensor_spec.numel,
            last_activation=last_layer_activation, last_kernel_initializer=_last_kernel_initializer,
            last_use_fc_bn=last_use_fc_bn, last_use_fc_ln=last_use_fc_ln, name=f'{name}.joint', **layers)
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
        joint_fc_layer_params: sizes of the joint layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or of the only one.
        critic_fc_layer_params: sizes of the layers behind the LSTM layers.
        kwargs: those of :class:`CriticNetwork`, except ``observation_input_processors_ctor``,
            ``action_input_processors_ctor``, ``observation_action_combiner``, ``last_layer_activation``,
            ``use_naive_parallel_network`` and those of norms.

    Raises:
        SpecError: an input that the encoders cannot take; says what to do about it.
    """

    @takes_arguments_of(
        CriticNetwork, without=('observation_input_processors_ctor', 'action_input_processors_ctor',
                                'observation_action_combiner', 'use_fc_bn', 'use_fc_ln', 'last_use_fc_bn',
                                'last_use_fc_ln', 'last_layer_activation', 'use_naive_parallel_network'),
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
        """See the base class."""
        return ParallelCriticNetwork(self, n, 'parallel_' + self._name)


class _QuantileCriticBase(_CriticBase):
    """A critic whose joint encoding is modulated by the embedding of each quantile fraction."""

    def _set_quantile_parts(self, embedding: Network, tau_encoder: Network, final_encoder: Network) -> None:
        self._tau_embedding = embedding
        self._tau_encoder = tau_encoder
        self._final_encoder = final_encoder

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """``((observation, action), tau)``, nests of ``[B, ...]`` and ``[B, N]``, to quantiles
        ``[B, *output_tensor_spec.shape, N]``."""
        pair, tau = inputs
        joint, state = super().forward(pair, state)
        embedded = self._tau_embedding(tau)[0]
        if embedded.ndim == 4:  # [B, n, N, D]: each network of the stack has fractions of its own
            embedded = embedded.transpose(1, 2)
        outer = embedded.shape[:2]
        modulation = self._tau_encoder(embedded.flatten(0, 1))[0].unflatten(0, outer)
        quantiles = self._final_encoder((joint.unsqueeze(1) * modulation).flatten(0, 1))[0]
        return quantiles.unflatten(0, outer).movedim(1, -1), state


class ParallelCriticQuantileNetwork(_QuantileCriticBase):
    """``n`` quantile critics as one.

    Args:
        critic_network: the network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, critic_network: _QuantileCriticBase, n: int, name: str = 'ParallelCriticQuantileNetwork'):
        super().__init__(critic_network.input_tensor_spec, (), name)
        self._stack_parts(critic_network, n)
        self._set_quantile_parts(_stacked_encoder(critic_network._tau_embedding, n),
                                 critic_network._tau_encoder.make_parallel(n),
                                 critic_network._final_encoder.make_parallel(n))

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """``((observation, action), tau)`` of ``[B, ...]`` or ``[B, n, ...]`` to quantiles
        ``[B, n, *output_tensor_spec.shape, N]``."""
        return super().forward(inputs, state)


@configurable
class CriticQuantileNetwork(_QuantileCriticBase):
    """Quantiles of the return of an observation and an action at given fractions (Dabney et al. 2018,
    arXiv:1806.06923, section 3.1).

    It is called as ``critic(((observation, action), tau), state)``, with fractions ``tau`` ``[B, N]`` in (0, 1). The
    encoding of observation and action is multiplied by an encoding of ``cos(pi k tau)``, and passes through further
    layers. Differs from the paper in that the encoding of the fractions ends in a sigmoid and layers are normalised
    unless told otherwise (Ma et al. 2020, arXiv:2004.14547).

    Args:
        tau_spec: spec of the fractions, of shape ``(N, )``.
        output_tensor_spec: ``()`` for one return, ``(K, )`` for K rewards; the quantiles are one more, last, dimension.
        obs_act_joint_fc_layer_params: sizes of the layers behind the combined encodings.
        obs_act_activation: activation of all layers but those of the fractions and the last one.
        tau_embedding_dim: size of the embedding of a fraction.
        tau_input_processors: makes the embeddings ``[B, N, tau_embedding_dim]`` of the fractions; ``None``:
            :class:`~alfx.networks.preprocessors.CosineEmbeddingPreprocessor`.
        tau_fc_layer_params: sizes of the layers behind the embedding; the last one is that of the encoding of
            observation and action. ``None``: one layer of that size.
        tau_activation: their activation.
        obs_act_tau_joint_fc_layer_params: sizes of the layers behind the product, before the last one.
        last_kernel_initializer: that of the last layer; ``None``: uniform in [-0.003, 0.003].
        kwargs: those of :class:`CriticNetwork`, except ``joint_fc_layer_params``, ``activation`` and those of the last
            layer; ``use_fc_ln`` is True unless given.

    Raises:
        SpecError: an input that the encoders cannot take; says what to do about it.
        ValueError: arguments that contradict each other.
    """

    @takes_arguments_of(
        CriticNetwork, without=('joint_fc_layer_params', 'activation', 'last_use_fc_bn', 'last_use_fc_ln',
                                'last_layer_activation'),
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
        """See the base class."""
        if self._use_naive_parallel_network:
            return NaiveParallelNetwork(self, n)
        return ParallelCriticQuantileNetwork(self, n, 'parallel_' + self._name)


def _tau_embedding(tau_spec: TensorSpec, preprocessor: Any, size: int, name: str) -> Network:
    """From fractions ``[B, N]`` to ``[B, N, size]``."""
    if not isinstance(tau_spec, TensorSpec) or tau_spec.ndim != 1:
        raise SpecError(f'{name}: expected a tau_spec of shape (N,), found {tau_spec}')
    if preprocessor is None:
        preprocessor = CosineEmbeddingPreprocessor(tau_spec, size)
    embedding = PreprocessorNetwork(tau_spec, preprocessor, name=f'{name}.tau_embedding')
    found, expected = tuple(embedding.processed_input_tensor_spec.shape), (tau_spec.numel, size)
    if found != expected:
        raise SpecError(f'{name}: tau_input_processors must make {expected} of the fractions, for '
                        f'tau_embedding_dim={size}; found {found}')
    return embedding
