"""Checkpoints of several ranks, which are those of one process: rank 0 writes what all of them have.

See :mod:`alfx.trainers.team.joint_state` for what is joined. Where the rollout stands, the states of the environments
and the random number generators of each rank are kept besides, for a run that goes on in as many processes; in another
number new episodes begin.
"""
import contextlib
import logging
from typing import Any

from alfx.engine.remote.data_parallel import Ranks
from alfx.trainers import run_state
from alfx.trainers.team import joint_state
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError

logger = logging.getLogger(__name__)
_ALGORITHM, _TRAINER = 'alg', 'trainer'


class JointCheckpointer(Checkpointer):
    """Saves and loads what several ranks have, in all of them at the same time.

    Args:
        ranks: the processes.
        ckpt_dir: the folder, which all of them can read.
        alg: the root algorithm.
        trainer: the ``RunState``.
    """

    def __init__(self, ranks: Ranks, ckpt_dir: str, alg: Any, trainer: Any):
        super().__init__(ckpt_dir, alg=alg, trainer=trainer)
        self._ranks, self._alg = ranks, alg
        self._counters: dict[str, int] | None = None

    def leave_group(self, counters: dict[str, int]) -> None:
        """From now on :meth:`save` does without the others, some of which are gone: the first one left writes.

        Args:
            counters: the counting metrics of the whole, by name.
        """
        self._counters = counters

    @property
    def writes(self) -> bool:
        """Whether this rank writes."""
        return self._ranks.rank == (0 if self._counters is None else self._ranks.survivors()[0])

    def save(self, global_step: int, environment_state: Any = None, temporary: bool = False) -> str:
        """As in the base class, of all ranks."""
        if self._counters is None:
            self._save_together(global_step, environment_state, temporary)
        elif self.writes:
            logger.info('other processes are gone: the checkpoint holds what rank %d has; what it stored for replay '
                        'stands for what they had stored', self._ranks.rank)
            self._write(global_step, self._joined(super()._states(), None), None, temporary)
        return self.path(global_step)

    def _save_together(self, global_step: int, environment_state: Any, temporary: bool) -> None:
        states = super()._states()
        own = joint_state.own_share(self._alg, states[_ALGORITHM])
        parts = self._ranks.gather_objects((own, states[_TRAINER]['rollout'], states[_TRAINER]['random'],
                                            environment_state))
        if parts is None:
            return
        environments = [part[-1] for part in parts]
        self._write(global_step, self._joined(states, parts),
                    None if any(state is None for state in environments) else environments, temporary)

    def _joined(self, states: dict[str, Any], parts: list[Any] | None) -> dict[str, Any]:
        """The states of this rank with those of all ranks, ``None`` for those that are not to be had."""
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
            return super()._read(global_step)  # which says what is wrong
        _, path, states = found or super()._read(step)
        if _ALGORITHM in states:
            share = joint_state.share_of(self._alg, states[_ALGORITHM], self._ranks.rank, self._ranks.size)
            states = {**states, _ALGORITHM: share}
        return step, path, states

    def remove_temporaries(self, keep: int) -> None:
        """As in the base class; in the rank that writes."""
        if self.writes:
            super().remove_temporaries(keep)
