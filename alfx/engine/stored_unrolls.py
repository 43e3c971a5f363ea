"""Storage of the unrolls that an auxiliary phase trains on; see :mod:`alfx.engine.auxiliary_phase`."""
import logging
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from alfx.data_structures import Experience
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import extract_spec

logger = logging.getLogger(__name__)


class PhaseSettings(Protocol):
    """Settings of an auxiliary phase.

    Attributes:
        interval: iterations from one phase to the next.
        mini_batch_length: steps of a training sequence; ``None`` for the length of an unroll.
        mini_batch_size: sequences in a minibatch, summed over all processes that train together.
        num_updates_per_train_iter: passes over the stored unrolls.
    """

    @property
    def interval(self) -> int: ...

    @property
    def mini_batch_length(self) -> int | None: ...

    @property
    def mini_batch_size(self) -> int: ...

    @property
    def num_updates_per_train_iter(self) -> int: ...


class Sequences(NamedTuple):
    """Starts of sequences, int64 ``[N]`` each, ordered so that the sequences of all environments alternate."""

    env_ids: Tensor
    positions: Tensor


class StoredUnrolls(nn.Module):
    """The unrolls since the last phase and the number of their iterations.

    It is a part of the algorithm, because the checkpoint of the algorithm has to contain it.

    Args:
        max_steps: maximum number of steps of each environment in all unrolls between two phases.
        context_steps: earlier steps to keep for the frame stacks of the first ones.
        checkpoint_limit: maximum size in bytes; larger contents are not saved in checkpoints.

    Attributes:
        num_iterations: iterations stored since the last phase.
        num_steps: steps of each environment in these iterations.
        replay_buffer: storage; ``None`` before the first unroll.
    """

    def __init__(self, max_steps: int, context_steps: int, checkpoint_limit: int):
        super().__init__()
        self.max_steps, self._context_steps, self._checkpoint_limit = max_steps, context_steps, checkpoint_limit
        self.num_iterations = self.num_steps = 0
        self.replay_buffer: ReplayBuffer | None = None
        self._loaded: dict[str, Any] = {}  # contents of a checkpoint, until the buffer exists

    def store(self, unroll: Experience) -> None:
        """Store an unroll ``[T, B, ...]`` and count it."""
        if self.replay_buffer is None:
            self._build(unroll)
        assert self.replay_buffer is not None, 'the replay buffer has not been built'
        self.replay_buffer.add_sequence(unroll)
        self.num_steps = min(self.num_steps + len(unroll.time_step.step_type), self.max_steps)
        self.num_iterations += 1

    def _build(self, like: Experience) -> None:
        self.replay_buffer = ReplayBuffer(
            extract_spec(like, from_dim=2), like.time_step.step_type.shape[1], self.max_steps + self._context_steps,
            num_earliest_frames_ignored=self._context_steps, name='auxiliary_phase_buffer')
        self.replay_buffer.checkpoint_limit = self._checkpoint_limit
        if self.replay_buffer.num_bytes(self.max_steps + self._context_steps) > self._checkpoint_limit:
            logger.warning('the unrolls of an auxiliary phase will be larger than '
                           'TrainerConfig.replay_checkpoint_megabytes, so that checkpoints do not contain them: a '
                           'resumed run starts without them and is not exactly reproducible')
        self._load()

    def _load(self) -> None:
        """Move the loaded state into the buffer."""
        assert self.replay_buffer is not None, 'the replay buffer has not been built'
        self.replay_buffer.load_state_dict(self._loaded)
        self._loaded = {}
        self.num_steps = min(self.num_steps, int(self.replay_buffer.current_size.min()))

    def sequences(self, length: int) -> Sequences:
        """Return everything stored as sequences of ``length`` steps; the oldest steps that do not fill one are dropped.
        """
        assert self.replay_buffer is not None, 'nothing has been stored yet'
        ends = self.replay_buffer.current_pos
        starts = torch.arange(self.num_steps // length).flip(0)[:, None] + 1
        positions = ends - starts * length  # [sequences of an environment, environments]
        env_ids = torch.arange(len(ends)).expand(positions.shape)
        return Sequences(env_ids.reshape(-1), positions.reshape(-1))

    def start_next_phase(self) -> None:
        """Start counting for the next phase; stored steps remain only as context of later ones."""
        self.num_iterations = self.num_steps = 0
        if self.replay_buffer is not None and not self._context_steps:
            self.replay_buffer.clear()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the counters, and the contents unless they are too large."""
        buffer = self._loaded if self.replay_buffer is None else self.replay_buffer.state_dict()
        return {'num_iterations': self.num_iterations, 'num_steps': self.num_steps,
                **({'replay_buffer': buffer} if buffer else {})}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`get_extra_state`."""
        self.num_iterations, self.num_steps = state['num_iterations'], state['num_steps']
        self._loaded = state.get('replay_buffer', {})
        if self.replay_buffer is not None:
            self.replay_buffer.clear()
            self._load()

    def join_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the states of several processes into the state of one process with all their environments."""
        extra = [state['_extra_state'] for state in states]
        if not all('replay_buffer' in x for x in extra):
            return {'_extra_state': {k: v for k, v in extra[0].items() if k != 'replay_buffer'}}
        joined = ReplayBuffer.join_states([x['replay_buffer'] for x in extra])
        return {'_extra_state': {**extra[0], 'replay_buffer': joined}}

    def split_state(self, state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """Return the part of the state of one process that belongs to process ``rank`` of ``size``."""
        extra = state['_extra_state']
        if 'replay_buffer' not in extra:
            return state
        share = ReplayBuffer.split_state(extra['replay_buffer'], rank, size)
        return {'_extra_state': {**extra, 'replay_buffer': share}}
