"""How long a plan by the cross-entropy method takes beside the matrix products that it consists of.

    python tools/planning_speed.py [--population 400] [--horizon 25] [--iterations 5] [--hidden 200 200] [--rounds 5]
                                   [--compile]

The plan is that of the shipped conf mbrl_pendulum with other sizes, by ``predict_step`` of its agent: one environment,
one thread; ``--compile`` is that of runs with ``TrainerConfig.compile``. The bare loop makes the layers of the same
network as often, and nothing else. Rounds take turns; a figure is the median of the rounds, the ratio the median of the
ratios within a round. Prints Markdown.
"""
import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer


def planner(root_dir: str, args: argparse.Namespace) -> Callable[[], object]:
    """A function that makes a plan, by an agent that has not been trained."""
    gin_utils.write_conf(root_dir, gin_utils.load('mbrl_pendulum', [
        f'CEMPlanAlgorithm.population_size = {args.population}', f'CEMPlanAlgorithm.planning_horizon = {args.horizon}',
        f'CEMPlanAlgorithm.max_iter_num = {args.iterations}',
        f'CEMPlanAlgorithm.elite_size = {max(1, args.population // 10)}',
        f'DeterministicDynamicsAlgorithm.hidden_size = {tuple(args.hidden)}', 'TrainerConfig.num_threads = 1',
        f'TrainerConfig.compile = {args.compile}']))
    algorithm = RLTrainer(TrainerConfig(root_dir=root_dir)).algorithm
    time_step = algorithm.environment.current_time_step()
    state = algorithm.get_initial_predict_state(1)

    def plan() -> object:
        with torch.no_grad(), context.eval_context():
            return algorithm.predict_step(algorithm.transform_timestep(
                time_step, algorithm.get_initial_transform_state(1))[0], state)

    return plan


def products(args: argparse.Namespace) -> Callable[[], object]:
    """A function that makes the layers of the model alone: 3 numbers and 1 action to 3 numbers."""
    sizes = [4, *args.hidden, 3]
    layers = [torch.nn.Linear(*shape) for shape in zip(sizes, sizes[1:])]
    rows = torch.randn(args.population, 4)

    def multiply() -> None:
        with torch.no_grad():
            for _ in range(args.horizon * args.iterations):
                x = rows
                for layer in layers[:-1]:
                    x = torch.nn.functional.silu(layer(x))
                layers[-1](x)

    return multiply


def seconds(run: Callable[[], object], repetitions: int) -> float:
    """Of one run, the mean of so many."""
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - start) / repetitions


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('population', 400), ('horizon', 25), ('iterations', 5), ('rounds', 5), ('repetitions', 20)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--hidden', type=int, nargs='+', default=[200, 200])
    parser.add_argument('--compile', action='store_true')
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root_dir:
        runs = {'plan': planner(root_dir, args), 'products': products(args)}
        for run in runs.values():
            seconds(run, 5)  # the model is recorded, or compiled, meanwhile
        rounds = [{name: seconds(run, args.repetitions) for name, run in runs.items()} for _ in range(args.rounds)]
    ratio = statistics.median(x['plan'] / x['products'] for x in rounds)
    print('| population | horizon | iterations | layers | a plan | its products | ratio |\n'
          '| ---: | ---: | ---: | --- | ---: | ---: | ---: |')
    plan, bare = (1e3 * statistics.median(x[name] for x in rounds) for name in ('plan', 'products'))
    print(f'| {args.population} | {args.horizon} | {args.iterations} | {" x ".join(map(str, args.hidden))} '
          f'| {plan:.1f} ms | {bare:.1f} ms | {ratio:.2f} |')


if __name__ == '__main__':
    main()
