"""Particles, generators and hypernetworks: inputs, outputs and invalid settings."""
from functools import partial

import pytest
import torch

from alfx import context
from alfx.algorithms import generator as generator_module
from alfx.algorithms.functional_particle_vi_algorithm import FuncParVIAlgorithm
from alfx.algorithms.generator import Generator, GeneratorLossInfo, InverseMVPAlgorithm
from alfx.algorithms.hypernetwork_algorithm import HyperNetwork
from alfx.algorithms.particle_vi_algorithm import ParVIAlgorithm
from alfx.data_structures import LossInfo
from alfx.environments.datagen import load_test
from alfx.gin_utils import ConfError
from alfx.layers import FC
from alfx.networks.containers import Sequential
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity
from alfx.utils.tensor_loader import TensorLoader


def classes(n=60, seed=0):
    """Three blobs."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(n) % 3
    centers = torch.tensor([[0.0, 2.0], [2.0, 0.0], [-2.0, -2.0]])
    return TensorLoader(centers[targets] + 0.3 * torch.randn(n, 2, generator=generator), targets, 20)


def loaders():
    return classes(), classes(seed=1)


def far_away():
    return tuple(TensorLoader(20 * torch.ones(20, 2) + i, torch.zeros(20, dtype=torch.int64), 20) for i in range(2))


def make(cls, **kwargs):
    context.reset()
    algorithm = cls(**{**dict(data_creator=loaders, data_creator_outlier=far_away, num_train_classes=3,
                              fc_layer_params=(16, ), entropy_regularization=None, optimizer=Adam(lr=1e-2)), **kwargs})
    algorithm.set_path('')
    algorithm.finalize()
    return algorithm


def squares(x):
    return 0.5 * x.square().sum(-1)


# Particles -----------------------------------------------------------------------------------------------------


def test_a_loss_function_may_return_a_tuple_with_more():
    algorithm = ParVIAlgorithm(2, num_particles=3)
    info = algorithm.train_step(lambda x: LossInfo(loss=squares(x), extra={'a': x.sum(-1)})).info
    assert info.loss.shape == (3, ) and 'a' in info.extra['more']
    torch.testing.assert_close(info.extra['neg_log_density'], squares(algorithm.particles.detach()))
    with pytest.raises(ValueError, match=r'expected loss_func to return a loss \[3\].*found \[3, 2\]'):
        algorithm.train_step(lambda x: x)


def test_masked_particles_do_not_move():
    algorithm = ParVIAlgorithm(2, num_particles=3)
    algorithm.train_step(squares, loss_mask=torch.tensor([1.0, 0.0, 1.0])).info.loss.sum().backward()
    assert algorithm.particles.grad.any(dim=1).tolist() == [True, False, True]


def test_the_weight_of_the_repulsion_can_be_given_for_a_step():
    algorithm = ParVIAlgorithm(2, num_particles=3, par_vi='svgd', entropy_regularization=0.0)
    losses = [algorithm.train_step(squares, entropy_regularization=w).info.loss for w in (None, 0.0, 2.0)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


@pytest.mark.parametrize('kwargs, name', [
    (dict(par_vi='svgdd'), 'ParVIAlgorithm.par_vi'), (dict(num_particles=0), 'ParVIAlgorithm.num_particles'),
    (dict(par_vi='minmax'), 'ParVIAlgorithm.critic_optimizer')])
def test_particles_that_make_no_sense_are_rejected(kwargs, name):
    with pytest.raises(ConfError, match=name):
        ParVIAlgorithm(2, **kwargs)


def test_the_critic_learns_by_its_own_optimizer_alone():
    algorithm = ParVIAlgorithm(2, num_particles=8, par_vi='minmax', critic_hidden_layers=(8, ),
                               critic_optimizer=Adam(lr=1e-2), optimizer=Adam(lr=0.0))
    algorithm.finalize()
    before = [p.detach().clone() for p in algorithm._critic.parameters()]
    particles = algorithm.particles.detach().clone()
    step = algorithm.train_step(squares)
    moved = [p.detach().clone() for p in algorithm._critic.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, moved)) and torch.equal(particles, algorithm.particles)
    algorithm.update_with_gradient(step.info)
    assert all(torch.equal(a, b) for a, b in zip(moved, algorithm._critic.parameters()))


# Ensembles of networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('kwargs', [
    dict(par_vi=None), dict(par_vi='svgd'), dict(par_vi='gfsf'), dict(par_vi='svgd', function_vi=True),
    dict(par_vi='gfsf', function_vi=True, function_extra_bs_sampler='normal', function_bs=20),
    dict(par_vi='minmax', critic_optimizer=Adam(lr=1e-3), critic_hidden_layers=(8, )), dict(prior_stddev=1.0)])
def test_an_ensemble_learns_classes_and_is_unsure_far_away(kwargs):
    algorithm = make(FuncParVIAlgorithm, num_particles=5, **kwargs)
    for _ in range(160 if 'critic_optimizer' in kwargs else 40):  # a critic learns first
        assert algorithm.train_iter() == 3
    measures = algorithm.evaluate()
    assert measures['test_accuracy'] > 0.95 and measures['test_nll'] < 0.3
    assert all(0 <= x for x in algorithm.eval_uncertainty())


@pytest.mark.parametrize('kwargs', [
    dict(), dict(par_vi='svgd2'), dict(par_vi='gfsf', generator_use_fc_bn=True), dict(par_vi='svgd', function_vi=True),
    dict(par_vi='svgd2', function_vi=True), dict(par_vi='gfsf', function_vi=True, prior_stddev=None),
    dict(par_vi='minmax', critic_optimizer=Adam(lr=1e-3), critic_hidden_layers=(8, )),
    dict(par_vi='svgd3', functional_gradient=True, direct_jac_inverse=True, noise_dim=4),
    dict(par_vi='svgd3', functional_gradient=True, block_inverse_mvp=True, noise_dim=4, lambda_trainable=True,
         lambda_optimizer=Adam(lr=1e-3), inverse_mvp_optimizer=Adam(lr=1e-3))])
def test_a_hypernetwork_learns_classes(kwargs):
    algorithm = make(HyperNetwork, num_particles=6, hidden_layers=(16, ), **kwargs)
    for _ in range(40):
        algorithm.train_iter()
    assert algorithm.evaluate(num_particles=9)['test_accuracy'] > 0.9
    assert len(algorithm.eval_uncertainty(num_particles=9)) == 6


def test_any_network_can_be_a_particle_and_be_extracted():
    net = Sequential(FC(2, 4, torch.tanh), FC(4, 3))
    algorithm = make(FuncParVIAlgorithm, param_net=net, num_particles=4)
    algorithm.train_iter()
    inputs = torch.randn(5, 2)
    single = algorithm.param_net.single_network(algorithm.particles[2].detach())
    torch.testing.assert_close(single(inputs)[0], algorithm.predict_step(inputs).output[:, 2])
    assert algorithm.predict_step(inputs, params=algorithm.particles[0]).output.shape == (5, 3)
    constructed = make(FuncParVIAlgorithm, param_net=partial(EncodingNetwork, last_layer_size=3,
                                                             last_activation=identity))
    assert constructed.predict_step(inputs).output.shape == (5, 10, 3)


def test_the_default_repulsion_weight_is_batch_size_over_sample_count():
    algorithm = make(FuncParVIAlgorithm)
    assert algorithm._entropy_regularization == pytest.approx(20 / 60)
    algorithm.set_data_loader(*loaders(), entropy_regularization=0.25)
    assert algorithm._entropy_regularization == 0.25
    later = make(HyperNetwork, data_creator=None, data_creator_outlier=None, input_tensor_spec=TensorSpec((2, )),
                 output_dim=3)
    with pytest.raises(ConfError, match='no data to train on'):
        later.train_iter()
    later.set_data_loader(*loaders())
    assert later._entropy_regularization == pytest.approx(20 / 60) and later.train_iter() == 3


def test_samples_that_do_not_count_do_not_affect_a_step():
    algorithm = make(FuncParVIAlgorithm, par_vi=None)
    inputs, targets = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    masked = algorithm.train_step((inputs, targets), loss_mask=torch.tensor([1.0, 1.0, 0.0, 0.0])).info.loss
    torch.testing.assert_close(masked, algorithm.train_step((inputs[:2], targets[:2])).info.loss)


def test_the_prior_is_scaled_by_the_fraction_of_data_in_a_batch():
    plain, prior = (make(FuncParVIAlgorithm, par_vi=None, prior_stddev=stddev) for stddev in (None, 0.5))
    with torch.no_grad():
        prior.particles.copy_(plain.particles)
    batch = torch.randn(15, 2), torch.zeros(15, dtype=torch.int64)
    difference = prior.train_step(batch).info.loss - plain.train_step(batch).info.loss
    torch.testing.assert_close(difference, plain.particles.square().sum(-1) / (2 * 0.5**2) * 15 / 60)


def test_extra_inputs_lie_between_or_around_those_of_the_batch():
    inputs = torch.tensor([[0.0, 5.0], [1.0, 9.0]])
    space = make(FuncParVIAlgorithm, function_vi=True, function_bs=100, function_extra_bs_ratio=0.5)._function_space
    extra = space.extra_inputs(inputs)
    assert extra.shape == (50, 2) and bool((extra >= inputs.amin(0)).all() and (extra <= inputs.amax(0)).all())
    space = make(FuncParVIAlgorithm, function_vi=True, function_extra_bs_sampler='normal', function_extra_bs_std=0.0,
                 function_extra_bs_ratio=2.0)._function_space
    assert {tuple(row) for row in space.extra_inputs(inputs).tolist()} <= {(0.0, 5.0), (1.0, 9.0)}


@pytest.mark.parametrize('cls, kwargs, message', [
    (FuncParVIAlgorithm, dict(par_vi='minmax', function_vi=True), 'function_vi = True is not possible'),
    (FuncParVIAlgorithm, dict(function_vi=True, prior_stddev=1.0), 'is a prior of parameters'),
    (FuncParVIAlgorithm, dict(loss_type='regresion'), 'loss_type'),
    (FuncParVIAlgorithm, dict(loss_type='regression'), r'expected targets \[B, '),
    (FuncParVIAlgorithm, dict(voting='loud'), 'voting'), (FuncParVIAlgorithm, dict(num_train_classes=2), 'a class 2'),
    (FuncParVIAlgorithm, dict(data_creator=None), 'data_creator is not set'),
    (FuncParVIAlgorithm, dict(data_creator=load_test), 'expected int64 targets'),
    (FuncParVIAlgorithm, dict(function_vi=True, function_extra_bs_sampler='odd'), 'function_extra_bs_sampler'),
    (FuncParVIAlgorithm, dict(param_net=Sequential(FC(2, 4))), r'expected 3 numbers \(output_dim\)'),
    (HyperNetwork, dict(par_vi='minmax', function_vi=True), 'function_vi = True is not possible'),
    (HyperNetwork, dict(function_vi=True, functional_gradient=True, direct_jac_inverse=True),
     'functional_gradient.*cannot be used together'),
    (HyperNetwork, dict(par_vi='gfsf', functional_gradient=True), 'cannot be used together'),
    (HyperNetwork, dict(functional_gradient=True), 'inverse_mvp_optimizer is required'),
    (HyperNetwork, dict(num_particles=0), 'num_particles')])
def test_meaningless_ensembles_are_rejected(cls, kwargs, message):
    with pytest.raises(ConfError, match=message):
        make(cls, **kwargs)


@pytest.mark.parametrize('kwargs, message', [
    (dict(data_creator_outlier=None), 'bind it, such as FuncParVIAlgorithm.data_creator_outlier'),
    (dict(data_creator=load_test, loss_type='regression', num_train_classes=2), 'evaluated only for classification')])
def test_uncertainty_without_required_data_is_rejected(kwargs, message):
    with pytest.raises(ConfError, match=message):
        make(FuncParVIAlgorithm, **kwargs).eval_uncertainty()


# Generators ----------------------------------------------------------------------------------------------------


def test_a_generator_without_regularization_minimizes_the_loss():
    generator = Generator(2, noise_dim=3, optimizer=Adam(lr=1e-2))
    generator.finalize()
    for _ in range(200):
        generator.update_with_gradient(generator.train_step(None, lambda x: squares(x - 1), batch_size=64).info)
    torch.testing.assert_close(generator.predict_step(batch_size=20).output, torch.ones(20, 2), rtol=0.2, atol=0.2)


def test_a_generator_with_inputs_makes_an_output_for_each():
    generator = Generator(2, noise_dim=3, input_tensor_spec=TensorSpec((4, )), par_vi='svgd',
                          entropy_regularization=1.0, use_kernel_averager=True)
    inputs = torch.randn(6, 4)
    step = generator.train_step(inputs, lambda pair: squares(pair[0] - pair[1][:, :2]))
    assert step.output.shape == (6, 2) and step.info.loss.shape == (6, )
    assert isinstance(step.info.extra, GeneratorLossInfo)
    with pytest.raises(ValueError, match='expected inputs, found none'):
        generator.predict_step(batch_size=3)
    with pytest.raises(ValueError, match='set batch_size'):
        Generator(2).predict_step()


def test_a_generator_predicts_with_its_moving_average():
    generator = Generator(2, noise_dim=3, net_moving_average_rate=0.5, optimizer=Adam(lr=0.1))
    generator.finalize()
    noise = torch.randn(4, 3)
    before = generator.predict_step(noise=noise).output
    generator.update_with_gradient(generator.train_step(None, squares, batch_size=4).info)
    assert torch.equal(generator.predict_step(noise=noise).output, before)
    generator.after_update(())
    assert not torch.equal(generator.predict_step(noise=noise).output, before)
    assert not torch.equal(generator.predict_step(noise=noise, training=True).output,
                           generator.predict_step(noise=noise).output)


def test_a_generator_can_maximize_mutual_information():
    generator = Generator(2, noise_dim=2, mi_weight=0.1, par_vi='svgd2', entropy_regularization=1.0,
                          optimizer=Adam(lr=1e-2))
    generator.finalize()
    info = generator.train_step(None, squares, batch_size=9).info
    assert info.loss.shape == (5, ) and info.scalar_loss.ndim == 0
    before = [p.detach().clone() for p in generator._mi_estimator.parameters()]
    generator.update_with_gradient(info)
    assert any(not torch.equal(a, b) for a, b in zip(before, generator._mi_estimator.parameters()))


def test_mutual_information_of_a_generator_with_padded_noise():
    generator = Generator(3, noise_dim=2, functional_gradient=True, direct_jac_inverse=True, mi_weight=0.1,
                          entropy_regularization=1.0)
    info = generator.train_step(None, squares, batch_size=8).info
    assert torch.isfinite(info.loss).all() and torch.isfinite(info.scalar_loss)


def test_repulsion_without_a_method_is_an_error_in_a_step_too():
    with pytest.raises(ValueError, match='has no effect with par_vi=None'):
        Generator(2, noise_dim=2).train_step(None, squares, batch_size=8, entropy_regularization=5.0)


@pytest.mark.parametrize('kwargs, message', [
    (dict(entropy_regularization=1.0), 'has no effect with par_vi=None'),
    (dict(par_vi='svgd3', input_tensor_spec=TensorSpec((1, ))), 'compares outputs of different inputs'),
    (dict(functional_gradient=True, direct_jac_inverse=True, noise_dim=3), 'is larger than output_dim'),
    (dict(lambda_trainable=True), 'only with functional_gradient'), (dict(par_vi='svgd4'), 'par_vi'),
    (dict(net_moving_average_rate=2.0), 'net_moving_average_rate')])
def test_generators_that_make_no_sense_are_rejected(kwargs, message):
    with pytest.raises(ConfError, match=message):
        Generator(2, **kwargs)


def test_answers_as_particles_are_rejected_where_there_is_no_second_sample():
    with pytest.raises(ValueError, match='transform_func requires par_vi svgd2, svgd3 or gfsf, found svgd'):
        Generator(2, par_vi='svgd', entropy_regularization=1.0).train_step(None, squares, 4, lambda x: (x, x, x))


@pytest.mark.parametrize('kwargs', [dict(direct_jac_inverse=True), dict(direct_jac_inverse=True, noise_dim=2),
                                    dict(direct_jac_inverse=True, noise_dim=2, block_inverse_mvp=True)])
def test_products_with_inverse_jacobians_are_the_same_in_pieces(kwargs, monkeypatch):
    generator = Generator(3, **{'noise_dim': 3, **kwargs}, hidden_layers=(8, ), functional_gradient=True,
                          entropy_regularization=1.0)
    losses = []
    for numbers in (1 << 22, 1):
        monkeypatch.setattr(generator_module, '_ROWS_AT_ONCE', numbers)
        torch.manual_seed(2)
        losses.append(generator.train_step(None, squares, batch_size=7).info.loss)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_inverse_products_of_several_vectors_match_single_ones():
    algorithm = InverseMVPAlgorithm(2, 3, hidden_size=8, num_hidden_layers=2)
    z, vec = torch.randn(4, 5), torch.randn(4, 6, 3)
    output, head = algorithm.predict_step((z, vec)).output
    assert torch.equal(head, z[:, :2])
    for i in range(6):
        torch.testing.assert_close(output[:, i], algorithm.predict_step((z, vec[:, i])).output[0])


def test_layers_next_to_a_given_network_are_logged(caplog):
    caplog.set_level('INFO')
    make(FuncParVIAlgorithm, param_net=Sequential(FC(2, 3)), fc_layer_params=None)
    assert 'is not used' not in caplog.text
    make(FuncParVIAlgorithm, param_net=Sequential(FC(2, 3)), fc_layer_params=(4, ), last_use_ln=True)
    for name in ('fc_layer_params', 'last_use_ln'):
        assert f'FuncParVIAlgorithm.{name} is not used: param_net is given' in caplog.text


def test_arguments_of_a_generator_that_have_no_effect_are_logged(caplog):
    caplog.set_level('INFO')
    Generator(2, noise_dim=2)
    assert 'is not used' not in caplog.text
    Generator(2, noise_dim=2, init_lambda=2.0, block_inverse_mvp=True, critic_optimizer=Adam())
    for name in ('init_lambda', 'block_inverse_mvp', 'critic_optimizer'):
        assert f'Generator.{name} is not used' in caplog.text
