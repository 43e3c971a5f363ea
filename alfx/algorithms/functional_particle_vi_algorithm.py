"""Ensembles of networks whose members repel each other: particle-based variational inference.

With ``function_vi`` the particles are the outputs of the networks for a batch and for inputs around it (Wang et al.
2019, "Function space particle optimization", arXiv:1902.09754), otherwise their parameters. In either case all networks
are computed at once (:mod:`alfx.networks.param_networks`), and memory grows with N times the number of parameters.
``par_vi=None`` is a deep ensemble (Lakshminarayanan et al. 2017, arXiv:1612.01474).

The loss of a network is the negative log likelihood of a *batch*, plus the prior's negative log density times batch
size divided by number of samples. With ``entropy_regularization`` equal to batch size divided by number of samples the
networks are samples of the posterior; ``None`` selects this value.
"""
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context, summary
from alfx.algorithms.particle_vi_algorithm import ParVIAlgorithm
from alfx.algorithms.particles import particle_vi
from alfx.algorithms.particles.supervised import SupervisedEnsemble, SupervisedTask, Uncertainty
from alfx.data_structures import AlgStep, LossInfo
from alfx.gin_utils import (ConfError, Count, NonNegative, Positive, check_value, configurable, log_unused,
                            non_default, problem_at)
from alfx.layers.weights import Activation
from alfx.networks.network import Network
from alfx.networks.param_networks import ParamNetwork, StackedParameters, given_network
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity

logger = logging.getLogger(__name__)


class FunctionSpace:
    """Represents networks by their outputs for a batch and for extra inputs around it.

    Args:
        owner: class named in error messages.
        network: computes ``n`` networks.
        batch_size: batch size that ``extra_ratio`` refers to; ``None``: the size of the batch.
        extra_ratio: number of extra inputs as a fraction of ``batch_size``.
        sampler: 'uniform': extra inputs are between the smallest and the largest value of each component in the batch;
            'normal': inputs of the batch with normal noise.
        stddev: standard deviation of that noise.

    Raises:
        ConfError: an argument is invalid.
    """

    def __init__(self, owner: str, network: StackedParameters, batch_size: int | None, extra_ratio: float, sampler: str,
                 stddev: float):
        check_value(owner, 'function_extra_bs_sampler', sampler, str, choices=['uniform', 'normal'])
        self._network = network
        self._batch_size, self._extra_ratio, self._sampler, self._stddev = batch_size, extra_ratio, sampler, stddev

    def extra_inputs(self, inputs: Tensor) -> Tensor:
        """Sample extra inputs ``[E, ...]`` for a batch ``[B, ...]``."""
        num = math.ceil((self._batch_size or len(inputs)) * self._extra_ratio)
        if self._sampler == 'normal':
            chosen = inputs[torch.randint(len(inputs), (num, ), device=inputs.device)]
            return chosen + self._stddev * torch.randn_like(chosen)
        low, high = inputs.amin(0), inputs.amax(0)
        return low + (high - low) * torch.rand(num, *inputs.shape[1:], dtype=inputs.dtype, device=inputs.device)

    def answers(self, params: Tensor, inputs: Tensor, extra_inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute outputs ``([N, B * C], [N, E * C])`` of networks with parameters ``[N, D]``."""
        outputs, _ = self._network.apply_parameters(params, torch.cat([inputs, extra_inputs]))
        rows = outputs.transpose(0, 1)
        return rows[:, :len(inputs)].flatten(1), rows[:, len(inputs):].flatten(1)


@configurable
class FuncParVIAlgorithm(SupervisedEnsemble, ParVIAlgorithm):
    """Ensemble of networks trained by particle-based variational inference; see the module docstring.

    Args:
        data_creator: see :class:`~alfx.algorithms.particles.supervised.SupervisedTask`, which also documents the
            other arguments that it shares with this class.
        data_creator_outlier: see ``SupervisedTask``.
        input_tensor_spec: spec of the inputs; ``None``: from the data.
        output_dim: number of outputs of a network; ``None``: ``num_train_classes``, or the number of targets.
        param_net: a ``ParamNetwork``, any other ``Network``, or a function that creates one from the spec of
            the inputs; its last layer has ``output_dim`` outputs. ``None``: created from the following arguments.
        conv_layer_params: see :class:`~alfx.networks.param_networks.ParamNetwork`, also for the next arguments.
        fc_layer_params: see ``ParamNetwork``.
        use_conv_bias: see ``ParamNetwork``.
        use_conv_ln: see ``ParamNetwork``.
        use_fc_bias: see ``ParamNetwork``.
        use_fc_ln: see ``ParamNetwork``.
        activation: see ``ParamNetwork``.
        last_activation: see ``ParamNetwork``.
        last_use_bias: see ``ParamNetwork``.
        last_use_ln: see ``ParamNetwork``.
        num_particles: number N of networks.
        entropy_regularization: weight of the repulsion; ``None``: batch size divided by number of samples.
        loss_type: 'classification' or 'regression'.
        voting: 'soft' chooses classes by the mean of the probabilities, 'hard' by majority vote.
        par_vi: 'svgd', 'gfsf', 'minmax' or ``None``.
        function_vi: use the outputs of the networks as particles; not with 'minmax'.
        function_bs: ``batch_size`` of :class:`FunctionSpace`.
        function_extra_bs_ratio: ``extra_ratio`` of :class:`FunctionSpace`.
        function_extra_bs_sampler: ``sampler`` of :class:`FunctionSpace`.
        function_extra_bs_std: ``stddev`` of :class:`FunctionSpace`.
        critic_hidden_layers: see :class:`~alfx.algorithms.particle_vi_algorithm.ParVIAlgorithm`, also for the other
            arguments of critics.
        critic_iter_num: see ``ParVIAlgorithm``.
        critic_l2_weight: see ``ParVIAlgorithm``.
        critic_use_bn: see ``ParVIAlgorithm``.
        num_train_classes: number of classes in the training data.
        optimizer: moves the particles.
        critic_optimizer: trains the critic of 'minmax'.
        logging_network: log the network.
        logging_training: log the loss and the accuracy of each epoch.
        logging_evaluate: log evaluations.
        config: the configuration of the run.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        prior_stddev: standard deviation of a normal prior over parameters; ``None``: flat. Not with ``function_vi``.
        noise_stddev: standard deviation of the noise of regression targets.

    Raises:
        ConfError: arguments contradict each other or the data.
    """

    _declared_capabilities = {'traceable_update': True}  # a critic restricts it

    def __init__(self, data_creator: Callable | None = None, data_creator_outlier: Callable | None = None,
                 input_tensor_spec: TensorSpec | None = None, output_dim: Count | None = None, param_net: Any = None,
                 conv_layer_params: Sequence[tuple] | None = None,
                 fc_layer_params: Sequence[Count | tuple[Count, bool]] | None = None, use_conv_bias: bool = False,
                 use_conv_ln: bool = False, use_fc_bias: bool = True, use_fc_ln: bool = False,
                 activation: Activation = torch.relu_, last_activation: Activation = identity,
                 last_use_bias: bool = True, last_use_ln: bool = False, num_particles: Count = 10,
                 entropy_regularization: NonNegative | None = 1.0, loss_type: str = 'classification',
                 voting: str = 'soft', par_vi: str | None = 'svgd', function_vi: bool = False,
                 function_bs: Count | None = None, function_extra_bs_ratio: NonNegative = 0.1,
                 function_extra_bs_sampler: str = 'uniform', function_extra_bs_std: NonNegative = 1.0,
                 critic_hidden_layers: Sequence[Count] = (100, 100), critic_iter_num: Count = 2,
                 critic_l2_weight: NonNegative = 10.0, critic_use_bn: bool = True, num_train_classes: Count = 10,
                 optimizer: Any = None, critic_optimizer: Any = None, logging_network: bool = False,
                 logging_training: bool = False, logging_evaluate: bool = False, config: Any = None,
                 debug_summaries: bool = False, name: str = 'FuncParVIAlgorithm', prior_stddev: Positive | None = None,
                 noise_stddev: Positive = 1.0):
        owner = type(self).__name__
        check_function_vi(owner, function_vi, par_vi, ('svgd', 'gfsf'), prior_stddev)
        task = SupervisedTask(owner, data_creator, data_creator_outlier, input_tensor_spec, output_dim, loss_type,
                              voting, num_train_classes, noise_stddev)
        if param_net is None:
            param_net = ParamNetwork(
                task.input_spec, conv_layer_params, fc_layer_params, use_conv_bias, use_conv_ln, use_fc_bias,
                use_fc_ln, activation=activation, last_layer_size=task.output_dim, last_activation=last_activation,
                last_use_bias=last_use_bias, last_use_ln=last_use_ln)
        else:
            log_unused(owner, non_default(FuncParVIAlgorithm.__init__, locals(), 'conv_layer_params', 'fc_layer_params',
                                      'use_conv_bias', 'use_conv_ln', 'use_fc_bias', 'use_fc_ln', 'activation',
                                      'last_activation', 'last_use_bias', 'last_use_ln'), 'param_net is given')
            param_net = param_net if isinstance(param_net, Network) else param_net(task.input_spec)
        network = given_network(param_net)
        if tuple(param_net.output_spec.shape) != (task.output_dim, ):
            raise ConfError([problem_at(owner, 'param_net', f'has the output {param_net.output_spec}, expected '
                                        f'{task.output_dim} numbers (output_dim)', 'change its last layer')])
        super().__init__(network.param_length, num_particles, 1.0, par_vi, critic_hidden_layers=critic_hidden_layers,
                         critic_l2_weight=critic_l2_weight, critic_iter_num=critic_iter_num,
                         critic_use_bn=critic_use_bn, critic_optimizer=critic_optimizer, optimizer=optimizer,
                         debug_summaries=debug_summaries, name=name)
        self._config, self._task = config, task
        self._logs = {'training': logging_training, 'evaluate': logging_evaluate}
        self._entropy_regularization = resolved_entropy_regularization(entropy_regularization, task)
        self._prior = Prior(prior_stddev)
        self._param_net = network
        self._function_space = FunctionSpace(owner, network, function_bs, function_extra_bs_ratio,
                                             function_extra_bs_sampler, function_extra_bs_std) if function_vi else None
        with torch.no_grad():
            self._particles.copy_(network.initial_parameters(num_particles))
        network.prepare(num_particles)
        if logging_network:
            log_network(name, network)

    @property
    def param_net(self) -> StackedParameters:
        """Network that computes all members; ``param_net.single_network(particles[i])`` is one of them."""
        return self._param_net

    def _answers(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self._param_net.apply_parameters(self._particles, inputs)[0]

    def predict_step(self, inputs: Tensor, params: Tensor | None = None,  # type: ignore[override]
                     state: Any = None) -> AlgStep:
        """Compute the outputs of the networks.

        Args:
            inputs: ``[B, ...]``.
            params: ``[N, D]``, or ``[D]`` for one network; ``None``: the particles.
            state: not used.

        Returns:
            ``output`` ``[B, N, C]``, or ``[B, C]``.
        """
        params = self._particles if params is None else params
        return AlgStep(output=self._param_net.apply_parameters(params, inputs)[0], state=(), info=())

    def train_step(self, inputs: tuple[Tensor, Tensor], entropy_regularization: float | None = None,  # type: ignore[override]
                   loss_mask: Tensor | None = None, state: Any = None) -> AlgStep:
        """Compute one step of the particles from one batch.

        Args:
            inputs: ``(inputs [B, ...], targets [B, ...])``.
            entropy_regularization: replaces the constructor's value.
            loss_mask: ``[B]``: 0 for samples that do not count.
            state: not used.

        Returns:
            as :meth:`ParVIAlgorithm.train_step`.
        """
        data, targets = self._own_rows(inputs)
        mask = None if loss_mask is None else context.own_rows(loss_mask)
        num, size = len(data), context.num_ranks()
        if self._function_space is None:
            def loss_func(params: Tensor) -> Tensor:
                outputs, _ = self._param_net.apply_parameters(params, data)
                return size * (self._task.loss(outputs, targets, mask) + self._prior(params, self._task, num))

            return super().train_step(loss_func, entropy_regularization=entropy_regularization)
        space = self._function_space
        extra_inputs = context.own_rows(space.extra_inputs(inputs[0]))

        def answers_loss(rows: Tensor) -> Tensor:
            outputs = rows.unflatten(1, (num, self._task.output_dim)).transpose(0, 1)
            return self._task.loss(outputs, targets, mask)

        step = super().train_step(answers_loss, lambda params: space.answers(params, data, extra_inputs),
                                  entropy_regularization)
        return step._replace(info=step.info._replace(loss=size * step.info.loss))

    def train_iter(self, state: Any = None) -> int:
        """Run one epoch: one update for each batch of the training data.

        Args:
            state: not used.

        Returns:
            the number of batches.

        Raises:
            ConfError: there is no data.
        """
        return self._train_epoch()

    def evaluate(self) -> dict[str, float]:
        """Compute metrics of the test data: ``test_accuracy``, ``test_nll`` and others."""
        return self._evaluate_with(self._answers)

    def eval_uncertainty(self) -> Uncertainty:
        """Evaluate how well outliers are detected and how well outputs for the test data are calibrated.

        Raises:
            ConfError: there are no outliers, or no classes.
        """
        return self._uncertainty_with(self._answers)

    def summarize_train(self, loss_info: LossInfo, params: Any,  # type: ignore[override]
                        cum_loss: float | None = None, avg_acc: float | None = None) -> None:
        """Write summaries after an epoch.

        Args:
            loss_info: losses of its last update.
            params: ``(name, parameter)`` of the updated parameters.
            cum_loss: sum over its batches of the negative log likelihood, averaged over the networks.
            avg_acc: mean over its batches of the accuracy, or of the root mean squared error.
        """
        self._summarize_epoch(loss_info, params, cum_loss, avg_acc)
        summary.scalar('particles/mean_distance', particle_vi.mean_pairwise_distance(self._particles.detach()))


class Prior:
    """Negative log density of a normal prior over parameters, scaled to the fraction that belongs to one batch.

    Args:
        stddev: standard deviation of the prior; ``None``: flat.
    """

    def __init__(self, stddev: float | None):
        self._stddev = stddev

    def __call__(self, params: Tensor, task: SupervisedTask, batch_size: int) -> Tensor:
        """Compute the loss ``[N]`` (0 if the prior is flat) for parameters ``[N, D]``."""
        if self._stddev is None:
            return params.new_zeros(())
        share = 1.0 if task.train_loader is None else batch_size / task.train_size
        return params.square().sum(-1) * (0.5 * share / self._stddev**2)


def check_function_vi(owner: str, function_vi: bool, par_vi: str | None, methods: Sequence[str],
                      prior_stddev: float | None) -> None:
    """Raise ``ConfError`` if ``function_vi`` contradicts other arguments."""
    if function_vi and par_vi not in methods:
        raise ConfError([problem_at(owner, 'function_vi', f'= True is not possible with par_vi={par_vi!r}',
                                    f'choose one of {list(methods)}')])
    if function_vi and prior_stddev is not None:
        raise ConfError([problem_at(owner, 'prior_stddev', 'is a prior of parameters, but with function_vi=True the '
                                    'particles are functions', 'remove one of the two')])


def resolved_entropy_regularization(given: float | None, task: SupervisedTask) -> float | None:
    """Return batch size divided by number of samples for ``None``, if there is data; otherwise the given value."""
    return task.batch_share if given is None and task.train_loader is not None else given


def log_network(name: str, network: StackedParameters) -> None:
    """Log the number of parameters and the structure of a network."""
    logger.info('%s: networks of %d parameters: %s', name, network.param_length,
                network.single_network(network.initial_parameters(1)[0]))
