"""Learning curves: smoothing, averages over runs, and columns for the horizontal axis."""
import numpy as np
import pytest

from alfx.reports import collecting, curves
from alfx.reports.curves import Curve


def curve(x, y):
    return Curve(np.array(x, float), np.array(y, float))


@pytest.mark.parametrize('y, smoothing, expected', [
    ([1, 2, np.nan, 4, 5, 6], 2, [1, 1.5, np.nan, np.nan, 4.5, 5.5]),
    ([1e17, 1.5, 2.5], 1, [1e17, 1.5, 2.5]),
    ([1, np.inf, 3, 4], 1, [1, np.inf, 3, 4]),
    ([3, 6, 9, 12], 3, [3, 4.5, 6, 9]),
])
def test_a_value_spoils_only_the_means_that_contain_it(y, smoothing, expected):
    found = curves.average([curve(range(len(y)), y)], smoothing)
    np.testing.assert_array_equal(found.center, expected)


@pytest.mark.parametrize('runs, x, center', [
    ([curve([980], [26.0]), curve([980, 2219], [26.0, 44.0])], [980], [26]),
    ([curve([900, 975], [5.0, 10.0]), curve([980, 5000], [20.0, 500.0])], [975], [15]),
])
def test_runs_without_a_common_range_are_averaged_where_the_shortest_ends(runs, x, center):
    for ordered in (runs, runs[::-1]):
        band = curves.average(ordered)
        assert band.x.tolist() == x and band.center.tolist() == center


@pytest.mark.parametrize('end, warns', [(80, True), (95, False)])
def test_a_mean_that_ends_with_a_short_run_is_logged(end, warns, caplog):
    curves.average([curve([0, 100], [1.0, 2.0]), curve([0, end], [1.0, 2.0])])
    assert (f'the mean of 2 runs ends with the shortest one, at {end} of 100' in caplog.text) == warns


def test_evaluations_are_not_drawn_over_their_own_number_of_episodes(tmp_path):
    (tmp_path / 'eval').mkdir()
    (tmp_path / 'progress.csv').write_text('env_steps,episodes,average_return\n100,5,1.0\n200,77,2.0\n')
    (tmp_path / 'eval' / 'progress.csv').write_text('env_steps,episodes,average_return\n100,3,8.0\n200,3,9.0\n')
    folder = str(tmp_path)
    assert len(curves.read_panels({'a': [folder]}, 'env_steps', ['average_return'])[1]) == 2
    titles = list(curves.read_panels({'a': [folder]}, 'episodes', ['average_return'])[1])
    assert titles == ['average_return in training']
    assert collecting._read_curve(folder, 'episodes', 'average_return', evaluation=True) is None
