"""Functions of ``FrameStacker``, which stacks observations with earlier ones."""
from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.transformers.field_checks import check_fields
from alfx.data_structures import Experience, StepType, TimeStep
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec


def stacked_spec(spec: TensorSpec, stack_size: int, axis: int) -> TensorSpec:
    """Return the spec of ``stack_size`` tensors joined along dimension ``axis``; scalars become a vector."""
    if stack_size == 1:
        return spec
    shape = list(spec.shape) or [1]
    shape[axis] *= stack_size
    if not isinstance(spec, BoundedTensorSpec):
        return spec.replace(shape=shape)
    bounds = [b if b.ndim == 0 else np.concatenate([b] * stack_size, axis) for b in (spec.minimum, spec.maximum)]
    return spec.replace(shape=shape, minimum=bounds[0], maximum=bounds[1])


def plan_stacking(observation_spec: NestedTensorSpec, stack_size: int, stack_axis: int,
                  fields: Optional[Sequence[str]]) -> tuple[list[str], list[int], NestedTensorSpec, list[TensorSpec]]:
    """Determine fields, axes and specs of stacking; the arguments are those of ``FrameStacker``.

    Returns:
        tuple:
        - paths in the observation; '' for the whole observation
        - for each path, the dimension of an observation along which to stack
        - spec of the stacked observation
        - for each path, the spec of the joined ``stack_size - 1`` previous frames

    Raises:
        SpecError: a field does not exist or has no dimension ``stack_axis``.
    """
    checked = check_fields('FrameStacker', observation_spec, fields)
    specs = [nest.get_field(observation_spec, field) for field in checked]
    for field, spec in zip(checked, specs):
        if not -max(spec.ndim, 1) <= stack_axis < max(spec.ndim, 1):
            raise SpecError(f"FrameStacker.stack_axis: {stack_axis} is not a dimension of '{field or 'observation'}', "
                            f'which is {spec}')
    axes = [stack_axis % max(spec.ndim, 1) for spec in specs]
    for field, spec, axis in zip(checked, specs, axes):
        observation_spec = nest.set_field(observation_spec, field, stacked_spec(spec, stack_size, axis))
    previous = [stacked_spec(TensorSpec(s.shape or (1, ), s.dtype), stack_size - 1, axis)
                for s, axis in zip(specs, axes)]
    return checked, axes, observation_spec, previous


def stack_time_step(time_step: TimeStep, steps: Tensor, prev_frames: Sequence[Tensor], fields: Sequence[str],
                    axes: Sequence[int], stack_size: int) -> tuple[NestedTensor, Tensor, list[Tensor]]:
    """Return the observation of a time step with stacked frames, from the previous frames.

    Args:
        time_step: ``[B, ...]``.
        steps: int64 ``[B]``, number of earlier steps of the episode.
        prev_frames: for each field, the joined ``stack_size - 1`` previous frames.
        fields: paths in the observation; '' for the whole observation.
        axes: for each field, the dimension of an observation along which to stack.
        stack_size: number of frames in a stack.

    Returns:
        The observation ``[B, ...]``, and ``steps`` and ``prev_frames`` for the next time step.
    """
    if stack_size == 1:
        return time_step.observation, steps, list(prev_frames)
    begins = (time_step.step_type == StepType.FIRST) | (steps == 0)
    # On a GPU it is cheaper to always select than to wait for the result; a traced graph cannot branch on it.
    some_begin = begins.device.type != 'cpu' or torch.compiler.is_compiling() or bool(begins.any())
    observation, frames = time_step.observation, []
    for field, axis, previous in zip(fields, axes, prev_frames):
        frame = nest.get_field(observation, field)
        frame = frame.unsqueeze(1) if frame.ndim == 1 else frame
        dim = axis + 1
        if some_begin:
            repeated = torch.cat([frame] * (stack_size - 1), dim)
            previous = torch.where(begins.view(-1, *[1] * (frame.ndim - 1)), repeated, previous)
        stacked = torch.cat([previous, frame], dim)
        frames.append(stacked.narrow(dim, frame.shape[dim], previous.shape[dim]))
        observation = nest.set_field(observation, field, stacked)
    return observation, torch.where(begins, 1, steps + 1), frames


def stack_indices(step_type: Tensor, stack_size: int) -> Tensor:
    """Return the indices of the frames of each stack: the step and its predecessors within the episode.

    Args:
        step_type: ``[B, L]`` with ``L = stack_size - 1 + T``: the steps before a batch, and the steps of the batch.
        stack_size: number of frames in a stack.

    Returns:
        int64 ``[B, T, stack_size]``: indices into the ``B * L`` steps, oldest first; the first step of the episode
        replaces steps before it.
    """
    batch, length = step_type.shape
    time = torch.arange(length, device=step_type.device)
    begins = torch.where(step_type == StepType.FIRST, time, 0).cummax(dim=1).values[:, stack_size - 1:]
    stack = time[:length - stack_size + 1].unsqueeze(-1) + time[:stack_size]
    rows = length * torch.arange(batch, device=step_type.device).view(-1, 1, 1)
    return torch.maximum(stack, begins.unsqueeze(-1)) + rows


def stack_from_replay(experience: Experience, fields: Sequence[str], axes: Sequence[int],
                      stack_size: int) -> NestedTensor:
    """Return the observation of a batch with stacked frames, which are looked up in the replay buffer.

    Args:
        experience: ``[B, T, ...]`` with ``batch_info`` and ``replay_buffer``.
        fields: paths in the observation; '' for the whole observation.
        axes: for each field, the dimension of an observation along which to stack.
        stack_size: number of frames in a stack.

    Returns:
        Nest ``[B, T, ...]``.

    Raises:
        ValueError: ``batch_info`` or ``replay_buffer`` is missing.
    """
    if stack_size == 1:
        return experience.time_step.observation
    buffer, info = experience.replay_buffer, experience.batch_info
    if buffer == () or info == ():
        raise ValueError('stacking frames needs experience with batch_info and replay_buffer, see '
                         'data_structures.add_batch_info')
    env_ids, first = info.env_ids.unsqueeze(-1), info.positions.unsqueeze(-1)
    earliest = buffer.earliest_positions(info.env_ids).unsqueeze(-1)
    positions = first + torch.arange(1 - stack_size, 0, device=first.device)
    positions = torch.maximum(positions, earliest)  # the oldest stored step replaces overwritten ones
    step_type = torch.cat(
        [buffer.get_field('time_step.step_type', env_ids, positions), experience.time_step.step_type], dim=1)
    sources = stack_indices(step_type, stack_size)
    observation = experience.time_step.observation
    for field, axis in zip(fields, axes):
        path = f'time_step.observation.{field}' if nest.is_nested(observation) else 'time_step.observation'
        frames = torch.cat([buffer.get_field(path, env_ids, positions), nest.get_field(observation, field)], dim=1)
        stacked = frames.flatten(0, 1).index_select(0, sources.flatten())
        stacked = stacked.view(*sources.shape, *frames.shape[2:])  # [B, T, stack_size, ...]
        if frames.ndim > 2:  # scalars are already stacked along their only dimension
            stacked = stacked.movedim(2, axis + 2).flatten(axis + 2, axis + 3)
        observation = nest.set_field(observation, field, stacked)
    return observation
