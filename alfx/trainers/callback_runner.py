"""Calls of the hooks of ``TrainerConfig.callbacks``; the callbacks themselves are in :mod:`alfx.runs.callbacks`."""
import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

import alfx
from alfx.checkpoints.module_states import check_plain
from alfx.config import TrainerConfig
from alfx.gin_utils import ConfError
from alfx.gin_utils.conf_error import hint_nearest
from alfx.gin_utils.value_checks import describe, problem_at
from alfx.runs.callbacks import Callback, Episode, EpisodeLog, TrainingRun
from alfx.trainers.reset_networks import ResetNetworks

_PACKAGE = os.path.join(os.path.dirname(alfx.__file__), '')


class CallbackError(RuntimeError):
    """Raised if a hook of a callback raises; the message names the callback, the hook and the line."""


class CallbackRunner:
    """Callbacks of a run. Hooks are called on rank 0; the other ranks only send their counts and episodes.

    Args:
        config: configuration of the run.
        algorithm: root algorithm.
        strategy: see :mod:`alfx.trainers.distributed.strategies`.

    Attributes:
        run: the object that hooks receive.
        stopped_by: name of the callback that ended the run; '' for none.
        received_state: the latest state of the callbacks, which a surviving rank saves if rank 0 is lost.

    Raises:
        ConfError: ``TrainerConfig.callbacks`` has an entry that is not a callback, or one of its hooks is never called.
    """

    def __init__(self, config: TrainerConfig, algorithm: Any, strategy: Any):
        self._strategy = strategy
        self._callbacks = _by_name(config.callbacks)
        self.run = TrainingRun(config.root_dir, algorithm)
        self.stopped_by = ''
        self.received_state: dict[str, Any] = {}
        self._metrics = [] if config.ml_type == 'sl' else algorithm.get_metrics()
        self._records_episodes = bool(self.users_of('on_episode_end'))
        collects = config.ml_type == 'rl' and config.collects
        resets = [name for name, callback in self._callbacks.items() if isinstance(callback, ResetNetworks)]
        for users, without, is_possible, reason in (
                (self.users_of('on_evaluation_end'), 'on_evaluation_end would never be called',
                 config.evaluate or config.eval_uncertainty, 'set TrainerConfig.evaluate = True'),
                (self.users_of('on_episode_end'), 'on_episode_end would never be called', collects,
                 'leave it out, because the run collects no episodes'),
                (resets, 'steps would never be reached', collects, 'leave it out, because the run collects no steps')):
            if users and not is_possible:
                raise ConfError([problem_at('TrainerConfig', 'callbacks',
                                            f'contains {users[0]}, whose {without}', reason)])
        if self._records_episodes:
            for metric in self._metrics[2:4]:  # returns and lengths
                metric.finished = []

    def users_of(self, hook: str) -> list[str]:
        """Return the names of the callbacks that override a hook."""
        return [name for name, callback in self._callbacks.items()
                if getattr(type(callback), hook) is not getattr(Callback, hook)]

    def start(self, stored: dict[str, Any], iteration: int, seconds: float, progress: float,
              evaluation: dict[str, float] | None) -> None:
        """Restore the state of a checkpoint, and call ``on_training_start``.

        Args:
            stored: result of :meth:`state_dict`; empty for a new run.
            iteration: number of finished iterations.
            seconds: training time.
            progress: finished fraction of the run.
            evaluation: results of the latest evaluation, or None.
        """
        self._update(iteration, seconds, progress)
        self.run.evaluation = evaluation
        if not self._strategy.writes:
            return
        for name, callback in self._callbacks.items():
            if name in stored.get('states', {}):
                with _named(name, 'load_state_dict'):
                    callback.load_state_dict(stored['states'][name])
        self.run.logged = dict(stored.get('logged', {}))
        if stored.get('stopped_by') in self._callbacks:
            self.stopped_by = stored['stopped_by']
            self.run.stop_reason = 'it has stopped the run before; remove the callback to continue'
        self.call('on_training_start')

    def end_iteration(self, iteration: int, seconds: float, progress: float) -> None:
        """Call ``on_episode_end`` for each new episode, and ``on_iteration_end``; see :meth:`start`."""
        for episode in self._update(iteration, seconds, progress):
            self.call('on_episode_end', episode)
        self.call('on_iteration_end')

    def end_evaluation(self, evaluation: dict[str, float] | None) -> None:
        """Call ``on_evaluation_end`` with results; None if the evaluation failed."""
        if evaluation is not None:
            self.run.evaluation = evaluation
            self.call('on_evaluation_end')

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks, in the order of the conf.

        Raises:
            CallbackError: a callback raised.
        """
        if not self._strategy.writes:
            return
        for name in self.users_of(hook):
            with _named(name, hook):
                getattr(self._callbacks[name], hook)(self.run, *args)
            if self.run.stop_reason is not None and not self.stopped_by:
                self.stopped_by = name

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks, for a checkpoint; on all ranks but rank 0 the one received last."""
        if not self._strategy.writes:
            return self.received_state
        states = {}
        for name, callback in self._callbacks.items():
            with _named(name, 'state_dict'):
                states[name] = callback.state_dict()
                check_plain(states[name])
        return {'states': states, 'logged': dict(self.run.logged), 'stopped_by': self.stopped_by}

    def _update(self, iteration: int, seconds: float, progress: float) -> list[Episode]:
        """Update the counts of all ranks, and return the episodes that have ended in this iteration, on rank 0."""
        run, episodes = self.run, []
        counts = [metric.count for metric in self._metrics[:2]]
        if self._records_episodes:
            run.algorithm.get_metrics()  # updates the metrics with all steps
            returns, lengths = (metric.finished for metric in self._metrics[2:4])
            episodes = [Episode(value, int(length)) for value, length in zip(returns, lengths, strict=True)]
            returns.clear()
            lengths.clear()
        gathered = self._strategy.gather((counts, episodes))
        if self._metrics:
            run.env_steps, run.episodes = (sum(part[0][i] for part in gathered) for i in range(2))
        run.iteration, run.seconds, run.progress = iteration, seconds, progress
        return [episode for part in gathered for episode in part[1]]


def _by_name(given: Any) -> dict[str, Callback]:
    """Return the callbacks by name: the class, with a number if several have the same class."""
    found: dict[str, Callback] = {}
    for callback in given:
        if callable(callback) and not isinstance(callback, Callback):  # a class, or the factory of one
            callback = callback()
        if not isinstance(callback, Callback):
            raise ConfError([problem_at('TrainerConfig', 'callbacks', f'contains {describe(callback)}, which is not a '
                                        'callback', 'derive its class from alfx.runs.callbacks.Callback')])
        name = type(callback).__name__
        hooks = [hook for hook in vars(Callback) if hook.startswith('on_')]
        for other in {hook for hook in dir(callback) if hook.startswith('on_')} - {*hooks}:
            if near := hint_nearest(other, hooks, 0.8):
                raise ConfError([problem_at('TrainerConfig', 'callbacks', f'{name}.{other} is not a hook', near)])
        number = sum(type(other).__name__ == name for other in found.values()) + 1
        if isinstance(callback, EpisodeLog) and callback.file in [getattr(x, 'file', '') for x in found.values()]:
            raise ConfError([problem_at('TrainerConfig', 'callbacks', f'contains two callbacks with the file '
                                        f'{callback.file}', 'set EpisodeLog.file of one of them')])
        found[f'{name}_{number}' if number > 1 else name] = callback
    return found


@contextlib.contextmanager
def _named(name: str, hook: str) -> Iterator[None]:
    try:
        yield
    except ConfError:  # its message says what to do
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = traceback.format_list([frame for frame in frames if not frame.filename.startswith(_PACKAGE)])
        what = f'{name}.{hook} of TrainerConfig.callbacks raised {type(error).__name__}: {error}'
        raise CallbackError('\n'.join([what, *where]).rstrip()) from error
