"""Runs in mixed precision on the CPU train, resume, evaluate, and checkpoint the loss scale."""
import pytest
import torch
from test_second_device import CONFS, tensors_of, trainer_of

from alfx.algorithms.config import TrainerConfig
from alfx.runs import building
from alfx.runs.evaluator import evaluate
from alfx.runs.playing import load_for_play

pytestmark = pytest.mark.usefixtures('bfloat16_instructions')

CPU = torch.device('cpu')


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that creates trainers with ``enable_amp`` in one run folder."""
    def trainer(name, iterations=None):
        base, overrides = CONFS[name]
        if 'enable_amp' not in overrides:
            monkeypatch.setitem(CONFS, name, (base, overrides + 'TrainerConfig.enable_amp = True\n'))
        return trainer_of(name, str(tmp_path), CPU, monkeypatch, iterations)

    return trainer


@pytest.mark.parametrize('name', ['PPO, recurrent', 'SAC', 'DQN, priorities and n steps'])
def test_a_run_trains_resumes_and_is_evaluated(name, make):
    trainer = make(name)
    trainer.train()
    trained = tensors_of(trainer.algorithm)
    resumed = make(name, iterations=trainer.current_iterations() + 2)
    resumed.train()
    now = tensors_of(resumed.algorithm)
    assert any(not torch.equal(x, now[key]) for key, x in trained.items())
    assert all(x.dtype != torch.bfloat16 for x in now.values())
    config = TrainerConfig(root_dir=resumed._config.root_dir)
    config.random_seed = 0
    env = building.create_eval_environment(config, 2)
    algorithm = building.create_algorithm(config, env, trains=False)
    load_for_play(config.root_dir, algorithm)
    assert algorithm.updater.precision is not None and len(evaluate(env, algorithm, 3).returns) == 3


def test_the_scale_of_the_losses_is_part_of_a_checkpoint(make, monkeypatch):
    monkeypatch.setattr('alfx.engine.mixed_precision._best_dtype', lambda device: torch.float16)
    trainer = make('SAC')
    scaler = trainer.algorithm.updater.precision.scaler
    scaler.scaled(torch.ones(()))
    scaler._scaler.update(128.0)
    trainer._save_checkpoint()
    resumed = make('SAC')
    assert resumed.algorithm.updater.precision.scaler.scale != 128.0
    resumed._resume()
    assert resumed.algorithm.updater.precision.scaler.scale == 128.0


def test_a_run_can_switch_to_mixed_precision_on_resume(tmp_path, monkeypatch):
    trainer = trainer_of('SAC', str(tmp_path), CPU, monkeypatch)
    assert 'mixed_precision' not in trainer._state.state_dict()  # as in checkpoints of earlier versions
    trainer.train()
    with open(tmp_path / 'short.gin', 'a') as conf:
        conf.write('TrainerConfig.enable_amp = True\n')
    resumed = trainer_of('SAC', str(tmp_path), CPU, monkeypatch, iterations=trainer.current_iterations() + 1)
    resumed.train()
    assert resumed.algorithm.updater.precision is not None
    assert resumed.current_iterations() == trainer.current_iterations() + 1
