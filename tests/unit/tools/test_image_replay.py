"""Figures of tools/benchmarks/image_replay.py."""
import os
import re
import sys

from helpers import warm_starts


def test_it_measures_memory_and_sampling(repository):
    found = warm_starts.run([sys.executable, 'tools/benchmarks/image_replay.py', '--frames', '40000', '--repeats', '1'],
                            cwd=repository, env={**os.environ, 'PYTHONPATH': repository}, capture_output=True,
                            text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    share = float(re.search(r'GB, ([0-9.]+) of the frames', found.stdout)[1])
    assert 1.0 <= share < 1.4  # stacks of four that are stored would take four times as much
    assert int(re.search(r'([0-9]+) us', found.stdout)[1]) > 0
