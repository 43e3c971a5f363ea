"""Kill runs at random moments, and verify that the resumed runs end like an uninterrupted one.

    python tools/kill_runs.py sac_pendulum ppo_cart_pole --kills 3
    python tools/kill_runs.py ppo_cart_pole --num_processes 2 --repeat 5 --conf_param TrainerConfig.num_env_steps=20000
    python tools/kill_runs.py my.gin --folder /tmp/kills           # keep the run folders; not inside a run folder

Each conf is trained once without interruption, and `--repeat` times with `--kills` kills (SIGKILL to all processes of
the run). A kill follows up to `--spread` new checkpoints since the last start, after a random part of the time between
two checkpoints. Afterwards all common checkpoints and the rows of `progress.csv` are compared, except for times. The
report names the first checkpoint that differs and its tensors, the number of differences in the last checkpoint, the
rows that differ, and the related log lines of the killed run. (Only the latest two contain the replay buffer.)
The exit code is 1 if anything differs.

Seed, threads and precision are fixed, since each run would otherwise choose them itself.
"""
import argparse
import contextlib
import logging
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alfx.runs import run_files
from alfx.utils.checkpoint_utils import read_checkpoint

_NUM_CHECKPOINTS = 40
_TIMES = ('seconds', 'saved_at')  # fields of the run state that are not compared
_TIME_COLUMNS = ('seconds', 'steps_per_second')  # columns of progress.csv that are not compared
_POLL_SECONDS = 0.005
_FIRST_WAIT_SECONDS = 0.1
_INEXACT_RESUMING = ('not exactly', 'uninterrupted run', 'rounds differently', 'new episodes')  # in the log of a run


class Outcome(NamedTuple):
    """Comparison of a killed run with the uninterrupted one.

    Attributes:
        kills: latest checkpoint at each kill; 0 for none.
        compared: number of common checkpoints.
        first: first checkpoint that differs; None if none does.
        differences: differences of that checkpoint.
        num_last: number of differences of the last checkpoint.
        rows: differences of ``progress.csv``.
        notes: log lines of the killed run about inexact resuming.
    """
    kills: list[int]
    compared: int
    first: int | None = None
    differences: tuple['Difference', ...] = ()
    num_last: int = 0
    rows: tuple['Difference', ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Return whether a checkpoint or a row of ``progress.csv`` differs."""
        return self.first is not None or bool(self.rows)


class Difference(NamedTuple):
    """One difference between two nests.

    Attributes:
        name: path of the leaf, or of the part that only one nest has.
        text: description of the difference.
        size: largest difference of two numbers, relative to the largest number if that exceeds 1; infinite if the
            leaves cannot be compared.
    """
    name: str
    text: str
    size: float = math.inf

    def __str__(self) -> str:
        return f'{self.name}: {self.text}'


def command(conf: str, root_dir: Path, params: Sequence[str] = (), num_processes: int = 1) -> list[str]:
    """Return the command that trains or resumes a run."""
    params = (f'TrainerConfig.num_checkpoints={_NUM_CHECKPOINTS}', 'TrainerConfig.random_seed=7',
              'TrainerConfig.num_threads=1', "TrainerConfig.float32_matmul_precision='highest'", *params)
    return [sys.executable, '-m', 'alfx.bin.train', '--conf', conf, '--root_dir', str(root_dir),
            *(part for param in params for part in ('--conf_param', param)),
            *((f'--num_processes={num_processes}', ) if num_processes > 1 else ())]


def checkpoints(root_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, oldest first."""
    paths = [p for p in (root_dir / 'train' / 'algorithm').glob('ckpt-*') if p.name.split('-')[1].isdecimal()]
    return dict(sorted((int(path.name.split('-')[1]), path) for path in paths))


def differences(expected: Any, found: Any, name: str = '') -> Iterator[Difference]:
    """Yield all bitwise differences between two nests of dicts, sequences, tensors and plain values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in dict.fromkeys((*expected, *found)):
            inner = f'{name}.{key}' if name else str(key)
            if key in expected and key in found:
                yield from differences(expected[key], found[key], inner)
            else:
                yield Difference(inner, f'only in the {"uninterrupted" if key in expected else "killed"} run')
    elif isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            yield Difference(name, f'{expected.dtype} {tuple(expected.shape)}, {found.dtype} {tuple(found.shape)}')
        elif not torch.equal(_bits(expected), _bits(found)):
            x, y = expected.double(), found.double()
            size = (x - y).abs().max().item()
            yield Difference(name, f'{int((x != y).sum())} of {x.numel()} differ, by up to {size:.3g}',
                             size / max(1.0, x.abs().max().item()))
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found):
        for i, (x, y) in enumerate(zip(expected, found)):
            yield from differences(x, y, f'{name}.{i}')
    elif isinstance(expected, float) and isinstance(found, float) and expected == expected and found == found:
        if expected != found:
            yield Difference(name, f'{expected!r}, {found!r}', abs(expected - found) / max(1.0, abs(expected)))
    elif type(expected) is not type(found) or repr(expected) != repr(found):  # NaN equals NaN
        yield Difference(name, f'{_short(expected)}, {_short(found)}')


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)  # works for single elements too


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:57]}...'


def contents(path: Path) -> dict[str, Any]:
    """Read a checkpoint without its times of day."""
    state = read_checkpoint(str(path))
    state['trainer'] = {key: value for key, value in state['trainer'].items() if key.split('.')[-1] not in _TIMES}
    return state


def table(root_dir: Path) -> dict[str, Any]:
    """Return the rows of ``progress.csv`` by number, without columns of times; empty if there is no such file."""
    path = root_dir / 'progress.csv'
    rows = run_files.read_table(str(path)) if path.exists() else []
    return {f'progress.csv row {i}': {name: x for name, x in row.items() if name not in _TIME_COLUMNS}
            for i, row in enumerate(rows, 1)}


def compare(uninterrupted: Path, killed: Path, kills: list[int]) -> Outcome:
    """Compare the checkpoints and the ``progress.csv`` of two runs."""
    rows = tuple(differences(table(uninterrupted), table(killed)))
    return _compare_checkpoints(uninterrupted, killed, kills)._replace(rows=rows)


def _compare_checkpoints(uninterrupted: Path, killed: Path, kills: list[int]) -> Outcome:
    expected, actual = checkpoints(uninterrupted), checkpoints(killed)
    common = [step for step in expected if step in actual]
    last = max(expected)
    if last != max(actual):
        return Outcome(kills, len(common), last, (Difference('the last checkpoint', f'{last}, {max(actual)}'), ), 1)
    for step in common:
        found = tuple(differences(contents(expected[step]), contents(actual[step])))
        if found:
            num_last = sum(1 for _ in differences(contents(expected[last]), contents(actual[last])))
            return Outcome(kills, len(common), step, found, num_last)
    return Outcome(kills, len(common))


def _seconds_between_checkpoints(root_dir: Path) -> float:
    times = [path.stat().st_mtime for path in checkpoints(root_dir).values()]
    return statistics.median(y - x for x, y in zip(times, times[1:])) if len(times) > 1 else _FIRST_WAIT_SECONDS


@contextlib.contextmanager
def started(arguments: list[str], log: Path, popen: Callable[..., Any]) -> Iterator[subprocess.Popen]:
    """Start a process in a new process group, which is killed on exit."""
    with open(log, 'ab') as file:
        process = popen(arguments, stdout=file, stderr=file, start_new_session=True)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(process: subprocess.Popen, log: Path) -> None:
    """Wait for the end of a run.

    Raises:
        RuntimeError: the run failed; the message contains the end of its log.
    """
    if process.wait():
        raise RuntimeError(f'{process.args}: exit code {process.returncode}\n{log.read_text()[-2000:]}')


def resuming_notes(log: Path) -> tuple[str, ...]:
    """Return the log lines about inexact resuming, without duplicates."""
    lines = log.read_text(errors='replace').splitlines()
    return tuple(dict.fromkeys(line for line in lines if any(phrase in line for phrase in _INEXACT_RESUMING)))


def train_with_kills(arguments: list[str], root_dir: Path, log: Path, num_kills: int,
                     longest_wait: Callable[[], float], generator: random.Random,
                     spread: int = 1,
                     popen: Callable[..., Any] = subprocess.Popen) -> list[int]:
    """Train a run, kill it several times, and let it finish.

    Args:
        arguments: training command.
        root_dir: run folder.
        log: file for the output.
        num_kills: number of kills.
        longest_wait: function that returns the maximum seconds between a new checkpoint and a kill.
        generator: random generator of the kill times.
        spread: maximum number of new checkpoints before a kill.
        popen: function that starts a process, like ``subprocess.Popen``.

    Returns:
        The latest checkpoint at each kill; fewer than ``num_kills`` if the run ended earlier.

    Raises:
        RuntimeError: training fails.
    """
    kills: list[int] = []
    for _ in range(num_kills):
        existing = set(checkpoints(root_dir))
        num_new = generator.randint(1, spread)
        with started(arguments, log, popen) as process:
            while process.poll() is None and len(checkpoints(root_dir).keys() - existing) < num_new:
                time.sleep(_POLL_SECONDS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(generator.random() * longest_wait())
            if process.poll() is not None:
                break
        kills.append(max(checkpoints(root_dir), default=0))
    with started(arguments, log, popen) as process:
        wait_for(process, log)
    return kills


def kill_runs(conf: str, folder: Path, num_kills: int, params: Sequence[str] = (), num_processes: int = 1,
              repeat: int = 1, seed: int = 0, spread: int = 1,
              popen: Callable[..., Any] = subprocess.Popen) -> Iterator[Outcome]:
    """Train a conf without interruption, and ``repeat`` times with kills.

    Args:
        conf: path of a conf, or name of a shipped conf.
        folder: folder for run folders and logs.
        num_kills: number of kills per run.
        params: bindings that override the conf.
        num_processes: number of training processes.
        repeat: number of killed runs.
        seed: random seed of the kill times.
        spread: maximum number of new checkpoints before a kill.
        popen: function that starts a process, like ``subprocess.Popen``.

    Raises:
        RuntimeError: training fails, or the run ends before the last kill.
    """
    folder.mkdir(parents=True, exist_ok=True)
    uninterrupted, log = folder / 'whole', folder / 'whole.log'
    shutil.rmtree(uninterrupted, ignore_errors=True)
    with started(command(conf, uninterrupted, params, num_processes), log, popen) as process:
        for i in range(repeat):
            killed = folder / f'killed-{i}'
            shutil.rmtree(killed, ignore_errors=True)
            killed_log = folder / f'killed-{i}.log'
            killed_log.unlink(missing_ok=True)
            kills = train_with_kills(command(conf, killed, params, num_processes), killed, killed_log, num_kills,
                                     lambda: _seconds_between_checkpoints(uninterrupted),
                                     random.Random(f'{seed} {i}'), spread, popen)
            if len(kills) < num_kills:
                raise RuntimeError(f'{conf}: the run ended after {len(kills)} of {num_kills} kills; make it '
                                   'longer, or use fewer kills')
            wait_for(process, log)
            yield compare(uninterrupted, killed, kills)._replace(notes=resuming_notes(killed_log))


def report(conf: str, outcome: Outcome, most: int = 20) -> str:
    """Format an outcome as text."""
    text = f'{conf}: killed at {", ".join(map(str, outcome.kills))}; '
    if not outcome.differs:
        return f'{text}{outcome.compared} checkpoints and progress.csv are identical'
    found = [*outcome.differences, *outcome.rows]
    lines = [*map(str, found[:most])]
    if len(found) > most:
        lines.append(f'... and {len(found) - most} more')
    if outcome.first is None:
        text += f'{outcome.compared} checkpoints are identical, but progress.csv differs'
    else:
        text += (f'ckpt-{outcome.first} is the first of {outcome.compared} that differs; the last one has '
                 f'{outcome.num_last} differences')
    lines += [f'log: {line}' for line in outcome.notes] or ['the log does not mention it']
    return '\n  '.join([text, *lines])


def main() -> int:
    """Kill the runs, and print the reports; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('confs', nargs='+')
    parser.add_argument('--kills', type=int, default=3, help='kills per run')
    parser.add_argument('--repeat', type=int, default=1, help='killed runs per conf')
    parser.add_argument('--spread', type=int, default=1, help='maximum number of new checkpoints before a kill')
    parser.add_argument('--seed', type=int, default=0, help='random seed of the kill times')
    parser.add_argument('--num_processes', type=int, default=1)
    parser.add_argument('--conf_param', action='append', default=[], help='overrides a binding; may be repeated')
    parser.add_argument('--folder', type=Path, help='keep the run folders here; default: a temporary folder')
    args = parser.parse_args()
    logging.getLogger('alfx').setLevel(logging.ERROR)  # hide warnings about older checkpoints without a replay buffer
    differs = False
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='alfx_kills_')))
        for conf in args.confs:
            for outcome in kill_runs(conf, folder / Path(conf).stem, args.kills, args.conf_param, args.num_processes,
                                     args.repeat, args.seed, args.spread):
                print(report(conf, outcome), flush=True)
                differs |= outcome.differs
    return int(differs)


if __name__ == '__main__':
    sys.exit(main())
