"""Confs that are included after the conf of any policy algorithm, all at once."""
import pytest

from alfx import gin_utils
from alfx.trainers import conf_check

SMALL = ['create_environment.num_parallel_environments = 2', 'TrainerConfig.unroll_length = 8',
         'TrainerConfig.mini_batch_size = 4', 'TrainerConfig.num_updates_per_train_iter = 1']


@pytest.mark.parametrize('conf', ['ppo_cart_pole', 'sac_pendulum', 'dqn_cart_pole'])
def test_auxiliary_modules_take_one_include_each(conf, tmp_path):
    """Including predictive representations, goals or an intrinsic reward takes one line each."""
    file = tmp_path / 'mine.gin'
    file.write_text(f"include '{conf}.gin'\ninclude 'predictive.gin'\ninclude 'goals.gin'\ninclude 'rnd.gin'\n")
    with gin_utils.loaded(str(file), SMALL):
        lines = list(conf_check.check(str(tmp_path / 'run')))
        assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []
    text = '\n'.join(lines)
    assert 'concatenated' in text and 'repr.future.target' in text and 'goal_generator.goal' in text
