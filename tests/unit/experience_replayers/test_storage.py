"""Storage of the contents: memory use, files, and sharing with other processes."""
import os
from types import SimpleNamespace

import pytest
import torch

from alfx import gin_utils, nest
from alfx.data_structures import BasicRLInfo, BasicRolloutInfo, Experience, StepType, time_step_spec
from alfx.experience_replayers import packed_storage
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

SPEC = {'step_type': TensorSpec((), torch.int32), 'value': TensorSpec((), torch.int64), 'frame': TensorSpec((600, ))}


def steps(values):
    """Return steps ``[T, B, ...]`` from int64 values of that shape."""
    return {'step_type': torch.full(values.shape, StepType.MID, dtype=torch.int32), 'value': values,
            'frame': values.float().unsqueeze(-1).expand(*values.shape, 600)}


def bytes_per_step(buffer):
    """Return the number of bytes in arrays of the buffer, per step of its capacity."""
    seen, total, pending = set(), 0, [buffer]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif type(item).__module__.startswith('alfx.experience_replayers'):
            pending.append(vars(item))
    return total / (buffer.max_length * buffer.num_environments)


@pytest.mark.parametrize('kwargs', [{}, {'prioritized_sampling': True, 'keep_episodic_info': True}])
def test_a_million_stacked_frames_take_no_more_than_7_2_gigabytes(kwargs):
    frame, action = BoundedTensorSpec((84, 84), torch.uint8, 0, 255), BoundedTensorSpec((), torch.int64, 0, 17)
    spec = Experience(time_step=time_step_spec(frame, action), action=action,
                      rollout_info=BasicRolloutInfo(rl=BasicRLInfo(action=action)))
    # A stack of four is looked up by index: each frame is stored once, for any stack.
    buffer = ReplayBuffer(spec, 8, 2000, num_earliest_frames_ignored=3, **kwargs)
    found = bytes_per_step(buffer)
    assert 84 * 84 < found and found * 1_000_000 <= 7.2e9, found


def test_a_memory_mapped_file_is_in_the_folder_and_removed_at_once(tmp_path, monkeypatch):
    mapped = []
    original = packed_storage.map_file
    monkeypatch.setattr(packed_storage, 'map_file', lambda *args: mapped.append(args) or original(*args))
    folder = str(tmp_path / 'replay')
    buffer = ReplayBuffer(SPEC, 2, 5, memory_map_dir=folder, enable_checkpoint=True)
    assert [directory for directory, _ in mapped] == [folder, folder]
    assert [size for _, size in mapped] == [5 * 2 * 16, 5 * 2 * 2400]
    assert os.listdir(folder) == []
    values = torch.arange(14).reshape(7, 2)
    buffer.add_sequence(steps(values))
    assert buffer.gather_all()[0]['value'].tolist() == values[2:].T.tolist()
    other = ReplayBuffer(SPEC, 2, 5, enable_checkpoint=True)
    other.load_state_dict(buffer.state_dict())
    assert other.gather_all()[0]['frame'].equal(buffer.gather_all()[0]['frame'])


@pytest.mark.parametrize('spec', [SPEC, {'value': SPEC['value']}, {'frame': SPEC['frame']}])
def test_single_steps_are_stored_where_longer_sequences_are(spec):
    buffers = [ReplayBuffer(spec, 2, 5) for _ in range(3)]
    values = torch.arange(14).reshape(7, 2)
    sequence = {name: x for name, x in steps(values).items() if name in spec}
    buffers[0].add_sequence(sequence)
    for i in range(7):
        buffers[1].add_sequence({name: x[i:i + 1] for name, x in sequence.items()})
        buffers[2].add_batch({name: x[i] for name, x in sequence.items()})
    for name, x in buffers[0].gather_all()[0].items():
        assert torch.equal(x, sequence[name][2:].transpose(0, 1))
    for buffer in buffers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(buffers[0]._store.blocks, buffer._store.blocks))
    with pytest.raises(SpecError, match='add_sequence'):
        buffers[0].add_sequence({name: x[:, :1] for name, x in sequence.items()})
    with pytest.raises(SpecError, match='add_sequence.*, found float64'):
        buffers[0].add_sequence({name: x.double() for name, x in sequence.items()})


def test_a_folder_that_is_too_small_is_rejected_before_collection(tmp_path):
    blocked = tmp_path / 'file'
    blocked.write_text('')
    with pytest.raises(ValueError, match=r"memory_map_dir: cannot map 0\.00 GB in '.*file'.*use a folder"):
        ReplayBuffer(SPEC, 1, 4, memory_map_dir=str(blocked))
    with pytest.raises(ValueError, match=r'memory_map_dir: cannot map \d+.* GB in .*smaller max_length'):
        ReplayBuffer(SPEC, 1, 10**12, memory_map_dir=str(tmp_path))


def test_unsupported_shared_or_mapped_storage_is_rejected_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"ReplayBuffer\.allow_multiprocess: expected ReplayBuffer.device to be 'cpu'"):
        ReplayBuffer(SPEC, 1, 4, allow_multiprocess=True, device='cuda')
    with pytest.raises(ValueError, match=r"ReplayBuffer\.memory_map_dir: expected ReplayBuffer.device to be 'cpu'"):
        ReplayBuffer(SPEC, 1, 4, memory_map_dir=str(tmp_path), device='cuda')
    with pytest.raises(ValueError, match=r"ReplayBuffer\.device: expected 'cpu' or one of \d+ GPU.*'cuda:99'"):
        ReplayBuffer(SPEC, 1, 4, device='cuda:99')
    with pytest.raises(ValueError, match='memory_map_dir: expected None with allow_multiprocess = True'):
        ReplayBuffer(SPEC, 1, 4, memory_map_dir=str(tmp_path), allow_multiprocess=True)


def shared_buffer():
    return ReplayBuffer(SPEC, 2, 6, prioritized_sampling=True, keep_episodic_info=True, allow_multiprocess=True)


def work_in_process(buffer, add, update):
    """Runs in another process."""
    torch.set_num_threads(1)
    for value in add:
        buffer.add_batch(steps(torch.tensor([value, value + 100])))
    buffer.update_priority(*update)
    buffer.get_batch(4, 2)


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_another_process_stores_into_and_samples_from_the_same_buffer(method):
    buffer = shared_buffer()
    buffer.add_sequence(steps(torch.tensor([[0, 100], [1, 101], [2, 102]])))
    buffer.get_batch(4, 1)
    update = torch.tensor([0, 1, 1]), torch.tensor([3, 4, 6]), torch.tensor([3.0, 0.0, 5.0])
    process = torch.multiprocessing.get_context(method).Process(target=work_in_process,
                                                                args=(buffer, range(3, 8), update))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert buffer.current_pos.tolist() == [8, 8] and buffer.total_size == 12
    buffer.add_batch(steps(torch.tensor([8, 108])))
    batch, _ = buffer.gather_all()
    assert batch['value'].tolist() == [list(range(3, 9)), list(range(103, 109))]
    assert batch['frame'][1, :, 0].tolist() == list(range(103, 109))
    _, info = buffer.get_batch(60, 1)
    weights = dict(zip(zip(info.env_ids.tolist(), info.positions.tolist()), info.importance_weights.tolist()))
    # 7 steps have priority 1, the newest of both environments the largest that was given: 3 + 0 + 5 + 7 + 2 * 5 = 25.
    assert (1, 4) not in weights
    assert weights[0, 3] == pytest.approx(12 * 3 / 25) and weights[1, 6] == pytest.approx(12 * 5 / 25)
    assert weights[0, 8] == pytest.approx(12 * 5 / 25) and weights[0, 5] == pytest.approx(12 / 25)
    assert buffer.steps_to_episode_end(torch.tensor([3]), torch.tensor([1])).tolist() == [5]


def write_many(buffer, env, count):
    """Runs in another process."""
    torch.set_num_threads(1)
    for value in range(count):
        buffer.add_batch(nest.map_structure(lambda x: x[0], steps(torch.tensor([[value]]))), torch.tensor([env]))


def test_processes_that_store_concurrently_do_not_interfere():
    buffer = ReplayBuffer(SPEC, 2, 40, prioritized_sampling=True, allow_multiprocess=True)
    processes = [torch.multiprocessing.get_context('fork').Process(target=write_many, args=(buffer, env, 300))
                 for env in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert buffer.current_pos.tolist() == [300, 300]
    batch, info = buffer.get_batch(200, 3)
    assert (batch['value'] == info.positions.unsqueeze(-1) + torch.arange(3)).all()


# The storage of slots itself ------------------------------------------------------------------------------------------


def storage_of(*specs, num_rows=3, num_columns=2):
    return packed_storage.PackedStorage(specs, num_rows, num_columns, torch.device('cpu'))


def numbers(spec, *outer):
    """Return different numbers in all elements, ``[*outer, *shape]``."""
    shape = (*outer, *spec.shape)
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(spec.dtype)


@pytest.mark.parametrize('specs', [
    [TensorSpec((2, 3)), TensorSpec((2, 3, 2), torch.int64)],
    [TensorSpec((8, ), torch.uint8)],  # no bytes are left over between slots
    [TensorSpec((3, ), torch.uint8), TensorSpec((), torch.int64), TensorSpec((), torch.float16), TensorSpec((2, 300))],
])
def test_every_element_of_every_slot_reads_back(specs):
    storage = storage_of(*specs)
    rows = [numbers(spec, 3, 2) for spec in specs]
    for row in range(3):
        storage.write_row(row, [x[row] for x in rows])
    slots = torch.arange(6)
    leaves = [storage.read_leaf(i, slots).view(x.shape) for i, x in enumerate(rows)]
    for found in (storage.read_slots(slots, (3, 2)), leaves):
        assert all(map(torch.equal, found, rows))
    storage.write_slots(torch.tensor([4]), [x[:1, 0] for x in rows])
    expected = [torch.cat((x[0, 1:], x[:1, 0])) for x in rows]
    assert all(map(torch.equal, storage.read_slots(torch.tensor([1, 4]), (2, )), expected))


def test_copies_of_slots_are_made_on_the_requested_device():
    storage = storage_of(*SPEC.values())
    for leaf, spec in zip(storage.read_slots(torch.tensor([5, 0, 1]), (3, ), torch.device('meta')), SPEC.values()):
        assert (leaf.device.type, leaf.shape, leaf.dtype) == ('meta', (3, *spec.shape), spec.dtype)


def test_a_storage_may_take_all_memory_and_no_byte_more(monkeypatch):
    # 4 + 8 bytes fill two words of 8 bytes, the frame takes 600 * 4: 3 * 2 * 2416 = 14496 bytes
    monkeypatch.setattr(packed_storage, 'memory_of', lambda device: 14_496)
    assert storage_of(*SPEC.values()).bytes_per_slot == 2416
    monkeypatch.setattr(packed_storage, 'memory_of', lambda device: 14_495)
    with pytest.raises(ConfError, match=r'needs 14,496 bytes .* of 3 steps of 2 environment\(s\) with 2416 bytes each'):
        storage_of(*SPEC.values())


@pytest.mark.parametrize('bound,num_rows,expected', [
    ({'replay_buffer_length': 100, 'unroll_length': 7}, 101, 'replay_buffer_length'),
    ({'replay_buffer_length': 100, 'unroll_length': 7}, 8, 'unroll_length'),
    ({'unroll_length': 7}, 8, 'unroll_length'),
    ({}, 8, 'replay_buffer_length'),
])
def test_too_little_memory_is_attributed_to_the_nearest_length(tmp_path, monkeypatch, bound, num_rows, expected):
    conf = tmp_path / 'lengths.gin'
    conf.write_text(''.join(f'TrainerConfig.{name} = {value}\n' for name, value in bound.items()))
    gin_utils.load(str(conf))
    monkeypatch.setattr(packed_storage, 'memory_of', lambda device: 0)
    with pytest.raises(ConfError, match=rf'TrainerConfig\.{expected}.* needs'):
        storage_of(TensorSpec(()), num_rows=num_rows)


def test_rows_to_be_saved_are_views_and_hold_no_other_rows():
    storage = storage_of(*SPEC.values())
    for rows, block in zip(storage.first_rows(2), storage.blocks):
        assert rows.data_ptr() == block.data_ptr() and rows.untyped_storage().nbytes() == rows.nbytes
        assert rows.equal(block[:2])


def test_a_mapped_file_may_take_all_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_storage.shutil, 'disk_usage', lambda folder: SimpleNamespace(free=4096))
    assert packed_storage.map_file(str(tmp_path), 4096).tolist() == [0] * 4096
    with pytest.raises(ValueError, match='No space left'):
        packed_storage.map_file(str(tmp_path), 4097)
    for size in (0, 1):
        assert packed_storage.map_file(str(tmp_path), size).shape == (size, )
