"""Aggregates of the scores of several runs, against values worked out by hand."""
import itertools

import numpy as np
import pytest

from alfx.reports.aggregates import (bootstrap_interval, interquartile_mean, interquartile_mean_interval,
                                   probability_of_improvement)


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end():
    # sorted: 1 2 | 3 4 5 6 | 7 100; the mean of 3, 4, 5, 6 is 4.5
    assert interquartile_mean(np.array([100.0, 3, 1, 5, 2, 4, 7, 6])) == 4.5
    # five: one at either end is left out; (2 + 3 + 4) / 3
    assert interquartile_mean(np.array([1.0, 2, 3, 4, 50])) == 3.0


def test_with_fewer_than_four_runs_the_interquartile_mean_is_the_mean():
    assert interquartile_mean(np.array([1.0, 2, 9])) == 4.0


def test_each_point_of_a_curve_has_its_own_interquartile_mean():
    values = np.array([[0.0, 4], [1, 3], [2, 2], [9, -5]])
    np.testing.assert_allclose(interquartile_mean(values), [1.5, 2.5])


def test_the_mean_of_scores_with_nan_is_nan():
    assert np.isnan(interquartile_mean(np.array([1.0, 2, 3, float('nan')])))


def test_no_scores_at_all_are_rejected():
    with pytest.raises(ValueError, match='at least one'):
        interquartile_mean(np.zeros(0))
    with pytest.raises(ValueError, match='at least one'):
        probability_of_improvement([])


def test_the_probability_of_improvement_counts_pairs_and_half_of_ties():
    # pairs (1,2) (1,1) (3,2) (3,1): 0 + 1/2 + 1 + 1 of 4
    assert probability_of_improvement([(np.array([1.0, 3]), np.array([2.0, 1]))]) == 0.625


def test_the_probability_of_improvement_is_the_mean_over_tasks():
    """Probability of improvement: the mean over tasks, whatever the number of runs per task."""
    first = (np.array([1.0, 3]), np.array([2.0, 1]))  # 0.625
    second = (np.array([0.0]), np.array([1.0, 2, 3]))  # 0
    assert probability_of_improvement([first, second]) == 0.3125


def test_both_directions_of_improvement_add_up_to_one():
    generator = np.random.default_rng(3)
    x, y = generator.integers(5, size=7), generator.integers(5, size=4)
    assert probability_of_improvement([(x, y)]) + probability_of_improvement([(y, x)]) == pytest.approx(1)


def test_the_interval_has_the_quantiles_of_all_possible_resamples():
    values = np.array([0.0, 1, 10, 100, 7])
    every = [interquartile_mean(np.array(sample)) for sample in itertools.product(values, repeat=5)]
    low, high = bootstrap_interval(lambda runs: float(interquartile_mean(runs[0])), [values], resamples=20000)
    expected = np.quantile(every, [0.025, 0.975])
    np.testing.assert_allclose([low, high], expected, atol=1.5)
    assert low < interquartile_mean(values) < high


def test_runs_are_drawn_within_their_stratum():
    strata = [np.array([0.0, 0, 0]), np.array([5.0, 5])]
    assert bootstrap_interval(lambda runs: float(runs[1].mean() - runs[0].mean()), strata, resamples=50) == (5, 5)


def test_the_interval_of_a_curve_is_computed_per_point():
    values = np.random.default_rng(1).normal(size=(6, 3))
    low, high = interquartile_mean_interval(values, resamples=5000)
    for p in range(3):
        limits = bootstrap_interval(lambda runs: float(interquartile_mean(runs[0])), [values[:, p]], resamples=5000)
        np.testing.assert_allclose([low[p], high[p]], limits, atol=0.1)


def test_a_single_run_has_no_interval():
    assert np.isnan(bootstrap_interval(lambda runs: 0.0, [np.ones(1)])).all()
    assert np.isnan(interquartile_mean_interval(np.ones((1, 2)))).all()
