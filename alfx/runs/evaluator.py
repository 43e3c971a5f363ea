"""Evaluation of a policy while it is being trained, or afterwards.

:func:`evaluate` plays episodes and counts. :class:`SyncEvaluator` calls it between two iterations;
:class:`Evaluator` lets another process do that (``async_eval_worker``) while training goes on.
"""
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import context, gin_utils, nest, summary
from alfx.data_structures import StepType, TimeStep, reset_at_first
from alfx.metrics.metrics import (AverageEnvInfoMetric, AverageEpisodeLengthMetric, AverageEpisodicAggregationMetric,
                                  AverageReturnMetric, update_metrics)
from alfx.offline.dataset_files import normalized_score
from alfx.offline.dataset_sources import reference_returns
from alfx.summary.trackers import event_writer
from alfx.runs import building
from alfx.utils import random_state
from alfx.runs import run_files
from alfx.runs.eval_video import EvalVideo
from alfx.runs.step_measures import EpisodeMeans
from alfx.utils.confidence import confidence_interval
from alfx.utils.transfers import to_device


class EvalJob(NamedTuple):
    """A request to the process that evaluates.

    Attributes:
        type: 'eval' or 'stop'.
        global_counter: the counter at the time of the request.
        step_metrics: further counters by name.
        state_dict: the weights, as ``torch.save`` writes them.
        progresses: what schedules depend on.
        walltime: the time of the request, in seconds since the epoch.
    """
    type: str
    global_counter: int = 0
    step_metrics: dict[str, int] = {}
    state_dict: bytes = b''
    progresses: dict[str, float] = {}
    walltime: float = 0.0


_FIRST_COLUMNS = ('global_counter', 'env_steps', 'iteration', 'episodes', 'average_return', 'std_return', 'ci95_return',
                  'average_length')


class EvalResult(NamedTuple):
    """What N episodes gave.

    Attributes:
        returns: float64 ``[N]``, or ``[N, K]`` for K-dimensional rewards.
        lengths: float64 ``[N]``, in steps.
        metrics: the metrics that the episodes were measured by.
        measures: what the algorithm measured besides, by name: float64 ``[n]``, means over the steps of an episode.
        final_infos: the numbers in the infos that episodes ended with, by name: float64 ``[n]``, of those that had
            them.
        complete: bool ``[N]``: which episodes came to an end of their own, and were not cut off.
        reference: returns of a random and of a good policy, between which scores are normalized; ``None``: no scores.
    """
    returns: np.ndarray
    lengths: np.ndarray
    metrics: list[AverageEpisodicAggregationMetric]
    measures: dict[str, np.ndarray] = {}
    complete: np.ndarray = np.zeros(0)
    final_infos: dict[str, np.ndarray] = {}
    reference: tuple[float, float] | None = None

    def env_info(self) -> dict[str, np.ndarray]:
        """What ``AverageEnvInfoMetric`` measured of each episode: float64 ``[N, ...]`` by path in the env_info."""
        return {path: values for metric in self.metrics if isinstance(metric, AverageEnvInfoMetric)
                for (path, _), values in zip(nest.flatten_with_path(metric.result()), metric.episodes())}

    def statistics(self) -> dict[str, float]:
        """Number of episodes, mean, standard deviation and half the 95% confidence interval of the return (summed over
        the dimensions of the reward), mean length, share of complete episodes, ``env_info/PATH``: means of the scalars
        in the env_info, ``final_info/NAME`` and ``measure/NAME``: means of :attr:`final_infos` and :attr:`measures`;
        ``normalized_score`` where there is a reference."""
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
        """The means of :meth:`statistics` that the environment and the algorithm add to return and length, by name; of
        the final infos whether episodes succeeded."""
        named = [(*name.partition('/'), mean) for name, mean in self.statistics().items()]
        return {name: mean for kind, _, name, mean in named if name and (kind != 'final_info' or 'success' in name)}

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
    """The keys of the bindings in scope ``evaluation/`` that nothing in this process has used."""
    return [binding.key for binding in gin_utils.unused_bindings() if binding.is_for_evaluation]


def evaluate(env: Any, algorithm: Any, num_episodes: int,
             on_step: Callable[[TimeStep, Any], None] | None = None) -> EvalResult:
    """Play episodes with ``predict_step`` and measure them.

    Each environment contributes a number of episodes that is fixed beforehand. To take the first ``num_episodes`` that
    end would favour short ones. Nothing is trained by it: modules are in evaluation mode, the run mode is 'eval', no
    summary is recorded, and the generators of this process are left as they were found.

    Args:
        env: batched environment; it is reset.
        algorithm: its epsilon_greedy says how it acts.
        num_episodes: N, in all environments together.
        on_step: called with each time step and the ``AlgStep`` that follows it.

    Raises:
        ValueError: ``num_episodes`` is less than 1.
    """
    if num_episodes < 1:
        raise ValueError(f'num_episodes must be at least 1, got {num_episodes}')
    with _evaluation_mode(algorithm), context.record_if(False), torch.no_grad():
        return _play(env, algorithm, num_episodes, on_step)


@contextlib.contextmanager
def _evaluation_mode(algorithm: Any) -> Iterator[None]:
    """All modules in evaluation mode, the run mode 'eval', the generators of this process left as they were."""
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
    metrics, step_measures = _metrics(time_step, num_episodes), EpisodeMeans()
    initial_state = algorithm.get_initial_predict_state(batch_size)
    state, transform_state = initial_state, algorithm.get_initial_transform_state(batch_size)
    device, complete = context.get_default_device(), []
    final_infos: dict[str, list[float]] = {}
    has_infos = on_step is not None or not algorithm.capabilities.traceable_prediction
    step = algorithm.predict_step if has_infos else algorithm.fast_predict_step
    while True:
        is_counted = remaining > 0
        # Episodes that do not count never end for the metrics.
        seen = torch.where(is_counted, time_step.step_type, torch.full_like(time_step.step_type, StepType.MID))
        update_metrics(metrics, time_step._replace(step_type=seen), stacked=False)
        ends = is_counted & time_step.is_last().cpu()
        complete.append((time_step.discount.cpu() == 0)[ends])
        for i, info in env.final_infos().items():
            for name, value in info.items() if ends[i] else ():
                final_infos.setdefault(name, []).append(value)
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


def _metrics(example: TimeStep, num_episodes: int) -> list[AverageEpisodicAggregationMetric]:
    metrics: list[AverageEpisodicAggregationMetric] = [
        AverageReturnMetric(example_time_step=example, buffer_size=num_episodes),
        AverageEpisodeLengthMetric(example_time_step=example, buffer_size=num_episodes)]
    if nest.flatten(example.env_info):
        metrics.append(AverageEnvInfoMetric(example_time_step=example, buffer_size=num_episodes))
    return metrics


class EvalLog:
    """Writes results of evaluations to the ``eval`` folder of a run: event files and ``progress.csv``.

    Args:
        root_dir: the run folder.
        config: the configuration of the run.
    """

    def __init__(self, root_dir: str, config: Any):
        folder = run_files.eval_dir(root_dir)
        self._writer = event_writer(folder, config)
        self._over_env_steps = config.summarizes_over_env_steps
        self._film_steps = config.eval_video_steps
        self._film: EvalVideo | None = None
        self._reference = reference_returns(config.offline_datasets())
        self._table = run_files.ProgressLog(run_files.eval_table(root_dir), _FIRST_COLUMNS)

    def evaluate(self, env: Any, algorithm: Any, num_episodes: int) -> EvalResult:
        """What :func:`evaluate` does; :meth:`write` will write the film of it that the configuration asks for."""
        self._film = EvalVideo(env, self._film_steps) if self._film_steps else None
        return evaluate(env, algorithm, num_episodes, self._film)._replace(reference=self._reference)

    def write(self, result: EvalResult, global_counter: int, step_metrics: dict[str, int], walltime: float) -> None:
        """Write one result.

        Args:
            result: what to write.
            global_counter: the counter when it was asked for.
            step_metrics: further counters at that time by name, 'EnvironmentSteps' among them.
            walltime: when it was asked for; a run that goes on from an earlier checkpoint cuts what is later.
        """
        self._writer.walltime = walltime
        step = step_metrics.get('EnvironmentSteps', global_counter) if self._over_env_steps else global_counter
        with summary.push_summary_writer(self._writer), context.record_if(True):
            for metric in result.metrics:
                metric.gen_summaries(step)
            if self._film is not None:
                self._film.write('episode', step)
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
        """Flush and close."""
        self._writer.close()


class SyncEvaluator:
    """Evaluates in this process; training waits.

    Args:
        env: the environments to evaluate in; None creates them as the conf says when they are first needed.
        config: the configuration of the run.

    Attributes:
        unused_bindings: keys of the bindings in scope ``evaluation/`` that the first evaluation did not use; None
            before it took place.
    """

    def __init__(self, env: Any, config: Any):
        self._env = env
        self._config = config
        self._log = EvalLog(config.root_dir, config)
        self._messages: list[str] = []
        self.unused_bindings: list[tuple[str, str, str]] | None = None

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        """Evaluate and write the result.

        Args:
            algorithm: what to evaluate.
            step_metrics: counters that go with the result by name, 'EnvironmentSteps' among them.
        """
        if self._env is None:
            with random_state.preserved():
                self._env = building.create_eval_environment(self._config, self._config.num_eval_environments)
        walltime = time.time()
        result = self._log.evaluate(self._env, algorithm, self._config.num_eval_episodes)
        self._log.write(result, context.get_global_counter(), step_metrics, walltime)
        self._messages += [f'evaluation at {context.get_global_counter()}: {result}']
        self.unused_bindings = unused_for_evaluation()

    def messages(self) -> list[str]:
        """What there is to tell about evaluations since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def close(self, timeout: float | None = None) -> None:
        """Close the environments and the files; there is nothing to wait for."""
        if self._env is not None:
            self._env.close()
        self._log.close()


def evaluate_supervised(algorithm: Any, config: Any) -> dict[str, float]:
    """What an algorithm that brings its own data says of itself, by name.

    Nothing is trained by it, as by :func:`evaluate`.

    Args:
        algorithm: has ``evaluate()``, of which a dict of numbers counts, and with ``config.eval_uncertainty``
            ``eval_uncertainty()``, which returns a named tuple of numbers.
        config: ``evaluate``, ``eval_uncertainty``.
    """
    numbers: dict[str, float] = {}
    with _evaluation_mode(algorithm):
        if config.evaluate or not config.eval_uncertainty:
            found = algorithm.evaluate()
            numbers |= {name: float(value) for name, value in found.items()} if isinstance(found, dict) else {}
        if config.eval_uncertainty:
            numbers |= algorithm.eval_uncertainty()._asdict()
    return numbers


class SupervisedEvaluator:
    """Lets an algorithm that brings its own data evaluate itself.

    What it gives goes to the ``eval`` folder, event files and ``progress.csv``, like results of policies.

    Args:
        config: the configuration of the run.

    Attributes:
        unused_bindings: as of :class:`SyncEvaluator`.
    """

    def __init__(self, config: Any):
        self._writer = event_writer(run_files.eval_dir(config.root_dir), config)
        self._table = run_files.ProgressLog(run_files.eval_table(config.root_dir),
                                            ('global_counter', 'env_steps', 'iteration'))
        self._config = config
        self._messages: list[str] = []
        self.unused_bindings: list[tuple[str, str, str]] | None = None

    def eval(self, algorithm: Any, step_metrics: dict[str, int]) -> None:
        """Evaluate as the configuration says and write the result.

        Args:
            algorithm: what to evaluate.
            step_metrics: counters that go with the result by name, 'Iterations' among them.
        """
        with summary.push_summary_writer(self._writer), context.record_if(True):
            numbers = evaluate_supervised(algorithm, self._config)
            for name, value in numbers.items():
                summary.scalar(f'eval/{name}', value)
        written = {name.removeprefix('eval/'): value for name, value in self._writer.latest_scalars.items()}
        self._writer.latest_scalars.clear()
        self._table.append({'global_counter': context.get_global_counter(),
                            'iteration': step_metrics.get('Iterations', ''), **written})
        self._writer.flush()
        shown = ', '.join(f'{name} {value:.5g}' for name, value in written.items())
        self._messages.append(f'evaluation at {context.get_global_counter()}: {shown or "done"}')
        self.unused_bindings = unused_for_evaluation()

    def messages(self) -> list[str]:
        """What there is to tell about evaluations since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def close(self, timeout: float | None = None) -> None:
        """Close the files; there is nothing to wait for."""
        self._writer.close()


def read_results(root_dir: str) -> list[dict[str, float]]:
    """The results of all evaluations of a run, in the order in which they were asked for."""
    path = run_files.eval_table(root_dir)
    if not os.path.isfile(path):
        return []
    rows = [{key: float(value) for key, value in row.items() if value} for row in run_files.read_table(path)]
    complete = [row for row in rows if 'global_counter' in row and row.keys() - {'global_counter', 'iteration'}]
    return sorted(complete, key=lambda row: row['global_counter'])
