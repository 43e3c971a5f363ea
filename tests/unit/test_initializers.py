"""Gains, fans and distributions of the initializers."""
import math
from functools import partial

import gin
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alfx.initializers import activation_gain, variance_scaling_init
from alfx.layers import FC
from alfx.networks.critic_networks import CriticNetwork
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity


def test_the_gain_keeps_the_second_moment_behind_the_activation():
    # relu passes half of a standard normal: E[relu(z)^2] = 1/2
    assert activation_gain(torch.relu_) == pytest.approx(math.sqrt(2), rel=1e-4)
    # E[(leaky z)^2] = (1 + 0.04) / 2
    assert activation_gain(partial(F.leaky_relu, negative_slope=0.2)) == pytest.approx(math.sqrt(2 / 1.04), rel=1e-4)
    assert activation_gain(identity) == 1.0
    assert activation_gain(lambda x: x) == pytest.approx(1.0, rel=1e-4)
    assert activation_gain(nn.ReLU(inplace=True)) == pytest.approx(math.sqrt(2), rel=1e-4)
    # z^2 has second moment E[z^4] = 3
    assert activation_gain(torch.square) == pytest.approx(1 / math.sqrt(3), rel=1e-3)
    z = torch.randn(2_000_000)
    for f in (torch.tanh, torch.sigmoid, F.elu, F.softplus):
        assert activation_gain(f) == pytest.approx(float(f(z).square().mean())**-0.5, rel=2e-3)


def test_non_elementwise_and_zero_activations_have_gain_one():
    assert activation_gain(partial(torch.softmax, dim=-1)) == 1.0
    assert activation_gain(lambda x: x.sum(dim=-1)) == 1.0
    assert activation_gain(torch.zeros_like) == 1.0
    assert activation_gain(nn.Softmax(dim=-1)) == 1.0
    assert activation_gain(nn.Softmax2d()) == activation_gain(partial(torch.softmax, dim=-3)) == 1.0  # of channels


@pytest.mark.parametrize('distribution', ['truncated_normal', 'normal', 'untruncated_normal', 'uniform'])
def test_the_standard_deviation_is_gain_over_the_root_of_the_fan(distribution):
    weight = torch.empty(300, 200, 3, 2)
    # fan in 200 * 3 * 2 = 1200
    assert variance_scaling_init(weight, gain=3.0, distribution=distribution) is weight
    assert float(weight.std()) == pytest.approx(3 / math.sqrt(1200), rel=0.01)
    assert abs(float(weight.mean())) < 1e-3
    if distribution == 'truncated_normal':
        assert float(weight.abs().max()) <= 2 * 3 / math.sqrt(1200) / 0.8796 + 1e-6
    if distribution == 'uniform':
        assert float(weight.abs().max()) <= math.sqrt(3) * 3 / math.sqrt(1200) + 1e-6


def test_the_fan_is_counted_by_mode_and_transposition():
    def std(**kwargs):
        return float(variance_scaling_init(torch.empty(400, 100, 2), **kwargs).std())

    assert std() == pytest.approx(200**-0.5, rel=0.02)
    assert std(mode='fan_out') == pytest.approx(800**-0.5, rel=0.02)
    assert std(mode='fan_avg') == pytest.approx(500**-0.5, rel=0.02)
    assert std(transposed=True) == pytest.approx(800**-0.5, rel=0.02)


def test_the_activation_counts_with_fan_in_only_and_on_request():
    def std(**kwargs):
        return float(variance_scaling_init(torch.empty(500, 500), nonlinearity=torch.relu_, **kwargs).std())

    assert std() == pytest.approx(math.sqrt(2 / 500), rel=0.02)
    assert std(calc_gain_after_activation=False) == pytest.approx(math.sqrt(1 / 500), rel=0.02)
    assert std(mode='fan_out') == pytest.approx(math.sqrt(1 / 500), rel=0.02)


def test_a_gain_of_zero_gives_zeros():
    for distribution in ('truncated_normal', 'normal', 'uniform'):
        assert not variance_scaling_init(torch.ones(3, 3), gain=0.0, distribution=distribution).any()


def test_the_signal_keeps_its_size_through_a_deep_network():
    x = torch.randn(64, 256)
    for _ in range(20):
        x = torch.relu(x @ variance_scaling_init(torch.empty(256, 256), nonlinearity=torch.relu).T)
    assert 0.3 < float(x.square().mean()) < 3.0


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="unknown mode 'fan'"):
        variance_scaling_init(torch.empty(2, 2), mode='fan')
    with pytest.raises(ValueError, match="unknown distribution 'cauchy'"):
        variance_scaling_init(torch.empty(2, 2), distribution='cauchy')
    with pytest.raises(ValueError, match='at least 2 dimensions'):
        variance_scaling_init(torch.empty(2))


@pytest.fixture
def bindings():
    """Return a function that binds parameters for the duration of a test."""
    yield lambda *lines: gin.parse_config('\n'.join(lines))
    gin.clear_config()


class TestInitialWeights:
    """Default initialization schemes, for layers without an explicit initializer."""

    def test_torch_is_the_default_of_a_linear_layer(self, bindings):
        bindings("initial_weights.weights = 'torch'", "initial_weights.biases = 'torch'")
        torch.manual_seed(0)
        layer = FC(50, 400, activation=torch.relu_)
        bound = 50**-0.5
        for values in (layer.weight, layer.bias):
            assert 0.98 * bound < float(values.abs().max()) <= bound
            assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.05)

    def test_a_gain_multiplies_only_the_weights(self, bindings):
        bindings("initial_weights.weights = 'torch'", "initial_weights.biases = 'torch'")
        layer = FC(100, 300, kernel_init_gain=0.01)
        assert float(layer.weight.abs().max()) <= 0.001 < float(layer.bias.abs().max()) <= 0.1

    def test_orthogonal_rows_have_the_gain_of_the_activation(self, bindings):
        bindings("initial_weights.weights = 'orthogonal'")
        layer = FC(64, 32, activation=torch.relu_)
        torch.testing.assert_close(layer.weight @ layer.weight.T, 2 * torch.eye(32), rtol=1e-3, atol=1e-3)
        assert not layer.bias.any()

    def test_each_stacked_layer_is_drawn_separately(self, bindings):
        bindings("initial_weights.weights = 'orthogonal'")
        layer = FC(8, 8).make_parallel(2)
        for weight in layer.weight:
            torch.testing.assert_close(weight @ weight.T, torch.eye(8), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize('scheme, largest', [('small', 0.003), ('same', 0.25)])
    def test_the_last_layer_of_a_critic(self, bindings, scheme, largest):
        bindings("initial_weights.weights = 'torch'", f"initial_weights.last_layers = '{scheme}'")
        critic = CriticNetwork((TensorSpec((3, )), TensorSpec((2, ))), joint_fc_layer_params=(16, ))
        last = [module for module in critic.modules() if isinstance(module, FC)][-1]
        assert 0.5 * largest < float(last.weight.abs().max()) <= largest

    def test_given_initializers_are_used(self, bindings):
        bindings("initial_weights.weights = 'torch'", "initial_weights.biases = 'torch'")
        layer = FC(4, 4, kernel_initializer=torch.nn.init.ones_, bias_init_value=2.0)
        assert (layer.weight == 1).all() and (layer.bias == 2).all()

    @pytest.mark.parametrize('name', ['weights', 'biases', 'last_layers'])
    def test_an_unknown_scheme_is_rejected_by_name(self, bindings, name):
        bindings(f"initial_weights.{name} = 'glorot'")
        with pytest.raises(ValueError, match=rf"initial_weights\.{name} must be .*found str 'glorot'"):
            FC(4, 4)
