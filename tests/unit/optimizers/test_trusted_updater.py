"""TrustedUpdater: steps are shrunk into a trust region."""
import pytest
import torch

from alfx.optimizers import TrustedUpdater


def moved(start, end):
    parameter = torch.nn.Parameter(torch.tensor(start))
    updater = TrustedUpdater([parameter])
    parameter.data = torch.tensor(end)
    return parameter, updater


def test_a_step_within_bounds_does_not_change():
    parameter, updater = moved([1.0, 2.0], [1.5, 2.5])
    change, shrinks = updater.adjust_step(lambda: (parameter[0] - 1.0).abs(), 0.5)
    assert (change.item(), shrinks) == (0.5, 0)
    assert parameter.tolist() == [1.5, 2.5]


def test_a_step_too_large_is_shrunk_along_its_direction():
    parameter, updater = moved([1.0, 2.0], [5.0, 4.0])
    change, shrinks = updater.adjust_step(lambda: (parameter[0] - 1.0).abs(), 1.0)
    # 1 + 0.9 * (1 / 4) * (5 - 1) = 1.9 and 2 + 0.9 * (1 / 4) * (4 - 2) = 2.45
    assert (change.item(), shrinks) == (4.0, 1)
    assert parameter.tolist() == pytest.approx([1.9, 2.45])


def test_the_tightest_of_several_bounds_decides():
    parameter, updater = moved([0.0, 0.0], [4.0, 4.0])
    updater.adjust_step(lambda: {'a': parameter[0], 'b': parameter[1]}, {'a': 2.0, 'b': 0.4})
    assert parameter.tolist() == pytest.approx([0.36, 0.36])
    parameter, updater = moved([0.0, 0.0], [4.0, 4.0])
    updater.adjust_step(lambda: {'a': parameter[0], 'b': parameter[1] / 2}, 1.0)
    assert parameter.tolist() == pytest.approx([0.9, 0.9])


def test_a_change_that_does_not_grow_linearly_is_shrunk_until_it_fits():
    parameter, updater = moved([0.0], [1.0])
    _, shrinks = updater.adjust_step(lambda: parameter[0].sqrt(), 0.1)
    assert shrinks > 1
    assert 0.0 < parameter.item() <= 0.01


def test_a_change_that_is_not_finite_counts_as_too_large():
    parameter, updater = moved([0.0], [8.0])
    updater.adjust_step(lambda: torch.where(parameter[0] > 3.0, torch.inf, parameter[0] * 0), 1.0)
    assert 0.0 < parameter.item() <= 3.0


def test_a_change_that_no_step_explains_is_an_error():
    _, updater = moved([0.0], [1.0])
    with pytest.raises(ValueError, match='depends on the parameters only'):
        updater.adjust_step(lambda: 2.0, 1.0)


def test_wrong_bounds_are_rejected():
    parameter, updater = moved([0.0], [1.0])
    with pytest.raises(ValueError, match='above 0'):
        updater.adjust_step(lambda: parameter[0], 0.0)
    with pytest.raises(ValueError):
        updater.adjust_step(lambda: {'a': parameter[0]}, {'b': 1.0})
    with pytest.raises(ValueError, match='at least one parameter'):
        TrustedUpdater([])
