"""Training of one conf with several random seeds: ``alfx train CONF --seeds 1,2,3``.

Each seed has its own process and its own run folder ``seed-N`` below the given folder. As many runs as the machine has
cores train at the same time. The same command resumes the runs that are not complete.
"""
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import alfx
from alfx.bin import command, flags, launch, ranks
from alfx.bin.flags import FLAGS, Parser
from alfx.utils import processes

_NO_STOP = {signal.SIGUSR1, signal.SIGUSR2}  # they request a checkpoint and the stacks of the threads


def define_flags(parser: Parser) -> None:
    """Define ``--seed`` and ``--seeds``."""
    flags.define_seed_flag(parser)
    parser.add('seeds N,N', 'train one run with each of these random seeds, --seeds 1,2,3, each in its own process and '
               'folder below --root_dir, as many at a time as there are cores',
               lambda text: [*map(flags.number(int, 0, 2**32 - 1), flags.words(text))], [])


def apply_seed() -> None:
    """Bind ``TrainerConfig.random_seed`` to ``--seed``, if the flag is given."""
    if FLAGS.seed is not None:
        FLAGS.conf_param = [*FLAGS.conf_param, f'TrainerConfig.random_seed={FLAGS.seed}']


def train(root_dir: str) -> int:
    """Run the current command line with each seed of ``--seeds``, and print the mean return with its interval.

    Args:
        root_dir: folder that contains the run folders.

    Returns:
        The exit code: 0 if all runs are complete, otherwise the code of a run that failed or was stopped.

    Raises:
        ConfError: the seeds are not distinct, other flags contradict ``--seeds``, or ``root_dir`` is a run.
    """
    _check_seeds()
    seeds: list[int] = FLAGS.seeds
    if os.path.isdir(os.path.join(root_dir, 'conf')):
        raise alfx.gin_utils.ConfError(f'--seeds: {root_dir!r} is the folder of a single run',
                                       'give the conf file, and a new folder with --root_dir')
    os.makedirs(os.path.join(root_dir, 'logs'), exist_ok=True)
    at_once = max(1, min(len(seeds), processes.num_cores() // (FLAGS.num_processes or 1)))
    threads = os.environ.get('OMP_NUM_THREADS') or str(processes.num_cores() // at_once or 1)
    environment = {**os.environ, 'OMP_NUM_THREADS': threads}
    print(f'{len(seeds)} run(s) in {root_dir}, {at_once} at a time; their output is in '
          f'{os.path.join(root_dir, "logs")}', flush=True)
    waiting = list(seeds)
    running: dict[int, subprocess.Popen] = {}
    all_runs: list[subprocess.Popen] = []
    try:
        with launch.forwarded_signals(all_runs) as received:
            while running or waiting and {*received} <= _NO_STOP:
                while waiting and len(running) < at_once and {*received} <= _NO_STOP:
                    seed = waiting.pop(0)
                    running[seed] = _start(seed, root_dir, environment)
                    all_runs.append(running[seed])
                for seed, process in [*running.items()]:
                    if process.poll() is not None:
                        del running[seed]
                        print(f'seed {seed}: {_result(root_dir, seed, process.returncode)}', flush=True)
                time.sleep(processes.POLL_SECONDS)
    finally:
        launch.kill(all_runs)
    runs = [_read(_folder(root_dir, seed)) for seed, process in zip(seeds, all_runs) if process.returncode == 0]
    found = [run for run in runs if run is not None]
    complete = [run for run, score in zip(found, _scores(found)[1]) if score is not None]
    if len(complete) > 1:
        print(_summary(complete))
    for name in ('plot', 'report'):
        print(f'  {name + ":":8}{command.command_of(name)} {shlex.quote(root_dir)}/seed-*')
    if waiting or any(process.returncode for process in all_runs):
        print(f'to resume: {command.command_of("train", *command.with_flags(sys.argv[1:], "--root_dir", root_dir))}')
    return launch.exit_code([process.returncode for process in all_runs], received)


def _check_seeds() -> None:
    if len(set(FLAGS.seeds)) < len(FLAGS.seeds):
        raise alfx.gin_utils.ConfError('--seeds: expected different numbers, found '
                                       f'{",".join(map(str, FLAGS.seeds))}', 'for example --seeds 1,2,3')
    if FLAGS.seed is not None or ranks.is_rank():
        raise alfx.gin_utils.ConfError(f'--seeds and {"torchrun" if FLAGS.seed is None else "--seed"} cannot be '
                                       'combined', 'use one of them')


def _folder(root_dir: str, seed: int) -> str:
    return os.path.join(root_dir, f'seed-{seed}')


def _log(root_dir: str, seed: int) -> str:
    return os.path.join(root_dir, 'logs', f'seed-{seed}.log')


def _start(seed: int, root_dir: str, environment: dict[str, str]) -> subprocess.Popen:
    arguments = command.with_flags(sys.argv[1:], '--seeds=', f'--seed={seed}', f'--root_dir={_folder(root_dir, seed)}')
    with open(_log(root_dir, seed), 'a', encoding='utf8') as log:
        return subprocess.Popen([sys.executable, '-m', 'alfx.bin.train', *arguments], env=environment, stdout=log,
                                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _read(folder: str) -> dict[str, Any] | None:
    from alfx.reports import comparing
    return comparing.read_run(folder) if os.path.exists(os.path.join(folder, 'progress.csv')) else None


def _result(root_dir: str, seed: int, code: int) -> str:
    run = _read(_folder(root_dir, seed))
    if code == 0 and run is not None:
        name, (score,) = _scores([run])
        return 'done, no episode has ended' if score is None else f'done, {name} {score:.5g}'
    return f'{processes.describe_exit(code)}; see {_log(root_dir, seed)}'


def _scores(runs: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    """Return the name and the values of the return that ranks these runs."""
    from alfx.reports import comparing
    column = comparing.score_column(runs)
    return 'training return' if column == 'final return' else 'return in evaluation', [run[column] for run in runs]


def _summary(runs: list[dict[str, Any]]) -> str:
    import numpy as np

    from alfx.reports.aggregates import interquartile_mean, interquartile_mean_interval
    name, scores = _scores(runs)
    returns = np.array(scores)[:, None]
    (low, ), (high, ) = interquartile_mean_interval(returns)
    return (f'{len(runs)} seeds: {name} {interquartile_mean(returns)[0]:.5g} (interquartile mean; 95% interval '
            f'{low:.5g} to {high:.5g})')
