"""Measure the time from the command to the first training iteration.

    python tools/benchmarks/startup.py                # the import time, and the time to the first training iteration
    python tools/benchmarks/startup.py --max 0.5      # exit with 1 if `import alfx` takes more than half a second

The import time excludes torch and gymnasium, which every reinforcement learning program imports. Each number is the
minimum of several processes, with files in the page cache.
"""
import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIBRARIES = 'import torch, gymnasium'
FIRST_ITERATION = ('create_environment.num_parallel_environments=8', 'TrainerConfig.num_iterations=1')


def import_seconds(statements: str, repeats: int) -> float:
    """Return the minimum wall time in seconds of a Python process that runs the statements."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, '-c', statements], check=True)
        times.append(time.perf_counter() - start)
    return min(times)


def first_iteration_seconds(conf: str) -> tuple[float, float]:
    """Return the seconds from the command to the end of the first iteration, and to the end of the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-m', 'alfx.bin.train', '--conf', conf, '--root_dir', f'{folder}/run']
        for parameter in FIRST_ITERATION:
            command += ['--conf_param', parameter]
        progress = Path(folder, 'run', 'progress.csv')
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        first = None
        while process.poll() is None:
            if first is None and progress.exists() and progress.read_text().count('\n') > 1:
                first = time.perf_counter() - start
            time.sleep(0.01)
        total = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f'{" ".join(command)} failed:\n{process.stdout.read()}')
    return (total if first is None else first), total


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--conf', default='ppo_cart_pole', help='conf of the first iteration')
    parser.add_argument('--repeats', type=int, default=5, help='processes per import')
    parser.add_argument('--import-only', action='store_true', help='skip the training')
    parser.add_argument('--max', type=float, help='exit with 1 if the import of alfx takes longer (seconds)')
    args = parser.parse_args()
    libraries = import_seconds(LIBRARIES, args.repeats)
    own_seconds = import_seconds(f'{LIBRARIES}\nimport alfx', args.repeats) - libraries
    print(f'torch and gymnasium        {libraries:6.2f} s')
    print(f'alfx on top of them        {own_seconds:6.2f} s')
    if not args.import_only:
        first, total = first_iteration_seconds(args.conf)
        print(f'to the first iteration     {first:6.2f} s')
        print(f'whole command, one iteration {total:4.2f} s')
    return int(args.max is not None and own_seconds > args.max)


if __name__ == '__main__':
    sys.exit(main())
