"""Classes of particles, generated networks and phasic policy gradients have the documented arguments.

``DELIBERATE`` contains intentional differences, which docs/coverage.md lists.
"""
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from alfx.algorithms import (functional_particle_vi_algorithm, generator, hypernetwork_algorithm, particle_vi_algorithm,
                             ppg_algorithm)
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.mi_estimator import MIEstimator
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.particle_vi_algorithm import ParVIAlgorithm
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity

COVERAGE = Path(__file__).parents[3] / 'docs' / 'coverage.md'
NAMES = {'torch': torch, 'identity': identity, 'MIEstimator': MIEstimator, 'EncodingNetwork': EncodingNetwork,
         'PPGAuxOptions': ppg_algorithm.PPGAuxOptions, 'TensorSpec': TensorSpec}


class Documented(NamedTuple):
    """The documented interface of a class: base, constructor arguments, methods and properties."""
    found: Any
    base: type
    arguments: str
    methods: list
    properties: list


CLASSES = [
    Documented(particle_vi_algorithm.ParVIAlgorithm, Algorithm, """
        particle_dim, num_particles=10, entropy_regularization=1.0, par_vi='gfsf', critic_input_dim=None,
        critic_hidden_layers=(100, 100), critic_l2_weight=10.0, critic_iter_num=2, critic_use_bn=True,
        critic_optimizer=None, optimizer=None, debug_summaries=False, name='ParVIAlgorithm'""",
               ['predict_step(state)',
                'train_step(loss_func, transform_func, entropy_regularization, loss_mask, state)'],
               ['num_particles', 'particles']),
    Documented(functional_particle_vi_algorithm.FuncParVIAlgorithm, ParVIAlgorithm, """
        data_creator=None, data_creator_outlier=None, input_tensor_spec=None, output_dim=None, param_net=None,
        conv_layer_params=None, fc_layer_params=None, use_conv_bias=False, use_conv_ln=False, use_fc_bias=True,
        use_fc_ln=False, activation=torch.relu_, last_activation=identity, last_use_bias=True, last_use_ln=False,
        num_particles=10, entropy_regularization=1.0, loss_type='classification', voting='soft', par_vi='svgd',
        function_vi=False, function_bs=None, function_extra_bs_ratio=0.1, function_extra_bs_sampler='uniform',
        function_extra_bs_std=1.0, critic_hidden_layers=(100, 100), critic_iter_num=2, critic_l2_weight=10.0,
        critic_use_bn=True, num_train_classes=10, optimizer=None, critic_optimizer=None, logging_network=False,
        logging_training=False, logging_evaluate=False, config=None, debug_summaries=False,
        name='FuncParVIAlgorithm'""",
               ['eval_uncertainty()', 'predict_step(inputs, params, state)',
                'set_data_loader(train_loader, test_loader, outlier_data_loaders, entropy_regularization)',
                'summarize_train(loss_info, params, cum_loss, avg_acc)', 'train_iter(state)',
                'train_step(inputs, entropy_regularization, loss_mask, state)'], []),
    Documented(generator.CriticAlgorithm, Algorithm, """
        input_tensor_spec, output_dim=None, hidden_layers=(3, 3), activation=torch.relu_, net=None,
        use_relu_mlp=False, use_bn=True, optimizer=None, name='CriticAlgorithm'""",
               ['predict_step(inputs, state, requires_jac_diag)'], []),
    Documented(generator.Generator, Algorithm, """
        output_dim, noise_dim=32, input_tensor_spec=None, hidden_layers=(256,), net=None,
        net_moving_average_rate=None, entropy_regularization=0.0, mi_weight=None, mi_estimator_cls=MIEstimator,
        par_vi=None, use_kernel_averager=False, functional_gradient=False, init_lambda=1.0,
        lambda_trainable=False, block_inverse_mvp=False, direct_jac_inverse=False, inverse_mvp_solve_iters=1,
        inverse_mvp_hidden_size=100, inverse_mvp_hidden_layers=1, critic_input_dim=None,
        critic_hidden_layers=(100, 100), critic_l2_weight=10.0, critic_iter_num=2, critic_relu_mlp=False,
        critic_use_bn=True, minmax_resample=True, critic_optimizer=None, inverse_mvp_optimizer=None,
        optimizer=None, lambda_optimizer=None, name='Generator'""",
               ['after_update(training_info)', 'predict_step(inputs, noise, batch_size, training, state)',
                'train_step(inputs, loss_func, batch_size, transform_func, entropy_regularization, state)'],
               ['noise_dim']),
    Documented(generator.GeneratorLossInfo, tuple, """
        generator, mi_estimator, inverse_mvp""",
               [], []),
    Documented(generator.InverseMVPAlgorithm, Algorithm, """
        input_dim, output_dim, hidden_size=100, num_hidden_layers=1, activation=torch.relu_, optimizer=None,
        name='InverseMVPAlgorithm'""",
               ['predict_step(inputs, state)'], []),
    Documented(hypernetwork_algorithm.HyperNetwork, Algorithm, """
        data_creator=None, data_creator_outlier=None, input_tensor_spec=None, output_dim=None,
        conv_layer_params=None, fc_layer_params=None, activation=torch.relu_, last_activation=identity,
        last_use_bias=True, last_use_ln=False, noise_dim=32, hidden_layers=(64, 64), use_conv_bias=False,
        use_conv_ln=False, use_fc_bias=True, use_fc_ln=False, generator_use_fc_bn=False, num_particles=10,
        entropy_regularization=1.0, critic_hidden_layers=(100, 100), critic_iter_num=2, critic_l2_weight=10.0,
        functional_gradient=False, init_lambda=1.0, lambda_trainable=False, block_inverse_mvp=False,
        direct_jac_inverse=False, inverse_mvp_solve_iters=1, inverse_mvp_hidden_size=100,
        inverse_mvp_hidden_layers=1, function_vi=False, function_bs=None, function_extra_bs_ratio=0.1,
        function_extra_bs_sampler='uniform', function_extra_bs_std=1.0, loss_type='classification', voting='soft',
        par_vi='svgd', num_train_classes=10, critic_optimizer=None, inverse_mvp_optimizer=None, optimizer=None,
        lambda_optimizer=None, logging_network=False, logging_training=False, logging_evaluate=False, config=None,
        name='HyperNetwork'""",
               ['eval_uncertainty(num_particles)', 'evaluate(num_particles)',
                'predict_step(inputs, params, num_particles, state)',
                'sample_parameters(noise, num_particles, training)',
                'set_data_loader(train_loader, test_loader, outlier_data_loaders, entropy_regularization)',
                'set_num_particles(num_particles)',
                'summarize_train(loss_info, params, cum_loss, avg_acc, inverse_mvp_loss)',
                'train_iter(num_particles, state)',
                'train_step(inputs, num_particles, entropy_regularization, state)'], ['num_particles']),
    Documented(ppg_algorithm.PPGAlgorithm, OffPolicyAlgorithm, """
        observation_spec, action_spec, reward_spec=TensorSpec(()), env=None, config=None,
        aux_options=PPGAuxOptions(enabled=True, interval=32, mini_batch_length=None, mini_batch_size=8,
        num_updates_per_train_iter=6), encoding_network_ctor=EncodingNetwork, policy_optimizer=None,
        aux_optimizer=None, epsilon_greedy=None, checkpoint=None, debug_summaries=False, name='PPGAlgorithm'""",
               ['after_train_iter(experience, info)', 'calc_loss(info)', 'predict_step(inputs, state)',
                'rollout_step(inputs, state)', 'train_step(inputs, state, plain_rollout_info)'], []),
]

# (class, method or '', documented argument): argument in alfx
DELIBERATE = {
    ('GeneratorLossInfo', '', 'generator'): 'generator=()',
    ('GeneratorLossInfo', '', 'mi_estimator'): 'mi_estimator=()',
    ('GeneratorLossInfo', '', 'inverse_mvp'): 'inverse_mvp=()',
    ('PPGAlgorithm', 'train_step', 'plain_rollout_info'): 'rollout_info',
    ('PPGAlgorithm', 'after_train_iter', 'experience'): 'root_inputs',
    ('PPGAlgorithm', 'after_train_iter', 'info'): 'rollout_info',
}
ADDED = {
    'FuncParVIAlgorithm': ['prior_stddev', 'noise_stddev'],
    'HyperNetwork': ['prior_stddev', 'noise_stddev'],
    'PPGAlgorithm': ['reward_weights', 'discrete_projection_net_ctor', 'continuous_projection_net_ctor', 'loss_class',
                     'aux_loss_class'],
}


def parameters_of(function):
    return [p for p in inspect.signature(function).parameters.values() if p.name != 'self']


def as_documented(text):
    return parameters_of(eval(f'lambda {" ".join(text.split())}: None', NAMES))


def shown(parameter, with_default=True):
    has_default = with_default and parameter.default is not inspect.Parameter.empty
    return f'{parameter.name}={parameter.default!r}' if has_default else parameter.name


def differences(where, documented, found, with_defaults):
    """Yield descriptions of differences between ordered arguments, without those in ``DELIBERATE``."""
    if len(found) < len(documented):
        yield f'{where}: {len(found)} arguments in place of {len(documented)}'
    for expected, parameter in zip(documented, found):
        expected_text = DELIBERATE.get((*where, expected.name), shown(expected, with_defaults))
        if shown(parameter, with_defaults) != expected_text:
            yield f'{where}: documented {expected_text}, found {shown(parameter, with_defaults)}'


@pytest.mark.parametrize('documented', CLASSES, ids=lambda documented: documented.found.__name__)
def test_arguments_defaults_and_bases_are_those_documented(documented):
    cls, name = documented.found, documented.found.__name__
    expected, found = as_documented(documented.arguments), parameters_of(cls)
    wrong = list(differences((name, ''), expected, found, with_defaults=True))
    assert not wrong
    assert [p.name for p in found[len(expected):]] == ADDED.get(name, [])
    assert issubclass(cls, documented.base)
    for method in documented.methods:
        method_name, arguments = re.fullmatch(r'(\w+)\((.*)\)', method).groups()
        found = parameters_of(getattr(cls, method_name))
        wrong += differences((name, method_name), as_documented(arguments), found, with_defaults=False)
        assert all(p.default is not p.empty for p in found[len(as_documented(arguments)):]), method
    assert not wrong
    for attribute in documented.properties:
        assert isinstance(inspect.getattr_static(cls, attribute), property), attribute


def test_intentional_differences_are_documented():
    text = COVERAGE.read_text()
    for name, method, argument in DELIBERATE:
        assert f'`{name}.{method}`' in text if method else f'`{name}`' in text
        assert f'`{argument}`' in text
    for name, arguments in ADDED.items():
        assert f'`{name}`' in text and all(f'`{argument}`' in text for argument in arguments)


def test_changed_defaults_missing_arguments_and_other_orders_are_found():
    documented = as_documented('a, b=1, c=None')
    for changed in ('a, b=2, c=None', 'a, b=1', 'b, a=1, c=None'):
        assert list(differences(('Any', ''), documented, as_documented(changed), True))
    assert not list(differences(('Any', ''), documented, as_documented('a, b=1, c=None, d=0'), True))
