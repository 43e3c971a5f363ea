"""Training again, every N iterations, on all unrolls since the last time, with another loss.

An algorithm that trains on whole unrolls and drops them asks for it by its ``auxiliary_phase``. The unrolls are kept as
the environment gave them, with the infos that the iteration has trained on (targets, for one). When the phase begins,
the infos that ``train_step`` yields are computed for all of them, and what ``auxiliary_reference`` keeps of these (the
policy as it was) is what ``calc_auxiliary_loss`` compares the later ones with.
"""
import logging
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from alfx import context, nest, summary
from alfx.data_structures import Experience, LossInfo
from alfx.engine import loss_reduction
from alfx.engine.plan import Batch, Eager, Objective, make_plan
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, extract_spec

logger = logging.getLogger(__name__)


class PhaseSettings(Protocol):
    """How an auxiliary phase trains.

    Attributes:
        interval: iterations from one phase to the next.
        mini_batch_length: steps of a training sequence; ``None``: those of an unroll.
        mini_batch_size: sequences in a minibatch; of several processes that train together, of all of them.
        num_updates_per_train_iter: passes over what is stored.
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
    """Where sequences begin: int64 ``[N]`` each, in an order in which all environments come together."""

    env_ids: Tensor
    positions: Tensor


class StoredUnrolls(nn.Module):
    """The unrolls since the last phase, and how many iterations they are of.

    It is part of the algorithm, as its checkpoint has to hold them.

    Args:
        max_steps: of each environment, in all unrolls between two phases.
        context_steps: earlier steps to keep, for the frame stacks of the first ones.
        checkpoint_limit: bytes; more than that is not part of checkpoints.

    Attributes:
        num_iterations: that have been stored since the last phase.
        num_steps: of each environment, in these.
        replay_buffer: holds them; ``None`` before the first unroll.
    """

    def __init__(self, max_steps: int, context_steps: int, checkpoint_limit: int):
        super().__init__()
        self._max_steps, self._context_steps, self._checkpoint_limit = max_steps, context_steps, checkpoint_limit
        self.num_iterations = self.num_steps = 0
        self.replay_buffer: ReplayBuffer | None = None
        self._loaded: dict[str, Any] = {}  # contents of a checkpoint, until there is a buffer for them

    def store(self, unroll: Experience) -> None:
        """Keep an unroll ``[T, B, ...]`` and count it."""
        if self.replay_buffer is None:
            self._build(unroll)
        assert self.replay_buffer is not None, 'it has been built'
        self.replay_buffer.add_sequence(unroll)
        self.num_steps = min(self.num_steps + len(unroll.time_step.step_type), self._max_steps)
        self.num_iterations += 1

    def _build(self, like: Experience) -> None:
        self.replay_buffer = ReplayBuffer(
            extract_spec(like, from_dim=2), like.time_step.step_type.shape[1], self._max_steps + self._context_steps,
            num_earliest_frames_ignored=self._context_steps, name='auxiliary_phase_buffer')
        self.replay_buffer.checkpoint_limit = self._checkpoint_limit
        if self.replay_buffer.num_bytes(self._max_steps + self._context_steps) > self._checkpoint_limit:
            logger.warning('the unrolls of an auxiliary phase will be larger than '
                           'TrainerConfig.replay_checkpoint_megabytes, and then not be part of checkpoints: a run that '
                           'goes on does so without those before, not exactly')
        self._take_over()

    def _take_over(self) -> None:
        """Put what has been loaded into the buffer."""
        assert self.replay_buffer is not None, 'it has been built'
        self.replay_buffer.load_state_dict(self._loaded)
        self._loaded = {}
        self.num_steps = min(self.num_steps, int(self.replay_buffer.current_size.min()))

    def sequences(self, length: int) -> Sequences:
        """All of what is stored in sequences of ``length`` steps; of what does not fit the oldest steps are left out.
        """
        assert self.replay_buffer is not None, 'something has been stored'
        ends = self.replay_buffer.current_pos
        starts = torch.arange(self.num_steps // length).flip(0)[:, None] + 1
        positions = ends - starts * length  # [sequences of an environment, environments]
        env_ids = torch.arange(len(ends)).expand(positions.shape)
        return Sequences(env_ids.reshape(-1), positions.reshape(-1))

    def start_anew(self) -> None:
        """What is stored has been used up; it stays as context of what follows."""
        self.num_iterations = self.num_steps = 0
        if self.replay_buffer is not None and not self._context_steps:
            self.replay_buffer.clear()

    def get_extra_state(self) -> dict[str, Any]:
        """Counters, and the contents unless they are too large."""
        buffer = self._loaded if self.replay_buffer is None else self.replay_buffer.state_dict()
        return {'num_iterations': self.num_iterations, 'num_steps': self.num_steps,
                **({'replay_buffer': buffer} if buffer else {})}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_extra_state`."""
        self.num_iterations, self.num_steps = state['num_iterations'], state['num_steps']
        self._loaded = state.get('replay_buffer', {})
        if self.replay_buffer is not None:
            self.replay_buffer.clear()
            self._take_over()

    def join_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of one process with the environments of several, from the state of each."""
        extra = [state['_extra_state'] for state in states]
        if not all('replay_buffer' in x for x in extra):
            return {'_extra_state': {k: v for k, v in extra[0].items() if k != 'replay_buffer'}}
        joined = ReplayBuffer.join_states([x['replay_buffer'] for x in extra])
        return {'_extra_state': {**extra[0], 'replay_buffer': joined}}

    def share_of_state(self, state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """The state of one of ``size`` processes that share the environments of one."""
        extra = state['_extra_state']
        if 'replay_buffer' not in extra:
            return state
        share = ReplayBuffer.share_of_state(extra['replay_buffer'], rank, size)
        return {'_extra_state': {**extra, 'replay_buffer': share}}


class AuxiliaryPhase:
    """Stores unrolls and, when it is time, trains on them.

    Args:
        learner: of the algorithm.
        algorithm: the root.
        settings: how to train.
        stored: where the unrolls are kept.
        unroll_length: steps of an unroll.
    """

    def __init__(self, learner: Any, algorithm: Any, settings: PhaseSettings, stored: StoredUnrolls,
                 unroll_length: int):
        self._learner, self._algorithm, self._settings, self._stored = learner, algorithm, settings, stored
        self._length = settings.mini_batch_length or unroll_length
        self._plan: Eager | None = None

    def store(self, unroll: Experience) -> None:
        """Keep an unroll ``[B, T, ...]`` that an iteration is about to be trained on."""
        self._stored.store(nest.map_structure(lambda x: x.transpose(0, 1), unroll._replace(batch_info=())))

    def run_if_due(self) -> None:
        """Train if there are the unrolls of ``interval`` iterations."""
        stored = self._stored
        if stored.num_iterations < self._settings.interval:
            return
        if stored.num_steps:
            with context.auxiliary_context():
                self._train(stored.sequences(min(self._length, stored.num_steps)))
        stored.start_anew()

    def _train(self, sequences: Sequences) -> None:
        settings, count = self._settings, len(sequences.positions)
        batch_size = math.ceil(settings.mini_batch_size / context.num_ranks())
        references = self._references(sequences, batch_size)
        for epoch in range(settings.num_updates_per_train_iter):
            order = torch.randperm(count)
            for start in range(0, count, batch_size):
                chosen = order[start:start + batch_size]
                is_last = epoch == settings.num_updates_per_train_iter - 1 and start + batch_size >= count
                reference = nest.map_structure(
                    lambda x, chosen=chosen: x.index_select(1, chosen.to(x.device)), references)
                batch = Batch((self._read(sequences, chosen), reference))
                with context.record_if(is_last), summary.scope('auxiliary_phase'):  # rare: each writes summaries, once
                    computed = self._learner.optimize(self.plan, batch, self._optimizers())
                    summary_utils.summarize_loss(computed.loss_info)

    @property
    def plan(self) -> Eager:
        """How gradients are computed."""
        if self._plan is None:
            algorithm, learner = self._algorithm, self._learner
            params = [p for o in self._optimizers() for group in o.param_groups for p in group['params']]
            objective = Objective(module=algorithm, losses=self._losses, params=params,
                                  name=f'{algorithm.name} in its auxiliary phase', variant=learner.variant,
                                  scaled=None if learner.scaler is None else learner.scaler.scaled)
            self._plan = make_plan(objective, algorithm.capabilities.traceable_update, learner.compiles)
        return self._plan

    def invalidate_caches(self) -> None:
        """The tensors of the algorithm have been moved: forget what has been made for where they were."""
        self._plan = None

    def _losses(self, batch: tuple[Experience, NestedTensor]) -> tuple[LossInfo, Tensor | None, NestedTensor]:
        """What is minimised for experience and references ``[T, B, ...]``."""
        experience, reference = batch
        info = self._learner.train_info(experience)
        loss_info, masks = loss_reduction.masked_loss(self._algorithm.calc_auxiliary_loss(info, reference),
                                               experience.time_step.step_type, bootstraps=False)
        return loss_info, masks, info

    def _references(self, sequences: Sequences, batch_size: int) -> NestedTensor:
        """What is kept of all sequences as they are now: ``[T, N, ...]``."""
        with torch.no_grad(), context.record_if(False):
            parts = [self._algorithm.auxiliary_reference(self._learner.train_info(self._read(sequences, chosen)))
                     for chosen in torch.arange(len(sequences.positions)).split(batch_size)]
        return nest.map_structure(lambda *x: torch.cat(x, 1), *parts)

    def _read(self, sequences: Sequences, chosen: Tensor) -> Experience:
        """Transformed sequences ``[T, B, ...]``."""
        buffer = self._stored.replay_buffer
        assert buffer is not None, 'something has been stored'
        length = min(self._length, self._stored.num_steps)
        experience, batch_info = buffer.get_sequences(sequences.env_ids[chosen], sequences.positions[chosen], length)
        experience = self._learner.transformed(experience, batch_info, buffer)
        return nest.map_structure(lambda x: x.transpose(0, 1), experience)

    def _optimizers(self) -> list[Any]:
        """Those that make the steps of the phase."""
        own = self._algorithm.auxiliary_optimizer
        return self._algorithm.optimized_parameters()[0] if own is None else [own]
