"""Packing of tensors for their way to a GPU."""
import pytest
import torch

from alfx.utils import transfers

TENSORS = [torch.arange(3, dtype=torch.int32), torch.tensor(True), torch.rand(2, 3), torch.zeros(0, 4),
           torch.randint(0, 255, (5, ), dtype=torch.uint8), torch.rand(4, 4).t(), torch.arange(7),
           torch.rand(()).half()]


def test_packed_tensors_are_unpacked_unchanged():
    block, layout = transfers.packed(TENSORS, pinned=False)
    assert block.dtype == torch.uint8 and block.is_contiguous()
    for expected, found in zip(TENSORS, transfers.unpacked(block, layout)):
        assert expected.dtype == found.dtype and torch.equal(expected, found)
        assert found.data_ptr() % found.dtype.itemsize == 0


def test_the_originals_may_be_written_to_afterwards():
    x = torch.zeros(3)
    block, layout = transfers.packed([x], pinned=False)
    x += 1
    assert not transfers.unpacked(block, layout)[0].any()


def test_tensors_already_on_the_device_are_not_copied():
    nested = {'a': torch.rand(2), 'b': (torch.rand(3), )}
    assert transfers.to_device(nested, torch.device('cpu')) is nested


@pytest.mark.gpu
def test_tensors_of_any_size_arrive_on_the_gpu_in_their_structure():
    device = torch.device('cuda', torch.cuda.current_device())
    nested = {'small': TENSORS, 'large': torch.rand(300, 300), 'there': torch.rand(2, device=device)}
    found = transfers.to_device(nested, device)
    assert found['there'] is nested['there']
    for expected, x in zip([*TENSORS, nested['large']], [*found['small'], found['large']]):
        assert x.device == device and x.dtype == expected.dtype and torch.equal(x.cpu(), expected)


@pytest.mark.gpu
def test_host_memory_is_reusable_at_once_and_transfers_do_not_mix():
    device = torch.device('cuda', torch.cuda.current_device())
    host, found = torch.zeros(2**20), []
    busy = torch.rand(4000, 4000, device=device)
    for i in range(20):
        busy = (busy @ busy).clamp(0, 1)
        host.fill_(i)
        found.append(transfers.to_device([host], device)[0])
    for i, x in enumerate(found):
        assert (x == i).all()
