"""Speed comparisons with other libraries use equal workloads and alternating rounds."""
import pathlib
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def population_speed(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / 'benchmarks'))
    import population_speed
    return population_speed


def run(population_speed, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, 'argv', ['population_speed.py', *arguments.split()])
    population_speed.main()
    return capsys.readouterr()


def test_an_update_is_a_minibatch_of_every_network(population_speed, monkeypatch):
    samples = population_speed.samples
    monkeypatch.setattr(population_speed, 'samples', lambda: tuple(x[:300] for x in samples()))
    assert population_speed.svgd_alfx()() == 3


def test_a_generation_is_an_episode_of_every_member(population_speed):
    steps = population_speed.es_alfx('CartPole-v1', 4, *population_speed._CART_POLE)()
    assert steps >= population_speed._MEMBERS * 8  # the shortest possible episode


def test_the_ratio_is_the_median_of_the_rounds(population_speed, monkeypatch, capsys):
    rates = iter([0, 0, 30, 10, 20, 20, 90, 10])  # one warmup each, then alternating
    monkeypatch.setattr(population_speed, 'rate', lambda work, seconds: next(rates))
    monkeypatch.setitem(population_speed.WORKLOADS, 'svgd', ('updates', lambda: None, lambda: None))
    row = run(population_speed, monkeypatch, capsys, 'svgd --rounds 3').out.splitlines()[-1]
    assert row == '| svgd | updates | 30 | Pyro | 10 | 3.0 |'


def test_missing_peers_are_named_and_unknown_workloads_rejected(population_speed, monkeypatch, capsys):
    def missing():
        raise ModuleNotFoundError(name='pyro')
    monkeypatch.setitem(population_speed.WORKLOADS, 'svgd', ('updates', lambda: None, missing))
    assert 'skipped, pyro is not installed' in run(population_speed, monkeypatch, capsys, 'svgd').err
    with pytest.raises(SystemExit):
        run(population_speed, monkeypatch, capsys, 'sgvd')
    assert "unknown workload 'sgvd'" in capsys.readouterr().err
