"""Train each exploration bonus with several policy algorithms and tasks, and write the table of their returns.

    python tools/bonus_table.py                                       # run everything that has no result yet
    python tools/bonus_table.py --bonus rnd icm --column DQN 'PPO, DoorKey-8x8' --seeds 2
    python tools/bonus_table.py --table                               # only rewrite the table

Each run has a separate conf: the base conf of the algorithm, its settings for the task, the conf of the bonus and its
coefficient. The settings of a column are the same with all bonuses; only the coefficient belongs to the bonus.
The greedy policy is evaluated at the end. Results are stored in docs/exploration_bonuses.json as soon as they exist, so
the command can be interrupted and repeated. Results whose settings have changed are dropped. The table is in
docs/choose_an_exploration_bonus.md.
"""
import argparse
import datetime
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from suites import replace_table

import alfx
from alfx.gin_utils import ConfError

ROOT = Path(__file__).resolve().parent.parent
MARKERS = '<!-- table: tools/bonus_table.py -->', '<!-- end of the table -->'
NUM_EPISODES = 20

_CORRIDOR = """
create_environment.env_name = 'Corridor'
create_environment.env_load_fn = @suite_exploration.load
create_environment.num_parallel_environments = 32
create_environment.nonparallel = True
QNetwork.fc_layer_params = ()                # the cell is one-hot, so this is a table
TDLoss.gamma = 0.95                          # lower values make the actions of a cell differ more
TrainerConfig.initial_collect_steps = 1000
TrainerConfig.unroll_length = 8
TrainerConfig.num_updates_per_train_iter = 16
TrainerConfig.mini_batch_length = 6          # five-step returns
TrainerConfig.mini_batch_size = 128
TrainerConfig.replay_buffer_length = 640     # per environment: the bonuses of older steps are outdated
"""


class Column(NamedTuple):
    """Column of the table.

    Attributes:
        algorithm: name of the policy algorithm.
        conf: its settings, as gin text.
        task: words for the comment of the conf.
        num_steps: environment steps of a run.
        scale: factor for the coefficients of all bonuses.
    """

    algorithm: str
    conf: str
    task: str = 'in a corridor'
    num_steps: int = 100_000
    scale: float = 1.0


COLUMNS = {
    'PPO': Column('PPO', """include 'ppo_corridor.gin'

TrainerConfig.unroll_length = 32
"""),
    'DQN': Column('DQN', f"""include 'dqn_n_step.gin'
{_CORRIDOR}
DqnAlgorithm.target_update_tau = 0.02
DqnAlgorithm.target_update_period = 1
exploration/LinearScheduler.schedule = [(0.0, 0.05), (1.0, 0.05)]
learning_rate/LinearScheduler.schedule = [(0.0, 1e-2), (1.0, 1e-3)]
"""),
    'discrete SAC': Column('discrete SAC', f"""include 'sac_cart_pole.gin'
{_CORRIDOR}
RewardScaling.scale = 1.0
SacAlgorithm.initial_log_alpha = -4.0
SacAlgorithm.target_entropy = 0.3
SacAlgorithm.use_entropy_reward = False      # it would outweigh bonuses that fade away
SacAlgorithm.target_update_tau = 0.02
SacAlgorithm.target_update_period = 1
LinearScheduler.schedule = [(0.0, 1e-2), (1.0, 1e-3)]
"""),
    'PPO, NoisyCorridor': Column('PPO', """include 'ppo_corridor.gin'

create_environment.env_name = 'NoisyCorridor'
""", 'in a noisy corridor', 300_000),
    'PPO, DoorKey-8x8': Column('PPO', """include 'ppo_minigrid_doorkey_8x8.gin'

TrainerConfig.unroll_length = 64
TrainerConfig.epsilon_greedy = 0.1           # a greedy policy can turn back and forth forever
""", 'on DoorKey', 125_000, 0.1),
}


class Bonus(NamedTuple):
    """Bonus to run.

    Attributes:
        include: conf of the bonus; '' for none.
        coef: weight of the bonus.
        bindings: lines of the conf that the task needs.
    """

    include: str
    coef: float = 0.1
    bindings: str = ''


_CELLS = 'EpisodicCount.resolution = 0.5               # the cell, one-hot, consists of floats\n'
BONUSES = {
    'none': Bonus(''),
    'count_bonus': Bonus('count_bonus.gin', 1.0),
    'episodic_count': Bonus('episodic_count.gin', bindings=_CELLS),
    'pseudo_count': Bonus('pseudo_count.gin'),
    'rnd': Bonus('rnd.gin'),
    'noveld': Bonus('noveld.gin', bindings=_CELLS),
    'icm': Bonus('icm.gin'),
    'ride': Bonus('ride.gin', 0.01, _CELLS),
    'ngu': Bonus('ngu.gin'),
    'e3b': Bonus('e3b.gin'),
    're3': Bonus('re3.gin'),
    'disagreement': Bonus('disagreement.gin'),
    'deir': Bonus('deir.gin'),
    'apt': Bonus('apt.gin'),
}


def conf_text(bonus: str, column: str, num_steps: int) -> str:
    """Return the conf of a cell of the table.

    Args:
        bonus: key of BONUSES.
        column: key of COLUMNS.
        num_steps: number of environment steps.
    """
    include, coef, bindings = BONUSES[bonus]
    algorithm, text, task, _, scale = COLUMNS[column]
    if include:
        text += (f"include '{include}'\n\nAgent.extrinsic_reward_coef = 10.0           # once the end is found, its "
                 f'reward outweighs the bonus\nAgent.intrinsic_reward_coef = {round(coef * scale, 6)}\n{bindings}')
    return f'# {algorithm} with {bonus} {task}\n{text}TrainerConfig.num_env_steps = {num_steps}\n'


def run(bonus: str, column: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Train and evaluate one run in a temporary folder.

    Args:
        bonus: key of BONUSES.
        column: key of COLUMNS.
        seed: random seed of the run.
        num_steps: number of environment steps.

    Returns:
        The row of docs/exploration_bonuses.json: the mean ``return`` of greedy episodes, or the ``reason`` why the
        algorithm does not accept the bonus, with the wall time ``seconds``.
    """
    started = time.monotonic()
    text = conf_text(bonus, column, num_steps)
    row = {'bonus': bonus, 'column': column, 'seed': seed, 'steps': num_steps, 'conf': fingerprint(text)}
    with tempfile.TemporaryDirectory(prefix='bonus_table_') as folder:
        conf = Path(folder, 'cell.gin')
        conf.write_text(text)
        try:
            alfx.train(conf, {'TrainerConfig.random_seed': seed}, f'{folder}/run')
            result: Any = alfx.evaluate(f'{folder}/run', NUM_EPISODES)
            row['return'] = float(np.mean(result.returns))
        except ConfError as error:
            row['reason'] = str(error).splitlines()[0]
    return {**row, 'seconds': round(time.monotonic() - started, 1), 'version': alfx.__version__,
            'date': datetime.date.today().isoformat()}


def fingerprint(text: str) -> str:
    """Return a hash of the text of a conf, to detect changed settings."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def is_current(row: Mapping[str, Any]) -> bool:
    """Return whether the settings of a stored run are still those of this file."""
    bonus, column, _ = key_of(row)
    known = bonus in BONUSES and column in COLUMNS
    return known and row['conf'] == fingerprint(conf_text(bonus, column, row['steps']))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the stored results as a Markdown table: the mean return over seeds, and the return of each if they differ.

    Args:
        rows: content of docs/exploration_bonuses.json.
    """
    lines = [f"| bonus | {' | '.join(COLUMNS)} |", '| --- |' + ' ---: |' * len(COLUMNS)]
    for bonus in BONUSES:
        cells = [[row for row in rows if key_of(row)[:2] == (bonus, column)] for column in COLUMNS]
        if any(cells):
            label = bonus if bonus == 'none' else f'`{BONUSES[bonus].include}`'
            lines.append(f"| {label} | {' | '.join(map(_cell, cells))} |")
    return '\n'.join(lines) + '\n'


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ''
    if 'reason' in rows[0]:
        return 'not accepted'
    returns = [row['return'] for row in sorted(rows, key=lambda row: row['seed'])]
    each = f" ({', '.join(f'{value:.2g}' for value in returns)})" if len(set(returns)) > 1 else ''
    return f'{np.mean(returns):.2f}{each}, {len(returns)} seed{"s" * (len(returns) > 1)}'


def write(rows: list[dict[str, Any]], numbers: Path, page: Path) -> None:
    """Write the JSON file, and replace the table on the page."""
    numbers.write_text('[\n' + ',\n'.join(json.dumps(row) for row in rows) + '\n]\n')
    replace_table(page, MARKERS, table(rows))


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return what identifies a run: bonus, column and seed."""
    return row['bonus'], row['column'], row['seed']


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--bonus', nargs='+', choices=BONUSES, default=list(BONUSES), help='bonuses')
    parser.add_argument('--column', nargs='+', choices=COLUMNS, default=list(COLUMNS), help='algorithms and tasks')
    parser.add_argument('--seeds', type=int, default=1, help='run seeds 0 to N - 1')
    parser.add_argument('--num_steps', type=int, help='environment steps of a run; default: those of the column')
    parser.add_argument('--json', type=Path, default=ROOT / 'docs' / 'exploration_bonuses.json',
                        help='file with the results')
    parser.add_argument('--page', type=Path, default=ROOT / 'docs' / 'choose_an_exploration_bonus.md',
                        help='page with the table')
    parser.add_argument('--table', action='store_true', help='only rewrite the table')
    args = parser.parse_args(argv)
    rows = [row for row in json.loads(args.json.read_text()) if is_current(row)] if args.json.exists() else []
    cells = [(bonus, column, seed) for seed in range(args.seeds) for column in args.column for bonus in args.bonus]
    for cell in () if args.table else cells:
        bonus, column, seed = cell
        num_steps = args.num_steps or COLUMNS[column].num_steps
        if any(key_of(row) == cell and row['steps'] == num_steps for row in rows):
            continue
        row = run(bonus, column, seed, num_steps)
        rows = sorted([*(old for old in rows if key_of(old) != cell), row], key=key_of)
        print(f"{bonus}, {column}, seed {seed}: {row.get('return', row.get('reason'))} ({row['seconds']:.0f} s)",
              flush=True)
        write(rows, args.json, args.page)
    write(rows, args.json, args.page)
    return 0


if __name__ == '__main__':
    sys.exit(main())
