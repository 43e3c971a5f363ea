"""Measure the memory of a replay buffer of Atari frames, and the time to sample stacks of them.

    python tools/benchmarks/image_replay.py [--frames 1000000] [--repeats 30]

Frames are gray images of 84 x 84 pixels, of which FrameStacker stacks four when a batch is sampled. A batch has 32
transitions, as for DQN. One thread; each time is the minimum of several repeats.
"""
import argparse
import re
from pathlib import Path

import torch
from replay_speed import experience_spec, in_episodes, microseconds

from alfx import nest
from alfx.algorithms.data_transformer import FrameStacker
from alfx.data_structures import Experience, add_batch_info
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import BoundedTensorSpec

FRAME = BoundedTensorSpec((1, 84, 84), torch.uint8, 0, 255)
ACTION = BoundedTensorSpec((), torch.int64, 0, 5)
NUM_ENVS, BATCH_SIZE, STACK_SIZE, EPISODE = 8, 32, 4, 500


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    status = Path('/proc/self/status').read_text()  # getrusage would include what ran before exec
    return int(re.search(r'VmHWM:\s+(\d+) kB', status)[1]) * 1024  # type: ignore[index]


def main() -> None:
    """Run the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--frames', type=int, default=1_000_000, help='capacity of all environments together')
    parser.add_argument('--repeats', type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = args.frames // NUM_ENVS
    spec = experience_spec(FRAME, ACTION)
    piece = in_episodes(nest.map_structure(lambda leaf: leaf.zeros((min(rows, EPISODE), NUM_ENVS)), spec), EPISODE)
    piece.time_step.observation.random_(0, 256)
    before = peak_memory()
    buffer = ReplayBuffer(spec, NUM_ENVS, rows, num_earliest_frames_ignored=STACK_SIZE - 1)
    for _ in range(rows // len(piece.action) + 1):
        buffer.add_sequence(piece)
    stacker = FrameStacker(FRAME, stack_size=STACK_SIZE)

    def sample() -> Experience:
        experience, info = buffer.get_batch(BATCH_SIZE, 2)
        return stacker.transform_experience(add_batch_info(experience, info, buffer))

    assert sample().time_step.observation.shape == (BATCH_SIZE, 2, STACK_SIZE, 84, 84)
    duration = microseconds(sample, args.repeats, calls=50)
    frames = rows * NUM_ENVS * 84 * 84
    used = peak_memory() - before
    print(f'{rows * NUM_ENVS:,} frames of 84 x 84 pixels, torch {torch.__version__}, one thread')
    print(f'peak memory          {used / 1e9:8.3f} GB, {used / frames:.3f} of the frames')
    rate = BATCH_SIZE / duration * 1e6
    print(f'sample {BATCH_SIZE} x 2 stacks {duration:9.0f} us, {rate:,.0f} transitions per second')


if __name__ == '__main__':
    main()
