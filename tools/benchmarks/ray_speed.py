"""Measure the speedup of two Ray rollout workers over one, with slow environment steps.

    python tools/benchmarks/ray_speed.py [--env_ms 5] [--envs 1] [--unroll_length 32] [--rounds 5] \\
        [--seconds 6] [--json FILE]

IMPALA on CartPole with a step that sleeps. Each worker steps ``--envs`` environments one after the other. Both runs are
in this process, with workers in one local cluster, and run alternately, ``--rounds`` times for ``--seconds`` each,
after their queues are emptied. Rates are medians over the rounds, the ratio is the median of the ratios within a round.
Prints a Markdown table.
"""
import argparse
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import async_speed

from alfx.trainers.acting import ray_cluster

QUEUE = 64
CONF = '''
import async_speed
include 'impala_cart_pole.gin'
suite_gym.load.gym_env_wrappers = (@async_speed.SleepingStep, )
async_speed.SleepingStep.milliseconds = {env_ms}
create_environment.num_parallel_environments = {envs}
TrainerConfig.async_unroll = False
TrainerConfig.unroll_queue_size = {queue}
TrainerConfig.unroll_length = {unroll_length}
TrainerConfig.num_env_steps = 100000000
TrainerConfig.random_seed = 0
'''


class Run(async_speed.Run):
    """Run that discards its steps after training on them."""

    def _steps(self) -> int:
        return int(self.algorithm.get_step_metrics()[0].result())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both runs; return the numbers."""
    settings = {name: getattr(options, name) for name in ('env_ms', 'envs', 'unroll_length')}
    queue = max(QUEUE, options.unroll_length)
    conf = CONF.format(**settings, queue=queue)
    waiting = -(-queue // options.unroll_length) + 1  # unrolls
    rates: dict[int, list[float]] = {1: [], 2: []}
    connection = ray_cluster.on_parts_built('ray_speed', 'local', num_cpus=sum(rates))
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[int, Run] = {}
        try:
            for workers in rates:
                runs[workers] = Run(Path(folder) / str(workers), conf, (f'TrainerConfig.num_ray_workers={workers}', ))
                runs[workers].iterate(2 * waiting)
            for _ in range(options.rounds):
                for workers, run in runs.items():
                    run.iterate(waiting)
                    rates[workers].append(run.steps_per_second(options.seconds))
        finally:
            for run in runs.values():
                run.close()
            connection.close()
    ratios = [two / one for one, two in zip(*rates.values())]
    return {**settings, 'one_worker': statistics.median(rates[1]), 'two_workers': statistics.median(rates[2]),
            'ratio': statistics.median(ratios), 'ratios': ratios}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--env_ms', type=float, default=5.0, help='duration of the sleep in a step')
    parser.add_argument('--envs', type=int, default=1, help='environments per worker')
    parser.add_argument('--unroll_length', type=int, default=32, help='steps of each environment per iteration')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=6.0, help='duration of each measurement')
    parser.add_argument('--json', help='file for the numbers')
    options = parser.parse_args()
    logging.getLogger('alfx').setLevel(logging.ERROR)
    result = measure(options)
    print('| ms per step | environments per worker | unroll length | one worker, steps/s | two workers, steps/s | '
          'ratio |')
    print('| --- | --- | --- | --- | --- | --- |')
    print(f'| {result["env_ms"]:g} | {result["envs"]} | {result["unroll_length"]} | {result["one_worker"]:.0f} | '
          f'{result["two_workers"]:.0f} | {result["ratio"]:.2f} |')
    print('rounds:', ' '.join(f'{ratio:.2f}' for ratio in result['ratios']))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == '__main__':
    main()
