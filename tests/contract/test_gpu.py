"""Training on a GPU, skipped without one. test_second_device.py finds misplaced tensors without a GPU."""
import logging
import os

import pytest
import torch
from test_second_device import CONFS, tensors_of, trainer_of

from alfx import nest
from alfx.algorithms.config import TrainerConfig
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.runs import building
from alfx.runs.evaluator import evaluate
from alfx.runs.playing import load_for_play
from alfx.tensor_specs import TensorSpec
from alfx.trainers.devices import find_device, use_device
from alfx.utils import random_state

pytestmark = pytest.mark.gpu
ORIGINAL = dict(CONFS)
NAMES = [name for name in CONFS if 'on the device' not in name]


@pytest.fixture
def gpu():
    device = find_device('cuda')
    use_device(device)
    return device


def train(name, folder, monkeypatch, gpu, extra='', iterations=None):
    """Return a trainer after training with ``extra`` lines of configuration."""
    base, overrides = ORIGINAL[name]
    monkeypatch.setitem(CONFS, name, (base, overrides + extra))
    trainer = trainer_of(name, str(folder), gpu, monkeypatch, iterations)
    trainer.train()
    return trainer


def is_finite(algorithm):
    return all(bool(torch.isfinite(p).all()) for p in algorithm.parameters())


@pytest.mark.parametrize('name', NAMES)
def test_a_run_trains_resumes_and_is_evaluated(name, tmp_path, monkeypatch, gpu):
    trainer = train(name, tmp_path, monkeypatch, gpu)
    assert {p.device for p in trainer.algorithm.parameters()} == {gpu} and is_finite(trainer.algorithm)
    resumed = train(name, tmp_path, monkeypatch, gpu, iterations=trainer.current_iterations() + 2)
    assert resumed.current_iterations() == trainer.current_iterations() + 2 and is_finite(resumed.algorithm)
    config = TrainerConfig(root_dir=resumed._config.root_dir)
    config.random_seed = 0
    env = building.create_eval_environment(config, 2)
    algorithm = building.create_algorithm(config, env, trains=False)
    load_for_play(config.root_dir, algorithm)
    assert len(evaluate(env, algorithm, 3).returns) == 3


@pytest.mark.parametrize('first, second', [('cpu', 'cuda'), ('cuda', 'cpu')])
def test_a_run_resumes_on_another_device(first, second, tmp_path, monkeypatch, gpu):
    devices = {'cpu': torch.device('cpu'), 'cuda': gpu}
    trainer = train('SAC', tmp_path, monkeypatch, devices[first])
    resumed = train('SAC', tmp_path, monkeypatch, devices[second], iterations=trainer.current_iterations() + 2)
    assert {p.device for p in resumed.algorithm.parameters()} == {devices[second]} and is_finite(resumed.algorithm)


def test_interrupted_and_uninterrupted_runs_draw_the_same_numbers(tmp_path, monkeypatch, gpu):
    uninterrupted = train('SAC', _folder(tmp_path, 'whole'), monkeypatch, gpu, iterations=16)
    parts = _folder(tmp_path, 'parts')
    extra = 'ReplayBuffer.enable_checkpoint = True\n'
    train('SAC', parts, monkeypatch, gpu, extra, iterations=12)
    resumed = train('SAC', parts, monkeypatch, gpu, iterations=16)
    for name, x in tensors_of(uninterrupted.algorithm).items():
        torch.testing.assert_close(x, tensors_of(resumed.algorithm)[name], rtol=1e-3, atol=1e-4)


def test_the_location_of_the_replay_buffer_has_no_effect(tmp_path, monkeypatch, gpu):
    found = [tensors_of(train('SAC', _folder(tmp_path, device), monkeypatch, gpu,
                              f"ReplayBuffer.device = '{device}'\n").algorithm) for device in ('cpu', 'cuda')]
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=1e-3, atol=1e-4)


def test_samples_of_both_kinds_of_storage_arrive_on_the_gpu(gpu):
    spec = {'small': TensorSpec((3, )), 'image': TensorSpec((3, 64, 64), torch.uint8),
            'kind': TensorSpec((), torch.int32)}
    batch = {'small': torch.rand(5, 4, 3), 'image': torch.randint(0, 255, (5, 4, 3, 64, 64), dtype=torch.uint8),
             'kind': torch.arange(20, dtype=torch.int32).view(5, 4)}
    for device in ('cpu', 'cuda'):
        buffer = ReplayBuffer(spec, 4, 5, device=device)
        buffer.add_sequence(nest.map_structure(lambda x: x.to(gpu), batch))
        sample, info = buffer.get_batch(6, 2)
        assert {x.device for x in nest.flatten(sample)} == {gpu} and info.positions.device == gpu
        rows, columns = info.positions.cpu(), info.env_ids.cpu()
        for key, x in sample.items():
            assert torch.equal(x[:, 0].cpu(), batch[key][rows, columns]) and torch.equal(
                x[:, 1].cpu(), batch[key][rows + 1, columns])


def test_the_generator_of_the_gpu_is_part_of_the_random_state(gpu):
    torch.rand(3, device=gpu)
    state = random_state.capture()
    first = torch.rand(3, device=gpu)
    random_state.restore(state)
    assert torch.equal(first, torch.rand(3, device=gpu))


@pytest.mark.parametrize('name', ['PPO', 'SAC', 'DQN, priorities and n steps'])
def test_mixed_precision_trains_and_resumes(name, tmp_path, monkeypatch, gpu):
    extra = 'TrainerConfig.enable_amp = True\n'
    trainer = train(name, tmp_path, monkeypatch, gpu, extra)
    assert is_finite(trainer.algorithm) and trainer.algorithm.updater.precision is not None
    resumed = train(name, tmp_path, monkeypatch, gpu, iterations=trainer.current_iterations() + 2)
    assert is_finite(resumed.algorithm)


def test_a_compiled_update_is_a_cuda_graph_and_matches_eager_mode(tmp_path, monkeypatch, gpu, caplog):
    found = []
    for compiled in (False, True):
        with caplog.at_level(logging.INFO, 'alfx'):
            trainer = train('hindsight', _folder(tmp_path, str(compiled)), monkeypatch, gpu,
                            f'TrainerConfig.compile = {compiled}\nTrainerConfig.summarize_first_interval = False\n')
        found.append(tensors_of(trainer.algorithm))
    assert 'is captured as a CUDA graph' in caplog.text
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=1e-2, atol=1e-3, msg=name)


def test_unused_memory_is_returned_on_request(tmp_path, monkeypatch, gpu):
    calls = []
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: calls.append(1))
    train('PPO', tmp_path, monkeypatch, gpu, 'TrainerConfig.empty_cache = True\n')
    assert calls


def _folder(parent, name):
    path = os.path.join(str(parent), name)
    os.makedirs(path, exist_ok=True)
    return path
