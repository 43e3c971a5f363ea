"""Estimators match the mutual information of correlated normal variables, which is known in closed form."""
import math

import pytest
import torch

from alfx.algorithms.mi_estimator import MIEstimator
from alfx.optimizers import Adam
from alfx.tensor_specs import TensorSpec
from alfx.utils.dist_utils import DiagMultivariateNormal


class Estimate:
    """An estimator trained on variables with ``size`` components, each pair with correlation ``rho``."""

    def __init__(self, estimator_type, sampler='buffer', size=2, rho=0.8, fc_layers=(64, 64)):
        torch.manual_seed(0)
        spec = TensorSpec((size, ))
        self.size, self.rho, self.learning_rate = size, rho, 2e-3
        self.prior = DiagMultivariateNormal(torch.zeros(size), torch.ones(size))
        self.needs_prior = estimator_type == 'ML'
        self.estimator = MIEstimator(spec, spec, fc_layers=fc_layers, sampler=sampler, estimator_type=estimator_type,
                                     optimizer=Adam(lr=lambda: self.learning_rate))
        self.estimator.finalize()

    @property
    def exact(self):
        return -self.size * math.log(1 - self.rho**2) / 2

    def draw(self, count):
        x = torch.randn(count, self.size)
        return x, self.rho * x + math.sqrt(1 - self.rho**2) * torch.randn(count, self.size)

    def train(self, steps, batch_size=256):
        """Train and return the mean bound of the last quarter, in which the learning rate is lower."""
        bounds = []
        for i in range(steps):
            self.learning_rate = 2e-3 if i < 3 * steps // 4 else 3e-4
            step = self.estimator.train_step(self.draw(batch_size), self.prior if self.needs_prior else None)
            self.estimator.update_with_gradient(step.info)
            if i >= 3 * steps // 4:
                bounds.append(float(step.output.detach().mean()))
        return sum(bounds) / len(bounds)

    def mean_pmi(self):
        with torch.no_grad():
            return float(self.estimator.calc_pmi(*self.draw(20000), self.prior).mean())


@pytest.mark.parametrize('estimator_type', ['DV', 'KLD', 'ML'])
def test_a_short_training_finds_most_of_the_mutual_information(estimator_type):
    estimate = Estimate(estimator_type, size=1, fc_layers=(32, 32))
    bound = estimate.train(300, batch_size=128)
    assert 0.8 * estimate.exact < bound < 1.1 * estimate.exact  # 0.511 nats


@pytest.mark.slow
@pytest.mark.parametrize('estimator_type', ['DV', 'KLD', 'ML'])
def test_the_mutual_information_of_normals_is_right_within_10_percent(estimator_type):
    estimate = Estimate(estimator_type)
    bound = estimate.train(1500)
    assert bound == pytest.approx(estimate.exact, rel=0.1)  # 1.022 nats
    assert estimate.mean_pmi() == pytest.approx(estimate.exact, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('sampler', ['double_buffer', 'shuffle', 'shift'])
def test_every_sampler_estimates_the_exact_information(sampler):
    estimate = Estimate('KLD', sampler=sampler)
    assert estimate.train(700) == pytest.approx(estimate.exact, rel=0.12)


@pytest.mark.slow
def test_the_pointwise_information_of_jsd_comes_close():
    estimate = Estimate('JSD')
    bound = estimate.train(800)
    assert 0.4 < bound < 2 * math.log(2)
    assert estimate.mean_pmi() == pytest.approx(estimate.exact, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize('estimator_type', ['KLD', 'ML'])
def test_conditional_mutual_information_differs_from_unconditional(estimator_type):
    """Estimate y = z + v where x and v have correlation 0.8: MI(x, y | z) is 0.511, MI(x, y) is 0.193 nats."""
    torch.manual_seed(0)
    spec = TensorSpec((1, ))
    estimator = MIEstimator([spec, spec], spec, fc_layers=(64, 64), sampler='shift', estimator_type=estimator_type,
                            optimizer=Adam(lr=2e-3))
    estimator.finalize()
    found = []
    for i in range(900):
        x, z = torch.randn(256, 1), torch.randn(256, 1)
        y = z + 0.8 * x + 0.6 * torch.randn(256, 1)
        step = estimator.train_step(([x, z], y), DiagMultivariateNormal(z, 1.0))
        estimator.update_with_gradient(step.info)
        if i >= 600:
            found.append(float(step.output.detach().mean()))
    assert sum(found) / len(found) == pytest.approx(-math.log(1 - 0.64) / 2, rel=0.1)
