"""Measure the speed of recording, sampling and loading datasets.

    python tools/benchmarks/dataset_speed.py                    # all three, three rounds
    python tools/benchmarks/dataset_speed.py record --rounds 5

record: Pendulum in 8 environments with a policy of two layers of 256, recorded alternately by alfx and by a
hand-written loop; both write a file. sample: fraction of the training time spent on sampling minibatches, for IQL with
two layers of 256 on 20,000 steps with 17-dimensional observations. load: seconds and memory to load a dataset of a
million such steps into the replay buffer. All use one thread.
"""
import argparse
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from bare_off_policy_loops import _mlp
from benchmark_offline import _ACTION, _EPISODES, _LENGTH, _OBSERVATION, transitions

from alfx import gin_utils, nest
from alfx.config import TrainerConfig
from alfx.data_structures import BasicRLInfo, Experience, time_step_spec
from alfx.experience_replayers.batch_reader import BatchReader
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.offline import recorder
from alfx.offline import dataset_folder
from alfx.offline import dataset_loading
from alfx.offline.buffer import make_buffer
from alfx.offline.dataset_episodes import Episodes
from alfx.runs import building
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.trainers.policy_trainer import RLTrainer

_ENVIRONMENTS, _WARM_UP = 8, 400
_SMALL = ('ActorDistributionNetwork.fc_layer_params = (256, 256)', 'create_environment.nonparallel = True',
          'TrainerConfig.random_seed = 0')
_IQL = """include 'iql.gin'
create_environment.env_name = 'HalfCheetah-v5'
create_environment.num_parallel_environments = 1
create_environment.nonparallel = True
TrainerConfig.offline_buffer_dir = '{dataset}'
TrainerConfig.num_updates_per_train_iter = 100
TrainerConfig.num_iterations = {iterations}
TrainerConfig.random_seed = 0
"""


def record_by_alfx(steps: int, path: Path) -> float:
    """Return the seconds for recording ``steps`` actions with alfx, after a warm-up."""
    with gin_utils.loaded('sac_pendulum', list(_SMALL)):
        config = TrainerConfig(root_dir='')
        env = building.create_eval_environment(config, _ENVIRONMENTS)
        algorithm = building.create_algorithm(config, env, trains=False)
    algorithm.eval()
    building.set_epsilon_greedy(algorithm, 1.0)
    policy = recorder.Policy(algorithm, _ENVIRONMENTS)
    recorder.record(env, policy, _WARM_UP)
    start = time.perf_counter()
    episodes = recorder.record(env, policy, steps)
    assert episodes is not None
    dataset_folder.write(str(path), episodes, {})
    seconds = time.perf_counter() - start
    env.close()
    gin_utils.clear()
    return seconds


def record_by_hand(steps: int, path: Path) -> float:
    """Return the seconds for recording ``steps`` actions with a list of environments, a network and numpy."""
    envs = [gymnasium.make('Pendulum-v1') for _ in range(_ENVIRONMENTS)]
    network = _mlp(3, (256, 256), 2)

    def act(observations: list[np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            mean, log_std = network(torch.from_numpy(np.stack(observations))).chunk(2, -1)
            return torch.tanh(mean + log_std.clamp(-20, 2).exp() * torch.randn_like(mean)).numpy()

    for _ in range(_WARM_UP // _ENVIRONMENTS):
        act([np.zeros(3, np.float32)] * _ENVIRONMENTS)
    rows: dict[str, list[list[Any]]] = {name: [[] for _ in envs] for name in ('observation', 'action', 'reward', 'end')}
    start = time.perf_counter()
    observations = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    for i, observation in enumerate(observations):
        rows['observation'][i].append(observation)
    for _ in range(-(-steps // _ENVIRONMENTS)):
        actions = act(observations)
        for i, env in enumerate(envs):
            observation, reward, terminated, truncated, _ = env.step(2 * actions[i])
            for name, value in (('observation', observation), ('action', actions[i]), ('reward', reward),
                                ('end', terminated or truncated)):
                rows[name][i].append(value)
            if terminated or truncated:
                observation = env.reset()[0]
                rows['observation'][i].append(observation)
            observations[i] = observation
    np.savez(path, **{name: np.concatenate([np.asarray(x) for x in parts]) for name, parts in rows.items()})
    return time.perf_counter() - start


def record(steps: int, rounds: int) -> str:
    """Compare the actions per second of both recorders."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        for i in range(rounds):
            peers = [record_by_alfx, record_by_hand][::1 if i % 2 else -1]
            seconds = {peer.__name__: peer(steps, Path(root, f'{i}{peer.__name__}')) for peer in peers}
            found.append((steps / seconds['record_by_alfx'], steps / seconds['record_by_hand']))
    ratio = statistics.median(alfx_rate / loop_rate for alfx_rate, loop_rate in found)
    alfx_rate, loop_rate = (statistics.median(x) for x in zip(*found))
    return f'record: {alfx_rate:,.0f} actions/s, hand-written loop {loop_rate:,.0f}: ratio {ratio:.2f}'


def sample(updates: int, rounds: int) -> str:
    """Measure the fraction of the training time spent on sampling, as the median over the rounds."""
    shares, rates = [], []
    data = transitions(0)
    episodes = Episodes({'': data['observation'].reshape(-1, _OBSERVATION)}, {'': data['action'].reshape(-1, _ACTION)},
                        data['reward'].reshape(-1), np.ones(_EPISODES * _LENGTH, np.float32),
                        np.full(_EPISODES, _LENGTH))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as root:
            dataset_folder.write(f'{root}/dataset', episodes, {'env_name': 'HalfCheetah-v5'})
            conf = Path(root, 'speed.gin')
            conf.write_text(_IQL.format(dataset=f'{root}/dataset', iterations=6 + updates // 100))
            with gin_utils.loaded(str(conf)):
                trainer = RLTrainer(TrainerConfig(root_dir=f'{root}/run'))
            algorithm = trainer.algorithm
            for _ in range(6):  # until updates are traced
                algorithm.train_iter()
            with _Drawing() as drawing:
                start = time.perf_counter()
                for _ in range(updates // 100):
                    algorithm.train_iter()
                total = time.perf_counter() - start
            shares.append(drawing.seconds / total)
            rates.append(updates // 100 * 100 / total)
    return f'sample: {statistics.median(shares):.1%} of an update, at {statistics.median(rates):,.0f} updates/s'


class _Drawing:
    """Context manager that measures the seconds spent on sampling minibatches."""

    def __enter__(self) -> '_Drawing':
        self.seconds = 0.0
        self._draw, self._get_batch = BatchReader.draw, ReplayBuffer.get_batch

        def draw(reader: BatchReader, *args: Any, **kwargs: Any) -> Iterator[Any]:
            batches = self._draw(reader, *args, **kwargs)
            while (found := self._timed(lambda: next(batches, None))) is not None:
                yield found

        BatchReader.draw = draw  # type: ignore[method-assign]
        ReplayBuffer.get_batch = lambda buffer, *args: self._timed(  # type: ignore[method-assign]
            lambda: self._get_batch(buffer, *args))
        return self

    def __exit__(self, *_: object) -> None:
        BatchReader.draw, ReplayBuffer.get_batch = self._draw, self._get_batch  # type: ignore[method-assign]

    def _timed(self, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return function()
        finally:
            self.seconds += time.perf_counter() - start


def load(steps: int, rounds: int) -> str:
    """Measure the minimum seconds, and the peak memory relative to the size of the buffer."""
    random, count = np.random.default_rng(0), max(steps // 1000, 1)
    episodes = Episodes({'': random.standard_normal((steps + count, _OBSERVATION), np.float32)},
                        {'': random.uniform(-1, 1, (steps, _ACTION)).astype(np.float32)},
                        random.standard_normal(steps, np.float32), np.ones(steps, np.float32),
                        np.full(count, steps // count))
    specs = TensorSpec((_OBSERVATION, )), BoundedTensorSpec((_ACTION, ), torch.float32, -1, 1), TensorSpec(())
    spec = Experience(time_step_spec(*specs), specs[1], BasicRLInfo(action=specs[1]))
    seconds, ratios = [], []
    with tempfile.TemporaryDirectory() as root:
        dataset_folder.write(root, episodes, {})
        del episodes
        for _ in range(rounds):
            with _Memory() as memory:
                start = time.perf_counter()
                buffer = make_buffer(dataset_loading.load([root], None, *specs, 2),
                                     nest.map_structure(TensorSpec.from_spec,
                                                                                               spec))
                seconds.append(time.perf_counter() - start)
            size = buffer.bytes_per_step * buffer.total_size
            ratios.append(memory.most / size)
            del buffer
    return (f'load: {steps:,} steps in {min(seconds):.2f} s, peak memory {statistics.median(ratios):.2f} times the '
            f'{size / 2**20:.0f} MiB of the buffer')


class _Memory:
    """Context manager that measures the peak of private memory since entry, in bytes, as ``most``."""

    def __enter__(self) -> '_Memory':
        self._before, self.most, self._ended = self._now(), 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now() - self._before)
        self.most = max(self.most, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        text = Path('/proc/self/status').read_text()
        return 1024 * int(text.split('RssAnon:')[1].split()[0])


PARTS = {'record': (record, 40_000), 'sample': (sample, 2000), 'load': (load, 1_000_000)}


def main() -> None:
    """Run the selected parts, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('parts', nargs='*', metavar='PART', help=f'{", ".join(PARTS)}; default: all')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--steps', type=int, help='actions, updates or steps of a round')
    args = parser.parse_args()
    for name in args.parts:
        if name not in PARTS:
            parser.error(f'unknown part {name!r}; choose from {", ".join(PARTS)}')
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name in args.parts or PARTS:
        function, steps = PARTS[name]
        print(function(args.steps or steps, args.rounds), flush=True)


if __name__ == '__main__':
    main()
