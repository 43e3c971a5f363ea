"""Gradient steps: losses to gradients, gradients over all processes, optimizer steps.

An :class:`Updater` belongs to one algorithm or to one part of an algorithm. It knows nothing about experience or
schedules. How gradients are computed is in :mod:`alfx.engine.plan`.
"""
import logging
import math
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import nn

from alfx import context
from alfx.data_structures import BatchInfo, LossInfo
from alfx.engine import loss_reduction
from alfx.engine.contract import Updates
from alfx.engine.gradient_noise import GradientNoiseScale
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.mixed_precision import LossScaler, MixedPrecision
from alfx.engine.plan import Batch, Computed, Eager, Objective, make_plan
from alfx.engine.plan.eager import Losses
from alfx.engine.remote.data_parallel import GradientAverager, Ranks, average_gradients
from alfx.gin_utils import ConfError, problem_at
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor

logger = logging.getLogger(__name__)


class Updater:
    """Gradient steps for the parameters that the optimizers of an algorithm own.

    Args:
        algorithm: owner of the parameters and optimizers.
        compiles: compile updates that are traceable (``TrainerConfig.compile``).

    Attributes:
        compiles: see above.
        ranks: processes that train together; ``None`` in a single process.
        precision: 16-bit computation of the networks; ``None`` if they compute in float32.
        scaler: loss scaler if the networks compute in float16, else ``None``.
        noise_scale: estimate of the gradient noise scale; ``None`` if it is not enabled.
    """

    def __init__(self, algorithm: Updates, compiles: bool = False):
        self._algorithm, self.compiles = algorithm, compiles
        self.ranks: Ranks | None = None
        self.precision: MixedPrecision | None = None
        self.scaler: LossScaler | None = None
        self.noise_scale: GradientNoiseScale | None = None
        self._averager: GradientAverager | None = None
        self._plans: dict[Losses, Eager] = {}
        self._parts_with_graph_keys: list[Any] | None = None
        self._projected_layers: list[Any] | None = None

    # Update ----------------------------------------------------------------------------------------------------

    def step(self, losses: Losses, batch: Batch, is_rare: bool = False, eager: bool = False) -> Computed:
        """Compute the losses of a batch and their gradients, and let all optimizers step.

        Args:
            losses: function from ``batch.experience`` to ``(losses, masks, infos)``, the same object at each call.
            batch: the batch.
            is_rare: whether there is at most one such update per iteration.
            eager: run in eager mode, because the batch already has an autograd graph.

        Raises:
            NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
        """
        return self.optimize(self.plan(losses, is_rare, eager), batch)

    def train_on_batch(self, losses: Losses, batch: NestedTensor) -> LossInfo:
        """Make one update from a batch for which ``losses`` needs no experience, and call ``after_update``."""
        computed = self.step(losses, Batch(batch))
        self._algorithm.after_update((), computed.train_info)
        return computed.loss_info

    def apply(self, loss_info: LossInfo, masks: torch.Tensor | None = None, weight: float = 1.0,
              batch_info: BatchInfo | None = None) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]:
        """Make an update from losses that have already been computed, see ``Algorithm.update_with_gradient``."""
        computed = self.step(_given_losses, self._given_batch(loss_info, masks, weight, batch_info), eager=True)
        return computed.loss_info._replace(scalar_loss=loss_info.scalar_loss), self._algorithm.optimized_parameters()[1]

    def compute_gradients(self, loss_info: LossInfo, masks: torch.Tensor | None = None, weight: float = 1.0,
                          batch_info: BatchInfo | None = None) -> list[torch.Tensor | None]:
        """Compute gradients without an update, see ``Algorithm.compute_gradients``."""
        plan = self.plan(_given_losses, eager=True)
        self._finite_gradients(plan, self._given_batch(loss_info, masks, weight, batch_info))
        return [None if p.grad is None else p.grad.clone() for _, p in self._algorithm.optimized_parameters()[1]]

    def apply_gradient_list(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let the optimizers step with given gradients, see ``Algorithm.apply_gradient_list``."""
        optimizers, params = self._algorithm.optimized_parameters()
        shapes = [None if gradient is None else gradient.shape for gradient in gradients]
        if len(shapes) != len(params) or any(shape not in (None, p.shape) for shape, (_, p) in zip(shapes, params)):
            raise ValueError(f'apply_gradient_list of {self._algorithm.name}: expected gradients of the shapes '
                             f'{[tuple(p.shape) for _, p in params]}, found {[s and tuple(s) for s in shapes]}')
        for gradient, (_, param) in zip(gradients, params):
            param.grad = None if gradient is None else gradient.clone()
        self._step_optimizers(optimizers)

    def optimize(self, plan: Eager, batch: Batch, optimizers: Sequence[Any] | None = None) -> Computed:
        """Compute gradients by a plan, average them over all processes, and let optimizers step.

        Args:
            plan: computes the gradients.
            batch: its input.
            optimizers: optimizers that step; ``None`` for all of the algorithm.

        Raises:
            NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
        """
        computed = self._finite_gradients(plan, batch)
        self._step_optimizers(self._algorithm.optimized_parameters()[0] if optimizers is None else optimizers)
        return computed

    def _finite_gradients(self, plan: Eager, batch: Batch) -> Computed:
        computed = plan.gradients(batch)
        if not math.isfinite(computed.loss_info.loss.item()):
            if self.averager is not None:
                self.averager.report_bad_loss()
            parts = plan.explain(batch) if computed.parts is None else computed.parts
            raise NonFiniteLossError(loss_reduction.describe_non_finite(self._algorithm.name, parts))
        return computed

    def _step_optimizers(self, optimizers: Sequence[Any]) -> None:
        if self.averager is not None:
            self.averager.average()
        if self.scaler is not None:
            self.scaler.step(optimizers)
        else:
            if context.should_record_summaries():
                updated = {p for optimizer in optimizers for group in optimizer.param_groups for p in group['params']}
                summary_utils.summarize_gradient_norm(p for p in self._algorithm.parameters() if p in updated)
            for optimizer in optimizers:
                optimizer.step()
        self._project_parameters()

    @torch.no_grad()
    def _project_parameters(self) -> None:
        """Let layers with constrained parameters restore the constraints, if the update had gradients for them."""
        if self._projected_layers is None:
            own = {p for _, p in self._algorithm.optimized_parameters()[1]}
            self._projected_layers = [layer for layer in cast(nn.Module, self._algorithm).modules() if getattr(
                layer, 'projects_parameters', False) and own.intersection(layer.parameters(recurse=False))]
        for layer in self._projected_layers:
            if any(p.grad is not None for p in layer.parameters(recurse=False)):
                layer.project_parameters()

    # Plans -----------------------------------------------------------------------------------------------------

    def plan(self, losses: Losses, is_rare: bool = False, eager: bool = False) -> Eager:
        """Return the plan that computes the gradients of ``losses``, created at the first call; see :meth:`step`."""
        if losses not in self._plans:
            is_traceable = self._algorithm.capabilities.traceable_update and not eager
            if is_traceable and self.scaler is not None:
                logger.info('updates of %s run in eager mode: with float16, gradients decide which updates are skipped',
                            self._algorithm.name)
            self._plans[losses] = make_plan(self.objective(losses), is_traceable, self.compiles, is_rare)
        return self._plans[losses]

    def objective(self, losses: Losses) -> Objective:
        """Return the objective that minimizes ``losses``."""
        algorithm, scaler = self._algorithm, self.scaler
        return Objective(module=cast(nn.Module, algorithm), losses=losses,
                         params=[p for _, p in algorithm.optimized_parameters()[1]], name=algorithm.name,
                         graph_key=self.graph_key,
                         scaled=None if scaler is None else scaler.scaled, gradient_noise=self.noise_scale)

    def graph_key(self) -> Hashable:
        """Return the key of the traced graph of the next update, from the keys of all parts of the algorithm."""
        if self._parts_with_graph_keys is None:
            self._parts_with_graph_keys = [part for part in self._algorithm.modules()
                                           if hasattr(type(part), 'graph_key')]
        return context.is_pretrain(), *[part.graph_key for part in self._parts_with_graph_keys]

    def invalidate_caches(self) -> None:
        """Drop all plans, because the tensors of the algorithm have been moved."""
        self._plans, self._projected_layers = {}, None

    @staticmethod
    def _given_batch(loss_info: LossInfo, masks: torch.Tensor | None, weight: float, batch_info: BatchInfo | None
                     ) -> Batch:
        weights = batch_info.importance_weights if batch_info is not None else ()
        return Batch((loss_reduction.weighted(loss_info, weight), masks), weights)

    # Set-up ----------------------------------------------------------------------------------------------------

    def use_mixed_precision(self, parts: 'Sequence[Updater]') -> None:
        """Let the networks compute in 16 bits from now on.

        Args:
            parts: updaters of all algorithms that own the networks, because some parts make separate updates.
        """
        self.precision = MixedPrecision(cast(nn.Module, self._algorithm), self._algorithm.device)
        for part in parts:
            part.scaler = self.precision.scaler

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of the parameters of ``optimizer`` over all processes.

        Call this only before an optimizer step that the algorithm makes itself; all other updates include it.
        """
        average_gradients(optimizer)

    @property
    def averager(self) -> GradientAverager | None:
        """Averager of the gradients of all processes that train together; ``None`` in a single process."""
        if self._averager is None and self.ranks is not None:
            self._averager = GradientAverager(self.ranks, [p for _, p in self._algorithm.optimized_parameters()[1]])
        return self._averager

    def join_ranks(self, rank: int, parts: 'Sequence[Updater]') -> None:
        """Train together with other processes, starting with the parameters and buffers of rank 0.

        Args:
            rank: rank of this process.
            parts: updaters of all parts of the algorithm, because some parts make separate updates.

        Raises:
            RuntimeError: this process has not joined any others, or has another rank.
        """
        ranks = context.get_ranks()
        if ranks is None or ranks.rank != rank:
            found = 'none' if ranks is None else f'rank {ranks.rank} of {ranks.size}'
            raise RuntimeError(f'activate_ddp({rank}): expected a process group in which this process is rank {rank} '
                               f'(alfx.engine.remote.data_parallel.join), found {found}')
        ranks.copy_from_rank0([*self._algorithm.parameters(), *self._algorithm.buffers()])
        for part in (self, *parts):
            part.ranks = ranks


def check_compilable(algorithm: Any, is_traceable: bool) -> None:
    """Raise ``ConfError`` if ``TrainerConfig.compile`` is set and the updates of ``algorithm`` are not traceable."""
    if not is_traceable:
        raise ConfError([problem_at(
            'TrainerConfig', 'compile', f'= True is not possible with {algorithm.name}: its update '
            'does not execute the same operations every time', 'leave it at False')])


def _given_losses(computed: tuple[LossInfo, torch.Tensor | None]) -> tuple[LossInfo, torch.Tensor | None, NestedTensor]:
    """Return losses that were computed before the update."""
    return *computed, ()
