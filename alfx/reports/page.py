"""HTML page of a report: a single self-contained file that follows the light or dark mode of the reader."""
import datetime
import html
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import alfx
from alfx.reports import figure
from alfx.reports.collecting import Interval, Report

_COLORS = (('#0969da', '#58a6ff'), ('#bc4c00', '#f0883e'), ('#1a7f37', '#3fb950'), ('#8250df', '#bc8cff'),
            ('#bf3989', '#f778ba'), ('#0b7285', '#39c5cf'), ('#7d6608', '#d4b106'), ('#57606a', '#8b949e'))
_STYLE = '''
:root{color-scheme:light dark;--back:#fff;--text:#1f2328;--faint:#59636e;--line:#d1d9e0;--head:#f6f8fa;LIGHT}
@media(prefers-color-scheme:dark){
:root{--back:#0d1117;--text:#e6edf3;--faint:#9198a1;--line:#3d444d;--head:#151b23;DARK}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:80rem;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:0 0 .3rem}
p{margin:.3rem 0;color:var(--faint)}
.figures{display:grid;gap:1.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr))}
figure{margin:0}svg{width:100%;height:auto;display:block}svg text{fill:var(--faint);font-size:12px}
.grid{stroke:var(--line);stroke-width:.7;fill:none}
.line{fill:none;stroke:currentColor;stroke-width:2.2}.run{fill:none;stroke:currentColor;stroke-width:.8;opacity:.4}
.band{fill:currentColor;opacity:.18;stroke:none}circle{fill:currentColor}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.5rem 0;padding:0;list-style:none;overflow-wrap:anywhere}
.legend b{display:inline-block;width:1.4em;height:.25em;margin-right:.4em;vertical-align:middle;background:currentColor}
.legend span{color:var(--text)}
.table{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;min-width:30rem}
th,td{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;
font-variant-numeric:tabular-nums}
th{background:var(--head)}th:first-child,td:first-child,.text td,.text th{text-align:left}
td{max-width:30rem}.text td{min-width:6rem;overflow-wrap:anywhere}
COLORS
@media(max-width:600px){figure{overflow-x:auto}svg{min-width:560px}}
@media print{body{max-width:none}.table{overflow:visible}}
'''


def render(report: Report, title: str) -> str:
    """Return the HTML page of a report.

    Args:
        report: data of the report.
        title: heading of the page.
    """
    quantity = report.y.replace('_', ' ')
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{_text(title)}</title><style>{_style()}</style></head><body>',
        f'<h1>{_text(title)}</h1><p>{_summary(report)}</p>',
        '<h2>Learning curves</h2>', _legend(report.methods), _figures(report),
        f'<p>The line is the interquartile mean (IQM) of {_text(quantity)} over the runs of a conf, the band is its '
        '95% bootstrap interval, and thin lines are the runs. With fewer than four runs the IQM is the mean.</p>',
        '<h2>Final scores</h2>', _scores(report)]
    if report.improvements:
        parts += ['<h2>Probability of improvement</h2>', _improvements(report),
                  '<p>The probability that a random run of the first conf has a higher final score than a random run '
                  'of the second, averaged over their common tasks; 0.5 means no difference.</p>']
    if report.differences:
        parts += ['<h2>Conf differences</h2>', _table(
            ['binding', *report.methods], [[name, *values] for name, values in report.differences], 'text')]
    parts += ['<h2>Runs</h2>', _runs(report), '<h2>Checkpoints and resumes</h2>', _starts(report),
              '<h2>Versions and system</h2>', _versions(report),
              f'<p>alfx {_text(alfx.__version__)}; statistics: Agarwal et al. 2021 (arXiv:2108.13264).</p>'
              '</body></html>\n']
    return '\n'.join(parts)


def _style() -> str:
    light, dark = (''.join(f'--c{i}:{pair[shade]};' for i, pair in enumerate(_COLORS)) for shade in (0, 1))
    colors = ''.join(f'.c{i}{{color:var(--c{i})}}' for i in range(len(_COLORS)))
    return _STYLE.replace('LIGHT', light).replace('DARK', dark).replace('COLORS', colors)


def _summary(report: Report) -> str:
    tasks = list(dict.fromkeys(run.task for run in report.runs))
    written = datetime.datetime.now().strftime('%Y-%m-%d %H:%M')
    return (f'{_count(len(report.runs), "run")} of {_count(len(report.methods), "conf")} on {_text(", ".join(tasks))}; '
            f'written {written}')


def _legend(methods: Sequence[str]) -> str:
    return '<ul class="legend">' + ''.join(f'<li class="c{i % len(_COLORS)}"><b></b><span>{_text(method)}</span></li>'
                                           for i, method in enumerate(methods)) + '</ul>'


def _figures(report: Report) -> str:
    numbers = {method: i for i, method in enumerate(report.methods)}
    figures = []
    for panel, tasks in report.curves.items():
        for task, curves in tasks.items():
            title = f'{task}, {panel}'
            numbered = {method: (numbers[method], curve) for method, curve in curves.items()}
            picture = figure.draw(numbered, report.x.replace('_', ' '), report.y.replace('_', ' '), title)
            figures.append(f'<figure><h3>{_text(title)}</h3>{picture}</figure>')
    return f'<div class="figures">{"".join(figures)}</div>'


def _scores(report: Report) -> str:
    head = ['conf', 'task', 'panel', 'runs', 'IQM', '95% interval', 'mean', 'worst', 'best']
    return _table(head, [[score.method, score.task, score.panel, str(len(score.runs)), number(score.iqm.value),
                          _interval(score.iqm), number(score.runs.mean()), number(score.runs.min()),
                          number(score.runs.max())] for score in report.scores])


def _improvements(report: Report) -> str:
    return _table(['conf', 'better than', 'tasks', 'panel', 'probability', '95% interval'],
                  [[item.better, item.other, ', '.join(item.tasks), item.panel, number(item.chance.value),
                    _interval(item.chance)] for item in report.improvements])


def _runs(report: Report) -> str:
    head = ['run', 'conf', 'task', 'seed', 'env steps', 'final', 'evaluation', 'wall time', 'steps/s']
    return _table(head, [[
        _name(run.folder), run.method, run.task, _cell(run.row['seed']), _cell(run.row['env steps']),
        number(run.finals.get('training')), number(run.finals.get('evaluation')), _minutes(run.row['minutes']),
        number(run.row['steps/s'])] for run in report.runs])


def _starts(report: Report) -> str:
    rows = []
    for run in report.runs:
        steps = run.checkpoints
        kept = f'{len(steps)}: {", ".join(f"ckpt-{step}" for step in steps)}' if steps else 'none'
        rows.append([_name(run.folder), run.starts[0] if run.starts else '-', run.changed,
                     ', '.join(run.starts[1:]) or 'never', kept])
    return _table(['run', 'started', 'last logged', 'resumed', 'checkpoints'], rows, 'text')


def _versions(report: Report) -> str:
    names = list(dict.fromkeys(name for run in report.runs for name in run.versions))
    rows = [[name, _values(run.versions.get(name) for run in report.runs)] for name in names]
    rows.append(['torch threads', _values(run.threads for run in report.runs)])
    return _table(['', 'version'], rows, 'text')


def _values(values: Iterable[Any]) -> str:
    """Return the common value of all runs, or each value with its number of runs."""
    found = [_cell(value) for value in values]
    counts = {value: found.count(value) for value in found}
    return found[0] if len(counts) == 1 else ', '.join(f'{value} ({_count(n, "run")})' for value, n in counts.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = '') -> str:
    body = ''.join('<tr>' + ''.join(f'<td>{_text(cell)}</td>' for cell in row) + '</tr>' for row in rows)
    titles = ''.join(f'<th>{_text(cell)}</th>' for cell in head)
    return (f'<div class="table"><table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
            '</div>')


def number(value: float | None) -> str:
    """Format a number with four digits, or all before the decimal point; None and non-finite numbers are a dash."""
    if value is None or not math.isfinite(value):
        return '-'
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'


def _interval(interval: Interval) -> str:
    return f'{number(interval.low)} to {number(interval.high)}' if math.isfinite(interval.low) else '-'


def _cell(value: Any) -> str:
    return '-' if value is None else f'{value:,}' if isinstance(value, int) else str(value)


def _minutes(minutes: float | None) -> str:
    if minutes is None:
        return '-'
    seconds = round(minutes * 60)
    return f'{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}'


def _count(count: int, what: str) -> str:
    return f'{count} {what}' if count == 1 else f'{count} {what}s'


def _name(folder: str) -> str:
    return os.path.basename(os.path.normpath(folder))


def _text(text: str) -> str:
    return html.escape(str(text))
