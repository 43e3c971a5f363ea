"""Minibatches for training: epochs over everything stored, or samples of one or several sources.

:class:`Batches` reads the replay buffers and applies the data transformer and ``preprocess_experience``. It never
trains. Read next: :mod:`alfx.engine.minibatches` (cutting experience) and :mod:`alfx.engine.batch_sources` (several
sources in one minibatch).
"""
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from alfx import nest
from alfx.config import TrainerConfig
from alfx.data_structures import BatchInfo, Experience, add_batch_info
from alfx.engine import minibatches
from alfx.engine.batch_sources import BatchConcatenator, BatchSource, Sample, SampleOrigin, Stage
from alfx.engine.contract import Trains
from alfx.engine.plan.program import copied
from alfx.experience_replayers.batch_reader import BatchReader, StaticBatch
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import NestedTensorSpec, extract_spec
from alfx.utils.schedulers import as_scheduler

_STEPS_AT_ONCE = 2**12

_Drawn = tuple[BatchInfo, Experience, StaticBatch | None]


class WholeBuffer(NamedTuple):
    """Everything in the replay buffer, ready for epochs of training.

    Attributes:
        collected: experience ``[B, T, ...]`` as the environments returned it, with preprocessed rollout infos.
        sequences: sequences ``[length, N, ...]`` to train on.
        length: steps per sequence, without a last step that is only used to bootstrap from.
        batch_size: sequences per minibatch.
    """

    collected: Experience
    sequences: Experience
    length: int
    batch_size: int

    @property
    def num_steps(self) -> int:
        """Number of steps that one epoch trains on."""
        return self.length * self.sequences.time_step.step_type.shape[1]


class Batches:
    """Source of minibatches for an algorithm.

    Args:
        algorithm: algorithm to train.
        settings: configuration of the run.

    Attributes:
        processed_experience_spec: spec of the output of ``preprocess_experience``; ``None`` before the first batch.
        reader: reads samples into the same memory each time; ``None`` if that is not possible.
    """

    def __init__(self, algorithm: Trains, settings: TrainerConfig):
        self._algorithm, self._settings = algorithm, settings
        self.processed_experience_spec: NestedTensorSpec = None
        self.reader: BatchReader | None = None
        self._reader_key: Any = None  # arguments of the reader
        self._context_steps = 0  # steps at the start of the replay buffer that an earlier iteration trained on
        self._concatenate = BatchConcatenator()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without the reader, which would read the buffer of the original."""
        return {**vars(self), 'reader': None, '_reader_key': None}

    def invalidate_caches(self) -> None:
        """Drop the reader, because the tensors of the algorithm have been moved."""
        self.reader = self._reader_key = None

    # Epochs over the whole buffer ------------------------------------------------------------------------------

    def whole_buffer(self) -> WholeBuffer | None:
        """Prepare everything in the replay buffer for training, and clear the buffer if the conf asks for it.

        Returns:
            The prepared experience, or ``None`` if there is too little of it.
        """
        settings, overlap = self._settings, self._algorithm.capabilities.bootstraps_sequences
        buffer = self._algorithm.replay_buffer
        assert buffer is not None, 'the replay buffer has been built'
        stored, clear = minibatches.steps_in(buffer), settings.clear_replay_buffer
        context_steps = self._context_steps if clear else stored - (buffer.max_length -
                                                                    buffer.num_earliest_frames_ignored)
        if stored - max(context_steps, 0) < (settings.mini_batch_length or 1) + (clear or overlap):
            return None
        if not minibatches.has_collected(buffer, settings.initial_collect_steps):
            if clear:
                self._context_steps = buffer.drop_all_but(keep=buffer.num_earliest_frames_ignored)
            return None
        everything, batch_info = buffer.gather_all()
        collected, batch_info = minibatches.drop_context(everything, batch_info, max(context_steps, 0))
        transformed = self._algorithm.transform_batch(collected, batch_info, buffer)
        demonstrations = self._algorithm.demonstration_batch(self._algorithm, collected, transformed)
        if demonstrations is not None:
            transformed = nest.map_structure(lambda x, y: torch.cat((x, y)), transformed, demonstrations)
        experience = self._preprocessed(transformed, batch_info)
        if clear:
            self._context_steps = buffer.drop_all_but(keep=buffer.num_earliest_frames_ignored)
            if not overlap:  # the last step was stored to bootstrap from, see Collector.collect
                collected, experience = nest.map_structure(lambda x: x[:, :-1], (collected, experience))
        length = minibatches.sequence_length(settings, experience.time_step.step_type.shape[1] - overlap)
        sequences = minibatches.as_sequences(experience, length, overlap)
        count = sequences.time_step.step_type.shape[1]
        batch_size = min(settings.mini_batch_size or buffer.num_environments, count)
        return WholeBuffer(collected._replace(rollout_info=experience.rollout_info), sequences, length, batch_size)

    @staticmethod
    def epochs(whole: WholeBuffer, count: int) -> Iterator[tuple[Sample, bool]]:
        """Yield the minibatches of ``count`` epochs in random order, each with a flag for the last of all epochs."""
        num_sequences = whole.sequences.time_step.step_type.shape[1]
        for epoch in range(count):
            for batch, is_last in minibatches.minibatches(whole.sequences, num_sequences, whole.batch_size):
                yield Sample(batch), is_last and epoch == count - 1

    # Samples of one or several sources -------------------------------------------------------------------------

    def sources(self, stage: Stage) -> list[BatchSource]:
        """Return the sources of minibatches in a stage; none until enough experience has been collected."""
        settings, sources, length = self._settings, [], self._settings.mini_batch_length or 1
        buffer = self._algorithm.replay_buffer
        if stage in (Stage.ONLINE, Stage.HYBRID):
            assert buffer is not None, 'the replay buffer has not been built'
            collected = BatchSource(buffer, settings.mini_batch_size or buffer.num_environments)
            sources = [source for source in self._algorithm.batch_sources(collected) if source.batch_size]
            sources.sort(key=lambda source: source.is_offline)  # the order of the columns of a batch
        elif stage is Stage.OFFLINE and buffer is not None and not minibatches.can_sample(
                buffer, length, settings.initial_collect_steps):
            return []
        if any(isinstance(source.source, ReplayBuffer) and not minibatches.can_sample(
                source.source, length, settings.initial_collect_steps if source.source is buffer else 0)
               for source in sources):
            return []
        if stage is Stage.ONLINE:
            return sources
        stored = self._algorithm.offline_replay_buffer
        assert stored is not None, 'this stage needs stored datasets'
        size = settings.offline_mini_batch_size or settings.mini_batch_size or stored.num_environments
        offline = BatchSource(stored, size, as_scheduler(settings.offline_loss_weight), is_offline=True)
        return [*sources, offline] if offline.current_weight() else sources

    def draw(self, sources: Sequence[BatchSource], count: int, static: bool | None) -> Iterator[Sample]:
        """Yield ``count`` minibatches, each with a fresh sample of every source.

        Args:
            sources: see :meth:`sources`.
            count: number of minibatches.
            static: None to read each sample into new tensors. A bool reads samples of a single source into the same
                memory each time, if possible, for updates that run from traced graphs: True into one minibatch, on
                which the graph itself computes; False into several minibatches, which are drawn together.
        """
        for drawn in zip(*(self._drawn(source, count, static) for source in sources)):
            yield self._sample(sources, drawn)

    def num_steps(self, sources: Sequence[BatchSource]) -> int:
        """Return the number of steps that one update with these sources trains on."""
        length = (self._settings.mini_batch_length or 1) - self._algorithm.capabilities.bootstraps_sequences
        return length * sum(source.batch_size for source in sources)

    def _drawn(self, source: BatchSource, count: int, static: bool | None) -> Iterator[_Drawn]:
        """Yield ``count`` transformed samples ``[source.batch_size, length, ...]`` and their origins."""
        buffer, length, per_draw = source.source, self._settings.mini_batch_length or 1, 1
        if isinstance(buffer, ReplayBuffer):
            per_draw = min(minibatches.samples_per_draw(buffer, source.batch_size * length), count)
            if static is not None:
                self._prepare_reader(source, length, 1 if static else per_draw)
                if self.reader is not None:
                    return ((info, batch.experience, batch) for info, batch in self.reader.draw(count, per_draw))
        return self._transformed_samples(buffer, source.batch_size, length, count, per_draw)

    def _prepare_reader(self, source: BatchSource, length: int, num_batches: int) -> None:
        transformer = self._algorithm.data_transformer
        key = source.source, source.batch_size, length, num_batches
        if key != self._reader_key:
            is_possible = transformer is None or not transformer.changes_experience
            self._reader_key, self.reader = key, source.source.reader(*key[1:]) if is_possible else None

    def _transformed_samples(self, buffer: Any, batch_size: int, length: int, count: int, per_draw: int
                             ) -> Iterator[_Drawn]:
        while count:
            number = min(per_draw, count)
            count -= number
            experience, batch_info = buffer.get_batch(batch_size * number, length)
            experience = self._algorithm.transform_batch(experience, batch_info, buffer)
            if number == 1:
                yield batch_info, experience, None
                continue
            leaves, tree = nest.flatten_with_structure((experience, batch_info._replace(replay_buffer=())))
            for parts in zip(*(x.split(batch_size) for x in leaves)):
                part, part_info = nest.unflatten(tree, parts)
                yield part_info._replace(replay_buffer=buffer), part, None

    def _sample(self, sources: Sequence[BatchSource], drawn: Sequence[_Drawn]) -> Sample:
        """Put the samples of all sources into one minibatch ``[T, B, ...]``."""
        parts, origins, static = [], [], None
        for source, (batch_info, experience, static) in zip(sources, drawn):
            experience = self._preprocessed(experience, batch_info)
            if static is not None and not static.holds(experience):
                experience, static = nest.map_structure(copied, experience), None
                self.reader = None  # preprocessing creates new tensors: reuse no memory from the next iteration on
            parts.append(static.time_major if static is not None else
                         nest.map_structure(lambda x: x.transpose(0, 1), experience))
            origins.append(SampleOrigin(source, batch_info))
        if not self._algorithm.capabilities.has_offline_hooks:
            return Sample(self._concatenate(parts), None, tuple(origins), static)
        collected, offline = ([part for part, source in zip(parts, sources) if source.is_offline == is_offline]
                              for is_offline in (False, True))
        return Sample(self._concatenate(collected) if collected else None,
                      self._concatenate(offline) if offline else None, tuple(origins), static)

    # Transforming ----------------------------------------------------------------------------------------------

    def processed(self, experience: Experience, batch_info: BatchInfo) -> Experience:
        """Transform and preprocess a batch ``[B, T, ...]`` of the replay buffer."""
        return self._preprocessed(self._algorithm.transform_batch(experience, batch_info,
                                                                  self._algorithm.replay_buffer), batch_info)

    def _preprocessed(self, experience: Experience, batch_info: BatchInfo) -> Experience:
        root_inputs, rollout_info = self._algorithm.preprocess_experience(experience.time_step,
                                                                          experience.rollout_info, batch_info)
        if root_inputs is not experience.time_step or rollout_info is not experience.rollout_info:
            experience = experience._replace(time_step=root_inputs, rollout_info=rollout_info)
        if self.processed_experience_spec is None:
            self.processed_experience_spec = extract_spec(experience, from_dim=2)
        return experience

    # Resume ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that are only context of later steps, such as the earlier frames of a frame stack."""
        buffer = self._algorithm.replay_buffer
        if not self._context_steps or buffer is None:
            return {}
        context_steps, _ = buffer.gather_all()
        return {'context': [x.clone() for x in nest.flatten(context_steps)]}  # not views of a shared storage

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        if 'context' not in state:
            return
        buffer = self._algorithm.replay_buffer
        assert buffer is not None, 'the replay buffer has been built'
        context_steps = [x.transpose(0, 1) for x in state['context']]
        self._context_steps = context_steps[0].shape[0]
        if not buffer.total_size:  # the checkpoint did not contain the replay buffer
            buffer.add_sequence(nest.pack_sequence_as(self._algorithm.experience_spec, context_steps))


def all_stored_experience(buffer: ReplayBuffer) -> Iterator[Experience]:
    """Yield everything in a buffer, ``[1, T, ...]`` at a time, for data transformers that compute statistics."""
    for experience, batch_info in buffer.iterate_all(_STEPS_AT_ONCE):
        yield add_batch_info(experience, batch_info, buffer)
