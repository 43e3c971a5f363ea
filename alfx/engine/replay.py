"""Training on what the replay buffer hands out: whole buffer in epochs, or sampled minibatches.

``train_from_replay_buffer`` -> ``preprocess_experience`` -> ``train_step`` -> ``calc_loss`` -> one update.
"""
from typing import TYPE_CHECKING, Any

import torch

from alfx import context, nest
from alfx.data_structures import BatchInfo, Experience, LossInfo, add_batch_info, clear_batch_info
from alfx.engine.unroll import reset_state_at_first
from alfx.engine.update import valid_masks
from alfx.experience_replayers.replay_buffer import ReplayBuffer
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
    if _steps_in(buffer) < 1 + config.clear_replay_buffer:
        return 0
    experience, batch_info = _without_context(*buffer.gather_all(), algorithm._context_steps)
    experience = _processed(algorithm, experience, batch_info)
    if config.clear_replay_buffer:  # the last step was stored to bootstrap from, see RLAlgorithm.unroll
        experience = nest.map_structure(lambda x: x[:, :-1], experience)
        algorithm._context_steps = buffer.rewind(keep=buffer.num_earliest_frames_ignored)
    sequences = _as_sequences(experience, config.mini_batch_length or 1)
    count = sequences.time_step.step_type.shape[1]
    batch_size = min(config.mini_batch_size or count, count)
    steps = 0
    for _ in range(config.num_updates_per_train_iter):
        for batch in _minibatches(sequences, count, batch_size):
            steps += _update(algorithm, batch, None, count_updates)
    return steps


def _without_context(experience: Experience, batch_info: BatchInfo, count: int) -> tuple[Experience, BatchInfo]:
    """Leave out the first ``count`` steps, which an earlier unroll has left for the frame stacks of this one."""
    if not count:
        return experience, batch_info
    batch_info = batch_info._replace(positions=batch_info.positions + count)
    return nest.map_structure(lambda x: x[:, count:], experience), batch_info


def _steps_in(buffer: ReplayBuffer) -> int:
    """How many steps of each environment are stored, on average."""
    return buffer.total_size // buffer.num_environments


def _as_sequences(experience: Experience, length: int) -> Experience:
    """Cut ``[B, T, ...]`` into sequences of ``length`` steps, time-major: ``[length, B * T / length, ...]``.

    Raises:
        ValueError: ``length`` does not divide T.
    """
    steps = experience.time_step.step_type.shape[1]
    if steps % length:
        raise ValueError(f'the replay buffer holds {steps} steps of each environment, which cannot be cut into '
                         f'sequences of TrainerConfig.mini_batch_length={length}; make unroll_length a multiple of it')

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)  # [T, B, ...]
        if length == 1:
            return x.reshape(1, -1, *x.shape[2:])
        x = x.reshape(steps // length, length, *x.shape[1:]).transpose(0, 1)
        return x.reshape(length, -1, *x.shape[3:])

    return nest.map_structure(cut, experience)


def _minibatches(sequences: Experience, count: int, batch_size: int) -> Any:
    """Yield the ``count`` sequences (dimension 1) in random order; all at once, order does not matter."""
    if batch_size == count:
        yield sequences
        return
    order = torch.randperm(count)
    for start in range(0, count, batch_size):
        index = order[start:start + batch_size]
        yield nest.map_structure(lambda x, index=index: x.index_select(1, index.to(x.device)), sequences)


def _train_on_samples(algorithm: 'Algorithm', count_updates: bool) -> int:
    """``num_updates_per_train_iter`` updates, each from a fresh sample."""
    config, buffer = algorithm._config, algorithm.replay_buffer
    assert config is not None and buffer is not None
    length = config.mini_batch_length or 1
    if buffer.total_size < config.initial_collect_steps or _steps_in(buffer) < length:
        return 0
    steps = 0
    for _ in range(config.num_updates_per_train_iter):
        experience, batch_info = buffer.get_batch(config.mini_batch_size or buffer.num_environments, length)
        experience = _processed(algorithm, experience, batch_info)
        time_major = nest.map_structure(lambda x: x.transpose(0, 1), experience)
        steps += _update(algorithm, time_major, batch_info, count_updates)
    return steps


def _processed(algorithm: 'Algorithm', experience: Experience, batch_info: BatchInfo) -> Experience:
    """Transform and preprocess a batch ``[B, T, ...]``."""
    device = algorithm.device
    if device.type != 'cpu':
        experience = experience.to(device)
    experience = clear_batch_info(algorithm.transform_experience(
        add_batch_info(experience, batch_info, algorithm.replay_buffer)))
    root_inputs, rollout_info = algorithm.preprocess_experience(experience.time_step, experience.rollout_info,
                                                                batch_info)
    experience = experience._replace(time_step=root_inputs, rollout_info=rollout_info)
    if algorithm._processed_experience_spec is None:
        algorithm._processed_experience_spec = extract_spec(experience, from_dim=2)
    return experience


def _update(algorithm: 'Algorithm', experience: Experience, batch_info: BatchInfo | None, count_updates: bool) -> int:
    """One gradient update from a minibatch ``[L, B, ...]``; returns ``L * B``."""
    if count_updates:
        context.increment_global_counter()
    train_info = compute_train_info(algorithm, experience)
    if algorithm._train_info_spec is None:
        algorithm._train_info_spec = extract_spec(train_info, from_dim=2)
    loss_info: LossInfo = algorithm.calc_loss(train_info)
    masks = valid_masks(experience.time_step.step_type)
    loss_info, params = algorithm.update_with_gradient(loss_info, masks, 1.0, batch_info)
    algorithm.after_update(experience.time_step, train_info)
    if context.should_record_summaries():
        algorithm.summarize_train(experience, train_info, loss_info, params)
    return masks.numel()


def compute_train_info(algorithm: 'Algorithm', experience: Experience) -> NestedTensor:
    """The infos ``[T, B, ...]`` of ``train_step`` for experience ``[T, B, ...]``.

    All steps at once if they are independent of each other, one after the other if a state connects them.
    """
    length, batch = experience.time_step.step_type.shape
    independent = algorithm._config.temporally_independent_train_step if algorithm._config is not None else None
    initial_state = algorithm.get_initial_train_state(batch)
    if independent is None:
        independent = not nest.flatten(initial_state)
    if independent:
        return _independent_train_info(algorithm, experience, length, batch)
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


def _independent_train_info(algorithm: 'Algorithm', experience: Experience, length: int, batch: int) -> NestedTensor:
    """``train_step`` on all ``T * B`` steps at once."""
    inputs = (experience.time_step, experience.rollout_info, experience.state)
    if length == 1:
        flat = nest.map_structure(lambda x: x[0], inputs)
    else:
        flat = nest.map_structure(lambda x: x.reshape(length * batch, *x.shape[2:]), inputs)
    time_step, rollout_info, rollout_state = flat
    state = algorithm.get_initial_train_state(length * batch)
    if nest.flatten(state) and algorithm.use_rollout_state and nest.flatten(rollout_state):
        state = nest.prune_nest_like(rollout_state, algorithm.train_state_spec)
    info = algorithm.train_step(time_step, state, rollout_info).info
    return nest.map_structure(lambda x: x.reshape(length, batch, *x.shape[1:]), info)
