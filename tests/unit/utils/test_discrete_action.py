"""DiscreteAction: between actions of the environment and their indices."""
import pytest
import torch

from alfx.tensor_specs import BoundedTensorSpec
from alfx.utils.discrete_action import DiscreteAction


def test_indices_count_from_the_minimum_and_back():
    action = DiscreteAction(BoundedTensorSpec((), torch.int32, -2, 2), 'Owner')
    assert action.num_actions == 5
    assert action.index(torch.tensor([-2, 2], dtype=torch.int32)).tolist() == [0, 4]
    back = action.action(torch.tensor([0, 4]))
    assert back.tolist() == [-2, 2] and back.dtype == torch.int32


def test_an_action_alone_in_a_nest_is_put_back_into_it():
    action = DiscreteAction({'move': BoundedTensorSpec((), torch.int64, 1, 3)}, 'Owner')
    assert action.action(torch.tensor([0]))['move'].tolist() == [1]
    assert action.index({'move': torch.tensor([3])}).tolist() == [2]


@pytest.mark.parametrize('epsilon', [0.0, 0.4, 1.0])
def test_exploration_replaces_a_share_of_the_actions_by_uniform_ones(epsilon):
    torch.manual_seed(0)
    action = DiscreteAction(BoundedTensorSpec((), torch.int64, 0, 3), 'Owner')
    index = torch.full((40000, ), 2)
    explored = action.explore(index, epsilon)
    share = torch.bincount(explored, minlength=4) / 40000
    expected = torch.tensor([epsilon / 4, epsilon / 4, 1 - epsilon + epsilon / 4, epsilon / 4])
    torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
    assert index.eq(2).all()


SPEC = BoundedTensorSpec((), torch.int64, 0, 1)


@pytest.mark.parametrize('spec', [SPEC.replace(dtype=torch.float32), SPEC.replace(shape=(2, )), [SPEC, SPEC]])
def test_any_other_action_is_refused(spec):
    with pytest.raises(ValueError, match='Owner: expected one discrete action'):
        DiscreteAction(spec, 'Owner')
