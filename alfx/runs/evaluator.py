"""Evaluation of policies during and after training.

:func:`evaluate` plays episodes and returns their statistics. :class:`SyncEvaluator` calls it between two iterations;
:class:`~alfx.trainers.async_evaluator.Evaluator` evaluates in another process while training continues.
"""
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import context, gin_utils, nest, summary
from alfx.data_structures import StepType, TimeStep, reset_at_first
from alfx.environments.seeding import derived_seed
from alfx.metrics.metrics import (AverageEnvInfoMetric, AverageEpisodicAggregationMetric, episode_metrics,
                                  update_metrics)
from alfx.offline.dataset_files import normalized_score
from alfx.offline.dataset_sources import reference_returns
from alfx.runs import building, run_files
from alfx.runs.eval_video import EvalVideo
from alfx.runs.step_measures import EpisodeMeans
from alfx.summary.trackers import event_writer
from alfx.utils import random_state
from alfx.utils.confidence import confidence_interval
from alfx.utils.transfers import to_device


class EvalJob(NamedTuple):
    """Request to the evaluation process.

    Attributes:
        type: 'eval' or 'stop'.
        global_counter: the counter at the time of the request.
        step_metrics: other counters by name.
        state_dict: the weights, serialized by ``torch.save``.
        progresses: training progress, which schedules depend on.
        walltime: time of the request, in seconds since the epoch.
    """
    type: str
    global_counter: int = 0
    step_metrics: dict[str, int] = {}
    state_dict: bytes = b''
    progresses: dict[str, float] = {}
    walltime: float = 0.0


_log = logging.getLogger(__name__)
_EVALUATION = 8  # stream of the seeds of evaluations
_LONG_EPISODE = 10_000  # steps without the end of an episode after which a warning is logged
_FIRST_COLUMNS = ('global_counter', 'env_steps', 'iteration', 'episodes', 'average_return', 'std_return', 'ci95_return',
                  'average_length')


class EvalResult(NamedTuple):
    """Result of an evaluation of N episodes.

    Attributes:
        returns: float64 ``[N]``, or ``[N, K]`` for K-dimensional rewards.
        lengths: float64 ``[N]``, in steps.
        metrics: metrics of the episodes.
        measures: measures of the algorithm by name, float64 ``[n]``, averaged over the steps of each episode.
        final_infos: numbers in the final info of the episodes by name, float64 ``[n]``; episodes without the entry are
            omitted.
        complete: bool ``[N]``, True for episodes that terminated, False for truncated episodes.
        reference: returns of a random and of an expert policy for the normalized score; None for no normalized score.
    """
    returns: np.ndarray
    lengths: np.ndarray
    metrics: list[AverageEpisodicAggregationMetric]
    measures: dict[str, np.ndarray] = {}
    complete: np.ndarray = np.zeros(0)
    final_infos: dict[str, np.ndarray] = {}
    reference: tuple[float, float] | None = None

    def env_info(self) -> dict[str, np.ndarray]:
        """Return the env_info of each episode, measured by ``AverageEnvInfoMetric``: float64 ``[N, ...]`` by path."""
        return {path: values for metric in self.metrics if isinstance(metric, AverageEnvInfoMetric)
                for (path, _), values in zip(nest.flatten_with_path(metric.result()), metric.episodes())}

    def statistics(self) -> dict[str, float]:
        """Return statistics over the episodes by name.

        Returns:
            The number of episodes; the mean, standard deviation and half the 95% confidence interval of the return
            (summed over the reward dimensions); the mean length; the fraction of complete episodes; ``env_info/PATH``,
            the means of the scalars in the env_info; ``final_info/NAME`` and ``measure/NAME``, the means of
            :attr:`final_infos` and :attr:`measures`; and ``normalized_score`` if there is a reference.
        """
        returns = self.returns.reshape(len(self.returns), -1).sum(1)
        scalars = {path: values for path, values in self.env_info().items() if values.ndim == 1}
        return {
            'episodes': len(returns),
            'average_return': float(returns.mean()),
            'std_return': float(returns.std(ddof=1)) if len(returns) > 1 else float('nan'),
            'ci95_return': float(confidence_interval(returns)),
            'average_length': float(self.lengths.mean()),
            **({'complete': float(self.complete.mean())} if len(self.complete) else {}),
            **{f'env_info/{path}': float(values.mean()) for path, values in scalars.items()},
            **{f'final_info/{name}': float(values.mean()) for name, values in self.final_infos.items()},
            **{f'measure/{name}': float(values.mean()) for name, values in self.measures.items()},
            **({} if self.reference is None else {
                'normalized_score': normalized_score(float(returns.mean()), self.reference)}),
        }

    def further_means(self) -> dict[str, float]:
        """Return the means of the env_info, the measures and the success rate from :meth:`statistics`, by name.

        A quantity that is summed over the episode is called ``sum of NAME``, except for successes.
        """
        named = [(*name.partition('/'), mean) for name, mean in self.statistics().items()]
        return {f'sum of {name}' if kind == 'env_info' and not re.search('@|success', name) else name: mean
                for kind, _, name, mean in named if name and (kind != 'final_info' or 'success' in name)}

    def __str__(self) -> str:
        s = self.statistics()
        count = len(self.returns)
        spread = '' if count == 1 else (f" +- {s['ci95_return']:.4g} (95%), standard deviation "
                                        f"{s['std_return']:.4g}")
        score = '' if self.reference is None else f", normalized score {s['normalized_score']:.1f}"
        means = ''.join(f', {name} {mean:.6g}' for name, mean in self.further_means().items())
        return (f"return {s['average_return']:.6g}{spread}{score}{means}, length {s['average_length']:.6g}, "
                f"{count} episode{'s'[:count != 1]}")


def unused_for_evaluation() -> list[tuple[str, str, str]]:
    """Return the keys of the bindings in scope ``evaluation/`` that this process has not used."""
    return [binding.key for binding in gin_utils.unused_bindings() if binding.is_for_evaluation]


def evaluate(env: Any, algorithm: Any, num_episodes: int,
             on_step: Callable[[TimeStep, Any], None] | None = None) -> EvalResult:
    """Play episodes with ``predict_step`` and return their statistics.

    Each environment contributes a fixed number of episodes, because taking the first ``num_episodes`` episodes that end
    would favor short episodes. Evaluation has no effect on training: modules are in evaluation mode, the run mode is
    'eval', summaries are disabled, and the random state of this process is restored.

    Args:
        env: batched environment; it is reset.
        algorithm: algorithm to evaluate; its ``epsilon_greedy`` determines how it acts.
        num_episodes: N, over all environments.
        on_step: called with each time step and the resulting ``AlgStep``.

    Raises:
        ValueError: ``num_episodes`` is less than 1.
    """
    if num_episodes < 1:
        raise ValueError(f'num_episodes: expected at least 1, found {num_episodes}')
    with _evaluation_mode(algorithm), context.record_if(False), torch.no_grad():
        return _play(env, algorithm, num_episodes, on_step)


@contextlib.contextmanager
def _evaluation_mode(algorithm: Any) -> Iterator[None]:
    """Switch all modules and the run mode to evaluation, and restore them and the random state afterwards."""
    training = [(module, module.training) for module in algorithm.modules()]
    try:
        algorithm.eval()
        with context.eval_context(), context.acting_precision(), random_state.preserved():
            yield
    finally:
        for module, mode in training:
            module.training = mode


def _play(env: Any, algorithm: Any, num_episodes: int, on_step: Callable | None) -> EvalResult:
    batch_size = env.batch_size
    remaining = torch.full((batch_size, ), num_episodes // batch_size)
    remaining[:num_episodes % batch_size] += 1
    time_step = env.reset()
    metrics, step_measures = episode_metrics(time_step, num_episodes), EpisodeMeans()
    initial_state = algorithm.get_initial_predict_state(batch_size)
    state, transform_state = initial_state, algorithm.get_initial_transform_state(batch_size)
    device, complete = context.get_default_device(), []
    final_infos: dict[str, list[float]] = {}
    has_infos = on_step is not None or not algorithm.capabilities.traceable_prediction
    step = algorithm.predict_step if has_infos else algorithm.fast_predict_step
    count, warn_at = 0, _LONG_EPISODE
    while True:
        count += 1
        if count == warn_at:
            warn_at *= 2
            _log.warning('%d steps were played in %s since an episode ended; if episodes do not end, limit them with '
                         'max_episode_steps, for example suite_gym.load.max_episode_steps = 1000', count, env.name)
        is_counted = remaining > 0
        # The metrics never see the end of episodes that are not counted.
        seen = torch.where(is_counted, time_step.step_type, torch.full_like(time_step.step_type, StepType.MID))
        update_metrics(metrics, time_step._replace(step_type=seen), stacked=False)
        ends = is_counted & time_step.is_last().cpu()
        complete.append((time_step.discount.cpu() == 0)[ends])
        for i, info in env.final_infos().items():
            for name, value in info.items() if ends[i] else ():
                final_infos.setdefault(name, []).append(value)
        if len(complete[-1]):
            count, warn_at = 0, _LONG_EPISODE
        remaining -= ends.to(remaining.dtype)
        inputs, transform_state = algorithm.transform_timestep(
            time_step if device.type == 'cpu' else to_device(time_step, device), transform_state)
        if nest.flatten(state):
            state = reset_at_first(state, initial_state, inputs)
        alg_step = step(inputs, state)
        if has_infos:
            measures = algorithm.measures(alg_step.info)
            if measures:
                step_measures.observe(measures, is_counted.numpy(), time_step.is_last().cpu().numpy())
        if on_step is not None:
            on_step(time_step, alg_step)
        if not remaining.any():
            break
        time_step, state = env.step(alg_step.output), alg_step.state
    returns, lengths = (metric.episodes()[0] for metric in metrics[:2])
    return EvalResult(returns, lengths, metrics, step_measures.result(), torch.cat(complete).numpy(),
                      {name: np.array(values) for name, values in final_infos.items()})


class EvalLog:
    """Log of evaluation results in the ``eval`` folder of a run: event files and ``progress.csv``.

    Args:
        root_dir: run folder.
        config: configuration of the run.
    """

    def __init__(self, root_dir: str, config: Any):
        self._writer = event_writer(run_files.eval_dir(root_dir), config)
        self._random_seed = config.random_seed
        self._over_env_steps = config.summarizes_over_env_steps
        self._video_steps = config.eval_video_steps
        self._video: EvalVideo | None = None
        self._reference = reference_returns(config.offline_datasets())
        self._table = run_files.ProgressLog(run_files.eval_table(root_dir), _FIRST_COLUMNS)

    def evaluate(self, env: Any, algorithm: Any, num_episodes: int) -> EvalResult:
        """Call :func:`evaluate`, and record a video for :meth:`write` if the configuration has ``eval_video_steps``.

        The episodes depend on the seed of the run and the global counter only, so a resumed run has the same ones.
        """
        env.seed(derived_seed(self._random_seed, _EVALUATION, context.get_global_counter()))
        self._video = EvalVideo(env, self._video_steps) if self._video_steps else None
        return evaluate(env, algorithm, num_episodes, self._video)._replace(reference=self._reference)

    def write(self, result: EvalResult, global_counter: int, step_metrics: dict[str, int], walltime: float) -> None:
        """Write a result.

        Args:
            result: the result.
            global_counter: the counter at the time of the request.
            step_metrics: other counters at that time by name, including 'EnvironmentSteps'.
            walltime: time of the request; a run that resumes from an earlier checkpoint removes later results.
        """
        self._writer.walltime = walltime
        step = step_metrics.get('EnvironmentSteps', global_counter) if self._over_env_steps else global_counter
        with summary.push_summary_writer(self._writer), context.record_if(True):
            for metric in result.metrics:
                metric.gen_summaries(step)
            if self._video is not None:
                self._video.write('episode', step)
            statistics = result.statistics()
            for name, value in statistics.items():
                shown = name in ('std_return', 'ci95_return', 'normalized_score') or name.startswith('final_info/')
                if shown and np.isfinite(value):
                    summary.scalar(f'Metrics/{name}', value, step=step)
                elif name.startswith('measure/'):
                    summary.scalar(name, value, step=step)
            for name, value in () if self._over_env_steps else step_metrics.items():
                summary.scalar(f'Metrics_vs_{name}/AverageReturn', statistics['average_return'], step=value)
        self._table.append({'global_counter': global_counter, 'env_steps': step_metrics.get('EnvironmentSteps', ''),
                            'iteration': step_metrics.get('Iterations', ''), **statistics})
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event files."""
        self._writer.close()


class RunEvaluator:
    """Base class of the evaluators of a run.

    Attributes:
        unused_bindings: keys of the bindings in scope ``evaluation/`` that the last completed evaluation did not use;
            None before the first result.
    """

    def __init__(self) -> None:
        self._messages: list[str] = []
        self.unused_bindings: list[tuple[str, str, str]] | None = None

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        """Evaluate and log the result, or request it.

        Args:
            algorithm: algorithm to evaluate.
            step_metrics: counters to log with the result by name, including 'EnvironmentSteps' and 'Iterations'.
        """
        raise NotImplementedError

    def messages(self) -> list[str]:
        """Return log messages about the evaluations since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def close(self, timeout: float | None = None) -> None:
        """Close environments and files; wait at most ``timeout`` seconds for evaluations in another process."""
        raise NotImplementedError


class SyncEvaluator(RunEvaluator):
    """Evaluator in the training process; training waits for it.

    Args:
        env: evaluation environments; None to create them from the conf at the first evaluation.
        config: configuration of the run.
    """

    def __init__(self, env: Any, config: Any):
        super().__init__()
        self._env = env
        self._config = config
        self._log = EvalLog(config.root_dir, config)

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        if self._env is None:
            with random_state.preserved():
                self._env = building.create_eval_environment(self._config, self._config.num_eval_environments,
                                                             renders=self._config.eval_video_steps > 0)
        walltime = time.time()
        result = self._log.evaluate(self._env, algorithm, self._config.num_eval_episodes)
        self._log.write(result, context.get_global_counter(), step_metrics, walltime)
        self._messages += [f'evaluation at {context.get_global_counter()}: {result}']
        self.unused_bindings = unused_for_evaluation()

    def close(self, timeout: float | None = None) -> None:
        if self._env is not None:
            self._env.close()
        self._log.close()


def evaluate_supervised(algorithm: Any, config: Any) -> dict[str, float]:
    """Evaluate a supervised algorithm on its own test data, and return its metrics by name.

    Evaluation has no effect on training, as in :func:`evaluate`.

    Args:
        algorithm: algorithm with ``evaluate()``, which may return a dict of numbers, and for
            ``config.eval_uncertainty`` with ``eval_uncertainty()``, which returns a named tuple of numbers.
        config: configuration of the run; ``evaluate`` and ``eval_uncertainty`` are used.
    """
    numbers: dict[str, float] = {}
    with _evaluation_mode(algorithm):
        if config.evaluate or not config.eval_uncertainty:
            found = algorithm.evaluate()
            numbers |= {name: float(value) for name, value in found.items()} if isinstance(found, dict) else {}
        if config.eval_uncertainty:
            numbers |= algorithm.eval_uncertainty()._asdict()
    return numbers


class SupervisedEvaluator(RunEvaluator):
    """Evaluator of supervised algorithms, which have their own test data.

    The results are logged to the ``eval`` folder (event files and ``progress.csv``), like results of policies.

    Args:
        config: configuration of the run.
    """

    def __init__(self, config: Any):
        super().__init__()
        self._writer = event_writer(run_files.eval_dir(config.root_dir), config)
        self._table = run_files.ProgressLog(run_files.eval_table(config.root_dir),
                                            ('global_counter', 'env_steps', 'iteration'))
        self._config = config

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        with summary.push_summary_writer(self._writer), context.record_if(True):
            for name, value in evaluate_supervised(algorithm, self._config).items():
                summary.scalar(f'eval/{name}', value)
        written = {name.removeprefix('eval/'): value for name, value in self._writer.latest_scalars.items()}
        self._writer.latest_scalars.clear()
        self._table.append({'global_counter': context.get_global_counter(),
                            'iteration': step_metrics.get('Iterations', ''), **written})
        self._writer.flush()
        shown = ', '.join(f'{name} {value:.5g}' for name, value in written.items())
        self._messages.append(f'evaluation at {context.get_global_counter()}: {shown or "done"}')
        self.unused_bindings = unused_for_evaluation()

    def close(self, timeout: float | None = None) -> None:
        self._writer.close()


def read_results(root_dir: str) -> list[dict[str, float]]:
    """Return the results of all evaluations of a run, in the order of the requests."""
    rows = [{key: float(value) for key, value in row.items() if value}
            for row in run_files.read_table(run_files.eval_table(root_dir))]
    complete = [row for row in rows if 'global_counter' in row and row.keys() - {'global_counter', 'iteration'}]
    return sorted(complete, key=lambda row: row['global_counter'])
