"""Training on what the replay buffer hands out: whole buffer in epochs, or sampled minibatches.

``train_from_replay_buffer`` -> ``preprocess_experience`` -> ``train_step`` -> ``calc_loss`` -> one update.
"""
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from alfx import context, gin_utils, nest
from alfx.data_structures import BatchInfo, Experience, LossInfo, add_batch_info, clear_batch_info
from alfx.engine.plan import Batch, Plan
from alfx.engine.plan.program import copied
from alfx.engine.planning import plan_of
from alfx.engine.priorities import importance_weights, update_priorities
from alfx.engine.unroll import reset_state_at_first
from alfx.engine.update import counted_loss, optimize
from alfx.experience_replayers.batch_reader import BatchReader, Slot
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils.checks import problem_at
from alfx.tensor_specs import NestedTensor, extract_spec

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm


def train_from_replay_buffer(algorithm: 'Algorithm', update_global_counter: bool = False) -> int:
    """Train on the replay buffer of ``algorithm`` as its ``TrainerConfig`` says.

    Args:
        algorithm: has a replay buffer.
        update_global_counter: count each update, if ``TrainerConfig.update_counter_every_mini_batch``.

    Returns:
        The number of steps trained on, repeated ones counted each time; 0 if there is too little data yet.
    """
    config, buffer = algorithm._config, algorithm.replay_buffer
    assert config is not None and buffer is not None, 'an algorithm with a replay buffer has a config'
    count_updates = update_global_counter and config.update_counter_every_mini_batch
    with context.replay_context():
        if config.whole_replay_buffer_training:
            return _train_on_whole_buffer(algorithm, count_updates)
        return _train_on_samples(algorithm, count_updates)


def _train_on_whole_buffer(algorithm: 'Algorithm', count_updates: bool) -> int:
    """``num_updates_per_train_iter`` epochs over everything in the buffer."""
    config, buffer = algorithm._config, algorithm.replay_buffer
    assert config is not None and buffer is not None
    stored, clear, overlap = _steps_in(buffer), config.clear_replay_buffer, algorithm.bootstraps_sequences
    context_steps = algorithm._context_steps if clear else stored - (buffer.max_length -
                                                                     buffer.num_earliest_frames_ignored)
    if stored - max(context_steps, 0) < (config.mini_batch_length or 1) + (clear or overlap):
        return 0
    if not _has_collected_enough(algorithm):
        if clear:
            algorithm._context_steps = buffer.rewind(keep=buffer.num_earliest_frames_ignored)
        return 0
    experience, batch_info = _without_context(*buffer.gather_all(), max(context_steps, 0))
    experience = _processed(algorithm, experience, batch_info)
    if clear:
        algorithm._context_steps = buffer.rewind(keep=buffer.num_earliest_frames_ignored)
        if not overlap:  # the last step was stored to bootstrap from, see RLAlgorithm.unroll
            experience = nest.map_structure(lambda x: x[:, :-1], experience)
    length = _sequence_length(algorithm, experience.time_step.step_type.shape[1] - overlap)
    sequences = _as_sequences(experience, length, overlap)
    count = sequences.time_step.step_type.shape[1]
    batch_size = min(config.mini_batch_size or buffer.num_environments, count)
    records, epochs, steps = _records_each_update(algorithm), config.num_updates_per_train_iter, 0
    for epoch in range(epochs):
        for batch, is_last in _minibatches(sequences, count, batch_size):
            is_last = is_last and epoch == epochs - 1
            with context.record_if(records or (is_last and context.should_record_summaries())):
                _update(algorithm, batch, None, count_updates)
            steps += _num_trained(algorithm, batch)
    return steps


def check_sequences(config: Any, needs_previous_step: bool = False) -> None:
    """Refuse lengths of sequences that nothing can be learned from, or that would fail in a later iteration.

    Args:
        config: of the run.
        needs_previous_step: see ``Algorithm.needs_previous_step``.

    Raises:
        ConfError: ``mini_batch_length`` does not divide the steps of every unroll, or it is 1 and a part of the
            algorithm learns from pairs of steps.
    """
    length = config.mini_batch_length or (max(int(config.unroll_length), 1) if config.whole_replay_buffer_training
                                          else 1)
    if needs_previous_step and length < 2 and not config.use_rollout_state:
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'mini_batch_length', f'= {length}: a part of the algorithm learns from a step and the one '
            'before it, and finds none in sequences of one step',
            'set TrainerConfig.mini_batch_length to 2 or more, or TrainerConfig.use_rollout_state = True')])
    if config.trains_on_whole_unrolls and length > 1 and not config.unroll_length:
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'mini_batch_length', f'= {length} with TrainerConfig.unroll_length = 0: unrolls of any '
            'length cannot be cut into sequences of that one', 'set mini_batch_length to 1, or unroll_length')])
    if config.trains_on_whole_unrolls and length > 1 and config.unroll_length % length:
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'mini_batch_length', f'= {length} does not divide TrainerConfig.unroll_length = '
            f'{config.unroll_length}: an unroll cannot be cut into sequences of that length',
            'make unroll_length a multiple of it')])


def _records_each_update(algorithm: 'Algorithm') -> bool:
    """Whether every update has a counter of its own to write summaries at; otherwise only the last one writes them."""
    config = algorithm._config
    return config is not None and config.update_counter_every_mini_batch and context.should_record_summaries()


def _has_collected_enough(algorithm: 'Algorithm') -> bool:
    """Whether ``initial_collect_steps`` have been stored, in all environments together, overwritten ones included."""
    config, buffer = algorithm._config, algorithm.replay_buffer
    assert config is not None and buffer is not None
    if not config.initial_collect_steps or buffer.total_size >= config.initial_collect_steps:
        return True
    return int(buffer.current_pos.sum()) >= config.initial_collect_steps


def _sequence_length(algorithm: 'Algorithm', steps: int) -> int:
    """``mini_batch_length``; by default that of an unroll. There are ``steps`` to train on."""
    config = algorithm._config
    assert config is not None
    if config.mini_batch_length:
        return config.mini_batch_length
    return steps if config.clear_replay_buffer else min(max(int(config.unroll_length), 1), steps)


def _without_context(experience: Experience, batch_info: BatchInfo, count: int) -> tuple[Experience, BatchInfo]:
    """Leave out the first ``count`` steps, which are kept for the frame stacks of those that follow."""
    if not count:
        return experience, batch_info
    batch_info = batch_info._replace(positions=batch_info.positions + count)
    return nest.map_structure(lambda x: x[:, count:], experience), batch_info


def _steps_in(buffer: ReplayBuffer) -> int:
    """How many steps of each environment are stored, on average."""
    return buffer.total_size // buffer.num_environments


def _as_sequences(experience: Experience, length: int, overlap: bool = False) -> Experience:
    """Cut ``[B, T, ...]`` into sequences of ``length`` steps, time-major: ``[length, B * (T // length), ...]``.

    With ``overlap`` each has one step more, which is the first one of the next: ``[length + 1, B * ((T - 1) // length),
    ...]``. The oldest steps are left out if ``length`` does not divide T (T - 1).
    """
    first = (experience.time_step.step_type.shape[1] - overlap) % length

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = x[:, first:].transpose(0, 1)  # [T, B, ...]
        if length == 1 and not overlap:
            return x.reshape(1, -1, *x.shape[2:])
        x = x.unfold(0, length + overlap, length).movedim(-1, 0)  # [length, T // length, B, ...]
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return nest.map_structure(cut, experience)


def _minibatches(sequences: Experience, count: int, batch_size: int) -> Iterator[tuple[Experience, bool]]:
    """Yield the ``count`` sequences (dimension 1) in random order, and whether these are the last ones.

    All at once, order does not matter.
    """
    if batch_size == count:
        yield sequences, True
        return
    order = torch.randperm(count)
    for start in range(0, count, batch_size):
        index = order[start:start + batch_size]
        yield (nest.map_structure(lambda x, index=index: x.index_select(1, index.to(x.device)), sequences),
               start + batch_size >= count)


def _train_on_samples(algorithm: 'Algorithm', count_updates: bool) -> int:
    """``num_updates_per_train_iter`` updates, each from a fresh sample."""
    config, buffer = algorithm._config, algorithm.replay_buffer
    assert config is not None and buffer is not None
    length = config.mini_batch_length or 1
    if _steps_in(buffer) - buffer.num_earliest_frames_ignored < length or not _has_collected_enough(algorithm):
        return 0
    records, updates, steps = _records_each_update(algorithm), config.num_updates_per_train_iter, 0
    batch_size = config.mini_batch_size or buffer.num_environments
    together = min(_drawn_together(buffer, batch_size * length), updates)
    reading = _reading(algorithm, batch_size, length, together)
    samples: _Samples = (_samples(algorithm, batch_size, length, updates, together) if reading.reader is None else
                         ((slot, slot.experience, info) for info, slot in reading.reader.draw(updates, together)))
    wanted = context.should_record_summaries()
    for update, (slot, experience, batch_info) in enumerate(samples):
        with context.record_if(records or update == updates - 1) if wanted else _NOTHING:
            experience = _preprocessed(algorithm, experience, batch_info)
            if slot is not None and slot.holds(experience):
                time_major = slot.time_major
            else:
                if slot is not None:  # from the next iteration on it is done without
                    algorithm._batch_reader, slot = reading._replace(reader=None), None
                    experience = nest.map_structure(copied, experience)
                time_major = nest.map_structure(lambda x: x.transpose(0, 1), experience)
            _update(algorithm, time_major, batch_info, count_updates, slot)
        steps += _num_trained(algorithm, time_major) if slot is None else reading.num_trained
    return steps


_NOTHING = contextlib.nullcontext()  # where no summaries are wanted, nothing has to be said before each update
_Samples = Iterator[tuple[Slot | None, Experience, BatchInfo]]


class _Reading(NamedTuple):
    """How samples are read.

    Attributes:
        key: what that depends on.
        reader: reads them into the same memory each time; ``None``: they are made anew.
        num_trained: so many steps of a sample are trained on.
    """

    key: Any
    reader: BatchReader | None
    num_trained: int


def _reading(algorithm: 'Algorithm', batch_size: int, length: int, together: int) -> _Reading:
    """Samples are read into the same memory each time, where updates are played on them as they are stored."""
    buffer, transformer = algorithm.replay_buffer, algorithm.data_transformer
    plan = _plan(algorithm)
    if not plan.reads_slots or (transformer is not None and transformer.changes_experience):
        return _Reading(None, None, 0)
    key = buffer, batch_size, length, 1 if plan.takes_batches_in_place else together
    reading: _Reading | None = algorithm._batch_reader
    if reading is None or reading.key != key:
        assert buffer is not None
        reading = _Reading(key, buffer.reader(*key[1:]), (length - algorithm.bootstraps_sequences) * batch_size)
        algorithm._batch_reader = reading
    return reading


_DRAWN_TOGETHER = 2**22  # bytes of small samples that are worth it to be drawn at once


def _drawn_together(buffer: ReplayBuffer, steps: int) -> int:
    """How many samples of so many steps are drawn at a time, which saves most of the time that drawing small ones
    takes; one where what is drawn depends on the updates in between."""
    return 1 if buffer.prioritized_sampling else max(_DRAWN_TOGETHER // (steps * buffer.bytes_per_step), 1)


def _samples(algorithm: 'Algorithm', batch_size: int, length: int, count: int, together: int) -> _Samples:
    """Transformed samples ``[batch_size, length, ...]`` for ``count`` updates."""
    buffer = algorithm.replay_buffer
    assert buffer is not None
    while count:
        number = min(together, count)
        count -= number
        experience, batch_info = buffer.get_batch(batch_size * number, length)
        experience = _transformed(algorithm, experience, batch_info)
        if number == 1:
            yield None, experience, batch_info
        else:
            leaves, tree = nest.flatten_with_structure((experience, batch_info._replace(replay_buffer=())))
            for parts in zip(*(x.split(batch_size) for x in leaves)):
                part, part_info = nest.unflatten(tree, parts)
                yield None, part, part_info._replace(replay_buffer=buffer)


def _processed(algorithm: 'Algorithm', experience: Experience, batch_info: BatchInfo) -> Experience:
    """Transform and preprocess a batch ``[B, T, ...]``."""
    return _preprocessed(algorithm, _transformed(algorithm, experience, batch_info), batch_info)


def _transformed(algorithm: 'Algorithm', experience: Experience, batch_info: BatchInfo) -> Experience:
    """What the data transformer makes of a batch ``[B, T, ...]``."""
    device = algorithm.device
    if device.type != 'cpu':
        experience = experience.to(device)
    return clear_batch_info(algorithm.transform_experience(
        add_batch_info(experience, batch_info, algorithm.replay_buffer)))


def _preprocessed(algorithm: 'Algorithm', experience: Experience, batch_info: BatchInfo) -> Experience:
    """What ``preprocess_experience`` makes of a batch ``[B, T, ...]``."""
    root_inputs, rollout_info = algorithm.preprocess_experience(experience.time_step, experience.rollout_info,
                                                                batch_info)
    if root_inputs is not experience.time_step or rollout_info is not experience.rollout_info:
        experience = experience._replace(time_step=root_inputs, rollout_info=rollout_info)
    if algorithm._processed_experience_spec is None:
        algorithm._processed_experience_spec = extract_spec(experience, from_dim=2)
    return experience


def _num_trained(algorithm: 'Algorithm', experience: Experience) -> int:
    """How many steps of a minibatch ``[L, B, ...]`` are trained on."""
    length, batch = experience.time_step.step_type.shape
    return (length - algorithm.bootstraps_sequences) * batch


def _update(algorithm: 'Algorithm', experience: Experience, batch_info: BatchInfo | None, count_updates: bool,
            slot: Slot | None = None) -> None:
    """One gradient update from a minibatch ``[L, B, ...]``, which is in ``slot`` for now, if anything is."""
    if count_updates:
        context.increment_global_counter()
    config = algorithm._config
    if batch_info is not None and config is not None:
        batch_info = importance_weights(config, batch_info)
    weights = batch_info.importance_weights if batch_info is not None else ()
    computed, params = optimize(algorithm, _plan(algorithm), Batch(experience, weights, slot))
    if batch_info is not None and config is not None:
        update_priorities(config, algorithm.replay_buffer, batch_info, computed.loss_info)
    algorithm.after_update(experience.time_step, computed.train_info)
    if context.should_record_summaries():
        algorithm.summarize_train(experience, computed.train_info, computed.loss_info, params)


def _plan(algorithm: 'Algorithm') -> Plan:
    return plan_of(algorithm, _losses)


def _losses(algorithm: 'Algorithm', experience: Experience) -> tuple[LossInfo, torch.Tensor, NestedTensor]:
    """``Objective.losses`` of a minibatch ``[T, B, ...]``."""
    train_info = compute_train_info(algorithm, experience)
    if algorithm._train_info_spec is None:
        algorithm._train_info_spec = extract_spec(train_info, from_dim=2)
    loss_info, masks = counted_loss(algorithm, algorithm.calc_loss(train_info), experience.time_step.step_type)
    return loss_info, masks, train_info


def compute_train_info(algorithm: 'Algorithm', experience: Experience) -> NestedTensor:
    """The infos ``[T, B, ...]`` of ``train_step`` for experience ``[T, B, ...]``.

    All steps at once where the algorithm can, one after the other where a state connects them.
    """
    length, batch = experience.time_step.step_type.shape
    independent = algorithm._config.temporally_independent_train_step if algorithm._config is not None else None
    if independent is None:
        independent = algorithm.trains_sequences_at_once
    if independent:
        return _train_info_at_once(algorithm, experience, length, batch)
    initial_state = algorithm.get_initial_train_state(batch)
    state = initial_state
    if algorithm.use_rollout_state and nest.flatten(experience.state):
        first = nest.map_structure(lambda x: x[0], experience.state)
        state = nest.prune_nest_like(first, algorithm.train_state_spec)
    infos = []
    for t in range(length):
        time_step, rollout_info = nest.map_structure(
            lambda x, t=t: x[t], (experience.time_step, experience.rollout_info))
        step = algorithm.train_step(time_step, reset_state_at_first(state, initial_state, time_step), rollout_info)
        state = step.state
        infos.append(step.info)
    return nest.stack(infos)


def _train_info_at_once(algorithm: 'Algorithm', experience: Experience, length: int, batch: int) -> NestedTensor:
    """``train_sequence``, with the state of the rollout or zeros at each step."""
    state = algorithm.get_initial_train_state(length * batch)
    if nest.flatten(state):
        if algorithm.use_rollout_state and nest.flatten(experience.state):
            state = nest.prune_nest_like(experience.state, algorithm.train_state_spec)
        else:
            state = nest.map_structure(lambda x: x.reshape(length, batch, *x.shape[1:]), state)
    return algorithm.train_sequence(experience.time_step, state, experience.rollout_info).info
