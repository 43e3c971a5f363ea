"""Measure the time to sample from the replay buffer and to store in it, for flat observations.

    python tools/benchmarks/replay_speed.py [--steps 1000000] [--repeats 30]

One thread. Observations have size 17 and actions size 6, as in HalfCheetah. Each number is the minimum of several
repeats, since other load on the machine can only increase the time.
"""
import argparse
import time
from collections.abc import Callable

import torch

from alfx import nest
from alfx.data_structures import BasicRLInfo, BasicRolloutInfo, Experience, StepType, time_step_spec
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, TensorSpec

BATCH_SIZE, BATCH_LENGTH, NUM_ENVS, UNROLL_LENGTH = 256, 2, 8, 32


def experience_spec(observation: TensorSpec = TensorSpec((17, )),
                    action: TensorSpec = BoundedTensorSpec((6, ), torch.float32, -1.0, 1.0)) -> Experience:
    """Return the spec of the experience that an off-policy algorithm stores."""
    return Experience(time_step=time_step_spec(observation, action), action=action,
                      rollout_info=BasicRolloutInfo(rl=BasicRLInfo(action=action)))


def random_steps(num_steps: int, num_envs: int) -> NestedTensor:
    """Return experience ``[T, B, ...]`` of truncated episodes of 1000 steps."""
    steps = nest.map_structure(lambda spec: torch.rand(num_steps, num_envs, *spec.shape).to(spec.dtype),
                               experience_spec())
    return in_episodes(steps, 1000)


def in_episodes(steps: Experience, length: int) -> Experience:
    """Return experience ``[T, B, ...]`` with the step types of truncated episodes of ``length`` steps."""
    num_steps, num_envs = steps.action.shape[:2]
    time = (torch.arange(num_steps) % length).unsqueeze(-1).expand(num_steps, num_envs)
    step_type = torch.where(time == 0, StepType.FIRST,
                            torch.where(time == length - 1, StepType.LAST, StepType.MID)).int()
    env_id = torch.arange(num_envs).expand(num_steps, num_envs)
    return steps._replace(time_step=steps.time_step._replace(step_type=step_type, env_id=env_id,
                                                             discount=torch.ones(num_steps, num_envs)))


def microseconds(function: Callable[[], object], repeats: int, calls: int = 200) -> float:
    """Return the microseconds per call: the minimum over repeats of the mean over ``calls`` calls."""
    best = float('inf')
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def measure(max_steps: int, repeats: int, **kwargs: object) -> dict[str, float]:
    """Return the microseconds of each operation on a full buffer."""
    rows = max_steps // NUM_ENVS
    buffer = ReplayBuffer(experience_spec(), NUM_ENVS, rows, **kwargs)
    piece = random_steps(min(rows, 10_000), NUM_ENVS)
    for _ in range(rows // len(piece.step_type) + 1):
        buffer.add_sequence(piece)
    one = nest.map_structure(lambda x: x[1].clone(), piece)
    unroll = nest.map_structure(lambda x: x[1:UNROLL_LENGTH + 1].clone(), piece)
    env_ids = one.time_step.env_id
    figures = {}
    if buffer.prioritized_sampling:
        for _ in range(200):  # varied priorities, as in the middle of a run
            _, info = buffer.get_batch(4096, BATCH_LENGTH)
            buffer.update_priority(info.env_ids, info.positions, torch.rand(4096)**2 + 1e-6)
    _, info = buffer.get_batch(BATCH_SIZE, BATCH_LENGTH)
    priorities = torch.rand(BATCH_SIZE)
    sample = lambda: buffer.get_batch(BATCH_SIZE, BATCH_LENGTH)
    figures[f'sample {BATCH_SIZE} sequences of {BATCH_LENGTH}'] = microseconds(sample, repeats)
    if buffer.prioritized_sampling:
        figures['update_priority of them'] = microseconds(
            lambda: buffer.update_priority(info.env_ids, info.positions, priorities), repeats)
    figures[f'add_batch, {NUM_ENVS} environments'] = microseconds(lambda: buffer.add_batch(one, env_ids), repeats)
    figures[f'add_sequence, a step of {UNROLL_LENGTH}'] = microseconds(
        lambda: buffer.add_sequence(unroll), repeats) / UNROLL_LENGTH

    def add_and_sample() -> None:
        buffer.add_batch(one, env_ids)
        buffer.get_batch(BATCH_SIZE, BATCH_LENGTH)

    figures['add_batch and sample, together'] = microseconds(add_and_sample, repeats)
    return figures


def main() -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=1_000_000, help='total capacity of all environments')
    parser.add_argument('--repeats', type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        'uniform': {},
        'prioritized': {'prioritized_sampling': True},
        'uniform, episodes': {'keep_episodic_info': True},
        'prioritized, returns': {'prioritized_sampling': True, 'record_episodic_return': True},
    }
    columns = {name: measure(args.steps, args.repeats, **kwargs) for name, kwargs in kinds.items()}
    operations = max(columns.values(), key=len)
    print(f'microseconds, {args.steps:,} steps stored, torch {torch.__version__}, one thread\n')
    print(f"{'':34s}" + ''.join(f'{name:>22s}' for name in columns))
    for operation in operations:
        print(f'{operation:34s}' + ''.join(
            f'{figures[operation]:22.1f}' if operation in figures else f"{'-':>22s}" for figures in columns.values()))


if __name__ == '__main__':
    main()
