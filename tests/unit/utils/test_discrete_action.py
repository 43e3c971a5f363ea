"""DiscreteAction: between actions of the environment and their indices."""
import pytest
import torch

from alfx.algorithms.base.exploration_noise import ActionBounds
from alfx.algorithms.sac.actions import ActionParts
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.discrete_action import DiscreteAction, EpsilonZGreedy, LongExplorationState, suited_algorithms


def test_indices_count_from_the_minimum_and_back():
    action = DiscreteAction(BoundedTensorSpec((), torch.int32, -2, 2), 'Owner')
    assert action.num_actions == 5
    assert action.index(torch.tensor([-2, 2], dtype=torch.int32)).tolist() == [0, 4]
    back = action.action(torch.tensor([0, 4]))
    assert back.tolist() == [-2, 2] and back.dtype == torch.int32


def test_an_action_in_a_nest_of_one_is_returned_in_the_nest():
    action = DiscreteAction({'move': BoundedTensorSpec((), torch.int64, 1, 3)}, 'Owner')
    assert action.action(torch.tensor([0]))['move'].tolist() == [1]
    assert action.index({'move': torch.tensor([3])}).tolist() == [2]


@pytest.mark.parametrize('epsilon', [0.0, 0.4, 1.0])
def test_exploration_replaces_a_fraction_of_the_actions_with_uniform_ones(epsilon):
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
def test_any_other_action_is_rejected(spec):
    with pytest.raises(ValueError, match='Owner: expected one discrete action'):
        DiscreteAction(spec, 'Owner')


def test_random_actions_are_repeated_for_lengths_of_the_zeta_distribution():
    torch.manual_seed(0)
    explore = EpsilonZGreedy(DiscreteAction(SPEC.replace(maximum=3), 'Owner'), 2.0, 'Owner')
    count = 40000
    state = LongExplorationState(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    index, state = explore(torch.full((count, ), 3), 1.0, state)
    torch.testing.assert_close(torch.bincount(index, minlength=4) / count, torch.full((4, ), 0.25), atol=0.01, rtol=0)
    # P(n) = n^-2 / zeta(2), with zeta(2) = pi^2 / 6: 0.6079, 0.1520, 0.0675
    proportions = torch.bincount(state.steps_left.clamp(max=3), minlength=4) / count
    torch.testing.assert_close(proportions[:3], torch.tensor([0.6079, 0.1520, 0.0675]), atol=0.01, rtol=0)


def test_a_random_action_sequence_ends_by_its_length_only():
    explore = EpsilonZGreedy(DiscreteAction(SPEC.replace(maximum=3), 'Owner'), 2.0, 'Owner')
    state = LongExplorationState(torch.tensor([2, 0]), torch.tensor([1, 0]))
    indices = []
    for _ in range(4):
        index, state = explore(torch.tensor([3, 3]), 0.0, state)
        indices.append(index.tolist())
    assert indices == [[1, 3], [1, 3], [3, 3], [3, 3]]


GO, HOW = BoundedTensorSpec((), torch.int64, 0, 2), BoundedTensorSpec((2, ), torch.float32, -1, 1)


@pytest.mark.parametrize('spec, names', [
    (GO, 'DqnAlgorithm, SacAlgorithm and PPOAlgorithm support'), ((GO, ), 'DqnAlgorithm and PPOAlgorithm support'),
    (HOW, 'SacAlgorithm, Td3Algorithm and PPOAlgorithm support'),
    ({'how': HOW, 'go': GO}, 'SacAlgorithm and PPOAlgorithm support'),
    ((GO, HOW), 'SacAlgorithm and PPOAlgorithm'), ((GO, GO), 'PPOAlgorithm and ActorCriticAlgorithm'),
    (BoundedTensorSpec((2, ), torch.int64, 0, 2), 'PPOAlgorithm and ActorCriticAlgorithm'),
    ((HOW, (GO, HOW)), 'PPOAlgorithm and ActorCriticAlgorithm'),
    (TensorSpec((2, )), 'with the bounds of gym_wrappers')])
def test_errors_name_algorithms_for_the_actions(spec, names):
    assert names in suited_algorithms(spec)
    for check in (ActionParts, lambda x: DiscreteAction(x, 'owner'), lambda x: ActionBounds(x, 'owner')):
        try:
            check(spec)
        except ValueError as error:
            assert names in str(error) or 'ContinuousActionClip' in str(error)
