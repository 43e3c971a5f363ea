"""Offline workloads of `tools/benchmarks/benchmark.py` for each peer.

The unit is updates. Every peer gets the same transitions with normal observations and uniform actions, since the work
does not depend on the data. Loading the data, ``warm_up`` updates and compilation are not timed. d3rlpy needs another
gymnasium version than alfx; the environment variable ``D3RLPY_PYTHON`` names the Python interpreter where it is
installed.
"""
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_EPISODES, _LENGTH, _OBSERVATION, _ACTION = 20, 1000, 17, 6


@dataclasses.dataclass(frozen=True)
class OfflineWorkload:
    """Algorithm with all settings that determine the amount of work.

    Attributes:
        algorithm: 'iql' or 'td3_bc'.
        batch_size: transitions in a minibatch.
        layers: hidden layers of every network.
        warm_up: updates before the timed ones.
        steps: default number of updates per measurement.
        description: one line for the table.
        unit: unit of the rate.
    """

    algorithm: str
    batch_size: int
    layers: tuple[int, ...]
    warm_up: int
    steps: int
    description: str
    unit: str = 'updates'


WORKLOADS = {
    'iql_half_cheetah': OfflineWorkload('iql', 256, (256, 256), 600, 3000,
                                        'IQL from 20,000 transitions, batch 256, 2 x 256, Adam 3e-4'),
    'td3_bc_half_cheetah': OfflineWorkload('td3_bc', 256, (256, 256), 600, 3000,
                                           'TD3+BC from 20,000 transitions, batch 256, 2 x 256, Adam 3e-4'),
}

_CONF = """include '{algorithm}.gin'
create_environment.env_name = 'HalfCheetah-v5'
create_environment.num_parallel_environments = 1
create_environment.nonparallel = True
TrainerConfig.offline_buffer_dir = '{dataset}'
TrainerConfig.mini_batch_size = {batch_size}
TrainerConfig.num_updates_per_train_iter = 100
TrainerConfig.num_iterations = {iterations}
TrainerConfig.num_summaries = None
TrainerConfig.random_seed = {seed}
TrainerConfig.compile = {compile}
"""


def transitions(seed: int) -> dict[str, np.ndarray]:
    """Return float32 ``observation`` [E, T + 1, 17], ``action`` [E, T, 6], ``reward`` [E, T] of truncated episodes."""
    random = np.random.default_rng(seed)
    observation = random.standard_normal((_EPISODES, _LENGTH + 1, _OBSERVATION), np.float32)
    action = random.uniform(-1, 1, (_EPISODES, _LENGTH, _ACTION)).astype(np.float32)
    return {'observation': observation, 'action': action,
            'reward': random.standard_normal((_EPISODES, _LENGTH), np.float32)}


def run_bare(workload: OfflineWorkload, steps: int, seed: int) -> tuple[int, float]:
    """Run the hand-written loop of `tools/benchmarks/bare_offline_loops.py`, which does not log."""
    import bare_offline_loops
    from bare_off_policy_loops import Replay

    data, replay = transitions(seed), Replay(_EPISODES * _LENGTH, _OBSERVATION, _ACTION, seed)
    replay.observation[:] = data['observation'][:, :-1].reshape(-1, _OBSERVATION)
    replay.next_observation[:] = data['observation'][:, 1:].reshape(-1, _OBSERVATION)
    replay.action[:] = data['action'].reshape(-1, _ACTION)
    replay.reward[:], replay.discount[:], replay.size = data['reward'].reshape(-1), 0.99, replay.capacity
    loop = getattr(bare_offline_loops, workload.algorithm)
    return loop(replay, workload.warm_up, steps, seed, workload.batch_size, workload.layers)


def run_alfx(workload: OfflineWorkload, steps: int, seed: int, compile: bool = False) -> tuple[int, float]:
    """Run alfx as `python -m alfx.bin.train` does, with summaries, progress.csv and checkpoints."""
    from alfx import gin_utils
    from alfx.config import TrainerConfig
    from alfx.offline import dataset_folder
    from alfx.offline.dataset_episodes import Episodes
    from alfx.trainers.policy_trainer import RLTrainer

    data = transitions(seed)
    episodes = Episodes({'': data['observation'].reshape(-1, _OBSERVATION)}, {'': data['action'].reshape(-1, _ACTION)},
                        data['reward'].reshape(-1), np.ones(_EPISODES * _LENGTH, np.float32),
                        np.full(_EPISODES, _LENGTH))
    untimed = workload.warm_up // 100
    with tempfile.TemporaryDirectory() as root:
        dataset_folder.write(f'{root}/dataset', episodes, {'env_name': 'HalfCheetah-v5'})
        conf = Path(root, 'benchmark.gin')
        conf.write_text(_CONF.format(**dataclasses.asdict(workload), dataset=f'{root}/dataset', seed=seed,
                                     compile=compile, iterations=untimed + steps // 100))
        gin_utils.write_conf(f'{root}/run', gin_utils.load(str(conf)))
        trainer = RLTrainer(TrainerConfig(root_dir=f'{root}/run'))
        learner, start = trainer.algorithm.learner, 0.0
        run_iteration = learner.run_iteration

        def timed() -> int:
            nonlocal start
            if trainer.current_iterations() == untimed:
                start = time.perf_counter()
            return run_iteration()

        learner.run_iteration = timed
        trainer.train()
        return steps // 100 * 100, time.perf_counter() - start


def run_d3rlpy(workload: OfflineWorkload, steps: int, seed: int) -> tuple[int, float]:
    """Run the update and sampling of d3rlpy without its logger, with the interpreter ``D3RLPY_PYTHON``."""
    request = {**dataclasses.asdict(workload), 'steps': steps, 'seed': seed}
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run([os.environ['D3RLPY_PYTHON'], __file__, json.dumps(request)], env=environment,
                          stdout=subprocess.PIPE, text=True, check=True)
    return steps, float(done.stdout.splitlines()[-1])


def _d3rlpy_seconds(algorithm: str, batch_size: int, layers: list[int], warm_up: int, steps: int, seed: int,
                    **_: Any) -> float:
    import d3rlpy
    import torch

    torch.set_num_threads(1)
    d3rlpy.seed(seed)
    data = transitions(seed)
    truncated = np.zeros((_EPISODES, _LENGTH), np.float32)
    truncated[:, -1] = 1
    dataset = d3rlpy.dataset.MDPDataset(data['observation'][:, :-1].reshape(-1, _OBSERVATION),
                                        data['action'].reshape(-1, _ACTION), data['reward'].reshape(-1),
                                        np.zeros(truncated.size, np.float32), truncated.reshape(-1))
    encoder = d3rlpy.models.encoders.VectorEncoderFactory(layers)
    networks = {'actor_encoder_factory': encoder, 'critic_encoder_factory': encoder, 'batch_size': batch_size}
    if algorithm == 'iql':
        config = d3rlpy.algos.IQLConfig(**networks, value_encoder_factory=encoder)
    else:
        config = d3rlpy.algos.TD3PlusBCConfig(**networks)
    learner, start = config.create(device='cpu:0'), 0.0
    learner.build_with_dataset(dataset)
    for i in range(warm_up + steps):
        if i == warm_up:
            start = time.perf_counter()
        learner.update(dataset.sample_transition_batch(batch_size))
    return time.perf_counter() - start


if __name__ == '__main__':
    print(_d3rlpy_seconds(**json.loads(sys.argv[1])))
