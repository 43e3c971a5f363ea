"""Off-policy workloads of `tools/benchmarks/benchmark.py` for each peer.

The unit is updates. Every peer first takes ``warm_up`` environment steps that are not timed: random steps, the first
updates, and compilation. The time includes environment steps and the default logging of the peer.
"""
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class OffPolicyWorkload:
    """Task with all settings that determine the amount of work.

    Attributes:
        algorithm: 'sac', 'td3', 'dqn', 'crossq', 'tqc' or 'droq'.
        env_name: gymnasium id; one environment.
        batch_size: transitions in a minibatch.
        layers: hidden layers of every network.
        every: environment steps between two trainings.
        updates: updates per training.
        warm_up: environment steps before the timed ones.
        steps: default number of environment steps per measurement.
        description: one line for the table.
        unit: unit of the rate.
    """

    algorithm: str
    env_name: str
    batch_size: int
    layers: tuple[int, ...]
    every: int
    updates: int
    warm_up: int
    steps: int
    description: str
    unit: str = 'updates'


WORKLOADS = {
    'sac_half_cheetah': OffPolicyWorkload('sac', 'HalfCheetah-v5', 256, (256, 256), 1, 1, 500, 2500,
                                          'SAC, one update a step, batch 256, 2 x 256, Adam 3e-4'),
    'sac_pendulum': OffPolicyWorkload('sac', 'Pendulum-v1', 256, (256, 256), 1, 1, 500, 2500,
                                      'SAC, one update a step, batch 256, 2 x 256, Adam 3e-4'),
    'sac_pendulum_small': OffPolicyWorkload('sac', 'Pendulum-v1', 64, (100, 100), 1, 1, 500, 6000,
                                            'SAC, one update a step, batch 64, 2 x 100, Adam 3e-4'),
    'td3_pendulum': OffPolicyWorkload('td3', 'Pendulum-v1', 256, (256, 256), 1, 1, 500, 4000,
                                      'TD3, one update a step, batch 256, 2 x 256, Adam 1e-3'),
    'crossq_half_cheetah': OffPolicyWorkload('crossq', 'HalfCheetah-v5', 256, (256, 256), 1, 1, 500, 2500,
                                             'CrossQ, one update a step, batch 256, 2 x 256, Adam 1e-3'),
    'tqc_half_cheetah': OffPolicyWorkload('tqc', 'HalfCheetah-v5', 256, (256, 256), 1, 1, 500, 1500,
                                          'TQC, 2 critics of 25 quantiles, one update a step, batch 256, 2 x 256'),
    'droq_half_cheetah': OffPolicyWorkload('droq', 'HalfCheetah-v5', 256, (256, 256), 1, 20, 300, 150,
                                           'DroQ, 20 updates a step, batch 256, 2 x 256, dropout 0.01, layer norm'),
    'dqn_cart_pole': OffPolicyWorkload('dqn', 'CartPole-v1', 64, (256, 256), 256, 128, 2048, 15_360,
                                       'DQN, 128 updates every 256 steps, batch 64, 2 x 256, Adam 2.3e-3'),
}

_COMMON = """
create_environment.env_name = '{env_name}'
create_environment.num_parallel_environments = 1
create_environment.nonparallel = True
TrainerConfig.unroll_length = {every}
TrainerConfig.num_updates_per_train_iter = {updates}
TrainerConfig.mini_batch_size = {batch_size}
TrainerConfig.initial_collect_steps = 100
TrainerConfig.num_env_steps = {total}
TrainerConfig.num_iterations = 0
TrainerConfig.num_summaries = None
TrainerConfig.summarize_first_interval = True
TrainerConfig.random_seed = {seed}
TrainerConfig.compile = {compile}
TrainerConfig.float32_matmul_precision = {precision!r}
"""
_ACTOR_AND_CRITICS = """
ActorDistributionNetwork.fc_layer_params = {layers}
CriticNetwork.joint_fc_layer_params = {layers}
TrainerConfig.replay_buffer_length = 1000000
"""
_CONFS = {
    **{name: f"include '{base}'" + _ACTOR_AND_CRITICS for name, base in (
        ('sac', 'sac_continuous.gin'), ('crossq', 'crossq.gin'), ('droq', 'droq.gin'))},
    'tqc': f"include 'tqc.gin'{_ACTOR_AND_CRITICS}QrsacAlgorithm.num_critic_replicas = 2\n",
    'td3': """include 'td3.gin'
ActorNetwork.fc_layer_params = {layers}
CriticNetwork.joint_fc_layer_params = {layers}
TrainerConfig.replay_buffer_length = 1000000
""",
    'dqn': """include 'dqn.gin'
QNetwork.fc_layer_params = {layers}
DqnAlgorithm.target_net_target_action = True
DqnAlgorithm.target_update_tau = 1.0
DqnAlgorithm.target_update_period = {updates}
DqnAlgorithm.rollout_epsilon_greedy = 0.04
dqn/Adam.lr = 2.3e-3
TrainerConfig.replay_buffer_length = 100000
""",
}


def run_bare(workload: OffPolicyWorkload, steps: int, seed: int) -> tuple[int, float]:
    """Run the hand-written loop of `tools/benchmarks/bare_off_policy_loops.py`, which does not log."""
    import bare_off_policy_loops

    loop = getattr(bare_off_policy_loops, workload.algorithm)
    return loop(workload.env_name, workload.warm_up, steps, seed, workload.batch_size, workload.layers)


def run_stable_baselines(package: Any, workload: OffPolicyWorkload, steps: int, seed: int) -> tuple[int, float]:
    """Run stable-baselines3, sb3-contrib or sbx with its csv and TensorBoard logger."""
    from stable_baselines3.common.logger import configure

    algorithm, policy_kwargs = workload.algorithm, {'net_arch': list(workload.layers)}
    if algorithm == 'tqc':
        policy_kwargs.update(n_critics=2, n_quantiles=25)  # sbx always has two critics
    elif algorithm == 'droq':
        algorithm, policy_kwargs = 'sac', {**policy_kwargs, 'dropout_rate': 0.01, 'layer_norm': True}

    settings: dict[str, Any] = {'batch_size': workload.batch_size, 'learning_starts': 100, 'seed': seed,
                                'policy_kwargs': policy_kwargs}
    if algorithm == 'dqn':
        settings.update(learning_rate=2.3e-3, buffer_size=100_000, train_freq=workload.every,
                        gradient_steps=workload.updates, target_update_interval=workload.every,
                        exploration_initial_eps=0.04, exploration_final_eps=0.04)
    else:
        settings.update(buffer_size=1_000_000, train_freq=1, gradient_steps=workload.updates)
    if workload.algorithm == 'droq':
        settings['policy_delay'] = workload.updates
    if algorithm == 'td3':
        import numpy as np
        from stable_baselines3.common.noise import NormalActionNoise

        settings['action_noise'] = NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))
    name = 'CrossQ' if algorithm == 'crossq' else algorithm.upper()
    agent = getattr(package, name)('MlpPolicy', workload.env_name, **settings)
    with tempfile.TemporaryDirectory() as folder:
        agent.set_logger(configure(folder, ['csv', 'tensorboard']))
        agent.learn(workload.warm_up)
        before = agent._n_updates
        start = time.perf_counter()
        agent.learn(steps, reset_num_timesteps=False)
        return agent._n_updates - before, time.perf_counter() - start


def run_alfx(workload: OffPolicyWorkload, steps: int, seed: int, compile: bool = False,
             precision: str | None = None) -> tuple[int, float]:
    """Run alfx as `python -m alfx.bin.train` does, with summaries, progress.csv and checkpoints."""
    from alfx import gin_utils
    from alfx.config import TrainerConfig
    from alfx.trainers.policy_trainer import RLTrainer

    fields = {**dataclasses.asdict(workload), 'total': workload.warm_up + steps, 'seed': seed, 'compile': compile,
              'precision': precision}
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, 'benchmark.gin')
        conf.write_text((_CONFS[workload.algorithm] + _COMMON).format(**fields))
        gin_utils.write_conf(f'{folder}/run', gin_utils.load(str(conf)))
        trainer = RLTrainer(TrainerConfig(root_dir=f'{folder}/run'))
        learner = trainer.algorithm.learner
        train, clock = learner.train_from_replay, {'updates': 0, 'start': 0.0}

        def counted(*args: Any, **kwargs: Any) -> int:
            if not clock['start'] and trainer.current_env_steps() >= workload.warm_up:
                clock['start'] = time.perf_counter()
            steps_trained = train(*args, **kwargs)
            if clock['start']:
                clock['updates'] += steps_trained // (2 * workload.batch_size)
            return steps_trained

        learner.train_from_replay = counted
        trainer.train()
        return int(clock['updates']), time.perf_counter() - clock['start']
