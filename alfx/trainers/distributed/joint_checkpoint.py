"""Checkpoints of distributed training in the format of a single process. Rank 0 writes the joined state of all ranks.

See :mod:`alfx.trainers.distributed.joint_state` for the joined state. The checkpoint also contains the rollout state,
the environment state and the random state of each rank, for a run that is resumed with the same number of ranks. With a
different number of ranks new episodes start.
"""
import contextlib
import logging
from typing import Any

from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.files import CheckpointError
from alfx.engine.remote.data_parallel import Ranks
from alfx.trainers import run_state
from alfx.trainers.distributed import joint_state

logger = logging.getLogger(__name__)
_ALGORITHM, _TRAINER = 'alg', 'trainer'


class JointCheckpointer(Checkpointer):
    """Checkpointer of distributed training. All ranks save and load at the same time.

    Args:
        ranks: the ranks.
        ckpt_dir: folder of the checkpoints, which all ranks must be able to read.
        alg: root algorithm.
        trainer: the ``RunState``.
    """

    def __init__(self, ranks: Ranks, ckpt_dir: str, alg: Any, trainer: Any):
        super().__init__(ckpt_dir, alg=alg, trainer=trainer)
        self._ranks, self._alg = ranks, alg
        self._counters: dict[str, int] | None = None

    def leave_group(self, counters: dict[str, int]) -> None:
        """Make :meth:`save` work without the other ranks after some are lost. The first surviving rank writes.

        Args:
            counters: values of the counting metrics over all ranks, by name.
        """
        self._counters = counters

    @property
    def writes(self) -> bool:
        """Return whether this rank writes checkpoints."""
        return self._ranks.rank == (0 if self._counters is None else self._ranks.survivors()[0])

    def save(self, global_step: int, environment_state: Any = None, temporary: bool = False,
             subfolder: str = '') -> str:
        """Save the joined state of all ranks; see the base class."""
        if self._counters is None:
            self._save_together(global_step, environment_state, temporary, subfolder)
        elif self.writes:
            logger.info('other ranks are lost: the checkpoint contains the state of rank %d, and its replay buffer '
                        'replaces the replay buffers of the lost ranks', self._ranks.rank)
            self._write(global_step, self._joined(super()._states(), None), None, temporary, subfolder)
        return self.path(global_step)

    def _save_together(self, global_step: int, environment_state: Any, temporary: bool, subfolder: str) -> None:
        states = super()._states()
        own = joint_state.own_share(self._alg, states[_ALGORITHM])
        parts = self._ranks.gather_objects((own, states[_TRAINER]['rollout'], states[_TRAINER]['random'],
                                            environment_state))
        if parts is None:
            return
        environments = [part[-1] for part in parts]
        self._write(global_step, self._joined(states, parts),
                    None if any(state is None for state in environments) else environments, temporary, subfolder)

    def _joined(self, states: dict[str, Any], parts: list[Any] | None) -> dict[str, Any]:
        """Return the state of this rank joined with the states of all ranks.

        If ``parts`` is None, the states of the other ranks are unavailable, and this rank replaces them.
        """
        algorithm, trainer = states[_ALGORITHM], states[_TRAINER]
        if parts is None:
            shares = [joint_state.own_share(self._alg, algorithm)] * self._ranks.size
        else:
            shares = [part[0] for part in parts]
        algorithm = joint_state.joined(self._alg, algorithm, shares)
        if self._counters is not None:
            algorithm = joint_state.with_counters(self._alg, algorithm, self._counters)
        each = [{'rollout': part[1], 'random': part[2]} for part in parts or ()]
        rollout = {**run_state.of_all_ranks(trainer['rollout']), 'ranks': each}
        return {**states, _ALGORITHM: algorithm, _TRAINER: {**trainer, 'rollout': rollout}}

    def _read(self, global_step: int | str) -> tuple[int, str, dict[str, Any]]:
        found = None
        if self._ranks.is_first:
            with contextlib.suppress(CheckpointError):
                found = super()._read(global_step)
        step = self._ranks.broadcast_from_rank0(None if found is None else found[0])
        if step is None:
            return super()._read(global_step)  # raises an error with the reason
        _, path, states = found or super()._read(step)
        if _ALGORITHM in states:
            share = joint_state.share_of(self._alg, states[_ALGORITHM], self._ranks.rank, self._ranks.size)
            states = {**states, _ALGORITHM: share}
        return step, path, states

    def remove_temporaries(self, keep: int) -> None:
        """Remove temporary checkpoints on the rank that writes; see the base class."""
        if self.writes:
            super().remove_temporaries(keep)
