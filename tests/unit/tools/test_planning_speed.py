import pathlib
import sys

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


def test_a_plan_is_held_against_the_layers_that_it_consists_of(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOLS))
    import planning_speed

    sizes = '--population 8 --horizon 2 --iterations 2 --hidden 4 --rounds 1 --repetitions 1'
    monkeypatch.setattr(sys, 'argv', ['planning_speed.py', *sizes.split()])
    calls = []
    monkeypatch.setattr(planning_speed.torch.nn.functional, 'silu', lambda x: calls.append(len(x)) or x.sigmoid() * x)
    planning_speed.main()
    row = capsys.readouterr().out.splitlines()[-1].split('|')
    assert [x.strip() for x in row[1:5]] == ['8', '2', '2', '4']
    assert float(row[-2]) > 0 and calls.count(8) >= 2 * 2 * (3 + 1)  # a layer for each step of each iteration, alone
