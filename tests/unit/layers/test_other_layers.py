"""Layers without weights, containers of layers, images and fixed decoding."""
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alfx import layers, nest
from alfx.layers.activations import is_elementwise, out_of_place
from alfx.nest.utils import NestConcat
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils import math_ops

ELEMENTWISE = [layers.Identity(), layers.Cast(torch.float64), layers.OneHot(4), layers.AddN(), layers.Detach(),
               layers.Scale(2.0), layers.ScaleGradient(2.0), layers.GetFields('a')]


@pytest.mark.parametrize('layer', ELEMENTWISE, ids=lambda layer: type(layer).__name__)
def test_an_elementwise_layer_is_its_own_stack(layer):
    assert layer.make_parallel(3) is layer


@pytest.mark.parametrize('layer, shape', [(layers.Transpose(0, -1), (2, 3, 4)), (layers.Permute(2, 0, -2), (2, 3, 4)),
                                          (layers.Reshape(4, -1), (2, 6)), (layers.Reshape((3, 4)), (12, )),
                                          (layers.Sum(0), (2, 3)), (layers.Sum((0, -1)), (2, 3, 4))], ids=str)
def test_a_layer_of_dimensions_counts_without_the_batch_and_stacks(layer, shape):
    x = torch.randn(5, 3, *shape)
    stack = layers.make_parallel_net(layer, 3)
    expected = torch.stack([layer(x[:, i]) for i in range(3)], dim=1)
    torch.testing.assert_close(stack(x), expected)


def test_simple_layers_compute_their_formulas():
    x = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(layers.Transpose()(x), x.transpose(1, 2))
    assert torch.equal(layers.Permute(1, 0)(x), x.permute(0, 2, 1))
    assert torch.equal(layers.Reshape(2, 6)(x), x.reshape(2, 2, 6))
    assert torch.equal(layers.Sum(dim=-1)(x), x.sum(-1))
    assert torch.equal(layers.AddN()((x, x, x)), 3 * x)
    assert layers.OneHot(3)(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert layers.Cast()(torch.tensor([1])).dtype == torch.float32
    assert layers.Cast('float64')(torch.tensor([1])).dtype == torch.float64
    assert layers.Lambda(lambda y: y + 1)(1) == 2
    assert torch.equal(layers.Identity()(x), x)
    nested = {'a': {'b': 1}, 'c': 2}
    assert layers.GetFields(('a.b', 'c'))(nested) == (1, 2)
    assert layers.GetFields(x='a', y='c')(nested) == {'x': {'b': 1}, 'y': 2}
    with pytest.raises(LookupError, match="did you mean 'a'"):
        layers.GetFields('aa')(nested)
    with pytest.raises(ValueError, match='either field_nest or named fields'):
        layers.GetFields('a', b='c')
    with pytest.raises(ValueError, match='not a permutation'):
        layers.Permute(0, 0)


def test_gradients_are_detached_or_scaled():
    x = torch.ones(2, requires_grad=True)
    assert not layers.Detach()(x).requires_grad
    assert not layers.Detach()({'a': x})['a'].requires_grad
    y = layers.ScaleGradient(0.25)(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad.tolist() == [0.25, 0.25]
    assert layers.Scale(3.0)(x).tolist() == [3, 3]


def test_sequential_runs_modules_one_after_the_other():
    a, b = layers.FC(3, 4), layers.FC(4, 2)
    x = torch.randn(5, 3)
    chain = layers.Sequential(a, torch.relu_, b)
    torch.testing.assert_close(chain(x), b(torch.relu(a(x))))
    assert chain[0] is a and len(chain) == 3
    assert {name for name, _ in chain.named_parameters()} == {'0.weight', '0.bias', '2.weight', '2.bias'}


def test_sequential_selects_results_by_name():
    x = {'x': torch.randn(5, 3), 'y': torch.randn(5, 2)}
    a, b = layers.FC(3, 4), layers.FC(6, 2)
    chain = layers.Sequential(('input.x', a), named=torch.tanh, joined=(('input.y', 'named'), NestConcat()), out=b,
                              output={'out': 'out', 'parts': ('named', 'input.y', '')})
    result = chain(x)
    named = torch.tanh(a(x['x']))
    expected = b(torch.cat([x['y'], named], -1))
    torch.testing.assert_close(result, {'out': expected, 'parts': (named, x['y'], expected)})


def test_sequential_selects_within_the_last_result():
    chain = layers.Sequential(layers.Branch(a=layers.Scale(2.0), b=layers.Scale(3.0)), ('.b', layers.Scale(10.0)))
    assert chain(torch.ones(1)).item() == 30.0


def test_in_place_activations_change_neither_input_nor_named_results():
    x = torch.tensor([[-1.0, 2.0]])
    chain = layers.Sequential(nn.ReLU(inplace=True), a=layers.Scale(-1.0), b=torch.relu_, output=('a', 'b'))
    assert [y.tolist() for y in chain(x)] == [[[0, -2]], [[0, 0]]]
    branch = layers.Branch(torch.tanh_, partial(F.relu, inplace=True))
    branch(x)
    layers.Branch(math_ops.softsign_, torch.tanh_)(x)
    assert x.tolist() == [[-1, 2]] and is_elementwise(math_ops.softsign_)


def test_wrong_chains_are_rejected_by_name():
    with pytest.raises(ValueError, match="element 'b': there is no earlier result 'aa'.*did you mean 'a'"):
        layers.Sequential(a=layers.Identity(), b=('aa', layers.Identity()))
    with pytest.raises(ValueError, match="output: there is no earlier result 'c'"):
        layers.Sequential(layers.Identity(), output='c')
    with pytest.raises(ValueError, match="element '0' is not a module"):
        layers.Sequential(3)
    with pytest.raises(ValueError, match="cannot be named 'input'"):
        layers.Sequential(input=layers.Identity())
    with pytest.raises(ValueError, match="cannot be named 'forward'"):
        layers.Sequential(forward=layers.Identity())
    with pytest.raises(ValueError, match='at least one module'):
        layers.Sequential()
    with pytest.raises(ValueError, match='either by position or by name'):
        layers.Branch(layers.Identity(), a=layers.Identity())


def test_branch_gives_the_nest_of_results():
    x = torch.ones(2, 1)
    assert [y.sum().item() for y in layers.Branch(layers.Scale(2.0), layers.Scale(3.0))(x)] == [4, 6]
    result = layers.Branch({'a': layers.Scale(2.0), 'b': (torch.neg, )})(x)
    assert result['a'].sum() == 4 and result['b'][0].sum() == -2


def sequential():
    return layers.Sequential(layers.FC(3, 4), torch.relu_, a=layers.Branch(x=nn.Linear(4, 2), y=layers.FC(4, 2)),
                             b=(('a.x', 'a.y'), NestConcat()))


def test_a_stack_of_containers_matches_each_container():
    chain = sequential()
    stack = chain.make_parallel(2)
    x = torch.randn(5, 2, 3)
    out = stack(x)
    for i in range(2):
        fc, branch = stack[0], stack[2]
        hidden = torch.relu(F.linear(x[:, i], fc.weight[i], fc.bias[i]))
        naive = dict(branch.named_children())['x']
        y = dict(branch.named_children())['y']
        expected = torch.cat([naive._layers[i](hidden), F.linear(hidden, y.weight[i], y.bias[i])], -1)
        torch.testing.assert_close(out[:, i], expected)


def test_every_layer_can_be_stacked_naively():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    stack = layers.make_parallel_net(module, 2)
    assert isinstance(stack, layers.NaiveParallelLayer)
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(stack(x)[:, 1], stack._layers[1](x[:, 1]))
    assert not torch.equal(stack._layers[0][0].weight, stack._layers[1][0].weight)
    nested = layers.NaiveParallelLayer(lambda n: {'sum': n[0] + n[1]}, 2)((x, x))
    torch.testing.assert_close(nested['sum'], 2 * x)
    assert layers.make_parallel_net(torch.relu_, 2) is torch.relu_
    before = stack._layers[0][0].weight.clone()
    stack.reset_parameters()
    assert not torch.equal(before, stack._layers[0][0].weight)


def test_inputs_and_specs_are_stacked():
    specs = (TensorSpec((2, )), BoundedTensorSpec((2, ), torch.int64, [0, 1], 5), BoundedTensorSpec((), maximum=3.0))
    plain, bounded, scalar = layers.make_parallel_spec(specs, 3)
    assert plain == TensorSpec((3, 2))
    assert bounded == BoundedTensorSpec((3, 2), torch.int64, [[0, 1]] * 3, 5)
    assert scalar.shape == (3, ) and scalar.maximum == 3
    stacked = layers.make_parallel_input({'a': torch.randn(4, 2), 'b': torch.randn(4)}, 3)
    assert nest.map_structure(lambda x: tuple(x.shape), stacked) == {'a': (4, 3, 2), 'b': (4, 3)}


def test_parameters_that_cannot_be_reset_are_named():

    class Unknown(nn.Module):

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match=r"\['gain'\] of Unknown: it has no reset_parameters"):
        layers.reset_parameters(nn.Sequential(nn.Linear(1, 1), Unknown()))
    chain = sequential()
    before = [p.clone() for p in chain.parameters() if p.ndim > 1]
    layers.reset_parameters(chain)
    assert all(not torch.equal(a, b) for a, b in zip(before, [p for p in chain.parameters() if p.ndim > 1]))


def test_in_place_functions_have_out_of_place_counterparts():
    assert out_of_place(torch.relu_) is torch.relu
    assert out_of_place(F.elu_) is F.elu
    assert out_of_place(partial(F.leaky_relu_, negative_slope=0.3))(torch.tensor(-1.0)) == pytest.approx(-0.3)
    module = nn.ELU(inplace=True)
    assert out_of_place(module).inplace is False and module.inplace is True
    assert out_of_place(torch.sum) is torch.sum
    assert is_elementwise(nn.Tanh()) and is_elementwise(F.gelu) and not is_elementwise(torch.softmax)
    assert not is_elementwise(nn.Linear(1, 1)) and not is_elementwise(lambda x: x)


def test_replication_padding_repeats_the_border_for_any_dtype():
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(layers.ReplicationPad2d((1, 2, 3, 0))(x), F.pad(x, (1, 2, 3, 0), mode='replicate'))
    assert layers.ReplicationPad2d(2)(torch.ones(1, 2, 2, dtype=torch.uint8)).shape == (1, 6, 6)


def test_random_crop_cuts_each_image_at_its_own_position():
    x = torch.arange(100).view(1, 1, 10, 10).expand(64, 2, 10, 10)
    crops = layers.RandomCrop((3, 4))(x)
    assert crops.shape == (64, 2, 3, 4)
    corner = crops[:, 0, 0, 0]
    offsets = (torch.arange(3)[:, None] * 10 + torch.arange(4)[None, :])
    assert torch.equal(crops, corner[:, None, None, None] + offsets.expand(64, 2, 3, 4))
    rows, columns = corner // 10, corner % 10
    assert set(rows.tolist()) == set(range(8)) and set(columns.tolist()) == set(range(7))


@pytest.mark.parametrize('padding, expected', [
    (1, [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]),
    ((0, 1), [[1, 1, 2, 2], [3, 3, 4, 4]]),
    ((2, 0, 0, 1), [[1, 1, 1, 2], [3, 3, 3, 4], [3, 3, 3, 4]]),
])
def test_random_crop_repeats_the_border(padding, expected):
    image = torch.arange(1., 5.).view(1, 1, 2, 2)
    crops = layers.RandomCrop((len(expected), len(expected[0])), padding=padding)(image)
    assert crops[0, 0].tolist() == expected


def test_random_crop_takes_any_leading_dimensions_of_large_enough_images():
    assert layers.RandomCrop(4, padding=1)(torch.ones(3, 2, 1, 4, 4)).shape == (3, 2, 1, 4, 4)
    with pytest.raises(ValueError, match='cannot crop'):
        layers.RandomCrop(5)(torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize('transpose, expected', [(False, (4, 4)), (True, (14, 14))])
@pytest.mark.parametrize('with_bn', [False, True])
def test_a_residue_block_adds_a_shortcut(transpose, expected, with_bn):
    block = layers.ResidueBlock(2, 3, 3, 2, transpose=transpose, with_batch_normalization=with_bn)
    x = torch.randn(4, 2, 7, 7)
    before = x.clone()
    y = block(x)
    assert y.shape == (4, 3, *expected) and bool((y >= 0).all())
    y.sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert torch.equal(x, before)


def test_a_residue_block_of_the_same_shape_has_no_shortcut_weights():
    block = layers.ResidueBlock(2, 2, 3, 1, with_batch_normalization=False)
    assert len(list(block.parameters())) == 4
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(4, 2, 5, 5)
    torch.testing.assert_close(block(x), torch.relu(x))
    with pytest.raises(ValueError, match='odd kernel_size'):
        layers.ResidueBlock(2, 2, 4, 1)
    with pytest.raises(ValueError, match='weight_opt_args'):
        layers.ResidueBlock(2, 2, 3, 1, transpose=True, weight_opt_args={'lr': 1.0})


def test_fixed_decoding_evaluates_the_basis():
    # at x = -1, 0, 1 with tau = 1/2: 1, x/2, x^2/4
    assert layers.FixedDecodingLayer(3, 3, 'poly').weight.tolist() == [[1, -0.5, 0.25], [1, 0, 0], [1, 0.5, 0.25]]
    # T_2(x) = 2x^2 - 1
    cheb = layers.FixedDecodingLayer(3, 3, 'cheb', tau=1.0).weight
    torch.testing.assert_close(cheb, torch.tensor([[1.0, -1, 1], [1, 0, -1], [1, 1, 1]]))
    rbf = layers.FixedDecodingLayer(2, 3, 'rbf', sigma=0.5).weight
    # centers -1 and 1; distance 1 gives exp(-1 / 0.25) = exp(-4), distance 2 gives exp(-16)
    torch.testing.assert_close(rbf, torch.exp(torch.tensor([[0.0, -16], [-4, -4], [-16, 0]])))
    # distance 2 / 7: exp(-4 / 49)
    assert float(layers.FixedDecodingLayer(8, 8)(torch.eye(8))[0, 1]) == pytest.approx(0.9216, abs=1e-4)
    haar = layers.FixedDecodingLayer(4, 4, 'haar', tau=1.0).weight
    root = 2**0.5
    torch.testing.assert_close(haar, torch.tensor([[1, 1, root, 0], [1, 1, -root, 0], [1, -1, 0, root],
                                                   [1, -1, 0, -root]]) / 2)
    # Haar functions are orthonormal.
    torch.testing.assert_close(haar.T @ haar, torch.eye(4))
    layer = layers.FixedDecodingLayer(3, 5)
    x = torch.randn(2, 3)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)
    assert not list(layer.parameters())
    with pytest.raises(ValueError, match="basis_type must be .*, found str 'fourier'"):
        layers.FixedDecodingLayer(2, 3, 'fourier')
    with pytest.raises(ValueError, match='tau must be a number > 0'):
        layers.FixedDecodingLayer(2, 3, tau=0.0)
