"""The count-based bonus: its arguments, and as part of an agent. The maths is in tests/numerics."""
from functools import partial

import pytest
import torch
from helpers import agents
from helpers.intrinsic_reward_contract import ACTION, OBSERVATION, IntrinsicRewardContract, random_steps

from alfx.algorithms.count_bonus_algorithm import CountBonusAlgorithm
from alfx.gin_utils import ConfError
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

ONE_NUMBER = agents.ENVIRONMENTS['discrete'](batch_size=1).observation_spec()


class TestSimHash(IntrinsicRewardContract):

    @staticmethod
    def make(**arguments):
        if arguments['observation_spec'] == ONE_NUMBER:
            return CountBonusAlgorithm(counting='grid', grid_size=3, **arguments)
        return CountBonusAlgorithm(num_bits=6, **arguments)


class TestSimHashOfNormalizedObservations(TestSimHash):

    @staticmethod
    def make(**arguments):
        if arguments['observation_spec'] == ONE_NUMBER:
            return TestSimHash.make(**arguments)
        return CountBonusAlgorithm(num_bits=6, observation_adapt_speed=8.0, **arguments)


def grid(**arguments):
    arguments = {'observation_spec': OBSERVATION, 'counting': 'grid', 'grid_size': 3, 'grid_bounds': [(-1, 1)] * 3,
                 **arguments}
    return CountBonusAlgorithm(**arguments)


@pytest.mark.parametrize('arguments, message', [
    (dict(counting='grd'), 'counting'),
    (dict(bonus_coef=0.0), 'bonus_coef'),
    (dict(num_bits=25), 'num_bits'),
    (dict(grid_size=4), "grid_size = 4 has no effect with counting = 'simhash'"),
    (dict(grid_bounds=[(0, 1)] * 3), 'grid_bounds'),
    (dict(counting='grid', grid_size=2, num_bits=8), "num_bits = 8 has no effect with counting = 'grid'"),
    (dict(counting='grid', grid_size=2, observation_adapt_speed=8.0), 'observation_adapt_speed'),
    (dict(observation_spec=TensorSpec(())), "counting = 'simhash' hashes directions.*"),
])
def test_invalid_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        CountBonusAlgorithm(**{'observation_spec': OBSERVATION, 'action_spec': ACTION, **arguments})


def test_a_grid_that_is_too_large_or_without_bounds_is_rejected():
    with pytest.raises(ValueError, match='is too large'):
        grid(grid_size=1000)
    with pytest.raises(ValueError, match='grid_bounds'):
        grid(grid_bounds=None)


def test_a_single_integer_counts_in_a_grid_without_further_arguments():
    module = CountBonusAlgorithm(BoundedTensorSpec((), torch.int64, 0, 4), counting='grid')
    steps = random_steps(3, step_type=[1, 1, 1])._replace(observation=torch.tensor([0, 4, 4]))
    module.rollout_step(steps)
    assert module.counts.tolist() == [1, 0, 0, 0, 2]


def test_evaluation_reports_visit_counts_and_the_next_bonus():
    module = grid(bonus_coef=2.0)
    steps = random_steps(2, step_type=[1, 1])._replace(observation=torch.tensor([[0.0, 0, 0], [0.9, 0, 0]]))
    for _ in range(3):
        module.rollout_step(steps)
    new = steps._replace(observation=torch.tensor([[0.0, 0, 0], [0, 0.9, 0]]))
    step = module.predict_step(new)
    assert step.info.count.tolist() == [3, 0]
    assert step.output.tolist() == pytest.approx([2 / 4**0.5, 2.0])


def test_evaluation_does_not_reward_first_steps():
    module = grid()
    step = module.predict_step(random_steps(2, step_type=[0, 1]))
    assert step.output.tolist() == [0.0, 1.0]
    assert step.info[0].isnan().tolist() == [True, False]


def test_observations_of_two_numbers_have_65536_cells_by_default():
    module = CountBonusAlgorithm(TensorSpec((2, )))
    assert module.counts.shape == (65536, )
    module.rollout_step(random_steps(3, step_type=[1, 1, 1])._replace(observation=torch.zeros(3, 2)))
    assert module.counts[0] == 3  # no projection of zeros is positive


def test_the_bits_of_a_cell_are_signs_of_projections_of_all_parts():
    module = CountBonusAlgorithm({'a': TensorSpec((2, )), 'b': TensorSpec(())}, num_bits=4)
    module._cells.projection.copy_(torch.tensor([[1.0, 0, 0, -1], [0, 1, 0, 0], [0, 0, 1, 0]]))
    observation = {'a': torch.tensor([[0.5, -1.0], [-0.5, 1.0]]), 'b': torch.tensor([2.0, -2.0])}
    # projections 0.5, -1, 2, -0.5: bits 0 and 2; and -0.5, 1, -2, 0.5: bits 1 and 3
    assert module._cells(observation).tolist() == [1 + 4, 2 + 8]


@pytest.mark.parametrize('unroll_length', [1, 4])
def test_each_step_is_counted_once_although_unrolls_share_one(unroll_length):
    module = partial(CountBonusAlgorithm, counting='grid', grid_size=8, grid_bounds=[(-2.0, 2.0)])
    agent, _ = agents.make_agent('actor-critic', 'discrete', unroll_length=unroll_length,
                                 intrinsic_reward_module=module)
    for _ in range(5):
        agent.train_iter()
    assert agent.intrinsic_reward.counts.sum() == 4 * 5 * unroll_length  # the last step is counted by the next unroll


def test_statistics_are_those_of_all_steps_of_an_unroll_but_the_first():
    at_once, in_parts = (CountBonusAlgorithm(OBSERVATION, num_bits=6, observation_adapt_speed=8.0) for _ in range(2))
    inputs = random_steps(4, 3)
    at_once.reward_unroll(inputs)
    in_parts._update_statistics(inputs.observation[1:].flatten(0, 1))
    found, expected = ({name: x for name, x in module.named_buffers() if 'normalizer' in name}
                       for module in (at_once, in_parts))
    assert found and all(torch.equal(x, expected[name]) for name, x in found.items())
