"""A resumed run and an uninterrupted run write the same ``progress.csv``."""
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import alfx
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.gin_utils import ConfError
from alfx.offline import dataset_folder
from alfx.offline.dataset_episodes import Episodes
from alfx.runs import run_files
from alfx.trainers import run_summary

SMALL = {'TrainerConfig.random_seed': 1, 'TrainerConfig.num_threads': 1, 'TrainerConfig.num_env_steps': 0,
         'TrainerConfig.num_iterations': 6, 'TrainerConfig.num_checkpoints': 3, 'TrainerConfig.evaluate': False,
         'TrainerConfig.mini_batch_size': 8, 'TrainerConfig.num_updates_per_train_iter': 2,
         'TrainerConfig.unroll_length': 20, 'create_environment.num_parallel_environments': 1,
         'TrainerConfig.summary_interval': 1}
MODEL = {'TrainerConfig.initial_collect_steps': 30, 'ModelBasedPolicyAlgorithm.model_period': 4,
         'ModelBasedPolicyAlgorithm.max_model_updates': 3, 'ModelBasedPolicyAlgorithm.num_rollouts': 10,
         'ModelBasedPolicyAlgorithm.num_imagined': 100, 'StochasticDynamicsAlgorithm.hidden_size': (8, )}
HYBRID = {'TrainerConfig.offline_mini_batch_size': 8, 'TrainerConfig.rl_train_after_update_steps': 5}


def table(root_dir):
    """Return the rows without the columns that depend on time."""
    return [{name: x for name, x in row.items() if name not in ('seconds', 'steps_per_second')}
            for row in run_files.read_table(os.path.join(root_dir, 'progress.csv'))]


def dataset(path):
    rng = np.random.default_rng(0)
    dataset_folder.write(path, Episodes(
        {'': rng.standard_normal((42, 3)).astype(np.float32)}, {'': rng.uniform(-1, 1, (40, 1)).astype(np.float32)},
        rng.standard_normal(40).astype(np.float32), np.ones(40, np.float32), np.array([20, 20])), {})
    return path


@pytest.mark.parametrize('conf, params', [
    ('ppo_cart_pole', {'TrainerConfig.update_counter_every_mini_batch': True}),
    ('ppo_cart_pole', {'TrainerConfig.update_counter_every_mini_batch': True, 'TrainerConfig.summary_interval': 5}),
    ('mbpo_pendulum', MODEL), ('iql_finetune_pendulum', HYBRID)])
def test_rows_after_a_resume_equal_those_of_one_run(tmp_path, monkeypatch, conf, params):
    params = {**SMALL, **params}
    if params.keys() & HYBRID.keys():
        params['TrainerConfig.offline_buffer_dir'] = dataset(str(tmp_path / 'data'))
    run, save = str(tmp_path / 'run'), Checkpointer.save

    def save_and_copy(self, step, *args, **kwargs):
        path = save(self, step, *args, **kwargs)
        shutil.copytree(run, str(tmp_path / f'copy-{step}'), ignore=shutil.ignore_patterns('train.lock'))
        return path

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, 'save', save_and_copy)
        alfx.train(conf, params, run)
    copies = [path for path in os.listdir(tmp_path) if path.startswith('copy-')]
    assert len(copies) == 3
    for copy in copies:  # the last copy is from the finished run
        alfx.train(conf, params, str(tmp_path / copy))
        assert table(str(tmp_path / copy)) == table(run), copy


def test_results_of_a_run_without_checkpoints_are_not_removed(tmp_path, monkeypatch):
    run = str(tmp_path / 'run')
    alfx.train('ppo_cart_pole', SMALL, run)
    before = table(run)
    shutil.rmtree(run_files.checkpoint_dir(run))
    with monkeypatch.context() as patch:
        patch.setattr(run_summary, '_LONGEST_WITHOUT_CHECKPOINT', 0.0)
        with pytest.raises(ConfError, match='results of .* seconds, but no checkpoint'):
            alfx.train('ppo_cart_pole', SMALL, run)
    assert table(run) == before
    alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.num_iterations': 2}, run)  # a short one starts again
    assert len(table(run)) < len(before)


def test_a_complete_run_keeps_its_final_return_if_trained_again(tmp_path):
    run = str(tmp_path / 'run')
    for _ in range(2):
        alfx.train('ppo_cart_pole', SMALL, run)
        events = b''.join(path.read_bytes() for path in (tmp_path / 'run' / 'train').glob('events*'))
        assert events.count(b'final/return') == 1


def test_a_value_logged_at_the_end_of_one_long_iteration_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_summary, '_LONGEST_WITHOUT_CHECKPOINT', 0.0)
    run = str(tmp_path / 'run')
    alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.num_iterations': 1, 'TrainerConfig.evaluate': True,
                                 'TrainerConfig.num_eval_episodes': 1,
                                 'TrainerConfig.callbacks': ['@KeepBestCheckpoint']}, run)
    assert 'best/' in (tmp_path / 'run' / 'progress.csv').read_text()


@pytest.mark.parametrize('datasets, steps', [((), [5, 10, 3]), (('data', ), [5, 10, 15])])
def test_trackers_have_one_axis_for_the_whole_run(datasets, steps):
    summary = run_summary.RunSummary.__new__(run_summary.RunSummary)
    summary._config = SimpleNamespace(offline_datasets=lambda: datasets)
    sent = []
    summary._trackers = SimpleNamespace(log=lambda values, step: sent.append(step))
    for counter, env_steps in ((5, 0), (10, 0), (15, 3)):
        summary._track({'global_counter': counter, 'env_steps': env_steps})
    assert sent == steps


def test_no_rows_are_written_while_initial_steps_are_collected(tmp_path):
    alfx.train('dqn_cart_pole', {
        'TrainerConfig.random_seed': 1, 'TrainerConfig.num_threads': 1, 'TrainerConfig.num_env_steps': 80,
        'TrainerConfig.initial_collect_steps': 60, 'TrainerConfig.unroll_length': 1, 'TrainerConfig.evaluate': False,
        'TrainerConfig.mini_batch_size': 8, 'TrainerConfig.num_updates_per_train_iter': 1,
        'create_environment.num_parallel_environments': 1, 'TrainerConfig.update_counter_every_mini_batch': True,
        'TrainerConfig.num_summaries': None, 'TrainerConfig.summary_interval': 10,
        'TrainerConfig.summarize_first_interval': True}, str(tmp_path / 'run'))
    counters = [int(row['global_counter']) for row in run_files.read_table(str(tmp_path / 'run' / 'progress.csv'))]
    assert 5 <= len(counters) < 30 and counters == sorted(set(counters))


def test_unrolls_of_varying_length_are_trained_on_as_wholes(tmp_path):
    alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.unroll_length': 3.5, 'TrainerConfig.mini_batch_length': None,
                                 'create_environment.num_parallel_environments': 2}, str(tmp_path / 'run'))
    rows = run_files.read_table(str(tmp_path / 'run' / 'progress.csv'))
    assert int(rows[-1]['env_steps']) in range(38, 44), 'six unrolls of 3.5 steps in two environments'
