"""Trainers, which run the schedule of a run from its start or its latest checkpoint to its end.

:meth:`Trainer.train` is the schedule. :meth:`alfx.engine.learner.Learner.iterate` runs one iteration;
:mod:`alfx.trainers.run_state` contains the state that is saved in checkpoints.
"""
import contextlib
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from alfx import context, gin_utils, summary
from alfx.checkpoints.files import CheckpointError
from alfx.config import TrainerConfig
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.remote.policy_state import states_in_python
from alfx.engine.updater import check_compilable
from alfx.runs import building, forking, run_files, run_lock, start_checks
from alfx.runs.evaluator import RunEvaluator, SupervisedEvaluator, SyncEvaluator, read_results
from alfx.runs.playing import play
from alfx.trainers import cpu_tuning, reproducibility
from alfx.trainers.acting import unroll_sources as acting
from alfx.trainers.async_evaluator import Evaluator
from alfx.trainers.callback_runner import CallbackRunner
from alfx.trainers.distributed.strategies import make_strategy
from alfx.trainers.environment_state import EnvironmentState
from alfx.trainers.profiling import profiled
from alfx.trainers.run_state import RunState, is_finite, save_crash
from alfx.trainers.run_summary import summarize_outputs
from alfx.utils.processes import GRACE_SECONDS, LostProcessError, lost_program
from alfx.utils.schedulers import values_over_percent

__all__ = ['RLTrainer', 'SLTrainer', 'Trainer', 'compute_summary_or_eval_interval', 'play']

logger = logging.getLogger(__name__)

_TEMPORARY_CHECKPOINT_SECONDS = 120.0  # minimum interval between two temporary checkpoints
_TEMPORARY_CHECKPOINT_SHARE = 0.02  # maximum fraction of the time spent on temporary checkpoints
_TEMPORARY_CHECKPOINTS_KEPT = 2


def compute_summary_or_eval_interval(config: TrainerConfig, batch_size: int, calls: int = 100,
                                     ends_at_env_steps: bool = True) -> int:
    """Return the number of iterations between two summaries or evaluations.

    Args:
        config: configuration of the run, which determines its length.
        batch_size: number of environments.
        calls: number of summaries or evaluations in the whole run.
        ends_at_env_steps: whether ``num_env_steps``, if set, ends the run.
    """
    iterations = config.num_iterations
    if config.num_env_steps and ends_at_env_steps:
        unroll_length = config.unroll_length or config.max_unroll_length
        until_steps = math.ceil(config.num_env_steps / max(unroll_length * batch_size, 1e-9))
        iterations = min(iterations, until_steps) if iterations else until_steps
    return max(1, math.ceil(iterations / calls))


class Trainer:
    """Base class of trainers. A run is resumed if the run folder contains a checkpoint.

    Checkpoints are written ``num_checkpoints`` times during the run, at its end, and when a signal stops the run. In
    between, a temporary checkpoint is written every two minutes (less often if that takes over 2% of the time); the
    latest two are kept. Choices made at the start (random seed, number of threads) are stored in the run folder. A run
    can therefore be killed at any time and resumed with bit-identical results if its environment state can be saved.

    Args:
        config: configuration of the run.
        ddp_rank: rank of this process in distributed training, set by ``torchrun`` or by the program that started it
            (:mod:`alfx.engine.remote.data_parallel`); -1 for a single process.

    Raises:
        RuntimeError: this process was not started as this rank.
        ConfError: the configuration is incompatible with the environment, the algorithm or the number of processes.
    """

    def __init__(self, config: TrainerConfig, ddp_rank: int = -1):
        config.required_algorithm_ctor()  # before the environments are created
        start_checks.check_loggers(config.loggers)
        self._config = config
        self._strategy = make_strategy(config, ddp_rank)
        self._start_record = run_files.StartRecord(config.root_dir)
        started = self._strategy.decide(self._start_record.read)
        self._keep_seed(started.get('random_seed'))
        config.random_seed = self._strategy.set_random_seed(config.random_seed)
        self._keep_axis(started.get('summary_axis'))
        summary.should_summarize_output(config.summarize_output)
        self._env = self._create_environment()
        if self._env is not None:
            start_checks.warn_of_unroll(self._env, config)
        self._algorithm = building.create_algorithm(config, self._env, trains=True)
        self._display = self._strategy.display('steps' if self._env is not None and config.collects else 'iterations')
        self._display.message(start_checks.describe_run(self._algorithm, self._env is not None))
        logger.info('random seed %d', config.random_seed)
        start_checks.warn_of_linear_networks()
        if config.summarize_output:
            summarize_outputs(self._algorithm)
        self._strategy.start(self._algorithm, config.random_seed)
        self._environment_state = EnvironmentState(self._env, config, lambda: self._signals.stop_signal is not None)
        self._state = RunState(self._algorithm, self._env, self._tuning(started.get('tuning')), config.random_seed)
        self._checkpointer = self._strategy.checkpointer(run_files.checkpoint_dir(config.root_dir), alg=self._algorithm,
                                                     trainer=self._state)
        self._summary = self._strategy.summary(config, self._algorithm, self._metrics())
        self._callbacks = CallbackRunner(config, self._algorithm, self._strategy) if config.callbacks else None
        if self._callbacks is not None:
            self._state.callbacks = self._callbacks.state_dict
        self._is_stopped = False  # by a callback
        self._signals = self._strategy.signals()
        self._evaluator: RunEvaluator | None = None
        self._unroll_source: Any = None
        self._summary_interval, self._eval_interval = (
            interval if count is None else compute_summary_or_eval_interval(
                config, self._num_environments(), count, self._ends_at_env_steps())
            for interval, count in ((config.summary_interval, config.num_summaries),
                                    (config.eval_interval, config.num_evals)))
        self._evaluated_at = -1
        self._saved_counter, self._saved_iteration, self._checkpoints_done = -1, -1, 0
        self._next_save = time.monotonic() + _TEMPORARY_CHECKPOINT_SECONDS
        self._has_trained = self._evaluation_conf_checked = self._temporary_save_is_due = False

    # The schedule ----------------------------------------------------------------------------------------------

    def train(self) -> float | None:
        """Train until the end of the run, or until a signal stops it.

        Returns:
            The mean return of the latest evaluation, or of the latest training episodes if there is no evaluation; None
            if neither exists.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite; a checkpoint of the state before the update was written.
            ConfError: another process trains in the run folder, or the first iteration did not use a binding of the
                user's conf.
            LostProcessError: a process of the run is lost; a checkpoint was written, except before the first iteration.
            CheckpointError: a checkpoint cannot be written or loaded.
            CallbackError: a callback raised an error.
            ParameterMismatchError: the parameters differ between the ranks of distributed training.
        """
        with self._running():
            self._resume()
            self._unroll_source = self._start_acting()
            self._config.freeze()
            while not (self._is_stopped or self._is_finished()) and self._signals.stop_signal is None:
                with context.record_if(self._summary_is_due()):
                    self._train_iter()  # unroll, then update the parameters
                    self._call_callbacks()  # on_episode_end and on_iteration_end of the callbacks
                    self._summarize()  # every summary_interval iterations
                self._advance()  # the counters and the progress for schedules
                if self._eval_is_due():  # every eval_interval iterations
                    self._evaluate()
                self._apply_callback_requests()  # stop, or keep the best checkpoint
                if self._checkpoint_is_due():  # num_checkpoints times, and after a signal
                    self._save_checkpoint()
                elif self._temporary_save_is_due and not self._is_finished():  # about every two minutes
                    self._save_checkpoint(temporary=True)
                self._show_progress()  # twice a second on a terminal
            self._finish()
        return self.average_return()

    def _train_iter(self) -> None:
        if self._config.empty_cache and context.get_default_device().type == 'cuda':
            torch.cuda.empty_cache()
        self._algorithm.learner.run_iteration()
        self._strategy.check_parameters(self._algorithm, self._state.iteration + 1)
        if not self._has_trained:
            self._has_trained = True
            self._record_conf()

    def _summarize(self) -> None:
        ends = self._progress_after(self.current_env_steps(), self._state.iteration + 1) >= 1.0
        if not (context.should_record_summaries() or ends):
            return
        self._state.last_summary = context.get_global_counter()
        self._restore_folder()
        with context.record_if(True):
            if self._env is not None:
                self._strategy.summarize_metrics(self._algorithm)
            infos = self._strategy.gather([] if self._env is None else self._env.latest_final_infos())
            self._summary.write(self._state.iteration, self._state.seconds, [*itertools.chain(*infos)],
                                self._take_logged())

    def _take_logged(self) -> dict[str, float]:
        """Return the scalars that callbacks have logged since the last call."""
        if self._callbacks is None:
            return {}
        logged, self._callbacks.run.logged = self._callbacks.run.logged, {}
        return logged

    def _call_callbacks(self) -> None:
        if self._callbacks is not None:
            iteration = self._state.iteration + 1
            progress = self._progress_after(self.current_env_steps(), iteration)
            self._callbacks.end_iteration(iteration, self._state.seconds, progress)

    def _apply_callback_requests(self) -> None:
        """Carry out what callbacks have requested, on all ranks, which also receive the states of the callbacks."""
        if self._callbacks is None:
            return
        callbacks, run, stopped_by = self._callbacks, self._callbacks.run, self._callbacks.stopped_by
        self._is_stopped, keeps_best, callbacks.received_state = self._strategy.decide(
            lambda: (bool(stopped_by), run.keeps_best, callbacks.state_dict() if context.num_ranks() > 1 else {}))
        if keeps_best:
            self._checkpointer.save(context.get_global_counter(), subfolder=run_files.BEST)
        run.keeps_best = False
        if run.stop_reason is not None:
            self._display.message(f'{stopped_by} stops the run: {run.stop_reason}')
            run.stop_reason = None

    def _advance(self) -> None:
        self._state.iteration += 1
        self._environment_state.advance()
        if not self._config.update_counter_every_mini_batch:
            context.increment_global_counter()
        self._temporary_save_is_due = self._strategy.agree(self._state.iteration, time.monotonic() > self._next_save)
        env_steps = self.current_env_steps()
        self._state.steps_of_iteration = env_steps - int(context.get_progress('env_steps'))
        self._update_progress(env_steps)

    def _update_progress(self, env_steps: int) -> None:
        context.update_all_progresses({
            'percent': self._progress_after(env_steps, self._state.iteration), 'iterations': self._state.iteration,
            'env_steps': env_steps, 'global_counter': context.get_global_counter()})

    def _summary_is_due(self) -> bool:
        counter, iteration, interval = context.get_global_counter(), self._state.iteration, self._summary_interval
        counts_iterations = self._config.num_summaries is not None
        done = iteration if counts_iterations else counter
        first = self._config.summarize_first_interval and done < interval and (
            counts_iterations or counter > self._state.last_summary)  # not in iterations without an update
        if first or self._is_last_iteration():
            return True
        if counts_iterations:
            return iteration % interval == 0
        # With update_counter_every_mini_batch an iteration moves the counter by several steps.
        return counter // interval > self._state.last_summary // interval

    def _is_last_iteration(self) -> bool:
        """Return whether the run ends with this iteration if it takes as many steps as the previous iteration."""
        env_steps = self.current_env_steps() + self._state.steps_of_iteration
        return self._progress_after(env_steps, self._state.iteration + 1) >= 1.0

    def _eval_is_due(self) -> bool:
        number, rest = divmod(self._state.iteration, self._eval_interval)
        num_evals = self._config.num_evals  # the last one is at the end of the run, which may be later
        return self._config.evaluate and not rest and (num_evals is None or number < num_evals)

    def _evaluate(self) -> None:
        self._evaluated_at = self._state.iteration
        self._strategy.evaluate(self._algorithm, self._evaluate_here)
        self._show_messages()
        if self._callbacks is not None:
            self._callbacks.end_evaluation(self._latest_evaluation())

    def _latest_evaluation(self) -> dict[str, float] | None:
        results = read_results(self._config.root_dir)
        return results[-1] if results else None

    def _evaluate_here(self) -> bool:
        """Evaluate, or request an evaluation from another process; return whether it was done in this process."""
        if self._evaluator is None:
            self._evaluator = self._create_evaluator()
        self._evaluator.eval(self._algorithm, {'EnvironmentSteps': self.current_env_steps(),
                                               'Iterations': self._state.iteration})
        return not isinstance(self._evaluator, Evaluator)

    def _checkpoints_to_be_done(self) -> int:
        return int(context.get_progress('percent') * self._config.num_checkpoints + 1e-9)

    def _checkpoint_is_due(self) -> bool:
        due = self._checkpoints_done < self._checkpoints_to_be_done() < self._config.num_checkpoints
        return self._signals.take_checkpoint_request() or due  # the last checkpoint is written at the end

    def _show_progress(self) -> None:
        if self._display.is_due():
            self._show_messages()
            self._display.show(self.progress(), self._count(), self._progress_values())

    def _count(self) -> int:
        return self._state.iteration if self._env is None else self.current_env_steps()

    def _progress_values(self) -> dict[str, str]:
        values = {'iteration': f'{self._state.iteration:,}'}
        if self._env is not None and self._config.collects:
            values['env steps'] = f'{self.current_env_steps():,}'
        else:
            values |= {name: f'{value:,.0f}' if name == 'updates' else f'{value:.5g}'
                       for name, value in self._summary.learning_values().items()}
        return values | {name.removeprefix('average_'): f'{value:.5g}'
                         for name, value in self._summary.episode_averages().items() if '/' not in name}

    def _show_messages(self) -> None:
        if self._evaluator is not None:
            for message in self._evaluator.messages():
                self._display.message(message)
            unused = self._evaluator.unused_bindings
            if unused is not None and not self._evaluation_conf_checked:
                self._evaluation_conf_checked = True
                gin_utils.warn_of_unused([b for b in gin_utils.unused_bindings() if b.key in unused])

    # Implemented by subclasses ---------------------------------------------------------------------------------

    def _create_environment(self) -> Any:
        """Create the training environments; None in supervised learning."""
        return None

    def _start_acting(self) -> Any:
        """Start asynchronous actors and return the source of their unrolls, or None."""
        return None

    def _create_evaluator(self) -> RunEvaluator:
        """Create the evaluator of this run."""
        raise NotImplementedError

    def _metrics(self) -> list[Any]:
        """Return the metrics to log."""
        return []

    def _num_environments(self) -> int:
        """Return the number of environments of all ranks."""
        return (1 if self._env is None else self._env.batch_size) * context.num_ranks()

    def _work(self) -> cpu_tuning.Work:
        """Return the batch sizes for the choice of CPU settings."""
        raise NotImplementedError

    def _is_finished(self) -> bool:
        """Return whether the run is finished."""
        raise NotImplementedError

    def _progress_after(self, env_steps: int, iterations: int) -> float:
        """Return the fraction of the run, in ``[0, 1]``, after the given environment steps and iterations."""
        raise NotImplementedError

    def progress(self) -> float:
        """Return the completed fraction of the run, in ``[0, 1]``."""
        return self._progress_after(self.current_env_steps(), self._state.iteration)

    def current_iterations(self) -> int:
        """Return the number of completed iterations."""
        return self._state.iteration

    def current_env_steps(self) -> int:
        """Return the number of environment steps."""
        return self._summary.count('EnvironmentSteps')

    # Start and end ---------------------------------------------------------------------------------------------

    @property
    def algorithm(self) -> Any:
        """Root algorithm."""
        return self._algorithm

    @property
    def stop_signal(self) -> int | None:
        """Signal that stopped the run before its end, or None."""
        return self._signals.stop_signal

    def leave_signals(self) -> None:
        """Leave signals to the program, because this run cannot be resumed."""
        self._signals.disable()

    def doubled_length(self) -> tuple[str, ...]:
        """Return the bindings that make the run twice as long."""
        limits = {'num_iterations': self._state.iteration, 'num_episodes': self._summary.count('NumberOfEpisodes')}
        if self._ends_at_env_steps():
            limits['num_env_steps'] = self.current_env_steps()
        shares = {name: done / limit for name, done in limits.items() if (limit := getattr(self._config, name))}
        name = max(shares, key=lambda limit: shares[limit])  # the limit that has ended the run
        stop = () if self._config.stop_at_return is None else ('TrainerConfig.stop_at_return=None', )
        return f'TrainerConfig.{name}={2 * max(1, int(shares[name])) * getattr(self._config, name)}', *stop

    def _ends_at_env_steps(self) -> bool:
        """Return whether ``num_env_steps`` ends the run."""
        return bool(self._config.num_env_steps)

    def last_scheduled_values(self) -> dict[str, float]:
        """Return the values, in the last iteration, of the schedules that a longer run would change, by argument.

        Values that have fallen below 2% of their start, with which hardly anything is learned, are left out.
        """
        env_steps = self.current_env_steps() - self._state.steps_of_iteration
        first, last = (values_over_percent(percent) for percent in (
            0.0, self._progress_after(env_steps, self._state.iteration - 1)))
        return {name: value for name, value in last.items() if abs(value) >= 0.02 * abs(first[name])}

    def score(self) -> str:
        """Describe the latest evaluation, or the latest training episodes if there is no evaluation."""
        value, results = self.average_return(), read_results(self._config.root_dir)
        if value is None and results:
            measures = {name: x for name, x in results[-1].items() if name not in ('global_counter', 'iteration')}
            return 'evaluation: ' + ', '.join(f'{name} {x:.5g}' for name, x in measures.items())
        if value is None:
            return f'{self.progress():.0%} of the run'
        if results:
            return f"evaluation return {value:.6g} (at {results[-1]['global_counter']:.0f})"
        return f'return {value:.6g} in the latest training episodes'

    def average_return(self) -> float | None:
        """Return the mean return of the latest evaluation, or else of the latest training episodes, or None."""
        return (read_results(self._config.root_dir) or [self._summary.episode_averages()])[-1].get('average_return')

    def _tuning(self, chosen_before: list | None) -> cpu_tuning.Tuning:
        """Return the CPU settings of torch, which are chosen once per run unless the conf sets them."""
        config = self._config
        if chosen_before is None or not gin_utils.has_checkpoint(config.root_dir):  # from a start that failed
            chosen_before = self._strategy.decide(lambda: [*cpu_tuning.choose(self._algorithm, config, self._work())])
        return cpu_tuning.choose_again(cpu_tuning.Tuning(*chosen_before), config)

    def _resume(self) -> None:
        """Start the run, or resume it from the latest checkpoint."""
        self._record_start()
        saved_at, counter = 0.0, -1
        if self._strategy.decide(self._checkpointer.has_checkpoint):
            conf_settings = forking.OptimizerSettings(self._algorithm)
            step = self._checkpointer.load('latest', load_options={'alg': {'skip_preloded': False}})
            if forking.branched_at(self._config.root_dir) == step:
                conf_settings.restore()
            saved_at, counter = self._state.saved_at, context.get_global_counter()
            threads = self._state.tuning.num_threads
            self._state.tuning = cpu_tuning.choose_again(self._state.tuning, self._config)
            if self._state.tuning.num_threads < threads and self._config.num_threads is None:
                logger.warning('resuming with %d torch threads instead of %d, the number of available cores; the '
                               'results differ by rounding', self._state.tuning.num_threads, threads)
            self._state.resume_rollout(self._checkpointer.load_environment_state(step), self._environment_state.restore)
            self._strategy.agree(self._state.iteration, False)  # exchanges the counters
            self._saved_counter, self._saved_iteration = counter, self._state.iteration
            self._display.message(f'resuming from {self._checkpointer.path(step)}, {self.progress():.1%} done')
            reproducibility.warn_on_resume(self._algorithm, self._config, self.current_env_steps())
        reproducibility.warn_at_start(self._algorithm, self._config, self._num_environments())
        if self._strategy.writes:  # remove entries logged after the checkpoint, because they will be logged again
            self._summary.cut(self._state.iteration - 1)
            run_files.cut_results(self._config.root_dir, saved_at, counter)
            self._summary.start_trackers(counter)
        percent_before = context.get_progress('percent')
        self._update_progress(self.current_env_steps())
        if counter >= 0:
            self._report_schedule_changes(percent_before)
        self._checkpoints_done = self._checkpoints_to_be_done()
        if self._callbacks is not None:
            self._callbacks.start(self._state.loaded_callbacks, self._state.iteration, self._state.seconds,
                                  self.progress(), self._latest_evaluation())
            self._apply_callback_requests()
        if counter >= 0 and self._eval_is_due() and not self._strategy.decide(self._has_evaluation):
            self._evaluate()
            self._apply_callback_requests()  # before the parameters change

    def _report_schedule_changes(self, percent: float) -> None:
        """Print the values that schedules jump to because the length of the run was changed."""
        now = context.get_progress('percent')
        if abs(now - percent) < 1e-9:
            return
        before, after = values_over_percent(percent), values_over_percent(now)
        for name, value in after.items():
            if value != before[name]:
                self._display.message(f'the length of the run has changed: {now:.1%} instead of {percent:.1%} is done, '
                                      f'and the schedule of {name} continues at {value:.4g} instead of '
                                      f'{before[name]:.4g}')

    def _has_evaluation(self) -> bool:
        """Return whether the current parameters have been evaluated."""
        if self._evaluated_at == self._state.iteration:
            return True
        return any(result['global_counter'] == context.get_global_counter()
                   for result in read_results(self._config.root_dir))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Set up the lock, signals and summary writer; save a checkpoint after a crash; close everything."""
        report = os.path.join(self._config.root_dir, 'py_train.INFO') if self._config.profiling else None
        over_env_steps = self._config.summarizes_over_env_steps
        try:
            with (run_files.created_folder(self._config.root_dir), run_lock.held(self._config.root_dir),
                  self._signals.handled(), summary.push_summary_writer(self._summary.writer),
                  context.summaries_at(self.current_env_steps if over_env_steps else None), profiled(report)):
                try:
                    yield
                finally:
                    self._strategy.report(sys.exception())
                    self._save_after_error(sys.exception())
        finally:
            self._close(wait=sys.exception() is None and self._signals.stop_signal is None)

    def _finish(self) -> None:
        """Do the last evaluation and write the last checkpoint."""
        stop_signal = self._signals.stop_signal
        evaluates = self._config.evaluate or self._config.eval_uncertainty
        if stop_signal is None and evaluates and not self._strategy.decide(self._has_evaluation):
            self._evaluate()
            self._apply_callback_requests()
        if stop_signal is None:
            self._log_remaining_scalars()
        if self._saved_iteration != self._state.iteration:  # the counter does not count iterations without an update
            if stop_signal is None:
                self._environment_state.finish()
            self._save_checkpoint()
        if self._callbacks is not None:
            self._callbacks.run.is_interrupted = stop_signal is not None
            self._callbacks.call('on_training_end')
            self._apply_callback_requests()
            if stop_signal is None:  # otherwise the resumed run logs the values, which are in the checkpoint
                self._log_remaining_scalars()
        self._display.show(self.progress(), self._count(), self._progress_values())
        if stop_signal is not None:
            self._display.message(f'stopped at {self.progress():.1%}; {self._config.root_dir} can be resumed')

    def _log_remaining_scalars(self) -> None:
        """Log what callbacks have logged after the last summary."""
        logged = self._take_logged()
        if logged and self._state.iteration:
            with context.record_if(True):
                self._summary.complete(self._state.iteration - 1, logged)

    def _close(self, wait: bool) -> None:
        if self._unroll_source is not None:
            self._unroll_source.close()
        if self._evaluator is not None:
            self._evaluator.close(timeout=None if wait else GRACE_SECONDS)
            self._show_messages()
        if wait and self._state.iteration:  # also of a run that was complete: resuming has removed it
            self._summary.write_final(self.average_return())
        self._display.close()
        self._summary.close()
        self._environment_state.close()
        if self._env is not None:
            self._env.close()

    # Checkpoints -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, temporary: bool = False) -> None:
        start = time.monotonic()
        environment_state = self._environment_state.get()
        self._restore_folder()
        self._summary.flush()  # entries before the checkpoint are never written again
        self._checkpointer.save(context.get_global_counter(), environment_state, temporary)
        self._checkpointer.remove_temporaries(_TEMPORARY_CHECKPOINTS_KEPT)
        if not temporary:
            self._saved_counter, self._saved_iteration = context.get_global_counter(), self._state.iteration
            self._checkpoints_done = self._checkpoints_to_be_done()
        now = time.monotonic()
        self._next_save = now + max(_TEMPORARY_CHECKPOINT_SECONDS, (now - start) / _TEMPORARY_CHECKPOINT_SHARE)

    def _save_after_error(self, error: BaseException | None) -> None:
        """Save a checkpoint after an error.

        If a loss is not finite or another process is lost, the state is consistent and is saved as a regular
        checkpoint. After any other error the state may be inconsistent; it is saved in a separate folder, from which
        no run resumes automatically. Nothing is saved if parameters are not finite, or if another process is lost
        before the first iteration: the state may be loaded in part, and must not replace the loaded checkpoint.
        """
        if not is_finite(self._algorithm):
            self._display.message('nothing is saved, because parameters are NaN or infinite; the run resumes from its '
                                  'latest checkpoint')
        elif isinstance(error, NonFiniteLossError) or isinstance(error, LostProcessError) and self._has_trained:
            if isinstance(error, LostProcessError):
                self._strategy.leave_group()
            if self._saved_counter != context.get_global_counter():
                self._save_checkpoint()
            self._display.message('the state before the error is saved in '
                                  f'{self._checkpointer.path(self._saved_counter)}')
        elif (isinstance(error, Exception) and self._strategy.writes and
              not isinstance(error, (CheckpointError, LostProcessError, run_lock.ReplacedFolderError))):
            save_crash(error, self._checkpointer.ckpt_dir, self._algorithm, self._state, self._config, self._display)

    def _restore_folder(self) -> None:
        """Restore a deleted run folder before writing, unless another run has started there."""
        if not self._strategy.writes:
            return
        run_lock.renew(self._config.root_dir)
        if gin_utils.rewrite_conf(self._config.root_dir):
            logger.warning('%s was removed completely or in part: the conf is written again and the run continues; '
                           'other removed files are lost', self._config.root_dir)
            self._record_start()

    def _record_start(self) -> None:
        if self._strategy.writes:
            axis = 'env_steps' if self._config.summarizes_over_env_steps else 'global_counter'
            self._start_record.write(random_seed=self._config.random_seed, tuning=list(self._state.tuning),
                                     summary_axis=axis)

    def _keep_seed(self, started_with: int | None) -> None:
        """Keep the seed of the start of the run; another seed needs a fork, or a run without checkpoints."""
        given, root_dir = self._config.random_seed, self._config.root_dir
        if given is None:
            self._config.random_seed = started_with
        elif started_with not in (None, given) and forking.has_own_checkpoint(root_dir):
            raise gin_utils.ConfError(f'TrainerConfig.random_seed is {given}, but the run in {root_dir} has '
                                      f'{started_with}',
                                      'use another root_dir for this seed, or leave it out to resume the stored run')

    def _keep_axis(self, started_with: str | None) -> None:
        """Keep the summary axis of the start of the run, possibly by an older version, unless the conf sets it."""
        if started_with is None or self._config.summary_axis is not None:
            return
        if (started_with == 'env_steps') != self._config.summarizes_over_env_steps:
            logger.info('summaries are logged over %s, as at the start of this run',
                        'environment steps' if started_with == 'env_steps' else 'iterations')
        self._config.summary_axis = started_with

    def _record_conf(self) -> None:
        """Write the operative configuration; raise a ConfError if bindings, except for evaluation, are unused."""
        unused = [b for b in gin_utils.unused_bindings() if not b.is_for_evaluation]
        if self._state.iteration == 0:  # a resumed run only gets a warning
            gin_utils.refuse_unused(unused)
        elif self._strategy.writes:
            gin_utils.warn_of_unused(unused)
        if self._strategy.writes:
            gin_utils.write_operative(self._config.root_dir)


class RLTrainer(Trainer):
    """Trainer for reinforcement learning.

    The run ends after ``num_iterations`` or ``num_env_steps``, whichever is set. If both are set, an algorithm with a
    replay buffer continues to train without environment steps until ``num_iterations``; any other algorithm stops at
    the limit that is reached first. ``num_episodes`` and ``stop_at_return`` can end the run earlier.

    Args:
        config: configuration of the run.
        ddp_rank: see :class:`Trainer`.
    """

    def __init__(self, config: TrainerConfig, ddp_rank: int = -1):
        super().__init__(config, ddp_rank)
        self._check_length()
        if not self._algorithm.on_policy:
            start_checks.warn_of_mini_batch(self._num_environments(), config)
        elif not config.offline_buffer_dir:
            start_checks.log_settings_of_replay(self._algorithm)
        acting.check(self._algorithm, config)

    def _create_environment(self) -> Any:
        start_checks.check_environment_is_named()
        return acting.create_environment(self._config)

    def _start_acting(self) -> Any:
        return acting.start(self._algorithm, self._config)

    def _create_evaluator(self) -> RunEvaluator:
        conf_file = os.path.join(self._config.root_dir, 'conf', 'config.gin')
        users = [] if self._callbacks is None else self._callbacks.users_of('on_evaluation_end')
        states = states_in_python(self._algorithm)
        if self._config.async_eval and (users or states):
            logger.info('evaluations run in the training process, because %s',
                        f'{users[0]} reacts to them' if users else f'{states[0]} keeps state outside of buffers')
        elif self._config.async_eval and os.path.isfile(conf_file):
            reason = lost_program()
            if not reason:
                return Evaluator(self._config, conf_file)
            self._display.message('evaluations run in this process, because another one cannot import what this '
                                  f'program defines: {reason}')
        return SyncEvaluator(None, self._config)

    def _metrics(self) -> list[Any]:
        return self._algorithm.get_metrics()

    def _work(self) -> cpu_tuning.Work:
        return cpu_tuning.Work(self._rows_per_update(), self._env.batch_size)

    def _rows_per_update(self) -> int:
        """Return the number of rows of a layer in one update."""
        config, on_policy = self._config, self._algorithm.on_policy
        collected = max(1, int((config.unroll_length or config.max_unroll_length) * self._env.batch_size))
        sampled = (config.mini_batch_size or self._env.batch_size) * (config.mini_batch_length or 1)
        if on_policy:
            return collected
        if not config.whole_replay_buffer_training:
            return sampled
        return min(sampled, collected) if config.mini_batch_size else collected

    def _ends_at_env_steps(self) -> bool:
        config = self._config
        trains_without_new_steps = not self._algorithm.on_policy and not config.trains_on_whole_unrolls
        return bool(config.num_env_steps) and not (config.num_iterations and trains_without_new_steps)

    def _is_finished(self) -> bool:
        config = self._config
        if config.num_iterations and self._state.iteration >= config.num_iterations:
            return True
        if config.num_episodes and self._num_episodes() >= config.num_episodes:
            return True
        if config.stop_at_return is not None and self._strategy.decide(self._has_reached_return):
            return True
        return self._ends_at_env_steps() and self.current_env_steps() >= config.num_env_steps

    def _num_episodes(self) -> int:
        """Return the number of finished episodes."""
        return self._summary.count('NumberOfEpisodes')

    def _has_reached_return(self) -> bool:
        """Return whether the latest evaluation reaches ``stop_at_return``, and print a message once."""
        wanted = self._config.stop_at_return
        assert wanted is not None, 'stop_at_return is not set'
        path = run_files.eval_table(self._config.root_dir)
        changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
        if changed != self._results_changed:
            self._results_changed = changed
            results = read_results(self._config.root_dir)
            found = results[-1]['average_return'] if results else -math.inf
            if found >= wanted and not self._is_good_enough:
                self._display.message(f'the evaluation return {found:.6g} reaches TrainerConfig.stop_at_return = '
                                      f'{wanted:g}: the run stops')
            self._is_good_enough = found >= wanted
        return self._is_good_enough

    _results_changed, _is_good_enough = -1, False

    def _progress_after(self, env_steps: int, iterations: int) -> float:
        config, done = self._config, 0.0
        if config.num_iterations:
            done = iterations / config.num_iterations
        if config.num_episodes:
            done = max(done, self._num_episodes() / config.num_episodes)
        if self._ends_at_env_steps():
            done = max(done, env_steps / config.num_env_steps)
        return min(done, 1.0)

    def _check_length(self) -> None:
        config = self._config
        steps = config.num_iterations * (config.unroll_length or config.max_unroll_length) * self._num_environments()
        if config.num_iterations and steps < config.num_env_steps:
            logger.warning('TrainerConfig.num_iterations = %d iterations take %d environment steps, fewer than '
                           'TrainerConfig.num_env_steps = %d: the run ends early; set num_iterations to 0 for no limit',
                           config.num_iterations, steps, config.num_env_steps)


class SLTrainer(Trainer):
    """Trainer for supervised learning. An iteration is an epoch over the data of the algorithm.

    ``train_iter()`` of the algorithm trains for one epoch. Evaluations call its ``evaluate()``, and also its
    ``eval_uncertainty()`` if ``TrainerConfig.eval_uncertainty`` is set, at least at the end of training. The returned
    numbers and the summaries are logged to the ``eval`` folder.

    Args:
        config: configuration of the run.

    Raises:
        ConfError: ``TrainerConfig.evaluate`` is set but the algorithm has no ``evaluate()``; or ``eval_uncertainty`` is
            set but the algorithm has no such method or cannot estimate uncertainty; or ``compile`` is set but the
            update cannot be compiled.
    """

    def __init__(self, config: TrainerConfig, ddp_rank: int = -1):
        super().__init__(config, ddp_rank)
        if config.compile:
            check_compilable(self._algorithm, self._algorithm.capabilities.traceable_update)
        if config.evaluate and not callable(getattr(self._algorithm, 'evaluate', None)):
            raise gin_utils.ConfError(f'TrainerConfig.evaluate = True, but {type(self._algorithm).__name__} has no '
                                      'evaluate()', 'set it to False')
        if config.eval_uncertainty:
            if not callable(getattr(self._algorithm, 'eval_uncertainty', None)):
                raise gin_utils.ConfError('TrainerConfig.eval_uncertainty = True, but '
                                          f'{type(self._algorithm).__name__} has no eval_uncertainty()',
                                          'set it to False')
            check = getattr(self._algorithm, 'check_uncertainty', None)
            if check is not None:
                check()

    def _create_evaluator(self) -> RunEvaluator:
        return SupervisedEvaluator(self._config)

    def _work(self) -> cpu_tuning.Work:
        return cpu_tuning.Work(self._config.mini_batch_size or 64)

    def _is_finished(self) -> bool:
        return self._state.iteration >= self._config.num_iterations

    def _progress_after(self, env_steps: int, iterations: int) -> float:
        return min(iterations / self._config.num_iterations, 1.0)
