"""Training on a device that is not the CPU: code that creates a tensor on the wrong device fails here without a GPU."""
import os
import sys

import pytest
import torch

from alfx import context, gin_utils, nest
from alfx.algorithms.config import TrainerConfig
from alfx.runs import building
from alfx.runs import run_files
from alfx.runs.evaluator import evaluate
from alfx.runs.playing import load_for_play
from alfx.trainers.policy_trainer import RLTrainer
from helpers.second_device import DEVICE, SecondDeviceTensor, second_device

# torch warns that nothing is copied to 'meta'; copies to this device work
pytestmark = pytest.mark.filterwarnings('ignore:for .*copying from a non-meta parameter')
COMMON = '''
create_environment.num_parallel_environments = 2
create_environment.nonparallel = True
TrainerConfig.num_updates_per_train_iter = 2
TrainerConfig.random_seed = 1
TrainerConfig.num_checkpoints = 1
TrainerConfig.evaluate = True
TrainerConfig.async_eval = False
TrainerConfig.num_eval_episodes = 1
TrainerConfig.debug_summaries = True
TrainerConfig.summarize_grads_and_vars = True
TrainerConfig.summarize_action_distributions = True
'''
UNROLLS = 'TrainerConfig.unroll_length = 8\nTrainerConfig.num_iterations = 3\nTrainerConfig.mini_batch_size = 8\n'
SAMPLES = ('TrainerConfig.initial_collect_steps = 16\nTrainerConfig.num_iterations = 7\n'
           'TrainerConfig.unroll_length = 4\nTrainerConfig.mini_batch_size = 8\n'
           'TrainerConfig.replay_buffer_length = 64\n')
SHORT = 'suite_gym.load.max_episode_steps = 20\n'
CONFS = {
    'PPO': ('ppo_cart_pole', UNROLLS + SHORT),
    'PPO, recurrent': ('ppo_cart_pole_rnn', UNROLLS + SHORT),
    'PPO, RND': ('ppo_rnd_corridor', UNROLLS),
    'actor-critic': ('ac_cart_pole', UNROLLS + SHORT),
    'SAC': ('sac_pendulum', SAMPLES + SHORT),
    'SAC, replay on the device': ('sac_pendulum', SAMPLES + SHORT + f"ReplayBuffer.device = '{DEVICE}'\n"),
    'SAC, mixed actions': ('sac_mixed_actions', SAMPLES),
    'DQN, priorities and n steps': ('rainbow_cart_pole', SAMPLES + SHORT),
    'MPO': ('mpo_pendulum', SAMPLES + SHORT),
    'hindsight': ('dqn_bit_flip', SAMPLES),
}


def trainer_of(name, folder, device, monkeypatch, iterations=None, bindings=()):
    monkeypatch.setattr(sys, 'argv', ['test'])
    base, overrides = CONFS[name]
    path = os.path.join(folder, 'short.gin')
    if not os.path.exists(path):
        with open(path, 'w', encoding='utf8') as file:
            file.write(f"include '{base}.gin'\n{COMMON}{overrides}")
    gin_utils.clear()
    limits = [] if iterations is None else [f'TrainerConfig.num_iterations = {iterations}']
    conf = gin_utils.load(path, [*limits, *bindings])
    root_dir = os.path.join(folder, 'run')
    gin_utils.write_conf(root_dir, conf)
    context.reset()
    context.set_default_device(device)
    return RLTrainer(TrainerConfig(root_dir=root_dir, conf_file=conf.conf_file))


def tensors_of(algorithm):
    return {name: x.detach().cpu() for name, x in algorithm.state_dict().items() if isinstance(x, torch.Tensor)}


SLOW = ('PPO, recurrent', 'PPO, RND', 'actor-critic', 'SAC, mixed actions', 'MPO')


@pytest.mark.parametrize('name', [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
                                  for name in CONFS])
def test_all_tensors_are_on_the_device_of_the_networks_and_runs_resume(name, tmp_path, monkeypatch):
    with second_device() as device:
        trainer = trainer_of(name, str(tmp_path), device, monkeypatch)
        trainer.train()
        trained = tensors_of(trainer.algorithm)
        assert all(isinstance(p, SecondDeviceTensor) for p in trainer.algorithm.parameters())
        resumed = trainer_of(name, str(tmp_path), device, monkeypatch,
                             iterations=trainer.current_iterations() + 2)
        resumed.train()
        assert resumed.current_iterations() == trainer.current_iterations() + 2
        assert any(not torch.equal(x, trained[name]) for name, x in tensors_of(resumed.algorithm).items())
        assert all(isinstance(p, SecondDeviceTensor) for p in resumed.algorithm.parameters())
        config = TrainerConfig(root_dir=resumed._config.root_dir)
        config.random_seed = 0
        env = building.create_eval_environment(config, 2)
        algorithm = building.create_algorithm(config, env, trains=False)
        load_for_play(config.root_dir, algorithm)
        assert len(evaluate(env, algorithm, 3).returns) == 3


@pytest.mark.parametrize('first, second', [('cpu', DEVICE), (DEVICE, 'cpu')])
def test_a_run_resumes_on_another_device(first, second, tmp_path, monkeypatch):
    with second_device():
        trainer = trainer_of('SAC', str(tmp_path), first, monkeypatch)
        trainer.train()
        resumed = trainer_of('SAC', str(tmp_path), second, monkeypatch, iterations=trainer.current_iterations() + 2)
        resumed.train()
        assert resumed.current_iterations() == trainer.current_iterations() + 2
        assert {p.device.type for p in resumed.algorithm.parameters()} == {torch.device(second).type}
    assert os.listdir(run_files.checkpoint_dir(resumed._config.root_dir))


def test_the_second_device_computes_the_same_as_the_first(tmp_path, monkeypatch):
    found = []
    for device in ('cpu', DEVICE):
        folder = tmp_path / str(device)
        folder.mkdir()
        with second_device():
            # beyond the bound the norm of gradients counts, which a CPU adds up in another order
            trainer = trainer_of('PPO', str(folder), device, monkeypatch,
                                 bindings=['ppo/Adam.gradient_clipping = 1e6'])
            trainer.train()
            found.append(tensors_of(trainer.algorithm))
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name


class TestTheSecondDeviceItself:

    def test_mixing_devices_is_rejected(self):
        with second_device() as device:
            on_device = torch.ones(3, device=device)
            with pytest.raises(RuntimeError, match='expected all tensors to be on the same device'):
                on_device + torch.ones(3)
            with pytest.raises(RuntimeError, match='same device'):
                torch.stack([on_device, torch.ones(3)])
            with pytest.raises(TypeError, match='numpy'):
                on_device.numpy()
            with pytest.raises(RuntimeError, match='what is indexed on the CPU'):
                torch.ones(3)[torch.tensor([1], device=device)]
            torch.testing.assert_close((on_device + torch.tensor(1.0)).cpu(), torch.full((3, ), 2.0))

    def test_gradients_are_on_it_and_right(self):
        with second_device() as device:
            layer = torch.nn.Linear(2, 1).to(device)
            layer(torch.ones(3, 2, device=device)).sum().backward()
            assert torch.equal(layer.weight.grad.cpu(), torch.full((1, 2), 3.0))
            assert all(isinstance(x, SecondDeviceTensor) for x in nest.flatten([layer.weight.grad, layer.bias.grad]))
