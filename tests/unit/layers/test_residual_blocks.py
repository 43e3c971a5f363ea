"""Residual blocks of convolutions."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alfx import layers
from alfx.norm_layers import BatchNorm2d


def random_parameters(block):
    for p in block.parameters():
        nn.init.normal_(p)
    return block


@pytest.mark.parametrize('transpose', [False, True])
@pytest.mark.parametrize('v1_5', [False, True])
@pytest.mark.parametrize('stride, size', [(1, (7, 5)), (2, (7, 6)), (3, (5, 4))])
def test_the_output_shape_is_known_in_advance(transpose, v1_5, stride, size):
    block = layers.BottleneckBlock(3, (3, 5), (4, 2, 6), stride, transpose=transpose, v1_5=v1_5)
    x = torch.randn(2, 3, *size)
    before = x.clone()
    y = block(x)
    assert tuple(y.shape[1:]) == block.calc_output_shape((3, *size))
    height, width = ((s * stride if transpose else -(-s // stride)) for s in size)
    assert y.shape == (2, 6, height, width) and bool((y >= 0).all())
    y.sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert torch.equal(x, before)


@pytest.mark.parametrize('v1_5', [False, True])
def test_a_bottleneck_block_is_three_convolutions_and_a_shortcut(v1_5):
    block = random_parameters(layers.BottleneckBlock(3, 3, (4, 2, 6), 2, v1_5=v1_5, with_batch_normalization=False))
    first, middle, last = block._body
    x = torch.randn(2, 3, 8, 8)
    y = F.relu(F.conv2d(x, first.weight, first.bias, 1 if v1_5 else 2))
    y = F.relu(F.conv2d(y, middle.weight, middle.bias, 2 if v1_5 else 1, 1))
    y = F.conv2d(y, last.weight, last.bias) + F.conv2d(x, block._shortcut.weight, block._shortcut.bias, 2)
    torch.testing.assert_close(block(x), F.relu(y))
    assert first.weight.shape == (4, 3, 1, 1) and middle.weight.shape == (2, 4, 3, 3)


def test_a_transposed_block_is_the_adjoint_of_a_block_in_its_convolutions():
    # <conv(x), y> = <x, transposed(y)> where the strides fit: then output_padding = stride - 1 makes the sizes meet
    block = layers.BottleneckBlock(1, 3, (1, 1, 1), 2, transpose=True, with_batch_normalization=False)
    transposed = block._body[1]
    x, y = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 4, 4)
    forward = F.conv2d(x, transposed.weight, None, 2, 1)
    backward = F.conv_transpose2d(y, transposed.weight, None, 2, 1, 1)
    torch.testing.assert_close((forward * y).sum(), (x * backward).sum())
    torch.testing.assert_close(transposed(y), F.relu(backward + transposed.bias.view(1, 1, 1, 1)))


def test_a_block_of_zero_weights_is_its_shortcut():
    block = layers.BottleneckBlock(2, 3, (4, 4, 2), 1, with_batch_normalization=False)
    assert len(list(block.parameters())) == 6
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(3, 2, 5, 5)
    torch.testing.assert_close(block(x), F.relu(x))


def test_batch_norm_is_made_by_its_constructor_and_frozen_in_evaluation():
    block = layers.BottleneckBlock(2, 3, (4, 4, 6), 2, bn_ctor=BatchNorm2d)
    norms = [m for m in block.modules() if isinstance(m, BatchNorm2d)]
    assert len(norms) == 4  # three convolutions and the shortcut
    block(torch.randn(4, 2, 6, 6))
    block.eval()
    before = copy.deepcopy(block.state_dict())
    block(torch.randn(4, 2, 6, 6))
    assert all(torch.equal(before[k], v) for k, v in block.state_dict().items())


def test_several_blocks_can_be_a_stack_with_their_own_weights():
    chain = layers.Sequential(layers.BottleneckBlock(2, 3, (4, 2, 4), 2), layers.ResidueBlock(4, 4, 3, 1))
    stack = layers.make_parallel_net(chain, 3)
    y = stack(torch.randn(5, 3, 2, 6, 6))
    assert y.shape == (5, 3, 4, 3, 3)


def test_wrong_arguments_are_rejected():
    with pytest.raises(ValueError, match='odd kernel_size'):
        layers.BottleneckBlock(2, 4, (4, 4, 2), 1)
    with pytest.raises(ValueError, match='three filters'):
        layers.BottleneckBlock(2, 3, (4, 4), 1)
    with pytest.raises(ValueError, match='found \\(3, 8, 8\\)'):
        layers.BottleneckBlock(2, 3, (4, 4, 2), 1).calc_output_shape((3, 8, 8))
