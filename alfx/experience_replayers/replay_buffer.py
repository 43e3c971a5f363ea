"""The replay buffer: the last steps of each environment, from which sequences are sampled.

Storage and look-up are in :mod:`~alfx.experience_replayers.ring_buffer`, sampling is in
:mod:`~alfx.experience_replayers.sampling` and :mod:`~alfx.experience_replayers.priorities`, and episodes are tracked in
:mod:`~alfx.experience_replayers.episodes` and :mod:`~alfx.experience_replayers.episodic_returns`.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Annotated, Any, Optional

import numpy as np
import torch
from torch import Tensor

from alfx import context, gin_utils, nest
from alfx.data_structures import BatchInfo
from alfx.experience_replayers.batch_reader import BatchReader, StaticBatch
from alfx.experience_replayers.episode_records import EpisodeRecords, Leaves
from alfx.experience_replayers.episodes import Episodes
from alfx.experience_replayers.episodic_returns import EpisodicReturns
from alfx.experience_replayers.priorities import Priorities, join_priorities, share_of_priorities
from alfx.experience_replayers.ring_buffer import RingBuffer, atomic, require_at_least
from alfx.experience_replayers.sampling import Sample, SequenceSampler
from alfx.gin_utils.value_checks import Count, Fraction, Range, log_unused, non_default
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils.transfers import to_device


_CHECKPOINT_LIMIT = 256 * 2**20


@gin_utils.configurable
class ReplayBuffer(RingBuffer):
    """Replay buffer for several environments; samples sequences uniformly or by priority.

    A sequence consists of consecutive steps of one environment. It never crosses the point where the newest step has
    overwritten the oldest.

    Args:
        data_spec: nest of specs of the data of one step of one environment; may contain distributions.
        num_environments: number of environments.
        max_length: number of steps that are kept for each environment.
        num_earliest_frames_ignored: number of oldest steps of each environment that are kept but not sampled, so that
            the context of a sampled step (a frame stack) can be looked up.
        prioritized_sampling: sample sequences in proportion to their priorities, see :meth:`update_priority`.
        initial_priority: priority of new steps until the first :meth:`update_priority`, above 0. After that new steps
            get the largest priority set so far.
        new_priority_period: number of calls of :meth:`update_priority` after which new steps get the largest of the
            stored priorities instead, until a larger one is set; smaller values forget large errors of the past
            earlier. 0: never.
        recent_data_steps: number of latest sequences of each environment that count as recent. With
            ``recent_data_steps = 1`` it is the sequence that ends with the newest step.
        recent_data_ratio: fraction of each batch that is drawn, uniformly, from the recent sequences alone, from 0 to
            1; the rest is drawn from all. Zhang and Sutton 2017 (arXiv:1712.01275) make one sequence of a batch the
            newest one.
        with_replacement: for uniform sampling: a batch may contain the same sequence more than once. Without
            replacement this still happens if there are fewer sequences than the updates of an iteration draw together,
            or if a recent sequence is also among those drawn from all. For prioritized sampling: draw independently;
            otherwise the draws are stratified, one from each of B parts of equal total priority.
        device: device of the storage: 'cpu' for host memory, which is larger, and from which samples are copied to a
            GPU while it computes; 'cuda' or 'cuda:N' for GPU memory, which needs no copies.
        allow_multiprocess: the buffer can be passed to other processes, which then store into and sample from the same
            memory, one at a time.
        keep_episodic_info: track episodes, for :meth:`steps_to_episode_end` and similar methods; needs a field
            ``step_type``. None: only if another argument needs it, or if the property of that name is set later.
        record_episodic_return: add to each batch the discounted return from each step to the termination of its
            episode, for example as a lower bound of values. Needs ``step_type``, ``reward`` and ``discount``; the
            stored values are used, before any data transformer. See :mod:`~alfx.experience_replayers.episodic_returns`.
        default_return: value for the unknown return of a running or truncated episode.
        gamma: discount factor of the returns, multiplied by the discount of the environment.
        return_after_truncation: return from the end of a truncated episode on, from which earlier returns follow: 0 if
            no reward is negative, or another lower bound. None: unknown.
        reward_clip: minimum and maximum reward for the returns; None for no limits.
        enable_checkpoint: include the contents in :meth:`state_dict`. None: only if they take at most
            :attr:`checkpoint_limit`.
        memory_map_dir: folder for memory-mapped storage in unnamed files, which are deleted together with the buffer.
            None for storage in memory.
        name: name of this buffer in error messages.

    Attributes:
        checkpoint_limit: maximum size, in bytes, of contents that are saved with ``enable_checkpoint = None``.
        returns: discounted returns of all slots; ``None`` if they are not recorded.

    Raises:
        ValueError: an argument is out of range, conflicts with another, or needs a field that ``data_spec`` lacks.
    """

    def __init__(self, data_spec: NestedTensorSpec, num_environments: Count, max_length: Count = 1024,
                 num_earliest_frames_ignored: Annotated[int, Range(minimum=0)] = 0, prioritized_sampling: bool = False,
                 initial_priority: Annotated[float, Range(above=0, below=float('inf'))] = 1.0,
                 recent_data_steps: Count = 1, recent_data_ratio: Fraction = 0.0, with_replacement: bool = False,
                 device: str | torch.device = 'cpu', allow_multiprocess: bool = False,
                 keep_episodic_info: Optional[bool] = None, record_episodic_return: bool = False,
                 default_return: float = -1000.0, gamma: Fraction = 0.99,
                 reward_clip: Optional[tuple[float, float]] = None, enable_checkpoint: Optional[bool] = None,
                 name: str = 'ReplayBuffer', memory_map_dir: Optional[str] = None,
                 return_after_truncation: Optional[float] = None,
                 new_priority_period: Annotated[int, Range(minimum=0)] = 0) -> None:
        if new_priority_period and not prioritized_sampling:
            raise ValueError(f'{name}.new_priority_period: expected 0 without prioritized_sampling, found '
                             f'{new_priority_period}; set TrainerConfig.priority_replay = True or remove it')
        super().__init__(data_spec, num_environments, max_length, device, allow_multiprocess, memory_map_dir, name)
        if num_earliest_frames_ignored >= max_length:
            raise ValueError(f'{name}.num_earliest_frames_ignored: expected less than max_length ({max_length}), found '
                             f'{num_earliest_frames_ignored}: no step could ever be sampled')
        self.num_earliest_frames_ignored = num_earliest_frames_ignored
        self.enable_checkpoint = enable_checkpoint
        self.checkpoint_limit = _CHECKPOINT_LIMIT
        self.initial_priority = initial_priority
        self._priorities = None
        if prioritized_sampling:
            self._priorities = Priorities(self._rings, initial_priority, allow_multiprocess, new_priority_period)
        self._sampler = SequenceSampler(self._rings, num_earliest_frames_ignored, with_replacement, recent_data_steps,
                                        recent_data_ratio, self._priorities)
        self.recent_data_ratio = recent_data_ratio
        if recent_data_steps != 1 and not recent_data_ratio:
            raise ValueError(f'{name}.recent_data_steps: expected no value with recent_data_ratio = 0, found '
                             f'{recent_data_steps}')
        self.returns = None
        if record_episodic_return:
            self.returns = self._make_returns(keep_episodic_info, gamma, default_return, reward_clip,
                                              return_after_truncation)
        else:
            unused = 'default_return', 'gamma', 'reward_clip', 'return_after_truncation'
            log_unused('ReplayBuffer', non_default(ReplayBuffer.__init__, locals(), *unused),
                       'record_episodic_return is False')
        self._records: Optional[EpisodeRecords] = None
        self._refuses_episodes = keep_episodic_info is False
        self.keep_episodic_info = bool(keep_episodic_info or record_episodic_return)

    def _make_returns(self, keep_episodic_info: Optional[bool], gamma: float, default_return: float,
                      reward_clip: Optional[tuple[float, float]],
                      return_after_truncation: Optional[float]) -> EpisodicReturns:
        if keep_episodic_info is False:
            raise ValueError(f'{self.name}.keep_episodic_info: expected True or None with record_episodic_return = '
                             'True, found False')
        for argument, value in (('default_return', default_return),
                                ('return_after_truncation', return_after_truncation)):
            if value is not None and not np.isfinite(value):
                raise ValueError(f'{self.name}.{argument}: expected a finite number, found {value}')
        if reward_clip is not None and not (len(reward_clip) == 2 and reward_clip[0] <= reward_clip[1]):
            raise ValueError(f'{self.name}.reward_clip: expected (smallest, largest) or None, found {reward_clip}')
        self._leaf('record_episodic_return', 'discount')
        shape = self._shapes[self._leaf('record_episodic_return', 'reward')]
        return EpisodicReturns(self._rings, shape, gamma, default_return, reward_clip,
                               return_after_truncation, self._lock is not None)

    def num_bytes(self, num_rows: int) -> int:
        """Return the size of ``num_rows`` steps of all environments in bytes."""
        return num_rows * self.num_environments * (self._store.bytes_per_slot + (0 if self._priorities is None else 4))

    @property
    def prioritized_sampling(self) -> bool:
        """Return whether sequences are sampled by priority."""
        return self._priorities is not None

    @property
    def keep_episodic_info(self) -> bool:
        """Return whether the buffer tracks episodes. Setting it to True rebuilds the records from the stored steps.

        Raises:
            ValueError: the experience has no field ``step_type``; or returns are recorded, which need it; or the buffer
                was created with False.
        """
        return self._records is not None

    @keep_episodic_info.setter
    def keep_episodic_info(self, keep: bool) -> None:
        if not keep and self.returns is not None:
            raise ValueError(f'{self.name}.keep_episodic_info: expected True with record_episodic_return = True, found '
                             'False')
        if keep and self._refuses_episodes:
            raise ValueError(f'{self.name}.keep_episodic_info: expected True or None, because the algorithm needs it, '
                             'found False')
        if not keep:
            self._records = None
        elif self._records is None:
            leaves = Leaves(self._leaf('keep_episodic_info', 'step_type'), self._find_leaf('discount'),
                            self._find_leaf('reward'))
            self._records = EpisodeRecords(self._rings, self._store, leaves, self.returns, self._lock is not None)

    # Sampling -------------------------------------------------------------------------------------------------

    @atomic
    def get_batch(self, batch_size: int, batch_length: int, uniform: bool = False) -> tuple[NestedTensor, BatchInfo]:
        """Sample sequences uniformly or by priority.

        Args:
            batch_size: number B of sequences.
            batch_length: number T of steps in each.
            uniform: draw all sequences with the same probability, despite priorities and ``recent_data_ratio``.

        Returns:
            tuple:
            - nest ``[B, T, ...]`` on the default device
            - ``BatchInfo`` with ``env_ids [B]`` and ``positions [B]`` (of the first steps) on the default device,
              ``replay_buffer`` and, with prioritized sampling, ``importance_weights [B]``: N * P, where N is the number
              of sequences that could have been sampled and P the probability of this one (its expected fraction of the
              batch). It is 1 for all if all priorities are the same; a loss is corrected for the sampling by
              multiplying it with ``(N * P) ** -beta``. With ``record_episodic_return`` also
              ``discounted_return [B, T]`` (``[B, T, K]`` for K-dimensional rewards).

        Raises:
            ValueError: no environment has ``batch_length`` steps (besides the ignored ones), or all priorities are 0.
        """
        require_at_least(f'{self.name}.get_batch', 1, batch_size=batch_size, batch_length=batch_length)
        sample = self._sample(batch_size, batch_length, uniform)
        return self._batch(sample.env_ids, sample.positions, batch_length, sample.relative_probabilities)

    def _sample(self, batch_size: int, batch_length: int, uniform: bool = False) -> Sample:
        """Draw sequences.

        Raises:
            ValueError: see :meth:`get_batch`.
        """
        try:
            sample = self._sampler.sample(batch_size, batch_length, uniform)
        except ValueError as error:
            raise ValueError(f'{self.name}.get_batch: the priorities of all sequences are 0; update_priority has to '
                             'set some above 0 (TrainerConfig.priority_replay_eps)') from error
        if sample is None:
            count = self.num_earliest_frames_ignored
            ignored = f' besides the {count} oldest, which are ignored' if count else ''
            raise ValueError(f'{self.name}.get_batch: expected an environment with at least {batch_length} steps'
                             f'{ignored}, found {self.current_size.tolist()} (max_length is {self.max_length}); '
                             'collect more before sampling (TrainerConfig.initial_collect_steps)')
        return sample

    def reader(self, batch_size: int, batch_length: int, slots: int = 1) -> BatchReader | None:
        """Return a sampler like :meth:`get_batch` that reuses the same memory for ``slots`` minibatches.

        ``None`` if this is not possible: the storage is not in host memory, samples are for another device, other
        processes use the buffer, or a subclass overrides :meth:`get_batch`.
        """
        if (self._lock is not None or self.device.type != 'cpu' or context.get_default_device().type != 'cpu'
                or type(self).get_batch is not ReplayBuffer.get_batch):
            return None
        leaves, read = self._store.static_slots((slots, batch_length, batch_size))
        return BatchReader([StaticBatch(self._tree.unflatten(of_one))
                            for of_one in zip(*(x.unbind() for x in leaves))], read,
                           lambda count: self._draw(batch_size, batch_length, count))

    def _draw(self, batch_size: int, length: int, count: int) -> tuple[list[BatchInfo], np.ndarray]:
        """Return the batch infos and the slots, int64 ``[count, T * B]``, of ``count`` minibatches drawn together."""
        env_ids, positions, probabilities = self._sample(batch_size * count, length)
        steps = self._rings.slots_from(positions, length, env_ids)  # [T, count * B]
        slots = steps.reshape(length, count, batch_size).swapaxes(0, 1).reshape(count, -1)

        def of_each(x: np.ndarray) -> Iterable[Tensor]:
            return map(torch.from_numpy, x.reshape(count, batch_size))

        weights: Iterable[Any] = repeat(()) if probabilities is None else of_each(probabilities)
        returns: Iterable[Any] = repeat(())
        if self.returns is not None:
            found = self.returns.get(slots.reshape(-1))
            found = found.reshape(count, length, batch_size, *found.shape[1:]).swapaxes(1, 2)
            returns = map(torch.from_numpy, found)
        return list(map(BatchInfo, of_each(env_ids), of_each(positions), weights, repeat(self), returns)), slots

    @atomic
    def update_priority(self, env_ids: Tensor, positions: Tensor, priorities: Tensor) -> None:
        """Set the priorities of sequences, usually those of a batch after training on it.

        Sequences whose first step is no longer in the buffer are ignored. If a sequence occurs more than once, its last
        priority counts.

        Args:
            env_ids: int64 ``[B]``, as in ``BatchInfo``.
            positions: int64 ``[B]``: positions of the first steps.
            priorities: float ``[B]``; the probabilities are proportional to them, so exponents have to be applied
                before.

        Raises:
            ValueError: the buffer samples uniformly, the shapes differ, there is no such environment, or a priority is
                negative, NaN or infinite.
        """
        if self._priorities is None:
            raise ValueError(f'{self.name}.update_priority: expected a buffer with prioritized_sampling = True, found '
                             'False')
        if priorities.ndim != 1 or not priorities.shape == env_ids.shape == positions.shape:
            raise ValueError(f'{self.name}.update_priority: expected env_ids, positions and priorities of the same '
                             f'shape [B], found {tuple(env_ids.shape)}, {tuple(positions.shape)} and '
                             f'{tuple(priorities.shape)}')
        values = priorities.detach().cpu().numpy().astype(np.float32, copy=False)
        if values.size and not (values.min() >= 0 and values.max() < np.inf):
            bad = [float(x) for x in values if not 0 <= x < np.inf][:5]
            raise ValueError(f'{self.name}.update_priority: expected finite priorities of at least 0, found {bad}')
        self._priorities.update(self._checked_range('update_priority', env_ids), positions.cpu().numpy(), values)

    @atomic
    def gather_all(self, ignore_earliest_frames: bool = False) -> tuple[NestedTensor, BatchInfo]:
        """Return all steps in the buffer, in order of time.

        Args:
            ignore_earliest_frames: exclude ``num_earliest_frames_ignored`` steps.

        Returns:
            The same as :meth:`get_batch`, with B = ``num_environments`` and T = the number of steps of each.

        Raises:
            ValueError: there are no steps, or the environments have different numbers of steps.
        """
        ignored = self.num_earliest_frames_ignored if ignore_earliest_frames else 0
        sizes = self._rings.sizes()
        length = int(sizes[0]) - ignored
        if (sizes != sizes[0]).any():
            raise ValueError(f'{self.name}.gather_all: expected the same number of steps for each environment, found '
                             f'{sizes.tolist()}; sample with get_batch, or store all environments together')
        if length <= 0:
            raise ValueError(f'{self.name}.gather_all: expected more than {ignored} steps, found {int(sizes[0])}')
        return self._batch(self._rings.all_envs.copy(), self._rings.positions() - length, length)

    @atomic
    def get_sequences(self, env_ids: Tensor, positions: Tensor, length: int) -> tuple[NestedTensor, BatchInfo]:
        """Return the sequences at given positions.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``: position of the first step of each sequence.
            length: T, the same for all.

        Returns:
            The same as :meth:`get_batch`.

        Raises:
            ValueError: a step is not (or no longer) in the buffer.
        """
        envs, steps = self._held('get_sequences', env_ids, positions)
        self._held('get_sequences', env_ids, positions + (length - 1))
        return self._batch(envs, steps, length)

    def iterate_all(self, length: int) -> Iterator[tuple[NestedTensor, BatchInfo]]:
        """Yield all stored steps, one environment after the other.

        Args:
            length: maximum length of a part.

        Yields:
            Parts ``[1, T, ...]``, each like the result of :meth:`get_batch`.
        """
        for env_id, (first, end) in enumerate(zip(self._rings.first(), self._rings.positions())):
            for start in range(int(first), int(end), length):
                yield self._batch(np.array([env_id]), np.array([start]), min(length, int(end) - start))

    @atomic
    def dequeue(self, n: int = 1, env_ids: Optional[Tensor] = None) -> tuple[NestedTensor, BatchInfo]:
        """Remove the oldest steps from the buffer, including those that are not sampled, and return them.

        Args:
            n: number of steps of each environment.
            env_ids: int64 ``[B]``: distinct environments; None for all.

        Returns:
            The same as :meth:`get_batch`, with T = ``n``.

        Raises:
            ValueError: an environment has fewer steps, or ``env_ids`` are not distinct environments of the buffer.
        """
        require_at_least(f'{self.name}.dequeue', 1, n=n)
        envs = self._rings.all_envs.copy() if env_ids is None else self._check_env_ids(env_ids)
        sizes = self._rings.sizes()[envs]
        if not len(envs) or sizes.min() < n:
            raise ValueError(f'{self.name}.dequeue: expected at least {n} steps of each environment, found '
                             f'{sizes.tolist()}')
        batch = self._batch(envs, self._rings.first()[envs], n)
        self._rings.drop_oldest(n, None if env_ids is None else envs)
        self._dropped(envs[:0])
        return batch

    def _batch(self, env_ids: np.ndarray, positions: np.ndarray, length: int,
               weights: Optional[np.ndarray] = None) -> tuple[NestedTensor, BatchInfo]:
        """Return the steps from ``positions`` on, and their batch info."""
        experience, slots = self._read(env_ids, positions, length)
        found = {'env_ids': torch.from_numpy(env_ids), 'positions': torch.from_numpy(positions)}
        if weights is not None:
            found['importance_weights'] = torch.from_numpy(weights)
        if self.returns is not None:
            returns = torch.from_numpy(self.returns.get(slots.numpy()))
            found['discounted_return'] = returns.view(len(env_ids), length, *returns.shape[1:])
        device = context.get_default_device()
        if device.type != 'cpu':
            found = to_device(found, device)
        return experience, BatchInfo(replay_buffer=self, **found)

    # Episodes -------------------------------------------------------------------------------------------------

    @atomic
    def steps_to_episode_end(self, positions: Tensor, env_ids: Tensor) -> Tensor:
        """Return the number of steps from given steps to the last (if it is running, the newest) step of their episode.

        Args:
            positions: int64, any shape that broadcasts with ``env_ids``.
            env_ids: int64.

        Returns:
            int64, of the broadcast shape and on the device of ``positions``; 0 at the last step itself.

        Raises:
            ValueError: a position is not (or no longer) in the buffer, or the buffer does not track episodes.
        """
        return self._look_up('steps_to_episode_end', lambda of, steps, envs: of.ends(steps, envs) - steps, positions,
                             env_ids)

    @atomic
    def get_episode_begin_position(self, positions: Tensor, env_ids: Tensor) -> Tensor:
        """Return the positions of the first steps of the episodes of given steps.

        If the first step is no longer in the buffer, return the position of the oldest step there.

        Args:
            positions: int64, any shape that broadcasts with ``env_ids``.
            env_ids: int64.

        Returns:
            int64, of the broadcast shape and on the device of ``positions``.

        Raises:
            ValueError: a position is not (or no longer) in the buffer, or the buffer does not track episodes.
        """
        return self._look_up('get_episode_begin_position', Episodes.begins, positions, env_ids)

    @atomic
    def get_disc_0_begin_position(self, positions: Tensor, env_ids: Tensor) -> Tensor:
        """Return the positions of the earliest steps whose discounted return includes given steps.

        It is the last earlier step of the same episode with a discount of 0, because the rewards for arriving there or
        earlier are independent of later ones; otherwise the first step of the episode that is still in the buffer. If
        discounts are 0 only where an episode ends, the result is that of :meth:`get_episode_begin_position`.

        Args:
            positions: int64, any shape that broadcasts with ``env_ids``.
            env_ids: int64.

        Returns:
            int64, of the broadcast shape and on the device of ``positions``.

        Raises:
            ValueError: a position is not (or no longer) in the buffer, the buffer does not track episodes, or the
                experience has no field ``discount``.
        """
        self._leaf('get_disc_0_begin_position', 'discount')
        return self._look_up('get_disc_0_begin_position', Episodes.return_begins, positions, env_ids)

    def _look_up(self, method: str, function: Callable[[Episodes, np.ndarray, np.ndarray], np.ndarray],
                 positions: Tensor, env_ids: Tensor) -> Tensor:
        if self._records is None:
            raise ValueError(f'{self.name}.{method}: expected a buffer that tracks episodes, found '
                             'keep_episodic_info = False; set it to True first')
        envs, steps = self._held(method, env_ids, positions)
        return torch.from_numpy(function(self._records.episodes, steps, envs)).to(positions.device)

    def _leaf(self, needed_by: str, field: str) -> int:
        """Return the index of the leaf with this name.

        Raises:
            ValueError: there is no such leaf.
        """
        leaf = self._find_leaf(field)
        if leaf is None:
            raise ValueError(f"{self.name}.{needed_by}: expected a field '{field}' in the experience, found none in "
                             f'{[path for path, _ in nest.flatten_with_path(self.data_spec)]}')
        return leaf

    # Updates after changes of the storage ---------------------------------------------------------------------

    def _stored(self, positions: Any, num_steps: int, env_ids: np.ndarray, leaves: Sequence[Tensor]) -> None:
        if self._priorities is not None:
            self._priorities.store(self._rings.slots_from(positions, num_steps, env_ids))
        if self._records is not None:
            self._records.stored(positions, num_steps, env_ids, leaves)

    def _dropped(self, env_ids: np.ndarray) -> None:
        if self._priorities is not None:
            length = self._priorities.length
            self._priorities.set_window(*self._rings.window(self.num_earliest_frames_ignored, length), length)
        if self._records is not None:
            self._records.retrace(env_ids)

    def _changed(self, leaves: Sequence[int], env_ids: np.ndarray) -> None:
        if self._records is not None:
            self._records.changed(leaves, env_ids)

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the contents if they are to be saved (``enable_checkpoint``), otherwise ``{}``.

        Returns:
            Tensors and numbers; the tensors share the memory of the storage.
        """
        used = min(int(self.current_pos.max()), self.max_length) if self.total_size else 0
        is_small = self.num_bytes(used) <= self.checkpoint_limit
        if not (is_small if self.enable_checkpoint is None else self.enable_checkpoint):
            return {}
        state = {
            'current_pos': self.current_pos,
            'current_size': self.current_size,
            'max_length': self.max_length,
            'leaves': self._leaf_descriptions(),
            'blocks': self._store.first_rows(used),
        }
        if self._priorities is not None:
            state['priorities'] = self._priorities.state_dict(used)
        return state

    @atomic
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of saved contents; do nothing with ``enable_checkpoint = False``, or if they were not saved.

        If they were saved by a buffer that sampled uniformly, all steps get ``initial_priority``.

        Raises:
            ValueError: they were saved by a buffer of another size or another spec.
        """
        if self.enable_checkpoint is False or not state_dict:
            return
        saved = (state_dict['max_length'], len(state_dict['current_pos']), state_dict['leaves'])
        own = (self.max_length, self.num_environments, self._leaf_descriptions())
        for what, expected, found in zip(('max_length', 'num_environments', 'data_spec'), own, saved):
            if expected != found:
                raise ValueError(f'{self.name}: the saved contents have another {what} than this buffer: expected '
                                 f'{expected}, found {found}; do not change it, or resume without the contents '
                                 '(enable_checkpoint=False)')
        for block, other in zip(self._store.blocks, state_dict['blocks']):
            block[:other.shape[0]].copy_(other)
        self._rings.set(state_dict['current_pos'].numpy(), state_dict['current_size'].numpy())
        if self._priorities is not None:
            self._priorities.load_state_dict(state_dict.get('priorities'))
        if self._records is not None:
            self._records.retrace(self._rings.all_envs)

    def priorities_state(self) -> dict[str, Any]:
        """Return the priorities of all steps, regardless of ``enable_checkpoint``; ``{}`` for uniform sampling."""
        return {} if self._priorities is None else self._priorities.state_dict(self.max_length)

    @atomic
    def load_priorities_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`priorities_state` of a buffer with the same steps.

        Does nothing for ``{}``, or if this buffer samples uniformly.
        """
        if self._priorities is not None and state:
            self._priorities.load_state_dict(state)

    @staticmethod
    def join_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the :meth:`state_dict` of one buffer with the environments of several buffers.

        Args:
            states: state of each of them; they have the same spec and ``max_length``.
        """
        used = max(block.shape[0] for state in states for block in state['blocks'])
        joined = {**states[0], **{key: torch.cat([state[key] for state in states])
                                  for key in ('current_pos', 'current_size')}}
        joined['blocks'] = [torch.cat([_lengthened(block, used) for block in blocks], 1)
                            for blocks in zip(*(state['blocks'] for state in states))]
        if 'priorities' in states[0]:
            joined['priorities'] = join_priorities([(s['priorities'], len(s['current_pos'])) for s in states], used)
        return joined

    @staticmethod
    def split_state(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """Return the :meth:`state_dict` of one of ``size`` buffers that the environments are divided among.

        Args:
            state: state of one buffer with all environments.
            rank: index of the buffer, from 0.
            size: number of buffers.
        """
        share = {**state, **{key: state[key].chunk(size)[rank] for key in ('current_pos', 'current_size')}}
        share['blocks'] = [block.chunk(size, 1)[rank] for block in state['blocks']]
        if 'priorities' in state:
            share['priorities'] = share_of_priorities(state['priorities'], len(state['current_pos']), rank, size)
        return share

    def _leaf_descriptions(self) -> list[str]:
        return [f'{path}: {spec.dtype_str} {tuple(spec.shape)}'
                for path, spec in nest.flatten_with_path(self.data_spec)]


def _lengthened(block: Tensor, rows: int) -> Tensor:
    """Return ``block`` padded with zeros to ``rows`` rows."""
    return block if block.shape[0] == rows else torch.cat([block, block.new_zeros(rows - block.shape[0],
                                                                                   *block.shape[1:])])
