"""The replay buffer: the last steps of each environment, from which sequences are sampled.

Storing and looking up is in :mod:`~alfx.experience_replayers.ring_buffer`, drawing in
:mod:`~alfx.experience_replayers.sampling` and :mod:`~alfx.experience_replayers.priorities`, what is known of episodes
in :mod:`~alfx.experience_replayers.episodes` and :mod:`~alfx.experience_replayers.episodic_returns`.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Optional

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
from alfx.gin_utils.value_checks import Count, Fraction
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils.transfers import to_device


_CHECKPOINT_LIMIT = 256 * 2**20


@gin_utils.configurable
class ReplayBuffer(RingBuffer):
    """Stores experience of several environments and samples sequences of it, uniformly or by priority.

    A sequence consists of steps that one environment stored one after the other; it never crosses the place where the
    newest step has overwritten the oldest.

    Args:
        data_spec: nest of specs of what is stored for each step and environment; may contain distributions.
        num_environments: number of environments.
        max_length: how many steps are kept for each environment.
        num_earliest_frames_ignored: so many of the oldest steps of each environment are kept but not sampled, so that
            what comes before a sampled step (a frame stack) can be looked up.
        prioritized_sampling: whether sequences are sampled in proportion to their priorities, see
            :meth:`update_priority`.
        initial_priority: above 0; of new steps until :meth:`update_priority` was called. From then on new steps get
            the largest priority that was given so far.
        recent_data_steps: the last so many sequences of each environment are its recent ones. With
            ``recent_data_steps = 1`` that is the one which ends with the newest step.
        recent_data_ratio: from 0 to 1; so much of each batch is drawn, uniformly, from the recent sequences alone, the
            rest from all. Zhang and Sutton 2017 (arXiv:1712.01275) make one sequence of a batch the newest one.
        with_replacement: for uniform sampling, whether a batch may contain the same sequence more than once; it may
            anyway if there are fewer sequences than are needed, and a sequence from the recent ones may be among those
            from all. For prioritised sampling, whether the draws are independent; if not they are stratified: one
            from each of B equal parts of the total priority.
        device: where the storage lives: 'cpu' for host memory, which is larger, and from which samples travel to a GPU
            while it computes; 'cuda' or 'cuda:N' for that of a GPU, from which they need not travel.
        allow_multiprocess: whether the buffer can be given to other processes, which then store into and sample from
            the same memory, one at a time.
        keep_episodic_info: whether to keep track of episodes, for :meth:`steps_to_episode_end` and the like; needs a
            field ``step_type``. None: only if it is needed for something else, or switched on later by setting the
            property of that name.
        record_episodic_return: whether batches come with the discounted return of each step up to the termination of
            its episode, for example as a lower bound of values. Needs ``step_type``, ``reward`` and ``discount``, which
            are those that are stored, before any data transformer. See
            :mod:`~alfx.experience_replayers.episodic_returns`.
        default_return: stands for the return of an episode that goes on or was truncated, which is not known.
        gamma: discount of the returns; multiplies that of the environment.
        return_after_truncation: what stands for the return that a truncated episode would have had from its end on, so
            that the returns before are known: 0 where no reward is negative, or a bound of it. None: not known.
        reward_clip: smallest and largest reward for the returns; None for no limits.
        enable_checkpoint: whether :meth:`state_dict` includes the contents. None: as long as these take no more than
            :attr:`checkpoint_limit`.
        memory_map_dir: folder of the files in which the storage lies in place of memory; they have no name and are
            gone when the buffer is. None for memory.
        name: what errors call this buffer.

    Attributes:
        checkpoint_limit: in bytes, of the contents that are saved with ``enable_checkpoint = None``.

    Raises:
        ValueError: an argument is out of range, does not go with another, or needs a field that ``data_spec`` lacks.
    """

    def __init__(self,
                 data_spec: NestedTensorSpec,
                 num_environments: Count,
                 max_length: Count = 1024,
                 num_earliest_frames_ignored: int = 0,
                 prioritized_sampling: bool = False,
                 initial_priority: float = 1.0,
                 recent_data_steps: int = 1,
                 recent_data_ratio: Fraction = 0.0,
                 with_replacement: bool = False,
                 device: str | torch.device = 'cpu',
                 allow_multiprocess: bool = False,
                 keep_episodic_info: Optional[bool] = None,
                 record_episodic_return: bool = False,
                 default_return: float = -1000.0,
                 gamma: Fraction = 0.99,
                 reward_clip: Optional[tuple[float, float]] = None,
                 enable_checkpoint: Optional[bool] = None,
                 name: str = 'ReplayBuffer',
                 memory_map_dir: Optional[str] = None,
                 return_after_truncation: Optional[float] = None) -> None:
        require_at_least(name, 0, num_earliest_frames_ignored=num_earliest_frames_ignored)
        require_at_least(name, 1, recent_data_steps=recent_data_steps)
        if not 0.0 <= recent_data_ratio <= 1.0:
            raise ValueError(f'{name}.recent_data_ratio: expected a number from 0 to 1, found {recent_data_ratio}')
        if not 0.0 < initial_priority < float('inf'):
            raise ValueError(f'{name}.initial_priority: expected a number above 0, found {initial_priority}')
        super().__init__(data_spec, num_environments, max_length, device, allow_multiprocess, memory_map_dir, name)
        if num_earliest_frames_ignored >= max_length:
            raise ValueError(f'{name}.num_earliest_frames_ignored: expected less than max_length ({max_length}), found '
                             f'{num_earliest_frames_ignored}: no step could ever be sampled')
        self._ignored = num_earliest_frames_ignored
        self._enable_checkpoint = enable_checkpoint
        self.checkpoint_limit = _CHECKPOINT_LIMIT
        self._initial_priority = initial_priority
        self._priorities = None
        if prioritized_sampling:
            self._priorities = Priorities(self._rings, initial_priority, allow_multiprocess)
        self._sampler = SequenceSampler(self._rings, num_earliest_frames_ignored, with_replacement, recent_data_steps,
                                        recent_data_ratio, self._priorities)
        if recent_data_steps != 1 and not recent_data_ratio:
            raise ValueError(f'{name}.recent_data_steps: expected it to be left out with recent_data_ratio = 0, found '
                             f'{recent_data_steps}')
        self._returns = None
        if record_episodic_return:
            self._returns = self._make_returns(keep_episodic_info, gamma, default_return, reward_clip,
                                               return_after_truncation)
        elif (default_return, gamma, reward_clip, return_after_truncation) != (-1000.0, 0.99, None, None):
            raise ValueError(f'{name}: expected default_return, gamma, reward_clip and return_after_truncation to be '
                             f'left out with record_episodic_return = False, found {default_return}, {gamma}, '
                             f'{reward_clip} and {return_after_truncation}')
        self._records: Optional[EpisodeRecords] = None
        self.keep_episodic_info = bool(keep_episodic_info or record_episodic_return)

    def _make_returns(self, keep_episodic_info: Optional[bool], gamma: float, default_return: float,
                      reward_clip: Optional[tuple[float, float]],
                      return_after_truncation: Optional[float]) -> EpisodicReturns:
        if keep_episodic_info is False:
            raise ValueError(f'{self.name}.keep_episodic_info: expected True or None with record_episodic_return = '
                             'True, found False')
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f'{self.name}.gamma: expected a number from 0 to 1, found {gamma}')
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

    @property
    def num_earliest_frames_ignored(self) -> int:
        """How many of the oldest steps of each environment are not sampled."""
        return self._ignored

    @property
    def enable_checkpoint(self) -> Optional[bool]:
        """Whether :meth:`state_dict` includes the contents; None where their size decides."""
        return self._enable_checkpoint

    def num_bytes(self, num_rows: int) -> int:
        """How much ``num_rows`` steps of all environments take."""
        return num_rows * self._num_envs * (self._store.bytes_per_cell + (0 if self._priorities is None else 4))

    @property
    def prioritized_sampling(self) -> bool:
        """Whether sequences are sampled by priority."""
        return self._priorities is not None

    @property
    def initial_priority(self) -> float:
        """The priority of new steps until :meth:`update_priority` was called."""
        return self._initial_priority

    @property
    def keep_episodic_info(self) -> bool:
        """Whether the buffer keeps track of episodes. Can be set; what is already stored is then looked through.

        Raises:
            ValueError: the experience has no field ``step_type``, or returns are recorded, which need it.
        """
        return self._records is not None

    @keep_episodic_info.setter
    def keep_episodic_info(self, keep: bool) -> None:
        if not keep and self._returns is not None:
            raise ValueError(f'{self.name}.keep_episodic_info: expected True with record_episodic_return = True, found '
                             'False')
        if not keep:
            self._records = None
        elif self._records is None:
            leaves = Leaves(self._leaf('keep_episodic_info', 'step_type'), self._find_leaf('discount'),
                            self._find_leaf('reward'))
            self._records = EpisodeRecords(self._rings, self._store, leaves, self._returns, self._lock is not None)

    # Sampling -------------------------------------------------------------------------------------------------

    @atomic
    def get_batch(self, batch_size: int, batch_length: int) -> tuple[NestedTensor, BatchInfo]:
        """Sample sequences, each possible one with the same probability or by priority.

        Args:
            batch_size: number B of sequences.
            batch_length: number T of steps in each.

        Returns:
            tuple:
            - nest ``[B, T, ...]`` on the default device
            - ``BatchInfo`` with ``env_ids [B]`` and ``positions [B]`` (of the first steps) on the default device,
              ``replay_buffer`` and, with prioritised sampling, ``importance_weights [B]``: N * P, where N is the number
              of sequences that could have been sampled and P the probability of this one (its expected share of the
              batch). That is 1 for all if all priorities are the same; a loss is corrected for the sampling by
              multiplying it with the power ``-beta`` of it. With ``record_episodic_return`` also
              ``discounted_return [B, T]`` (``[B, T, K]`` for K-dimensional rewards).

        Raises:
            ValueError: no environment has ``batch_length`` steps (besides the ignored ones), or all priorities are 0.
        """
        require_at_least(f'{self.name}.get_batch', 1, batch_size=batch_size, batch_length=batch_length)
        sample = self._sample(batch_size, batch_length)
        return self._batch(sample.env_ids, sample.positions, batch_length, sample.relative_probabilities)

    def _sample(self, batch_size: int, batch_length: int) -> Sample:
        """Draw sequences.

        Raises:
            ValueError: see :meth:`get_batch`.
        """
        try:
            sample = self._sampler.sample(batch_size, batch_length)
        except ValueError as error:
            raise ValueError(f'{self.name}.get_batch: the priorities of all sequences are 0; update_priority has to '
                             'leave some above (TrainerConfig.priority_replay_eps)') from error
        if sample is None:
            ignored = f' besides the {self._ignored} oldest, which are ignored' if self._ignored else ''
            raise ValueError(f'{self.name}.get_batch: expected an environment with at least {batch_length} steps'
                             f'{ignored}, found {self.current_size.tolist()} (max_length is {self._max_length}); '
                             'collect more before sampling (TrainerConfig.initial_collect_steps)')
        return sample

    def reader(self, batch_size: int, batch_length: int, slots: int = 1) -> BatchReader | None:
        """What samples as :meth:`get_batch` does, but into the same memory each time: that of ``slots`` minibatches.

        ``None`` if that is not possible: the storage is not in host memory, samples are for another device, or other
        processes use the buffer.
        """
        if self._lock is not None or self._device.type != 'cpu' or context.get_default_device().type != 'cpu':
            return None
        leaves, read = self._store.reused_cells((slots, batch_length, batch_size))
        return BatchReader([StaticBatch(self._tree.unflatten(of_one))
                            for of_one in zip(*(x.unbind() for x in leaves))], read,
                           lambda count: self._draw(batch_size, batch_length, count))

    def _draw(self, batch_size: int, length: int, count: int) -> tuple[list[BatchInfo], np.ndarray]:
        """What to read for ``count`` minibatches that are drawn together: int64 ``[count, T * B]``."""
        env_ids, positions, probabilities = self._sample(batch_size * count, length)
        steps = self._rings.slots_from(positions, length, env_ids)  # [T, count * B]
        slots = steps.reshape(length, count, batch_size).swapaxes(0, 1).reshape(count, -1)

        def of_each(x: np.ndarray) -> Iterable[Tensor]:
            return map(torch.from_numpy, x.reshape(count, batch_size))

        weights: Iterable[Any] = repeat(()) if probabilities is None else of_each(probabilities)
        returns: Iterable[Any] = repeat(())
        if self._returns is not None:
            found = self._returns.get(slots.reshape(-1))
            found = found.reshape(count, length, batch_size, *found.shape[1:]).swapaxes(1, 2)
            returns = map(torch.from_numpy, found)
        return list(map(BatchInfo, of_each(env_ids), of_each(positions), weights, repeat(self), returns)), slots

    @atomic
    def update_priority(self, env_ids: Tensor, positions: Tensor, priorities: Tensor) -> None:
        """Set the priorities of sequences, usually of those of a batch after it was trained on.

        Sequences whose first step is not in the buffer any more are ignored. Of a sequence that occurs more than once
        the last priority counts.

        Args:
            env_ids: int64 ``[B]``, as in ``BatchInfo``.
            positions: int64 ``[B]``: of the first steps.
            priorities: float ``[B]``, to which the probabilities are proportional: exponents have been applied.

        Raises:
            ValueError: the buffer samples uniformly, the shapes differ, or a priority is negative, NaN or infinite.
        """
        if self._priorities is None:
            raise ValueError(f'{self.name}.update_priority: expected a buffer with prioritized_sampling = True, found '
                             'one that samples uniformly')
        if priorities.ndim != 1 or not priorities.shape == env_ids.shape == positions.shape:
            raise ValueError(f'{self.name}.update_priority: expected env_ids, positions and priorities of one shape '
                             f'[B], found {tuple(env_ids.shape)}, {tuple(positions.shape)} and '
                             f'{tuple(priorities.shape)}')
        values = priorities.detach().cpu().numpy().astype(np.float32, copy=False)
        if values.size and not (values.min() >= 0 and values.max() < np.inf):
            bad = [float(x) for x in values if not 0 <= x < np.inf][:5]
            raise ValueError(f'{self.name}.update_priority: expected finite priorities of at least 0, found {bad}')
        self._priorities.update(env_ids.cpu().numpy(), positions.cpu().numpy(), values)

    @atomic
    def gather_all(self, ignore_earliest_frames: bool = False) -> tuple[NestedTensor, BatchInfo]:
        """Everything in the buffer, in order of time.

        Args:
            ignore_earliest_frames: whether to leave out ``num_earliest_frames_ignored`` steps.

        Returns:
            as :meth:`get_batch`, with B = ``num_environments`` and T = the number of steps of each.

        Raises:
            ValueError: there is nothing, or not the same number of steps for each environment.
        """
        ignored = self._ignored if ignore_earliest_frames else 0
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
        """Sequences that are asked for.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``: of the first step of each.
            length: T, of all of them.

        Returns:
            as :meth:`get_batch`.

        Raises:
            ValueError: a step is not in the buffer (any more).
        """
        envs, steps = self._held('get_sequences', env_ids, positions)
        self._held('get_sequences', env_ids, positions + (length - 1))
        return self._batch(envs, steps, length)

    def iterate_all(self, length: int) -> Iterator[tuple[NestedTensor, BatchInfo]]:
        """All that is stored, of one environment after the other.

        Args:
            length: of a part, at most.

        Yields:
            parts ``[1, T, ...]``, each as of :meth:`get_batch`
        """
        for env_id, (first, end) in enumerate(zip(self._rings.first(), self._rings.positions())):
            for start in range(int(first), int(end), length):
                yield self._batch(np.array([env_id]), np.array([start]), min(length, int(end) - start))

    @atomic
    def dequeue(self, n: int = 1, env_ids: Optional[Tensor] = None) -> tuple[NestedTensor, BatchInfo]:
        """Take the oldest steps out of the buffer, those that are not sampled included.

        Args:
            n: how many of each environment.
            env_ids: int64 ``[B]``: of which environments, each at most once; None for all.

        Returns:
            as :meth:`get_batch`, with T = ``n``.

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
        """The steps from ``positions`` on, and where they came from."""
        experience, slots = self._read(env_ids, positions, length)
        found = {'env_ids': torch.from_numpy(env_ids), 'positions': torch.from_numpy(positions)}
        if weights is not None:
            found['importance_weights'] = torch.from_numpy(weights)
        if self._returns is not None:
            returns = torch.from_numpy(self._returns.get(slots.numpy()))
            found['discounted_return'] = returns.view(len(env_ids), length, *returns.shape[1:])
        device = context.get_default_device()
        if device.type != 'cpu':
            found = to_device(found, device)
        return experience, BatchInfo(replay_buffer=self, **found)

    # Episodes -------------------------------------------------------------------------------------------------

    @atomic
    def steps_to_episode_end(self, positions: Tensor, env_ids: Tensor) -> Tensor:
        """How many steps after given ones the last step of the episode is; while it goes on, the newest step.

        Args:
            positions: int64, any shape that broadcasts with ``env_ids``.
            env_ids: int64.

        Returns:
            int64, of the shape of the two and the device of ``positions``; 0 at the last step itself.

        Raises:
            ValueError: a position is not in the buffer (any more), or the buffer does not keep track of episodes.
        """
        return self._look_up('steps_to_episode_end', lambda of, steps, envs: of.ends(steps, envs) - steps, positions,
                             env_ids)

    @atomic
    def get_episode_begin_position(self, positions: Tensor, env_ids: Tensor) -> Tensor:
        """The positions of the first steps of the episodes that given steps belong to.

        Where that is not in the buffer any more, the position of the oldest step there.

        Args:
            positions: int64, any shape that broadcasts with ``env_ids``.
            env_ids: int64.

        Returns:
            int64, of the shape of the two and the device of ``positions``.

        Raises:
            ValueError: a position is not in the buffer (any more), or the buffer does not keep track of episodes.
        """
        return self._look_up('get_episode_begin_position', Episodes.begins, positions, env_ids)

    @atomic
    def get_disc_0_begin_position(self, positions: Tensor, env_ids: Tensor) -> Tensor:
        """The positions of the earliest steps whose discounted return reaches given steps.

        That is the last step before with a discount of 0, if there is one in the same episode (a reward for arriving
        there or earlier is cut off from what follows), otherwise the first step of the episode as far as it is in the
        buffer. With discounts that are 0 only where an episode ends it is :meth:`get_episode_begin_position`.

        Args:
            positions: int64, any shape that broadcasts with ``env_ids``.
            env_ids: int64.

        Returns:
            int64, of the shape of the two and the device of ``positions``.

        Raises:
            ValueError: a position is not in the buffer (any more), or the buffer does not keep track of episodes, or
                the experience has no field ``discount``.
        """
        self._leaf('get_disc_0_begin_position', 'discount')
        return self._look_up('get_disc_0_begin_position', Episodes.return_begins, positions, env_ids)

    def _look_up(self, method: str, function: Callable[[Episodes, np.ndarray, np.ndarray], np.ndarray],
                 positions: Tensor, env_ids: Tensor) -> Tensor:
        if self._records is None:
            raise ValueError(f'{self.name}.{method}: expected a buffer that keeps track of episodes, found '
                             'keep_episodic_info = False; set it to True before')
        envs, steps = self._held(method, env_ids, positions)
        return torch.from_numpy(function(self._records.episodes, steps, envs)).to(positions.device)

    def _leaf(self, needed_by: str, field: str) -> int:
        """The leaf of that name.

        Raises:
            ValueError: there is none.
        """
        leaf = self._find_leaf(field)
        if leaf is None:
            raise ValueError(f"{self.name}.{needed_by}: expected a field '{field}' in the experience, found none in "
                             f'{[path for path, _ in nest.flatten_with_path(self._data_spec)]}')
        return leaf

    # What keeps up with the storage ---------------------------------------------------------------------------

    def _stored(self, positions: Any, num_steps: int, env_ids: np.ndarray, leaves: Sequence[Tensor]) -> None:
        if self._priorities is not None:
            self._priorities.store(self._rings.slots_from(positions, num_steps, env_ids))
        if self._records is not None:
            self._records.stored(positions, num_steps, env_ids, leaves)

    def _dropped(self, env_ids: np.ndarray) -> None:
        if self._priorities is not None:
            length = self._priorities.length
            self._priorities.set_window(*self._rings.window(self._ignored, length), length)
        if self._records is not None:
            self._records.retrace(env_ids)

    def _changed(self, leaves: Sequence[int], env_ids: np.ndarray) -> None:
        if self._records is not None:
            self._records.changed(leaves, env_ids)

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The contents, if they are to be saved (``enable_checkpoint``); otherwise nothing.

        Returns:
            tensors and numbers; the tensors are those of the storage, not copies.
        """
        used = min(int(self.current_pos.max()), self._max_length) if self.total_size else 0
        is_small = self.num_bytes(used) <= self.checkpoint_limit
        if not (is_small if self._enable_checkpoint is None else self._enable_checkpoint):
            return {}
        state = {
            'current_pos': self.current_pos,
            'current_size': self.current_size,
            'max_length': self._max_length,
            'leaves': self._leaf_descriptions(),
            'blocks': self._store.first_rows(used),
        }
        if self._priorities is not None:
            state['priorities'] = self._priorities.state_dict(used)
        return state

    @atomic
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the contents, as copies; nothing happens with ``enable_checkpoint = False``, or if they were not
        saved.

        If they were saved by a buffer that sampled uniformly, all steps get ``initial_priority``.

        Raises:
            ValueError: they are those of a buffer of another size or another spec.
        """
        if self._enable_checkpoint is False or not state_dict:
            return
        saved = (state_dict['max_length'], len(state_dict['current_pos']), state_dict['leaves'])
        own = (self._max_length, self._num_envs, self._leaf_descriptions())
        for what, expected, found in zip(('max_length', 'num_environments', 'data_spec'), own, saved):
            if expected != found:
                raise ValueError(f'{self.name}: the saved contents have another {what} than this buffer: expected '
                                 f'{expected}, found {found}; keep it as it was, or resume without the contents '
                                 '(enable_checkpoint=False)')
        for block, other in zip(self._store.blocks, state_dict['blocks']):
            block[:other.shape[0]].copy_(other)
        self._rings.set(state_dict['current_pos'].numpy(), state_dict['current_size'].numpy())
        if self._priorities is not None:
            self._priorities.load_state_dict(state_dict.get('priorities'))
        if self._records is not None:
            self._records.retrace(self._rings.all_envs)

    def priorities_state(self) -> dict[str, Any]:
        """The priorities of all steps without their contents, whatever ``enable_checkpoint`` says; ``{}`` where
        sampling is uniform."""
        return {} if self._priorities is None else self._priorities.state_dict(self._max_length)

    @atomic
    def load_priorities_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`priorities_state`, for a buffer that holds the same steps; nothing happens for ``{}``,
        or if this one samples uniformly."""
        if self._priorities is not None and state:
            self._priorities.load_state_dict(state)

    @staticmethod
    def join_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What :meth:`state_dict` of one buffer with the environments of several such buffers would return.

        Args:
            states: what it returned for each of them; they have the same spec and ``max_length``.
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
    def share_of_state(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """What :meth:`state_dict` of one of ``size`` buffers would return that divide the environments among them.

        Args:
            state: what it returned for one buffer with all environments.
            rank: which share, from 0.
            size: how many there are.
        """
        share = {**state, **{key: state[key].chunk(size)[rank] for key in ('current_pos', 'current_size')}}
        share['blocks'] = [block.chunk(size, 1)[rank] for block in state['blocks']]
        if 'priorities' in state:
            share['priorities'] = share_of_priorities(state['priorities'], len(state['current_pos']), rank, size)
        return share

    def _leaf_descriptions(self) -> list[str]:
        return [f'{path}: {spec.dtype_str} {tuple(spec.shape)}'
                for path, spec in nest.flatten_with_path(self._data_spec)]


def _lengthened(block: Tensor, rows: int) -> Tensor:
    """``block`` with zeros after it, ``rows`` rows in all."""
    return block if block.shape[0] == rows else torch.cat([block, block.new_zeros(rows - block.shape[0],
                                                                                   *block.shape[1:])])
