"""Auxiliary phases: every N iterations, train on all unrolls since the last phase with another loss.

An algorithm that trains on whole unrolls requests phases with its ``auxiliary_phase``. The unrolls are stored as the
environment returned them, with the infos that the iteration trained on, such as its targets. When a phase begins, the
infos of ``train_step`` are computed for all of them, and ``auxiliary_reference`` selects the references of
``calc_auxiliary_loss``, such as the policy before the phase.
"""
import math
from typing import Any

import torch
from torch import Tensor

from alfx import context, nest, summary
from alfx.data_structures import Experience, LossInfo
from alfx.engine import loss_reduction
from alfx.engine.contract import Acts
from alfx.engine.plan import Batch, Eager, make_plan
from alfx.engine.sequence_losses import SequenceLosses
from alfx.engine.stored_unrolls import Sequences, StoredUnrolls
from alfx.engine.updater import Updater
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor


class AuxiliaryPhase:
    """Stores unrolls and trains on them every few iterations.

    Args:
        algorithm: root algorithm; it has an ``auxiliary_phase``.
        updater: makes the gradient steps.
        losses: computes the infos of ``train_step``.
        stored: stores the unrolls.
    """

    def __init__(self, algorithm: Acts, updater: Updater, losses: SequenceLosses, stored: StoredUnrolls):
        assert algorithm.auxiliary_phase is not None, 'the algorithm has no auxiliary phase'
        self._algorithm, self._updater, self._train_info = algorithm, updater, losses.train_info
        self._settings, self._stored = algorithm.auxiliary_phase, stored
        self._length = self._settings.mini_batch_length or stored.max_steps // self._settings.interval
        self._plan: Eager | None = None

    def store(self, unroll: Experience) -> None:
        """Store an unroll ``[B, T, ...]`` that an iteration is about to train on."""
        self._stored.store(nest.map_structure(lambda x: x.transpose(0, 1), unroll._replace(batch_info=())))

    def run_if_due(self) -> None:
        """Train if the unrolls of ``interval`` iterations have been stored."""
        stored = self._stored
        if stored.num_iterations < self._settings.interval:
            return
        if stored.num_steps:
            with context.auxiliary_context():
                self._train(stored.sequences(min(self._length, stored.num_steps)))
        stored.start_next_phase()

    def _train(self, sequences: Sequences) -> None:
        settings, count = self._settings, len(sequences.positions)
        batch_size = math.ceil(settings.mini_batch_size / context.num_ranks())
        references = self._references(sequences, batch_size)
        for epoch in range(settings.num_updates_per_train_iter):
            order = torch.randperm(count)
            for start in range(0, count, batch_size):
                chosen = order[start:start + batch_size]
                is_last = epoch == settings.num_updates_per_train_iter - 1 and start + batch_size >= count
                reference = nest.map_structure(
                    lambda x, chosen=chosen: x.index_select(1, chosen.to(x.device)), references)
                batch = Batch((self._read(sequences, chosen), reference))
                # phases are rare, so each one writes summaries, at its last update
                with context.record_if(is_last), summary.scope('auxiliary_phase'):
                    computed = self._updater.optimize(self.plan, batch, self._optimizers())
                    summary_utils.summarize_loss(computed.loss_info)

    @property
    def plan(self) -> Eager:
        """Plan that computes the gradients."""
        if self._plan is None:
            algorithm, updater = self._algorithm, self._updater
            params = [p for o in self._optimizers() for group in o.param_groups for p in group['params']]
            objective = updater.objective(self._losses)._replace(
                params=params, name=f'{algorithm.name} in its auxiliary phase', gradient_noise=None)
            self._plan = make_plan(objective, algorithm.capabilities.traceable_update, updater.compiles)
        return self._plan

    def invalidate_caches(self) -> None:
        """Drop the plan, because the tensors of the algorithm have been moved."""
        self._plan = None

    def _losses(self, batch: tuple[Experience, NestedTensor]) -> tuple[LossInfo, Tensor | None, NestedTensor]:
        """Return losses, masks and infos for experience and references ``[T, B, ...]``."""
        experience, reference = batch
        info = self._train_info(experience)
        loss_info, masks = loss_reduction.masked_loss(self._algorithm.calc_auxiliary_loss(info, reference),
                                                      experience.time_step.step_type, bootstraps=False)
        return loss_info, masks, info

    def _references(self, sequences: Sequences, batch_size: int) -> NestedTensor:
        """Compute the references ``[T, N, ...]`` of all sequences with the current parameters."""
        with torch.no_grad(), context.record_if(False):
            parts = [self._algorithm.auxiliary_reference(self._train_info(self._read(sequences, chosen)))
                     for chosen in torch.arange(len(sequences.positions)).split(batch_size)]
        return nest.map_structure(lambda *x: torch.cat(x, 1), *parts)

    def _read(self, sequences: Sequences, chosen: Tensor) -> Experience:
        """Return transformed sequences ``[T, B, ...]``."""
        buffer = self._stored.replay_buffer
        assert buffer is not None, 'nothing has been stored yet'
        length = min(self._length, self._stored.num_steps)
        experience, batch_info = buffer.get_sequences(sequences.env_ids[chosen], sequences.positions[chosen], length)
        experience = self._algorithm.transform_batch(experience, batch_info, buffer)
        return nest.map_structure(lambda x: x.transpose(0, 1), experience)

    def _optimizers(self) -> list[Any]:
        """Return the optimizers of the phase."""
        own = self._algorithm.auxiliary_optimizer
        return self._algorithm.optimized_parameters()[0] if own is None else [own]
