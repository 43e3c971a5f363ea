"""Runs of supervised learning, as a user makes them: confs, resuming, evaluation, curves."""
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import warm_starts

import alfx
from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import ConfError
from alfx.runs import playing
from alfx.search.measure import Measure
from alfx.trainers.policy_trainer import SLTrainer

BASE = '''
TrainerConfig.ml_type = 'sl'
TrainerConfig.algorithm_ctor = @{name}
TrainerConfig.evaluate = True
TrainerConfig.eval_uncertainty = True
TrainerConfig.eval_interval = 2
TrainerConfig.summary_interval = 1
TrainerConfig.num_checkpoints = 2
TrainerConfig.random_seed = 1
TrainerConfig.num_threads = 1
TrainerConfig.float32_matmul_precision = 'highest'
{name}.data_creator = @inlier/load_digits
{name}.data_creator_outlier = @outlier/load_digits
{name}.num_train_classes = 6
{name}.num_particles = 3
{name}.entropy_regularization = None
{name}.fc_layer_params = (8,)
{name}.optimizer = @Adam()
Adam.lr = 3e-3
inlier/load_digits.label_idx = (0, 1, 2, 3, 4, 5)
outlier/load_digits.label_idx = (6, 7, 8, 9)
{more}
'''
PARTICLES = dict(name='FuncParVIAlgorithm',
                 more='FuncParVIAlgorithm.function_vi = True')
HYPER = dict(name='HyperNetwork', more='HyperNetwork.hidden_layers = (8,)')

pytest.importorskip('sklearn')


@pytest.fixture(autouse=True)
def empty():
    yield
    gin_utils.clear()
    context.reset()


def train(tmp_path, folder, epochs=4, **kind):
    context.reset()
    conf = tmp_path / 'mine.gin'
    conf.write_text(BASE.format(**(kind or PARTICLES)))
    root_dir = str(tmp_path / folder)
    with gin_utils.loaded(str(conf), [f'TrainerConfig.num_iterations = {epochs}'], root_dir) as loaded:
        gin_utils.write_conf(root_dir, loaded, ['train'])
        trainer = SLTrainer(TrainerConfig(root_dir=root_dir, conf_file=str(conf)))
        trainer.train()
        return trainer


def table(path):
    lines = path.read_text().splitlines()
    return [dict(zip(lines[0].split(','), line.split(','))) for line in lines[1:]]


@pytest.mark.parametrize('kind', [PARTICLES, HYPER], ids=['particles', 'hypernetwork'])
def test_a_stopped_run_resumes_exactly(tmp_path, kind):
    uninterrupted = train(tmp_path, 'whole', **kind)
    train(tmp_path, 'part', epochs=2, **kind)
    resumed = train(tmp_path, 'part', **kind)
    for (name, a), (_, b) in zip(uninterrupted.algorithm.state_dict().items(), resumed.algorithm.state_dict().items()):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b), name
    assert (tmp_path / 'whole/eval/progress.csv').read_text() == (tmp_path / 'part/eval/progress.csv').read_text()


def test_evaluations_are_in_a_table_with_outlier_detection_scores(tmp_path):
    trainer = train(tmp_path, 'run')
    rows = table(tmp_path / 'run/eval/progress.csv')
    assert [row['iteration'] for row in rows] == ['2', '4']
    assert {'test_accuracy', 'test_nll', 'test_brier', 'test_ece', 'auroc_entropy', 'auroc_variance'} <= rows[0].keys()
    assert float(rows[-1]['auroc_entropy']) == pytest.approx(trainer.algorithm.eval_uncertainty().auroc_entropy)
    assert 'test_accuracy' in trainer.score()
    settings = SimpleNamespace(function=None, direction='maximize', measured_in='evaluation', measure='test_accuracy',
                               score='last', score_window=None)
    assert Measure(settings).final(str(tmp_path / 'run')) == float(rows[-1]['test_accuracy'])
    assert 'loss' in table(tmp_path / 'run/progress.csv')[0]


def test_the_checkpoint_with_the_best_measure_is_kept(tmp_path):
    bindings = (PARTICLES['more'] + '\nTrainerConfig.callbacks = (@KeepBestCheckpoint(),)\n'
                'TrainerConfig.eval_interval = 1\n')
    train(tmp_path, 'run', name=PARTICLES['name'], more=bindings + 'KeepBestCheckpoint.metric = "test_nll"\n'
          'KeepBestCheckpoint.mode = "min"')
    losses = [float(row['test_nll']) for row in table(tmp_path / 'run/eval/progress.csv')]
    assert len(losses) == 4
    assert alfx.evaluate(tmp_path / 'run', checkpoint_step='best')['test_nll'] == pytest.approx(min(losses), rel=1e-5)
    with pytest.raises(ConfError, match='on_episode_end would never be called'):
        train(tmp_path, 'other', name=PARTICLES['name'], more='TrainerConfig.callbacks = (@EpisodeLog(),)')


def program(name, *arguments):
    return warm_starts.run([sys.executable, '-m', f'alfx.bin.{name}', *arguments], capture_output=True, text=True,
                          timeout=100)


def test_evaluate_and_plot_accept_the_run_and_play_rejects_with_a_hint(tmp_path):
    train(tmp_path, 'run')
    root_dir = str(tmp_path / 'run')
    expected = table(tmp_path / 'run/eval/progress.csv')[-1]
    measures = json.loads(program('evaluate', '--root_dir', root_dir, '--json', '-').stdout)['measures']
    assert measures['test_accuracy'] == pytest.approx(float(expected['test_accuracy']))
    assert measures['auroc_variance'] == pytest.approx(float(expected['auroc_variance']), rel=1e-6)
    assert alfx.evaluate(root_dir) == pytest.approx(measures)
    with pytest.raises(ConfError, match='has no episodes'):
        alfx.evaluate(root_dir, num_episodes=3)
    assert 'has no episodes: remove --num_episodes' in program('evaluate', root_dir, '--num_episodes', '3').stderr
    with gin_utils.loaded(None, [], root_dir, same_run=False):
        with pytest.raises(ConfError, match='which has no policy to play\n.*alfx.bin.evaluate'):
            playing.make_policy(root_dir, 1)
    picture = tmp_path / 'curve.png'
    output = program('plot', root_dir, '--x', 'iteration', '--y', 'test_accuracy', '--output', str(picture)).stdout
    assert f"{float(expected['test_accuracy']):.5g} at 4" in output and picture.stat().st_size


def test_an_update_that_cannot_be_compiled_is_rejected_before_training(tmp_path):
    kind = dict(PARTICLES, more='TrainerConfig.compile = True\nFuncParVIAlgorithm.par_vi = "minmax"\n'
                'FuncParVIAlgorithm.critic_optimizer = @Adam()')
    with pytest.raises(ConfError, match='compile = True is not possible with FuncParVIAlgorithm'):
        train(tmp_path, 'run', **kind)
    assert not os.path.exists(tmp_path / 'run/progress.csv')


def test_missing_uncertainty_estimates_raise_before_training(tmp_path):
    kind = dict(PARTICLES, more='FuncParVIAlgorithm.data_creator_outlier = None')
    with pytest.raises(ConfError, match='data_creator_outlier is not set'):
        train(tmp_path, 'run', **kind)
    assert not os.path.exists(tmp_path / 'run/progress.csv')
