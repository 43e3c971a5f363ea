"""The benchmark of planning."""
import pathlib
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


def test_a_plan_is_compared_with_its_matrix_products(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOLS / 'benchmarks'))
    import planning_speed

    sizes = '--population 8 --horizon 2 --iterations 2 --hidden 4 --rounds 1 --repetitions 1'
    monkeypatch.setattr(sys, 'argv', ['planning_speed.py', *sizes.split()])
    calls = []
    silu = planning_speed.nn.functional.silu
    monkeypatch.setattr(planning_speed.nn.functional, 'silu', lambda *x, **k: calls.append(len(x[0])) or silu(*x, **k))
    planning_speed.main()
    head, *_, plan, products = capsys.readouterr().out.splitlines()
    assert head == 'Population 8, 2 steps, 2 iterations, layers 4:'
    assert plan.startswith('| alfx |') and products.startswith('| products |') and products.endswith('| 1.00 |')
    assert calls.count(8) >= 2 * 2 * (3 + 1)  # a layer for each step of each iteration, alone


def test_a_missing_peer_is_reported(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOLS / 'benchmarks'))
    import planning_speed

    monkeypatch.setattr(sys, 'argv', ['planning_speed.py', '--peers', 'mbrl'])
    monkeypatch.setattr(planning_speed.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(SystemExit):
        planning_speed.main()
    assert 'not installed: mbrl' in capsys.readouterr().err
