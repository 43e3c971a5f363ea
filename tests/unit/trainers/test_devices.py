"""``--device``: available and missing devices."""
import os
import sys

import pytest
import torch
from helpers import warm_starts

from alfx import context, gin_utils
from alfx.trainers import devices


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that simulates a number of GPUs."""
    def set_count(count):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: count > 0)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: count)
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda i: f'GPU number {i}')

    return set_count


@pytest.mark.parametrize('count, name, found', [
    (0, 'cpu', 'cpu'), (0, 'auto', 'cpu'), (1, 'cpu', 'cpu'), (1, 'auto', 'cuda:0'), (2, 'cuda', 'cuda:0'),
    (2, 'cuda:1', 'cuda:1'), (2, 'cuda:0', 'cuda:0'), (0, torch.device('cpu'), 'cpu'),
    (2, torch.device('cuda', 1), 'cuda:1')])
def test_a_device_is_found_by_its_name_and_a_gpu_has_its_number(gpus, count, name, found):
    gpus(count)
    assert devices.find_device(name) == torch.device(found)


@pytest.mark.parametrize('count, name, message', [
    (0, 'cuda', 'device=cuda: this GPU does not exist.*: use device=cpu'),
    (0, 'cuda:3', 'device=cuda:3: this GPU does not exist.*: use device=cpu'),
    (1, 'cuda:3', r'available devices: cpu, cuda:0 \(GPU number 0\)'),
    (2, 'cuda:2', r'available devices: cpu, cuda:0 \(GPU number 0\), cuda:1 \(GPU number 1\)'),
    (1, 'gpu', "expected 'cpu', 'cuda', 'cuda:N' or 'auto'.*cuda:0"), (0, 'cuda:', "expected 'cpu'"),
    (0, 'CPU', "expected 'cpu'"), (0, 'cuda:-1', "expected 'cpu'")])
def test_missing_devices_are_rejected_with_the_available_ones(gpus, count, name, message):
    gpus(count)
    with pytest.raises(gin_utils.ConfError, match=f'(?s){message}'):
        devices.find_device(name)


def test_a_device_in_use_is_the_default_one_and_the_current_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    devices.use_device(torch.device('cuda', 1))
    assert context.get_default_device() == torch.device('cuda', 1) and chosen == [torch.device('cuda', 1)]
    devices.use_device(torch.device('cpu'))
    assert context.get_default_device() == torch.device('cpu') and len(chosen) == 1


@pytest.mark.parametrize('program, arguments', [
    ('train', ['--conf', 'ppo_cart_pole', '--root_dir', 'run']), ('check', ['--conf', 'ppo_cart_pole']),
    ('evaluate', ['--root_dir', '.']), ('play', ['--root_dir', '.'])])
def test_every_program_rejects_a_missing_gpu_before_it_writes_anything(program, arguments, tmp_path, repository):
    found = warm_starts.run([sys.executable, '-m', f'alfx.bin.{program}', *arguments, '--device', 'cuda:99'],
                           capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False,
                           env={**os.environ, 'PYTHONPATH': repository})
    assert found.returncode == 2, found.stderr
    assert 'device=cuda:99: this GPU does not exist' in found.stderr and 'Traceback' not in found.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('count, device, found', [(0, 'cpu', ''), (1, 'cpu', 'GPU number 0'), (1, 'meta', '')])
def test_an_unused_gpu_is_reported(gpus, count, device, found):
    gpus(count)
    context.set_default_device(torch.device(device))
    try:
        assert devices.unused_gpu() == found
    finally:
        context.reset()
