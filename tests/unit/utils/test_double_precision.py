"""Layers computed in float64."""
import torch
from torch import nn
from torch.nn import functional as F

from alfx.algorithms.taac.double_precision import LinearLayersInDouble


def test_linear_layers_and_later_ones_are_float64_and_parameters_stay():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 5), nn.LayerNorm(5), nn.Tanh())
    x = torch.randn(7, 2, 4)
    with LinearLayersInDouble():
        convolved, y = network[:2](x), network(x)
    assert convolved.dtype == torch.float32 and y.dtype == torch.float64
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    expected = network[2:].double()(convolved.double())
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)


def test_nothing_else_becomes_float64():
    x = torch.randn(3)
    with LinearLayersInDouble():
        assert (torch.tanh(x) + 1).dtype == torch.float32
        assert F.one_hot(torch.tensor([1, 0])).dtype == torch.int64
