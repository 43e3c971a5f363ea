"""When an algorithm collects, draws and updates, and what has to be remembered of that from one iteration to the next.

:meth:`Learner.iterate` is an iteration; it reads from top to bottom in this file. What is computed is the algorithm's
business, how an update is computed that of :mod:`alfx.engine.plan`. Read next :mod:`alfx.engine.unroll`.
"""
import logging
import math
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from alfx import context, nest, summary
from alfx.data_structures import BatchInfo, Experience, LossInfo, StepType, TimeStep, add_batch_info, clear_batch_info
from alfx.engine import probe
from alfx.engine import minibatches
from alfx.engine import loss_reduction
from alfx.engine.auxiliary_phase import AuxiliaryPhase
from alfx.engine.contract import Settings, Trains
from alfx.engine.errors import NonFiniteLossError
from alfx.engine.gradient_noise import GradientNoiseScale
from alfx.engine.mixed_precision import LossScaler, MixedPrecision
from alfx.engine.batch_sources import (BatchConcatenator, SampleOrigin, Sample, BatchSource, Stage, concatenate,
                                       stage_of, update_priorities, weights_of)
from alfx.engine.plan import Batch, Computed, Eager, Objective, make_plan
from alfx.engine.plan.eager import Losses
from alfx.engine.plan.program import copied
from alfx.engine.remote.data_parallel import GradientAverager, Ranks, average_gradients
from alfx.engine.remote.remote_unroll import RemoteUnroll, UnrollSource
from alfx.engine.unroll import RolloutState, Steps, start, unroll
from alfx.experience_replayers.batch_reader import BatchReader, StaticBatch
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError
from alfx.gin_utils.value_checks import problem_at
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, extract_spec
from alfx.engine.capabilities import Capabilities
from alfx.utils.schedulers import as_scheduler

logger = logging.getLogger(__name__)
_STEPS_AT_ONCE = 2**12


class Learner:
    """Collects experience with an algorithm and trains it.

    Args:
        algorithm: ``Trains``; to iterate, ``Acts`` (see :mod:`alfx.engine.contract`).
        settings: the ``TrainerConfig``; ``None`` for an algorithm that makes only updates of its own.

    Attributes:
        ranks: the processes that train together; ``None`` in one process alone.
        precision: how the networks compute in 16 bits, if they do.
        scaler: scales the loss of an update, where the networks compute in float16.
        noise_scale: estimates how noisy gradients are, if that is asked for.
        train_info_spec: of what ``calc_loss`` gets; known from the first training step on.
        processed_experience_spec: of what ``preprocess_experience`` returns; likewise.
        remote: where unrolls come from if other processes act.
        cursor: where the rollout stands; ``None`` before it has begun.
        num_trained: samples trained on in the latest iteration.
        reader: reads samples into the same memory each time, if that is possible.
        phase: trains once more every so many iterations, if the algorithm asks for that.
    """

    def __init__(self, algorithm: Trains, settings: Settings | None):
        self._algorithm: Any = algorithm
        self._settings: Any = settings
        self.ranks: Ranks | None = None
        self._averager: GradientAverager | None = None
        self.precision: MixedPrecision | None = None
        self.scaler: LossScaler | None = None
        self.noise_scale: GradientNoiseScale | None = None
        self.train_info_spec: NestedTensorSpec = None
        self.processed_experience_spec: NestedTensorSpec = None
        self.remote: RemoteUnroll | None = None
        self.cursor: RolloutState | None = None
        self._unrolled_inputs: TimeStep | None = None  # of the latest unroll, until the iteration is over
        self._unroll_debt = 0.0  # the fraction of a step by which unrolls have been too short so far
        self.num_trained = 0
        self._context_steps = 0  # at the start of the replay buffer, trained on in an earlier iteration
        self.reader: BatchReader | None = None
        self._reader_key: Any = None  # what the reader depends on
        self._plans: dict[str, Eager] = {}  # by what computes the losses
        self._join = BatchConcatenator()
        self._taking_turns: list[Any] | None = None  # parts that may have several fixed updates
        self.phase: AuxiliaryPhase | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: not the reader, whose functions would go on reading the buffer of the original."""
        return {**vars(self), 'reader': None, '_reader_key': None}

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the algorithm."""
        return self._algorithm.capabilities

    def invalidate_caches(self) -> None:
        """The tensors of the algorithm have been moved: forget what has been made for where they were."""
        self.reader = self._reader_key = None
        self._plans = {}
        if self.phase is not None:
            self.phase.invalidate_caches()

    # An iteration ----------------------------------------------------------------------------------------------

    def iterate(self) -> int:
        """Collect, train, perhaps an auxiliary phase, ``after_train_iter``.

        Returns:
            The number of samples trained on, repeated ones counted each time; without those of the phase.
        """
        algorithm, started = self._algorithm, time.perf_counter()
        experience = None if self.stage is Stage.PRETRAIN else self.unroll_if_due()
        unrolled = time.perf_counter()
        rollout_info = None if experience is None else experience.rollout_info
        if not algorithm.on_policy:
            steps = algorithm.train_from_replay_buffer(update_global_counter=True)
        elif experience is None:
            steps = 0
        else:
            if self._settings.update_counter_every_mini_batch:
                context.increment_global_counter()  # there is one update an iteration
            if self._has_traceable_updates:
                rollout_info = None  # infos are part of what is computed from the experience
            elif self.capabilities.recomputes_rollout_info:
                rollout_info = self.train_info(experience)
            steps = algorithm.train_from_unroll(experience, rollout_info)
        if self.phase is not None:
            self.phase.run_if_due()
        if self.capabilities.trains_after_iteration:
            algorithm.after_train_iter(self._unrolled_inputs, rollout_info)
        self._unrolled_inputs = None
        if context.should_record_summaries():
            summary.scalar('time/unroll', unrolled - started)
            summary.scalar('time/train', time.perf_counter() - unrolled)
        self.num_trained = steps
        return steps

    @property
    def stage(self) -> Stage:
        """What an iteration that begins now trains on: own experience, stored datasets, or both."""
        return stage_of(self._settings, self._algorithm.offline_replay_buffer is not None,
                        context.get_global_counter())

    # Collecting ------------------------------------------------------------------------------------------------

    @property
    def unrolls_end_with_bootstrap(self) -> bool:
        """Whether an unroll ends with a step to bootstrap from, which is the first one of the next unroll as well."""
        settings = self._settings
        return bool(self._algorithm.on_policy) or (settings is not None and (settings.unroll_with_grad
                                                                             or settings.trains_on_whole_unrolls))

    def use_source(self, source: UnrollSource, update_period: int) -> None:
        """From now on other processes act: take their steps in place of stepping the environment.

        Args:
            source: brings them; whoever sets it closes it.
            update_period: hand it the weights every so many iterations, the first one included.
        """
        self.remote = RemoteUnroll(source, update_period)

    def unroll_if_due(self) -> Experience | None:
        """The unroll of this iteration, or ``None`` if ``unroll_length`` leaves it out or the steps are used up."""
        settings = self._settings
        assert settings is not None and self._algorithm.environment is not None, 'a root has both'
        if settings.num_env_steps and self._env_steps() >= settings.num_env_steps:
            return None
        if self.remote is not None:
            self.remote.start_iteration(self._algorithm, context.should_record_summaries(),
                                        context.get_summary_step())
            if not settings.unroll_length:  # what there is; an iteration that could not train either waits for a step
                return self._unroll_up_to(settings.max_unroll_length, at_least=0 if self.num_trained else 1)
        debt = self._unroll_debt + settings.unroll_length
        length = int(debt)
        experience = self._algorithm.unroll(length) if length else None
        self._unroll_debt = debt - length
        return experience

    def _env_steps(self) -> int:
        """How many steps the environments of the run have taken; of all processes, as of the last iteration."""
        if context.get_ranks() is None:
            return self._algorithm.get_step_metrics()[0].count
        return int(context.get_progress('env_steps'))

    def unroll(self, length: int) -> Experience:
        """Collect ``length`` steps of each environment, store them for replay, update the metrics.

        On-policy, with ``unroll_with_grad``, and where each unroll is trained on as a whole and then dropped, one more
        step follows that the environment does not see; values are bootstrapped from it.

        Returns:
            Experience ``[T, B, ...]`` or, with that step, ``[T + 1, B, ...]``; on-policy with transformed time steps,
            otherwise as the environment gave them.
        """
        experience = self._unroll_up_to(length, at_least=length)
        assert experience is not None, 'so many steps have been waited for'
        return experience

    def _unroll_up_to(self, length: int, at_least: int) -> Experience | None:
        """:meth:`unroll` of ``at_least`` to ``length`` steps; ``None`` if there are none."""
        algorithm, bootstrap = self._algorithm, self.unrolls_end_with_bootstrap
        if self.remote is not None:
            steps = self.remote.unroll(algorithm, length, at_least, bootstrap)
        else:
            steps = self._unroll_here(length, bootstrap)
        if steps is None:
            return None
        experience, env_steps, self._unrolled_inputs = steps
        algorithm.observe_unroll(env_steps)
        if self.capabilities.postprocesses_unrolls:
            assert steps.inputs is not None, 'it has been kept'
            with context.rollout_context(), torch.no_grad():
                rollout_info = algorithm.postprocess_unroll(steps.inputs, experience.rollout_info)
            experience = experience._replace(rollout_info=rollout_info)
        if not algorithm.on_policy:
            stores_bootstrap = self._settings.trains_on_whole_unrolls
            algorithm.observe_sequence_for_replay(experience if stores_bootstrap or not bootstrap else
                                                  nest.map_structure(lambda x: x[:-1], experience))
        if context.should_record_summaries():
            algorithm.summarize_rollout(experience)
        return experience

    def _unroll_here(self, length: int, bootstrap: bool) -> Steps:
        """Step the environment of this process."""
        algorithm, env = self._algorithm, self._algorithm.environment
        if self.cursor is None:
            self.cursor = start(algorithm, env)
        on_policy = bool(algorithm.on_policy)
        with_grad = self._settings.unroll_with_grad or (on_policy and not self.capabilities.recomputes_rollout_info)
        with context.acting_precision():
            return Steps(*unroll(algorithm, env, self.cursor, length, with_grad=with_grad, bootstrap=bootstrap,
                                 transformed=on_policy, keep_inputs=self.capabilities.needs_unroll_inputs))

    # Training --------------------------------------------------------------------------------------------------

    def train_from_unroll(self, experience: Experience, train_info: NestedTensor | None) -> int:
        """On-policy training: one update from the infos of an unroll.

        Args:
            experience: ``[T + 1, B, ...]``; the last step is there to bootstrap from, its loss does not count.
            train_info: infos ``[T + 1, B, ...]``; ``None``: they are computed from ``experience``.

        Returns:
            ``T * B``, the number of steps trained on.
        """
        if train_info is None:
            computed = self.optimize(self.unroll_plan, Batch(experience))
        else:
            computed = self._computed(*self._counted(train_info, experience, bootstraps=True))
        self._after_update(experience, computed)
        length, batch = experience.time_step.step_type.shape
        return (length - 1) * batch

    def train_from_replay_buffer(self, update_global_counter: bool = False) -> int:
        """Train on what is stored, own experience or datasets: on all of it in epochs, or on sampled minibatches.

        Args:
            update_global_counter: count each update, if ``TrainerConfig.update_counter_every_mini_batch``.

        Returns:
            The number of steps trained on, repeated ones counted each time; 0 if there is too little data yet.
        """
        settings = self._settings
        assert settings is not None, 'an algorithm with a replay buffer has a config'
        counts, stage = update_global_counter and settings.update_counter_every_mini_batch, self.stage
        with context.pretrain_context() if stage is Stage.PRETRAIN else context.replay_context():
            if settings.whole_replay_buffer_training:
                return self._train_on_whole_buffer(counts)
            return self._train_on_samples(self._shares(stage), counts)

    @property
    def _buffer(self) -> Any:
        return self._algorithm.replay_buffer

    def _train_on_whole_buffer(self, counts: bool) -> int:
        """``num_updates_per_train_iter`` epochs over everything in the buffer."""
        settings, buffer, overlap = self._settings, self._buffer, self.capabilities.bootstraps_sequences
        stored, clear = minibatches.steps_in(buffer), settings.clear_replay_buffer
        context_steps = self._context_steps if clear else stored - (buffer.max_length -
                                                                    buffer.num_earliest_frames_ignored)
        if stored - max(context_steps, 0) < (settings.mini_batch_length or 1) + (clear or overlap):
            return 0
        if not minibatches.has_collected(buffer, settings.initial_collect_steps):
            if clear:
                self._context_steps = buffer.drop_all_but(keep=buffer.num_earliest_frames_ignored)
            return 0
        everything, batch_info = buffer.gather_all()
        collected, batch_info = minibatches.drop_context(everything, batch_info, max(context_steps, 0))
        transformed = self.transformed(collected, batch_info, buffer)
        beside = self._algorithm.demonstration_batch(self._algorithm, collected, transformed)
        if beside is not None:
            transformed = nest.map_structure(lambda x, y: torch.cat((x, y)), transformed, beside)
        experience = self._preprocessed(transformed, batch_info)
        if clear:
            self._context_steps = buffer.drop_all_but(keep=buffer.num_earliest_frames_ignored)
            if not overlap:  # the last step was stored to bootstrap from, see unroll
                collected, experience = nest.map_structure(lambda x: x[:, :-1], (collected, experience))
        if self.phase is not None:
            self.phase.store(collected._replace(rollout_info=experience.rollout_info))
        length = minibatches.sequence_length(settings, experience.time_step.step_type.shape[1] - overlap)
        sequences = minibatches.as_sequences(experience, length, overlap)
        count = sequences.time_step.step_type.shape[1]
        batch_size = min(settings.mini_batch_size or buffer.num_environments, count)
        records, epochs = self._records_each_update(), settings.num_updates_per_train_iter
        for epoch in range(epochs):
            for batch, is_last in minibatches.minibatches(sequences, count, batch_size):
                is_last = is_last and epoch == epochs - 1
                with context.record_if(records or (is_last and context.should_record_summaries())):
                    self._update(Sample(batch), counts)
        return epochs * length * count

    def _shares(self, stage: Stage) -> list[BatchSource]:
        """What minibatches are drawn from in an iteration; nothing as long as too little has been collected."""
        settings, shares, length = self._settings, [], self._settings.mini_batch_length or 1
        if stage in (Stage.ONLINE, Stage.HYBRID):
            everything = BatchSource(self._buffer, settings.mini_batch_size or self._buffer.num_environments)
            shares = [share for share in self._algorithm.batch_sources(everything) if share.batch_size]
        elif stage is Stage.OFFLINE and self._buffer is not None and not minibatches.can_sample(
                self._buffer, length, settings.initial_collect_steps):
            return []
        if any(isinstance(share.source, ReplayBuffer) and not minibatches.can_sample(
                share.source, length, settings.initial_collect_steps) for share in shares):
            return []
        if stage is Stage.ONLINE:
            return shares
        stored = self._algorithm.offline_replay_buffer
        size = settings.offline_mini_batch_size or settings.mini_batch_size or stored.num_environments
        offline = BatchSource(stored, size, as_scheduler(settings.offline_loss_weight), is_offline=True)
        return [*shares, offline] if offline.current_weight() else shares

    def _train_on_samples(self, shares: Sequence[BatchSource], counts: bool) -> int:
        """``num_updates_per_train_iter`` updates, each from a fresh sample of each share."""
        if not shares:
            return 0
        records, updates = self._records_each_update(), self._settings.num_updates_per_train_iter
        wanted = context.should_record_summaries()
        for number, drawn in enumerate(zip(*(self._drawn(share, updates, len(shares) == 1) for share in shares))):
            with context.record_if(wanted and (records or number == updates - 1)):
                self._update(self._sample(shares, drawn), counts)
        length = (self._settings.mini_batch_length or 1) - self.capabilities.bootstraps_sequences
        return updates * length * sum([share.batch_size for share in shares])

    def _drawn(self, share: BatchSource, count: int, is_alone: bool) -> '_Samples':
        """``count`` transformed samples ``[share.batch_size, length, ...]`` of a share, with where they came from."""
        buffer, length = share.source, self._settings.mini_batch_length or 1
        together = 1
        if isinstance(buffer, ReplayBuffer):
            together = min(minibatches.samples_per_draw(buffer, share.batch_size * length), count)
        if is_alone and isinstance(buffer, ReplayBuffer):
            self._make_reader(share, length, together)
            if self.reader is not None:
                return ((info, slot.experience, slot) for info, slot in self.reader.draw(count, together))
        return self._samples(buffer, share.batch_size, length, count, together)

    def _sample(self, shares: Sequence[BatchSource], drawn: Sequence[tuple[BatchInfo, Experience,
                                                                           StaticBatch | None]]) -> Sample:
        """What an update is made from: samples of all shares side by side."""
        parts, origins, slot = [], [], None
        for share, (batch_info, experience, slot) in zip(shares, drawn):
            experience = self._preprocessed(experience, batch_info)
            if slot is not None and not slot.holds(experience):
                experience, slot = nest.map_structure(copied, experience), None
                self.reader = None  # preprocessing makes batches of its own: from the next iteration on
            parts.append(slot.time_major if slot is not None else
                         nest.map_structure(lambda x: x.transpose(0, 1), experience))
            origins.append(SampleOrigin(share, batch_info))
        if not self.capabilities.has_offline_hooks:
            return Sample(self._join(parts), None, tuple(origins), slot)
        own, apart = ([part for part, share in zip(parts, shares) if share.is_offline == offline]
                      for offline in (False, True))
        return Sample(self._join(own) if own else None, self._join(apart) if apart else None, tuple(origins), slot)

    def _records_each_update(self) -> bool:
        """Whether every update has a counter of its own to write summaries at; otherwise only the last one does."""
        return self._settings.update_counter_every_mini_batch and context.should_record_summaries()

    def _make_reader(self, share: BatchSource, length: int, together: int) -> None:
        """Samples are read into the same memory each time, where updates are played on them as they are stored."""
        transformer = self._algorithm.data_transformer
        if not self.capabilities.traceable_update:
            return
        plan = self._plan_of('_offline_losses' if share.is_offline and self.capabilities.has_offline_hooks
                             else 'losses')
        key = share.source, share.batch_size, length, 1 if plan.accepts_static_batches else together
        if key != self._reader_key:
            is_possible = plan.reads_slots and (transformer is None or not transformer.changes_experience)
            self._reader_key, self.reader = key, share.source.reader(*key[1:]) if is_possible else None

    def _samples(self, buffer: Any, batch_size: int, length: int, count: int, together: int) -> '_Samples':
        """Transformed samples ``[batch_size, length, ...]`` for ``count`` updates, ``together`` drawn at a time."""
        while count:
            number = min(together, count)
            count -= number
            experience, batch_info = buffer.get_batch(batch_size * number, length)
            experience = self.transformed(experience, batch_info, buffer)
            if number == 1:
                yield batch_info, experience, None
                continue
            leaves, tree = nest.flatten_with_structure((experience, batch_info._replace(replay_buffer=())))
            for parts in zip(*(x.split(batch_size) for x in leaves)):
                part, part_info = nest.unflatten(tree, parts)
                yield part_info._replace(replay_buffer=buffer), part, None

    def processed(self, experience: Experience, batch_info: BatchInfo) -> Experience:
        """What is trained on of a batch ``[B, T, ...]`` from the replay buffer."""
        return self._preprocessed(self.transformed(experience, batch_info, self._buffer), batch_info)

    def all_offline_data(self) -> Iterator[Experience]:
        """All stored datasets, ``[1, T, ...]`` at a time, for data transformers."""
        buffer = self._algorithm.offline_replay_buffer
        for experience, batch_info in buffer.iterate_all(_STEPS_AT_ONCE):
            yield add_batch_info(experience, batch_info, buffer)

    def transformed(self, experience: Experience, batch_info: BatchInfo, buffer: Any) -> Experience:
        """What the data transformer makes of a batch ``[B, T, ...]`` from ``buffer``."""
        device = self._algorithm.device
        if device.type != 'cpu':
            experience = experience.to(device)
        return clear_batch_info(self._algorithm.transform_experience(
            add_batch_info(experience, batch_info, buffer)))

    def _preprocessed(self, experience: Experience, batch_info: BatchInfo) -> Experience:
        """What ``preprocess_experience`` makes of a batch ``[B, T, ...]``."""
        root_inputs, rollout_info = self._algorithm.preprocess_experience(experience.time_step,
                                                                          experience.rollout_info, batch_info)
        if root_inputs is not experience.time_step or rollout_info is not experience.rollout_info:
            experience = experience._replace(time_step=root_inputs, rollout_info=rollout_info)
        if self.processed_experience_spec is None:
            self.processed_experience_spec = extract_spec(experience, from_dim=2)
        return experience

    def train_on_batch(self, batch: NestedTensor) -> LossInfo:
        """One update of an algorithm whose ``train_step`` makes the loss of a batch by itself, as in supervised runs.

        Args:
            batch: what ``train_step`` takes.

        Returns:
            As of :class:`~alfx.engine.plan.eager.Computed`.
        """
        if self.capabilities.traceable_update:
            computed = self.optimize(self.step_plan, Batch(batch))
        else:
            computed = self._computed(*self._step_losses(batch))
        self._algorithm.after_update((), computed.train_info)
        return computed.loss_info

    # An update -------------------------------------------------------------------------------------------------

    @property
    def _has_traceable_updates(self) -> bool:
        """Whether the updates of an iteration are the same tensor operations every time, made from experience alone."""
        capabilities = self.capabilities
        return capabilities.traceable_update and (not self._algorithm.on_policy or (
            capabilities.recomputes_rollout_info and not capabilities.trains_after_iteration))

    @property
    def plan(self) -> Eager:
        """How gradients of minibatches are computed: step by step, or in a faster way that does the same."""
        return self._plan_of('losses')

    @property
    def unroll_plan(self) -> Eager:
        """The same for unrolls whose infos are computed anew."""
        return self._plan_of('_unroll_losses', is_rare=True)

    @property
    def step_plan(self) -> Eager:
        """The same for batches of which ``train_step`` makes the loss."""
        return self._plan_of('_step_losses')

    def _plan_of(self, losses: str, is_rare: bool = False) -> Eager:
        """The plan for a method that computes losses."""
        if losses not in self._plans:
            self._plans[losses] = self._make_plan(getattr(self, losses), is_rare)
        return self._plans[losses]

    def _make_plan(self, losses: Losses, is_rare: bool = False) -> Eager:
        is_traceable = self.capabilities.traceable_update
        if is_traceable and self.scaler is not None:
            logger.info('updates of %s are made step by step: whether one is skipped depends on its gradients '
                        '(float16)', self._algorithm.name)
        return make_plan(self._objective(losses), is_traceable, self.compiles, is_rare)

    @property
    def compiles(self) -> bool:
        """Whether updates are compiled."""
        return self._settings is not None and self._settings.compile

    def _objective(self, losses: Losses) -> Objective:
        """What the algorithm minimises."""
        algorithm, scaler = self._algorithm, self.scaler
        return Objective(module=algorithm, losses=losses, params=[p for _, p in algorithm.optimized_parameters()[1]],
                         name=algorithm.name, variant=self.variant, scaled=None if scaler is None else scaler.scaled,
                         gradient_noise=self.noise_scale)

    def variant(self) -> Hashable:
        """Which one of several fixed updates the next one is, of all parts."""
        if self._taking_turns is None:
            self._taking_turns = [part for part in self._algorithm.modules() if hasattr(type(part), 'graph_key')]
        return context.is_pretrain(), *[part.graph_key for part in self._taking_turns]

    def _update(self, sample: Sample, counts: bool) -> None:
        """One gradient update."""
        if counts:
            context.increment_global_counter()
        weights = weights_of(self._settings, sample.origins)
        made_from: Any = sample.experience
        losses = 'losses'
        if sample.apart is not None:
            made_from, losses = ((sample.apart, '_offline_losses') if made_from is None else
                                 ((made_from, sample.apart), '_hybrid_losses'))
        if self.capabilities.traceable_update:
            computed = self.optimize(self._plan_of(losses), Batch(made_from, weights, sample.slot))
        else:
            loss_info, masks, train_info = getattr(self, losses)(made_from)
            computed = self._computed(loss_info, masks, train_info, weights)
        update_priorities(self._settings, sample.origins, computed.loss_info)
        self._after_update(sample.shown, computed)

    def _after_update(self, experience: Experience, computed: Computed) -> None:
        """What follows an update from experience ``[T, B, ...]``."""
        algorithm = self._algorithm
        algorithm.after_update(experience.time_step, computed.train_info)
        if context.should_record_summaries():
            algorithm.summarize_train(experience, computed.train_info, computed.loss_info,
                                      algorithm.optimized_parameters()[1])

    def losses(self, experience: Experience) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
        """What is minimised for a minibatch.

        Args:
            experience: ``[T, B, ...]``.

        Returns:
            tuple:
            - the losses ``[T, B]``; of ``T - 1`` steps where the last one is there only to bootstrap from
            - masks of that shape
            - what they were made from, ``[T, B, ...]``
        """
        return self._counted(self.train_info(experience), experience, self.capabilities.bootstraps_sequences)

    def _offline_losses(self, experience: Experience) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
        """:meth:`losses` by the offline hooks."""
        train_info = self.train_info(experience, offline=True)
        loss_info = self._algorithm.calc_loss_offline(train_info, context.is_pretrain())
        return *loss_reduction.masked_loss(loss_info, experience.time_step.step_type,
                                    self.capabilities.bootstraps_sequences), train_info

    def _hybrid_losses(self, both: tuple[Experience, Experience]) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
        """:meth:`losses` of own experience and, beside them, those of stored datasets by the offline hooks.

        Returns:
            as :meth:`losses`, with the columns of both; what they were made from is that of own experience.
        """
        own, masks, train_info = self.losses(both[0])
        offline, offline_masks, _ = self._offline_losses(both[1])
        return concatenate(own, offline), torch.cat((masks, offline_masks), 1), train_info

    def _unroll_losses(self, experience: Experience) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
        """:meth:`losses` of an unroll, whose last step is always there only to bootstrap from."""
        return self._counted(self.train_info(experience), experience, bootstraps=True)

    def _step_losses(self, batch: NestedTensor) -> tuple[LossInfo, None, NestedTensor]:
        """What is minimised for a batch of which ``train_step`` makes the loss."""
        info = self._algorithm.train_step(batch).info
        return info, None, info

    def _counted(self, train_info: NestedTensor, experience: Experience, bootstraps: bool
                 ) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
        """:meth:`losses` made from ``train_info``."""
        loss_info, masks = loss_reduction.masked_loss(self._algorithm.calc_loss(train_info),
                                                      experience.time_step.step_type,
                                               bootstraps)
        return loss_info, masks, train_info

    def _computed(self, loss_info: LossInfo, masks: torch.Tensor | None, train_info: NestedTensor,
                  weights: torch.Tensor | tuple[()] = ()) -> Computed:
        """An update by the algorithm's own ``update_with_gradient``, from losses that have been computed."""
        loss_info, _ = self._algorithm.update_with_gradient(loss_info, masks, 1.0,
                                                            BatchInfo(importance_weights=weights))
        return Computed(loss_info, train_info)

    def train_info(self, experience: Experience, offline: bool = False) -> NestedTensor:
        """The infos ``[T, B, ...]`` that the loss gets for experience ``[T, B, ...]``; with ``offline`` of the offline
        hooks."""
        independent = self._settings.temporally_independent_train_step if self._settings is not None else None
        if independent is None:
            independent = self.capabilities.trains_sequences_at_once
        train_info = minibatches.compute_train_info(self._algorithm, experience, independent, offline)
        if self.train_info_spec is None:
            self.train_info_spec = extract_spec(train_info, from_dim=2)
        return train_info

    def apply_gradients(self, loss_info: LossInfo, masks: torch.Tensor | None = None, weight: float = 1.0,
                        batch_info: BatchInfo | None = None) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]:
        """One update of all parameters that the optimizers of the algorithm own.

        Args:
            loss_info: ``loss`` is ``[T, B]`` or ``()``.
            masks: float32 ``[T, B]``: 0 for steps that are not to be trained on.
            weight: factor of the loss.
            batch_info: where the batch came from; its importance weights apply.

        Returns:
            ``loss_info`` with ``loss`` reduced to a scalar (and, where summaries are written, ``extra`` to masked
            means), and ``(name, parameter)`` of what was updated.

        Raises:
            NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
        """
        computed = self.optimize(*self._planned(loss_info, masks, weight, batch_info))
        return computed.loss_info._replace(scalar_loss=loss_info.scalar_loss), self._algorithm.optimized_parameters()[1]

    def _planned(self, loss_info: LossInfo, masks: torch.Tensor | None, weight: float, batch_info: BatchInfo | None
                 ) -> tuple[Eager, Batch]:
        """How to compute the gradients of losses that have been computed, and of what."""
        plan = Eager(self._objective(lambda _: (loss_reduction.weighted(loss_info, weight), masks, ())))
        return plan, Batch((), batch_info.importance_weights if batch_info is not None else ())

    def compute_gradients(self, loss_info: LossInfo, masks: torch.Tensor | None = None, weight: float = 1.0,
                          batch_info: BatchInfo | None = None) -> list[torch.Tensor | None]:
        """See ``Algorithm.compute_gradients``."""
        self._finite_gradients(*self._planned(loss_info, masks, weight, batch_info))
        return [None if p.grad is None else p.grad.clone() for _, p in self._algorithm.optimized_parameters()[1]]

    def apply_gradient_list(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See ``Algorithm.apply_gradient_list``."""
        params = self._algorithm.optimized_parameters()[1]
        shapes = [None if gradient is None else gradient.shape for gradient in gradients]
        if len(shapes) != len(params) or any(shape not in (None, p.shape) for shape, (_, p) in zip(shapes, params)):
            raise ValueError(f'apply_gradient_list of {self._algorithm.name}: expected gradients of the shapes '
                             f'{[tuple(p.shape) for _, p in params]}, found {[s and tuple(s) for s in shapes]}')
        for gradient, (_, param) in zip(gradients, params):
            param.grad = None if gradient is None else gradient.clone()
        self._make_steps(self._algorithm.optimized_parameters()[0])

    def optimize(self, plan: Eager, batch: Batch, optimizers: Sequence[Any] | None = None) -> Computed:
        """Gradients, averaged over all processes, and the steps of the optimizers.

        Args:
            plan: computes the gradients.
            batch: from which.
            optimizers: make the steps; ``None``: all of the algorithm.

        Raises:
            NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
        """
        computed = self._finite_gradients(plan, batch)
        self._make_steps(self._algorithm.optimized_parameters()[0] if optimizers is None else optimizers)
        return computed

    def _finite_gradients(self, plan: Eager, batch: Batch) -> Computed:
        """Leave gradients in the parameters, or name the losses that are not finite."""
        computed = plan.gradients(batch)
        if not math.isfinite(computed.loss_info.loss.item()):
            if self.averager is not None:
                self.averager.report_bad_loss()
            parts = plan.explain(batch) if computed.parts is None else computed.parts
            raise NonFiniteLossError(loss_reduction.describe_non_finite(self._algorithm.name, parts))
        return computed

    def _make_steps(self, optimizers: Sequence[Any]) -> None:
        """Average the gradients in the parameters over all processes; let ``optimizers`` step."""
        if self.averager is not None:
            self.averager.average()
        if self.scaler is not None:
            self.scaler.step(optimizers)
        else:
            if context.should_record_summaries():
                summary_utils.summarize_gradient_norm(self._algorithm.parameters())
            for optimizer in optimizers:
                optimizer.step()

    # Set-up ----------------------------------------------------------------------------------------------------

    def check_compilable(self) -> None:
        """Refuse what cannot be compiled, before anything is trained.

        Raises:
            ConfError: the algorithm's update is not the same operations every time.
        """
        if not self._has_traceable_updates:
            raise ConfError([problem_at(
                'TrainerConfig', 'compile', f'= True is not possible with {self._algorithm.name}: its update is not '
                'the same operations every time', 'leave it at False')])

    def use_mixed_precision(self, parts: 'Sequence[Learner]') -> None:
        """Let the networks compute in 16 bits from now on.

        Args:
            parts: of all algorithms that the networks belong to: some make updates of their own.
        """
        self.precision = MixedPrecision(self._algorithm, self._algorithm.device)
        for part in parts:
            part.scaler = self.precision.scaler

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of what ``optimizer`` owns over the processes that train together, if any do.

        For a step that an algorithm makes itself; in every other update this is done for it.
        """
        average_gradients(optimizer)

    @property
    def averager(self) -> GradientAverager | None:
        """Averages gradients over the processes that train together; ``None`` in one process alone."""
        if self._averager is None and self.ranks is not None:
            self._averager = GradientAverager(self.ranks, [p for _, p in self._algorithm.optimized_parameters()[1]])
        return self._averager

    def join_ranks(self, rank: int, parts: 'Sequence[Learner]') -> None:
        """Train together with other processes from now on, with the parameters and buffers of rank 0.

        Args:
            rank: the number of this process among them.
            parts: of all algorithms that the algorithm consists of: some make updates of their own.

        Raises:
            RuntimeError: this process has not joined any others, or has another number.
        """
        ranks = context.get_ranks()
        if ranks is None or ranks.rank != rank:
            found = 'none' if ranks is None else f'rank {ranks.rank} of {ranks.size}'
            raise RuntimeError(f'activate_ddp({rank}): expected a process that has joined others as rank {rank} '
                               f'(alfx.engine.remote.data_parallel.join), found {found}')
        ranks.copy_from_rank0([*self._algorithm.parameters(), *self._algorithm.buffers()])
        for part in (self, *parts):
            part.ranks = ranks

    # Resume ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the rollout stands, as tensors and numbers; the environment's own state is kept apart."""
        if self._algorithm.environment is None:
            return {}
        state: dict[str, Any] = {'unroll_debt': self._unroll_debt}
        if self.cursor is not None:
            cursor = self.cursor
            state['cursor'] = nest.flatten((cursor.time_step, cursor.inputs, cursor.state, cursor.transform_state))
        if self._context_steps:
            context_steps, _ = self._buffer.gather_all()
            state['context'] = [x.clone() for x in nest.flatten(context_steps)]  # no views of a shared storage
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; the environment has been put back where it was."""
        if not state:
            return
        self._unroll_debt = state['unroll_debt']
        if 'cursor' in state:
            with probe.unchanged(self._algorithm):  # the statistics of a data transformer among others
                like = start(self._algorithm, self._algorithm.environment)
            parts = (like.time_step, like.inputs, like.state, like.transform_state)
            places = [x.device for x in nest.flatten(parts)]  # a checkpoint is loaded into host memory
            time_step, inputs, own_state, transform_state = nest.pack_sequence_as(
                parts, [x.to(y) for x, y in zip(state['cursor'], places)])
            self.cursor = replace(like, time_step=time_step, inputs=inputs, state=own_state,
                                   transform_state=transform_state)
        if 'context' in state:
            context_steps = [x.transpose(0, 1) for x in state['context']]
            self._context_steps = context_steps[0].shape[0]
            if not self._buffer.total_size:  # the checkpoint did not hold its contents
                self._buffer.add_sequence(nest.pack_sequence_as(self._algorithm.experience_spec, context_steps))

    def start_new_episodes(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` with environments that could not be put back where they were.

        The newest steps in the replay buffer become the LAST ones of episodes that were cut off there.
        """
        self._unroll_debt = state['unroll_debt']
        buffer = self._buffer
        if buffer is None:
            return
        env_ids = (buffer.current_size > 0).nonzero().flatten()
        if env_ids.numel():
            last = torch.full((env_ids.numel(), ), StepType.LAST, dtype=torch.int32)
            buffer.set_field('time_step.step_type', env_ids, buffer.current_pos[env_ids] - 1, last)


_Samples = Iterator[tuple[BatchInfo, Experience, StaticBatch | None]]
