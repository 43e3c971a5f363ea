"""A program that trains as one rank or alone, with random numbers that do not depend on the number of ranks.

    python tests/helpers/rank_program.py '{"conf": ..., "params": [...], "root_dir": ..., "out": ..., "halves": 2}'

Every rank draws the same numbers as a single process would for its part. Noise: the whole is drawn, from a generator
that depends only on the number of draws before, and the part is cut out (:class:`SplitNoise`). Samples of the replay
buffer and the order of minibatches: each part has its own generator, and a single process concatenates the parts.
``halves`` is the number of parts; the number of ranks is ``halves`` or 1.
"""
import json
import sys

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alfx import gin_utils
from alfx.bin.ranks import is_rank
from alfx.engine.remote import data_parallel
from alfx.experience_replayers import sampling

aten = torch.ops.aten
UNIFORM = {aten.rand.default, aten.uniform_.default, aten.rand_like.default}
SCALED = {aten.normal.Tensor_Tensor, aten.normal.float_Tensor}
NOISE = {aten.randn.default, aten.normal_.default, aten.randn_like.default, *UNIFORM, *SCALED}


class SplitNoise(TorchDispatchMode):
    """Mode in which noise for ``[n, ...]`` is one of ``parts`` parts of the noise for the whole.

    Args:
        part: index of the part; ``None`` for the whole.
        parts: number of parts.
        environments: environments of a part: rows drawn for an environment step.
        batch: batch size of a part: numbers drawn for training have a multiple of that many rows, time-major.
        unroll: steps of an unroll.
    """

    def __init__(self, part, parts, environments, batch, unroll):
        super().__init__()
        self.part, self.parts, self.environments, self.batch, self.unroll = part, parts, environments, batch, unroll
        self.draws = 0

    def generator(self, *key):
        seed = np.random.SeedSequence(1, spawn_key=key).generate_state(1, np.uint64)[0] >> np.uint64(1)
        return torch.Generator().manual_seed(int(seed))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if type(out) is not torch.Tensor:  # the compiler looks at operations without numbers
            return out
        if func == aten.randperm.default:
            return self.order(args[0])
        if func not in NOISE or out.ndim == 0:
            return out
        self.draws += 1
        noise = self.cut(torch.rand if func in UNIFORM else torch.randn, out.shape).to(out.dtype)
        if func in SCALED:
            noise = args[0] + args[1] * noise
        return out.copy_(noise)

    def cut(self, draw, shape):
        rows = self.environments if shape[0] == self.own(self.environments) else self.batch
        assert shape[0] % self.own(rows) == 0, f'noise of shape {shape} belongs to nobody'
        time = shape[0] // self.own(rows)
        noise = draw(time, rows * self.parts, *shape[1:], generator=self.generator(0, self.draws))
        if self.part is not None:
            noise = noise[:, rows * self.part:rows * (self.part + 1)]
        return noise.reshape(shape)

    def own(self, rows):
        return rows if self.part is not None else rows * self.parts

    def order(self, count):
        """Return the order of minibatches of single steps: the index is ``time * environments + environment``."""
        self.draws += 1
        parts = range(self.parts) if self.part is None else [self.part]
        length = count if self.part is not None else count // self.parts
        orders = [torch.randperm(length, generator=self.generator(1, self.draws, part)) for part in parts]
        if self.part is not None:
            return orders[0]
        envs = self.environments
        placed = [order // envs * envs * self.parts + part * envs + order % envs for part, order in enumerate(orders)]
        batches = [torch.cat(b) for b in zip(*(p.split(self.batch) for p in placed))]
        return torch.cat(batches)


def sample_parts(noise, batch):
    """Return a replacement of ``SequenceSampler.sample`` that draws parts of a batch from parts of the environments."""
    count = [0]

    def sample(self, batch_size, length, uniform=False):
        first, end = self._rings.window(self._ignored, length)
        if end <= first:
            return None
        envs, positions = [], []
        for _ in range(batch_size // noise.own(batch)):
            count[0] += 1
            for i, part in enumerate(range(noise.parts) if noise.part is None else [noise.part]):
                g = noise.generator(2, count[0], part)
                envs.append(torch.randint(noise.environments, (batch, ), generator=g) + i * noise.environments)
                positions.append(first + torch.randint(int(end - first), (batch, ), generator=g))
        return sampling.Sample(torch.cat(envs).numpy(), torch.cat(positions).numpy())

    return sample


def main(request):
    from alfx.algorithms.config import TrainerConfig
    from alfx.trainers.policy_trainer import RLTrainer
    torch.set_num_threads(1)
    ranks = data_parallel.join(torch.device('cpu')) if is_rank() else None
    rank = -1 if ranks is None else ranks.rank
    gin_utils.load(request['conf'], request['params'], None)
    trainer = RLTrainer(TrainerConfig(root_dir=request['root_dir']), rank)
    parts = request['halves']
    batch = trainer._config.mini_batch_size // (parts if ranks is None else 1)
    envs = trainer._env.batch_size // (parts if ranks is None else 1)
    noise = SplitNoise(None if ranks is None else rank, parts, envs, batch, trainer._config.unroll_length)
    sampling.SequenceSampler.sample = sample_parts(noise, batch)
    with noise:
        trainer.train()
    state = {name: x for name, x in trainer.algorithm.state_dict().items() if isinstance(x, torch.Tensor)}
    torch.save(state, f"{request['out']}.{max(rank, 0)}")
    data_parallel.leave()


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
