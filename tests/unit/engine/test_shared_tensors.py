"""Memory shared by processes is bounded and ordered, and is never read half-written."""
import copy
import multiprocessing
import shutil
import threading
from collections import namedtuple

import pytest
import torch

from alfx import TensorSpec
from alfx.engine.remote.shared_tensors import Published, StepRing
from alfx.gin_utils import ConfError
from alfx.utils.processes import LostProcessError
from alfx.utils.shared_memory import SharedTensors

SPECS = [TensorSpec((3, 2)), TensorSpec((), torch.int64), TensorSpec((5, ), torch.uint8), TensorSpec((1, ), torch.bool)]
CONTEXT = multiprocessing.get_context('spawn')


def step(number):
    return [torch.full((3, 2), float(number)), torch.tensor(number), torch.full((5, ), number % 256, dtype=torch.uint8),
            torch.tensor([number % 2 == 1])]


def two_sides(size):
    """Return the writer's and the reader's view of a ring: shared memory, separate positions."""
    ring = StepRing(SPECS, size, CONTEXT)
    return ring, copy.copy(ring)


def test_tensors_of_all_types_share_one_block_without_touching_each_other():
    shared = SharedTensors(SPECS, 'a test')
    for i, tensor in enumerate(shared.tensors):
        tensor.fill_(i + 1)
    assert [(tuple(t.shape), t.dtype) for t in shared.tensors] == [(tuple(s.shape), s.dtype) for s in SPECS]
    assert [float(t.float().mean()) for t in shared.tensors] == [1, 2, 3, 1]
    reopened = SharedTensors.__new__(SharedTensors)
    reopened.__setstate__(shared.__getstate__())
    reopened.tensors[1].fill_(9)
    assert int(shared.tensors[1]) == 9


def test_data_larger_than_shared_memory_is_rejected(monkeypatch):
    usage = namedtuple('usage', 'total used free')
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage(0, 0, 2**20))
    with pytest.raises(ConfError, match='a queue of 9999999 steps(.|\n)*MiB'):
        StepRing(SPECS, 9999999, CONTEXT)


def test_steps_keep_their_order_in_a_ring_that_stores_what_fits():
    writer, reader = two_sides(4)
    assert writer.is_untouched
    written, received = 0, []
    for take in (3, 4, 1, 2, 4, 4):
        while writer.wait_for_room(0.0):
            writer.put(step(written))
            written += 1
        out = reader.empty_steps(6)
        assert reader.get(out, 1, take, 0.0) == take
        received += out[1][1:1 + take].tolist()
        for row in range(1, 1 + take):
            assert all(torch.equal(a[row], b) for a, b in zip(out, step(int(out[1][row]))))
    assert received == list(range(18)) and not writer.is_untouched and written <= 18 + 4
    assert reader.get(reader.empty_steps(9), 0, 9, 0.0) == written - 18
    assert reader.get(reader.empty_steps(1), 0, 1, 0.0) == 0 == reader.get([], 0, 0, 1.0)


def test_a_full_ring_makes_the_writer_wait_and_an_empty_one_the_reader():
    writer, reader = two_sides(3)
    out, count = reader.empty_steps(200), 0

    def write():
        for number in range(200):
            while not writer.wait_for_room():
                pass
            writer.put(step(number))

    thread = threading.Thread(target=write)
    thread.start()
    while count < 200:
        count += reader.get(out, count, min(7, 200 - count))
    thread.join()
    assert out[1].tolist() == list(range(200)) and out[0][:, 2, 1].tolist() == list(map(float, range(200)))


def test_versions_are_never_seen_half_written():
    published = Published([TensorSpec((20000, )), TensorSpec((20000, ), torch.int64)], 'a test', CONTEXT)
    reader = copy.copy(published)
    seen, calls = [], []

    def read(tensors):
        low, high = torch.cat([t.float() for t in tensors]).aminmax()
        seen.append((float(low), float(high)))

    assert not reader.take(read, lambda: None)

    def write():
        for number in range(1, 300):
            published.publish(lambda tensors, n=number: [t.fill_(n) for t in tensors], lambda: calls.append(1))

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        reader.take(read, lambda: None)
    thread.join()
    reader.take(read, lambda: None)
    assert all(low == high for low, high in seen) and seen[-1] == (299.0, 299.0)
    assert [a for a, _ in seen] == sorted({a for a, _ in seen})  # each version once
    assert not reader.take(read, lambda: None)


def test_waiting_for_a_dead_process_polls_its_health():
    published = Published([TensorSpec(())], 'a test', CONTEXT)
    published._lock.acquire()  # held by a process that has been killed

    def check_health():
        raise LostProcessError('the other process', 'is gone')

    with pytest.raises(LostProcessError):
        published.publish(lambda tensors: None, check_health)
