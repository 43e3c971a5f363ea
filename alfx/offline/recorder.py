"""Recording of whole episodes from a policy that acts in a batch of environments."""
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alfx import context, nest
from alfx.data_structures import StepType, TimeStep, reset_at_first
from alfx.offline.dataset_episodes import Episodes, from_steps, joined
from alfx.tensor_specs import NestedTensor, zeros_from_spec
from alfx.utils.discrete_action import random_valid
from alfx.utils.transfers import to_device

Act = Callable[[TimeStep], NestedTensor]
_BLOCK = 256  # steps that are stacked together: many small tensors slow down Python's garbage collection


class Policy:
    """Policy that acts as an algorithm does in evaluation.

    Args:
        algorithm: a loaded algorithm; its ``predict_step`` acts, greedily or not depending on its configuration.
        num_environments: B.
    """

    def __init__(self, algorithm: Any, num_environments: int) -> None:
        self._algorithm = algorithm
        self._initial_state = self._state = algorithm.get_initial_predict_state(num_environments)
        self._transform_state = algorithm.get_initial_transform_state(num_environments)

    def __call__(self, time_step: TimeStep) -> NestedTensor:
        """Return the actions ``[B, ...]`` at a time step ``[B, ...]`` of the environment."""
        algorithm, device = self._algorithm, self._algorithm.device
        is_here = device.type == 'cpu'
        with context.eval_context(), torch.no_grad():
            inputs, self._transform_state = algorithm.transform_timestep(
                time_step if is_here else to_device(time_step, device), self._transform_state)
            if nest.flatten(self._state):
                self._state = reset_at_first(self._state, self._initial_state, inputs)
            step = algorithm.fast_predict_step(inputs, self._state)
        self._state = step.state
        return step.output if is_here else nest.map_structure(torch.Tensor.cpu, step.output)


def action_masks(transformer: Any, num_environments: int) -> Act:
    """Return a function from time steps ``[B, ...]`` to the action masks that a data transformer provides.

    Args:
        transformer: a data transformer with ``has_action_mask``.
        num_environments: B.
    """
    transformer = transformer.cpu()
    state = zeros_from_spec(transformer.state_spec, num_environments)

    def masks(time_step: TimeStep) -> NestedTensor:
        nonlocal state
        with context.eval_context(), torch.no_grad():
            transformed, state = transformer.transform_timestep(time_step, state)
        return transformed.action_mask

    return masks


def random_policy(action_spec: NestedTensor, num_environments: int, masks: Act | None = None) -> Act:
    """Return a policy of uniformly random actions; actions without bounds are standard normal.

    Args:
        action_spec: nest of specs.
        num_environments: B.
        masks: returns the action mask of a time step; each discrete action is drawn from the allowed ones. The mask is
            bool ``[B, ..., N]``, as in :class:`~alfx.algorithms.data_transformer.ActionMask`, or a nest of such masks
            for the discrete actions in their order.
    """
    def draw(spec: Any) -> torch.Tensor:
        return spec.sample([num_environments]) if hasattr(spec, 'sample') else spec.randn([num_environments])

    def act(time_step: TimeStep) -> NestedTensor:
        action = nest.map_structure(draw, action_spec)
        if masks is None:
            return action
        left = iter(nest.flatten(masks(time_step)))
        return nest.map_structure(lambda own, spec: own if spec.is_continuous else (
            random_valid(next(left)) + torch.as_tensor(spec.minimum.copy())).to(own.dtype), action, action_spec)

    return act


def with_noise(act: Act, action_spec: NestedTensor, scale: float, is_correlated: bool = False) -> Act:
    """Return ``act`` with normal noise added to its continuous actions, which are then clipped to their bounds.

    Args:
        act: policy.
        action_spec: nest of specs.
        scale: standard deviation, in units of half the range of an action; for an action without bounds, in its own
            units.
        is_correlated: also add the noise of the previous step of the same episode, which makes the disturbances of
            consecutive actions correlated.
    """
    before: dict[str, torch.Tensor] = {}

    def disturb(path: str, action: torch.Tensor, spec: Any, is_first: torch.Tensor) -> torch.Tensor:
        if not spec.is_continuous:
            return action
        total = noise = torch.randn_like(action)
        if is_correlated:
            if path in before:
                total = noise + before[path].masked_fill(is_first.reshape(-1, *[1] * (action.ndim - 1)), 0)
            before[path] = noise
        if not spec.is_bounded():
            return action + scale * total
        low, high = (torch.tensor(x, dtype=action.dtype) for x in (spec.minimum, spec.maximum))
        return torch.clamp(action + scale * (high - low) / 2 * total, low, high)

    def disturbed(time_step: TimeStep) -> NestedTensor:
        action = act(time_step)
        return nest.pack_sequence_as(action, [
            disturb(path, leaf, spec, time_step.is_first())
            for (path, leaf), spec in zip(nest.flatten_with_path(action), nest.flatten(action_spec))])

    return disturbed


def _clipping(spec: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that clips sampled actions as the environment does, so that executed actions are recorded."""
    if not spec.is_continuous or not spec.is_bounded():
        return lambda action: action
    low, high = (torch.tensor(x, dtype=spec.dtype) for x in (spec.minimum, spec.maximum))
    return lambda action: torch.clamp(action, low, high)


def record(env: Any, act: Act, num_actions: int, on_step: Callable[[int], None] | None = None) -> Episodes | None:
    """Act for ``num_actions`` actions and return whole episodes.

    Running episodes are truncated at the end, so the result has ``num_actions`` actions, or up to B - 1 more. After an
    interrupt (``KeyboardInterrupt``), only the episodes that have ended are returned.

    Args:
        env: a new batched environment.
        act: policy.
        num_actions: number of actions in all environments together.
        on_step: called with the number of actions so far.

    Returns:
        The episodes; ``None`` if there is no action.
    """
    steps: list[tuple[TimeStep, NestedTensor]] = []
    blocks: list[NestedTensor] = []
    done, is_interrupted = 0, False
    clips = nest.map_structure(_clipping, env.action_spec())
    time_step = env.current_time_step()
    try:
        while done < num_actions:
            action = nest.map_structure(lambda clip, leaf: clip(leaf), clips, act(time_step))
            # at LAST the environment ignores the action; numpy counts so few numbers faster than torch
            done += int(np.count_nonzero(time_step.step_type.numpy() != int(StepType.LAST)))
            following = env.step(action)
            steps.append((_recorded_fields(time_step), action))
            time_step = following
            if len(steps) == _BLOCK:
                blocks, steps = [*blocks, nest.stack(steps)], []  # one statement, so that an interrupt loses nothing
            if on_step is not None:
                on_step(done)
    except KeyboardInterrupt:
        is_interrupted = True
    if not steps and not blocks:
        return None
    steps.append((_recorded_fields(time_step), action))
    all_steps = nest.map_structure(lambda *x: torch.cat(x), *blocks, nest.stack(steps))
    parts = []
    for number in range(env.batch_size):
        own = nest.map_structure(lambda x, number=number: x[:, number], all_steps)
        if is_interrupted:
            ended = own[0].is_last().nonzero().flatten()
            end = int(ended[-1]) + 1 if len(ended) else 0
            own = nest.map_structure(lambda x, end=end: x[:end], own)
        parts.append(from_steps(*own))
    found = [part for part in parts if part is not None]
    return joined(found) if found else None


def _recorded_fields(time_step: TimeStep) -> TimeStep:
    """Return the recorded fields of a time step."""
    return TimeStep(step_type=time_step.step_type, reward=time_step.reward, discount=time_step.discount,
                    observation=time_step.observation)
