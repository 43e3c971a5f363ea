"""Encoders that map observations to a vector, feed-forward or recurrent.

Read next: :mod:`alfx.networks.actor_distribution_networks` and :mod:`alfx.networks.value_networks`, which add heads.
The decoders of :mod:`alfx.networks.decoding_networks` can be imported from here as well.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from alfx.gin_utils import Count, Fraction, configurable, takes_arguments_of
from alfx.layers import (FC, Activation, Initializer, LayerNormOption, NaiveParallelLayer, Norm, NormPosition, Reshape,
                         Size2d, first_layers, make_parallel_input, make_parallel_net, make_parallel_spec, pair)
from alfx.nest.utils import NestCombiner
from alfx.networks.decoding_networks import AutoShapeImageDeconvNetwork as AutoShapeImageDeconvNetwork
from alfx.networks.decoding_networks import ImageDecodingNetwork as ImageDecodingNetwork
from alfx.networks.decoding_networks import ImageDecodingNetworkV2 as ImageDecodingNetworkV2
from alfx.networks.decoding_networks import SpatialBroadcastDecodingNetwork as SpatialBroadcastDecodingNetwork
from alfx.networks.image_layers import LayersNetwork, conv_layers
from alfx.networks.input_preparation import prepare_inputs
from alfx.networks.network import Network
from alfx.networks.networks import LSTMCell
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.norm_layers import ParallelLayerNorm, RmsNorm
from alfx.tensor_specs import (BoundedTensorSpec, Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec,
                               torch_dtype_to_str)


# Arguments of EncodingNetwork that networks with an encoder do not forward.
UNFORWARDED_ARGUMENTS = ('use_batch_ensemble', 'ensemble_size', 'input_with_ensemble_ids', 'use_conv_ln')
LAST_LAYER_ARGUMENTS = ('last_layer_size', 'last_activation', 'last_kernel_initializer', 'last_use_fc_bn',
                        'last_use_fc_ln')
NORM_ARGUMENTS = ('norm', 'norm_position', 'input_norm', 'dropout')


def _refuse_batch_ensemble(use_batch_ensemble: bool, ensemble_size: int, where: str) -> None:
    if ensemble_size != 10:
        raise ValueError(f'{where}: ensemble_size={ensemble_size} has no meaning without use_batch_ensemble, which is '
                         'not supported; use make_parallel(n) for an ensemble')
    if use_batch_ensemble:
        raise ValueError(f'{where}: use_batch_ensemble=True is not supported; use make_parallel(n) for an ensemble')


@configurable
class ImageEncodingNetwork(LayersNetwork):
    """Convolutional encoder.

    Args:
        input_channels: channels of the input.
        input_size: height and width of the input, or one number for both.
        conv_layer_params: for each layer ``(filters, kernel_size, strides[, padding[, pooling_kernel]])``; a pooling
            kernel k adds max pooling over k x k squares.
        use_batch_ensemble: not supported.
        ensemble_size: used with ``use_batch_ensemble`` only.
        same_padding: pad by ``(kernel_size - 1) // 2``; overrides the padding in ``conv_layer_params``.
        activation: activation of all layers.
        kernel_initializer: initializes the weights of a layer in place; ``None`` uses variance scaling.
        flatten_output: return a vector instead of an image.
        name: name of the network.

    Raises:
        ValueError: there are no layers, a layer is malformed, or the images are too small for the layers.
    """

    def __init__(self, input_channels: Count, input_size: Size2d, conv_layer_params: Sequence[tuple],
                 use_batch_ensemble: bool = False, ensemble_size: Count = 10, same_padding: bool = False,
                 activation: Activation = torch.relu_, kernel_initializer: Initializer | None = None,
                 flatten_output: bool = False, name: str = 'ImageEncodingNetwork'):
        _refuse_batch_ensemble(use_batch_ensemble, ensemble_size, name)
        spec = TensorSpec((input_channels, *pair(input_size)))
        super().__init__(spec, (), name)
        modules, shape = conv_layers(spec.shape, conv_layer_params, same_padding, activation, kernel_initializer, name)
        self._output_spec = TensorSpec(shape)
        if flatten_output:
            self._output_spec = TensorSpec((self._output_spec.numel, ))
            modules.append(Reshape(self._output_spec.numel))
        self._set_layers(modules)


def _check_encodable(spec: TensorSpec, with_conv: bool, where: str) -> None:
    """Raise ``SpecError`` for an input that the layers do not support, with advice."""
    found = f'{where}: expected a float32 input, found {torch_dtype_to_str(spec.dtype)} {tuple(spec.shape)}; '
    if spec.dtype == torch.uint8:
        raise SpecError(found + 'images are not converted silently: add @ImageScaleTransformer to '
                        'TrainerConfig.data_transformer_ctor, which scales them to floats')
    if spec.is_discrete:
        raise SpecError(found + _advice_for_integers(spec))
    if spec.dtype != torch.get_default_dtype():
        raise SpecError(found + 'add input_preprocessors=@Cast()')
    if with_conv and spec.ndim != 3:
        raise SpecError(f'{where}: conv_layer_params need images (channels, height, width), found '
                        f'{tuple(spec.shape)}; omit them for vectors')


def _advice_for_integers(spec: TensorSpec) -> str:
    """Return advice on how to convert integers to floats, as quantities or as categories."""
    bounded: Any = BoundedTensorSpec.from_spec(spec)
    size = int(bounded.maximum.max()) - int(bounded.minimum.min()) + 1
    advice = ('for quantities add @ImageScaleTransformer to TrainerConfig.data_transformer_ctor' if size <= 2**16 else
              'for quantities add @ObservationNormalizer to TrainerConfig.data_transformer_ctor and name them in '
              "ObservationNormalizer.fields ([''] if they are the whole observation)")
    advice += ', or set input_preprocessors = @Cast() of this network to take them as they are'
    if size * spec.numel <= 2**24:  # see EmbeddingPreprocessor
        one_hot = '@OneHot() or ' if size <= 2**12 and bounded.minimum.min() >= 0 else ''
        advice += f', for categories set input_preprocessors = {one_hot}@EmbeddingPreprocessor()'
    return advice


@configurable
class EncodingNetwork(PreprocessorNetwork, LayersNetwork):
    """Encoder with optional preprocessing, convolutions and fully connected layers, in this order.

    Images and other tensors are flattened before the fully connected layers.

    Args:
        input_tensor_spec: nest of specs of the input.
        output_tensor_spec: reshapes the output to the shape of this spec.
        input_preprocessors: see :class:`~alfx.networks.preprocessor_networks.PreprocessorNetwork`.
        input_preprocessors_ctor: creates ``input_preprocessors``, called with ``input_tensor_spec``.
        preprocessing_combiner: see ``PreprocessorNetwork``. Without combiner and preprocessors,
            :func:`~alfx.networks.input_preparation.prepare_inputs` chooses both where it can.
        conv_layer_params: see :class:`ImageEncodingNetwork`. Each image of a nested input passes through such
            convolutions.
        fc_layer_params: sizes of the fully connected layers.
        activation: activation of all layers except the last layer.
        kernel_initializer: initializes the weights of a layer in place; ``None`` uses variance scaling.
        use_fc_bn: use batch norm in fully connected layers.
        use_fc_ln: use layer norm in fully connected layers.
        use_batch_ensemble: not supported.
        ensemble_size: used with ``use_batch_ensemble`` only.
        input_with_ensemble_ids: used with ``use_batch_ensemble`` only.
        last_layer_size: size of an additional last layer; ``None`` together with ``last_activation`` and
            ``output_tensor_spec`` uses the number of elements of that spec.
        last_activation: activation of the last layer; required with ``last_layer_size``.
        last_kernel_initializer: initializer of the last layer; ``None`` uses ``kernel_initializer``.
        last_use_fc_bn: use batch norm in the last layer.
        last_use_fc_ln: use layer norm in the last layer.
        name: name of the network.
        use_conv_ln: use layer norm in convolutions, over channels and positions, or with ``'channels'`` over the
            channels of each position.
        norm: creates a norm of the fully connected layers except the last from their number of features, such as
            :class:`~alfx.norm_layers.BatchNorm`; not with ``use_fc_bn`` or ``use_fc_ln``.
        norm_position: apply ``norm`` ``'before'`` or ``'after'`` the activation.
        input_norm: creates a norm of the preprocessed and flattened input; not with convolutions.
        dropout: rate of :class:`~alfx.layers.Dropout` in the fully connected layers except the last, before their norm.

    Raises:
        SpecError: the layers do not support the input; the message says what to do.
        ValueError: arguments contradict each other.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec | None = None,
                 input_preprocessors: Nested = None,
                 input_preprocessors_ctor: Callable[[NestedTensorSpec], Nested] | None = None,
                 preprocessing_combiner: Callable | None = None, conv_layer_params: Sequence[tuple] | None = None,
                 fc_layer_params: Sequence[Count] | None = None, activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None, use_fc_bn: bool = False, use_fc_ln: bool = False,
                 use_batch_ensemble: bool = False, ensemble_size: Count = 10, input_with_ensemble_ids: bool = False,
                 last_layer_size: Count | None = None, last_activation: Activation | None = None,
                 last_kernel_initializer: Initializer | None = None, last_use_fc_bn: bool = False,
                 last_use_fc_ln: bool = False, name: str = 'EncodingNetwork', use_conv_ln: LayerNormOption = False,
                 norm: Norm | None = None, norm_position: NormPosition = 'before', input_norm: Norm | None = None,
                 dropout: Fraction = 0.0):
        _refuse_batch_ensemble(use_batch_ensemble or input_with_ensemble_ids, ensemble_size, name)
        if output_tensor_spec is not None and not isinstance(output_tensor_spec, TensorSpec):
            raise SpecError(f'{name}: output_tensor_spec must be the spec of one tensor, found {output_tensor_spec}; '
                            'use a separate network for each of its parts')
        if last_layer_size is None and last_activation is not None and output_tensor_spec is not None:
            last_layer_size = output_tensor_spec.numel
        if (last_layer_size is None) != (last_activation is None):
            found = getattr(last_activation, '__name__', last_activation)
            raise ValueError(f'{name}: last_layer_size and last_activation must be given together, found '
                             f'{last_layer_size} and {found}')
        if last_layer_size is None and (last_kernel_initializer or last_use_fc_bn or last_use_fc_ln):
            raise ValueError(f'{name}: last_layer_size is required by other arguments whose names begin with last_')
        if input_preprocessors_ctor is not None:
            if input_preprocessors is not None:
                raise ValueError(f'{name}: input_preprocessors and input_preprocessors_ctor cannot be used together')
            input_preprocessors = input_preprocessors_ctor(input_tensor_spec)
        prepared = ''
        is_plain = isinstance(input_tensor_spec, TensorSpec) and input_tensor_spec.is_continuous
        if input_preprocessors is None and not is_plain:
            input_preprocessors, preprocessing_combiner, prepared, has_convolutions = prepare_inputs(
                input_tensor_spec, preprocessing_combiner, activation=activation, use_conv_ln=use_conv_ln,
                kernel_initializer=kernel_initializer,
                **({'conv_layer_params': conv_layer_params} if conv_layer_params else {}))
            conv_layer_params = None if has_convolutions else conv_layer_params
        super().__init__(input_tensor_spec, input_preprocessors, preprocessing_combiner, name)
        self.prepared = prepared
        spec = self.processed_input_tensor_spec
        _check_encodable(spec, bool(conv_layer_params), name)
        modules: list[nn.Module] = []
        shape = tuple(spec.shape)
        if conv_layer_params:
            modules, shape = conv_layers(shape, conv_layer_params, False, activation, kernel_initializer, name,
                                         use_ln=use_conv_ln)
        size = TensorSpec(shape).numel
        if len(shape) != 1:
            modules.append(Reshape(size))
        if input_norm is not None:
            if conv_layer_params:
                raise ValueError(f'{name}: input_norm normalizes vectors; remove it or conv_layer_params')
            modules.append(input_norm(size))
        for width in fc_layer_params or ():
            modules.append(FC(size, width, activation, use_bn=use_fc_bn, use_ln=use_fc_ln,
                              kernel_initializer=kernel_initializer, norm=norm, norm_position=norm_position,
                              dropout=dropout))
            size = width
        if last_layer_size is not None and last_activation is not None:
            initializer = kernel_initializer if last_kernel_initializer is None else last_kernel_initializer
            modules.append(FC(size, last_layer_size, last_activation, use_bn=last_use_fc_bn, use_ln=last_use_fc_ln,
                              kernel_initializer=initializer))
            size = last_layer_size
        self._output_spec = TensorSpec((size, ))
        if output_tensor_spec is not None and tuple(output_tensor_spec.shape) != (size, ):
            if output_tensor_spec.numel != size:
                raise ValueError(f'{name}: the {size} outputs cannot be reshaped to {output_tensor_spec}; '
                                 f'last_layer_size should be {output_tensor_spec.numel}')
            self._output_spec = TensorSpec(output_tensor_spec.shape)
            modules.append(Reshape(*output_tensor_spec.shape))
        self._set_layers(modules)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to ``[B, size]``, or to the shape of ``output_tensor_spec``."""
        if self._preprocess is not None:
            inputs = self._preprocess(inputs)
        for layer in self._chain:
            inputs = layer(inputs)
        return inputs, state

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedEncodingNetwork(self, n, 'parallel_' + self._name)


class StackedEncodingNetwork(EncodingNetwork):
    """Stack of ``n`` encoders; each layer is a single batched product.

    Args:
        network: the encoder to stack.
        n: number of encoders.
        name: name of the network.
    """

    def __init__(self, network: EncodingNetwork, n: int, name: str = 'StackedEncodingNetwork'):
        Network.__init__(self, network.input_tensor_spec, (), name)
        self._stack_preprocessing(network, n)
        self.prepared = network.prepared
        chain = network._chain
        # A leading Reshape gets inputs without the stack dimension if all encoders share them.
        self._shared_reshape = chain[0] if chain and isinstance(chain[0], Reshape) else None
        self._set_layers([make_parallel_net(layer, n) for layer in chain])
        first = next((layer for layer in self._chain if any(True for _ in layer.parameters())), None)
        self._stacks_inputs = first is None or isinstance(first, (NaiveParallelLayer, ParallelLayerNorm, RmsNorm))
        self._output_spec = make_parallel_spec(network.output_spec, n)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, size]``."""
        return self._encode(inputs, self._chain, self._parallelism), state

    def _encode(self, inputs: NestedTensor, chain: list[Any], n: int) -> torch.Tensor:
        """Encode the input with the layers ``chain`` of ``n`` encoders."""
        if self._preprocess is not None:
            inputs = self._preprocess(inputs)
        if inputs.ndim == self.processed_input_tensor_spec.ndim + 1:
            if self._stacks_inputs:
                inputs = make_parallel_input(inputs, n)
            elif self._shared_reshape is not None:
                inputs, chain = self._shared_reshape(inputs), chain[1:]
        for layer in chain:
            inputs = layer(inputs)
        return inputs

    def _first_networks(self, k: int) -> Callable[[NestedTensor], torch.Tensor] | None:
        """Compute only the first ``k`` networks; ``None`` with preprocessors or with a custom combiner."""
        combiner = None if self._combiner is None else getattr(self, '_stacked_combiner', self._combiner)
        if self._preprocessors is not None or not isinstance(combiner, NestCombiner | None):
            return None
        chain = [first_layers(layer, k) for layer in self._chain]
        return None if None in chain else partial(self._encode, chain=chain, n=k)

    def make_parallel(self, n: int) -> Network:
        """Raise ``ValueError``: a stack of networks cannot be stacked again."""
        raise ValueError(f'{self._name} is already a stack of networks')


@configurable
@takes_arguments_of(EncodingNetwork, without=('input_preprocessors_ctor', *UNFORWARDED_ARGUMENTS),
                    defaults={'name': 'ParallelEncodingNetwork'}, after={'n': 'input_tensor_spec'})
def ParallelEncodingNetwork(n: Count, **kwargs: Any) -> StackedEncodingNetwork:
    """Create a stack of ``n`` :class:`EncodingNetwork`.

    Args:
        n: number of encoders.
        kwargs: arguments of :class:`EncodingNetwork`, except ``input_preprocessors_ctor`` and those of ensembles.
    """
    return StackedEncodingNetwork(EncodingNetwork(**kwargs), n, kwargs['name'])


class EncodedNetwork(Network):
    """Network that starts with an encoder, ``_encoding_net``, which may be recurrent."""

    _encoding_net: Network

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Spec of the state of the encoder."""
        return self._encoding_net.state_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of observations ``[B, ...]`` to the output of the encoder."""
        return self._encoding_net(inputs, state)


def vector_encoder(ctor: Callable[..., Network], input_tensor_spec: NestedTensorSpec, name: str, /,
                   **arguments: Any) -> tuple[Network, int]:
    """Create an encoder whose output is a vector.

    Args:
        ctor: creates the encoder; called with ``input_tensor_spec`` and ``arguments``.
        input_tensor_spec: nest of specs of the input.
        name: name of the network that contains it, for messages.
        arguments: arguments of ``ctor``.

    Returns:
        The encoder and the size of its output.

    Raises:
        SpecError: the output is not a vector.
    """
    encoder = ctor(input_tensor_spec, **arguments)
    encoded = encoder.output_spec
    if not isinstance(encoded, TensorSpec) or encoded.ndim != 1:
        raise SpecError(f'{name}: the output of the encoder must be a vector, found {encoded}')
    return encoder, encoded.numel


@configurable
class LSTMEncodingNetwork(Network):
    """Recurrent encoder: an encoder, LSTM layers, and a second encoder.

    The state is a tuple with ``(h, c)`` of each LSTM layer.

    Args:
        pre_fc_layer_params: sizes of the fully connected layers before the LSTM layers.
        hidden_size: sizes of the LSTM layers, or the size of a single one.
        lstm_output_layers: LSTM layers whose outputs are concatenated, a number or several; -1 is the last one.
        post_fc_layer_params: sizes of the fully connected layers after the LSTM layers.
        kwargs: arguments of :class:`EncodingNetwork`, except ``input_preprocessors_ctor``, ``fc_layer_params`` and the
            arguments of norms and ensembles.

    Raises:
        SpecError: the layers do not support the input.
        ValueError: there is no LSTM layer, or ``lstm_output_layers`` do not exist.
    """

    @takes_arguments_of(
        EncodingNetwork, without=('input_preprocessors_ctor', 'fc_layer_params', 'use_fc_bn', 'use_fc_ln',
                                  'last_use_fc_bn', 'last_use_fc_ln', *UNFORWARDED_ARGUMENTS, *NORM_ARGUMENTS),
        defaults={'name': 'LSTMEncodingNetwork'}, after={'pre_fc_layer_params': 'conv_layer_params'})
    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec | None,
                 activation: Activation, kernel_initializer: Initializer | None, last_layer_size: Count | None,
                 last_activation: Activation | None, last_kernel_initializer: Initializer | None, name: str,
                 pre_fc_layer_params: Sequence[Count] | None = None, hidden_size: Count | Sequence[Count] = (100, ),
                 lstm_output_layers: int | Sequence[int] = -1, post_fc_layer_params: Sequence[Count] | None = None,
                 **kwargs: Any):
        sizes = (hidden_size, ) if isinstance(hidden_size, int) else tuple(hidden_size)
        chosen = (lstm_output_layers, ) if isinstance(lstm_output_layers, int) else tuple(lstm_output_layers)
        if not sizes or not chosen or any(not -len(sizes) <= i < len(sizes) for i in chosen):
            raise ValueError(f'{name}: expected at least one LSTM layer, and lstm_output_layers among them, found '
                             f'hidden_size={hidden_size}, lstm_output_layers={lstm_output_layers}')
        super().__init__(input_tensor_spec, (), name)
        self._pre_encoding_net: Network = EncodingNetwork(
            input_tensor_spec, fc_layer_params=pre_fc_layer_params, activation=activation,
            kernel_initializer=kernel_initializer, name=name, **kwargs)
        inputs = (self._pre_encoding_net.output_spec.numel, ) + sizes
        self._set_cells([LSTMCell(size, hidden) for size, hidden in zip(inputs, sizes)])
        self._output_layers = chosen
        size = sum(sizes[i] for i in chosen)
        self._output_spec = TensorSpec((size, ))
        self._post_encoding_net: Network | None = None
        if post_fc_layer_params or last_layer_size is not None or output_tensor_spec is not None:
            self._post_encoding_net = EncodingNetwork(
                TensorSpec((size, )), output_tensor_spec, fc_layer_params=post_fc_layer_params, activation=activation,
                kernel_initializer=kernel_initializer, last_layer_size=last_layer_size,
                last_activation=last_activation, last_kernel_initializer=last_kernel_initializer, name=name)
            self._output_spec = self._post_encoding_net.output_spec
        elif last_activation is not None:
            raise ValueError(f'{name}: last_activation was given without last_layer_size')

    def _set_cells(self, cells: list[Network]) -> None:
        self._cells = nn.ModuleList(cells)
        self._cell_list = cells
        self._state_spec = tuple(cell.state_spec for cell in cells)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to ``[B, size]``, or to the shape of ``output_tensor_spec``."""
        x, _ = self._pre_encoding_net(inputs)
        hidden, new_state = [], []
        for cell, cell_state in zip(self._cell_list, state):
            x, cell_state = cell(x, cell_state)
            hidden.append(x)
            new_state.append(cell_state)
        chosen = [hidden[i] for i in self._output_layers]
        x = chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)
        if self._post_encoding_net is not None:
            x, _ = self._post_encoding_net(x)
        return x, tuple(new_state)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedLSTMEncodingNetwork(self, n, 'parallel_' + self._name)


class StackedLSTMEncodingNetwork(LSTMEncodingNetwork):
    """Stack of ``n`` recurrent encoders.

    Args:
        network: the encoder to stack.
        n: number of encoders.
        name: name of the network.
    """

    def __init__(self, network: LSTMEncodingNetwork, n: int, name: str = 'StackedLSTMEncodingNetwork'):
        Network.__init__(self, network.input_tensor_spec, (), name)
        self._parallelism = n
        self._pre_encoding_net = network._pre_encoding_net.make_parallel(n)
        self._set_cells([cell.make_parallel(n) for cell in network._cell_list])
        self._output_layers = network._output_layers
        post = network._post_encoding_net
        self._post_encoding_net = None if post is None else post.make_parallel(n)
        self._output_spec = make_parallel_spec(network.output_spec, n)

    def make_parallel(self, n: int) -> Network:
        """Raise ``ValueError``: a stack of networks cannot be stacked again."""
        raise ValueError(f'{self._name} is already a stack of networks')
