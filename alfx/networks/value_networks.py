"""Value networks: an encoder whose last layer outputs the values of an observation."""
from collections.abc import Callable, Sequence
from typing import Any

from alfx.gin_utils import Count, configurable, takes_arguments_of
from alfx.initializers import small_last_layer_init
from alfx.networks.encoding_networks import (LAST_LAYER_ARGUMENTS, NORM_ARGUMENTS, UNFORWARDED_ARGUMENTS,
                                             EncodedNetwork, EncodingNetwork, LSTMEncodingNetwork)
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.utils.math_ops import identity

_SCALAR = TensorSpec(())
# Small initial values, because large ones would dominate the error of the first targets.
_last_kernel_initializer = small_last_layer_init(0.03)


@configurable
class ValueNetworkBase(EncodedNetwork):
    """Encoder of any kind with a last layer of values ``[B, *output_tensor_spec.shape]``.

    Args:
        input_tensor_spec: nest of specs of the observation.
        output_tensor_spec: spec of the values; ``()`` for a scalar.
        encoding_network_ctor: creates the encoder; called with ``input_tensor_spec``, ``output_tensor_spec``,
            ``last_layer_size``, ``last_activation``, ``last_kernel_initializer`` and ``encoder_kwargs``.
        name: name of the network.
        encoder_kwargs: arguments of the encoder.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec,
                 encoding_network_ctor: Callable[..., Network], name: str = 'ValueNetworkBase', **encoder_kwargs: Any):
        super().__init__(input_tensor_spec, (), name)
        self._encoding_net = encoding_network_ctor(
            input_tensor_spec, output_tensor_spec=output_tensor_spec, last_layer_size=output_tensor_spec.numel,
            last_activation=identity, last_kernel_initializer=_last_kernel_initializer, **encoder_kwargs)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelValueNetwork(self, n, 'parallel_' + self._name)


@configurable
class ValueNetwork(ValueNetworkBase):
    """Value network with an :class:`~alfx.networks.encoding_networks.EncodingNetwork`.

    Args:
        output_tensor_spec: spec of the values; ``()`` for a scalar.
        kwargs: arguments of :class:`~alfx.networks.encoding_networks.EncodingNetwork`, except those of the last layer
            and of ensembles.

    Raises:
        SpecError: the encoder does not support the observation.
    """

    @takes_arguments_of(EncodingNetwork, without=(*UNFORWARDED_ARGUMENTS, *LAST_LAYER_ARGUMENTS),
                        defaults={'name': 'ValueNetwork'})
    def __init__(self, output_tensor_spec: TensorSpec = _SCALAR, **kwargs: Any):
        super().__init__(output_tensor_spec=output_tensor_spec, encoding_network_ctor=EncodingNetwork, **kwargs)


class ParallelValueNetwork(EncodedNetwork):
    """Stack of ``n`` value networks: ``[B, ...]`` or ``[B, n, ...]`` to values ``[B, n, *output_tensor_spec.shape]``.

    Args:
        value_network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, value_network: ValueNetworkBase, n: int, name: str = 'ParallelValueNetwork'):
        super().__init__(value_network.input_tensor_spec, (), name)
        self._parallelism = n
        self._encoding_net = value_network._encoding_net.make_parallel(n)


@configurable
class ValueRNNNetwork(ValueNetworkBase):
    """Recurrent value network with an :class:`~alfx.networks.encoding_networks.LSTMEncodingNetwork`.

    Args:
        fc_layer_params: sizes of the layers before the LSTM layers.
        lstm_hidden_size: sizes of the LSTM layers, or the size of a single one.
        value_fc_layer_params: sizes of the layers after the LSTM layers.
        kwargs: arguments of :class:`ValueNetwork`, except ``input_preprocessors_ctor`` and those of norms.

    Raises:
        SpecError: the encoder does not support the observation.
    """

    @takes_arguments_of(ValueNetwork, without=('input_preprocessors_ctor', 'use_fc_bn', 'use_fc_ln', *NORM_ARGUMENTS),
                        defaults={'name': 'ValueRNNNetwork'})
    def __init__(self, fc_layer_params: Sequence[Count] | None, lstm_hidden_size: Count | Sequence[Count] = 100,
                 value_fc_layer_params: Sequence[Count] | None = None, **kwargs: Any):
        super().__init__(
            encoding_network_ctor=LSTMEncodingNetwork, pre_fc_layer_params=fc_layer_params,
            hidden_size=lstm_hidden_size, post_fc_layer_params=value_fc_layer_params, **kwargs)
