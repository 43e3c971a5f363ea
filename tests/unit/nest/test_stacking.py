"""Stacking and concatenating nests is stacking and concatenating each of their leaves."""
from typing import Any, NamedTuple

import pytest
import torch

from alfx import nest
from alfx.utils import dist_utils  # noqa: F401 - makes distributions nests


class Pair(NamedTuple):
    left: Any = ()
    right: Any = ()


def nest_of(number, shape=(2, )):
    """Return a nest with every kind of node and with different leaves."""
    x = torch.full(shape, float(number))
    normal = torch.distributions.Independent(torch.distributions.Normal(x, x + 1), 1)
    return Pair((x, [x + 2, Pair(x + 3)], ()), {'b': x + 4, 'a': Pair(right=(x + 5, normal)), 'empty': {}})


@pytest.mark.parametrize('count', [1, 2, 5])
@pytest.mark.parametrize('dim', [0, 1])
def test_each_leaf_is_stacked(count, dim):
    nests = [nest_of(10 * i) for i in range(count)]
    stacked = nest.stack(nests, dim)
    nest.assert_same_structure_up_to(nests[0].left, stacked.left)
    expected = [torch.stack(leaves, dim) for leaves in zip(*map(nest.flatten, nests))]
    found = nest.flatten(stacked)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert isinstance(stacked.right['a'].right[1], torch.distributions.Independent)
    assert isinstance(stacked.left[1][1], Pair) and stacked.left[2] == () and stacked.right['empty'] == {}


@pytest.mark.parametrize('count', [1, 3])
def test_each_leaf_is_concatenated(count):
    nests = [nest_of(10 * i, (i + 1, 3)) for i in range(count)]
    joined = nest.concatenate(nests)
    expected = [torch.cat(leaves) for leaves in zip(*map(nest.flatten, nests))]
    assert all(torch.equal(x, y) for x, y in zip(nest.flatten(joined), expected, strict=True))
    assert nest.structure(nest_of(0).left) == nest.structure(joined.left)


def test_a_single_tensor_is_a_nest():
    x = torch.arange(3)
    assert nest.stack([x, x]).tolist() == [[0, 1, 2]] * 2
    assert nest.concatenate([x, x]).tolist() == [0, 1, 2] * 2


def test_stacking_empty_nests_gives_an_empty_nest():
    assert nest.stack([(), ()]) == () and nest.concatenate([Pair(), Pair()]) == Pair()


@pytest.mark.parametrize('nests', [({'a': 0}, {'b': 0}), ({'a': 0}, {'a': 0, 'b': 0}), ((0, 0), (0, ))])
def test_nests_of_different_structures_are_rejected(nests):
    nests = [nest.map_structure(lambda _: torch.zeros(1), x) for x in nests]
    for function in (nest.stack, nest.concatenate):
        with pytest.raises(ValueError, match='argument|key'):
            function(nests)


def test_only_a_batch_of_one_step_is_unbatched():
    assert nest.unbatch_nested_tensor({'a': torch.zeros(1, 2), 'b': torch.zeros(1)})['a'].shape == (2, )
    with pytest.raises(ValueError, match='expected a batch size of 1'):
        nest.unbatch_nested_tensor({'a': torch.zeros(1, 2), 'b': torch.zeros(3)})


def test_a_single_nest_is_not_copied():
    x = torch.zeros(2)
    assert nest.stack([(x, )])[0].data_ptr() == x.data_ptr()
