"""The bounds of mutual information against loops over samples, constants worked out by hand, and closed forms."""
import math

import pytest
import torch

from alfx.algorithms.mi_estimator import MIEstimator, _exp
from alfx.networks.network import Network
from alfx.tensor_specs import TensorSpec
from alfx.utils.averager import ScalarEMAverager
from alfx.utils.dist_utils import DiagMultivariateNormal

SCALAR = TensorSpec((1, ))


class Product(Network):
    """T(x, y) = factor * x * y, with a factor that can be trained."""

    def __init__(self, factor=1.0):
        super().__init__([SCALAR, SCALAR], (), 'Product')
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, inputs, state=()):
        return self.factor * inputs[0] * inputs[1], state


class LogRatio(Network):
    """The pointwise mutual information of two normal variables of variance 1 with correlation rho."""

    def __init__(self, rho):
        super().__init__([SCALAR, SCALAR], (), 'LogRatio')
        self.rho = rho

    def forward(self, inputs, state=()):
        x, y = inputs
        variance = 1 - self.rho**2
        return y**2 / 2 - (y - self.rho * x)**2 / (2 * variance) - math.log(variance) / 2, state


class Line(Network):
    """q(y|x) = N(slope * x, 0.5)."""

    def __init__(self):
        super().__init__(SCALAR, (), 'Line')
        self.slope = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs, state=()):
        return DiagMultivariateNormal(self.slope * inputs, 0.5), state


def make(estimator_type, model, sampler='shift', **args):
    return MIEstimator(SCALAR, SCALAR, model=model, sampler=sampler, estimator_type=estimator_type, **args)


def column(*values):
    return torch.tensor(values)[:, None]


def slow_bounds(estimator_type, x, y, factor, mean=None):
    """Return the bounds, with the previous sample's y as the sample of Q; ``mean`` is the mean of exp(T)."""
    bounds = []
    for i in range(len(x)):
        joint, product = factor * x[i] * y[i], factor * x[i] * y[i - 1]
        if estimator_type == 'DV':
            bounds.append(joint - math.log(mean) - math.exp(product) / mean + 1)
        elif estimator_type == 'KLD':
            bounds.append(joint - math.exp(product) + 1)
        else:
            bounds.append(-math.log(1 + math.exp(-joint)) - math.log(1 + math.exp(product)) + math.log(4))
    return bounds


@pytest.mark.parametrize('estimator_type', ['DV', 'KLD', 'JSD'])
def test_bounds_equal_a_loop_over_the_samples(estimator_type):
    torch.manual_seed(0)
    x, y = torch.randn(7, 1), torch.randn(7, 1)
    step = make(estimator_type, Product(0.6)).train_step((x, y))
    products = [math.exp(0.6 * float(x[i, 0] * y[i - 1, 0])) for i in range(7)]
    expected = slow_bounds(estimator_type, x[:, 0].tolist(), y[:, 0].tolist(), 0.6, sum(products) / 7)
    torch.testing.assert_close(step.output.tolist(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(step.info.loss, -step.output) and torch.equal(step.info.extra.bound, step.output)


def test_bounds_of_two_samples_worked_out_by_hand():
    # T = x y: of P 1 * 2 = 2 and 0 * 1 = 0, of Q (y shifted to 1, 2) 1 * 1 = 1 and 0 * 2 = 0
    batch = column(1., 0.), column(2., 1.)
    assert make('KLD', Product()).train_step(batch).output.tolist() == pytest.approx([2 - math.e + 1, 0.0])
    # mean of exp(T) over Q: (e + 1) / 2 = 1.85914, its logarithm 0.62011; mean of P 1, bound 0.37989
    assert make('DV', Product()).train_step(batch).output.mean().item() == pytest.approx(0.37989, abs=1e-5)
    # softplus(-2) 0.126928, softplus(0) 0.693147, softplus(1) 1.313262: 1.386294 - 0.126928 - 1.313262 and 0
    assert make('JSD', Product()).train_step(batch).output.tolist() == pytest.approx([-0.053896, 0.0], abs=1e-5)


def test_ml_is_the_difference_of_log_probabilities():
    # q(y|x) = N(0.7 x, 0.5) at x = 1, y = 1.2: -ln 0.5 - 0.5 = 0.193147 - c; P(y) = N(0, 1): -0.72 - c
    prior = DiagMultivariateNormal(torch.zeros(1), 1.0)
    estimator = make('ML', Line())
    step = estimator.train_step((column(1.), column(1.2)), prior)
    assert float(step.output) == pytest.approx(0.193147 + 0.72, abs=1e-5)
    assert float(estimator.calc_pmi(column(1.), column(1.2), prior)) == pytest.approx(float(step.output))


def test_dv_follows_the_gradient_of_the_logarithm_of_a_running_mean():
    torch.manual_seed(1)
    batches = [(torch.randn(5, 1), torch.randn(5, 1)) for _ in range(3)]
    model = Product(0.5)
    estimator = make('DV', model, averager=ScalarEMAverager(update_rate=0.1))
    means = []
    for x, y in batches:
        product = 0.5 * x * y.roll(1, 0)
        means.append(float(product.exp().mean()))
        model.factor.grad = None
        estimator.train_step((x, y)).info.loss.mean().backward()
    # weights 0.1 * 0.9^2, 0.1 * 0.9, 0.1, divided by their sum
    average = (0.081 * means[0] + 0.09 * means[1] + 0.1 * means[2]) / 0.271
    x, y = batches[-1]
    expected = float((x * y).mean() - (x * y.roll(1, 0) * (0.5 * x * y.roll(1, 0)).exp()).mean() / average)
    assert float(model.factor.grad) == pytest.approx(-expected, rel=1e-4)
    # the first batch: exactly the gradient of the bound itself
    model.factor.grad = None
    x, y = batches[0]
    make('DV', model).train_step((x, y)).info.loss.mean().backward()
    found = model.factor.grad.clone()
    bound = (model.factor * x * y).mean() - (model.factor * x * y.roll(1, 0)).exp().mean().log()
    exact, = torch.autograd.grad(-bound, model.factor)
    torch.testing.assert_close(found, exact)


def gaussians(count, rho):
    x = torch.randn(count, 1)
    return x, rho * x + math.sqrt(1 - rho**2) * torch.randn(count, 1)


@pytest.mark.parametrize('sampler', ['shift', 'shuffle', 'buffer', 'double_buffer'])
@pytest.mark.parametrize('estimator_type', ['DV', 'KLD', 'JSD'])
def test_the_true_log_ratio_gives_the_divergence(estimator_type, sampler):
    torch.manual_seed(2)
    rho, count = 0.6, 100000
    x, y = gaussians(count, rho)
    estimator = make(estimator_type, LogRatio(rho), sampler, buffer_size=count)
    found = float(estimator.train_step((x, y)).output.mean())
    information = -math.log(1 - rho**2) / 2  # 0.2231
    if estimator_type == 'JSD':
        ratio = LogRatio(rho)([x, y])[0].exp()  # twice JSD = E_P[log 2r/(1+r)] + E_P[1/r log 2/(1+r)]
        information = float(((2 * ratio / (1 + ratio)).log() + (2 / (1 + ratio)).log() / ratio).mean())
    assert found == pytest.approx(information, abs=0.012)
    assert float(estimator.calc_pmi(x, y).mean()) == pytest.approx(0.2231, abs=0.012)


def test_no_statistic_exceeds_the_mutual_information():
    torch.manual_seed(3)
    x, y = gaussians(100000, 0.6)
    for factor in (0.1, 0.4, 0.8):
        for estimator_type in ('DV', 'KLD'):
            bound = float(make(estimator_type, Product(factor)).train_step((x, y)).output.mean())
            assert bound < 0.2231


def test_the_free_constant_of_dv_is_subtracted_from_the_pointwise_value():
    """Pointwise information is reported without the constant that the DV bound leaves open."""
    class Shifted(LogRatio):
        def forward(self, inputs, state=()):
            return super().forward(inputs)[0] + 3.0, state

    torch.manual_seed(4)
    x, y = gaussians(50000, 0.5)
    estimator = make('DV', Shifted(0.5))
    assert float(estimator.calc_pmi(x, y).mean()) > 3  # it has no statistics yet
    estimator.train_step((x, y))
    torch.testing.assert_close(estimator.calc_pmi(x, y), LogRatio(0.5)([x, y])[0].squeeze(1), atol=0.05, rtol=0)


def test_the_exponential_continues_linearly():
    x = torch.tensor([-3., 0., 19., 21., 200.], requires_grad=True)
    y = _exp(x)
    slope = math.exp(20)
    torch.testing.assert_close(y, torch.tensor([math.exp(-3), 1.0, math.exp(19), 2 * slope, 181 * slope]))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([math.exp(-3), 1.0, math.exp(19), slope, slope]))


def test_with_an_average_kld_is_dv_and_jsd_shifts_its_statistic():
    x, y = torch.randn(6), torch.randn(6)
    mean = sum(math.exp(0.8 * x[i] * y[i - 1]) for i in range(6)) / 6  # of the first batch
    for kind in ('KLD', 'JSD'):
        estimator = make(kind, Product(0.8), averager=ScalarEMAverager(1.0))
        found = estimator.train_step((x[:, None], y[:, None])).output
        if kind == 'KLD':
            expected = slow_bounds('DV', x, y, 0.8, mean)
        else:
            expected = [math.log(4) - math.log(1 + mean * math.exp(-0.8 * x[i] * y[i]))
                        - math.log(1 + math.exp(0.8 * x[i] * y[i - 1]) / mean) for i in range(6)]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(estimator.calc_pmi(x[:, None], y[:, None]), 0.8 * x * y - math.log(mean))
