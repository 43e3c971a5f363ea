"""The schedule of an iteration: collect, train, auxiliary phase.

Calls go in one direction: :class:`Learner` calls :class:`~alfx.engine.collector.Collector`,
:class:`~alfx.engine.batches.Batches` and :class:`~alfx.engine.updater.Updater`, and these call the steps and hooks of
the algorithm that :mod:`alfx.engine.contract` lists.
"""
import time
from functools import cached_property
from typing import Any

from alfx import context, summary
from alfx.config import TrainerConfig
from alfx.data_structures import Experience
from alfx.engine.auxiliary_phase import AuxiliaryPhase
from alfx.engine.batch_sources import Sample, Stage, stage_of, update_priorities, weights_of
from alfx.engine.batches import Batches
from alfx.engine.collector import Collector, UnrollRequest
from alfx.engine.contract import Acts
from alfx.engine.plan import Batch, Computed
from alfx.engine.plan.eager import Losses
from alfx.engine.sequence_losses import SequenceLosses
from alfx.engine.updater import Updater
from alfx.tensor_specs import NestedTensor


class Learner:
    """Training iterations of an algorithm: collects experience and trains on it.

    Args:
        algorithm: algorithm to train.
        updater: computes gradients and steps the optimizers.
        settings: configuration of the run; ``None`` for a part of an algorithm that only calls
            :meth:`train_from_unroll`.

    Attributes:
        updater: see above.
        losses: computes the losses of a minibatch.
        num_trained: samples that the latest iteration trained on.
    """

    def __init__(self, algorithm: Acts, updater: Updater, settings: TrainerConfig | None):
        self._algorithm, self.updater, self._given_settings = algorithm, updater, settings
        self.losses = SequenceLosses(algorithm, settings)
        self.num_trained = 0
        self._phase: AuxiliaryPhase | None = None

    @property
    def _settings(self) -> TrainerConfig:
        if self._given_settings is None:
            raise ValueError(f'{self._algorithm.name}: a training iteration needs a TrainerConfig; pass config=')
        return self._given_settings

    @cached_property
    def collector(self) -> Collector:
        """Collector of experience; created at the first use."""
        return Collector(self._algorithm, self._settings)

    @cached_property
    def batches(self) -> Batches:
        """Source of minibatches; created at the first use."""
        return Batches(self._algorithm, self._settings)

    # An iteration ----------------------------------------------------------------------------------------------

    def iterate(self) -> int:
        """Run one iteration.

        Returns:
            Number of samples trained on, without the auxiliary phase; a sample counts each time it is used.
        """
        algorithm, started = self._algorithm, time.perf_counter()
        algorithm.optimized_parameters()  # raises at the first iteration if a parameter has no optimizer
        request = None if self.stage is Stage.PRETRAIN else self.collector.next_request(bool(self.num_trained))
        experience = None
        if request is not None:
            experience = self.collect(request)
            self.collector.mark_collected(request)
        collected = time.perf_counter()
        rollout_info = None if experience is None else experience.rollout_info
        if not algorithm.on_policy:
            self.num_trained = self.train_from_replay(counts_updates=True)
        elif experience is None:
            self.num_trained = 0
        else:
            if self._settings.update_counter_every_mini_batch:
                context.increment_global_counter()  # one update per iteration
            if self._recomputes_in_update:
                rollout_info = None
            elif algorithm.capabilities.recomputes_rollout_info:
                rollout_info = self.losses.train_info(experience)
            self.num_trained = self.train_from_unroll(experience, rollout_info)
        if self.phase is not None:
            self.phase.run_if_due()
        if algorithm.capabilities.trains_after_iteration:
            algorithm.after_train_iter(self.collector.inputs, rollout_info)
        self.collector.inputs = None
        if context.should_record_summaries():
            summary.scalar('time/unroll', collected - started)
            summary.scalar('time/train', time.perf_counter() - collected)
        return self.num_trained

    def run_iteration(self) -> int:
        """Run the iteration of a trainer; the same as :meth:`iterate` unless the algorithm has its own loop."""
        return self.iterate()

    @property
    def stage(self) -> Stage:
        """Stage of an iteration that begins now: it trains on collected experience, on datasets, or on both."""
        return stage_of(self._settings, self._algorithm.offline_replay_buffer is not None, context.get_global_counter())

    def collect(self, request: UnrollRequest) -> Experience | None:
        """Collect an unroll, see :meth:`Collector.collect <alfx.engine.collector.Collector.collect>`."""
        return self.collector.collect(request)

    def train_from_unroll(self, experience: Experience, rollout_info: NestedTensor | None) -> int:
        """Make one on-policy update.

        Args:
            experience: ``[T + 1, B, ...]``; the last step is only used to bootstrap from.
            rollout_info: infos ``[T + 1, B, ...]``; ``None`` to compute them from ``experience``, which is also done
                if acting has left those of ``experience`` incomplete and they are passed unchanged.

        Returns:
            ``T * B``, the number of steps trained on.
        """
        is_partial = self._algorithm.capabilities.recomputes_rollout_info and rollout_info is experience.rollout_info
        if rollout_info is None or is_partial:
            computed = self.update(self.losses.unroll, Batch(experience), is_rare=True)
        else:
            computed = self.update(self.losses.unroll_with_info, Batch((rollout_info, experience)), eager=True)
        self._after_update(experience, computed)
        length, batch = experience.time_step.step_type.shape
        return (length - 1) * batch

    def train_from_replay(self, counts_updates: bool = False) -> int:
        """Train on stored experience: on everything in epochs, or on sampled minibatches.

        Args:
            counts_updates: increment the global counter at each update, if
                ``TrainerConfig.update_counter_every_mini_batch``.

        Returns:
            Number of steps trained on; a step counts each time it is used. 0 if there is too little data yet.
        """
        stage, counts = self.stage, counts_updates and self._settings.update_counter_every_mini_batch
        with context.pretrain_context() if stage is Stage.PRETRAIN else context.replay_context():
            if self._settings.whole_replay_buffer_training:
                return self._train_epochs(counts)
            return self._train_on_samples(stage, counts)

    def _train_epochs(self, counts: bool) -> int:
        whole, epochs = self.batches.whole_buffer(), self._settings.num_updates_per_train_iter
        if whole is None:
            return 0
        if self.phase is not None:
            self.phase.store(whole.collected)
        every_update = self._records_every_update
        for sample, is_last in self.batches.epochs(whole, epochs):
            with context.record_if(every_update or (is_last and context.should_record_summaries())):
                self._update_from(sample, counts)
        return epochs * whole.num_steps

    def _train_on_samples(self, stage: Stage, counts: bool) -> int:
        sources, updates = self.batches.sources(stage), self._settings.num_updates_per_train_iter
        if sources and stage in (Stage.ONLINE, Stage.HYBRID):
            updates = self._algorithm.num_updates_due(updates)
        if not sources or not updates:
            return 0
        every_update, records = self._records_every_update, context.should_record_summaries()
        only_offline = sources[0].is_offline and self._algorithm.capabilities.has_offline_hooks
        losses = self.losses.offline if only_offline else self.losses.collected
        static = self._static_batches(losses) if len(sources) == 1 else None
        samples = self.batches.draw(sources, updates, static)
        for number, sample in enumerate(samples):
            with context.record_if(records and (every_update or number == updates - 1)):
                self._update_from(sample, counts)
        return updates * self.batches.num_steps(sources)

    def _static_batches(self, losses: Losses) -> bool | None:
        if not self._algorithm.capabilities.traceable_update:
            return None
        plan = self.updater.plan(losses)
        return plan.accepts_static_batches if plan.supports_static_batches else None

    @property
    def _records_every_update(self) -> bool:
        """Return whether every update writes summaries, at its own counter, instead of only the last update."""
        return self._settings.update_counter_every_mini_batch and context.should_record_summaries()

    @property
    def _recomputes_in_update(self) -> bool:
        """Return whether the update computes the infos of an unroll, as a part of its traced graph."""
        capabilities = self._algorithm.capabilities
        return (capabilities.traceable_update and capabilities.recomputes_rollout_info
                and not capabilities.trains_after_iteration)

    # An update -------------------------------------------------------------------------------------------------

    def update(self, losses: Losses, batch: Batch, is_rare: bool = False, eager: bool = False) -> Computed:
        """Make one gradient step, see :meth:`Updater.step <alfx.engine.updater.Updater.step>`."""
        return self.updater.step(losses, batch, is_rare, eager)

    def _update_from(self, sample: Sample, counts: bool) -> None:
        if counts:
            context.increment_global_counter()
        experience: Any = sample.experience
        losses: Losses = self.losses.collected
        if sample.offline_batch is not None:
            losses = self.losses.offline if experience is None else self.losses.hybrid
            experience = sample.offline_batch if experience is None else (experience, sample.offline_batch)
        batch = Batch(experience, weights_of(self._settings, sample.origins), sample.static_batch)
        computed = self.update(losses, batch)
        update_priorities(self._settings, sample.origins, computed.loss_info)
        self._after_update(sample.logged_batch, computed)

    def _after_update(self, experience: Experience, computed: Computed) -> None:
        algorithm = self._algorithm
        algorithm.after_update(experience.time_step, computed.train_info)
        if context.should_record_summaries():
            algorithm.summarize_train(experience, computed.train_info, computed.loss_info,
                                      algorithm.optimized_parameters()[1])

    # Set-up and resume -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> AuxiliaryPhase | None:
        """The auxiliary phase, if the algorithm has one."""
        stored = self._algorithm.stored_unrolls
        if self._phase is None and stored is not None:
            self._phase = AuxiliaryPhase(self._algorithm, self.updater, self.losses, stored)
        return self._phase

    @property
    def has_traceable_updates(self) -> bool:
        """Return whether all updates of an iteration can run from traced graphs."""
        if self._algorithm.on_policy:
            return self._recomputes_in_update
        return self._algorithm.capabilities.traceable_update

    def invalidate_caches(self) -> None:
        """Drop all cached objects that refer to tensors of the algorithm, after these have been moved."""
        if self._given_settings is not None:
            self.batches.invalidate_caches()
        if self._phase is not None:
            self._phase.invalidate_caches()

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two iterations, without the state of the environments."""
        if self._algorithm.environment is None:
            return {}
        return {**self.collector.state_dict(), **self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, after the state of the environments has been restored."""
        if state:
            self.collector.load_state_dict(state)
            self.batches.load_state_dict(state)
