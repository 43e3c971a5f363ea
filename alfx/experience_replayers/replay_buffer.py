"""The replay buffer: the last steps of each environment, in preallocated tensors.

Each environment has a ring of its own; all of them are the columns of one storage
(:mod:`~alfx.experience_replayers.row_store`). A *position* is the number of steps that an environment had stored before
a step since the buffer was made; it never wraps around, the row of the storage is ``position % max_length``. As long
as all environments are stored together the bookkeeping is two Python integers.
"""
from typing import Any, Optional

import torch
from torch import Tensor

from alfx import context, gin_utils, nest
from alfx.data_structures import BatchInfo
from alfx.experience_replayers.row_store import RowStore
from alfx.experience_replayers.sampling import draw_distinct
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, check_consistent


@gin_utils.configurable
class ReplayBuffer:
    """Stores experience of several environments and samples sequences of it, uniformly.

    A sequence consists of steps that one environment stored one after the other; it never crosses the place where the
    newest step has overwritten the oldest.

    Args:
        data_spec: nest of specs of what is stored for each step and environment; may contain distributions.
        num_environments: number of environments.
        max_length: how many steps are kept for each environment.
        num_earliest_frames_ignored: so many of the oldest steps of each environment are kept but not sampled, so that
            what comes before a sampled step (a frame stack) can be looked up.
        prioritized_sampling: not in this version; must be False.
        initial_priority: has no effect without ``prioritized_sampling``.
        recent_data_steps: has no effect without ``recent_data_ratio``.
        recent_data_ratio: not in this version; must be 0.
        with_replacement: whether a batch may contain the same sequence more than once. It may anyway if there are
            fewer sequences than the batch needs.
        device: where the storage lives.
        allow_multiprocess: not in this version; must be False.
        keep_episodic_info: not in this version; must be None or False.
        record_episodic_return: not in this version; must be False.
        default_return: has no effect without ``record_episodic_return``.
        gamma: has no effect without ``record_episodic_return``.
        reward_clip: has no effect without ``record_episodic_return``.
        enable_checkpoint: whether :meth:`state_dict` includes the contents.
        name: what errors call this buffer.

    Raises:
        ValueError: an argument is out of range, or asks for what this version does not have.
    """

    def __init__(self,
                 data_spec: NestedTensorSpec,
                 num_environments: int,
                 max_length: int = 1024,
                 num_earliest_frames_ignored: int = 0,
                 prioritized_sampling: bool = False,
                 initial_priority: float = 1.0,
                 recent_data_steps: int = 1,
                 recent_data_ratio: float = 0.0,
                 with_replacement: bool = False,
                 device: str | torch.device = 'cpu',
                 allow_multiprocess: bool = False,
                 keep_episodic_info: Optional[bool] = None,
                 record_episodic_return: bool = False,
                 default_return: float = -1000.0,
                 gamma: float = 0.99,
                 reward_clip: Optional[tuple[float, float]] = None,
                 enable_checkpoint: bool = False,
                 name: str = 'ReplayBuffer') -> None:
        _refuse(name, prioritized_sampling=(prioritized_sampling, False), initial_priority=(initial_priority, 1.0),
                recent_data_steps=(recent_data_steps, 1), recent_data_ratio=(recent_data_ratio, 0.0),
                allow_multiprocess=(allow_multiprocess, False), keep_episodic_info=(keep_episodic_info or None, None),
                record_episodic_return=(record_episodic_return, False), default_return=(default_return, -1000.0),
                gamma=(gamma, 0.99), reward_clip=(reward_clip, None))
        _require_at_least(name, 1, num_environments=num_environments, max_length=max_length)
        _require_at_least(name, 0, num_earliest_frames_ignored=num_earliest_frames_ignored)
        if num_earliest_frames_ignored >= max_length:
            raise ValueError(f'{name}.num_earliest_frames_ignored: expected less than max_length ({max_length}), found '
                             f'{num_earliest_frames_ignored}: no step could ever be sampled')
        specs, self._tree = nest.flatten_with_structure(data_spec)
        if not specs:
            raise ValueError(f'{name}.data_spec: expected at least one TensorSpec, found an empty nest')
        self.name = name
        self._data_spec = data_spec
        self._leaf_indices = self._tree.unflatten(range(len(specs)))
        self._num_envs = num_environments
        self._max_length = max_length
        self._ignored = num_earliest_frames_ignored
        self._with_replacement = with_replacement
        self._device = torch.device(device)
        self._enable_checkpoint = enable_checkpoint
        self._shapes = [spec.shape for spec in specs]
        self._batch_shapes = [torch.Size((num_environments, *shape)) for shape in self._shapes]
        self._dtypes = [spec.dtype for spec in specs]
        self._all_envs = torch.arange(num_environments)
        self._store = RowStore(specs, max_length, num_environments, self._device)
        # While all environments have the same position and size, those are two numbers; otherwise tensors [E].
        self._lockstep = True
        self._pos, self._size = 0, 0
        self._env_pos = self._env_size = self._all_envs

    # What it is and how much is in it -------------------------------------------------------------------------

    @property
    def data_spec(self) -> NestedTensorSpec:
        """Spec of what is stored for one step of one environment."""
        return self._data_spec

    @property
    def num_environments(self) -> int:
        """Number of environments."""
        return self._num_envs

    @property
    def max_length(self) -> int:
        """How many steps are kept for each environment."""
        return self._max_length

    @property
    def num_earliest_frames_ignored(self) -> int:
        """How many of the oldest steps of each environment are not sampled."""
        return self._ignored

    @property
    def device(self) -> torch.device:
        """Where the storage lives."""
        return self._device

    @property
    def enable_checkpoint(self) -> bool:
        """Whether :meth:`state_dict` includes the contents."""
        return self._enable_checkpoint

    @property
    def current_pos(self) -> Tensor:
        """int64 ``[num_environments]``: the position that the next step of each environment gets."""
        return torch.full((self._num_envs, ), self._pos) if self._lockstep else self._env_pos.clone()

    @property
    def current_size(self) -> Tensor:
        """int64 ``[num_environments]``: how many steps each environment has in the buffer."""
        return torch.full((self._num_envs, ), self._size) if self._lockstep else self._env_size.clone()

    @property
    def total_size(self) -> int:
        """How many steps of all environments together are in the buffer."""
        return self._size * self._num_envs if self._lockstep else int(self._env_size.sum())

    def earliest_positions(self, env_ids: Tensor) -> Tensor:
        """The positions of the oldest steps in the buffer, ``num_earliest_frames_ignored`` included.

        Args:
            env_ids: int64, any shape.

        Returns:
            int64, the same shape and device.
        """
        if self._lockstep:
            return torch.full_like(env_ids, self._pos - self._size)
        return (self._env_pos - self._env_size).to(env_ids.device)[env_ids]

    # Storing --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_batch(self, batch: NestedTensor, env_ids: Optional[Tensor] = None) -> None:
        """Store one step of several environments, as copies.

        Args:
            batch: nest ``[B, ...]``.
            env_ids: int64 ``[B]``: which environments, each at most once; None for all in order.

        Raises:
            SpecError: ``batch`` does not have the spec of the buffer.
            ValueError: ``env_ids`` are not distinct environments of the buffer.
        """
        leaves, tree = nest.flatten_with_structure(batch)
        if tree != self._tree or [x.dtype for x in leaves] != self._dtypes:
            self._raise_spec_error('add_batch', batch, 1)
        size = self._num_envs if env_ids is None else env_ids.numel()
        shapes = self._batch_shapes if size == self._num_envs else [(size, *shape) for shape in self._shapes]
        if [x.shape for x in leaves] != shapes:
            self._raise_spec_error('add_batch', batch, 1, (size, ))
        if env_ids is None or torch.equal(env_ids.cpu(), self._all_envs):
            env_ids = self._all_envs
            if self._lockstep:
                self._store.write_row(self._pos % self._max_length, leaves)
                self._pos += 1
                self._size = min(self._size + 1, self._max_length)
                return
        else:
            env_ids = self._check_env_ids(env_ids)
        self._leave_lockstep()
        pos = self._env_pos[env_ids]
        self._store.write_cells(pos % self._max_length * self._num_envs + env_ids, leaves)
        self._env_pos[env_ids] = pos + 1
        self._env_size[env_ids] = (self._env_size[env_ids] + 1).clamp_(max=self._max_length)

    @torch.no_grad()
    def add_sequence(self, batch: NestedTensor) -> None:
        """Store T steps of all environments, as copies: the same as :meth:`add_batch` for each of them in turn.

        Args:
            batch: nest ``[T, num_environments, ...]``.

        Raises:
            SpecError: ``batch`` does not have the spec of the buffer.
        """
        leaves, tree = nest.flatten_with_structure(batch)
        if tree != self._tree or [x.dtype for x in leaves] != self._dtypes:
            self._raise_spec_error('add_sequence', batch, 2)
        num_steps = leaves[0].shape[0] if leaves[0].ndim else 0
        if any(x.shape != (num_steps, *shape) for x, shape in zip(leaves, self._batch_shapes)):
            self._raise_spec_error('add_sequence', batch, 2, (num_steps, self._num_envs))
        skipped = max(num_steps - self._max_length, 0)
        if skipped:
            leaves = [x[skipped:] for x in leaves]
        if self._lockstep:
            self._store.write_rows((self._pos + skipped) % self._max_length, leaves)
            self._pos += num_steps
            self._size = min(self._size + num_steps, self._max_length)
            return
        positions = self._env_pos + torch.arange(skipped, num_steps).unsqueeze(-1)
        cells = positions % self._max_length * self._num_envs + self._all_envs
        self._store.write_cells(cells.flatten(), [x.flatten(0, 1) for x in leaves])
        self._env_pos += num_steps
        self._env_size = (self._env_size + num_steps).clamp_(max=self._max_length)

    def clear(self, env_ids: Optional[Tensor] = None) -> None:
        """Forget the steps of some environments. Positions go on from where they are.

        Args:
            env_ids: int64 ``[B]``; None for all environments, which then get the same position.

        Raises:
            ValueError: ``env_ids`` are not distinct environments of the buffer.
        """
        if env_ids is None:
            self._pos = self._pos if self._lockstep else int(self._env_pos.max())
            self._size = 0
            self._lockstep = True
            return
        env_ids = self._check_env_ids(env_ids)
        self._leave_lockstep()
        self._env_size[env_ids] = 0

    def rewind(self, keep: int = 0) -> int:
        """Forget the newest step, whose place the next one takes, and all but ``keep`` steps before it.

        Args:
            keep: steps of each environment to keep as context of those that follow, such as for a frame stack.

        Returns:
            How many steps were kept.

        Raises:
            ValueError: the environments were not stored together, or there is no step.
        """
        if not self._lockstep or not self._size:
            raise ValueError(f'{self.name}.rewind: expected at least one step of all environments together, found '
                             f'{self.current_size.tolist()}')
        self._pos -= 1
        self._size = min(self._size - 1, keep)
        return self._size

    def _leave_lockstep(self) -> None:
        if self._lockstep:
            self._env_pos, self._env_size = self.current_pos, self.current_size
            self._lockstep = False

    def _check_env_ids(self, env_ids: Tensor) -> Tensor:
        env_ids = env_ids.cpu()
        if env_ids.ndim != 1 or env_ids.dtype != torch.int64 or env_ids.unique().numel() != env_ids.numel() or (
                (env_ids < 0) | (env_ids >= self._num_envs)).any():
            raise ValueError(f'{self.name}: expected distinct environment ids, int64 [B] from 0 to '
                             f'{self._num_envs - 1}, found {env_ids.dtype} {env_ids.tolist()}')
        return env_ids

    def _raise_spec_error(self, method: str, batch: NestedTensor, from_dim: int, outer: tuple[int, ...] = ()) -> None:
        """Say what about ``batch`` is wrong; something is."""
        where = f'{self.name}.{method}'
        check_consistent(batch, self._data_spec, from_dim, where)
        for path, x in nest.flatten_with_path(batch):
            if tuple(x.shape[:from_dim]) != outer:
                raise SpecError(f'{where}: {path}: expected the outer dimensions {outer}, found '
                                f'{tuple(x.shape[:from_dim])}')
        raise SpecError(f'{where}: {nest.structure(batch)} does not match {self._tree}')

    # Reading --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_batch(self, batch_size: int, batch_length: int) -> tuple[NestedTensor, BatchInfo]:
        """Sample sequences, each possible one with the same probability.

        Args:
            batch_size: number B of sequences.
            batch_length: number T of steps in each.

        Returns:
            tuple:
            - nest ``[B, T, ...]`` on the default device
            - ``BatchInfo`` with ``env_ids [B]`` and ``positions [B]`` (of the first steps) on the default device, and
              ``replay_buffer``

        Raises:
            ValueError: no environment has ``batch_length`` steps (besides the ignored ones).
        """
        _require_at_least(f'{self.name}.get_batch', 1, batch_size=batch_size, batch_length=batch_length)
        if self._lockstep:
            starts = max(self._size - self._ignored - batch_length + 1, 0)
            drawn = self._draw(starts * self._num_envs, batch_size, batch_length)
            env_ids = drawn % self._num_envs
            positions = drawn.div(self._num_envs, rounding_mode='floor').add_(self._pos - self._size + self._ignored)
        else:
            env_starts = (self._env_size - (self._ignored + batch_length - 1)).clamp_(min=0)
            ends = env_starts.cumsum(0)
            drawn = self._draw(int(ends[-1]), batch_size, batch_length)
            env_ids = torch.searchsorted(ends, drawn, right=True)
            first = self._env_pos - self._env_size + self._ignored - (ends - env_starts)
            positions = drawn + first[env_ids]
        if batch_length == 1:
            cells = positions % self._max_length * self._num_envs + env_ids
        else:
            steps = positions.unsqueeze(-1) + torch.arange(batch_length)
            cells = (steps % self._max_length * self._num_envs + env_ids.unsqueeze(-1)).view(-1)
        return self._read(cells, env_ids, positions, batch_length)

    @torch.no_grad()
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
        sizes = self.current_size
        length = int(sizes[0]) - ignored
        if bool((sizes != sizes[0]).any()):
            raise ValueError(f'{self.name}.gather_all: expected the same number of steps for each environment, found '
                             f'{sizes.tolist()}; sample with get_batch, or store all environments together')
        if length <= 0:
            raise ValueError(f'{self.name}.gather_all: expected more than {ignored} steps, found {int(sizes[0])}')
        positions = self.current_pos - length
        steps = positions.unsqueeze(-1) + torch.arange(length)
        cells = steps % self._max_length * self._num_envs + self._all_envs.unsqueeze(-1)
        return self._read(cells.view(-1), self._all_envs.clone(), positions, length)

    @torch.no_grad()
    def get_field(self, field: str, env_ids: Tensor, positions: Tensor) -> NestedTensor:
        """Part of the steps at given places.

        Args:
            field: path in ``data_spec``, e.g. 'time_step.observation'; '' for everything.
            env_ids: int64, any shape that broadcasts with ``positions``.
            positions: int64. On the CPU they are checked; elsewhere that would make the device wait.

        Returns:
            nest ``[*shape, ...]`` with ``shape`` that of the two broadcast together, on the device of ``positions``.

        Raises:
            ValueError: a position is not in the buffer (any more).
        """
        env_ids, positions = torch.broadcast_tensors(env_ids, positions)
        if positions.device.type == 'cpu':
            first = self.earliest_positions(env_ids)
            if bool(((positions < first) | (positions >= self.current_pos[env_ids])).any()):
                raise ValueError(f'{self.name}.get_field: positions from {int(positions.min())} to '
                                 f'{int(positions.max())}, but the buffer holds {int(first.min())} to '
                                 f'{int(self.current_pos.max()) - 1}')
        cells = (positions % self._max_length * self._num_envs + env_ids).reshape(-1).to(self._device)
        leaves = nest.get_field(self._leaf_indices, field) if field else self._leaf_indices

        def read(leaf: int) -> Tensor:
            chosen = self._store.field(leaf).index_select(0, cells).to(positions.device)
            return chosen.view(positions.shape + self._shapes[leaf])

        return nest.map_structure(read, leaves)

    def _draw(self, num_sequences: int, batch_size: int, batch_length: int) -> Tensor:
        """int64 ``[batch_size]`` of ``range(num_sequences)``."""
        if num_sequences == 0:
            ignored = f' besides the {self._ignored} oldest, which are ignored' if self._ignored else ''
            raise ValueError(f'{self.name}.get_batch: expected an environment with at least {batch_length} steps'
                             f'{ignored}, found {self.current_size.tolist()} (max_length is {self._max_length}); '
                             'collect more before sampling (TrainerConfig.initial_collect_steps)')
        if self._with_replacement or num_sequences < batch_size:
            return torch.randint(num_sequences, (batch_size, ))
        return draw_distinct(num_sequences, batch_size)

    def _read(self, cells: Tensor, env_ids: Tensor, positions: Tensor,
              batch_length: int) -> tuple[NestedTensor, BatchInfo]:
        leaves = self._store.read_cells(cells.to(self._device), (len(env_ids), batch_length))
        device = context.get_default_device()
        if device.type != 'cpu' or self._device.type != 'cpu':
            leaves = [x.to(device) for x in leaves]
            env_ids, positions = env_ids.to(device), positions.to(device)
        info = BatchInfo(env_ids=env_ids, positions=positions, replay_buffer=self)
        return self._tree.unflatten(leaves), info

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The contents, if ``enable_checkpoint``; otherwise nothing.

        Returns:
            tensors and numbers; the tensors are those of the storage, not copies.
        """
        if not self._enable_checkpoint:
            return {}
        used = min(int(self.current_pos.max()), self._max_length)
        return {
            'current_pos': self.current_pos,
            'current_size': self.current_size,
            'max_length': self._max_length,
            'leaves': self._leaf_descriptions(),
            'blocks': [block[:used] for block in self._store.blocks],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the contents, as copies; nothing happens unless ``enable_checkpoint``, or if they were not saved.

        Raises:
            ValueError: they are those of a buffer of another size or another spec.
        """
        if not self._enable_checkpoint or not state_dict:
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
        self._env_pos, self._env_size = state_dict['current_pos'].clone(), state_dict['current_size'].clone()
        self._pos, self._size = int(self._env_pos[0]), int(self._env_size[0])
        self._lockstep = bool((self._env_pos == self._pos).all()) and bool((self._env_size == self._size).all())

    def _leaf_descriptions(self) -> list[str]:
        return [f'{path}: {spec.dtype_str} {tuple(spec.shape)}'
                for path, spec in nest.flatten_with_path(self._data_spec)]


def _refuse(name: str, **settings: tuple[Any, Any]) -> None:
    """Raise unless every ``argument=(value, default)``, of features that do not exist yet, has its default."""
    for argument, (value, default) in settings.items():
        if value != default:
            raise ValueError(f'{name}.{argument}: not available in this version, expected it to be left out, '
                             f'found {value!r}')


def _require_at_least(name: str, least: int, **arguments: int) -> None:
    for argument, value in arguments.items():
        if value < least:
            raise ValueError(f'{name}.{argument}: expected at least {least}, found {value}')
