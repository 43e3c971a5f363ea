"""Records that cross the borders between processes."""
import importlib
import pickle
import pkgutil

import pytest
import torch

from alfx import algorithms
from alfx.data_structures import (LossInfo, StepType, TimeStep, namedtuple, reset_at_first, restart, termination,
                                  time_step_spec, transition, valid_masks)
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

Local = namedtuple('Local', ['a', 'b'], default_value=())


def test_a_named_tuple_is_pickled_by_its_qualified_name():
    assert Local.__module__ == __name__
    found = pickle.loads(pickle.dumps(Local(a=1)))
    assert type(found) is Local and found == (1, ())


def test_every_named_tuple_of_an_algorithm_can_be_pickled():
    records = {TimeStep, LossInfo}
    for module in pkgutil.iter_modules(algorithms.__path__, 'alfx.algorithms.'):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, '_fields'):
                records.add(value)
    assert len(records) > 30
    for record in records:
        empty = record(*[()] * len(record._fields))
        assert type(pickle.loads(pickle.dumps(empty))) is record


def test_steps_of_an_episode_worked_out_by_hand():
    observation, action = torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4])
    first = restart(observation, BoundedTensorSpec((), torch.int64, 3, 5), batched=True)
    assert (first.step_type.tolist(), first.reward.tolist(), first.discount.tolist()) == ([0, 0], [0, 0], [1, 1])
    assert first.prev_action.tolist() == [3, 3] and first.env_id.tolist() == [0, 1]
    middle = transition(observation, action, [5.0, 6.0])
    assert (middle.step_type.tolist(), middle.reward.tolist(), middle.discount.tolist()) == ([1, 1], [5, 6], [1, 1])
    assert transition(observation, action, 5.0, discount=[0.5, 1.0]).discount.tolist() == [0.5, 1.0]
    last = termination(observation, action, 7.0, env_id=torch.tensor([8, 9]))
    assert (last.step_type.tolist(), last.reward.tolist(), last.discount.tolist()) == ([2, 2], [7, 7], [0, 0])
    assert last.env_id.tolist() == [8, 9]
    for i, step in enumerate((first, middle, last)):
        kinds = step.is_first(), step.is_mid(), step.is_last()
        assert [kind.tolist() for kind in kinds] == [[i == j] * 2 for j in range(3)]
        assert valid_masks(step.step_type).tolist() == [i < 2] * 2


def test_a_discount_is_a_number_from_0_to_1():
    discount = time_step_spec(TensorSpec((1, )), TensorSpec(())).discount
    assert (discount.minimum.tolist(), discount.maximum.tolist()) == (0.0, 1.0)


@pytest.mark.parametrize('shape', [(), (2, ), (2, 3)])
def test_states_are_reset_in_rows_of_first_steps_only(shape):
    state = {'a': torch.arange(1.0, 4.0).view(3, *[1] * len(shape)).expand(3, *shape)}
    step = TimeStep(step_type=torch.tensor([StepType.MID, StepType.FIRST, StepType.LAST], dtype=torch.int32))
    found = reset_at_first(state, {'a': torch.full((3, *shape), 9.0)}, step)['a']
    assert found.shape == (3, *shape)
    assert [found[i].unique().tolist() for i in range(3)] == [[1.0], [9.0], [3.0]]
