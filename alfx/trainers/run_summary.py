"""Logging of a run: metrics, throughput, network outputs, the conf and ``progress.csv``."""
import logging
import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn

import alfx
from alfx import context, gin_utils, nest, summary
from alfx.networks.network import Network
from alfx.reports import comparing
from alfx.runs import run_files
from alfx.runs.evaluator import read_results
from alfx.summary import trackers
from alfx.summary.summary_utils import add_mean_hist_summary
from alfx.summary.writer import SummaryWriter

logger = logging.getLogger(__name__)

_LONGEST_SETTING = 100  # characters
_LONGEST_WITHOUT_CHECKPOINT = 600.0  # seconds; temporary checkpoints are written every two minutes


class RunSummary:
    """Writer of the summaries and the ``progress.csv`` of a run.

    Args:
        config: configuration of the run.
        algorithm: root algorithm.
        metrics: metrics of the algorithm, empty in supervised learning; the first is the number of environment steps.
        writer: summary writer to use instead of an event file; then no ``progress.csv`` is written.
    """

    def __init__(self, config: Any, algorithm: Any, metrics: list[Any], writer: SummaryWriter | None = None):
        self._config = config
        self._algorithm = algorithm
        self._metrics = {metric.name: metric for metric in metrics}
        self._has_table = writer is None
        self.writer = writer or trackers.event_writer(run_files.train_dir(config.root_dir), config)
        if self._has_table:
            trackers.check_servers(config.loggers)
        self._trackers: trackers.Trackers | None = None
        self._tracked_evaluation = -1.0  # counter of the latest evaluation sent to the trackers
        self._table = run_files.ProgressLog(os.path.join(config.root_dir, 'progress.csv'), run_files.PROGRESS_COLUMNS)
        self._row: dict[str, Any] = {}
        self._last: tuple[float, int, int] | None = None
        self._is_first = True

    def write(self, iteration: int, seconds: float, final_infos: Sequence[dict[str, float]] = (),
              logged: dict[str, float] | None = None) -> None:
        """Log the metrics of the run at the end of an iteration that records summaries.

        Args:
            iteration: number of completed iterations before this iteration.
            seconds: training time so far.
            final_infos: numbers in the final infos of the latest episodes.
            logged: scalars of callbacks.
        """
        if self._is_first:
            self._write_once()
            self._is_first = False
        env_steps = self.count('EnvironmentSteps')
        rate = self._rate(iteration, env_steps)
        averages, logged = _averages(final_infos), logged or {}
        row = {'iteration': iteration, 'global_counter': context.get_global_counter(), 'env_steps': env_steps,
               'episodes': self.count('NumberOfEpisodes'), 'seconds': round(seconds, 3), **self.episode_averages(),
               'steps_per_second': rate.get('environment_steps_per_second', ''), **averages}
        scalars_of = {'throughput/': rate, 'Metrics/': averages, 'train/': self._learning(), '': logged}
        for prefix, values in scalars_of.items():
            for name, value in values.items():
                summary.scalar(f'{prefix}{name}', value)
        scalars = dict(self.writer.latest_scalars)
        learning = {tag: value for tag, value in scalars.items() if run_files.LEARNING_COLUMN.search(tag)}
        self.writer.latest_scalars.clear()
        if not self._has_table:
            return
        self._row = {**row, **learning, **logged}
        self._append()
        if self._trackers is not None:
            self._track({**row, **scalars})
            self._track_evaluations()

    def complete(self, iteration: int, logged: dict[str, float]) -> None:
        """Log scalars of callbacks at the end of a run, after its last row, and add them to that row.

        Args:
            iteration: number of completed iterations before the last iteration.
            logged: the scalars.
        """
        for name, value in logged.items():
            summary.scalar(name, value)
        self.writer.latest_scalars.clear()
        if not self._has_table:
            return
        if self._row.get('iteration') != iteration:  # the last iteration wrote no summary, or another process did
            last = self._table.last_row()
            self._row = last if last.get('iteration') == str(iteration) else {
                'iteration': iteration, 'global_counter': context.get_global_counter() - 1,
                'env_steps': self.count('EnvironmentSteps'), 'episodes': self.count('NumberOfEpisodes'),
                **self.episode_averages()}
        self._row |= logged
        self._table.cut('iteration', iteration - 1)
        self._append()
        if self._trackers is not None:
            self._track({**{name: self._row[name] for name in ('global_counter', 'env_steps')}, **logged})

    def _append(self) -> None:
        try:
            self._table.append(self._row)
        except OSError as error:  # as for event files, continue; a full disk makes the next checkpoint fail
            logger.error('progress.csv cannot be written: %s', error)

    def start_trackers(self, global_counter: int) -> None:
        """Start or resume the trackers of ``TrainerConfig.loggers``.

        Args:
            global_counter: counter of the checkpoint from which the run is resumed; -1 for a new run.

        Raises:
            ConfError: a tracker cannot be started.
        """
        self._tracked_evaluation = global_counter
        self._trackers = trackers.Trackers(self._config.loggers, self._config.root_dir)
        self._trackers.params(comparing.read_bindings(self._config.root_dir))

    def write_final(self, average_return: float | None) -> None:
        """Log the final return of the run, by which TensorBoard compares hyperparameters.

        Args:
            average_return: the final return, or None.
        """
        if average_return is not None:
            over_env_steps = self._config.summarizes_over_env_steps
            step = self.count('EnvironmentSteps') if over_env_steps else context.get_global_counter()
            self.writer.add_scalar('final/return', average_return, step)

    def flush(self) -> None:
        """Write everything logged so far to the event file, and send new evaluations to the trackers."""
        self._track_evaluations()
        self.writer.flush()

    def close(self) -> None:
        """Flush and close the writer and the trackers."""
        if self._trackers is not None:
            self._track_evaluations()
            self._trackers.close()
        self.writer.close()

    def _track(self, row: dict[str, Any]) -> None:
        step = (not self._config.offline_datasets() and row.get('env_steps')) or row['global_counter']
        if self._trackers:
            self._trackers.log({name: float(x) for name, x in row.items() if isinstance(x, (int, float))}, int(step))

    def _track_evaluations(self) -> None:
        """Send new evaluations to the trackers, read from their table, which another process may write."""
        for row in read_results(self._config.root_dir) if self._trackers else ():
            if row['global_counter'] > self._tracked_evaluation:
                self._tracked_evaluation = row['global_counter']
                names = {name: name if name in ('global_counter', 'env_steps') else f'eval/{name}' for name in row}
                self._track({names[name]: value for name, value in row.items()})

    def cut(self, iteration: int) -> None:
        """Remove the rows of ``progress.csv`` later than ``iteration``, if this process writes the file.

        Raises:
            ConfError: ``iteration`` is -1, for a start without a checkpoint, but a long run would be removed.
        """
        if self._has_table:
            seconds = float(self._table.last_row().get('seconds') or 0)
            if iteration < 0 and seconds > _LONGEST_WITHOUT_CHECKPOINT:
                raise gin_utils.ConfError(f'the run folder has results of {seconds:.0f} seconds, but no checkpoint: '
                                          'a new start would remove them', 'use another root_dir, or move the folder')
            self._table.cut('iteration', iteration)

    def count(self, name: str) -> int:
        """Return the value of a counting metric, 0 if there is no such metric."""
        return self._metrics[name].count if name in self._metrics else 0

    def episode_averages(self) -> dict[str, float]:
        """Return ``average_return`` (summed over the reward dimensions) and ``average_length`` of the latest episodes.

        For K-dimensional rewards ``average_return/0`` to ``average_return/K-1`` are added. The dict is empty before the
        first episode has ended.
        """
        averages = {}
        for key, name in (('average_return', 'AverageReturn'), ('average_length', 'AverageEpisodeLength')):
            metric = self._metrics.get(name)
            if metric is not None and metric.has_result():
                result = metric.result()
                averages[key] = float(result.sum())
                averages |= {f'{key}/{i}': float(result[i]) for i in range(len(result) if result.ndim else 0)}
        return averages

    def learning_values(self) -> dict[str, float]:
        """Return the number of updates and the latest logged loss, as far as they are known."""
        found = {'updates': self._learning().get('updates'), 'loss': self._row.get('loss')}
        return {name: float(value) for name, value in found.items() if value is not None}

    def _learning(self) -> dict[str, float]:
        """Return learning rates, number of updates, exploration rate and size of the replay buffer."""
        optimizers, found = self._optimizers, {}
        for label, optimizer in optimizers.items():
            if optimizer.param_groups:
                found[f'learning_rate/{label}'] = float(optimizer.param_groups[0]['lr'])
        counts = [float(state['step']) for optimizer in optimizers.values() for state in optimizer.state.values()
                  if 'step' in state]
        if counts:  # counted by Adam and similar optimizers, and saved in checkpoints
            found['updates'] = max(counts)
        for part in self._explorers:
            found['exploration_rate'] = part.exploration_rate
        buffer = self._algorithm.replay_buffer
        if buffer is not None:
            found['replay_buffer_size'] = float(buffer.total_size)
        return found

    @cached_property
    def _optimizers(self) -> dict[str, Any]:
        """All optimizers by name, with a number if several have the same name."""
        optimizers = self._algorithm.optimizers(include_ignored_attributes=True)
        names = [getattr(optimizer, 'name', type(optimizer).__name__) for optimizer in optimizers]
        return {f'{name}_{names[:i].count(name) + 1}' if names.count(name) > 1 else name: optimizer
                for i, (name, optimizer) in enumerate(zip(names, optimizers))}

    @cached_property
    def _explorers(self) -> list[Any]:
        """Parts of the algorithm with an ``exploration_rate``."""
        return [part for part in self._algorithm.modules() if hasattr(part, 'exploration_rate')]

    def _rate(self, iteration: int, env_steps: int) -> dict[str, float]:
        now = time.perf_counter()
        last, self._last = self._last, (now, iteration, env_steps)
        if last is None or now <= last[0]:
            return {}
        elapsed = now - last[0]
        rate = {'iterations_per_second': (iteration - last[1]) / elapsed}
        if env_steps:
            rate['environment_steps_per_second'] = (env_steps - last[2]) / elapsed
        return rate

    def _write_once(self) -> None:
        summary.text('config/operative', _as_code(gin_utils.operative_config_str()))
        summary.text('networks/parameters', parameter_table(self._algorithm))
        settings = comparing.read_bindings(self._config.root_dir)
        if settings:
            self.writer.add_hparams({name: setting_of(value) for name, value in settings.items()})
        package = os.path.dirname(os.path.abspath(alfx.__file__))
        for name in self._config.code_snapshots or ():
            with open(os.path.join(package, name), encoding='utf8') as file:
                summary.text(f'code/{name}', _as_code(file.read()))


def _averages(final_infos: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average each number over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for info in final_infos:
        for name, value in info.items():
            values.setdefault(f'final_info/{name}', []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def setting_of(text: str) -> bool | float | str:
    """Return the value of a binding for TensorBoard: a number, a bool, or its text, truncated if it is long."""
    if text in ('True', 'False'):
        return text == 'True'
    try:
        return float(text)
    except ValueError:
        text = text.strip("'\"")
        return text if len(text) <= _LONGEST_SETTING else f'{text[:_LONGEST_SETTING - 3]}...'


def parameter_table(algorithm: nn.Module) -> str:
    """Return the number of parameters of each part of an algorithm as a Markdown table."""
    rows = [(name, _count_parameters(part)) for name, part in algorithm.named_children()]
    own = sum(p.numel() for p in algorithm.parameters(recurse=False))
    rows = [(name, count) for name, count in [*rows, ('(own parameters)', own)] if count]
    total = _count_parameters(algorithm)
    lines = ['| part | parameters |', '|---|---:|', *(f'| {name} | {count:,} |' for name, count in rows),
             f'| **{type(algorithm).__name__}** | **{total:,}** |']
    return '\n'.join(lines)


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _as_code(text: str) -> str:
    return ''.join(f'    {line}\n' for line in text.splitlines())


def summarize_outputs(algorithm: nn.Module) -> None:
    """Log the output of every network in ``algorithm`` (``TrainerConfig.summarize_output``).

    The tags are ``network_output/<run mode>/<path of the network>``: histogram and mean of each output tensor, or of
    each parameter of a distribution, at the first call in each summary step and run mode ('rollout', 'replay', ...).
    Unrolls replayed from a traced graph do not call the networks, so they log nothing.
    """
    for path, module in algorithm.named_modules():
        if isinstance(module, Network):
            module.register_forward_hook(_OutputLogger(path))


class _OutputLogger:
    """Forward hook that logs the output of the network at ``path``."""

    def __init__(self, path: str):
        self._path = path
        self._written: dict[str, tuple[int, int]] = {}  # run mode -> iteration or update, step of summaries

    def __call__(self, network: nn.Module, inputs: Any, result: tuple[Any, Any]) -> None:
        if not (summary.should_record_summaries() and summary.should_summarize_output()):
            return
        mode, step = context.exe_mode_name(), (context.get_global_counter(), context.get_summary_step())
        if self._written.get(mode) == step:
            return
        self._written[mode] = step
        name = f'network_output/{mode}/{self._path}'
        for path, leaf in nest.flatten_with_path(result[0]):
            add_mean_hist_summary(f'{name}/{path}' if path else name, leaf)
