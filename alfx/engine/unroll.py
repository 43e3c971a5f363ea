"""Stepping the environment with the current policy.

``unroll`` is the inner loop of collecting experience: ``rollout_step``, ``env.step``, repeat. It runs once an
environment step, so that nothing in it may cost more than a few microseconds.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from alfx import context, nest
from alfx.data_structures import AlgStep, Experience, TimeStep, reset_at_first
from alfx.engine.contract import Acts
from alfx.tensor_specs import NestedTensor
from alfx.utils.transfers import to_device


class Steps(NamedTuple):
    """Consecutive steps of all environments.

    Attributes:
        experience: ``[T, B, ...]``: transformed time steps on-policy, otherwise as the environment gave them; ``state``
            only where training starts from it (``use_rollout_state``).
        env_steps: the environment's own step types, rewards, discounts and infos ``[T, B, ...]``, which metrics are
            made of.
        inputs: transformed time steps ``[T, B, ...]`` where ``Capabilities.needs_unroll_inputs``, otherwise ``None``.
    """

    experience: Experience
    env_steps: TimeStep
    inputs: TimeStep | None


@dataclass
class RolloutState:
    """Where the rollout stands.

    Attributes:
        time_step: the latest time step as the environment gave it, ``[B, ...]``.
        inputs: the same after the data transformer.
        state: the policy state that goes with it, before a reset at FIRST.
        transform_state: the state of the data transformer after ``inputs``.
        initial_state: the policy state at the first step of an episode.
        has_state: whether there is any.
    """

    time_step: TimeStep
    inputs: TimeStep
    state: NestedTensor
    transform_state: NestedTensor
    initial_state: NestedTensor
    has_state: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_state = bool(nest.flatten(self.initial_state))


def start(algorithm: Acts, env: Any) -> RolloutState:
    """A cursor at the first time step of ``env``."""
    time_step = _on_device(env.current_time_step(), algorithm.device)
    state = algorithm.get_initial_rollout_state(env.batch_size)
    with context.rollout_context(), torch.no_grad():
        inputs, transform_state = algorithm.transform_timestep(
            time_step, algorithm.get_initial_transform_state(env.batch_size))
    return RolloutState(time_step, inputs, state, transform_state, initial_state=state)


def acting_step(algorithm: Acts) -> Callable[[TimeStep, NestedTensor], AlgStep]:
    """The step that experience is collected with: ``collect_step`` if the rest is recomputed, ``rollout_step``."""
    return algorithm.collect_step if algorithm.capabilities.recomputes_rollout_info else algorithm.rollout_step


def unroll(algorithm: Acts, env: Any, cursor: RolloutState, length: int, *, with_grad: bool, bootstrap: bool,
           transformed: bool, keep_inputs: bool = False) -> tuple[Experience, TimeStep, TimeStep | None]:
    """Collect ``length`` steps of every environment, and move ``cursor`` on.

    Args:
        algorithm: the root algorithm.
        env: batched environment.
        cursor: where to start; updated.
        length: environment steps, at least 1.
        with_grad: keep the graph of ``rollout_step`` for an update through time.
        bootstrap: append one more step, taken at the final time step but not given to the environment, from
            which values can be bootstrapped. The next unroll begins with the same time step.
        transformed: put the transformed time steps into the experience in place of the environment's own.
        keep_inputs: return the transformed time steps besides.

    Returns:
        tuple:
        - experience ``[length, B, ...]``, or ``[length + 1, B, ...]`` with ``bootstrap``; with states only where
          training starts from them (``use_rollout_state``)
        - the environment's own step types, rewards, discounts and infos ``[length, B, ...]``, which metrics are made
          of
        - with ``keep_inputs`` the transformed time steps of the experience, otherwise ``None``
    """
    step, recomputes = acting_step(algorithm), algorithm.capabilities.recomputes_rollout_info
    initial_state, stateful = cursor.initial_state, cursor.has_state
    keeps_state, overwrites_action = algorithm.use_rollout_state, algorithm.overwrite_policy_output
    device, transform, act = algorithm.device, algorithm.transform_timestep, env.step
    is_on_host = device.type == 'cpu'
    experiences, env_steps, inputs = [], [], []
    with context.rollout_context(), torch.set_grad_enabled(with_grad):
        for _ in range(length):
            state = reset_at_first(cursor.state, initial_state, cursor.inputs) if stateful else initial_state
            alg_step = step(cursor.inputs, state)
            action = _detached(alg_step.output) if with_grad else alg_step.output
            time_step = act(action)
            if not is_on_host:
                time_step = to_device(time_step, device)
            if overwrites_action:
                alg_step = alg_step._replace(output=time_step.prev_action)
            experiences.append(_experience(cursor, alg_step, state if keeps_state else (), transformed))
            env_steps.append(cursor.time_step)
            if keep_inputs:
                inputs.append(cursor.inputs)
            cursor.time_step, cursor.state = time_step, alg_step.state
            cursor.inputs, cursor.transform_state = transform(time_step, cursor.transform_state)
        if bootstrap:
            state = reset_at_first(cursor.state, initial_state, cursor.inputs) if stateful else initial_state
            if not recomputes:  # otherwise all that is needed of this step is its inputs
                alg_step = step(cursor.inputs, state)
            experiences.append(_experience(cursor, alg_step, state if keeps_state else (), transformed))
            if keep_inputs:
                inputs.append(cursor.inputs)
    if stateful:
        cursor.state = nest.map_structure(torch.Tensor.detach, cursor.state)
    experience = nest.stack(experiences)
    if experiences[0].time_step is not env_steps[0]:
        own = nest.stack([metric_fields(time_step) for time_step in env_steps])
    else:
        own = metric_fields(experience.time_step, length if bootstrap else None)
    if not keep_inputs:
        return experience, own, None
    return experience, own, experience.time_step if experiences[0].time_step is inputs[0] else nest.stack(inputs)


def map_steps(func: Callable[..., Any], *steps: Steps) -> Steps:
    """Apply ``func`` to the corresponding tensors of ``steps``."""
    mapped: Any = [None if parts[0] is None else nest.map_structure(func, *parts) for parts in zip(*steps)]
    return Steps(*mapped)


def metric_fields(time_step: TimeStep, length: int | None = None) -> TimeStep:
    """What metrics look at: the first ``length`` steps of a sequence, or all there is."""
    kept = TimeStep(step_type=time_step.step_type, reward=time_step.reward, discount=time_step.discount,
                        env_info=time_step.env_info)
    return kept if length is None else nest.map_structure(lambda x: x[:length], kept)


def _experience(cursor: RolloutState, alg_step: AlgStep, state: NestedTensor, transformed: bool) -> Experience:
    return Experience(cursor.inputs if transformed else cursor.time_step, alg_step.output, alg_step.info, state)


def _detached(action: NestedTensor) -> NestedTensor:
    return action.detach() if isinstance(action, torch.Tensor) else nest.map_structure(torch.Tensor.detach, action)


def _on_device(time_step: TimeStep, device: torch.device) -> TimeStep:
    return time_step if device.type == 'cpu' else to_device(time_step, device)
