"""Hypernetworks: a generator that outputs the parameters of networks.

Ensembles of any size can be sampled from it. It is the hypernetwork of HyperGAN (Ratzlaff, Li 2019, arXiv:1901.11058)
with one generator for the parameters of all layers, and without its mixer and discriminator: particle-based variational
inference keeps the networks different (:mod:`alfx.algorithms.generator`).

The last layer of the generator is initialized so that the generated parameters have the spread of initial parameters of
a network (compare Chang et al. 2020, "Principled weight initialization for hypernetworks", ICLR). Otherwise the initial
outputs of the networks would be orders of magnitude too large.
"""
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.functional_particle_vi_algorithm import (FunctionSpace, Prior, check_function_vi, log_network,
                                                              resolved_entropy_regularization)
from alfx.algorithms.generator import Generator
from alfx.algorithms.particles import particle_vi
from alfx.algorithms.particles.supervised import SupervisedEnsemble, SupervisedTask, Uncertainty
from alfx.data_structures import AlgStep, LossInfo
from alfx.gin_utils import ConfError, Count, NonNegative, Positive, check_value, configurable, problem_at
from alfx.layers.weights import Activation
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.param_networks import ParamNetwork, StackedParameters
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity


@configurable
class HyperNetwork(SupervisedEnsemble, Algorithm):
    """Distribution of networks; see the module docstring.

    Args:
        data_creator: see :class:`~alfx.algorithms.particles.supervised.SupervisedTask`, which also documents the
            other arguments that it shares with this class.
        data_creator_outlier: see ``SupervisedTask``.
        input_tensor_spec: spec of the inputs; ``None``: from the data.
        output_dim: number of outputs of a network; ``None``: ``num_train_classes``, or the number of targets.
        conv_layer_params: see :class:`~alfx.networks.param_networks.ParamNetwork`, also for the other arguments of
            layers.
        fc_layer_params: see ``ParamNetwork``.
        activation: see ``ParamNetwork``.
        last_activation: see ``ParamNetwork``.
        last_use_bias: see ``ParamNetwork``.
        last_use_ln: see ``ParamNetwork``.
        noise_dim: size of the noise.
        hidden_layers: sizes of the hidden layers of the generator; ``None``: none.
        use_conv_bias: see ``ParamNetwork``.
        use_conv_ln: see ``ParamNetwork``.
        use_fc_bias: see ``ParamNetwork``.
        use_fc_ln: see ``ParamNetwork``.
        generator_use_fc_bn: use batch norm in the generator.
        num_particles: number N of networks that are sampled for a batch.
        entropy_regularization: weight of the repulsion; ``None``: batch size divided by number of samples.
        critic_hidden_layers: see :class:`~alfx.algorithms.generator.Generator`, also for all arguments up to
            ``inverse_mvp_hidden_layers``.
        critic_iter_num: see ``Generator``.
        critic_l2_weight: see ``Generator``.
        functional_gradient: see ``Generator``.
        init_lambda: see ``Generator``.
        lambda_trainable: see ``Generator``.
        block_inverse_mvp: see ``Generator``.
        direct_jac_inverse: see ``Generator``.
        inverse_mvp_solve_iters: see ``Generator``.
        inverse_mvp_hidden_size: see ``Generator``.
        inverse_mvp_hidden_layers: see ``Generator``.
        function_vi: use the outputs of the networks as particles; with 'svgd', 'svgd2', 'svgd3' and 'gfsf'.
        function_bs: ``batch_size`` of
            :class:`~alfx.algorithms.functional_particle_vi_algorithm.FunctionSpace`.
        function_extra_bs_ratio: ``extra_ratio`` of ``FunctionSpace``.
        function_extra_bs_sampler: ``sampler`` of ``FunctionSpace``.
        function_extra_bs_std: ``stddev`` of ``FunctionSpace``.
        loss_type: 'classification' or 'regression'.
        voting: 'soft' chooses classes by the mean of the probabilities, 'hard' by majority vote.
        par_vi: 'svgd' (the same as 'svgd3'), 'svgd2', 'svgd3', 'gfsf' or 'minmax'.
        num_train_classes: number of classes in the training data.
        critic_optimizer: trains the critic of 'minmax'.
        inverse_mvp_optimizer: see ``Generator``.
        optimizer: trains the generator.
        lambda_optimizer: see ``Generator``.
        logging_network: log the networks.
        logging_training: log the loss and the accuracy of each epoch.
        logging_evaluate: log evaluations.
        config: the configuration of the run.
        name: name of this algorithm.
        prior_stddev: standard deviation of a normal prior over parameters; ``None``: flat. Not with ``function_vi``.
        noise_stddev: standard deviation of the noise of regression targets.

    Raises:
        ConfError: arguments contradict each other or the data.
    """

    _declared_capabilities = {'traceable_update': True}  # the parts of the generator restrict it

    def __init__(self, data_creator: Callable | None = None, data_creator_outlier: Callable | None = None,
                 input_tensor_spec: TensorSpec | None = None, output_dim: Count | None = None,
                 conv_layer_params: Sequence[tuple] | None = None,
                 fc_layer_params: Sequence[Count | tuple[Count, bool]] | None = None,
                 activation: Activation = torch.relu_, last_activation: Activation = identity,
                 last_use_bias: bool = True, last_use_ln: bool = False, noise_dim: Count = 32,
                 hidden_layers: Sequence[Count] | None = (64, 64), use_conv_bias: bool = False,
                 use_conv_ln: bool = False, use_fc_bias: bool = True, use_fc_ln: bool = False,
                 generator_use_fc_bn: bool = False, num_particles: Count = 10,
                 entropy_regularization: NonNegative | None = 1.0, critic_hidden_layers: Sequence[Count] = (100, 100),
                 critic_iter_num: Count = 2, critic_l2_weight: NonNegative = 10.0, functional_gradient: bool = False,
                 init_lambda: float = 1.0, lambda_trainable: bool = False, block_inverse_mvp: bool = False,
                 direct_jac_inverse: bool = False, inverse_mvp_solve_iters: Count = 1,
                 inverse_mvp_hidden_size: Count = 100, inverse_mvp_hidden_layers: Count = 1, function_vi: bool = False,
                 function_bs: Count | None = None, function_extra_bs_ratio: NonNegative = 0.1,
                 function_extra_bs_sampler: str = 'uniform', function_extra_bs_std: NonNegative = 1.0,
                 loss_type: str = 'classification', voting: str = 'soft', par_vi: str = 'svgd',
                 num_train_classes: Count = 10, critic_optimizer: Any = None, inverse_mvp_optimizer: Any = None,
                 optimizer: Any = None, lambda_optimizer: Any = None, logging_network: bool = False,
                 logging_training: bool = False, logging_evaluate: bool = False, config: Any = None,
                 name: str = 'HyperNetwork', prior_stddev: Positive | None = None, noise_stddev: Positive = 1.0):
        owner = type(self).__name__
        check_value(owner, 'par_vi', par_vi, str, choices=['svgd', 'svgd2', 'svgd3', 'gfsf', 'minmax'])
        if function_vi and functional_gradient:
            raise ConfError([problem_at(owner, 'functional_gradient', '= True and function_vi = True cannot be used '
                                        'together', 'remove one of the two')])
        check_function_vi(owner, function_vi, par_vi, ('svgd', 'svgd2', 'svgd3', 'gfsf'), prior_stddev)
        task = SupervisedTask(owner, data_creator, data_creator_outlier, input_tensor_spec, output_dim, loss_type,
                              voting, num_train_classes, noise_stddev)
        super().__init__(config=config, optimizer=optimizer, name=name)
        self._task = task
        self._logs = {'training': logging_training, 'evaluate': logging_evaluate}
        self._entropy_regularization = resolved_entropy_regularization(entropy_regularization, task)
        self._prior = Prior(prior_stddev)
        self._param_net = ParamNetwork(
            task.input_spec, conv_layer_params, fc_layer_params, use_conv_bias, use_conv_ln, use_fc_bias, use_fc_ln,
            activation=activation, last_layer_size=task.output_dim, last_activation=last_activation,
            last_use_bias=last_use_bias, last_use_ln=last_use_ln)
        self._function_space = FunctionSpace(owner, self._param_net, function_bs, function_extra_bs_ratio,
                                             function_extra_bs_sampler, function_extra_bs_std) if function_vi else None
        self.set_num_particles(num_particles)
        net = EncodingNetwork(TensorSpec((noise_dim, )), fc_layer_params=tuple(hidden_layers or ()),
                              use_fc_bn=generator_use_fc_bn, last_layer_size=self._param_net.param_length,
                              last_activation=identity, name='generator')
        spread_as_initial(net, self._param_net)
        self._generator = Generator(
            self._param_net.param_length, noise_dim, net=net, entropy_regularization=1.0,
            par_vi='svgd3' if par_vi == 'svgd' else par_vi, functional_gradient=functional_gradient,
            init_lambda=init_lambda, lambda_trainable=lambda_trainable, block_inverse_mvp=block_inverse_mvp,
            direct_jac_inverse=direct_jac_inverse, inverse_mvp_solve_iters=inverse_mvp_solve_iters,
            inverse_mvp_hidden_size=inverse_mvp_hidden_size, inverse_mvp_hidden_layers=inverse_mvp_hidden_layers,
            critic_hidden_layers=critic_hidden_layers, critic_l2_weight=critic_l2_weight,
            critic_iter_num=critic_iter_num, critic_optimizer=critic_optimizer,
            inverse_mvp_optimizer=inverse_mvp_optimizer, lambda_optimizer=lambda_optimizer)
        if logging_network:
            log_network(name, self._param_net)

    @property
    def graph_key(self) -> Hashable:
        """Key of the traced graph: the number of networks drawn, besides the key of the base class."""
        return super().graph_key, self._num_drawn

    @property
    def num_particles(self) -> int:
        """Number N of networks that are sampled for a batch."""
        return self._num_particles

    def set_num_particles(self, num_particles: int) -> None:
        """Set the number of networks to sample.

        Raises:
            ConfError: the number is not a positive int.
        """
        self._num_particles = check_value(type(self).__name__, 'num_particles', num_particles, int, minimum=1)
        self._num_drawn = self._num_particles  # in a training step; :meth:`train_iter` may change it for an epoch

    def sample_parameters(self, noise: Tensor | None = None, num_particles: int | None = None, training: bool = True
                          ) -> Tensor:
        """Sample parameters of networks.

        Args:
            noise: ``[N, noise_dim]``; ``None``: sampled.
            num_particles: N; ``None``: :attr:`num_particles`.
            training: the generator is being trained.

        Returns:
            ``[N, D]``.
        """
        return self._generator.predict_step(noise=noise, batch_size=num_particles or self._num_particles,
                                            training=training).output

    def predict_step(self, inputs: Tensor, params: Tensor | None = None,  # type: ignore[override]
                     num_particles: int | None = None, state: Any = None) -> AlgStep:
        """Compute the outputs of an ensemble.

        Args:
            inputs: ``[B, ...]``.
            params: ``[N, D]``, or ``[D]`` for one network; ``None``: sampled.
            num_particles: N, if they are sampled; ``None``: :attr:`num_particles`.
            state: not used.

        Returns:
            ``output`` ``[B, N, C]``, or ``[B, C]``.
        """
        if params is None:
            params = self.sample_parameters(num_particles=num_particles, training=False)
        return AlgStep(output=self._param_net.apply_parameters(params, inputs)[0], state=(), info=())

    def _answers(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.predict_step(inputs).output

    def _outputs_of_fixed_sample(self, num_particles: int | None) -> Callable[[Tensor], Tensor]:
        """Return a function that computes outputs with the same sampled networks for all batches."""
        with torch.no_grad():
            params = self.sample_parameters(num_particles=num_particles, training=False)
        return lambda inputs: self.predict_step(inputs, params).output

    def train_step(self, inputs: tuple[Tensor, Tensor], num_particles: int | None = None,  # type: ignore[override]
                   entropy_regularization: float | None = None, state: Any = None) -> AlgStep:
        """Compute one training step of the generator from one batch.

        Args:
            inputs: ``(inputs [B, ...], targets [B, ...])``.
            num_particles: N; ``None``: :attr:`num_particles`.
            entropy_regularization: replaces the constructor's value.
            state: not used.

        Returns:
            as :meth:`Generator.train_step`.
        """
        data, targets = self._own_rows(inputs)
        size = context.num_ranks()
        weight = self._entropy_regularization if entropy_regularization is None else entropy_regularization
        batch_size, space = num_particles or self._num_drawn, self._function_space
        if space is None:
            def loss_func(params: Tensor) -> Tensor:
                outputs, _ = self._param_net.apply_parameters(params, data)
                return size * (self._task.loss(outputs, targets) + self._prior(params, self._task, len(data)))

            return self._generator.train_step(None, loss_func, batch_size, entropy_regularization=weight)

        def answers_loss(rows: Tensor) -> Tensor:
            outputs = rows.unflatten(1, (len(data), self._task.output_dim)).transpose(0, 1)
            return self._task.loss(outputs, targets)

        def transform(params: Any) -> tuple[Tensor, Tensor, Tensor]:
            params, extra_inputs = params if isinstance(params, tuple) else (
                params, context.own_rows(space.extra_inputs(inputs[0])))
            return *space.answers(params, data, extra_inputs), extra_inputs

        step = self._generator.train_step(None, answers_loss, batch_size, transform, weight)
        return step._replace(info=step.info._replace(loss=size * step.info.loss))

    def train_iter(self, num_particles: int | None = None, state: Any = None) -> int:
        """Run one epoch: one update for each batch of the training data.

        Args:
            num_particles: N; ``None``: :attr:`num_particles`.
            state: not used.

        Returns:
            the number of batches.

        Raises:
            ConfError: there is no data.
        """
        self._num_drawn = num_particles or self._num_particles
        self._param_net.prepare(self._num_drawn)
        try:
            return self._train_epoch()
        finally:
            self._num_drawn = self._num_particles

    def after_update(self, root_inputs: Any, info: Any) -> None:
        """Call ``after_update`` of the generator."""
        self._generator.after_update(info)

    def evaluate(self, num_particles: int | None = None) -> dict[str, float]:
        """Compute metrics of the test data with a sampled ensemble: ``test_accuracy``, ``test_nll`` and others.

        Args:
            num_particles: N; ``None``: :attr:`num_particles`.
        """
        return self._evaluate_with(self._outputs_of_fixed_sample(num_particles))

    def eval_uncertainty(self, num_particles: int | None = None) -> Uncertainty:
        """Evaluate how well a sampled ensemble detects outliers and how well its outputs are calibrated.

        Args:
            num_particles: N; ``None``: :attr:`num_particles`.

        Raises:
            ConfError: there are no outliers, or no classes.
        """
        return self._uncertainty_with(self._outputs_of_fixed_sample(num_particles))

    def summarize_train(self, loss_info: LossInfo, params: Any,  # type: ignore[override]
                        cum_loss: float | None = None, avg_acc: float | None = None,
                        inverse_mvp_loss: float | None = None) -> None:
        """Write summaries after an epoch.

        Args:
            loss_info: losses of its last update.
            params: ``(name, parameter)`` of the updated parameters.
            cum_loss: sum over its batches of the negative log likelihood, averaged over the networks.
            avg_acc: mean over its batches of the accuracy, or of the root mean squared error.
            inverse_mvp_loss: loss of the network of inverse products.
        """
        self._summarize_epoch(loss_info, params, cum_loss, avg_acc)
        if inverse_mvp_loss is not None:
            summary.scalar('train_epoch/inverse_mvp_loss', inverse_mvp_loss)
        with torch.no_grad():
            drawn = self.sample_parameters()
        summary.scalar('particles/mean_distance', particle_vi.mean_pairwise_distance(drawn))


def spread_as_initial(generator: nn.Module, network: StackedParameters, num_samples: int = 8) -> None:
    """Scale the last layer of a generator so that its outputs have the spread of initial parameters of networks.

    Args:
        generator: module whose last parameters are the weight ``[D, H]`` and the bias ``[D]`` of its last layer.
        network: network whose initial parameters are sampled.
        num_samples: number of networks to sample.
    """
    weight, bias = list(generator.parameters())[-2:]
    with torch.no_grad():
        initial = network.initial_parameters(num_samples)
        sizes = [torch.Size(shape).numel() for shape in network.shapes]
        for rows, biases, part in zip(weight.split(sizes), bias.split(sizes), initial.split(sizes, 1)):
            # hidden layers keep the variance of the noise, which is 1
            rows.normal_(0, max(float(part.std()), 1e-3) / weight.shape[1]**0.5)
            biases[:] = part[0] if float(part.std()) < 1e-6 else 0.0
