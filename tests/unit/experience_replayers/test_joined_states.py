"""Replay buffers of several processes joined to one, and split again."""
import pytest
import torch

from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec


def make(num_envs, prioritized, length=4):
    spec = {'x': TensorSpec((2, )), 'image': TensorSpec((40, 40), torch.uint8)}
    return ReplayBuffer(spec, num_envs, length, prioritized_sampling=prioritized, enable_checkpoint=True)


def fill(buffer, first_env, steps):
    for t in range(steps):
        envs = torch.arange(first_env, first_env + buffer.num_environments)
        buffer.add_batch({'x': torch.stack([envs.float(), torch.full(envs.shape, float(t))], -1),
                          'image': (envs + t).to(torch.uint8)[:, None, None].expand(-1, 40, 40)})
    if buffer.prioritized_sampling:
        buffer.get_batch(1, 1)
        envs = torch.arange(buffer.num_environments)
        positions = buffer.current_pos - 1
        buffer.update_priority(envs, positions, 2.0 + first_env + envs.float())


def contents(buffer):
    (experience, _), = [buffer.gather_all()]
    return experience['x'], experience['image']


@pytest.mark.parametrize('prioritized', [False, True])
@pytest.mark.parametrize('steps', [3, 6])
def test_two_buffers_and_one_of_all_environments_hold_the_same(prioritized, steps):
    halves, full = [make(2, prioritized), make(2, prioritized)], make(4, prioritized)
    for i, half in enumerate(halves):
        fill(half, 2 * i, steps)
    fill(full, 0, steps)
    joined = make(4, prioritized)
    joined.load_state_dict(joined.join_states([half.state_dict() for half in halves]))
    for a, b in zip(contents(joined), contents(full)):
        assert torch.equal(a, b)
    shares = [make(2, prioritized), make(2, prioritized)]
    for rank, share in enumerate(shares):
        share.load_state_dict(share.split_state(full.state_dict(), rank, 2))
        for a, b in zip(contents(share), contents(halves[rank])):
            assert torch.equal(a, b)
    if prioritized:
        assert torch.equal(*(buffer.state_dict()['priorities']['priorities'] for buffer in (joined, full)))
        assert torch.equal(*(buffer.state_dict()['priorities']['newest'] for buffer in (joined, full)))
        assert torch.equal(*(buffer.state_dict()['priorities']['priorities'] for buffer in (shares[1], halves[1])))


def test_as_many_buffers_as_before_keep_their_priorities_of_new_steps():
    halves = [make(2, True), make(2, True)]
    for i, half in enumerate(halves):
        fill(half, 2 * i, 3)
    joined = halves[0].join_states([half.state_dict() for half in halves])
    newest = [half.state_dict()['priorities']['newest'] for half in halves]
    assert not torch.equal(*newest)
    for rank, size in ((0, 2), (1, 2), (0, 4)):
        share = make(4 // size, True)
        share.load_state_dict(share.split_state(joined, rank, size))
        expected = newest[rank] if size == 2 else joined['priorities']['newest']
        assert torch.equal(share.state_dict()['priorities']['newest'], expected)


def test_an_updated_priority_outweighs_an_initial_one():
    """New steps of the joined buffer get the largest priority that was set, 0.25, and not the initial 1."""
    halves, joined = [make(1, True), make(1, True)], make(2, True)
    for half in halves:
        half.add_batch({'x': torch.zeros(1, 2), 'image': torch.zeros(1, 40, 40, dtype=torch.uint8)})
    halves[1].update_priority(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.25]))
    joined.load_state_dict(joined.join_states([half.state_dict() for half in halves]))
    assert joined.state_dict()['priorities']['newest'][:2].tolist() == [0.25, 1.0]
