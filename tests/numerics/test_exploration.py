"""Exploration bonuses with a memory of the episode, against slow loops over steps in float64."""
from functools import partial

import pytest
import torch
from helpers.intrinsic_reward_contract import ACTION, random_steps

from alfx import nest
from alfx.algorithms.exploration.bonus import ExplorationBonus
from alfx.algorithms.exploration.factors import EpisodicCount
from alfx.algorithms.exploration.memory import EpisodicMemory, ObservationHash, places_of
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

CELLS = BoundedTensorSpec((2, ), torch.int64, 0, 1)  # of which an episode visits some several times
LENGTH, BATCH = 80, 3


def steps(observation_spec=CELLS, seed=0, length=LENGTH, batch=BATCH):
    """Return time steps of episodes of about 20 steps; some have one step, and one column begins within an episode."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.where(torch.rand(length, batch, generator=generator) < 0.05, 0, 1)
    step_type[0] = torch.tensor([0, 0, 1])
    step_type[31:33, 1] = 0
    step_type[-1, 0] = 0
    step_type[:-1][step_type[1:] == 0] += step_type[:-1][step_type[1:] == 0]  # LAST before FIRST
    return random_steps(length, batch, observation_spec=observation_spec, seed=seed, step_type=step_type)


def episodes(inputs):
    """Yield ``(t, b, indices of the earlier steps of the episode)`` for all steps."""
    for b in range(inputs.step_type.shape[1]):
        earlier: list[int] = []
        for t in range(len(inputs.step_type)):
            if inputs.step_type[t, b] == 0:
                earlier = []
            yield t, b, list(earlier)
            earlier.append(t)


def bonus(*factors, observation_spec=CELLS, **arguments):
    torch.manual_seed(0)
    return ExplorationBonus(observation_spec, ACTION, factors, **arguments)


def rewarded(module, inputs, sizes=None):
    """Return the rewards of steps that are passed in parts of these sizes."""
    state, rewards = module.get_initial_unroll_state(inputs.step_type.shape[1]), []
    for part in zip(*(x.split(sizes or [len(x)]) for x in nest.flatten(inputs))):
        step = module.reward_steps(nest.pack_sequence_as(inputs, part), state)
        state = step.state
        rewards.append(step.output)
    return torch.cat(rewards)


CUTS = {'one step': [1] * LENGTH, 'sevens': [7] * 11 + [3], 'ends': [31, 1, 1, 40, 6, 1]}
BONUSES = {'episodic count': (EpisodicCount, ), 'root of count': (partial(EpisodicCount, decay='inverse_sqrt'), ),
           'forgetful count': (partial(EpisodicCount, capacity=5), )}


@pytest.mark.parametrize('cut', CUTS)
@pytest.mark.parametrize('name', BONUSES)
def test_any_cut_into_unrolls_gives_the_same_rewards(name, cut):
    module, inputs = bonus(*BONUSES[name]), steps()
    assert torch.equal(rewarded(module, inputs), rewarded(module, inputs, CUTS[cut]))


@pytest.mark.parametrize('name', BONUSES)
def test_environments_and_episodes_do_not_affect_each_other(name):
    module, inputs = bonus(*BONUSES[name]), steps()
    whole, order = rewarded(module, inputs), [2, 0, 1]
    assert torch.equal(rewarded(module, nest.map_structure(lambda x: x[:, order], inputs)), whole[:, order])
    start = int((inputs.step_type[1:, 1] == 0).nonzero()[0]) + 1
    alone = rewarded(module, nest.map_structure(lambda x: x[start:, 1:2], inputs))
    assert torch.equal(alone[:, 0], whole[start:, 1])


@pytest.mark.parametrize('name', BONUSES)
def test_a_step_without_a_previous_one_has_no_reward(name):
    reward, inputs = rewarded(bonus(*BONUSES[name]), steps()), steps()
    assert (reward[inputs.step_type == 0] == 0).all() and reward[0, 2] == 0
    assert reward[1, 2] != 0


@pytest.mark.parametrize(('decay', 'capacity'), [('first', 1000), ('inverse_sqrt', 1000), ('first', 5),
                                                 ('inverse_sqrt', 1)])
def test_episodic_counts_match_a_loop(decay, capacity):
    inputs = steps()
    found = rewarded(bonus(partial(EpisodicCount, decay=decay, capacity=capacity)), inputs)
    for t, b, earlier in episodes(inputs):
        same = [s for s in earlier[-capacity:] if torch.equal(inputs.observation[s, b], inputs.observation[t, b])]
        expected = (1.0 if not same else 0.0) if decay == 'first' else (len(same) + 1)**-0.5
        assert found[t, b].item() == pytest.approx(expected if earlier else 0.0)


def test_floating_point_numbers_are_counted_to_a_resolution():
    """0.499 and 0.501 round to the same multiple of 0.1, and 0.56 to another."""
    inputs = random_steps(4, 1, observation_spec=TensorSpec((1, )), step_type=[[0], [1], [1], [1]])
    inputs = inputs._replace(observation=torch.tensor([0.0, 0.499, 0.501, 0.56]).reshape(4, 1, 1))
    module = bonus(partial(EpisodicCount, resolution=0.1), observation_spec=TensorSpec((1, )))
    assert rewarded(module, inputs).flatten().tolist() == [0, 1, 0, 1]


def test_a_part_of_the_observation_can_be_counted():
    spec = {'position': CELLS, 'noise': TensorSpec((3, ))}
    inputs = steps(spec)
    found = rewarded(bonus(partial(EpisodicCount, field='position'), observation_spec=spec), inputs)
    alone = rewarded(bonus(EpisodicCount), inputs._replace(observation=inputs.observation['position']))
    assert torch.equal(found, alone) and 0 < found.mean() < 1


def test_hashes_count_as_exactly_as_a_dict():
    spec = BoundedTensorSpec((49, ), torch.uint8, 0, 2)
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 3, (49, ), generator=generator, dtype=torch.uint8)
    observation = base.repeat(100_000, 1)  # which differ in few places
    rows = torch.arange(100_000)
    for _ in range(4):
        observation[rows, torch.randint(0, 49, (100_000, ), generator=generator)] = torch.randint(
            0, 3, (100_000, ), generator=generator, dtype=torch.uint8)
    hashes = ObservationHash(spec, None, 'test')(observation.unsqueeze(0))[0]
    distinct = len({row.tobytes() for row in observation.numpy()})
    assert 50_000 < distinct < 100_000 and len(hashes.unique()) == distinct


def test_a_memory_returns_the_latest_steps_of_the_episode_only():
    inputs, memory = steps(), EpisodicMemory(6, TensorSpec((), torch.int64))
    number = torch.arange(LENGTH * BATCH).reshape(LENGTH, BATCH)
    state, length, found = torch.zeros(BATCH, 6, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64), {}
    for start in range(0, LENGTH, 5):
        rows = slice(start, start + 5)
        places = places_of(inputs.step_type[rows], length)
        others, valid = memory.earlier(number[rows], state, places)
        for t in range(5):
            for b in range(BATCH):
                found[start + t, b] = others[b][valid[b, t]].sort().values.tolist()
        state, length = memory.add(number[rows], state, places), places.next_length
    for t, b, earlier in episodes(inputs):
        assert found[t, b] == [int(number[s, b]) for s in earlier[-6:]]
