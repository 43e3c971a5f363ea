"""What a checkpoint holds besides the algorithm, so that a run goes on as if it had not stopped."""
import logging
import time
from typing import Any

from alfx import context
from alfx.trainers import random_state
from alfx.trainers.cpu_tuning import Tuning

logger = logging.getLogger(__name__)


class RunState:
    """Counters, generators, and where the rollout stands.

    Attributes:
        iteration: number of iterations done.
        seconds: time spent in training, in all processes that the run has had.
        saved_at: when the checkpoint was written that the run went on from (seconds since the epoch), 0 for none.
        tuning: how torch computes.

    Args:
        algorithm: the root algorithm.
        env: its environment, None in supervised learning.
        tuning: how torch computes.
        random_seed: the seed of the run.
    """

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

    @property
    def seconds(self) -> float:
        """Time spent in training, in all processes that the run has had."""
        return self._loaded_seconds + time.monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now."""
        return {
            'iteration': self.iteration,
            'global_counter': context.get_global_counter(),
            'progresses': context.get_all_progresses(),
            'seconds': self.seconds,
            'saved_at': time.time(),
            'random_seed': self._random_seed,
            'tuning': list(self.tuning),
            'rollout': self._algorithm.get_rollout_state(),
            'mixed_precision': {} if self._algorithm.mixed_precision is None else
                               self._algorithm.mixed_precision.state_dict(),
            'random': random_state.capture()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counters and progress; ``resume_rollout`` does the rest."""
        self._loaded = dict(state)
        self.iteration = state['iteration']
        self.saved_at = state['saved_at']
        self.tuning = Tuning(*state['tuning'])
        self._loaded_seconds, self._start = state['seconds'], time.monotonic()
        context.set_global_counter(state['global_counter'])
        context.update_all_progresses(state['progresses'])
        if self._algorithm.mixed_precision is not None:
            self._algorithm.mixed_precision.load_state_dict(state.get('mixed_precision', {}))

    def resume_rollout(self, environment_state: Any) -> None:
        """Put environments, rollout and, last, the random number generators where they were.

        Args:
            environment_state: what ``env.get_state()`` returned when the checkpoint was written; None if there is
                none: then new episodes begin, other than those that the run began with.
        """
        state = self._loaded
        if environment_state is not None:
            self._env.set_state(environment_state)
            self._algorithm.set_rollout_state(state['rollout'])
        elif self._env is not None:
            logger.info('the state of the environments is not in the checkpoint: new episodes begin')
            self._algorithm.start_new_episodes(state['rollout'])
            self._env.seed((self._random_seed + 7919 * (self.iteration + 1)) % 2**31)
        else:
            self._algorithm.set_rollout_state(state['rollout'])
        random_state.restore(state['random'])
        self._loaded = {}
