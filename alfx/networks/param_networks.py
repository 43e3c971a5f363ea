"""Networks with given parameters: ``theta [D]`` for one, ``[n, D]`` for ``n`` networks computed at once.

:class:`StackedParameters` wraps any network; :class:`ParamNetwork` has convolutions and fully connected layers. The
parameters come from particles, a hypernetwork, or the members of a population. Read next:
:mod:`alfx.layers.given_parameters`.
"""
from collections.abc import Sequence
from typing import Any

import torch

from alfx import nest
from alfx.gin_utils import Count, configurable
from alfx.layers import FC, Activation, Initializer, Reshape, Size2d, make_parallel_spec, pair
from alfx.layers.given_parameters import GivenParameters
from alfx.networks.image_layers import LayersNetwork, conv_layers
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, TensorSpec


class StackedParameters(Network):
    """Network of any kind that computes with given parameters.

    ``theta [n, D]`` computes ``n`` networks: inputs are ``[B, ...]``, shared by all, or ``[B, n, ...]``, outputs and
    states ``[B, n, ...]``. ``theta [D]`` computes one network, without the dimension ``n``. A row of ``theta`` has the
    layout of ``torch.nn.utils.parameters_to_vector``. Gradients reach ``theta``; the network itself has no parameters.

    Args:
        network: template; its structure and the distribution of its initial parameters are used.
        n: number of networks with initial parameters until parameters are given; ``None`` is one network without the
            dimension ``n``.
        name: name of the network; ``None`` is ``'given_'`` and the name of ``network``.

    Raises:
        ValueError: the network has no parameters, its copies share parameters, or it has batch norm.
    """

    _theta: torch.Tensor

    def __init__(self, network: Network, n: int | None = None, name: str | None = None):
        name = name or 'given_' + network.name
        super().__init__(network.input_tensor_spec, (), name)
        self._given = GivenParameters(network, name)
        self._single_state_spec = network.state_spec
        self._single_output_spec = network.output_spec
        initial = self._given.initial_parameters(n or 1)
        self.set_parameters(initial if n else initial[0])

    @property
    def param_length(self) -> int:
        """Number of parameters of one network, ``D``."""
        return self._given.param_length

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters of one network, in the order of a row of ``theta``."""
        return self._given.shapes

    @property
    def theta(self) -> torch.Tensor:
        """Current parameters, ``[n, D]`` or ``[D]``."""
        return self._theta

    def initial_parameters(self, n: int) -> torch.Tensor:
        """Return initial parameters ``[n, D]`` of ``n`` new networks."""
        return self._given.initial_parameters(n)

    def prepare(self, n: int) -> None:
        """Create the stack of ``n`` networks now; a first call that creates it cannot be traced."""
        self._given.prepare(n)

    def parameters_of(self, network: Network) -> torch.Tensor:
        """Return the parameters ``[D]`` of a network like the template."""
        return self._given.parameters_of(network)

    def single_network(self, theta: torch.Tensor) -> Network:
        """Create an ordinary, separate network with the parameters ``theta [D]``."""
        return self._given.with_parameters(theta)

    def set_parameters(self, theta: torch.Tensor, reinitialize: bool = False) -> None:
        """Compute with ``theta`` from now on.

        Args:
            theta: ``[n, param_length]`` or ``[param_length]``.
            reinitialize: first fill ``theta`` in place with initial values.

        Raises:
            ValueError: ``theta`` has another shape.
        """
        self._given.check(theta)
        if reinitialize:
            with torch.no_grad():
                theta.copy_(self._given.initial_parameters(theta.numel() // self.param_length).view_as(theta))
        self.__dict__['_theta'] = theta  # not registered: the provider owns it, even if it is an nn.Parameter
        n = theta.shape[0] if theta.ndim == 2 else None
        if n != self._parallelism or self._output_spec is None:
            single = self._single_state_spec, self._single_output_spec
            self._parallelism = n
            self._state_spec, self._output_spec = single if n is None else (make_parallel_spec(x, n) for x in single)

    def apply_parameters(self, theta: torch.Tensor, inputs: NestedTensor, state: NestedTensor = ()
                         ) -> tuple[Any, NestedTensor]:
        """Call the network with ``theta`` and restore the previous parameters.

        Args:
            theta: ``[n, param_length]`` or ``[param_length]``.
            inputs: nest of ``[B, ...]`` or ``[B, n, ...]``.
            state: nest of ``[B, n, ...]``, or ``[B, ...]`` for ``[param_length]``.

        Returns:
            The output and the next state.
        """
        before = self._theta
        self.set_parameters(theta)
        try:
            return self(inputs, state)
        finally:
            self.set_parameters(before)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B, ...]`` or ``[B, n, ...]`` to nests of ``[B, n, ...]``; without ``n`` for one network."""
        try:
            if self._parallelism is not None:
                return self._given.stack(self._theta, self.training)(inputs, state)
            stack = self._given.stack(self._theta.unsqueeze(0), self.training)
            output = stack(inputs, nest.map_structure(lambda x: x.unsqueeze(1), state))
            return nest.map_structure(lambda x: x[:, 0], output)
        finally:
            self._given.release()

    def make_parallel(self, n: int) -> Network:
        """Raise ``ValueError``: a stack of networks cannot be stacked again."""
        raise ValueError(f'{self._name} is already a stack of networks: set parameters [n, {self.param_length}]')


class _Layers(LayersNetwork):
    """Layers of a network with given parameters, used as template."""

    def __init__(self, input_tensor_spec: TensorSpec, modules: list[Any], name: str):
        super().__init__(input_tensor_spec, (), name)
        self._set_layers(modules)


@configurable
class ParamConvNet(StackedParameters):
    """Convolutional network with given parameters.

    Args:
        input_channels: channels of the input.
        input_size: height and width of the input, or one number for both.
        conv_layer_params: for each layer ``(filters, kernel_size, strides[, padding[, pooling_kernel]])``.
        same_padding: pad by ``(kernel_size - 1) // 2``; overrides the padding in ``conv_layer_params``.
        activation: activation of all layers.
        use_bias: add biases.
        use_ln: normalize over channels and positions.
        n_groups: number of networks until parameters are given; ``None`` is one.
        kernel_initializer: initializes the weights of a layer in place; ``None`` uses variance scaling.
        flatten_output: return a vector instead of an image.
        name: name of the network.

    Raises:
        ValueError: there are no layers, a layer is malformed, or the images are too small for the layers.
    """

    def __init__(self, input_channels: int, input_size: Size2d, conv_layer_params: Sequence[tuple],
                 same_padding: bool = False, activation: Activation = torch.relu_, use_bias: bool = False,
                 use_ln: bool = False, n_groups: int | None = None, kernel_initializer: Initializer | None = None,
                 flatten_output: bool = False, name: str = 'ParamConvNet'):
        spec = TensorSpec((input_channels, *pair(input_size)))
        modules, shape = conv_layers(spec.shape, conv_layer_params, same_padding, activation, kernel_initializer, name,
                                     use_bias, use_ln)
        if flatten_output:
            modules.append(Reshape(TensorSpec(shape).numel))
        super().__init__(_Layers(spec, modules, name), n_groups, name)


@configurable
class ParamNetwork(StackedParameters):
    """Network with given parameters: optional convolutions, then optional fully connected layers.

    Args:
        input_tensor_spec: spec of the input; an image ``(channels, height, width)`` for convolutions.
        conv_layer_params: see :class:`ParamConvNet`.
        fc_layer_params: sizes of the fully connected layers, or pairs ``(size, use_bias)``.
        use_conv_bias: add biases to convolutions.
        use_conv_ln: normalize over channels and positions after convolutions.
        use_fc_bias: add biases to fully connected layers.
        use_fc_ln: use layer norm in fully connected layers.
        n_groups: number of networks until parameters are given; ``None`` is one.
        activation: activation of all layers except the last one.
        kernel_initializer: initializes the weights of a layer in place; ``None`` uses variance scaling.
        last_layer_size: size of an additional last layer.
        last_activation: activation of the last layer; required with ``last_layer_size``.
        last_use_bias: add a bias to the last layer.
        last_use_ln: use layer norm in the last layer.
        name: name of the network.

    Raises:
        ValueError: arguments contradict each other.
    """

    def __init__(self, input_tensor_spec: TensorSpec, conv_layer_params: Sequence[tuple] | None = None,
                 fc_layer_params: Sequence[Count | tuple[Count, bool]] | None = None, use_conv_bias: bool = False,
                 use_conv_ln: bool = False,
                 use_fc_bias: bool = True, use_fc_ln: bool = False, n_groups: int | None = None,
                 activation: Activation = torch.relu_, kernel_initializer: Initializer | None = None,
                 last_layer_size: int | None = None, last_activation: Activation | None = None,
                 last_use_bias: bool = True, last_use_ln: bool = False, name: str = 'ParamNetwork'):
        if (last_layer_size is None) != (last_activation is None):
            raise ValueError(f'{name}: last_layer_size and last_activation must be given together, found '
                             f'{last_layer_size} and {last_activation}')
        modules: list[Any] = []
        shape = tuple(input_tensor_spec.shape)
        if conv_layer_params:
            if len(shape) != 3:
                raise ValueError(f'{name}: conv_layer_params need images (channels, height, width), found {shape}; '
                                 'omit them for vectors')
            modules, shape = conv_layers(shape, conv_layer_params, False, activation, kernel_initializer, name,
                                         use_conv_bias, use_conv_ln)
        size = TensorSpec(shape).numel
        if len(shape) != 1:
            modules.append(Reshape(size))
        layers = [(*_size_and_bias(params, use_fc_bias, name), use_fc_ln, activation)
                  for params in fc_layer_params or ()]
        if last_layer_size is not None and last_activation is not None:
            layers.append((last_layer_size, last_use_bias, last_use_ln, last_activation))
        for width, use_bias, use_ln, function in layers:
            modules.append(FC(size, width, function, use_bias=use_bias, use_ln=use_ln,
                              kernel_initializer=kernel_initializer))
            size = width
        super().__init__(_Layers(input_tensor_spec, modules, name), n_groups, name)


def _size_and_bias(params: Any, use_bias: bool, where: str) -> tuple[int, bool]:
    if isinstance(params, int):
        return params, use_bias
    if isinstance(params, Sequence) and 1 <= len(params) <= 2 and isinstance(params[0], int):
        return params[0], bool(params[1]) if len(params) > 1 else use_bias
    raise ValueError(f'{where}: fc_layer_params: expected sizes or pairs (size, use_bias), found {params!r}')


def given_network(network: Network) -> StackedParameters:
    """Return a network with given parameters: ``network`` itself if it is one, otherwise a wrapper of it."""
    return network if isinstance(network, StackedParameters) else StackedParameters(network)

