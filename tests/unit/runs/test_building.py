"""Construction of the algorithm of a run that began with the weights of another run."""
import shutil

import pytest

import alfx
from alfx import gin_utils

SMALL = {'create_environment.num_parallel_environments': 2, 'create_environment.nonparallel': True,
         'TrainerConfig.num_env_steps': 32, 'TrainerConfig.unroll_length': 8, 'TrainerConfig.mini_batch_size': 8,
         'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.random_seed': 1,
         'TrainerConfig.num_checkpoints': 1}


def test_a_fine_tuned_run_does_not_need_its_teacher_any_more(tmp_path):
    teacher, student = tmp_path / 'teacher', tmp_path / 'student'
    alfx.train('ppo_cart_pole', SMALL, teacher)
    source = f'alg._rl_algorithm@{teacher}/train/algorithm/ckpt-2'
    params = {**SMALL, 'PPOAlgorithm.checkpoint': source}
    alfx.train('ppo_cart_pole', params, student)
    shutil.rmtree(teacher)
    alfx.load(student)
    alfx.train('ppo_cart_pole', {**params, 'TrainerConfig.num_env_steps': 64}, student)
    with pytest.raises(gin_utils.ConfError, match='teacher'):
        alfx.train('ppo_cart_pole', params, tmp_path / 'another')
