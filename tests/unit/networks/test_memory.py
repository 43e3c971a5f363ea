"""External memories against loops over slots, hand-computed constants, and through time."""
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from alfx import nest
from alfx.networks.memory import FIFOMemory, Memory, MemoryWithUsage, content_weights
from alfx.tensor_specs import SpecError, TensorSpec


def slow_weights(key, memory, scale, normalize, mask):
    """Return the weights of one key over the slots of one memory, written from the formula."""
    exponentials = []
    for i, slot in enumerate(memory):
        dot = float(sum(a * b for a, b in zip(key.tolist(), slot.tolist())))
        length = float(key.norm() * slot.norm())
        similarity = dot / length if normalize and length > 0 else (0.0 if normalize else dot)
        exponentials.append(math.exp(scale * similarity) if mask[i] else 0.0)
    total = sum(exponentials)
    return torch.tensor([x / total if total else 0.0 for x in exponentials])


class SlowMemory:
    """One memory with usage, as Python lists."""

    def __init__(self, size, dim, decay):
        self.slots, self.usage, self.decay = [[0.0] * dim for _ in range(size)], [0.0] * size, decay

    def read(self, keys, scales, normalize):
        found, used = [], [0.0] * len(self.slots)
        for key, scale in zip(keys, scales):
            weights = slow_weights(key, torch.tensor(self.slots), float(scale), normalize, [u > 0 for u in self.usage])
            found.append(sum(w * torch.tensor(slot) for w, slot in zip(weights, self.slots)))
            used = [u + float(w) for u, w in zip(used, weights)]
        self.usage = [u + w for u, w in zip(self.usage, used)]
        return torch.stack(found)

    def write(self, content):
        least = self.usage.index(min(self.usage))
        self.usage = [u * self.decay for u in self.usage]
        self.slots[least], self.usage[least] = content.tolist(), 1.0


@pytest.mark.parametrize('normalize', [False, True])
@pytest.mark.parametrize('decay', [None, 0.7, 1.0])
def test_reads_and_writes_match_a_loop_over_slots(normalize, decay):
    batch, size, dim, num_keys = 3, 4, 2, 2
    memory = MemoryWithUsage(dim, size, normalize=normalize, usage_decay=decay)
    memory.build(batch)
    slow = [SlowMemory(size, dim, 0.75 if decay is None else decay) for _ in range(batch)]
    for _ in range(3 * size):
        keys, scales = torch.randn(batch, num_keys, dim), torch.rand(batch, num_keys) * 3
        found = memory.read(keys, scales)
        expected = torch.stack([m.read(k, s, normalize) for m, k, s in zip(slow, keys, scales)])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        content = torch.randn(batch, dim)
        memory.write(content)
        for m, c in zip(slow, content):
            m.write(c)
        torch.testing.assert_close(memory.states.memory, torch.tensor([m.slots for m in slow]))
        torch.testing.assert_close(memory.usage, torch.tensor([m.usage for m in slow]), atol=1e-5, rtol=1e-4)


def test_a_read_by_hand():
    memory = MemoryWithUsage(2, 3)
    memory.build(1)
    memory.write(torch.tensor([[2.0, 0.0]]))
    memory.write(torch.tensor([[0.0, 1.0]]))
    # the key is along the first slot: cosines 1 and 0; with strength log(3) the weights are 3/4 and 1/4
    found = memory.read(torch.tensor([[5.0, 0.0]]), math.log(3.0))
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.25]]))
    # before the read the usage was 1 * (1 - 1/3) and 1
    torch.testing.assert_close(memory.usage, torch.tensor([[2 / 3 + 0.75, 1.25, 0.0]]))
    # by the inner product, 10 and 0, with strength log(3) / 10
    by_product = MemoryWithUsage(2, 3, normalize=False)
    by_product.from_states(memory.states)
    torch.testing.assert_close(by_product.read(torch.tensor([[5.0, 0.0]]), math.log(3.0) / 10), found)


def test_the_default_key_strength_depends_on_normalization():
    for normalize, scale in ((True, 5.0), (False, 1 / math.sqrt(3))):
        memory, explicit = (MemoryWithUsage(3, 4, normalize=normalize, scale=s) for s in (None, 0.5))
        memory.build(2)
        for _ in range(4):
            memory.write(torch.randn(2, 3))
        explicit.from_states(memory.states)
        keys = torch.randn(2, 3)
        states = memory.states
        found = memory.read(keys)
        memory.from_states(states)
        torch.testing.assert_close(found, memory.read(keys, scale))
        torch.testing.assert_close(explicit.read(keys), explicit.read(keys, 0.5))
        torch.testing.assert_close(memory.read(keys, torch.tensor([0.0, 1.0]))[0], states.memory[0].mean(0))


def test_reads_do_not_depend_on_the_number_of_empty_slots():
    contents, keys = torch.randn(3, 2, 4), torch.randn(2, 2, 4)
    found = []
    for size in (3, 50):
        memory = MemoryWithUsage(4, size)
        memory.build(2)
        assert not memory.read(keys).any()
        for content in contents:
            memory.write(content)
        found.append(memory.read(keys))
    torch.testing.assert_close(*found)


def test_empty_slots_fill_first_then_the_least_used_is_overwritten():
    memory = MemoryWithUsage(3, 3)
    memory.build(1)
    for i in range(3):
        memory.write(torch.eye(3)[i:i + 1])
        for _ in range(5):
            memory.read(torch.eye(3)[:1], 20.0)
    torch.testing.assert_close(memory.states.memory[0], torch.eye(3))
    for _ in range(4):
        memory.read(torch.eye(3)[1:2], 20.0)
        memory.write(-torch.ones(1, 3))
    # slots 0 (at first) and 1 were read; 2, the newest but never read, went first
    assert memory.states.memory[0, 1].tolist() == [0, 1, 0]
    assert memory.states.memory[0, 2].tolist() == [-1, -1, -1]


def test_slots_that_are_not_read_for_long_are_not_taken_for_empty_ones():
    memory = MemoryWithUsage(2, 200, usage_decay=0.5)
    memory.build(1)
    for i in range(200):
        memory.write(torch.full((1, 2), float(i)))
    assert memory.states.memory[0, :, 0].tolist() == list(range(200)) and (memory.states.usage > 0).all()


def test_keys_are_made_of_a_query_with_positive_strengths():
    memory = MemoryWithUsage(4, 5)
    keynet = memory.create_keynet(6, 2)
    memory.build(3)
    for _ in range(5):
        memory.write(torch.randn(3, 4))
    states, query = memory.states, torch.randn(3, 6)
    found = memory.genkey_and_read(keynet, query)
    assert found.shape == (3, 8)
    memory.from_states(states)
    raw = keynet(query).view(3, 2, 5)
    expected = memory.read(raw[:, :, :4], F.softplus(raw[:, :, 4]))
    assert expected.shape == (3, 2, 4)
    torch.testing.assert_close(found, expected.flatten(1))
    memory.from_states(states)
    torch.testing.assert_close(memory.genkey_and_read(keynet, query, flatten_result=False), expected)


def unrolled(snapshot_only):
    memory = MemoryWithUsage(3, 2, snapshot_only=snapshot_only)
    memory.build(2)
    contents = [torch.randn(2, 3, requires_grad=True) for _ in range(4)]
    keys = torch.randn(2, 3, requires_grad=True)
    before = memory.states
    for content in contents:
        memory.write(content)
        found = memory.read(keys)
    found.square().sum().backward()
    assert all(not x.any() for x in before), 'a state that was taken stays what it was'
    return contents, keys


def test_gradients_flow_through_time_to_writes_still_in_memory():
    contents, keys = unrolled(snapshot_only=False)
    has_gradient = torch.stack([content.grad.any(dim=1) for content in contents])
    assert has_gradient[-1].all() and has_gradient.sum(0).tolist() == [2, 2] and bool(keys.grad.any())
    contents, keys = unrolled(snapshot_only=True)
    assert all(content.grad is None for content in contents) and bool(keys.grad.any())


def test_the_gradient_of_a_read_matches_its_formula():
    memory, keys = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 2, 4, dtype=torch.float64)
    scale, mask = torch.rand(2, 2, dtype=torch.float64), torch.tensor([[True, True, False], [False] * 3])
    inputs = [x.requires_grad_() for x in (keys, memory, scale)]
    assert torch.autograd.gradcheck(lambda k, m, s: content_weights(k, m, s), inputs)
    assert torch.autograd.gradcheck(lambda k, m, s: content_weights(k, m, s, False, mask), inputs)


def test_a_slot_of_zeros_has_finite_gradients():
    memory = torch.zeros(1, 2, 3, requires_grad=True)
    keys = torch.zeros(1, 1, 3, requires_grad=True)
    content_weights(keys, memory, 2.0)[..., 0].sum().backward()
    assert bool(torch.isfinite(memory.grad).all()) and bool(torch.isfinite(keys.grad).all())


@pytest.mark.parametrize('make', [partial(MemoryWithUsage, 2, 3), partial(FIFOMemory, 2, 3)])
def test_zeros_are_an_empty_memory_and_reset_clears_the_chosen_ones(make):
    memory, other = make(), make()
    memory.build(2)
    assert all(not x.any() for x in memory.states)
    for _ in range(4):
        memory.write(torch.randn(2, 2))
    memory.reset(torch.tensor([True, False]))
    other.build(1)
    content, key = torch.randn(2, 2), torch.randn(2, 2)
    memory.write(content)
    other.write(content[:1])
    torch.testing.assert_close(memory.read(key)[:1], other.read(key[:1]))
    assert memory.states.memory[1].ne(0).all()
    memory.reset()
    assert all(not x.any() for x in memory.states) and not memory.read(key).any()


def test_a_fifo_memory_keeps_the_latest_in_order():
    memory = FIFOMemory(1, 3)
    memory.build(2)
    assert memory.mask.tolist() == [[False] * 3] * 2
    for i in range(1, 6):
        memory.write(torch.tensor([[1.0], [-1.0]]) * i)
        expected = [0, 0, 0, *range(1, i + 1)][-3:]
        assert memory.memory[0].flatten().tolist() == expected
        assert memory.memory[1].flatten().tolist() == [-x for x in expected]
        assert memory.mask[0].tolist() == [x > 0 for x in expected]


def test_a_fifo_memory_is_read_by_attention_over_its_contents():
    memory = FIFOMemory(4, 3)
    memory.build(2)
    keys = torch.randn(2, 5, 4)
    assert not memory.read(keys).any()
    for _ in range(5):
        memory.write(torch.randn(2, 4))
        states, count = memory.states, int(memory.mask[0].sum())
        attention = torch.softmax(keys @ states.memory[:, 3 - count:].transpose(1, 2) / 2, dim=-1)
        torch.testing.assert_close(memory.read(keys), attention @ states.memory[:, 3 - count:])
        assert all(a is b for a, b in zip(states, memory.states))


@pytest.mark.parametrize('make', [partial(MemoryWithUsage, 2, 3), partial(FIFOMemory, 2, 3)])
def test_invalid_arguments_are_rejected_by_name(make):
    memory = make(name='notes')
    assert (memory.dim, memory.size, memory.name) == (2, 3, 'notes')
    with pytest.raises(RuntimeError, match='notes holds no contents: call build'):
        memory.read(torch.zeros(1, 2))
    memory.build(2)
    with pytest.raises(SpecError, match='notes.write: expected content of shape .*found'):
        memory.write(torch.zeros(2, 3))
    with pytest.raises(SpecError, match='notes.read: expected keys of shape'):
        memory.read(torch.zeros(3, 2))
    with pytest.raises(SpecError, match='notes: states'):
        memory.from_states(nest.map_structure(lambda x: x[:, None], memory.states))
    memory.release()
    with pytest.raises(RuntimeError, match='holds no contents'):
        memory.states


def test_numbers_out_of_range_are_rejected():
    with pytest.raises(ValueError, match='dim must be an int >= 1'):
        MemoryWithUsage(0, 3)
    with pytest.raises(ValueError, match='usage_decay must be a number'):
        MemoryWithUsage(2, 3, usage_decay=0.0)
    with pytest.raises(ValueError, match='num_keys=0'):
        MemoryWithUsage(2, 3).create_keynet(4, 0)
    assert MemoryWithUsage(2, 1).state_spec == (TensorSpec((1, 2)), TensorSpec((1, )))
    base = Memory(2, 3, TensorSpec((3, 2)))
    base.build(4)
    assert base.states.shape == (4, 3, 2)
    with pytest.raises(NotImplementedError, match='Memory.read'):
        base.read(torch.zeros(4, 2))
    with pytest.raises(NotImplementedError, match='Memory.write'):
        base.write(torch.zeros(4, 2))
