"""Parts of the results: a summary table for each suite, and a page for each family of tasks."""
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfx.reports.aggregates import bootstrap_interval, interquartile_mean


class Suite(NamedTuple):
    """Tasks that are compared in one table.

    Attributes:
        name: heading.
        tasks: environment name by the suffix of its confs: ``{'half_cheetah': 'HalfCheetah-v5'}``.
        note: sentence below the heading.
    """
    name: str
    tasks: Mapping[str, str]
    note: str = ''


SUITES = (
    Suite('MuJoCo', {'half_cheetah': 'HalfCheetah-v5', 'hopper': 'Hopper-v5', 'walker2d': 'Walker2d-v5',
                     'ant': 'Ant-v5', 'humanoid': 'Humanoid-v5'},
          'Offline algorithms state the number of updates instead of environment steps.'),
    Suite('MinAtar', {f'minatar_{game}': f'MinAtar {game}'
                      for game in ('asterix', 'breakout', 'freeway', 'seaquest', 'space_invaders')},
          'Actions are sticky with a probability of 0.1, as in the original MinAtar.'),
    Suite('Exploration', {'corridor': 'Corridor', 'noisy_corridor': 'NoisyCorridor',
                          'minigrid_doorkey_8x8': 'MiniGrid-DoorKey-8x8-v0',
                          'minigrid_doorkey_16x16': 'MiniGrid-DoorKey-16x16-v0',
                          'minigrid_key_corridor': 'MiniGrid-KeyCorridorS3R2-v0',
                          'minigrid_key_corridor_s3r3': 'MiniGrid-KeyCorridorS3R3-v0',
                          'minigrid_multi_room': 'MiniGrid-MultiRoom-N6-v0'},
          'Random actions practically never find the end of the corridors. `ppo` has no bonus.'),
)


class Family(NamedTuple):
    """Tasks whose results share a page.

    Attributes:
        name: heading.
        file: name of the page in docs/results.
        tasks: regular expression for the beginning of the names of its environments.
    """
    name: str
    file: str
    tasks: str


FAMILIES = (
    Family('MuJoCo and robotics', 'mujoco.md',
           'Ant|Fetch|HalfCheetah|Hopper|Humanoid|Inverted|PointMaze|Reacher|Swimmer|Walker2d'),
    Family('Classic control, Box2D and tabular tasks', 'classic_control.md',
           'Acrobot|CartPole|Cliff|FrozenLake|LunarLander|MountainCar|Pendulum|Taxi'),
    Family('Games from images', 'images.md', r'ALE|MinAtar|\w+NoFrameskip'),
    Family('Exploration and memory', 'exploration.md', 'BitFlip|Corridor|MiniGrid|NoisyCorridor|TMaze'),
    Family('Other tasks', 'other.md', ''),
)


def family_of(task: str) -> Family:
    """Return the family of a task, given the name of its environment."""
    return next(family for family in FAMILIES if re.match(family.tasks, task))


def suite_table(suite: Suite, stored: Mapping[str, Any], mean_of: Callable[[Any], float]) -> str:
    """Return the Markdown section of a suite; '' if no result of it is stored.

    A cell has the interquartile mean over the seeds with its 95% bootstrap interval (Agarwal et al. 2021,
    arXiv:2108.13264), the number of seeds, and the steps. With fewer than four seeds the interquartile
    mean is the mean.

    Args:
        suite: the suite.
        stored: content of docs/results.json.
        mean_of: returns the mean return of a stored run.
    """
    rows: dict[str, dict[str, str]] = {}
    for suffix, env_name in suite.tasks.items():
        for conf, entry in stored.items():
            if entry['env_name'] == env_name and conf.endswith(f'_{suffix}') and entry['runs']:
                runs = list(entry['runs'].values())
                rows.setdefault(conf.removesuffix(f'_{suffix}'), {})[suffix] = _cell([mean_of(run) for run in runs],
                                                                                     [run['env_steps'] for run in runs])
    if not rows:
        return ''
    shown = [suffix for suffix in suite.tasks if any(suffix in row for row in rows.values())]
    head = ['algorithm', *(re.sub(r'^(MinAtar |MiniGrid-)|-v\d+$', '', suite.tasks[suffix]) for suffix in shown)]
    table = [head, ['---', *['---:'] * len(shown)]]
    table += [[f'`{name}`', *(row.get(suffix, '') for suffix in shown)] for name, row in sorted(rows.items())]
    lines = ''.join(f"| {' | '.join(row)} |\n" for row in table)
    return f'## {suite.name}: all algorithms\n\n{suite.note}\n\n{lines}'


def _cell(means: Sequence[float], steps: Sequence[int]) -> str:
    values = np.asarray(means)
    low, high = bootstrap_interval(lambda runs: float(interquartile_mean(runs[0])), [values])
    spread = f' [{_number(low)}, {_number(high)}]' if len(values) > 1 else ''
    return f'{_number(float(interquartile_mean(values)))}{spread}<br>{len(values)} x {_short(float(np.median(steps)))}'


def _number(x: float) -> str:
    """Format a return with four significant digits, without an exponent."""
    return f'{x:,.0f}' if abs(x) >= 1000 else f'{x:.4g}'


def _short(steps: float) -> str:
    """Format a number of steps as 5k, 500k, 1M or 1.5M."""
    return f'{steps / 1e6:.3g}M' if steps >= 995_000 else f'{steps / 1e3:.0f}k'


def replace_table(page: Path, markers: tuple[str, str], table: str) -> None:
    """Replace the table between two markers on a page.

    Args:
        page: Markdown file that contains both markers.
        markers: comments before and after the table.
        table: new table, which ends with a line break.
    """
    begin, end = markers
    head, rest = page.read_text().split(begin)
    page.write_text(f'{head}{begin}\n\n{table}\n{end}{rest.split(end)[1]}')
