"""Cut the contents of a replay buffer into minibatches, and compute the training infos of a minibatch.

:class:`~alfx.engine.batches.Batches` decides in which order these functions are called.
"""
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from alfx import context, gin_utils, nest
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, Experience, reset_at_first
from alfx.engine.capabilities import Capabilities
from alfx.engine.contract import Trains
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils.value_checks import problem_at
from alfx.tensor_specs import NestedTensor

_logger = logging.getLogger(__name__)
_BYTES_PER_DRAW = 2**22  # small samples are drawn together up to this size


def check_sequences(settings: TrainerConfig, capabilities: Capabilities = Capabilities()) -> None:
    """Raise an error for sequence lengths from which nothing can be learned, or that would fail in a later iteration.

    ALF trains on samples of one step whose state holds the previous step. An algorithm that reads both steps from the
    sample needs two, so its ``mini_batch_length = 1`` becomes 2, unless whole unrolls are cut into sequences.

    Args:
        settings: configuration of the run.
        capabilities: capabilities of the algorithm.

    Raises:
        ConfError: ``mini_batch_length`` does not divide the steps of every unroll, or it is 1 and a part of the
            algorithm learns from pairs of steps.
    """
    length = settings.mini_batch_length or (max(int(settings.unroll_length), 1) if settings.whole_replay_buffer_training
                                          else 1)
    reads_pairs = capabilities.needs_two_steps and not (settings.whole_replay_buffer_training
                                                        and capabilities.bootstraps_sequences)
    if reads_pairs and settings.mini_batch_length == 1 and not settings.trains_on_whole_unrolls:
        _logger.info('TrainerConfig.mini_batch_length = 1 is read as 2: the algorithm learns from a step and the one '
                     'before, and two steps are one transition')
        settings.mini_batch_length = 2
    elif length < 2 and (reads_pairs or capabilities.needs_previous_step and not settings.use_rollout_state):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'mini_batch_length', f'= {length}: a part of the algorithm learns from pairs of '
            'steps, and sequences of one step contain no pair',
            'set TrainerConfig.mini_batch_length to 2 or more' +
            ('' if capabilities.needs_two_steps else ', or TrainerConfig.use_rollout_state = True'))])
    if settings.trains_on_whole_unrolls and length > 1 and not settings.unroll_length:
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'mini_batch_length', f'= {length} with TrainerConfig.unroll_length = 0: unrolls of '
            'varying length cannot be cut into sequences of this length',
            'set mini_batch_length to 1, or set unroll_length')])
    if (settings.trains_on_whole_unrolls and settings.mini_batch_length and length > 1
            and settings.unroll_length % length):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'mini_batch_length', f'= {length} does not divide TrainerConfig.unroll_length = '
            f'{settings.unroll_length}: an unroll cannot be cut into sequences of this length',
            'make unroll_length a multiple of mini_batch_length')])


def has_collected(buffer: ReplayBuffer, steps: int) -> bool:
    """Return whether ``steps`` steps have been stored, summed over environments, including overwritten ones."""
    return not steps or buffer.total_size >= steps or int(buffer.current_pos.sum()) >= steps


def can_sample(buffer: ReplayBuffer, length: int, initial_steps: int) -> bool:
    """Return whether ``initial_steps`` have been collected and sequences of ``length`` steps are available."""
    return steps_in(buffer) - buffer.num_earliest_frames_ignored >= length and has_collected(buffer, initial_steps)


def steps_in(buffer: ReplayBuffer) -> int:
    """Return the number of stored steps per environment, on average."""
    return buffer.total_size // buffer.num_environments


def sequence_length(settings: TrainerConfig, steps: int) -> int:
    """Return ``mini_batch_length``; by default the length of an unroll, at most ``steps``, the steps to train on."""
    if settings.mini_batch_length:
        return settings.mini_batch_length
    return steps if settings.clear_replay_buffer else min(max(int(settings.unroll_length), 1), steps)


def drop_context(experience: Experience, batch_info: BatchInfo, count: int) -> tuple[Experience, BatchInfo]:
    """Drop the first ``count`` steps, which are stored only for the frame stacks of later steps."""
    if not count:
        return experience, batch_info
    batch_info = batch_info._replace(positions=batch_info.positions + count)
    return nest.map_structure(lambda x: x[:, count:], experience), batch_info


def as_sequences(experience: Experience, length: int, overlap: bool = False) -> Experience:
    """Cut ``[B, T, ...]`` into sequences of ``length`` steps, time-major: ``[length, B * (T // length), ...]``.

    With ``overlap`` each sequence has one more step, the first step of the next sequence: ``[length + 1, B * ((T - 1)
    // length), ...]``. The oldest steps are dropped if ``length`` does not divide T (or T - 1).
    """
    first = (experience.time_step.step_type.shape[1] - overlap) % length

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = x[:, first:].transpose(0, 1)  # [T, B, ...]
        if length == 1 and not overlap:
            return x.reshape(1, -1, *x.shape[2:])
        x = x.unfold(0, length + overlap, length).movedim(-1, 0)  # [length, T // length, B, ...]
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return nest.map_structure(cut, experience)


def minibatches(sequences: Experience, count: int, batch_size: int) -> Iterator[tuple[Experience, bool]]:
    """Yield minibatches of ``count`` sequences (dimension 1) in random order, each with a flag for the last one.

    A single minibatch of all sequences keeps their order.
    """
    if batch_size == count:
        yield sequences, True
        return
    order = torch.randperm(count)
    for start in range(0, count, batch_size):
        index = order[start:start + batch_size]
        yield (nest.map_structure(lambda x, index=index: x.index_select(1, index.to(x.device)), sequences),
               start + batch_size >= count)


def samples_per_draw(buffer: ReplayBuffer, steps: int) -> int:
    """Return how many samples of ``steps`` steps to draw at once: many small ones take little longer than one.

    The result is 1 if an update changes the probabilities of the next sample, or if each sample has its own share of
    recent sequences.
    """
    draws_each = buffer.prioritized_sampling or buffer.recent_data_ratio
    return 1 if draws_each else max(_BYTES_PER_DRAW // (steps * buffer.bytes_per_step), 1)


def compute_train_info(algorithm: Trains, experience: Experience, independent: bool, offline: bool = False
                       ) -> NestedTensor:
    """Compute the infos ``[T, B, ...]`` of ``train_step`` for experience ``[T, B, ...]``.

    Args:
        algorithm: algorithm to train.
        experience: ``[T, B, ...]``.
        independent: compute all steps at once; otherwise one after the other, connected by the state.
        offline: compute the infos of ``train_step_offline`` instead.
    """
    length, batch = experience.time_step.step_type.shape
    train_step: Any = algorithm.train_step
    train_sequence: Any = algorithm.train_sequence
    if offline:
        train_step, train_sequence = (partial(step, pre_train=context.is_pretrain()) for step in
                                      (algorithm.train_step_offline, algorithm.train_sequence_offline))
    if independent:
        return _train_info_at_once(algorithm, train_sequence, experience, length, batch)
    initial_state = algorithm.get_initial_train_state(batch)
    state = initial_state
    if algorithm.use_rollout_state and nest.flatten(experience.state):
        first = nest.map_structure(lambda x: x[0], experience.state)
        state = nest.prune_nest_like(first, algorithm.train_state_spec)
    infos = []
    for t in range(length):
        time_step, rollout_info = nest.map_structure(
            lambda x, t=t: x[t], (experience.time_step, experience.rollout_info))
        step = train_step(time_step, reset_at_first(state, initial_state, time_step), rollout_info)
        state = step.state
        infos.append(step.info)
    return nest.stack(infos)


def _train_info_at_once(algorithm: Trains, train_sequence: Callable[..., AlgStep], experience: Experience, length: int,
                        batch: int) -> NestedTensor:
    """Call ``train_sequence`` with the rollout state, or with zeros, at each step."""
    state = algorithm.get_initial_train_state(length * batch)
    if nest.flatten(state):
        if algorithm.use_rollout_state and nest.flatten(experience.state):
            state = nest.prune_nest_like(experience.state, algorithm.train_state_spec)
        else:
            state = nest.map_structure(lambda x: x.reshape(length, batch, *x.shape[1:]), state)
    return train_sequence(experience.time_step, state, experience.rollout_info).info
