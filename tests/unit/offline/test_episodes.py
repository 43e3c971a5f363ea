"""Conversion between episodes and steps: alignment, cuts and round trips."""
import numpy as np
import pytest
import torch

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.offline import dataset_episodes as stored
from alfx.offline import recorder
from alfx.offline.dataset_episodes import Episodes, from_steps, joined, shortened
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

FLOAT = TensorSpec(())


def make(lengths=(3, 1, 4), terminated=(True, False, True)):
    """Episode k counts its observations from 100 k, its actions from 100 k as well; the reward is their sum."""
    observation = np.concatenate([100 * k + np.arange(n + 1) for k, n in enumerate(lengths)]).astype(np.float32)
    action = np.concatenate([100 * k + np.arange(n) for k, n in enumerate(lengths)]).astype(np.float32)
    arrived = np.concatenate([100 * k + np.arange(1, n + 1) for k, n in enumerate(lengths)])
    discount = np.ones(len(action), np.float32)
    discount[np.cumsum(lengths)[np.array(terminated)] - 1] = 0
    return Episodes({'': observation}, {'': action}, (action + arrived).astype(np.float32), discount,
                    np.array(lengths))


def steps_of(episodes, env_id=0):
    parts = list(stored.steps(episodes, env_id, FLOAT, FLOAT, FLOAT))
    return nest.map_structure(lambda *x: torch.cat(x), *parts)


def test_every_step_has_its_own_action_and_the_reward_for_arriving():
    step, action = steps_of(make(), env_id=7)
    F, M, L = (int(x) for x in (StepType.FIRST, StepType.MID, StepType.LAST))
    assert step.step_type.tolist() == [F, M, M, L, F, L, F, M, M, M, L]
    assert step.observation.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 202, 203, 204]
    assert action.tolist() == [0, 1, 2, 0, 100, 0, 200, 201, 202, 203, 0]
    assert step.prev_action.tolist() == [0, 0, 1, 2, 0, 100, 0, 200, 201, 202, 203]
    assert step.reward.tolist() == [0, 1, 3, 5, 0, 201, 0, 401, 403, 405, 407]
    assert step.discount.tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]
    assert step.env_id.tolist() == [7] * 11


def test_many_steps_come_in_several_parts(monkeypatch):
    at_once = steps_of(make())
    monkeypatch.setattr(stored, '_ROWS_AT_ONCE', 5)
    assert len(list(stored.steps(make(), 0, FLOAT, FLOAT, FLOAT))) == 3
    parts = steps_of(make())
    assert torch.equal(at_once[0].reward, parts[0].reward) and torch.equal(at_once[1], parts[1])


def test_steps_become_the_episodes_that_they_came_from():
    round_trip = from_steps(*steps_of(make()))
    for original, restored in zip(make(), round_trip):
        for x, y in zip(*[list(z.values()) if isinstance(z, dict) else [z] for z in (original, restored)]):
            assert np.array_equal(x, y)


def test_the_rest_of_a_ring_becomes_truncated_episodes():
    step, action = steps_of(make())
    cut = from_steps(*nest.map_structure(lambda x: x[1:9], (step, action)))
    assert cut.lengths.tolist() == [2, 1, 2]
    assert cut.observation[''].tolist() == [1, 2, 3, 100, 101, 200, 201, 202]
    assert cut.reward.tolist() == [3, 5, 201, 401, 403] and cut.terminated().tolist() == [True, False, False]


def test_steps_without_an_action_are_no_episode():
    step, action = steps_of(make())
    assert from_steps(*nest.map_structure(lambda x: x[:1], (step, action))) is None


@pytest.mark.parametrize('num_steps, lengths', [
    (None, [3, 1, 4]), (11, [3, 1, 4]), (10, [3, 1, 3]), (8, [3, 1, 1]), (7, [3, 1]), (6, [3, 1]), (5, [3]), (2, [1]),
    (1, [])])
def test_a_dataset_is_cut_to_a_number_of_steps_and_bootstraps_there(num_steps, lengths):
    cut = shortened(make(), num_steps)
    assert cut.lengths.tolist() == lengths and (num_steps is None or cut.num_steps <= num_steps)
    if lengths:
        step, _ = steps_of(cut)
        expected, _ = steps_of(make())
        assert torch.equal(step.observation, expected.observation[:cut.num_steps])
        assert int(step.step_type[-1]) == StepType.LAST
        assert cut.terminated()[-1] == (lengths in ([3, 1, 4], [3]))


def test_parts_and_selections_keep_their_rows_together():
    selected = make().select(np.array([2, 0]))
    assert selected.observation[''].tolist() == [200, 201, 202, 203, 204, 0, 1, 2, 3]
    assert selected.terminated().tolist() == [True, True] and selected.returns().tolist() == [1616, 9]
    assert joined([make().part(0, 1), make().part(1, 3)]).reward.tolist() == make().reward.tolist()


def test_noise_correlates_with_the_next_action_within_an_episode():
    spec = BoundedTensorSpec((1, ), minimum=-1e6, maximum=3e6)  # half of the range is 2e6
    act = recorder.with_noise(lambda _: torch.zeros(1000, 1), spec, 1e-3, is_correlated=True)
    torch.manual_seed(0)
    first, second, third = (act(TimeStep(step_type=torch.full((1000, ), int(x)))) / 2e3
                            for x in (StepType.FIRST, StepType.MID, StepType.FIRST))
    torch.manual_seed(0)
    noise = [torch.randn(1000, 1) for _ in range(3)]
    torch.testing.assert_close(first, noise[0])
    torch.testing.assert_close(second, noise[1] + noise[0])
    torch.testing.assert_close(third, noise[2])
