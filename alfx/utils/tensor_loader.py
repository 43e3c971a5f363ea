"""Batches of data that are already tensors."""
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class TensorData(NamedTuple):
    """Samples with their targets.

    Attributes:
        inputs: ``[n, ...]``.
        targets: int64 ``[n]`` classes, or ``[n, C]`` numbers.
    """
    inputs: Tensor
    targets: Tensor


class TensorLoader:
    """Iterable of batches ``(inputs [B, ...], targets [B, ...])``, each created by one ``index_select``.

    The order of an epoch comes from torch's generator, which is part of checkpoints, so a resumed run sees the same
    batches.

    Args:
        inputs: ``[n, ...]``.
        targets: ``[n]`` or ``[n, C]``.
        batch_size: B; the last batch of an epoch may be smaller.
        shuffle: use a new random order in each epoch.

    Attributes:
        data: all samples.
        batch_size: number of samples of every batch except the last one.

    Raises:
        ValueError: the numbers of inputs and targets differ, or are 0, or ``batch_size`` is less than 1.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int, shuffle: bool = True):
        if len(inputs) != len(targets) or not len(inputs):
            raise ValueError(f'TensorLoader: expected as many targets as inputs, found {len(targets)} and '
                             f'{len(inputs)}')
        if batch_size < 1:
            raise ValueError(f'TensorLoader.batch_size: expected at least 1, found {batch_size}')
        self.data = TensorData(inputs, targets)
        self.batch_size = min(batch_size, len(inputs))
        self._shuffle = shuffle

    @property
    def dataset(self) -> Tensor:
        """Inputs; their ``len`` is the number of samples."""
        return self.data.inputs

    def __len__(self) -> int:
        return math.ceil(len(self.data.inputs) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = self.data
        if not self._shuffle:
            yield from zip(inputs.split(self.batch_size), targets.split(self.batch_size))
            return
        for index in torch.randperm(len(inputs)).to(inputs.device).split(self.batch_size):
            yield inputs.index_select(0, index), targets.index_select(0, index)
