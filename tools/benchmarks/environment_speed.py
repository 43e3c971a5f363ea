"""Compare environment steps per second: one after the other, in processes, and in C++.

    python tools/benchmarks/environment_speed.py                          # CartPole and Pong, 8 environments
    python tools/benchmarks/environment_speed.py cart_pole --environments 64 --rounds 5 --seconds 2

All variants run alternately in one process, so that changes in the speed of the machine affect them equally. The ratios
are medians over the rounds. CPU time is measured for this process and its threads only, not for worker processes.
"""
import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from alfx.environments import suite_ale_vector, suite_atari, suite_envpool, suite_gym
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.process_vector_env import ProcessVectorEnv

REFERENCE = 'processes'
GAME = {'noop_max': 1, 'sticky_action_probability': 0.0}
WAYS: dict[str, dict[str, Callable[[int], AlfEnvironment]]] = {
    'cart_pole': {
        'one by one': lambda n: suite_gym.load('CartPole-v1', batch_size=n),
        REFERENCE: lambda n: suite_gym.load('CartPole-v1', batch_size=n, vector_env=ProcessVectorEnv),
        'EnvPool': lambda n: suite_envpool.load('CartPole-v1', batch_size=n),
    },
    'pong': {
        'one by one': lambda n: suite_atari.load('Pong', batch_size=n, **GAME),
        REFERENCE: lambda n: suite_atari.load('Pong', batch_size=n, vector_env=ProcessVectorEnv, **GAME),
        'ALE vector': lambda n: suite_ale_vector.load('Pong', batch_size=n, **GAME),
        'EnvPool': lambda n: suite_envpool.load('Pong-v5', batch_size=n, env_args={'noop_max': 1}),
    },
}


class Measurement(NamedTuple):
    """Measurement of one variant in one round.

    Attributes:
        rate: environment steps per second.
        microseconds: CPU time per environment step in this process and its threads.
    """

    rate: float
    microseconds: float


def measure(env: AlfEnvironment, actions: torch.Tensor, seconds: float) -> Measurement:
    """Step ``env`` for ``seconds``."""
    steps, started, cpu = 0, time.perf_counter(), _cpu_seconds()
    while time.perf_counter() - started < seconds:
        for action in actions:
            env.step(action)
        steps += len(actions) * env.batch_size
    return Measurement(steps / (time.perf_counter() - started), (_cpu_seconds() - cpu) / steps * 1e6)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def compare(workload: str, count: int, rounds: int, seconds: float) -> dict[str, list[Measurement]]:
    """Measure all variants alternately for ``rounds`` rounds."""
    envs = {name: make(count) for name, make in WAYS[workload].items()}
    found: dict[str, list[Measurement]] = {name: [] for name in envs}
    try:
        for env in envs.values():
            env.seed(0)
            env.reset()
        spec = next(iter(envs.values())).action_spec()
        generator = torch.Generator().manual_seed(0)
        actions = torch.randint(int(spec.maximum) + 1, (16, count), generator=generator)
        for _ in range(rounds):
            for name, env in envs.items():
                found[name].append(measure(env, actions, seconds))
    finally:
        for env in envs.values():
            env.close()
    return found


def format_table(found: dict[str, list[Measurement]]) -> str:
    """Format the medians as a Markdown table."""
    lines = [f'| variant | env steps/s | speedup over {REFERENCE} | CPU time of this process per step |',
             '| --- | ---: | ---: | ---: |']
    for name, rounds in found.items():
        ratio = statistics.median(a.rate / b.rate for a, b in zip(rounds, found[REFERENCE]))
        lines.append(f'| {name} | {_median(x.rate for x in rounds):,.0f} | {ratio:.2f} | '
                     f'{_median(x.microseconds for x in rounds):,.1f} us |')
    return '\n'.join(lines)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def main() -> None:
    """Run the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('workloads', nargs='*', metavar='workload', help=f'some of {list(WAYS)}; default: all')
    parser.add_argument('--environments', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=1.0, help='duration of each measurement')
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - set(WAYS)
    if unknown:
        parser.error(f'expected workloads of {list(WAYS)}, found {sorted(unknown)}')
    torch.set_num_threads(1)
    for workload in arguments.workloads or list(WAYS):
        print(f'{workload}, {arguments.environments} environments')
        print(format_table(compare(workload, arguments.environments, arguments.rounds, arguments.seconds)))


if __name__ == '__main__':
    main()
