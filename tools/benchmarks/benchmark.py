"""Measure environment steps or updates per second and peak memory of alfx and other libraries (peers).

    python tools/benchmarks/benchmark.py                                   # all workloads, three rounds
    python tools/benchmarks/benchmark.py ppo_cart_pole --rounds 5 --json docs/benchmark.json
    python tools/benchmarks/benchmark.py a2c_cart_pole --peers alfx bare --steps 40000
    # time that RND and ICM add to an iteration
    python tools/benchmarks/benchmark.py ppo_cart_pole_bonus --rounds 5
    # for libraries with more threads
    python tools/benchmarks/benchmark.py sac_pendulum --cores 2
    # compare two source trees
    python tools/benchmarks/benchmark.py td3_pendulum --peers alfx eager compiled --rounds 6 --against ../before

'eager' is alfx without traced graphs. With --against, each alfx peer is also measured with the alfx and the benchmark
scripts of another source tree, in the same rounds and with the same installed packages: 'alfx before'. Each tree is
measured by its own scripts because they time methods of the training loop, whose names may differ.

Each measurement runs in a separate process, so that its peak memory can be measured, and is pinned to one core, since
XLA starts threads whatever its flags are. A round runs every peer once, and each round starts with a different peer, so
that changes in the speed of the machine affect all peers equally. Ratios are computed within a round; the result is
their median.
"""
import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ONE_THREAD = {**{name: '1' for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')},
              'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'}
ROOT = Path(__file__).resolve().parents[2]
BEFORE = ' before'


def pin_to_cores(number: int) -> None:
    """Pin this process, with all threads that it starts, to its last ``number`` cores.

    Raises:
        SystemExit: the system does not support pinning, or there are fewer cores.
    """
    if not hasattr(os, 'sched_setaffinity'):
        raise SystemExit('this system cannot pin a process to cores; use Linux, or --cores 0')
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < number <= len(cores):
        raise SystemExit(f'--cores {number}: expected a number from 1 to {len(cores)}, the cores that this process may '
                         'use, or 0 for all of them')
    os.sched_setaffinity(0, cores[-number:])


def _measure_here(peer: str, workload_name: str, steps: int, seed: int, cores: int) -> None:
    """Measure in the subprocess, and print one JSON line with the result."""
    if cores:
        pin_to_cores(cores)
    from benchmark_peers import PEERS, WORKLOADS

    import torch
    torch.set_num_threads(1)
    started, processor_seconds = time.perf_counter(), time.process_time()
    steps_taken, seconds = PEERS[peer](WORKLOADS[workload_name], steps, seed)
    busy = (time.process_time() - processor_seconds) / (time.perf_counter() - started)  # cores, including construction
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({'steps': steps_taken, 'seconds': seconds, 'rate': steps_taken / seconds, 'peak_mib': peak,
                      'cores_busy': round(busy, 2)}))


def _script_of(tree: Path) -> Path:
    """Return the benchmark script of a source tree; up to version 0.8.8 it was in `tools`."""
    script = tree / 'tools' / 'benchmarks' / 'benchmark.py'
    return script if script.is_file() else tree / 'tools' / 'benchmark.py'


def measure(peer: str, workload_name: str, steps: int, seed: int, cores: int = 1,
            against: Path | None = None) -> dict[str, float]:
    """Measure once in a separate process with ``cores`` cores; 0 for all cores.

    alfx and the benchmark scripts are those of the source tree ``against`` if the peer name ends with ' before',
    otherwise those of the tree of this file.

    Raises:
        SystemExit: the process failed; its output is shown.
    """
    tree = against if against and peer.endswith(BEFORE) else ROOT
    command = [sys.executable, str(_script_of(tree)), workload_name, '--measure', peer.removesuffix(BEFORE),
               '--steps', str(steps), '--seed', str(seed), '--cores', str(cores)]
    environment = {**os.environ, **ONE_THREAD, 'PYTHONPATH': str(tree)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          check=False)
    if done.returncode:
        raise SystemExit(f'{peer} on {workload_name} failed:\n{done.stdout}{done.stderr}')
    return json.loads(done.stdout.splitlines()[-1])


def summarize(rounds: list[dict[str, dict[str, float]]], reference: str) -> dict[str, dict[str, float]]:
    """Return for each peer the median rate, its range, the median peak memory and the median ratio reference / peer.

    The reference of 'PEER before' is PEER.
    """
    rows = {}
    for peer in rounds[0]:
        rates = [r[peer]['rate'] for r in rounds]
        rows[peer] = {'rate': statistics.median(rates), 'lowest': min(rates), 'highest': max(rates),
                      'peak_mib': statistics.median(r[peer]['peak_mib'] for r in rounds)}
        other = peer.removesuffix(BEFORE) if peer.endswith(BEFORE) else reference
        if other in rounds[0]:
            rows[peer]['ratio'] = statistics.median(r[other]['rate'] / r[peer]['rate'] for r in rounds)
    return rows


def _rate(rate: float) -> str:
    return f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'


def format_table(rows: dict[str, dict[str, float]], reference: str, unit: str = 'steps') -> str:
    """Format the rows as a Markdown table."""
    lines = [f'| peer | {unit}/s (median) | range | speedup of {reference} | peak memory |',
             '| --- | ---: | ---: | ---: | ---: |']
    for peer, row in rows.items():
        ratio = f"{row['ratio']:.2f}" if 'ratio' in row and peer != reference else ''
        ratio += f' ({peer.removesuffix(BEFORE)})' if peer.endswith(BEFORE) and ratio else ''
        lines.append(f"| {peer} | {_rate(row['rate'])} | {_rate(row['lowest'])} to {_rate(row['highest'])} | {ratio} "
                     f"| {row['peak_mib']:.0f} MiB |")
    return '\n'.join(lines)


def _versions() -> dict[str, str]:
    found = {'python': platform.python_version()}
    for name in ('alfx', 'torch', 'gymnasium', 'numpy', 'stable-baselines3', 'sbx-rl'):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        text = Path('/proc/cpuinfo').read_text()
    except OSError:
        return platform.processor()
    return next((line.split(':', 1)[1].strip() for line in text.splitlines() if line.startswith('model name')), '')


def run_workload(name: str, peers: list[str], rounds: int, steps: int | None, seed: int, cores: int = 1,
                 against: Path | None = None) -> dict:
    """Run all rounds of one workload, print the results, and return the entry of the JSON file."""
    from benchmark_peers import OF_ALFX, WORKLOADS, unavailable

    workload = WORKLOADS[name]
    print(f'\n{name}: {workload.description}')
    peers_here = []
    for peer in peers:
        reason = unavailable(peer, workload)
        print(f'  {peer} is skipped: {reason}' if reason else f'  {peer}', flush=True)
        peers_here += [] if reason else [peer, peer + BEFORE] if against and peer in OF_ALFX else [peer]
    if not peers_here:
        raise SystemExit(f'no peer supports {name}')
    unit = workload.unit
    results = []
    for i in range(rounds):
        order = peers_here[i % len(peers_here):] + peers_here[:i % len(peers_here)]
        measured = {peer: measure(peer, name, steps or workload.steps, seed + i, cores, against) for peer in order}
        results.append({peer: measured[peer] for peer in peers_here})
        rates = '   '.join(f"{peer} {_rate(results[-1][peer]['rate'])}" for peer in peers_here)
        print(f'  round {i + 1}/{rounds}: {rates} {unit}/s', flush=True)
    rows = summarize(results, peers_here[0])
    print('\n' + format_table(rows, peers_here[0], unit))
    return {'unit': unit, 'description': workload.description, 'cores': cores,
            **({'against': str(against)} if against else {}), 'summary': rows, 'rounds': results,
            'date': datetime.date.today().isoformat(), 'processor': _processor(), 'versions': _versions()}


def main() -> None:
    """Run the command line."""
    from benchmark_peers import PEERS, WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('workloads', nargs='*', metavar='workload',
                        help=f'{", ".join(WORKLOADS)}; default: all of them')
    parser.add_argument('--peers', nargs='+', choices=list(PEERS), default=list(PEERS),
                        help='the first one is the reference')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--steps', type=int, help='environment steps per measurement')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--cores', type=int, default=int(hasattr(os, 'sched_setaffinity')),
                        help='cores per measurement; 0 for all')
    parser.add_argument('--against', type=Path, metavar='FOLDER', help='another source tree of alfx, to compare with')
    parser.add_argument('--json', type=Path, help='store the numbers here; other workloads in the file are kept')
    parser.add_argument('--measure', choices=list(PEERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.workloads or list(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            parser.error(f'unknown workload {name!r}; choose from {", ".join(WORKLOADS)}')
    if args.against and not (args.against / 'alfx' / '__init__.py').is_file():
        parser.error(f'--against {args.against}: expected a source tree, but the folder contains no alfx')
    if args.measure:
        _measure_here(args.measure, names[0], args.steps, args.seed, args.cores)
        return
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in names:
        results[name] = run_workload(name, args.peers, args.rounds, args.steps, args.seed, args.cores,
                                     args.against and args.against.resolve())
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main()
