"""Wrapper that checks every time step against the specs and the order of steps."""
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.wrapper_base import _MODULE, AlfEnvironmentBaseWrapper
from alfx.gin_utils import configurable
from alfx.tensor_specs import (BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec,
                               check_consistent)


@configurable(module=_MODULE)
class CheckedEnvironment(AlfEnvironmentBaseWrapper):
    """Checks actions and time steps; for tests and for environments under development.

    It checks that

    - actions and time steps have the structure, shapes, dtypes and bounds of their specs; only floats of an action may
      be out of bounds, since environments clip them;
    - all numbers are finite, and the discount is 0 at LAST only (``AtariTerminalOnLifeLossWrapper`` goes outside);
    - FIRST, MID, ..., LAST follow each other;
    - FIRST has reward 0, discount 1 and the ``prev_action`` nearest to zeros; other steps have the given action;
    - no step writes to the tensors of the previous step.

    Args:
        env: the environment.

    Raises:
        SpecError: in ``reset`` and ``step``; the message names the tensor and the problem.
    """

    def __init__(self, env: AlfEnvironment):
        super().__init__(env)
        # policies may choose floats outside of the bounds: environments clip them
        self._actions = nest.map_structure(
            lambda spec: TensorSpec(spec.shape, spec.dtype) if spec.is_continuous else spec, env.action_spec())
        self._last: TimeStep | None = None
        self._copy: TimeStep | None = None

    def _reset(self) -> TimeStep:
        time_step = self._env.reset()
        self._check(time_step)
        _require(bool(time_step.is_first().all()), 'step_type', 'FIRST after reset()', time_step.step_type)
        return self._keep(time_step)

    def _step(self, action: NestedTensor) -> TimeStep:
        check_values(action, self._actions, 'action')
        given = nest.map_structure(torch.clone, action)
        time_step = self._env.step(action)
        nest.map_structure(lambda a, b: _require(torch.equal(a, b), 'action', 'an action that is not written to', a),
                           action, given)
        self._check(time_step)
        self._check_order(time_step)
        moved = ~time_step.is_first()
        nest.map_structure(
            lambda prev, a: _require(torch.equal(prev[moved], a[moved].to(prev.dtype)), 'prev_action',
                                     'the action that was given', prev), time_step.prev_action, given)
        return self._keep(time_step)

    def request_reset(self, mask: torch.Tensor) -> None:
        super().request_reset(mask)
        if self._last is not None and self._copy is not None:  # the caller marks the current step LAST
            step_type = self._last.step_type.masked_fill(mask, int(StepType.LAST))
            self._last, self._copy = (step._replace(step_type=step_type) for step in (self._last, self._copy))

    def _keep(self, time_step: TimeStep) -> TimeStep:
        self._last, self._copy = time_step, nest.map_structure(torch.clone, time_step)
        return time_step

    def _check(self, time_step: TimeStep) -> None:
        check_values(time_step, self._env.time_step_spec()._replace(prev_action=self._actions), 'time step')
        size = nest.get_nest_batch_size(time_step)
        _require(size == self.batch_size, 'time step', f'a batch of {self.batch_size}', size)
        first = time_step.is_first()
        _require(not bool(time_step.reward[first].any()), 'reward', '0 at FIRST', time_step.reward)
        _require(bool((time_step.discount[first] == 1).all()), 'discount', '1 at FIRST', time_step.discount)
        for leaf, spec in zip(nest.flatten(time_step.prev_action), nest.flatten(self._env.action_spec())):
            _require(bool((leaf[first] == spec.nearest_zeros()).all()), 'prev_action',
                     'the action nearest to zeros at FIRST', leaf)
        middle = time_step.is_mid() & (time_step.discount == 0)
        _require(not bool(middle.any()), 'discount', '0 only at LAST', time_step.discount)
        if self._last is not None:
            for (path, now), then in zip(nest.flatten_with_path(self._last), nest.flatten(self._copy)):
                _require(torch.equal(now, then), path, 'a step that does not write to tensors of the previous step',
                         now)

    def _check_order(self, time_step: TimeStep) -> None:
        assert self._last is not None
        ended = self._last.is_last()
        _require(torch.equal(time_step.is_first(), ended), 'step_type', 'FIRST exactly where the previous step was '
                 f'LAST ({self._last.step_type.tolist()})', time_step.step_type)
        _require(torch.equal(time_step.env_id, self._last.env_id), 'env_id', 'the same as before', time_step.env_id)

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self._last = self._copy = self._current


def _require(condition: bool, where: str, expected: str, found: Any) -> None:
    if not condition:
        found = found.tolist() if isinstance(found, torch.Tensor) and found.numel() < 50 else found
        raise SpecError(f'{where}: expected {expected}, found {found}')


def check_values(nested: NestedTensor, spec: NestedTensorSpec, where: str) -> None:
    """Check the structure, shapes, dtypes, bounds and finiteness of a nest."""
    check_consistent(nested, spec, where=where)
    for (path, leaf_spec), tensor in zip(nest.flatten_with_path(spec), nest.flatten(nested)):
        place = f'{where}.{path}' if path else where
        if tensor.dtype.is_floating_point:
            _require(bool(torch.isfinite(tensor).all()), place, 'finite numbers', tensor)
        if isinstance(leaf_spec, BoundedTensorSpec) and tensor.numel():
            low, high = (torch.from_numpy(np.array(bound)) for bound in (leaf_spec.minimum, leaf_spec.maximum))
            _require(bool(((tensor >= low) & (tensor <= high)).all()), place, f'values within {leaf_spec}', tensor)
    if isinstance(nested, TimeStep):
        step_type = nested.step_type
        _require(bool(((step_type >= StepType.FIRST) & (step_type <= StepType.LAST)).all()), f'{where}.step_type',
                 '0, 1 or 2', step_type)
