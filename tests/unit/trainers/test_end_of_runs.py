"""What ends a run besides steps and iterations, and what ``train`` returns."""
import os

import pytest

from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.checkpoints.reading import read_checkpoint
from alfx.gin_utils import ConfError
from alfx.runs import run_files
from alfx.trainers.policy_trainer import RLTrainer

SHORT = ['TrainerConfig.num_env_steps = 0', 'TrainerConfig.num_summaries = None', 'TrainerConfig.summary_interval = 1',
         'TrainerConfig.num_updates_per_train_iter = 1', 'TrainerConfig.num_threads = 1',
         'TrainerConfig.random_seed = 1', "TrainerConfig.float32_matmul_precision = 'highest'"]
EVALUATED = ['TrainerConfig.evaluate = True', 'TrainerConfig.async_eval = False', 'TrainerConfig.eval_interval = 2',
             'TrainerConfig.num_eval_episodes = 2']


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


def run(tmp_path, *params, conf='ppo_cart_pole'):
    context.reset()
    gin_utils.load(conf, [*SHORT, *params])
    trainer = RLTrainer(TrainerConfig(root_dir=str(tmp_path)))
    return trainer, trainer.train()


def test_a_run_ends_with_the_iteration_in_which_its_last_episode_ends(tmp_path):
    trainer, returned = run(tmp_path, 'TrainerConfig.num_episodes = 40')
    episodes = trainer.algorithm.get_metrics()[1].result()
    assert 40 <= episodes < 40 + 8 * 4 and trainer.progress() == 1.0
    assert returned == pytest.approx(float(trainer.algorithm.get_metrics()[2].result()))
    assert trainer.doubled_length() == ('TrainerConfig.num_episodes=80', )


SMALL_DQN = ['TrainerConfig.mini_batch_size = 4', 'create_environment.num_parallel_environments = 1',
             'create_environment.nonparallel = True', 'TrainerConfig.unroll_length = 1']


def test_the_last_checkpoint_has_the_last_iteration_without_an_update(tmp_path):
    run(tmp_path, *SMALL_DQN, 'TrainerConfig.update_counter_every_mini_batch = True',
        'TrainerConfig.initial_collect_steps = 1000', 'TrainerConfig.num_iterations = 20',
        'TrainerConfig.num_checkpoints = 2', conf='dqn_cart_pole')
    assert read_checkpoint(str(tmp_path / 'train/algorithm/ckpt-0'))['trainer']['iteration'] == 20


def test_the_number_of_summaries_is_independent_of_updates(tmp_path):
    run(tmp_path, *SMALL_DQN, 'TrainerConfig.update_counter_every_mini_batch = True', 'TrainerConfig.num_summaries = 3',
        'TrainerConfig.summarize_first_interval = False', 'TrainerConfig.initial_collect_steps = 4',
        'TrainerConfig.num_updates_per_train_iter = 4', 'TrainerConfig.num_iterations = 24', conf='dqn_cart_pole')
    assert len(run_files.read_table(str(tmp_path / 'progress.csv'))) <= 5  # with the first and the last iteration


def test_summaries_are_spread_over_training_without_new_steps(tmp_path):
    trainer, _ = run(tmp_path, *SMALL_DQN, 'TrainerConfig.num_summaries = 5', 'TrainerConfig.num_iterations = 60',
                     'TrainerConfig.num_env_steps = 20', conf='dqn_cart_pole')
    assert trainer.current_iterations() == 60 and trainer._summary_interval == 12
    assert trainer.doubled_length() == ('TrainerConfig.num_iterations=120', )


def test_a_good_enough_evaluation_ends_the_run_with_checkpoint_and_log(tmp_path, capsys):
    trainer, returned = run(tmp_path, *EVALUATED, 'TrainerConfig.num_iterations = 20',
                            'TrainerConfig.stop_at_return = 5.0')
    assert trainer.current_iterations() == 2 and returned >= 5.0
    assert 'reaches TrainerConfig.stop_at_return = 5' in capsys.readouterr().err
    assert trainer.doubled_length() == ('TrainerConfig.num_iterations=40', 'TrainerConfig.stop_at_return=None')
    assert any(name.startswith('ckpt-2') for name in os.listdir(tmp_path / 'train/algorithm'))


def test_a_run_that_never_reaches_the_threshold_runs_to_its_end(tmp_path):
    trainer, returned = run(tmp_path, *EVALUATED, 'TrainerConfig.num_iterations = 4',
                            'TrainerConfig.stop_at_return = 1000.0')
    assert trainer.current_iterations() == 4 and returned < 1000.0


@pytest.mark.parametrize('params, message', [
    (['TrainerConfig.stop_at_return = 5.0'], 'stop_at_return = 5 needs evaluations'),
    (['TrainerConfig.num_episodes = 5', 'TrainerConfig.num_summaries = 10'], 'num_summaries = 10 needs the number'),
    (['TrainerConfig.num_episodes = 5', 'TrainerConfig.num_env_steps = 9000', 'TrainerConfig.num_evals = 10'],
     'num_evals = 10 needs the number'),
    ([], 'never end')])
def test_settings_that_contradict_each_other_are_rejected(tmp_path, params, message):
    with pytest.raises(ConfError, match=message):
        run(tmp_path, *params)
