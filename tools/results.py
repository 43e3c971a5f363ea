"""Train shipped confs with several seeds, evaluate each run, and write docs/results.md and docs/results/.

    python tools/results.py --conf ppo_cart_pole --seeds 5 --jobs 2
    python tools/results.py --conf ppo_cart_pole ppo_pendulum --seeds 3
    python tools/results.py --table          # only rewrite the page from docs/results.json

The same command resumes interrupted runs. Runs with a stored result are skipped unless their conf has changed. The
header comment of a conf states the required results:

    #   expected  evaluation return -170 +- 30
    #   expected  success 0.97 +- 0.02
    #   expected  repr/reconstruction at most 0.012

Missing datasets that a conf uses, `data/TASK/LEVEL`, are created by tools/make_datasets.py. For these confs the result
may be a normalized_score, which is 0 for a random policy and 100 for an expert.

The numbers are stored in docs/results.json, run folders and logs in runs/results.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import make_datasets
import numpy as np
import torch
from make_datasets import run_program as _run
from pictures import as_curves, draw_curves
from suites import FAMILIES, SUITES, family_of, suite_table

from alfx import gin_utils
from alfx.gin_utils import stored_files
from alfx.reports import curves
from alfx.runs.run_files import read_table
from alfx.utils.confidence import confidence_interval
from alfx.utils.processes import num_cores

ROOT = Path(__file__).resolve().parent.parent
_RETURN = 'return'
_EXPECTED = re.compile(r'^#\s*expected\s+(?:evaluation (?=return )|(?=\S+ (?:at most )?-?[\d.]))(\S+)\s+'
                       r'(at most )?(-?[\d,.]*\d)'
                       r'(?:\s*\+-\s*([\d,.]*\d))?', re.MULTILINE)
_CURVE_POINTS = 25
_SHOWN_VERSIONS = ('alfx', 'torch', 'gymnasium')
_HEAD = """# Results

Results of the shipped confs. Each row evaluates the greedy policy at the end of training, with at least 20 episodes
per seed. With *epsilon 0.1*, the policy samples its action with this probability instead of taking the most likely
action, as set in its conf (`TrainerConfig.epsilon_greedy`).

`python tools/results.py --conf NAME --seeds N` writes a row. The numbers are in [results.json](results.json), and the
curves in [curves.json](curves.json). The rows of each conf, with learning curves:

"""
_SUITES_HEAD = """
The tables below compare all algorithms on a suite. A cell has the interquartile mean over the seeds with its 95%
bootstrap interval (Agarwal et al. 2021, arXiv:2108.13264), and below it seeds and steps. With fewer than four seeds the
interquartile mean is the mean.

"""
_FAMILY_HEAD = """- *measure*: the return of an episode, or a metric of the environment or the algorithm, such as
  success. A *normalized_score* is 0 for a random policy and 100 for an expert.
- *mean*, *95% interval*: mean over seeds and its interval (Student's t). *worst* is the worst seed.
- *required*: the lower end of the result stated in the header comment of the conf, or the upper end if less is better.
  A conf that states several results has several rows.
- *older conf*: the conf, or one that it includes, has changed since, so a new run may give another result.
- *steps*: environment steps, or updates for offline runs.
- *wall time*: median training time of a run, and the number of runs that shared the cores of the machine. *compiled*
  marks runs with `TrainerConfig.compile`, which learn the same in less time.
- *updates/s*: parameter updates per second of wall time, in the median run; not known for old runs.

The learning curves show the return of the latest training episodes over environment steps: the interquartile
mean over seeds, and each seed as a thin line. [All results](../results.md)

"""
_COLUMNS = ('conf', 'environment', 'steps', 'seeds', 'wall time', 'measure', 'mean', '95% interval', 'worst',
            'required', 'verdict', 'date', 'versions', 'updates/s')
_SHOWN = ('conf', 'measure', 'mean', '95% interval', 'worst', 'required', 'verdict', 'steps', 'seeds', 'wall time',
          'updates/s', 'date', 'versions')  # columns of the table of a task, in this order
_NUMBERS = ('steps', 'seeds', 'wall time', 'updates/s', 'mean', '95% interval', 'worst', 'required')


@dataclasses.dataclass(frozen=True)
class Bar:
    """Result stated in the header comment of a conf.

    Attributes:
        measure: 'return', the path of a number in the env_info, such as 'success', or the name of a metric of the
            algorithm, such as 'irm/accuracy'.
        required: lowest (with ``at_most`` highest) mean that counts as reached; None if no result is stated.
        at_most: less is better.
    """

    measure: str = _RETURN
    required: float | None = None
    at_most: bool = False

    def verdict(self, mean: float) -> str:
        """Return 'reached' or 'missed', or '' if nothing is required."""
        if self.required is None:
            return ''
        return 'reached' if (mean <= self.required if self.at_most else mean >= self.required) else 'missed'

    def __str__(self) -> str:
        if self.required is None:
            return ''
        return f"{'at most ' if self.at_most else ''}{self.required:,.5g}"


@dataclasses.dataclass(frozen=True)
class Task:
    """Conf to run.

    Attributes:
        name: name of the conf, without folder and `.gin`.
        conf: conf as given on the command line.
        env_name: environment of the conf.
        bars: results stated in its header comment, one or more.
        fingerprint: hash of the bindings of the conf.
        epsilon_greedy: epsilon of the evaluation; 0 is greedy.
        datasets: datasets of tools/make_datasets.py that the conf uses, each as TASK/LEVEL.
        updates_per_iteration: parameter updates per iteration.
    """

    name: str
    conf: str
    env_name: str
    bars: tuple[Bar, ...]
    fingerprint: str
    epsilon_greedy: float = 0.0
    datasets: tuple[str, ...] = ()
    updates_per_iteration: int = 1


def stated_results(conf_text: str) -> tuple[Bar, ...]:
    """Parse the results stated in the header comment of a conf, one bar for each line.

    ``#   expected  evaluation return -170 +- 30`` is ``Bar('return', -200.0)``,
    ``#   expected  success 0.97 +- 0.02`` is ``Bar('success', 0.95)``,
    ``#   expected  repr/reconstruction at most 0.012`` is
    ``Bar('repr/reconstruction', 0.012, at_most=True)``. A header without a result is ``Bar('return', None)``.
    """
    bars = []
    for measure, at_most, expected, margin in _EXPECTED.findall(conf_text):
        value, width = (float((text or '0').replace(',', '')) for text in (expected, margin))
        bars.append(Bar(measure, value + width if at_most else value - width, bool(at_most)))
    return tuple(bars) or (Bar(), )


def read_task(conf: str) -> Task:
    """Load and check a conf.

    Raises:
        ConfError: the conf is invalid or does not exist.
    """
    loaded = gin_utils.load(conf)
    bindings = {str(binding).split(' = ', 1)[0]: str(binding) for binding in loaded.bindings}
    data = next((value for name, value in bindings.items() if name.endswith('.data_creator')), ' = ?')
    text = bindings.get('create_environment.env_name', data).split(' = ', 1)[1].strip("'\"")
    if bindings.get('create_environment.env_load_fn', '').endswith('@suite_minatar.load'):
        text = f'MinAtar {text}'  # its names, such as 'breakout', do not name the suite
    fingerprint = hashlib.sha256('\n'.join(sorted(bindings.values())).encode()).hexdigest()[:8]
    bars = stated_results(Path(loaded.conf_file).read_text())
    epsilon_greedy = bindings.get('TrainerConfig.epsilon_greedy', ' = 0').split(' = ', 1)[1]
    named = [value for name, value in bindings.items() if name.endswith(('.offline_buffer_dir', '.demonstrations'))]
    datasets = re.findall(r"'data/([^/']+/[^/']+)'", '\n'.join(named))
    updates = bindings.get('TrainerConfig.num_updates_per_train_iter', ' = 4').split(' = ', 1)[1]
    return Task(Path(loaded.conf_file).stem, str(Path(conf).resolve()) if os.path.isfile(conf) else conf, text, bars,
                fingerprint, float(epsilon_greedy), tuple(datasets), int(updates))


def train_and_evaluate(task: Task, seed: int, folder: Path, episodes: int, jobs: int,
                       compile: bool = False, device: str = 'cpu') -> dict[str, Any]:
    """Train one run, resuming it if it was interrupted, and evaluate it.

    Args:
        task: conf to run.
        seed: random seed of the run.
        folder: parent of the run folder.
        episodes: number of evaluation episodes.
        jobs: number of runs that share the cores; the torch threads are divided among them.
        compile: compile the updates, which learns the same in less time.
        device: device of the training; evaluation uses the CPU.

    Returns:
        The entry of the run in docs/results.json.

    Raises:
        RuntimeError: training or evaluation failed.
    """
    root_dir = folder / f'{task.name}-{task.fingerprint}' / f'seed-{seed}'
    root_dir.parent.mkdir(parents=True, exist_ok=True)
    threads = max(1, num_cores() // jobs)
    log = root_dir.parent / f'seed-{seed}.log'
    _run(['alfx.bin.train', '--conf', task.conf, '--root_dir', str(root_dir), '--conf_param',
          f'TrainerConfig.random_seed={seed}', *(['--conf_param', 'TrainerConfig.compile=True'] if compile else []),
          *(['--device', device] if device != 'cpu' else [])], log, threads)
    text = _run(['alfx.bin.evaluate', '--root_dir', str(root_dir), '--epsilon_greedy', str(task.epsilon_greedy),
                 '--num_episodes', str(episodes), '--json', '-'], log, threads)
    last = read_table(str(root_dir / 'progress.csv'))[-1]
    versions = json.loads((root_dir / 'conf' / 'versions.json').read_text())
    report = json.loads(text)
    measures = {name: [value] for name, value in report.get('measures', {}).items()}  # supervised learning
    supervised = {'returns': [], 'env_info': {}, 'measures': measures}
    evaluation = report.get(f'epsilon_greedy={task.epsilon_greedy:g}', supervised)
    further = {**evaluation['env_info'], **evaluation['measures']}
    if 'normalized_score' in evaluation:
        further['normalized_score'] = [evaluation['normalized_score']]
    for bar in task.bars:
        if bar.measure != _RETURN and bar.measure not in further:
            raise RuntimeError(f"the header comment of {task.name} states '{bar.measure}', but evaluation gives "
                               f"{sorted(further) or 'no other numbers'}")
    return {'returns': evaluation['returns'], 'env_info': further, 'epsilon_greedy': task.epsilon_greedy,
            'env_steps': int(float(last['env_steps'])) or _updates(task, last) or _epochs(root_dir),
            **({'updates': int(float(last['train/updates']))} if last.get('train/updates') else {}),
            'seconds': float(last['seconds']), 'jobs': jobs, 'cores': num_cores(),
            'compiled': compile, **({} if device == 'cpu' else {'device': torch.cuda.get_device_name(device)}),
            'curve': learning_curve(root_dir),
            'date': datetime.date.today().isoformat(), 'versions': versions}


def learning_curve(root_dir: Path) -> list[list[float]]:
    """Return the training curve of a run as ``[environment steps, return]`` at up to :data:`_CURVE_POINTS` points.

    The return is the mean of the latest episodes. The list is empty if no returns were logged.
    """
    if not curves.has_column(str(root_dir), 'average_return', evaluation=False):
        return []
    curve = curves.read_curve(str(root_dir), 'env_steps', 'average_return', evaluation=False)
    if curve is None:
        return []
    indices = np.unique(np.linspace(0, len(curve.x) - 1, _CURVE_POINTS).round().astype(int))
    return [[float(f'{x:.6g}'), float(f'{y:.4g}')] for x, y in zip(curve.x[indices], curve.y[indices])]


def _updates(task: Task, last: dict[str, Any]) -> int:
    """Return the number of updates of an offline run; 0 for other runs."""
    return (int(float(last['iteration'])) + 1) * task.updates_per_iteration if task.datasets else 0


def _epochs(root_dir: Path) -> int:
    """Return the number of epochs of a supervised run."""
    return int(float(read_table(str(root_dir / 'eval' / 'progress.csv'))[-1]['iteration']))


def has_measure(run: dict[str, Any], measure: str) -> bool:
    """Return whether a stored run contains the measure."""
    return measure == _RETURN or measure in run.get('env_info', {})


def mean_over_episodes(run: dict[str, Any], measure: str) -> float:
    """Return the mean of the measure over the episodes of a run; multi-dimensional returns are summed."""
    values = np.asarray(run['returns'] if measure == _RETURN else run['env_info'][measure])
    return float(values.reshape(len(values), -1).sum(1).mean())


def bars_of(entry: dict[str, Any]) -> list[Bar]:
    """Return the bars of a stored conf."""
    if 'bars' in entry:
        return [Bar(**bar) for bar in entry['bars']]
    return [Bar(entry.get('measure', _RETURN), entry['required'])]  # old format with a single result


def rows_of(name: str, entry: dict[str, Any]) -> list[list[str]]:
    """Return the table rows of a conf: one for each bar whose measure is stored."""
    rows = []
    for bar in bars_of(entry):
        runs = [run for run in entry['runs'].values() if has_measure(run, bar.measure)]
        if runs:
            rows.append(_row(name, entry['env_name'], runs, bar, entry.get('outdated', False)))
    return rows


def _row(name: str, env_name: str, runs: list[dict[str, Any]], bar: Bar, outdated: bool) -> list[str]:
    means = np.array([mean_over_episodes(run, bar.measure) for run in runs])
    half_width = float(confidence_interval(means))
    latest = max(runs, key=lambda run: run['date'])
    worst = means.max() if bar.at_most else means.min()
    epsilon = latest.get('epsilon_greedy', 0.0)
    measure = bar.measure + (f', epsilon {epsilon:g}' if epsilon else '')
    speeds = [run['updates'] / run['seconds'] for run in runs if 'updates' in run]
    hardware = f"{latest['cores']} cores" + (f" and a GPU ({latest['device']})" if 'device' in latest else '')
    return [f'`{name}`', env_name, f"{int(np.median([run['env_steps'] for run in runs])):,}", str(len(runs)),
            f"{format_minutes(float(np.median([run['seconds'] for run in runs])))}, {latest['jobs']} on {hardware}"
            f"{', compiled' if latest.get('compiled') else ''}", measure, f'{means.mean():,.5g}',
            '' if np.isnan(half_width) else f'{means.mean() - half_width:,.5g} to {means.mean() + half_width:,.5g}',
            f'{worst:,.5g}', str(bar), ', '.join(filter(None, (bar.verdict(means.mean()), 'older conf' * outdated))),
            latest['date'],
            ', '.join(f"{key} {latest['versions'][key]}" for key in _SHOWN_VERSIONS if latest['versions'].get(key)),
            f'{np.median(speeds):,.3g}' if speeds else '']


def format_minutes(seconds: float) -> str:
    """Format a duration as `45 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.0f} min' if seconds < 100 * 60 else f'{seconds / 3600:.1f} h'


def write_table(stored: dict[str, Any], path: Path, learning_curves: dict[str, Any] | None = None,
                changed: str | None = None) -> None:
    """Write docs/results.md, the pages in docs/results, and their figures.

    Args:
        stored: content of docs/results.json.
        path: path of the page. Figures of tasks are written to ``images/results`` in the same folder, figures of confs
            to ``images/curves``.
        learning_curves: content of docs/curves.json.
        changed: conf whose results changed; only its figures are drawn. None: all figures are drawn.
    """
    tasks: dict[str, list[str]] = {}
    for name, entry in sorted(stored.items()):
        tasks.setdefault(entry['env_name'].lstrip('@').rsplit('/', 1)[-1], []).append(name)
    head: list[Sequence[str]] = [_COLUMNS, ['---:' if column in _NUMBERS else '---' for column in _COLUMNS]]
    shown = [_COLUMNS.index(column) for column in _SHOWN]
    sections: dict[str, list[str]] = {}
    for task, names in sorted(tasks.items(), key=lambda item: item[0].lower()):
        rows = [row for name in names for row in rows_of(name, stored[name])]
        if rows:
            picture = _draw_task(task, names, learning_curves or {}, path.parent / 'images' / 'results',
                                 draw=changed is None or changed in names)
            table = [f"| {' | '.join(row[i] for i in shown)} |\n" for row in [*head, *rows]]
            sections.setdefault(family_of(task).file, []).append(f'## {task}\n\n' + ''.join(table) + picture)
    pages = path.with_suffix('')
    pages.mkdir(exist_ok=True)
    links = []
    for family in FAMILIES:
        if found := sections.get(family.file):
            (pages / family.file).write_text(f'# Results: {family.name}\n\n{_FAMILY_HEAD}' + '\n'.join(found))
            links.append(f'- [{family.name}]({pages.name}/{family.file})\n')
    tables = [suite_table(suite, stored, lambda run: mean_over_episodes(run, _RETURN)) for suite in SUITES]
    path.write_text(_HEAD + ''.join(links) + _SUITES_HEAD + '\n'.join(filter(None, tables)))
    for name, entry in (learning_curves or {}).items():
        if changed in (None, name) and (runs := as_curves(entry)):
            draw_curves(picture_of(name, path.parent), [(f"{name} ({entry['env_name']})", [('', runs)])])


def picture_of(conf: str, docs: Path = ROOT / 'docs') -> Path:
    """Return the path of the figure with the learning curves of a conf; the file may not exist."""
    return docs / 'images' / 'curves' / f'{conf}.svg'


def _draw_task(task: str, names: Sequence[str], learning_curves: dict[str, Any], folder: Path, draw: bool) -> str:
    """Draw the figure of a task, if ``draw`` is set, and return its Markdown line; '' if there are no curves."""
    lines = [(name, as_curves(learning_curves[name])) for name in names if name in learning_curves]
    lines = [(name, runs) for name, runs in lines if runs]
    if not lines:
        return ''
    picture = folder / f"{task.replace(' ', '-')}.svg"
    if draw:
        draw_curves(picture, [(task if len(lines) > 1 else f'{lines[0][0]} ({task})', lines)])
    return f'\n![Learning curves of {task}](../images/results/{picture.name})\n'


class Store:
    """Store for docs/results.json, docs/curves.json and the page generated from them; safe with several threads.

    Attributes:
        confs: content of docs/results.json.
        curves: content of docs/curves.json: ``fingerprint``, ``env_name`` and ``runs`` (the points of each seed) by
            conf.

    Args:
        path: path of results.json; the other files are in the same folder.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._curves_path = path.with_name('curves.json')
        self._read()

    def _read(self) -> None:
        self.confs, self.curves = (json.loads(file.read_text()) if file.exists() else {}
                                   for file in (self._path, self._curves_path))

    @contextlib.contextmanager
    def _latest(self) -> Iterator[None]:
        """Reload the files and lock them against other threads and processes."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                self._read()
                yield
            finally:
                os.close(folder)

    def is_done(self, task: Task, seed: int) -> bool:
        """Return whether the result of this seed is stored for the current conf."""
        entry = self.confs.get(task.name, {})
        if entry.get('fingerprint') != task.fingerprint or str(seed) not in entry['runs']:
            return False
        return all(has_measure(entry['runs'][str(seed)], bar.measure) for bar in task.bars)

    def restate(self, task: Task) -> None:
        """Update the bars of stored runs from the current header comment of their conf."""
        with self._latest():
            entry = self.confs.get(task.name, {})
            if entry.get('fingerprint') == task.fingerprint and bars_of(entry) != list(task.bars):
                self._put(task, entry['runs'])

    def update(self) -> None:
        """Mark results whose conf has other bindings now, update the bars of all others, and write all files."""
        with self._latest():  # other processes may have added results
            self.mark_outdated()
            self.write()

    def mark_outdated(self) -> None:
        """Mark results whose conf has other bindings now, and update the bars of all others."""
        for name, entry in self.confs.items():
            try:
                task = read_task(name)
            except gin_utils.ConfError:  # the conf was removed
                continue
            entry.pop('outdated', None)
            if task.fingerprint != entry['fingerprint']:
                entry['outdated'] = True
            else:
                entry['bars'] = [dataclasses.asdict(bar) for bar in task.bars]

    def add(self, task: Task, seed: int, result: dict[str, Any]) -> None:
        """Store a result and drop the results of older versions of the conf."""
        with self._latest():
            entry = self.confs.get(task.name, {})
            if entry.get('fingerprint') != task.fingerprint:
                entry = {'fingerprint': task.fingerprint, 'runs': {}}
            runs = {key: run for key, run in entry['runs'].items()
                    if all(has_measure(run, bar.measure) for bar in task.bars)}
            self._put_curve(task, seed, result.pop('curve', []))
            self._put(task, {**runs, str(seed): result})

    def _put_curve(self, task: Task, seed: int, points: list[list[float]]) -> None:
        entry = self.curves.get(task.name, {})
        runs = entry['runs'] if entry.get('fingerprint') == task.fingerprint else {}
        if points:
            self.curves[task.name] = {'fingerprint': task.fingerprint, 'env_name': task.env_name,
                                      'runs': {**runs, str(seed): points}}

    def _put(self, task: Task, runs: dict[str, Any]) -> None:
        self.confs[task.name] = {'fingerprint': task.fingerprint, 'env_name': task.env_name,
                                 'bars': [dataclasses.asdict(bar) for bar in task.bars],
                                 'runs': dict(sorted(runs.items(), key=lambda item: int(item[0])))}
        self.write(changed=task.name)

    def write(self, changed: str | None = None) -> None:
        """Write the JSON files and the page; with ``changed``, draw the figures of this conf only."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stored_files.write(str(self._path), json.dumps(dict(sorted(self.confs.items())), indent=1) + '\n')
        if self.curves:
            lines = [f' {json.dumps(name)}: {json.dumps(entry)}' for name, entry in sorted(self.curves.items())]
            stored_files.write(str(self._curves_path), '{\n' + ',\n'.join(lines) + '\n}\n')
        write_table(self.confs, self._path.with_suffix('.md'), self.curves, changed)


def run_all(tasks: list[Task], seeds: int, store: Store, folder: Path, episodes: int, jobs: int,
            compile: bool = False, device: str = 'cpu') -> int:
    """Run all tasks and seeds without a stored result; return the number of failed runs."""
    todo = [(task, seed) for task in tasks for seed in range(seeds) if not store.is_done(task, seed)]
    print(f'{len(todo)} runs to do, {len(tasks) * seeds - len(todo)} already stored; logs in {folder}', flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(train_and_evaluate, task, seed, folder, episodes, jobs, compile,
                           device): (task, seed)
                   for task, seed in todo}
        for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
            task, seed = futures[future]
            if (error := future.exception()) is not None:  # the other runs continue
                failed += 1
                print(f'[{i}/{len(todo)}] {task.name} seed {seed} failed: {type(error).__name__}: {error}', flush=True)
                continue
            result = future.result()
            store.add(task, seed, result)
            means = ', '.join(f'{bar.measure} {mean_over_episodes(result, bar.measure):.5g}' for bar in task.bars)
            print(f"[{i}/{len(todo)}] {task.name} seed {seed}: {means}, {format_minutes(result['seconds'])}",
                  flush=True)
    return failed


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--conf', nargs='+', default=[], help='names or paths of confs')
    parser.add_argument('--seeds', type=int, default=5, help='run seeds 0 to N - 1')
    parser.add_argument('--jobs', type=int, default=1, help='number of parallel runs')
    parser.add_argument('--episodes', type=int, default=20, help='episodes per evaluation')
    parser.add_argument('--folder', type=Path, default=ROOT / 'runs' / 'results', help='parent of the run folders')
    parser.add_argument('--json', type=Path, default=ROOT / 'docs' / 'results.json', help='file with the results')
    parser.add_argument('--compile', action='store_true', help='compile the updates')
    parser.add_argument('--device', default='cpu', help='device of the training, as for alfx.bin.train')
    parser.add_argument('--table', action='store_true', help='only rewrite the page')
    args = parser.parse_args()
    store = Store(args.json)
    if args.table:
        store.update()
        return 0
    if not args.conf:
        parser.error('no conf given; name one or more: --conf ppo_cart_pole')
    try:
        tasks = [read_task(conf) for conf in args.conf]
    except gin_utils.ConfError as error:
        print(f'ConfError: {error}', file=sys.stderr)
        return 2
    for task in tasks:
        store.restate(task)
    try:
        make_datasets.make([name for task in tasks for name in task.datasets], make_datasets.FOLDER)
    except RuntimeError as error:
        print(f'RuntimeError: {error}', file=sys.stderr)
        return 1
    return int(run_all(tasks, args.seeds, store, args.folder.resolve(), args.episodes, args.jobs,
                       args.compile, args.device) > 0)


if __name__ == '__main__':
    sys.exit(main())
