"""Peers and workloads that `tools/benchmarks/benchmark.py` times in its subprocesses.

A workload fixes all settings that determine the amount of work: task, number of environments, network, rollout length,
minibatches, epochs, optimizer. A peer is a function (workload, steps, seed) -> (environment steps taken, seconds). It
returns (updates, seconds) for the workloads of `benchmark_off_policy.py` and `benchmark_offline.py`, and
(iterations, seconds) for the cost of an exploration bonus. The time includes training and the default logging of the
peer, but not the construction of environments and networks.
"""
import dataclasses
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_off_policy
import benchmark_offline
from benchmark_off_policy import OffPolicyWorkload
from benchmark_offline import OfflineWorkload


@dataclasses.dataclass(frozen=True)
class Workload:
    """Task with all settings that determine the amount of work.

    Attributes:
        algorithm: 'ppo', 'ppo_doorkey', 'a2c' or 'pqn'.
        env_name: gymnasium id.
        num_envs: number of parallel environments.
        unroll_length: steps of each environment per iteration.
        epochs: updates on the whole rollout per iteration, as one minibatch unless the algorithm has its own size.
        steps: default number of environment steps per measurement.
        description: one line for the table.
        unit: unit of the rate: environment 'steps', or 'iterations' to compare alfx with and without exploration
            bonuses, which is independent of the length of episodes.
    """

    algorithm: str
    env_name: str
    num_envs: int
    unroll_length: int
    epochs: int
    steps: int
    description: str
    unit: str = 'steps'


WORKLOADS: dict[str, Any] = {
    'ppo_cart_pole': Workload('ppo', 'CartPole-v1', 8, 32, 20, 60_000,
                              'PPO, 8 x 32 steps, one minibatch of 256, 20 epochs, 2 x 64 tanh, Adam 3e-4'),
    'a2c_cart_pole': Workload('a2c', 'CartPole-v1', 8, 5, 1, 100_000,
                              'A2C, 8 x 5 steps, one update each, 2 x 64 tanh, RMSprop 7e-4'),
    'pqn_cart_pole': Workload('pqn', 'CartPole-v1', 32, 64, 4, 120_000,
                              'PQN, 32 x 64 steps, 4 epochs of minibatches of 128, 2 x 256 with layer norm, RAdam'),
    'ppo_cart_pole_bonus': Workload('ppo', 'CartPole-v1', 8, 32, 20, 60_000,
                                    'PPO as in ppo_cart_pole, without and with a bonus with networks of equal size; '
                                    'a speedup of 1.3 means that the bonus adds 30%', 'iterations'),
    'ppo_doorkey_bonus': Workload('ppo_doorkey', 'MiniGrid-DoorKey-8x8-v0', 16, 128, 4, 20_480,
                                  'PPO as in ppo_minigrid_doorkey_8x8.gin, without and with a bonus', 'iterations'),
    **benchmark_off_policy.WORKLOADS,
    **benchmark_offline.WORKLOADS,
}

# Networks and environments as in the other peers; summaries and progress.csv with the defaults of TrainerConfig.
_ALFX_NETWORKS = """
ActorDistributionNetwork.fc_layer_params = (64, 64)
ActorDistributionNetwork.activation = @torch.tanh
ValueNetwork.fc_layer_params = (64, 64)
ValueNetwork.activation = @torch.tanh
"""
_ALFX_COMMON = """
create_environment.env_name = '{env_name}'
create_environment.num_parallel_environments = {num_envs}
create_environment.nonparallel = True
TrainerConfig.unroll_length = {unroll_length}
TrainerConfig.num_env_steps = {steps}
TrainerConfig.num_iterations = 0
TrainerConfig.num_summaries = None
TrainerConfig.summarize_first_interval = True
TrainerConfig.random_seed = {seed}
TrainerConfig.compile = {compile}
"""
_ALFX_CONFS = {
    'ppo_doorkey': "include 'ppo_minigrid_doorkey_8x8.gin'\n",
    'ppo': f"""include 'ppo.gin'
ppo/Adam.lr = 3e-4
TrainerConfig.mini_batch_size = {{batch_size}}
TrainerConfig.num_updates_per_train_iter = {{epochs}}
{_ALFX_NETWORKS}""",
    'pqn': "include 'pqn_cart_pole.gin'\n",
    'a2c': f"""include 'ac_simple.gin'
Agent.optimizer = @ac/RMSprop()
ac/RMSprop.lr = 7e-4
ac/RMSprop.alpha = 0.99
ac/RMSprop.eps = 1e-5
ac/RMSprop.gradient_clipping = 0.5
ac/RMSprop.clip_by_global_norm = True
ActorCriticLoss.td_lambda = 1.0
{_ALFX_NETWORKS}""",
}
# Two networks with two layers of 64 each, like policy and value: target and predictor, or forward and inverse model.
_BONUSES = {
    '': '',
    'rnd': """include 'rnd.gin'
rnd_target/EncodingNetwork.fc_layer_params = (64, )
rnd_target/EncodingNetwork.last_layer_size = 64
rnd_predictor/EncodingNetwork.fc_layer_params = (64, )
rnd_predictor/EncodingNetwork.last_layer_size = 64
""",
    'icm': """Agent.intrinsic_reward_module = @ICMAlgorithm
ICMAlgorithm.hidden_size = (64, 64)
ICMAlgorithm.optimizer = @icm/Adam()
icm/Adam.lr = 1e-3
""",
    # as shipped; the features of an inverse model have 32 numbers
    'episodic_count': "include 'episodic_count.gin'\nEpisodicCount.resolution = 0.01\n",
    'noveld': "include 'noveld.gin'\nEpisodicCount.resolution = 0.01\n",
    **{name: f"include '{name}.gin'\n" for name in ('e3b', 'ngu', 're3', 'disagreement', 'deir')},
}
_WITH_BONUS = [name for name in _BONUSES if name]


def run_bare(workload: Any, steps: int, seed: int) -> tuple[int, float]:
    """Run the hand-written loop of the workload, which does not log."""
    if isinstance(workload, OfflineWorkload):
        return benchmark_offline.run_bare(workload, steps, seed)
    if isinstance(workload, OffPolicyWorkload):
        return benchmark_off_policy.run_bare(workload, steps, seed)
    import bare_loops

    loop = {'ppo': bare_loops.ppo, 'a2c': bare_loops.a2c, 'pqn': bare_loops.pqn}[workload.algorithm]
    return loop(workload.env_name, steps, seed)


def _stable_baselines(package: Any, workload: Any, steps: int, seed: int, warm_up: int) -> tuple[int, float]:
    if isinstance(workload, OffPolicyWorkload):
        return benchmark_off_policy.run_stable_baselines(package, workload, steps, seed)
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    environment = make_vec_env(workload.env_name, workload.num_envs, seed=seed)
    if workload.algorithm == 'ppo':
        agent = package.PPO('MlpPolicy', environment, n_steps=workload.unroll_length, n_epochs=workload.epochs,
                            batch_size=workload.num_envs * workload.unroll_length, seed=seed, device='cpu')
    else:
        agent = package.A2C('MlpPolicy', environment, n_steps=workload.unroll_length, seed=seed, device='cpu')
    with tempfile.TemporaryDirectory() as folder:
        agent.set_logger(configure(folder, ['csv', 'tensorboard']))
        if warm_up:
            agent.learn(warm_up)
        before = agent.num_timesteps if warm_up else 0
        start = time.perf_counter()
        agent.learn(steps, reset_num_timesteps=not warm_up)
        return agent.num_timesteps - before, time.perf_counter() - start


_CONTRIB = ('crossq', 'tqc')  # algorithms of sb3-contrib


def run_sb3(workload: Any, steps: int, seed: int) -> tuple[int, float]:
    """Run stable-baselines3 or sb3-contrib with its vector environment and its csv and TensorBoard logger."""
    package = importlib.import_module('sb3_contrib' if workload.algorithm in _CONTRIB else 'stable_baselines3')
    return _stable_baselines(package, workload, steps, seed, warm_up=0)


def run_sbx(workload: Any, steps: int, seed: int) -> tuple[int, float]:
    """Run sbx (Stable-Baselines on JAX) after two iterations that are not timed, in which it compiles."""
    import sbx

    warm_up = 0 if isinstance(workload, OffPolicyWorkload) else 2 * workload.num_envs * workload.unroll_length
    return _stable_baselines(sbx, workload, steps, seed, warm_up)


_COMPILED_AFTER = 60  # iterations, after which policy and update are compiled


def run_alfx(workload: Any, steps: int, seed: int, bonus: str = '', compile: bool = False) -> tuple[int, float]:
    """Run alfx as `python -m alfx.bin.train` does, with summaries, progress.csv and checkpoints.

    The time starts after compilation, as for sbx.
    """
    if isinstance(workload, OfflineWorkload):
        return benchmark_offline.run_alfx(workload, steps, seed, compile=compile)
    if isinstance(workload, OffPolicyWorkload):
        return benchmark_off_policy.run_alfx(workload, steps, seed, compile=compile)
    from alfx import gin_utils
    from alfx.config import TrainerConfig
    from alfx.trainers.policy_trainer import RLTrainer

    batch_size = workload.num_envs * workload.unroll_length
    untimed = _COMPILED_AFTER if compile else 0
    fields = {**dataclasses.asdict(workload), 'batch_size': batch_size, 'steps': steps + untimed * batch_size,
              'seed': seed, 'compile': compile}
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, 'benchmark.gin')
        conf.write_text((_ALFX_CONFS[workload.algorithm] + _BONUSES[bonus] + _ALFX_COMMON).format(**fields))
        gin_utils.write_conf(f'{folder}/run', gin_utils.load(str(conf)))
        trainer = RLTrainer(TrainerConfig(root_dir=f'{folder}/run'))
        counter = trainer.current_iterations if workload.unit == 'iterations' else trainer.current_env_steps
        learner, before, start = trainer.algorithm.learner, 0, time.perf_counter()
        run_iteration = learner.run_iteration

        def timed() -> int:
            nonlocal before, start
            if trainer.current_iterations() == untimed:
                before, start = counter(), time.perf_counter()
            return run_iteration()

        if untimed:
            learner.run_iteration = timed
        trainer.train()
        return counter() - before, time.perf_counter() - start


def run_alfx_bfloat16(workload: Any, steps: int, seed: int) -> tuple[int, float]:
    """Run compiled alfx with bfloat16 matrix products, which are less precise than those of the other peers."""
    return benchmark_off_policy.run_alfx(workload, steps, seed, compile=True, precision='medium')


def disable_graphs() -> None:
    """Disable traced and compiled graphs in this process."""
    from alfx.engine.plan import backends
    backends.WARM_UP = backends.WarmUp(*[sys.maxsize] * len(backends.WarmUp._fields))


def run_alfx_eager(workload: Any, steps: int, seed: int) -> tuple[int, float]:
    """Run alfx in eager mode; the difference to ``run_alfx`` is the gain of traced graphs."""
    disable_graphs()
    return run_alfx(workload, steps, seed)


PEERS: dict[str, Callable[[Any, int, int], tuple[int, float]]] = {
    'alfx': run_alfx, 'eager': run_alfx_eager, 'compiled': partial(run_alfx, compile=True),
    'bfloat16': run_alfx_bfloat16, 'sb3': run_sb3, 'bare': run_bare, 'sbx': run_sbx,
    'd3rlpy': benchmark_offline.run_d3rlpy,
    **{name: partial(run_alfx, bonus=name) for name in _WITH_BONUS}}

OF_ALFX = ('alfx', 'eager', 'compiled', 'bfloat16', *_WITH_BONUS)  # peers that can be compared with another source tree


def unavailable(peer: str, workload: Any) -> str:
    """Return the reason why the peer does not support the workload, or ''."""
    compares_bonuses = workload.unit == 'iterations'
    if peer in _BONUSES:
        return '' if compares_bonuses else 'only for the workloads ppo_cart_pole_bonus and ppo_doorkey_bonus'
    if compares_bonuses and peer != 'alfx':
        return 'this workload compares alfx with itself'
    is_offline = isinstance(workload, OfflineWorkload)
    if peer == 'd3rlpy':
        return ('offline workloads only' if not is_offline else '' if 'D3RLPY_PYTHON' in os.environ else
                'the environment variable D3RLPY_PYTHON is not set')
    if is_offline and peer not in ('alfx', 'eager', 'compiled', 'bare'):
        return 'no offline workloads'
    if peer in ('compiled', 'bfloat16'):
        return '' if peer == 'compiled' or isinstance(workload, OffPolicyWorkload) else 'its products are too small'
    if peer == 'eager':
        return ''
    module = {'alfx': 'alfx', 'sb3': 'stable_baselines3', 'sbx': 'sbx', 'bare': 'torch'}[peer]
    if peer == 'sb3' and workload.algorithm in _CONTRIB:
        module = 'sb3_contrib'
    if importlib.util.find_spec(module) is None:
        return f'{module} is not installed (make install-bench)'
    if peer in ('sb3', 'bare') and workload.algorithm == 'droq' or peer == 'bare' and workload.algorithm in _CONTRIB:
        return f'no {workload.algorithm}'
    if peer == 'sbx' and workload.algorithm == 'a2c' or peer in ('sbx', 'sb3') and workload.algorithm == 'pqn':
        return f'{peer} has no {workload.algorithm.upper()}'
    return ''
