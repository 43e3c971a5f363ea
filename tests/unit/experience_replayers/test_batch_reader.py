"""A reader samples the same batches as the buffer, into reused memory."""
import pytest
import torch

from alfx import nest
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec

SPEC = {'image': TensorSpec((40, 20), torch.uint8), 'reward': TensorSpec(()), 'step_type': TensorSpec((), torch.int32),
        'discount': TensorSpec(())}


def filled(num_envs=3, length=20, steps=30, **options):
    torch.manual_seed(0)
    buffer = ReplayBuffer(SPEC, num_envs, length, **options)
    for t in range(steps):
        number = torch.arange(num_envs) + 10 * t
        buffer.add_batch({'image': number[:, None, None].expand(-1, 40, 20).to(torch.uint8), 'reward': number.float(),
                          'step_type': torch.full((num_envs, ), 1, dtype=torch.int32),
                          'discount': torch.ones(num_envs)})
    return buffer


@pytest.mark.parametrize('options', [{}, {'prioritized_sampling': True}, {'record_episodic_return': True},
                                     {'recent_data_steps': 3, 'recent_data_ratio': 0.5}])
@pytest.mark.parametrize('length', [1, 3])
@pytest.mark.parametrize('slots', [1, 2, 3, 7])
def test_a_reader_samples_the_same_batches_as_the_buffer(options, length, slots):
    buffer = filled(**options)
    reader = buffer.reader(4, length, slots)
    torch.manual_seed(1)
    expected, expected_info = buffer.get_batch(20, length)
    torch.manual_seed(1)
    for part, (info, slot) in enumerate(reader.draw(5)):
        assert slot is reader.slots[part % slots]
        chosen = slice(4 * part, 4 * part + 4)
        for name, x in expected.items():
            torch.testing.assert_close(slot.experience[name], x[chosen])
            torch.testing.assert_close(slot.time_major[name], x[chosen].transpose(0, 1))
        for name in ('env_ids', 'positions', 'importance_weights', 'discounted_return'):
            value, expected_value = getattr(info, name), getattr(expected_info, name)
            if isinstance(expected_value, tuple):
                assert value == () and expected_value == ()
            else:
                assert torch.equal(value, expected_value[chosen])
        assert info.replay_buffer is buffer


@pytest.mark.parametrize('slots', [1, 2])
def test_minibatches_reuse_the_same_memory(slots):
    reader = filled().reader(4, 2, slots)
    before = [[x.data_ptr() for x in nest.flatten(slot.experience)] for slot in reader.slots]
    rewards = [slot.experience['reward'].clone() for _, slot in reader.draw(4)]
    assert not torch.equal(rewards[0], rewards[slots]) and len(reader.slots) == slots
    assert [[x.data_ptr() for x in nest.flatten(slot.experience)] for slot in reader.slots] == before


def test_a_reader_recognizes_its_own_tensors():
    slot = filled().reader(4, 2).slots[0]
    own = slot.experience
    assert slot.holds(dict(own))
    assert not slot.holds({**own, 'reward': own['reward'] * 1})
    assert not slot.holds({name: x for name, x in own.items() if name != 'step_type'})
    assert not slot.holds({**own, 'more': own['reward']})


def test_a_buffer_of_several_processes_has_no_reader():
    assert filled(allow_multiprocess=True).reader(4, 2) is None


def test_too_few_steps_raise_as_in_the_buffer():
    buffer = ReplayBuffer(SPEC, 1, 10)
    with pytest.raises(ValueError, match='collect more'):
        next(buffer.reader(4, 2).draw(1))


def test_it_reads_where_all_leaves_are_large():
    buffer = ReplayBuffer({'image': TensorSpec((40, 40), torch.uint8)}, 1, 4)
    for t in range(6):
        buffer.add_batch({'image': torch.full((1, 40, 40), t, dtype=torch.uint8)})
    reader = buffer.reader(3, 2)
    (info, slot), = reader.draw(1)
    assert slot.time_major['image'][:, :, 0, 0].tolist() == torch.stack([info.positions, info.positions + 1]).tolist()
