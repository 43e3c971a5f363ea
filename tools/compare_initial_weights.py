"""Compares schemes of initial weights over algorithm families, tasks and seeds.

    python tools/compare_initial_weights.py                        # run everything that has no result yet
    python tools/compare_initial_weights.py --only sac ppo         # of these families
    python tools/compare_initial_weights.py --seeds 3 --core 1     # three seeds each, on processor 1
    python tools/compare_initial_weights.py --table                # only print the table of the stored results

Each run trains a shipped conf for a reduced budget with ``initial_weights`` bound to one scheme; nothing else changes,
and a seed is used with every scheme. Results are stored in docs/initial_weights.json as soon as they exist, so the
command can be interrupted and repeated.
"""
import argparse
import csv
import datetime
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import alfx

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'docs/initial_weights.json'

SCHEMES = {
    'variance_scaling': {},
    'torch': {'initial_weights.weights': 'torch', 'initial_weights.biases': 'torch'},
    'torch, same last layers': {'initial_weights.weights': 'torch', 'initial_weights.biases': 'torch',
                                'initial_weights.last_layers': 'same'},
    'orthogonal': {'initial_weights.weights': 'orthogonal'},
    'torch, zero biases': {'initial_weights.weights': 'torch'},
    'variance_scaling, same last layers': {'initial_weights.last_layers': 'same'},
}
# The policy's output layer keeps the gain of its class (0.3) with variance scaling and has the gain 1 with torch's.
_UNIT_GAIN = {'NormalProjectionNetwork.projection_output_init_gain': 1.0}
_ONE_ENV = {'create_environment.num_parallel_environments': 1, 'create_environment.nonparallel': True}


def _steps(count: int, **bindings: Any) -> dict[str, Any]:
    return {'TrainerConfig.num_env_steps': count, **bindings}


# family: {task: (conf, bindings)}
TASKS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    'sac': {'HalfCheetah-v5': ('sac_half_cheetah', _steps(60000)), 'Hopper-v5': ('sac_hopper', _steps(60000))},
    'dqn': {'LunarLander-v3': ('dqn_cart_pole', {
        **_steps(40000), 'create_environment.env_name': 'LunarLander-v3', 'QNetwork.fc_layer_params': (128, 128),
        'RewardScaling.scale': 0.05}),
            'Acrobot-v1': ('dqn_acrobot', _steps(40000))},
    'ppo': {'HalfCheetah-v5': ('ppo_half_cheetah', _steps(150000)),
            'LunarLander-v3': ('ppo_lunar_lander', _steps(200000))},
    'td3': {'HalfCheetah-v5': ('td3_half_cheetah', _steps(60000)),
            'Hopper-v5': ('td3_half_cheetah', {**_steps(60000), 'create_environment.env_name': 'Hopper-v5'})},
    'a2c': {'CartPole-v1': ('ac_cart_pole', _steps(150000)),
            'Acrobot-v1': ('ac_cart_pole', {**_steps(150000), 'create_environment.env_name': 'Acrobot-v1'})},
    'mpo': {'Pendulum-v1': ('mpo_pendulum', _steps(20000)), 'CartPole-v1': ('mpo_cart_pole', _steps(20000))},
    'qrsac': {'HalfCheetah-v5': ('qrsac_pendulum', {
        **_steps(60000), 'create_environment.env_name': 'HalfCheetah-v5', 'sac/Adam.lr': 3e-4,
        'ActorDistributionNetwork.fc_layer_params': (256, 256), 'CriticNetwork.joint_fc_layer_params': (256, 256),
        'TrainerConfig.mini_batch_size': 256, 'TrainerConfig.initial_collect_steps': 10000,
        'TrainerConfig.replay_buffer_length': 100000}),
              'Pendulum-v1': ('qrsac_pendulum', _steps(8000))},
    'ddpg': {'HalfCheetah-v5': ('ddpg_pendulum', {
        **_steps(60000), 'create_environment.env_name': 'HalfCheetah-v5', 'actor/Adam.lr': 3e-4,
        'critic/Adam.lr': 3e-4, 'ActorNetwork.fc_layer_params': (256, 256), 'OneStepTDLoss.gamma': 0.99,
        'CriticNetwork.joint_fc_layer_params': (256, 256), 'TrainerConfig.mini_batch_size': 256,
        'TrainerConfig.initial_collect_steps': 10000, 'TrainerConfig.replay_buffer_length': 100000,
        'TrainerConfig.unroll_length': 1, 'RewardScaling.scale': 1.0}),
             'Pendulum-v1': ('ddpg_pendulum', _steps(8000))},
}


def _bindings(family: str, task: str, scheme: str, seed: int) -> tuple[str, dict[str, Any]]:
    conf, bindings = TASKS[family][task]
    bindings = {**bindings, **SCHEMES[scheme], 'TrainerConfig.random_seed': seed}
    if family in ('sac', 'qrsac') and scheme.startswith('torch'):
        bindings.update(_UNIT_GAIN)
    return conf, bindings


def _train(conf: str, bindings: dict[str, Any], core: int | None) -> tuple[list[tuple[int, float]], float]:
    """Train one run and return its learning curve ``[(environment steps, training return), ...]`` and wall seconds."""
    folder = tempfile.mkdtemp(prefix='initial_weights_')
    pin = [] if core is None else ['taskset', '-c', str(core)]
    command = [*pin, sys.executable, '-m', 'alfx.bin.train', '--conf', conf, '--root_dir', f'{folder}/run']
    for name, value in bindings.items():
        command += ['--conf_param', f'{name}={value!r}']
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)},
                              capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f'{" ".join(command)} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}')
        with open(f'{folder}/run/progress.csv') as file:
            rows = [row for row in csv.DictReader(file) if row['average_return']]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [(int(row['env_steps']), float(row['average_return'])) for row in rows], time.monotonic() - started


def _stored() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def _store(row: dict[str, Any]) -> None:
    """Append ``row`` to the stored results; several processes may do so at the same time."""
    with open(f'{RESULTS}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [*_stored(), row]
        text = '[\n' + ',\n'.join(json.dumps(row) for row in rows) + '\n]\n'
        temporary = RESULTS.with_suffix('.tmp')
        temporary.write_text(text)
        temporary.replace(RESULTS)


def _key(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row['family'], row['task'], row['scheme'], row['seed']


def _table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: the mean training return at the end, over seeds, of each scheme."""
    schemes = [scheme for scheme in SCHEMES if any(row['scheme'] == scheme for row in rows)]
    lines = ['| family | task | steps | seeds | ' + ' | '.join(schemes) + ' |', '|---' * (4 + len(schemes)) + '|']
    for family, tasks in TASKS.items():
        for task in tasks:
            mine = [row for row in rows if (row['family'], row['task']) == (family, task)]
            if not mine:
                continue
            cells = []
            for scheme in schemes:
                values = [row['final_return'] for row in sorted(mine, key=lambda row: row['seed'])
                          if row['scheme'] == scheme]
                cells.append(f'**{np.mean(values):,.0f}** ({", ".join(f"{v:,.0f}" for v in values)})' if values else '')
            seeds = sorted({row['seed'] for row in mine})
            lines.append(f'| {family} | {task} | {mine[0]["steps"]:,} | {len(seeds)} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', nargs='+', choices=list(TASKS), default=list(TASKS), help='families')
    parser.add_argument('--schemes', nargs='+', choices=list(SCHEMES), default=list(SCHEMES)[:4])
    parser.add_argument('--seeds', type=int, default=3, help='seeds 1 to N of each')
    parser.add_argument('--core', type=int, help='processor to run on')
    parser.add_argument('--table', action='store_true', help='only print the table')
    args = parser.parse_args()
    if not args.table:
        for seed in range(1, args.seeds + 1):
            for family in args.only:
                for task in TASKS[family]:
                    for scheme in args.schemes:
                        if (family, task, scheme, seed) in map(_key, _stored()):
                            continue
                        conf, bindings = _bindings(family, task, scheme, seed)
                        curve, seconds = _train(conf, bindings, args.core)
                        steps = bindings['TrainerConfig.num_env_steps']
                        final = [value for step, value in curve if step >= 0.95 * steps]
                        row = {'family': family, 'task': task, 'scheme': scheme, 'seed': seed, 'steps': steps,
                               'final_return': round(float(np.mean(final)), 2),
                               'curve': [(step, round(value, 1)) for step, value in curve[::4]],
                               'seconds': round(seconds, 1), 'version': alfx.__version__,
                               'date': datetime.date.today().isoformat()}
                        _store(row)
                        print(f'{family} {task} {scheme} seed {seed}: {row["final_return"]:,.1f} '
                              f'({seconds:.0f} s)', flush=True)
    print(_table(_stored()))


if __name__ == '__main__':
    main()
