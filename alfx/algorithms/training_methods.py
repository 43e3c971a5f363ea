"""Training methods of an algorithm that users may call or override; each forwards to its learner or updater.

A trainer drives the learner directly. These methods exist for code that trains an algorithm by itself, and for classes
that override one of them: a :class:`CustomLearner` then calls the overriding method in the iteration.
"""
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from alfx.config import TrainerConfig
from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine.collector import UnrollRequest
from alfx.engine.learner import Learner
from alfx.engine.plan import Batch, Computed
from alfx.engine.updater import Updater
from alfx.tensor_specs import NestedTensor


class TrainingMethods:
    """Training methods that :class:`~alfx.algorithms.algorithm.Algorithm` inherits."""

    if TYPE_CHECKING:
        @property
        def learner(self) -> Learner: ...

        @property
        def updater(self) -> Updater: ...

        @property
        def on_policy(self) -> bool | None: ...

        def observe_sequence_for_replay(self, exp: Experience) -> None: ...

    def train_iter(self) -> int:
        """Run one iteration: unroll, train, ``after_train_iter``.

        Returns:
            Number of samples trained on; a sample counts each time it is used.
        """
        return self.learner.iterate()

    def unroll(self, unroll_length: int) -> Experience | None:
        """Collect ``unroll_length`` steps of each environment, store them for replay and update the metrics.

        If the algorithm is on-policy, or with ``unroll_with_grad``, or if whole unrolls are trained on, one more step
        follows that is not given to the environment; values are bootstrapped from it.

        Returns:
            Experience ``[T, B, ...]`` or, with that extra step, ``[T + 1, B, ...]``. On-policy it holds transformed
            time steps, otherwise those of the environment.
        """
        return self.learner.collector.collect(UnrollRequest(unroll_length, unroll_length))

    def train_from_unroll(self, experience: Experience, train_info: NestedTensor) -> int:
        """Train on an unroll ``[T, B, ...]``: directly if on-policy, else through the replay buffer.

        Returns:
            Number of steps trained on.
        """
        if self.on_policy:
            return Learner.train_from_unroll(self.learner, experience, train_info)
        self.observe_sequence_for_replay(experience._replace(rollout_info=train_info))
        return self.train_from_replay_buffer()

    def train_from_replay_buffer(self, update_global_counter: bool = False) -> int:
        """Train on the replay buffer.

        Args:
            update_global_counter: count each update, if ``TrainerConfig.update_counter_every_mini_batch``.

        Returns:
            Number of steps trained on; a step counts each time it is used. 0 if there is too little data yet.
        """
        return Learner.train_from_replay(self.learner, update_global_counter)

    def update_with_gradient(self, loss_info: LossInfo, valid_masks: torch.Tensor | None = None, weight: float = 1.0,
                             batch_info: BatchInfo | None = None) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]:
        """Make one gradient update.

        Args:
            loss_info: ``loss`` is ``[T, B]``.
            valid_masks: float32 ``[T, B]``: 0 for steps to ignore.
            weight: factor of the loss.
            batch_info: origin of the batch; its importance weights apply.

        Returns:
            The loss info with reduced losses, and ``(name, parameter)`` of everything updated.

        Raises:
            NonFiniteLossError: the loss is not finite; no parameter has been changed.
        """
        return self.updater.apply(loss_info, valid_masks, weight, batch_info)

    def compute_gradients(self, loss_info: LossInfo, valid_masks: torch.Tensor | None = None, weight: float = 1.0,
                          batch_info: BatchInfo | None = None) -> list[torch.Tensor | None]:
        """Compute the gradients of :meth:`update_with_gradient`, which has the same arguments, without an update.

        Returns:
            One gradient for each parameter of ``optimized_parameters()``, in that order, or ``None`` where the loss
            does not depend on it. They are not averaged over processes.

        Raises:
            NonFiniteLossError: the loss is not finite.
        """
        return self.updater.compute_gradients(loss_info, valid_masks, weight, batch_info)

    def apply_gradient_list(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Average gradients over all processes and let the optimizers step.

        Args:
            gradients: result of :meth:`compute_gradients`, of this algorithm or of a copy.

        Raises:
            ValueError: their number or shapes differ from those of the parameters.
        """
        self.updater.apply_gradient_list(gradients)

    def activate_ddp(self, rank: int) -> None:
        """Train together with other processes from now on; called on the root algorithm, after ``finalize``.

        Parameters and buffers take the values of rank 0. The gradients of every update are averaged over all ranks.
        See :mod:`alfx.engine.remote.data_parallel`.

        Args:
            rank: rank of this process.

        Raises:
            RuntimeError: this process has not joined any others, or has another rank.
        """
        parts = [part.updater for part in cast(nn.Module, self).modules() if isinstance(part, TrainingMethods)]
        self.updater.join_ranks(rank, parts)


_LOOPS = ('train_iter', 'unroll', 'train_from_unroll', 'train_from_replay_buffer', 'update_with_gradient')


def overridden_loops(algorithm: TrainingMethods) -> dict[str, Callable[..., Any]]:
    """Return the training methods that the class of ``algorithm`` overrides, by name."""
    return {name: getattr(algorithm, name) for name in _LOOPS
            if getattr(type(algorithm), name) is not getattr(TrainingMethods, name)}


def make_learner(algorithm: Any, updater: Updater, config: TrainerConfig | None) -> Learner:
    """Return the learner of ``algorithm``, which calls the training methods that its class overrides."""
    if overridden_loops(algorithm):
        return CustomLearner(algorithm, updater, config)
    return Learner(algorithm, updater, config)


class CustomLearner(Learner):
    """Learner of an algorithm whose class overrides training methods.

    Args:
        algorithm: the algorithm whose overriding methods are called.
        updater: makes its gradient steps.
        settings: configuration of the run.
    """

    def __init__(self, algorithm: Any, updater: Updater, settings: TrainerConfig | None):
        super().__init__(algorithm, updater, settings)
        self._overridden = overridden_loops(algorithm)

    def run_iteration(self) -> int:
        """Run ``train_iter`` of the algorithm."""
        return self._overridden.get('train_iter', self.iterate)()

    def collect(self, request: UnrollRequest) -> Experience | None:
        """Collect by ``unroll`` of the algorithm."""
        return self._overridden['unroll'](request.length) if 'unroll' in self._overridden else super().collect(request)

    def train_from_unroll(self, experience: Experience, rollout_info: NestedTensor | None) -> int:
        """Train by ``train_from_unroll`` of the algorithm."""
        return self._overridden.get('train_from_unroll', super().train_from_unroll)(experience, rollout_info)

    def train_from_replay(self, counts_updates: bool = False) -> int:
        """Train by ``train_from_replay_buffer`` of the algorithm."""
        return self._overridden.get('train_from_replay_buffer', super().train_from_replay)(counts_updates)

    def update(self, losses: Any, batch: Batch, is_rare: bool = False, eager: bool = False) -> Computed:
        """Update by ``update_with_gradient`` of the algorithm."""
        if 'update_with_gradient' not in self._overridden:
            return super().update(losses, batch, is_rare, eager)
        loss_info, masks, info = losses(batch.experience)
        loss_info, _ = self._overridden['update_with_gradient'](loss_info, masks, 1.0,
                                                                BatchInfo(importance_weights=batch.weights))
        return Computed(loss_info, info)
