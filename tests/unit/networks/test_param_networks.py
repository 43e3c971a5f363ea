"""Networks and layers with parameters passed from outside."""
import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from alfx.layers import FC, ParamConv2D, ParamFC
from alfx.layers.sequential import NaiveParallelLayer
from alfx.networks.containers import Sequential
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.param_networks import ParamConvNet, ParamNetwork, StackedParameters, given_network
from alfx.tensor_specs import TensorSpec

VECTOR, IMAGE = TensorSpec((3, )), TensorSpec((2, 8, 8))


def network():
    return EncodingNetwork(VECTOR, fc_layer_params=(4, ), last_layer_size=2, last_activation=torch.tanh)


def test_theta_rows_follow_the_parameter_layout_of_torch():
    single = network()
    stacked = StackedParameters(single)
    theta = torch.nn.utils.parameters_to_vector(single.parameters()).detach()
    assert torch.equal(stacked.parameters_of(single), theta) and stacked.param_length == theta.numel() == 26
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(stacked.apply_parameters(theta, inputs)[0], single(inputs)[0])
    torch.testing.assert_close(stacked.single_network(theta)(inputs)[0], single(inputs)[0])


def test_theta_without_a_network_dimension_is_one_recurrent_network():
    single = LSTMEncodingNetwork(VECTOR, hidden_size=5)
    stacked = StackedParameters(single)
    stacked.set_parameters(stacked.parameters_of(single))
    inputs, state = torch.randn(4, 3), tuple((torch.randn(4, 5), torch.randn(4, 5)) for _ in range(1))
    assert stacked.state_spec == single.state_spec and stacked.output_spec == single.output_spec
    output, ((h, c), ) = stacked(inputs, state)
    expected, ((expected_h, expected_c), ) = single(inputs, state)
    for actual, reference in ((output, expected), (h, expected_h), (c, expected_c)):
        torch.testing.assert_close(actual, reference)


def test_the_number_of_networks_follows_the_given_parameters():
    stacked = StackedParameters(network(), 3)
    assert stacked(torch.randn(5, 3))[0].shape == (5, 3, 2) and stacked.output_spec == TensorSpec((3, 2))
    stacked.set_parameters(stacked.initial_parameters(7))
    assert stacked(torch.randn(5, 3))[0].shape == (5, 7, 2) and stacked.output_spec == TensorSpec((7, 2))
    stacked.apply_parameters(stacked.initial_parameters(2), torch.randn(5, 3))
    assert stacked(torch.randn(5, 7, 3))[0].shape == (5, 7, 2)


def test_initial_parameters_are_drawn_separately_for_each_network():
    rows = StackedParameters(network()).initial_parameters(2)
    assert rows.shape == (2, 26) and not torch.equal(rows[0], rows[1])
    theta = torch.zeros(2, 26)
    stacked = StackedParameters(network())
    stacked.set_parameters(theta, reinitialize=True)
    assert stacked.theta is theta and bool(theta.any(dim=1).all())


def test_calls_do_not_retain_the_graph_of_the_parameters():
    stacked = StackedParameters(network())
    theta = torch.randn(2, 26, requires_grad=True) * 1.0
    stacked.apply_parameters(theta, torch.randn(5, 3))
    alive = weakref.ref(theta)
    del theta
    gc.collect()
    assert alive() is None


def test_computing_changes_no_generator_and_accepts_external_parameters():
    stacked = StackedParameters(network())
    theta = torch.nn.Parameter(stacked.initial_parameters(2))
    before = torch.get_rng_state()
    stacked.set_parameters(theta)
    stacked(torch.ones(5, 3))
    assert torch.equal(torch.get_rng_state(), before) and not list(stacked.parameters())


@pytest.mark.parametrize('theta', [torch.zeros(2, 25), torch.zeros(25), torch.zeros(1, 2, 26), torch.zeros(0, 26)])
def test_parameters_of_another_length_are_rejected(theta):
    with pytest.raises(ValueError, match=r'given_.*: expected parameters \[n, 26\] or \[26\], found'):
        StackedParameters(network()).set_parameters(theta)


def test_parameters_that_networks_share_are_rejected():
    class Shared(FC):

        def copy(self):
            return self

        def make_parallel(self, n):
            return NaiveParallelLayer(self, n)

    stack = StackedParameters(Sequential(Shared(3, 3), FC(3, 3)))
    stack.set_parameters(torch.zeros(2, 24))
    with pytest.raises(ValueError, match='shares parameters between networks'):
        stack(torch.zeros(4, 3))
    with pytest.raises(ValueError, match='set parameters'):
        StackedParameters(network()).make_parallel(2)


def test_a_layer_that_a_network_uses_twice_gets_the_same_parameters():
    layer = FC(3, 3, torch.tanh)
    stack, theta, inputs = StackedParameters(Sequential(layer, layer)), torch.randn(2, 12), torch.randn(5, 3)
    stack.set_parameters(theta)
    for row, output in zip(theta, stack(inputs)[0].unbind(1)):
        torch.nn.utils.vector_to_parameters(row, layer.parameters())
        torch.testing.assert_close(output, layer(layer(inputs)))


@pytest.mark.parametrize('shared', [True, False])
def test_a_layer_uses_given_parameters(shared):
    layer = ParamFC(3, 4, activation=torch.tanh, n_groups=2)
    weight, bias = torch.randn(2, 4, 3), torch.randn(2, 4)
    layer.set_parameters(torch.cat([weight.flatten(1), bias], dim=1))
    assert (layer.weight_length, layer.bias_length, layer.param_length) == (12, 4, 16)
    assert torch.equal(layer.weight, weight) and torch.equal(layer.bias, bias)
    inputs = torch.randn(5, 3) if shared else torch.randn(5, 2, 3)
    own = [inputs, inputs] if shared else inputs.unbind(1)
    expected = torch.stack([torch.tanh(F.linear(x, w, b)) for x, w, b in zip(own, weight, bias)], dim=1)
    torch.testing.assert_close(layer(inputs), expected)
    with pytest.raises(ValueError, match='n_groups = 2'):
        layer.set_parameters(torch.zeros(3, 16))


def test_a_convolution_uses_given_parameters():
    layer = ParamConv2D(2, 3, 3, activation=torch.tanh, strides=2, padding=1, pooling_kernel=2, use_bias=True)
    weight, bias = torch.randn(4, 3, 2, 3, 3), torch.randn(4, 3)
    layer.set_parameters(torch.cat([weight.flatten(1), bias], dim=1))
    inputs = torch.randn(5, 2, 8, 8)
    expected = torch.stack([F.max_pool2d(torch.tanh(F.conv2d(inputs, w, b, 2, 1)), 2) for w, b in zip(weight, bias)], 1)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-5)
    layer.set_parameters(torch.cat([weight[0].flatten(), bias[0]]))
    torch.testing.assert_close(layer(inputs), expected[:, 0], rtol=1e-4, atol=1e-5)


def test_initial_parameters_of_a_layer_can_be_drawn_in_place():
    layer, theta = ParamFC(3, 4, use_bias=False), torch.zeros(2, 12)
    layer.set_parameters(theta, reinitialize=True)
    assert bool(theta.any(dim=1).all()) and layer.bias is None and layer.bias_length == 0


def test_a_convolutional_network_has_the_given_layers():
    stacked = ParamNetwork(IMAGE, conv_layer_params=((3, 3, 1, 1, 2), ), fc_layer_params=(5, (4, False)),
                           use_conv_bias=True, use_conv_ln=True, use_fc_ln=True, last_layer_size=2,
                           last_activation=torch.tanh, last_use_bias=False, n_groups=2)
    convolution, norm, first, second = 3 * 2 * 9 + 3, 2 * 3, 48 * 5 + 5 + 2 * 5, 5 * 4 + 2 * 4
    assert stacked.param_length == convolution + norm + first + second + 4 * 2
    assert stacked(torch.randn(6, 2, 8, 8))[0].shape == (6, 2, 2)
    assert ParamConvNet(2, 8, ((3, 3, 1), ), same_padding=True)(torch.randn(6, 2, 8, 8))[0].shape == (6, 3, 8, 8)
    flat = ParamConvNet(2, 8, ((3, 3, 1), ), n_groups=2, flatten_output=True)
    assert flat(torch.randn(6, 2, 8, 8))[0].shape == (6, 2, 108)


@pytest.mark.parametrize('arguments, message', [
    (dict(last_layer_size=2), 'must be given together'), (dict(fc_layer_params=('a', )), 'True or False|pairs'),
    (dict(conv_layer_params=((3, 3, 1), )), 'need images')])
def test_arguments_that_contradict_each_other_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParamNetwork(VECTOR, **arguments)


def test_a_network_with_given_parameters_is_not_wrapped_again():
    stacked = ParamNetwork(VECTOR, fc_layer_params=(2, ))
    assert given_network(stacked) is stacked
    assert given_network(Sequential(FC(3, 2))).param_length == 8
