"""What follows each step of a batch from the replay buffer: looked up there, as far as the episode goes.

Used by :mod:`alfx.algorithms.predictive_representation_learner`.
"""
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import BatchInfo, StepType
from alfx.tensor_specs import NestedTensor


class FutureSteps:
    """The steps t, t + 1, ..., t + R after each step t of a batch ``[B, T]``.

    What is looked up is what the environment gave, before any data transformer. Each stored step is read once; the
    results are views of that.

    Args:
        batch_info: where the batch came from: ``env_ids [B]``, ``positions [B]`` and ``replay_buffer``.
        length: T.
        num_steps: R, at least 0.

    Raises:
        ValueError: ``batch_info`` does not say which replay buffer it is.
    """

    def __init__(self, batch_info: BatchInfo, length: int, num_steps: int):
        buffer = batch_info.replay_buffer
        if isinstance(buffer, tuple) or buffer is None:
            raise ValueError('looking up future steps needs a batch_info with the replay buffer that it came from')
        self._buffer = buffer
        self._num_steps = num_steps
        self._env_ids = batch_info.env_ids.unsqueeze(1)
        newest = buffer.current_pos.to(self._env_ids.device)[self._env_ids] - 1
        steps = torch.arange(length + num_steps, device=self._env_ids.device)
        positions = batch_info.positions.unsqueeze(1) + steps  # [B, T + R]
        self._is_stored = positions <= newest
        self._positions = torch.minimum(positions, newest)

    def mask(self) -> Tensor:
        """bool ``[B, T, R + 1]``: whether the step t + i is of the same episode as t, and stored.

        The final step of an episode belongs to it; the step t itself is always there.
        """
        step_type = self._buffer.get_field('time_step.step_type', self._env_ids, self._positions)
        goes_on = self._is_stored & (step_type != StepType.FIRST)
        goes_on[:, 1:] &= step_type[:, :-1] != StepType.LAST
        mask = self._ahead(goes_on).clone()
        mask[:, :, 0] = True
        return mask.to(torch.uint8).cumprod(2).bool()

    def field(self, field: str) -> NestedTensor:
        """The part of the experience at the path ``field`` at t, ..., t + R: nest ``[B, T, R + 1, ...]``.

        Beyond the newest step it is that of the newest.

        Raises:
            LookupError: there is no such field.
        """
        found = self._buffer.get_field(experience_field(self._buffer.data_spec, field), self._env_ids, self._positions)
        return nest.map_structure(self._ahead, found)

    def _ahead(self, x: Tensor) -> Tensor:
        """``[B, T + R, ...]`` to ``[B, T, R + 1, ...]``, without copying."""
        return x.unfold(1, self._num_steps + 1, 1).movedim(-1, 2)


def experience_field(data_spec: Any, field: str) -> str:
    """The path in the experience that ``field`` means: the fields of the time step may be named by themselves.

    Args:
        data_spec: spec of the experience, or any nest of its structure.
        field: such as 'reward' or 'observation.camera', for 'time_step.reward' and so on; or any path in the
            experience.
    """
    first = field.split('.')[0]
    if hasattr(data_spec, 'time_step') and first not in data_spec._fields and first in data_spec.time_step._fields:
        return f'time_step.{field}'
    return field
