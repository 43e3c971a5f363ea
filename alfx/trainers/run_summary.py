"""What the trainer itself writes: metrics, throughput, the conf, ``progress.csv``."""
import logging
import os
import re
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

import alfx
from alfx import context, gin_utils, summary
from alfx.summary import trackers
from alfx.summary.writer import SummaryWriter
from alfx.reports import comparing
from alfx.runs import run_files
from alfx.runs.evaluator import read_results

logger = logging.getLogger(__name__)

_COLUMNS = ('iteration', 'global_counter', 'env_steps', 'episodes', 'seconds', 'average_return', 'average_length',
            'steps_per_second')
_LONGEST_SETTING = 100  # characters
_IN_TABLE = re.compile(r'(^|/)(((scalar_)?loss|alpha)(/|$)|train/)')


class RunSummary:
    """Writes the summaries and ``progress.csv`` of a run.

    Args:
        config: the configuration of the run.
        algorithm: the root algorithm.
        metrics: its metrics, empty in supervised learning; the number of environment steps comes first.
        writer: takes the summaries in place of an event file; there is no ``progress.csv`` then.
    """

    def __init__(self, config: Any, algorithm: Any, metrics: list[Any],
                 writer: SummaryWriter | None = None):
        self._config = config
        self._algorithm = algorithm
        self._metrics = {metric.name: metric for metric in metrics}
        self._has_table = writer is None
        self.writer = writer or trackers.event_writer(run_files.train_dir(config.root_dir), config)
        if self._has_table:
            trackers.check_packages(config.loggers)
        self._trackers: trackers.Trackers | None = None
        self._tracked_evaluation = -1.0  # the counter of the latest one that the trackers got
        self._table = run_files.ProgressLog(os.path.join(config.root_dir, 'progress.csv'), _COLUMNS)
        self._last: tuple[float, int, int] | None = None
        self._is_first = True

    def write(self, iteration: int, seconds: float, final_infos: Sequence[dict[str, float]] = ()) -> None:
        """Write what the trainer knows at the end of an iteration that records summaries.

        Args:
            iteration: number of iterations done before this one.
            seconds: time spent in training so far.
            final_infos: the numbers in the infos that the latest episodes ended with.
        """
        if self._is_first:
            self._write_once()
            self._is_first = False
        env_steps = self.count('EnvironmentSteps')
        rate = self._rate(iteration, env_steps)
        for name, value in rate.items():
            summary.scalar(f'throughput/{name}', value)
        averages = _averages(final_infos)
        row = {'iteration': iteration, 'global_counter': context.get_global_counter(), 'env_steps': env_steps,
               'episodes': self.count('NumberOfEpisodes'), 'seconds': round(seconds, 3), **self.episode_averages(),
               'steps_per_second': rate.get('environment_steps_per_second', ''), **averages}
        for name, value in averages.items():
            summary.scalar(f'Metrics/{name}', value)
        for name, value in self._learning().items():
            summary.scalar(f'train/{name}', value)
        scalars = dict(self.writer.latest_scalars)
        learning = {tag: value for tag, value in scalars.items() if _IN_TABLE.search(tag)}
        self.writer.latest_scalars.clear()
        if not self._has_table:
            return
        try:
            self._table.append({**row, **learning})
        except OSError as error:  # as with event files: the run goes on, and its next checkpoint tells if it cannot
            logger.error('progress.csv cannot be written: %s', error)
        if self._trackers is not None:
            self._track({**row, **scalars})
            self._track_evaluations()

    def start_trackers(self, global_counter: int) -> None:
        """Let the trackers of ``TrainerConfig.loggers`` begin, or go on.

        Args:
            global_counter: of the checkpoint that the run goes on from; -1 for a new run.

        Raises:
            ConfError: one cannot begin.
        """
        self._tracked_evaluation = global_counter
        self._trackers = trackers.Trackers(self._config.loggers, self._config.root_dir)
        self._trackers.params(comparing.read_bindings(self._config.root_dir))

    def write_final(self, average_return: float | None) -> None:
        """Write what the run has come to: what its settings are compared by.

        Args:
            average_return: None where there is none.
        """
        if average_return is not None:
            over_env_steps = self._config.summarizes_over_env_steps
            step = self.count('EnvironmentSteps') if over_env_steps else context.get_global_counter()
            self.writer.add_scalar('final/return', average_return, step)

    def close(self) -> None:
        """Write what has not been written yet; nothing comes after it."""
        if self._trackers is not None:
            self._track_evaluations()
            self._trackers.close()
        self.writer.close()

    def _track(self, row: dict[str, Any]) -> None:
        step = row.get('env_steps') or row['global_counter']
        if self._trackers:
            self._trackers.log({name: float(x) for name, x in row.items() if isinstance(x, (int, float))}, int(step))

    def _track_evaluations(self) -> None:
        """Evaluations may be made by another process; what they found is in their table."""
        for row in read_results(self._config.root_dir) if self._trackers else ():
            if row['global_counter'] > self._tracked_evaluation:
                self._tracked_evaluation = row['global_counter']
                names = {name: name if name in ('global_counter', 'env_steps') else f'eval/{name}' for name in row}
                self._track({names[name]: value for name, value in row.items()})

    def cut(self, global_counter: int) -> None:
        """Remove the rows of ``progress.csv`` that are later than ``global_counter``, if that is written here."""
        if not self._has_table:
            return
        self._table.cut('global_counter', global_counter)

    def count(self, name: str) -> int:
        """The value of a counting metric, 0 if there is none."""
        return self._metrics[name].count if name in self._metrics else 0

    def episode_averages(self) -> dict[str, float]:
        """``average_return`` (summed over the dimensions of the reward) and ``average_length`` of the latest episodes;
        empty before one has ended."""
        averages = {}
        for key, name in (('average_return', 'AverageReturn'), ('average_length', 'AverageEpisodeLength')):
            metric = self._metrics.get(name)
            if metric is not None and metric.has_result():
                averages[key] = float(metric.result().sum())
        return averages

    def _learning(self) -> dict[str, float]:
        """What the algorithm and its optimizers are set to now, and how much is stored to learn from."""
        optimizers, found = self._optimizers, {}
        for label, optimizer in optimizers.items():
            if optimizer.param_groups:
                found[f'learning_rate/{label}'] = float(optimizer.param_groups[0]['lr'])
        counts = [float(state['step']) for optimizer in optimizers.values() for state in optimizer.state.values()
                  if 'step' in state]
        if counts:  # Adam and its like count them, and go on in a run that does
            found['updates'] = max(counts)
        for part in self._explorers:
            found['exploration_rate'] = part.exploration_rate
        buffer = self._algorithm.replay_buffer
        if buffer is not None:
            found['replay_buffer_size'] = float(buffer.total_size)
        return found

    @cached_property
    def _optimizers(self) -> dict[str, Any]:
        """All optimizers by name, numbered where several have the same."""
        optimizers = self._algorithm.optimizers(include_ignored_attributes=True)
        names = [getattr(optimizer, 'name', type(optimizer).__name__) for optimizer in optimizers]
        return {f'{name}_{names[:i].count(name) + 1}' if names.count(name) > 1 else name: optimizer
                for i, (name, optimizer) in enumerate(zip(names, optimizers))}

    @cached_property
    def _explorers(self) -> list[Any]:
        """The parts of the algorithm that have an ``exploration_rate``."""
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
    """Of each number over the episodes that had it."""
    values: dict[str, list[float]] = {}
    for info in final_infos:
        for name, value in info.items():
            values.setdefault(f'final_info/{name}', []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def setting_of(text: str) -> bool | float | str:
    """The value of a binding as TensorBoard tells it: a number or a bool, or else its text, cut off if it is long."""
    if text in ('True', 'False'):
        return text == 'True'
    try:
        return float(text)
    except ValueError:
        text = text.strip("'\"")
        return text if len(text) <= _LONGEST_SETTING else f'{text[:_LONGEST_SETTING - 3]}...'


def parameter_table(algorithm: nn.Module) -> str:
    """The number of parameters of each part of an algorithm, as a Markdown table."""
    rows = [(name, _count_parameters(part)) for name, part in algorithm.named_children()]
    own = sum(p.numel() for p in algorithm.parameters(recurse=False))
    rows = [(name, count) for name, count in [*rows, ('(its own)', own)] if count]
    total = _count_parameters(algorithm)
    lines = ['| part | parameters |', '|---|---:|', *(f'| {name} | {count:,} |' for name, count in rows),
             f'| **{type(algorithm).__name__}** | **{total:,}** |']
    return '\n'.join(lines)


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if isinstance(p, torch.Tensor))


def _as_code(text: str) -> str:
    return ''.join(f'    {line}\n' for line in text.splitlines())
