"""Tests of confidence intervals."""

import numpy as np
import pytest

from alfx.utils.confidence import confidence_interval, student_t_quantile


@pytest.mark.parametrize('degrees, expected', [(1, 12.7062), (2, 4.30265), (9, 2.26216), (30, 2.04227)])
def test_quantiles_match_the_tables(degrees, expected):
    assert student_t_quantile(0.975, degrees) == pytest.approx(expected, rel=1e-4)


def test_quantiles_with_one_degree_of_freedom_are_those_of_cauchy():
    assert student_t_quantile(0.9, 1) == pytest.approx(np.tan(np.pi * 0.4), rel=1e-6)


def test_the_interval_covers_the_mean_at_its_confidence_level():
    samples = np.random.default_rng(0).normal(3.0, 2.0, size=(5, 4000))
    covered = np.abs(samples.mean(0) - 3.0) <= confidence_interval(samples)
    assert covered.mean() == pytest.approx(0.95, abs=0.015)


def test_a_single_sample_has_no_interval():
    assert np.isnan(confidence_interval(np.array([1.0])))


def test_arguments_out_of_range_are_rejected():
    with pytest.raises(ValueError):
        student_t_quantile(0.4, 3)
    with pytest.raises(ValueError):
        student_t_quantile(0.9, 0)
