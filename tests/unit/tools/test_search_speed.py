"""The tools of the tree search: speed and showing a tree."""
import pathlib
import sys

import pytest
import torch
from helpers import warm_starts

from alfx.engine.plan import backends

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / 'benchmarks'))


@pytest.mark.compiles
def test_every_measured_run_is_a_separate_search_and_takes_time(monkeypatch):
    import search_speed
    monkeypatch.setattr(backends, 'WARM_UP', backends.WarmUp(calls=1, compiled_calls=1))
    torch.manual_seed(0)
    runs = search_speed.alfx_runs(2, 3, 4, search_speed.Network(3), tensors=True)
    assert list(runs) == ['tree', 'net', 'alfx eager', 'alfx eager gumbel', 'alfx', 'alfx gumbel', 'alfx compiled',
                          'alfx compiled gumbel', 'alfx tensors']
    assert runs['alfx']().root_visits.sum(-1).tolist() == [4, 4]
    for name in ('alfx eager', 'alfx compiled', 'alfx tensors'):
        assert torch.equal(runs['alfx']().root_visits, runs[name]().root_visits)
    times = search_speed.measure({'alfx': runs['alfx']}, 4, rounds=2)
    assert len(times['alfx']) == 2 and min(times['alfx']) > 0


def test_a_tree_is_printed_with_the_most_visited_action_first():
    command = [sys.executable, str(TOOLS / 'show_tree.py'), '--position', 'XX. OO. ...', '--simulations', '60']
    lines = warm_starts.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith('root: visits 61') and lines[0].endswith('player 0 to move')
    assert lines[1].startswith('├─ 2: visits') and lines[1].endswith('over')
    wrong = warm_starts.run([*command[:3], 'XX'], capture_output=True, text=True)
    assert wrong.returncode != 0 and 'expected three lines' in wrong.stderr
