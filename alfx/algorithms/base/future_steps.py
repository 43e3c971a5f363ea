"""Lookup of the steps that follow each step of a batch in the replay buffer, within the episode.

Used by :mod:`alfx.algorithms.predictive_representation_learner`.
"""
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import BatchInfo, StepType
from alfx.tensor_specs import NestedTensor


class FutureSteps:
    """Steps t, t + 1, ..., t + R after each step t of a batch ``[B, T]``.

    Fields are read from the replay buffer and are not transformed by data transformers. Each stored step is read once;
    the results are views of it.

    Args:
        batch_info: origin of the batch: ``env_ids [B]``, ``positions [B]`` and ``replay_buffer``.
        length: T.
        num_steps: R, at least 0.

    Raises:
        ValueError: ``batch_info`` has no replay buffer.
    """

    def __init__(self, batch_info: BatchInfo, length: int, num_steps: int):
        buffer = batch_info.replay_buffer
        if isinstance(buffer, tuple) or buffer is None:
            raise ValueError('looking up future steps requires a batch_info with its replay buffer')
        self._buffer = buffer
        self._num_steps = num_steps
        self._env_ids = batch_info.env_ids.unsqueeze(1)
        newest = buffer.current_pos.to(self._env_ids.device)[self._env_ids] - 1
        steps = torch.arange(length + num_steps, device=self._env_ids.device)
        positions = batch_info.positions.unsqueeze(1) + steps  # [B, T + R]
        self._is_stored = positions <= newest
        self._positions = torch.minimum(positions, newest)

    def mask(self) -> Tensor:
        """Return bool ``[B, T, R + 1]``: the step t + i is stored and belongs to the same episode as t.

        The final step of an episode belongs to it; the entry of step t itself is always True.
        """
        step_type = self._buffer.get_field('time_step.step_type', self._env_ids, self._positions)
        continues = self._is_stored & (step_type != StepType.FIRST)
        continues[:, 1:] &= step_type[:, :-1] != StepType.LAST
        mask = self._ahead(continues).clone()
        mask[:, :, 0] = True
        return mask.to(torch.uint8).cumprod(2).bool()

    def field(self, field: str) -> NestedTensor:
        """Return the experience at the path ``field`` at t, ..., t + R: nest ``[B, T, R + 1, ...]``.

        Beyond the newest step the newest step is repeated.

        Raises:
            LookupError: there is no such field.
        """
        found = self._buffer.get_field(experience_field(self._buffer.data_spec, field), self._env_ids, self._positions)
        return nest.map_structure(self._ahead, found)

    def _ahead(self, x: Tensor) -> Tensor:
        """Return a view ``[B, T, R + 1, ...]`` of ``[B, T + R, ...]``."""
        return x.unfold(1, self._num_steps + 1, 1).movedim(-1, 2)


def experience_field(data_spec: Any, field: str) -> str:
    """Return the path in the experience that ``field`` stands for; fields of the time step need no prefix.

    Args:
        data_spec: spec of the experience, or any nest of its structure.
        field: short for a field of the time step, such as 'reward' or 'observation.camera' for 'time_step.reward' and
            so on; or any path in the experience.
    """
    first = field.split('.')[0]
    if hasattr(data_spec, 'time_step') and first not in data_spec._fields and first in data_spec.time_step._fields:
        return f'time_step.{field}'
    return field
