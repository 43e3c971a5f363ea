"""Algorithms for discrete actions learn from images: each catches the ball in at least 95% of the episodes of Catch."""
import pytest
import torch
from helpers import catch

from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer

SHARED = ['create_environment.env_load_fn = @helpers.catch.load', "create_environment.env_name = 'Catch'",
          'create_environment.nonparallel = True', 'TrainerConfig.data_transformer_ctor = @ImageScaleTransformer',
          'TrainerConfig.random_seed = 0', 'TrainerConfig.num_summaries = 2', 'TrainerConfig.num_checkpoints = 1']
Q_NETWORK = ['QNetwork.conv_layer_params = ((16, 3, 1), )', 'QNetwork.fc_layer_params = (64, )']
REPLAY = ['create_environment.num_parallel_environments = 8', 'TrainerConfig.unroll_length = 4',
          'TrainerConfig.num_updates_per_train_iter = 8', 'TrainerConfig.mini_batch_size = 32',
          'TrainerConfig.initial_collect_steps = 500', 'TrainerConfig.replay_buffer_length = 1000']
DEEP_Q = [*Q_NETWORK, *REPLAY, 'learning_rate/LinearScheduler.schedule = [(0.0, 1e-3), (1.0, 1e-4)]',
          'DqnAlgorithm.target_update_period = 50']
ACTOR = ['ActorDistributionNetwork.conv_layer_params = ((16, 3, 1), )',
         'ActorDistributionNetwork.fc_layer_params = (64, )']
UNROLLS = ['create_environment.num_parallel_environments = 32', 'TrainerConfig.unroll_length = 16',
           'TrainerConfig.mini_batch_size = 128']
CASES = {
    'dqn': [*DEEP_Q, 'TrainerConfig.num_env_steps = 6000'],
    'rainbow': [*DEEP_Q, 'DqnAlgorithm.v_min = -1.0', 'DqnAlgorithm.v_max = 1.0',
                'TrainerConfig.num_env_steps = 6000'],
    'ppo': [*ACTOR, *UNROLLS, 'ValueNetwork.conv_layer_params = ((16, 3, 1), )',
            'ValueNetwork.fc_layer_params = (64, )', 'ppo/Adam.lr = 2e-3', 'PPOLoss.entropy_regularization = 0.01',
            'TrainerConfig.num_updates_per_train_iter = 4', 'TrainerConfig.num_env_steps = 20000'],
    'sac': [*Q_NETWORK, *REPLAY, 'sac/Adam.lr = 1e-3', 'SacAlgorithm.initial_log_alpha = -2.0',
            'SacAlgorithm.target_entropy = 0.1', 'SacAlgorithm.target_update_tau = 0.02',
            'TrainerConfig.num_env_steps = 8000'],
    'pqn': [*Q_NETWORK, *UNROLLS, 'pqn/RAdam.lr = 1e-3', 'PqnAlgorithm.td_lambda = 0.9',
            'TrainerConfig.num_updates_per_train_iter = 4', 'TrainerConfig.num_env_steps = 20000'],
}


def greedy_return(algorithm, num_episodes=100):
    """Return the mean return of episodes, all of the same length, in ``num_episodes`` environments at once."""
    env = catch.load('Catch', batch_size=num_episodes)
    env.seed(1)
    time_step, total = env.reset(), torch.zeros(num_episodes)
    transforming = algorithm.get_initial_transform_state(num_episodes)
    with torch.no_grad(), context.eval_context():
        for _ in range(catch.Catch.num_steps):
            transformed, transforming = algorithm.transform_timestep(time_step, transforming)
            step = algorithm.predict_step(transformed, algorithm.get_initial_predict_state(num_episodes))
            time_step = env.step(step.output)
            total += time_step.reward
    return total.mean().item()


@pytest.mark.slow
@pytest.mark.parametrize('conf', list(CASES))
def test_the_greedy_policy_reaches_most_of_the_optimum(conf, tmp_path):
    with gin_utils.loaded(conf, [*SHARED, *CASES[conf]], str(tmp_path)):
        trainer = RLTrainer(TrainerConfig(root_dir=str(tmp_path)))
        trainer.train()
    assert greedy_return(trainer._algorithm) >= 0.9


def test_the_best_policy_always_catches_the_ball_and_others_do_not():
    env, returns = catch.Catch(), {}
    for policy in ('best', 'still'):
        env.reset(seed=0)
        for _ in range(50):
            observation, is_over = env.reset()[0], False
            while not is_over:
                ball, paddle = observation[0, :9].max(0).argmax(), observation[0, 9].argmax()
                action = 1 + (int(ball > paddle) - int(ball < paddle) if policy == 'best' else 0)
                observation, reward, is_over, _, _ = env.step(action)
            returns.setdefault(policy, []).append(reward)
    assert set(returns['best']) == {1.0} and set(returns['still']) == {1.0, -1.0}
