"""The table of tools/benchmarks/replay_speed.py."""
import os
import sys

from helpers import warm_starts


def test_it_measures_every_operation_for_every_kind_of_buffer(repository):
    found = warm_starts.run([sys.executable, 'tools/benchmarks/replay_speed.py', '--steps', '4000', '--repeats', '1'],
                            cwd=repository, env={**os.environ, 'PYTHONPATH': repository}, capture_output=True,
                            text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    rows = [line for line in found.stdout.splitlines()[3:] if line.strip()]
    assert [row.split()[0] for row in rows] == ['sample', 'update_priority', 'add_batch,', 'add_sequence,', 'add_batch']
    figures = [row.split()[-4:] for row in rows]
    assert figures[1][0] == figures[1][2] == '-'
    assert all(float(figure) > 0 for row in figures for figure in row if figure != '-')
