"""What a checkpoint holds besides the algorithm, so that a run goes on as if it had not stopped."""
import logging
import time
from typing import Any

from alfx import context
from alfx.environments.described_environment import DescribedEnvironment
from alfx.environments.seeding import derived_seed
from alfx.utils import random_state
from alfx.trainers.cpu_tuning import Tuning

logger = logging.getLogger(__name__)
_REJOINED = 7  # purpose of the seeds of processes that go on from what others have written


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
        state = {
            'iteration': self.iteration,
            'global_counter': context.get_global_counter(),
            'progresses': context.get_all_progresses(),
            'seconds': self.seconds,
            'saved_at': time.time(),
            'random_seed': self._random_seed,
            'tuning': list(self.tuning),
            'rollout': self._algorithm.learner.state_dict(),
            'random': random_state.capture()
        }
        precision = self._algorithm.updater.precision
        if precision is not None and precision.scaler is not None:
            state['mixed_precision'] = precision.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counters and progress; ``resume_rollout`` does the rest."""
        self._loaded = dict(state)
        self.iteration = state['iteration']
        self.saved_at = state['saved_at']
        self.tuning = Tuning(*state['tuning'])
        self._loaded_seconds, self._start = state['seconds'], time.monotonic()
        context.set_global_counter(state['global_counter'])
        context.update_all_progresses(state['progresses'])
        precision = self._algorithm.updater.precision
        if 'mixed_precision' in state and precision is not None:
            precision.load_state_dict(state['mixed_precision'])

    def resume_rollout(self, environment_state: Any) -> None:
        """Put environments, rollout and, last, the random number generators where they were.

        Args:
            environment_state: what ``env.get_state()`` returned when the checkpoint was written; None if there is
                none. Then, and where other processes act from now on, new episodes begin, other than those that the
                run began with.
        """
        rollout, random, environment_state = self._own_part(environment_state)
        if environment_state is not None and not isinstance(self._env, DescribedEnvironment):
            self._env.set_state(environment_state)
            self._algorithm.learner.load_state_dict(rollout)
        elif self._env is not None:
            logger.info('the state of the environments is not in the checkpoint: new episodes begin')
            self._algorithm.learner.collector.start_new_episodes(rollout)
            self._env.seed((self._random_seed + 7919 * (self.iteration + 1)) % 2**31)
        else:
            self._algorithm.learner.load_state_dict(rollout)
        if random is None:
            random_state.set_random_seed(derived_seed(self._random_seed, _REJOINED, self.iteration,
                                                      context.get_ranks().rank))
        else:
            random_state.restore(random)
        self._loaded = {}

    def _own_part(self, environment_state: Any) -> tuple[Any, Any, Any]:
        """What this process goes on from: of its rollout, its generators and its environments; ``None`` for nothing.

        Where several processes train together each has its own. In as many as have written the checkpoint they go on
        from there. In another number environments start anew, and the generators of all but the first one.
        """
        state, ranks = self._loaded, context.get_ranks()
        parts, size = state['rollout'].get('ranks'), context.num_ranks()
        if parts is None and ranks is None:
            return state['rollout'], state['random'], environment_state
        if parts and len(parts) == size and ranks is not None:
            own = parts[ranks.rank]
            return own['rollout'], own['random'], environment_state and environment_state[ranks.rank]
        written_by = 'when a process was lost' if parts == [] else f'by {len(parts or [0])} process(es)'
        logger.info('the checkpoint was written %s, this run has %d%s', written_by, size,
                    '' if self._env is None else ': its environments start anew')
        is_first = ranks is None or ranks.is_first
        return of_all_ranks(state['rollout']), state['random'] if is_first else None, None


def of_all_ranks(rollout: dict[str, Any]) -> dict[str, Any]:
    """What is the same in all ranks of where the rollout stands; nothing in supervised learning."""
    return {name: value for name, value in rollout.items() if name == 'unroll_debt'}
