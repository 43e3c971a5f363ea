"""Construction of the algorithm of a run that began with the weights of another run."""
import shutil

import pytest

import alfx
from alfx import gin_utils
from alfx.gin_utils.python_values import binding_lines

SMALL = {'create_environment.num_parallel_environments': 2, 'create_environment.nonparallel': True,
         'TrainerConfig.num_env_steps': 32, 'TrainerConfig.unroll_length': 8, 'TrainerConfig.mini_batch_size': 8,
         'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.random_seed': 1,
         'TrainerConfig.num_checkpoints': 1}


def test_a_fine_tuned_run_does_not_need_its_teacher_any_more(tmp_path):
    teacher, student = tmp_path / 'teacher', tmp_path / 'student'
    alfx.train('ppo_cart_pole', SMALL, teacher)
    checkpoint, = (path for path in (teacher / 'train/algorithm').iterdir() if path.suffix == '')
    source = f'alg._rl_algorithm@{checkpoint}'
    params = {**SMALL, 'PPOAlgorithm.checkpoint': source}
    alfx.train('ppo_cart_pole', params, student)
    shutil.rmtree(teacher)
    alfx.load(student)
    alfx.train('ppo_cart_pole', {**params, 'TrainerConfig.num_env_steps': 64}, student)
    with pytest.raises(gin_utils.ConfError, match='teacher'):
        alfx.train('ppo_cart_pole', params, tmp_path / 'another')


def test_a_longer_run_logs_the_values_its_schedules_jump_to(tmp_path, capsys):
    params = {**SMALL, 'LinearScheduler.progress_type': 'percent', 'LinearScheduler.schedule': [(0.0, 1e-3), (1.0, 0)]}
    lines = [*binding_lines(params), 'ppo/Adam.lr = @LinearScheduler()', 'TrainerConfig.num_iterations = 2',
             'TrainerConfig.num_env_steps = 0']
    alfx.train('ppo_cart_pole', lines, tmp_path)
    assert 'the schedule of' not in capsys.readouterr().err
    alfx.train('ppo_cart_pole', [*lines, 'TrainerConfig.num_iterations = 4'], tmp_path)
    assert ('50.0% instead of 100.0% is done, and the schedule of ppo/Adam.lr continues at 0.0005 instead of 0\n'
            in capsys.readouterr().err)
