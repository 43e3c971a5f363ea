"""Main loop of a hyperparameter search, which starts, monitors and stops runs and records the trials.

:meth:`Searching.run` is the loop. Every decision is written to the study before it takes effect, so the
hyperparameter search can be killed at any time and resumed.
"""
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from alfx.gin_utils import ConfError
from alfx.runs import run_files
from alfx.search import search_folder as folder_module
from alfx.search import search_conf, seeds
from alfx.search.measure import Measure, MeasureError
from alfx.search.results import Results
from alfx.search.run_process import Run
from alfx.search.runs import Execution, Executor, InlineExecutor, ProcessExecutor
from alfx.search.search_conf import SearchConf
from alfx.search.search_settings import Search
from alfx.search.study import Study
from alfx.utils.processes import num_cores, signal_handlers

_POLL_SECONDS = 0.1
_STOP_SECONDS = 120.0  # a run that takes longer to stop is killed
_MAX_RESTARTS = 3
_QUIET_SECONDS = 60.0  # after this long without output, the active runs are printed
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)


@dataclasses.dataclass
class ActiveTrial:
    """Trial in progress.

    Attributes:
        trial: trial of optuna.
        texts: parameters in the syntax of confs.
        values: values of its finished runs, by index of the seed.
        waiting: indices of the seeds whose runs have not started.
        restarts: number of runs restarted after a signal had stopped them.
        is_unwanted: whether the pruner has decided to stop the trial.
    """
    trial: Any
    texts: dict[str, str]
    values: dict[int, float]
    waiting: list[int]
    restarts: int = 0
    is_unwanted: bool = False

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self.trial.number


@dataclasses.dataclass
class ActiveRun:
    """Run in progress.

    Attributes:
        run: description of the run.
        active: trial of the run.
        execution: handle of the run.
        started: start time, by ``time.monotonic``.
        earlier_seconds: duration of the run before the hyperparameter search was resumed.
        asked_to_stop: time at which the run was asked to stop; None if it was not.
        out_of_time: whether it was asked to stop because of ``run_seconds``.
        is_dropped: whether the result of the run is ignored, because its trial has ended.
    """
    run: Run
    active: ActiveTrial
    execution: Execution
    started: float
    earlier_seconds: float
    asked_to_stop: float | None = None
    out_of_time: bool = False
    is_dropped: bool = False

    def seconds(self) -> float:
        """Return the duration of the run in seconds."""
        return self.earlier_seconds + time.monotonic() - self.started

    def stop(self) -> None:
        """Ask the run to stop, unless it was asked before."""
        if self.asked_to_stop is None:
            self.asked_to_stop = time.monotonic()
            self.execution.stop()


class Searching:
    """Hyperparameter search in progress.

    Args:
        conf: search conf.
        root_dir: search folder.
        tell: function that prints a line.
        make_executor: function that creates the executor; None for the executor of the settings.

    Raises:
        ConfError: optuna is not installed or rejects an argument.
    """

    def __init__(self, conf: SearchConf, root_dir: str, tell: Callable[[str], None],
                 make_executor: Callable[[Search], Executor] | None = None):
        self._conf, self._settings = conf, conf.settings
        self._folder = folder_module.SearchFolder(root_dir)
        self._study = Study(self._folder.study_file, conf.settings, conf.space)
        self._measure = Measure(conf.settings)
        self._show, self._last_output = tell, time.monotonic()
        self._executor = (make_executor or _executor)(conf.settings)
        self._results = Results(self._folder, conf, self._study)
        self._trials: dict[int, ActiveTrial] = {}
        self._runs: list[ActiveRun] = []
        self._failed_now = 0
        self._unused_warned: set[str] = set()
        self._started = time.monotonic()
        self._stop_reason = ''
        self._gave_up = False
        self.stop_signal: int | None = None

    def run(self) -> bool:
        """Run trials until all have ended, or until a limit or a signal stops the hyperparameter search.

        Returns:
            Whether all trials have ended.

        Raises:
            ConfError: the first trials have all failed; the message contains the reason.
        """
        with signal_handlers({signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}):
            try:
                self._resume()
                while self._is_at_work():
                    for run in list(self._runs):
                        self._check_run(run)
                    self._start_runs()
                    self._check_limits()
                    if self._runs and time.monotonic() - self._last_output > _QUIET_SECONDS:
                        self._tell(f"running: {', '.join(self._description(run) for run in self._runs)}")
                    if self._runs:
                        time.sleep(_POLL_SECONDS)
            finally:
                self._end()
        self._results.write()
        if self._gave_up:
            raise ConfError(self._stop_reason, 'see the .log file next to its run folder')
        is_done = not self._trials and not self._may_begin()
        if not is_done:
            self._tell(f'stopped: {self._stop_reason}')
        return is_done

    def summary(self) -> list[str]:
        """Return lines that describe the best trial."""
        return self._results.summary()

    def _tell(self, line: str) -> None:
        self._last_output = time.monotonic()
        self._show(line)

    def _description(self, run: ActiveRun) -> str:
        curve = self._measure.curve(run.run.root_dir)
        seed = f' seed {run.run.repeat}' if self._settings.num_seeds > 1 else ''
        value = f' at {curve[-1]:.6g}' if curve else ''
        state = 'queued' if run.execution.is_queued else f'{run.seconds():.0f} s'
        return f'trial {run.run.trial}{seed}{value} ({state})'

    # The loop --------------------------------------------------------------------------------------------------

    def _is_at_work(self) -> bool:
        if self._runs:
            return True
        return not self._stop_reason and (bool(self._trials) or self._may_begin())

    def _may_begin(self) -> bool:
        return len(self._study.trials()) < self._study.num_trials

    def _resume(self) -> None:
        """Continue the trials that were running when the hyperparameter search stopped."""
        running = self._study.running()
        ended = len(self._study.trials()) - len(running)
        if ended or running:
            self._tell(f'resuming: {ended} of {self._study.num_trials} trials have ended, {len(running)} were running')
        for trial in running:
            active = self._take(trial)
            if not active.waiting:  # its last run has ended
                self._complete(active)

    def _take(self, trial: Any) -> ActiveTrial:
        texts = self._study.texts(trial.params)
        known = trial.user_attrs.get('values', {})
        values = {int(repeat): value for repeat, value in known.items()}
        waiting = [repeat for repeat in range(self._settings.num_seeds) if repeat not in values]
        active = self._trials[trial.number] = ActiveTrial(trial, texts, values, waiting)
        text = ''.join(f'{name} = {value}\n' for name, value in texts.items())
        folder_module.write_text(os.path.join(self._folder.trial_dir(trial.number), 'params.gin'), text)
        return active

    def _start_runs(self) -> None:
        while not self._stop_reason and len(self._runs) < self._settings.num_parallel:
            active = next((active for active in self._trials.values() if active.waiting), None)
            if active is None:
                if not self._may_begin():
                    return
                active = self._take(self._study.ask())
            self._start(active, active.waiting.pop(0))
            if self._settings.executor == 'inline':
                self._check_run(self._runs[0])
                return  # to the check of limits and signals

    def _start(self, active: ActiveTrial, repeat: int) -> None:
        root_dir = self._folder.run_dir(active.number, repeat)
        seed = seeds.run_seed(self._settings.seed, active.number, repeat)
        params = [f'{name} = {text}' for name, text in active.texts.items()]
        if self._conf.function is None:
            params.append(f'TrainerConfig.random_seed = {seed}')
        run = Run(active.number, repeat, root_dir, self._folder.base_file, tuple(params), seed, self._conf.function,
                  self._settings.device, self._threads(), self._conf.must_be_used)
        os.makedirs(os.path.dirname(root_dir), exist_ok=True)
        earlier = _seconds_of(root_dir)
        started = time.monotonic()
        execution = self._executor.start(run, lambda: self._report(active, run))
        self._runs.append(ActiveRun(run, active, execution, started, earlier))

    def _threads(self) -> int | None:
        if self._settings.executor != 'process' or 'OMP_NUM_THREADS' in os.environ:
            return self._settings.threads_per_run
        return self._settings.threads_per_run or max(1, num_cores() // self._settings.num_parallel)

    def _check_run(self, run: ActiveRun) -> None:
        code = run.execution.poll()
        if run.execution.is_queued:
            run.started = time.monotonic()
        if not run.is_dropped and self._report(run.active, run.run) and code != 0:
            self._end_trial(run.active, self._study.prune)
        limit = self._settings.run_seconds
        if code is None:
            if limit is not None and run.seconds() > limit and run.asked_to_stop is None:
                run.out_of_time = True
                run.stop()
            if run.asked_to_stop is not None and time.monotonic() - run.asked_to_stop > _STOP_SECONDS:
                run.execution.kill()
            return
        self._runs.remove(run)
        if not run.is_dropped:
            self._run_ended(run, code)

    def _report(self, active: ActiveTrial, run: Run) -> bool:
        """Report the scores of a run to the pruner, and return whether to stop the trial."""
        if run.repeat == 0 and not active.is_unwanted:
            active.is_unwanted = self._study.report(active.trial, self._measure.curve(run.root_dir))
        return active.is_unwanted

    def _run_ended(self, run: ActiveRun, code: int) -> None:
        active, repeat = run.active, run.run.repeat
        self._note_seconds(run)
        if run.out_of_time:
            code = 0  # the run keeps the score it has reached
        if code != 0 and self._stop_reason or code in _STOPPED and active.restarts < _MAX_RESTARTS:
            active.restarts += 1
            active.waiting.insert(0, repeat)  # the run is resumed from its checkpoint
            return
        if code != 0:
            self._fail(active, run.execution.log_tail())
            return
        try:
            active.values[repeat] = self._measure.final(run.run.root_dir)
        except MeasureError as error:
            late = f' when it was stopped after {run.seconds():.0f} s' if run.out_of_time else ''
            self._fail(active, f'{error}{late}')
            return
        self._tell_unused(run.run)
        self._study.note(active.trial, 'values', {str(key): value for key, value in sorted(active.values.items())})
        if len(active.values) == self._settings.num_seeds:
            self._complete(active)

    def _tell_unused(self, run: Run) -> None:
        """Print a warning, once per binding, if a run has not used a searched binding."""
        if self._conf.function is None:
            for name in set(search_conf.unused(self._conf, run.root_dir)) - self._unused_warned:
                self._unused_warned.add(name)
                self._tell(f'warning: trial {run.trial} has not used {name}, so its value makes no difference')

    def _complete(self, active: ActiveTrial) -> None:
        value = sum(active.values.values()) / len(active.values)
        self._end_trial(active, lambda trial: self._study.complete(trial, value))

    def _fail(self, active: ActiveTrial, log_tail: str) -> None:
        self._failed_now += 1
        self._end_trial(active, lambda trial: self._study.fail(trial, log_tail))
        if self._failed_now >= self._settings.give_up_after and self._study.best() is None:
            self._gave_up = True
            self._stop_reason = f'the first {self._failed_now} trials have all failed, the last with: {log_tail}'

    def _end_trial(self, active: ActiveTrial, end: Callable[[Any], None]) -> None:
        """End a trial in the study, and stop its remaining runs."""
        del self._trials[active.number]
        active.waiting.clear()
        dropped = [run for run in self._runs if run.active is active]
        for run in dropped:
            self._note_seconds(run)
        end(active.trial)
        for run in dropped:
            run.is_dropped = True
            run.stop()
        self._tell(self._results.line(active.number))
        self._results.write_occasionally()

    def _note_seconds(self, run: ActiveRun) -> None:
        known = run.active.trial.user_attrs.get('seconds', {})
        self._study.note(run.active.trial, 'seconds', {**known, str(run.run.repeat): round(run.seconds(), 2)})

    # Stopping --------------------------------------------------------------------------------------------------

    def _check_limits(self) -> None:
        limit = self._settings.total_seconds
        if limit is not None and time.monotonic() - self._started > limit and self._is_at_work():
            self._stop_reason = self._stop_reason or f'the time limit of {limit:g} s is reached'
        if self.stop_signal is not None:
            self._stop_reason = signal.Signals(self.stop_signal).name
        if self._stop_reason:
            for run in self._runs:
                run.stop()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop_signal = number

    def _end(self) -> None:
        """Kill all remaining runs and close the executor."""
        for run in self._runs:
            run.execution.kill()
        while self._runs:
            self._runs = [run for run in self._runs if run.execution.poll() is None]
            time.sleep(_POLL_SECONDS if self._runs else 0)
        self._executor.close()


def _executor(settings: Search) -> Executor:
    if settings.executor == 'ray':
        from alfx.search.ray_runs import RayExecutor
        return RayExecutor(settings)
    return InlineExecutor() if settings.executor == 'inline' else ProcessExecutor()


def _seconds_of(root_dir: str) -> float:
    """Return how many seconds a run has trained so far."""
    rows = run_files.read_table(os.path.join(root_dir, 'progress.csv'))
    return float(rows[-1].get('seconds') or 0.0) if rows else 0.0
