"""Combiners of nests: concatenation, sums, products and outer products."""
import pytest
import torch
from torch import nn

from alfx import context
from alfx.nest import utils
from alfx.tensor_specs import SpecError, TensorSpec

A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])


def test_concat_takes_the_tensors_of_the_mask_in_visiting_order():
    nested = {'b': B, 'a': (A, torch.tensor([[9.0]]))}
    assert utils.NestConcat()(nested).tolist() == [[1, 2, 9, 3, 4]]
    assert utils.NestConcat({'a': (True, False), 'b': 1})(nested).tolist() == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match="at 'a'"):
        utils.NestConcat({'a': True, 'b': True})(nested)


@pytest.mark.parametrize('dim, shape', [(0, (4, 4, 6)), (1, (2, 8, 6)), (2, (2, 4, 12)), (-1, (2, 4, 12)),
                                        (-3, (4, 4, 6))])
def test_concat_counts_dimensions_without_the_batch(dim, shape):
    x = torch.zeros(5, 2, 4, 6)
    concat = utils.NestConcat(dim=dim)
    assert concat((x, x)).shape == (5, *shape)
    assert concat((TensorSpec((2, 4, 6)), TensorSpec((2, 4, 6)))).shape == shape
    stacked = x[:, None].expand(5, 3, 2, 4, 6)
    assert concat.make_parallel(3)((stacked, stacked)).shape == (5, 3, *shape)


@pytest.mark.parametrize('dim', [1, -2])
def test_concat_never_joins_the_batch_dimension(dim):
    with pytest.raises(ValueError, match=f'expected tensors with dimension {dim} besides the batch dimension'):
        utils.NestConcat(dim=dim)((torch.zeros(5, 2), torch.zeros(5, 2)))


def test_sum_product_and_outer_product():
    assert utils.NestSum()((A, B)).tolist() == [[4, 6]]
    assert utils.NestSum(average=True)((A, B)).tolist() == [[2, 3]]
    assert utils.NestMultiply()((A, B)).tolist() == [[3, 8]]
    assert utils.NestOuterProduct()((A, B)).tolist() == [[3, 4, 6, 8]]
    # (1, 2, [1]) x (3, 4, [1])
    assert utils.NestOuterProduct(padding=True)((A, B)).tolist() == [[3, 4, 1, 6, 8, 2, 3, 4, 1]]
    assert utils.NestSum(activation=lambda x: -x)((A, B)).tolist() == [[-4, -6]]
    with pytest.raises(ValueError, match='no tensors'):
        utils.NestSum()(())


@pytest.mark.parametrize('combiner, expected', [(utils.NestSum(), [[11, 12, 13], [21, 22, 23], [31, 32, 33]]),
                                               (utils.NestMultiply(), [[10, 20, 30], [20, 40, 60], [30, 60, 90]])])
def test_sums_and_products_broadcast_specs_but_not_samples(combiner, expected):
    vectors, scalars = torch.tensor([[1.0, 2, 3]] * 3), torch.tensor([10.0, 20, 30])
    assert combiner((vectors, scalars)).tolist() == expected
    assert combiner((TensorSpec((2, 3)), TensorSpec((3, )))) == TensorSpec((2, 3))
    assert combiner((torch.ones(4, 2, 3), torch.ones(4, 3))).shape == (4, 2, 3)
    stacked = combiner.make_parallel(2)((vectors.unsqueeze(1).expand(3, 2, 3), scalars.unsqueeze(1).expand(3, 2)))
    assert stacked[:, 1].tolist() == expected


def test_the_outer_product_keeps_several_batch_dimensions():
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    product = utils.NestOuterProduct().make_parallel(3)((x, y))
    torch.testing.assert_close(product, torch.einsum('bni,bnj->bnij', x, y).flatten(2))


@pytest.mark.parametrize('ctor', [utils.NestSum, utils.NestMultiply, utils.NestOuterProduct])
def test_an_in_place_activation_does_not_change_the_input_tensor(ctor):
    x = torch.tensor([[-1.0, 1.0]])
    assert ctor(activation=torch.relu_)((x, )).tolist() == [[0, 1]]
    assert x.tolist() == [[-1, 1]]


def test_stack_zeros_and_device():
    nested = {'a': A, 'b': (B, )}
    stacked = utils.stack_nests([nested, nested], dim=1)
    assert stacked['a'].shape == (1, 2, 2)
    assert not utils.zeros_like(nested)['b'][0].any()
    moved = utils.convert_device({'a': A, 'name': 'x'}, 'cpu')
    assert moved['name'] == 'x' and moved['a'].device.type == 'cpu'
    assert utils.convert_device(A).device.type == 'cpu'


def test_the_outer_rank_is_the_rank_beyond_the_spec():
    specs = {'a': TensorSpec((2, )), 'b': TensorSpec(())}
    assert utils.get_outer_rank({'a': torch.zeros(7, 3, 2), 'b': torch.zeros(7, 3)}, specs) == 2
    with pytest.raises(SpecError, match='same number of batch dimensions'):
        utils.get_outer_rank({'a': torch.zeros(7, 3, 2), 'b': torch.zeros(7)}, specs)
    with pytest.raises(SpecError, match="'a': expected"):
        utils.get_outer_rank({'a': torch.zeros(7, 3), 'b': torch.zeros(7)}, specs)


def test_the_gradient_has_the_structure_of_its_argument():
    x = {'a': torch.tensor(3.0, requires_grad=True), 'b': torch.tensor(2.0, requires_grad=True)}
    gradient = utils.grad(x, x['a']**2 * x['b'])
    assert (gradient['a'].item(), gradient['b'].item()) == (12.0, 9.0)


def test_a_nest_of_modules_becomes_a_module():
    module = utils.make_nested_module({'a': nn.Linear(1, 2), 'b': (nn.Linear(2, 3), None), 'c': 3})
    assert sorted(name for name, _ in module.named_parameters()) == ['a.bias', 'a.weight', 'b.0.bias', 'b.0.weight']
    with pytest.raises(ValueError, match='found 3'):
        utils.make_nested_module({'c': 3}, ignore_non_module_element=False)
    assert utils.make_nested_module(None) is None


def test_fields_are_picked_by_their_paths():
    nested = {'a': {'x': 1, 'y': 2}, 'b': 3}
    assert utils.get_nested_field(nested, ('a.y', {'k': 'b'})) == (2, {'k': 3})
    with pytest.raises(LookupError, match="did you mean 'a'"):
        utils.get_nested_field(nested, ('aa', ))


def test_without_a_device_tensors_go_to_the_default_one():
    with context.device('meta'):
        assert utils.convert_device({'a': A})['a'].device.type == 'meta'
    assert utils.convert_device(A).device.type == 'cpu'
