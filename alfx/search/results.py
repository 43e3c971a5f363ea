"""Result files of a hyperparameter search: ``results.md``, ``results.csv``, ``plot.png`` and ``best.gin``."""
import csv
import io
import os
import re
import time
from typing import Any

import numpy as np

from alfx.reports.comparing import short_name
from alfx.search import seeds
from alfx.search.search_conf import SearchConf, full_name
from alfx.search.search_folder import SearchFolder, write_text
from alfx.search.study import Study

_SHARE_OF_TIME = 0.05  # largest fraction of the time spent on writing these files during the hyperparameter search
_WORDS = {'RUNNING': 'running', 'COMPLETE': 'complete', 'PRUNED': 'pruned', 'FAIL': 'failed'}
_MAX_SLICES = 12


class Results:
    """Writer of the results of a hyperparameter search.

    Args:
        folder: search folder.
        conf: search conf.
        study: the trials.
    """

    def __init__(self, folder: SearchFolder, conf: SearchConf, study: Study):
        self._folder, self._conf, self._study = folder, conf, study
        self._written, self._cost = 0.0, 0.0

    def line(self, number: int) -> str:
        """Return one line about a finished trial."""
        trials = self._study.trials()
        trial, best = trials[number], self._study.best()
        ended = sum(trial.state.name != 'RUNNING' for trial in trials)
        if trial.state.name == 'FAIL':
            outcome = f"failed: {_one_line(trial.user_attrs.get('log_tail', ''))}"
        else:
            value = '' if trial.value is None else f' {trial.value:.6g}'
            outcome = 'pruned at' + value if trial.state.name == 'PRUNED' else value.strip()
        params = '  '.join(f'{short_name(name)} {text}' for name, text in self._study.short_texts(trial.params).items())
        score = f'  (best {best.value:.6g}, trial {best.number})' if best else ''
        return f'[{ended}/{self._study.num_trials}] trial {number}: {outcome}{score}  {params}'.rstrip()

    def summary(self) -> list[str]:
        """Return lines that describe the best trial."""
        best = self._study.best()
        if best is None:
            return ['no completed trial']
        texts = self._study.texts(best.params)
        return [f'best: {best.value:.6g}, trial {best.number}', *(f'  {name} = {text}' for name, text in texts.items())]

    def write_occasionally(self) -> None:
        """Write all files, unless this would take more than 5% of the time."""
        if time.monotonic() - self._written > self._cost / _SHARE_OF_TIME:
            self.write()

    def write(self) -> None:
        """Write all files."""
        begun = time.monotonic()
        trials, best = self._study.trials(), self._study.best()
        rows = [self._row(trial) for trial in trials]
        write_text(self._folder.path('results.csv'), _csv(rows))
        write_text(self._folder.path('results.md'), self._markdown(rows))
        if best is not None:
            write_text(self._folder.path('best.gin'), self._best_conf(best))
        if any(trial.value is not None for trial in trials):
            draw(trials, list(self._conf.space), self._study, self._conf.settings.direction,
                 self._folder.path('plot.png'))
        self._written = time.monotonic()
        self._cost = self._written - begun

    def _row(self, trial: Any) -> dict[str, str]:
        attributes, texts = trial.user_attrs, self._study.texts(trial.params)
        used = range(self._conf.settings.num_seeds)
        return {
            'trial': str(trial.number), 'state': _WORDS[trial.state.name],
            'value': '' if trial.value is None else repr(trial.value),
            **{name: texts.get(name, '') for name in self._conf.space},
            'seeds': ' '.join(str(seeds.run_seed(self._conf.settings.seed, trial.number, repeat)) for repeat in used),
            'values': ' '.join(repr(value) for value in attributes.get('values', {}).values()),
            'seconds': f"{sum(attributes.get('seconds', {}).values()):.1f}",
            'log tail': attributes.get('log_tail', ''),
        }

    def _markdown(self, rows: list[dict[str, str]]) -> str:
        settings = self._conf.settings
        window = f' {settings.score_window or 5}' if settings.score == 'mean' else ''
        what = 'return value of the function' if settings.function is not None else \
            f'{settings.score}{window} {settings.measure} in {settings.measured_in}'
        over = f', mean over {settings.num_seeds} seeds' if settings.num_seeds > 1 else ''
        head = [f'{settings.direction} {what}{over}', '', *(f'    {line}' for line in self.summary()), '']
        if not rows:
            return '\n'.join(head)
        names = [name for name in rows[0] if name != 'seeds' and (name != 'values' or settings.num_seeds > 1)]
        cells = [names, ['---'] * len(names), *([_cell(row[name]) for name in names] for row in self._sorted(rows))]
        return '\n'.join([*head, *(f"| {' | '.join(row)} |" for row in cells)]) + '\n'

    def _sorted(self, rows: list[dict[str, str]]) -> list[dict[str, str]]:
        """Sort the rows: completed trials first, the best at the top."""
        sign = -1 if self._conf.settings.direction == 'maximize' else 1
        order = ['complete', 'pruned', 'running', 'failed']
        return sorted(rows, key=lambda row: (order.index(row['state']), sign * float(row['value'] or 0)))

    def _best_conf(self, best: Any) -> str:
        texts = self._study.texts(best.params)
        head = (f'# Trial {best.number} of a hyperparameter search: value {best.value!r} with random_seed '
                f"{self._row(best)['seeds']}\n")
        searched = tuple(f'{full_name(name)} = ' for name in texts)
        kept = ''.join(f'{line}\n' for line in self._conf.base_text.splitlines() if not line.startswith(searched))
        return head + kept + ''.join(f'{name} = {text}\n' for name, text in texts.items())


def _csv(rows: list[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ['trial'])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cell(text: str) -> str:
    """Return a table cell, with long numbers rounded to five digits."""
    rounded = re.sub(r'-?\d+\.\d{4,}(e[+-]?\d+)?', lambda match: f'{float(match[0]):.5g}', text)
    return _one_line(rounded).replace('|', '\\|')


def _one_line(text: str) -> str:
    return ' '.join(text.split())


def draw(trials: list[Any], names: list[str], study: Study, direction: str, path: str) -> None:
    """Plot the value of each trial with the best value so far, and the values over each parameter.

    Args:
        trials: trials of optuna (``FrozenTrial``), sorted by number.
        names: names of the parameters; only the first twelve are plotted.
        study: study of the trials.
        direction: 'maximize' or 'minimize'.
        path: file to write.
    """
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    names = names[:_MAX_SLICES]
    columns = min(4, len(names) + 1)
    lines = -(-(len(names) + 1) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.4 * columns, 3.4 * lines), squeeze=False,
                                   layout='constrained')
    panels = axes.ravel()
    _draw_history(panels[0], trials, direction)
    for axis, name in zip(panels[1:], names):
        _draw_slice(axis, trials, name, study)
    for axis in panels[len(names) + 1:]:
        axis.set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=3, fontsize='small',
                  frameon=False)
    figure.savefig(path + '.tmp', dpi=100, format='png')
    pyplot.close(figure)
    os.replace(path + '.tmp', path)


def _of_state(trials: list[Any], state: str) -> list[Any]:
    return [trial for trial in trials if trial.state.name == state and trial.value is not None]


def _draw_history(axis: Any, trials: list[Any], direction: str) -> None:
    complete, pruned = _of_state(trials, 'COMPLETE'), _of_state(trials, 'PRUNED')
    failed = [trial.number for trial in trials if trial.state.name == 'FAIL']
    axis.scatter([trial.number for trial in complete], [trial.value for trial in complete], s=14, label='complete')
    if pruned:
        axis.scatter([t.number for t in pruned], [t.value for t in pruned], s=14, marker='x', c='0.6', label='pruned')
    for number in failed:
        axis.axvline(number, color='tab:red', alpha=0.3, linewidth=1)
    if complete:
        accumulate = np.maximum.accumulate if direction == 'maximize' else np.minimum.accumulate
        best = accumulate([trial.value for trial in complete])
        axis.step([*(trial.number for trial in complete), trials[-1].number], [*best, best[-1]], where='post',
                  color='tab:orange', label='best so far')
    axis.set_title('failed trials in red' if failed else 'history', fontsize='small')
    axis.set_xlabel('trial')
    axis.set_ylabel('value')
    axis.grid(alpha=0.3)


def _draw_slice(axis: Any, trials: list[Any], name: str, study: Study) -> None:
    choices = study.choices(name)
    position = choices.index if choices else float
    for state, style in (('PRUNED', dict(c='0.7', marker='x')), ('COMPLETE', dict(c='tab:blue'))):
        shown = [trial for trial in _of_state(trials, state) if name in trial.params]
        axis.scatter([position(trial.params[name]) for trial in shown], [trial.value for trial in shown], s=14, **style)
    if choices:
        axis.set_xticks(range(len(choices)), choices, fontsize='small')
    elif study.is_logarithmic(name):
        axis.set_xscale('log')
        low, high = axis.get_xlim()
        ticks = np.geomspace(low, high, 5)[1:-1]  # by default labels of a short range cover each other
        axis.set_xticks(ticks, [f'{tick:.2g}' for tick in ticks])
        axis.minorticks_off()
    else:
        axis.locator_params(axis='x', nbins=4)
    axis.set_title(short_name(name), fontsize='small')
    axis.grid(alpha=0.3)
