"""Export the policy of every shipped conf after a short run, and compare the files with the policy.

    python tools/exports.py                          # all confs without a stored result
    python tools/exports.py --conf ppo_cart_pole     # repeat these confs
    python tools/exports.py --table                  # only rewrite the table

The table is in docs/export_a_policy.md, its numbers in docs/exports.json. ONNX needs `pip install onnxscript
onnxruntime`. The runs are those of tests/confs: a few steps and two updates with the networks of the conf. The policy
and its files then act on the same observations of whole episodes. A conf takes half a minute, or some minutes with
images.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from suites import replace_table

import alfx
from alfx import context, gin_utils
from alfx.runs import exporting, playing
from alfx.runs.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
FORMATS = {'torch.export': '.pt2', 'ONNX': '.onnx'}
_BEGIN, _END = '<!-- table: tools/exports.py -->', '<!-- end of the table -->'
_TOO_FAR = 1e-5  # tolerance of `alfx export`


def short_runs() -> Any:
    """Import the test module of all confs, which contains the settings of short runs."""
    path = ROOT / 'tests' / 'confs' / 'test_shipped_confs.py'
    spec = importlib.util.spec_from_file_location('test_shipped_confs', path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export_conf(conf: str, num_steps: int, runs: Any) -> dict[str, Any]:
    """Train a conf for a few steps, export its policy in each format, and compare.

    Args:
        conf: name of a shipped conf, with `.gin`.
        num_steps: number of observed steps to compare.
        runs: module returned by :func:`short_runs`.

    Returns:
        ``algorithm`` and, for each format, the largest difference over ``num_steps``; or ``reason`` if the policy
        cannot be exported.
    """
    with tempfile.TemporaryDirectory() as folder, _working_in(folder):
        root_dir = os.path.join(folder, 'run')
        short = runs.shortened(conf)
        runs.train(conf, short, root_dir)
        if 'create_environment' not in gin_utils.stored_info(root_dir)['operative']:
            return {'reason': 'supervised learning has no policy'}
        with gin_utils.loaded(None, [], root_dir, same_run=False):
            env, algorithm = playing.make_policy(root_dir, 1, epsilon_greedy=0.0)
            try:
                playing.load_for_play(root_dir, algorithm)
                return _differences(Policy(env, algorithm), env, type(algorithm.policy_algorithm or algorithm).__name__,
                                    num_steps, folder)
            finally:
                env.close()


def _differences(policy: Policy, env: Any, name: str, num_steps: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {'algorithm': name}
    try:
        program = exporting.export(policy, name)
    except exporting.ExportError as error:
        return {**found, 'reason': str(error).splitlines()[0].split(' cannot be exported: ', 1)[-1]}
    text = exporting.PolicyStep(policy).signature().to_json({})
    steps = []
    for suffix in FORMATS.values():
        path = os.path.join(folder, f'policy{suffix}')
        exporting.check_path(path)
        exporting.save(program, text, path)
        steps.append(exporting.load(path))
    differences = exporting.greatest_differences(policy, steps, env, num_steps)
    return {**found, **dict(zip(FORMATS, differences)), 'num_steps': num_steps}


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        gin_utils.clear()
        context.reset()


class TookTooLongError(Exception):
    """Time limit of a conf exceeded."""


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TookTooLongError(f'not finished after {seconds} s')

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def table(stored: dict[str, dict[str, Any]]) -> str:
    """Return the stored results as a Markdown table."""
    lines = [f"| conf | algorithm | {' | '.join(FORMATS)} | steps |", f"| --- | --- |{' ---: |' * (len(FORMATS) + 1)}"]
    for conf, entry in sorted(stored.items()):
        cells = [_cell(entry, label) for label in FORMATS]
        if 'reason' in entry:
            cells = [f"no: {entry['reason']}", *([''] * (len(FORMATS) - 1))]
        steps = f"{entry['num_steps']:,}" if 'num_steps' in entry else ''
        lines.append(f"| `{conf}` | {entry.get('algorithm', '')} | {' | '.join(cells)} | {steps} |")
    return '\n'.join(lines) + '\n'


def _cell(entry: dict[str, Any], label: str) -> str:
    value = entry.get(label)
    if value is None:
        return ''
    return '0' if value == 0 else f'{value:.1e}' if value <= _TOO_FAR else f'**{value:.1e}**'


def write(stored: dict[str, dict[str, Any]], numbers: Path, page: Path) -> None:
    """Write the JSON file, and replace the table on the page."""
    numbers.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + '\n')
    replace_table(page, (_BEGIN, _END), table(stored))


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--conf', nargs='+', default=[], help='names of shipped confs; default: all without a result')
    parser.add_argument('--num_steps', type=int, default=10_000, help='number of observed steps to compare')
    parser.add_argument('--seconds', type=int, default=900, help='time limit per conf')
    parser.add_argument('--json', type=Path, default=ROOT / 'docs' / 'exports.json', help='file with the results')
    parser.add_argument('--page', type=Path, default=ROOT / 'docs' / 'export_a_policy.md', help='page with the table')
    parser.add_argument('--table', action='store_true', help='only rewrite the table')
    args = parser.parse_args()
    stored = json.loads(args.json.read_text()) if args.json.exists() else {}
    runs = short_runs()
    confs = args.conf or [name.removesuffix('.gin') for name in runs.TASKS if name.removesuffix('.gin') not in stored]
    failed = 0
    torch.set_num_threads(1)
    for conf in () if args.table else confs:
        try:
            with _at_most(args.seconds):
                stored[conf] = export_conf(f'{conf}.gin', args.num_steps, runs)
        except Exception:  # noqa: BLE001 - continue with the other confs
            failed += 1
            print(f'{conf} failed:\n{traceback.format_exc()}', flush=True)
            continue
        print(conf, stored[conf], flush=True)
        write(stored, args.json, args.page)
    write(stored, args.json, args.page)
    print(f'{len(stored)} confs with alfx {alfx.__version__}, torch {torch.__version__}')
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
