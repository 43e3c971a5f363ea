"""Normalization layers, also with separate statistics for each step."""
import pytest
import torch
from torch import nn

from alfx import norm_layers
from alfx.layers import FC


def test_without_steps_batch_norm_matches_torch():
    actual, expected = norm_layers.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3, momentum=0.3)
    for _ in range(3):
        x = torch.randn(8, 3) * 2 + 1
        torch.testing.assert_close(actual(x), expected(x))
    torch.testing.assert_close(actual.state_dict(), expected.state_dict())


@pytest.mark.parametrize('momentum', [0.1, None])
def test_each_step_has_its_own_statistics(momentum):
    stepwise = norm_layers.BatchNorm2d(2, momentum=momentum)
    norm_layers.set_batch_norm_max_steps(nn.Sequential(stepwise), 3)
    separate = [nn.BatchNorm2d(2, momentum=momentum) for _ in range(3)]
    for _ in range(2):
        for step in range(5):
            norm_layers.set_batch_norm_current_step(nn.Sequential(stepwise), step)
            x = torch.randn(4, 2, 3, 3) * (step + 1)
            # Steps beyond the last one share its statistics.
            torch.testing.assert_close(stepwise(x), separate[min(step, 2)](x))
    torch.testing.assert_close(stepwise.running_var, torch.stack([s.running_var for s in separate]))
    stepwise.eval(), separate[1].eval()
    stepwise.set_current_step(1)
    torch.testing.assert_close(stepwise(x), separate[1](x))


def test_current_statistics_become_those_of_each_step():
    layer = norm_layers.BatchNorm1d(2)
    layer(torch.randn(8, 2) + 3)
    mean = layer.running_mean.clone()
    layer.set_max_steps(4)
    torch.testing.assert_close(layer.running_mean, mean.expand(4, 2))
    layer.set_max_steps(1)
    torch.testing.assert_close(layer.running_mean, mean)
    with pytest.raises(ValueError, match='at least 1'):
        layer.set_max_steps(0)


def test_a_recurrent_network_with_plain_batch_norm_is_rejected_by_name():
    assert norm_layers.prepare_rnn_batch_norm(FC(2, 3)) is False
    assert norm_layers.prepare_rnn_batch_norm(FC(2, 3, use_bn=True, bn_ctor=norm_layers.BatchNorm1d)) is True
    with pytest.raises(ValueError, match=r"\['0._norm'\].*bn_ctor=@alfx.norm_layers.BatchNorm1d"):
        norm_layers.prepare_rnn_batch_norm(nn.Sequential(FC(2, 3, use_bn=True)))


def test_stacked_layer_norm_equals_layer_norm_of_each():
    stacked, single = norm_layers.ParallelLayerNorm(3, 5), nn.LayerNorm(5)
    x = torch.randn(4, 3, 5)
    nn.init.normal_(stacked.weight), nn.init.normal_(stacked.bias)
    for i in range(3):
        single.load_state_dict({'weight': stacked.weight[i], 'bias': stacked.bias[i]})
        torch.testing.assert_close(stacked(x)[:, i], single(x[:, i]))
    torch.testing.assert_close(stacked(x[:, :2], first=2), stacked(x)[:, :2])
    stacked.reset_parameters()
    assert bool((stacked.weight == 1).all()) and not stacked.bias.any()
