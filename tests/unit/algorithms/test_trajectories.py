"""Trajectories against their recurrences."""
import pytest
import torch

from alfx.algorithms.taac.action_curves import LinearTrajectory, QuadraticTrajectory, Trajectory, action_scale
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

FORMS = [Trajectory(), LinearTrajectory(), LinearTrajectory(False), QuadraticTrajectory(), QuadraticTrajectory(False)]


def rows(*values):
    return torch.tensor([values])


def test_a_constant_trajectory_repeats_its_action():
    tau = rows(0.3, -0.2)
    assert torch.equal(Trajectory().extend(tau), tau)
    assert torch.equal(Trajectory().renew(rows(0.5, 0.1), tau), rows(0.5, 0.1))


def test_a_line_keeps_its_slope_and_stops_at_the_bound():
    # a = 0.2, v = 0.25: 0.2 + 2 * 0.25 = 0.7, then 1.2, which is clipped to 1
    form = LinearTrajectory()
    tau = form.extend(rows(0.2, 0.25))
    torch.testing.assert_close(tau, rows(0.7, 0.25))
    torch.testing.assert_close(form.extend(tau), rows(1.0, 0.25))


def test_a_new_line_leads_through_the_new_action_or_has_the_new_slope():
    # from a = 0.2 to 0.6: the slope is (0.6 - 0.2) / 2 = 0.2; with slope 0.6 the action is 0.2 + 1.2, clipped
    torch.testing.assert_close(LinearTrajectory().renew(rows(0.6), rows(0.2, -0.9)), rows(0.6, 0.2))
    torch.testing.assert_close(LinearTrajectory(False).renew(rows(0.6), rows(0.2, -0.9)), rows(1.0, 0.6))


def test_a_parabola_bends_and_stops_at_the_bound():
    # v = 0.1 + 2 * 0.05 = 0.2, a = -0.5 + 0.4 = -0.1; then v = 0.3, a = 0.5; then v = 0.4, a = 1.3 clipped
    form = QuadraticTrajectory()
    tau = form.extend(rows(-0.5, 0.1, 0.05))
    torch.testing.assert_close(tau, rows(-0.1, 0.2, 0.05))
    tau = form.extend(tau)
    torch.testing.assert_close(tau, rows(0.5, 0.3, 0.05))
    torch.testing.assert_close(form.extend(tau), rows(1.0, 0.4, 0.05))


def test_a_new_parabola_starts_at_a_slope_of_zero():
    # inverse: v = (0.6 - 0.2) / 2 = 0.2, u = v / 2 = 0.1; direct: u = 0.3, v = 0.6, a = 0.2 + 1.2 clipped
    torch.testing.assert_close(QuadraticTrajectory().renew(rows(0.6), rows(0.2, 0.9, 0.9)), rows(0.6, 0.2, 0.1))
    torch.testing.assert_close(QuadraticTrajectory(False).renew(rows(0.3), rows(0.2, 0.9, 0.9)), rows(1.0, 0.6, 0.3))


@pytest.mark.parametrize('inverse', [LinearTrajectory(), QuadraticTrajectory()])
def test_inferred_trajectories_are_reachable_by_the_dynamics(inverse):
    torch.manual_seed(0)
    n, order = 3, inverse.order
    tau, action = (2 * torch.rand(50, k) - 1 for k in (order * n, n))
    new = inverse.renew(action, tau)
    at_rest = torch.cat((tau[:, :n], new[:, n:]), -1)  # the previous action with the new derivatives ...
    if order == 3:
        at_rest[:, n:2 * n] = 0  # ... from a slope of zero
    torch.testing.assert_close(inverse.extend(at_rest), new)


@pytest.mark.parametrize('form', FORMS)
def test_results_stay_in_range_and_inputs_do_not_change(form):
    torch.manual_seed(0)
    tau = 2 * torch.rand(20, 2 * form.order) - 1
    for _ in range(30):
        output, before = 3 * torch.randn(20, 2), tau.clone()
        extended, renewed = form.extend(tau), form.renew(output, tau)
        assert torch.equal(tau, before)
        for new in (extended, renewed):
            assert new.shape == tau.shape and new.abs().max() <= 1
        tau = torch.where(torch.rand(20, 1) < 0.5, extended, renewed)
        assert torch.equal(form.action(tau), tau[:, :2])


@pytest.mark.parametrize('form', FORMS)
def test_a_new_trajectory_is_differentiable_in_the_output(form):
    output = torch.tensor([[0.1, -0.3]], requires_grad=True)
    form.renew(output, torch.zeros(1, 2 * form.order)).sum().backward()
    assert (output.grad > 0).all()


def test_the_range_of_an_action_is_its_middle_and_half_width():
    middle, half = action_scale(BoundedTensorSpec((2, ), torch.float32, [-2, 0], [2, 1]), 'X')
    assert middle.tolist() == [0.0, 0.5] and half.tolist() == [2.0, 0.5]


@pytest.mark.parametrize('spec', [BoundedTensorSpec((), torch.int64, 0, 3), TensorSpec((2, )), [TensorSpec((2, ))],
                                  BoundedTensorSpec((2, ), torch.float32, [-1, 0], [1, 0])])
def test_actions_without_a_range_are_rejected(spec):
    with pytest.raises(SpecError, match='TaacX'):
        action_scale(spec, 'TaacX')
