"""Runs with an asynchronous actor learn, stop, survive a kill and resume like any other run."""
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import warm_starts
from helpers.unroll_fakes import CONF, TESTS_FOLDER, SAMPLED, children_of, is_running, run_folder, wait_for

from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.checkpoint_utils import read_checkpoint

pytestmark = pytest.mark.processes


def train(config):
    trainer = RLTrainer(config)
    trainer.train()
    return trainer


def last_checkpoint(root_dir):
    folder = root_dir / 'train' / 'algorithm'
    numbers = [int(path.name[5:]) for path in folder.glob('ckpt-*') if path.name[5:].isdigit()]
    return read_checkpoint(str(folder / f'ckpt-{max(numbers)}'))


class Command:
    """A run of ``alfx.bin.train`` in a separate process."""

    def __init__(self, root_dir, *params):
        root_dir.mkdir(exist_ok=True)
        self._conf = root_dir / 'given.gin'
        self._conf.write_text(CONF)
        self.root_dir = root_dir
        self._params = [part for param in params for part in ('--conf_param', param)]

    def start(self, *params):
        """Start the process; its output goes to a file, so that it never waits for a reader."""
        overrides = [part for param in params for part in ('--conf_param', param)]
        self._output = open(self.root_dir / 'output.txt', 'w', encoding='utf8')
        path = os.pathsep.join([TESTS_FOLDER, os.getcwd(), os.environ.get('PYTHONPATH', '')])
        command = [sys.executable, '-m', 'alfx.bin.train', '--conf', str(self._conf), '--root_dir', str(self.root_dir)]
        self.process = warm_starts.Popen([*command, *self._params, *overrides], stdout=self._output,
                                        stderr=subprocess.STDOUT, env={**os.environ, 'PYTHONPATH': path})
        return self.process

    def end(self, seconds=100):
        """Wait for the process to end; return its exit code and output."""
        code = self.process.wait(seconds)
        self._output.close()
        return code, (self.root_dir / 'output.txt').read_text()

    def wait_for_steps(self):
        """Wait until the run trains; return the actor process."""
        table = self.root_dir / 'progress.csv'
        wait_for(lambda: self.process.poll() is not None or (table.exists() and table.read_text().count('\n') > 3))
        assert self.process.poll() is None, (self.root_dir / 'output.txt').read_text()
        child, = children_of(self.process.pid)
        return child


ENDLESS = (*SAMPLED, 'TrainerConfig.num_iterations=100000000', 'TrainerConfig.summary_interval=20',
           'load_drift.seconds=0.001')


@pytest.fixture
def command(tmp_path):
    commands = []

    def make(*params):
        commands.append(Command(tmp_path / 'run', *params))
        return commands[-1]

    yield make
    for each in commands:
        for pid in [*children_of(each.process.pid), each.process.pid]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        each.process.wait()


@pytest.mark.slow
def test_a_run_whose_unroll_process_is_killed_can_be_resumed(command):
    """Write a checkpoint and end the run if the unroll process is killed; the run can be resumed from it."""
    run = command(*ENDLESS)
    run.start()
    child = run.wait_for_steps()
    time.sleep(0.3 * torch.rand(()).item())
    started = time.monotonic()
    os.kill(child, signal.SIGKILL)
    code, output = run.end(30)
    assert time.monotonic() - started < 30
    assert code == 1 and f'LostProcessError: the unroll process (pid {child}) was killed by SIGKILL' in output
    assert 'the state before the error is saved in' in output and 'Traceback' not in output
    assert not is_running(child)
    saved = last_checkpoint(run.root_dir)
    done = saved['trainer']['iteration']
    run.start(f'TrainerConfig.num_iterations={done + 3}')
    code, output = run.end()
    assert code == 0 and 'new episodes start' in output, output
    after = last_checkpoint(run.root_dir)
    assert after['trainer']['iteration'] == done + 3
    assert int(after['alg']['seen']) > int(saved['alg']['seen']) > 0  # the actor's counter is resumed


@pytest.mark.slow
def test_the_unroll_process_exits_when_the_run_is_killed(command):
    run = command(*ENDLESS, 'load_drift.seconds=0.5')
    run.start('TrainerConfig.unroll_queue_size=10000', 'TrainerConfig.unroll_length=1',
              'TrainerConfig.summary_interval=1')
    child = run.wait_for_steps()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    wait_for(lambda: not is_running(child), 10)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_of_the_run_lets_it_write_its_checkpoint(command, number):
    run = command(*ENDLESS)
    process = run.start()
    child = run.wait_for_steps()
    for pid in (child, process.pid):  # as a terminal does
        os.kill(pid, number)
    code, output = run.end(60)
    assert code == 128 + number and f'{run.root_dir} can be resumed' in output, output
    assert not is_running(child) and last_checkpoint(run.root_dir)['trainer']['iteration'] > 0


@pytest.mark.parametrize('params', [
    (), (*SAMPLED, 'TrainerConfig.initial_collect_steps=40', 'TrainerConfig.unroll_length=1.5',
         'TrainerConfig.num_env_steps=100', 'TrainerConfig.num_iterations=0', 'TrainerConfig.evaluate=True',
         'TrainerConfig.async_eval=False', 'TrainerConfig.num_evals=1', 'TrainerConfig.num_eval_episodes=1')
], ids=['whole unrolls', 'sampled'])
def test_a_run_trains_and_leaves_its_statistics_in_the_checkpoint(tmp_path, monkeypatch, params):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    config = run_folder(tmp_path, monkeypatch, 'TrainerConfig.summary_interval=1', *params)
    trainer = train(config)
    assert not children_of(os.getpid())
    if config.num_env_steps:
        assert 100 <= trainer.current_env_steps() < 100 + 3 * 2
    else:
        assert trainer.current_env_steps() == 6 * 5 * 3 - 15  # the first step of each episode does not count
    saved = last_checkpoint(tmp_path)['alg']
    assert int(saved['seen']) == int(trainer.algorithm.seen) >= trainer.current_env_steps()
    tags = EventAccumulator(str(tmp_path / 'train')).Reload().Tags()['scalars']
    assert {'async_unroll/seconds_of_env_step', 'async_unroll/age', 'steering/action'} <= set(tags)


@pytest.mark.slow
def test_the_same_run_resumes_with_or_without_an_asynchronous_actor(tmp_path, monkeypatch):
    iterations = []
    for acts in ('False', 'True', 'False'):
        gin_utils.clear()
        context.reset()
        config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.num_env_steps=0',
                            f'TrainerConfig.async_unroll={acts}', f'TrainerConfig.num_iterations={len(iterations) + 3}')
        gin_utils.check_same_conf(str(tmp_path))
        trainer = train(config)
        iterations.append(trainer.current_iterations())
        seen = int(trainer.algorithm.seen)
    assert iterations == [3, 4, 5] and seen >= 5 * 5 * 3 and not children_of(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize('conf', ['sac_pendulum', 'dqn_cart_pole', 'ppo_rnd_corridor', 'ppo_ngu_corridor',
                                  'ppo_deir_corridor', 'sac_apt_mountain_car_continuous', 'impala_cart_pole',
                                  'ppg_cart_pole'])
def test_confs_of_all_ways_to_train_run_with_another_process_that_acts(tmp_path, conf):
    bindings = ('async_unroll=True', 'num_iterations=6', 'num_env_steps=0', 'initial_collect_steps=20',
                'evaluate=False', 'summary_interval=2', 'unroll_queue_size=20')
    params = [f'TrainerConfig.{binding}' for binding in bindings]
    if conf == 'ppg_cart_pole':
        params.append('PPGAuxOptions.interval=2')
    gin_utils.write_conf(str(tmp_path), gin_utils.load(conf, params))
    trainer = train(TrainerConfig(root_dir=str(tmp_path)))
    assert trainer.current_iterations() == 6 and trainer.current_env_steps() > 0
    assert not children_of(os.getpid())


def test_a_run_without_unroll_length_uses_all_available_steps(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_length=0',
                        'TrainerConfig.max_unroll_length=3', 'TrainerConfig.num_env_steps=60',
                        'TrainerConfig.num_iterations=0', 'load_drift.seconds=0.01')
    trainer = train(config)
    steps, iterations = trainer.current_env_steps(), trainer.current_iterations()
    assert 60 <= steps < 60 + 9 and iterations >= steps / 9
    assert not children_of(os.getpid())


def test_on_policy_algorithms_are_rejected_before_the_first_step(tmp_path, monkeypatch):
    from alfx.gin_utils import ConfError
    config = run_folder(tmp_path, monkeypatch, 'Steering.on_policy=True')
    with pytest.raises(ConfError, match='on-policy'):
        RLTrainer(config)


def test_a_check_of_the_conf_acts_in_its_own_process(tmp_path, monkeypatch):
    from alfx.trainers.conf_check import check
    run_folder(tmp_path / 'conf', monkeypatch, *SAMPLED, 'TrainerConfig.unroll_length=0',
               'TrainerConfig.max_unroll_length=3')
    (tmp_path / 'run').mkdir()
    lines = list(check(str(tmp_path / 'run')))
    assert any('iteration' in line for line in lines)
    assert TrainerConfig(root_dir='').async_unroll
