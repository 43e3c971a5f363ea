"""Trackers receive the metrics of a run, and their failures do not end it."""
import importlib.util
import json
import logging
import socket

import pytest

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.gin_utils import ConfError
from alfx.runs.run_files import read_table
from alfx.summary import trackers
from alfx.trainers.policy_trainer import RLTrainer

SMALL = ['create_environment.num_parallel_environments = 2', 'TrainerConfig.num_env_steps = 0',
         'TrainerConfig.unroll_length = 16', 'TrainerConfig.mini_batch_size = 8', 'TrainerConfig.random_seed = 1',
         'TrainerConfig.num_updates_per_train_iter = 1', 'TrainerConfig.evaluate = True',
         'TrainerConfig.num_evals = None', 'TrainerConfig.eval_interval = 2', 'TrainerConfig.num_eval_episodes = 1',
         'TrainerConfig.async_eval = False', 'TrainerConfig.num_summaries = None',
         'TrainerConfig.summary_interval = 1']


class Recorder(trackers.Tracker):
    """A tracker that keeps its inputs; ``made`` contains all instances."""

    made: list = []

    def __init__(self, root_dir, run_id):
        self.resumed_id, self.rows, self.bindings, self.is_closed = run_id, [], {}, False
        self.made.append(self)

    @property
    def run_id(self):
        return self.resumed_id or 'first'

    def params(self, values):
        self.bindings.update(values)

    def log(self, values, step):
        self.rows.append((step, dict(values)))

    def close(self):
        self.is_closed = True


@pytest.fixture
def recorders(monkeypatch):
    monkeypatch.setattr(Recorder, 'made', [])
    monkeypatch.setitem(trackers.TRACKERS, 'wandb', Recorder)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: object())
    return Recorder.made


def train(root_dir, num_iterations, loggers):
    gin_utils.load('ppo_cart_pole', [*SMALL, f'TrainerConfig.num_iterations = {num_iterations}',
                                     f'TrainerConfig.loggers = {loggers!r}'], allow_unused=True)
    config = TrainerConfig(root_dir=str(root_dir))
    trainer = RLTrainer(config)
    gin_utils.write_conf(str(root_dir), gin_utils.load('ppo_cart_pole', SMALL, allow_unused=True))
    trainer.train()
    gin_utils.clear()


def test_a_tracker_gets_summaries_and_evaluations_even_after_resuming(
        recorders, tmp_path):
    """Pass each summary and evaluation over environment steps to a tracker, also when the run is resumed."""
    train(tmp_path / 'run', 4, ['wandb'])
    train(tmp_path / 'run', 6, ['wandb'])
    first, second = recorders
    assert (first.resumed_id, second.resumed_id) == (None, 'first') and first.is_closed and second.is_closed
    assert first.bindings['PPOLoss.gamma'] == '0.98'

    table = read_table(str(tmp_path / 'run' / 'progress.csv'))
    rows = [(step, row) for step, row in first.rows + second.rows if 'iteration' in row]
    assert [step for step, _ in rows] == [int(row['env_steps']) for row in table]
    assert [row['loss'] for _, row in rows] == pytest.approx([float(row['loss']) for row in table])
    assert all('throughput/iterations_per_second' in row for _, row in rows[1:4])

    evaluated = [(step, row['eval/average_return']) for step, row in first.rows + second.rows
                 if 'eval/average_return' in row]
    expected = [(int(row['env_steps']), float(row['average_return']))
                for row in read_table(str(tmp_path / 'run' / 'eval' / 'progress.csv'))]
    assert evaluated == expected and len(expected) == 3
    assert not list((tmp_path / 'run').rglob('*tfevents*'))  # 'tensorboard' is not among the trackers


def test_a_failing_tracker_is_logged_once_and_dropped(recorders, tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, 'mlflow', type('Broken', (Recorder, ), {
        'log': lambda self, values, step: 1 / 0}))
    both = trackers.Trackers(['tensorboard', 'wandb', 'mlflow'], str(tmp_path))
    with caplog.at_level(logging.ERROR, 'alfx'):
        both.log({'loss': 1.0}, 1)
        both.log({'loss': 2.0}, 2)
    assert [record.getMessage() for record in caplog.records if 'mlflow' in record.getMessage()] == [
        'mlflow is disabled after an error: ZeroDivisionError: division by zero']
    assert recorders[0].rows == [(1, {'loss': 1.0}), (2, {'loss': 2.0})]
    with open(tmp_path / 'train' / 'trackers.json') as file:
        assert json.load(file) == {'wandb': 'first', 'mlflow': 'first'}


@pytest.mark.parametrize('name, variables', [
    ('mlflow', {'MLFLOW_TRACKING_URI': '{}'}), ('wandb', {'WANDB_MODE': 'online', 'WANDB_BASE_URL': '{}'})])
def test_a_server_that_does_not_answer_is_named_before_the_run(monkeypatch, name, variables):
    monkeypatch.setattr(trackers, '_ANSWER_SECONDS', 0.2)
    with socket.create_server(('127.0.0.1', 0)) as silent:  # accepts connections, but never answers
        address = f'http://127.0.0.1:{silent.getsockname()[1]}'
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value.format(address))
        with pytest.raises(ConfError, match=f"'{name}': the server {address} does not answer: .*timed out\n.*unset"):
            trackers.check_servers(['tensorboard', name])
    with pytest.raises(ConfError, match='does not answer: .*refused'):
        trackers.check_servers([name])
    for variable in variables:
        monkeypatch.delenv(variable)
    trackers.check_servers(['tensorboard', name])  # both write to files by default


@pytest.mark.parametrize('attributes', [{}, {'run_id': 3}])
def test_a_tracker_without_a_run_id_is_rejected(tmp_path, monkeypatch, attributes):
    own = type('Own', (), {'__init__': lambda self, root_dir, run_id: None, **attributes})
    monkeypatch.setitem(trackers.TRACKERS, 'own', own)
    with pytest.raises(ConfError, match="'own' cannot be started: Own.__init__ has to set run_id to a string"):
        trackers.Trackers(['own'], str(tmp_path))


def test_a_tracker_that_cannot_start_ends_the_run_before_training(recorders, tmp_path, monkeypatch):
    def fail(root_dir, run_id):
        raise OSError('no server')

    monkeypatch.setitem(trackers.TRACKERS, 'wandb', fail)
    with pytest.raises(ConfError, match="'wandb' cannot be started: no server"):
        trackers.Trackers(['wandb'], str(tmp_path))


def test_unknown_loggers_are_rejected_by_name(tmp_path):
    with pytest.raises(ConfError, match=r"loggers.*'wandbb'"):
        TrainerConfig(root_dir=str(tmp_path), algorithm_ctor=dict, loggers=['wandbb'])


def test_a_conf_can_name_a_registered_tracker(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, 'made', [])
    monkeypatch.setitem(trackers.TRACKERS, 'my_tracker', Recorder)
    train(tmp_path / 'run', 2, ['my_tracker'])
    recorder, = Recorder.made
    assert recorder.rows and recorder.bindings and recorder.is_closed


@pytest.mark.parametrize('name', ['wandb', 'mlflow'])
def test_the_package_itself_takes_numbers_without_a_network(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    for variable in ('WANDB_MODE', 'MLFLOW_TRACKING_URI'):
        monkeypatch.delenv(variable, raising=False)
    for step in (10, 20):
        tracker = trackers.Trackers([name], str(tmp_path))
        tracker.params({'ppo/Adam.lr': '0.001', 'Agent.optimizer': '@ppo/Adam()'})
        tracker.log({'loss': 2.5, 'loss/rl.pg_loss': 1.5, 'env_steps': step}, step)
        tracker.log({'eval/average_return': 2.0}, step - 5)
        assert tracker  # it has not failed
        tracker.close()
    if name == 'mlflow':
        found, = tmp_path.rglob('loss.rl.pg_loss')
        assert [line.split()[1:] for line in found.read_text().splitlines()] == [['1.5', '10'], ['1.5', '20']]
    else:
        assert list(tmp_path.rglob('*.wandb'))
