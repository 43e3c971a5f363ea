"""Decoders: images of the requested shape, upsampling against slow code, invalid settings."""
import gin
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from alfx.gin_utils import ConfError
from alfx.networks import encoding_networks
from alfx.networks.decoding_networks import (UPSAMPLING_MODES, AutoShapeImageDeconvNetwork, ImageDecodingNetwork,
                                             ImageDecodingNetworkV2)
from alfx.tensor_specs import SpecError, TensorSpec


class TestUpsampling:

    def test_it_matches_a_slow_loop_of_repetition_and_convolution(self):
        net = ImageDecodingNetworkV2(4, (2, (3, 3, 1, 1)), (2, 3), 5)
        inputs = torch.randn(2, 4)
        small = net._chain[1](net._chain[0](inputs))
        large = torch.empty(2, 5, 4, 6)
        for row in range(4):
            for column in range(6):
                large[:, :, row, column] = small[:, :, row // 2, column // 2]
        convolution = net._chain[-1]
        expected = F.conv2d(large, convolution.weight, convolution.bias, padding=1).tanh()
        torch.testing.assert_close(net(inputs)[0], expected)

    @pytest.mark.parametrize('mode', UPSAMPLING_MODES)
    def test_each_mode_matches_torch(self, mode):
        net = ImageDecodingNetworkV2(4, (1.5, (2, 1, 1)), 4, 3, upsampling_mode=mode)
        image = torch.randn(2, 3, 4, 4)
        torch.testing.assert_close(net._chain[2](image), F.interpolate(image, scale_factor=1.5, mode=mode))
        assert net.output_spec.shape == (2, 6, 6)

    def test_layers_keep_their_order_and_the_last_has_its_own_activation(self):
        net = ImageDecodingNetworkV2(4, (2, (8, 3, 1), 2, (6, 3, 1), (1, 3, 1)), 3, 2, (7, 9), same_padding=True,
                                     output_activation=torch.sigmoid)
        assert net.output_spec.shape == (1, 12, 12)
        assert [p.shape[0] for p in net.parameters() if p.ndim == 2] == [7, 9, 18]
        images = net(torch.randn(3, 4))[0]
        assert ((images > 0) & (images < 1)).all()

    @pytest.mark.parametrize('n', [1, 3])
    def test_a_stack_matches_its_members(self, n):
        single = ImageDecodingNetworkV2(4, ((3, 3, 1, 1), 2, (2, 3, 1)), 3, 2)
        stack = single.make_parallel(n)
        inputs = torch.randn(5, 4)
        outputs = stack(inputs)[0]
        for i in range(n):
            with torch.no_grad():
                for own, stacked in zip(single.parameters(), stack.parameters(), strict=True):
                    own.copy_(stacked[i])
            torch.testing.assert_close(outputs[:, i], single(inputs)[0])

    @pytest.mark.parametrize('layers, message', [
        ((), 'last element is a convolution'), ((2, ), 'last element is a convolution'),
        (((3, 3), ), r'upsample_conv_layer_params\[0\]: expected a number or'), ((-1, (3, 3, 1)), 'above 0'),
        ((2, (3, 9, 1)), r'upsample_conv_layer_params\[1\]: an image .* becomes empty')])
    def test_malformed_layers_are_rejected(self, layers, message):
        with pytest.raises(ValueError, match=message):
            ImageDecodingNetworkV2(4, layers, 3, 2)

    def test_an_unknown_mode_is_rejected(self):
        with pytest.raises(ConfError, match="'nearest'"):
            ImageDecodingNetworkV2(4, ((3, 3, 1), ), 3, 2, upsampling_mode='nearer')


layer = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))


class TestAutoShape:

    def test_the_value_worked_out_by_hand(self):
        # from 13 x 10 back: (13 + 2 - 4) / 2 = 5 rest 1: 6 pixels, 1 of output padding; (10 + 2 - 4) / 2 = 4: 5 pixels;
        # then (6 - 3) / 2 = 1 rest 1: 2 pixels, and (5 - 3) / 2 = 1: 2 pixels
        net = AutoShapeImageDeconvNetwork(5, ((4, 3, 2), (1, 4, 2, 1)), (1, 13, 10), 6)
        assert net._chain[1](net._chain[0](torch.randn(1, 5))).shape == (1, 6, 2, 2)
        assert [layer._output_padding for layer in net._chain[2:]] == [(1, 0), (1, 0)]
        assert net.output_spec == TensorSpec((1, 13, 10))

    @settings(max_examples=40)
    @given(st.lists(layer, min_size=1, max_size=3), st.integers(1, 20), st.integers(1, 20))
    def test_images_have_the_requested_shape_or_are_rejected(self, layers, height, width):
        shape = layers[-1][0], height, width
        try:
            net = AutoShapeImageDeconvNetwork(3, layers, TensorSpec(shape), 2)
        except ValueError as error:
            assert 'choose smaller kernels or strides' in str(error)
            return
        assert net(torch.randn(2, 3))[0].shape == (2, *shape)

    def test_it_is_an_image_decoding_network_of_the_right_size_and_copyable(self):
        net = AutoShapeImageDeconvNetwork(5, ((4, 3, 2), (1, 4, 2, 1)), (1, 13, 10), 6, (7, ))
        like = ImageDecodingNetwork(5, ((4, 3, 2, 0, (1, 0)), (1, 4, 2, 1, (1, 0))), 2, 6,
                                    preprocess_fc_layer_params=(7, ))
        like.load_state_dict(net.state_dict())
        inputs = torch.randn(2, 5)
        assert torch.equal(net(inputs)[0], like(inputs)[0])
        copy = net.copy()
        assert isinstance(copy, AutoShapeImageDeconvNetwork) and copy.output_spec == net.output_spec
        assert net.make_parallel(2)(inputs)[0].shape == (2, 2, 1, 13, 10)

    @pytest.mark.parametrize('layers, shape, message', [
        ((), (1, 8, 8), 'at least one layer'), (((2, 3, 1), ), (1, 8, 8), 'as many channels'),
        (((1, 3, 1), ), (8, 8), 'as many channels'), (((1, 3), ), (1, 8, 8), r'transconv_layer_params\[0\]'),
        (((1, 3, 1, 0, 0), ), (1, 8, 8), 'the output padding follows'),
        (((1, 9, 1), ), (1, 8, 8), 'choose smaller kernels')])
    def test_unsuitable_decoders_are_rejected(self, layers, shape, message):
        with pytest.raises(ValueError, match=message):
            AutoShapeImageDeconvNetwork(5, layers, shape, 6)


NETWORKS = {
    'ImageDecodingNetwork': dict(transconv_layer_params=((1, 3, 2), ), start_decoding_size=3,
                                 start_decoding_channels=2),
    'ImageDecodingNetworkV2': dict(upsample_conv_layer_params=(2, (1, 3, 1)), start_decoding_size=3,
                                   start_decoding_channels=2),
    'AutoShapeImageDeconvNetwork': dict(transconv_layer_params=((1, 3, 2), ), output_shape=(1, 7, 7),
                                        start_decoding_channels=2),
    'SpatialBroadcastDecodingNetwork': dict(output_height=4, conv_layer_params=((1, 3, 1), )),
}
SIZES = {name: 'start_decoding_channels' for name in NETWORKS} | {'SpatialBroadcastDecodingNetwork': 'output_height'}


@pytest.mark.parametrize('name', list(NETWORKS))
class TestAll:

    def test_a_spec_can_replace_the_number_of_inputs(self, name):
        network = getattr(encoding_networks, name)
        assert network(TensorSpec((4, )), **NETWORKS[name]).input_tensor_spec == TensorSpec((4, ))
        assert network(4, **NETWORKS[name]).input_tensor_spec == TensorSpec((4, ))
        with pytest.raises(SpecError, match='expected a vector'):
            network(TensorSpec((4, 2)), **NETWORKS[name])

    def test_conf_files_can_use_its_documented_name(self, name):
        gin.clear_config()
        selector = f'alfx.networks.encoding_networks.{name}'
        gin.bind_parameter(f'{selector}.{SIZES[name]}', 3)
        arguments = {key: value for key, value in NETWORKS[name].items() if key != SIZES[name]}
        network = getattr(encoding_networks, name)(4, **arguments)
        first_image = network.output_spec.shape[1] if 'output' in SIZES[name] else network._chain[1]._shape[0]
        assert first_image == 3
