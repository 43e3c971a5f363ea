"""Functions of alfx.utils.common, which algorithms written for ALF import."""
import pytest
import torch

from alfx.tensor_specs import TensorSpec
from alfx.utils import common


@pytest.mark.parametrize('x, expected', [((1, 2), [1, 2]), ([1], [1]), (None, [None]), ('ab', ['ab']), ({}, [{}])])
def test_as_list_wraps_values_that_are_not_lists(x, expected):
    assert common.as_list(x) == expected


@pytest.mark.parametrize('x, expected', [(3, (3, 3)), ((2, 4), (2, 4)), ([2, 4], (2, 4))])
def test_tuplify2d_makes_a_pair(x, expected):
    assert common.tuplify2d(x) == expected


def test_expand_dims_as_adds_dimensions_at_the_chosen_end():
    y = torch.zeros(2, 3, 4)
    assert common.expand_dims_as(torch.zeros(2), y).shape == (2, 1, 1)
    assert common.expand_dims_as(torch.zeros(3, 4), y, end=False).shape == (1, 3, 4)
    assert common.expand_dims_as(y, y).shape == (2, 3, 4)
    with pytest.raises(ValueError, match='at most 1 dimensions'):
        common.expand_dims_as(y, torch.zeros(2))


def test_reset_replaces_the_states_of_chosen_environments():
    state = {'h': torch.ones(3, 2), 'n': torch.tensor([1, 2, 3])}
    initial = common.get_initial_policy_state(3, {'h': TensorSpec((2,)), 'n': TensorSpec((), torch.int64)})
    reset = common.reset_state_if_necessary(state, initial, torch.tensor([True, False, True]))
    assert reset['h'].tolist() == [[0, 0], [1, 1], [0, 0]] and reset['n'].tolist() == [0, 2, 0]
    assert state['h'].sum() == 6


def test_detached_tensors_have_no_gradient():
    x = torch.ones(2, requires_grad=True)
    detached = common.detach({'a': x * 2, 'b': ()})
    assert not detached['a'].requires_grad and detached['b'] == () and detached['a'].tolist() == [2, 2]
