"""Particles and generators become samples of distributions that are known in closed form."""
import math

import pytest
import torch

from alfx.algorithms.functional_particle_vi_algorithm import FuncParVIAlgorithm
from alfx.algorithms.generator import Generator
from alfx.algorithms.particle_vi_algorithm import ParVIAlgorithm
from alfx.environments.datagen import load_digits
from alfx.optimizers import Adam
from alfx.utils.tensor_loader import TensorLoader


def ready(algorithm):
    algorithm.set_path('')
    algorithm.finalize()
    return algorithm


def annealed(optimizer, lr, step, num_steps):
    """Keep the learning rate at ``lr`` for the first half of the steps, then anneal it to 0."""
    share = min(1.0, 2 - 2 * step / num_steps)
    optimizer.param_groups[0]['lr'] = lr * max(1e-3, 0.5 - 0.5 * math.cos(math.pi * share))


@pytest.mark.parametrize('par_vi', ['svgd', 'gfsf', 'minmax'])
def test_the_posterior_of_linear_regression_has_its_mean_and_covariance(par_vi):
    """Compare the particles with the exact posterior.

    With unit noise and a flat prior the weights are normal, with mean C X^T y and covariance C = (X^T X)^-1. The
    optimal direction is linear, so the critic is linear too; a wide critic would push single particles apart.
    """
    torch.manual_seed(0)
    x = torch.randn(50, 3)
    y = x @ torch.randn(3, 1) + torch.randn(50, 1)
    optimizer, critic_optimizer = Adam(lr=5e-2), Adam(lr=3e-2)
    algorithm = ready(FuncParVIAlgorithm(
        data_creator=lambda: (TensorLoader(x, y, 50), TensorLoader(x, y, 50)), loss_type='regression',
        last_use_bias=False, num_particles=128, par_vi=par_vi, entropy_regularization=None, optimizer=optimizer,
        critic_hidden_layers=(), critic_use_bn=False, critic_l2_weight=1.0, critic_iter_num=5,
        critic_optimizer=critic_optimizer))
    for step in range(300):
        annealed(optimizer, 5e-2, step, 300)
        if par_vi == 'minmax':
            annealed(critic_optimizer, 3e-2, step, 300)
        algorithm.train_iter()
    covariance = torch.linalg.inv(x.T @ x)
    mean = (covariance @ x.T @ y)[:, 0]
    particles = algorithm.particles.detach()
    assert float((particles.mean(0) - mean).norm() / mean.norm()) < 0.03
    assert float((torch.cov(particles.T) - covariance).norm() / covariance.norm()) < 0.15


def test_a_generator_with_a_critic_learns_a_linear_regression_posterior():
    """Learn a correlated posterior that is seven times narrower than the noise of the generator."""
    torch.manual_seed(0)
    x = torch.randn(50, 3)
    y = x @ torch.randn(3, 1) + torch.randn(50, 1)
    optimizer, critic_optimizer = Adam(lr=1e-2), Adam(lr=1e-2)
    generator = ready(Generator(
        3, noise_dim=3, hidden_layers=(), par_vi='minmax', entropy_regularization=1.0, optimizer=optimizer,
        critic_hidden_layers=(32, ), critic_relu_mlp=True, critic_use_bn=False, critic_l2_weight=1.0, critic_iter_num=5,
        critic_optimizer=critic_optimizer))
    for step in range(400):
        annealed(optimizer, 1e-2, step, 400)
        annealed(critic_optimizer, 1e-2, step, 400)
        info = generator.train_step(None, lambda w: 0.5 * (y - x @ w.T).square().sum(0), batch_size=128).info
        generator.update_with_gradient(info)
    covariance = torch.linalg.inv(x.T @ x)
    mean = (covariance @ x.T @ y)[:, 0]
    samples = generator.predict_step(batch_size=20000).output.detach()
    assert float((samples.mean(0) - mean).norm() / mean.norm()) < 0.03
    assert float((torch.cov(samples.T) - covariance).norm() / covariance.norm()) < 0.15


def test_particles_without_repulsion_come_to_the_maximum():
    torch.manual_seed(0)
    optimizer = Adam(lr=0.3)
    algorithm = ready(ParVIAlgorithm(2, num_particles=20, par_vi='svgd', entropy_regularization=0.0,
                                     optimizer=optimizer))
    for step in range(200):
        annealed(optimizer, 0.3, step, 200)
        algorithm.update_with_gradient(algorithm.train_step(lambda x: 0.5 * (x - 3).square().sum(-1)).info)
    torch.testing.assert_close(algorithm.particles.detach(), torch.full((20, 2), 3.0), rtol=0, atol=1e-2)


GENERATORS = {
    'svgd': dict(par_vi='svgd'), 'svgd2': dict(par_vi='svgd2'), 'svgd3': dict(par_vi='svgd3'),
    'gfsf': dict(par_vi='gfsf'),
    'minmax': dict(par_vi='minmax', critic_hidden_layers=(32, ), critic_relu_mlp=True, critic_use_bn=False,
                   critic_l2_weight=1.0, critic_optimizer=Adam(lr=3e-3)),
    'gpvi': dict(functional_gradient=True, direct_jac_inverse=True),
    'gpvi of less noise': dict(functional_gradient=True, direct_jac_inverse=True, noise_dim=1, block_inverse_mvp=True),
    'gpvi by a network': dict(functional_gradient=True, inverse_mvp_hidden_size=32, inverse_mvp_solve_iters=2,
                              inverse_mvp_optimizer=Adam(lr=3e-3)),
}


@pytest.mark.parametrize('kind', GENERATORS)
def test_a_linear_generator_learns_the_variances_of_a_normal_distribution(kind):
    """Learn variances 1 and 4 with correlation 0."""
    torch.manual_seed(0)
    variances, optimizer = torch.tensor([1.0, 4.0]), Adam(lr=3e-2)
    generator = ready(Generator(2, **{'noise_dim': 2, **GENERATORS[kind]}, hidden_layers=(),
                                entropy_regularization=1.0, optimizer=optimizer,
                                lambda_trainable=kind == 'gpvi of less noise'))
    for step in range(300):
        annealed(optimizer, 3e-2, step, 300)
        info = generator.train_step(None, lambda x: 0.5 * (x.square() / variances).sum(-1), batch_size=128).info
        generator.update_with_gradient(info)
    samples = generator.predict_step(batch_size=20000).output.detach()
    assert float((torch.cov(samples.T) - torch.diag(variances)).norm() / variances.norm()) < 0.15
    assert float(samples.mean(0).abs().max()) < 0.15


def test_function_space_detects_unknown_digits_like_a_deep_ensemble():
    pytest.importorskip('sklearn')
    found = {}
    for par_vi in (None, 'svgd'):
        torch.manual_seed(0)
        algorithm = ready(FuncParVIAlgorithm(
            data_creator=lambda: load_digits((0, 1, 2, 3, 4, 5)),
            data_creator_outlier=lambda: load_digits((6, 7, 8, 9)),
            num_train_classes=6, fc_layer_params=(64, ), num_particles=5, par_vi=par_vi,
            function_vi=par_vi is not None, entropy_regularization=None, optimizer=Adam(lr=3e-3)))
        for _ in range(20):
            algorithm.train_iter()
        assert algorithm.evaluate()['test_accuracy'] >= 0.97
        found[par_vi] = algorithm.eval_uncertainty()
    for measure in ('auroc_entropy', 'auroc_variance'):
        assert getattr(found['svgd'], measure) >= max(0.9, getattr(found[None], measure) - 0.01)
