"""State of a run that checkpoints contain besides the algorithm, and the checkpoint after a crash."""
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from alfx import context
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.module_states import NOT_FITTING, mismatch_error
from alfx.config import TrainerConfig
from alfx.environments.environment_errors import EnvironmentStepError
from alfx.environments.seeding import derived_seed
from alfx.gin_utils import ConfError, stored_files
from alfx.runs import run_files
from alfx.trainers.callback_runner import CallbackError
from alfx.trainers.cpu_tuning import Tuning
from alfx.trainers.progress_display import ProgressDisplay
from alfx.utils import random_state

logger = logging.getLogger(__name__)
_STATE = {'iteration': range(2**62), 'global_counter': range(2**62), 'progresses': {str: float}, 'seconds': float,
          'saved_at': float, 'tuning': list, 'rollout': dict, 'random': dict,
          'last_summary?': range(-1, 2**62), 'steps_of_iteration?': range(2**62),
          'callbacks?': dict}
_REJOINED = 7  # stream of the seeds of ranks that resume from the checkpoint of other ranks


class RunState:
    """Counters, random number generators and rollout state of a run.

    Attributes:
        iteration: number of completed iterations.
        seconds: training time in seconds, including the time before the run was resumed.
        saved_at: time of the checkpoint from which the run was resumed (seconds since the epoch), 0 for none.
        tuning: CPU settings of torch.
        last_summary: global counter of the latest row of ``progress.csv``; -1 for none.
        steps_of_iteration: environment steps of the latest iteration.
        callbacks: function that returns the state of the callbacks; None for no callbacks.
        loaded_callbacks: state of the callbacks in the checkpoint from which the run was resumed.

    Args:
        algorithm: root algorithm.
        env: environment of the algorithm, None in supervised learning.
        tuning: CPU settings of torch.
        random_seed: random seed of the run.
    """

    optional_keys = frozenset({'callbacks', 'mixed_precision'})  # callbacks and device of a resumed run may differ

    def __init__(self, algorithm: Any, env: Any, tuning: Tuning, random_seed: int):
        self._algorithm = algorithm
        self._env = env
        self._random_seed = random_seed
        self._loaded: dict[str, Any] = {}
        self._loaded_seconds = 0.0
        self._start = time.monotonic()
        self.iteration = 0
        self.saved_at = 0.0
        self.tuning = tuning
        self.last_summary = -1
        self.steps_of_iteration = 0
        self.callbacks: Callable[[], dict[str, Any]] | None = None
        self.loaded_callbacks: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Training time in seconds, including the time before the run was resumed."""
        return self._loaded_seconds + time.monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        """Return the current state."""
        state = {
            'iteration': self.iteration,
            'global_counter': context.get_global_counter(),
            'progresses': context.get_all_progresses(),
            'seconds': self.seconds,
            'saved_at': time.time(),
            'random_seed': self._random_seed,
            'tuning': list(self.tuning),
            'last_summary': self.last_summary,
            'steps_of_iteration': self.steps_of_iteration,
            'rollout': self._algorithm.learner.state_dict(),
            'random': random_state.capture()
        }
        if self.callbacks is not None:
            state['callbacks'] = self.callbacks()
        precision = self._algorithm.updater.precision
        if precision is not None and precision.scaler is not None:
            state['mixed_precision'] = precision.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load counters and progress; call ``resume_rollout`` to restore the rest."""
        problem = stored_files.mismatch(state, _STATE)
        if problem or not run_files.is_tuning(state['tuning']):
            raise ValueError(problem or f"tuning: expected threads and precisions, found {state['tuning']}")
        self._loaded = dict(state)
        self.iteration = state['iteration']
        self.saved_at = state['saved_at']
        self.tuning = Tuning(*state['tuning'])
        self.last_summary = state.get('last_summary', state['global_counter'] - 1)
        self.steps_of_iteration = state.get('steps_of_iteration', 0)
        self.loaded_callbacks = state.get('callbacks', {})
        self._loaded_seconds, self._start = state['seconds'], time.monotonic()
        context.set_global_counter(state['global_counter'])
        context.update_all_progresses(state['progresses'])
        precision = self._algorithm.updater.precision
        if 'mixed_precision' in state and precision is not None:
            precision.load_state_dict(state['mixed_precision'])

    def resume_rollout(self, environment_state: Any, restore: Callable[[Any], bool]) -> None:
        """Restore the environments, the rollout state and, last, the random number generators.

        Args:
            environment_state: state of the environments in the checkpoint, or None.
            restore: restores the part of ``environment_state`` of this process and returns whether that succeeded. If
                not, new episodes start with different seeds than at the start of the run.
        """
        with _explained():
            rollout, random, environment_state = self._own_part(environment_state)
        has_episodes = restore(environment_state) or self._env is None
        with _explained():
            if has_episodes:
                self._algorithm.learner.load_state_dict(rollout)
            else:
                logger.info('the state of the environments is not restored from the checkpoint: new episodes start')
                self._algorithm.learner.collector.start_new_episodes(rollout)
                self._env.seed((self._random_seed + 7919 * (self.iteration + 1)) % 2**31)
        if random is None:
            random_state.set_random_seed(derived_seed(self._random_seed, _REJOINED, self.iteration,
                                                      context.get_ranks().rank))
        else:
            with _explained():
                random_state.restore(random)
        self._loaded = {}

    def _own_part(self, environment_state: Any) -> tuple[Any, Any, Any]:
        """Return the rollout, random and environment state of this process, None for state that is unavailable.

        In distributed training each rank has its own state. If the number of ranks is the same as in the checkpoint,
        each rank restores its state. Otherwise new episodes start, and only rank 0 restores its random state.
        """
        state, ranks = self._loaded, context.get_ranks()
        parts, size = state['rollout'].get('ranks'), context.num_ranks()
        if parts is None and ranks is None:
            return state['rollout'], state['random'], environment_state
        if parts and len(parts) == size and ranks is not None:
            own = parts[ranks.rank]
            return own['rollout'], own['random'], environment_state and environment_state[ranks.rank]
        written_by = 'when a process was lost' if parts == [] else f'by {len(parts or [0])} process(es)'
        logger.info('the checkpoint was written %s, but this run has %d%s', written_by, size,
                    '' if self._env is None else ': new episodes start')
        return of_all_ranks(state['rollout']), state['random'] if ranks is None or ranks.is_first else None, None


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn errors about state that does not fit this run into a CheckpointError."""
    try:
        yield
    except (ConfError, EnvironmentStepError):
        raise
    except NOT_FITTING as error:
        raise mismatch_error('the latest checkpoint', 'trainer', repr(error)) from error


def of_all_ranks(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the rollout state that is equal on all ranks; empty in supervised learning."""
    return {name: value for name, value in rollout.items() if name == 'unroll_debt'}


def is_finite(algorithm: Any) -> bool:
    """Return whether all parameters are finite."""
    return all(bool(torch.isfinite(p).all()) for p in algorithm.parameters())


def save_crash(error: Exception, folder: str, algorithm: Any, state: RunState, config: TrainerConfig,
               display: ProgressDisplay) -> None:
    """Save a checkpoint after an unexpected error. It may be inconsistent, so no run resumes from it automatically.

    Nothing is saved before the first iteration, or if the user declines at the terminal
    (``TrainerConfig.confirm_checkpoint_upon_crash``).

    Args:
        error: the error that ended the training.
        folder: folder of the checkpoints; the checkpoint is saved in its subfolder ``crash``.
        algorithm: root algorithm.
        state: state of the run.
        config: configuration of the run.
        display: display for the question and the path of the checkpoint.
    """
    if state.iteration == 0:
        return
    if config.confirm_checkpoint_upon_crash and sys.stdin is not None and sys.stdin.isatty():
        display.message(f'{type(error).__name__}: {error}\nsave a checkpoint of the state after the error? [y/N]')
        if sys.stdin.readline().strip().lower() not in ('y', 'yes'):
            return
    if isinstance(error, CallbackError):  # its state may be what cannot be saved
        state.callbacks = None
    path = Checkpointer(os.path.join(folder, 'crash'), alg=algorithm, trainer=state).save(context.get_global_counter())
    display.message(f'the state after the crash is saved in {path}')
