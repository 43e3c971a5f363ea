"""Dropout as a layer, and inside of fully connected layers and networks."""
import pytest
import torch

from alfx import context
from alfx.layers import FC, Dropout
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import TensorSpec

SPEC = TensorSpec((3, ))


def test_dropped_elements_are_zero_and_the_others_are_scaled():
    x = torch.rand(200, 100) + 1.0
    y = Dropout(0.2)(x)
    remaining = y != 0.0
    torch.testing.assert_close(y[remaining], x[remaining] / 0.8)
    assert abs(remaining.float().mean() - 0.8) < 0.01  # five standard deviations: 5 * sqrt(0.2 * 0.8 / 20000) = 0.014


def test_the_gradient_passes_through_kept_elements_only():
    x = torch.ones(50, 4, requires_grad=True)
    y = Dropout(0.5)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2.0 * (y != 0.0))


@pytest.mark.parametrize('mode, drops', [
    ('normal', True), ('replay', True), ('pretrain', True), ('rollout', False), ('eval', False), ('auxiliary', False)])
def test_elements_are_dropped_in_training_only(mode, drops):
    context.set_exe_mode(mode)
    x = torch.ones(100)
    assert torch.equal(Dropout(0.5)(x), x) != drops
    assert torch.equal(Dropout(0.5).eval()(x), x)


def test_rare_drops_of_half_precision_keep_their_rate():
    y = Dropout(1e-4)(torch.ones(10**6, dtype=torch.float16))
    assert 50 < int((y == 0).sum()) < 150  # uniform float16 numbers are multiples of 1 / 2048: 488 zeros


@pytest.mark.parametrize('rate', [1.0, -0.1])
def test_a_rate_out_of_range_is_rejected(rate):
    with pytest.raises(ValueError, match='rate'):
        Dropout(rate)


@pytest.mark.parametrize('args', [{}, dict(use_ln=True), dict(activation=torch.relu_)])
def test_dropout_comes_before_norm_and_activation(args):
    layer = FC(3, 8, dropout=0.5, **args)
    stack = layer.make_parallel(2)
    x = torch.randn(5, 3)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.manual_seed(1)
    dropped = Dropout(0.5)(plain)
    norm = layer._norm or torch.nn.Identity()
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x), layer._activation(norm(dropped)))
    with context.eval_context():
        stacked = stack(x)
        for i in range(2):
            layer.load_state_dict({name: p[i] for name, p in stack.state_dict().items()})
            torch.testing.assert_close(stacked[:, i], layer(x))


def test_each_critic_of_a_stack_has_its_own_mask():
    stack = FC(3, 50, dropout=0.5).make_parallel(2)
    for name in ('weight', 'bias'):
        parameter = getattr(stack, name).data
        parameter[1] = parameter[0]
    y = stack(torch.ones(4, 3))
    assert not torch.equal(y[:, 0] == 0, y[:, 1] == 0) and not torch.equal(y[0] == 0, y[1] == 0)
    assert stack.first_layers(1)(torch.ones(4, 3)).shape == (4, 1, 50)


def test_networks_drop_in_all_layers_except_the_last():
    critic = CriticNetwork((SPEC, SPEC), joint_fc_layer_params=(8, 8), dropout=0.3).make_parallel(2)
    assert sum(isinstance(m, Dropout) for m in critic.modules()) == 2
    value = ValueNetwork(input_tensor_spec=SPEC, fc_layer_params=(8, ), dropout=0.3)
    assert sum(isinstance(m, Dropout) for m in value.modules()) == 1
