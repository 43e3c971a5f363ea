"""Q networks: they map an observation to the values of all discrete actions.

The values are ``[B, num_actions]``: column ``i`` is the action ``action_spec.minimum + i``. With ``num_atoms`` they are
logits of a distribution over values for each action (Bellemare et al. 2017, arXiv:1707.06887). A network for mixed
actions gets ``(observation, continuous action)`` as input and combines both with ``input_preprocessors`` and
``preprocessing_combiner``.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from alfx.gin_utils import Count, NonNegative, Range, configurable, takes_arguments_of
from alfx.initializers import small_last_layer_init
from alfx.layers import FC, Activation, Initializer, LayerNormOption, make_parallel_net
from alfx.networks.action_specs import require_discrete
from alfx.networks.encoding_networks import (LAST_LAYER_ARGUMENTS, NORM_ARGUMENTS, UNFORWARDED_ARGUMENTS,
                                             EncodedNetwork, EncodingNetwork, LSTMEncodingNetwork, vector_encoder)
from alfx.networks.network import NaiveParallelNetwork, Network
from alfx.networks.networks import NoisyFC
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

_last_kernel_initializer = small_last_layer_init(0.03)


def _number_of_actions(spec: TensorSpec, name: str) -> int:
    require_discrete(spec, name)
    if spec.ndim != 0:
        raise SpecError(f'{name}: expected one discrete action of shape (), found {spec}; convert a vector of actions '
                        'to a single one in the environment, or use an actor-critic algorithm')
    return int(spec.maximum) - int(spec.minimum) + 1  # type: ignore[attr-defined]


class _FreshNoiseFC(nn.Module):
    """:class:`~alfx.networks.networks.NoisyFC` with new noise at each call, separate for each sample."""

    def __init__(self, input_size: int, output_size: int, **arguments: Any):
        super().__init__()
        self._noisy = NoisyFC(input_size, output_size, **arguments)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._noisy.with_new_noise(inputs)


class _QHead(nn.Module):
    """Head that maps an encoding to the values of all actions.

    Args:
        hidden: hidden layers.
        last: the last layer of the advantages, or the last layers of advantages and state values.
        num_actions: number of actions.
        num_atoms: number of logits for each action; ``None`` for a single value.
        halves: give each of the two last layers one half of the hidden units.
    """

    def __init__(self, hidden: list[Any], last: list[Any], num_actions: int, num_atoms: int | None, halves: bool):
        super().__init__()
        self._hidden, self._last = nn.ModuleList(hidden), nn.ModuleList(last)
        self._hidden_list, self._last_list = hidden, last
        self.num_actions, self.num_atoms, self._halves = num_actions, num_atoms, halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[B, size]`` to ``[B, num_actions]`` or ``[B, num_actions, num_atoms]``."""
        for layer in self._hidden_list:
            x = layer(x)
        if len(self._last_list) == 1:
            return self._per_action(self._last_list[0](x))
        for_advantage, for_value = x.chunk(2, dim=-1) if self._halves else (x, x)
        advantage = self._per_action(self._last_list[0](for_advantage))
        value = self._last_list[1](for_value)
        if self.num_atoms is None:
            return advantage + (value - advantage.mean(dim=-1, keepdim=True))
        return advantage + (value.unsqueeze(-2) - advantage.mean(dim=-2, keepdim=True))

    def _per_action(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.num_atoms is None else x.unflatten(-1, (self.num_actions, self.num_atoms))

    def make_parallel(self, n: int) -> '_QHead':
        hidden, last = ([make_parallel_net(layer, n) for layer in layers]
                        for layers in (self._hidden_list, self._last_list))
        return _QHead(hidden, last, self.num_actions, self.num_atoms, self._halves)


def _make_head(input_size: int, num_actions: int, fc_layer_params: Sequence[int], activation: Activation,
               kernel_initializer: Initializer | None, dueling: bool, noise: dict[str, Any] | None,
               num_atoms: int | None) -> _QHead:
    layer: Any = FC if noise is None else partial(_FreshNoiseFC, **noise)
    hidden, size = [], input_size
    for i, width in enumerate(fc_layer_params):
        # The last hidden layers of the two dueling streams are computed as one layer of twice the width.
        doubled = dueling and i == len(fc_layer_params) - 1
        hidden.append(layer(size, 2 * width if doubled else width, activation=activation,
                            kernel_initializer=kernel_initializer))
        size = width
    atoms = 1 if num_atoms is None else num_atoms
    outputs = (num_actions * atoms, atoms) if dueling else (num_actions * atoms, )
    last_initializer = _last_kernel_initializer if noise is None else None  # noisy layers: as in the paper
    last = [layer(size, count, activation=identity, kernel_initializer=last_initializer) for count in outputs]
    return _QHead(hidden, last, num_actions, num_atoms, dueling and bool(hidden))


class _EncoderAndHead(EncodedNetwork):
    """Encoder followed by the head."""

    def _set_parts(self, encoder: Network, head: _QHead) -> None:
        self._encoding_net = encoder
        self._head = head

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map a nest of observations ``[B, ...]`` to ``[B, num_actions]`` or ``[B, num_actions, num_atoms]``."""
        encoded, state = self._encoding_net(inputs, state)
        return self._head(encoded), state


@configurable
class QNetworkBase(_EncoderAndHead):
    """Encoder of any kind with a last layer that outputs the values of all actions.

    Args:
        input_tensor_spec: nest of specs of the observation.
        action_spec: spec of one discrete action, of shape ``()``.
        encoding_network_ctor: creates the encoder; called with ``input_tensor_spec`` and ``encoder_kwargs``. The output
            of the encoder must be a vector.
        use_naive_parallel_network: let :meth:`make_parallel` create ``n`` networks that are called one after the other
            instead of stacked weights. The values are the same.
        name: name of the network.
        head_fc_layer_params: sizes of the layers between the encoder and the last layer.
        head_activation: activation of these layers.
        head_kernel_initializer: initializer of these layers; ``None`` uses variance scaling, or the weights of
            ``NoisyFC`` if they are noisy.
        dueling: compute the values as the sum of a state value and of advantages, whose mean over actions is subtracted
            (Wang et al. 2016, arXiv:1511.06581, eq. 9). Both streams have a separate last layer, and a separate last
            layer of ``head_fc_layer_params``, if there is any. Unlike in the paper, the gradient that enters the
            encoder is not scaled by 1/sqrt(2), which Adam would mostly undo.
        noisy: use :class:`~alfx.networks.networks.NoisyFC` for the layers after the encoder (Fortunato et al. 2018,
            arXiv:1706.10295), with new noise at each call, separate for each sample. Evaluation uses no noise.
        noise_std: initial standard deviation of the noise of a unit, sigma_0 in the paper; ``None``: the default of
            ``NoisyFC``, 0.5. Only with ``noisy``.
        num_atoms: number of logits for each action; ``None`` for a single value.
        encoder_kwargs: arguments of the encoder.

    Attributes:
        num_actions: number of actions; output ``i`` belongs to the action ``action_spec.minimum + i``.

    Raises:
        SpecError: the action is not a single discrete one, or the encoder does not support the observation.
        ValueError: ``num_atoms`` is below 2, or ``noise_std`` is given without ``noisy``.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, action_spec: TensorSpec,
                 encoding_network_ctor: Callable[..., Network], use_naive_parallel_network: bool = False,
                 name: str = 'QNetworkBase', head_fc_layer_params: Sequence[Count] = (),
                 head_activation: Activation = torch.relu_, head_kernel_initializer: Initializer | None = None,
                 dueling: bool = False, noisy: bool = False, num_atoms: Annotated[int, Range(minimum=2)] | None = None,
                 noise_std: NonNegative | None = None, **encoder_kwargs: Any):
        super().__init__(input_tensor_spec, (), name)
        if noise_std is not None and not noisy:
            raise ValueError(f'{name}: noise_std is {noise_std}, but noisy is False; set noisy, or remove noise_std')
        self.num_actions = _number_of_actions(action_spec, name)
        self._action_spec, self.num_atoms = action_spec, num_atoms
        self._use_naive_parallel_network = use_naive_parallel_network
        self._noisy = noisy
        noise = {} if noise_std is None else {'std_init': noise_std}
        encoder, size = vector_encoder(encoding_network_ctor, input_tensor_spec, name, **encoder_kwargs)
        self._set_parts(encoder, _make_head(size, self.num_actions, head_fc_layer_params, head_activation,
                                            head_kernel_initializer, dueling, noise if noisy else None, num_atoms))

    @property
    def action_spec(self) -> TensorSpec:
        """Spec of the action."""
        return self._action_spec

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        if self._use_naive_parallel_network or self._noisy:
            return NaiveParallelNetwork(self, n)
        return ParallelQNetwork(self, n, 'parallel_' + self._name)


class ParallelQNetwork(_EncoderAndHead):
    """Stack of ``n`` Q networks: ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, num_actions]``, or with atoms.

    Args:
        q_network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, q_network: QNetworkBase, n: int, name: str = 'ParallelQNetwork'):
        super().__init__(q_network.input_tensor_spec, (), name)
        self._parallelism = n
        self._set_parts(q_network._encoding_net.make_parallel(n), q_network._head.make_parallel(n))


def _split_layers(fc_layer_params: Sequence[int] | None, dueling: bool, noisy: bool
                  ) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the fully connected layers into those of the encoder and those of the head."""
    layers = tuple(fc_layer_params or ())
    if noisy:
        return (), layers
    return (layers[:-1], layers[-1:]) if dueling else (layers, ())


@configurable
class QNetwork(QNetworkBase):
    """Q network with an :class:`~alfx.networks.encoding_networks.EncodingNetwork`.

    Args:
        action_spec: spec of one discrete action, of shape ``()``; ``minimum`` may be any number.
        fc_layer_params: sizes of the fully connected layers before the last one.
        activation: activation of all layers except the last.
        kernel_initializer: initializer of all layers except the last.
        use_naive_parallel_network: see :class:`QNetworkBase`.
        dueling: see ``QNetworkBase``; the two streams have separate last layers of ``fc_layer_params``.
        noisy: see ``QNetworkBase``; all fully connected layers are noisy.
        num_atoms: see ``QNetworkBase``.
        use_layer_norm: use layer norm before the activation of all layers except the last; not with ``dueling`` or
            ``noisy``. After a convolution it normalizes over channels and positions, or with ``'channels'`` over
            the channels of each position.
        noise_std: see ``QNetworkBase``.
        kwargs: arguments of :class:`~alfx.networks.encoding_networks.EncodingNetwork`, except ``output_tensor_spec``,
            ``input_preprocessors_ctor``, ``use_fc_bn`` and the arguments of layer norm, of the last layer and of
            ensembles.

    Raises:
        SpecError: the action is not a single discrete one, or the encoder does not support the observation.
        ValueError: ``num_atoms`` is below 2, or ``use_layer_norm`` is combined with ``dueling`` or ``noisy``.
    """

    @takes_arguments_of(
        EncodingNetwork, without=('output_tensor_spec', 'input_preprocessors_ctor', 'use_fc_bn', 'use_fc_ln',
                                  *UNFORWARDED_ARGUMENTS, *LAST_LAYER_ARGUMENTS, *NORM_ARGUMENTS),
        defaults={'name': 'QNetwork'}, after={'action_spec': 'input_tensor_spec', 'dueling': 'name',
                                              'use_naive_parallel_network': 'kernel_initializer'})
    def __init__(self, action_spec: TensorSpec, fc_layer_params: Sequence[Count] | None, activation: Activation,
                 kernel_initializer: Initializer | None, use_naive_parallel_network: bool = False,
                 dueling: bool = False, noisy: bool = False, num_atoms: Annotated[int, Range(minimum=2)] | None = None,
                 use_layer_norm: LayerNormOption = False, noise_std: NonNegative | None = None, **kwargs: Any):
        if use_layer_norm and (dueling or noisy):
            raise ValueError(f"{kwargs['name']}: use_layer_norm is not supported together with "
                             f"{'dueling' if dueling else 'noisy'}; set one of them to False")
        encoder_layers, head_layers = _split_layers(fc_layer_params, dueling, noisy)
        super().__init__(
            action_spec=action_spec, encoding_network_ctor=EncodingNetwork,
            use_naive_parallel_network=use_naive_parallel_network, head_fc_layer_params=head_layers,
            head_activation=activation, head_kernel_initializer=kernel_initializer, dueling=dueling, noisy=noisy,
            noise_std=noise_std, num_atoms=num_atoms, fc_layer_params=encoder_layers, activation=activation,
            use_fc_ln=bool(use_layer_norm), use_conv_ln=use_layer_norm, kernel_initializer=kernel_initializer, **kwargs)


@configurable
class QRNNNetwork(QNetworkBase):
    """Recurrent Q network with an :class:`~alfx.networks.encoding_networks.LSTMEncodingNetwork`.

    Args:
        fc_layer_params: sizes of the layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or the size of a single one.
        value_fc_layer_params: sizes of the layers after the LSTM layers.
        dueling: see ``QNetworkBase``; the two streams have separate last layers of ``value_fc_layer_params``.
        noisy: see ``QNetworkBase``; all fully connected layers after the LSTM layers are noisy.
        kwargs: arguments of :class:`QNetwork`, except ``use_layer_norm``.

    Raises:
        SpecError: the action is not a single discrete one, or the encoder does not support the observation.
        ValueError: ``num_atoms`` is below 2.
    """

    @takes_arguments_of(QNetwork, without=('use_layer_norm', ), defaults={'name': 'QRNNNetwork'})
    def __init__(self, activation: Activation, kernel_initializer: Initializer | None, dueling: bool, noisy: bool,
                 fc_layer_params: Sequence[Count] | None, lstm_hidden_size: Count | Sequence[Count] = 100,
                 value_fc_layer_params: Sequence[Count] | None = None, **kwargs: Any):
        encoder_layers, head_layers = _split_layers(value_fc_layer_params, dueling, noisy)
        super().__init__(
            encoding_network_ctor=LSTMEncodingNetwork, head_fc_layer_params=head_layers, head_activation=activation,
            head_kernel_initializer=kernel_initializer, dueling=dueling, noisy=noisy,
            pre_fc_layer_params=fc_layer_params, hidden_size=lstm_hidden_size, post_fc_layer_params=encoder_layers,
            activation=activation, kernel_initializer=kernel_initializer, **kwargs)
