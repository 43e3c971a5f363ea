"""Losses that predict a scalar: their minimum is the target, in every encoding."""
import pytest
import torch

from alfx.utils import losses
from alfx.utils.math_ops import Log1pTransform, Sqrt1pTransform, SqrtLinearTransform

TRANSFORMS = [None, SqrtLinearTransform(), Sqrt1pTransform(), Log1pTransform(alpha=3)]
BINNED = [losses.DiscreteRegressionLoss, losses.OrderedDiscreteRegressionLoss]


def minimize(loss, target, size):
    pred = torch.zeros(target.shape[0], size, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([pred], max_iter=300, line_search_fn='strong_wolfe')

    def closure():
        optimizer.zero_grad()
        total = loss(pred, target).sum()
        total.backward()
        return total

    optimizer.step(closure)
    return pred.detach()


@pytest.mark.parametrize('transform', TRANSFORMS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize('after_mean', [False, True])
@pytest.mark.parametrize('cls', BINNED)
def test_the_expectation_of_the_best_prediction_is_the_target(cls, after_mean, transform):
    loss = cls(transform=transform, inverse_after_mean=after_mean)
    target = torch.tensor([-2.3, -0.4, 0.0, 1.0, 3.7], dtype=torch.float64)
    pred = minimize(loss, target, 12)
    torch.testing.assert_close(loss.calc_expectation(pred), target, atol=0.02, rtol=0)


def test_targets_beyond_the_last_bin_are_clipped_to_it():
    # 5 bins at -2 .. 2
    loss = losses.DiscreteRegressionLoss()
    certain = torch.tensor([[0.0, 0.0, 0.0, 0.0, 50.0]])
    assert loss(certain, torch.tensor([100.0])).item() == pytest.approx(0.0, abs=1e-5)
    assert loss.calc_expectation(certain).item() == pytest.approx(2.0)


def test_two_hot_divergence_worked_out_by_hand():
    # Target 0.25 with 3 bins at -1, 0, 1: weights 0.75 on 0 and 0.25 on 1, whose entropy is 0.562335; the
    # cross-entropy of a uniform prediction is log 3.
    loss = losses.DiscreteRegressionLoss()
    assert loss(torch.zeros(1, 3), torch.tensor([0.25])).item() == pytest.approx(1.098612 - 0.562335, abs=1e-5)
    # logits (0, 1, 2): log-probabilities -2.407606, -1.407606, -0.407606 -> 0.75 * 1.407606 + 0.25 * 0.407606
    assert loss(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0.25])).item() == pytest.approx(1.157606 - 0.562335,
                                                                                              abs=1e-5)


@pytest.mark.parametrize('target', [0.7, -0.4, 0.0, 2.0, 3.25, -9.0])
@pytest.mark.parametrize('after_mean', [False, True])
@pytest.mark.parametrize('transform', TRANSFORMS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize('cls', BINNED)
def test_a_perfect_prediction_has_no_loss_and_no_gradient(cls, transform, after_mean, target):
    loss, size = cls(transform, after_mean), 11
    value = torch.tensor([target], dtype=torch.float64)
    below, weight = loss._locate(size, value)
    probs = torch.zeros(size, dtype=torch.float64)
    probs[below], probs[below + 1] = 1 - weight, weight
    if cls is losses.OrderedDiscreteRegressionLoss:
        probs = torch.logit(probs.flip(0).cumsum(0).flip(0).clamp(1e-12, 1 - 1e-12))
    else:
        probs = probs.clamp(1e-12).log()
    pred = probs[None].requires_grad_()
    result = loss(pred, value)
    result.backward()
    assert result.item() == pytest.approx(0.0, abs=1e-9) and pred.grad.abs().max() < 1e-9


@pytest.mark.parametrize('cls', BINNED)
def test_the_divergence_is_never_negative(cls):
    target = torch.linspace(-6, 6, 101)
    assert (cls()(torch.randn(101, 9), target) >= 0).all()


@pytest.mark.parametrize('cls', BINNED)
def test_bins_are_evenly_spaced_after_the_transform(cls):
    # y (|y| + 2) of the bins -2 .. 2 is -8, -3, 0, 3, 8.
    certain = torch.tensor([[50.0, 50.0, 50.0, 50.0, 50.0]]) if cls is losses.OrderedDiscreteRegressionLoss else (
        torch.tensor([[0.0, 0.0, 0.0, 0.0, 50.0]]))
    for after_mean in (False, True):
        loss = cls(transform=Sqrt1pTransform(), inverse_after_mean=after_mean)
        assert loss.calc_expectation(certain).item() == pytest.approx(8.0)
        assert loss(certain, torch.tensor([8.0])).item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize('cls', BINNED)
@pytest.mark.parametrize('size', [8, 21])
def test_the_initial_bias_predicts_about_zero(cls, size):
    bias = torch.empty(size)
    loss = cls(transform=SqrtLinearTransform())
    loss.initialize_bias(bias)
    assert abs(loss.calc_expectation(bias.unsqueeze(0)).item()) < 0.6


@pytest.mark.parametrize('transform', TRANSFORMS, ids=lambda t: type(t).__name__)
def test_square_loss_inverts_its_transform(transform):
    loss = losses.SquareLoss(transform)
    target = torch.tensor([-5.0, 0.0, 2.0])
    pred = target if transform is None else transform.transform(target)
    torch.testing.assert_close(loss(pred, target), torch.zeros(3))
    torch.testing.assert_close(loss.calc_expectation(pred), target)


@pytest.mark.parametrize('after_mean', [False, True])
def test_quantile_regression_predicts_a_certain_target(after_mean):
    transform = Sqrt1pTransform()
    loss = losses.QuantileRegressionLoss(transform=transform, inverse_after_mean=after_mean)
    target = torch.tensor([4.0, -1.0])
    pred = transform.transform(target).unsqueeze(-1).expand(2, 5)
    torch.testing.assert_close(loss(pred, target), torch.zeros(2))
    torch.testing.assert_close(loss.calc_expectation(pred), target)
    assert losses.QuantileRegressionLoss().calc_expectation(torch.tensor([[1.0, 3.0]])).item() == 2.0


def test_mean_squared_loss_averages_all_but_the_batch():
    pred, target = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    loss = losses.MeanSquaredLoss()(pred, target)
    torch.testing.assert_close(loss.loss, 0.5 * (pred - target).square().mean((1, 2)))
    assert losses.MeanSquaredLoss(batch_dims=2)(pred, target).loss.shape == (4, 3)
    assert losses.MeanSquaredLoss(batch_dims=3)(pred, target).loss.shape == (4, 3, 2)
    with pytest.raises(ValueError, match='differ in shape'):
        losses.MeanSquaredLoss()(pred, target[:2])


@pytest.mark.parametrize('cls', BINNED)
def test_the_loss_of_an_exact_prediction_is_not_negative(cls):
    weight = torch.rand(5000)
    share = torch.stack((1 - weight, weight), -1)
    pred = share.log() if cls is losses.DiscreteRegressionLoss else torch.stack((weight, torch.logit(weight)), -1)
    shifted = torch.nn.functional.pad(pred, (1, 2), value=-60.0)  # the bins -2 to 2; the value is between -1 and 0
    if cls is losses.OrderedDiscreteRegressionLoss:
        shifted[:, 1] = 60.0
    loss = cls()(shifted, weight - 1)
    assert loss.min() >= 0 and loss.max() < 1e-5
