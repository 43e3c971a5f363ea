"""Training of values towards bootstrapped targets: selects which rows of a sequence go through which networks.

No loss reads every value at every step of a sequence ``[T, B, ...]``. An algorithm implements four hooks that compute
terms for any rows; this module decides for which rows each hook is called::

    policy_terms      terms of the policy      all steps; no gradient at those that policy_loss leaves out
    policy_loss       the loss of the policy   all steps, or all but the last
    trained_values    Q(s[t], a[t])            all steps but the last, which has no target
    bootstrap_values  V'(s[t]), no gradient    all steps but the first, which no target reads

With T = 2 each network computes B rows with gradient and B without. Terms that are left out are zero. Updates that do
not train the policy (see ``policy_update_period``) compute its terms only for the steps that targets bootstrap from.
With :class:`~alfx.norm_layers.BatchNorm` in the networks, LAST steps do not count in the statistics of a batch, and the
policy of the steps to bootstrap from uses running statistics. Read next :mod:`alfx.algorithms.sac_algorithm`.
"""
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import context, nest, norm_layers
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.time_slices import steps, pad_end, pad_start
from alfx.data_structures import AlgStep, BatchInfo, StepType, TimeStep, valid_masks
from alfx.tensor_specs import NestedTensor
from alfx.utils.saved_count import SavedCount
from alfx.utils.target_updater import TargetUpdater


def _unchanged(nested: Any) -> Any:
    return nested


@dataclass
class Rows:
    """N steps as one batch ``[N, ...]``; each field of a sequence is sliced when it is first read.

    Attributes:
        source: the time step and the info of the rollout, ``[N, ...]``, or ``[T, B, ...]`` to be sliced.
        select_steps: selects these steps of a nest ``[T, B, ...]``.
        of: selects these rows of an output of :meth:`BootstrappedAlgorithm.policy_terms`, which may have more.
    """

    source: tuple[TimeStep, Any]
    select_steps: Callable[[NestedTensor], Any] = _unchanged
    of: Callable[[Any], Any] = _unchanged

    @cached_property
    def observation(self) -> NestedTensor:
        """Observation, nest ``[N, ...]``."""
        return self.select_steps(self.source[0].observation)

    @cached_property
    def inputs(self) -> TimeStep:
        """The whole time step ``[N, ...]``."""
        return self.select_steps(self.source[0])

    @cached_property
    def action_mask(self) -> Any:
        """Mask of valid actions, bool ``[N, ..., A]``, or ``()``."""
        return self.select_steps(self.source[0].action_mask)

    @cached_property
    def rollout_info(self) -> Any:
        """Info of ``rollout_step`` ``[N, ...]``."""
        return self.select_steps(self.source[1])


class Terms(NamedTuple):
    """Outputs of the hooks of :class:`BootstrappedAlgorithm`, from which :meth:`~BootstrappedAlgorithm.train_info`
    builds the training info."""

    policy: Any
    loss: Any
    values: Any
    target: Any


def _set_missing_losses(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
    state.setdefault(f'{prefix}_latest_policy_losses', module._latest_policy_losses)


class BootstrappedAlgorithm(Algorithm):
    """Base class with ``train_step`` and ``train_sequence`` built from hooks that compute parts of the loss for rows
    ``[N, ...]``.

    Each hook gets the training state and returns it with its own part advanced by one step. When whole sequences are
    computed at once, there is no state.
    """

    _not_trained: tuple[str, ...] = ('_target_critic_networks', )
    _train_actor_on_last_step = True  # compute policy_loss at the last step of a sequence
    _critic_networks: Any
    _update_target: TargetUpdater | None
    _joins_batches = False  # compute values and targets by one call, joint_values
    _policy_update_period = 1
    _updates: SavedCount | None = None  # counts updates if the policy is not trained in each of them
    _normalizes_by_batch = False  # a network contains BatchNorm
    _samples_later_apart = False  # the policy contains BatchNorm
    _latest_policy_losses: Tensor  # logged for updates that do not train the policy; 0 before the first one
    _bootstraps_from_first_step = False  # compute bootstrap_values at the first step

    @property
    def actor(self) -> Any:
        """Policy network, or ``None``."""
        return getattr(self, '_actor_network', None)

    @property
    def critics(self) -> Any:
        """Critic networks, or ``None``."""
        return getattr(self, '_critic_networks', None)

    @property
    def target_critics(self) -> Any:
        """Target critic networks, or ``None``."""
        return getattr(self, '_target_critic_networks', None)

    def _set_target_critics(self, tau: float, period: int) -> None:
        """Create target critics as a copy of the critics, updated with rate ``tau`` in every ``period``-th call."""
        critics = self._critic_networks
        self._target_critic_networks = critics.copy(name='target_' + critics.name)
        self._update_target = TargetUpdater(critics, self._target_critic_networks, tau=tau, period=period)

    @property
    def updates_are_traceable(self) -> bool:
        """Return whether the steps of a sequence are independent, without recurrent state."""
        return not nest.flatten(self.train_state_spec)

    def _set_policy_update_period(self, period: int, num_losses: int) -> None:
        """Train the policy only in every ``period``-th update; ``num_losses`` of its losses are logged."""
        self._policy_update_period = period
        self._updates = SavedCount(self, '_num_updates')
        self.register_buffer('_latest_policy_losses', torch.zeros(num_losses))
        self.optional_keys = frozenset({'_latest_policy_losses'})  # checkpoints before alfx 0.9.2 lack it
        self.register_load_state_dict_pre_hook(_set_missing_losses)

    def _set_norms(self, policy: Any, critics: Any) -> None:
        """Find out which networks contain :class:`~alfx.norm_layers.BatchNorm`."""
        self._samples_later_apart = norm_layers.has_batch_norm(policy)
        self._normalizes_by_batch = self._samples_later_apart or norm_layers.has_batch_norm(critics)

    @property
    def graph_key(self) -> Hashable:
        """Key of the traced graph: whether the next update trains the policy."""
        return self._is_actor_trained()

    def _is_actor_trained(self) -> bool:
        """Return whether the next update trains the policy."""
        return self._updates is None or (self._updates.value + 1) % self._policy_update_period == 0

    def _logged_policy_losses(self, losses: list[Any], step_type: Tensor) -> list[Any]:
        """Return losses of the policy ``[T, B]`` for logging: their latest means if this update does not train it.

        The first one is ``()`` in these updates.
        """
        if self._updates is None:
            return losses
        if isinstance(losses[0], Tensor):
            masks = valid_masks(step_type)
            means = [(x.detach() * masks).sum() for x in losses]
            self._latest_policy_losses.copy_(torch.stack(means) / masks.sum().clamp(min=1))
            return losses
        return list(self._latest_policy_losses.clone()) if context.should_record_summaries() else losses

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Pass on the discounted returns ``[B, T]`` of the replay buffer, if it has any, to losses that read them."""
        if hasattr(rollout_info, 'discounted_return') and isinstance(batch_info.discounted_return, Tensor):
            rollout_info = rollout_info._replace(discounted_return=batch_info.discounted_return)
        return root_inputs, rollout_info

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Compute the terms of the policy.

        Returns:
            terms that other hooks read at every step, nest ``[N, ...]``; terms that only :meth:`policy_loss` and
            :meth:`trained_values` read; the state.
        """
        return (), (), state

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the losses of the policy, nest ``[N, ...]``; return them and the state.

        ``policy`` and ``details`` are the outputs of :meth:`policy_terms` for these rows.
        """
        return (), state

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute values of the actions taken, nest ``[N, ...]`` with gradient; return them and the state.

        ``details`` is the second output of :meth:`policy_terms`; ``rows.of(details)`` selects these rows of it.
        """
        raise NotImplementedError(f'{type(self).__name__}.trained_values')

    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Compute the values that targets bootstrap from, nest ``[N, ...]`` without gradient; return them and the
        state.

        ``policy`` is the first output of :meth:`policy_terms`; ``rows.of(policy)`` selects these rows of it.
        """
        raise NotImplementedError(f'{type(self).__name__}.bootstrap_values')

    def joint_values(self, trained: Rows, later: Rows, policy: Any) -> tuple[Any, Any]:
        """Compute :meth:`trained_values` of ``trained`` and :meth:`bootstrap_values` of ``later`` together."""
        raise NotImplementedError(f'{type(self).__name__}.joint_values')

    def _joint_critics(self, trained: NestedTensor, later: NestedTensor) -> tuple[Tensor, Tensor]:
        """Call the critics, and the target critics if there are any, once for two sets of rows.

        Args:
            trained: pair of nests (observation, action) of ``[N, ...]``.
            later: the same, of the steps to bootstrap from.

        Returns:
            values of ``trained`` by the critics, and of ``later`` by the target critics, without gradient.
        """
        both = nest.map_structure(lambda a, b: torch.cat((a, b.detach())), trained, later)
        with norm_layers.repeated_rows(2):
            values, bootstrapped = self.critics(both)[0].chunk(2)
            if self.target_critics is not None:
                with torch.no_grad():
                    bootstrapped = self.target_critics(both)[0].chunk(2)[1]
        return values, bootstrapped.detach()

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the output and the info of ``train_step`` ``[B, ...]`` or ``train_sequence`` ``[T, B, ...]``.

        ``terms`` are the outputs of the hooks above, 0 for rows that were left out.
        """
        raise NotImplementedError(f'{type(self).__name__}.train_info')

    def num_steps_with_gradient(self, length: int) -> tuple[int, int]:
        """Return the number of leading steps of a sequence at which the policy has a gradient, and the same for the
        values."""
        return length if self._train_actor_on_last_step else length - 1, length - 1

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute one step ``[B, ...]``: all hooks for the same rows."""
        rows = Rows((inputs, rollout_info))
        policy, details, state = self.policy_terms(rows, state)
        loss, state = self.policy_loss(rows, policy, details, state)
        values, state = self.trained_values(rows, details, state)
        target, state = self.bootstrap_values(rows, policy, state)
        output, info = self.train_info(inputs, rollout_info, Terms(policy, loss, values, target))
        return AlgStep(output, state, info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute :meth:`train_step` for sequences ``[T, B, ...]``, without values that no loss reads; see the
        module."""
        length, batch = inputs.step_type.shape
        if length < 2 or nest.flatten(self.train_state_spec):
            return super().train_sequence(inputs, state, rollout_info)
        of_policy, of_values = self.num_steps_with_gradient(length)

        def rows(start: int, stop: int) -> Rows:
            cut_policy = partial(nest.map_structure, lambda x: x[start * batch:stop * batch])
            return Rows((inputs, rollout_info), partial(steps, start=start, stop=stop), cut_policy)

        acting = trained = replace(rows(0, of_policy), of=_unchanged)
        if of_values != of_policy:
            trained = rows(0, of_values)
        policy = details = loss = ()
        if of_policy:
            with self._counted(inputs.step_type[:of_policy]):
                policy, details, _ = self.policy_terms(acting, state)
                loss, _ = self.policy_loss(acting, policy, details, state)
        if not self._joins_batches:
            with self._counted(inputs.step_type[:of_values]):
                values, _ = self.trained_values(trained, details, state)
        first = 0 if self._bootstraps_from_first_step else 1
        later, of_later = rows(first, length), policy
        if self._samples_later_apart or not of_policy:
            later = replace(later, of=_unchanged)
            with torch.no_grad(), norm_layers.running_statistics():
                of_later, _, _ = self.policy_terms(later, state)
            before = first * batch  # without policy terms of these steps, any others will do: no loss reads them
            policy = nest.map_structure(lambda a, b: torch.cat((a[:before], b)), policy if of_policy else of_later,
                                        of_later)
        elif of_policy < length:
            rest = replace(rows(of_policy, length), of=_unchanged)
            with torch.no_grad():
                of_rest, _, _ = self.policy_terms(rest, state)
            policy = nest.map_structure(lambda a, b: torch.cat((a, b)), policy, of_rest)
            later, of_later = (rest, of_rest) if of_policy == first else (later, policy)
        with self._counted(inputs.step_type[:length - first]):  # transitions from LAST steps do not count
            if self._joins_batches:
                values, target = self.joint_values(trained, later, of_later)
            else:
                target, _ = self.bootstrap_values(later, of_later, state)
        if first:
            target = nest.map_structure(lambda x: pad_start(x, batch), target)

        def by_time(x: Tensor) -> Tensor:
            missing = length * batch - x.shape[0]
            return (pad_end(x, missing) if missing else x).unflatten(0, (length, batch))

        terms = nest.map_structure(by_time, Terms(policy, loss, values, target))
        output, info = self.train_info(inputs, rollout_info, terms)
        return AlgStep(output, (), info)

    def _counted(self, step_type: Tensor) -> AbstractContextManager[None]:
        """Context manager in which LAST steps of ``[T, B]`` do not count in the statistics of batch norm."""
        if not self._normalizes_by_batch:
            return nullcontext()
        return norm_layers.counted((step_type != StepType.LAST).flatten().to(torch.float32))

    def after_update(self, root_inputs: NestedTensor, info: Any) -> None:
        """Update the target networks, and count the update."""
        if self._update_target is not None:
            self._update_target()
        if self._updates is not None:
            self._updates.add()
