"""The table of exploration bonuses with several policy algorithms."""
import json
import pathlib

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def bonus_table(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import bonus_table
    return bonus_table


@pytest.fixture
def page(bonus_table, tmp_path):
    page = tmp_path / 'page.md'
    begin, end = bonus_table.MARKERS
    page.write_text(f'# Before\n\n{begin}\nold\n{end}\n\nafter\n')
    return page


def row(bonus, column, seed, **found):
    return {'bonus': bonus, 'column': column, 'seed': seed, **found}


def test_a_cell_shows_the_mean_and_each_seed_if_they_differ(bonus_table):
    text = bonus_table.table([row('rnd', 'PPO', 1, **{'return': 0.0}), row('rnd', 'PPO', 0, **{'return': 1.0}),
                              row('rnd', 'DQN', 0, **{'return': 1.0}), row('none', 'PPO', 0, **{'return': 0.0}),
                              row('deir', 'DQN', 0, reason='it needs whole unrolls')])
    assert text.splitlines()[2:] == ['| none | 0.00, 1 seed |  |  |  |  |',
                                     '| `rnd.gin` | 0.50 (1, 0), 2 seeds | 1.00, 1 seed |  |  |  |',
                                     '| `deir.gin` |  | not accepted |  |  |  |']


def test_runs_are_stored_and_repeated_only_if_their_conf_changes(bonus_table, page, tmp_path, monkeypatch):
    numbers = tmp_path / 'numbers.json'
    arguments = ['--bonus', 'count_bonus', '--column', 'PPO', '--json', str(numbers), '--page', str(page),
                 '--num_steps', '2000']
    assert bonus_table.main(arguments) == 0
    found, = json.loads(numbers.read_text())
    assert (found['bonus'], found['column'], found['seed'], found['return']) == ('count_bonus', 'PPO', 0, 0.0)
    text = page.read_text()
    assert '| `count_bonus.gin` | 0.00, 1 seed |' in text and text.startswith('# Before') and 'old' not in text

    repeated = []
    monkeypatch.setattr(bonus_table, 'run', lambda *cell: repeated.append(cell) or found)
    bonus_table.main(arguments)
    assert not repeated
    monkeypatch.setitem(bonus_table.BONUSES, 'count_bonus', bonus_table.Bonus('count_bonus.gin', 0.5))
    bonus_table.main(arguments)
    assert repeated == [('count_bonus', 'PPO', 0, 2000)]


@pytest.mark.parametrize('bonus, column', [('deir', 'DQN'), ('apt', 'PPO')])
def test_a_rejected_combination_is_stored_with_its_reason(bonus_table, bonus, column):
    found = bonus_table.run(bonus, column, 0, 2000)
    assert found['reason'] and 'return' not in found
