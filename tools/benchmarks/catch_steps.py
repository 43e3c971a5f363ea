"""Environment steps until Catch is solved, with alfx and with bare loops of the same algorithms.

    python tools/benchmarks catch_steps --seeds 5

Catch is the game of tests/learning/test_catch.py, whose settings are used. A run ends when the greedy policy has a mean
return of 0.9 (the best is 1). The policy is tried every 128 steps, and every 512 steps for PPO and PQN.
"""
import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import bare_catch_loops
import torch

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.runs.callbacks import Callback, TrainingRun
from alfx.trainers.policy_trainer import RLTrainer

sys.path.append(str(Path(__file__).resolve().parents[2] / 'tests'))
from learning import test_catch


class _StopWhenSolved(Callback):
    """Stop a run whose greedy policy has reached the goal."""

    steps = 0

    def on_iteration_end(self, run: TrainingRun) -> None:
        if run.env_steps % 128 == 0 and run.env_steps > 500:
            state = torch.get_rng_state()
            solved = test_catch.greedy_return(run.algorithm) >= bare_catch_loops.GOAL
            torch.set_rng_state(state)
            if solved:
                run.stop('solved')
        _StopWhenSolved.steps = run.env_steps


def alfx_steps(name: str, seed: int) -> int:
    """Return the steps until alfx has solved the game; the length of the run if it has not."""
    with tempfile.TemporaryDirectory() as folder:
        params = [*test_catch.SHARED, *test_catch.CASES[name], f'TrainerConfig.random_seed = {seed}']
        with gin_utils.loaded(name, params, folder):
            config = TrainerConfig(root_dir=folder)
            config.callbacks = (_StopWhenSolved(), )
            RLTrainer(config).train()
    return _StopWhenSolved.steps


def length_of(name: str) -> int:
    """Return the length of a run in environment steps, on which schedules depend."""
    setting = next(case for case in test_catch.CASES[name] if case.startswith('TrainerConfig.num_env_steps'))
    return int(setting.partition('=')[2])


def main() -> None:
    """Print a table of the median steps over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--seeds', type=int, default=5, help='number of seeds')
    parser.add_argument('--algorithms', nargs='+', choices=list(bare_catch_loops.LOOPS),
                        default=list(bare_catch_loops.LOOPS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[Any, ...]] = []
    for name in args.algorithms:
        total = length_of(name)
        alfx_counts = [alfx_steps(name, seed) for seed in range(args.seeds)]
        bare = [bare_catch_loops.LOOPS[name](seed, total) for seed in range(args.seeds)]
        rows.append((name, statistics.median(alfx_counts), statistics.median(bare), alfx_counts, bare))
        print(rows[-1], flush=True)
    print('\n| algorithm | alfx | bare loop | ratio |\n| --- | ---: | ---: | ---: |')
    for name, our_median, bare_median, alfx_counts, bare in rows:
        print(f'| {name} | {our_median:,.0f} ({min(alfx_counts):,} to {max(alfx_counts):,}) '
              f'| {bare_median:,.0f} ({min(bare):,} to {max(bare):,}) | {our_median / bare_median:.2f} |')


if __name__ == '__main__':
    main()
