"""Policy algorithms, intrinsic rewards and representations, composed by conf alone: a sample that covers all pairs.

`tools/compose.py` tries all combinations; here each combination must train with them.
"""
import itertools
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / 'tools'))
try:
    import compose
finally:
    sys.path.pop(0)

from alfx import gin_utils


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


@pytest.mark.parametrize('cell', compose.covering_sample() + [
    pytest.param(cell, marks=pytest.mark.slow) for cell in compose.sample_of_bonuses()], ids=' + '.join)
def test_each_combination_works_or_is_rejected_by_name(cell, tmp_path):
    """Train, repeat, save and evaluate every combination, unless it is rejected by name."""
    outcome = compose.try_cell(cell, tmp_path)
    assert outcome.verdict == ('ok' if compose.expected_refusal(cell) is None else 'rejected'), outcome.message


def test_the_sample_covers_all_pairs():
    sample = compose.covering_sample()
    for a, b in itertools.combinations(range(3), 2):
        tables = (compose.POLICIES, compose.INTRINSIC, compose.REPRESENTATION)
        assert {(cell[a], cell[b]) for cell in sample} == set(itertools.product(tables[a], tables[b]))
    assert {(cell.policy, cell.form) for cell in sample} == set(itertools.product(compose.POLICIES, compose.FORMS))
    assert {(cell.intrinsic, cell.form) for cell in sample} == set(itertools.product(compose.INTRINSIC, compose.FORMS))
    assert ({(cell.representation, cell.form) for cell in sample}
            == set(itertools.product(compose.REPRESENTATION, compose.FORMS)))


def test_the_table_shows_verdicts_and_reasons():
    cells = compose.cells(['ppo'], ['none', 'icm'], ['none'], ['feed-forward'])
    outcomes = dict(zip(cells, [compose.Outcome('ok'), compose.Outcome('rejected', 'because')]))
    assert compose.table(outcomes).splitlines()[2] == '| ppo | feed-forward | ok | rejected |'
    assert compose.reasons(outcomes) == ['1 rejected: because']
