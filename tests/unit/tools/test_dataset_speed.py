"""Output of tools/benchmarks/dataset_speed.py."""
import os
import re
import subprocess
import sys

import pytest
from helpers import warm_starts

pytestmark = pytest.mark.processes


def output_lines(repository, *arguments, run=warm_starts.run):
    found = run([sys.executable, 'tools/benchmarks/dataset_speed.py', *arguments], cwd=repository, timeout=120,
                           env={**os.environ, 'PYTHONPATH': repository}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_recording_and_loading_are_measured(repository):
    record, load = output_lines(repository, 'record', 'load', '--rounds', '1', '--steps', '2000',
                                run=subprocess.run)  # as users do it, once
    assert re.fullmatch(r'record: [\d,]+ actions/s, hand-written loop [\d,]+: ratio \d+\.\d\d', record)
    assert re.fullmatch(r'load: 2,000 steps in \d+\.\d\d s, peak memory \d+\.\d\d times'
                        r' the \d+ MiB of the buffer', load)


def test_the_fraction_of_time_in_sampling_is_measured(repository):
    pytest.importorskip('mujoco')
    line, = output_lines(repository, 'sample', '--rounds', '1', '--steps', '100')
    share = float(re.fullmatch(r'sample: (\d+\.\d)% of an update, at [\d,]+ updates/s', line)[1])
    assert 0 < share < 100
