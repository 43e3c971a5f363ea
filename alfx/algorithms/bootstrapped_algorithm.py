"""How values are trained towards those of later steps: which rows of a sequence go through which networks.

Of sequences ``[T, B, ...]`` no loss reads everything at each step. An algorithm says in four hooks what it computes for
any rows, and here, in one place, is said for which rows it does::

    policy_terms      what the policy does     all steps; from the first that policy_loss leaves out on, no gradient
    policy_loss       the loss of the policy   all steps, or all but the last
    trained_values    Q(s[t], a[t])            all steps but the last, which has no target
    bootstrap_values  V'(s[t]), no gradient    all steps but the first, which no target reads

With T = 2 that is B rows through each network with gradient and B without. What is left out is zero. Read next
:mod:`alfx.algorithms.sac_algorithm`.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.time_slices import steps, pad_end, pad_start
from alfx.data_structures import AlgStep, BatchInfo, TimeStep
from alfx.tensor_specs import NestedTensor
from alfx.utils.target_updater import TargetUpdater


def _all(nested: Any) -> Any:
    return nested


@dataclass
class Rows:
    """N steps as one batch ``[N, ...]``; of a sequence each part is cut out when it is first read.

    Attributes:
        whole: the time step and the info of the rollout, ``[N, ...]``, or ``[T, B, ...]`` to be cut.
        cut: takes these steps of a nest ``[T, B, ...]``.
        of: takes these rows of what :meth:`BootstrappedAlgorithm.policy_terms` yielded for them and perhaps others.
    """

    whole: tuple[TimeStep, Any]
    cut: Callable[[NestedTensor], Any] = _all
    of: Callable[[Any], Any] = _all

    @cached_property
    def observation(self) -> NestedTensor:
        """Nest ``[N, ...]``."""
        return self.cut(self.whole[0].observation)

    @cached_property
    def inputs(self) -> TimeStep:
        """The whole time step ``[N, ...]``."""
        return self.cut(self.whole[0])

    @cached_property
    def action_mask(self) -> Any:
        """bool ``[N, ..., A]``, or ``()``: which actions are valid."""
        return self.cut(self.whole[0].action_mask)

    @cached_property
    def rollout_info(self) -> Any:
        """The info of ``rollout_step`` ``[N, ...]``."""
        return self.cut(self.whole[1])


class Terms(NamedTuple):
    """What the hooks of :class:`BootstrappedAlgorithm` yield, of which :meth:`~BootstrappedAlgorithm.train_info` is
    made."""

    policy: Any
    loss: Any
    values: Any
    target: Any


class BootstrappedAlgorithm(Algorithm):
    """``train_step`` and ``train_sequence`` from hooks that compute parts of the loss for any rows ``[N, ...]``.

    Each hook gets the state of training and returns it with its own part one step further. In sequences at once there
    is none.
    """

    _train_actor_on_last_step = True  # whether policy_loss is computed at the last step of a sequence
    _update_target: TargetUpdater
    _bootstraps_from_first_step = False  # whether bootstrap_values are computed at the first one

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Hand the discounted returns ``[B, T]`` that the replay buffer knows, if it does, to losses that read them."""
        if hasattr(rollout_info, 'discounted_return') and isinstance(batch_info.discounted_return, Tensor):
            rollout_info = rollout_info._replace(discounted_return=batch_info.discounted_return)
        return root_inputs, rollout_info

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """What the policy does.

        Returns:
            what other hooks read at every step, nest ``[N, ...]``; what only :meth:`policy_loss` and
            :meth:`trained_values` read; the state.
        """
        return (), (), state

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """The losses of the policy, nest ``[N, ...]``, and the state.

        ``policy`` and ``details`` are of :meth:`policy_terms` for these rows.
        """
        return (), state

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Values of the actions taken, nest ``[N, ...]`` with gradient, and the state.

        ``details`` are of :meth:`policy_terms`; ``rows.of(details)`` are those of these rows.
        """
        raise NotImplementedError(f'{type(self).__name__}.trained_values')

    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Values that others are trained towards, nest ``[N, ...]`` without gradient, and the state.

        ``policy`` is of :meth:`policy_terms`; ``rows.of(policy)`` is that of these rows.
        """
        raise NotImplementedError(f'{type(self).__name__}.bootstrap_values')

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """The output and the info of ``train_step`` ``[B, ...]`` or ``train_sequence`` ``[T, B, ...]``.

        ``terms`` are what the hooks above yielded, 0 where it was left out.
        """
        raise NotImplementedError(f'{type(self).__name__}.train_info')

    def num_steps_with_gradient(self, length: int) -> tuple[int, int]:
        """At how many steps of a sequence, from the first on, the policy has a gradient, and the values."""
        return length if self._train_actor_on_last_step else length - 1, length - 1

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """One step ``[B, ...]``: all of the hooks for the same rows."""
        rows = Rows((inputs, rollout_info))
        policy, details, state = self.policy_terms(rows, state)
        loss, state = self.policy_loss(rows, policy, details, state)
        values, state = self.trained_values(rows, details, state)
        target, state = self.bootstrap_values(rows, policy, state)
        output, info = self.train_info(inputs, rollout_info, Terms(policy, loss, values, target))
        return AlgStep(output, state, info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """:meth:`train_step` for sequences ``[T, B, ...]``, without what no loss reads; see the module."""
        length, batch = inputs.step_type.shape
        if length < 2 or nest.flatten(self.train_state_spec):
            return super().train_sequence(inputs, state, rollout_info)
        of_policy, of_values = self.num_steps_with_gradient(length)

        def rows(start: int, stop: int) -> Rows:
            cut_policy = partial(nest.map_structure, lambda x: x[start * batch:stop * batch])
            return Rows((inputs, rollout_info), partial(steps, start=start, stop=stop), cut_policy)

        acting = trained = replace(rows(0, of_policy), of=_all)
        if of_values < of_policy:
            trained = rows(0, of_values)
        policy, details, _ = self.policy_terms(acting, state)
        loss, _ = self.policy_loss(acting, policy, details, state)
        values, _ = self.trained_values(trained, details, state)
        first = 0 if self._bootstraps_from_first_step else 1
        later, of_later = rows(first, length), policy
        if of_policy < length:
            rest = replace(rows(of_policy, length), of=_all)
            with torch.no_grad():
                of_rest, _, _ = self.policy_terms(rest, state)
            policy = nest.map_structure(lambda a, b: torch.cat((a, b)), policy, of_rest)
            later, of_later = (rest, of_rest) if of_policy == first else (later, policy)
        target, _ = self.bootstrap_values(later, of_later, state)
        if first:
            target = nest.map_structure(lambda x: pad_start(x, batch), target)

        def by_time(x: Tensor) -> Tensor:
            missing = length * batch - x.shape[0]
            return (pad_end(x, missing) if missing else x).unflatten(0, (length, batch))

        terms = nest.map_structure(by_time, Terms(policy, loss, values, target))
        output, info = self.train_info(inputs, rollout_info, terms)
        return AlgStep(output, (), info)

    def after_update(self, root_inputs: NestedTensor, info: Any) -> None:
        """Move the target networks."""
        self._update_target()
