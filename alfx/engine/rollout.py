"""The inner loop of collecting experience: ``rollout_step``, ``env.step``, repeat.

The loop in :func:`rollout` runs once per environment step, so nothing in it may cost more than a few microseconds. Read
next: :mod:`alfx.engine.collector`, which decides when to call :func:`rollout`.
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
        experience: ``[T, B, ...]``. On-policy it holds transformed time steps, otherwise those of the environment.
            ``state`` is set only if training starts from it (``use_rollout_state``).
        env_steps: step types, rewards, discounts and infos ``[T, B, ...]`` of the environment, for metrics.
        inputs: transformed time steps ``[T, B, ...]`` if ``Capabilities.needs_unroll_inputs``, otherwise ``None``.
    """

    experience: Experience
    env_steps: TimeStep
    inputs: TimeStep | None


@dataclass
class RolloutState:
    """The position of a rollout between two unrolls.

    Attributes:
        time_step: latest time step ``[B, ...]`` of the environment.
        inputs: the same time step after the data transformer.
        state: policy state that belongs to it, before a reset at FIRST.
        transform_state: state of the data transformer after ``inputs``.
        initial_state: policy state at the first step of an episode.
        has_state: whether the policy is recurrent.
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
    """Return the state of a rollout that begins at the current time step of ``env``."""
    time_step = to_device(env.current_time_step(), algorithm.device)
    state = algorithm.get_initial_rollout_state(env.batch_size)
    with context.rollout_context(), torch.no_grad():
        inputs, transform_state = algorithm.transform_timestep(
            time_step, algorithm.get_initial_transform_state(env.batch_size))
    return RolloutState(time_step, inputs, state, transform_state, initial_state=state)


def acting_step(algorithm: Acts) -> Callable[[TimeStep, NestedTensor], AlgStep]:
    """Return the method that collects experience: ``collect_step`` if infos are recomputed, else ``rollout_step``."""
    return algorithm.collect_step if algorithm.capabilities.recomputes_rollout_info else algorithm.rollout_step


def rollout(algorithm: Acts, env: Any, position: RolloutState, length: int, *, with_grad: bool, bootstrap: bool,
            transformed: bool, keep_inputs: bool = False) -> Steps:
    """Collect ``length`` steps of every environment and advance ``position``.

    Args:
        algorithm: root algorithm.
        env: batched environment.
        position: where to start; updated in place.
        length: environment steps, at least 1.
        with_grad: keep the autograd graph of ``rollout_step``, for backpropagation through time.
        bootstrap: append one more step, taken at the final time step but not given to the environment, so that values
            can be bootstrapped from it. The next unroll begins with the same time step.
        transformed: store transformed time steps in the experience instead of the environment's own.
        keep_inputs: return the transformed time steps as well.

    Returns:
        The steps. ``experience`` and ``inputs`` are ``[length, B, ...]``, or ``[length + 1, B, ...]`` with
        ``bootstrap``; ``env_steps`` is ``[length, B, ...]``.
    """
    step, recomputes = acting_step(algorithm), algorithm.capabilities.recomputes_rollout_info
    initial_state, stateful = position.initial_state, position.has_state
    keeps_state, overwrites_action = algorithm.use_rollout_state, algorithm.overwrite_policy_output
    device, transform, act = algorithm.device, algorithm.transform_timestep, env.step
    is_on_host = device.type == 'cpu'
    experiences, env_steps, inputs = [], [], []
    with context.rollout_context(), torch.set_grad_enabled(with_grad):
        for _ in range(length):
            state = reset_at_first(position.state, initial_state, position.inputs) if stateful else initial_state
            alg_step = step(position.inputs, state)
            action = _detached(alg_step.output) if with_grad else alg_step.output
            time_step = act(action)
            if not is_on_host:
                time_step = to_device(time_step, device)
            if overwrites_action:
                executed = time_step.prev_action
                alg_step = alg_step._replace(output=executed, info=_with_action(alg_step.info, executed))
            experiences.append(_experience(position, alg_step, state if keeps_state else (), transformed))
            env_steps.append(position.time_step)
            if keep_inputs:
                inputs.append(position.inputs)
            position.time_step, position.state = time_step, alg_step.state
            position.inputs, position.transform_state = transform(time_step, position.transform_state)
        if bootstrap:
            state = reset_at_first(position.state, initial_state, position.inputs) if stateful else initial_state
            if not recomputes:  # otherwise only the inputs of this step are needed
                with context.frozen_statistics():  # the next unroll begins with this time step and counts it
                    alg_step = step(position.inputs, state)
            experiences.append(_experience(position, alg_step, state if keeps_state else (), transformed))
            if keep_inputs:
                inputs.append(position.inputs)
    if stateful:
        position.state = nest.map_structure(torch.Tensor.detach, position.state)
    experience = nest.stack(experiences)
    if experiences[0].time_step is not env_steps[0]:
        own = nest.stack([metric_fields(time_step) for time_step in env_steps])
    else:
        own = metric_fields(experience.time_step, length if bootstrap else None)
    if not keep_inputs:
        return Steps(experience, own, None)
    same = experiences[0].time_step is inputs[0]
    return Steps(experience, own, experience.time_step if same else nest.stack(inputs))


def postprocessed(algorithm: Acts, inputs: TimeStep, rollout_info: NestedTensor,
                  unroll_state: NestedTensor | None) -> tuple[NestedTensor, NestedTensor | None]:
    """Call ``postprocess_unroll``, or ``postprocess_steps`` if the algorithm has a state between unrolls.

    Returns:
        The infos to store, and the next state; ``None`` for an algorithm without this state.
    """
    if not nest.flatten(algorithm.unroll_state_spec):
        return algorithm.postprocess_unroll(inputs, rollout_info), None
    return algorithm.postprocess_steps(inputs, rollout_info, unroll_state)


def map_steps(func: Callable[..., Any], *steps: Steps) -> Steps:
    """Apply ``func`` to the corresponding tensors of ``steps``."""
    mapped: Any = [None if parts[0] is None else nest.map_structure(func, *parts) for parts in zip(*steps)]
    return Steps(*mapped)


def metric_fields(time_step: TimeStep, length: int | None = None) -> TimeStep:
    """Return the fields that metrics read, of the first ``length`` steps or of all."""
    kept = TimeStep(step_type=time_step.step_type, reward=time_step.reward, discount=time_step.discount,
                    env_info=time_step.env_info)
    return kept if length is None else nest.map_structure(lambda x: x[:length], kept)


def _experience(position: RolloutState, alg_step: AlgStep, state: NestedTensor, transformed: bool) -> Experience:
    return Experience(position.inputs if transformed else position.time_step, alg_step.output, alg_step.info, state)


def _with_action(info: Any, action: NestedTensor) -> Any:
    """Return a rollout info with another action; in the info of an agent, change the info of the policy algorithm."""
    for part in ('rl', 'ac'):
        if hasattr(info, part):
            return info._replace(**{part: _with_action(getattr(info, part), action)})
    return info._replace(action=action) if hasattr(info, 'action') else info


def _detached(action: NestedTensor) -> NestedTensor:
    return action.detach() if isinstance(action, torch.Tensor) else nest.map_structure(torch.Tensor.detach, action)
