"""The search: starts runs while there is room, watches them, ends them, and keeps the books.

:meth:`Searching.run` is the loop. Everything it decides is in the study before anything follows from it, so that it can
be killed between any two steps and go on.
"""
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from alfx.gin_utils import ConfError
from alfx.search import search_folder as folder_module
from alfx.search import search_conf, seeds
from alfx.search.measure import Measure, MeasureError
from alfx.search.results import Results
from alfx.search.run_process import Run
from alfx.search.runs import Execution, Executor, InlineExecutor, ProcessExecutor
from alfx.search.search_conf import SearchConf
from alfx.search.search_settings import Search
from alfx.search.study import Study
from alfx.runs import run_files

_POLL_SECONDS = 0.1
_STOP_SECONDS = 120.0  # a run that does not end within this after it was asked to is killed
_MAX_RESTARTS = 3
_QUIET_SECONDS = 60.0  # after so long without a line, one tells what is running
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)


@dataclasses.dataclass
class ActiveTrial:
    """A trial that has not ended.

    Attributes:
        trial: optuna's.
        texts: its parameters as a conf writes them.
        values: what its runs have given so far, by the number of the seed.
        waiting: the seeds whose runs have not been started.
        restarts: how often runs were started again because a signal had ended them.
        is_unwanted: whether the pruner would end it.
    """
    trial: Any
    texts: dict[str, str]
    values: dict[int, float]
    waiting: list[int]
    restarts: int = 0
    is_unwanted: bool = False

    @property
    def number(self) -> int:
        """Of the trial."""
        return self.trial.number


@dataclasses.dataclass
class ActiveRun:
    """A run that has not ended.

    Attributes:
        run: what runs.
        active: the trial it belongs to.
        execution: the handle.
        started: when, of ``time.monotonic``.
        earlier_seconds: how long it ran before this search was started.
        asked_to_stop: when, None if it was not.
        out_of_time: whether that was because of ``run_seconds``.
        is_dropped: whether what comes of it does not matter any more.
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
        """How long it has run."""
        return self.earlier_seconds + time.monotonic() - self.started

    def stop(self) -> None:
        """Ask it to end; once."""
        if self.asked_to_stop is None:
            self.asked_to_stop = time.monotonic()
            self.execution.stop()


class Searching:
    """A search at work.

    Args:
        conf: what it is.
        root_dir: its folder.
        tell: shows a line.
        make_executor: replaces what the settings ask for.

    Raises:
        ConfError: optuna is not installed, or takes other arguments.
    """

    def __init__(self, conf: SearchConf, root_dir: str, tell: Callable[[str], None],
                 make_executor: Callable[[Search], Executor] | None = None):
        self._conf, self._settings = conf, conf.settings
        self._folder = folder_module.SearchFolder(root_dir)
        self._study = Study(self._folder.study_file, conf.settings, conf.space)
        self._measure = Measure(conf.settings)
        self._show, self._told = tell, time.monotonic()
        self._executor = (make_executor or _executor)(conf.settings)
        self._results = Results(self._folder, conf, self._study)
        self._trials: dict[int, ActiveTrial] = {}
        self._runs: list[ActiveRun] = []
        self._failed_now = 0
        self._unused_told: set[str] = set()
        self._begun = time.monotonic()
        self._why_stopping = ''
        self._gave_up = False
        self.stop_signal: int | None = None

    def run(self) -> bool:
        """Search until all trials have ended, or until something stops it.

        Returns:
            Whether all trials have ended.

        Raises:
            ConfError: the first trials have all failed; the message says of what.
        """
        with self._signals():
            try:
                self._resume()
                while self._is_at_work():
                    for run in list(self._runs):
                        self._look_after(run)
                    self._start_runs()
                    self._check_limits()
                    self._tell_what_runs()
                    if self._runs:
                        time.sleep(_POLL_SECONDS)
            finally:
                self._end()
        self._results.write()
        if self._gave_up:
            raise ConfError(self._why_stopping, 'see the .log of its run beside its folder')
        is_done = not self._trials and not self._may_begin()
        if not is_done:
            self._tell(f'stopped: {self._why_stopping}')
        return is_done

    def summary(self) -> list[str]:
        """The best trial in words."""
        return self._results.summary()

    def _tell(self, line: str) -> None:
        self._told = time.monotonic()
        self._show(line)

    def _tell_what_runs(self) -> None:
        if self._runs and time.monotonic() - self._told > _QUIET_SECONDS:
            self._tell(f"running: {', '.join(self._in_words(run) for run in self._runs)}")

    def _in_words(self, run: ActiveRun) -> str:
        curve = self._measure.curve(run.run.root_dir)
        seed = f' seed {run.run.repeat}' if self._settings.num_seeds > 1 else ''
        value = f' at {curve[-1]:.6g}' if curve else ''
        state = 'queued' if run.execution.is_queued else f'{run.seconds():.0f} s'
        return f'trial {run.run.trial}{seed}{value} ({state})'

    # The loop --------------------------------------------------------------------------------------------------

    def _is_at_work(self) -> bool:
        if self._runs:
            return True
        return not self._why_stopping and (bool(self._trials) or self._may_begin())

    def _may_begin(self) -> bool:
        return len(self._study.trials()) < self._study.num_trials

    def _resume(self) -> None:
        """Take up the trials that were running when the search ended."""
        running = self._study.running()
        ended = len(self._study.trials()) - len(running)
        if ended or running:
            self._tell(f'going on: {ended} of {self._study.num_trials} trials have ended, {len(running)} were running')
        for trial in running:
            active = self._take(trial)
            if not active.waiting:  # its last run had ended
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
        while not self._why_stopping and len(self._runs) < self._settings.num_parallel:
            active = next((active for active in self._trials.values() if active.waiting), None)
            if active is None:
                if not self._may_begin():
                    return
                active = self._take(self._study.ask())
            self._start(active, active.waiting.pop(0))
            if self._settings.executor == 'inline':
                self._look_after(self._runs[0])

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
        return self._settings.threads_per_run or max(1, (os.cpu_count() or 1) // self._settings.num_parallel)

    def _look_after(self, run: ActiveRun) -> None:
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
        """Show the pruner what a run has reached; whether it would end the trial."""
        if run.repeat == 0 and not active.is_unwanted:
            active.is_unwanted = self._study.report(active.trial, self._measure.curve(run.root_dir))
        return active.is_unwanted

    def _run_ended(self, run: ActiveRun, code: int) -> None:
        active, repeat = run.active, run.run.repeat
        self._note_seconds(run)
        if run.out_of_time:
            code = 0  # what it has reached counts
        if code != 0 and self._why_stopping or code in _STOPPED and active.restarts < _MAX_RESTARTS:
            active.restarts += 1
            active.waiting.insert(0, repeat)  # it goes on from its checkpoint
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
        """Say it once if nothing uses a binding that is searched: then its value makes no difference."""
        if self._conf.function is None:
            for name in set(search_conf.unused(self._conf, run.root_dir)) - self._unused_told:
                self._unused_told.add(name)
                self._tell(f'warning: nothing in trial {run.trial} has used {name}: its value makes no difference')

    def _complete(self, active: ActiveTrial) -> None:
        value = sum(active.values.values()) / len(active.values)
        self._end_trial(active, lambda trial: self._study.complete(trial, value))

    def _fail(self, active: ActiveTrial, log_tail: str) -> None:
        self._failed_now += 1
        self._end_trial(active, lambda trial: self._study.fail(trial, log_tail))
        if self._failed_now >= self._settings.give_up_after and self._study.best() is None:
            self._gave_up = True
            self._why_stopping = f'all of the first {self._failed_now} trials failed, the last with: {log_tail}'

    def _end_trial(self, active: ActiveTrial, end: Callable[[Any], None]) -> None:
        """End a trial in the study; what still runs of it is stopped."""
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
        self._results.write_now_and_then()

    def _note_seconds(self, run: ActiveRun) -> None:
        known = run.active.trial.user_attrs.get('seconds', {})
        self._study.note(run.active.trial, 'seconds', {**known, str(run.run.repeat): round(run.seconds(), 2)})

    # Stopping --------------------------------------------------------------------------------------------------

    def _check_limits(self) -> None:
        limit = self._settings.total_seconds
        if limit is not None and time.monotonic() - self._begun > limit and self._is_at_work():
            self._why_stopping = self._why_stopping or f'{limit:g} s have passed'
        if self.stop_signal is not None:
            self._why_stopping = signal.Signals(self.stop_signal).name
        if self._why_stopping:
            for run in self._runs:
                run.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM; outside of the main thread, where Python has none, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop_signal = number

    def _end(self) -> None:
        """Leave no process behind."""
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
    """How long a run has trained before."""
    path = os.path.join(root_dir, 'progress.csv')
    rows = run_files.read_table(path) if os.path.isfile(path) else []
    return float(rows[-1].get('seconds') or 0.0) if rows else 0.0
