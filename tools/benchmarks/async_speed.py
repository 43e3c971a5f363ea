"""Measure the speedup of an asynchronous actor with slow environment steps.

    python tools/benchmarks/async_speed.py [--env_ms 5] [--updates 1] [--rounds 7] [--seconds 6] [--json FILE]

Soft actor-critic (two layers of 256, minibatches of 256) on Pendulum with a step that sleeps. The synchronous run steps
the environment between the updates; the asynchronous run steps it in another process (``TrainerConfig.async_unroll``).
Both do the same number of updates per step. They run alternately in this process, ``--rounds`` times for ``--seconds``
each; the queue of the asynchronous run is emptied first. The rates are medians over the rounds, the ratio is the median
of the ratios within a round. 'at best' is the speedup if acting and training overlapped completely. Prints a Markdown
table.
"""
import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import torch

from alfx import context, gin_utils
from alfx.config import TrainerConfig
from alfx.gin_utils import configurable
from alfx.trainers.policy_trainer import RLTrainer

FOLDER = str(Path(__file__).resolve().parent)
QUEUE = 10
CONF = '''
import async_speed
include 'sac_pendulum.gin'
suite_gym.load.gym_env_wrappers = (@async_speed.SleepingStep, )
async_speed.SleepingStep.milliseconds = {env_ms}
create_environment.num_parallel_environments = {envs}
ActorDistributionNetwork.fc_layer_params = ({hidden}, {hidden})
CriticNetwork.joint_fc_layer_params = ({hidden}, {hidden})
TrainerConfig.mini_batch_size = {batch}
TrainerConfig.num_updates_per_train_iter = {updates}
TrainerConfig.unroll_length = 1
TrainerConfig.initial_collect_steps = 300
TrainerConfig.num_env_steps = 100000000
TrainerConfig.random_seed = 0
TrainerConfig.evaluate = False
'''
ASYNC = ('TrainerConfig.async_unroll=True', f'TrainerConfig.unroll_queue_size={QUEUE}')


@configurable
class SleepingStep(gymnasium.Wrapper):
    """Wrapper that sleeps in each step.

    Args:
        env: environment to wrap.
        milliseconds: duration of the sleep.
    """

    def __init__(self, env: gymnasium.Env, milliseconds: float = 5.0):
        super().__init__(env)
        self._seconds = milliseconds / 1e3

    def step(self, action: Any) -> tuple:
        """Sleep, then step."""
        time.sleep(self._seconds)
        return self.env.step(action)


class Run:
    """Run whose iterations are called one by one.

    Args:
        folder: run folder.
        conf: text of the conf.
        params: additional bindings.
    """

    def __init__(self, folder: Path, conf: str, params: tuple[str, ...]):
        folder.mkdir()
        (folder / 'speed.gin').write_text(conf)
        gin_utils.clear()
        context.reset()
        gin_utils.write_conf(str(folder), gin_utils.load(str(folder / 'speed.gin'), params))
        self._trainer = RLTrainer(TrainerConfig(root_dir=str(folder)))
        self._source = self._trainer._start_acting()
        self.algorithm = self._trainer.algorithm

    def steps_per_second(self, seconds: float) -> float:
        """Train for ``seconds``; return the steps per second of all environments together."""
        before, started = self._steps(), time.perf_counter()
        while time.perf_counter() - started < seconds:
            self.algorithm.train_iter()
        return (self._steps() - before) / (time.perf_counter() - started)

    def iterate(self, count: int) -> None:
        """Run ``count`` iterations."""
        for _ in range(count):
            self.algorithm.train_iter()

    def _steps(self) -> int:
        return int(self.algorithm.replay_buffer.current_pos.sum())

    def close(self) -> None:
        """Close the trainer and its processes."""
        self._trainer._unroll_source = self._source
        self._trainer._close(wait=False)


def parts(run: Run) -> tuple[float, float]:
    """Return the milliseconds per iteration of a synchronous run: for acting and stepping, and for training."""
    learner, spent = run.algorithm.learner, [0.0, 0.0]
    for _ in range(100):
        times = [time.perf_counter()]
        request = learner.collector.next_request(trained_before=True)
        if request is not None:
            learner.collect(request)
            learner.collector.mark_collected(request)
        times.append(time.perf_counter())
        learner.train_from_replay(counts_updates=True)
        times.append(time.perf_counter())
        spent = [total + b - a for total, a, b in zip(spent, times, times[1:])]
    return spent[0] * 10, spent[1] * 10


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both runs; return the numbers."""
    settings = {name: getattr(options, name) for name in ('env_ms', 'envs', 'hidden', 'batch', 'updates')}
    conf = CONF.format(**settings)
    os.environ['PYTHONPATH'] = os.pathsep.join([FOLDER, str(Path(FOLDER).parents[1]), os.environ.get('PYTHONPATH', '')])
    rates: dict[str, list[float]] = {'synchronous': [], 'asynchronous': []}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        try:
            for name, params in (('synchronous', ()), ('asynchronous', ASYNC)):
                runs[name] = Run(Path(folder) / name, conf, params)
                runs[name].iterate(1200)  # initial steps, and until updates and policy are traced
            acting, training = parts(runs['synchronous'])
            for _ in range(options.rounds):
                rates['synchronous'].append(runs['synchronous'].steps_per_second(options.seconds))
                runs['asynchronous'].iterate(4 * QUEUE)  # discard the steps that waited in the queue
                rates['asynchronous'].append(runs['asynchronous'].steps_per_second(options.seconds))
        finally:
            for run in runs.values():
                run.close()
    ratios = [b / a for a, b in zip(*rates.values())]
    return {**settings, 'threads': torch.get_num_threads(), 'acting_ms': acting, 'training_ms': training,
            **{name: statistics.median(values) for name, values in rates.items()},
            'ratio': statistics.median(ratios), 'ratios': ratios,
            'at_best': (acting + training) / max(acting, training)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--env_ms', type=float, default=5.0, help='duration of the sleep in a step')
    parser.add_argument('--envs', type=int, default=1, help='number of environments, stepped one after the other')
    parser.add_argument('--updates', type=int, default=1, help='updates per step')
    parser.add_argument('--hidden', type=int, default=256, help='size of the layers')
    parser.add_argument('--batch', type=int, default=256, help='size of the minibatches')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--seconds', type=float, default=6.0, help='duration of each measurement')
    parser.add_argument('--json', type=Path, help='file for the numbers')
    options = parser.parse_args()
    logging.getLogger('alfx').setLevel(logging.ERROR)
    found = measure(options)
    print('| sleep per step | updates per step | acting + stepping | training | synchronous | asynchronous | ratio | '
          'at best |\n|---:|---:|---:|---:|---:|---:|---:|---:|')
    print('| {env_ms:g} ms | {updates} | {acting_ms:.1f} ms | {training_ms:.1f} ms | {synchronous:.0f} steps/s | '
          '{asynchronous:.0f} steps/s | **{ratio:.2f}** | {at_best:.2f} |'.format(**found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main()
