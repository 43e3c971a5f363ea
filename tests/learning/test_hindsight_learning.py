"""A task whose goal is never reached by chance becomes learnable with hindsight goals."""
import pytest

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.runs import building
from alfx.runs.evaluator import evaluate
from alfx.trainers.policy_trainer import RLTrainer


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


def success_rate(conf, root_dir, *params):
    """Train with seed 0 and return the success rate of the greedy policy over 50 episodes."""
    params = ['TrainerConfig.random_seed = 0', *params]
    with gin_utils.loaded(conf, params, str(root_dir)) as loaded:
        trainer = RLTrainer(TrainerConfig(root_dir=str(root_dir), conf_file=loaded.conf_file))
        trainer.train()
        env = building.create_eval_environment(trainer._config, 5)
        try:
            return evaluate(env, trainer._algorithm, 50).statistics()['env_info/success']
        finally:
            env.close()


@pytest.mark.parametrize('proportion, least, most', [(0.8, 0.9, 1.0), (0.0, 0.0, 0.2)])
def test_flipping_bits_is_learned_with_hindsight_and_not_without(tmp_path, proportion, least, most):
    # 12 bits, 3,000 steps: random flips reach the goal once in hundreds of episodes
    found = success_rate('dqn_bit_flip', tmp_path, 'TrainerConfig.num_env_steps = 3000',
                         f'HindsightExperienceTransformer.her_proportion = {proportion}')
    assert least <= found <= most
