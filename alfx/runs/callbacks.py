"""Callbacks: user code that the trainer calls at events of a run, such as the end of an evaluation.

A callback overrides the hooks of :class:`Callback` that it needs; ``TrainerConfig.callbacks`` lists the callbacks of a
run. Each hook gets a :class:`TrainingRun`. :mod:`alfx.trainers.callback_runner` calls the hooks.
"""
import dataclasses
import logging
import math
import os
from typing import Any, NamedTuple

import numpy as np

from alfx import gin_utils
from alfx.gin_utils.conf_error import hint_nearest
from alfx.gin_utils.settings import setting, wrong_values
from alfx.runs import run_files

_log = logging.getLogger(__name__)


class Episode(NamedTuple):
    """Finished training episode.

    Attributes:
        episode_return: undiscounted sum of the rewards of the environment, float64 ``[]``, or ``[K]`` for K-dimensional
            rewards. Intrinsic rewards and reward scaling are not included.
        length: number of steps.
    """
    episode_return: np.ndarray
    length: int


@dataclasses.dataclass
class TrainingRun:
    """Run in progress, as callbacks see it. The counts cover all environments, ranks and earlier parts of the run.

    Attributes:
        root_dir: run folder.
        algorithm: root algorithm.
        iteration: number of finished iterations.
        env_steps: number of environment steps; 0 in supervised learning.
        episodes: number of finished episodes; 0 in supervised learning.
        seconds: training time in seconds.
        progress: finished fraction of the run, in ``[0, 1]``.
        evaluation: results of the latest evaluation, a row of ``eval/progress.csv``: 'average_return',
            'average_length', 'env_steps', 'global_counter', ... in reinforcement learning, and the measures of the
            algorithm in supervised learning. None before the first evaluation.
        is_interrupted: True if a signal stops the run before its end, so that it may be resumed.
        logged: values of :meth:`log` that were not written yet.
        stop_reason: argument of :meth:`stop`; None if no callback has called it.
        keeps_best: whether :meth:`keep_as_best` was called since the last iteration.
    """
    root_dir: str
    algorithm: Any
    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    progress: float = 0.0
    evaluation: dict[str, float] | None = None
    is_interrupted: bool = False
    logged: dict[str, float] = dataclasses.field(default_factory=dict)
    stop_reason: str | None = None
    keeps_best: bool = False

    def log(self, name: str, value: float) -> None:
        """Log a scalar to the event files, to the loggers of the conf and to the column ``name`` of ``progress.csv``.

        The latest value is written with the next summary (``TrainerConfig.summary_interval``): that of this iteration
        for values logged in ``on_iteration_end`` and ``on_episode_end``. Values after the last summary are added to the
        last row when the run ends.

        Raises:
            ValueError: ``value`` is not a number; or ``name`` is a column that alfx writes, or reserved for scalars of
                the algorithm, with the part 'train', 'loss', 'scalar_loss' or 'alpha' between slashes.
        """
        if name in run_files.PROGRESS_COLUMNS:
            raise ValueError(f'{name!r} is a column that alfx writes to progress.csv; choose another name')
        if run_files.LEARNING_COLUMN.search(name):
            raise ValueError(f"{name!r}: 'train', 'loss', 'scalar_loss' and 'alpha' between slashes are reserved for "
                             f"the algorithm; choose another name, such as 'callback/{name.rsplit('/', 1)[-1]}'")
        try:
            self.logged[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{name}: expected a number, found {value!r}') from error

    def stop(self, reason: str) -> None:
        """End the run after this iteration, with a last evaluation and checkpoint, as at the end of its budget.

        The same command does not continue the run, unless the conf no longer has the callback that stopped it.

        Args:
            reason: text for the log.
        """
        self.stop_reason = self.stop_reason or reason

    def keep_as_best(self) -> None:
        """Store the current state as the best checkpoint, which replaces the best checkpoint so far.

        ``--checkpoint_step best`` and ``alfx.load(run, 'best')`` load it. It is written at the end of the iteration to
        ``train/algorithm/best``, without the replay buffer, and no later checkpoint removes it.
        """
        self.keeps_best = True


class Callback:
    """Base class of callbacks. Every hook does nothing by default.

    An error in a hook ends the run with a :class:`~alfx.trainers.callback_runner.CallbackError`, which names the
    callback and the hook. With several processes, all hooks run on rank 0 only: they may read the algorithm, but must
    not change its parameters.
    """

    settings_may_change = True  # when a stored run is resumed

    def on_training_start(self, run: TrainingRun) -> None:
        """Called before the first iteration, also when a run is resumed, after :meth:`load_state_dict`.

        An object that is used in several runs resets its state here if ``run.iteration`` is 0.
        """

    def on_iteration_end(self, run: TrainingRun) -> None:
        """Called after each iteration: an unroll and the updates on it ('sl': an epoch)."""

    def on_episode_end(self, run: TrainingRun, episode: Episode) -> None:
        """Called for each finished training episode, before ``on_iteration_end`` of the iteration in which it ended.

        The counts of ``run`` are those of the end of the iteration.
        """

    def on_evaluation_end(self, run: TrainingRun) -> None:
        """Called after each evaluation, with its results in ``run.evaluation``.

        A run with this hook evaluates in the training process, whatever ``TrainerConfig.async_eval`` is, so that the
        algorithm still has the parameters that were evaluated.
        """

    def on_training_end(self, run: TrainingRun) -> None:
        """Called after the last iteration and the last checkpoint, not after an error. See ``run.is_interrupted``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in checkpoints: numbers, strings, tensors, None, and lists and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the checkpoint from which the run is resumed; not called if there is none."""


class SettingsCallback(Callback):
    """Base class of callbacks that are dataclasses of settings."""

    def __post_init__(self) -> None:
        problems = wrong_values(self, type(self).__name__)
        if problems:
            raise gin_utils.ConfError(problems)


class _Improvement(SettingsCallback):
    """Base class of callbacks that compare the evaluations of a run by one of their results."""

    metric: str
    mode: str
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._best: float | None = None

    def on_training_start(self, run: TrainingRun) -> None:
        if run.iteration == 0:  # the same object may have been used in another run
            self._best = None

    def improves(self, run: TrainingRun) -> bool:
        """Return whether the latest evaluation is better than all before; NaN never is."""
        results = run.evaluation or {}
        if self.metric not in results:
            raise gin_utils.ConfError(
                f'{type(self).__name__}.metric: the evaluation has no result {self.metric!r}',
                hint_nearest(self.metric, list(results)) or f'choose one of {", ".join(results)}')
        value = results[self.metric]
        sign = 1.0 if self.mode == 'max' else -1.0
        # the difference of equal infinities is NaN, which is no improvement either
        if math.isnan(value) or self._best is not None and not sign * (value - self._best) > self.min_delta:
            return False
        self._best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {'best': self._best, 'metric': self.metric, 'mode': self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        same = (state.get('metric', self.metric), state.get('mode', self.mode)) == (self.metric, self.mode)
        self._best = state['best'] if same else None  # other results cannot be compared


@gin_utils.configurable
@dataclasses.dataclass(eq=False)
class KeepBestCheckpoint(_Improvement):
    """Callback that keeps the checkpoint with the best evaluation; see :meth:`TrainingRun.keep_as_best`.

    ``--checkpoint_step best`` loads it in play, evaluate, record and export, as does ``alfx.load(run, 'best')``. Its
    result is logged as ``best/METRIC`` (a loss as ``best_METRIC``). The best of many noisy evaluations overestimates
    the policy, so evaluate it again before reporting it.

    Args:
        metric: result to compare, a column of ``eval/progress.csv``. The first of equal results is kept.
        mode: 'max' if large values are good, 'min' if small values are.

    Raises:
        ConfError: an evaluation has no such result.
    """

    metric: str = setting('average_return')
    mode: str = setting('max', choices=('max', 'min'))

    def on_training_start(self, run: TrainingRun) -> None:
        super().on_training_start(run)
        if self._best is not None and not os.path.isdir(run_files.best_checkpoint_dir(run.root_dir)):
            _log.info('the best checkpoint is missing: the next evaluation becomes the best')  # removed, or a fork
            self._best = None

    def on_evaluation_end(self, run: TrainingRun) -> None:
        if self.improves(run):
            run.keep_as_best()
            assert self._best is not None, 'improves() should have set it'
            name = f'best/{self.metric}'
            if run_files.LEARNING_COLUMN.search(name):  # reserved for scalars of the algorithm
                name = f"best_{self.metric.replace('/', '_')}"
            run.log(name, self._best)


@gin_utils.configurable
@dataclasses.dataclass(eq=False)
class StopWithoutImprovement(_Improvement):
    """Callback that stops the run when evaluations no longer improve (early stopping).

    Args:
        patience: number of successive evaluations without improvement after which the run stops.
        min_delta: smallest improvement that counts; larger values stop earlier.
        metric: result to compare, a column of ``eval/progress.csv``.
        mode: 'max' if large values are good, 'min' if small values are.

    Raises:
        ConfError: an evaluation has no such result.
    """

    patience: int = setting(5, minimum=1)
    min_delta: float = setting(0.0, minimum=0)
    metric: str = setting('average_return')
    mode: str = setting('max', choices=('max', 'min'))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_without = 0

    def on_training_start(self, run: TrainingRun) -> None:
        super().on_training_start(run)
        if run.iteration == 0:
            self._num_without = 0

    def on_evaluation_end(self, run: TrainingRun) -> None:
        self._num_without = 0 if self.improves(run) else self._num_without + 1
        if self._num_without >= self.patience:
            run.stop(f'{self.metric} has not improved on {self._best} in {self._num_without} evaluations')

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'num_without': self._num_without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        is_other_metric = self._best is None and state['best'] is not None
        self._num_without = 0 if is_other_metric else state['num_without']


@gin_utils.configurable
@dataclasses.dataclass(eq=False)
class EpisodeLog(SettingsCallback):
    """Callback that writes a row for each finished training episode to a CSV file.

    The columns are ``episode`` (number of the episode, from 1), ``env_steps`` and ``seconds`` (environment steps and
    training time at the end of the iteration in which it ended), ``return`` (summed over the reward dimensions) and
    ``length``. A resumed run removes the rows after its checkpoint and writes them again.

    Args:
        file: name of the file in the run folder.
    """

    file: str = setting('episodes.csv')

    def __post_init__(self) -> None:
        super().__post_init__()
        if os.path.basename(self.file) != self.file or not self.file.endswith('.csv') or self.file == 'progress.csv':
            raise gin_utils.ConfError('EpisodeLog.file: expected the name of a .csv file in the run folder, other '
                                      f'than progress.csv, found {self.file!r}')

    def on_training_start(self, run: TrainingRun) -> None:
        self._table = run_files.ProgressLog(os.path.join(run.root_dir, self.file),
                                            ('episode', 'env_steps', 'return', 'length', 'seconds'))
        self._count = run.episodes
        self._table.cut('episode', self._count)

    def on_episode_end(self, run: TrainingRun, episode: Episode) -> None:
        self._count += 1
        self._table.append({'episode': self._count, 'env_steps': run.env_steps,
                            'return': float(episode.episode_return.sum()), 'length': episode.length,
                            'seconds': round(run.seconds, 3)})
