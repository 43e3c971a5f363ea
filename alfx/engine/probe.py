"""Specs of the results of an algorithm, found by one step on zeros before the first environment step.

The step runs without gradients, and all random number generators and buffers are restored afterwards.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from alfx import context, nest
from alfx.data_structures import AlgStep, Experience, StepType, TimeStep
from alfx.engine.contract import Acts
from alfx.engine.rollout import Steps, acting_step, map_steps, metric_fields, postprocessed
from alfx.tensor_specs import NestedTensorSpec, SpecError, TensorSpec, extract_spec, nearest_zeros

_BATCH = 2


@contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """Context manager that disables gradients and restores buffers and random number generators at its end."""
    buffers = [(part._buffers, name, buffer, buffer.clone()) for part in module.modules()
               for name, buffer in part._buffers.items() if buffer is not None]
    devices = [torch.cuda.current_device()] if context.get_default_device().type == 'cuda' else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            yield
        finally:
            for owner, name, buffer, before in buffers:
                owner[name] = buffer  # it may have been replaced
                buffer.copy_(before)


def _rollout_step(algorithm: Acts, step_spec: TimeStep) -> AlgStep:
    device = algorithm.device
    time_step = nest.map_structure(lambda x: x.to(device), nearest_zeros(step_spec, _BATCH))
    with unchanged(algorithm), context.rollout_context(), context.record_if(False):
        step = acting_step(algorithm)(time_step, algorithm.get_initial_rollout_state(_BATCH))
        if not algorithm.capabilities.postprocesses_unrolls:
            return step
        inputs, info = nest.map_structure(lambda x: torch.stack((x, x)), (time_step, step.info))
        info, _ = postprocessed(algorithm, inputs, info, None)
        return step._replace(info=nest.map_structure(lambda x: x[0], info))


def rollout_info_spec(algorithm: Acts, step_spec: TimeStep) -> NestedTensorSpec:
    """Return the spec of the rollout infos of ``algorithm``.

    Args:
        algorithm: root algorithm.
        step_spec: spec of the transformed time step.

    Raises:
        SpecError: the action or the state returned does not match its spec.
    """
    alg_step = _rollout_step(algorithm, step_spec)
    if not isinstance(alg_step, AlgStep):
        raise SpecError(f'{algorithm.name}.rollout_step: expected an AlgStep, found a {type(alg_step).__name__}; '
                        'return AlgStep(output=action, state=state, info=info)')
    _check(alg_step.output, algorithm.action_spec, f'the action of {algorithm.name}.rollout_step')
    _check(alg_step.state, algorithm.rollout_state_spec, f'the state of {algorithm.name}.rollout_step')
    _require_tensors(alg_step.info, f'the info of {algorithm.name}.rollout_step')
    return extract_spec(alg_step.info)


def steps_spec(algorithm: Acts, raw_step_spec: TimeStep) -> Steps:
    """Return the specs of one step of one environment as :func:`alfx.engine.rollout.rollout` collects it.

    Args:
        algorithm: root algorithm that has been finalized.
        raw_step_spec: spec of the time step as the environment returns it.
    """
    device = algorithm.device
    raw = nest.map_structure(lambda x: x.to(device), nearest_zeros(raw_step_spec, _BATCH))
    raw = raw._replace(step_type=torch.full_like(raw.step_type, StepType.LAST))  # a LAST step needs no valid action
    with unchanged(algorithm), context.rollout_context(), context.record_if(False):
        inputs, _ = algorithm.transform_timestep(raw, algorithm.get_initial_transform_state(_BATCH))
        state = algorithm.get_initial_rollout_state(_BATCH)
        step = acting_step(algorithm)(inputs, state)
    experience = Experience(inputs if algorithm.on_policy else raw, step.output, step.info,
                            state if algorithm.use_rollout_state else ())
    kept = inputs if algorithm.capabilities.needs_unroll_inputs else None
    return map_steps(extract_spec, Steps(experience, metric_fields(raw), kept))


def _require_tensors(nested: Any, where: str) -> None:
    for path, leaf in nest.flatten_with_path(nested):
        if not isinstance(leaf, torch.Tensor):
            raise SpecError(f"{where}{f' at {path}' if path else ''}: expected a tensor [B, ...], found {leaf!r}")


def _check(found: NestedTensorSpec, spec: NestedTensorSpec, where: str) -> None:
    try:
        nest.assert_same_structure(spec, found)
    except ValueError as error:
        raise SpecError(f'{where}: {error}') from None
    _require_tensors(found, where)
    for (path, wanted), tensor in zip(nest.flatten_with_path(spec), nest.flatten(found)):
        if tuple(tensor.shape[1:]) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
            raise SpecError(f"{where}{f' at {path}' if path else ''}: expected [B, ...] of {wanted}, found "
                            f'{TensorSpec(tensor.shape[1:], tensor.dtype)}')


def experience_spec(algorithm: Acts, raw_step_spec: TimeStep) -> NestedTensorSpec:
    """Return the spec of the experience in the replay buffer of ``algorithm``.

    Args:
        algorithm: root algorithm whose ``rollout_info_spec`` is known.
        raw_step_spec: spec of the time step as the environment returns it.
    """
    state = algorithm.rollout_state_spec if algorithm.use_rollout_state else ()
    plain = nest.map_structure(TensorSpec.from_spec, (raw_step_spec, algorithm.action_spec, state))
    return Experience(time_step=plain[0], action=plain[1], rollout_info=algorithm.rollout_info_spec, state=plain[2])
