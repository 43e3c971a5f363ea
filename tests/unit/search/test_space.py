"""Search spaces: how ranges and lists are read, sampled and rejected."""
import pytest

from alfx.gin_utils import ConfError
from alfx.search import space


@pytest.mark.parametrize('text, probes', [
    ('uniform(0, 1)', ['0.0', '1.0']), ('uniform(low=0, high=1, step=0.3)', ['0.0', '0.8999999999999999']),
    ('log_uniform(1e-5, 1e-2)', ['1e-05', '0.01']), ('integer(1, 10, step=4)', ['1', '9']),
    ('log_integer(8, 1024)', ['8', '1024']), ("choice('a', 2, None)", ["'a'", '2', 'None'])])
def test_a_text_means_a_range(text, probes):
    assert space.parse(text).probes() == probes


def test_a_list_is_a_choice_of_its_values_in_conf_syntax():
    assert space.parse([(64, 64), 'relu', 0.5, True]).probes() == ['(64, 64)', "'relu'", '0.5', 'True']


@pytest.mark.parametrize('value, grid', [
    ('integer(1, 4)', [1, 2, 3, 4]), ('integer(0, 10, step=5)', [0, 5, 10]),
    ('uniform(0.1, 0.5, step=0.1)', pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])), ([3, 1, 2], ['3', '1', '2'])])
def test_a_grid_lists_every_value_in_order(value, grid):
    assert space.parse(value).grid() == grid


@pytest.mark.parametrize('value', ['uniform(0, 1)', 'log_uniform(1, 2)', 'log_integer(1, 8)', 'integer(0, 10000000)'])
def test_a_grid_over_a_continuous_range_is_rejected(value):
    with pytest.raises(ConfError, match='step'):
        space.parse(value).grid()


@pytest.mark.parametrize('value, message', [
    ('unifrom(0, 1)', "(?s)unknown function unifrom.*did you mean 'uniform'"), ('uniform(0)', 'missing.*high'),
    ('uniform(0, 1, log=True)', '(?s)log.*uniform\\(low'), ('uniform(1, 0)', 'low must not exceed high'),
    ('log_uniform(0, 1)', 'must be > 0'), ('integer(0.5, 2)', 'an int'), ('uniform(0, 1, step=0)', 'step must be > 0'),
    ('uniform(0, x)', 'must be numbers or strings'), ('0.5', 'a list of values'), ('uniform(', 'a list of values'),
    (0.5, '(?s)a list of values.*outside of Search.space'), ([], 'list of values is empty'), ([1, 1], 'listed twice'),
    ('uniform(0, 1e999)', 'must be a number'), ("uniform('a', 1)", 'must be a number'), (True, 'a list of values')])
def test_a_wrong_range_is_rejected_with_a_remedy(value, message):
    with pytest.raises(ConfError, match=message):
        space.parse(value)
